"""One product of few tokens with a wide weight on Hopper: every byte of the weight once, by all multiprocessors.

A block has one warpgroup that fetches and one that multiplies 64 rows, a tile. The columns of a tile are cut into steps of
128, or of 64 for many tokens, which the blocks of a cluster share out in order::

    fetch      steps of the block, as far as the ring holds ────────────────►
    multiply       step ─► step ─► ... ─► sums to shared memory │ adds up its share of the tile, in the cluster's order,
                                                                │ out of all blocks' shared memory ─► outputs

Weights are the operand with 64 rows of ``wgmma``, tokens the narrow one, both from shared memory. A cluster of one reads its
own sums alone. Rows of tokens that are not there are zeros by the copy's own bounds.

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
from ddtree_jax.pallas.rider import Rider
from ddtree_jax.pallas.simt import FLOAT, UINT
from ddtree_jax.pallas.skinny_gemm_shape import SIDE, WARPGROUP, Config, Shape, num_floats, num_stages
from ddtree_jax.pallas.skinny_gemm_sums import finish

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
    x: Any
    blocks: Any
    x_s: Any
    blocks_s: Any
    sums_s: Any
    full: Any
    free: Any

    @property
    def num_stages(self) -> int:
        return self.x_s.shape[0]

    def fetch(self) -> None:
        """Keeps the ring full: a step's weight blocks, which lie together, and its columns of the tokens."""
        shape = self.shape
        begin, end = shape.span(self.rank)
        first_column = self.tile // shape.tiles_a_group * shape.num_steps
        # A start that is no constant, as the tokens may be fewer than the rows.
        rows = pl.ds(lax.mul(self.rank, jnp.int32(0)), shape.num_tokens)

        @pl.loop(0, end - begin)
        def _(i: Array) -> None:
            slot = lax.rem(i, jnp.int32(self.num_stages))
            pl.when(i >= self.num_stages)(lambda: plgpu.barrier_wait(self.free.at[slot]))
            start = (self.tile * shape.num_steps + begin + i) * shape.step_blocks
            source = self.blocks.at[pl.ds(start, shape.step_blocks)]
            plgpu.copy_gmem_to_smem(source, self.blocks_s.at[slot], self.full.at[slot])
            column = (first_column + begin + i) * (shape.step_blocks * SIDE)
            source = self.x.at[rows, pl.ds(column, shape.step_blocks * SIDE)]
            plgpu.copy_gmem_to_smem(source, self.x_s.at[slot], self.full.at[slot])

    def multiply(self) -> Array:
        """Sums [64, tokens] over the block's steps."""
        shape = self.shape
        begin, end = shape.span(self.rank)

        def slot_of(i: Array) -> Array:
            return lax.rem(i, jnp.int32(self.num_stages))

        def run(acc_ref: Any) -> Array:
            @pl.loop(0, end - begin)
            def _(i: Array) -> None:
                slot = slot_of(i)
                plgpu.barrier_wait(self.full.at[slot])
                for j in range(shape.step_blocks):
                    tokens = self.x_s.at[slot, :, pl.ds(j * SIDE, SIDE)]
                    plgpu.wgmma(acc_ref, self.blocks_s.at[slot, j], tokens.transpose((1, 0)))
                plgpu.wgmma_wait(shape.step_blocks)
                # The step before has been read.
                pl.when(i > 0)(lambda: plgpu.barrier_arrive(self.free.at[slot_of(i - 1)]))

            return acc_ref[...]

        return pl.run_scoped(run, plgpu.ACC((SIDE, shape.num_tokens), jnp.float32))

    def finish(self, outs: Sequence[Any]) -> None:
        """Outputs of the block's share of the tile."""
        refs = [(self.sums_s, FLOAT), *((out, UINT) for out in outs)]
        call = _finish_cluster if self.shape.cluster > 1 else _finish_alone
        simt.run(functools.partial(call, self.shape), refs, [self.tile, self.rank])


def _finish_alone(shape: Shape, t: Any, tile: Any, rank: Any, sums: simt.Memory, *outs: Any) -> None:
    finish(t, shape, tile, rank, lambda _, index: t.load_vector(sums, index, 4), lambda: None, *outs)


def _finish_cluster(shape: Shape, t: Any, tile: Any, rank: Any, sums: simt.Memory, *outs: Any) -> None:
    load = functools.partial(load_from_cluster, sums)
    finish(t, shape, tile, rank, load, functools.partial(cluster_barrier, "arrive.release"), *outs)


def load_from_cluster(sums: simt.Memory, rank: simt.Value | int, index: simt.Value) -> list[simt.Value]:
    """Four floats from ``index`` on of what lies in the place of ``sums`` in a block of the cluster."""
    loaded = mgpu.utils.inline_ptx(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, $4, $5; "
        "ld.shared::cluster.v4.f32 {$0,$1,$2,$3}, [there]; }",
        sums.at(index),
        w.i32(rank) if isinstance(rank, int) else rank.code,
        result_types=[w.f32()] * 4,
        has_side_effects=True,
    )
    return [simt.Value(value, FLOAT) for value in loaded]


def cluster_barrier(*actions: str) -> None:
    """A thread's part in the barrier of a cluster's threads: it tells what it has done, or waits to see what all have."""
    for action in actions:
        mgpu.utils.inline_ptx(f"barrier.cluster.{action};", has_side_effects=True, convergent=True)


def at_cluster_barrier(*actions: str) -> None:
    w.inline(0, 0)(functools.partial(cluster_barrier, *actions))()


def _run(block: _Block, warpgroup: Array, outs: Sequence[Any]) -> None:
    is_cluster, stage = block.shape.cluster > 1, functools.partial(stage_sums, block.sums_s, shape=block.shape)
    pl.when(warpgroup == 1)(block.fetch)
    if not is_cluster:

        @pl.when(warpgroup == 0)
        def _() -> None:
            stage(acc=block.multiply())
            w.sync_threads(WARPGROUP)
            block.finish(outs)

        return
    pl.when(warpgroup == 0)(lambda: stage(acc=block.multiply()))
    at_cluster_barrier("arrive.release", "wait.acquire")
    pl.when(warpgroup == 0)(lambda: block.finish(outs))
    pl.when(warpgroup == 1)(lambda: at_cluster_barrier("arrive.release"))
    # No block may end while another one reads its sums.
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
        *others, x_s, blocks_s, sums_s, full, free = refs
        # [rider's arrays, outputs, rider's outputs]
        outs = others[len(arrays) : len(others) - len(rider_outs)]
        index, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        tile, rank = index // shape.cluster, lax.rem(index, jnp.int32(shape.cluster))
        if cluster > 1:
            tile, rank = index, lax.axis_index("rank")
        block = _Block(shape, tile, rank, x, blocks, x_s, blocks_s, sums_s, full, free)
        if rider:
            is_rider = index >= shape.num_blocks
            pl.when(~is_rider)(lambda: _run(block, warpgroup, outs))
            rider_refs = *others[: len(arrays)], *others[len(arrays) + len(outs) :]
            pl.when(is_rider & (warpgroup == 0))(lambda: rider.run(index - shape.num_blocks, rider_refs, sums_s))
            return
        if interpret is None:
            _run(block, warpgroup, outs)
            return
        pl.when(warpgroup == 1)(block.fetch)

        @pl.when(warpgroup == 0)
        def _() -> None:
            outs[0][index] = block.multiply()

    cluster = 1 if interpret is not None else shape.cluster
    swizzled = (plgpu.TilingTransform((8, SIDE)), plgpu.SwizzleTransform(128))
    results = [jax.ShapeDtypeStruct((shape.num_stored, output.width), output.dtype) for output in shape.outputs]
    if interpret is not None:
        results = [jax.ShapeDtypeStruct((shape.num_blocks, SIDE, shape.num_tokens), jnp.float32)]
    return list(
        plgpu.kernel(
            body,
            out_type=(*results, *rider_outs),
            grid=(shape.num_blocks // cluster + rider_blocks,),
            grid_names=("block",),
            **({"cluster": (cluster,), "cluster_names": ("rank",)} if cluster > 1 else {}),
            num_threads=2,
            thread_name="warpgroup",
            kernel_name=f"skinny_gemm_{rider.name}" if rider else "skinny_gemm",
            scratch_types=[
                plgpu.SMEM((stages, shape.num_tokens, shape.step_blocks * SIDE), jnp.bfloat16, transforms=swizzled),
                plgpu.SMEM((stages, shape.step_blocks, SIDE, SIDE), jnp.bfloat16, transforms=swizzled),
                plgpu.SMEM((num_floats(shape, floats),), jnp.float32),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            ],
            interpret=interpret,
        )(x_TK, blocks_bok, *arrays)
    )
