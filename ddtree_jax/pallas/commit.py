"""Accept and commit: the path that the target drew, and the accepted rows of all layers moved behind the prefix.

::

    accept_path   a block a sequence, a thread a node
                  matches:   0 1 1 0 1 1     is the node what the target drew at its parent?
                  parents:   0 0 1 0 3 2     all of a node's ancestors match? log2(depth) steps, each over twice the way
                  accepted:  1 1 1 0 0 1  -> path 0 1 2 5
    commit_rows   a block an array (a layer's cache) and sequence: rows path[0], path[1], ... to slots length, length + 1, ...

One launch each. Bytes of a commit: accepted rows, read and written; at 61 layers of 1,152 bytes and 8 rows 1.1 MB, 0.25 us.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.simt import INT

_WARPGROUP = 128
_MOVE_THREADS = 256
MAX_NODES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """Static shape: ``num_nodes`` of at most ``depth``."""

    num_nodes: int
    depth: int

    @property
    def num_threads(self) -> int:
        return _WARPGROUP * -(-max(self.num_nodes, self.depth + 1) // _WARPGROUP)


def walk(
    t: Any,
    shape: Walk,
    sequence: Any,
    token: Any,
    parent: Any,
    depth: Any,
    count: Any,
    drawn: Any,
    out_path: Any,
    out_accepted: Any,
    parents: Any,
    accepted: Any,
    path: Any,
    total: Any,
) -> None:
    """A thread a node. Global memory: [B, N], count [B], out_path [B, L + 1]; shared: [N], [N], [L + 1], [1]."""
    node, zero = t.thread(), t.value(INT, 0)
    num_places = shape.depth + 1
    at = sequence * shape.num_nodes + t.minimum(node, shape.num_nodes - 1)
    mine = t.load(parent, at)
    drawn_there = t.load(drawn, sequence * shape.num_nodes + mine)
    is_match = t.is_equal(drawn_there, t.load(token, at)) & (node < t.load(count, sequence))
    is_root = t.is_equal(node, 0)
    flag = t.cast(t.cast(is_root | is_match, simt.UINT), INT)
    is_node = node < shape.num_nodes
    with t.when(is_root):
        t.store(total, zero, 0)
    with t.when(node < num_places):
        t.store(path, node, 0)
    for _ in range(max(shape.depth, 1).bit_length()):
        with t.when(is_node):
            t.store(parents, node, mine)
            t.store(accepted, node, flag)
        t.barrier()
        flag, mine = flag & t.load(accepted, mine), t.load(parents, mine)
        t.barrier()
    with t.when(is_node & t.is_equal(flag, 1)):
        t.store(path, t.load(depth, at), node)
        t.atomic_add(total, zero, t.value(INT, 1))
    t.barrier()
    with t.when(node < num_places):
        t.store(out_path, sequence * num_places + node, t.load(path, node))
    with t.when(is_root):
        t.store(out_accepted, sequence, t.load(total, zero))


def accept_path(
    token_BN: Int32[Array, "B N"],
    parent_BN: Int32[Array, "B N"],
    depth_BN: Int32[Array, "B N"],
    count_B: Int32[Array, "B"],
    drawn_BN: Int32[Array, "B N"],
    depth: int,
) -> tuple[Int32[Array, "B T"], Int32[Array, "B"]]:
    """Longest path from the root along which each node is what the target drew at its parent; see `tree.walk`.

    Raises:
      NotImplementedError: for more nodes than a block has threads.
    """
    batch, num_nodes = token_BN.shape
    if max(num_nodes, depth + 1) > MAX_NODES:
        raise NotImplementedError(f"{num_nodes} nodes of depth {depth}; at most {MAX_NODES} fit")
    shape = Walk(num_nodes=num_nodes, depth=depth)

    def body(*refs: Any) -> None:
        function = functools.partial(_call, walk, shape)
        simt.run(function, [(ref, INT) for ref in refs], [lax.axis_index("b")])

    path_BT, accepted_B = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((batch, depth + 1), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)),
        grid=(batch,),
        grid_names=("b",),
        scratch_types=[plgpu.SMEM((size,), jnp.int32) for size in (num_nodes, num_nodes, depth + 1, 1)],
        **simt.options("accept_path", shape.num_threads),
    )(token_BN, parent_BN, depth_BN, count_B, drawn_BN)
    return path_BT, accepted_B


def _call(function: Any, shape: Any, t: Any, *args: Any) -> None:
    function(t, shape, *args)


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Static shape: arrays of ``num_slots`` rows of ``words`` int32, ``width`` of which a thread moves at a time."""

    num_slots: int
    num_rows: int
    num_moved: int
    words: int
    width: int
    num_threads: int


def move_rows(t: Any, shape: Move, sequence: Any, rows: Any, slots: Any, index: Any, length: Any, count: Any) -> None:
    """Copies rows index[b, i] to slots length[b] + i for i below count[b], as far as there are slots."""
    per_row = shape.words // shape.width
    first, num = t.load(length, sequence), t.load(count, sequence)
    for turn in range(-(-shape.num_moved * per_row // shape.num_threads)):
        place = t.thread() + turn * shape.num_threads
        # Rows have few, known widths: the division is one by a constant.
        row = t.divide(place, per_row)
        with t.when((row < num) & (row < shape.num_moved) & (first + row < shape.num_slots)):
            column = (place - row * per_row) * shape.width
            source = sequence * shape.num_rows + t.load(index, sequence * shape.num_moved + row)
            values = t.load_vector(rows, source * shape.words + column, shape.width)
            t.store_vector(slots, (sequence * shape.num_slots + first + row) * shape.words + column, values)


def commit_rows(
    slots: Sequence[Array],
    rows: Sequence[Array],
    index_BT: Int32[Array, "B T"],
    length_B: Int32[Array, "B"],
    count_B: Int32[Array, "B"],
) -> list[Array]:
    """Arrays [B, S, ...] with rows ``index_BT`` of [B, N, ...] at slots ``length_B``, ``length_B + 1``, ...

    Of each sequence the first ``count_B`` rows are written, as far as there are slots. Arrays are updated in place: a loop
    that carries them copies none. Those of one shape and type share a launch.

    Raises:
      NotImplementedError: for rows that are not whole words, or whose type is not that of the array.
    """
    updated = list(slots)
    groups: dict[tuple, list[int]] = {}
    for i, (to, of) in enumerate(zip(slots, rows, strict=True)):
        if to.dtype != of.dtype:
            raise NotImplementedError(f"rows of {of.dtype} for slots of {to.dtype}")
        groups.setdefault((to.shape, of.shape, to.dtype), []).append(i)
    for members in groups.values():
        moved = _commit_group([slots[i] for i in members], [rows[i] for i in members], index_BT, length_B, count_B)
        for i, array in zip(members, moved, strict=True):
            updated[i] = array
    return updated


def _commit_group(
    slots: list[Array], rows: list[Array], index_BT: Array, length_B: Array, count_B: Array
) -> list[Array]:
    batch, num_slots, *row_shape = slots[0].shape
    row_bytes = math.prod(row_shape) * slots[0].dtype.itemsize
    if row_bytes % 4:
        raise NotImplementedError(f"rows of {row_bytes} bytes; a multiple of 4 is needed")
    words = row_bytes // 4
    shape = Move(
        num_slots=num_slots,
        num_rows=rows[0].shape[1],
        num_moved=index_BT.shape[1],
        words=words,
        width=next(width for width in (4, 2, 1) if words % width == 0),
        num_threads=_MOVE_THREADS,
    )

    def body(*refs: Any) -> None:
        numbers, of, to = refs[:3], refs[3 : 3 + len(rows)], refs[3 + len(rows) :]
        simt.run(functools.partial(_move, shape), [(ref, INT) for ref in (*numbers, *of, *to)], _block())

    to = [jax.new_ref(array) for array in slots]
    plgpu.kernel(
        body,
        grid=(len(slots), batch),
        grid_names=("array", "b"),
        **simt.options("commit_rows", shape.num_threads),
    )(index_BT, length_B, count_B, *rows, *to)
    return [jax.freeze(ref) for ref in to]


def _block() -> list[Array]:
    return [lax.axis_index("array"), lax.axis_index("b")]


def _move(shape: Move, t: Any, array: Any, sequence: Any, index: Any, length: Any, count: Any, *memories: Any) -> None:
    """The block's own array among those that it is given."""
    half = len(memories) // 2
    rows, slots = (t.pick(array, memories[part]) for part in (slice(half), slice(half, None)))
    move_rows(t, shape, sequence, rows, slots, index, length, count)
