"""Best-first growth of a draft tree in one warp.

Node n lies in lane n % 32, register n // 32, with its best continuation that is not in the tree yet: the next rank of the
candidates behind it. A round puts the best continuation of all nodes into the tree::

    each lane    its best continuation; what would follow it: the next rank behind the same node, and its own first child
    all lanes    largest score; ties, which are rare, by rank path
    winner       goes on to the next rank;  the new node's lane takes the child

What would follow is made ready while the lanes still compare. Scores are sums of two float32 without rounding, as in the
reference. A path is its ranks, a byte each from the top, with its length in the last byte, so that equal scores go by
rank path, a prefix before its continuations.
"""

from dataclasses import dataclass
from typing import Any

from ddtree_jax.pallas.simt import FLOAT, INT, UINT, WIDE
from ddtree_jax.pallas.tree_expand_top import ordered, unordered

_LANES = 32
_ALL = (1 << 32) - 1
_PLACE = (1 << 20) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Static shape; a row of candidates takes ``stride`` places."""

    depth: int
    num_candidates: int
    stride: int
    num_nodes: int

    @property
    def registers(self) -> int:
        """Nodes a lane that may have children: all but the last."""
        return max(1, -(-(self.num_nodes - 1) // _LANES))

    @property
    def path_words(self) -> int:
        return -(-(self.depth + 1) // 8)

    @property
    def mask_words(self) -> int:
        return -(-self.num_nodes // _LANES)


@dataclass(slots=True)
class _Continuation:
    """The best prefix behind a node that is not in the tree; ``key`` 0 if there is none.

    ``high`` and ``low`` are the node's own score, ``place`` is 65536 depth + rank of the continuation.
    """

    key: Any
    path: list
    high: Any
    low: Any
    place: Any

    def values(self) -> list:
        return [self.key, *self.path, self.high, self.low, self.place]

    @classmethod
    def of(cls, values: list) -> "_Continuation":
        key, *path, high, low, place = values
        return cls(key, path, high, low, place)


def grow(t: Any, shape: Growth, budget: Any, logp: Any, records: Any, count: Any) -> None:
    """Run by one warp: fills ``count`` and, for all nodes but the root, ``records``.

    Global memory: budget [1]. Shared: logp [L, stride], records [N] (parent, depth of the parent and rank), count [1].
    """
    lane, zero, nothing = t.thread() & (_LANES - 1), t.value(INT, 0), t.value(FLOAT, 0.0)
    key = _key(t, *_add(nothing, nothing, t.load(logp, zero)))
    path = [t.value(WIDE, int(i == shape.path_words - 1)) for i in range(shape.path_words)]
    behind_root = _Continuation(t.select(t.is_equal(lane, 0), key, 0), path, nothing, nothing, zero)
    empty = _Continuation(t.value(WIDE, 0), path, nothing, nothing, zero)
    slots = [behind_root] + [empty] * (shape.registers - 1)

    def add_node(i: Any, num: Any, *values: Any) -> list:
        size = len(values) // shape.registers
        slots = [_Continuation.of(list(values[j * size : (j + 1) * size])) for j in range(shape.registers)]
        best, register = _best_of_lane(t, slots)
        terms = _terms_that_follow(t, shape, best, logp)
        winner, largest = _winner(t, best)
        sibling, child_key = _successors(t, shape, best, *terms)
        low = t.shuffle(t.cast(best.key, UINT), winner)
        child_key = t.shuffle(child_key, winner)
        path = [t.shuffle(word, winner) for word in best.path]
        place = t.shuffle(best.place | (register << 20), winner)
        depth, parent = (place >> 16) & 15, winner + (place >> 20) * _LANES
        # At the last depth the key is 0, and the place stays one that can be read.
        below = t.minimum(depth + 1, shape.depth - 1) << 16
        path[-1] = path[-1] + 1
        new = _Continuation(child_key, path, unordered(t, largest), unordered(t, low), below)
        node, is_any = i + 1, largest > 0
        is_winner, is_owner = t.is_equal(lane, winner) & is_any, t.is_equal(lane, node & (_LANES - 1)) & is_any
        changed = []
        for j, slot in enumerate(slots):
            slot = _choose(t, is_winner & t.is_equal(register, j), sibling, slot)
            changed += _choose(t, is_owner & t.is_equal(node >> 5, j), new, slot).values()
        with t.when(is_winner):
            t.store(records, node, (parent << 20) | (best.place & _PLACE))
        return [num + t.cast(t.cast(is_any, UINT), INT), *changed]

    limit = t.minimum(t.load(budget, zero), shape.num_nodes - 1)
    num, *_ = t.loop(limit, add_node, [t.value(INT, 1), *(value for slot in slots for value in slot.values())])
    with t.when(t.is_equal(lane, 0)):
        t.store(count, zero, num)


def write_tree(
    t: Any, shape: Growth, sequence: Any, root: Any, start: Any, token: Any, records: Any, count: Any, outs: Any
) -> None:
    """A thread a node. Global memory: root and start [B]; shared: token [L, stride]. ``outs``: see `tree_expand`."""
    node, num, position = t.thread(), t.load(count, t.value(INT, 0)), t.load(start, sequence)
    out_token, out_parent, out_depth, out_position, out_count, out_mask = outs
    with t.when(t.is_equal(node, 0)):
        t.store(out_count, sequence, num)
    with t.when(node < shape.num_nodes):
        is_inner = (node > 0) & (node < num)
        record = t.load(records, t.select(is_inner, node, 1))
        parent, depth = t.select(is_inner, record >> 20, 0), t.select(is_inner, (record >> 16 & 15) + 1, 0)
        drawn = t.load(token, t.select(is_inner, (record >> 16 & 15) * shape.stride + (record & 65535), 0))
        drawn = t.select(is_inner, drawn, t.select(t.is_equal(node, 0), t.load(root, sequence), 0))
        at = sequence * shape.num_nodes + node
        for out, value in (
            (out_token, drawn),
            (out_parent, parent),
            (out_depth, depth),
            (out_position, position + depth),
        ):
            t.store(out, at, value)
        words = _bits(t, shape, node)
        for _ in range(shape.depth):
            words = [
                word | t.select(is_inner, bit, 0) for word, bit in zip(words, _bits(t, shape, parent), strict=True)
            ]
            parent = t.select(parent > 0, t.load(records, t.maximum(parent, 1)) >> 20, 0)
        for i, word in enumerate(words):
            t.store(out_mask, at * shape.mask_words + i, t.cast(word, INT))


def _bits(t: Any, shape: Growth, node: Any) -> list:
    """Mask words with the bit of a node."""
    bit = t.value(UINT, 1) << t.cast(node & (_LANES - 1), UINT)
    return [t.select(t.is_equal(node >> 5, word), bit, 0) for word in range(shape.mask_words)]


def _add(high: Any, low: Any, term: Any) -> tuple[Any, Any]:
    """Knuth's two-sum, in the order of the reference."""
    total = high + term
    rest = total - high
    low = low + ((high - (total - rest)) + (term - rest))
    high = total + low
    return high, low - (high - total)


def _key(t: Any, high: Any, low: Any) -> Any:
    """Orders as the sums do."""
    return (t.cast(ordered(t, high), WIDE) << 32) | t.cast(ordered(t, low), WIDE)


def _is_better(t: Any, a: _Continuation, b: _Continuation) -> Any:
    is_less = a.path[-1] < b.path[-1]
    for mine, other in zip(a.path[-2::-1], b.path[-2::-1], strict=True):
        is_less = (mine < other) | (t.is_equal(mine, other) & is_less)
    return (a.key > b.key) | (t.is_equal(a.key, b.key) & is_less)


def _choose(t: Any, condition: Any, yes: _Continuation, no: _Continuation) -> _Continuation:
    return _Continuation.of([t.select(condition, a, b) for a, b in zip(yes.values(), no.values(), strict=True)])


def _best_of_lane(t: Any, slots: list[_Continuation]) -> tuple[_Continuation, Any]:
    best, register = slots[0], t.value(INT, 0)
    for j, slot in enumerate(slots[1:], 1):
        is_better = _is_better(t, slot, best)
        best, register = _choose(t, is_better, slot, best), t.select(is_better, t.value(INT, j), register)
    return best, register


def _terms_that_follow(t: Any, shape: Growth, best: _Continuation, logp: Any) -> tuple[Any, Any]:
    """Log-probabilities of the next rank at a continuation's depth, and of the first one below it."""
    depth, rank = best.place >> 16, best.place & 65535
    following = t.load(logp, depth * shape.stride + t.minimum(rank + 1, shape.num_candidates - 1))
    return following, t.load(logp, t.minimum(depth + 1, shape.depth - 1) * shape.stride)


def _successors(t: Any, shape: Growth, best: _Continuation, following: Any, below: Any) -> tuple[_Continuation, Any]:
    """What takes a continuation's place behind its node, and the key of its own first child."""
    depth, rank = best.place >> 16, best.place & 65535
    key = _key(t, *_add(best.high, best.low, following))
    step = t.value(WIDE, 1) << t.cast(t.cast((~depth & 7) * 8, UINT), WIDE)
    path = [word + t.select(t.is_equal(depth >> 3, i), step, 0) for i, word in enumerate(best.path)]
    key = t.select(rank + 1 < shape.num_candidates, key, 0)
    high, low = (unordered(t, t.cast(part, UINT)) for part in (best.key >> 32, best.key))
    child_key = t.select(depth + 1 < shape.depth, _key(t, *_add(high, low, below)), 0)
    return _Continuation(key, path, best.high, best.low, best.place + 1), child_key


def _winner(t: Any, best: _Continuation) -> tuple[Any, Any]:
    """Lane with the best continuation, and the upper half of its key, which is 0 if there is none."""
    high = t.cast(best.key >> 32, UINT)
    largest = t.warp_maximum(high)
    is_best = t.is_equal(high, largest)
    lanes = t.ballot(is_best)

    def break_tie() -> list:
        low = t.cast(best.key, UINT)
        among = is_best & t.is_equal(low, t.warp_maximum(t.select(is_best, low, 0)))
        for word in best.path:
            for part in (t.cast(word >> 32, UINT), t.cast(word, UINT)):
                among = among & t.is_equal(part, t.warp_minimum(t.select(among, part, _ALL)))
        return [t.ballot(among)]

    (lanes,) = t.branch((lanes & (lanes - 1)) > 0, break_tie, [lanes])
    return t.lowest_bit(lanes), largest
