"""INT4 experts: the schedule's own code, run on numpy with a place a thread, and how often it has weights read."""

import contextlib
import dataclasses
import importlib.util
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from ddtree_jax.pallas import int4_schedule, int4_spans, int4_steps, int4_unpack
from ddtree_jax.pallas.int4_kernel import share_memory
from ddtree_jax.pallas.int4_schedule import UnitTable
from ddtree_jax.quant import round_products
from experiments.bench_int4_moe import cases_to_compile

GARBAGE = 0x5EED5EED


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
    """What `int4_schedule` calls of MLIR's dialects, on numpy; atomics come in random order."""

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

    def add_atomically(self, ptx: str, pointer: Pointer, value: np.ndarray, **options: Any) -> np.ndarray:
        assert ptx.startswith("atom.shared.add")
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
        del mask, clamp
        assert kind == "up"
        lanes = self.threads % 32
        return np.where(lanes < distance, value, value[np.maximum(self.threads - distance, 0)])

    def modules(self) -> dict[str, Any]:
        """Stand-ins for the names that `int4_schedule` imports."""
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
        utils = {"when": self.when, "fori": self.fori, "inline_ptx": self.add_atomically}
        return {
            "arith": types.SimpleNamespace(**arith),
            "llvm": types.SimpleNamespace(load=self.load, store=self.store),
            "gpu": types.SimpleNamespace(barrier=lambda: None),
            "nvvm": types.SimpleNamespace(shfl_sync=self.shift_lanes, ShflKind=types.SimpleNamespace(up="up")),
            "w": types.SimpleNamespace(**words),
            "mgpu": types.SimpleNamespace(utils=types.SimpleNamespace(**utils)),
            "_false": lambda: self.value(0) != 0,
        }


def run_schedule(expert_P: np.ndarray, table: UnitTable, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entries of units, pairs of slots, places of pairs."""
    schedule = load_again(int4_schedule, **Machine(640, seed).modules())
    table = schedule.UnitTable(**dataclasses.asdict(table))
    scratch = schedule.scratch_words(table.num_pairs, table.num_experts)
    *tables, scratch = (np.full(size, GARBAGE, np.int32) for size in (*table.num_words, scratch))
    schedule.build_schedule(expert_P, *tables, scratch, table=table, num_threads=640)
    return tables


def split_entries(table: UnitTable, units: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Experts, first slots, numbers of pairs."""
    return np.stack([*table.split(*map(jnp.asarray, (units[numbers], numbers.astype(np.int32))))])


def draw_experts(kind: str, T: int, X: int, E: int) -> np.ndarray:
    rng = np.random.default_rng(T)
    routings = {
        "distinct": lambda: np.stack([rng.choice(E, X, replace=X > E) for _ in range(T)]),
        "hot": lambda: np.minimum(rng.geometric(0.3, (T, X)) - 1, E),
        "one": lambda: np.full((T, X), E - 1),
        "foreign": lambda: rng.integers(-E, 2 * E, (T, X)),
    }
    return routings[kind]().reshape(T * X).astype(np.int32)


@pytest.mark.parametrize("unit_tokens", [8, 24, 64])
@pytest.mark.parametrize("kind", ["distinct", "hot", "one", "foreign"])
@pytest.mark.parametrize("shape", [(64, 8, 384), (33, 3, 5), (64, 8, 48)])
def test_units_hold_every_local_pair_once(shape: tuple[int, int, int], kind: str, unit_tokens: int) -> None:
    T, X, E = shape
    expert_P = draw_experts(kind, *shape)
    table = UnitTable(num_pairs=T * X, num_experts=E, unit_tokens=unit_tokens)
    units, pairs, places = run_schedule(expert_P, table, seed=T)
    num_units, slot, found = int(units[-1]), 0, []
    entries = split_entries(table, units, np.arange(num_units))
    for unit, (expert, first_slot, count) in enumerate(entries.T.tolist()):
        assert first_slot == slot and 1 <= count <= unit_tokens
        held = pairs[8 * slot : 8 * slot + count]
        assert (expert_P[held] == expert).all()
        np.testing.assert_array_equal(places[held], unit * unit_tokens + np.arange(count))
        slot += -(-count // 8)
        assert (pairs[8 * first_slot + count : 8 * slot] == -1).all()
        found += held.tolist()
    local = np.flatnonzero((expert_P >= 0) & (expert_P < E))
    assert found == local[np.argsort(expert_P[local], kind="stable")].tolist()
    assert (np.delete(places, local) == -1).all()
    sizes = np.bincount(expert_P[local], minlength=E)
    assert num_units == (-(-sizes // unit_tokens)).sum()


def hidden_bytes(features: int) -> int:
    return 8 * int4_steps.token_stride(features)


@pytest.mark.parametrize(
    ("form", "experts", "features", "unit_tokens"),
    [
        ("HOPPER", 384, 256, 64),
        ("HOPPER", 48, 2048, 64),
        ("AMPERE", 384, 256, 64),
        ("SMALL", 384, 256, 24),
        ("SMALL", 48, 2048, 40),
    ],
)
def test_units_are_as_large_as_costs_no_stage(form: str, experts: int, features: int, unit_tokens: int) -> None:
    base = getattr(int4_spans, form)
    sizes = (64, 8, experts, 1, hidden_bytes(features))
    small, large = (share_memory(*sizes, dataclasses.replace(base, unit_tokens=size)) for size in (8, 64))
    assert small[0] == 8 and large == (unit_tokens, small[1]) and small[1] >= 2
    assert share_memory(8, *sizes[1:], dataclasses.replace(base, unit_tokens=64))[0] == 8


@pytest.mark.parametrize(("capability", "num_stages"), [(9, [3] * 6), (12, [3, 3, 3, 3, 2, 2]), (8, [3] * 6)])
def test_rings_are_those_that_were_measured(
    capability: int, num_stages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages at Kimi K2.6's shapes, as they were when tables had a slot a pair."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # Cases are made of shapes.
    found = []
    for _, function, (_, expert_TX, _, experts) in cases_to_compile(capability, num_blocks=132):
        sizes = (*expert_TX.shape, experts.down_EMKmw.shape[0], 1, hidden_bytes(experts.down_EMKmw.shape[2] * 64))
        found.append(share_memory(*sizes, function.keywords["config"]))
    assert found == [(8, stages) for stages in num_stages]


def test_a_tile_of_weights_is_read_once_whatever_the_number_of_its_tokens() -> None:
    """Steps that all blocks' spans hold, of a routing in which every token chooses the same experts."""
    T, X, experts = 64, 8, 384
    config = dataclasses.replace(int4_spans.HOPPER, unit_tokens=64)
    unit_tokens, _ = share_memory(T, X, experts, 1, hidden_bytes(256), config)
    table = UnitTable(num_pairs=T * X, num_experts=experts, unit_tokens=unit_tokens)
    expert_P = np.tile(np.arange(X, dtype=np.int32) * 5, T)
    units, _, _ = run_schedule(expert_P, table, seed=0)
    blocks = types.SimpleNamespace(shape=(experts, 1, 112, 8, 576))
    product = int4_spans.Product(blocks, config)
    start, end = product.span(jnp.int32(units[-1]), jnp.arange(config.num_blocks))
    steps = np.concatenate([np.arange(*span) for span in zip(start.tolist(), end.tolist(), strict=True)])
    experts_read, _, _ = split_entries(table, units, steps // product.num_steps)
    loads = np.stack([experts_read, steps % product.num_steps])
    assert loads.shape[1] == X * product.num_steps == len(np.unique(loads, axis=1).T)


def test_subnormal_nibbles_give_the_same_weights() -> None:
    """`expand_pair`'s own code with the multiplication in float64, rounded once: bit for bit what the integers stand for."""

    def widen(words: Any) -> np.ndarray:
        return np.asarray(words, np.uint32).view(np.uint16).view(jnp.bfloat16).astype(np.float64)

    def multiply_add(a: np.ndarray, b: Any, c: Any) -> np.ndarray:
        exact = widen(a) * widen(b) + widen(c)
        # Exact in float32, too: 16 bits of a product at most.
        np.testing.assert_array_equal(exact.astype(np.float32), exact)
        return exact.astype(np.float32).astype(jnp.bfloat16).view(np.uint32)

    def scale_half(pair: np.ndarray, factors: np.ndarray, half: int, terms: np.ndarray) -> np.ndarray:
        spread = [np.repeat(np.asarray(word).view(np.uint16)[half::2], 2).view(np.uint32) for word in (factors, terms)]
        return multiply_add(pair, *spread)

    unpack = load_again(
        int4_unpack,
        w=types.SimpleNamespace(i32=np.uint32),
        arith=types.SimpleNamespace(shrui=np.right_shift, andi=np.bitwise_and),
        _multiply_add=lambda a, b, c: multiply_add(a, np.full_like(a, b), np.full_like(a, c)),
        _scale_half=scale_half,
    )
    rng = np.random.default_rng(0)
    # All significands at both borders, random ones between them.
    exponents = np.concatenate([np.repeat([-94, 26], 128), rng.integers(-94, 27, 3840)])
    significands = 1 + np.concatenate([np.tile(np.arange(128), 2), rng.integers(0, 128, 3840)]) / 128
    scale = (rng.choice([-1.0, 1.0], 4096) * significands * 2.0**exponents).astype(jnp.bfloat16)
    scale[-2:] = 0.0, 1.0
    scales = unpack.widen_scales(scale.view(np.uint32), True)
    words = rng.integers(0, 2**32, 2048, dtype=np.uint32)
    words[:16] = np.arange(16, dtype=np.uint32) * np.uint32(0x11111111)
    nibbles = (words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)
    for half in range(2):
        integers = nibbles.astype(np.int32) - 8
        expected = np.asarray(
            round_products(jnp.asarray(integers), jnp.asarray(scale[half::2]), jnp.float32), np.float64
        )
        for i in range(4):
            pair = unpack.expand_pair(words, i, scales, half)
            found = widen(pair).reshape(-1, 2) * int4_unpack.SUBNORMAL_SCALE
            np.testing.assert_array_equal(found, expected[:, [i, i + 4]])
