"""Absorbed latent attention of tree nodes: to the committed prefix, and to the nodes that each node may see.

::

              cache slots              rows of this call
            0  1  2  3  4  5  6        n0 n1 n2 n3
    n0      x  x  x  x  .  .  .        x                 length 4; n1 and n2 are children of n0,
    n1      x  x  x  x  .  .  .        x  x              n3 is a child of n1
    n2      x  x  x  x  .  .  .        x     x
    n3      x  x  x  x  .  .  .        x  x     x
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


def tree_mla(
    query_BTHW: Float[Array, "B T H W"],
    cache_BSW: Float[Array, "B S W"],
    rows_BTW: Float[Array, "B T W"],
    length_B: Int32[Array, "B"],
    visible_BTt: Bool[Array, "B T T"],
    *,
    num_latent: int,
    scale: float,
) -> Float[Array, "B T H C"]:
    """Latents that the heads attend to.

    A row of cache and rows is the latent (``num_latent`` wide, also the value) and the rotated key. ``visible_BTt[b, i, j]``
    says whether row i sees row j of the same call. Scores and softmax are float32. What slots from ``length_B`` on
    hold never matters, nor does NaN in a row to those that do not see it.
    """
    num_slots = cache_BSW.shape[1]
    slot_BS = jnp.broadcast_to(jnp.arange(num_slots, dtype=jnp.int32), (length_B.shape[0], num_slots))
    committed_BS = slot_BS < length_B[:, None]
    # Zeroed, since a weight of zero times an undefined NaN would still be NaN.
    cache_BSW = jnp.where(committed_BS[..., None], cache_BSW, 0)

    score_BHTS = jnp.einsum("BTHW,BSW->BHTS", query_BTHW, cache_BSW, preferred_element_type=jnp.float32)
    score_BHTt = jnp.einsum("BTHW,BtW->BHTt", query_BTHW, rows_BTW, preferred_element_type=jnp.float32)
    score_BHTS = jnp.where(committed_BS[:, None, None], score_BHTS * scale, -jnp.inf)
    score_BHTt = jnp.where(visible_BTt[:, None], score_BHTt * scale, -jnp.inf)
    weight = jax.nn.softmax(jnp.concatenate([score_BHTS, score_BHTt], axis=-1), axis=-1).astype(query_BTHW.dtype)
    weight_BHTS, weight_BHTt = jnp.split(weight, [num_slots], axis=-1)
    # Zeroed likewise; who sees such a row has NaN among its scores already.
    rows_BTW = jnp.where(jnp.isfinite(rows_BTW), rows_BTW, 0)
    return jnp.einsum("BHTS,BSC->BTHC", weight_BHTS, cache_BSW[..., :num_latent]) + jnp.einsum(
        "BHTt,BtC->BTHC", weight_BHTt, rows_BTW[..., :num_latent]
    )
