"""Norms, both products of the query, and the cache's rows, by clusters that have a head or two heads' rotary parts each.

See `latent_query`, whose kernel this is.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from ddtree_jax.pallas import simt
from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.bfloat16_rows import SWIZZLED, fill
from ddtree_jax.pallas.latent_query_threads import Shape, add_query, make_rows, norm_tokens
from ddtree_jax.pallas.simt import FLOAT, INT, UINT
from ddtree_jax.pallas.skinny_gemm_kernel import at_cluster_barrier, cluster_barrier, stage_sums
from ddtree_jax.pallas.skinny_gemm_shape import SIDE, num_floats
from ddtree_jax.pallas.skinny_gemm_sums import finish


def _load_from_cluster(sums: simt.Memory, rank: simt.Value | int, index: simt.Value) -> list[simt.Value]:
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


def _sync_warpgroup() -> None:
    @w.inline(0, 0)
    def call() -> None:
        mgpu.utils.warp_barrier()
        mgpu.utils.warpgroup_barrier()

    call()


def _finish_turned(shape: Shape, t: Any, tile: Any, half: Any, part: Any, sums: simt.Memory, out: simt.Memory) -> None:
    def load(i: int, index: simt.Value) -> list[simt.Value]:
        return _load_from_cluster(sums, half * shape.q_b.cluster + i, index)

    finish(t, shape.turned, tile, part, load, functools.partial(cluster_barrier, "arrive.release"), out)


def _finish_latent(shape: Shape, t: Any, tile: Any, sums: simt.Memory, out: simt.Memory) -> None:
    def load(_: int, index: simt.Value) -> list[simt.Value]:
        return t.load_vector(sums, index, 4)

    finish(t, shape.key_up, tile, t.value(INT, 0), load, lambda: None, out)


def _add_query(shape: Shape, t: Any, sums: simt.Memory, tokens: simt.Memory) -> None:
    load = functools.partial(_load_from_cluster, sums)
    add_query(t, load, functools.partial(cluster_barrier, "arrive.release"), tokens, shape=shape)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block's refs and place; its methods are what its warpgroups do."""

    shape: Shape
    cluster: Array
    rank: Array
    warpgroup: Array
    q_b: Any
    key_up: Any
    tokens_s: Any
    q_b_s: Any
    key_up_s: Any
    sums_s: Any
    staged_s: Any
    q_b_full: Any
    key_up_full: Any

    @property
    def half(self) -> Array:
        """Which of the cluster's two tiles."""
        return lax.div(self.rank, jnp.int32(self.shape.q_b.cluster))

    @property
    def part(self) -> Array:
        """Which of the tile's columns."""
        return lax.rem(self.rank, jnp.int32(self.shape.q_b.cluster))

    @property
    def has_head(self) -> Array:
        return self.cluster < self.shape.num_heads

    def fetch(self) -> None:
        """All that the block needs of the weights: they lie together, a part of q_b's tile, tiles of key_up."""
        shape = self.shape
        step = self.q_b_s.shape[1]
        start = (2 * self.cluster + self.half) * shape.q_b.num_columns + self.part * shape.num_columns
        for i in range(self.q_b_s.shape[0]):
            source = self.q_b.at[pl.ds(start + i * step, step)]
            plgpu.copy_gmem_to_smem(source, self.q_b_s.at[i], self.q_b_full.at[i])
        for i in range(shape.num_up_tiles):
            pl.when(self.has_up_tile(i))(functools.partial(self._fetch_up, i))

    def _fetch_up(self, i: int) -> None:
        source = self.key_up.at[pl.ds(2 * self._up_tile(i), 2)]
        plgpu.copy_gmem_to_smem(source, self.key_up_s.at[i], self.key_up_full.at[i])

    def _up_tile(self, i: Array | int) -> Array:
        return self.cluster * self.shape.key_up.tiles_a_group + self.rank + i * self.shape.cluster

    def has_up_tile(self, i: Array | int) -> Array:
        return self.has_head & (self.rank + i * self.shape.cluster < self.shape.key_up.tiles_a_group)

    def multiply(self) -> None:
        """Sums of the part of q_b's tile, to where the cluster finds them."""
        num_steps, step = self.q_b_s.shape[:2]

        def run(acc_ref: Any) -> Array:
            for i in range(num_steps):
                plgpu.barrier_wait(self.q_b_full.at[i])
                for j in range(step):
                    tokens = self.tokens_s.at[i * step + j]
                    plgpu.wgmma(acc_ref, self.q_b_s.at[i, j], tokens.transpose((1, 0)))
            return acc_ref[...]

        stage_sums(self.sums_s, self._sum(run), self.shape.q_b)

    def lift(self, out: Any) -> None:
        """The warpgroup's tile of the head's query in the latent space."""
        i = self.warpgroup
        plgpu.barrier_wait(self.key_up_full.at[i])

        def run(acc_ref: Any) -> Array:
            for j in range(2):
                plgpu.wgmma(acc_ref, self.key_up_s.at[i, j], self.tokens_s.at[j].transpose((1, 0)))
            return acc_ref[...]

        stage_sums(self.staged_s.at[i], self._sum(run), self.shape.key_up)
        _sync_warpgroup()
        function = functools.partial(_finish_latent, self.shape)
        simt.run(function, [(self.staged_s.at[i], FLOAT), (out, UINT)], [self._up_tile(i)])

    def _sum(self, run: Callable) -> Array:
        return pl.run_scoped(run, plgpu.ACC((SIDE, self.shape.q_b.num_tokens), jnp.float32))


def _finish_head(block: _Block, out_latent: Any) -> None:
    """A cluster that has a head: the query without position goes on into the latent space."""
    shape = block.shape
    at_cluster_barrier("arrive.release", "wait.acquire")
    fill(functools.partial(_add_query, shape), block.tokens_s, [(block.sums_s, FLOAT)], [])
    is_lifting = (block.warpgroup < shape.num_up_tiles) & block.has_up_tile(block.warpgroup)
    pl.when(is_lifting)(lambda: block.lift(out_latent))
    # No block may end while another one reads its sums.
    at_cluster_barrier("wait.acquire")


def _finish_rest(block: _Block, rows: Sequence[tuple[Any, Any]], out_rotary: Any) -> None:
    """A cluster of two heads' rotary parts, whose other warpgroups make the cache's rows."""
    shape = block.shape
    at_cluster_barrier("arrive.release")

    @pl.when(block.warpgroup == 0)
    def _() -> None:
        at_cluster_barrier("wait.acquire")
        tile = 2 * (block.cluster - shape.num_heads) + block.half
        function = functools.partial(_finish_turned, shape)
        simt.run(function, [(block.sums_s, FLOAT), (out_rotary, UINT)], [tile, block.half, block.part])

    @pl.when(block.warpgroup > 0)
    def _() -> None:
        number = (block.cluster - shape.num_heads) * shape.cluster + block.rank
        simt.run(functools.partial(make_rows, shape=shape), rows, [number])
        at_cluster_barrier("wait.acquire", "arrive.release")

    at_cluster_barrier("wait.acquire")


def launch(
    query_BTA: BFloat16[Array, "B T A"],
    latent_BTW: BFloat16[Array, "B T W"],
    query_gain_A: BFloat16[Array, "A"],
    latent_gain_C: BFloat16[Array, "C"],
    cos_BTr: Float[Array, "B T r"],
    sin_BTr: Float[Array, "B T r"],
    q_b: BFloat16[Array, "b 64 64"],
    key_up: BFloat16[Array, "c 64 64"],
    shape: Shape,
) -> list[Array]:
    """Rows, tile, latent and rotary part of the query, the last two [tokens, heads * width]."""

    def body(query: Any, latent: Any, gain: Any, latent_gain: Any, cos: Any, sin: Any, *refs: Any) -> None:
        q_b, key_up, out_rows, out_tile, out_latent, out_rotary, *scratch = refs
        warpgroup = lax.axis_index("warpgroup")
        place = lax.axis_index("cluster"), lax.axis_index("rank"), warpgroup
        block = _Block(shape, *place, q_b, key_up, *scratch)
        pl.when(warpgroup == shape.num_warpgroups - 1)(block.fetch)
        norm = functools.partial(norm_tokens, shape=shape)
        fill(norm, block.tokens_s, [(query, UINT), (gain, UINT)], [block.part])
        pl.when(warpgroup == 0)(block.multiply)
        rows = (latent, UINT), (latent_gain, UINT), (cos, FLOAT), (sin, FLOAT), (out_rows, UINT), (out_tile, UINT)
        pl.when(block.has_head)(lambda: _finish_head(block, out_latent))
        pl.when(~block.has_head)(lambda: _finish_rest(block, rows, out_rotary))

    B, T, W = latent_BTW.shape
    step, floats, num_up = shape.q_b.step_blocks, num_floats(shape.q_b), shape.num_up_tiles
    outs = latent_BTW.shape, (B, shape.rows.num_rows, W), (B * T, shape.key_up.outputs[0].width)
    outs = *outs, (B * T, shape.turned.outputs[0].width)
    return list(
        plgpu.kernel(
            body,
            out_type=tuple(jax.ShapeDtypeStruct(out, jnp.bfloat16) for out in outs),
            grid=(shape.num_clusters,),
            grid_names=("cluster",),
            cluster=(shape.cluster,),
            cluster_names=("rank",),
            num_threads=shape.num_warpgroups,
            thread_name="warpgroup",
            kernel_name="latent_query",
            scratch_types=[
                _swizzled(shape.num_columns, shape.q_b.num_tokens, SIDE),
                _swizzled(shape.num_columns // step, step, SIDE, SIDE),
                _swizzled(num_up, 2, SIDE, SIDE),
                plgpu.SMEM((floats,), jnp.float32),
                plgpu.SMEM((num_up, floats), jnp.float32),
                plgpu.Barrier(num_arrivals=1, num_barriers=shape.num_columns // step),
                plgpu.Barrier(num_arrivals=1, num_barriers=num_up),
            ],
        )(query_BTA, latent_BTW, query_gain_A, latent_gain_C, cos_BTr, sin_BTr, q_b, key_up)
    )


def _swizzled(*shape: int) -> Any:
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)
