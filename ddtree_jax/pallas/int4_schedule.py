"""Which expert's weights meet which tokens: the schedule of the INT4 kernel, made by every block for itself.

A pair is one token at one of its experts, pair ``t * X + x``. A unit is an expert and up to 8 of its pairs; a pair's place
is ``8 * unit + n``. Units stand in the order of experts, an expert's pairs in the order of tokens. Pairs whose expert is not
among the local ones (another shard's, or a padding row's) are in no unit and cost nothing.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm

from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.int4_steps import TOKENS

_LANES = 32


def scratch_words(num_pairs: int, num_experts: int) -> int:
    """Words of shared memory that `build_schedule` works in."""
    return 2 * _whole(num_pairs) + 2 * _whole(num_experts)


def _whole(size: int) -> int:
    return _LANES * -(-size // _LANES)


def build_schedule(
    expert: Any,
    units: Any,
    pairs: Any,
    places: Any,
    scratch: Any,
    *,
    num_pairs: int,
    num_experts: int,
    num_threads: int,
) -> None:
    """Fills the tables in shared memory; all threads of the block take part and wait for each other.

    ``units`` [P + 1]: 16 * expert + number of its pairs; last the number of units. ``pairs`` [8 P]: the units' pairs, -1
    behind them. ``places`` [P]: -1 for no unit. A warp ranks 32 pairs at a time; the rest is done by all threads.
    """

    @w.inline(5, 0)
    def call(expert_g, units, pairs, places, scratch) -> None:
        thread = w.thread()
        lane = arith.andi(thread, w.i32(_LANES - 1))
        expert_s = w.pointer(scratch)
        rank_s = w.at(expert_s, w.i32(4 * _whole(num_pairs)), w.SHARED)
        count_s = w.at(rank_s, w.i32(4 * _whole(num_pairs)), w.SHARED)
        first_s = w.at(count_s, w.i32(4 * _whole(num_experts)), w.SHARED)

        def strided(size: int, function: Any) -> None:
            """Calls ``function(index, is_inside)`` for all indices below ``size``, spread over the threads."""
            for turn in range(-(-size // num_threads)):
                index = arith.addi(thread, w.i32(turn * num_threads))
                function(index, _less(index, size))

        def read_expert(index: ir.Value, is_inside: ir.Value) -> None:
            inside = arith.minsi(index, w.i32(num_pairs - 1))
            expert = llvm.load(w.i32(), w.at(w.gmem(expert_g), w.wide(w.scaled(inside, 4)), w.GLOBAL))
            is_local = arith.andi(
                _less(index, num_pairs), arith.cmpi(arith.CmpIPredicate.ult, expert, w.i32(num_experts))
            )
            with mgpu.utils.when(is_inside):
                llvm.store(arith.select(is_local, expert, w.i32(-1)), _word(expert_s, index))

        def fill(pointer: ir.Value, value: int) -> Any:
            def store(index: ir.Value, is_inside: ir.Value) -> None:
                with mgpu.utils.when(is_inside):
                    llvm.store(w.i32(value), _word(pointer, index))

            return store

        strided(_whole(num_pairs), read_expert)
        strided(_whole(num_experts), fill(count_s, 0))
        strided(TOKENS * num_pairs, fill(w.pointer(pairs), -1))
        gpu.barrier()

        with mgpu.utils.when(_less(thread, _LANES)):

            @mgpu.utils.fori(w.i32(_whole(num_pairs) // _LANES), [])
            def _(turn: ir.Value, carry: list) -> list:
                _rank(arith.addi(w.scaled(turn, _LANES), lane), lane, expert_s, rank_s, count_s)
                return carry

            total = _first_units(lane, count_s, first_s, _whole(num_experts) // _LANES)
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, w.i32(_LANES - 1))):
                llvm.store(total, _word(w.pointer(units), w.i32(num_pairs)))
        gpu.barrier()

        def write(index: ir.Value, is_inside: ir.Value) -> None:
            with mgpu.utils.when(is_inside):
                expert = llvm.load(w.i32(), _word(expert_s, index))
                is_local = arith.cmpi(arith.CmpIPredicate.sge, expert, w.i32(0))
                known = arith.maxsi(expert, w.i32(0))
                rank = llvm.load(w.i32(), _word(rank_s, index))
                count = llvm.load(w.i32(), _word(count_s, known))
                unit = arith.addi(llvm.load(w.i32(), _word(first_s, known)), arith.shrui(rank, w.i32(3)))
                n = arith.andi(rank, w.i32(TOKENS - 1))
                place = arith.addi(w.scaled(unit, TOKENS), n)
                llvm.store(arith.select(is_local, place, w.i32(-1)), _word(w.pointer(places), index))
                with mgpu.utils.when(is_local):
                    llvm.store(index, _word(w.pointer(pairs), place))
                    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, n, w.i32(0))):
                        size = arith.minsi(arith.subi(count, rank), w.i32(TOKENS))
                        entry = arith.addi(w.scaled(expert, 16), size)
                        llvm.store(entry, _word(w.pointer(units), unit))

        strided(num_pairs, write)
        # The scratch memory becomes the ring, which the copy engine writes.
        if w.has_copy_engine():
            mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
        gpu.barrier()

    call(expert, units, pairs, places, scratch)


def _rank(index: ir.Value, lane: ir.Value, expert_s: ir.Value, rank_s: ir.Value, count_s: ir.Value) -> None:
    """Ranks a warp's 32 pairs among all up to them of the same expert, and counts them."""
    expert = llvm.load(w.i32(), _word(expert_s, index))
    same = mgpu.utils.inline_ptx(
        "match.any.sync.b32 $0, $1, 0xffffffff;",
        expert,
        result_types=w.i32(),
        has_side_effects=True,
        convergent=True,
    )
    before = _popcount(arith.andi(same, arith.subi(arith.shli(w.i32(1), lane), w.i32(1))))
    count = _word(count_s, arith.maxsi(expert, w.i32(0)))
    seen = llvm.load(w.i32(), count)
    llvm.store(arith.addi(seen, before), _word(rank_s, index))
    mgpu.utils.warp_barrier()
    is_first = arith.cmpi(arith.CmpIPredicate.eq, before, w.i32(0))
    is_local = arith.cmpi(arith.CmpIPredicate.sge, expert, w.i32(0))
    with mgpu.utils.when(arith.andi(is_first, is_local)):
        llvm.store(arith.addi(seen, _popcount(same)), count)
    mgpu.utils.warp_barrier()


def _first_units(lane: ir.Value, count_s: ir.Value, first_s: ir.Value, run: int) -> ir.Value:
    """Writes every expert's first unit; returns the number of units up to the lane's ``run`` of experts."""
    begin = w.scaled(lane, run)
    units = []
    for i in range(run):
        count = llvm.load(w.i32(), _word(count_s, arith.addi(begin, w.i32(i))))
        units.append(arith.shrui(arith.addi(count, w.i32(TOKENS - 1)), w.i32(3)))
    own = w.add(*units)
    total = own
    for distance in (1, 2, 4, 8, 16):
        other = nvvm.shfl_sync(w.i32(-1), total, w.i32(distance), w.i32(0), nvvm.ShflKind.up)
        is_inside = arith.cmpi(arith.CmpIPredicate.sge, lane, w.i32(distance))
        total = arith.addi(total, arith.select(is_inside, other, w.i32(0)))
    first = arith.subi(total, own)
    for i in range(run):
        llvm.store(first, _word(first_s, arith.addi(begin, w.i32(i))))
        first = arith.addi(first, units[i])
    return total


def _less(index: ir.Value, bound: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.slt, index, w.i32(bound))


def _word(pointer: ir.Value, index: ir.Value) -> ir.Value:
    return w.at(pointer, w.scaled(index, 4), w.SHARED)


def _popcount(value: ir.Value) -> ir.Value:
    return mgpu.utils.inline_ptx("popc.b32 $0, $1;", value, result_types=w.i32())
