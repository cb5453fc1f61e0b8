"""From draft logits to a tree: the kernels' code run on numpy, against sorting and the reference, and lowered for a GPU."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simt_numpy import Memory, NumpyThreads, shared

from ddtree_jax import tree
from ddtree_jax.pallas import simt, tree_expand
from ddtree_jax.pallas.tree_expand_grow import Growth, grow, write_tree
from ddtree_jax.pallas.tree_expand_merge import Lists, merge_rows
from ddtree_jax.pallas.tree_expand_top import Piece, select_top


def run_top(logits_RV: np.ndarray, piece: Piece, first_id: int = 0) -> tuple[np.ndarray, ...]:
    """Ids, logits [R, C, K] and log-sum-exps [R, C]."""
    shape = (len(logits_RV), piece.num_pieces, piece.num_best)
    logit, token, lse = (
        shared(np.prod(shape), np.float32),
        shared(np.prod(shape), np.int32),
        shared(shape[0] * shape[1], np.float32),
    )
    for row in range(shape[0]):
        for index in range(shape[1]):
            threads = NumpyThreads(piece.num_threads)
            select_top(
                threads,
                piece,
                *(threads.value(np.int32, number) for number in (row, index, first_id)),
                Memory(logits_RV.reshape(-1)),
                logit,
                token,
                lse,
                shared(piece.num_groups, np.uint64),
                shared(piece.num_survivors, np.uint64),
                shared(2, np.uint64),
                shared(piece.num_threads // 32, np.float32),
                shared(1, np.int32),
            )
    return token.array.reshape(shape), logit.array.reshape(shape), lse.array.reshape(shape[:2])


@np.errstate(invalid="ignore")
def run_expand(
    token_LCK: np.ndarray,
    logit_LCK: np.ndarray,
    lse_LC: np.ndarray,
    budget: int,
    num_nodes: int,
    num_threads: int = 256,
) -> tuple[tree.Tree, np.ndarray]:
    """The tree behind root 7 at position 100, and the positions."""
    depth, num_pieces, num_candidates = token_LCK.shape
    lists = Lists(depth=depth, num_pieces=num_pieces, num_candidates=num_candidates, num_threads=num_threads)
    growth = Growth(depth=depth, num_candidates=num_candidates, stride=lists.stride, num_nodes=num_nodes)
    outs = [shared(num_nodes, np.int32) for _ in range(4)] + [shared(1, np.int32)]
    outs.append(shared(num_nodes * growth.mask_words, np.int32))
    logp, token = shared(depth * lists.stride, np.float32), shared(depth * lists.stride, np.int32)
    keys = shared(depth * lists.warps_a_row * lists.stride, np.uint64)
    inputs = [Memory(np.asarray(x, np.int32)) for x in ([7], [100], [budget])]
    candidates = [Memory(x.reshape(-1)) for x in (logit_LCK, token_LCK, lse_LC)]
    threads = NumpyThreads(num_threads)
    sequence = threads.value(np.int32, 0)
    merge_rows(threads, lists, sequence, *candidates, keys, logp, token)
    records, count = shared(num_nodes, np.int32), shared(1, np.int32)
    with threads.when(threads.thread() < 32):
        grow(threads, growth, inputs[2], logp, records, count)
    threads.barrier()
    write_tree(threads, growth, sequence, *inputs[:2], token, records, count, outs)
    nodes = [jnp.asarray(out.array)[None] for out in outs[:3]]
    words = outs[5].array.reshape(num_nodes, -1).view(np.uint32)
    visible = words[:, np.arange(num_nodes) // 32] >> np.arange(num_nodes) % 32 & 1
    built = tree.Tree(
        token_BN=nodes[0],
        parent_BN=nodes[1],
        depth_BN=nodes[2],
        count_B=jnp.asarray(outs[4].array),
        visible_BNn=jnp.asarray(visible[None] != 0),
    )
    return built, outs[3].array


def split_lists(token_LK: np.ndarray, logp_LK: np.ndarray, num_pieces: int, seed: int) -> tuple[np.ndarray, ...]:
    """Candidates dealt out to pieces at random; what a piece lacks is absent."""
    depth, num_candidates = token_LK.shape
    random = np.random.default_rng(seed)
    token = np.full((depth, num_pieces, num_candidates), -1, np.int32)
    logit = np.full(token.shape, -np.inf, np.float32)
    for level in range(depth):
        owner = random.integers(0, num_pieces, num_candidates)
        for piece in range(num_pieces):
            mine = owner == piece
            token[level, piece, : mine.sum()], logit[level, piece, : mine.sum()] = (
                token_LK[level, mine],
                logp_LK[level, mine],
            )
    lse = np.where(np.arange(num_pieces) == seed % num_pieces, 0, -np.inf).astype(np.float32)
    return token, logit, np.tile(lse, (depth, 1))


def assert_same_tree(built: tree.Tree, expected: tree.Tree, name: object = "") -> None:
    for field in ("count_B", "depth_BN", "parent_BN", "token_BN", "visible_BNn"):
        np.testing.assert_array_equal(getattr(built, field), getattr(expected, field), err_msg=f"{name} {field}")


EXPAND = jax.jit(tree.expand_reference, static_argnums=4)


def expected_tree(token_LK: np.ndarray, logp_LK: np.ndarray, budget: int, num_nodes: int) -> tree.Tree:
    arrays = jnp.asarray(token_LK)[None], jnp.asarray(logp_LK)[None]
    return EXPAND(jnp.array([7]), *arrays, jnp.int32(budget), num_nodes)


def draw_logits(kind: str, num_rows: int, vocab: int) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(num_rows, vocab)).astype(np.float32) * 5
    if kind == "rounded":
        return np.round(x)  # Both zeros occur.
    if kind == "impossible":
        x[:] = -np.inf
        x[0, vocab // 2] = 1
    if kind == "spread":  # The best columns lie in a group of threads each.
        x[:] = np.where(np.arange(vocab) % 16 == 3, 9, 0) - np.arange(vocab) / np.float32(1000)
    if kind == "falling":
        return -np.sort(-x, axis=1)
    return np.zeros_like(x) if kind == "equal" else x


@pytest.mark.parametrize("kind", ["rounded", "impossible", "falling", "spread", "equal"])
@pytest.mark.parametrize(
    ("vocab", "num_best", "num_threads", "vectors", "width"),
    [
        (1000, 15, 128, 1, 4),
        (1000, 63, 128, 2, 4),
        (997, 15, 128, 1, 1),
        (1, 1, 128, 1, 1),
        (20, 15, 128, 1, 4),
        (1022, 64, 256, 1, 2),
        (3000, 256, 512, 2, 4),
    ],
)
def test_best_of_pieces(kind, vocab, num_best, num_threads, vectors, width):
    piece = Piece(num_columns=vocab, num_best=num_best, num_threads=num_threads, vectors=vectors, width=width)
    logits_RV = draw_logits(kind, 2, vocab)
    token, logit, lse = run_top(logits_RV, piece, first_id=1000)
    for row, index in np.ndindex(*lse.shape):
        start = index * piece.columns
        part = logits_RV[row, start : start + piece.columns]
        best = np.argsort(-part, kind="stable")[:num_best]
        np.testing.assert_array_equal(token[row, index, : len(best)], best + start + 1000)
        np.testing.assert_array_equal(logit[row, index, : len(best)], part[best])
        assert (token[row, index, len(best) :] == -1).all()
        exact = np.logaddexp.reduce(part.astype(np.float64))
        np.testing.assert_allclose(lse[row, index], exact, rtol=3e-7, atol=1e-6)


SHAPES = [
    # depth, candidates, budget, nodes, pieces, threads: candidates below, at and above the budget
    (7, 15, 15, 16, 1, 256),
    (7, 31, 20, 32, 4, 256),
    (7, 63, 63, 64, 8, 1024),
    (3, 5, 13, 32, 2, 128),
    (16, 10, 40, 64, 3, 512),
    (1, 3, 7, 8, 3, 128),
    (8, 70, 100, 129, 5, 512),
    (5, 2, 40, 64, 2, 256),
    (1, 1, 1, 2, 1, 128),
    (15, 4, 20, 21, 3, 512),
]


@pytest.mark.parametrize("kind", [2, "impossible", "equal"])
@pytest.mark.parametrize(("depth", "num_candidates", "budget", "num_nodes", "num_pieces", "num_threads"), SHAPES)
def test_trees_equal_the_reference(kind, depth, num_candidates, budget, num_nodes, num_pieces, num_threads):
    """A number of levels makes most scores exactly equal."""
    random = np.random.default_rng(depth)
    logp_LK = -np.sort(random.exponential(size=(depth, num_candidates)).astype(np.float32), axis=1)
    if kind == "impossible":
        logp_LK[:, num_candidates // 2 :] = -np.inf
        logp_LK[depth // 2] = -np.inf
    elif kind == "equal":
        logp_LK[:] = 0
    elif kind:
        logp_LK = np.round(logp_LK * kind) / np.float32(kind)
    token_LK = np.sort(random.permuted(np.tile(np.arange(999, dtype=np.int32), (depth, 1)), axis=1)[:, :num_candidates])
    lists = split_lists(token_LK, logp_LK, num_pieces, depth)
    built, position_N = run_expand(*lists, budget, num_nodes, num_threads)
    assert_same_tree(built, expected_tree(token_LK, logp_LK, budget, num_nodes))
    np.testing.assert_array_equal(position_N, 100 + np.asarray(built.depth_BN[0]))


def test_largest_tree():
    """Ranks up to 255 at one depth, paths of 16 ranks, eight nodes a lane."""
    random = np.random.default_rng(0)
    logp_LK = -np.sort(random.exponential(size=(16, 256)).astype(np.float32), axis=1)
    logp_LK[1:] -= 100  # So that all nodes are children of the root.
    token_LK = np.tile(np.arange(256, dtype=np.int32), (16, 1))
    built, _ = run_expand(*split_lists(token_LK, logp_LK, 2, 0), 256, 257, 512)
    assert_same_tree(built, expected_tree(token_LK, logp_LK, 256, 257))
    assert int(built.depth_BN.sum()) == 256


def test_pieces_have_one_log_sum_exp():
    """Rows split over pieces give the tree of whole rows: the log-sum-exps add up."""
    logits_LV = np.random.default_rng(5).normal(size=(4, 600)).astype(np.float32) * 3
    trees = []
    for width, num_pieces in ((2, 3), (4, 2)):
        piece = Piece(num_columns=600, num_best=15, num_threads=128, vectors=1, width=width)
        assert piece.num_pieces == num_pieces
        token, logit, lse = run_top(logits_LV, piece)
        trees.append(run_expand(token, logit, lse, 15, 16)[0])
    assert_same_tree(*trees)
    logp_LV = np.asarray(jax.nn.log_softmax(jnp.asarray(logits_LV)))
    order_LK = np.argsort(-logits_LV, axis=1, kind="stable")[:, :15].astype(np.int32)
    assert_same_tree(trees[0], expected_tree(order_LK, np.take_along_axis(logp_LV, order_LK, 1), 15, 16))


def test_golden_trees(golden):
    with np.load(golden / "ddtree_trees.npz") as file:
        arrays = dict(file)
    compared = 0
    for facts in json.loads((golden / "ddtree_trees.json").read_text()):
        name, budget = f"c{facts['case']:02}", facts["budget"]
        if budget == 0:
            continue
        logits_LV = arrays[f"{name}_logits"]
        vocab = logits_LV.shape[1]
        width = next(width for width in (4, 2, 1) if vocab % width == 0)
        num_best = min(budget, vocab)
        piece = Piece(num_columns=vocab, num_best=num_best, num_threads=256, vectors=4 // width, width=width)
        token, logit, lse = run_top(logits_LV, piece)
        built, _ = run_expand(token, logit, lse, budget, budget + 1)
        count = int(built.count_B[0])
        assert np.asarray(built.depth_BN[0, 1:count]).tolist() == arrays[f"{name}_depths"].tolist(), name
        assert np.asarray(built.parent_BN[0, :count]).tolist() == [0, *arrays[f"{name}_parents"][1:].tolist()], name
        if not facts["exact_ties"]:
            assert np.asarray(built.token_BN[0, 1:count]).tolist() == arrays[f"{name}_tokens"].tolist(), name
        visible = arrays[f"{name}_visibility"]
        np.testing.assert_array_equal(built.visible_BNn[0, : len(visible), : len(visible)], visible, err_msg=name)
        compared += 1
    assert compared >= 35


def candidates_like(depth: int, num_pieces: int, num_candidates: int) -> tree_expand.Candidates:
    lists = (1, depth, num_pieces, num_candidates)
    kinds = ((lists, jnp.float32), (lists, jnp.int32), (lists[:3], jnp.float32))
    return tree_expand.Candidates(*(jax.ShapeDtypeStruct(*kind) for kind in kinds))


def from_logits(logits_BLV: jax.Array, budget: jax.Array, num_nodes: int) -> tree_expand.Expansion:
    candidates = tree_expand.top_candidates(logits_BLV, min(num_nodes - 1, logits_BLV.shape[2]), jnp.int32(0))
    zeros_B = jnp.zeros(len(logits_BLV), jnp.int32)
    return tree_expand.expand_tree(zeros_B, zeros_B, candidates, budget, num_nodes)


@pytest.mark.parametrize(
    ("batch", "depth", "vocab", "num_nodes"),
    [(1, 7, 163_840, 16), (1, 7, 163_840, 64), (1, 7, 20_480, 32), (2, 16, 30_001, 257), (1, 1, 1, 2)],
)
def test_kernels_lower_for_a_gpu(batch, depth, vocab, num_nodes):
    arrays = jax.ShapeDtypeStruct((batch, depth, vocab), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    traced = jax.jit(functools.partial(from_logits, num_nodes=num_nodes)).trace(*arrays)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("tree_expand_top") and lowered.count("tree_expand_grow")
    shapes = [x.shape for x in traced.out_info]
    assert shapes == [(batch, num_nodes)] * 4 + [(batch,), (batch, num_nodes, -(-num_nodes // 32))]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: top(jnp.zeros((1, 2, 8), jnp.bfloat16), 3), "bfloat16"),
        (lambda: top(jnp.zeros((1, 2, 999)), 257), "257 candidates"),
        (lambda: top(jnp.zeros((1, 1, 32 * 10_240 + 4)), 3), "327684 columns"),
        (lambda: expand_abstract(candidates_like(17, 1, 4), 5), "17 rows"),
        (lambda: expand_abstract(candidates_like(2, 33, 4), 5), "33 pieces"),
        (lambda: expand_abstract(candidates_like(2, 1, 4), 258), "257 nodes"),
        (lambda: expand_abstract(candidates_like(2, 1, 4), 1), "0 nodes"),
        (lambda: expand_abstract(candidates_like(2, 1, 257), 5), "257 candidates"),
    ],
)
def test_unsupported_input_is_named(call, named):
    with pytest.raises(NotImplementedError, match=named):
        call()


def top(logits_BLV: jax.Array, num_candidates: int) -> None:
    jax.eval_shape(
        functools.partial(tree_expand.top_candidates, num_candidates=num_candidates), logits_BLV, first_id=jnp.int32(0)
    )


def expand_abstract(candidates: tree_expand.Candidates, num_nodes: int) -> None:
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    call = functools.partial(tree_expand.expand_tree, num_nodes=num_nodes)
    jax.eval_shape(call, one, one, candidates, jax.ShapeDtypeStruct((), jnp.int32))


def test_numpy_has_what_a_gpu_has():
    def methods(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert methods(NumpyThreads) == methods(simt.Threads)


def exchange(t, memory, meet) -> np.ndarray:
    t.store(memory, t.thread(), t.thread())
    meet()
    return t.load(memory, t.thread() ^ 33)


def test_races_are_found():
    t = NumpyThreads(128)
    np.testing.assert_array_equal(exchange(t, shared(128, np.int32), t.barrier), np.arange(128) ^ 33)
    for meet in (t.warp_barrier, lambda: None):
        with pytest.raises(AssertionError, match="read"):
            exchange(t, shared(128, np.int32), meet)
    memory = shared(128, np.int32)
    exchange(t, memory, t.barrier)
    with pytest.raises(AssertionError, match="overwrite"):
        t.store(memory, t.thread(), 0)
    with pytest.raises(AssertionError, match="two threads"):
        t.store(shared(1, np.int32), t.value(np.dtype("int32"), 0), 0)
    with pytest.raises(AssertionError, match="lanes"), t.when(t.thread() < 5):
        t.shuffle_xor(t.thread(), 1)
