"""What a warpgroup of `tree_mla_hopper` does with rows and weights of a tile beside its products."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.bfloat16_rows import SWIZZLED

WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)


def zeros(shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def spread(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The row's numbers in all columns."""
    return lax.broadcast_in_dim(row, shape, [0])


def store_weights(weights_ref: Any, top_ref: Any, weights: jax.Array, top: jax.Array) -> None:
    """Both at once; Pallas' own stores, one after the other, would take three more barriers."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), w.REF, WGMMA, ROW))
    def store(_, weights_ref, top_ref, weights, top):
        # This warp's scores are done, but products of the others may still read what lies there.
        mgpu.utils.warpgroup_barrier()
        weights.store_tiled(weights_ref, swizzle=128)
        top.store_untiled(top_ref, optimized=False)

    store(weights_ref, top_ref, weights, top)


def any_in_warp(moved: jax.Array) -> jax.Array:
    """Whether it is true of any of the warp's rows."""

    @w.inline(0, 0, (ROW,), plgpu.ShapeDtypeStruct((), jnp.int32, layout=w.SCALAR))
    def call(moved):
        flags = [arith.extui(w.i32(), *w.elements(register, 1)) for register in moved.registers.flat]
        seen = mgpu.utils.inline_ptx(
            "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }",
            functools.reduce(arith.ori, flags),
            result_types=w.i32(),
            has_side_effects=True,
            convergent=True,
        )
        return mgpu.FragmentedArray.splat(seen, (), is_signed=True)

    return call(moved) != 0
