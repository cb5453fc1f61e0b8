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
    no_auto: bool = False
    static: bool = False
    max_groups: int = 8
    salt: bool = True
    progressive: bool = True
    interpret: object = None


def _swizzled(*shape):
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def partials(query_BrW, cache_BSW, rows_BNW, length_B, bits_Br2, *, num_latent, scale, splits, config):
    B, R, W = query_BrW.shape
    N = rows_BNW.shape[1]
    C = num_latent
    half, rotary = C // 2, W - C
    tiles_r = pl.cdiv(R, _TILE)
    rows_in = min(R, _TILE)
    factor = scale * math.log2(math.e)

    def plan(length, s):
        prefix_tiles = lax.div(length + (_TILE - 1), jnp.int32(_TILE))
        total = prefix_tiles + 1
        per = jnp.maximum(lax.div(total + (splits - 1), jnp.int32(splits)), config.min_tiles)
        first = s * per
        return prefix_tiles, first, jnp.minimum(per, total - first)

    def body(q_g, c_g, t_g, len_g, bits_g, o_g, lse_g, q_s, qr_s, kv_s, r_s, m_s, l_s, q_bar, kv_bar, kv_free, r_bar, r_free, p_bar, done):
        b, rt, s, wg = (lax.axis_index(a) for a in ("batch", "tile", "split", "wg"))
        if config.pdl:
            plgpu.griddepcontrol_wait()
        rows = pl.ds(rt * _TILE, rows_in)
        length = len_g[b]
        prefix_tiles, first, count = plan(length, s)
        pairs = lax.div(jnp.maximum(count, 0) + 1, jnp.int32(2))

        @pl.when(wg == 2)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            for h in range(2):
                plgpu.copy_gmem_to_smem(q_g.at[b, rows, pl.ds(h * half, half)], q_s.at[h, pl.ds(0, rows_in)], q_bar)
            plgpu.copy_gmem_to_smem(q_g.at[b, rows, pl.ds(C, rotary)], qr_s.at[pl.ds(0, rows_in)], q_bar)

            @pl.when(count <= 0)
            def _():
                plgpu.barrier_wait(q_bar)

            def fetch(tile, columns, into, t, bar):
                @pl.when(tile < prefix_tiles)
                def _():
                    plgpu.copy_gmem_to_smem(c_g.at[b, pl.ds(tile * _TILE, _TILE), columns], into.at[...], bar)

                @pl.when(tile >= prefix_tiles)
                def _():
                    plgpu.copy_gmem_to_smem(t_g.at[b, :, columns], into.at[pl.ds(0, N)], bar)

            @pl.loop(0, pairs)
            def _(i):
                def latent(t, h):
                    @pl.when(2 * i + t < count)
                    def _():
                        @pl.when(i > 0)
                        def _():
                            plgpu.barrier_wait(kv_free.at[2 * t + h])
                        fetch(first + 2 * i + t, pl.ds(h * half, half), kv_s.at[t, h], t, kv_bar.at[2 * t + h])

                def rotated(t):
                    @pl.when(2 * i + t < count)
                    def _():
                        @pl.when(i > 0)
                        def _():
                            plgpu.barrier_wait(r_free.at[t])
                        fetch(first + 2 * i + t, pl.ds(C, rotary), r_s.at[t], t, r_bar.at[t])

                latent(0, 0)
                latent(1, 1)
                rotated(0)
                rotated(1)
                latent(0, 1)
                latent(1, 0)

        def consume(wg):
            plgpu.set_max_registers(240, action="increase")
            wg0, peer = wg, 1 - wg
            zeros = plgpu.layout_cast(jnp.zeros((_TILE,), jnp.float32), _ROW)
            acc = plgpu.layout_cast(jnp.zeros((_TILE, half), jnp.float32), _WGMMA)
            column = plgpu.broadcasted_iota(jnp.int32, (_TILE, _TILE), 1, layout=_WGMMA)
            plgpu.barrier_wait(q_bar)

            def is_ragged(tile):
                return (tile >= prefix_tiles) | (length - tile * _TILE < _TILE)

            def clean(tile, t, wg):
                """A weight of zero times a NaN would be NaN; scores are masked, but values have to be finite."""
                @pl.when(is_ragged(tile))
                def _():
                    @pl.loop(0, half // 64)
                    def _(c):
                        at = kv_s.at[t, wg, :, pl.ds(c * 64, 64)]
                        v = plgpu.load(at, layout=_WGMMA)
                        at[...] = jnp.where(jnp.abs(v.astype(jnp.float32)) < jnp.inf, v, jnp.bfloat16(0))
                    plgpu.commit_smem()

            def mask(x, tile):
                def tree(x):
                    low, high = (
                        lax.broadcast_in_dim(
                            plgpu.load(bits_g.at[b, w, pl.ds(rt * _TILE, _TILE)], layout=_ROW, optimized=False), x.shape, [0]
                        )
                        for w in range(2)
                    )
                    word = jnp.where(column < 32, low, high)
                    return jnp.where((lax.shift_right_logical(word, column & 31) & 1) != 0, x, -jnp.inf)

                def tail(x):
                    return jnp.where(column < length - tile * _TILE, x, -jnp.inf)

                return lax.cond(is_ragged(tile), lambda x: lax.cond(tile >= prefix_tiles, tree, tail, x), lambda x: x, x)

            def weigh(acc, p16, t, wg, during=lambda: None):
                values = kv_s.at[t, wg]
                if config.interpret is not None:
                    during()
                    return acc + jnp.dot(p16, values[...], preferred_element_type=jnp.float32)

                def run(ref):
                    plgpu.wgmma(ref, p16, values)
                    during()

                return pl.run_state(run)(plgpu.ACC.init(acc))

            def spread(x, shape):
                return lax.broadcast_in_dim(x, shape, [0])

            def pair(i, carry):
                wg, peer = wg0, 1 - wg0
                if config.salt:
                    wg = wg0 ^ (i & lax.shift_right_logical(length, jnp.int32(31)))
                    peer = 1 - wg
                own_tile = first + 2 * i + wg
                peer_tile = first + 2 * i + peer
                has_peer = 2 * i + peer < count

                def own(carry):
                    acc, m, l = carry

                    waits = [kv_bar.at[2 * wg + wg], r_bar.at[wg], kv_bar.at[2 * wg + peer]]
                    if not config.progressive:
                        for bar in waits:
                            plgpu.barrier_wait(bar)

                    def scores(ref):
                        parts = [(q_s.at[wg], kv_s.at[wg, wg]), (qr_s, r_s.at[wg]), (q_s.at[peer], kv_s.at[wg, peer])]
                        for bar, (query, key) in zip(waits, parts, strict=True):
                            if config.progressive:
                                plgpu.barrier_wait(bar)
                            plgpu.wgmma(ref, query, key.transpose((1, 0)))
                        return ref[...]

                    x = pl.run_scoped(scores, plgpu.ACC((_TILE, _TILE), jnp.float32))
                    x = mask(x, own_tile)
                    clean(own_tile, wg, wg)
                    m_new = jnp.maximum(m, x.max(axis=1) * factor)
                    p = jnp.exp2(x * factor - spread(m_new, x.shape))
                    p16 = p.astype(jnp.bfloat16)
                    r_s[wg] = p16
                    m_s[wg] = m_new
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(p_bar.at[wg])
                    alpha = jnp.exp2(m - m_new)
                    l = l * alpha + p.sum(axis=1)
                    acc = weigh(acc * spread(alpha, acc.shape), p16, wg, wg)
                    plgpu.barrier_arrive(kv_free.at[2 * wg + wg])
                    return acc, m_new, l

                def other(carry):
                    acc, m, l = carry
                    plgpu.barrier_wait(kv_bar.at[2 * peer + wg])
                    plgpu.barrier_wait(p_bar.at[peer])
                    p16 = plgpu.load(r_s.at[peer], layout=_WGMMA)
                    m_peer = plgpu.load(m_s.at[peer], layout=_ROW)
                    plgpu.barrier_arrive(r_free.at[peer])
                    clean(peer_tile, peer, wg)
                    m_new = jnp.maximum(m, m_peer)
                    alpha = jnp.exp2(m - m_new)
                    p16 = (p16.astype(jnp.float32) * spread(jnp.exp2(m_peer - m_new), p16.shape)).astype(jnp.bfloat16)
                    acc = weigh(acc * spread(alpha, acc.shape), p16, peer, wg)
                    plgpu.barrier_arrive(kv_free.at[2 * peer + wg])
                    return acc, m_new, l * alpha

                if config.mode == "T":
                    return other(own(carry))
                carry = lax.cond(2 * i + wg < count, own, lambda c: c, carry)
                return lax.cond(has_peer, other, lambda c: c, carry)

            carry = (acc, zeros + _LOWEST, zeros)
            acc, m, l = lax.fori_loop(0, pairs, pair, carry)
            l_s[wg] = l
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)
            l = l + plgpu.load(l_s.at[peer], layout=_ROW)
            inverse = 1.0 / jnp.maximum(l, 1e-30)
            acc = acc * spread(inverse, acc.shape)
            q_s[wg] = acc.astype(jnp.bfloat16)

            def store_lse():
                m_s[0] = jnp.where(l > 0, m + jnp.log2(jnp.maximum(l, 1e-30)), _LOWEST)

            when(wg == 0, store_lse)

            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_s.at[wg, pl.ds(0, rows_in)], o_g.at[b, s, rows, pl.ds(wg * half, half)])

            when(wg == 0, lambda: plgpu.copy_smem_to_gmem(m_s.at[0], lse_g.at[b, s, pl.ds(rt * _TILE, _TILE)]))

            if config.pdl:
                plgpu.griddepcontrol_launch_dependents()
            plgpu.wait_smem_to_gmem(0)

        def when(condition, do):
            if isinstance(condition, bool):  # noqa
                if condition:
                    do()
            else:
                pl.when(condition)(do)

        if config.static:
            for w in range(2):
                pl.when((wg == w) & (count > 0))(functools.partial(consume, length * 0 + w))
        else:
            pl.when((wg < 2) & (count > 0))(functools.partial(consume, wg))

    f = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((B, splits, R, C), jnp.bfloat16),
            jax.ShapeDtypeStruct((B, splits, tiles_r * _TILE), jnp.float32),
        ),
        grid=(splits, tiles_r, B),
        grid_names=("split", "tile", "batch"),
        num_threads=3,
        thread_name="wg",
        kernel_name="tree_mla_partials",
        interpret=config.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=config.no_auto),
        scratch_types=[
            _swizzled(2, _TILE, half),
            _swizzled(_TILE, rotary),
            _swizzled(2, 2, _TILE, half),
            _swizzled(2, _TILE, rotary),
            plgpu.SMEM((2, _TILE), jnp.float32),
            plgpu.SMEM((2, _TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_barriers=4),
            plgpu.Barrier(num_barriers=4),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
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
    out = combine(part, lse, length_B, rows=N * H, splits=splits, config=config, max_groups=config.max_groups)
    return out.reshape(B, N, H, num_latent)
