"""Which expert's weights meet which tokens: the schedule of the INT4 kernel, made on the device.

A pair is one token at one of its experts, pair ``t * X + x``. A unit is an expert and up to 8 of its pairs; a pair's place
is ``8 * unit + n``. Units stand in the order of experts, an expert's pairs in the order of tokens. Pairs whose expert is not
among the local ones (another shard's, or a padding row's) are in no unit and cost nothing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm
from jaxtyping import Array, Int32

from ddtree_jax.pallas import registers as r
from ddtree_jax.pallas.registers import TOKENS

NUM_COUNTERS = 8
_THREADS = 512


class Schedule(NamedTuple):
    """``unit_U`` is 16 * expert + number of its pairs; ``pair_UN`` has -1 behind them; ``place_P`` is -1 for no unit."""

    unit_U: Int32[Array, "U"]
    pair_UN: Int32[Array, "U N"]
    place_P: Int32[Array, "P"]
    num_units: Int32[Array, "one"]
    counters: Int32[Array, "counters"]


def make_schedule_reference(expert_TX: Int32[Array, "T X"], num_experts: int) -> Schedule:
    """The same in plain JAX. What lies behind the last unit is undefined in the kernel's, zero or -1 here."""
    expert_P = expert_TX.reshape(-1)
    number_P = jnp.arange(expert_P.size, dtype=jnp.int32)
    is_local_P = (expert_P >= 0) & (expert_P < num_experts)
    is_same_PP = (expert_P[:, None] == expert_P[None]) & is_local_P[None]
    rank_P = jnp.sum(is_same_PP & (number_P[None] < number_P[:, None]), axis=1, dtype=jnp.int32)
    is_first_P = is_local_P & (rank_P % TOKENS == 0)
    key_P = expert_P * expert_P.size + rank_P // TOKENS
    unit_P = jnp.sum(is_first_P[None] & (key_P[None] < key_P[:, None]), axis=1, dtype=jnp.int32)
    place_P = jnp.where(is_local_P, TOKENS * unit_P + rank_P % TOKENS, -1)
    count_P = jnp.minimum(TOKENS, jnp.sum(is_same_PP, axis=1, dtype=jnp.int32) - rank_P)
    beyond = TOKENS * expert_P.size
    pair_UN = jnp.full((beyond,), -1, jnp.int32)
    pair_UN = pair_UN.at[jnp.where(is_local_P, place_P, beyond)].set(number_P, mode="drop").reshape(-1, TOKENS)
    unit_U = jnp.zeros_like(expert_P)
    unit_U = unit_U.at[jnp.where(is_first_P, unit_P, beyond)].set(16 * expert_P + count_P, mode="drop")
    num_units = jnp.sum(is_first_P, dtype=jnp.int32)[None]
    return Schedule(unit_U, pair_UN, place_P, num_units, jnp.zeros((NUM_COUNTERS,), jnp.int32))


def make_schedule(expert_TX: Int32[Array, "T X"], num_experts: int) -> Schedule:
    """One small kernel: a warp ranks 32 pairs at a time, then all threads write the tables."""
    num_pairs = expert_TX.size
    i32 = jnp.int32

    def body(expert, *refs: Any) -> None:
        _build(num_pairs, num_experts, expert, *refs)

    outputs = Schedule(
        jax.ShapeDtypeStruct((num_pairs,), i32),
        jax.ShapeDtypeStruct((num_pairs, TOKENS), i32),
        jax.ShapeDtypeStruct((num_pairs,), i32),
        jax.ShapeDtypeStruct((1,), i32),
        jax.ShapeDtypeStruct((NUM_COUNTERS,), i32),
    )
    kernel = plgpu.kernel(
        body,
        out_type=tuple(outputs),
        num_threads=_THREADS // 128,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        scratch_types=[plgpu.SMEM((_whole(num_pairs),), i32)] * 2 + [plgpu.SMEM((_whole(num_experts),), i32)] * 2,
        kernel_name="int4_moe_schedule",
    )
    return Schedule(*kernel(expert_TX.reshape(-1)))


def _whole(size: int) -> int:
    return _THREADS * -(-size // _THREADS)


def _build(num_pairs: int, num_experts: int, *refs: Any) -> None:
    @r.inline(10, 0)
    def call(expert_g, unit_g, pair_g, place_g, num_units_g, counters_g, expert_s, rank_s, count_s, first_s) -> None:
        thread = r._thread()
        lane = arith.andi(thread, r._i32(31))
        is_warp_0 = _less(thread, 32)
        global_ = {name: r._gmem(ref) for name, ref in dict(e=expert_g, u=unit_g, p=pair_g, w=place_g).items()}
        shared = {name: r._pointer(ref) for name, ref in dict(e=expert_s, r=rank_s, c=count_s, f=first_s).items()}

        def strided(size: int, function: Any, threads: int = _THREADS, start: ir.Value = thread) -> None:
            """Calls ``function(index)`` for all indices up to ``size``, rounded up to whole turns of the threads."""

            @mgpu.utils.fori(r._i32(-(-size // threads)), [])
            def _(turn: ir.Value, carry: list) -> list:
                function(arith.addi(r._scaled(turn, threads), start))
                return carry

        def read_expert(index: ir.Value) -> None:
            inside = arith.minsi(index, r._i32(num_pairs - 1))
            expert = llvm.load(r._i32(), _word(global_["e"], inside, r._GLOBAL))
            is_local = arith.andi(_less(index, num_pairs), arith.cmpi(arith.CmpIPredicate.ult, expert, r._i32(num_experts)))
            llvm.store(arith.select(is_local, expert, r._i32(-1)), _word(shared["e"], index, r._SHARED))

        def clear_pairs(index: ir.Value) -> None:
            with mgpu.utils.when(_less(index, num_pairs * TOKENS)):
                llvm.store(r._i32(-1), _word(global_["p"], index, r._GLOBAL))

        strided(num_pairs, read_expert)
        strided(num_experts, lambda index: llvm.store(r._i32(0), _word(shared["c"], index, r._SHARED)))
        strided(num_pairs * TOKENS, clear_pairs)
        with mgpu.utils.when(_less(thread, NUM_COUNTERS)):
            llvm.store(r._i32(0), _word(r._gmem(counters_g), thread, r._GLOBAL))
        gpu.barrier()

        def rank(index: ir.Value) -> None:
            expert = llvm.load(r._i32(), _word(shared["e"], index, r._SHARED))
            same = mgpu.utils.inline_ptx(
                "match.any.sync.b32 $0, $1, 0xffffffff;", expert, result_types=r._i32(), has_side_effects=True
            )
            below = arith.subi(arith.shli(r._i32(1), lane), r._i32(1))
            before = _popcount(arith.andi(same, below))
            count = _word(shared["c"], arith.maxsi(expert, r._i32(0)), r._SHARED)
            seen = llvm.load(r._i32(), count)
            llvm.store(arith.addi(seen, before), _word(shared["r"], index, r._SHARED))
            mgpu.utils.warp_barrier()
            is_first = arith.cmpi(arith.CmpIPredicate.eq, before, r._i32(0))
            is_local = arith.cmpi(arith.CmpIPredicate.sge, expert, r._i32(0))
            with mgpu.utils.when(arith.andi(is_first, is_local)):
                llvm.store(arith.addi(seen, _popcount(same)), count)
            mgpu.utils.warp_barrier()

        with mgpu.utils.when(is_warp_0):
            strided(num_pairs, rank, 32, lane)
            # First unit of every expert: a lane sums its run of experts, the warp sums the lanes.
            run = _whole(num_experts) // 32
            begin = r._scaled(lane, run)
            size = arith.constant(r._i32(), run)

            def num_units(index: ir.Value) -> ir.Value:
                count = llvm.load(r._i32(), _word(shared["c"], arith.addi(begin, index), r._SHARED))
                return arith.shrui(arith.addi(count, r._i32(TOKENS - 1)), r._i32(3))

            own = mgpu.utils.fori(size, [r._i32(0)])(lambda i, sums: [arith.addi(sums[0], num_units(i))]).results[0]
            total = own
            for distance in (1, 2, 4, 8, 16):
                other = nvvm.shfl_sync(
                    r._i32(-1), total, r._i32(distance), r._i32(0), nvvm.ShflKind.up
                )
                is_inside = arith.cmpi(arith.CmpIPredicate.sge, lane, r._i32(distance))
                total = arith.addi(total, arith.select(is_inside, other, r._i32(0)))
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, r._i32(31))):
                llvm.store(total, r._gmem(num_units_g))

            def write_first(index: ir.Value, sums: list) -> list:
                llvm.store(sums[0], _word(shared["f"], arith.addi(begin, index), r._SHARED))
                return [arith.addi(sums[0], num_units(index))]

            mgpu.utils.fori(size, [arith.subi(total, own)])(write_first)
        gpu.barrier()

        def write(index: ir.Value) -> None:
            expert = llvm.load(r._i32(), _word(shared["e"], index, r._SHARED))
            is_local = arith.cmpi(arith.CmpIPredicate.sge, expert, r._i32(0))
            inside = arith.maxsi(expert, r._i32(0))
            rank = llvm.load(r._i32(), _word(shared["r"], index, r._SHARED))
            count = llvm.load(r._i32(), _word(shared["c"], inside, r._SHARED))
            first = llvm.load(r._i32(), _word(shared["f"], inside, r._SHARED))
            unit = arith.addi(first, arith.shrui(rank, r._i32(3)))
            n = arith.andi(rank, r._i32(TOKENS - 1))
            place = arith.addi(r._scaled(unit, TOKENS), n)
            with mgpu.utils.when(_less(index, num_pairs)):
                llvm.store(arith.select(is_local, place, r._i32(-1)), _word(global_["w"], index, r._GLOBAL))
            with mgpu.utils.when(is_local):
                llvm.store(index, _word(global_["p"], place, r._GLOBAL))
                with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, n, r._i32(0))):
                    size = arith.minsi(arith.subi(count, rank), r._i32(TOKENS))
                    entry = arith.addi(r._scaled(expert, 16), size)
                    llvm.store(entry, _word(global_["u"], unit, r._GLOBAL))

        strided(num_pairs, write)

    call(*refs)


def _less(index: ir.Value, bound: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.slt, index, r._i32(bound))


def _word(pointer: ir.Value, index: ir.Value, space: int) -> ir.Value:
    scaled = r._scaled(index, 4)
    return r._at(pointer, r._wide(scaled) if space == r._GLOBAL else scaled, space)


def _popcount(value: ir.Value) -> ir.Value:
    return mgpu.utils.inline_ptx("popc.b32 $0, $1;", value, result_types=r._i32())
