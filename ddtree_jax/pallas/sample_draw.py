"""The draw at a node from its pieces' best tokens, or from all tokens that may be drawn: a block a node.

::

    gather    pieces' lists ──► shared memory, side by side: logit below the row's best over the temperature, id;
              if they are too long for it, they are read where they are, at each step of the search anew
    filters   top-k, top-p: the lowest order of float32 bits at which count or mass above is small enough, by bisection;
              mass in units of 2**-31, so that sums do not depend on their order
    noise     threefry of (key of the position, id), as `jax.random.gumbel` makes it: for the tokens kept alone
    draw      largest logit + noise, equal ones by lower id
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    lane, sequence = t.thread() & (_LANES - 1), t.divide(row, shape.num_nodes)
    best = _best_of_pieces(t, row, lane, shape.num_pieces, best_logit, best_token)
    heat, k, p = heat_of(t, temperature, sequence), t.load(top_k, sequence), t.load(top_p, sequence)
    peak, total = peak_of(t, row, shape.num_pieces, best_logit), total_of(t, row, shape.num_pieces, piece_sum)
    words = key_at(t, noise_key, sequence, t.load(length, sequence) + t.load(depth, row) + 1)
    filters = _Filters(k, p, t.log(t.load(min_p, sequence)), total)
    found, is_short = _gather(t, shape, row, heat, peak, piece_count, list_logit, list_token, kept_logit, kept_token)
    t.barrier()
    is_kept = found <= shape.num_kept
    kept = _Kept(t, shape, found, kept_logit, kept_token, kept_mass)
    listed = _Listed(t, shape, row, heat, peak, piece_count, list_logit, list_token)
    (drawn,) = t.branch(is_kept, lambda: [_largest(t, kept, filters, words, keys, sums)], [t.value(WIDE, 0)])
    (drawn,) = t.branch(~is_kept & ~is_short, lambda: [_largest(t, listed, filters, words, keys, sums)], [drawn])
    # Behind top-k the mass is that of the tokens that it keeps; of those that no list holds too, unless there are enough.
    misses_mass = (k > 0) & (p < 1.0) & (found < k) & (found < shape.vocab)
    with t.when(t.is_equal(t.thread(), 0)):
        is_greedy = t.load(temperature, sequence) <= 0.0
        token = t.select((drawn > 0) & ~is_greedy, column_of(t, drawn), column_of(t, best))
        t.store(out, row, t.select(is_greedy | ~(misses_mass | is_short), token, -1))


class _Filters(NamedTuple):
    """Of a row; ``total`` is the mass of all its tokens."""

    top_k: Any
    top_p: Any
    log_min_p: Any
    total: Any


class _Kept:
    """A row's tokens in shared memory; a thread's places are its own."""

    def __init__(self, t: Any, shape: Draw, num: Any, logit: Any, token: Any, mass: Any) -> None:
        self.t, self.shape, self.num = t, shape, num
        self.logit, self.token, self.mass = logit, token, mass

    def each(self, function: Callable, carry: Any) -> Any:
        """Carries through the thread's tokens: ``function(place, logit, is_there, carry)``."""
        t, num_threads = self.t, self.shape.num_threads

        def step(i: Any, carry: Any) -> list:
            place = t.thread() + i * num_threads
            return [function(place, t.load(self.logit, place), place < self.num, carry)]

        return t.loop(t.divide(self.num + (num_threads - 1), num_threads), step, [carry])[0]

    def weigh(self, total: Any) -> None:
        """Before the first `mass_at`."""

        def store(place: Any, y: Any, is_there: Any, carry: Any) -> Any:
            with self.t.when(is_there):
                self.t.store(self.mass, place, _mass_of(self.t, y, total))
            return carry

        self.each(store, self.t.value(INT, 0))

    def mass_at(self, place: Any, _y: Any, _total: Any) -> Any:
        return self.t.load(self.mass, place)


class _Listed:
    """A row's tokens where they are listed, which are more than fit into shared memory."""

    def __init__(self, t: Any, shape: Draw, row: Any, heat: Any, peak: Any, count: Any, logit: Any, token: Any) -> None:
        self.t, self.shape, self.row, self.heat, self.peak = t, shape, row, heat, peak
        self.count, self.logit, self.token = count, logit, token

    def each(self, function: Callable, carry: Any) -> Any:
        """As that of `_Kept`."""
        t, shape = self.t, self.shape

        def of_piece(piece: Any, carry: Any) -> list:
            at = self.row * shape.num_pieces + piece
            num = t.load(self.count, at)

            def step(i: Any, carry: Any) -> list:
                offset = t.thread() + i * shape.num_threads
                place = at * shape.capacity + t.minimum(offset, num - 1)
                return [function(place, (t.load(self.logit, place) - self.peak) / self.heat, offset < num, carry)]

            return t.loop(t.divide(num + (shape.num_threads - 1), shape.num_threads), step, [carry])

        return t.loop(shape.num_pieces, of_piece, [carry])[0]

    def weigh(self, total: Any) -> None:
        """There is no place to keep masses."""

    def mass_at(self, _place: Any, y: Any, total: Any) -> Any:
        return _mass_of(self.t, y, total)


def _mass_of(t: Any, y: Any, total: Any) -> Any:
    """Of a row's mass, in units of 2**-31."""
    return t.round(t.exp2(y * LOG2_E) / total * UNIT)


def _largest(t: Any, tokens: _Kept | _Listed, filters: _Filters, words: tuple, keys: Any, sums: Any) -> Any:
    """Key of the token that is drawn, 0 if there is none."""
    k, p, nothing, num_warps = filters.top_k, filters.top_p, t.value(UINT, 0), tokens.shape.num_threads // _LANES

    def add_up(turn: Any, weigh: Callable) -> Any:
        """Sum of ``weigh(place, logit)`` over all tokens, uint32."""

        def add(place: Any, y: Any, is_there: Any, carry: Any) -> Any:
            return carry + t.select(is_there, weigh(place, y), 0)

        return _block_sum(t, tokens.each(add, nothing), turn, sums, num_warps)

    def first_of_k() -> list:
        def holds(turn: Any, order: Any) -> Any:
            return add_up(turn, lambda _, y: t.cast(ordered(t, y) > order, UINT)) < t.cast(k, UINT)

        return [_first_order(t, holds)]

    (k_order,) = t.branch(k > 0, first_of_k, [nothing])

    def mass_of_k() -> list:
        def add(_: Any, y: Any, is_there: Any, carry: Any) -> Any:
            return carry + t.select(is_there & (ordered(t, y) >= k_order), units_of(t, y), 0)

        mass = simt.block_reduce(t, tokens.each(add, t.value(WIDE, 0)), operator.add, keys, num_warps)
        return [t.to_float(mass) * (1 / UNIT)]

    (total,) = t.branch(k > 0, mass_of_k, [filters.total])

    def first_of_p() -> list:
        def holds(turn: Any, order: Any) -> Any:
            def weigh(place: Any, y: Any) -> Any:
                return t.select(ordered(t, y) > order, tokens.mass_at(place, y, total), 0)

            return add_up(turn, weigh) < t.round(p * UNIT)

        tokens.weigh(total)
        return [_first_order(t, holds)]

    (p_order,) = t.branch(p < 1.0, first_of_p, [nothing])
    lowest = t.maximum(k_order, p_order)

    def largest(place: Any, y: Any, is_there: Any, carry: Any) -> Any:
        is_kept, token = is_there & (ordered(t, y) >= lowest) & (y >= filters.log_min_p), t.load(tokens.token, place)
        key = key_of(t, y + gumbel(t, words, token), token)
        return t.select(is_kept, t.maximum(carry, key), carry)

    return simt.block_reduce(t, tokens.each(largest, t.value(WIDE, 0)), t.maximum, keys, num_warps)


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
) -> tuple[Any, Any]:
    """Lists to shared memory, as far as they fit, a warp a list at a time; their length, and whether one was too short."""
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
    return t.shuffle(end, t.value(INT, _LANES - 1)), num_short > 0


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
