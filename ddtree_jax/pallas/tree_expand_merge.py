"""The best candidates of a row from those of its pieces (parts of the vocabulary on one device, or the shards of several).

A list is a piece's keys, best first, element e = 32 j + lane in register j of a lane; of two lists, one reversed, the larger
ones of each place are the best of both in an order that log2 stages of compare-exchange sort (Batcher)::

    a   9 7 4 1                        max   9 7 6 8    stages  9 8 6 7    9 8 7 6
    b   2 5 6 8   (8 6 5 2 reversed)

Q warps a row take every Q-th list; the first warp of each row merges theirs and turns logits into log-probabilities.
"""

import operator
from dataclasses import dataclass
from typing import Any

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.tree_expand_top import LN_2, LOG2_E, LOWEST, column_of, key_of, logit_of

IMPOSSIBLE = -1e30
"""Stands for a log-probability of -inf, so that sums stay ordered and finite."""
_LANES = 32
_AHEAD = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """Static shape: ``depth`` rows of ``num_pieces`` lists of ``num_candidates``."""

    depth: int
    num_pieces: int
    num_candidates: int
    num_threads: int

    @property
    def per_lane(self) -> int:
        registers = 1
        while registers * _LANES < self.num_candidates:
            registers *= 2
        return registers

    @property
    def stride(self) -> int:
        """Places of a row of candidates in shared memory."""
        return self.per_lane * _LANES

    @property
    def warps_a_row(self) -> int:
        sharers = 1
        while 2 * sharers * self.depth * _LANES <= self.num_threads and 2 * sharers <= self.num_pieces:
            sharers *= 2
        return sharers


def merge_rows(
    t: Any, lists: Lists, sequence: Any, logit: Any, token: Any, lse: Any, keys: Any, out_logp: Any, out_token: Any
) -> None:
    """Fills a sequence's candidates in shared memory: out_logp and out_token [L, stride], best first; all threads wait.

    Global memory: logit and token [B, L, C, K], lse [B, L, C]. Shared: keys [L, Q, stride].
    """
    warp, lane = t.thread() >> 5, t.thread() & (_LANES - 1)
    sharers = lists.warps_a_row
    row, part = warp >> (sharers.bit_length() - 1), warp & (sharers - 1)
    with t.when(row < lists.depth):
        merged = _merge_pieces(t, lists, (sequence * lists.depth + row) * lists.num_pieces, part, logit, token)
        for j, key in enumerate(merged):
            t.store(keys, warp * lists.stride + j * _LANES + lane, key)
    t.barrier()
    with t.when(warp < lists.depth):
        first = warp * sharers * lists.stride
        merged = [t.load(keys, first + j * _LANES + lane) for j in range(lists.per_lane)]
        for other in range(1, sharers):
            at = first + (other + 1) * lists.stride - 1 - lane
            merged = _merge(t, lane, merged, [t.load(keys, at - j * _LANES) for j in range(lists.per_lane)])
        total = _sum_lse(t, lists, sequence * lists.depth + warp, lane, lse)
        for j, key in enumerate(merged):
            at = warp * lists.stride + j * _LANES + lane
            # Of a row without any possible token the difference is NaN, which the maximum passes over.
            t.store(out_logp, at, t.maximum(logit_of(t, key) - total, IMPOSSIBLE))
            t.store(out_token, at, column_of(t, key))
    t.barrier()


def _merge_pieces(t: Any, lists: Lists, first: Any, part: Any, logit: Any, token: Any) -> list:
    """Lists ``part``, ``part + Q``, ... of a row; several are fetched before they are needed."""
    lane, num_turns = t.thread() & (_LANES - 1), -(-lists.num_pieces // lists.warps_a_row)
    ahead = max(1, _AHEAD // lists.per_lane)

    def load(turn: int) -> list:
        piece, keys = part + turn * lists.warps_a_row, []
        for j in range(lists.per_lane):
            e = lane + j * _LANES if turn == 0 else ~lane + (lists.stride - j * _LANES)
            at = (first + t.minimum(piece, lists.num_pieces - 1)) * lists.num_candidates
            at = at + t.minimum(e, lists.num_candidates - 1)
            ids = t.load(token, at)
            is_there = (piece < lists.num_pieces) & (e < lists.num_candidates) & (ids >= 0)
            keys.append(t.select(is_there, key_of(t, t.load(logit, at), ids), 0))
        return keys

    merged: list = []
    for begin in range(0, num_turns, ahead):
        for fetched in [load(turn) for turn in range(begin, min(begin + ahead, num_turns))]:
            merged = _merge(t, lane, merged, fetched) if merged else fetched
    return merged


def _merge(t: Any, lane: Any, best_first: list, best_last: list) -> list:
    keys = list(map(t.maximum, best_first, best_last))
    distance = len(keys) // 2
    while distance:
        for j in range(len(keys)):
            if not j & distance:
                a, b = keys[j], keys[j + distance]
                keys[j], keys[j + distance] = t.maximum(a, b), t.minimum(a, b)
        distance //= 2
    for distance in (16, 8, 4, 2, 1):
        keeps_larger = t.is_equal(lane & distance, 0)
        others = [t.shuffle_xor(key, distance) for key in keys]
        keys = [t.select((key > other) ^ keeps_larger, other, key) for key, other in zip(keys, others, strict=True)]
    return keys


def _sum_lse(t: Any, lists: Lists, row: Any, lane: Any, lse: Any) -> Any:
    """Log-sum-exp of a row from those of its pieces, of which there are no more than lanes."""
    part = t.load(lse, row * lists.num_pieces + t.minimum(lane, lists.num_pieces - 1))
    if lists.num_pieces == 1:
        return part
    maximum = t.maximum(simt.warp_reduce(t, part, t.maximum), LOWEST)
    part = t.select(lane < lists.num_pieces, t.exp2((part - maximum) * LOG2_E), 0.0)
    return maximum + t.log2(simt.warp_reduce(t, part, operator.add)) * LN_2
