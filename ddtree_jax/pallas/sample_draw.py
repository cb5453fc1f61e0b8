"""The draw at a node from its pieces' best tokens, or from all tokens that may be drawn: a block a node.

::

    gather    pieces' lists ──► shared memory, side by side: logit below the row's best over the temperature, id
    filters   top-k, top-p: the lowest order of float32 bits at which count or mass above is small enough, by bisection;
              mass in units of 2**-31, so that sums do not depend on their order
    noise     threefry of (key of the position, id), as `jax.random.gumbel` makes it: for the tokens kept alone
    draw      largest logit + noise, equal ones by lower id
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.sample_collect import UNIT, heat_of, peak_of, prefix_sums, total_of, units_of
from ddtree_jax.pallas.sample_noise import gumbel, key_at
from ddtree_jax.pallas.simt import INT, UINT, WIDE
from ddtree_jax.pallas.tree_expand_top import LOG2_E, column_of, key_of, ordered

_LANES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Static shape: C pieces a row with lists of ``capacity``; ``num_kept``, so many a thread, fit into shared memory."""

    num_nodes: int
    num_pieces: int
    capacity: int
    num_kept: int
    vocab: int
    num_threads: int


def merge_best(t: Any, num_rows: int, num_pieces: int, block: Any, logit: Any, token: Any, out: Any) -> None:
    """A warp a row: the best of the pieces' best tokens. Global memory: [R, C], out [R]."""
    lane = t.thread() & (_LANES - 1)
    row = block * 4 + (t.thread() >> 5)
    best = _best_of_pieces(t, t.minimum(row, num_rows - 1), lane, num_pieces, logit, token)
    with t.when(t.is_equal(lane, 0) & (row < num_rows)):
        t.store(out, row, column_of(t, best))


def _best_of_pieces(t: Any, row: Any, lane: Any, num_pieces: int, logit: Any, token: Any) -> Any:
    at = row * num_pieces + t.minimum(lane, num_pieces - 1)
    return simt.warp_reduce(t, key_of(t, t.load(logit, at), t.load(token, at)), t.maximum)


def draw(
    t: Any,
    shape: Draw,
    row: Any,
    depth: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    noise_key: Any,
    length: Any,
    best_logit: Any,
    best_token: Any,
    piece_sum: Any,
    piece_count: Any,
    list_logit: Any,
    list_token: Any,
    out: Any,
    kept_logit: Any,
    kept_token: Any,
    kept_mass: Any,
    keys: Any,
    sums: Any,
) -> None:
    """Writes the drawn token, the best one without a temperature, or -1 where the lists do not hold what the draw needs.

    Global memory: depth and out [R]; temperature, top_k, top_p, min_p and length [B]; noise_key [B, 2]; pieces' [R, C] and
    lists [R, C, capacity]. Shared: kept [num_kept], of which each thread uses places of its own behind `_gather`, keys
    [warps], sums [2, warps].
    """
    lane, num_warps = t.thread() & (_LANES - 1), shape.num_threads // _LANES
    sequence = t.divide(row, shape.num_nodes)
    best = _best_of_pieces(t, row, lane, shape.num_pieces, best_logit, best_token)
    heat, k, p = heat_of(t, temperature, sequence), t.load(top_k, sequence), t.load(top_p, sequence)
    peak, total = peak_of(t, row, shape.num_pieces, best_logit), total_of(t, row, shape.num_pieces, piece_sum)
    words = key_at(t, noise_key, sequence, t.load(length, sequence) + t.load(depth, row) + 1)
    found = _gather(t, shape, row, heat, peak, piece_count, list_logit, list_token, kept_logit, kept_token)
    t.barrier()
    num = t.minimum(found, shape.num_kept)

    def each(function: Callable, carry: Any) -> Any:
        """Carries through the thread's kept tokens: ``function(place, order, logit, is_there, carry)``."""

        def step(i: Any, carry: Any) -> list:
            place = t.thread() + i * shape.num_threads
            y = t.load(kept_logit, place)
            return [function(place, ordered(t, y), y, place < num, carry)]

        return t.loop(t.divide(num + (shape.num_threads - 1), shape.num_threads), step, [carry])[0]

    def add_up(turn: Any, weigh: Callable) -> Any:
        """Sum of ``weigh(place, order)`` over all kept tokens, uint32."""

        def add(place: Any, order: Any, _: Any, is_there: Any, carry: Any) -> Any:
            return carry + t.select(is_there, weigh(place, order), 0)

        return _block_sum(t, each(add, t.value(UINT, 0)), turn, sums, num_warps)

    nothing = t.value(UINT, 0)

    def above_k(turn: Any, order: Any) -> Any:
        return add_up(turn, lambda _, other: t.cast(other > order, UINT)) < t.cast(k, UINT)

    (k_order,) = t.branch(k > 0, lambda: [_first_order(t, above_k)], [nothing])
    # Behind top-k the mass is that of the tokens that it keeps; of those that no list holds too, unless there are enough.
    misses_mass = (k > 0) & (p < 1.0) & (num < k) & (num < shape.vocab)

    def mass_kept() -> list:
        def add(_: Any, order: Any, y: Any, is_there: Any, carry: Any) -> Any:
            return carry + t.select(is_there & (order >= k_order), units_of(t, y), 0)

        mass = simt.block_reduce(t, each(add, t.value(WIDE, 0)), operator.add, keys, num_warps)
        return [t.to_float(mass) * (1 / UNIT)]

    (total,) = t.branch(k > 0, mass_kept, [total])

    def first_of_p() -> list:
        def weigh(place: Any, _: Any, y: Any, is_there: Any, carry: Any) -> Any:
            with t.when(is_there):
                t.store(kept_mass, place, t.round(t.exp2(y * LOG2_E) / total * UNIT))
            return carry

        each(weigh, nothing)
        enough = t.round(p * UNIT)

        def above_p(turn: Any, order: Any) -> Any:
            return add_up(turn, lambda place, other: t.select(other > order, t.load(kept_mass, place), 0)) < enough

        return [_first_order(t, above_p)]

    (p_order,) = t.branch(p < 1.0, first_of_p, [nothing])
    lowest, least = t.maximum(k_order, p_order), t.log(t.load(min_p, sequence))

    def largest(place: Any, order: Any, y: Any, is_there: Any, carry: Any) -> Any:
        is_kept, token = is_there & (order >= lowest) & (y >= least), t.load(kept_token, place)
        key = key_of(t, y + gumbel(t, words, token), token)
        return t.select(is_kept, t.maximum(carry, key), carry)

    drawn = simt.block_reduce(t, each(largest, t.value(WIDE, 0)), t.maximum, keys, num_warps)
    with t.when(t.is_equal(t.thread(), 0)):
        is_complete, is_greedy = ~misses_mass & (found <= shape.num_kept), t.load(temperature, sequence) <= 0.0
        token = t.select((drawn > 0) & ~is_greedy, column_of(t, drawn), column_of(t, best))
        t.store(out, row, t.select(is_complete | is_greedy, token, -1))


def _gather(
    t: Any,
    shape: Draw,
    row: Any,
    heat: Any,
    peak: Any,
    piece_count: Any,
    list_logit: Any,
    list_token: Any,
    kept_logit: Any,
    kept_token: Any,
) -> Any:
    """Lists to shared memory, a warp a list at a time. Returns their length, more than fits if one of them was too short."""
    warp, lane, num_warps = t.thread() >> 5, t.thread() & (_LANES - 1), shape.num_threads // _LANES
    mine = t.load(piece_count, row * shape.num_pieces + t.minimum(lane, shape.num_pieces - 1))
    mine = t.select(lane < shape.num_pieces, mine, 0)
    num_short = t.popcount(t.ballot(mine > shape.capacity))
    mine = t.minimum(mine, shape.capacity)
    end = prefix_sums(t, mine)
    for turn in range(-(-shape.num_pieces // num_warps)):
        piece = warp + turn * num_warps
        num, to = (t.shuffle(value, piece) for value in (mine, end - mine))
        start = (row * shape.num_pieces + t.minimum(piece, shape.num_pieces - 1)) * shape.capacity

        def fetch(i: Any, num: Any = num, to: Any = to, start: Any = start) -> None:
            place = lane + i * _LANES
            with t.when((place < num) & (to + place < shape.num_kept)):
                t.store(kept_logit, to + place, (t.load(list_logit, start + place) - peak) / heat)
                t.store(kept_token, to + place, t.load(list_token, start + place))

        t.loop((num + (_LANES - 1)) >> 5, fetch)
    return t.select(num_short > 0, t.value(INT, shape.num_kept + 1), t.shuffle(end, t.value(INT, _LANES - 1)))


def _block_sum(t: Any, value: Any, turn: Any, scratch: Any, num_warps: int) -> Any:
    """Of uint32 values of all threads. Turns use the halves of ``scratch`` [2, warps] one after the other: a barrier each."""
    lane, half = t.thread() & (_LANES - 1), (turn & 1) * num_warps
    value = t.warp_sum(value)
    with t.when(t.is_equal(lane, 0)):
        t.store(scratch, half + (t.thread() >> 5), value)
    t.barrier()
    part = t.load(scratch, half + t.minimum(lane, num_warps - 1))
    return t.warp_sum(t.select(lane < num_warps, part, 0))


def _first_order(t: Any, holds: Callable) -> Any:
    """Smallest uint32 at which a predicate holds that goes on holding above it: ``holds(turn, order)``."""

    def halve(turn: Any, low: Any, high: Any) -> list:
        middle = (low & high) + ((low ^ high) >> 1)
        is_above = holds(turn, middle)
        return [t.select(is_above, low, middle + 1), t.select(is_above, middle, high)]

    return t.loop(32, halve, [t.value(UINT, 0), t.value(UINT, 2**32 - 1)])[1]
