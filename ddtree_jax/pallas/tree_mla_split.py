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
_NUM_THREADS, _LOADS_IN_FLIGHT = 512, 9


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


def num_splits(batch: int, row_tiles: int, num_slots: int, tree_tiles: int, tile: int, num_sms: int) -> int:
    """Blocks along the slots: as many as fill the GPU, at most one a tile."""
    return max(1, min(num_sms // (row_tiles * batch), pl.cdiv(num_slots, tile) + tree_tiles))


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
    """Static shape of what `add_splits` adds up; the logarithm of each row's sum of weights stands ``copies`` times."""

    splits: int
    width: int
    copies: int

    @property
    def threads_a_row(self) -> int:
        return self.width // UNIT

    @property
    def groups(self) -> int:
        """Of threads, each of which takes every ``groups``-th split."""
        return _NUM_THREADS // self.threads_a_row

    @property
    def turns(self) -> int:
        """Splits of a group."""
        return pl.cdiv(self.splits, self.groups)

    @property
    def scratch(self) -> tuple[int, int, int]:
        """Sizes of `add_splits`' arrays in shared memory."""
        return self.splits, self.groups * self.width, 2 * self.groups


def add_splits(
    t: Any,
    shape: Parts,
    row: Any,
    total: Any,
    each: Any,
    part: Any,
    lse: Any,
    out: Any,
    logs: Any,
    sums: Any,
    stats: Any,
) -> None:
    """Global: part [rows, s, C], lse [rows, s, c], out [rows, C]; shared: logs [s], sums [groups, C], stats [2, groups].

    ``total`` tiles are ``each`` a split; splits behind them are not read. Groups and turns without a split add zeros, so that
    it does not matter how many of them there are.
    """
    width, groups = shape.width, shape.groups
    group = t.divide(t.thread(), shape.threads_a_row)
    column = (t.thread() - group * shape.threads_a_row) * UNIT
    nothing = [t.value(part.kind, 0)] * (UNIT if part.kind == FLOAT else UNIT // 2)

    def load(number: Any) -> list[Any]:
        index = (row * shape.splits + number) * width + column
        return t.branch(number * each < total, functools.partial(_load, t, part, index), nothing)

    turns = [group + turn * groups for turn in range(shape.turns)]
    chunks = [turns[start : start + _LOADS_IN_FLIGHT] for start in range(0, shape.turns, _LOADS_IN_FLIGHT)]
    loaded = [load(number) for number in chunks[0]]
    # They are on their way before anything waits for a logarithm: no access is moved past a barrier.
    t.barrier()
    _stage_logs(t, shape, row, total, each, lse, logs)
    top, weight, acc = t.value(FLOAT, LOWEST), t.value(FLOAT, 0), [t.value(FLOAT, 0)] * UNIT
    for i, numbers in enumerate(chunks):
        parts = [load(number) for number in numbers] if i else loaded
        own = [t.load(logs, t.minimum(number, shape.splits - 1)) for number in numbers]
        is_used = [number * each < total for number in numbers]
        own = [t.select(used, log, LOWEST) for used, log in zip(is_used, own, strict=True)]
        new_top = functools.reduce(t.maximum, own, top)
        scale = t.exp2(top - new_top)
        top, weight, acc = new_top, weight * scale, [x * scale for x in acc]
        for used, log, words in zip(is_used, own, parts, strict=True):
            term = t.select(used, t.exp2(log - new_top), 0)
            values = words if part.kind == FLOAT else unpack(t, words)
            weight, acc = weight + term, [x + value * term for x, value in zip(acc, values, strict=True)]
    for start in (0, 4):
        t.store_vector(sums, group * width + column + start, acc[start : start + 4])
    with t.when(t.is_equal(column, 0)):
        t.store(stats, group, top)
        t.store(stats, group + groups, weight)
    t.barrier()
    _add_groups(t, shape, row, out, sums, stats)


def _stage_logs(t: Any, shape: Parts, row: Any, total: Any, each: Any, lse: Any, logs: Any) -> None:
    """The splits' logarithms to shared memory, each once."""
    for start in range(0, shape.splits, _NUM_THREADS):
        number = t.thread() + start
        with t.when((number < shape.splits) & (number * each < total)):
            t.store(logs, number, t.load(lse, (row * shape.splits + number) * shape.copies))
    t.barrier()


def _load(t: Any, part: Any, index: Any) -> list[Any]:
    if part.kind == FLOAT:
        return t.load_vector(part, index, 4) + t.load_vector(part, index + 4, 4)
    return t.load_vector(part, index >> 1, UNIT // 2)


def _add_groups(t: Any, shape: Parts, row: Any, out: Any, sums: Any, stats: Any) -> None:
    """Two columns a thread, in the order of the groups."""
    groups = [t.value(INT, g) for g in range(shape.groups)]
    column = t.thread() * 2
    with t.when(column < shape.width):
        tops, weights = ([t.load(stats, g + start) for g in groups] for start in (0, shape.groups))
        top = functools.reduce(t.maximum, tops)
        scales = [t.exp2(x - top) for x in tops]
        pairs = [t.load_vector(sums, g * shape.width + column, 2) for g in groups]
        weight, low, high = (
            functools.reduce(operator.add, [x * scale for x, scale in zip(values, scales, strict=True)])
            for values in (weights, *zip(*pairs, strict=True))
        )
        t.store(out, (row * shape.width + column) >> 1, t.pair(low / weight, high / weight))


def combine(
    part_BnsC: Float[Array, "B n s C"],
    lse_Bnsc: Float[Array, "B n s c"],
    length_B: Int32[Array, "B"],
    *,
    tree_tiles: int,
    tile: int,
    interpret: object = None,
) -> BFloat16[Array, "B n C"]:
    """Sum over splits of ``part``, each already divided by its own sum of weights, whose base-2 logarithm is ``lse``.

    ``lse`` holds each number c times, so that a row's numbers are sectors that no other block reads.

    A block a row. Its groups of threads take the splits in turn, all loads at once, and what they have is added up in order.
    """
    batch, rows, splits, width = part_BnsC.shape
    if splits == 1:
        return part_BnsC[:, :, 0].astype(jnp.bfloat16)
    if interpret is not None:
        return combine_reference(part_BnsC, lse_Bnsc, length_B, tree_tiles=tree_tiles, tile=tile)
    shape = Parts(splits=splits, width=width, copies=lse_Bnsc.shape[-1])
    kinds = (FLOAT if part_BnsC.dtype == jnp.float32 else UINT, FLOAT, UINT, FLOAT, FLOAT, FLOAT)

    def body(part, lse, length, *refs):
        row, b = lax.axis_index("row"), lax.axis_index("batch")
        _, total, each = tile_counts(length[b], tree_tiles, splits, tile)
        memories = list(zip((part, lse, *refs), kinds, strict=True))
        simt.run(functools.partial(_add_splits, shape), memories, [b * rows + row, total, each])

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, rows, width), jnp.bfloat16),
        grid=(rows, batch),
        grid_names=("row", "batch"),
        scratch_types=[plgpu.SMEM((size,), jnp.float32) for size in shape.scratch],
        **simt.options("tree_mla_combine", _NUM_THREADS),
    )(part_BnsC, lse_Bnsc, length_B)


def _add_splits(shape: Parts, t: Any, *args: Any) -> None:
    add_splits(t, shape, *args)


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
