"""Trees equal the reference heap in set, order and parents; masks are ancestors; the walk follows what was drawn."""

import functools
import heapq
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import sampling, tree


def build(logits_LV: np.ndarray, budget: int, num_nodes: int, num_candidates: int | None = None) -> tree.Tree:
    num_candidates = num_candidates or min(num_nodes - 1, logits_LV.shape[1])
    return _build(jnp.asarray(logits_LV)[None], jnp.int32(budget), num_nodes, num_candidates)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _build(logits_BLV: jax.Array, budget: jax.Array, num_nodes: int, num_candidates: int) -> tree.Tree:
    return tree.expand(jnp.array([7]), *sampling.best(logits_BLV, num_candidates), budget, num_nodes)


def nodes_of(built: tree.Tree) -> tuple[list[int], list[int], list[int]]:
    nodes = slice(1, np.asarray(built.count_B)[0])
    token_N, depth_N, parent_N = (np.asarray(column)[0] for column in (built.token_BN, built.depth_BN, built.parent_BN))
    return token_N[nodes].tolist(), depth_N[nodes].tolist(), parent_N[nodes].tolist()


def scores_of(logits_LV: np.ndarray, tokens: list[int], depths: list[int], parents: list[int]) -> np.ndarray:
    """Log-probability of each node's path, in float64."""
    logits_LV = logits_LV.astype(np.float64)
    logp_LV = logits_LV - np.log(np.sum(np.exp(logits_LV - logits_LV.max(1, keepdims=True)), 1, keepdims=True))
    logp_LV -= logits_LV.max(1, keepdims=True)
    scores = [0.0]
    for token, depth, parent in zip(tokens, depths, parents, strict=True):
        scores.append(scores[parent] + logp_LV[depth - 1, token])
    return np.array(scores[1:])


def heap_tree(logp_LK: np.ndarray, budget: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Best-first search with a heap, in float64: rank paths in the order taken, and each one's parent node."""
    heap, taken, parents = [(-float(logp_LK[0, 0]), (0,), 0)], [], []
    while heap and len(taken) < budget:
        cost, path, parent = heapq.heappop(heap)
        taken.append(path)
        parents.append(parent)
        depth, rank = len(path), path[-1]
        if rank + 1 < logp_LK.shape[1]:
            step = float(logp_LK[depth - 1, rank]) - float(logp_LK[depth - 1, rank + 1])
            heapq.heappush(heap, (cost + step, (*path[:-1], rank + 1), parent))
        if depth < logp_LK.shape[0]:
            heapq.heappush(heap, (cost - float(logp_LK[depth, 0]), (*path, 0), len(taken)))
    return taken, parents


def test_golden_trees(golden):
    with np.load(golden / "ddtree_trees.npz") as file:
        arrays = dict(file)
    compared = 0
    for facts in json.loads((golden / "ddtree_trees.json").read_text()):
        name, budget = f"c{facts['case']:02}", facts["budget"]
        logits_LV = arrays[f"{name}_logits"]
        # One program a depth, not one a case: room for the largest tree, and tokens that cannot be.
        if budget <= logits_LV.shape[1]:
            logits_LV = np.pad(logits_LV, ((0, 0), (0, 2000 - logits_LV.shape[1])), constant_values=-np.inf)
        built = build(logits_LV, budget, 129)
        tokens, depths, parents = nodes_of(built)
        assert depths == arrays[f"{name}_depths"].tolist(), name
        assert parents == arrays[f"{name}_parents"][1:].tolist(), name
        if not facts["exact_ties"]:
            assert tokens == arrays[f"{name}_tokens"].tolist(), name
        np.testing.assert_allclose(
            np.sort(scores_of(arrays[f"{name}_logits"], tokens, depths, parents)),
            np.sort(arrays.get(f"{name}_node_logprob", np.zeros(0))),
            atol=1e-4,
            err_msg=name,
        )
        visible = arrays[f"{name}_visibility"]
        visible_Nn = np.asarray(built.visible_BNn)[0, : len(visible), : len(visible)]
        np.testing.assert_array_equal(visible_Nn, visible, err_msg=name)
        compared += 1
    assert compared == 40


@pytest.mark.parametrize("levels", [None, 2, 5])
@pytest.mark.parametrize(
    ("depth", "vocab", "budget", "num_nodes"), [(7, 29, 15, 16), (3, 5, 13, 32), (1, 3, 7, 8), (5, 2, 40, 64)]
)
def test_equals_heap(levels, depth, vocab, budget, num_nodes):
    """Random log-probabilities; with `levels` they take few values, so that most scores are exactly equal."""
    expand = jax.jit(tree.expand, static_argnums=4)
    for seed in range(25):
        random = np.random.default_rng(seed)
        logp_LK = -np.sort(random.exponential(size=(depth, min(vocab, num_nodes - 1))).astype(np.float32), axis=1)
        if levels:
            logp_LK = np.round(logp_LK * levels) / levels
        token_LK = np.argsort(random.random((depth, vocab)), axis=1)[:, : logp_LK.shape[1]].astype(np.int32)
        built = expand(
            jnp.array([3]), jnp.asarray(token_LK)[None], jnp.asarray(logp_LK)[None], jnp.int32(budget), num_nodes
        )
        paths, parents = heap_tree(logp_LK, budget)
        tokens, depths, built_parents = nodes_of(built)
        assert built_parents == parents
        assert depths == [len(path) for path in paths]
        assert tokens == [token_LK[len(path) - 1, path[-1]] for path in paths]


def test_smaller_budget_is_a_prefix():
    logits_LV = np.random.default_rng(1).normal(size=(7, 53)).astype(np.float32)
    whole = nodes_of(build(logits_LV, 31, 32))
    for budget in (0, 1, 6, 30):
        assert nodes_of(build(logits_LV, budget, 32)) == tuple(column[:budget] for column in whole)


def test_one_candidate_a_depth_is_the_chain_of_best_tokens():
    logits_LV = np.random.default_rng(2).normal(size=(7, 53)).astype(np.float32)
    tokens, depths, parents = nodes_of(build(logits_LV, 7, 8, num_candidates=1))
    assert tokens == logits_LV.argmax(axis=1).tolist()
    assert depths == list(range(1, 8))
    assert parents == list(range(7))


def test_equal_logits_go_by_lower_id():
    tokens, _, _ = nodes_of(build(np.zeros((1, 11), np.float32), 5, 6))
    assert tokens == [0, 1, 2, 3, 4]


def test_mask_is_self_and_ancestors_and_padding_sees_itself_alone():
    logits_LV = np.random.default_rng(3).normal(size=(5, 17)).astype(np.float32)
    built = build(logits_LV, 9, 16)
    parents = np.asarray(built.parent_BN[0])
    for node in range(16):
        expected, ancestor = {node}, node
        while 0 < ancestor < 10:
            ancestor = int(parents[ancestor])
            expected.add(ancestor)
        assert set(np.flatnonzero(built.visible_BNn[0, node])) == expected


def test_walk_follows_the_drawn_tokens():
    """The path is what a dictionary of children gives, for random draws that often hit a child."""
    for seed in range(50):
        random = np.random.default_rng(seed)
        built = build(random.normal(size=(4, 5)).astype(np.float32), 11, 16)
        drawn = random.integers(0, 5, 16).astype(np.int32)
        path_BT, count_B = tree.walk(built, jnp.asarray(drawn)[None], 4)
        children = {(int(built.parent_BN[0, node]), int(built.token_BN[0, node])): node for node in range(1, 12)}
        expected = [0]
        while (expected[-1], int(drawn[expected[-1]])) in children:
            expected.append(children[expected[-1], int(drawn[expected[-1]])])
        assert np.asarray(path_BT[0, : int(count_B[0])]).tolist() == expected


def test_padding_is_never_accepted():
    """Padding nodes hold token 0 and point to the root: drawing token 0 at the root must not select one of them."""
    built = build(np.array([[0.0, 3.0, 2.0, 1.0]], np.float32), 2, 8)
    _, count_B = tree.walk(built, jnp.zeros((1, 8), jnp.int32), 1)
    assert int(count_B[0]) == 1
