"""INT4 in groups of 32 along the input dimension, as compressed-tensors packs Kimi's routed experts.

::

    int32 word i of a row      bits 31..28   ...   7..4    3..0
    holds input columns             8i+7     ...   8i+1    8i       each as an unsigned nibble, value + 8

A weight is ``bfloat16(integer * scale)``: the product is exact in float32 and rounded once, to nearest even.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int32

from ddtree_jax.config import INT4_GROUP_SIZE

NIBBLES = 8
_ZERO = 8


def pack_int4(values: Int32[Array, "*rows columns"]) -> Int32[Array, "*rows words"]:
    """Packs integers -8..7, eight to a word; ``columns`` is a multiple of 8."""
    nibbles = (values + _ZERO).astype(jnp.uint32).reshape(*values.shape[:-1], -1, NIBBLES)
    shifts = 4 * jnp.arange(NIBBLES, dtype=jnp.uint32)
    words = jnp.sum(jnp.left_shift(nibbles, jnp.broadcast_to(shifts, nibbles.shape)), axis=-1, dtype=jnp.uint32)
    return jnp.asarray(words).view(jnp.int32)


def unpack_int4(words: Int32[Array, "*rows words"]) -> Int32[Array, "*rows columns"]:
    """Inverse of `pack_int4`."""
    shifts = 4 * jnp.arange(NIBBLES, dtype=jnp.int32)
    spread = jnp.broadcast_to(words[..., None], (*words.shape, NIBBLES))
    nibbles = jnp.right_shift(spread, jnp.broadcast_to(shifts, spread.shape)) & 0xF
    return (nibbles - _ZERO).reshape(*words.shape[:-1], -1)


def dequantize(
    words: Int32[Array, "*rows words"], scale: BFloat16[Array, "*rows groups"], dtype: Any = jnp.bfloat16
) -> Float[Array, "*rows columns"]:
    """Weights that packed integers and group scales stand for, bit-equal to compressed-tensors; ``dtype`` only holds them."""
    integers = unpack_int4(words).reshape(*scale.shape, INT4_GROUP_SIZE)
    return round_products(integers, scale, dtype).reshape(*scale.shape[:-1], -1)


def round_products(
    integers: Int32[Array, "*groups columns"], scale: BFloat16[Array, "*groups"], dtype: Any
) -> Float[Array, "*groups columns"]:
    """``bfloat16(integer * scale)``, held in ``dtype``."""
    product = integers.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]
    # The rounding to bfloat16, in float32: a CPU takes thrice as long to go there and back.
    return jax.lax.reduce_precision(product, exponent_bits=8, mantissa_bits=7).astype(dtype)


def quantize(
    weight: Float[Array, "*rows columns"],
) -> tuple[Int32[Array, "*rows words"], BFloat16[Array, "*rows groups"]]:
    """Symmetric rounding to -7..7 with the group's largest magnitude / 7 as scale (Kimi's training does the same)."""
    groups = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, INT4_GROUP_SIZE)
    scale = (jnp.max(jnp.abs(groups), axis=-1) / 7.0).astype(jnp.bfloat16)
    divisor = jnp.where(scale == 0, 1.0, scale.astype(jnp.float32))
    integers = jnp.clip(jnp.round(groups / divisor[..., None]), -7, 7).astype(jnp.int32)
    return pack_int4(integers.reshape(weight.shape)), scale
