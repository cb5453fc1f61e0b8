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


def grow(
    t: Any, shape: Growth, sequence: Any, root: Any, start: Any, budget: Any, logp: Any, token: Any, outs: Any, masks: Any
) -> None:
    """Run by one warp. Shared memory: logp and token [L, stride], masks [N, W]. ``outs``: see `tree_expand`."""
    lane = t.thread() & (_LANES - 1)
    out_token, out_parent, out_depth, out_position, out_count, _ = outs
    first, position = sequence * shape.num_nodes, t.load(start, sequence)
    with t.when(t.is_equal(lane, 0)):
        t.store(out_token, first, t.load(root, sequence))
        t.store(out_parent, first, 0)
        t.store(out_depth, first, 0)
        t.store(out_position, first, position)
    _store_mask(t, shape, sequence, t.value(INT, 0), None, outs, masks)

    key = _key(t, *_add(t.value(FLOAT, 0.0), t.value(FLOAT, 0.0), t.load(logp, t.value(INT, 0))))
    values: list = []
    for j in range(shape.registers):
        is_root = t.is_equal(lane, 0 if j == 0 else -1)
        path = [t.value(WIDE, int(i == shape.path_words - 1)) for i in range(shape.path_words)]
        root_of = _Continuation(
            t.select(is_root, key, 0), path, t.value(FLOAT, 0.0), t.value(FLOAT, 0.0), t.value(INT, 0)
        )
        values += root_of.values()

    def add_node(i: Any, count: Any, *values: Any) -> list:
        size = len(values) // shape.registers
        slots = [_Continuation.of(list(values[j * size : (j + 1) * size])) for j in range(shape.registers)]
        best, register = _best_of_lane(t, slots)
        sibling, child = _successors(t, shape, best, logp)
        winner, is_any = _winner(t, best)
        key, child_key = t.shuffle(best.key, winner), t.shuffle(child.key, winner)
        path = [t.shuffle(word, winner) for word in child.path]
        place = t.shuffle(best.place, winner)
        parent = t.shuffle(lane + register * _LANES, winner)
        high, low = _sum_of(t, key)
        # At the last depth the key is 0, and the place stays one that can be read.
        below = t.minimum((place & -65536) + 65536, (shape.depth - 1) << 16)
        new = _Continuation(child_key, path, high, low, below)
        node = i + 1
        is_winner, is_owner = t.is_equal(lane, winner) & is_any, t.is_equal(lane, node & (_LANES - 1)) & is_any
        changed = []
        for j, slot in enumerate(slots):
            slot = _choose(t, is_winner & t.is_equal(register, j), sibling, slot)
            changed += _choose(t, is_owner & t.is_equal(node >> 5, j), new, slot).values()
        with t.when(is_any):
            depth = place >> 16
            with t.when(t.is_equal(lane, 0)):
                t.store(out_token, first + node, t.load(token, depth * shape.stride + (place & 65535)))
                t.store(out_parent, first + node, parent)
                t.store(out_depth, first + node, depth + 1)
                t.store(out_position, first + node, position + depth + 1)
            _store_mask(t, shape, sequence, node, parent, outs, masks)
        return [count + t.cast(t.cast(is_any, UINT), INT), *changed]

    limit = t.minimum(t.load(budget, t.value(INT, 0)), shape.num_nodes - 1)
    count, *_ = t.loop(limit, add_node, [t.value(INT, 1), *values])
    with t.when(t.is_equal(lane, 0)):
        t.store(out_count, sequence, count)
    _pad(t, shape, sequence, position, count, outs)


def _store_mask(t: Any, shape: Growth, sequence: Any, node: Any, parent: Any, outs: Any, masks: Any) -> None:
    """A lane a word: what the parent sees, if there is one, and the node itself. A lane reads what it wrote itself."""
    lane = t.thread() & (_LANES - 1)
    with t.when(lane < shape.mask_words):
        word = t.select(t.is_equal(node >> 5, lane), t.value(UINT, 1) << t.cast(node & (_LANES - 1), UINT), 0)
        if parent is not None:
            word = word | t.load(masks, parent * shape.mask_words + lane)
        t.store(masks, node * shape.mask_words + lane, word)
        t.store(outs[-1], (sequence * shape.num_nodes + node) * shape.mask_words + lane, t.cast(word, INT))


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


def _sum_of(t: Any, key: Any) -> tuple[Any, Any]:
    return unordered(t, t.cast(key >> 32, UINT)), unordered(t, t.cast(key, UINT))


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


def _successors(t: Any, shape: Growth, best: _Continuation, logp: Any) -> tuple[_Continuation, _Continuation]:
    """What takes a continuation's place behind its node, and its own first child (whose score stands in the key alone)."""
    depth, rank = best.place >> 16, best.place & 65535
    following = t.load(logp, depth * shape.stride + t.minimum(rank + 1, shape.num_candidates - 1))
    key = _key(t, *_add(best.high, best.low, following))
    path = []
    for i, word in enumerate(best.path):
        step = t.value(WIDE, 1) << t.cast(t.cast((~depth & 7) * 8, UINT), WIDE)
        path.append(word + t.select(t.is_equal(depth >> 3, i), step, 0))
    has_next = rank + 1 < shape.num_candidates
    sibling = _Continuation(t.select(has_next, key, 0), path, best.high, best.low, best.place + 1)

    below = t.load(logp, t.minimum(depth + 1, shape.depth - 1) * shape.stride)
    key = t.select(depth + 1 < shape.depth, _key(t, *_add(*_sum_of(t, best.key), below)), 0)
    path = [*best.path[:-1], best.path[-1] + 1]
    return sibling, _Continuation(key, path, best.high, best.low, best.place)


def _winner(t: Any, best: _Continuation) -> tuple[Any, Any]:
    """Lane with the best continuation, and whether there is any."""
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

    (lanes,) = t.branch(t.popcount(lanes) > 1, break_tie, [lanes])
    return t.lowest_bit(lanes), largest > 0


def _pad(t: Any, shape: Growth, sequence: Any, position: Any, count: Any, outs: Any) -> None:
    """Nodes from ``count`` on: zeros, and a mask of themselves alone."""
    lane = t.thread() & (_LANES - 1)
    out_token, out_parent, out_depth, out_position, _, out_mask = outs
    for turn in range(shape.mask_words):
        node = lane + turn * _LANES
        with t.when((node >= count) & (node < shape.num_nodes)):
            at = sequence * shape.num_nodes + node
            for out in (out_token, out_parent, out_depth):
                t.store(out, at, 0)
            t.store(out_position, at, position)
            for word in range(shape.mask_words):
                own = t.select(t.is_equal(node >> 5, word), t.value(INT, 1) << lane, 0)
                t.store(out_mask, at * shape.mask_words + word, own)
