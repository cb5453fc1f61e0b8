"""One product of few tokens with a wide weight on Hopper: every byte of the weight once, by all multiprocessors.

A block has a thread that fetches and a warpgroup that multiplies 64 rows, a tile. The columns of a tile are cut into steps of
256 for few tokens, of 128, or of 64 for many, which the blocks of a cluster share out in order::

    fetch      steps of the block, as far as the ring holds ────────────────►
    multiply       step ─► step ─► ... ─► sums to the blocks of the cluster, each some tokens │ each adds up what has come,
                                                                                              │ in their order ─► outputs

`skinny_gemm_ring` has the fetching, `skinny_gemm_exchange` what blocks send each other. Weights are the operand with 64 rows
of ``wgmma``, tokens the narrow one, both from shared memory. A block without a cluster adds up nothing. Rows of tokens that
are not there are zeros by the copy's own bounds.

A product without clusters leaves multiprocessors free if it has fewer tiles. There blocks of a rider do what would be another
launch; their scratch lies where other blocks have their sums.

Bytes: the weight, and for every step its columns of the tokens, which should lie in the second cache. An H200 reads 4.57 TB/s
at best; a launch was measured to take about 2.2 us, and what it reads at 4.3 TB/s where all multiprocessors have a part.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm
from jaxtyping import Array, BFloat16

from ddtree_jax.pallas import simt
from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.bfloat16_rows import SWIZZLED
from ddtree_jax.pallas.rider import Rider
from ddtree_jax.pallas.simt import FLOAT, UINT
from ddtree_jax.pallas.skinny_gemm_exchange import expect, send
from ddtree_jax.pallas.skinny_gemm_ring import InterpretedRing, Ring, num_barriers
from ddtree_jax.pallas.skinny_gemm_shape import SIDE, WARPGROUP, Config, Shape, num_scratch_floats, num_stages
from ddtree_jax.pallas.skinny_gemm_sums import finish, received_place, staged_place

_WGMMA = plgpu.Layout.WGMMA


def stage_sums(sums_ref: Any, acc: Array, shape: Shape) -> None:
    """The sums [64, tokens] to shared memory, token by token."""

    @w.inline(1, 0, (_WGMMA,))
    def call(sums: Any, acc: Any) -> None:
        r, t = w.lane()
        row = w.add(w.scaled(w.warp(), 16), r)
        start = w.at(w.pointer(sums), w.scaled(w.add(row, w.scaled(t, 2 * shape.sums_stride)), 4), w.SHARED)
        # Registers: 8 columns after 8, of each the upper and the lower half of the warp's 16 rows.
        for i, register in enumerate(acc.registers.flat):
            for j, value in enumerate(w.elements(register, 2)):
                offset = 4 * ((8 * (i // 2) + j) * shape.sums_stride + 8 * (i % 2))
                llvm.store(value, w.at(start, w.i32(offset), w.SHARED), alignment=4)

    call(sums_ref, acc)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block's refs and place; its methods are what its warpgroups do."""

    shape: Shape
    tile: Array
    rank: Array
    ring: Ring | InterpretedRing

    @property
    def num_steps(self) -> Array:
        begin, end = self.shape.span(self.rank)
        return end - begin

    def fetch(self, first: int, last: int | None = None) -> None:
        """Steps from ``first`` on to ``last``, as the ring has stages for them."""

        def fill(step: Array) -> None:
            self._fetch(step)

        def refill(step: Array) -> None:
            self.ring.wait_free(step)
            self._fetch(step)

        stages, num_steps = jnp.int32(self.ring.num_stages), self.num_steps
        pl.loop(first, lax.clamp(jnp.int32(first), num_steps, stages if last is None else jnp.int32(last)))(fill)
        if last is None:
            pl.loop(stages, lax.max(num_steps, stages))(refill)

    def _fetch(self, step: Array) -> None:
        """A step's weight blocks, which lie together, and its columns of the tokens."""
        shape = self.shape
        number = shape.span(self.rank)[0] + step
        first_column = lax.div(self.tile, jnp.int32(shape.tiles_a_group)) * shape.num_steps
        block = (self.tile * shape.num_steps + number) * shape.step_blocks
        self.ring.copy(self.ring.place(step)[0], block, (first_column + number) * (shape.step_blocks * SIDE))

    def multiply(self) -> Array:
        """Sums [64, tokens] over the block's steps."""
        shape, ring = self.shape, self.ring

        def run(acc_ref: Any) -> Array:
            @pl.loop(0, self.num_steps)
            def _(step: Array) -> None:
                slot, _ = ring.place(step)
                ring.wait_full(step)
                for j in range(shape.step_blocks):
                    tokens = ring.x_s.at[slot, :, pl.ds(j * SIDE, SIDE)]
                    plgpu.wgmma(acc_ref, ring.blocks_s.at[slot, j], tokens.transpose((1, 0)))
                plgpu.wgmma_wait(shape.step_blocks)
                # The step before has been read.
                pl.when(step > 0)(lambda: ring.let_go(step - 1))

            return acc_ref[...]

        return pl.run_scoped(run, plgpu.ACC((SIDE, shape.num_tokens), jnp.float32))

    def add_up(self, sums_s: Any, outs: Sequence[Any]) -> None:
        """Multiplies, and writes the block's share of the tile's outputs."""
        function = functools.partial(_finish, self.shape)
        if self.shape.cluster == 1:
            stage_sums(sums_s, self.multiply(), self.shape)
            w.sync_threads(WARPGROUP)
        else:
            barriers, index = self.ring.barriers, 2 * self.ring.num_stages
            expect(barriers, index, self.rank, self.shape)
            at_cluster_barrier("wait.acquire")
            send(sums_s, barriers, index, self.rank, self.multiply(), self.shape)
            w.wait_barrier(barriers, jnp.int32(index), jnp.int32(0))
        simt.run(function, [(sums_s, FLOAT), *((out, UINT) for out in outs)], [self.tile, self.rank])


def _finish(shape: Shape, t: Any, tile: Any, rank: Any, sums: simt.Memory, *outs: Any) -> None:
    def load(i: int, index: simt.Value) -> list[simt.Value]:
        return t.load_vector(sums, index + i * shape.received_stride, 4)

    place = staged_place if shape.cluster == 1 else received_place
    finish(t, shape, tile, rank, load, lambda: None, *outs, place=place)


def cluster_barrier(*actions: str) -> None:
    """A thread's part in the barrier of a cluster's threads: it tells what it has done, or waits to see what all have."""
    for action in actions:
        mgpu.utils.inline_ptx(f"barrier.cluster.{action};", has_side_effects=True, convergent=True)


def at_cluster_barrier(*actions: str) -> None:
    w.inline(0, 0)(functools.partial(cluster_barrier, *actions))()


def _run(block: _Block, warpgroup: Array, sums_s: Any, outs: Sequence[Any], config: Config) -> None:
    is_cluster = block.shape.cluster > 1
    first_stages = min(config.first_stages, block.ring.num_stages)

    @pl.when(warpgroup == 0)
    def _() -> None:
        block.ring.begin()
        block.fetch(0, first_stages)
        block.ring.begin_rest()

    # All barriers are made.
    simt.run(lambda t: t.barrier(), [], [])
    if is_cluster:
        at_cluster_barrier("arrive.relaxed")
    pl.when(warpgroup == 1)(lambda: block.add_up(sums_s, outs))

    @pl.when(warpgroup == 0)
    def _() -> None:
        block.fetch(first_stages)
        if is_cluster:
            at_cluster_barrier("wait.acquire")


def launch(
    x_TK: BFloat16[Array, "T K"],
    blocks_bok: BFloat16[Array, "b 64 64"],
    shape: Shape,
    config: Config,
    interpret: Any = None,
    rider: Rider | None = None,
) -> list[Array]:
    """The outputs, then the rider's; if it is interpreted, the sums of all blocks [blocks, 64, T], for tokens filled up to T.

    Blocks of the weight stand in the order (tile, columns). A rider rides without clusters, and is not interpreted.
    """
    floats = rider.num_floats if rider else 0
    stages = num_stages(shape, config, floats)
    arrays, rider_outs, rider_blocks = (rider.arrays, rider.outs, rider.num_blocks) if rider else ((), (), 0)

    def body(x: Any, blocks: Any, *refs: Any) -> None:
        *others, x_s, blocks_s, sums_s = refs[:-num_barrier_refs]
        # [rider's arrays, outputs, rider's outputs]
        outs = others[len(arrays) : len(others) - len(rider_outs)]
        index, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        tile, rank = index // shape.cluster, lax.rem(index, jnp.int32(shape.cluster))
        if cluster > 1:
            tile, rank = index - idle_clusters, lax.axis_index("rank")
        kind = Ring if interpret is None else InterpretedRing
        block = _Block(shape, tile, rank, kind(shape, x, blocks, x_s, blocks_s, *refs[-num_barrier_refs:]))
        if rider:
            is_rider = index >= shape.num_blocks
            pl.when(~is_rider)(lambda: _run(block, warpgroup, sums_s, outs, config))
            rider_refs = *others[: len(arrays)], *others[len(arrays) + len(outs) :]
            pl.when(is_rider & (warpgroup == 0))(lambda: rider.run(index - shape.num_blocks, rider_refs, sums_s))
            return
        if interpret is None:
            run = functools.partial(_run, block, warpgroup, sums_s, outs, config)
            pl.when(tile >= 0)(run) if idle_clusters else run()
            return

        @pl.when(warpgroup == 0)
        def _() -> None:
            block.fetch(0)

        @pl.when(warpgroup == 1)
        def _() -> None:
            outs[0][index] = block.multiply()

    cluster = 1 if interpret is not None else shape.cluster
    idle_clusters = config.idle_clusters if cluster == 2 else 0
    barriers = [plgpu.SMEM((num_barriers(stages),), jnp.int64)]
    if interpret is not None:
        barriers = [plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages) for arrivals in (2, 1)]
    num_barrier_refs = len(barriers)
    results = [jax.ShapeDtypeStruct((shape.num_stored, output.width), output.dtype) for output in shape.outputs]
    if interpret is not None:
        results = [jax.ShapeDtypeStruct((shape.num_blocks, SIDE, shape.num_tokens), jnp.float32)]
    return list(
        plgpu.kernel(
            body,
            out_type=(*results, *rider_outs),
            grid=(idle_clusters + shape.num_blocks // cluster + rider_blocks,),
            grid_names=("block",),
            **({"cluster": (cluster,), "cluster_names": ("rank",)} if cluster > 1 else {}),
            num_threads=2,
            thread_name="warpgroup",
            kernel_name=f"skinny_gemm_{rider.name}" if rider else "skinny_gemm",
            scratch_types=[
                plgpu.SMEM((stages, shape.num_tokens, shape.step_blocks * SIDE), jnp.bfloat16, transforms=SWIZZLED),
                plgpu.SMEM((stages, shape.step_blocks, SIDE, SIDE), jnp.bfloat16, transforms=SWIZZLED),
                plgpu.SMEM((num_scratch_floats(shape, floats),), jnp.float32),
                *barriers,
            ],
            interpret=interpret,
        )(x_TK, blocks_bok, *arrays)
    )
