"""What the target draws at every node: a few launches, from logits on one device or on shards of the vocabulary.

::

    logits [B, N, V] ─┬► best_of_pieces ──► best [R, C] ──► merge_greedy ──► tokens                       greedy
                      ├► add_up_pieces  ◄─ best ──► sums, counts ┬─────────────────┐
                      ├► collect_pieces ◄─ best ◄────────────────┘ ──► lists ──► draw_tokens ──► tokens   top-k, top-p
                      └► perturb_pieces ◄─ best ──► best with noise ──► merge_greedy ──► tokens           else
                         a block a piece    other shards' pieces join here    a block a row (a node, R = B N)

Bytes: the logits once, 10.5 MB for 16 nodes of 163,840 columns, 2.3 us of an H200's 4.57 TB/s. Noise is made for the tokens
that the filters keep, and equals `jax.random.gumbel` of the node's position bit for bit. Positions' keys and logarithms of
filters are made where they are used, so that nothing but these kernels runs, and one sum that asks if all draws are known.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32, UInt32

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.sample_collect import NUM_BUCKETS, Collection, add_up_piece, collect, perturb, pick_best
from ddtree_jax.pallas.sample_draw import Draw, draw, merge_best
from ddtree_jax.pallas.simt import FLOAT, INT, UINT, WIDE
from ddtree_jax.pallas.tree_expand import MAX_PIECES
from ddtree_jax.pallas.tree_expand_top import Piece

_ROWS_A_BLOCK = 4


class Best(NamedTuple):
    """The best token of each of C pieces of a row."""

    logit_RC: Float[Array, "R C"]
    token_RC: Int32[Array, "R C"]


class Sums(NamedTuple):
    """The mass of each piece, an integer of 64 bits in units of 2**-31, low word first, and its tokens a bucket of logits."""

    mass_RC2: Int32[Array, "R C 2"]
    count_RCh: Int32[Array, "R C h"]


class Lists(NamedTuple):
    """The tokens of each piece that may be drawn; of ``count_RC`` a list holds the first Z."""

    count_RC: Int32[Array, "R C"]
    logit_RCZ: Float[Array, "R C Z"]
    token_RCZ: Int32[Array, "R C Z"]


class Filters(NamedTuple):
    """Of a sequence; temperature 0 draws the best token."""

    temperature_B: Float[Array, "B"]
    top_k_B: Int32[Array, "B"]
    top_p_B: Float[Array, "B"]
    min_p_B: Float[Array, "B"]


class Noise(NamedTuple):
    """What the noise of a sequence's tokens depends on: behind depth d it is that of position ``length_B + d + 1``.

    A position's threefry key is that of the sequence, folded as `jax.random.fold_in` does.
    """

    key_B2: UInt32[Array, "B 2"]
    length_B: Int32[Array, "B"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A block of the first kernel reads up to ``num_threads * vectors * 4`` columns; ``draw_threads`` divide ``num_kept``."""

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


def _collection(logits_BNV: Array, row_pieces: int, vocab: int, config: Config) -> Collection:
    piece, num_nodes = _piece(logits_BNV, config), logits_BNV.shape[1]
    return Collection(piece=piece, num_nodes=num_nodes, row_pieces=row_pieces, vocab=vocab, capacity=config.capacity)


def add_up_pieces(
    logits_BNV: Float[Array, "B N V"], best: Best, filters: Filters, vocab: int, config: Config = Config()
) -> Sums:
    """Sums of exp((logit - row's best) / temperature) over this device's pieces; ``best`` are those of whole rows.

    Raises:
      NotImplementedError: for logits that are not float32, or too many columns.
    """
    batch, num_nodes, columns = logits_BNV.shape
    shape = _collection(logits_BNV, best.logit_RC.shape[1], vocab, config)
    pieces = (batch * num_nodes, shape.piece.num_pieces)

    def body(*refs: Any) -> None:
        numbers = (lax.axis_index("row"), lax.axis_index("piece"))
        pairs = list(zip(refs, (FLOAT, FLOAT, FLOAT, WIDE, INT, WIDE, INT), strict=True))
        simt.run(functools.partial(_add_up_piece, shape), pairs, numbers)

    return Sums(
        *plgpu.kernel(
            body,
            out_type=tuple(jax.ShapeDtypeStruct((*pieces, size), jnp.int32) for size in (2, NUM_BUCKETS)),
            grid=pieces,
            grid_names=("row", "piece"),
            scratch_types=[plgpu.SMEM((size,), jnp.int32) for size in (2 * config.num_threads // 32, NUM_BUCKETS)],
            **simt.options("sample_add_up", config.num_threads),
        )(logits_BNV.reshape(-1, columns), filters.temperature_B, best.logit_RC)
    )


def _add_up_piece(shape: Collection, t: Any, *args: Any) -> None:
    add_up_piece(t, shape, *args)


def collect_pieces(
    logits_BNV: Float[Array, "B N V"],
    best: Best,
    sums: Sums,
    filters: Filters,
    first_id: Int32[Array, ""],
    vocab: int,
    config: Config = Config(),
) -> Lists:
    """This device's tokens that may be drawn; ``best`` and sums are those of whole rows, other shards' pieces included."""
    batch, num_nodes, columns = logits_BNV.shape
    shape = _collection(logits_BNV, best.logit_RC.shape[1], vocab, config)
    pieces = (batch * num_nodes, shape.piece.num_pieces)
    lists = (*pieces, config.capacity)

    def body(first_id: Any, *refs: Any) -> None:
        kinds = (FLOAT, FLOAT, INT, FLOAT, FLOAT, FLOAT, WIDE, INT, INT, FLOAT, INT, INT, INT)
        numbers = (lax.axis_index("row"), lax.axis_index("piece"), first_id[0])
        simt.run(functools.partial(_collect, shape), list(zip(refs, kinds, strict=True)), numbers)

    outs = ((pieces, jnp.int32), (lists, jnp.float32), (lists, jnp.int32))
    return Lists(
        *plgpu.kernel(
            body,
            out_type=tuple(jax.ShapeDtypeStruct(*out) for out in outs),
            grid=pieces,
            grid_names=("row", "piece"),
            scratch_types=[plgpu.SMEM((size,), jnp.int32) for size in (1, config.num_threads)],
            **simt.options("sample_collect", config.num_threads),
        )(first_id.reshape(1), logits_BNV.reshape(-1, columns), *filters, best.logit_RC, *sums)
    )


def _collect(shape: Collection, t: Any, *args: Any) -> None:
    collect(t, shape, *args)


def perturb_pieces(
    logits_BNV: Float[Array, "B N V"],
    best: Best,
    filters: Filters,
    noise: Noise,
    depth_BN: Int32[Array, "B N"],
    first_id: Int32[Array, ""],
    vocab: int,
    config: Config = Config(),
) -> Best:
    """The best tokens with noise, where no sequence has top-k or top-p; ``best`` are those of whole rows without it.

    `merge_greedy` of the result, of all devices, is the draw.
    """
    batch, num_nodes, columns = logits_BNV.shape
    shape = _collection(logits_BNV, best.logit_RC.shape[1], vocab, config)
    pieces = (batch * num_nodes, shape.piece.num_pieces)

    def body(first_id: Any, *refs: Any) -> None:
        kinds = (FLOAT, INT, FLOAT, FLOAT, UINT, INT, FLOAT, FLOAT, INT, WIDE)
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
            filters.min_p_B,
            *noise,
            best.logit_RC,
        )
    )


def _perturb(shape: Collection, t: Any, *args: Any) -> None:
    perturb(t, shape, *args)


def draw_tokens(
    best: Best,
    sums: Sums,
    lists: Lists,
    filters: Filters,
    noise: Noise,
    depth_BN: Int32[Array, "B N"],
    vocab: int,
    config: Config = Config(),
) -> Int32[Array, "B N"]:
    """One token a node, the best one without a temperature; -1 where the lists lack what the draw needs.

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
        vocab=vocab,
        num_threads=config.draw_threads,
    )
    num_warps, f32, i32, u32 = config.draw_threads // 32, jnp.float32, jnp.int32, jnp.uint32

    def body(*refs: Any) -> None:
        of_sequence = (INT, FLOAT, INT, FLOAT, FLOAT, UINT, INT)
        kinds = (*of_sequence, FLOAT, INT, WIDE, INT, FLOAT, INT, INT, FLOAT, INT, UINT, WIDE, UINT)
        simt.run(functools.partial(_draw, shape), list(zip(refs, kinds, strict=True)), [lax.axis_index("row")])

    token_R = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows,), i32),
        grid=(num_rows,),
        grid_names=("row",),
        scratch_types=[
            *(plgpu.SMEM((config.num_kept,), kind) for kind in (f32, i32, u32)),
            plgpu.SMEM((2 * num_warps,), i32),
            plgpu.SMEM((2 * num_warps,), u32),
        ],
        **simt.options("sample_draw", config.draw_threads),
    )(depth_BN.reshape(num_rows), *filters, *noise, *best, sums.mass_RC2, *lists)
    return token_R.reshape(batch, num_nodes)


def _draw(shape: Draw, t: Any, *args: Any) -> None:
    draw(t, shape, *args)
