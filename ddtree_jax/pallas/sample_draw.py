"""The draw at a node from its pieces' best tokens, or from all tokens that may be drawn: a block a node.

::

    gather    pieces' lists ──► shared memory: logit below the row's best over the temperature, id
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
from ddtree_jax.pallas.sample_collect import UNIT, peak_of, total_of, units_of
from ddtree_jax.pallas.sample_noise import gumbel
from ddtree_jax.pallas.simt import INT, UINT, WIDE
from ddtree_jax.pallas.tree_expand_top import LOG2_E, column_of, key_of, ordered

_LANES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Static shape: C pieces a row with lists of ``capacity``; ``num_kept`` fit into shared memory."""

    num_nodes: int
    num_pieces: int
    capacity: int
    num_kept: int
    num_depths: int
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
    log_min_p: Any,
    noise_key: Any,
    best_logit: Any,
    best_token: Any,
    piece_sum: Any,
    piece_count: Any,
    list_logit: Any,
    list_token: Any,
    out: Any,
    kept_logit: Any,
    kept_token: Any,
    keys: Any,
    sums: Any,
    count: Any,
) -> None:
    """Writes the drawn token, or -1 where the lists do not hold what the draw needs.

    Global memory: depth and out [R]; temperature, top_k, top_p, log_min_p [B]; noise_key [B, depths, 2]; pieces'
    [R, C] and lists [R, C, capacity]. Shared: kept [num_kept], keys and sums [warps], count [1].
    """
    lane, zero, num_warps = t.thread() & (_LANES - 1), t.value(INT, 0), shape.num_threads // _LANES
    sequence = t.divide(row, shape.num_nodes)
    with t.when(t.is_equal(t.thread(), 0)):
        t.store(count, zero, 0)
    best = _best_of_pieces(t, row, lane, shape.num_pieces, best_logit, best_token)
    heat = t.load(temperature, sequence)
    peak, total = peak_of(t, row, shape.num_pieces, best_logit), total_of(t, row, shape.num_pieces, piece_sum)
    t.barrier()
    _gather(t, shape, row, heat, peak, piece_count, list_logit, list_token, kept_logit, kept_token, count)
    t.barrier()
    found = t.load(count, zero)
    num = t.minimum(found, shape.num_kept)

    def each(function: Callable, carry: Any) -> Any:
        """Carries through the thread's kept tokens: ``function(order, logit, id, is_there, carry)``."""

        def step(i: Any, carry: Any) -> list:
            place = t.thread() + i * shape.num_threads
            inside = t.minimum(place, shape.num_kept - 1)
            y = t.load(kept_logit, inside)
            return [function(ordered(t, y), y, t.load(kept_token, inside), place < num, carry)]

        return t.loop(t.divide(num + (shape.num_threads - 1), shape.num_threads), step, [carry])[0]

    def add_up(weigh: Callable) -> Any:
        """Sum of ``weigh(order, logit)`` over all kept tokens, uint32."""

        def add(order: Any, y: Any, _: Any, is_there: Any, carry: Any) -> Any:
            return carry + t.select(is_there, weigh(order, y), 0)

        return _block_sum(t, each(add, t.value(UINT, 0)), sums, num_warps)

    k, p = t.load(top_k, sequence), t.load(top_p, sequence)
    nothing = t.value(UINT, 0)

    def above_k(order: Any) -> Any:
        return add_up(lambda other, _: t.cast(other > order, UINT)) < t.cast(k, UINT)

    (k_order,) = t.branch(k > 0, lambda: [_first_order(t, above_k)], [nothing])
    # Behind top-k the mass is that of the tokens that it keeps; of those that no list holds too, unless there are enough.
    misses_mass = (k > 0) & (p < 1.0) & (num < k) & (num < shape.vocab)

    def mass_kept() -> list:
        def add(order: Any, y: Any, _: Any, is_there: Any, carry: Any) -> Any:
            return carry + t.select(is_there & (order >= k_order), units_of(t, y), 0)

        mass = simt.block_reduce(t, each(add, t.value(WIDE, 0)), operator.add, keys, num_warps)
        return [t.to_float(mass) * (1 / UNIT)]

    (total,) = t.branch(k > 0, mass_kept, [total])

    def above_p(order: Any) -> Any:
        def weigh(other: Any, y: Any) -> Any:
            return t.select(other > order, t.round(t.exp2(y * LOG2_E) / total * UNIT), 0)

        return add_up(weigh) < t.round(p * UNIT)

    (p_order,) = t.branch(p < 1.0, lambda: [_first_order(t, above_p)], [nothing])
    lowest, least = t.maximum(k_order, p_order), t.load(log_min_p, sequence)
    key_at = (sequence * shape.num_depths + t.load(depth, row)) * 2
    words = t.load(noise_key, key_at), t.load(noise_key, key_at + 1)

    def largest(order: Any, y: Any, token: Any, is_there: Any, carry: Any) -> Any:
        is_kept = is_there & (order >= lowest) & (y >= least)
        key = key_of(t, y + gumbel(t, words, token), token)
        return t.select(is_kept, t.maximum(carry, key), carry)

    drawn = simt.block_reduce(t, each(largest, t.value(WIDE, 0)), t.maximum, keys, num_warps)
    with t.when(t.is_equal(t.thread(), 0)):
        token = t.select(drawn > 0, column_of(t, drawn), column_of(t, best))
        is_complete = ~misses_mass & (found <= shape.num_kept)
        t.store(out, row, t.select(is_complete, token, -1))


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
    count: Any,
) -> None:
    """Lists to shared memory, a warp a list at a time. A list that was too short counts as more than fits."""
    warp, lane, num_warps = t.thread() >> 5, t.thread() & (_LANES - 1), shape.num_threads // _LANES
    for turn in range(-(-shape.num_pieces // num_warps)):
        piece = warp + turn * num_warps
        at = row * shape.num_pieces + t.minimum(piece, shape.num_pieces - 1)
        num = t.select(piece < shape.num_pieces, t.load(piece_count, at), 0)
        with t.when((num > shape.capacity) & t.is_equal(lane, 0)):
            t.atomic_add(count, t.value(INT, 0), t.value(INT, shape.num_kept + 1))
        num = t.minimum(num, shape.capacity)

        def fetch(i: Any, at: Any = at, num: Any = num) -> None:
            place = lane + i * _LANES
            inside = at * shape.capacity + t.minimum(place, num - 1)
            to = simt.append(t, place < num, count)
            with t.when((place < num) & (to < shape.num_kept)):
                t.store(kept_logit, to, (t.load(list_logit, inside) - peak) / heat)
                t.store(kept_token, to, t.load(list_token, inside))

        t.loop((num + (_LANES - 1)) >> 5, fetch)


def _block_sum(t: Any, value: Any, scratch: Any, num_warps: int) -> Any:
    """Of uint32 values of all threads."""
    lane = t.thread() & (_LANES - 1)
    value = t.warp_sum(value)
    with t.when(t.is_equal(lane, 0)):
        t.store(scratch, t.thread() >> 5, value)
    t.barrier()
    part = t.load(scratch, t.minimum(lane, num_warps - 1))
    value = t.warp_sum(t.select(lane < num_warps, part, 0))
    t.barrier()
    return value


def _first_order(t: Any, holds: Callable) -> Any:
    """Smallest uint32 at which a predicate holds that goes on holding above it."""

    def halve(_: Any, low: Any, high: Any) -> list:
        middle = (low & high) + ((low ^ high) >> 1)
        is_above = holds(middle)
        return [t.select(is_above, low, middle + 1), t.select(is_above, middle, high)]

    return t.loop(32, halve, [t.value(UINT, 0), t.value(UINT, 2**32 - 1)])[1]
