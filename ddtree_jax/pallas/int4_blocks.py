"""The layout in which the kernels read INT4 weights: blocks of 64 rows by 64 columns, 2,304 contiguous bytes each.

A block is 18 whole lines of 128 bytes: 512 words of weights and 64 words of scales. What one thread needs of it for the
tensor cores' 16 x 8 x 16 product (the register operand A, 16 rows a warp) lies together, in the order of its registers,
so that a warp loads 512 contiguous bytes and nothing is shuffled::

    word 128 w + 4 l + 2 q + h   of warp w, lane l = 4 r + t, group q of 32 columns, half h:
      row 16 w + 8 h + r, columns 32 q + 8 t ... + 7 of the block
      bits    0-3 4-7 8-11 12-15 | 16-19 20-23 24-27 28-31
      column   0   2    4    6   |   1     3     5     7      as unsigned nibbles, value + 8

    word 512 + 16 w + 2 r + q    scales of group q: bfloat16 of row 16 w + r below, of row 16 w + 8 + r above

A mask and a shift give the bits of two neighbouring columns in the two halves of a word.

Up to 8 blocks below each other form a group, an array [..., groups, block columns, blocks, words]: a tile of 512 rows is
contiguous, whatever number of its columns one copy takes.

Rows of a down projection stand in their natural order. In a gate and up projection the halves are the two projections:
row 16 w + r of a block is gate's, row 16 w + 8 + r up's, feature 8 w + r of the block's 32.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Int32

from ddtree_jax.quant import NIBBLES

BLOCK_ROWS = 64
BLOCK_COLUMNS = 64
WEIGHT_WORDS = 512
BLOCK_WORDS = 576
MAX_GROUP = 8
_WARPS, _LANE_ROWS, _LANE_COLUMNS, _GROUPS, _HALVES = 4, 8, 4, 2, 2
_NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_down(
    words: Int32[Array, "*batch D i"], scale: BFloat16[Array, "*batch D g"]
) -> Int32[Array, "*batch M K m w"]:
    """Blocks of a projection in natural row order; both of its sizes are padded to whole blocks with zeros."""
    rows = BLOCK_ROWS * -(-words.shape[-2] // BLOCK_ROWS)
    split = (rows // BLOCK_ROWS, _WARPS, _HALVES, _LANE_ROWS)
    words, scale = _pad(words, -2, rows), _pad(scale, -2, rows)
    return _pack(*(array.reshape(*array.shape[:-2], *split, array.shape[-1]) for array in (words, scale)))


def pack_gate_up(
    words: Int32[Array, "*batch 2 F I"], scale: BFloat16[Array, "*batch 2 F G"]
) -> Int32[Array, "*batch M K m w"]:
    """Blocks of gate and up together, 32 features of both a block."""
    features = BLOCK_ROWS // 2
    rows = features * -(-words.shape[-2] // features)
    split = (_HALVES, rows // features, _WARPS, _LANE_ROWS)

    def arrange(array: Array) -> Array:
        array = _pad(array, -2, rows)
        return jnp.moveaxis(array.reshape(*array.shape[:-3], *split, array.shape[-1]), -5, -3)

    return _pack(arrange(words), arrange(scale))


def _pad(array: Array, axis: int, size: int) -> Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, widths)


def _pack(words: Array, scale: Array) -> Array:
    """From [..., blocks, warps, halves, lane rows, columns] to blocks."""
    columns = BLOCK_COLUMNS * -(-words.shape[-1] * NIBBLES // BLOCK_COLUMNS)
    blocks = columns // BLOCK_COLUMNS
    words = _reorder(_pad(words, -1, columns // NIBBLES))
    words = words.reshape(*words.shape[:-1], blocks, _GROUPS, _LANE_COLUMNS)
    # [..., M, warp, half, r, K, q, t] -> [..., M, K, warp, r, t, q, half]
    words = jnp.moveaxis(words, (-3, -6, -4, -1, -2, -5), (-6, -5, -4, -3, -2, -1))
    scale = _pad(scale, -1, columns // 32)
    scale = scale.reshape(*scale.shape[:-1], blocks, _GROUPS)
    # [..., M, warp, half, r, K, q] -> [..., M, K, warp, r, q, half]
    scale = jnp.moveaxis(scale, (-2, -5, -3, -1, -4), (-5, -4, -3, -2, -1))
    scale = jax.lax.bitcast_convert_type(scale, jnp.int32)
    shape = words.shape[:-5]
    packed = jnp.concatenate([words.reshape(*shape, -1), scale.reshape(*shape, -1)], axis=-1)
    group = math.gcd(shape[-2], MAX_GROUP)
    return jnp.swapaxes(packed.reshape(*shape[:-2], shape[-2] // group, group, blocks, BLOCK_WORDS), -3, -2)


def _reorder(words: Array) -> Array:
    """Nibble i of the result is nibble ``_NIBBLE_ORDER[i]`` of the word."""
    nibbles = [((words >> 4 * source) & 15) << 4 * i for i, source in enumerate(_NIBBLE_ORDER)]
    result = nibbles[0]
    for nibble in nibbles[1:]:
        result = result | nibble
    return result


def unpack_blocks(blocks: Int32[Array, "*batch M K m w"]) -> tuple[Array, Array]:
    """Integers [*batch, rows, columns] and scales [*batch, rows, groups] in the blocks' own row order."""
    batch = blocks.shape[:-4]
    num_columns = blocks.shape[-3]
    blocks = jnp.swapaxes(blocks, -3, -2).reshape(*batch, -1, num_columns, BLOCK_WORDS)
    num_rows = blocks.shape[-3]
    words = blocks[..., :WEIGHT_WORDS].reshape(
        *batch, num_rows, num_columns, _WARPS, _LANE_ROWS, _LANE_COLUMNS, _GROUPS, _HALVES
    )
    words = jnp.moveaxis(words, (-6, -5, -4, -3, -2, -1), (-3, -6, -4, -1, -2, -5))[..., None]
    shifts = jnp.asarray([4 * _NIBBLE_ORDER.index(column) for column in range(NIBBLES)], jnp.int32)
    spread = jnp.broadcast_to(words, (*words.shape[:-1], NIBBLES))
    integers = (jnp.right_shift(spread, jnp.broadcast_to(shifts, spread.shape)) & 15) - 8
    integers = integers.reshape(*batch, num_rows * BLOCK_ROWS, num_columns * BLOCK_COLUMNS)
    halves = jnp.asarray(blocks[..., WEIGHT_WORDS:]).view(jnp.bfloat16)
    scale = halves.reshape(*batch, num_rows, num_columns, _WARPS, _LANE_ROWS, _GROUPS, _HALVES)
    scale = jnp.moveaxis(scale, (-5, -4, -3, -2, -1), (-2, -5, -3, -1, -4))
    return integers, scale.reshape(*batch, num_rows * BLOCK_ROWS, num_columns * _GROUPS)


def split_halves(rows: Array) -> Array:
    """From [*batch, 2 F, columns] in the row order of gate and up to [*batch, 2, F, columns]."""
    *batch, num_rows, columns = rows.shape
    split = rows.reshape(*batch, num_rows // 16, _HALVES, _LANE_ROWS, columns)
    return jnp.moveaxis(split, -3, -4).reshape(*batch, 2, num_rows // 2, columns)
