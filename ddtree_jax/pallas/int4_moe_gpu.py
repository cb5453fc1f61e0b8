"""Routed experts with INT4 group-32 weights on a GPU: one kernel for routing to output."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas import registers as regs
from ddtree_jax.pallas.int4_blocks import BLOCK_COLUMNS, BLOCK_ROWS, BLOCK_WORDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    num_blocks: int = 132
    warpgroups: int = 4
    tile_rows: int = 512
    step_columns: int = 128
    num_stages: int = 6
    mode: str = "full"


class Schedule(NamedTuple):
    expert_U: Any
    rows_UN: Any
    place_P: Any  # unit * 8 + place
    num_units_1: Any


def schedule_reference(expert_TX, num_experts):
    e = expert_TX.reshape(-1)
    P = e.shape[0]
    valid = (e >= 0) & (e < num_experts)
    same = (e[:, None] == e[None]) & valid[None]
    before = jnp.arange(P)[None] < jnp.arange(P)[:, None]
    rank = jnp.sum(same & before, axis=1, dtype=jnp.int32)
    lead = valid & (rank % regs.TOKENS == 0)
    chunk = rank // regs.TOKENS
    less = (e[None] < e[:, None]) | ((e[None] == e[:, None]) & (chunk[None] < chunk[:, None]))
    unit = jnp.sum(less & lead[None], axis=1, dtype=jnp.int32)
    place = jnp.where(valid, unit * regs.TOKENS + rank % regs.TOKENS, -1)
    drop = P * regs.TOKENS
    rows = jnp.full((P * regs.TOKENS,), -1, jnp.int32).at[jnp.where(valid, place, drop)].set(
        jnp.arange(P, dtype=jnp.int32), mode="drop")
    expert = jnp.zeros((P,), jnp.int32).at[jnp.where(lead, unit, P)].set(e, mode="drop")
    return Schedule(expert, rows.reshape(P, regs.TOKENS), place, jnp.sum(lead, dtype=jnp.int32)[None])


def int4_moe_gpu(x_TD, expert_TX, weight_TX, gate_up_EMKW, down_EMKW, config: Config):
    T, D = x_TD.shape
    X = expert_TX.shape[1]
    P = T * X
    E = gate_up_EMKW.shape[0]
    schedule = schedule_reference(expert_TX, E)
    G, wgs = config.num_blocks, config.warpgroups
    tile_blocks = config.tile_rows // BLOCK_ROWS
    wg_blocks = tile_blocks // wgs
    step_blocks = config.step_columns // BLOCK_COLUMNS
    stages = config.num_stages
    bm = config.tile_rows
    half = bm // 2
    F = BLOCK_ROWS // 2 * gate_up_EMKW.shape[1]
    mt1, ks1 = -(-gate_up_EMKW.shape[1] // tile_blocks), gate_up_EMKW.shape[2] // step_blocks
    mt2, ks2 = -(-down_EMKW.shape[1] // tile_blocks), down_EMKW.shape[2] // step_blocks
    n_threads = 128 * wgs

    def body(x, gu, dn, uexp, rows, place, nu, wt, out, y1, h, y2, w1, w2, ring, bars):
        c, wg = lax.axis_index("c"), lax.axis_index("wg")
        sems = pl.get_global(plgpu.SemaphoreType.REGULAR((4,)))
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
            ring_state = (i0, i1)
            for blocks, mt, ks in ((gu, mt1, ks1), (dn, mt2, ks2)):
                start, end = span(mt, ks)

                def step(s, carry):
                    stage, phase, unit, tile, k = carry
                    regs.fetch_step(blocks, ring, bars, uexp[jnp.minimum(unit, units - 1)], tile * tile_blocks,
                        k * step_blocks, stage, phase, step_blocks=step_blocks, tile_blocks=tile_blocks, num_stages=stages)
                    return (*advance_ring(stage, phase), *advance(unit, tile, k, mt, ks))

                out_state = lax.fori_loop(start, end, step, (*ring_state, *split(start, mt, ks)))
                ring_state = out_state[:2]

        @pl.when(wg < wgs)
        def _():
            ring_state = (i0, i0)

            def stream(ring_state, tokens, whole, partial, mt, ks, per_row, has_halves):
                start, end = span(mt, ks)
                last_unit = jnp.maximum(units - 1, 0)
                load = lambda unit, k: regs.load_tokens(
                    tokens, rows, jnp.minimum(unit, last_unit), k * config.step_columns, config.step_columns, per_row)
                zero = plgpu.layout_cast(jnp.zeros((64 * wg_blocks, 8), jnp.float32), regs.ACCUMULATOR)
                where = split(start, mt, ks)
                first_k = where[2]
                if config.mode == "copy":
                    def copy_step(s, carry):
                        stage, phase = carry
                        regs.wait_barrier(bars, stage, phase)
                        regs.arrive_warp(bars, stage + stages)
                        return advance_ring(stage, phase)
                    return lax.fori_loop(start, end, copy_step, ring_state)

                def step(s, carry):
                    stage, phase, unit, tile, k, words, sums = carry
                    after = advance(unit, tile, k, mt, ks)
                    next_words = load(after[0], after[2])
                    regs.wait_barrier(bars, stage, phase)
                    sums = regs.multiply_step(ring, stage, wg, words, sums, step_blocks=step_blocks,
                        warpgroup_blocks=wg_blocks, tile_blocks=tile_blocks)
                    regs.arrive_warp(bars, stage + stages)
                    ends = k + 1 == ks

                    @pl.when(ends | (s + 1 == end))
                    def _():
                        # The tile began in an earlier block's span if this span's first step is not its first.
                        is_partial = (s - k < start).astype(jnp.int32)
                        regs.store_sums(sums, whole, partial, rows, unit, tile, c, is_partial, wg,
                            warpgroup_blocks=wg_blocks, tile_blocks=tile_blocks, has_halves=has_halves)

                    sums = sums * jnp.where(ends, 0.0, 1.0)
                    return (*advance_ring(stage, phase), *after, next_words, sums)

                carry = (*ring_state, *where, load(where[0], where[2]), zero)
                return lax.fori_loop(start, end, step, carry)[:2]

            def parts(unit, tile, mt, ks):
                """First and last block that hold steps of a tile."""
                begin = (unit * mt + tile) * ks
                return owner(begin, mt, ks), owner(begin + ks - 1, mt, ks)

            me, everyone = c * wgs + wg, G * wgs
            ring_state = stream(ring_state, x, y1, w1, mt1, ks1, X, True)
            regs.sync_grid(sems, i0, jnp.int32(G), n_threads)

            vec = plgpu.Layout.WG_STRIDED((half,), vec_size=half // 128)

            def combine(i, _):
                task = me + i * everyone
                pair, tile = task // mt1, lax.rem(task, mt1)
                where = place[pair]

                @pl.when(where >= 0)
                def _():
                    unit, n = where // 8, lax.rem(where, 8)
                    first, last = parts(unit, tile, mt1, ks1)
                    gate_up = tuple(plgpu.load(y1.at[pair, tile, j], layout=vec) for j in range(2))

                    def add(b, gate_up):
                        return tuple(v + plgpu.load(w1.at[b, n, j], layout=vec) for j, v in enumerate(gate_up))

                    gate, up = lax.fori_loop(first + 1, last + 1, add, gate_up)
                    value = gate / (1.0 + jnp.exp(-gate)) * up
                    h[pair, pl.ds(tile * half, half)] = value.astype(jnp.bfloat16)
                return 0

            tasks = P * mt1
            lax.fori_loop(0, (tasks - me + everyone - 1) // everyone, combine, 0)
            regs.sync_grid(sems, i1, jnp.int32(G), n_threads)
            stream(ring_state, h, y2, w2, mt2, ks2, 1, False)
            regs.sync_grid(sems, jnp.int32(2), jnp.int32(G), n_threads)

            full = plgpu.Layout.WG_STRIDED((bm,), vec_size=bm // 128)

            def reduce(i, _):
                task = me + i * everyone
                token, tile = task // mt2, lax.rem(task, mt2)
                places = [place[token * X + j] for j in range(X)]
                values = [plgpu.load(y2.at[token * X + j, tile], layout=full) for j in range(X)]
                total = None
                for j in range(X):
                    where = jnp.maximum(places[j], 0)
                    unit, n = where // 8, lax.rem(where, 8)
                    first, last = parts(unit, tile, mt2, ks2)
                    add = lambda b, v: v + plgpu.load(w2.at[b, n], layout=full)
                    last = jnp.where(places[j] < 0, first, last)
                    value = lax.fori_loop(first + 1, last + 1, add, values[j])
                    weighted = jnp.where(places[j] < 0, 0.0, value * wt[token, j])
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
            jax.ShapeDtypeStruct((P, mt1 * half), jnp.bfloat16),
            jax.ShapeDtypeStruct((P, mt2, bm), f32),
            jax.ShapeDtypeStruct((G, 8, 2, half), f32),
            jax.ShapeDtypeStruct((G, 8, bm), f32),
        ),
        grid=(G,), grid_names=("c",), num_threads=wgs + 1, thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, approx_math=True),
        scratch_types=[
            plgpu.SMEM((stages * tile_blocks * step_blocks, BLOCK_WORDS), jnp.int32),
            plgpu.SMEM((2 * stages,), jnp.int64) if False else plgpu.SMEM((4 * stages,), jnp.int32),
        ],
    )
    outs = kernel(x_TD, gate_up_EMKW, down_EMKW, schedule.expert_U, schedule.rows_UN, schedule.place_P,
                  schedule.num_units_1, weight_TX)
    return outs[0][:, :D], outs
