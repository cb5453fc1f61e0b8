"""One product of few tokens with a wide weight on Hopper: every byte of the weight once, by all multiprocessors.

A block has one warpgroup that fetches and one or two that multiply, 64 rows of a tile each. The weight is cut into steps
(up to 128 rows by 64 to 256 columns) in the order (tile of rows, columns), and every block takes an equal span of them,
wherever tiles begin or end::

    fetch      steps of the span, as far as the ring holds ────────────────────────────────────────────►
    multiply   tail of tile 3 ─► parts, signal | tile 4 ─► outputs | head of tile 5 ─► wait, add parts ─► outputs

                   tile 3           tile 4           tile 5
    spans      ....|.......][.......|...............|......][.........][.....|...      ][ between blocks

Weights are the operand with 64 rows of ``wgmma``, tokens the narrow one, both from shared memory. A tile that lies in one
block goes straight to the outputs. Of one that blocks share, the block that has its head adds the parts of the others in
the order of blocks: the same on every run. No block waits before it has handed over its own part, so that none waits for
itself, and every tail should have been there for the length of a span when it is asked for.

Where a tile has as many blocks of its own as a cluster, they read each other's shared memory instead, each of them adding
up its share of the tile, in the same order: no way through the second cache, but multiprocessors that clusters leave over.

Bytes: the weight, and for every step its columns of the tokens, which should lie in the second cache; 4.57 TB/s on an
H200 at best.

Not yet run on a GPU: what is said here of time is a plan, not a measurement.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm
from jaxtyping import Array, BFloat16

from ddtree_jax.pallas import simt
from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.simt import FLOAT, UINT
from ddtree_jax.pallas.skinny_gemm_shape import SIDE, WARPGROUP, Config, Shape, num_stages
from ddtree_jax.pallas.skinny_gemm_sums import finish, finish_cluster, store_part

_WGMMA = plgpu.Layout.WGMMA


def _stage_sums(sums_ref: Any, warpgroup: Array, acc: Array, shape: Shape) -> None:
    """A warpgroup's sums [64, tokens] to shared memory, token by token."""

    @w.inline(1, 1, (_WGMMA,))
    def call(sums: Any, warpgroup: Any, acc: Any) -> None:
        r, t = w.lane()
        row = w.add(w.scaled(warpgroup, SIDE), w.scaled(w.warp(), 16), r)
        start = w.at(w.pointer(sums), w.scaled(w.add(row, w.scaled(t, 2 * shape.sums_stride)), 4), w.SHARED)
        # Registers: 8 columns after 8, of each the upper and the lower half of the warp's 16 rows.
        for i, register in enumerate(acc.registers.flat):
            for j, value in enumerate(w.elements(register, 2)):
                offset = 4 * ((8 * (i // 2) + j) * shape.sums_stride + 8 * (i % 2))
                llvm.store(value, w.at(start, w.i32(offset), w.SHARED), alignment=4)

    call(sums_ref, warpgroup, acc)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block's refs and place; its methods are what its warpgroups do."""

    shape: Shape
    index: Array
    warpgroup: Array
    x: Any
    blocks: Any
    parts: Any
    outs: Sequence[Any]
    x_s: Any
    blocks_s: Any
    sums_s: Any
    full: Any
    free: Any
    semaphores: w.Semaphores | None
    is_interpreted: bool

    @property
    def num_stages(self) -> int:
        return self.x_s.shape[0]

    def fetch(self) -> None:
        """Keeps the ring full: a step's weight blocks, which lie together, and its columns of the tokens."""
        shape = self.shape
        start, end = shape.span(self.index)
        per_step = shape.step_blocks * shape.warpgroups

        @pl.loop(0, end - start)
        def _(i: Array) -> None:
            slot = lax.rem(i, jnp.int32(self.num_stages))
            pl.when(i >= self.num_stages)(lambda: plgpu.barrier_wait(self.free.at[slot]))
            step = start + i
            tile, k = step // shape.num_steps, lax.rem(step, jnp.int32(shape.num_steps))
            column = (tile // shape.tiles_a_group * shape.num_steps + k) * (shape.step_blocks * SIDE)
            source = self.blocks.at[pl.ds(step * per_step, per_step)]
            plgpu.copy_gmem_to_smem(source, self.blocks_s.at[slot], self.full.at[slot])
            source = self.x.at[:, pl.ds(column, shape.step_blocks * SIDE)]
            plgpu.copy_gmem_to_smem(source, self.x_s.at[slot], self.full.at[slot])

    def stage(self) -> None:
        """Sums up the block's share of a tile and puts the sums where the cluster can read them."""
        start, end = self.shape.span(self.index)
        acc = self._multiply(jnp.int32(0), jnp.int32(0), end - start)
        _stage_sums(self.sums_s, self.warpgroup, acc, self.shape)

    def add_up(self) -> None:
        """Outputs of the block's share of the cluster's tile."""
        cluster = self.shape.cluster
        refs = [(self.sums_s, FLOAT), *((out, UINT) for out in self.outs)]
        numbers = [self.index // cluster, lax.rem(self.index, jnp.int32(cluster))]
        simt.run(functools.partial(_call_cluster, self.shape), refs, numbers)

    def compute(self) -> None:
        """Goes through the span, a tile's piece after the other."""
        shape = self.shape
        start, end = shape.span(self.index)
        first, last = start // shape.num_steps, (end - 1) // shape.num_steps
        if self.semaphores is not None:
            self.semaphores.signal(jnp.int32(0))

        @pl.loop(first, last + 1)
        def _(tile: Array) -> None:
            begin = jnp.maximum(start - tile * shape.num_steps, 0)
            stop = jnp.minimum(end - tile * shape.num_steps, shape.num_steps)
            acc = self._multiply(tile * shape.num_steps - start, begin, stop)
            if self.is_interpreted:
                self.parts[self.index, tile - first, self.warpgroup] = acc
            else:
                self._hand_over(tile, begin, acc)

        if self.semaphores is not None:
            self._close()

    def _multiply(self, offset: Array, begin: Array, stop: Array) -> Array:
        """Sums over steps ``begin`` to ``stop`` of a tile, which are ``offset`` behind those steps in the span."""
        shape = self.shape

        def slot_of(k: Array) -> Array:
            return lax.rem(offset + k, jnp.int32(self.num_stages))

        def multiply(acc_ref: Any) -> Array:
            @pl.loop(begin, stop)
            def _(k: Array) -> None:
                slot = slot_of(k)
                plgpu.barrier_wait(self.full.at[slot])
                for j in range(shape.step_blocks):
                    rows = self.blocks_s.at[slot, j * shape.warpgroups + self.warpgroup]
                    tokens = self.x_s.at[slot, :, pl.ds(j * SIDE, SIDE)]
                    plgpu.wgmma(acc_ref, rows, tokens.transpose((1, 0)))
                plgpu.wgmma_wait(shape.step_blocks)
                # The step before has been read.
                pl.when(k > begin)(lambda: plgpu.barrier_arrive(self.free.at[slot_of(k - 1)]))

            return acc_ref[...]

        acc = pl.run_scoped(multiply, plgpu.ACC((SIDE, shape.num_tokens), jnp.float32))
        plgpu.barrier_arrive(self.free.at[slot_of(stop - 1)])
        return acc

    def _hand_over(self, tile: Array, begin: Array, acc: Array) -> None:
        """Sums that a tile begins with become outputs, with what the blocks behind have; others are handed over."""
        shape = self.shape
        w.sync_threads(shape.num_threads)
        _stage_sums(self.sums_s, self.warpgroup, acc, shape)
        w.sync_threads(shape.num_threads)
        if not shape.has_parts:
            self._finish(tile, jnp.int32(0))
            return

        @pl.when(begin > 0)
        def _() -> None:
            simt.run(functools.partial(_call, store_part, shape), self._memories(), [self.index])
            self.semaphores.signal(1 + tile)

        @pl.when(begin == 0)
        def _() -> None:
            count = shape.owner((tile + 1) * shape.num_steps - 1) - self.index
            pl.when(count > 0)(lambda: self.semaphores.wait(1 + tile, count))
            self._finish(tile, count)

    def _finish(self, tile: Array, count: Array) -> None:
        refs = [*self._memories(), *((out, UINT) for out in self.outs)]
        simt.run(functools.partial(_call, finish, self.shape), refs, [tile, self.index + 1, count])

    def _memories(self) -> list[tuple[Any, np.dtype]]:
        return [(self.sums_s, FLOAT), (self.parts, FLOAT)]

    def _close(self) -> None:
        """Block 0 waits until all have begun, so that none of them takes the next launch's semaphores."""

        @pl.when(self.index == 0)
        def _() -> None:
            self.semaphores.wait(jnp.int32(0), jnp.int32(self.shape.num_blocks))
            self.semaphores.close()


def _call(function: Callable, shape: Shape, t: Any, *args: Any) -> None:
    function(t, shape, *args)


def _call_cluster(shape: Shape, t: Any, tile: Any, rank: Any, sums: simt.Memory, *outs: Any) -> None:
    def load(i: int, index: simt.Value) -> list[simt.Value]:
        loaded = mgpu.utils.inline_ptx(
            "{ .reg .b32 there; mapa.shared::cluster.u32 there, $4, $5; "
            "ld.shared::cluster.v4.f32 {$0,$1,$2,$3}, [there]; }",
            sums.at(index),
            w.i32(i),
            result_types=[w.f32()] * 4,
            has_side_effects=True,
        )
        return [simt.Value(value, FLOAT) for value in loaded]

    finish_cluster(t, shape, tile, rank, load, functools.partial(_cluster_barrier, "arrive.release"), *outs)


def _cluster_barrier(*actions: str) -> None:
    """A thread's part in the barrier of a cluster's threads: it tells what it has done, or waits to see what all have."""
    for action in actions:
        mgpu.utils.inline_ptx(f"barrier.cluster.{action};", has_side_effects=True, convergent=True)


def _at_cluster_barrier(*actions: str) -> None:
    w.inline(0, 0)(functools.partial(_cluster_barrier, *actions))()


def launch(
    x_TK: BFloat16[Array, "T K"],
    blocks_bok: BFloat16[Array, "b 64 64"],
    shape: Shape,
    config: Config,
    interpret: Any = None,
) -> list[Array]:
    """The outputs; if it is interpreted, instead the sums of all blocks' pieces of tiles [blocks, pieces, warpgroup, 64, T].

    Blocks of the weight stand in the order (tile, columns, warpgroup).
    """
    stages = num_stages(shape, config)

    def body(x: Any, blocks: Any, *refs: Any) -> None:
        *outs, parts, x_s, blocks_s, sums_s, full, free = refs
        index, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        has_cluster = shape.cluster > 1 and interpret is None
        if has_cluster:
            index = index * shape.cluster + lax.axis_index("rank")
        semaphores = None
        if shape.has_parts and interpret is None:
            threads = shape.num_threads + WARPGROUP
            size = 1 + shape.num_tiles
            semaphores = w.open_semaphores(size, index, shape.num_blocks, threads, shape.num_threads)
        memories = (x, blocks, parts, outs, x_s, blocks_s, sums_s, full, free)
        block = _Block(shape, index, warpgroup, *memories, semaphores, interpret is not None)
        pl.when(warpgroup == shape.warpgroups)(block.fetch)
        pl.when(warpgroup < shape.warpgroups)(block.stage if has_cluster else block.compute)
        if has_cluster:
            _at_cluster_barrier("arrive.release", "wait.acquire")
            pl.when(warpgroup < shape.warpgroups)(block.add_up)
            pl.when(warpgroup == shape.warpgroups)(lambda: _at_cluster_barrier("arrive.release"))
            # No block may end while another one reads its sums.
            _at_cluster_barrier("wait.acquire")

    cluster = 1 if interpret is not None else shape.cluster
    swizzled = (plgpu.TilingTransform((8, SIDE)), plgpu.SwizzleTransform(128))
    pieces = (shape.max_pieces, shape.warpgroups, SIDE, shape.num_tokens)
    parts_shape = pieces if interpret is not None else (shape.num_tokens, shape.rows) if shape.has_parts else (4,)
    outputs = () if interpret is not None else shape.outputs
    results = plgpu.kernel(
        body,
        out_type=(
            *(jax.ShapeDtypeStruct((shape.num_stored, output.width), output.dtype) for output in outputs),
            jax.ShapeDtypeStruct((shape.num_blocks, *parts_shape), jnp.float32),
        ),
        grid=(shape.num_blocks // cluster,),
        grid_names=("block",),
        **({"cluster": (cluster,), "cluster_names": ("rank",)} if cluster > 1 else {}),
        num_threads=shape.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="skinny_gemm",
        scratch_types=[
            plgpu.SMEM((stages, shape.num_tokens, shape.step_blocks * SIDE), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((stages, shape.step_blocks * shape.warpgroups, SIDE, SIDE), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((shape.num_tokens * shape.sums_stride,), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=shape.warpgroups, num_barriers=stages),
        ],
        interpret=interpret,
    )(x_TK, blocks_bok)
    return list(results) if interpret is not None else list(results[:-1])
