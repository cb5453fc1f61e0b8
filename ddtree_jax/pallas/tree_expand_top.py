"""The best columns of a piece of a row of logits, and the piece's log-sum-exp, in one pass: one block a piece.

::

    load       every thread holds its columns in registers         k[thread][i]: key of a logit and its column
    groups     the best key of each of G >= 2 K groups of threads
    bound      the K-th best of those: at least K keys reach it, and few more do
    survivors  what reaches the bound goes to shared memory        at most K groups' columns, mostly about 1.2 K
    rank       a survivor's place is how many are better           keys differ, so that every place is taken once

Keys order by logit, equal logits by lower column. Bytes: the logits once.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.simt import FLOAT, INT, UINT, WIDE

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
LOWEST = -3e38


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Static shape: ``num_threads`` hold ``vectors`` times ``width`` neighbouring columns each."""

    num_columns: int
    num_best: int
    num_threads: int
    vectors: int
    width: int

    @classmethod
    def of(cls, num_columns: int, num_best: int, num_threads: int, vectors: int) -> "Piece":
        """Threads that load up to ``vectors`` times 16 bytes, or the same in smaller pieces where rows are not so aligned."""
        width = next(width for width in (4, 2, 1) if num_columns % width == 0)
        return cls(
            num_columns=num_columns,
            num_best=num_best,
            num_threads=num_threads,
            vectors=min(vectors * 4 // width, -(-num_columns // (num_threads * width))),
            width=width,
        )

    @property
    def columns(self) -> int:
        return self.num_threads * self.vectors * self.width

    @property
    def num_pieces(self) -> int:
        """Of a row."""
        return -(-self.num_columns // self.columns)

    @property
    def num_groups(self) -> int:
        groups = self.num_threads // 32
        while groups < min(2 * self.num_best, self.num_threads):
            groups *= 2
        return groups

    @property
    def num_survivors(self) -> int:
        """At most."""
        return min(self.columns, self.num_best * self.columns // self.num_groups)


def key_of(t: Any, logit: Any, column: Any) -> Any:
    """Larger is better: by logit, then by lower column; never 0."""
    return (t.cast(ordered(t, logit), WIDE) << 32) | t.cast(t.cast(~column, UINT), WIDE)


def ordered(t: Any, x: Any) -> Any:
    """Bits of a float32 in its order; adding 0 makes both zeros alike."""
    bits = t.bits(x + 0.0, INT)
    return t.bits(bits ^ ((bits >> 31) | -(2**31)), UINT)


def unordered(t: Any, order: Any) -> Any:
    bits = t.bits(order, INT)
    return t.bits(bits ^ (~(bits >> 31) | -(2**31)), FLOAT)


def logit_of(t: Any, key: Any) -> Any:
    return unordered(t, t.cast(key >> 32, UINT))


def column_of(t: Any, key: Any) -> Any:
    return t.cast(~t.cast(key, UINT), INT)


def select_top(
    t: Any,
    piece: Piece,
    row: Any,
    index: Any,
    first_id: Any,
    logits: Any,
    out_logit: Any,
    out_token: Any,
    out_lse: Any,
    groups: Any,
    survivors: Any,
    bound: Any,
    sums: Any,
    count: Any,
) -> None:
    """Writes a piece's best, best first, as logits and ids (column + ``first_id``); places without a column hold id -1.

    Global memory: logits [rows, columns], out_logit and out_token [rows, pieces, K], out_lse [rows, pieces]. Shared:
    groups [G], survivors and bound [2], all keys; sums [warps]; count [1].
    """
    thread, first = t.thread(), t.value(INT, 0)

    with t.when(t.is_equal(thread, 0)):
        t.store(count, first, 0)
        t.store(bound, first, 0)
    logit, column = load_columns(t, piece, row, index, logits)
    best = best_of_thread(t, piece, logit, column)
    _find_bound(t, piece, best, groups, bound)

    limit, top = t.load(bound, first), t.load(bound, first + 1)
    with t.when(best >= limit):
        for x, c in zip(logit, column, strict=True):
            key = key_of(t, x, c)
            with t.when((c < piece.num_columns) & (key >= limit)):
                t.store(survivors, t.atomic_add(count, first, t.value(INT, 1)), key)
    maximum = t.maximum(logit_of(t, top), LOWEST)
    parts = [
        t.select(c < piece.num_columns, t.exp2((x - maximum) * LOG2_E), 0.0) for x, c in zip(logit, column, strict=True)
    ]
    total = simt.warp_reduce(t, functools.reduce(operator.add, parts), operator.add)
    with t.when(t.is_equal(thread & 31, 0)):
        t.store(sums, thread >> 5, total)
    t.barrier()

    out = (row * piece.num_pieces + index) * piece.num_best
    _rank_survivors(t, piece, survivors, t.load(count, first), out, first_id, out_logit, out_token)
    _store_lse(t, piece, maximum, sums, row * piece.num_pieces + index, out_lse)


def load_columns(t: Any, piece: Piece, row: Any, index: Any, logits: Any) -> tuple[list, list]:
    """Logits and columns of a thread, in the order of columns; columns from ``num_columns`` on repeat others' logits."""
    logit, column = [], []
    for turn in range(piece.vectors):
        start = index * piece.columns + (t.thread() + turn * piece.num_threads) * piece.width
        inside = t.minimum(start, piece.num_columns - piece.width)
        logit += t.load_vector(logits, row * piece.num_columns + inside, piece.width)
        column += [start + i for i in range(piece.width)]
    return logit, column


def best_of_thread(t: Any, piece: Piece, logit: list, column: list) -> Any:
    """Key of the best column, 0 if there is none. Columns rise, so that the first of equal logits has the lowest."""
    best, where = t.value(UINT, 0), t.value(INT, 0)
    for x, c in zip(logit, column, strict=True):
        order = ordered(t, x)
        is_better = (order > best) & (c < piece.num_columns)
        best, where = t.select(is_better, order, best), t.select(is_better, c, where)
    is_any = column[0] < piece.num_columns
    key = (t.cast(best, WIDE) << 32) | t.cast(t.bits(~where, UINT), WIDE)
    return t.select(is_any, key, 0)


def _find_bound(t: Any, piece: Piece, best: Any, groups: Any, bound: Any) -> None:
    """bound[0]: K-th best key of the groups, 0 if fewer have any; bound[1]: the best."""
    members = piece.num_threads // piece.num_groups
    best = simt.warp_reduce(t, best, t.maximum, members)
    group, part = t.thread() >> (members.bit_length() - 1), t.thread() & (members - 1)
    with t.when(t.is_equal(part, 0)):
        t.store(groups, group, best)
    t.barrier()
    rank = t.value(INT, 0)
    for turn in range(-(-piece.num_groups // (2 * members))):
        at = (part + turn * members) * 2
        inside = t.minimum(at, piece.num_groups - 2)
        for other in t.load_vector(groups, inside, 2):
            rank = rank + t.cast((other > best) & (at < piece.num_groups), INT)
    rank = simt.warp_reduce(t, rank, operator.add, members)
    with t.when(t.is_equal(part, 0) & (best > 0)):
        with t.when(t.is_equal(rank, piece.num_best - 1)):
            t.store(bound, t.value(INT, 0), best)
        with t.when(t.is_equal(rank, 0)):
            t.store(bound, t.value(INT, 1), best)
    t.barrier()


_RANKERS = 8


def _rank_survivors(
    t: Any, piece: Piece, survivors: Any, num: Any, out: Any, first_id: Any, out_logit: Any, out_token: Any
) -> None:
    """Eight lanes a survivor."""
    part, mine = t.thread() & (_RANKERS - 1), t.thread() >> 3
    at_once = piece.num_threads // _RANKERS

    def rank_one(turn: Any) -> None:
        i = mine + turn * at_once
        key = t.load(survivors, t.minimum(i, num - 1))

        def compare(step: Any, rank: Any) -> list:
            j = step * _RANKERS + part
            other = t.load(survivors, t.minimum(j, num - 1))
            return [rank + t.cast((other > key) & (j < num), INT)]

        (rank,) = t.loop((num + (_RANKERS - 1)) >> 3, compare, [t.value(INT, 0)])
        rank = simt.warp_reduce(t, rank, operator.add, _RANKERS)
        with t.when(t.is_equal(part, 0) & (i < num) & (rank < piece.num_best)):
            t.store(out_logit, out + rank, logit_of(t, key))
            t.store(out_token, out + rank, column_of(t, key) + first_id)

    t.loop((num + (at_once - 1)) >> (at_once.bit_length() - 1), rank_one)
    with t.when((t.thread() >= num) & (t.thread() < piece.num_best)):
        t.store(out_logit, out + t.thread(), -float("inf"))
        t.store(out_token, out + t.thread(), -1)


def _store_lse(t: Any, piece: Piece, maximum: Any, sums: Any, at: Any, out_lse: Any) -> None:
    with t.when(t.thread() < 32):
        lane = t.thread() & 31
        num_warps = piece.num_threads // 32
        part = t.load(sums, t.minimum(lane, num_warps - 1))
        total = simt.warp_reduce(t, t.select(lane < num_warps, part, 0.0), operator.add)
        with t.when(t.is_equal(lane, 0)):
            t.store(out_lse, at, maximum + t.log2(total) * LN_2)
