"""What the pieces of a row of target logits say about the draw: their best tokens and sums, then all that may be drawn.

A token y below the row's best (in logits over the temperature) can be drawn only where all of this holds:

* y >= -21: noise lies between -4.48 and 15.95, so that what is further down loses to the best token whatever is drawn;
* y >= log(sum of exp y) - log(V / (1 - top_p)), with top_p: all tokens of less than (1 - top_p) / V of the mass have no more
  than 1 - top_p together, so that those above them have reached top_p;
* y >= log(min_p), with min_p and without top-k.

The row's best and sum come from all of its pieces, hence three launches, a block a piece; those after the first find the
logits in L2. Sums are of integers, in units of 2**-31 of the best token's weight, so that they do not depend on how a row is
divided into pieces and shards.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.sample_noise import gumbel
from ddtree_jax.pallas.simt import INT, WIDE
from ddtree_jax.pallas.tree_expand_top import (
    LN_2,
    LOG2_E,
    LOWEST,
    Piece,
    best_of_thread,
    column_of,
    key_of,
    load_columns,
    logit_of,
)

UNIT = float(2**31)
NOISE_RANGE = 21.0
SLACK = 0.01
"""By which the bound is lowered, far more than its rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collection:
    """Static shape: rows of ``num_nodes`` a sequence and ``row_pieces`` on all devices, ``capacity`` tokens a piece."""

    piece: Piece
    num_nodes: int
    row_pieces: int
    capacity: int
    num_depths: int = 0


def pick_best(
    t: Any, piece: Piece, row: Any, index: Any, first_id: Any, logits: Any, out_logit: Any, out_token: Any, keys: Any
) -> None:
    """A piece's best token alone. Global memory: logits [R, V], outs [R, C]; shared: keys [warps]."""
    best = best_of_thread(t, piece, *load_columns(t, piece, row, index, logits))
    best = simt.block_reduce(t, best, t.maximum, keys, piece.num_threads // 32)
    with t.when(t.is_equal(t.thread(), 0)):
        at = row * piece.num_pieces + index
        t.store(out_logit, at, logit_of(t, best))
        t.store(out_token, at, column_of(t, best) + first_id)


def add_up_piece(
    t: Any,
    shape: Collection,
    row: Any,
    index: Any,
    logits: Any,
    temperature: Any,
    best_logit: Any,
    out_sum: Any,
    sums: Any,
) -> None:
    """A piece's sum of exp((logit - row's best) / temperature), each rounded to units of 2**-31.

    Global memory: logits [R, V], temperature [B], best_logit [R, S] of all S pieces of a row, out_sum [R, C]; shared: sums
    [warps].
    """
    piece = shape.piece
    logit, column = load_columns(t, piece, row, index, logits)
    peak, heat = peak_of(t, row, shape.row_pieces, best_logit), t.load(temperature, t.divide(row, shape.num_nodes))
    parts = [
        t.select(c < piece.num_columns, units_of(t, (x - peak) / heat), t.value(WIDE, 0))
        for x, c in zip(logit, column, strict=True)
    ]
    total = simt.block_reduce(t, functools.reduce(operator.add, parts), operator.add, sums, piece.num_threads // 32)
    with t.when(t.is_equal(t.thread(), 0)):
        t.store(out_sum, row * piece.num_pieces + index, total)


def units_of(t: Any, y: Any) -> Any:
    """exp(y) of a y that is not positive, in units of 2**-31."""
    return t.cast(t.round(t.exp2(y * LOG2_E) * UNIT), WIDE)


def peak_of(t: Any, row: Any, num_pieces: int, best_logit: Any) -> Any:
    """A row's largest logit from its pieces'; every warp for itself."""
    at = row * num_pieces + t.minimum(t.thread() & 31, num_pieces - 1)
    return t.maximum(simt.warp_reduce(t, t.load(best_logit, at), t.maximum), LOWEST)


def total_of(t: Any, row: Any, num_pieces: int, piece_sum: Any) -> Any:
    """A row's sum from its pieces'; every warp for itself."""
    lane = t.thread() & 31
    part = t.load(piece_sum, row * num_pieces + t.minimum(lane, num_pieces - 1))
    part = t.select(lane < num_pieces, part, 0)
    return t.to_float(simt.warp_reduce(t, part, operator.add)) * (1 / UNIT)


def collect(
    t: Any,
    shape: Collection,
    row: Any,
    index: Any,
    first_id: Any,
    logits: Any,
    temperature: Any,
    cutoff: Any,
    floor: Any,
    best_logit: Any,
    piece_sum: Any,
    out_count: Any,
    list_logit: Any,
    list_token: Any,
    count: Any,
) -> None:
    """Lists a piece's tokens that may be drawn; ``out_count`` may exceed the capacity.

    Global memory: logits [R, V], temperature, cutoff and floor [B], best_logit and piece_sum [R, S] of all S pieces of a
    row, out_count [R, C], lists [R, C, capacity]. Shared: count [1].
    """
    piece, zero = shape.piece, t.value(INT, 0)
    at, sequence = row * piece.num_pieces + index, t.divide(row, shape.num_nodes)
    with t.when(t.is_equal(t.thread(), 0)):
        t.store(count, zero, 0)
    logit, column = load_columns(t, piece, row, index, logits)
    heat = t.load(temperature, sequence)
    peak, total = peak_of(t, row, shape.row_pieces, best_logit), total_of(t, row, shape.row_pieces, piece_sum)
    bound = t.maximum(t.log2(total) * LN_2 - t.load(cutoff, sequence), t.load(floor, sequence)) - SLACK
    t.barrier()
    for x, c in zip(logit, column, strict=True):
        may_be_drawn = (c < piece.num_columns) & ((x - peak) / heat >= bound)
        place = simt.append(t, may_be_drawn, count)
        with t.when(may_be_drawn & (place < shape.capacity)):
            t.store(list_logit, at * shape.capacity + place, x)
            t.store(list_token, at * shape.capacity + place, c + first_id)
    t.barrier()
    with t.when(t.is_equal(t.thread(), 0)):
        t.store(out_count, at, t.load(count, zero))


def perturb(
    t: Any,
    shape: Collection,
    row: Any,
    index: Any,
    first_id: Any,
    logits: Any,
    depth: Any,
    temperature: Any,
    log_min_p: Any,
    noise_key: Any,
    best_logit: Any,
    out_logit: Any,
    out_token: Any,
    keys: Any,
) -> None:
    """A piece's best token with noise, where top-k and top-p remove none, so that nothing of other pieces matters.

    Global memory: logits [R, V], depth [R], temperature and log_min_p [B], noise_key [B, depths, 2], best_logit [R, S], outs
    [R, C]. Shared: keys [warps].
    """
    piece, sequence = shape.piece, t.divide(row, shape.num_nodes)
    logit, column = load_columns(t, piece, row, index, logits)
    heat, least = t.load(temperature, sequence), t.load(log_min_p, sequence)
    peak = peak_of(t, row, shape.row_pieces, best_logit)
    key_at = (sequence * shape.num_depths + t.load(depth, row)) * 2
    words = t.load(noise_key, key_at), t.load(noise_key, key_at + 1)
    largest = t.value(WIDE, 0)
    for x, c in zip(logit, column, strict=True):
        y = (x - peak) / heat
        key = key_of(t, y + gumbel(t, words, c + first_id), c)
        largest = t.select((c < piece.num_columns) & (y >= least), t.maximum(largest, key), largest)
    largest = simt.block_reduce(t, largest, t.maximum, keys, piece.num_threads // 32)
    with t.when(t.is_equal(t.thread(), 0)):
        at = row * piece.num_pieces + index
        t.store(out_logit, at, t.select(largest > 0, logit_of(t, largest), -float("inf")))
        t.store(out_token, at, t.select(largest > 0, column_of(t, largest) + first_id, 2**31 - 1))
