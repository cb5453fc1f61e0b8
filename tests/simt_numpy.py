"""Runs what is written against `simt.Threads` on numpy arrays with a place a thread, all threads in step.

Every access to memory is checked: what another thread has written can be read, and what another one has read can be
overwritten, behind a barrier alone (a warp's own barrier within a warp). Barriers and what lanes do together need all
threads of the block or the warp.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.simt import BOOL, INT, UINT

_NOBODY, _SEVERAL = -1, -2
GARBAGE = 0x5EED5EED


class Memory:
    """A flat array that knows who has touched it since when."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.reader, self.writer = (np.full(array.shape, _NOBODY) for _ in range(2))
        self.read_at, self.written_at = (np.zeros((2, *array.shape), np.int64) for _ in range(2))

    @property
    def kind(self) -> np.dtype:
        return self.array.dtype


def shared(size: int, kind: type) -> Memory:
    """What shared memory, or an output, holds when a block begins is undefined."""
    return Memory(np.full(size, GARBAGE if np.dtype(kind).kind in "iu" else np.nan, kind))


class NumpyThreads:
    """The methods of `simt.Threads`."""

    def __init__(self, num_threads: int) -> None:
        self._thread = np.arange(num_threads, dtype=INT)
        self._active = np.ones(num_threads, bool)
        self._time = np.ones((2, num_threads), np.int64)  # barriers of the block, barriers of the warp

    def thread(self) -> np.ndarray:
        return self._thread

    def value(self, kind: np.dtype, number: Any) -> np.ndarray:
        return np.full(self._thread.shape, number, kind)

    def select(self, condition: np.ndarray, yes: np.ndarray, no: Any) -> np.ndarray:
        return np.where(condition, yes, np.asarray(no, yes.dtype))

    def is_equal(self, a: np.ndarray, b: Any) -> np.ndarray:
        return a == b

    def maximum(self, a: np.ndarray, b: Any) -> np.ndarray:
        return np.fmax(a, np.asarray(b, a.dtype))

    def minimum(self, a: np.ndarray, b: Any) -> np.ndarray:
        return np.fmin(a, np.asarray(b, a.dtype))

    def divide(self, a: np.ndarray, divisor: int) -> np.ndarray:
        return a // np.asarray(divisor, a.dtype)

    def cast(self, a: np.ndarray, kind: np.dtype) -> np.ndarray:
        return a.astype(kind)

    def bits(self, a: np.ndarray, kind: np.dtype) -> np.ndarray:
        return a.view(kind)

    def fma(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def exp2(self, a: np.ndarray) -> np.ndarray:
        return np.exp2(a)

    def log2(self, a: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log2(a)

    def log(self, a: np.ndarray) -> np.ndarray:
        return np.log(a)

    def exp(self, a: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.exp(a)

    def rsqrt(self, a: np.ndarray) -> np.ndarray:
        return 1 / np.sqrt(a)

    def pair(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        low, high = (x.astype(jnp.bfloat16).view(np.uint16).astype(UINT) for x in (low, high))
        return low | (high << 16)

    def round(self, a: np.ndarray) -> np.ndarray:
        return np.rint(a).astype(UINT)

    def to_float(self, a: np.ndarray) -> np.ndarray:
        return a.astype(np.float32)

    def popcount(self, a: np.ndarray) -> np.ndarray:
        return np.bitwise_count(a).astype(INT)

    def lowest_bit(self, a: np.ndarray) -> np.ndarray:
        return np.where(a == 0, 32, np.bitwise_count((a & -a.astype(np.int64)) - 1)).astype(INT)

    def pick(self, index: np.ndarray, memories: Sequence[Memory]) -> Memory:
        assert (index == index[0]).all()
        return memories[index[0]]

    def load(self, memory: Memory, index: np.ndarray) -> np.ndarray:
        inside = np.where(self._active, index, 0)
        assert inside.min() >= 0 and inside.max() < memory.array.size, f"index {inside.min()} to {inside.max()}"
        threads = self._thread[self._active]
        at = index[self._active]
        self._check(memory.writer, memory.written_at, at, threads, "read")
        other = (memory.reader[at] != _NOBODY) & (memory.reader[at] != threads)
        memory.reader[at] = np.where(other, _SEVERAL, threads)
        memory.read_at[:, at] = self._time[:, threads]
        return memory.array[inside]

    def load_vector(self, memory: Memory, index: np.ndarray, size: int) -> list[np.ndarray]:
        assert not (index[self._active] % size).any(), "not aligned"
        return [self.load(memory, index + np.int32(i)) for i in range(size)]

    def store_vector(self, memory: Memory, index: np.ndarray, values: Sequence[np.ndarray]) -> None:
        assert not (index[self._active] % len(values)).any(), "not aligned"
        for i, value in enumerate(values):
            self.store(memory, index + np.int32(i), value)

    def store(self, memory: Memory, index: np.ndarray, value: Any) -> None:
        threads, at = self._thread[self._active], index[self._active]
        assert at.size == 0 or (at.min() >= 0 and at.max() < memory.array.size), f"index {at.min()} to {at.max()}"
        assert len(set(at.tolist())) == at.size, "two threads write to one place"
        self._check(memory.writer, memory.written_at, at, threads, "overwrite")
        self._check(memory.reader, memory.read_at, at, threads, "overwrite what was read from")
        values = np.broadcast_to(np.asarray(value, memory.array.dtype), self._thread.shape)
        memory.array[at] = values[self._active]
        memory.writer[at], memory.reader[at] = threads, _NOBODY
        memory.written_at[:, at] = self._time[:, threads]

    def _check(self, whom: np.ndarray, when: np.ndarray, at: np.ndarray, threads: np.ndarray, what: str) -> None:
        others = (whom[at] != _NOBODY) & (whom[at] != threads)
        is_behind_block_barrier = when[0, at] < self._time[0, threads]
        is_same_warp = (whom[at] >= 0) & (whom[at] // 32 == threads // 32)
        is_behind_warp_barrier = is_same_warp & (when[1, at] < self._time[1, threads])
        racing = others & ~is_behind_block_barrier & ~is_behind_warp_barrier
        assert not racing.any(), f"threads {threads[racing][:5]} {what} {at[racing][:5]} without a barrier"

    def atomic_add(self, memory: Memory, index: np.ndarray, value: np.ndarray) -> np.ndarray:
        """In the order of threads."""
        threads = self._thread[self._active]
        order = threads[np.argsort(index[threads], kind="stable")]
        at, added = index[order], value[order]
        before = np.zeros(self._thread.shape, INT)
        if threads.size:
            is_first = np.diff(at, prepend=-1) != 0
            sums = np.cumsum(added) - added
            before[order] = memory.array[at] + sums - np.maximum.accumulate(np.where(is_first, sums, 0))
            np.add.at(memory.array, at, added)
            memory.writer[at], memory.written_at[:, at] = _SEVERAL, self._time[:, order]
        return before

    @contextlib.contextmanager
    def when(self, condition: np.ndarray) -> Iterator[None]:
        outer = self._active
        self._active = outer & condition
        yield
        self._active = outer

    def branch(self, condition: np.ndarray, then: Callable, otherwise: Sequence[np.ndarray]) -> list[np.ndarray]:
        with self.when(condition):
            values = then() if self._active.any() else otherwise
        return [np.where(condition, value, other) for value, other in zip(values, otherwise, strict=True)]

    def loop(self, count: Any, body: Callable, carry: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
        count = np.broadcast_to(np.asarray(count, INT), self._thread.shape)
        carry, i = list(carry), 0
        while (self._active & (i < count)).any():
            with self.when(i < count):
                values = body(self.value(INT, i), *carry) or []
                assert [value.dtype for value in values] == [value.dtype for value in carry]
                carry = [np.where(self._active, *pair) for pair in zip(values, carry, strict=True)]
            i += 1
        return carry

    def shuffle_xor(self, value: np.ndarray, distance: int) -> np.ndarray:
        self._need_warps()
        return value[self._thread ^ distance]

    def shuffle(self, value: np.ndarray, lane: np.ndarray) -> np.ndarray:
        self._need_warps()
        return value[(self._thread & ~31) + (lane & 31)]

    def ballot(self, condition: np.ndarray) -> np.ndarray:
        assert condition.dtype == BOOL
        return self._of_warps(condition, lambda warps: warps @ (1 << np.arange(32)))

    def warp_maximum(self, value: np.ndarray) -> np.ndarray:
        return self._of_warps(value, lambda warps: warps.max(axis=1))

    def warp_minimum(self, value: np.ndarray) -> np.ndarray:
        return self._of_warps(value, lambda warps: warps.min(axis=1))

    def warp_sum(self, value: np.ndarray) -> np.ndarray:
        return self._of_warps(value, lambda warps: warps.sum(axis=1))

    def _of_warps(self, value: np.ndarray, reduce: Callable) -> np.ndarray:
        self._need_warps()
        return np.repeat(reduce(value.reshape(-1, 32)), 32).astype(UINT)

    def _need_warps(self) -> None:
        warps = self._active.reshape(-1, 32)
        assert (warps.all(axis=1) | ~warps.any(axis=1)).all(), "some lanes of a warp are missing"

    def warp_barrier(self) -> None:
        self._need_warps()
        self._time[1, self._active] += 1

    def barrier(self) -> None:
        assert self._active.all(), "some threads of the block are missing"
        self._time += 1


def memory_of(array: Any) -> Memory:
    """Two bfloat16 a word, as the kernels see them."""
    array = np.ascontiguousarray(array).reshape(-1)
    return Memory(array.view(UINT) if array.dtype == jnp.bfloat16 else array.copy())


def launch(
    block: Callable, num_threads: int, grid: Sequence[int], arrays: Sequence, outs: Sequence
) -> list[np.ndarray]:
    """Outs, given by shape and type, of a kernel whose block is ``block(threads, *numbers, *arrays, *outs)``."""
    inputs = [memory_of(array) for array in arrays]
    results = []
    for shape, kind in outs:
        size = int(np.prod(shape))
        results.append(shared(size // 2, UINT) if kind == jnp.bfloat16 else shared(size, kind))
    for numbers in np.ndindex(*grid):
        threads = NumpyThreads(num_threads)
        block(threads, *(threads.value(np.int32, number) for number in numbers), *inputs, *results)
    return [memory.array.view(kind).reshape(shape) for memory, (shape, kind) in zip(results, outs, strict=True)]
