"""Which expert's weights meet which tokens: the schedule of the INT4 kernel, made by every block for itself.

A pair is one token at one of its experts, pair ``t * X + x``. A unit is an expert and up to 8 of its pairs, as many as one
product takes; a pair's place is ``8 * unit + n``. Units stand in the order of experts. Pairs whose expert is not among the
local ones (another shard's, or a padding row's) are in no unit and cost nothing.
"""

from collections.abc import Callable
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
    return (_stride(num_pairs) + 1) * _whole(num_experts) + _whole(num_experts) // _LANES


def _whole(size: int) -> int:
    return _LANES * -(-size // _LANES)


def _num_words(num_pairs: int) -> int:
    """Of an expert's bits, a bit a pair: 1, 2 or whole vectors of 4."""
    size = -(-num_pairs // _LANES)
    return size if size < 3 else 4 * -(-size // 4)


def _stride(num_pairs: int) -> int:
    """Words from expert to expert: vectors of experts behind each other are in different banks."""
    size = _num_words(num_pairs)
    return size + 4 if size > 4 else size


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
    unit. Every expert has a bit a pair: its pairs' number and order are counts of bits, in whatever order they were set::

        bits zero | bits set | units counted, by warps of experts | places found
    """
    num_pairs, num_experts = table.num_pairs, table.num_experts

    @w.inline(5, 0)
    def call(expert_g, units, pairs, places, scratch) -> None:
        thread = w.thread()
        bits_s = _Bits(w.pointer(scratch), num_pairs)
        first_s = w.at(bits_s.pointer, w.i32(4 * bits_s.stride * _whole(num_experts)), w.SHARED)
        total_s = w.at(first_s, w.i32(4 * _whole(num_experts)), w.SHARED)
        indices = [arith.addi(thread, w.i32(start)) for start in range(0, num_pairs, num_threads)]

        def each(size: int, function: Callable[[ir.Value], None]) -> None:
            for start in range(0, size, num_threads):
                index = arith.addi(thread, w.i32(start))
                with mgpu.utils.when(_less(index, size)):
                    function(index)

        experts = [_read_expert(expert_g, index, num_pairs, num_experts) for index in indices]
        each(bits_s.stride * _whole(num_experts), lambda index: llvm.store(w.i32(0), _word(bits_s.pointer, index)))
        each(TOKENS * table.num_units, lambda index: llvm.store(w.i32(-1), _word(w.pointer(pairs), index)))
        gpu.barrier()
        for index, expert in zip(indices, experts, strict=True):
            bits_s.set(expert, index)
        gpu.barrier()
        each(_whole(num_experts), lambda expert: _count_units(expert, bits_s, first_s, total_s))
        gpu.barrier()
        totals = [llvm.load(w.i32(), _word(total_s, w.i32(i))) for i in range(_whole(num_experts) // _LANES)]
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, thread, w.i32(0))):
            llvm.store(w.add(*totals), _word(w.pointer(units), w.i32(table.num_units)))
        for index, expert in zip(indices, experts, strict=True):
            with mgpu.utils.when(_less(index, num_pairs)):
                _place(index, expert, bits_s, first_s, totals, *map(w.pointer, (units, pairs, places)))
        # The scratch memory becomes the ring, which the copy engine writes.
        if w.has_copy_engine():
            mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
        gpu.barrier()

    call(expert, units, pairs, places, scratch)


@dataclass(frozen=True, slots=True)
class _Bits:
    """Words of an expert's bits behind each other: bit i of word j stands for pair 32 j + i."""

    pointer: ir.Value
    num_pairs: int

    @property
    def size(self) -> int:
        return _num_words(self.num_pairs)

    @property
    def stride(self) -> int:
        return _stride(self.num_pairs)

    def _start(self, expert: ir.Value) -> ir.Value:
        return _word(self.pointer, w.scaled(arith.maxsi(expert, w.i32(0)), self.stride))

    def set(self, expert: ir.Value, pair: ir.Value) -> None:
        """Nothing for an expert that is none of ours."""
        is_local = arith.extui(w.i32(), _is_local(expert))
        mgpu.utils.inline_ptx(
            "red.shared.or.b32 [$0], $1;",
            _word(self._start(expert), arith.shrui(pair, w.i32(5))),
            arith.shli(is_local, arith.andi(pair, w.i32(_LANES - 1))),
            has_side_effects=True,
        )

    def load(self, expert: ir.Value) -> list[ir.Value]:
        vector = min(self.size, 4)
        start = self._start(expert)
        loaded = (w.load(w.i32(), w.at(start, w.i32(4 * i), w.SHARED), vector) for i in range(0, self.size, vector))
        return [word for words in loaded for word in words]


def _is_local(expert: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.sge, expert, w.i32(0))


def _count(words: list[ir.Value]) -> ir.Value:
    """Number of bits that are set."""
    return w.add(*(mgpu.utils.inline_ptx("popc.b32 $0, $1;", word, result_types=w.i32()) for word in words))


def _count_units(expert: ir.Value, bits_s: _Bits, first_s: ir.Value, total_s: ir.Value) -> None:
    """A warp writes its experts' first units, counted from the first of them, and how many they have together."""
    lane = arith.andi(expert, w.i32(_LANES - 1))
    own = arith.shrui(arith.addi(_count(bits_s.load(expert)), w.i32(TOKENS - 1)), w.i32(3))
    total = own
    for distance in (1, 2, 4, 8, 16):
        other = nvvm.shfl_sync(w.i32(-1), total, w.i32(distance), w.i32(0), nvvm.ShflKind.up)
        is_inside = arith.cmpi(arith.CmpIPredicate.sge, lane, w.i32(distance))
        total = arith.addi(total, arith.select(is_inside, other, w.i32(0)))
    llvm.store(arith.subi(total, own), _word(first_s, expert))
    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, w.i32(_LANES - 1))):
        llvm.store(total, _word(total_s, arith.shrui(expert, w.i32(5))))


def _read_expert(expert_g: ir.Value, index: ir.Value, num_pairs: int, num_experts: int) -> ir.Value:
    """A pair's expert, -1 if it is none of ours or there is no such pair."""
    inside = arith.minsi(index, w.i32(num_pairs - 1))
    expert = llvm.load(w.i32(), w.at(w.gmem(expert_g), w.wide(w.scaled(inside, 4)), w.GLOBAL))
    is_local = arith.cmpi(arith.CmpIPredicate.ult, expert, w.i32(num_experts))
    return arith.select(arith.andi(is_local, _less(index, num_pairs)), expert, w.i32(-1))


def _place(
    index: ir.Value,
    expert: ir.Value,
    bits_s: _Bits,
    first_s: ir.Value,
    totals: list[ir.Value],
    units: ir.Value,
    pairs: ir.Value,
    places: ir.Value,
) -> None:
    """Writes a pair's place, the pair to it, and the unit's entry if it is the unit's first."""
    known = arith.maxsi(expert, w.i32(0))
    words = bits_s.load(expert)
    warp, group = arith.shrui(known, w.i32(5)), arith.shrui(index, w.i32(5))
    first_unit = llvm.load(w.i32(), _word(first_s, known))
    for i, total in enumerate(totals[:-1]):
        is_before = arith.cmpi(arith.CmpIPredicate.slt, w.i32(i), warp)
        first_unit = arith.addi(first_unit, arith.select(is_before, total, w.i32(0)))
    lower = arith.subi(arith.shli(w.i32(1), arith.andi(index, w.i32(_LANES - 1))), w.i32(1))
    earlier = []
    for j, word in enumerate(words):
        is_before = arith.cmpi(arith.CmpIPredicate.slt, w.i32(j), group)
        is_own = arith.cmpi(arith.CmpIPredicate.eq, w.i32(j), group)
        mask = arith.select(is_before, w.i32(-1), arith.select(is_own, lower, w.i32(0)))
        earlier.append(arith.andi(word, mask))
    rank = _count(earlier)
    place = arith.addi(w.scaled(first_unit, TOKENS), rank)
    is_local = _is_local(expert)
    llvm.store(arith.select(is_local, place, w.i32(-1)), _word(places, index))
    with mgpu.utils.when(is_local):
        llvm.store(index, _word(pairs, place))
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, arith.andi(rank, w.i32(TOKENS - 1)), w.i32(0))):
            size = arith.minsi(arith.subi(_count(words), rank), w.i32(TOKENS))
            entry = arith.addi(w.scaled(expert, 1 << _EXPERT_SHIFT), size)
            llvm.store(entry, _word(units, arith.shrui(place, w.i32(TOKENS.bit_length() - 1))))


def _less(index: ir.Value, bound: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.slt, index, w.i32(bound))


def _word(pointer: ir.Value, index: ir.Value) -> ir.Value:
    return w.at(pointer, w.scaled(index, 4), w.SHARED)
