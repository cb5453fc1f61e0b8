"""draft"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)
_TILE = 64
_LOWEST = -1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    stages: int = 2
    num_sms: int = 132
    min_tiles: int = 1
    mode: str = "R"
    combine_only: bool = False
    pdl: bool = False
    multicast: bool = False
    interpret: object = None


def _swizzled(*shape):
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def partials(query_BrW, cache_BSW, rows_BNW, length_B, bits_Br2, *, num_latent, scale, splits, config):
    B, R, W = query_BrW.shape
    N = rows_BNW.shape[1]
    C = num_latent
    half = C // 2
    tiles_r = pl.cdiv(R, _TILE)
    rows_in = min(R, _TILE)
    factor = scale * math.log2(math.e)
    stages = config.stages
    paired = config.multicast and tiles_r % 2 == 0

    def plan(length, s):
        prefix_tiles = lax.div(length + (_TILE - 1), jnp.int32(_TILE))
        total = prefix_tiles + 1
        per = jnp.maximum(lax.div(total + (splits - 1), jnp.int32(splits)), config.min_tiles)
        first = s * per
        return prefix_tiles, first, jnp.minimum(per, total - first)

    def body(q_g, c_g, t_g, len_g, bits_g, o_g, lse_g, qo_s, kv_s, lse_s, q_bar, kv_bar, free_bar, done_bar):
        b, rt, s, wg = (lax.axis_index(a) for a in ("batch", "tile", "split", "wg"))
        shared = {}
        if paired:
            rt = rt * 2 + lax.axis_index("pair")
            shared = {"collective_axes": "pair"}
        if config.pdl:
            plgpu.griddepcontrol_wait()
        q_s, o_s = qo_s
        length = len_g[b]
        prefix_tiles, first, count = plan(length, s)
        rows = pl.ds(rt * _TILE, rows_in)

        @pl.when((wg == 2) & (count > 0))
        def _():
            plgpu.set_max_registers(40, action="decrease")
            plgpu.copy_gmem_to_smem(q_g.at[b, rows], q_s.at[pl.ds(0, rows_in)], q_bar)

            @pl.loop(0, count)
            def _(i):
                slot = lax.rem(i, jnp.int32(stages))
                tile = first + i

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(free_bar.at[slot])

                @pl.when(tile < prefix_tiles)
                def _():
                    plgpu.copy_gmem_to_smem(c_g.at[b, pl.ds(tile * _TILE, _TILE)], kv_s.at[slot], kv_bar.at[slot], **shared)

                @pl.when(tile >= prefix_tiles)
                def _():
                    plgpu.copy_gmem_to_smem(t_g.at[b], kv_s.at[slot, pl.ds(0, N)], kv_bar.at[slot], **shared)

        @pl.when((wg < 2) & (count > 0))
        def _():
            plgpu.set_max_registers(232, action="increase")
            cols = pl.ds(wg * half, half)
            zeros = plgpu.layout_cast(jnp.zeros((_TILE,), jnp.float32), _ROW)
            acc = plgpu.layout_cast(jnp.zeros((_TILE, half), jnp.float32), _WGMMA)
            column = plgpu.broadcasted_iota(jnp.int32, (_TILE, _TILE), 1, layout=_WGMMA)
            bits = [plgpu.load(bits_g.at[b, w, pl.ds(rt * _TILE, _TILE)], layout=_ROW, optimized=False) for w in range(2)]
            plgpu.barrier_wait(q_bar)

            def step(i, carry):
                acc, m, l = carry
                slot = lax.rem(i, jnp.int32(stages))
                tile = first + i
                is_tree = tile >= prefix_tiles
                limit = length - tile * _TILE
                plgpu.barrier_wait(kv_bar.at[slot])
                if config.mode == "load":
                    @pl.when(i + stages < count)
                    def _():
                        plgpu.barrier_arrive(free_bar.at[slot])
                    return carry

                def scores(ref):
                    plgpu.wgmma(ref, q_s, kv_s.at[slot].transpose((1, 0)))
                    return ref[...]

                x = pl.run_scoped(scores, plgpu.ACC((_TILE, _TILE), jnp.float32))

                def masked(x):
                    def tree(x):
                        low, high = (lax.broadcast_in_dim(w, x.shape, [0]) for w in bits)
                        word = jnp.where(column < 32, low, high)
                        return jnp.where((lax.shift_right_logical(word, column & 31) & 1) != 0, x, -jnp.inf)

                    def tail(x):
                        return jnp.where(column < limit, x, -jnp.inf)

                    return lax.cond(is_tree, tree, tail, x)

                ragged = is_tree | (limit < _TILE)
                x = lax.cond(ragged, masked, lambda x: x, x)

                @pl.when(ragged)
                def _():
                    for c in range(half // 64):
                        at = kv_s.at[slot, :, pl.ds(wg * half + c * 64, 64)]
                        v = plgpu.load(at, layout=_WGMMA)
                        at[...] = jnp.where(jnp.abs(v.astype(jnp.float32)) < jnp.inf, v, jnp.bfloat16(0))
                    plgpu.commit_smem()

                m_new = jnp.maximum(m, x.max(axis=1) * factor)
                alpha = jnp.exp2(m - m_new)
                p = jnp.exp2(x * factor - lax.broadcast_in_dim(m_new, x.shape, [0]))
                l = l * alpha + p.sum(axis=1)
                acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
                p16 = p.astype(jnp.bfloat16)

                if config.interpret is not None:
                    acc = acc + jnp.dot(p16, kv_s[slot, :, cols], preferred_element_type=jnp.float32)
                else:
                    acc = pl.run_state(lambda ref: plgpu.wgmma(ref, p16, kv_s.at[slot, :, cols]))(plgpu.ACC.init(acc))
                # The last arrivals would reach a neighbour that may be gone; nobody waits for them.
                @pl.when(i + stages < count)
                def _():
                    plgpu.barrier_arrive(free_bar.at[slot])

                return acc, m_new, l

            acc, m, l = lax.fori_loop(0, count, step, (acc, zeros + _LOWEST, zeros))
            inverse = 1.0 / jnp.maximum(l, 1e-30)
            acc = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
            plgpu.barrier_arrive(done_bar)
            plgpu.barrier_wait(done_bar)
            o_s[wg] = acc.astype(jnp.bfloat16)

            @pl.when(wg == 0)
            def _():
                lse_s[...] = jnp.where(l > 0, m + jnp.log2(jnp.maximum(l, 1e-30)), _LOWEST)

            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_s.at[wg, pl.ds(0, rows_in)], o_g.at[b, s, rows, cols])

            @pl.when(wg == 0)
            def _():
                plgpu.copy_smem_to_gmem(lse_s, lse_g.at[b, s, pl.ds(rt * _TILE, _TILE)])

            if config.pdl:
                plgpu.griddepcontrol_launch_dependents()
            plgpu.wait_smem_to_gmem(0)

    f = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((B, splits, R, C), jnp.bfloat16),
            jax.ShapeDtypeStruct((B, splits, tiles_r * _TILE), jnp.float32),
        ),
        grid=(splits, tiles_r // 2 if paired else tiles_r, B),
        **({"cluster": (2,), "cluster_names": ("pair",)} if paired else {}),
        grid_names=("split", "tile", "batch"),
        num_threads=3,
        thread_name="wg",
        kernel_name="tree_mla_partials",
        interpret=config.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[
            plgpu.RefUnion(_swizzled(_TILE, W), _swizzled(2, _TILE, half)),
            _swizzled(stages, _TILE, W),
            plgpu.SMEM((_TILE,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=stages),
            plgpu.ClusterBarrier(collective_axes=("pair",), num_arrivals=2, num_barriers=stages)
            if paired
            else plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2),
        ],
    )
    return f(query_BrW, cache_BSW, rows_BNW, length_B, bits_Br2)


def plan_splits(batch, rows, num_slots, config):
    """Number of CTAs along the prefix: fills the SMs, at most one tile each."""
    tiles_r = pl.cdiv(rows, _TILE)
    return max(1, min(config.num_sms // (tiles_r * batch), pl.cdiv(num_slots, _TILE) + 1))


def combine(part_BsrC, lse_Bsr, length_B, *, rows, splits, config, max_groups=8):
    B, _, R, C = part_BsrC.shape
    groups = min(max_groups, pl.cdiv(splits, 8))
    each = pl.cdiv(splits, groups)

    def body(part_g, lse_g, len_g, o_g, acc_s, stat_s, done_bar):
        b, r, wg = (lax.axis_index(a) for a in ("batch", "row", "wg"))
        prefix_tiles = lax.div(len_g[b] + (_TILE - 1), jnp.int32(_TILE))
        total = prefix_tiles + 1
        per = jnp.maximum(lax.div(total + (splits - 1), jnp.int32(splits)), config.min_tiles)
        active = lax.div(total + per - 1, per)
        start = wg * each

        if config.pdl:
            plgpu.griddepcontrol_wait()

        layout = plgpu.Layout.WG_STRIDED((C,), vec_size=4)

        def own():
            lse, rows_ = [], []
            for i in range(each):
                s = jnp.minimum(start + i, active - 1)
                rows_.append(plgpu.load(part_g.at[b, s, r], layout=layout, optimized=False))
                lse.append(jnp.where(start + i < active, lse_g[b, s, r], _LOWEST))
            top = functools.reduce(jnp.maximum, lse)
            weights = [jnp.exp2(x - top) for x in lse]
            acc = functools.reduce(jnp.add, [row.astype(jnp.float32) * w for row, w in zip(rows_, weights, strict=True)])
            return top, functools.reduce(jnp.add, weights), acc

        top, weight, acc = own()
        if groups == 1:
            o_g[b, r] = (acc / weight).astype(jnp.bfloat16)
            return
        acc_s[wg] = acc
        stat_s[wg, 0] = top
        stat_s[wg, 1] = weight
        plgpu.barrier_arrive(done_bar)
        plgpu.barrier_wait(done_bar)

        @pl.when(wg == 0)
        def _():
            tops = [stat_s[g, 0] for g in range(groups)]
            top = functools.reduce(jnp.maximum, tops)
            weights = [jnp.exp2(t - top) for t in tops]
            total_weight = functools.reduce(jnp.add, [stat_s[g, 1] * w for g, w in enumerate(weights)])
            acc = functools.reduce(
                jnp.add, [plgpu.load(acc_s.at[g], layout=layout) * w for g, w in enumerate(weights)]
            )
            o_g[b, r] = (acc / total_weight).astype(jnp.bfloat16)

    f = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B, R, C), jnp.bfloat16),
        grid=(R, B),
        grid_names=("row", "batch"),
        num_threads=groups,
        thread_name="wg",
        kernel_name="tree_mla_combine",
        interpret=config.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[
            plgpu.SMEM((groups, C), jnp.float32),
            plgpu.SMEM((groups, 2), jnp.float32),
            plgpu.Barrier(num_arrivals=groups),
        ],
    )
    return f(part_BsrC, lse_Bsr, length_B)


def pack_visible(visible_BNn, heads):
    """Ancestor bits of every row (node, head): [B, 2, N * H] int32."""
    B, N, _ = visible_BNn.shape
    wide = jnp.pad(visible_BNn, ((0, 0), (0, 0), (0, _TILE - N)))
    shift = jnp.arange(32, dtype=jnp.uint32)
    words = jnp.sum(wide.reshape(B, N, 2, 32).astype(jnp.uint32) << shift, axis=-1, dtype=jnp.uint32)
    words = lax.bitcast_convert_type(words, jnp.int32).transpose(0, 2, 1)
    rows = jnp.repeat(words, heads, axis=2)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % _TILE)))


def tree_mla_hopper(query_BTHW, cache_BSW, rows_BTW, length_B, visible_BTt, *, num_latent, scale, config=Config()):
    B, N, H, W = query_BTHW.shape
    bits = pack_visible(visible_BTt, H)
    rows = jnp.pad(rows_BTW, ((0, 0), (0, -N % 8), (0, 0)))
    q = query_BTHW.reshape(B, N * H, W)
    splits = plan_splits(B, N * H, cache_BSW.shape[1], config)
    part, lse = partials(q, cache_BSW, rows, length_B, bits, num_latent=num_latent, scale=scale, splits=splits, config=config)
    out = combine(part, lse, length_B, rows=N * H, splits=splits, config=config)
    return out.reshape(B, N, H, num_latent)
