"""Words that the prefill kernels' parts share."""

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ddtree_jax.pallas import warps as w


def sync_warpgroup(warpgroup: ir.Value) -> None:
    number = arith.addi(warpgroup, w.i32(1))
    mgpu.utils.inline_ptx("bar.sync $0, 128;", number, has_side_effects=True, convergent=True)


def narrow(low: ir.Value, high: ir.Value) -> ir.Value:
    """Two float32 as bfloat16 in a word."""
    return mgpu.utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, result_types=w.i32())


def cache_policy(priority: str) -> ir.Value:
    """What copies and loads tell the second cache of their lines: ``evict_first`` or ``evict_last``."""
    return mgpu.utils.inline_ptx(
        f"createpolicy.fractional.L2::{priority}.b64 $0, 1.0;", result_types=w.i64_type(), has_side_effects=True
    )
