"""The kernels from draft logits to a tree: their code run on numpy against `tree.expand` and ``lax.top_k``, and lowered for a GPU."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: F401

from ddtree_jax import sampling, tree
from ddtree_jax.pallas import tree_expand
from ddtree_jax.pallas.tree_expand_grow import Growth, grow
from ddtree_jax.pallas.tree_expand_merge import Lists, merge_rows
from ddtree_jax.pallas.tree_expand_top import Piece, select_top
from tests.simt_numpy import Memory, NumpyThreads

GARBAGE = 0x5EED5EED


def shared(size: int, kind: type) -> Memory:
    """What shared memory holds when a block begins is undefined."""
    return Memory(np.full(size, GARBAGE if np.dtype(kind).kind in "iu" else np.nan, kind))


def run_top(logits_RV: np.ndarray, piece: Piece, first_id: int = 0) -> tuple[np.ndarray, ...]:
    """Ids, logits [R, C, K] and log-sum-exps [R, C]."""
    shape = (len(logits_RV), piece.num_pieces, piece.num_best)
    logit, token, lse = shared(np.prod(shape), np.float32), shared(np.prod(shape), np.int32), shared(shape[0] * shape[1], np.float32)
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


def run_expand(
    token_LCK: np.ndarray, logit_LCK: np.ndarray, lse_LC: np.ndarray, budget: int, num_nodes: int, num_threads: int = 256
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
    masks = shared(num_nodes * growth.mask_words, np.uint32)
    with threads.when(threads.thread() < 32):
        grow(threads, growth, sequence, *inputs, logp, token, outs, masks)
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
            token[level, piece, : mine.sum()], logit[level, piece, : mine.sum()] = token_LK[level, mine], logp_LK[level, mine]
    lse = np.where(np.arange(num_pieces) == seed % num_pieces, 0, -np.inf).astype(np.float32)
    return token, logit, np.tile(lse, (depth, 1))


def assert_same_tree(built: tree.Tree, expected: tree.Tree, name: object = "") -> None:
    for field in ("count_B", "depth_BN", "parent_BN", "token_BN", "visible_BNn"):
        np.testing.assert_array_equal(getattr(built, field), getattr(expected, field), err_msg=f"{name} {field}")


@functools.cache
def reference(num_nodes: int):
    return jax.jit(tree.expand, static_argnums=4)


def expected_tree(token_LK: np.ndarray, logp_LK: np.ndarray, budget: int, num_nodes: int) -> tree.Tree:
    arrays = jnp.asarray(token_LK)[None], jnp.asarray(logp_LK)[None]
    return reference(num_nodes)(jnp.array([7]), *arrays, jnp.int32(budget), num_nodes)
