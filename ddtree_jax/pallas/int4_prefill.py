"""Routed experts with INT4 group-32 weights for many tokens on Hopper: grouped products on the tensor cores.

A unit is up to 64 tokens of one expert and a tile of 512 rows of its weights. Blocks, one a multiprocessor, take units in
turn; in each, one warpgroup copies and four compute::

    prepare       pairs sorted by expert, units; token rows permuted
    gate and up   copies ──► ring ──► weights to registers, wgmma ──► silu(gate) * up ──► hidden rows by place
    down          copies ──► ring ──► weights to registers, wgmma ──► bfloat16 by pair, 512 columns a slice
    sum           a token's pairs, weighted, in order, in float32 ──► y_TD

Weights are read once for each 64 tokens of an expert. 2,048 tokens of 8 experts are 180 GFLOP for a shard of 384 experts of
256 features, 228 us at 790 TFLOP/s, and 1.19 GB of weights, 260 us at 4.57 TB/s. It also writes and reads the pairs' rows,
235 MB each way, which a shard of 48 experts of 2,048 features has an eighth of. One H200, us::

                   prepare   gate and up   down   sum
    384 x 256        16          251        178     63
    48 x 2,048       17          247        144     32

From one run to the next, gate and up varied between 243 and 256 of the first. There, copies and stores alone take 210 in gate
and up and 183 in down, with products but without unpacking 216, 186: down, sum and most of prepare are as fast as the memory.
In gate and up the compiler unpacks all of a stage before its products; unpacking kept between products, two or four at a
time, gained nothing. Nor did bulk copies of hidden rows, warpgroups that begin at different times, or rows of down by place.
Tokens in their own order, permuted while they are copied 4 bytes a time, make prepare 6 us shorter and gate and up 90 longer;
permuted by exchange between threads, they take as long as now.

Down's stores ask the second cache to keep their lines, and the sum reads without displacing them: 3 us less in down, 4 in the
sum, 1.5 more in the next prepare, during which they are probably written back. Only a fraction of the rows kept, or the
last slices of all units at the end, gained no more. Sums in the down kernel, by a warpgroup of its own, slice after slice
through a few slots: 273 to 290 instead of down's and sum's 248.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int32

from ddtree_jax.pallas import int4_prefill_steps as steps
from ddtree_jax.pallas import warps
from ddtree_jax.pallas.int4_blocks import BLOCK_COLUMNS, BLOCK_ROWS
from ddtree_jax.pallas.int4_prefill_schedule import Schedule, prepare, scratch_bytes
from ddtree_jax.pallas.int4_prefill_sum import sum_pairs

MAX_TOKENS = 4096
HOPPER_SHARED_BYTES = 200_000
_INT = jnp.int32
_WARPS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tuning. ``token_counts`` are the numbers of tokens that code exists for; a unit takes the next larger.

    ``num_blocks`` is the device's multiprocessors: one block runs on each. ``shared_bytes`` of shared memory a block, less
    than the device's limit by what the compiler adds; the stages of a ring are as many as fit, up to ``gate_up_stages`` and
    ``down_stages``: more in flight made gate and up slower. ``warpgroups`` compute and one copies; registers are a thread's,
    all together no more than the kernel starts with (65,536 / threads, in eights). Products are started in groups of
    ``operands`` times 16 columns, and overlap across ``unroll`` stages: with more of both, registers do not suffice and the
    compiler lets each product wait for the last. In down, of 4 stages, it does so already; there the memory takes longer.
    """

    num_blocks: int = 132
    token_counts: tuple[int, ...] = (16, 32, 40, 48, 56, 64)
    shared_bytes: int = 231_000
    gate_up_stages: int = 4
    down_stages: int = 6
    operands: int = 2
    unroll: int = 4
    warpgroups: int = 4
    compute_registers: int = 112
    copy_registers: int = 32

    @property
    def blocks(self) -> int:
        """Of a tile, for each computing warpgroup."""
        return steps.TILE_BLOCKS // self.warpgroups


def choose_config(
    expert_TX: Int32[Array, "T X"],
    gate_up_EMKmw: Int32[Array, "E M K m w"],
    down_EMKmw: Int32[Array, "E n k r w"],
    num_blocks: int,
    shared_bytes: int,
) -> Config:
    """Tuning for a device with so many multiprocessors, and so much shared memory for each block.

    Raises:
      NotImplementedError: the kernels do not take this input, or the device is not Hopper. It is named.
    """
    config = Config(num_blocks=num_blocks)
    if shared_bytes < HOPPER_SHARED_BYTES:
        raise NotImplementedError(f"{shared_bytes} bytes of shared memory; {HOPPER_SHARED_BYTES} are needed")
    for blocks in (gate_up_EMKmw, down_EMKmw):
        if blocks.shape[3] != steps.TILE_BLOCKS:
            raise NotImplementedError(f"groups of {blocks.shape[3]} blocks; groups of {steps.TILE_BLOCKS} are needed")
    features = gate_up_EMKmw.shape[1] * steps.TILE_ROWS // 2
    columns = down_EMKmw.shape[2] * BLOCK_COLUMNS
    if features != columns:
        raise NotImplementedError(f"down takes {columns} columns, not gate and up's {features} features")
    (T, X), E = expert_TX.shape, gate_up_EMKmw.shape[0]
    scratch = scratch_bytes(min(T, MAX_TOKENS) * X, E)
    if scratch > config.shared_bytes:
        raise NotImplementedError(f"sorting {T} tokens of {X} among {E} experts takes {scratch} bytes of shared memory")
    return config


@dataclass(frozen=True, slots=True)
class _Product:
    """A product's refs; its units stand in the order of units of tokens, an expert's tiles beside each other."""

    config: Config
    num_stages: int
    ring: Any
    barriers: Any
    blocks: Any
    units: Any
    num_units: Array

    @property
    def num_tiles(self) -> int:
        return self.blocks.shape[1]

    @property
    def num_columns(self) -> int:
        return self.blocks.shape[2]

    def _index(self, turn: Array) -> Array:
        """Number of the block's unit of a turn: from left to right, then back, so that each gets large and small ones."""
        block, num_blocks = lax.axis_index("block"), self.config.num_blocks
        return turn * num_blocks + jnp.where(turn % 2 == 0, block, num_blocks - 1 - block)

    def _load(self, turn: Array) -> tuple[Array, ...]:
        """Expert, first place, number of tokens, tile of a turn's unit; of any unit behind the last."""
        index = self._index(turn)
        unit = jnp.minimum(index // self.num_tiles, self.units.shape[0] - 1)
        return (*(self.units[unit, i] for i in range(3)), lax.rem(index, self.num_tiles))

    def _each_unit(self, function: Callable) -> None:
        """Calls ``function(stages used before, expert, first place, number of tokens, tile)``."""
        total = self.num_units * self.num_tiles
        whole = total // self.config.num_blocks
        turns = whole + (self._index(whole) < total).astype(_INT)

        def step(turn: Array, entry: tuple) -> tuple:
            # Early: it comes from device memory.
            following = self._load(turn + 1)
            function(turn * self.num_columns, *entry)
            return following

        lax.fori_loop(0, turns, step, self._load(jnp.int32(0)))

    def run(self, fetch: Callable[[], None], compute: Callable[[], None]) -> None:
        """Gives each warpgroup its part."""
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == self.config.warpgroups)(fetch)
        pl.when(warpgroup < self.config.warpgroups)(compute)

    def fetch(self, rows: Any, pairs: Any, per_row: int | None) -> None:
        """What the copying warpgroup does."""
        plgpu.set_max_registers(self.config.copy_registers, action="decrease")
        arrays = (self.ring, self.barriers, self.blocks, rows, pairs)
        self._each_unit(functools.partial(steps.fetch_unit, *arrays, num_stages=self.num_stages, per_row=per_row))

    def compute(self, multiply: Callable) -> None:
        """What a computing warpgroup does; ``multiply`` has code for each of the token counts."""
        config = self.config
        plgpu.set_max_registers(config.compute_registers, action="increase")

        def compute(done: Array, expert: Array, first: Array, count: Array, tile: Array) -> None:
            del expert
            scalars = (done, first, count, tile, lax.axis_index("warpgroup"))
            smaller = 0
            for num_tokens in config.token_counts:
                sizes = steps.Sizes(
                    self.num_columns,
                    num_tokens,
                    self.num_stages,
                    config.blocks,
                    config.operands,
                    config.unroll,
                )
                step = functools.partial(multiply, *scalars, sizes=sizes)
                pl.when((count > smaller) & (count <= num_tokens))(step)
                smaller = num_tokens

        self._each_unit(compute)


def _launch(
    body: Callable, inputs: tuple, out_type: Any, features: int, name: str, max_stages: int, config: Config
) -> Any:
    """Runs ``body(num_stages, staging, ring, barriers, *inputs, *outputs)``; a warpgroup stages rows of ``features``."""
    staging_bytes = config.warpgroups * steps.staging_bytes(features)
    num_stages = min(max_stages, (config.shared_bytes - staging_bytes) // steps.STAGE_BYTES)

    def run(*refs: Any) -> None:
        *arrays, ring, staging, barriers = refs
        arrivals = [steps.FULL_ARRIVALS] * num_stages + [_WARPS * config.warpgroups] * num_stages
        warps.init_barriers(barriers, arrivals)
        body(num_stages, staging, ring, barriers, *arrays)

    return plgpu.kernel(
        run,
        out_type=out_type,
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, approx_math=True
        ),
        scratch_types=[
            plgpu.SMEM((num_stages * steps.STAGE_BYTES // 4,), _INT),
            plgpu.SMEM((staging_bytes // 4,), _INT),
            plgpu.SMEM((4 * num_stages,), _INT),
        ],
    )(*inputs)


def _multiply_gate_up(
    permuted_TD: BFloat16[Array, "T D"],
    blocks: Int32[Array, "E M K m w"],
    schedule: Schedule,
    config: Config,
) -> BFloat16[Array, "P F"]:
    """``silu(gate x) * up x`` by place, columns permuted."""
    P, num_features = schedule.pair_P.shape[0], blocks.shape[1] * steps.TILE_ROWS // 2

    def body(num_stages, staging, ring, barriers, rows, pairs, blocks, units, num_units, hidden) -> None:
        product = _Product(config, num_stages, ring, barriers, blocks, units, num_units[0])
        step = functools.partial(steps.multiply_gate_up, ring, barriers, staging, hidden)
        product.run(lambda: product.fetch(rows, pairs, P // permuted_TD.shape[0]), lambda: product.compute(step))

    inputs = (permuted_TD, schedule.pair_P, blocks, schedule.unit_U3, schedule.num_units_1)
    out_type = jax.ShapeDtypeStruct((P, num_features), jnp.bfloat16)
    features = config.blocks * BLOCK_ROWS // 2
    return _launch(body, inputs, out_type, features, "int4_prefill_gate_up", config.gate_up_stages, config)


def _multiply_down(
    hidden_PF: BFloat16[Array, "P F"], blocks: Int32[Array, "E M K m w"], schedule: Schedule, config: Config
) -> BFloat16[Array, "M P c"]:
    """Products by pair, in slices of 512 columns."""
    P, num_tiles = hidden_PF.shape[0], blocks.shape[1]

    def body(num_stages, staging, ring, barriers, hidden, pairs, blocks, units, num_units, y) -> None:
        product = _Product(config, num_stages, ring, barriers, blocks, units, num_units[0])
        step = functools.partial(steps.multiply_down, ring, barriers, staging, y, pairs)

        def compute() -> None:
            product.compute(step)
            steps.finish_stores()

        product.run(lambda: product.fetch(hidden, pairs, None), compute)

    inputs = (hidden_PF, schedule.pair_P, blocks, schedule.unit_U3, schedule.num_units_1)
    out_type = jax.ShapeDtypeStruct((num_tiles, P, steps.TILE_ROWS), jnp.bfloat16)
    features = config.blocks * BLOCK_ROWS
    return _launch(body, inputs, out_type, features, "int4_prefill_down", config.down_stages, config)


def int4_moe_prefill(
    x_TD: BFloat16[Array, "T D"],
    expert_TX: Int32[Array, "T X"],
    weight_TX: Float[Array, "T X"],
    gate_up_EMKmw: Int32[Array, "E M K m w"],
    down_EMKmw: Int32[Array, "E n k r w"],
    config: Config,
) -> BFloat16[Array, "T D"]:
    """Weighted sum of each token's experts. What `int4_moe` checks and documents; D is a multiple of 64 here."""
    schedule, permuted_TD = prepare(x_TD, expert_TX, gate_up_EMKmw.shape[0], config.num_blocks)
    hidden_PF = _multiply_gate_up(permuted_TD, gate_up_EMKmw, schedule, config)
    y_MPc = _multiply_down(hidden_PF, down_EMKmw, schedule, config)
    y_TD = sum_pairs(y_MPc, expert_TX, weight_TX, down_EMKmw.shape[0], config.num_blocks)
    return y_TD[:, : x_TD.shape[1]]
