"""INT4 experts: the schedule's own code, run on numpy with a place a thread, and how often it has weights read."""

import dataclasses
import types
from typing import Any

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from mlir_numpy import Machine, load_again

from ddtree_jax.pallas import int4_schedule, int4_steps, int4_unpack
from ddtree_jax.pallas.int4_kernel import count_stages
from ddtree_jax.pallas.int4_schedule import UnitTable
from ddtree_jax.quant import round_products
from experiments.bench_int4_moe import cases_to_compile

GARBAGE = 0x5EED5EED


def run_schedule(expert_P: np.ndarray, table: UnitTable, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entries of units, pairs of units, places of pairs."""
    schedule = load_again(int4_schedule, **Machine(640, seed).modules())
    table = schedule.UnitTable(**dataclasses.asdict(table))
    scratch = schedule.scratch_words(table.num_pairs, table.num_experts)
    *tables, scratch = (np.full(size, GARBAGE, np.int32) for size in (*table.num_words, scratch))
    schedule.build_schedule(expert_P, *tables, scratch, table=table, num_threads=640)
    return tables


def draw_experts(kind: str, T: int, X: int, E: int) -> np.ndarray:
    rng = np.random.default_rng(T)
    routings = {
        "distinct": lambda: np.stack([rng.choice(E, X, replace=X > E) for _ in range(T)]),
        "hot": lambda: np.minimum(rng.geometric(0.3, (T, X)) - 1, E),
        "one": lambda: np.full((T, X), E - 1),
        "foreign": lambda: rng.integers(-E, 2 * E, (T, X)),
    }
    return routings[kind]().reshape(T * X).astype(np.int32)


@pytest.mark.parametrize("kind", ["distinct", "hot", "one", "foreign"])
@pytest.mark.parametrize("shape", [(64, 8, 384), (33, 3, 5), (64, 8, 48)])
def test_units_hold_every_local_pair_once(shape: tuple[int, int, int], kind: str) -> None:
    T, X, E = shape
    expert_P = draw_experts(kind, *shape)
    table = UnitTable(num_pairs=T * X, num_experts=E)
    units, pairs, places = run_schedule(expert_P, table, seed=T)
    num_units, found = int(units[-1]), []
    entries = np.stack(table.split(jnp.asarray(units[:num_units])), axis=1)
    for unit, (expert, count) in enumerate(entries.tolist()):
        assert 1 <= count <= 8
        held = pairs[8 * unit :][:count]
        assert (expert_P[held] == expert).all() and (pairs[8 * unit + count : 8 * unit + 8] == -1).all()
        np.testing.assert_array_equal(places[held], 8 * unit + np.arange(count))
        found += held.tolist()
    local = np.flatnonzero((expert_P >= 0) & (expert_P < E))
    assert found == local[np.argsort(expert_P[local], kind="stable")].tolist()
    assert (np.delete(places, local) == -1).all()
    sizes = np.bincount(expert_P[local], minlength=E)
    assert num_units == (-(-sizes // 8)).sum()


@pytest.mark.parametrize(("capability", "num_stages"), [(9, [3] * 6), (12, [3, 3, 3, 3, 2, 2]), (8, [3] * 6)])
def test_rings_are_those_that_were_measured(
    capability: int, num_stages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages at Kimi K2.6's shapes, as they were when tables had a slot a pair."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # Cases are made of shapes.
    found = []
    for _, function, (_, expert_TX, _, experts) in cases_to_compile(capability, num_blocks=132):
        table = UnitTable(num_pairs=expert_TX.size, num_experts=experts.down_EMKmw.shape[0])
        hidden_bytes = 8 * int4_steps.token_stride(experts.down_EMKmw.shape[2] * 64)
        found.append(count_stages(table, hidden_bytes, function.keywords["config"]))
    assert found == num_stages


def load_unpack() -> types.ModuleType:
    """`int4_unpack` with the multiplication in float64, rounded once."""

    def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            exact = widen(a) * widen(b) + widen(c)
            rounded = exact.astype(np.float32)
        # 16 bits of a product at most: nothing is rounded twice.
        is_normal = np.isfinite(rounded) & (np.abs(exact) >= 2.0**-126)
        np.testing.assert_array_equal(rounded[is_normal], exact[is_normal])
        return rounded.astype(jnp.bfloat16).view(np.uint32)

    def scale_half(pair: np.ndarray, factors: np.ndarray, terms: np.ndarray, half: int) -> np.ndarray:
        spread = [np.repeat(np.asarray(word).view(np.uint16)[half::2], 2).view(np.uint32) for word in (factors, terms)]
        return multiply_add(pair, *spread)

    return load_again(
        int4_unpack,
        w=types.SimpleNamespace(i32=np.uint32),
        arith=types.SimpleNamespace(shrui=np.right_shift, andi=np.bitwise_and),
        _multiply=lambda a, b: multiply_add(a, np.full_like(a, b), np.zeros_like(a)),
        _scale_half=scale_half,
    )


def widen(words: Any) -> np.ndarray:
    """Pairs of bfloat16 in words."""
    return np.asarray(words, np.uint32).view(np.uint16).view(jnp.bfloat16).astype(np.float64)


def unpack_all(scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights of 8 nibbles for each scale, all 16 values among them: as the kernel's code makes them, and as is right."""
    unpack, words = load_unpack(), np.random.default_rng(0).integers(0, 2**32, len(scale) // 2, dtype=np.uint32)
    words[:16] = np.arange(16, dtype=np.uint32) * np.uint32(0x11111111)
    nibbles = (words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)
    integers = jnp.asarray(nibbles.astype(np.int32) - 8)
    scales = unpack.widen_scales(scale.view(np.uint32))
    found, expected = [], []
    for half in range(2):
        pairs = [widen(unpack.expand_pair(words, i, scales, half)).reshape(-1, 2) for i in range(4)]
        found.append(np.concatenate(pairs, axis=1)[:, [0, 2, 4, 6, 1, 3, 5, 7]] * int4_unpack.WEIGHT_SCALE)
        expected.append(np.asarray(round_products(integers, jnp.asarray(scale[half::2]), jnp.float32), np.float64))
    return np.stack(found), np.stack(expected)


def draw_scales(exponents: range) -> np.ndarray:
    """All significands at both borders, random ones between them."""
    rng = np.random.default_rng(0)
    drawn = np.concatenate([np.repeat([exponents[0], exponents[-1]], 128), rng.choice(exponents, 3840)])
    significands = 1 + np.concatenate([np.tile(np.arange(128), 2), rng.integers(0, 128, 3840)]) / 128
    return (rng.choice([-1.0, 1.0], 4096) * significands * 2.0**drawn).astype(jnp.bfloat16)


def test_nibbles_and_scales_become_the_weights_bit_for_bit() -> None:
    scale = draw_scales(range(-94, 27))
    scale[-2:] = 0.0, 1.0
    np.testing.assert_array_equal(*unpack_all(scale))


def test_scales_that_are_too_small_or_too_large_do_what_is_documented() -> None:
    """Weights a little off, and none that looks like one."""
    found, expected = unpack_all(draw_scales(range(-133, -94)))
    assert 0 < np.abs(found - expected).max() <= 2.0**-101
    found, _ = unpack_all(draw_scales(range(27, 31)))
    assert not np.isfinite(found[..., [0, 2, 4, 6]]).any()
