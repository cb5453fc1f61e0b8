"""Units of the prefill kernels: which places hold which pairs of which expert, and permuted token rows.

A pair is one token at one of its experts, pair ``t * X + x``. Pairs that have an expert here are sorted by it; their place is
their rank. A unit is an expert and up to 64 of its places. Experts with larger units come first, so that blocks which take
units in turn are busy equally long. Which of an expert's places a pair gets is left to chance: its products are the same in
all of them.

One block sorts, the others permute token rows meanwhile::

    block 0       pairs an expert ─► sums over experts ─► units, places of pairs
    others        token rows, 16 bytes a thread
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm
from jaxtyping import Array, BFloat16, Int32

from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.int4_prefill_steps import MAX_TOKENS

_INT = jnp.int32
_LANES = 32
_THREADS = 1024
_CHUNKS_AT_ONCE = 2


class Schedule(NamedTuple):
    """Units of places: [expert, first place, number of places], and how many there are.

    Place p holds pair ``pair_P[p]``; what stands at places and units behind the last is undefined.
    """

    unit_U3: Int32[Array, "U 3"]
    num_units_1: Int32[Array, "1"]
    pair_P: Int32[Array, "P"]


def max_units(num_pairs: int, num_experts: int) -> int:
    return min(num_experts, num_pairs) + num_pairs // MAX_TOKENS


def scratch_bytes(num_pairs: int, num_experts: int) -> int:
    """Of shared memory that `prepare` takes."""
    return 4 * (num_pairs + 3 * _whole_lanes(num_experts))


def _whole_lanes(size: int) -> int:
    return _LANES * -(-size // _LANES)


def prepare(
    x_TD: BFloat16[Array, "T D"], expert_TX: Int32[Array, "T X"], num_experts: int, num_blocks: int
) -> tuple[Schedule, BFloat16[Array, "T D"]]:
    """The schedule of a routing, and token rows with permuted columns."""
    P = expert_TX.size
    experts = _whole_lanes(num_experts)

    def body(x, expert, unit, num_units, pair, permuted, *scratch) -> None:
        block = lax.axis_index("block")
        sizes = {"num_pairs": P, "num_experts": num_experts}

        @pl.when(block == 0)
        def _() -> None:
            _sort(expert, unit, num_units, pair, *scratch, **sizes)

        @pl.when(block > 0)
        def _() -> None:
            _permute(x, permuted, block - 1, num_blocks=num_blocks - 1)

    *schedule, permuted_TD = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((max_units(P, num_experts), 3), _INT),
            jax.ShapeDtypeStruct((1,), _INT),
            jax.ShapeDtypeStruct((P,), _INT),
            jax.ShapeDtypeStruct(x_TD.shape, jnp.bfloat16),
        ),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=_THREADS // 128,
        thread_name="warpgroup",
        kernel_name="int4_prefill_prepare",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        scratch_types=[
            plgpu.SMEM((experts,), _INT),
            plgpu.SMEM((2 * experts,), _INT),
            plgpu.SMEM((P,), _INT),
        ],
    )(x_TD, expert_TX.reshape(P))
    return Schedule(*schedule), permuted_TD


def _less(index: ir.Value, bound: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.slt, index, w.i32(bound))


def _word(pointer: ir.Value, index: ir.Value, space: int = w.SHARED) -> ir.Value:
    offset = w.scaled(index, 4)
    return w.at(pointer, w.wide(offset) if space == w.GLOBAL else offset, space)


def _strided(size: int, function: Any) -> None:
    """Calls ``function(index)`` for all indices below ``size``, spread over the threads."""
    for turn in range(-(-size // _THREADS)):
        index = arith.addi(w.thread(), w.i32(turn * _THREADS))
        with mgpu.utils.when(_less(index, size)):
            function(index)


def _sort(
    expert: Any,
    unit: Any,
    num_units: Any,
    pair: Any,
    total_s: Any,
    first_s: Any,
    pair_s: Any,
    *,
    num_pairs: int,
    num_experts: int,
) -> None:
    """Fills the schedule. ``total_s``: pairs an expert; ``first_s``: an expert's next place, then its first unit."""
    experts = _whole_lanes(num_experts)

    @w.inline(7, 0)
    def call(expert, unit, num_units, pair, total_s, first_s, pair_s) -> None:
        totals, firsts, pairs = map(w.pointer, (total_s, first_s, pair_s))
        units_first = w.at(firsts, w.i32(4 * experts), w.SHARED)
        indices = [arith.addi(w.thread(), w.i32(start)) for start in range(0, num_pairs, _THREADS)]
        # All at once: they come from device memory.
        chosen = [
            llvm.load(w.i32(), _word(w.gmem(expert), arith.minsi(index, w.i32(num_pairs - 1)), w.GLOBAL))
            for index in indices
        ]
        _strided(experts, lambda index: llvm.store(w.i32(0), _word(totals, index)))
        gpu.barrier()

        def each_local_pair(use: Any) -> None:
            for index, number in zip(indices, chosen, strict=True):
                is_local = arith.cmpi(arith.CmpIPredicate.ult, number, w.i32(num_experts))
                with mgpu.utils.when(arith.andi(is_local, _less(index, num_pairs))):
                    use(index, number)

        each_local_pair(lambda _, number: _count_up(_word(totals, number)))
        gpu.barrier()
        with mgpu.utils.when(_less(w.thread(), _LANES)):
            total = _sum_experts(w.thread(), totals, firsts, units_first, experts // _LANES)
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, w.thread(), w.i32(_LANES - 1))):
                llvm.store(total, w.gmem(num_units))
        gpu.barrier()

        def write_units(index: ir.Value) -> None:
            count = llvm.load(w.i32(), _word(totals, index))
            size, number = _unit_size(count)
            first_unit = llvm.load(w.i32(), _word(units_first, index))
            first = llvm.load(w.i32(), _word(firsts, index))

            @mgpu.utils.fori(number, [])
            def _(turn: ir.Value, carry: list) -> list:
                start = arith.muli(turn, size)
                entry = (index, arith.addi(first, start), arith.minsi(arith.subi(count, start), size))
                for i, value in enumerate(entry):
                    at = w.add(w.scaled(arith.addi(first_unit, turn), 3), w.i32(i))
                    llvm.store(value, _word(w.gmem(unit), at, w.GLOBAL))
                return carry

        _strided(num_experts, write_units)
        gpu.barrier()
        each_local_pair(lambda index, number: llvm.store(index, _word(pairs, _count_up(_word(firsts, number)))))
        gpu.barrier()

        def copy_pair(index: ir.Value) -> None:
            llvm.store(llvm.load(w.i32(), _word(pairs, index)), _word(w.gmem(pair), index, w.GLOBAL))

        _strided(num_pairs, copy_pair)

    call(expert, unit, num_units, pair, total_s, first_s, pair_s)


def _count_up(counter: ir.Value) -> ir.Value:
    """Adds 1 to a word of shared memory; returns what was there."""
    return mgpu.utils.inline_ptx(
        "atom.shared.add.u32 $0, [$1], 1;", counter, result_types=w.i32(), has_side_effects=True
    )


def _unit_size(count: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Places a unit, and number of units, of an expert with ``count`` pairs."""
    number = arith.divui(arith.addi(count, w.i32(MAX_TOKENS - 1)), w.i32(MAX_TOKENS))
    eighths = w.scaled(arith.maxsi(number, w.i32(1)), 8)
    size = w.scaled(arith.divui(arith.addi(count, arith.subi(eighths, w.i32(1))), eighths), 8)
    return size, number


def _sum_experts(lane: ir.Value, totals: ir.Value, firsts: ir.Value, units_first: ir.Value, run: int) -> ir.Value:
    """Writes every expert's first place and first unit, by one warp; returns the number of units, in the last lane."""
    places = [arith.addi(w.scaled(lane, run), w.i32(i)) for i in range(run)]
    counts = [llvm.load(w.i32(), _word(totals, place)) for place in places]
    _sum_lanes(lane, counts, w.i32(0), lambda i, first: llvm.store(first, _word(firsts, places[i])))
    sizes = [_unit_size(count) for count in counts]
    total = w.i32(0)
    for size in range(MAX_TOKENS, 0, -8):
        is_size = [arith.cmpi(arith.CmpIPredicate.eq, own, w.i32(size)) for own, _ in sizes]
        numbers = [arith.select(is_, number, w.i32(0)) for is_, (_, number) in zip(is_size, sizes, strict=True)]

        def store(i: int, first: ir.Value, is_size: list = is_size) -> None:
            with mgpu.utils.when(is_size[i]):
                llvm.store(first, _word(units_first, places[i]))

        total = _sum_lanes(lane, numbers, total, store)
        total = nvvm.shfl_sync(w.i32(-1), total, w.i32(_LANES - 1), w.i32(_LANES - 1), nvvm.ShflKind.idx)
    return total


def _sum_lanes(lane: ir.Value, values: list, start: ir.Value, store: Any) -> ir.Value:
    """Calls ``store(i, start + sum of all before value i of the lane)``; returns the same after the lane's last."""
    own = w.add(*values)
    total = own
    for distance in (1, 2, 4, 8, 16):
        other = nvvm.shfl_sync(w.i32(-1), total, w.i32(distance), w.i32(0), nvvm.ShflKind.up)
        is_inside = arith.cmpi(arith.CmpIPredicate.sge, lane, w.i32(distance))
        total = arith.addi(total, arith.select(is_inside, other, w.i32(0)))
    total = arith.addi(total, start)
    first = arith.subi(total, own)
    for i, value in enumerate(values):
        store(i, first)
        first = arith.addi(first, value)
    return total


def _permute(x: Any, permuted: Any, block: jax.Array, *, num_blocks: int) -> None:
    """`permute_columns` by ``num_blocks`` blocks: 8 columns a thread and turn, so that stores are of whole lines."""

    @w.inline(2, 1)
    def call(x, permuted, block) -> None:
        rows, width = ir.MemRefType(x.type).shape
        total, step = rows * width // 8, num_blocks * _THREADS
        start = arith.addi(w.scaled(block, _THREADS), w.thread())
        part = w.wide(w.scaled(arith.andi(start, w.i32(3)), 4))
        turn_step = _CHUNKS_AT_ONCE * step
        turns = arith.divui(arith.subi(w.i32(total + turn_step - 1), start), w.i32(turn_step))

        @mgpu.utils.fori(turns, [])
        def _(turn: ir.Value, carry: list) -> list:
            loaded = []
            for i in range(_CHUNKS_AT_ONCE):
                index = w.add(start, w.scaled(turn, turn_step), w.i32(i * step))
                # Behind the end, 64 bytes that are there; they are not stored.
                inside = arith.minsi(arith.shrui(index, w.i32(2)), w.i32(total // 4 - 1))
                source = w.at(w.gmem(x), arith.addi(arith.muli(w.wide(inside), w.i64(64)), part), w.GLOBAL)
                words = [llvm.load(w.i32(), w.at(source, w.i64(16 * t), w.GLOBAL)) for t in range(4)]
                loaded.append((index, words))
            for index, words in loaded:
                with mgpu.utils.when(_less(index, total)):
                    target = w.at(w.gmem(permuted), arith.muli(w.wide(index), w.i64(16)), w.GLOBAL)
                    llvm.store(w.register(words), target, alignment=16)
            return carry

    call(x, permuted, block)
