"""draft portable"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_LOWEST = -1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    rows: int = 32
    slots: int = 16
    stages: int = 3
    num_sms: int = 132
    tma: bool = True
    interpret: object = None


def partials(query_BrW, cache_BSW, rows_BNW, length_B, bits_Br2, *, num_latent, scale, splits, config):
    B, R, W = query_BrW.shape
    N = rows_BNW.shape[1]
    C = num_latent
    tiles_r = R // config.rows
    rows, slots, stages = config.rows, config.slots, config.stages
    tree_tiles = N // slots
    factor = scale * math.log2(math.e)
    bf16 = jnp.bfloat16

    def body(q_g, c_g, t_g, len_g, bits_g, o_g, lse_g, q_s, kv_s, r_s, p_s, *bars):
        b, rt, s = (lax.axis_index(a) for a in ("batch", "tile", "split"))
        length = len_g[b]
        prefix_tiles = lax.div(length + (slots - 1), jnp.int32(slots))
        total = prefix_tiles + tree_tiles
        per = lax.div(total + (splits - 1), jnp.int32(splits))
        first = s * per
        count = jnp.minimum(per, total - first)
        at_rows = pl.ds(rt * rows, rows)

        def copy(src, dst, *bar):
            mode = {} if config.tma else {"oob_mode": plgpu.OOBFillMode.PROMISE_IN_BOUNDS}
            plgpu.copy_gmem_to_smem(src, dst, *bar, **mode)

        def fetch(i):
            slot = lax.rem(i, jnp.int32(stages))
            tile = first + i
            bar = [bars[0].at[slot]] if config.tma else []
            parts = [(pl.ds(0, C), kv_s), (pl.ds(C, W - C), r_s)]

            @pl.when(tile < prefix_tiles)
            def _():
                for source, into in parts:
                    copy(c_g.at[b, pl.ds(tile * slots, slots), source], into.at[slot], *bar)

            @pl.when(tile >= prefix_tiles)
            def _():
                for source, into in parts:
                    copy(t_g.at[b, pl.ds((tile - prefix_tiles) * slots, slots), source], into.at[slot], *bar)

        @pl.when(count > 0)
        def _():
            copy(q_g.at[b, at_rows], q_s, *([bars[1]] if config.tma else []))
            for i in range(stages - 1):
                pl.when(i < count)(lambda i=i: fetch(jnp.int32(i)))
            if config.tma:
                plgpu.barrier_wait(bars[1])

            acc_layout = plgpu.Layout.MMA_ACC(bf16, m_warps=rows // 16)
            row_layout = acc_layout.reduce(1)
            lhs = plgpu.Layout.MMA_LHS(bf16, m_warps=rows // 16)
            rhs = plgpu.Layout.MMA_RHS(bf16, m_warps=rows // 16)
            zeros = plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), row_layout)
            acc = plgpu.layout_cast(jnp.zeros((rows, C), jnp.float32), acc_layout)
            column = plgpu.broadcasted_iota(jnp.int32, (rows, slots), 1, layout=acc_layout)

            def product(acc, a, b):
                if config.interpret is not None:
                    return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
                return plgpu.mma(acc, a, b)

            def spread(x, shape):
                return lax.broadcast_in_dim(x, shape, [0])

            def step(i, carry):
                acc, m, l = carry
                slot = lax.rem(i, jnp.int32(stages))
                tile = first + i
                if config.tma:
                    plgpu.barrier_wait(bars[0].at[slot])
                else:
                    plgpu.wait_gmem_to_smem(0)
                x = plgpu.layout_cast(jnp.zeros((rows, slots), jnp.float32), acc_layout)
                for c in range(W // 64):
                    columns = pl.ds(c * 64, 64)
                    query = plgpu.load(q_s.at[:, columns], layout=lhs)
                    key = kv_s.at[slot, :, columns] if c < C // 64 else r_s.at[slot]
                    key = plgpu.load(key.transpose((1, 0)), layout=rhs)
                    x = product(x, query, key)

                def tree(x):
                    start = (tile - prefix_tiles) * slots
                    word = plgpu.load(bits_g.at[b, lax.div(start, jnp.int32(32)), at_rows], layout=row_layout, optimized=False)
                    shift = column + (start & 31)
                    return jnp.where((lax.shift_right_logical(spread(word, x.shape), shift) & 1) != 0, x, -jnp.inf)

                def tail(x):
                    return jnp.where(column < length - tile * slots, x, -jnp.inf)

                x = lax.cond(tile >= prefix_tiles, tree, tail, x)
                m_new = jnp.maximum(m, x.max(axis=1) * factor)
                alpha = jnp.exp2(m - m_new)
                p = jnp.exp2(x * factor - spread(m_new, x.shape))
                l = l * alpha + p.sum(axis=1)
                p_s[...] = p.astype(bf16)
                # The store waits for the whole warpgroup, so nobody reads the last tile's buffer any more.
                pl.when(i + (stages - 1) < count)(lambda: fetch(i + (stages - 1)))
                weight = plgpu.load(p_s, layout=lhs)
                acc = acc * spread(alpha, acc.shape)
                value = plgpu.load(kv_s.at[slot, :, pl.ds(0, C)], layout=rhs)
                value = jnp.where(jnp.abs(value.astype(jnp.float32)) < jnp.inf, value, bf16(0))
                return product(acc, weight, value), m_new, l

            acc, m, l = lax.fori_loop(0, count, step, (acc, zeros + _LOWEST, zeros))
            acc = acc * spread(1.0 / jnp.maximum(l, 1e-30), acc.shape)
            o_g[b, s, at_rows] = acc.astype(bf16)
            lse_g[b, s, at_rows] = jnp.where(l > 0, m + jnp.log2(jnp.maximum(l, 1e-30)), _LOWEST)

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    f = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((B, splits, R, C), bf16),
            jax.ShapeDtypeStruct((B, splits, R), jnp.float32),
        ),
        grid=(splits, tiles_r, B),
        grid_names=("split", "tile", "batch"),
        kernel_name="tree_mla_portable",
        interpret=config.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[
            plgpu.SMEM((rows, W), bf16, transforms=swizzled),
            plgpu.SMEM((stages, slots, C), bf16, transforms=swizzled),
            plgpu.SMEM(
                (stages, slots, W - C),
                bf16,
                transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64)),
            ),
            plgpu.SMEM((rows, slots), bf16),
            *([plgpu.Barrier(num_arrivals=2, num_barriers=stages), plgpu.Barrier()] if config.tma else []),
        ],
    )
    return f(query_BrW, cache_BSW, rows_BNW, length_B, bits_Br2)


def tree_mla_portable(query_BTHW, cache_BSW, rows_BTW, length_B, visible_BTt, *, num_latent, scale, config=Config()):
    from ddtree_jax.pallas import tree_mla_hopper as h

    B, N, H, W = query_BTHW.shape
    rows = jnp.pad(rows_BTW, ((0, 0), (0, -N % config.slots), (0, 0)))
    q = query_BTHW.reshape(B, N * H, W)
    q = jnp.pad(q, ((0, 0), (0, -(N * H) % config.rows), (0, 0)))
    R = q.shape[1]
    bits = h.pack_visible(visible_BTt, H)[:, :, :R]
    splits = max(1, min(config.num_sms // (R // config.rows * B), pl.cdiv(cache_BSW.shape[1], config.slots)))
    part, lse = partials(q, cache_BSW, rows, length_B, bits, num_latent=num_latent, scale=scale, splits=splits, config=config)
    prefix = lax.div(length_B + (config.slots - 1), jnp.int32(config.slots))
    total = prefix + rows.shape[1] // config.slots
    per = lax.div(total + (splits - 1), jnp.int32(splits))
    active = lax.div(total + per - 1, per)
    live = jnp.arange(splits)[None, :, None] < active[:, None, None]
    lse = jnp.where(live, lse, -jnp.inf)
    w = jax.nn.softmax(lse * math.log(2.0), axis=1)
    out = jnp.einsum("bsr,bsrc->brc", w, jnp.where(live[..., None], part, jnp.bfloat16(0)).astype(jnp.float32))
    return out[:, : N * H].astype(jnp.bfloat16).reshape(B, N, H, num_latent)
