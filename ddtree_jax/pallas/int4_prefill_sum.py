"""Sums over a token's experts: the down product's rows by pair, weighted, in the order of pairs, in float32.

Bytes: every local pair's row once, 235 MB for 16,384 pairs of 7,168 columns.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, BFloat16, Float, Int32

from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.int4_prefill_words import cache_policy, narrow
from ddtree_jax.pallas.int4_unpack import WEIGHT_SCALE

_TOKENS_AT_ONCE = 2
_WARPGROUPS = 8


def sum_pairs(
    y_MPc: BFloat16[Array, "M P c"],
    expert_TX: Int32[Array, "T X"],
    weight_TX: Float[Array, "T X"],
    num_experts: int,
    num_blocks: int,
) -> BFloat16[Array, "T D"]:
    """Rows of tokens from slices ``y_MPc`` of their pairs' rows, which are `WEIGHT_SCALE` times smaller.

    What pairs without an expert here hold is left out.
    """
    num_slices, _, width = y_MPc.shape
    T = expert_TX.shape[0]
    workers = num_blocks * _WARPGROUPS // num_slices

    def body(y, expert, weight, out) -> None:
        worker = lax.axis_index("warpgroup") * num_blocks + lax.axis_index("block")

        @pl.when(worker < workers * num_slices)
        def _() -> None:
            tile, first = lax.rem(worker, jnp.int32(num_slices)), worker // num_slices
            sizes = {"num_experts": num_experts, "num_workers": workers}
            _sum_slice(y, expert, weight, out, tile, first, **sizes)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T, num_slices * width), jnp.bfloat16),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        kernel_name="int4_prefill_sum",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(y_MPc, expert_TX, weight_TX)


def _sum_slice(
    y: Any, expert: Any, weight: Any, out: Any, *scalars: jax.Array, num_experts: int, num_workers: int
) -> None:
    """Adds up the pairs of every ``num_workers``-th token, weighted, in their order, in float32, for 512 columns.

    Scalars: slice of ``y`` [slices, pairs, 512], first token. Pairs without an expert here are left out.
    """

    @w.inline(4, 2)
    def call(y, expert, weight, out, tile, first) -> None:
        num_tokens, per_token = ir.MemRefType(expert.type).shape
        _, num_pairs, width = ir.MemRefType(y.type).shape
        out_width = ir.MemRefType(out.type).shape[1]
        column = w.scaled(arith.andi(w.thread(), w.i32(127)), 2 * width // 128)
        slice_at = w.at(w.gmem(y), arith.muli(w.wide(tile), w.i64(2 * width * num_pairs)), w.GLOBAL)
        slice_at = w.at(slice_at, w.wide(column), w.GLOBAL)
        out_at = w.at(w.gmem(out), w.wide(w.add(w.scaled(tile, 2 * width), column)), w.GLOBAL)
        # No row is read twice: what the down product has left in the second cache stays there until it is read.
        policy = cache_policy("evict_first")
        step = num_workers * _TOKENS_AT_ONCE
        turns = arith.divui(arith.subi(w.i32(num_tokens + step - 1), first), w.i32(step))

        @mgpu.utils.fori(turns, [])
        def _(turn: ir.Value, carry: list) -> list:
            tokens = [w.add(first, w.scaled(turn, step), w.i32(i * num_workers)) for i in range(_TOKENS_AT_ONCE)]
            loaded = []
            for token in tokens:
                is_token = arith.cmpi(arith.CmpIPredicate.slt, token, w.i32(num_tokens))
                pair = w.scaled(arith.minsi(token, w.i32(num_tokens - 1)), per_token)
                for x in range(per_token):
                    at = w.wide(w.scaled(arith.addi(pair, w.i32(x)), 4))
                    chosen = llvm.load(w.i32(), w.at(w.gmem(expert), at, w.GLOBAL))
                    is_local = arith.cmpi(arith.CmpIPredicate.ult, chosen, w.i32(num_experts))
                    row = w.at(slice_at, arith.muli(w.wide(arith.addi(pair, w.i32(x))), w.i64(2 * width)), w.GLOBAL)
                    words = _load_if(row, arith.andi(is_token, is_local), policy)
                    factor = llvm.load(w.f32(), w.at(w.gmem(weight), at, w.GLOBAL))
                    # The router's weight of another shard's expert may be anything.
                    factor = arith.select(is_local, factor, arith.constant(w.f32(), 0.0))
                    # A power of 2: nothing is rounded.
                    factor = arith.mulf(factor, arith.constant(w.f32(), WEIGHT_SCALE))
                    loaded.append((words, factor))
            for i, token in enumerate(tokens):
                total = [arith.constant(w.f32(), 0.0)] * 4
                for words, factor in loaded[i * per_token : (i + 1) * per_token]:
                    values = [value for word in words for value in _widen(word)]
                    total = [
                        arith.addf(sum_, arith.mulf(value, factor)) for sum_, value in zip(total, values, strict=True)
                    ]
                with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, token, w.i32(num_tokens))):
                    to = w.at(out_at, arith.muli(w.wide(token), w.i64(2 * out_width)), w.GLOBAL)
                    llvm.store(w.register([narrow(*total[:2]), narrow(*total[2:])]), to, alignment=8)
            return carry

    call(y, expert, weight, out, *scalars)


def _load_if(pointer: ir.Value, is_needed: ir.Value, policy: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Two words, or zeros."""
    return mgpu.utils.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; "
        "@p ld.global.L1::no_allocate.L2::cache_hint.v2.b32 {$0, $1}, [$2], $4; }",
        pointer,
        arith.extui(w.i32(), is_needed),
        policy,
        result_types=[w.i32(), w.i32()],
        has_side_effects=True,
    )


def _widen(word: ir.Value) -> tuple[ir.Value, ir.Value]:
    low, high = arith.shli(word, w.i32(16)), arith.andi(word, w.i32(0xFFFF0000))
    return arith.bitcast(w.f32(), low), arith.bitcast(w.f32(), high)
