"""What threads of `skinny_gemm` do with a tile's sums: add them up in order, write them as outputs.

``t`` is what a thread can do, on a GPU (`simt`) or on numpy in tests.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddtree_jax.pallas.simt import UINT
from ddtree_jax.pallas.skinny_gemm_shape import SIDE, TOKENS_A_GROUP, WARPGROUP, Shape

_VECTORS_A_TOKEN = SIDE // 4


def staged_place(t: Any, shape: Shape, turn: int, token: Any, row: Any) -> Any:
    """Of four sums where a block has those of all tokens."""
    del turn
    # The last turn may have more threads than places; what lies behind the tokens is not written.
    return t.minimum(token, shape.num_tokens - 1) * shape.sums_stride + row


def received_place(t: Any, shape: Shape, turn: int, token: Any, row: Any) -> Any:
    """Of four sums where a block has what a block of the cluster has sent to it, a group of tokens a turn."""
    del t
    return ((token & (TOKENS_A_GROUP - 1)) + turn * TOKENS_A_GROUP) * shape.sums_stride + row


def finish(
    t: Any,
    shape: Shape,
    tile: Any,
    rank: Any,
    load: Callable,
    let_go: Callable[[], None],
    *outs: Any,
    place: Callable = staged_place,
) -> None:
    """Adds up a block's share of a tile, in the order of the cluster's blocks, and writes its outputs.

    ``load(i, index)`` gives four sums of block i, which lie where ``place`` says; after ``let_go()`` none are loaded any
    more. The outputs [T, width] are given as words: a bfloat16 one has two values in each.
    """
    places, totals = _places(t, shape, rank), []
    for turn, (token, row) in enumerate(places):
        index = place(t, shape, turn, token, row)
        total, *others = [load(i, index) for i in range(shape.cluster)]
        for values in others:
            total = [x + value for x, value in zip(total, values, strict=True)]
        totals.append(total)
    let_go()
    for (token, row), total in zip(places, totals, strict=True):
        _write(t, shape, tile * SIDE + row, token, total, outs)


def _places(t: Any, shape: Shape, rank: Any) -> list[tuple[Any, Any]]:
    """Token and first of four rows, of every turn of a thread of a warpgroup of the cluster, one in each block."""
    places = []
    for turn in range(-(-shape.num_tokens * _VECTORS_A_TOKEN // (WARPGROUP * shape.cluster))):
        index = (t.thread() & (WARPGROUP - 1)) + (rank + turn * shape.cluster) * WARPGROUP
        token = t.divide(index, _VECTORS_A_TOKEN)
        places.append((token, (index - token * _VECTORS_A_TOKEN) * 4))
    return places


def _write(t: Any, shape: Shape, row: Any, token: Any, values: Sequence[Any], outs: Sequence[Any]) -> None:
    """Four rows' values of a token, to the output that they belong to."""
    begin = 0
    for output, out in zip(shape.outputs, outs, strict=True):
        is_gated = output.is_gated
        # Four rows of a gated output are two features: their gates, then their ups.
        column = (row - begin * SIDE) >> 1 if is_gated else row - begin * SIDE
        is_inside = (row >= begin * SIDE) & (column < output.width) & (token < shape.num_stored)
        kept = [_silu(t, values[i]) * values[i + 2] for i in range(2)] if is_gated else values
        with t.when(is_inside):
            at = token * output.width + column
            if np.dtype(output.dtype).itemsize == 2:
                words = [pack_sums(t, *kept[i : i + 2]) for i in range(0, len(kept), 2)]
                t.store_vector(out, at >> 1, words)
            else:
                t.store_vector(out, at, [t.bits(value, UINT) for value in kept])
        begin += output.num_blocks


def _silu(t: Any, x: Any) -> Any:
    return x / (t.exp2(x * -1.4426950408889634) + 1.0)


def pack_sums(t: Any, low: Any, high: Any) -> Any:
    """Two floats as bfloat16 in a word, rounded to the nearest, to even in the middle."""

    def narrow(x: Any) -> Any:
        bits = t.bits(x, UINT)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return t.select(t.is_equal(x, x), rounded, 0x7FC0)

    return narrow(low) | (narrow(high) << 16)
