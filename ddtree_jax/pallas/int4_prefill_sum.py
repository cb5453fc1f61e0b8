"""Sums over a token's experts inside the down kernel: slices of 512 columns, while they are still in the second cache.

Blocks go through the units of a slice, then through those of the next. A slice is complete once every unit's stores have been
counted; then one warpgroup of each block adds up its share of the tokens, while the others go on. Slices lie in a ring of so
few that it stays in the cache: a slice is written only after the one that was in its place has been added up::

    units   | slice 0 ........ | slice 1 ........ | slice 2 ........ | slice 3 ........ |
    sums                       | 0 ......... |    | 1 ......... |    | 2 ......... |    | 3 ......... |

Bytes: every local pair's row twice through the cache, 235 MB each way for 16,384 pairs of 7,168 columns; tokens' rows once.
"""

from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.int4_prefill_words import narrow, sync_warpgroup

_TOKENS_AT_ONCE = 2


def _is_first_thread() -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, arith.andi(w.thread(), w.i32(127)), w.i32(0))


def _semaphore(ref: ir.Value, index: ir.Value) -> ir.Value:
    return w.at(w.gmem(ref), w.wide(w.scaled(index, 4)), w.GLOBAL)


def count_up(semaphores: ir.Value, index: ir.Value, is_counted: ir.Value) -> None:
    """One thread, after `sync_warpgroup`: what the warpgroup wrote before can be seen by who awaits the count."""
    with mgpu.utils.when(arith.andi(_is_first_thread(), is_counted)):
        mgpu.utils.inline_ptx(
            "red.release.gpu.global.add.u32 [$0], $1;", _semaphore(semaphores, index), w.i32(1), has_side_effects=True
        )


def finish_stores(semaphores: Any, pending: jax.Array, warpgroup: jax.Array) -> None:
    """Waits for the warpgroup's bulk stores and counts slice ``pending - 1`` up, none if it is 0."""

    @w.inline(1, 2)
    def call(semaphores, pending, warpgroup) -> None:
        wait_stores(warpgroup)
        count_up(semaphores, arith.subi(pending, w.i32(1)), arith.cmpi(arith.CmpIPredicate.sgt, pending, w.i32(0)))

    call(semaphores, pending, warpgroup)


def wait_stores(warpgroup: ir.Value) -> None:
    mgpu.utils.inline_ptx("cp.async.bulk.wait_group 0;", has_side_effects=True)
    mgpu.utils.inline_ptx("fence.proxy.async;", has_side_effects=True)
    sync_warpgroup(warpgroup)


def await_count(semaphores: Any, index: jax.Array, count: jax.Array, warpgroup: jax.Array) -> None:
    """A warpgroup waits until a semaphore has been counted up to ``count``."""

    @w.inline(1, 3)
    def call(semaphores, index, count, warpgroup) -> None:
        with mgpu.utils.when(_is_first_thread()):
            loop = scf.WhileOp([], [])
            with ir.InsertionPoint(loop.before.blocks.append()):
                seen = mgpu.utils.inline_ptx(
                    "ld.acquire.gpu.global.b32 $0, [$1];",
                    _semaphore(semaphores, index),
                    result_types=w.i32(),
                    has_side_effects=True,
                )
                scf.condition(arith.cmpi(arith.CmpIPredicate.slt, seen, count), [])
            with ir.InsertionPoint(loop.after.blocks.append()):
                scf.yield_([])
        sync_warpgroup(warpgroup)

    call(semaphores, index, count, warpgroup)


def signal(semaphores: Any, index: jax.Array, warpgroup: jax.Array) -> None:
    @w.inline(1, 2)
    def call(semaphores, index, warpgroup) -> None:
        sync_warpgroup(warpgroup)
        count_up(semaphores, index, arith.constant(ir.IntegerType.get_signless(1), 1))

    call(semaphores, index, warpgroup)


def sum_slice(
    y: Any, expert: Any, weight: Any, out: Any, *scalars: jax.Array, num_experts: int, num_workers: int
) -> None:
    """Adds up the pairs of every ``num_workers``-th token, weighted, in their order, in float32, for 512 columns.

    Scalars: slice, its place in the ring ``y`` [slices, pairs, 512], first token. Pairs without an expert here are left out.
    """

    @w.inline(4, 3)
    def call(y, expert, weight, out, tile, place, first) -> None:
        num_tokens, per_token = ir.MemRefType(expert.type).shape
        _, num_pairs, width = ir.MemRefType(y.type).shape
        out_width = ir.MemRefType(out.type).shape[1]
        column = w.scaled(arith.andi(w.thread(), w.i32(127)), 2 * width // 128)
        slice_at = w.at(w.gmem(y), arith.muli(w.wide(place), w.i64(2 * width * num_pairs)), w.GLOBAL)
        slice_at = w.at(slice_at, w.wide(column), w.GLOBAL)
        out_at = w.at(w.gmem(out), w.wide(w.add(w.scaled(tile, 2 * width), column)), w.GLOBAL)
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
                    words = _load_if(row, arith.andi(is_token, is_local))
                    factor = llvm.load(w.f32(), w.at(w.gmem(weight), at, w.GLOBAL))
                    # The router's weight of another shard's expert may be anything.
                    factor = arith.select(is_local, factor, arith.constant(w.f32(), 0.0))
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


def _load_if(pointer: ir.Value, is_needed: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Two words that other multiprocessors wrote, or zeros."""
    return mgpu.utils.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.cg.v2.b32 {$0, $1}, [$2]; }",
        pointer,
        arith.extui(w.i32(), is_needed),
        result_types=[w.i32(), w.i32()],
        has_side_effects=True,
    )


def _widen(word: ir.Value) -> tuple[ir.Value, ir.Value]:
    low, high = arith.shli(word, w.i32(16)), arith.andi(word, w.i32(0xFFFF0000))
    return arith.bitcast(w.f32(), low), arith.bitcast(w.f32(), high)
