"""Stages of shared memory that one thread of `skinny_gemm` keeps full of a weight and of its tokens.

A stage has two barriers: one counts the bytes that come, the other the warps that have read them. The thread that fetches
makes the first ones itself and fills some stages before the block's threads wait for each other; what is fetched depends on
no other thread.

An interpreter knows Pallas' own copies alone, in which all threads of a warpgroup arrive and wait for each other twice a
step; an H200 takes 220 cycles for that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm
from jaxtyping import Array

from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.bfloat16_rows import SWIZZLED
from ddtree_jax.pallas.skinny_gemm_shape import SIDE, Shape

_NUM_WARPS = 4  # That multiply.


@dataclass(frozen=True, slots=True)
class _Stages:
    """Refs of a launch: x [T, K] and blocks [b, 64, 64] in global memory, their stages in shared memory."""

    shape: Shape
    x: Any
    blocks: Any
    x_s: Any
    blocks_s: Any

    @property
    def num_stages(self) -> int:
        return self.x_s.shape[0]


@dataclass(frozen=True, slots=True)
class Ring(_Stages):
    """``barriers`` has `num_barriers` words: full and free ones of all stages, then one that is left to the caller."""

    barriers: Any

    def begin(self) -> None:
        """The fetching warpgroup's: makes what its copies need."""
        self._init(0, (1,) * self.num_stages)

    def begin_rest(self) -> None:
        """Makes the other barriers; all threads of the block have to wait for each other before anyone uses one."""
        self._init(self.num_stages, (*(_NUM_WARPS,) * self.num_stages, 1))

    def _init(self, start: int, counts: Sequence[int]) -> None:
        @w.inline(1, 0)
        def call(barriers: Any) -> None:
            for i, count in enumerate(counts):
                nvvm.mbarrier_init(w.barrier(barriers, w.i32(start + i)), w.i32(count), predicate=_is_first())
            mgpu.utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)

        call(self.barriers)

    def copy(self, slot: Array, block: Array, column: Array) -> None:
        """Starts to fill a stage: weight blocks from ``block`` on, which lie together, columns of tokens from ``column`` on.

        Rows of tokens that are not there become zeros.
        """
        shape, swizzled = self.shape, plgpu.RefType(SWIZZLED)

        @plgpu.inline_mgpu(arg_types=(w.REF, w.REF, swizzled, swizzled, w.REF, *(w.SCALAR,) * 3))
        def call(ctx: Any, x: Any, blocks: Any, x_s: Any, blocks_s: Any, barriers: Any, *numbers: Any) -> None:
            slot, block, column = (number.registers.item() for number in numbers)
            full, is_first = w.barrier(barriers, slot), _is_first()
            nvvm.mbarrier_arrive_expect_tx(full, w.i32(shape.stage_bytes), predicate=is_first)
            slot, block, column, zero = (
                arith.index_cast(ir.IndexType.get(), number) for number in (slot, block, column, w.i32(0))
            )
            width = shape.step_blocks * SIDE
            for source, stages, places in (
                (blocks, blocks_s, (mgpu.ds(block, shape.step_blocks), slice(None), slice(None))),
                # A start that is no constant, as the tokens may be fewer than the rows.
                (x, x_s, (mgpu.ds(zero, shape.num_tokens), mgpu.ds(column, width))),
            ):
                ctx.async_copy(
                    src_ref=source,
                    dst_ref=mgpu.utils.memref_slice(stages, slot),
                    gmem_slice=places,
                    gmem_transform=(mgpu.TileTransform((8, SIDE)),),
                    swizzle=128,
                    barrier=mgpu.utils.BarrierRef(full, w.i32(0), None, 1),
                    arrive=False,
                    predicate=is_first,
                )

        call(self.x, self.blocks, self.x_s, self.blocks_s, self.barriers, slot, block, column)

    def place(self, step: Array) -> tuple[Array, Array]:
        """Stage of a step, and the parity of its turn there."""
        stages = jnp.int32(self.num_stages)
        return lax.rem(step, stages), lax.rem(lax.div(step, stages), jnp.int32(2))

    def wait_full(self, step: Array) -> None:
        w.wait_barrier(self.barriers, *self.place(step))

    def wait_free(self, step: Array) -> None:
        """For the stage of a step that is not its first: until the one before has been read."""
        slot, parity = self.place(step)
        w.wait_barrier(self.barriers, slot + self.num_stages, parity ^ 1)

    def let_go(self, step: Array) -> None:
        """The multiplying warps have read the step."""
        w.arrive_warp(self.barriers, self.place(step)[0] + self.num_stages)


def num_barriers(stages: int) -> int:
    """Words of shared memory for a `Ring`."""
    return 2 * stages + 1


def _is_first() -> ir.Value:
    """One thread of the warpgroup, always the same."""
    return mgpu.utils.single_thread_predicate(scope=mgpu.utils.ThreadSubset.WARPGROUP)


@dataclass(frozen=True, slots=True)
class InterpretedRing(_Stages):
    """The same in Pallas' words. The barriers come with the launch, in which a full one counts two copies."""

    full: Any
    free: Any

    def copy(self, slot: Array, block: Array, column: Array) -> None:
        step_blocks = self.shape.step_blocks
        source = self.blocks.at[pl.ds(block, step_blocks)]
        plgpu.copy_gmem_to_smem(source, self.blocks_s.at[slot], self.full.at[slot])
        source = self.x.at[pl.ds(0, self.shape.num_tokens), pl.ds(column, step_blocks * SIDE)]
        plgpu.copy_gmem_to_smem(source, self.x_s.at[slot], self.full.at[slot])

    def place(self, step: Array) -> tuple[Array, None]:
        return lax.rem(step, jnp.int32(self.num_stages)), None

    def wait_full(self, step: Array) -> None:
        plgpu.barrier_wait(self.full.at[self.place(step)[0]])

    def wait_free(self, step: Array) -> None:
        plgpu.barrier_wait(self.free.at[self.place(step)[0]])

    def let_go(self, step: Array) -> None:
        plgpu.barrier_arrive(self.free.at[self.place(step)[0]])
