"""Absorbed latent attention of tree nodes: to the committed prefix, and to the nodes that each node may see.

::

              cache slots              rows of this call
            0  1  2  3  4  5  6        n0 n1 n2 n3
    n0      x  x  x  x  .  .  .        x                 length 4; n1 and n2 are children of n0,
    n1      x  x  x  x  .  .  .        x  x              n3 is a child of n1
    n2      x  x  x  x  .  .  .        x     x
    n3      x  x  x  x  .  .  .        x  x     x
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from ddtree_jax.pallas import tree_mla_hopper as hopper
from ddtree_jax.pallas import tree_mla_portable as portable
from ddtree_jax.pallas.tree_mla_split import LATENTS, ROTARY, Query

ROW_MULTIPLE = hopper.ROW_MULTIPLE
SLOT_MULTIPLE = 16
"""The kernels read the cache in pieces of so many slots; other lengths of the cache leave them unused."""


def tree_mla(
    query: Query,
    cache_BSW: Float[Array, "B S W"],
    rows_BTW: Float[Array, "B T W"],
    length_B: Int32[Array, "B"],
    visible_BTt: Bool[Array, "B T T"],
    tile_BtW: Float[Array, "B t W"] | None = None,
    *,
    scale: float,
) -> Float[Array, "B T H C"]:
    """Latents that the heads attend to.

    A row of cache and rows is the latent, also the value, and the key that is turned already; queries are turned here.
    ``visible_BTt[b, i, j]`` says whether row i sees row j of the same call. Scores and softmax are float32. What slots from
    ``length_B`` on hold never matters, nor does NaN in a row to those that do not see it. ``tile_BtW`` are the rows as
    `fill_tiles` makes them with `ROW_MULTIPLE`, if they are there.

    This is the one place that chooses: a kernel where the program is compiled for a GPU and the kernels take the input,
    else `tree_mla_reference`.
    """
    arrays = (query, cache_BSW, rows_BTW, length_B, visible_BTt, tile_BtW)
    kernel, reference = (functools.partial(function, scale=scale) for function in (tree_mla_gpu, tree_mla_reference))
    try:
        return jax.lax.platform_dependent(*arrays, cuda=kernel, default=reference)
    except NotImplementedError:
        return reference(*arrays)


def tree_mla_gpu(
    query: Query,
    cache_BSW: Float[Array, "B S W"],
    rows_BTW: Float[Array, "B T W"],
    length_B: Int32[Array, "B"],
    visible_BTt: Bool[Array, "B T T"],
    tile_BtW: Float[Array, "B t W"] | None = None,
    *,
    scale: float,
) -> Float[Array, "B T H C"]:
    """`tree_mla` by the kernel for the GPU at hand. Narrow models are filled up with zeros, which copies their cache.

    Raises:
      NotImplementedError: no kernel takes this input; the offending value is named.
    """
    num_latent, rotary = query.latent_BTHC.shape[-1], query.rotary_BTHR.shape[-1]
    wide = next((width for width in LATENTS if width >= num_latent), None)
    if wide is None or rotary > ROTARY:
        raise NotImplementedError(f"a latent of {num_latent} and {rotary}; at most {LATENTS[-1]} and {ROTARY} fit")
    if (num_latent, rotary) != (wide, ROTARY):
        query = Query(
            _fill(query.latent_BTHC, wide),
            _fill(query.rotary_BTHR, ROTARY),
            *(_fill(x, ROTARY // 2) for x in query[2:]),
        )
        widen = functools.partial(_widen, num_latent=num_latent, widths=(wide, ROTARY))
        cache_BSW, rows_BTW, tile_BtW = widen(cache_BSW), widen(rows_BTW), None
    out_BTHC = _kernel(tile_BtW)(query, cache_BSW, rows_BTW, length_B, visible_BTt, scale=scale)
    return out_BTHC[..., :num_latent]


def _fill(x: Array, width: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def _widen(x: Array, num_latent: int, widths: tuple[int, int]) -> Array:
    return jnp.concatenate([*map(_fill, jnp.split(x, [num_latent], axis=-1), widths)], axis=-1)


def _kernel(tile_BtW: Array | None) -> Any:
    """The Hopper form on compute capability 9, the portable one from 8 on. Without a GPU, Pallas compiles for 9 as well."""
    if jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
        raise NotImplementedError(
            f"{jax.device_count()} devices outside shard_map; the partitioner cannot divide a kernel"
        )
    device = jax.config.jax_default_device or jax.devices()[0]
    major = int(getattr(device, "compute_capability", "9.0").split(".")[0])
    num_sms = getattr(device, "core_count", hopper.Config().num_sms)
    if major == 9:
        return functools.partial(hopper.tree_mla_hopper, tile_BtW=tile_BtW, config=hopper.Config(num_sms=num_sms))
    if major < 8:
        raise NotImplementedError(f"compute capability {device.compute_capability}; at least 8.0 is needed")
    config = portable.Config(num_sms=num_sms, copy_engine=major >= 9)
    return functools.partial(portable.tree_mla_portable, config=config)


def tree_mla_reference(
    query: Query,
    cache_BSW: Float[Array, "B S W"],
    rows_BTW: Float[Array, "B T W"],
    length_B: Int32[Array, "B"],
    visible_BTt: Bool[Array, "B T T"],
    tile_BtW: Float[Array, "B t W"] | None = None,
    *,
    scale: float,
) -> Float[Array, "B T H C"]:
    """`tree_mla` in plain JAX: the path of a CPU, of float32, and of what the kernels refuse. ``tile_BtW`` is not read."""
    del tile_BtW
    query_BTHW, num_latent = query.join(), query.latent_BTHC.shape[-1]
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
