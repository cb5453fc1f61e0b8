"""What both forms of tree MLA share: how the slots are split among blocks, mask words, and the sum of the splits.

Rows are pairs of a node and a head; n stands for their axis, s for that of the splits.

::

    tiles    0   1   2   3   4   5   6        prefix tiles 0 to 5, as many as the length needs; tile 6 is the tree
    split    0   0   1   1   2   2   3        4 splits of ceil(7 / 4) tiles; the last one has less, others may have none
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Bool, Float, Int32

LOWEST = -1e30
"""Stands for the maximum over no scores: finite, so that differences of maxima are never NaN."""

LATENTS, ROTARY = (256, 512), 64
"""Widths that the tiles are made for."""

WORD = 32
_WARPGROUPS, _SPLITS_A_GROUP = 8, 16
_LOADS_IN_FLIGHT = 20


def check(query_BTHW: Array, cache_BSW: Array, num_latent: int, slot_multiple: int) -> None:
    """Raises NotImplementedError for shapes and types that a form's tiles do not fit."""
    if query_BTHW.dtype != jnp.bfloat16 or cache_BSW.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"query is {query_BTHW.dtype}, cache is {cache_BSW.dtype}; only bfloat16 is supported"
        )
    if num_latent not in LATENTS:
        raise NotImplementedError(f"num_latent is {num_latent}; only {LATENTS} are supported")
    if query_BTHW.shape[-1] - num_latent != ROTARY:
        raise NotImplementedError(
            f"the rotary part is {query_BTHW.shape[-1] - num_latent} wide; only {ROTARY} is supported"
        )
    if cache_BSW.shape[1] % slot_multiple:
        raise NotImplementedError(
            f"the cache has {cache_BSW.shape[1]} slots; only multiples of {slot_multiple} are supported"
        )


def num_splits(batch: int, row_tiles: int, num_slots: int, tile: int, num_sms: int) -> int:
    """Blocks along the slots: as many as fill the GPU, at most one a tile."""
    return max(1, min(num_sms // (row_tiles * batch), pl.cdiv(num_slots, tile) + 1))


def tile_counts(length: Array, tree_tiles: int, splits: int, tile: int) -> tuple[Array, Array, Array]:
    """Tiles of the committed prefix, all tiles, and tiles a split, for one sequence."""
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


def combine(
    part_BnsC: Float[Array, "B n s C"],
    lse_Bnsc: Float[Array, "B n s c"],
    length_B: Int32[Array, "B"],
    *,
    tree_tiles: int,
    tile: int,
    barriers: bool = True,
    interpret: object = None,
) -> BFloat16[Array, "B n C"]:
    """Sum over splits of ``part``, each already divided by its own sum of weights, whose base-2 logarithm is ``lse``.

    ``lse`` holds each number c times, so that a row's numbers are sectors that no other block reads.

    A block a row. Its warpgroups take equal shares of the splits, all loads at once, and the first adds up their sums
    in order. Splits that had no tiles are never read. Without ``barriers`` (before Hopper) a block has one warpgroup.
    """
    batch, rows, splits, width = part_BnsC.shape
    if splits == 1:
        return part_BnsC[:, :, 0].astype(jnp.bfloat16)
    groups = min(_WARPGROUPS, pl.cdiv(splits, _SPLITS_A_GROUP)) if barriers else 1
    share = pl.cdiv(splits, groups)
    chunks = pl.cdiv(share, _LOADS_IN_FLIGHT)
    chunk = pl.cdiv(share, chunks)

    def body(part_g, lse_g, len_g, out_g, *scratch):
        b, row, group = lax.axis_index("batch"), lax.axis_index("row"), lax.axis_index("group")
        _, total, each = tile_counts(len_g[b], tree_tiles, splits, tile)
        used = lax.div(total + each - 1, each)
        end = jnp.minimum((group + 1) * share, used)
        layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)

        def add_chunk(c, carry):
            top, weight, acc = carry
            start = group * share + c * chunk
            parts, lses = [], []
            for i in range(chunk):
                s = jnp.minimum(start + i, used - 1)
                parts.append(plgpu.load(part_g.at[b, row, s], layout=layout, optimized=False))
                lses.append(jnp.where(start + i < end, lse_g[b, row, s, 0], LOWEST))
            new_top = functools.reduce(jnp.maximum, lses, top)
            scale = jnp.exp2(top - new_top)
            acc, weight = acc * scale, weight * scale
            for part, lse in zip(parts, lses, strict=True):
                term = jnp.exp2(lse - new_top)
                acc, weight = acc + part.astype(jnp.float32) * term, weight + term
            return new_top, weight, acc

        zeros = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
        carry = (jnp.float32(LOWEST), jnp.float32(0), zeros)
        if chunks == 1:
            top, weight, acc = add_chunk(0, carry)
        else:
            top, weight, acc = lax.fori_loop(0, chunks, add_chunk, carry)
        if groups == 1:
            out_g[b, row] = (acc / weight).astype(jnp.bfloat16)
            return
        acc_s, stat_s, done = scratch
        acc_s[group] = acc
        stat_s[group, 0] = top
        stat_s[group, 1] = weight
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

        @pl.when(group == 0)
        def _():
            tops = [stat_s[g, 0] for g in range(groups)]
            top = functools.reduce(jnp.maximum, tops)
            scales = [jnp.exp2(t - top) for t in tops]
            weight = functools.reduce(jnp.add, [stat_s[g, 1] * scale for g, scale in enumerate(scales)])
            terms = [plgpu.load(acc_s.at[g], layout=layout) * scale for g, scale in enumerate(scales)]
            out_g[b, row] = (functools.reduce(jnp.add, terms) / weight).astype(jnp.bfloat16)

    shared = [
        plgpu.SMEM((groups, width), jnp.float32),
        plgpu.SMEM((groups, 2), jnp.float32),
        plgpu.Barrier(num_arrivals=groups),
    ]
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, rows, width), jnp.bfloat16),
        grid=(rows, batch),
        grid_names=("row", "batch"),
        num_threads=groups,
        thread_name="group",
        kernel_name="tree_mla_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=shared if groups > 1 else [],
        interpret=interpret,
    )
    return kernel(part_BnsC, lse_Bnsc, length_B)
