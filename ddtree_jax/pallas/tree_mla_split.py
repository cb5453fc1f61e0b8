"""What both forms of tree MLA share: the query, how the slots are split among blocks, mask words, the sum of the splits.

Rows are pairs of a node and a head; n stands for their axis, s for that of the splits.

::

    tiles    0   1   2   3   4   5   6        prefix tiles 0 to 5, as many as the length needs; tile 6 is the tree
    split    0   0   1   1   2   2   3        4 splits of ceil(7 / 4) tiles; the last one has less, others may have none

Where the cache has fewer tiles than there may be splits, each tile has one. So how many slots a cache has besides those that
are committed changes neither the tiles of a split nor, since `add_splits` has them added in one order, a bit of the result.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Bool, Float, Int32

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.bfloat16_rows import UNIT, unpack
from ddtree_jax.pallas.latent_rows import turn_pairs
from ddtree_jax.pallas.simt import FLOAT, INT, UINT

LOWEST = -1e30
"""Stands for the maximum over no scores: finite, so that differences of maxima are never NaN."""

LATENTS, ROTARY = (256, 512), 64
"""Widths that the tiles are made for."""

WORD = 32
_FEW_SPLITS = 16


class Query(NamedTuple):
    """Latent and rotary parts of the heads' queries, and what the rotary ones are still to be turned by.

    Cosines and sines are float32, one for each pair (2i, 2i + 1).
    """

    latent_BTHC: Float[Array, "B T H C"]
    rotary_BTHR: Float[Array, "B T H R"]
    cos_BTr: Float[Array, "B T r"]
    sin_BTr: Float[Array, "B T r"]

    def join(self) -> Float[Array, "B T H W"]:
        """Both parts side by side, the rotary one turned, and rounded as it was."""
        turn = (of_pair_BTr[:, :, None] for of_pair_BTr in (self.cos_BTr, self.sin_BTr))
        return jnp.concatenate([self.latent_BTHC, turn_pairs(self.rotary_BTHR, *turn)], axis=-1)


def check(query: Query, cache_BSW: Array, slot_multiple: int) -> None:
    """Raises NotImplementedError for shapes and types that a form's tiles do not fit."""
    types = query.latent_BTHC.dtype, query.rotary_BTHR.dtype, cache_BSW.dtype
    if set(types) != {jnp.dtype(jnp.bfloat16)}:
        raise NotImplementedError(f"query and cache are {', '.join(map(str, types))}; only bfloat16 is supported")
    num_latent, rotary = query.latent_BTHC.shape[-1], query.rotary_BTHR.shape[-1]
    if num_latent not in LATENTS:
        raise NotImplementedError(f"the latent part is {num_latent} wide; only {LATENTS} are supported")
    if rotary != ROTARY:
        raise NotImplementedError(f"the rotary part is {rotary} wide; only {ROTARY} is supported")
    if cache_BSW.shape[1] % slot_multiple:
        raise NotImplementedError(
            f"the cache has {cache_BSW.shape[1]} slots; only multiples of {slot_multiple} are supported"
        )


def most_splits(batch: int, row_tiles: int, num_sms: int) -> int:
    """Blocks along the slots that fill the GPU."""
    return max(1, num_sms // (row_tiles * batch))


def num_splits(most: int, num_slots: int, tree_tiles: int, tile: int) -> int:
    """Blocks along the slots: as many as fill the GPU, at most one a tile."""
    return min(most, pl.cdiv(num_slots, tile) + tree_tiles)


def tile_counts(length: Array, tree_tiles: int, splits: int, tile: int) -> tuple[Array, Array, Array]:
    """Tiles of the committed prefix, all tiles, and tiles a split, for each length."""
    prefix = lax.div(length + (tile - 1), jnp.int32(tile))
    total = prefix + tree_tiles
    return prefix, total, lax.div(total + (splits - 1), jnp.int32(splits))


def pack_visible(visible_BTt: Bool[Array, "B T T"], heads: int, tile: int, row_tile: int) -> Int32[Array, "B w n"]:
    """Bit c % 32 of word c // 32 says whether the row sees row c of the call. Words and rows are filled up to whole tiles."""
    batch, num_nodes, _ = visible_BTt.shape
    wide = jnp.pad(visible_BTt, ((0, 0), (0, 0), (0, -num_nodes % max(tile, WORD))))
    bits = wide.reshape(batch, num_nodes, -1, WORD).astype(jnp.uint32)
    bits <<= lax.broadcasted_iota(jnp.uint32, bits.shape, 3)
    words_BTw = lax.bitcast_convert_type(jnp.sum(bits, axis=-1, dtype=jnp.uint32), jnp.int32)
    words_Bwn = jnp.repeat(words_BTw.transpose(0, 2, 1), heads, axis=2)
    return jnp.pad(words_Bwn, ((0, 0), (0, 0), (0, -words_Bwn.shape[2] % row_tile)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Static shape of what `add_splits` adds up; the logarithm of each row's sum of weights stands ``copies`` times.

    Few threads, which load ``chunk`` splits at a time: much of what a warp does takes as long however few splits it has.
    """

    splits: int
    width: int
    copies: int
    num_threads: int
    chunk: int = 5

    @classmethod
    def of(cls, part: Any, lse: Any, most: int) -> "Parts":
        """``most`` is that of `most_splits`, so that the order of a sum does not depend on the cache's slots."""
        num_threads = 128 if most <= _FEW_SPLITS else 256
        return cls(splits=part.shape[2], width=part.shape[3], copies=lse.shape[3], num_threads=num_threads)

    @property
    def threads_a_row(self) -> int:
        return self.width // UNIT

    @property
    def groups(self) -> int:
        """Of threads, each of which takes every ``groups``-th split."""
        return self.num_threads // self.threads_a_row

    @property
    def num_chunks(self) -> int:
        return pl.cdiv(self.splits, self.groups * self.chunk)

    @property
    def num_logs(self) -> int:
        """Places for the splits of all chunks, whole warps."""
        return 32 * pl.cdiv(self.groups * self.chunk * self.num_chunks, 32)

    @property
    def scratch(self) -> tuple[int, int]:
        """Sizes of `add_splits`' arrays in shared memory."""
        return self.num_logs, self.groups * self.width


def add_splits(
    t: Any, row: Any, total: Any, each: Any, part: Any, lse: Any, out: Any, logs: Any, sums: Any, *, shape: Parts
) -> None:
    """Global memory: part [rows, s, C], lse [rows, s, c], out [rows, C]; shared: logs [s], sums [groups, C].

    ``total`` tiles are ``each`` a split; splits behind them are not read. They add zeros, so that it does not matter how many
    of them there are.
    """
    width, chunk = shape.width, shape.chunk
    group = t.divide(t.thread(), shape.threads_a_row)
    column = (t.thread() - group * shape.threads_a_row) * UNIT
    nothing = [t.value(part.kind, 0)] * (UNIT if part.kind == FLOAT else UNIT // 2)

    def number(i: Any, j: int) -> Any:
        return (i * chunk + j) * shape.groups + group

    def load(i: Any, j: int) -> list[Any]:
        index = (row * shape.splits + number(i, j)) * width + column
        return t.branch(number(i, j) * each < total, functools.partial(_load, t, part, index), nothing)

    def add_chunk(i: Any, *carry: Any) -> list[Any]:
        words, acc = carry[:-UNIT], carry[-UNIT:]
        ahead = [word for j in range(chunk) for word in load(i + 1, j)]
        for j in range(chunk):
            term = t.exp2(t.load(logs, number(i, j)) - top)
            loaded = words[j * len(nothing) : (j + 1) * len(nothing)]
            values = loaded if part.kind == FLOAT else unpack(t, loaded)
            acc = [t.fma(value, term, x) for value, x in zip(values, acc, strict=True)]
        return [*ahead, *acc]

    words = [word for j in range(chunk) for word in load(t.value(INT, 0), j)]
    # They are on their way before anything waits for a logarithm: no access is moved past a barrier.
    t.barrier()
    top, weight = _weigh(t, shape, row, total, each, lse, logs)
    starts = [c * chunk * shape.groups for c in range(shape.num_chunks)]
    num_used = functools.reduce(operator.add, [t.select(each * start < total, t.value(INT, 1), 0) for start in starts])
    acc = t.loop(num_used, add_chunk, [*words, *[t.value(FLOAT, 0)] * UNIT])[-UNIT:]
    for start in (0, 4):
        t.store_vector(sums, group * width + column + start, acc[start : start + 4])
    t.barrier()
    _add_groups(t, shape, row, weight, out, sums)


def _load(t: Any, part: Any, index: Any) -> list[Any]:
    if part.kind == FLOAT:
        return t.load_vector(part, index, 4) + t.load_vector(part, index + 4, 4)
    return t.load_vector(part, index >> 1, UNIT // 2)


def _weigh(t: Any, shape: Parts, row: Any, total: Any, each: Any, lse: Any, logs: Any) -> tuple[Any, Any]:
    """The splits' logarithms to shared memory; returns the largest, and the sum of weights that refer to it."""
    for start in range(0, shape.num_logs, shape.num_threads):
        number = t.thread() + start
        index = (row * shape.splits + number) * shape.copies
        log = t.branch(number * each < total, functools.partial(_load_one, t, lse, index), [t.value(FLOAT, LOWEST)])
        with t.when(number < shape.num_logs):
            t.store(logs, number, log[0])
    t.barrier()
    own = [t.load(logs, (t.thread() & 31) + start) for start in range(0, shape.num_logs, 32)]
    top = simt.warp_reduce(t, functools.reduce(t.maximum, own), t.maximum)
    weights = [t.exp2(log - top) for log in own]
    return top, simt.warp_reduce(t, functools.reduce(operator.add, weights), operator.add)


def _load_one(t: Any, memory: Any, index: Any) -> list[Any]:
    return [t.load(memory, index)]


def _add_groups(t: Any, shape: Parts, row: Any, weight: Any, out: Any, sums: Any) -> None:
    """Two columns a thread, in the order of the groups."""
    column = t.thread() * 2
    with t.when(column < shape.width):
        pairs = [t.load_vector(sums, column + g * shape.width, 2) for g in range(shape.groups)]
        low, high = (functools.reduce(operator.add, values) / weight for values in zip(*pairs, strict=True))
        t.store(out, (row * shape.width + column) >> 1, t.pair(low, high))


def combine(
    part_BnsC: Float[Array, "B n s C"],
    lse_Bnsc: Float[Array, "B n s c"],
    length_B: Int32[Array, "B"],
    *,
    tree_tiles: int,
    tile: int,
    most: int,
    interpret: object = None,
) -> BFloat16[Array, "B n C"]:
    """Sum over splits of ``part``, each already divided by its own sum of weights, whose base-2 logarithm is ``lse``.

    ``lse`` holds each number c times, so that a row's numbers are sectors that no other block reads.

    A block a row. Its groups of threads take the splits in turn, some at a time while the next are on their way; what they
    have is added up in order. ``most`` is that of `most_splits`.
    """
    batch, rows, splits, width = part_BnsC.shape
    if splits == 1:
        return part_BnsC[:, :, 0].astype(jnp.bfloat16)
    if interpret is not None:
        return combine_reference(part_BnsC, lse_Bnsc, length_B, tree_tiles=tree_tiles, tile=tile)
    shape = Parts.of(part_BnsC, lse_Bnsc, most)
    kinds = (FLOAT if part_BnsC.dtype == jnp.float32 else UINT, FLOAT, UINT, FLOAT, FLOAT)

    def body(part, lse, length, *refs):
        row, b = lax.axis_index("row"), lax.axis_index("batch")
        _, total, each = tile_counts(length[b], tree_tiles, splits, tile)
        memories = list(zip((part, lse, *refs), kinds, strict=True))
        simt.run(functools.partial(add_splits, shape=shape), memories, [b * rows + row, total, each])

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, rows, width), jnp.bfloat16),
        grid=(rows, batch),
        grid_names=("row", "batch"),
        scratch_types=[plgpu.SMEM((size,), jnp.float32) for size in shape.scratch],
        **simt.options("tree_mla_combine", shape.num_threads),
    )(part_BnsC, lse_Bnsc, length_B)


def combine_reference(
    part_BnsC: Float[Array, "B n s C"],
    lse_Bnsc: Float[Array, "B n s c"],
    length_B: Int32[Array, "B"],
    *,
    tree_tiles: int,
    tile: int,
) -> BFloat16[Array, "B n C"]:
    """`combine` in plain JAX, where the kernels before it are interpreted."""
    splits = part_BnsC.shape[2]
    _, total_B, each_B = tile_counts(length_B, tree_tiles, splits, tile)
    is_used_Bs = jnp.arange(splits, dtype=jnp.int32)[None] * each_B[:, None] < total_B[:, None]
    lse_Bns = jnp.where(is_used_Bs[:, None], lse_Bnsc[..., 0], LOWEST)
    weight_Bns = jnp.where(is_used_Bs[:, None], jnp.exp2(lse_Bns - jnp.max(lse_Bns, axis=-1, keepdims=True)), 0)
    part_BnsC = jnp.where(is_used_Bs[:, None, :, None], part_BnsC.astype(jnp.float32), 0)
    sum_BnC = jnp.einsum("Bns,BnsC->BnC", weight_Bns, part_BnsC)
    return (sum_BnC / jnp.sum(weight_Bns, axis=-1)[..., None]).astype(jnp.bfloat16)
