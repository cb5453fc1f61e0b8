"""Routed experts with INT4 group-32 weights for many tokens on Hopper: grouped products near the tensor cores' rate.

A unit is up to 64 tokens of one expert and a tile of 512 rows of its weights. Blocks, one a multiprocessor, take units in
turn; in each, one warpgroup copies and four compute::

    prepare       pairs sorted by expert, units; token rows permuted
    gate and up   copies ──► ring ──► weights to registers, wgmma ──► silu(gate) * up ──► hidden rows by place
    down          copies ──► ring ──► weights to registers, wgmma ──► bfloat16 by pair, 512 columns a slice
    sum           a token's pairs, weighted, in order, in float32 ──► y_TD

Weights are read once for each 64 tokens of an expert. 2,048 tokens of 8 experts are 180 GFLOP for a shard of 384 experts of
256 features, 228 us at 790 TFLOP/s, and 1.19 GB of weights, 260 us at 4.57 TB/s.
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
from ddtree_jax.pallas import int4_prefill_sum as sums
from ddtree_jax.pallas import warps
from ddtree_jax.pallas.int4_blocks import BLOCK_COLUMNS, BLOCK_ROWS
from ddtree_jax.pallas.int4_prefill_schedule import Schedule, prepare

MAX_TOKENS = 4096
MAX_EXPERTS = 1536
"""Whose counts, one of each warp, shared memory has room for."""
HOPPER_SHARED_BYTES = 200_000
_INT = jnp.int32
_WARPS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """Warpgroups of a block: ``computing`` ones, then one that copies, then one that adds up, if there is such.

    Registers are those of a thread; all together are no more than the kernel starts with.
    """

    computing: int
    compute_registers: int
    copy_registers: int
    sum_registers: int = 0

    @property
    def num_warpgroups(self) -> int:
        return self.computing + (2 if self.sum_registers else 1)

    @property
    def blocks(self) -> int:
        """Of a tile, for each computing warpgroup."""
        return steps.TILE_BLOCKS // self.computing


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tuning. ``token_counts`` are the numbers of tokens that code exists for; a unit takes the next larger.

    ``num_blocks`` is the device's multiprocessors: all blocks must run at once, one on each. ``shared_bytes`` of shared
    memory a block, less than the device's limit by what the compiler adds. Products are started in groups of ``operands``
    times 16 columns, and overlap across ``unroll`` stages: with more of both, registers do not suffice and the compiler lets
    each product wait for the last.
    """

    num_blocks: int = 132
    token_counts: tuple[int, ...] = (16, 32, 48, 64)
    shared_bytes: int = 231_000
    operands: int = 2
    unroll: int = 2
    gate_up: Roles = Roles(computing=4, compute_registers=112, copy_registers=32)
    down: Roles = Roles(computing=2, compute_registers=208, copy_registers=40, sum_registers=56)


def choose_config(
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
    if gate_up_EMKmw.shape[0] > MAX_EXPERTS:
        raise NotImplementedError(f"{gate_up_EMKmw.shape[0]} experts; {MAX_EXPERTS} are the most")
    return config


@dataclass(frozen=True, slots=True)
class _Product:
    """A product's refs, and the order of its units: unit of tokens by unit of tokens, or tile by tile."""

    config: Config
    roles: Roles
    num_stages: int
    ring: Any
    barriers: Any
    blocks: Any
    units: Any
    num_units: Array
    is_by_tile: bool

    @property
    def num_tiles(self) -> int:
        return self.blocks.shape[1]

    @property
    def num_columns(self) -> int:
        return self.blocks.shape[2]

    def index(self, turn: Array) -> Array:
        """Number of the block's unit of a turn."""
        return lax.axis_index("block") + turn * self.config.num_blocks

    def _load(self, turn: Array) -> tuple[Array, ...]:
        """Expert, first place, number of tokens, tile of a turn's unit; of any unit behind the last."""
        index, num_units = self.index(turn), jnp.maximum(self.num_units, 1)
        if self.is_by_tile:
            tile, unit = index // num_units, lax.rem(index, num_units)
        else:
            tile, unit = lax.rem(index, self.num_tiles), index // self.num_tiles
        unit = jnp.minimum(unit, self.units.shape[0] - 1)
        return (*(self.units[unit, i] for i in range(3)), tile)

    def each_unit(self, function: Callable, carry: Array) -> Array:
        """Carries ``function(turn, (stages used before, expert, first place, number of tokens, tile), carry)`` through."""
        total = self.num_units * self.num_tiles
        turns = (total - self.index(jnp.int32(0)) + self.config.num_blocks - 1) // self.config.num_blocks

        def step(turn: Array, state: tuple) -> tuple:
            entry, carry = state
            # Early: it comes from device memory.
            following = self._load(turn + 1)
            return following, function(turn, (turn * self.num_columns, *entry), carry)

        return lax.fori_loop(0, turns, step, (self._load(jnp.int32(0)), carry))[1]

    def fetch(self, rows: Any, pairs: Any, per_row: int | None) -> None:
        """What the copying warpgroup does."""
        plgpu.set_max_registers(self.roles.copy_registers, action="decrease")
        sizes = {"num_stages": self.num_stages, "per_row": per_row}

        def fetch(turn: Array, scalars: tuple, carry: Array) -> Array:
            del turn
            steps.fetch_unit(self.ring, self.barriers, self.blocks, rows, pairs, *scalars, **sizes)
            return carry

        self.each_unit(fetch, jnp.int32(0))

    def multiply(self, count: Array, function: Callable, *scalars: Array) -> None:
        """Calls a multiplying step in the code for ``count`` tokens."""
        smaller = 0
        for num_tokens in self.config.token_counts:
            sizes = steps.Sizes(
                self.num_columns,
                num_tokens,
                self.num_stages,
                self.roles.blocks,
                self.config.operands,
                self.config.unroll,
            )
            step = functools.partial(function, *scalars, sizes=sizes)
            pl.when((count > smaller) & (count <= num_tokens))(step)
            smaller = num_tokens


def _launch(
    body: Callable, inputs: tuple, out_type: Any, features: int, name: str, config: Config, roles: Roles
) -> Any:
    """Runs ``body(num_stages, staging, ring, barriers, *inputs, *outputs)``; a warpgroup stages rows of ``features``."""
    staging_bytes = roles.computing * steps.staging_bytes(features)
    num_stages = (config.shared_bytes - staging_bytes) // steps.STAGE_BYTES

    def run(*refs: Any) -> None:
        *arrays, ring, staging, barriers = refs
        arrivals = [steps.FULL_ARRIVALS] * num_stages + [_WARPS * roles.computing] * num_stages
        warps.init_barriers(barriers, arrivals)
        body(num_stages, staging, ring, barriers, *arrays)

    return plgpu.kernel(
        run,
        out_type=out_type,
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=roles.num_warpgroups,
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
    roles = config.gate_up

    def body(num_stages, staging, ring, barriers, rows, pairs, blocks, units, num_units, hidden) -> None:
        warpgroup = lax.axis_index("warpgroup")
        product = _Product(config, roles, num_stages, ring, barriers, blocks, units, num_units[0], False)

        @pl.when(warpgroup == roles.computing)
        def _() -> None:
            product.fetch(rows, pairs, P // permuted_TD.shape[0])

        @pl.when(warpgroup < roles.computing)
        def _() -> None:
            plgpu.set_max_registers(roles.compute_registers, action="increase")

            def multiply(turn: Array, scalars: tuple, carry: Array) -> Array:
                del turn
                done, _, first, count, tile = scalars
                step = functools.partial(steps.multiply_gate_up, ring, barriers, staging, hidden)
                product.multiply(count, step, done, first, count, tile, warpgroup)
                return carry

            product.each_unit(multiply, jnp.int32(0))

    inputs = (permuted_TD, schedule.pair_P, blocks, schedule.unit_U3, schedule.num_units_1)
    out_type = jax.ShapeDtypeStruct((P, num_features), jnp.bfloat16)
    return _launch(body, inputs, out_type, roles.blocks * BLOCK_ROWS // 2, "int4_prefill_gate_up", config, roles)


def _multiply_down(
    hidden_PF: BFloat16[Array, "P F"],
    expert_TX: Int32[Array, "T X"],
    weight_TX: Float[Array, "T X"],
    blocks: Int32[Array, "E M K m w"],
    schedule: Schedule,
    config: Config,
) -> BFloat16[Array, "T D"]:
    """The weighted sums over tokens' experts."""
    T, num_tiles = expert_TX.shape[0], blocks.shape[1]
    roles = config.down

    def body(
        num_stages, staging, ring, barriers, hidden, pairs, blocks, units, num_units, expert, weight, out, y
    ) -> None:  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        product = _Product(config, roles, num_stages, ring, barriers, blocks, units, num_units[0], True)
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((2 * num_tiles,)))
        slices = _Slices(product, y, semaphores, warpgroup)

        @pl.when(warpgroup == roles.computing)
        def _() -> None:
            product.fetch(hidden, pairs, None)

        @pl.when(warpgroup < roles.computing)
        def _() -> None:
            slices.write(staging, pairs)

        @pl.when(warpgroup == roles.computing + 1)
        def _() -> None:
            slices.add_up(expert, weight, out)

    inputs = (
        hidden_PF,
        schedule.pair_P,
        blocks,
        schedule.unit_U3,
        schedule.num_units_1,
        expert_TX,
        weight_TX,
    )
    out_type = (
        jax.ShapeDtypeStruct((T, num_tiles * steps.TILE_ROWS), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_tiles, expert_TX.size, steps.TILE_ROWS), jnp.bfloat16),
    )
    return _launch(body, inputs, out_type, roles.blocks * BLOCK_ROWS, "int4_prefill_down", config, roles)[0]


@dataclass(frozen=True, slots=True)
class _Slices:
    """The down product's slices (see `int4_prefill_sum`): semaphore i counts slice i's stores, then its sums."""

    product: _Product
    y: Any
    semaphores: Any
    warpgroup: Array

    @property
    def num_slices(self) -> Array:
        """In the ring: as many as blocks are busy with at once, and two more."""
        units = jnp.maximum(self.product.num_units, 1)
        return jnp.minimum(self.product.num_tiles, 2 + (self.product.config.num_blocks + units - 1) // units)

    def write(self, staging: Any, pairs: Any) -> None:
        """What a computing warpgroup does. The carry: the slice + 1 whose stores are not counted yet, 0 for none."""
        product = self.product
        plgpu.set_max_registers(product.roles.compute_registers, action="increase")
        arrays = (product.ring, product.barriers, staging, self.y, pairs, self.semaphores)

        def multiply(turn: Array, scalars: tuple, pending: Array) -> Array:
            done, _, first, count, tile = scalars
            is_first = lax.rem(product.index(turn), product.num_units) < product.config.num_blocks
            must_wait = is_first & (tile >= self.num_slices)

            @pl.when(must_wait)
            def _() -> None:
                sums.finish_stores(self.semaphores, pending, self.warpgroup)
                replaced = product.num_tiles + tile - self.num_slices
                sums.await_count(self.semaphores, replaced, jnp.int32(product.config.num_blocks), self.warpgroup)

            pending = jnp.where(must_wait, 0, pending)
            place = lax.rem(tile, self.num_slices)
            step = functools.partial(steps.multiply_down, *arrays)
            product.multiply(count, step, done, first, count, place, self.warpgroup, pending)
            return tile + 1

        pending = product.each_unit(multiply, jnp.int32(0))
        sums.finish_stores(self.semaphores, pending, self.warpgroup)

    def add_up(self, expert: Any, weight: Any, out: Any) -> None:
        """What the adding warpgroup does."""
        product = self.product
        plgpu.set_max_registers(product.roles.sum_registers, action="decrease")
        sizes = {"num_experts": product.blocks.shape[0], "num_workers": product.config.num_blocks}

        def add_slice(tile: Array, carry: Array) -> Array:
            sums.await_count(self.semaphores, tile, product.num_units * product.roles.computing, self.warpgroup)
            place = lax.rem(tile, self.num_slices)
            sums.sum_slice(self.y, expert, weight, out, tile, place, lax.axis_index("block"), **sizes)
            sums.signal(self.semaphores, product.num_tiles + tile, self.warpgroup)
            return carry

        lax.fori_loop(0, product.num_tiles, add_slice, 0)


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
    y_TD = _multiply_down(hidden_PF, expert_TX, weight_TX, down_EMKmw, schedule, config)
    return y_TD[:, : x_TD.shape[1]]
