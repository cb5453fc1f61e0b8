"""Rows of bfloat16 for code of single threads: a thread takes units of eight neighbours, 16 bytes, as float32."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas import simt
from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.simt import FLOAT, INT, UINT

UNIT = 8
LINE = 64
"""Columns that the copy engine swizzles together: 128 bytes."""
SWIZZLED = plgpu.TilingTransform((8, LINE)), plgpu.SwizzleTransform(128)


def swizzle(row: Any, column: Any) -> Any:
    """Place of a column in rows of a line each, which lie as the copy engine swizzles them."""
    return row * LINE + (column ^ ((row & 7) * UNIT))


def fill(function: Callable, swizzled: Any, refs: Sequence[tuple[Any, Any]], scalars: Sequence[Any]) -> None:
    """`simt.run` by all threads of a block, with a swizzled array in shared memory as the last one.

    The tensor cores may read it then.
    """
    kinds = *(kind for _, kind in refs), UINT
    types = *(w.REF,) * len(refs), plgpu.RefType(SWIZZLED), *(w.SCALAR,) * len(scalars)

    @plgpu.inline_mgpu(arg_types=types)
    def call(_: Any, *args: Any) -> None:
        memories = map(simt.Memory, args[: len(kinds)], kinds)
        numbers = [simt.Value(number.registers.item(), INT) for number in args[len(kinds) :]]
        t = simt.Threads()
        function(t, *numbers, *memories)
        mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
        t.barrier()

    call(*(ref for ref, _ in refs), swizzled, *scalars)


def load_unit(t: Any, memory: Any, index: Any) -> list:
    """Eight values from ``index``, a multiple of 8, of an array of float32, or of words of two bfloat16."""
    if memory.kind == FLOAT:
        return t.load_vector(memory, index, 4) + t.load_vector(memory, index + 4, 4)
    return unpack(t, t.load_vector(memory, index >> 1, UNIT // 2))


def store_unit(t: Any, memory: Any, index: Any, values: Sequence[Any]) -> None:
    """Rounds eight values to bfloat16."""
    t.store_vector(memory, index >> 1, pack(t, values))


def unpack(t: Any, words: Sequence[Any]) -> list:
    """Two floats a word, the low half first."""
    return [t.bits(bits, FLOAT) for word in words for bits in (word << 16, word & 0xFFFF0000)]


def pack(t: Any, values: Sequence[Any]) -> list:
    return [t.pair(low, high) for low, high in zip(values[::2], values[1::2], strict=True)]


def rounded(t: Any, values: Sequence[Any]) -> list:
    """The bfloat16 nearest to each of the values."""
    return unpack(t, pack(t, values))


def add_squares(values: Sequence[Any]) -> Any:
    return functools.reduce(operator.add, [value * value for value in values])


def store_warp_sum(t: Any, value: Any, sums: Any) -> None:
    """Adds the values of each warp's threads up, into ``sums`` [warps]."""
    total = simt.warp_reduce(t, value, operator.add)
    with t.when(t.is_equal(t.thread() & 31, 0)):
        t.store(sums, t.thread() >> 5, total)


def add_warp_sums(t: Any, sums: Any, first: Any, count: Any) -> Any:
    """What ``count`` warps from ``first`` on have stored; up to 32, and in an order that depends on nothing else."""
    lane = t.thread() & 31
    part = t.load(sums, first + t.minimum(lane, count - 1))
    return simt.warp_reduce(t, t.select(lane < count, part, 0.0), operator.add)


def apply_norm(t: Any, values: Sequence[Any], scale: Any, gain: Sequence[Any]) -> list:
    """Normalised values, rounded, times the gain; what is stored of them is rounded again."""
    return [value * factor for value, factor in zip(rounded(t, [x * scale for x in values]), gain, strict=True)]
