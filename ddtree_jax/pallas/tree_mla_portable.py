"""Tree MLA on `plgpu.mma`, for every GPU from Ampere on: 32 rows (nodes x heads) a block, one warpgroup, tiles of 16 slots.

::

    copies   | tile 0  tile 1 | tile 2 | tile 3 |           each into the buffer that the last tile has just left
    compute  |                | tile 0 | tile 1 | tile 2    time ->

Query, three buffers of tiles and the weights take 95 KB of shared memory, so that the form fits into the 99 KB (101,376
bytes) of sm_86, sm_89 and sm_120. From Hopper on the copy engine fills the buffers, before it ``cp.async`` does.
Splits, mask words and values that are not finite are treated as in the Hopper form.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Bool, Float, Int32

from ddtree_jax.pallas import tree_mla_split as split
from ddtree_jax.pallas.split_sum import LOWEST
from ddtree_jax.pallas.tree_mla_split import Query

_ROWS = 32
_TILE = 16
_COPIES = 32  # Of a row's logarithm: a line of 128 bytes, as Pallas wants them written.
_BF16 = jnp.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """``copy_engine`` is for Hopper and later, where copies report to barriers; ``num_sms`` blocks run at once."""

    num_sms: int = 132
    num_buffers: int = 3
    copy_engine: bool = True


def tree_mla_portable(
    query: Query,
    cache_BSW: Float[Array, "B S W"],
    rows_BTW: Float[Array, "B T W"],
    length_B: Int32[Array, "B"],
    visible_BTt: Bool[Array, "B T T"],
    *,
    scale: float,
    config: Config = Config(),
    interpret: object = None,
) -> BFloat16[Array, "B T H C"]:
    """See `tree_mla.tree_mla`.

    Raises:
      NotImplementedError: for shapes and types that the tiles do not fit; the offending value is named.
    """
    batch, num_nodes, heads, num_latent = query.latent_BTHC.shape
    split.check(query, cache_BSW, _TILE)
    query_BnW = query.join().reshape(batch, num_nodes * heads, -1)
    query_BnW = jnp.pad(query_BnW, ((0, 0), (0, -query_BnW.shape[1] % _ROWS), (0, 0)))
    rows_BTW = jnp.pad(rows_BTW, ((0, 0), (0, -num_nodes % _TILE), (0, 0)))
    words_Bwn = split.pack_visible(visible_BTt, heads, _TILE, _ROWS)
    part_BnsC, lse_Bnsc = _attend_splits(
        query_BnW, cache_BSW, rows_BTW, length_B, words_Bwn, num_latent, scale, config, interpret
    )
    out_BnC = split.combine(
        part_BnsC,
        lse_Bnsc,
        length_B,
        tree_tiles=rows_BTW.shape[1] // _TILE,
        tile=_TILE,
        most=split.most_splits(batch, query_BnW.shape[1] // _ROWS, config.num_sms),
        num_sms=config.num_sms,
        interpret=interpret,
    )
    return out_BnC[:, : num_nodes * heads].reshape(batch, num_nodes, heads, num_latent)


def _attend_splits(
    query_BnW: Array,
    cache_BSW: Array,
    rows_BTW: Array,
    length_B: Array,
    words_Bwn: Array,
    num_latent: int,
    scale: float,
    config: Config,
    interpret: object,
) -> tuple[Float[Array, "B n s C"], Float[Array, "B n s c"]]:
    """Each split's output, divided by its sum of weights, and the base-2 logarithm of that sum."""
    batch, num_rows, width = query_BnW.shape
    rotary = width - num_latent
    row_tiles, tree_tiles = num_rows // _ROWS, rows_BTW.shape[1] // _TILE
    most = split.most_splits(batch, row_tiles, config.num_sms)
    splits = split.num_splits(most, cache_BSW.shape[1], tree_tiles, _TILE)
    factor = scale * math.log2(math.e)
    ahead = config.num_buffers - 1
    layouts = {"m_warps": _ROWS // 16}
    acc_layout = plgpu.Layout.MMA_ACC(_BF16, **layouts)
    row_layout = acc_layout.reduce(1)
    lhs, rhs = plgpu.Layout.MMA_LHS(_BF16, **layouts), plgpu.Layout.MMA_RHS(_BF16, **layouts)

    def multiply_add(acc, a, b):
        if interpret is not None:
            return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
        return plgpu.mma(acc, a, b)

    def spread(row, shape):
        return lax.broadcast_in_dim(row, shape, [0])

    def body(query_g, cache_g, tree_g, length_g, words_g, out_g, lse_g, query_s, latent_s, rotary_s, weights_s, *bars):
        b, row_tile, s = (lax.axis_index(name) for name in ("batch", "row_tile", "split"))
        at_rows = pl.ds(row_tile * _ROWS, _ROWS)
        length = length_g[b]
        prefix_tiles, total, each = split.tile_counts(length, tree_tiles, splits, _TILE)
        first = s * each
        count = jnp.clip(total - first, 0, each)

        def copy(source, into, ready):
            if config.copy_engine:
                plgpu.copy_gmem_to_smem(source, into, ready)
            else:
                plgpu.copy_gmem_to_smem(source, into, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

        def wait(number):
            if config.copy_engine:
                plgpu.barrier_wait(bars[0].at[number])
            else:
                plgpu.wait_gmem_to_smem(0)

        def fetch(i):
            buffer, tile = lax.rem(i, jnp.int32(config.num_buffers)), first + i

            def fetch_from(source_g, start):
                for at_columns, into in ((pl.ds(0, num_latent), latent_s), (pl.ds(num_latent, rotary), rotary_s)):
                    ready = bars[0].at[buffer] if config.copy_engine else None
                    copy(source_g.at[b, pl.ds(start, _TILE), at_columns], into.at[buffer], ready)

            pl.when(tile < prefix_tiles)(lambda: fetch_from(cache_g, tile * _TILE))
            pl.when(tile >= prefix_tiles)(lambda: fetch_from(tree_g, (tile - prefix_tiles) * _TILE))

        def score(buffer):
            x = plgpu.layout_cast(jnp.zeros((_ROWS, _TILE), jnp.float32), acc_layout)
            for c in range(width // 64):
                query = plgpu.load(query_s.at[:, pl.ds(c * 64, 64)], layout=lhs)
                key = latent_s.at[buffer, :, pl.ds(c * 64, 64)] if c < num_latent // 64 else rotary_s.at[buffer]
                x = multiply_add(x, query, plgpu.load(key.transpose((1, 0)), layout=rhs))
            return x

        def mask(x, tile):
            column = plgpu.broadcasted_iota(jnp.int32, (_ROWS, _TILE), 1, layout=acc_layout)

            def tree(x):
                start = (tile - prefix_tiles) * _TILE
                word_at = words_g.at[b, lax.div(start, jnp.int32(split.WORD)), at_rows]
                word = plgpu.load(word_at, layout=row_layout, optimized=False)
                bit = lax.shift_right_logical(spread(word, x.shape), column + (start & (split.WORD - 1))) & 1
                return jnp.where(bit != 0, x, -jnp.inf)

            def prefix(x):
                return jnp.where(column < length - tile * _TILE, x, -jnp.inf)

            return lax.cond(tile >= prefix_tiles, tree, prefix, x)

        def add_tile(i, carry):
            acc, top, total_weight = carry
            buffer = lax.rem(i, jnp.int32(config.num_buffers))
            wait(buffer)
            x = mask(score(buffer), first + i)
            new_top = jnp.maximum(top, x.max(axis=1) * factor)
            alpha = jnp.exp2(top - new_top)
            weights = jnp.exp2(x * factor - spread(new_top, x.shape))
            total_weight = total_weight * alpha + weights.sum(axis=1)
            weights_s[...] = weights.astype(_BF16)
            # The store waits for the whole warpgroup, so nobody reads the last tile's buffer any more.
            pl.when(i + ahead < count)(lambda: fetch(i + ahead))
            value = plgpu.load(latent_s.at[buffer], layout=rhs)
            value = jnp.where(jnp.abs(value.astype(jnp.float32)) < jnp.inf, value, _BF16(0))
            acc = multiply_add(acc * spread(alpha, acc.shape), plgpu.load(weights_s, layout=lhs), value)
            return acc, new_top, total_weight

        @pl.when(count > 0)
        def _():
            copy(query_g.at[b, at_rows], query_s, bars[1] if config.copy_engine else None)
            for i in range(ahead):
                pl.when(i < count)(lambda i=i: fetch(jnp.int32(i)))
            if config.copy_engine:
                plgpu.barrier_wait(bars[1])
            zeros = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), row_layout)
            acc = plgpu.layout_cast(jnp.zeros((_ROWS, num_latent), jnp.float32), acc_layout)
            acc, top, total_weight = lax.fori_loop(0, count, add_tile, (acc, zeros + LOWEST, zeros))
            total_weight = jnp.maximum(total_weight, 1e-30)
            out_g[b, at_rows, s] = acc * spread(1.0 / total_weight, acc.shape)
            lse = jnp.maximum(top + jnp.log2(total_weight), LOWEST)
            lse_g[b, at_rows, s] = plgpu.layout_cast(spread(lse, (_ROWS, _COPIES)), acc_layout)

    def buffers(tiling, swizzle, *shape):
        return plgpu.SMEM(shape, _BF16, transforms=(plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(swizzle)))

    bars = [plgpu.Barrier(num_arrivals=2, num_barriers=config.num_buffers), plgpu.Barrier()]
    kernel = plgpu.kernel(
        body,
        out_type=(
            # float32, for stores of whole sectors (32 bytes).
            jax.ShapeDtypeStruct((batch, num_rows, splits, num_latent), jnp.float32),
            jax.ShapeDtypeStruct((batch, num_rows, splits, _COPIES), jnp.float32),
        ),
        grid=(splits, row_tiles, batch),
        grid_names=("split", "row_tile", "batch"),
        kernel_name="tree_mla_portable",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[
            buffers((8, 64), 128, _ROWS, width),
            buffers((8, 64), 128, config.num_buffers, _TILE, num_latent),
            # Half as wide, since cp.async wants the number of (8, n) pieces to be a multiple of the warps.
            buffers((8, 32), 64, config.num_buffers, _TILE, rotary),
            plgpu.SMEM((_ROWS, _TILE), _BF16),
            *(bars if config.copy_engine else []),
        ],
        interpret=interpret,
    )
    return kernel(query_BnW, cache_BSW, rows_BTW, length_B, words_Bwn)
