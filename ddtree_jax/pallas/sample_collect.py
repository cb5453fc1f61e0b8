"""What the pieces of a row of target logits say about the draw: their best tokens, sums and counts, then what may be drawn.

::

    y, below the row's best over the temperature        0   -0.33  -0.66  -0.98          -21
    bucket                                              |   0   |   1   |   2   |  ...  63  |  nobody counts
    tokens, in all pieces of the row                        1       0       3             41
    top_k 4                                              kept    kept     last                 the first that reach k
    top_p                                                ... until buckets behind have no more than 1 - top_p of the mass

A token can be drawn only where all of this holds:

* y >= -21: noise lies between -4.48 and 15.95, so that what is further down loses to the best token whatever is drawn;
* with top-k its bucket is not behind the first that reaches k tokens together with those before it;
* with top-p alone its bucket is not behind one that leaves to those behind no more than 1 - top_p of the mass, even if all
  of their tokens had the most that their bucket allows; a little less than that, for all that rounding may do;
* y >= log(min_p), with min_p and without top-k: top-k with top-p needs the mass of all that top-k keeps.

The row's best and its sum and counts come from all of its pieces, hence three launches, a block a piece; those after the
first find the logits in L2. Sums are of integers, in units of 2**-31 of the best token's weight, so that they do not depend
on how a row is divided into pieces and shards.
"""

import operator
from dataclasses import dataclass
from typing import Any

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.sample_noise import gumbel, key_at
from ddtree_jax.pallas.simt import FLOAT, INT, UINT, WIDE
from ddtree_jax.pallas.tree_expand_top import (
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
NUM_BUCKETS = 64
_BUCKETS_PER_UNIT = NUM_BUCKETS / NOISE_RANGE
_SLACK = 2e-5
"""Of a row's mass, far more than what rounding of weights and sums may add up to; rounded masses come on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collection:
    """Static shape: ``num_nodes`` rows a sequence, ``row_pieces`` and ``vocab`` of all devices, ``capacity`` a list."""

    piece: Piece
    num_nodes: int
    row_pieces: int
    vocab: int
    capacity: int


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
    out_count: Any,
    sums: Any,
    counts: Any,
) -> None:
    """A piece's sum of exp((logit - row's best) / temperature), each rounded to units of 2**-31, and tokens a bucket.

    Global memory: logits [R, V], temperature [B], best_logit [R, S] of all S pieces of a row, out_sum [R, C], out_count
    [R, C, buckets]; shared: sums [warps], counts [buckets].
    """
    piece, thread = shape.piece, t.thread()
    with t.when(thread < NUM_BUCKETS):
        t.store(counts, thread, 0)
    logit, column = load_columns(t, piece, row, index, logits)
    peak = peak_of(t, row, shape.row_pieces, best_logit)
    heat = heat_of(t, temperature, t.divide(row, shape.num_nodes))
    t.barrier()
    total = t.value(WIDE, 0)
    for x, c in zip(logit, column, strict=True):
        y, is_there = (x - peak) / heat, c < piece.num_columns
        bucket = bucket_of(t, y)
        with t.when(is_there & (bucket < NUM_BUCKETS)):
            t.atomic_add(counts, bucket, t.value(INT, 1))
        total = total + t.select(is_there, units_of(t, y), t.value(WIDE, 0))
    total = simt.block_reduce(t, total, operator.add, sums, piece.num_threads // 32)
    at = row * piece.num_pieces + index
    with t.when(t.is_equal(thread, 0)):
        t.store(out_sum, at, total)
    with t.when(thread < NUM_BUCKETS):
        t.store(out_count, at * NUM_BUCKETS + thread, t.load(counts, thread))


def bucket_of(t: Any, y: Any) -> Any:
    """Number of a bucket, not below ``NUM_BUCKETS`` of those that cannot be drawn; never rises with y."""
    return t.cast(t.round(t.minimum(y * -_BUCKETS_PER_UNIT, 2.0 * NUM_BUCKETS) - 0.5), INT)


def heat_of(t: Any, temperature: Any, sequence: Any) -> Any:
    """The temperature, 1 where it is 0: draws are not used then."""
    heat = t.load(temperature, sequence)
    return t.select(heat > 0.0, heat, 1.0)


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


def prefix_sums(t: Any, value: Any, is_backward: bool = False) -> Any:
    """Sum of a warp's values up to each lane and with it, or from the last lane on."""
    lane = t.thread() & 31
    for distance in (1, 2, 4, 8, 16):
        other = lane + distance if is_backward else lane - distance
        is_lane = (other >= 0) & (other < 32)
        value = value + t.select(is_lane, t.shuffle(value, other & 31), 0)
    return value


def collect(
    t: Any,
    shape: Collection,
    row: Any,
    index: Any,
    first_id: Any,
    logits: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    best_logit: Any,
    piece_sum: Any,
    piece_count: Any,
    out_count: Any,
    list_logit: Any,
    list_token: Any,
    count: Any,
    counts: Any,
) -> None:
    """Lists a piece's tokens that may be drawn; ``out_count`` may exceed the capacity.

    Global memory: logits [R, V], temperature, top_k, top_p and min_p [B], best_logit and piece_sum [R, S] of all S pieces of
    a row, piece_count [R, S, buckets], out_count [R, C], lists [R, C, capacity]. Shared: count [1], counts [threads].
    """
    piece, zero = shape.piece, t.value(INT, 0)
    at, sequence = row * piece.num_pieces + index, t.divide(row, shape.num_nodes)
    with t.when(t.is_equal(t.thread(), 0)):
        t.store(count, zero, 0)
    logit, column = load_columns(t, piece, row, index, logits)
    heat, k, p = heat_of(t, temperature, sequence), t.load(top_k, sequence), t.load(top_p, sequence)
    peak, total = peak_of(t, row, shape.row_pieces, best_logit), total_of(t, row, shape.row_pieces, piece_sum)
    least = t.select(k > 0, t.value(FLOAT, -float("inf")), t.log(t.load(min_p, sequence)))
    _count_row(t, shape, row, piece_count, counts)
    t.barrier()
    last = t.minimum(_last_bucket(t, shape, counts, total, k, p), NUM_BUCKETS - 1)
    for x, c in zip(logit, column, strict=True):
        y = (x - peak) / heat
        may_be_drawn = (c < piece.num_columns) & (bucket_of(t, y) <= last) & (y >= least)
        place = simt.append(t, may_be_drawn, count)
        with t.when(may_be_drawn & (place < shape.capacity)):
            t.store(list_logit, at * shape.capacity + place, x)
            t.store(list_token, at * shape.capacity + place, c + first_id)
    t.barrier()
    with t.when(t.is_equal(t.thread(), 0)):
        t.store(out_count, at, t.load(count, zero))


def _count_row(t: Any, shape: Collection, row: Any, piece_count: Any, counts: Any) -> None:
    """Tokens a bucket of a share of the row's pieces, to counts [shares, buckets]."""
    num_shares, thread = shape.piece.num_threads // NUM_BUCKETS, t.thread()
    bucket, mine = thread & (NUM_BUCKETS - 1), t.value(INT, 0)
    for turn in range(-(-shape.row_pieces // num_shares)):
        other = t.divide(thread, NUM_BUCKETS) + turn * num_shares
        inside = row * shape.row_pieces + t.minimum(other, shape.row_pieces - 1)
        mine = mine + t.select(other < shape.row_pieces, t.load(piece_count, inside * NUM_BUCKETS + bucket), 0)
    t.store(counts, thread, mine)


def _last_bucket(t: Any, shape: Collection, counts: Any, total: Any, k: Any, p: Any) -> Any:
    """Behind it nothing can be drawn; every warp for itself, two neighbouring buckets a lane."""
    lane, pair = t.thread() & 31, [t.value(INT, 0)] * 2
    for share in range(shape.piece.num_threads // NUM_BUCKETS):
        part = t.load_vector(counts, lane * 2 + share * NUM_BUCKETS, 2)
        pair = [mine + other for mine, other in zip(pair, part, strict=True)]
    upto = prefix_sums(t, pair[0] + pair[1])
    uncounted = t.value(INT, shape.vocab) - t.shuffle(upto, t.value(INT, 31))

    def most(num: Any, bucket: Any) -> Any:
        """Mass of tokens of a bucket, if all had the most that it allows."""
        start = t.to_float(t.cast(bucket, UINT)) * (-LOG2_E / _BUCKETS_PER_UNIT)
        return t.to_float(t.cast(num, UINT)) * t.exp2(start)

    mass = [most(num, lane * 2 + i) for i, num in enumerate(pair)]
    behind = prefix_sums(t, mass[0] + mass[1], is_backward=True) - mass[0] - mass[1]
    behind = behind + most(uncounted, t.value(INT, NUM_BUCKETS))
    slack = _SLACK + shape.vocab / UNIT
    limit = total * (t.value(FLOAT, 1.0 - slack) - p)
    does_reach_k = (upto - pair[1] < k, upto < k)
    is_heavy = (behind + mass[1] > limit, behind > limit)
    before_k, before_p = (
        t.popcount(t.ballot(first)) + t.popcount(t.ballot(second)) for first, second in (does_reach_k, is_heavy)
    )
    return t.select(k > 0, before_k, before_p)


def perturb(
    t: Any,
    shape: Collection,
    row: Any,
    index: Any,
    first_id: Any,
    logits: Any,
    depth: Any,
    temperature: Any,
    min_p: Any,
    noise_key: Any,
    length: Any,
    best_logit: Any,
    out_logit: Any,
    out_token: Any,
    keys: Any,
) -> None:
    """A piece's best token with noise, where top-k and top-p remove none, so that nothing of other pieces matters.

    Without a temperature it is the best one without noise.

    Global memory: logits [R, V], depth [R], temperature and min_p [B], noise_key [B, 2], length [B], best_logit [R, S], outs
    [R, C]. Shared: keys [warps].
    """
    piece, sequence = shape.piece, t.divide(row, shape.num_nodes)
    logit, column = load_columns(t, piece, row, index, logits)
    heat, least = heat_of(t, temperature, sequence), t.log(t.load(min_p, sequence))
    has_noise = t.load(temperature, sequence) > 0.0
    peak = peak_of(t, row, shape.row_pieces, best_logit)
    words = key_at(t, noise_key, sequence, t.load(length, sequence) + t.load(depth, row) + 1)
    largest = t.value(WIDE, 0)
    for x, c in zip(logit, column, strict=True):
        y = (x - peak) / heat
        key = key_of(t, t.select(has_noise, y + gumbel(t, words, c + first_id), x), c)
        largest = t.select((c < piece.num_columns) & (y >= least), t.maximum(largest, key), largest)
    largest = simt.block_reduce(t, largest, t.maximum, keys, piece.num_threads // 32)
    with t.when(t.is_equal(t.thread(), 0)):
        at = row * piece.num_pieces + index
        t.store(out_logit, at, t.select(largest > 0, logit_of(t, largest), -float("inf")))
        t.store(out_token, at, t.select(largest > 0, column_of(t, largest) + first_id, 2**31 - 1))
