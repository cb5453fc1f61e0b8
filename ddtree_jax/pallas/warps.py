"""Words that Pallas lacks for kernels written warp by warp: inline Mosaic GPU, barriers of our own, waiting for the grid.

Functions with Pallas arguments (refs and scalars) are called from a kernel's body; the others build the code of functions
under `inline`, which run in all threads of a warpgroup. Lane l of a warp is (r, t) = (l // 4, l % 4), as in PTX's picture of
``mma.m16n8k16``.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf, vector

SCALAR = plgpu.Layout.WG_SPLAT(())
REF = plgpu.RefType()
GLOBAL, SHARED = 1, 3


def i32(value: int | None = None) -> Any:
    kind = ir.IntegerType.get_signless(32)
    return kind if value is None else arith.constant(kind, ir.IntegerAttr.get(kind, _signed(value)))


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def i64(value: int) -> ir.Value:
    kind = ir.IntegerType.get_signless(64)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def f32() -> ir.Type:
    return ir.F32Type.get()


def i64_type() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def thread() -> ir.Value:
    return mgpu.utils.thread_idx()


def lane() -> tuple[ir.Value, ir.Value]:
    lane = arith.andi(thread(), i32(31))
    return arith.shrui(lane, i32(2)), arith.andi(lane, i32(3))


def warp() -> ir.Value:
    """Of the warpgroup, 0 to 3."""
    return arith.andi(arith.shrui(thread(), i32(5)), i32(3))


def at(pointer: ir.Value, num_bytes: ir.Value, space: int) -> ir.Value:
    """Pointer moved by a number of bytes."""
    kind = llvm.PointerType.get(space)
    return llvm.getelementptr(
        kind, pointer, [num_bytes], [-(1 << 31)], ir.IntegerType.get_signless(8), llvm.GEPNoWrapFlags.none
    )


def pointer(ref: ir.Value) -> ir.Value:
    return mgpu.utils.memref_ptr(ref)


def gmem(ref: ir.Value) -> ir.Value:
    return llvm.addrspacecast(llvm.PointerType.get(GLOBAL), pointer(ref))


def wide(value: ir.Value) -> ir.Value:
    return arith.extsi(ir.IntegerType.get_signless(64), value)


def add(*values: ir.Value) -> ir.Value:
    return functools.reduce(arith.addi, values)


def scaled(value: ir.Value, factor: int) -> ir.Value:
    return arith.muli(value, i32(factor))


def load(kind: ir.Type, pointer: ir.Value, num_words: int) -> list[ir.Value]:
    loaded = llvm.load(ir.VectorType.get((num_words,), kind), pointer, alignment=4 * num_words)
    return elements(loaded, num_words)


def elements(register: ir.Value, size: int) -> list[ir.Value]:
    return [vector.extract(register, [], ir.DenseI64ArrayAttr.get([i])) for i in range(size)]


def register(values: Sequence[ir.Value]) -> ir.Value:
    return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), list(values))


def _scalar(value: mgpu.FragmentedArray) -> ir.Value:
    return value.registers.item()


def inline(num_refs: int, num_scalars: int, arrays: tuple = (), result: Any = None) -> Callable:
    """Decorator for a function of refs, then scalars (given as values), then arrays of the given layouts."""

    def decorate(function: Callable) -> Callable:
        def body(context: Any, *args: Any) -> Any:
            del context
            refs, scalars = args[:num_refs], args[num_refs : num_refs + num_scalars]
            return function(*refs, *map(_scalar, scalars), *args[num_refs + num_scalars :])

        wrapped = plgpu.inline_mgpu(arg_types=(REF,) * num_refs + (SCALAR,) * num_scalars + arrays, return_type=result)
        return wrapped(body)

    return decorate


def init_barriers(barriers: Any, counts: Sequence[int], *, waits: bool = True) -> None:
    """Makes ``barriers`` (int64 in shared memory) usable, barrier i with ``counts[i]`` arrivals.

    All threads wait, unless the caller has them wait before the first use.
    """

    @inline(1, 0)
    def call(ref: ir.Value) -> None:
        first = mgpu.utils.single_thread_predicate(scope=mgpu.utils.ThreadSubset.BLOCK)
        for i, count in enumerate(counts):
            nvvm.mbarrier_init(at(pointer(ref), i32(8 * i), SHARED), i32(count), predicate=first)
        if has_copy_engine():
            mgpu.utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)
        if waits:
            gpu.barrier()

    call(barriers)


def warp_index() -> jax.Array:
    """Of the warpgroup, 0 to 3; threads of different warps hold different values."""

    @inline(0, 0, (), plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def call() -> mgpu.FragmentedArray:
        return mgpu.FragmentedArray.splat(warp(), (), is_signed=True)

    return call()


def barrier(ref: ir.Value, index: ir.Value) -> ir.Value:
    return at(pointer(ref), scaled(index, 8), SHARED)


def has_copy_engine() -> bool:
    """Whether the device that code is being built for has bulk copies: Hopper and newer."""
    return mgpu.utils.get_arch().major >= 9


def wait(ref: ir.Value, index: ir.Value, parity: ir.Value) -> None:
    if has_copy_engine():
        nvvm.mbarrier_try_wait_parity(barrier(ref, index), parity, i32(10_000_000))
        return
    loop = scf.WhileOp([], [])
    with ir.InsertionPoint(loop.before.blocks.append()):
        is_over = mgpu.utils.inline_ptx(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }",
            barrier(ref, index),
            parity,
            result_types=i32(),
            has_side_effects=True,
        )
        scf.condition(arith.cmpi(arith.CmpIPredicate.eq, is_over, i32(0)), [])
    with ir.InsertionPoint(loop.after.blocks.append()):
        scf.yield_([])


def wait_barrier(barriers: Any, index: jax.Array, parity: jax.Array) -> None:
    inline(1, 2)(wait)(barriers, index, parity)


def arrive_warp(barriers: Any, index: jax.Array) -> None:
    """One arrival a warp, after all of its lanes got here."""

    @inline(1, 1)
    def call(ref: ir.Value, index: ir.Value) -> None:
        mgpu.utils.warp_barrier()
        first = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(thread(), i32(31)), i32(0))
        mgpu.utils.inline_ptx(
            "mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];",
            barrier(ref, index),
            predicate=first,
            has_side_effects=True,
        )

    call(barriers, index)


def share(value: jax.Array) -> jax.Array:
    """What lane 0 holds, for all of the warp."""

    @inline(0, 1, (), plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def call(value: ir.Value) -> mgpu.FragmentedArray:
        shared = nvvm.shfl_sync(i32(-1), value, i32(0), i32(31), nvvm.ShflKind.idx)
        return mgpu.FragmentedArray.splat(shared, (), is_signed=True)

    return call(value)


def finish(*values: jax.Array) -> None:
    """Values are there before what comes behind: the compiler would compute them where they are used."""

    @inline(0, len(values))
    def call(*values: ir.Value) -> None:
        operands = " ".join(f"${i}" for i in range(len(values)))
        mgpu.utils.inline_ptx(f"// {operands}", *values, has_side_effects=True)

    call(*values)


def _sync_threads(num_threads: int) -> None:
    # Convergent: otherwise LLVM gives lane 0, which has done something alone, a copy of the barrier of its own.
    mgpu.utils.warp_barrier()
    mgpu.utils.inline_ptx(f"bar.sync 15, {num_threads};", has_side_effects=True, convergent=True)


def sync_threads(num_threads: int) -> None:
    """All ``num_threads`` computing threads of the block wait for each other."""
    inline(0, 0)(functools.partial(_sync_threads, num_threads))()


def _words(num_words: int) -> ir.Value:
    """Pointer to words of device memory that belong to the kernel's module: zero when it is loaded, then as left behind."""
    name = "semaphores"
    module = ir.InsertionPoint.current.block.owner
    while module.operation.name != "builtin.module":
        module = module.operation.parent
    block = module.operation.regions[0].blocks[0]
    names = {op.attributes["sym_name"].value for op in block.operations if "sym_name" in op.attributes}
    if name not in names:
        with ir.InsertionPoint.at_block_begin(block):
            llvm.GlobalOp(
                llvm.ArrayType.get(i32(), num_words),
                name,
                ir.Attribute.parse("#llvm.linkage<internal>"),
                addr_space=ir.IntegerAttr.get(i32(), GLOBAL),
                value=ir.Attribute.parse(f"dense<0> : tensor<{num_words}xi32>"),
            )
    return llvm.AddressOfOp(llvm.PointerType.get(GLOBAL), ir.FlatSymbolRefAttr.get(name)).result


@dataclass(frozen=True, slots=True)
class Semaphores:
    """``size`` counters that are zero at every launch, though nothing fills them before it.

    They lie in the kernel's module. Launches, which never overlap, take one of two sets in turn: ``launch`` counts them. A
    launch has to clear the other set, for the next.
    """

    size: int
    num_threads: int
    launch: jax.Array

    @property
    def num_words(self) -> int:
        """The number of launches, then both sets."""
        return 1 + 2 * self.size

    def place(self, index: jax.Array) -> jax.Array:
        """Of a semaphore among the words."""
        return 1 + (self.launch & 1) * self.size + index

    def signal(self, index: jax.Array) -> None:
        """Counts one up, after what all ``num_threads`` computing threads of the block have written can be seen by all."""

        @inline(0, 1)
        def call(place: ir.Value) -> None:
            _sync_threads(self.num_threads)
            with mgpu.utils.when(_is_thread(0)):
                to = _word(_words(self.num_words), place)
                mgpu.utils.inline_ptx("red.release.gpu.global.add.u32 [$0], $1;", to, i32(1), has_side_effects=True)

        call(self.place(index))

    def wait(self, index: jax.Array, count: jax.Array) -> None:
        """All ``num_threads`` computing threads of the block wait until a semaphore has been counted up to ``count``.

        One of another warp than signals asks for it: thread 0 may still be busy with making visible what was written.
        """

        @inline(0, 2)
        def call(place: ir.Value, count: ir.Value) -> None:
            with mgpu.utils.when(_is_thread(self.num_threads - 32)):
                _spin(_word(_words(self.num_words), place), count)
            _sync_threads(self.num_threads)

        call(self.place(index), count)

    def take(self, index: jax.Array) -> jax.Array:
        """Counts one up for the warp: lane 0 gets what the count was, others 0. Nobody waits for it before it is used."""

        @inline(0, 1, (), plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
        def call(place: ir.Value) -> mgpu.FragmentedArray:
            number = mgpu.utils.inline_ptx(
                "{ .reg .pred p; setp.eq.s32 p, $2, 0; mov.b32 $0, 0; @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }",
                _word(_words(self.num_words), place),
                arith.andi(thread(), i32(31)),
                result_types=i32(),
                has_side_effects=True,
            )
            return mgpu.FragmentedArray.splat(number, (), is_signed=True)

        return call(self.place(index))

    def spin(self, place: ir.Value, count: ir.Value) -> None:
        """One thread waits, at a semaphore's `place`."""
        _spin(_word(_words(self.num_words), place), count)

    def clear_next(self, block: jax.Array, num_blocks: int) -> None:
        """The computing threads of all blocks call this: the other set will be zero when the next launch begins."""

        @inline(0, 2)
        def call(launch: ir.Value, block: ir.Value) -> None:
            other = arith.muli(arith.andi(arith.addi(launch, i32(1)), i32(1)), i32(self.size))
            own = add(scaled(block, self.num_threads), thread())
            for start in range(0, self.size, num_blocks * self.num_threads):
                index = arith.addi(own, i32(start))
                with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, index, i32(self.size))):
                    llvm.store(i32(0), _word(_words(self.num_words), add(index, other, i32(1))))

        call(self.launch, block)

    def close(self) -> None:
        """Gives the next launch the other set; one block does that, when all blocks have begun."""

        @inline(0, 1)
        def call(launch: ir.Value) -> None:
            with mgpu.utils.when(_is_thread(0)):
                llvm.store(arith.addi(launch, i32(1)), _words(self.num_words))

        call(self.launch)


def open_semaphores(size: int, num_threads: int) -> Semaphores:
    """Every thread asks for its set's number; ``num_threads`` of a block compute: `Semaphores` says what they may do."""

    @inline(0, 0, (), plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def call() -> mgpu.FragmentedArray:
        launch = mgpu.utils.inline_ptx(
            "ld.relaxed.gpu.global.b32 $0, [$1];", _words(1 + 2 * size), result_types=i32(), has_side_effects=True
        )
        return mgpu.FragmentedArray.splat(launch, (), is_signed=True)

    return Semaphores(size, num_threads, call())


def _spin(semaphore: ir.Value, count: ir.Value) -> None:
    loop = scf.WhileOp([], [])
    with ir.InsertionPoint(loop.before.blocks.append()):
        seen = mgpu.utils.inline_ptx(
            "ld.acquire.gpu.global.b32 $0, [$1];", semaphore, result_types=i32(), has_side_effects=True
        )
        scf.condition(arith.cmpi(arith.CmpIPredicate.slt, seen, count), [])
    with ir.InsertionPoint(loop.after.blocks.append()):
        scf.yield_([])


def _is_thread(number: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, thread(), i32(number))


def _word(words: ir.Value, index: ir.Value) -> ir.Value:
    return at(words, wide(scaled(index, 4)), GLOBAL)
