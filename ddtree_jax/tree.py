"""Draft trees: best-first expansion of a factorised draft, ancestor masks, and the walk along what the target drew.

::

    node     0 (root)                 ranks are positions in a depth's candidates, best first;
            / \\                       a node's score is the sum of its path's log-probabilities
           1   3        depth 1       nodes are numbered in the order of falling scores
          / \\   \\
         2   5   4      depth 2       visible[5] = {0, 1, 5}
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from ddtree_jax.pallas import commit, simt, tree_expand
from ddtree_jax.vocabulary import Shard

# Stands for a log-probability of -inf, so that sums stay ordered and finite.
_IMPOSSIBLE = -1e30
# Stands for the cost of a prefix that there is not: greater than all sums of those, and stays what it is in a sum.
_NOWHERE = 2.0**127
# Ranks are below 511.
_RANK_BITS, _RANKS_A_WORD = 9, 3


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Tree:
    """N nodes a sequence, of which the first ``count_B`` exist; node 0 is the root.

    The others hold token 0, depth 0 and parent 0, and see only themselves. The root's parent is the root.
    """

    token_BN: Int32[Array, "B N"]
    parent_BN: Int32[Array, "B N"]
    depth_BN: Int32[Array, "B N"]
    count_B: Int32[Array, "B"]
    visible_BNn: Bool[Array, "B N N"]


def root_only(root_B: Int32[Array, "B"]) -> Tree:
    """The tree of plain decoding."""
    zeros_BN = jnp.zeros((root_B.shape[0], 1), jnp.int32)
    ones_B = jnp.ones(root_B.shape, jnp.int32)
    return Tree(
        token_BN=root_B[:, None],
        parent_BN=zeros_BN,
        depth_BN=zeros_BN,
        count_B=ones_B,
        visible_BNn=jnp.ones((root_B.shape[0], 1, 1), bool),
    )


def grow(
    root_B: Int32[Array, "B"],
    logits_BLV: Float[Array, "B L V"],
    budget: Int32[Array, ""],
    num_nodes: int,
    num_candidates: int,
    shard: Shard = Shard(),
) -> Tree:
    """The tree of a draft's logits: `expand` on the ``num_candidates`` best tokens of each row.

    The logits may be those of a shard: its candidates and log-sum-exps are gathered, and every device grows the whole tree.
    """

    def by_kernels(root_B: Array, logits_BLV: Array, budget: Array) -> Tree:
        first_id = shard.first_id(logits_BLV.shape[-1])
        logit_BLCK, token_BLCK, lse_BLC = tree_expand.top_candidates(logits_BLV, num_candidates, first_id)
        logit_BLCK, token_BLCK, lse_BLC1 = shard.gather(logit_BLCK, token_BLCK, lse_BLC[..., None])
        candidates = tree_expand.Candidates(logit_BLCK, token_BLCK, lse_BLC1[..., 0])
        return _of_kernel(root_B, candidates, budget, num_nodes)

    def by_reference(root_B: Array, logits_BLV: Array, budget: Array) -> Tree:
        top_BLK, token_BLK, lse_BL1 = shard.top(jnp.where(logits_BLV == 0, 0.0, logits_BLV), num_candidates)
        return expand_reference(root_B, token_BLK, top_BLK - lse_BL1, budget, num_nodes)

    return simt.choose(by_kernels, by_reference, root_B, logits_BLV, budget, has_kernels=shard.has_kernels)


def expand(
    root_B: Int32[Array, "B"],
    token_BLK: Int32[Array, "B L K"],
    logp_BLK: Float[Array, "B L K"],
    budget: Int32[Array, ""],
    num_nodes: int,
) -> Tree:
    """The ``budget`` most probable prefixes under the product of the depths' marginals, in ``num_nodes`` places.

    Set, order and parents are those of the reference heap (liranringel/ddtree, ``build_ddtree_tree``): scores are summed
    without rounding, equal ones go by rank path. With one candidate a depth this is a chain. ``budget`` may be traced, at
    most ``num_nodes - 1``; where the candidates give fewer prefixes, the tree is smaller.
    """

    def by_kernel(root_B: Array, token_BLK: Array, logp_BLK: Array, budget: Array) -> Tree:
        lse_BLC = jnp.zeros((*logp_BLK.shape[:2], 1), jnp.float32)
        candidates = tree_expand.Candidates(logp_BLK[:, :, None], token_BLK[:, :, None], lse_BLC)
        return _of_kernel(root_B, candidates, budget, num_nodes)

    reference = functools.partial(expand_reference, num_nodes=num_nodes)
    return simt.choose(by_kernel, reference, root_B, token_BLK, logp_BLK, budget)


def _of_kernel(root_B: Array, candidates: tree_expand.Candidates, budget: Array, num_nodes: int) -> Tree:
    out = tree_expand.expand_tree(root_B, jnp.zeros_like(root_B), candidates, budget, num_nodes)
    node_N = jnp.arange(num_nodes, dtype=jnp.int32)
    bits_BNn = jax.lax.shift_right_logical(out.visible_BNw[:, :, node_N // 32], (node_N % 32)[None, None])
    return Tree(
        token_BN=out.token_BN,
        parent_BN=out.parent_BN,
        depth_BN=out.depth_BN,
        count_B=out.count_B,
        visible_BNn=(bits_BNn & 1) != 0,
    )


def expand_reference(
    root_B: Int32[Array, "B"],
    token_BLK: Int32[Array, "B L K"],
    logp_BLK: Float[Array, "B L K"],
    budget: Int32[Array, ""],
    num_nodes: int,
) -> Tree:
    """`expand` in plain JAX."""
    token_BN, parent_BN, depth_BN, count_B = jax.vmap(_expand_sequence, in_axes=(0, 0, 0, None, None))(
        root_B, token_BLK, logp_BLK, budget, num_nodes
    )
    return Tree(
        token_BN=token_BN,
        parent_BN=parent_BN,
        depth_BN=depth_BN,
        count_B=count_B,
        visible_BNn=_ancestors(parent_BN, depth_BN),
    )


class _Prefixes(NamedTuple):
    """Some prefixes: minus their scores, each an unevaluated sum of two float32, and their rank paths.

    A path is packed in words of three ranks, 1 added to each and 0 where it has ended, so that paths compare as words do.
    """

    high_N: Array
    low_N: Array
    path_WN: Array


def _expand_sequence(
    root_token: Array, token_LK: Array, logp_LK: Array, budget: Array, num_nodes: int
) -> tuple[Array, Array, Array, Array]:
    """Level by level: the best of depth d + 1 continue the best of depth d, so no heap is needed.

    If the i-th best of a depth with its k-th candidate is among the `limit` best of the next depth, so are all pairs of
    smaller i and k; hence only pairs with (i + 1)(k + 1) <= limit are looked at.
    """
    depth, num_candidates = logp_LK.shape
    limit = num_nodes - 1
    pairs = [(i, k) for i in range(limit) for k in range(min(num_candidates, limit // (i + 1)))]
    before_P, rank_P = jnp.array(pairs, jnp.int32).reshape(-1, 2).T
    # A row without any possible token has the logarithm of 0 / 0.
    cost_LK = -jnp.maximum(jnp.where(jnp.isnan(logp_LK), -jnp.inf, logp_LK), _IMPOSSIBLE)
    num_words = -(-depth // _RANKS_A_WORD)

    def deepen(state: _Prefixes, row: tuple[Array, Array, Array]) -> tuple[_Prefixes, tuple[_Prefixes, Array]]:
        level, token_K, cost_K = row
        high_P, low_P = _add(state.high_N[before_P], state.low_N[before_P], cost_K[rank_P])
        shift = _RANK_BITS * (_RANKS_A_WORD - 1 - level % _RANKS_A_WORD)
        is_word_W = jnp.arange(num_words, dtype=jnp.int32) == level // _RANKS_A_WORD
        path_WP = state.path_WN[:, before_P] + jnp.where(is_word_W[:, None], jnp.left_shift(rank_P + 1, shift)[None], 0)
        best, pair_N = _best_first(_Prefixes(high_P, low_P, path_WP), limit)
        parent_N = jnp.where(level == 0, -1, before_P[pair_N] + (level - 1) * limit)
        facts_FN = jnp.stack([token_K[rank_P[pair_N]], parent_N, jnp.broadcast_to(level + 1, parent_N.shape)])
        return best, (best, facts_FN)

    root = _Prefixes(
        jnp.where(jnp.arange(limit) > 0, _NOWHERE, 0.0), jnp.zeros(limit), jnp.zeros((num_words, limit), jnp.int32)
    )
    rows = jnp.arange(depth, dtype=jnp.int32), token_LK, cost_LK
    _, (levels, facts_LFN) = jax.lax.scan(deepen, root, rows)
    # Places are those in all levels, one behind the other; the root's is -1.
    prefixes = _Prefixes(
        levels.high_N.ravel(), levels.low_N.ravel(), jnp.moveaxis(levels.path_WN, 0, 1).reshape(num_words, -1)
    )
    best, place_N = _best_first(prefixes, limit)
    node_N = jnp.arange(1, num_nodes, dtype=jnp.int32)
    node_of_C = jnp.zeros(depth * limit + 1, jnp.int32).at[place_N + 1].set(node_N)
    exists_N = (node_N <= budget) & (best.high_N < _NOWHERE)
    token_N, parent_N, depth_N = jnp.where(exists_N, jnp.moveaxis(facts_LFN, 1, 0).reshape(3, -1)[:, place_N], 0)
    node_of_parent_N = jnp.where(exists_N, node_of_C[parent_N + 1], 0)

    def behind_root(values_N: Array, first: Array | int) -> Array:
        return jnp.concatenate([jnp.full(1, first, jnp.int32), values_N])

    count = 1 + jnp.sum(exists_N, dtype=jnp.int32)
    return behind_root(token_N, root_token), behind_root(node_of_parent_N, 0), behind_root(depth_N, 0), count


def _add(high: Array, low: Array, term: Array) -> tuple[Array, Array]:
    """Adds to an unevaluated sum of two float32, whose 48 bits hold such sums exactly (Knuth's two-sum)."""
    total = high + term
    rest = total - high
    low = low + ((high - (total - rest)) + (term - rest))
    high = total + low
    return high, low - (high - total)


def _best_first(prefixes: _Prefixes, limit: int) -> tuple[_Prefixes, Array]:
    """The best ones and their places before: falling scores; of equal ones the lesser rank path, a prefix first."""
    place = jnp.arange(prefixes.high_N.size, dtype=jnp.int32)
    keys = prefixes.high_N, prefixes.low_N, *prefixes.path_WN
    high, low, *path, place = (column[:limit] for column in jax.lax.sort((*keys, place), num_keys=len(keys)))
    return _Prefixes(high, low, jnp.stack(path)), place


def _ancestors(parent_BN: Int32[Array, "B N"], depth_BN: Int32[Array, "B N"]) -> Bool[Array, "B N N"]:
    """Whether node i is node j or descends from it. Padding has depth 0 and so no ancestors."""
    node_n = jnp.arange(parent_BN.shape[1], dtype=jnp.int32)
    exact_parent_BN = jnp.where(depth_BN > 0, parent_BN, node_n[None])
    visible_BNn = jnp.broadcast_to(node_n[:, None] == node_n[None], (*parent_BN.shape, node_n.size))
    doublings = max(node_n.size - 1, 1).bit_length()
    for _ in range(doublings):
        visible_BNn |= jnp.take_along_axis(visible_BNn, exact_parent_BN[..., None], axis=1)
        exact_parent_BN = jnp.take_along_axis(exact_parent_BN, exact_parent_BN, axis=1)
    return visible_BNn


def walk(
    tree: Tree, drawn_BN: Int32[Array, "B N"], depth: int, *, has_kernels: bool = True
) -> tuple[Int32[Array, "B T"], Int32[Array, "B"]]:
    """Longest path from the root along which each node is what the target drew at its parent.

    Returns:
      Its node numbers, root first, in ``depth + 1`` places, and how many of them count (at least 1).
    """

    def by_kernel(tree: Tree, drawn_BN: Array) -> tuple[Array, Array]:
        return commit.accept_path(tree.token_BN, tree.parent_BN, tree.depth_BN, tree.count_B, drawn_BN, depth)

    by_reference = functools.partial(walk_reference, depth=depth)
    return simt.choose(by_kernel, by_reference, tree, drawn_BN, has_kernels=has_kernels)


def walk_reference(
    tree: Tree, drawn_BN: Int32[Array, "B N"], depth: int
) -> tuple[Int32[Array, "B T"], Int32[Array, "B"]]:
    """`walk` in plain JAX."""
    node_BN = jnp.broadcast_to(jnp.arange(tree.token_BN.shape[1], dtype=jnp.int32), tree.token_BN.shape)
    drawn_at_parent_BN = jnp.take_along_axis(drawn_BN, tree.parent_BN, axis=1)
    is_root_BN = node_BN == 0
    matches_BN = ~is_root_BN & (node_BN < tree.count_B[:, None]) & (drawn_at_parent_BN == tree.token_BN)
    accepted_BN = is_root_BN
    for _ in range(depth):
        accepted_BN = is_root_BN | (matches_BN & jnp.take_along_axis(accepted_BN, tree.parent_BN, axis=1))
    level_T = jnp.arange(depth + 1, dtype=jnp.int32)
    on_path_BTN = accepted_BN[:, None] & (tree.depth_BN[:, None] == level_T[None, :, None])
    return jnp.argmax(on_path_BTN, axis=-1).astype(jnp.int32), jnp.sum(accepted_BN, axis=-1, dtype=jnp.int32)
