"""Accept and commit: the kernels' code run on numpy against `tree.walk` and `cache`, lowered, and no copy of a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simt_numpy import Memory, NumpyThreads, shared

from ddtree_jax import cache, tree
from ddtree_jax.pallas import commit
from ddtree_jax.pallas.commit import Move, Walk, move_rows, walk


def random_tree(rng: np.random.Generator, batch: int, num_nodes: int, depth: int, vocab: int) -> tree.Tree:
    """Siblings differ in their tokens; each sequence has a number of nodes of its own, the others are padding."""
    token, parent, level = (np.zeros((batch, num_nodes), np.int32) for _ in range(3))
    count = rng.integers(1, num_nodes + 1, batch).astype(np.int32)
    for b in range(batch):
        taken, node = set(), 1
        while node < count[b]:
            above, drawn = rng.integers(0, node), rng.integers(0, vocab)
            if level[b, above] < depth and (above, drawn) not in taken:
                taken.add((above, drawn))
                parent[b, node], token[b, node], level[b, node] = above, drawn, level[b, above] + 1
                node += 1
            elif len(taken) == vocab:  # Hardly any place is left.
                count[b] = node
    arrays = (jnp.asarray(x) for x in (token, parent, level, count))
    fields = dict(zip(("token_BN", "parent_BN", "depth_BN", "count_B"), arrays, strict=True))
    return tree.Tree(**fields, visible_BNn=jnp.zeros((batch, num_nodes, num_nodes), bool))


def run_walk(built: tree.Tree, drawn: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
    batch, num_nodes = drawn.shape
    shape = Walk(num_nodes=num_nodes, depth=depth)
    inputs = [
        np.asarray(x).reshape(-1) for x in (built.token_BN, built.parent_BN, built.depth_BN, built.count_B, drawn)
    ]
    path, accepted = shared(batch * (depth + 1), np.int32), shared(batch, np.int32)
    for b in range(batch):
        threads = NumpyThreads(shape.num_threads)
        memory = [shared(size, np.int32) for size in (num_nodes, num_nodes, depth + 1, 1)]
        walk(threads, shape, threads.value(np.int32, b), *map(Memory, inputs), path, accepted, *memory)
    return path.array.reshape(batch, -1), accepted.array


SIZES = [(16, 7, 3), (64, 7, 5), (257, 16, 7), (9, 8, 2), (2, 1, 2), (1, 1, 2)]


@pytest.mark.parametrize(("num_nodes", "depth", "vocab"), SIZES)
def test_walk(num_nodes, depth, vocab):
    rng = np.random.default_rng(num_nodes)
    lengths = []
    for _ in range(8):
        built = random_tree(rng, 3, num_nodes, depth, vocab)
        # Half of the nodes draw a child, if there is one.
        drawn = rng.integers(0, vocab, (3, num_nodes)).astype(np.int32)
        for b, node in np.ndindex(3, num_nodes):
            children = np.flatnonzero((np.asarray(built.parent_BN[b]) == node) & (np.asarray(built.depth_BN[b]) > 0))
            if children.size and rng.random() < 0.7:
                drawn[b, node] = built.token_BN[b, rng.choice(children)]
        path, accepted = run_walk(built, drawn, depth)
        expected_path, expected = tree.walk_reference(built, jnp.asarray(drawn), depth)
        np.testing.assert_array_equal(path, expected_path)
        np.testing.assert_array_equal(accepted, expected)
        lengths += accepted.tolist()
    assert num_nodes < 9 or max(lengths) > 3


def test_padding_is_never_accepted():
    """Padding nodes hold token 0 and point to the root."""
    built = random_tree(np.random.default_rng(0), 1, 8, 1, 3)
    zeros = jnp.zeros((1, 8), jnp.int32)
    built = tree.Tree(
        token_BN=zeros, parent_BN=zeros, depth_BN=zeros, count_B=jnp.array([1]), visible_BNn=built.visible_BNn
    )
    assert run_walk(built, np.zeros((1, 8), np.int32), 1)[1].tolist() == [1]


@pytest.mark.parametrize(("row_shape", "dtype"), [((36,), jnp.bfloat16), ((5, 3), jnp.float32), ((6,), jnp.bfloat16)])
def test_rows_move(row_shape, dtype):
    """Against `take_rows` and `append`; the last sequence's rows do not all fit behind its prefix."""
    rng = np.random.default_rng(1)
    batch, num_slots, num_rows, num_moved = 3, 23, 11, 5
    slots, rows = (
        np.asarray(jnp.asarray(rng.normal(size=(batch, size, *row_shape)), dtype)) for size in (num_slots, num_rows)
    )
    index = rng.integers(0, num_rows, (batch, num_moved)).astype(np.int32)
    length, count = np.array([0, 7, 21], np.int32), np.array([5, 0, 4], np.int32)
    taken = cache.take_rows(jnp.asarray(rows), jnp.asarray(index))
    expected = cache.append(jnp.asarray(slots), taken, jnp.asarray(length), jnp.asarray(count))
    words = int(np.prod(row_shape)) * slots.dtype.itemsize // 4
    width = next(width for width in (4, 2, 1) if words % width == 0)
    shape = Move(num_slots=num_slots, num_rows=num_rows, num_moved=num_moved, words=words, width=width, num_threads=128)
    source, target = (Memory(x.copy().view(np.int32).reshape(-1)) for x in (rows, slots))
    for b in range(batch):
        threads = NumpyThreads(128)
        numbers = (Memory(x.reshape(-1)) for x in (index, length, count))
        move_rows(threads, shape, threads.value(np.int32, b), source, target, *numbers)
    moved = target.array.view(slots.dtype).reshape(slots.shape)
    np.testing.assert_array_equal(moved.view(np.int16), np.asarray(expected).view(np.int16))


def test_kernels_lower_for_a_gpu():
    def commit_all(slots, rows, nodes, drawn, length):
        path_BT, accepted_B = commit.accept_path(*nodes, drawn, 7)
        return commit.commit_rows(slots, rows, path_BT, length, accepted_B)

    def like(*shape: int, dtype: type = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    slots = [like(2, 4096, 576, dtype=jnp.bfloat16)] * 61 + [like(2, 4096, 2, 64, dtype=jnp.bfloat16)] * 3
    rows = [like(2, 16, *x.shape[2:], dtype=x.dtype) for x in slots]
    nodes = (*[like(2, 16)] * 3, like(2))
    traced = jax.jit(commit_all, donate_argnums=0).trace(slots, rows, nodes, like(2, 16), like(2))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("accept_path") and text.count("commit_rows")
    assert [x.shape for x in traced.out_info] == [x.shape for x in slots]


def test_unsupported_input_is_named():
    one = jnp.zeros(1, jnp.int32)
    index = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(NotImplementedError, match="6 bytes"):
        commit.commit_rows([jnp.zeros((1, 4, 3), jnp.bfloat16)], [jnp.zeros((1, 2, 3), jnp.bfloat16)], index, one, one)
    with pytest.raises(NotImplementedError, match="float32 for slots of bfloat16"):
        commit.commit_rows([jnp.zeros((1, 4, 4), jnp.bfloat16)], [jnp.zeros((1, 2, 4))], index, one, one)
    nodes = jnp.zeros((1, 1025), jnp.int32)
    with pytest.raises(NotImplementedError, match="1025 nodes"):
        commit.accept_path(nodes, nodes, nodes, one, nodes, 7)
