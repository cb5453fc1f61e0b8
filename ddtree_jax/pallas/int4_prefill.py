"""Routed experts with INT4 group-32 weights for many tokens on Hopper: grouped products near the tensor cores' rate.

A unit is up to 64 tokens of one expert (`schedule`) and a tile of 512 rows of its weights. Blocks, one a multiprocessor, take
units in turn, in the order of experts::

    schedule      pairs sorted by expert, units of equal size                                              plain JAX
    gate and up   copies ──► ring ──► 2 warpgroups: weights in registers, wgmma ──► silu(gate) * up ──► hidden_PF
    down          copies ──► ring ──► 2 warpgroups: the same                                        ──► y_PD by pair
    sum           a token's pairs, weighted, in order, in float32                                          ──► y_TD

Weights are read once for each unit of tokens: all of an expert's while its tokens are no more than 64. 2,048 tokens of 8 experts on a shard of 384
experts of 256 features are 180 GFLOP, 228 us at 790 TFLOP/s, and 1.19 GB of weights, 260 us at 4.57 TB/s.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int32

from ddtree_jax.pallas import int4_prefill_steps as steps
from ddtree_jax.pallas import warps
from ddtree_jax.pallas.int4_blocks import BLOCK_COLUMNS

_INT = jnp.int32
_WARPS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tuning. ``token_counts`` are the numbers of tokens that code exists for; a unit takes the next larger.

    ``shared_bytes`` of shared memory a block, less than the device's limit by what the compiler adds. Registers are those
    of a thread.
    """

    num_blocks: int = 132
    token_counts: tuple[int, ...] = (16, 32, 48, 64)
    shared_bytes: int = 231_000
    copy_registers: int = 40
    compute_registers: int = 232


class Schedule(NamedTuple):
    """Units of tokens: [expert, first place, number of tokens], and how many there are.

    Place p holds pair ``pair_P[p]`` (``t * X + x``) of token ``token_P[p]``; places behind all units hold pairs without an
    expert here.
    """

    unit_U3: Int32[Array, "U 3"]
    num_units_1: Int32[Array, "1"]
    pair_P: Int32[Array, "P"]
    token_P: Int32[Array, "P"]


def build_schedule(expert_TX: Int32[Array, "T X"], num_experts: int) -> Schedule:
    """Sorts pairs by expert and cuts each expert's into as few units as can be, of sizes that differ by 8 at most."""
    T, X = expert_TX.shape
    P = T * X
    expert_P = expert_TX.reshape(P)
    key_P = jnp.where((expert_P >= 0) & (expert_P < num_experts), expert_P, num_experts)
    sorted_P, pair_P = lax.sort((key_P, jnp.arange(P, dtype=_INT)), num_keys=1, is_stable=True)
    first_E = jnp.searchsorted(sorted_P, jnp.arange(num_experts + 1, dtype=_INT), method="scan_unrolled").astype(_INT)
    count_E = jnp.diff(first_E)
    units_E = -(-count_E // steps.MAX_TOKENS)
    size_E = 8 * -(-count_E // jnp.maximum(8 * units_E, 1))
    end_E = jnp.cumsum(units_E, dtype=_INT)
    U = min(num_experts, P) + P // steps.MAX_TOKENS
    unit_U = jnp.arange(U, dtype=_INT)
    expert_U = jnp.searchsorted(end_E, unit_U, side="right", method="scan_unrolled").astype(_INT)
    expert_U = jnp.minimum(expert_U, num_experts - 1)
    turn_U = unit_U - (end_E - units_E)[expert_U]
    start_U = turn_U * size_E[expert_U]
    counted_U = jnp.clip(count_E[expert_U] - start_U, 0, size_E[expert_U])
    unit_U3 = jnp.stack([expert_U, first_E[expert_U] + start_U, counted_U], axis=1)
    return Schedule(unit_U3, end_E[-1:], pair_P, pair_P // X)


def _run_product(
    rows: BFloat16[Array, "R W"],
    row_P: Int32[Array, "P"],
    blocks: Int32[Array, "E M K m w"],
    schedule: Schedule,
    width: int,
    is_gate_up: bool,
    config: Config,
) -> BFloat16[Array, "P W"]:
    """One product of all units. ``rows`` by place are ``rows[row_P]``; the result's rows are places (gate and up) or pairs."""
    _, num_tiles, num_columns, _, _ = blocks.shape
    features = steps.TILE_ROWS // steps.WARPGROUPS // (2 if is_gate_up else 1)
    staging_bytes = steps.WARPGROUPS * steps.staging_bytes(features)
    num_stages = (config.shared_bytes - staging_bytes) // steps.STAGE_BYTES

    def body(rows_g, row_g, blocks_g, unit_g, num_units_g, pair_g, out_g, ring, staging, barriers) -> None:
        arrivals = [steps.FULL_ARRIVALS] * num_stages + [_WARPS * steps.WARPGROUPS] * num_stages
        warps.init_barriers(barriers, arrivals)
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        total = num_units_g[0] * num_tiles
        turns = (total - block + config.num_blocks - 1) // config.num_blocks

        def load_unit(turn: Array) -> tuple[Array, ...]:
            index = block + turn * config.num_blocks
            unit = jnp.minimum(index // num_tiles, unit_g.shape[0] - 1)
            return (*(unit_g[unit, i] for i in range(3)), lax.rem(index, num_tiles))

        def each_unit(function: Any) -> None:
            def step(turn: Array, entry: tuple) -> tuple:
                following = load_unit(turn + 1)
                function(turn * num_columns, *entry)
                return following

            lax.fori_loop(0, turns, step, load_unit(jnp.int32(0)))

        @pl.when(warpgroup == steps.WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(config.copy_registers, action="decrease")

            def fetch(done: Array, expert: Array, first: Array, count: Array, tile: Array) -> None:
                steps.fetch_unit(
                    ring, barriers, blocks_g, rows_g, row_g, done, expert, first, count, tile, num_stages=num_stages
                )

            each_unit(fetch)

        @pl.when(warpgroup < steps.WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(config.compute_registers, action="increase")

            def multiply(done: Array, expert: Array, first: Array, count: Array, tile: Array) -> None:
                del expert
                smaller = 0
                for num_tokens in config.token_counts:

                    @pl.when((count > smaller) & (count <= num_tokens))
                    def _() -> None:
                        scalars = (done, first, count, tile, warpgroup)
                        sizes = {"num_columns": num_columns, "num_tokens": num_tokens, "num_stages": num_stages}
                        if is_gate_up:
                            steps.multiply_gate_up(ring, barriers, staging, out_g, *scalars, **sizes)
                        else:
                            steps.multiply_down(ring, barriers, staging, out_g, pair_g, *scalars, **sizes)

                    smaller = num_tokens

            each_unit(multiply)
            if not is_gate_up:
                steps.finish_stores()

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((row_P.shape[0], width), jnp.bfloat16),
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=steps.WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="int4_prefill_gate_up" if is_gate_up else "int4_prefill_down",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, approx_math=True
        ),
        scratch_types=[
            plgpu.SMEM((num_stages * steps.STAGE_BYTES // 4,), _INT),
            plgpu.SMEM((staging_bytes // 4,), _INT),
            plgpu.SMEM((4 * num_stages,), _INT),
        ],
    )(rows, row_P, blocks, schedule.unit_U3, schedule.num_units_1, schedule.pair_P)


def int4_moe_prefill(
    x_TD: BFloat16[Array, "T D"],
    expert_TX: Int32[Array, "T X"],
    weight_TX: Float[Array, "T X"],
    gate_up_EMKmw: Int32[Array, "E M K m w"],
    down_EMKmw: Int32[Array, "E n k r w"],
    config: Config,
) -> BFloat16[Array, "T D"]:
    """Weighted sum of each token's experts. What `int4_moe` checks and documents; D is a multiple of 64 here."""
    (T, X), E = expert_TX.shape, gate_up_EMKmw.shape[0]
    schedule = build_schedule(expert_TX, E)
    num_features = down_EMKmw.shape[2] * BLOCK_COLUMNS
    permuted_TD = steps.permute_columns(x_TD)
    hidden_PF = _run_product(
        permuted_TD, schedule.token_P, gate_up_EMKmw, schedule, num_features, True, config
    )
    place_P = jnp.arange(T * X, dtype=_INT)
    width = down_EMKmw.shape[1] * steps.TILE_ROWS
    y_PD = _run_product(hidden_PF, place_P, down_EMKmw, schedule, width, False, config)
    is_local_TX1 = ((expert_TX >= 0) & (expert_TX < E))[..., None]
    y_TXD = y_PD.reshape(T, X, width).astype(jnp.float32) * weight_TX[..., None]
    return jnp.sum(jnp.where(is_local_TX1, y_TXD, 0.0), axis=1).astype(jnp.bfloat16)[:, : x_TD.shape[1]]
