"""From draft logits to a finished tree in two launches: the best candidates of each row, and the tree.

::

    logits [B, L, V] ──► top_candidates ──► [B, L, C, K] ──┬──► expand_tree ──► tokens, parents, depths, positions, masks
                         a block a piece    best, ids, lse │    a block a sequence: merge, then grow
    other shards' [B, L, C, K] ────────────────────────────┘

A piece is a part of a row on this device, or a shard of the vocabulary on another: both are merged in the second launch.
Bytes: the logits once, 4.6 MB at [7, 163840], 1.0 us of an H200's 4.57 TB/s; the rest is latency.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.simt import FLOAT, INT, WIDE
from ddtree_jax.pallas.tree_expand_grow import Growth, grow, write_tree
from ddtree_jax.pallas.tree_expand_merge import Lists, merge_rows
from ddtree_jax.pallas.tree_expand_top import Piece, select_top

MAX_DEPTH, MAX_BUDGET, MAX_PIECES = 16, 256, 32


class Candidates(NamedTuple):
    """The K best tokens, best first, of each of C pieces of a row, and the pieces' log-sum-exp. Id -1: none."""

    logit_BLCK: Float[Array, "B L C K"]
    token_BLCK: Int32[Array, "B L C K"]
    lse_BLC: Float[Array, "B L C"]


class Expansion(NamedTuple):
    """A tree's arrays, see `tree.Tree`; bit n of ``visible_BNw`` says whether a node is node n or descends from it."""

    token_BN: Int32[Array, "B N"]
    parent_BN: Int32[Array, "B N"]
    depth_BN: Int32[Array, "B N"]
    position_BN: Int32[Array, "B N"]
    count_B: Int32[Array, "B"]
    visible_BNw: Int32[Array, "B N w"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A block of the first kernel reads up to ``num_threads * vectors * 4`` columns."""

    num_threads: int = 512
    vectors: int = 5
    expand_threads: int = 1024


def top_candidates(
    logits_BLV: Float[Array, "B L V"], num_candidates: int, first_id: Int32[Array, ""], config: Config = Config()
) -> Candidates:
    """The best ``num_candidates`` of each row's pieces; column v has the id ``first_id + v``.

    Equal logits, both zeros too, go by lower id.

    Raises:
      NotImplementedError: for types and sizes that the kernel does not take; the offending value is named.
    """
    batch, depth, vocab = logits_BLV.shape
    if logits_BLV.dtype != jnp.float32:
        raise NotImplementedError(f"logits are {logits_BLV.dtype}; float32 is needed")
    if not 1 <= num_candidates <= MAX_BUDGET:
        raise NotImplementedError(f"{num_candidates} candidates; 1 to {MAX_BUDGET} fit")
    piece = Piece.of(vocab, num_candidates, config.num_threads, config.vectors)
    if piece.num_pieces > MAX_PIECES:
        raise NotImplementedError(f"{vocab} columns; at most {MAX_PIECES * piece.columns} fit")
    lists = (batch * depth, piece.num_pieces, num_candidates)

    def body(logits: Any, first_id: Any, logit: Any, token: Any, lse: Any, *shared: Any) -> None:
        numbers = (lax.axis_index("row"), lax.axis_index("piece"), first_id[0])
        kinds = (FLOAT, FLOAT, INT, FLOAT, WIDE, WIDE, WIDE, FLOAT, INT)
        refs = list(zip((logits, logit, token, lse, *shared), kinds, strict=True))
        simt.run(functools.partial(_select_top, piece), refs, numbers)

    logit, token, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(lists, jnp.float32),
            jax.ShapeDtypeStruct(lists, jnp.int32),
            jax.ShapeDtypeStruct(lists[:2], jnp.float32),
        ),
        grid=(batch * depth, piece.num_pieces),
        grid_names=("row", "piece"),
        scratch_types=[
            plgpu.SMEM((2 * piece.num_groups,), jnp.int32),
            plgpu.SMEM((2 * piece.num_survivors,), jnp.int32),
            plgpu.SMEM((4,), jnp.int32),
            plgpu.SMEM((piece.num_threads // 32,), jnp.float32),
            plgpu.SMEM((1,), jnp.int32),
        ],
        **simt.options("tree_expand_top", piece.num_threads),
    )(logits_BLV.reshape(batch * depth, vocab), first_id.reshape(1))
    shape = (batch, depth, *lists[1:])
    return Candidates(logit.reshape(shape), token.reshape(shape), lse.reshape(shape[:-1]))


def _select_top(piece: Piece, t: Any, *args: Any) -> None:
    select_top(t, piece, *args)


def expand_tree(
    root_B: Int32[Array, "B"],
    start_B: Int32[Array, "B"],
    candidates: Candidates,
    budget: Int32[Array, ""],
    num_nodes: int,
    config: Config = Config(),
) -> Expansion:
    """The ``budget`` most probable prefixes, in ``num_nodes`` places; node i lies at position ``start_B`` + its depth.

    A row needs K candidates in all its pieces together. Set, order and parents are those of `tree.expand`.

    Raises:
      NotImplementedError: for sizes that the kernel does not take; the offending value is named.
    """
    batch, depth, num_pieces, num_candidates = candidates.logit_BLCK.shape
    for name, size, most in (("rows", depth, MAX_DEPTH), ("pieces", num_pieces, MAX_PIECES)):
        if not 1 <= size <= most:
            raise NotImplementedError(f"{size} {name}; 1 to {most} fit")
    for name, size in (("nodes behind the root", num_nodes - 1), ("candidates", num_candidates)):
        if not 1 <= size <= MAX_BUDGET:
            raise NotImplementedError(f"{size} {name}; 1 to {MAX_BUDGET} fit")
    threads = config.expand_threads if num_candidates <= 64 else config.expand_threads // 2
    lists = Lists(depth=depth, num_pieces=num_pieces, num_candidates=num_candidates, num_threads=threads)
    growth = Growth(depth=depth, num_candidates=num_candidates, stride=lists.stride, num_nodes=num_nodes)
    nodes = jax.ShapeDtypeStruct((batch, num_nodes), jnp.int32)
    num_keys = 2 * depth * lists.warps_a_row * lists.stride

    def body(*refs: Any) -> None:
        kinds = (INT, INT, FLOAT, INT, FLOAT, INT, *[INT] * 6, WIDE, FLOAT, INT, INT, INT)
        simt.run(functools.partial(_expand, lists, growth), list(zip(refs, kinds, strict=True)), [lax.axis_index("b")])

    return Expansion(
        *plgpu.kernel(
            body,
            out_type=(
                *[nodes] * 4,
                jax.ShapeDtypeStruct((batch,), jnp.int32),
                jax.ShapeDtypeStruct((batch, num_nodes, growth.mask_words), jnp.int32),
            ),
            grid=(batch,),
            grid_names=("b",),
            scratch_types=[
                plgpu.SMEM((num_keys,), jnp.int32),
                plgpu.SMEM((depth * lists.stride,), jnp.float32),
                plgpu.SMEM((depth * lists.stride,), jnp.int32),
                plgpu.SMEM((num_nodes,), jnp.int32),
                plgpu.SMEM((1,), jnp.int32),
            ],
            **simt.options("tree_expand_grow", threads),
        )(root_B, start_B, *candidates, budget.reshape(1))
    )


def _expand(lists: Lists, growth: Growth, t: Any, sequence: Any, root: Any, start: Any, *memories: Any) -> None:
    logit, token, lse, budget, *outs, keys, row_logp, row_token, records, count = memories
    merge_rows(t, lists, sequence, logit, token, lse, keys, row_logp, row_token)
    with t.when(t.thread() < 32):
        grow(t, growth, budget, row_logp, records, count)
    t.barrier()
    write_tree(t, growth, sequence, root, start, row_token, records, count, outs)
