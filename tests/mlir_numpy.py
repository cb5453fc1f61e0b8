"""The code of single threads as MLIR's dialects write it, run on numpy with a place a thread."""

import contextlib
import importlib.util
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np


def load_again(module: types.ModuleType, **stand_ins: Any) -> types.ModuleType:
    """A copy of a module with other values for names that it imports, and without checks of types."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_on_numpy", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    for name, stand_in in stand_ins.items():
        setattr(copy, name, stand_in)
    return copy


class Pointer:
    """Into an array of int32, a number of bytes for each thread."""

    def __init__(self, words: np.ndarray, num_bytes: Any = 0) -> None:
        self.words, self.num_bytes = words, num_bytes


class Machine:
    """What the schedules call of MLIR's dialects, on numpy; atomics come in random order."""

    def __init__(self, num_threads: int, seed: int) -> None:
        self.threads = np.arange(num_threads, dtype=np.int32)
        self.active = np.ones(num_threads, bool)
        self.rng = np.random.default_rng(seed)

    def value(self, number: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(number, np.int32), self.threads.shape)

    def _places(self, pointer: Pointer) -> np.ndarray:
        places = self.value(pointer.num_bytes) // 4
        inside = (places >= 0) & (places < len(pointer.words))
        assert inside[self.active].all(), "outside of an array"
        return np.where(self.active, places, 0)

    def load(self, kind: Any, pointer: Pointer) -> np.ndarray:
        del kind
        return pointer.words[self._places(pointer)]

    def store(self, value: np.ndarray, pointer: Pointer) -> None:
        places, values = self._places(pointer)[self.active], self.value(value)[self.active]
        assert len(np.unique(places)) == len(np.unique(np.stack([places, values]), axis=1).T), "threads disagree"
        pointer.words[places] = values

    def run_ptx(self, ptx: str, *operands: Any, **options: Any) -> np.ndarray | None:
        if ptx == "popc.b32 $0, $1;":
            return np.bitwise_count(operands[0].view(np.uint32)).astype(np.int32)
        if ptx == "red.shared.or.b32 [$0], $1;":
            np.bitwise_or.at(operands[0].words, self._places(operands[0])[self.active], operands[1][self.active])
            return None
        return self.add_atomically(ptx, *operands, **options)

    def add_atomically(self, ptx: str, pointer: Pointer, value: np.ndarray | None = None, **options: Any) -> np.ndarray:
        assert ptx == f"atom.shared.add.u32 $0, [$1], {1 if value is None else '$2'};"
        value = self.value(1) if value is None else value
        before = self.value(0).copy()
        places = self._places(pointer)
        for thread in self.rng.permutation(self.threads[self.active]):
            before[thread] = pointer.words[places[thread]]
            pointer.words[places[thread]] += value[thread]
        return before

    @contextlib.contextmanager
    def when(self, condition: np.ndarray) -> Iterator[None]:
        outer = self.active
        self.active = outer & condition
        yield
        self.active = outer

    def fori(self, bound: np.ndarray, carry: Sequence[np.ndarray]) -> Callable:
        def run(body: Callable) -> types.SimpleNamespace:
            results = list(carry)
            for i in range(int(np.where(self.active, bound, 0).max())):
                with self.when(i < bound):
                    after = body(self.value(i), results)
                    results = [np.where(self.active, *pair) for pair in zip(after, results, strict=True)]
            return types.SimpleNamespace(results=results)

        return run

    def shift_lanes(self, mask: Any, value: np.ndarray, distance: np.ndarray, clamp: Any, kind: str) -> np.ndarray:
        """From as many lanes before, the own value in the first; or of a lane."""
        del mask, clamp
        lanes = self.threads % 32
        if kind == "idx":
            return value[self.threads - lanes + distance]
        return np.where(lanes < distance, value, value[np.maximum(self.threads - distance, 0)])

    def modules(self) -> dict[str, Any]:
        """Stand-ins for the names that a schedule imports."""
        unsigned = {"shrui": np.right_shift, "divui": np.floor_divide, "ult": np.less}
        unsigned = {
            name: lambda a, b, function=function: function(a.view(np.uint32), np.asarray(b).view(np.uint32))
            for name, function in unsigned.items()
        }
        compare = {
            "eq": np.equal,
            "slt": np.less,
            "sle": np.less_equal,
            "sge": np.greater_equal,
            "ult": unsigned["ult"],
        }
        arith = {
            "CmpIPredicate": types.SimpleNamespace(**{name: name for name in compare}),
            "cmpi": lambda predicate, a, b: compare[predicate](a, b),
            "select": np.where,
            "extui": lambda kind, a: a.astype(np.int32),
            "shrui": lambda a, b: unsigned["shrui"](a, b).astype(np.int32),
            "divui": lambda a, b: unsigned["divui"](a, b).astype(np.int32),
            **{"addi": np.add, "subi": np.subtract, "muli": np.multiply, "andi": np.bitwise_and, "shli": np.left_shift},
            **{"minsi": np.minimum, "maxsi": np.maximum},
        }
        at = lambda pointer, num_bytes, space=None: Pointer(pointer.words, pointer.num_bytes + num_bytes)  # noqa: E731
        words = {
            "inline": lambda num_refs, num_scalars: lambda function: function,
            "thread": lambda: self.threads,
            "i32": lambda number=None: self.value(0 if number is None else number),
            "scaled": lambda value, factor: value * np.int32(factor),
            "add": lambda *values: sum(values[1:], values[0]),
            "wide": lambda value: value,
            "at": at,
            "load": lambda kind, pointer, size: [self.load(kind, at(pointer, 4 * i)) for i in range(size)],
            "pointer": Pointer,
            "gmem": Pointer,
            "has_copy_engine": lambda: False,
            "GLOBAL": 1,
            "SHARED": 3,
        }
        utils = {"when": self.when, "fori": self.fori, "inline_ptx": self.run_ptx}
        return {
            "arith": types.SimpleNamespace(**arith),
            "llvm": types.SimpleNamespace(load=self.load, store=self.store),
            "gpu": types.SimpleNamespace(barrier=lambda: None),
            "nvvm": types.SimpleNamespace(
                shfl_sync=self.shift_lanes, ShflKind=types.SimpleNamespace(up="up", idx="idx")
            ),
            "w": types.SimpleNamespace(**words),
            "mgpu": types.SimpleNamespace(utils=types.SimpleNamespace(**utils)),
            "_false": lambda: self.value(0) != 0,
        }
