"""What the target draws at every node: a few launches, from logits on one device or on shards of the vocabulary.

::

    logits [B, N, V] ─┬► best_of_pieces ──► best [R, C] ──► merge_greedy ──► tokens                       greedy
                      ├► add_up_pieces  ◄─ best ──► sums [R, C] ─┬─────────────────┐
                      ├► collect_pieces ◄─ best ◄────────────────┘ ──► lists ──► draw_tokens ──► tokens   top-k, top-p
                      └► perturb_pieces ◄─ best ──► best with noise ──► merge_greedy ──► tokens           else
                         a block a piece    other shards' pieces join here    a block a row (a node, R = B N)

Bytes: the logits once, 10.5 MB for 16 nodes of 163,840 columns, 2.3 us of an H200's 4.57 TB/s. Noise is made for the tokens
that the filters keep, and equals `jax.random.gumbel` of the node's position bit for bit.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32, UInt32

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.sample_collect import NOISE_RANGE, Collection, add_up_piece, collect, perturb, pick_best
from ddtree_jax.pallas.sample_draw import Draw, draw, merge_best
from ddtree_jax.pallas.simt import FLOAT, INT, UINT, WIDE
from ddtree_jax.pallas.tree_expand import MAX_PIECES
from ddtree_jax.pallas.tree_expand_top import Piece

_ROWS_A_BLOCK = 4


class Best(NamedTuple):
    """The best token of each of C pieces of a row."""

    logit_RC: Float[Array, "R C"]
    token_RC: Int32[Array, "R C"]


class Lists(NamedTuple):
    """The tokens of each piece that may be drawn; of ``count_RC`` a list holds the first Z."""

    count_RC: Int32[Array, "R C"]
    logit_RCZ: Float[Array, "R C Z"]
    token_RCZ: Int32[Array, "R C Z"]


class Filters(NamedTuple):
    """Of a sequence; temperatures are positive."""

    temperature_B: Float[Array, "B"]
    top_k_B: Int32[Array, "B"]
    top_p_B: Float[Array, "B"]
    min_p_B: Float[Array, "B"]

    def cutoff_B(self, vocab: int) -> Float[Array, "B"]:
        """How far below the sum of all a token with too little mass for top-p lies."""
        return jnp.where(self.top_p_B < 1, jnp.log(vocab / (1 - self.top_p_B)), jnp.inf)

    def floor_B(self) -> Float[Array, "B"]:
        """How far below the best token, over the temperature, none can be drawn: noise is bounded, and min_p bounds too.

        With top-k the mass of all that it keeps is needed, whether min_p removes them or not.
        """
        lowest_B = jnp.where(self.top_k_B > 0, -jnp.inf, jnp.log(self.min_p_B))
        return jnp.maximum(lowest_B, -NOISE_RANGE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A block of the first kernel reads up to ``num_threads * vectors * 4`` columns."""

    num_threads: int = 512
    vectors: int = 5
    capacity: int = 2048
    num_kept: int = 8192
    draw_threads: int = 512


def _piece(logits_BNV: Array, config: Config) -> Piece:
    if logits_BNV.dtype != jnp.float32:
        raise NotImplementedError(f"logits are {logits_BNV.dtype}; float32 is needed")
    piece = Piece.of(logits_BNV.shape[-1], 1, config.num_threads, config.vectors)
    if piece.num_pieces > MAX_PIECES:
        raise NotImplementedError(f"{piece.num_columns} columns; at most {MAX_PIECES * piece.columns} fit")
    return piece


def best_of_pieces(logits_BNV: Float[Array, "B N V"], first_id: Int32[Array, ""], config: Config = Config()) -> Best:
    """The best tokens, equal logits by lower id; column v has the id ``first_id + v``.

    Raises:
      NotImplementedError: for logits that are not float32, or too many columns.
    """
    batch, num_nodes, vocab = logits_BNV.shape
    piece = _piece(logits_BNV, config)
    num_rows, shape = batch * num_nodes, (batch * num_nodes, piece.num_pieces)

    def body(logits: Any, first_id: Any, logit: Any, token: Any, keys: Any) -> None:
        refs = [(logits, FLOAT), (logit, FLOAT), (token, INT), (keys, WIDE)]
        function = functools.partial(_pick_best, piece)
        simt.run(function, refs, (lax.axis_index("row"), lax.axis_index("piece"), first_id[0]))

    return Best(
        *plgpu.kernel(
            body,
            out_type=(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)),
            grid=shape,
            grid_names=("row", "piece"),
            scratch_types=[plgpu.SMEM((2 * config.num_threads // 32,), jnp.int32)],
            **simt.options("sample_best", config.num_threads),
        )(logits_BNV.reshape(num_rows, vocab), first_id.reshape(1))
    )


def _pick_best(piece: Piece, t: Any, *args: Any) -> None:
    pick_best(t, piece, *args)


def merge_greedy(best: Best) -> Int32[Array, "R"]:
    """The best tokens of whole rows."""
    num_rows, num_pieces = best.logit_RC.shape

    def body(logit: Any, token: Any, out: Any) -> None:
        function = functools.partial(_merge_best, num_rows, num_pieces)
        simt.run(function, [(logit, FLOAT), (token, INT), (out, INT)], [lax.axis_index("block")])

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        grid=(-(-num_rows // _ROWS_A_BLOCK),),
        grid_names=("block",),
        **simt.options("sample_merge", 32 * _ROWS_A_BLOCK),
    )(*best)


def _merge_best(num_rows: int, num_pieces: int, t: Any, *args: Any) -> None:
    merge_best(t, num_rows, num_pieces, *args)


def _collection(logits_BNV: Array, row_pieces: int | None, config: Config) -> Collection:
    piece = _piece(logits_BNV, config)
    num_nodes = logits_BNV.shape[1]
    return Collection(
        piece=piece, num_nodes=num_nodes, row_pieces=row_pieces or piece.num_pieces, capacity=config.capacity
    )


def add_up_pieces(
    logits_BNV: Float[Array, "B N V"], best: Best, filters: Filters, config: Config = Config()
) -> Int32[Array, "R C 2"]:
    """Sums of exp((logit - row's best) / temperature) over this device's pieces; ``best`` are those of whole rows.

    A sum is an integer of 64 bits, low word first, in units of 2**-31.

    Raises:
      NotImplementedError: for logits that are not float32, or too many columns.
    """
    batch, num_nodes, columns = logits_BNV.shape
    shape = _collection(logits_BNV, best.logit_RC.shape[1], config)
    num_rows, num_pieces = batch * num_nodes, shape.piece.num_pieces

    def body(*refs: Any) -> None:
        numbers = (lax.axis_index("row"), lax.axis_index("piece"))
        pairs = list(zip(refs, (FLOAT, FLOAT, FLOAT, WIDE, WIDE), strict=True))
        simt.run(functools.partial(_add_up_piece, shape), pairs, numbers)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, num_pieces, 2), jnp.int32),
        grid=(num_rows, num_pieces),
        grid_names=("row", "piece"),
        scratch_types=[plgpu.SMEM((2 * config.num_threads // 32,), jnp.int32)],
        **simt.options("sample_add_up", config.num_threads),
    )(logits_BNV.reshape(-1, columns), filters.temperature_B, best.logit_RC)


def _add_up_piece(shape: Collection, t: Any, *args: Any) -> None:
    add_up_piece(t, shape, *args)


def collect_pieces(
    logits_BNV: Float[Array, "B N V"],
    best: Best,
    sum_RC2: Int32[Array, "R C 2"],
    filters: Filters,
    first_id: Int32[Array, ""],
    vocab: int,
    config: Config = Config(),
) -> Lists:
    """This device's tokens that may be drawn; ``best`` and sums are those of whole rows, other shards' pieces included."""
    batch, num_nodes, columns = logits_BNV.shape
    shape = _collection(logits_BNV, sum_RC2.shape[1], config)
    pieces = (batch * num_nodes, shape.piece.num_pieces)
    lists = (*pieces, config.capacity)

    def body(logits: Any, temperature: Any, cutoff: Any, floor: Any, best: Any, total: Any, first_id: Any, *refs: Any):
        kinds = (FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, WIDE, INT, FLOAT, INT, INT)
        numbers = (lax.axis_index("row"), lax.axis_index("piece"), first_id[0])
        pairs = list(zip((logits, temperature, cutoff, floor, best, total, *refs), kinds, strict=True))
        simt.run(functools.partial(_collect, shape), pairs, numbers)

    outs = ((pieces, jnp.int32), (lists, jnp.float32), (lists, jnp.int32))
    return Lists(
        *plgpu.kernel(
            body,
            out_type=tuple(jax.ShapeDtypeStruct(*out) for out in outs),
            grid=pieces,
            grid_names=("row", "piece"),
            scratch_types=[plgpu.SMEM((1,), jnp.int32)],
            **simt.options("sample_collect", config.num_threads),
        )(
            logits_BNV.reshape(-1, columns),
            filters.temperature_B,
            filters.cutoff_B(vocab),
            filters.floor_B(),
            best.logit_RC,
            sum_RC2,
            first_id.reshape(1),
        )
    )


def _collect(shape: Collection, t: Any, *args: Any) -> None:
    collect(t, shape, *args)


def perturb_pieces(
    logits_BNV: Float[Array, "B N V"],
    best: Best,
    filters: Filters,
    depth_BN: Int32[Array, "B N"],
    key_BT2: UInt32[Array, "B T 2"],
    first_id: Int32[Array, ""],
    config: Config = Config(),
) -> Best:
    """The best tokens with noise, where no sequence has top-k or top-p; ``best`` are those of whole rows without it.

    `merge_greedy` of the result, of all devices, is the draw.
    """
    batch, num_nodes, columns = logits_BNV.shape
    shape = replace(_collection(logits_BNV, best.logit_RC.shape[1], config), num_depths=key_BT2.shape[1])
    pieces = (batch * num_nodes, shape.piece.num_pieces)

    def body(first_id: Any, *refs: Any) -> None:
        kinds = (FLOAT, INT, FLOAT, FLOAT, UINT, FLOAT, FLOAT, INT, WIDE)
        numbers = (lax.axis_index("row"), lax.axis_index("piece"), first_id[0])
        simt.run(functools.partial(_perturb, shape), list(zip(refs, kinds, strict=True)), numbers)

    return Best(
        *plgpu.kernel(
            body,
            out_type=(jax.ShapeDtypeStruct(pieces, jnp.float32), jax.ShapeDtypeStruct(pieces, jnp.int32)),
            grid=pieces,
            grid_names=("row", "piece"),
            scratch_types=[plgpu.SMEM((2 * config.num_threads // 32,), jnp.int32)],
            **simt.options("sample_perturb", config.num_threads),
        )(
            first_id.reshape(1),
            logits_BNV.reshape(-1, columns),
            depth_BN.reshape(-1),
            filters.temperature_B,
            jnp.log(filters.min_p_B),
            key_BT2.reshape(-1),
            best.logit_RC,
        )
    )


def _perturb(shape: Collection, t: Any, *args: Any) -> None:
    perturb(t, shape, *args)


def draw_tokens(
    best: Best,
    sum_RC2: Int32[Array, "R C 2"],
    lists: Lists,
    filters: Filters,
    depth_BN: Int32[Array, "B N"],
    key_BT2: UInt32[Array, "B T 2"],
    vocab: int,
    config: Config = Config(),
) -> Int32[Array, "B N"]:
    """One token a node, with the noise of the threefry key of its depth; -1 where the lists lack what the draw needs.

    A whole row's pieces are needed. Lists may lack something where more tokens than fit may be drawn, as of flat logits, or
    where top-k comes before top-p and keeps more than may be drawn.
    """
    (batch, num_nodes), (num_rows, num_pieces, capacity) = depth_BN.shape, lists.logit_RCZ.shape
    if num_pieces > MAX_PIECES:
        raise NotImplementedError(f"{num_pieces} pieces; at most {MAX_PIECES} fit")
    shape = Draw(
        num_nodes=num_nodes,
        num_pieces=num_pieces,
        capacity=capacity,
        num_kept=config.num_kept,
        num_depths=key_BT2.shape[1],
        vocab=vocab,
        num_threads=config.draw_threads,
    )
    num_warps, f32, i32 = config.draw_threads // 32, jnp.float32, jnp.int32

    def body(*refs: Any) -> None:
        of_sequence = (INT, FLOAT, INT, FLOAT, FLOAT, UINT)
        kinds = (*of_sequence, FLOAT, INT, WIDE, INT, FLOAT, INT, INT, FLOAT, INT, WIDE, UINT, INT)
        simt.run(functools.partial(_draw, shape), list(zip(refs, kinds, strict=True)), [lax.axis_index("row")])

    token_R = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows,), i32),
        grid=(num_rows,),
        grid_names=("row",),
        scratch_types=[
            plgpu.SMEM((config.num_kept,), f32),
            plgpu.SMEM((config.num_kept,), i32),
            plgpu.SMEM((2 * num_warps,), i32),
            plgpu.SMEM((num_warps,), jnp.uint32),
            plgpu.SMEM((1,), i32),
        ],
        **simt.options("sample_draw", config.draw_threads),
    )(
        depth_BN.reshape(num_rows),
        filters.temperature_B,
        filters.top_k_B,
        filters.top_p_B,
        jnp.log(filters.min_p_B),
        key_BT2.reshape(-1),
        *best,
        sum_RC2,
        *lists,
    )
    return token_R.reshape(batch, num_nodes)


def _draw(shape: Draw, t: Any, *args: Any) -> None:
    draw(t, shape, *args)
