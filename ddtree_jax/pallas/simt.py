"""Code of single threads, written with Python's operators, for what works on bits and lanes and not on tiles.

A function written against `Threads` runs in all threads of a block. Its values are `Value` when it is built for a GPU; tests
give it an object of the same methods on numpy arrays with a place a thread, and so run the same code without a GPU, with
checks for races. Types are those of numpy: int32 and uint32 and uint64 differ in comparisons and shifts.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, math, scf

from ddtree_jax.pallas import warps as w

BOOL, INT, UINT, WIDE, FLOAT = (np.dtype(name) for name in ("bool", "int32", "uint32", "uint64", "float32"))
_LESS = {INT: arith.CmpIPredicate.slt, UINT: arith.CmpIPredicate.ult, WIDE: arith.CmpIPredicate.ult}


def _type(kind: np.dtype) -> ir.Type:
    return ir.F32Type.get() if kind == FLOAT else ir.IntegerType.get_signless(1 if kind == BOOL else 8 * kind.itemsize)


def _constant(kind: np.dtype, value: Any) -> ir.Value:
    if kind == FLOAT:
        return arith.constant(_type(kind), ir.FloatAttr.get(_type(kind), float(value)))
    bits = 1 if kind == BOOL else 8 * kind.itemsize
    value = int(value)
    signed = value - (1 << bits) if bits > 1 and value >= 1 << (bits - 1) else value
    return arith.constant(_type(kind), ir.IntegerAttr.get(_type(kind), signed))


class Value:
    """A number in each thread."""

    def __init__(self, code: ir.Value, kind: np.dtype) -> None:
        self.code, self.kind = code, kind

    def _with(self, other: Any) -> ir.Value:
        if not isinstance(other, Value):
            return _constant(self.kind, other)
        if other.kind != self.kind:
            raise TypeError(f"{self.kind} meets {other.kind}")
        return other.code

    def _apply(self, function: Callable, other: Any) -> "Value":
        return Value(function(self.code, self._with(other)), self.kind)

    def _is_float(self) -> bool:
        return self.kind == FLOAT

    def __add__(self, other: Any) -> "Value":
        return self._apply(arith.addf if self._is_float() else arith.addi, other)

    def __sub__(self, other: Any) -> "Value":
        return self._apply(arith.subf if self._is_float() else arith.subi, other)

    def __truediv__(self, other: Any) -> "Value":
        return self._apply(arith.divf, other)

    def __mul__(self, other: Any) -> "Value":
        return self._apply(arith.mulf if self._is_float() else arith.muli, other)

    def __and__(self, other: Any) -> "Value":
        return self._apply(arith.andi, other)

    def __or__(self, other: Any) -> "Value":
        return self._apply(arith.ori, other)

    def __xor__(self, other: Any) -> "Value":
        return self._apply(arith.xori, other)

    def __invert__(self) -> "Value":
        return self ^ (1 if self.kind == BOOL else -1)

    def __lshift__(self, other: Any) -> "Value":
        return self._apply(arith.shli, other)

    def __rshift__(self, other: Any) -> "Value":
        return self._apply(arith.shrsi if self.kind == INT else arith.shrui, other)

    def _compare(self, other: Any, less: bool, swap: bool, equal: bool) -> "Value":
        a, b = self.code, self._with(other)
        if swap:
            a, b = b, a
        if self._is_float():
            kinds = arith.CmpFPredicate
            predicate = kinds.OEQ if not less else kinds.OLE if equal else kinds.OLT
            return Value(arith.cmpf(predicate, a, b), BOOL)
        if not less:
            return Value(arith.cmpi(arith.CmpIPredicate.eq, a, b), BOOL)
        is_less = Value(arith.cmpi(_LESS[self.kind], *((b, a) if equal else (a, b))), BOOL)
        return ~is_less if equal else is_less

    def __lt__(self, other: Any) -> "Value":
        return self._compare(other, True, False, False)

    def __gt__(self, other: Any) -> "Value":
        return self._compare(other, True, True, False)

    def __le__(self, other: Any) -> "Value":
        return self._compare(other, True, False, True)

    def __ge__(self, other: Any) -> "Value":
        return self._compare(other, True, True, True)

    def equals(self, other: Any) -> "Value":
        return self._compare(other, False, False, True)


class Memory:
    """An array in global or shared memory, addressed by its flat index."""

    def __init__(self, ref: ir.Value, kind: np.dtype) -> None:
        is_shared = mgpu.utils.is_smem_ref(ref)
        self.kind, self.space = kind, w.SHARED if is_shared else w.GLOBAL
        self.pointer = w.pointer(ref) if is_shared else w.gmem(ref)

    def at(self, index: Value) -> ir.Value:
        size = self.kind.itemsize
        if self.space == w.GLOBAL:
            return w.at(self.pointer, arith.muli(w.wide(index.code), w.i64(size)), self.space)
        return w.at(self.pointer, arith.muli(index.code, w.i32(size)), self.space)


class Threads:
    """What a thread can do on a GPU."""

    def thread(self) -> Value:
        """Of the block."""
        return Value(w.thread(), INT)

    def value(self, kind: np.dtype, number: Any) -> Value:
        return Value(_constant(kind, number), kind)

    def select(self, condition: Value, yes: Value, no: Any) -> Value:
        return Value(arith.select(condition.code, yes.code, yes._with(no)), yes.kind)

    def is_equal(self, a: Value, b: Any) -> Value:
        return a.equals(b)

    def maximum(self, a: Value, b: Any) -> Value:
        """Of floats: the other one where one is NaN."""
        function = {FLOAT: arith.maxnumf, INT: arith.maxsi}.get(a.kind, arith.maxui)
        return a._apply(function, b)

    def minimum(self, a: Value, b: Any) -> Value:
        return a._apply({FLOAT: arith.minnumf, INT: arith.minsi}.get(a.kind, arith.minui), b)

    def divide(self, a: Value, divisor: Any) -> Value:
        """Of an integer that is not negative."""
        return a._apply(arith.divui, divisor)

    def cast(self, a: Value, kind: np.dtype) -> Value:
        """Between integers (and truth values): extended by their own sign, or cut off."""
        old, new = (1 if k == BOOL else 8 * k.itemsize for k in (a.kind, kind))
        if old == new:
            return Value(a.code, kind)
        function = arith.trunci if new < old else arith.extsi if a.kind == INT else arith.extui
        return Value(function(_type(kind), a.code), kind)

    def bits(self, a: Value, kind: np.dtype) -> Value:
        """The same bits read as another type."""
        return Value(arith.bitcast(_type(kind), a.code), kind)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """``a * b + c``, rounded once."""
        return Value(math.fma(a.code, b.code, c.code), FLOAT)

    def exp2(self, a: Value) -> Value:
        return self._ptx("ex2.approx.f32 $0, $1;", FLOAT, a)

    def log2(self, a: Value) -> Value:
        return Value(math.log2(a.code), FLOAT)

    def log(self, a: Value) -> Value:
        """Natural logarithm, to the last bit that of XLA."""
        return Value(math.log(a.code), FLOAT)

    def exp(self, a: Value) -> Value:
        """To the last bit that of XLA, as are `log` and `rsqrt`."""
        return Value(math.exp(a.code), FLOAT)

    def rsqrt(self, a: Value) -> Value:
        return Value(math.rsqrt(a.code), FLOAT)

    def round(self, a: Value) -> Value:
        """Nearest uint32 of a float."""
        return self._ptx("cvt.rni.u32.f32 $0, $1;", UINT, a)

    def to_float(self, a: Value) -> Value:
        """The float nearest to an unsigned integer."""
        return Value(arith.uitofp(_type(FLOAT), a.code), FLOAT)

    def pair(self, low: Value, high: Value) -> Value:
        """A word of the bfloat16 nearest to two floats, ties to even."""
        return self._ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", UINT, high, low)

    def popcount(self, a: Value) -> Value:
        return self._ptx("popc.b32 $0, $1;", INT, a)

    def lowest_bit(self, a: Value) -> Value:
        """Index of the lowest bit that is set; 32 if none is."""
        return self._ptx("{ .reg .b32 r; brev.b32 r, $1; clz.b32 $0, r; }", INT, a)

    def pick(self, index: Value, memories: Sequence[Memory]) -> Memory:
        """One of several arrays of one type in global memory; all threads of the block pick the same."""
        picked = copy.copy(memories[0])
        for i, memory in enumerate(memories[1:], 1):
            picked.pointer = arith.select(self.is_equal(index, i).code, memory.pointer, picked.pointer)
        return picked

    def load(self, memory: Memory, index: Value) -> Value:
        loaded = llvm.load(_type(memory.kind), memory.at(index), alignment=memory.kind.itemsize)
        return Value(loaded, memory.kind)

    def load_vector(self, memory: Memory, index: Value, size: int) -> list[Value]:
        """``size`` values that lie together, aligned to their size."""
        kind = ir.VectorType.get((size,), _type(memory.kind))
        loaded = llvm.load(kind, memory.at(index), alignment=size * memory.kind.itemsize)
        return [Value(element, memory.kind) for element in w.elements(loaded, size)]

    def store(self, memory: Memory, index: Value, value: Any) -> None:
        code = self.value(memory.kind, 0)._with(value)
        llvm.store(code, memory.at(index), alignment=memory.kind.itemsize)

    def store_vector(self, memory: Memory, index: Value, values: Sequence[Value]) -> None:
        """Stores values side by side, aligned to their size."""
        code = w.register([value.code for value in values])
        llvm.store(code, memory.at(index), alignment=len(values) * memory.kind.itemsize)

    def atomic_add(self, memory: Memory, index: Value, value: Value) -> Value:
        """Adds to an int32 in shared memory; returns what was there."""
        ptx = "atom.shared.add.u32 $0, [$1], $2;"
        options = {"result_types": w.i32(), "has_side_effects": True}
        return Value(mgpu.utils.inline_ptx(ptx, memory.at(index), value.code, **options), INT)

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with mgpu.utils.when(condition.code):
            yield

    def branch(self, condition: Value, then: Callable[[], Sequence[Value]], otherwise: Sequence[Value]) -> list[Value]:
        """``then()`` in threads where the condition holds, else the values given."""
        operation = scf.IfOp(condition.code, [value.code.type for value in otherwise], has_else=True)
        with ir.InsertionPoint(operation.then_block):
            scf.yield_([value.code for value in then()])
        with ir.InsertionPoint(operation.else_block):
            scf.yield_([value.code for value in otherwise])
        return [Value(code, value.kind) for code, value in zip(operation.results, otherwise, strict=True)]

    def loop(self, count: Value | int, body: Callable, carry: Sequence[Value] = ()) -> list[Value]:
        """``carry = body(i, *carry)`` for i from 0 to ``count``."""
        count = count if isinstance(count, Value) else self.value(INT, count)
        kinds = [value.kind for value in carry]

        @mgpu.utils.fori(count.code, [value.code for value in carry])
        def result(i: ir.Value, codes: list[ir.Value]) -> list[ir.Value]:
            values = body(Value(i, INT), *map(Value, codes, kinds))
            return [value.code for value in values or ()]

        return list(map(Value, result.results, kinds))

    def shuffle_xor(self, value: Value, distance: int) -> Value:
        """The value of the lane whose index differs by this bit pattern."""
        return self._shuffle(value, "bfly", self.value(INT, distance))

    def shuffle(self, value: Value, lane: Value) -> Value:
        """The value of the given lane."""
        return self._shuffle(value, "idx", lane)

    def _shuffle(self, value: Value, mode: str, operand: Value) -> Value:
        if value.kind == WIDE:
            low, high = (self._shuffle(self.cast(part, UINT), mode, operand) for part in (value, value >> 32))
            return self.cast(low, WIDE) | (self.cast(high, WIDE) << 32)
        ptx = f"shfl.sync.{mode}.b32 $0, $1, $2, 31, 0xffffffff;"
        if value.kind == FLOAT:
            return self.bits(self._shuffle(self.bits(value, UINT), mode, operand), FLOAT)
        return self._ptx(ptx, value.kind, value, operand, is_collective=True)

    def ballot(self, condition: Value) -> Value:
        """Bit l says whether the condition holds in lane l."""
        return self._ptx(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
            UINT,
            self.cast(condition, UINT),
            is_collective=True,
        )

    def warp_maximum(self, value: Value) -> Value:
        return self._ptx("redux.sync.max.u32 $0, $1, 0xffffffff;", UINT, value, is_collective=True)

    def warp_minimum(self, value: Value) -> Value:
        return self._ptx("redux.sync.min.u32 $0, $1, 0xffffffff;", UINT, value, is_collective=True)

    def warp_sum(self, value: Value) -> Value:
        return self._ptx("redux.sync.add.u32 $0, $1, 0xffffffff;", UINT, value, is_collective=True)

    def warp_barrier(self) -> None:
        mgpu.utils.warp_barrier()

    def barrier(self) -> None:
        """All threads of the block wait for each other."""
        mgpu.utils.warp_barrier()
        gpu.barrier()

    def _ptx(self, ptx: str, kind: np.dtype, *values: Value, is_collective: bool = False) -> Value:
        codes = [value.code for value in values]
        options = {"has_side_effects": is_collective, "convergent": is_collective}
        return Value(mgpu.utils.inline_ptx(ptx, *codes, result_types=_type(kind), **options), kind)


def warp_reduce(t: Any, value: Any, combine: Callable, width: int = 32) -> Any:
    """Combines the values of ``width`` neighbouring lanes, a power of two; all of them get the result."""
    distance = 1
    while distance < width:
        value = combine(value, t.shuffle_xor(value, distance))
        distance *= 2
    return value


def block_reduce(t: Any, value: Any, combine: Callable, scratch: Any, num_warps: int) -> Any:
    """Combines the values of all threads, up to 32 warps; all of them get the result. ``scratch`` [warps] is free again."""
    lane = t.thread() & 31
    value = warp_reduce(t, value, combine)
    with t.when(t.is_equal(lane, 0)):
        t.store(scratch, t.thread() >> 5, value)
    t.barrier()
    width = 1
    while width < num_warps:
        width *= 2
    # Repeated values are combined with their likes alone: the warps' number is a power of two.
    value = warp_reduce(t, t.load(scratch, lane & (width - 1)), combine, width)
    t.barrier()
    return value


def append(t: Any, condition: Any, count: Any) -> Any:
    """A place of its own for each thread where the condition holds; ``count`` [1] in shared memory counts them."""
    lanes = t.ballot(condition)
    lane, zero = t.thread() & 31, t.value(INT, 0)
    before = t.popcount(lanes & ((t.value(UINT, 1) << t.cast(lane, UINT)) - 1))
    first = [zero]
    first = t.branch(t.is_equal(lane, 0), lambda: [t.atomic_add(count, zero, t.popcount(lanes))], first)
    return t.shuffle(first[0], zero) + before


def run(function: Callable, refs: Sequence[tuple[Any, np.dtype]], scalars: Sequence[Any]) -> None:
    """Calls ``function(threads, *scalars, *memories)`` in a kernel's body.

    Refs, in global or shared memory, come with the type that the function sees: keys of 64 bits lie in arrays of int32.
    """
    kinds = [kind for _, kind in refs]

    @w.inline(len(refs), len(scalars))
    def call(*args: Any) -> None:
        numbers = [Value(code, INT) for code in args[len(refs) :]]
        function(Threads(), *numbers, *map(Memory, args[: len(refs)], kinds))

    call(*(ref for ref, _ in refs), *scalars)


def options(name: str, num_threads: int) -> dict[str, Any]:
    """Arguments of `plgpu.kernel` for a kernel whose body calls `run`."""
    return {
        "num_threads": num_threads // 128,
        "thread_name": "warpgroup",
        "kernel_name": name,
        "compiler_params": plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    }


def check_device() -> None:
    """Raises NotImplementedError where a kernel cannot be part of the program that is being traced."""
    if jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
        raise NotImplementedError(
            f"{jax.device_count()} devices outside shard_map; the partitioner cannot divide a kernel"
        )
    device = jax.config.jax_default_device or jax.devices()[0]
    capability = getattr(device, "compute_capability", "9.0")
    if int(capability.split(".")[0]) < 8:
        raise NotImplementedError(f"compute capability {capability}; at least 8.0 is needed")


def choose(kernel: Callable, reference: Callable, *arrays: Any, has_kernels: bool = True) -> Any:
    """``kernel(*arrays)`` where the program is compiled for a GPU and the kernel takes them, else the reference's result.

    Without ``has_kernels`` it is the reference's result everywhere.
    """
    if not has_kernels:
        return reference(*arrays)
    try:
        check_device()
        return jax.lax.platform_dependent(*arrays, cuda=kernel, default=reference)
    except NotImplementedError:
        return reference(*arrays)
