"""Routed experts with INT4 group-32 weights on a GPU: one kernel for routing to output."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas import registers as regs
from ddtree_jax.pallas.int4_blocks import BLOCK_COLUMNS, BLOCK_ROWS
from ddtree_jax.pallas.int4_schedule import make_schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    num_blocks: int = 132
    warpgroups: int = 2
    tile_rows: int = 512
    step_columns: int = 128
    num_stages: int = 5
    batch: int = 4
    mode: str = "full"
    warp_map: bool = False
    unroll: int = 4
    hint: bool = False


def int4_moe_gpu(x_TD, expert_TX, weight_TX, gate_up_EMKW, down_EMKW, config: Config):
    T, D = x_TD.shape
    X = expert_TX.shape[1]
    P = T * X
    E = gate_up_EMKW.shape[0]
    schedule = make_schedule(expert_TX, E)
    G, wgs = config.num_blocks, config.warpgroups
    tile_blocks = config.tile_rows // BLOCK_ROWS
    wg_blocks = tile_blocks // wgs
    step_blocks = config.step_columns // BLOCK_COLUMNS
    stages = config.num_stages
    bm = config.tile_rows
    half = bm // 2
    (_, M1, K1, g1, _), (_, M2, K2, g2, _) = gate_up_EMKW.shape, down_EMKW.shape
    mt1, ks1 = -(-M1 * g1 // tile_blocks), K1 // step_blocks
    mt2, ks2 = -(-M2 * g2 // tile_blocks), K2 // step_blocks
    n_threads = 128 * wgs
    stage_bytes = regs.stage_bytes(tile_blocks, step_blocks)
    tokens_in_stage = tile_blocks * step_blocks * 2304
    x_stride = regs.token_stride(config.step_columns)
    h_columns = mt1 * half
    h_stride = regs.token_stride(h_columns)

    def body(x, gu, dn, info, rows, place, nu, sems, wt, out, y1, y2, w1, w2, ring, bars, hbuf):
        c, wg = lax.axis_index("c"), lax.axis_index("wg")
        regs.init_barriers(bars, [1] * stages + [4 * wgs] * stages)
        units = nu[0]

        def span(mt, ks):
            total = units * (mt * ks)
            return c * total // G, (c + 1) * total // G

        def owner(step, mt, ks):
            return ((step + 1) * G - 1) // (units * (mt * ks))

        def split(step, mt, ks):
            tile = step // ks
            return tile // mt, lax.rem(tile, mt), lax.rem(step, ks)

        def advance(unit, tile, k, mt, ks):
            end_k = k + 1 == ks
            end_t = end_k & (tile + 1 == mt)
            k = jnp.where(end_k, 0, k + 1)
            return unit + end_t.astype(jnp.int32), jnp.where(end_t, 0, tile + end_k.astype(jnp.int32)), k

        def advance_ring(stage, phase):
            last = stage + 1 == stages
            return jnp.where(last, 0, stage + 1), jnp.where(last, 1 - phase, phase)

        i0, i1 = jnp.int32(0), jnp.int32(1)

        @pl.when(wg == wgs)
        def _():
            def fetch(warp):
                done = i0
                for blocks, mt, ks, g, with_tokens in ((gu, mt1, ks1, g1, 15), (dn, mt2, ks2, g2, 0)):
                    start, end = span(mt, ks)
                    # A warp takes every fourth step, counted through both products.
                    first = start + lax.rem(warp - done + 4 * (done // 4 + 1), 4)

                    def step(i, _):
                        s = first + 4 * i
                        index = done + s - start
                        unit, tile, k = split(s, mt, ks)
                        entry = info[unit]
                        regs.fetch_step(blocks, ring, bars, x, rows, entry // 16, tile * (tile_blocks // g),
                            k * step_blocks, lax.rem(index, stages), 1 - lax.rem(index // stages, 2), unit,
                            entry & with_tokens,
                            step_blocks=step_blocks, tile_blocks=tile_blocks, num_stages=stages, per_row=X, hint=config.hint)
                        return 0

                    lax.fori_loop(0, jnp.maximum(end - first + 3, 0) // 4, step, 0)
                    done = done + end - start

            plgpu.warp_map(fetch) if config.warp_map else fetch(regs.warp_index())

        @pl.when(wg < wgs)
        def _():
            ring_state = (i0, i0)

            def stream(ring_state, tokens, stride, prepare, whole, partial, mt, ks, group, has_halves):
                start, end = span(mt, ks)
                zero = plgpu.layout_cast(jnp.zeros((64 * wg_blocks, 8), jnp.float32), regs.ACCUMULATOR)
                if config.mode == "copy":
                    def copy_step(s, carry):
                        stage, phase = carry
                        regs.wait_barrier(bars, stage, phase)
                        regs.arrive_warp(bars, stage + stages)
                        return advance_ring(stage, phase)
                    return lax.fori_loop(start, end, copy_step, ring_state)

                def step(s, carry):
                    stage, phase, unit, tile, k, count, sums = carry
                    is_new = (s == start) | ((tile == 0) & (k == 0))
                    count = lax.cond(is_new, lambda: prepare(unit), lambda: count)
                    regs.wait_barrier(bars, stage, phase)
                    where = stage * stage_bytes + tokens_in_stage if has_halves else k * (2 * config.step_columns)
                    sums = regs.multiply_step(ring, tokens, sums, stage, wg, where, count, step_blocks=step_blocks,
                        warpgroup_blocks=wg_blocks, tile_blocks=tile_blocks, group=group, stride=stride)
                    regs.arrive_warp(bars, stage + stages)
                    ends = k + 1 == ks

                    @pl.when(ends | (s + 1 == end))
                    def _():
                        # The tile began in an earlier block's span if this span's first step is not its first.
                        is_partial = (s - k < start).astype(jnp.int32)
                        regs.store_sums(sums, whole, partial, rows, unit, tile, c, is_partial, wg,
                            warpgroup_blocks=wg_blocks, tile_blocks=tile_blocks, has_halves=has_halves)

                    sums = sums * jnp.where(ends, 0.0, 1.0)
                    return (*advance_ring(stage, phase), *advance(unit, tile, k, mt, ks), count, sums)

                return lax.fori_loop(start, end, step, (*ring_state, *split(start, mt, ks), i0, zero))[:2]

            def parts(unit, tile, mt, ks):
                """First and last block that hold steps of a tile."""
                begin = (unit * mt + tile) * ks
                return owner(begin, mt, ks), owner(begin + ks - 1, mt, ks)

            def sum_parts(values, spans, load, unroll):
                """Adds to value i the parts of the blocks behind the first, ``load(i, block)``, in order."""
                most = spans[0][1] - spans[0][0]
                for first, last in spans[1:]:
                    most = jnp.maximum(most, last - first)

                def add(step, values):
                    added = []
                    base = 1 + step * unroll
                    for i, (value, (first, last)) in enumerate(zip(values, spans)):
                        blocks = [first + base + j for j in range(unroll)]
                        parts = [load(i, jnp.minimum(block, last)) for block in blocks]
                        for block, part in zip(blocks, parts):
                            value = jax.tree.map(lambda v, p: v + jnp.where(block <= last, p, 0.0), value, part)
                        added.append(value)
                    return added

                return lax.fori_loop(0, (most + unroll - 1) // unroll, add, values)

            me, everyone = c * wgs + wg, G * wgs
            ring_state = stream(ring_state, ring, x_stride, lambda unit: info[unit] & 15, y1, w1, mt1, ks1, g1, True)
            regs.sync_grid(sems, i0, jnp.int32(G), n_threads)

            vec = plgpu.Layout.WG_STRIDED((half,), vec_size=half // 128)

            def swiglu(unit):
                """Puts the unit's hidden rows into shared memory; returns how many there are."""
                count = info[unit] & 15
                regs.sync_threads(n_threads)
                tasks = count * mt1

                def some(i, _):
                    task = [jnp.minimum((i * config.batch + j) * wgs + wg, tasks - 1) for j in range(config.batch)]
                    places = [(t // mt1, lax.rem(t, mt1)) for t in task]
                    pairs = [rows[unit, n] for n, _ in places]
                    spans = [parts(unit, tile, mt1, ks1) for _, tile in places]
                    values = [
                        [plgpu.load(y1.at[pair, tile, j], layout=vec) for j in range(2)]
                        for pair, (_, tile) in zip(pairs, places)
                    ]
                    load = lambda i, b: [plgpu.load(w1.at[b, places[i][0], j], layout=vec) for j in range(2)]
                    for (n, tile), (gate, up) in zip(places, sum_parts(values, spans, load, config.unroll)):
                        value = gate / (1.0 + jnp.exp(-gate)) * up
                        hbuf[n, pl.ds(tile * half, half)] = value.astype(jnp.bfloat16)
                    return 0

                per = config.batch * wgs
                lax.fori_loop(0, (tasks + per - 1) // per, some, 0)
                regs.sync_threads(n_threads)
                return count

            stream(ring_state, hbuf, h_stride, swiglu, y2, w2, mt2, ks2, g2, False)
            regs.sync_grid(sems, i1, jnp.int32(G), n_threads)

            full = plgpu.Layout.WG_STRIDED((bm,), vec_size=bm // 128)

            def reduce(i, _):
                task = me + i * everyone
                token, tile = task // mt2, lax.rem(task, mt2)
                places = [place[token * X + j] for j in range(X)]
                weights = [wt[token, j] for j in range(X)]
                values = [plgpu.load(y2.at[token * X + j, tile], layout=full) for j in range(X)]
                spans = []
                for where in places:
                    first, last = parts(jnp.maximum(where, 0) // 8, tile, mt2, ks2)
                    spans.append((first, jnp.where(where < 0, first, last)))
                load = lambda i, b: plgpu.load(w2.at[b, jnp.maximum(places[i], 0) % 8], layout=full)
                total = None
                for value, where, weight in zip(sum_parts(values, spans, load, 1), places, weights):
                    weighted = jnp.where(where < 0, 0.0, value * weight)
                    total = weighted if total is None else total + weighted
                out[token, pl.ds(tile * bm, bm)] = total.astype(jnp.bfloat16)
                return 0

            lax.fori_loop(0, (T * mt2 - me + everyone - 1) // everyone, reduce, 0)

    f32 = jnp.float32
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((T, mt2 * bm), jnp.bfloat16),
            jax.ShapeDtypeStruct((P, mt1, 2, half), f32),
            jax.ShapeDtypeStruct((P, mt2, bm), f32),
            jax.ShapeDtypeStruct((G, 8, 2, half), f32),
            jax.ShapeDtypeStruct((G, 8, bm), f32),
        ),
        grid=(G,), grid_names=("c",), num_threads=wgs + 1, thread_name="wg", kernel_name="int4_moe",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, approx_math=True),
        scratch_types=[
            plgpu.SMEM((stages * stage_bytes // 4,), jnp.int32),
            plgpu.SMEM((4 * stages,), jnp.int32),
            plgpu.SMEM((8, h_stride // 2), jnp.bfloat16),
        ],
    )
    outs = kernel(x_TD, gate_up_EMKW, down_EMKW, schedule.unit_U, schedule.pair_UN, schedule.place_P,
                  schedule.num_units, schedule.counters, weight_TX)
    return outs[0][:, :D], outs
