"""Grouped-query attention of a block of rows to a committed prefix, all of it or a window, and to the block itself.

Row t of the block stands at position ``length + t``, a slot at the position of its own number. ::

              cache slots              block rows
            0  1  2  3  4  5  6        0  1  2
    row 0   .  .  x  x  x  .  .        x                 length 5, window 4, causal
    row 1   .  .  .  x  x  .  .        x  x
    row 2   .  .  .  .  x  .  .        x  x  x

    row 0   x  x  x  x  x  .  .        x  x  x           length 5, no window, not causal; other rows see the same
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.add_norm import rms_norm
from ddtree_jax.pallas.block_attention_kernel import block_attention_gpu

_LEAST_WINDOWS = 4
"""In plain JAX caches of fewer are read as they are: a window may be copied before it is read."""


def block_attention(
    query_BTJQR: Float[Array, "B T J Q R"],
    key_BTJR: Float[Array, "B T J R"],
    value_BTJR: Float[Array, "B T J R"],
    query_gain_R: Float[Array, "R"],
    key_gain_R: Float[Array, "R"],
    cos_BTr: Float[Array, "B T r"],
    sin_BTr: Float[Array, "B T r"],
    keys_BSJR: Float[Array, "B S J R"],
    values_BSJR: Float[Array, "B S J R"],
    length_B: Int32[Array, "B"],
    *,
    eps: float,
    window: int | None,
    is_causal: bool,
) -> Float[Array, "B T J Q R"]:
    """What the heads attend to.

    Query, key and value are projections of the block's rows; ``keys_BSJR`` are normed and turned. A row sees positions that
    are less than ``window`` away, and rows behind its own only without ``is_causal``. Scores and softmax are float32. Slots
    that no row sees may hold anything to the kernel; plain JAX multiplies their values by zero.

    This is the one place that chooses: the kernel where the program is compiled for a GPU and it takes the input, else
    `block_attention_reference`.
    """
    rows, cache = (query_BTJQR, key_BTJR, value_BTJR), (keys_BSJR, values_BSJR)
    kernel, reference = (
        functools.partial(function, eps=eps, window=window, is_causal=is_causal)
        for function in (block_attention_gpu, block_attention_reference)
    )
    return simt.choose(kernel, reference, *rows, query_gain_R, key_gain_R, cos_BTr, sin_BTr, *cache, length_B)


def block_attention_reference(
    query_BTJQR: Float[Array, "B T J Q R"],
    key_BTJR: Float[Array, "B T J R"],
    value_BTJR: Float[Array, "B T J R"],
    query_gain_R: Float[Array, "R"],
    key_gain_R: Float[Array, "R"],
    cos_BTr: Float[Array, "B T r"],
    sin_BTr: Float[Array, "B T r"],
    keys_BSJR: Float[Array, "B S J R"],
    values_BSJR: Float[Array, "B S J R"],
    length_B: Int32[Array, "B"],
    *,
    eps: float,
    window: int | None,
    is_causal: bool,
) -> Float[Array, "B T J Q R"]:
    """`block_attention` in plain JAX: the path of a CPU, of float32, and of what the kernel refuses."""
    turn_BTr = cos_BTr, sin_BTr
    cos_sin = (x_BTr[:, :, None] for x_BTr in turn_BTr)
    key_BTJR = turn_halves(rms_norm(key_BTJR, key_gain_R, eps), *cos_sin)
    cos_sin = (x_BTr[:, :, None, None] for x_BTr in turn_BTr)
    query_BTJQR = turn_halves(rms_norm(query_BTJQR, query_gain_R, eps), *cos_sin)
    keys_BSJR, values_BSJR, first_B = _within_window(keys_BSJR, values_BSJR, length_B, window)
    num_tokens, num_slots = query_BTJQR.shape[1], keys_BSJR.shape[1]
    positions_BT = length_B[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    context_BTS, block_BTt = visible(positions_BT, length_B, first_B, num_slots, window=window, is_causal=is_causal)

    scale = query_BTJQR.shape[-1] ** -0.5
    score_BJQTS = jnp.einsum("BTJQR,BSJR->BJQTS", query_BTJQR, keys_BSJR, preferred_element_type=jnp.float32)
    score_BJQTt = jnp.einsum("BTJQR,BtJR->BJQTt", query_BTJQR, key_BTJR, preferred_element_type=jnp.float32)
    score_BJQTS = jnp.where(context_BTS[:, None, None], score_BJQTS * scale, -jnp.inf)
    score_BJQTt = jnp.where(block_BTt[:, None, None], score_BJQTt * scale, -jnp.inf)
    # One softmax over both, without putting them together: context scores are as long as the cache.
    top_BJQT1 = jnp.maximum(*(jnp.max(part, axis=-1, keepdims=True) for part in (score_BJQTS, score_BJQTt)))
    weight_BJQTS, weight_BJQTt = jnp.exp(score_BJQTS - top_BJQT1), jnp.exp(score_BJQTt - top_BJQT1)
    total_BJQT1 = sum(jnp.sum(part, axis=-1, keepdims=True) for part in (weight_BJQTS, weight_BJQTt))
    dtype = query_BTJQR.dtype
    weight_BJQTS, weight_BJQTt = ((part / total_BJQT1).astype(dtype) for part in (weight_BJQTS, weight_BJQTt))
    attended_BTJQR = jnp.einsum("BJQTS,BSJR->BTJQR", weight_BJQTS, values_BSJR)
    return attended_BTJQR + jnp.einsum("BJQTt,BtJR->BTJQR", weight_BJQTt, value_BTJR)


def turn_halves(
    x: Float[Array, "... R"], cos: Float[Array, "... r"], sin: Float[Array, "... r"]
) -> Float[Array, "... R"]:
    """Turns pairs (i, i + R / 2) by the angles whose cosines and sines are given, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _within_window(
    keys_BSJR: Array, values_BSJR: Array, length_B: Array, window: int | None
) -> tuple[Float[Array, "B W J R"], Float[Array, "B W J R"], Int32[Array, "B"]]:
    """As many slots as the window has, among them all that rows from ``length_B`` on see, and the first one's number.

    All slots without a window, or of a cache that is little longer.
    """
    num_slots = keys_BSJR.shape[1]
    if window is None or num_slots < _LEAST_WINDOWS * window:
        return keys_BSJR, values_BSJR, jnp.zeros_like(length_B)
    first_B = jnp.clip(length_B - window, 0, num_slots - window)
    take = jax.vmap(functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=window))
    return take(keys_BSJR, first_B), take(values_BSJR, first_B), first_B


def visible(
    positions_BT: Int32[Array, "B T"],
    length_B: Int32[Array, "B"],
    first_B: Int32[Array, "B"],
    num_slots: int,
    *,
    window: int | None,
    is_causal: bool,
) -> tuple[Bool[Array, "B T S"], Bool[Array, "B T T"]]:
    """Which of ``num_slots`` context slots from ``first_B`` on, and which block rows, each block row sees."""
    batch, num_rows = positions_BT.shape
    slot_BS = first_B[:, None] + jnp.arange(num_slots, dtype=jnp.int32)[None]
    slot_BTS = jnp.broadcast_to(slot_BS[:, None], (batch, num_rows, num_slots))
    context_BTS = slot_BTS < length_B[:, None, None]
    distance_BTt = positions_BT[:, :, None] - positions_BT[:, None, :]
    block_BTt = distance_BTt >= 0 if is_causal else jnp.ones(distance_BTt.shape, bool)
    if window is not None:
        context_BTS &= positions_BT[..., None] - slot_BTS < window
        block_BTt &= jnp.abs(distance_BTt) < window
    return context_BTS, block_BTt
