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

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from ddtree_jax.pallas import commit, simt, tree_expand

# Stands for a log-probability of -inf, so that sums stay ordered and finite.
_IMPOSSIBLE = -1e30


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
) -> Tree:
    """The tree of a draft's logits: `expand` on the ``num_candidates`` best tokens of each row."""

    def by_kernels(root_B: Array, logits_BLV: Array, budget: Array) -> Tree:
        candidates = tree_expand.top_candidates(logits_BLV, num_candidates, jnp.int32(0))
        return _of_kernel(root_B, candidates, budget, num_nodes)

    def by_reference(root_B: Array, logits_BLV: Array, budget: Array) -> Tree:
        top_BLK, token_BLK = jax.lax.top_k(jnp.where(logits_BLV == 0, 0.0, logits_BLV), num_candidates)
        logp_BLK = top_BLK - jax.nn.logsumexp(logits_BLV, axis=-1, keepdims=True)
        return expand_reference(root_B, token_BLK, logp_BLK, budget, num_nodes)

    return simt.choose(by_kernels, by_reference, root_B, logits_BLV, budget)


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


def _expand_sequence(
    root: Array, token_LK: Array, logp_LK: Array, budget: Array, num_nodes: int
) -> tuple[Array, Array, Array, Array]:
    """Level by level: the best of depth d + 1 continue the best of depth d, so no heap is needed.

    If the i-th best of a depth with its k-th candidate is among the `limit` best of the next depth, so are all pairs of
    smaller i and k; hence only pairs with (i + 1)(k + 1) <= limit are looked at.
    """
    depth, num_candidates = logp_LK.shape
    limit = num_nodes - 1
    # A row without any possible token has the logarithm of 0 / 0.
    logp_LK = jnp.maximum(jnp.where(jnp.isnan(logp_LK), -jnp.inf, logp_LK), _IMPOSSIBLE)
    high, low = jnp.zeros(1), jnp.zeros(1)
    path = [jnp.full(1, -1, jnp.int32) for _ in range(depth)]
    levels, offset, parent_offset = [], 0, -1
    for level in range(depth):
        pairs = [
            (i, k)
            for i in range(high.shape[0])
            for k in range(min(num_candidates, limit))
            if (i + 1) * (k + 1) <= limit
        ]
        before = jnp.array([i for i, _ in pairs], jnp.int32)
        rank = jnp.array([k for _, k in pairs], jnp.int32)
        high, low = _add(high[before], low[before], logp_LK[level][rank])
        path = [ranks[before] for ranks in path]
        path[level] = rank
        high, low, *path, before = _sort_best_first(high, low, path, before)
        width = min(limit, len(pairs))
        high, low, *path, before = (column[:width] for column in (high, low, *path, before))
        token = token_LK[level][path[level]]
        levels.append((high, low, *path, token, before + parent_offset, jnp.full(width, level + 1, jnp.int32)))
        offset, parent_offset = offset + width, offset
    high, low, *columns = (jnp.concatenate(column) for column in zip(*levels, strict=True))
    path, extra = columns[:depth], columns[depth:]
    origin = jnp.arange(offset, dtype=jnp.int32)
    *_, token, parent, depths, origin = _sort_best_first(high, low, path, *extra, origin)
    # A candidate's place in the sorted order, from its place in the concatenated levels; the root (-1) becomes node 0.
    node_of = jnp.zeros(offset + 1, jnp.int32).at[origin + 1].set(jnp.arange(1, offset + 1, dtype=jnp.int32))
    exists = jnp.arange(1, num_nodes) <= jnp.minimum(budget, offset)

    def column(values: Array, first: Array | int) -> Array:
        padded = jnp.concatenate([values, jnp.zeros(max(limit - offset, 0), jnp.int32)])[:limit]
        return jnp.concatenate([jnp.full(1, first, jnp.int32), jnp.where(exists, padded, 0)])

    return column(token, root), column(node_of[parent + 1], 0), column(depths, 0), 1 + jnp.sum(exists, dtype=jnp.int32)


def _add(high: Array, low: Array, term: Array) -> tuple[Array, Array]:
    """Adds to an unevaluated sum of two float32, whose 48 bits hold such sums exactly (Knuth's two-sum)."""
    total = high + term
    rest = total - high
    low = low + ((high - (total - rest)) + (term - rest))
    high = total + low
    return high, low - (high - total)


def _sort_best_first(high: Array, low: Array, path: list[Array], *others: Array) -> list[Array]:
    """Falling scores; equal ones by rank path, in which a prefix (filled up with -1) comes before its continuations."""
    columns = jax.lax.sort((-high, -low, *path, *others), num_keys=2 + len(path))
    return [-columns[0], -columns[1], *columns[2:]]


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


def walk(tree: Tree, drawn_BN: Int32[Array, "B N"], depth: int) -> tuple[Int32[Array, "B T"], Int32[Array, "B"]]:
    """Longest path from the root along which each node is what the target drew at its parent.

    Returns:
      Its node numbers, root first, in ``depth + 1`` places, and how many of them count (at least 1).
    """

    def by_kernel(tree: Tree, drawn_BN: Array) -> tuple[Array, Array]:
        return commit.accept_path(tree.token_BN, tree.parent_BN, tree.depth_BN, tree.count_B, drawn_BN, depth)

    return simt.choose(by_kernel, functools.partial(walk_reference, depth=depth), tree, drawn_BN)


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
