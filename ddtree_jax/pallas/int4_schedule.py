"""Which expert's weights meet which tokens: the schedule of the INT4 kernel, made by every block for itself.

A pair is one token at one of its experts, pair ``t * X + x``. A unit is an expert and up to 8 of its pairs, as many as one
product takes; a pair's place is ``8 * unit + n``. Units stand in the order of experts. Pairs whose expert is not among the
local ones (another shard's, or a padding row's) are in no unit and cost nothing.
"""

from dataclasses import dataclass
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm
from jaxtyping import Array

from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.int4_steps import TOKENS

_LANES = 32
_EXPERT_SHIFT = TOKENS.bit_length()


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTable:
    """Sizes of the tables, and what a unit's entry holds: number of pairs, expert."""

    num_pairs: int
    num_experts: int

    @property
    def num_units(self) -> int:
        """At most: every expert may have one that is not full."""
        return min(self.num_pairs, self.num_experts + self.num_pairs // TOKENS)

    @property
    def num_words(self) -> tuple[int, int, int]:
        """Of ``units``, ``pairs``, ``places``."""
        return self.num_units + 1, TOKENS * self.num_units, self.num_pairs

    def split(self, entry: Array) -> tuple[Array, Array]:
        """Expert, number of pairs."""
        return entry >> _EXPERT_SHIFT, entry & ((1 << _EXPERT_SHIFT) - 1)


def scratch_words(num_pairs: int, num_experts: int) -> int:
    """Words of shared memory that `build_schedule` works in."""
    return 2 * _whole(num_experts) + _whole(num_pairs)


def _whole(size: int) -> int:
    return _LANES * -(-size // _LANES)


def build_schedule(
    expert: Any,
    units: Any,
    pairs: Any,
    places: Any,
    scratch: Any,
    *,
    table: UnitTable,
    num_threads: int,
) -> None:
    """Fills the tables in shared memory; all threads of the block take part and wait for each other.

    ``units``: entries of the table, last the number of units. ``pairs``: 8 a unit, -1 behind its own. ``places``: -1 for no
    unit.
    """
    num_pairs, num_experts = table.num_pairs, table.num_experts

    @w.inline(5, 0)
    def call(expert_g, units, pairs, places, scratch) -> None:
        thread = w.thread()
        count_s = w.pointer(scratch)
        first_s = w.at(count_s, w.i32(4 * _whole(num_experts)), w.SHARED)
        expert_s = w.at(first_s, w.i32(4 * _whole(num_experts)), w.SHARED)
        indices = [arith.addi(thread, w.i32(start)) for start in range(0, num_pairs, num_threads)]

        def fill(pointer: ir.Value, size: int, value: int) -> None:
            for start in range(0, size, num_threads):
                index = arith.addi(thread, w.i32(start))
                with mgpu.utils.when(_less(index, size)):
                    llvm.store(w.i32(value), _word(pointer, index))

        experts = [_read_expert(expert_g, index, num_pairs, num_experts) for index in indices]
        for index, expert in zip(indices, experts, strict=True):
            with mgpu.utils.when(_less(index, num_pairs)):
                llvm.store(expert, _word(expert_s, index))
        fill(count_s, _whole(num_experts), 0)
        fill(w.pointer(pairs), TOKENS * table.num_units, -1)
        gpu.barrier()
        ranks = [_count_up(count_s, expert) for expert in experts]
        gpu.barrier()
        with mgpu.utils.when(_less(thread, _LANES)):
            total = _find_firsts(thread, count_s, first_s, _whole(num_experts) // _LANES)
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, thread, w.i32(_LANES - 1))):
                llvm.store(total, _word(w.pointer(units), w.i32(table.num_units)))
        gpu.barrier()
        pairs_s = w.pointer(pairs)
        for index, expert, rank in zip(indices, experts, ranks, strict=True):
            with mgpu.utils.when(_has_one_unit(expert, count_s)):
                first_unit = llvm.load(w.i32(), _word(first_s, expert))
                llvm.store(index, _word(pairs_s, arith.addi(w.scaled(first_unit, TOKENS), rank)))
        gpu.barrier()
        ranks = [
            _put_in_order(*pair, expert_s, count_s, first_s, pairs_s) for pair in zip(indices, experts, strict=True)
        ]
        gpu.barrier()
        for index, expert, rank in zip(indices, experts, ranks, strict=True):
            with mgpu.utils.when(_less(index, num_pairs)):
                _place(index, expert, rank, count_s, first_s, *map(w.pointer, (units, pairs, places)))
        # The scratch memory becomes the ring, which the copy engine writes.
        if w.has_copy_engine():
            mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
        gpu.barrier()

    call(expert, units, pairs, places, scratch)


def _read_expert(expert_g: ir.Value, index: ir.Value, num_pairs: int, num_experts: int) -> ir.Value:
    """A pair's expert, -1 if it is none of ours or there is no such pair."""
    inside = arith.minsi(index, w.i32(num_pairs - 1))
    expert = llvm.load(w.i32(), w.at(w.gmem(expert_g), w.wide(w.scaled(inside, 4)), w.GLOBAL))
    is_local = arith.cmpi(arith.CmpIPredicate.ult, expert, w.i32(num_experts))
    return arith.select(arith.andi(is_local, _less(index, num_pairs)), expert, w.i32(-1))


def _count_up(count_s: ir.Value, expert: ir.Value) -> ir.Value:
    """How many pairs of the expert were counted before, which is left to chance."""
    is_local = arith.cmpi(arith.CmpIPredicate.sge, expert, w.i32(0))
    return mgpu.utils.inline_ptx(
        "atom.shared.add.u32 $0, [$1], $2;",
        _word(count_s, arith.maxsi(expert, w.i32(0))),
        arith.extui(w.i32(), is_local),
        result_types=w.i32(),
        has_side_effects=True,
    )


def _has_one_unit(expert: ir.Value, count_s: ir.Value) -> ir.Value:
    """False also for an expert that is none of ours."""
    count = llvm.load(w.i32(), _word(count_s, arith.maxsi(expert, w.i32(0))))
    is_local = arith.cmpi(arith.CmpIPredicate.sge, expert, w.i32(0))
    return arith.andi(is_local, arith.cmpi(arith.CmpIPredicate.sle, count, w.i32(TOKENS)))


def _put_in_order(
    index: ir.Value,
    expert: ir.Value,
    expert_s: ir.Value,
    count_s: ir.Value,
    first_s: ir.Value,
    pairs_s: ir.Value,
) -> ir.Value:
    """The pair's rank among its expert's, in the order of pairs: the same in all blocks, which were counted up by chance.

    The only unit of an expert holds its pairs already. Those of an expert with several are looked for.
    """
    has_one_unit = _has_one_unit(expert, count_s)
    is_local = arith.cmpi(arith.CmpIPredicate.sge, expert, w.i32(0))
    known = arith.maxsi(expert, w.i32(0))
    unit = arith.select(has_one_unit, llvm.load(w.i32(), _word(first_s, known)), w.i32(0))
    rank = w.i32(0)
    for start in range(0, TOKENS, 4):
        others = w.load(w.i32(), _word(pairs_s, arith.addi(w.scaled(unit, TOKENS), w.i32(start))), 4)
        for other in others:
            # Free places hold -1, the largest of unsigned numbers.
            is_earlier = arith.cmpi(arith.CmpIPredicate.ult, other, index)
            rank = arith.addi(rank, arith.extui(w.i32(), is_earlier))

    has_several = arith.andi(is_local, arith.cmpi(arith.CmpIPredicate.eq, has_one_unit, _false()))

    @mgpu.utils.fori(arith.select(has_several, index, w.i32(0)), [w.i32(0)])
    def earlier(other: ir.Value, carry: list) -> list:
        is_same = arith.cmpi(arith.CmpIPredicate.eq, llvm.load(w.i32(), _word(expert_s, other)), expert)
        return [arith.addi(carry[0], arith.extui(w.i32(), is_same))]

    return arith.select(has_several, earlier.results[0], rank)


def _false() -> ir.Value:
    kind = ir.IntegerType.get_signless(1)
    return arith.constant(kind, ir.IntegerAttr.get(kind, 0))


def _place(
    index: ir.Value,
    expert: ir.Value,
    rank: ir.Value,
    count_s: ir.Value,
    first_s: ir.Value,
    units: ir.Value,
    pairs: ir.Value,
    places: ir.Value,
) -> None:
    """Writes a pair's place, the pair to it, and the unit's entry if it is the unit's first."""
    is_local = arith.cmpi(arith.CmpIPredicate.sge, expert, w.i32(0))
    known = arith.maxsi(expert, w.i32(0))
    count = llvm.load(w.i32(), _word(count_s, known))
    first_unit = llvm.load(w.i32(), _word(first_s, known))
    place = arith.addi(w.scaled(first_unit, TOKENS), rank)
    llvm.store(arith.select(is_local, place, w.i32(-1)), _word(places, index))
    with mgpu.utils.when(is_local):
        llvm.store(index, _word(pairs, place))
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, arith.andi(rank, w.i32(TOKENS - 1)), w.i32(0))):
            size = arith.minsi(arith.subi(count, rank), w.i32(TOKENS))
            entry = arith.addi(w.scaled(expert, 1 << _EXPERT_SHIFT), size)
            llvm.store(entry, _word(units, arith.shrui(place, w.i32(TOKENS.bit_length() - 1))))


def _find_firsts(lane: ir.Value, count_s: ir.Value, first_s: ir.Value, run: int) -> ir.Value:
    """Writes every expert's first unit; returns the number of units up to the lane's ``run`` of experts."""
    begin = w.scaled(lane, run)
    counts = [llvm.load(w.i32(), _word(count_s, arith.addi(begin, w.i32(i)))) for i in range(run)]
    units = [arith.shrui(arith.addi(count, w.i32(TOKENS - 1)), w.i32(3)) for count in counts]
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
