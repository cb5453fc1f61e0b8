"""How the slots of a block's attention are split, and the sum of the splits, in one launch with a block a row::

warps    0     1     2     3        take splits in turn, all loads at once: four columns a lane
splits   0     1     2     3
         4     5     6     .        as many as the length needs; others are never read
threads  0 to 63                    then add up what the warps have, two columns each
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int32

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.simt import FLOAT, INT, UINT

LOWEST = -1e30
"""Stands for the maximum over no scores: finite, so that differences of maxima are never NaN."""

WIDTH, COPIES = 128, 32
_LANES, _COLUMNS, _NUM_WARPS = 32, 4, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """What is read of ``num_slots`` slots, in tiles of ``tile``, a power of two, and by how many blocks for a tile of rows.

    The block's own rows are one tile behind those of the slots. ::

        slots     0 1 2 3  4 5 6 7  8 9 a b  . . . .        length 10, window 5, tiles of 4: tiles 1 and 2, then the block's
        tiles              0        1          2
        splits             0        0          1            3 tiles among 2 splits
    """

    num_slots: int
    window: int | None
    tile: int
    num_splits: int

    @staticmethod
    def most(num_slots: int, window: int | None, tile: int) -> int:
        """Tiles that there can be."""
        seen = num_slots if window is None else min(num_slots, window - 1 + tile)
        return -(-seen // tile) + 1

    def lowest_slot(self, length: Any, maximum: Any) -> Any:
        """That any row sees."""
        return maximum(length - ((self.window or self.num_slots + 1) - 1), 0)

    def tiles(self, length: Any, maximum: Any) -> tuple[Any, Any]:
        """Number of the first tile of slots, and how many are read."""
        shift = self.tile.bit_length() - 1
        first = self.lowest_slot(length, maximum) >> shift
        return first, ((length + (self.tile - 1)) >> shift) - first


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """Static shape: parts of ``num_rows`` rows of each pair of a sequence and one of ``heads``."""

    splits: Splits
    heads: int
    num_rows: int
    num_warps: int


def sum_splits(
    t: Any,
    shape: Sum,
    row: Any,
    block: Any,
    part: Any,
    lse: Any,
    length: Any,
    out: Any,
    sums: Any,
    tops: Any,
    weights: Any,
) -> None:
    """Global memory: part [b, n, s, R], lse [b, n, s, c], length [B], out [b, n, R]; shared: sums [w, R], others [w]."""
    warp, lane, num_splits = t.thread() >> 5, t.thread() & 31, shape.splits.num_splits
    total = shape.splits.tiles(t.load(length, t.divide(block, shape.heads)), t.maximum)[1] + 1
    each = t.divide(total + (num_splits - 1), num_splits)
    at_row = block * shape.num_rows + row
    values, logs = [], []
    for turn in range(-(-num_splits // shape.num_warps)):
        split = warp + turn * shape.num_warps
        is_used = split * each < total
        # The first one is always there.
        at = at_row * num_splits + t.select(is_used, split, 0)
        values.append(t.load_vector(part, at * WIDTH + lane * _COLUMNS, _COLUMNS))
        logs.append(t.select(is_used, t.load(lse, at * COPIES), LOWEST))
    top = functools.reduce(t.maximum, logs)
    terms = [t.exp2(log - top) for log in logs]
    for column in range(_COLUMNS):
        products = [value[column] * term for value, term in zip(values, terms, strict=True)]
        t.store(sums, (warp * _COLUMNS + column) * _LANES + lane, functools.reduce(operator.add, products))
    with t.when(t.is_equal(lane, 0)):
        t.store(tops, warp, top)
        t.store(weights, warp, functools.reduce(operator.add, terms))
    t.barrier()
    with t.when(t.thread() < WIDTH // 2):
        _add_warps(t, shape, t.thread(), at_row, out, sums, tops, weights)


def _add_warps(t: Any, shape: Sum, word: Any, at_row: Any, out: Any, sums: Any, tops: Any, weights: Any) -> None:
    """Two neighbouring columns."""
    warps = [t.value(INT, warp) for warp in range(shape.num_warps)]
    logs = [t.load(tops, warp) for warp in warps]
    top = functools.reduce(t.maximum, logs)
    terms = [t.exp2(log - top) for log in logs]

    def add(columns: Callable[[Any], Any]) -> Any:
        return functools.reduce(operator.add, [columns(w) * term for w, term in zip(warps, terms, strict=True)])

    def column(number: Any) -> Any:
        place = (number & (_COLUMNS - 1)) * _LANES + (number >> 2)
        return add(lambda warp: t.load(sums, warp * WIDTH + place))

    weight = add(lambda warp: t.load(weights, warp))
    low, high = (column(word * 2 + i) / weight for i in (0, 1))
    t.store(out, at_row * (WIDTH // 2) + word, t.pair(low, high))


def sum_splits_gpu(
    part_bnsR: Float[Array, "b n s R"],
    lse_bnsc: Float[Array, "b n s c"],
    length_B: Int32[Array, "B"],
    splits: Splits,
) -> BFloat16[Array, "b n R"]:
    """The sum over splits of ``part``, each already divided by its own sum of weights, whose base-2 logarithm is ``lse``.

    ``lse`` holds each number c times, so that a row's numbers are lines that no other block writes.
    """
    blocks, num_rows = part_bnsR.shape[:2]
    shape = Sum(splits=splits, heads=blocks // length_B.shape[0], num_rows=num_rows, num_warps=_NUM_WARPS)

    def body(*refs: Any) -> None:
        kinds = (FLOAT, FLOAT, INT, UINT, FLOAT, FLOAT, FLOAT)
        numbers = [lax.axis_index("row"), lax.axis_index("block")]
        simt.run(functools.partial(_sum_splits, shape), list(zip(refs, kinds, strict=True)), numbers)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((blocks, num_rows, WIDTH), jnp.bfloat16),
        grid=(num_rows, blocks),
        grid_names=("row", "block"),
        scratch_types=[plgpu.SMEM((size,), jnp.float32) for size in (_NUM_WARPS * WIDTH, _NUM_WARPS, _NUM_WARPS)],
        **simt.options("block_attention_sum", _NUM_WARPS * _LANES),
    )(part_bnsR, lse_bnsc, length_B)


def _sum_splits(shape: Sum, t: Any, *args: Any) -> None:
    sum_splits(t, shape, *args)


def sum_splits_reference(
    part_bnsR: Float[Array, "b n s R"],
    lse_bnsc: Float[Array, "b n s c"],
    length_B: Int32[Array, "B"],
    splits: Splits,
) -> BFloat16[Array, "b n R"]:
    """`sum_splits_gpu` in plain JAX."""
    total_B = splits.tiles(length_B, jnp.maximum)[1] + 1
    each_B = lax.div(total_B + (splits.num_splits - 1), jnp.full_like(total_B, splits.num_splits))
    is_used_Bs = jnp.arange(splits.num_splits, dtype=jnp.int32)[None] * each_B[:, None] < total_B[:, None]
    is_used_bns = jnp.repeat(is_used_Bs, part_bnsR.shape[0] // length_B.shape[0], axis=0)[:, None]
    lse_bns = jnp.where(is_used_bns, lse_bnsc[..., 0], LOWEST)
    weight_bns = jnp.exp2(lse_bns - jnp.max(lse_bns, axis=-1, keepdims=True))
    weight_bns /= jnp.sum(weight_bns, axis=-1, keepdims=True)
    part_bnsR = jnp.where(is_used_bns[..., None], part_bnsR, 0)
    return jnp.sum(part_bnsR * weight_bns[..., None], axis=2).astype(jnp.bfloat16)
