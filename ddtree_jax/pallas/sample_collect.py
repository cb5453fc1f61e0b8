"""What a piece of a row of target logits has to say about the draw: its best token, or all tokens that may be drawn.

A token y below the best (in logits over the temperature) can be drawn only where both hold:

* y >= -21: noise lies between -4.48 and 15.95, so that what is further down loses to the best token whatever is drawn;
* y >= log(sum of exp y) - log(V / (1 - top_p)), with top_p: all tokens of less than (1 - top_p) / V of the mass have no more
  than 1 - top_p together, so that those above them have reached top_p.

A piece's best and sum are at most the row's, so that what a piece leaves out the row leaves out too. One launch, a block a
piece; bytes: the logits once.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.simt import INT
from ddtree_jax.pallas.tree_expand_top import (
    LN_2,
    LOG2_E,
    LOWEST,
    Piece,
    best_of_thread,
    column_of,
    load_columns,
    logit_of,
)

NOISE_RANGE = 21.0
SLACK = 0.01
"""By which the bound is lowered, far more than its rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collection:
    """Static shape: rows of ``num_nodes`` a sequence, ``capacity`` tokens a piece."""

    piece: Piece
    num_nodes: int
    capacity: int


def pick_best(
    t: Any, piece: Piece, row: Any, index: Any, first_id: Any, logits: Any, out_logit: Any, out_token: Any, keys: Any
) -> None:
    """A piece's best token alone. Global memory: logits [R, V], outs [R, C]; shared: keys [warps]."""
    best = best_of_thread(t, piece, *load_columns(t, piece, row, index, logits))
    best = simt.block_reduce(t, best, t.maximum, keys, piece.num_threads // 32)
    with t.when(t.is_equal(t.thread(), 0)):
        _store_best(t, row * piece.num_pieces + index, first_id, best, out_logit, out_token)


def _store_best(t: Any, at: Any, first_id: Any, best: Any, out_logit: Any, out_token: Any) -> None:
    t.store(out_logit, at, logit_of(t, best))
    t.store(out_token, at, column_of(t, best) + first_id)


def bound_of(t: Any, total: Any, cutoff: Any) -> Any:
    """The lowest logit that may be drawn, over the temperature and below the best; ``total`` is the sum of exp."""
    return t.maximum(t.log2(total) * LN_2 - cutoff, -NOISE_RANGE) - SLACK


def collect(
    t: Any,
    shape: Collection,
    row: Any,
    index: Any,
    first_id: Any,
    logits: Any,
    temperature: Any,
    cutoff: Any,
    out_logit: Any,
    out_token: Any,
    out_sum: Any,
    out_count: Any,
    list_logit: Any,
    list_token: Any,
    keys: Any,
    sums: Any,
    count: Any,
) -> None:
    """Global memory: logits [R, V], temperature and cutoff [B], outs [R, C], lists [R, C, capacity].

    ``out_sum`` is the sum of exp((logit - best) / temperature), ``out_count`` may exceed the capacity. Shared: keys and sums
    [warps], count [1].
    """
    piece, zero = shape.piece, t.value(INT, 0)
    num_warps, at = piece.num_threads // 32, row * piece.num_pieces + index
    sequence = t.divide(row, shape.num_nodes)
    with t.when(t.is_equal(t.thread(), 0)):
        t.store(count, zero, 0)
    logit, column = load_columns(t, piece, row, index, logits)
    best = simt.block_reduce(t, best_of_thread(t, piece, logit, column), t.maximum, keys, num_warps)
    maximum, heat = t.maximum(logit_of(t, best), LOWEST), t.load(temperature, sequence)
    below = [(x - maximum) / heat for x in logit]
    parts = [t.select(c < piece.num_columns, t.exp2(y * LOG2_E), 0.0) for y, c in zip(below, column, strict=True)]
    total = simt.block_reduce(t, functools.reduce(operator.add, parts), operator.add, sums, num_warps)
    bound = bound_of(t, total, t.load(cutoff, sequence))
    for x, y, c in zip(logit, below, column, strict=True):
        may_be_drawn = (c < piece.num_columns) & (y >= bound)
        place = simt.append(t, may_be_drawn, count)
        with t.when(may_be_drawn & (place < shape.capacity)):
            t.store(list_logit, at * shape.capacity + place, x)
            t.store(list_token, at * shape.capacity + place, c + first_id)
    t.barrier()
    with t.when(t.is_equal(t.thread(), 0)):
        _store_best(t, at, first_id, best, out_logit, out_token)
        t.store(out_sum, at, total)
        t.store(out_count, at, t.load(count, zero))
