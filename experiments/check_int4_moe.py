"""Compares the INT4 kernel on the device that is there with float64 on the host, with itself, and with its portable forms."""

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas import int4_spans
from ddtree_jax.pallas.int4_blocks import BLOCK_COLUMNS, BLOCK_ROWS, pack_down, pack_gate_up
from ddtree_jax.pallas.int4_moe import ExpertBlocks, choose_config, int4_moe_gpu
from ddtree_jax.quant import dequantize
from experiments.bench_int4_moe import SHARDS, WIDTH, Shard

LARGEST_ERROR = 4e-3
"""Relative norm error that is still right: that of a bfloat16 output on bfloat16 hidden rows, and some room."""

SHAPES = (
    (1, 1, 8, 64, 32),
    (64, 8, 384, 128, 64),
    (33, 6, 20, 320, 160),
    (9, 4, 12, 1024, 512),
    (7, 3, 9, 576, 288),
    (5, 2, 16, 96, 96),
    (64, 8, 32, 256, 128),
    (16, 8, 48, 512, 1024),
    (2, 8, 64, 1536, 256),
    (40, 1, 8, 224, 352),
    (12, 4, 10, 4096, 192),
    (48, 2, 9, 4608, 256),
)
"""T, X, E, D, F. The last two have so many tiles of down that blocks share some of them out late."""
COMPARED = (3, 6, 7)
"""Of these all forms are compared."""
EQUAL = ("hopper", "small", "ampere")
"""Forms that add up in the same order."""


class Problem(NamedTuple):
    """Small random experts: in blocks on the device, and dense on the host."""

    shape: tuple[int, ...]
    experts: ExpertBlocks
    gate_up_E2FD: np.ndarray
    down_EDF: np.ndarray


class Routing(NamedTuple):
    x_TD: jax.Array
    expert_TX: np.ndarray
    weight_TX: np.ndarray


def draw_problem(shape: tuple[int, ...]) -> Problem:
    """Scales that must not matter are NaN: the last expert's, which nothing chooses, and those of rows behind the width."""
    _, _, E, D, F = shape
    rng = np.random.default_rng(shape)
    rows = BLOCK_ROWS * -(-D // BLOCK_ROWS)
    parts = []
    for axes in ((E, 2, F, D), (E, rows, F)):
        words = rng.integers(-(2**31), 2**31, (*axes[:-1], axes[-1] // 8)).astype(np.int32)
        scale = rng.normal(0.0, 0.05, (*axes[:-1], axes[-1] // 32))
        scale[-1] = np.nan
        parts.append((words, scale))
    parts[1][1][:, D:] = np.nan
    parts = [(jnp.asarray(words), jnp.asarray(scale, jnp.bfloat16)) for words, scale in parts]
    experts = ExpertBlocks(pack_gate_up(*parts[0]), pack_down(*parts[1]))
    gate_up_E2FD, down_EDF = (np.asarray(dequantize(*part, jnp.float32), np.float64) for part in parts)
    return Problem(shape, experts, gate_up_E2FD, down_EDF[:, :D])


def draw_routing(shape: tuple[int, ...], number: int) -> Routing:
    """In turn: distinct experts, one for all, with foreign and repeated ones, few of them, all but one foreign.

    Rows of tokens without a local expert are NaN.
    """
    T, X, E, D, _ = shape
    rng = np.random.default_rng((*shape, number))
    kinds = (
        lambda: np.stack([rng.choice(E - 1, X, replace=X > E - 1) for _ in range(T)]),
        lambda: np.full((T, X), rng.integers(0, E - 1)),
        lambda: rng.integers(-3, E + 3, (T, X)),
        lambda: rng.integers(0, min(3, E - 1), (T, X)),
        lambda: np.where(np.arange(T * X).reshape(T, X) == T * X // 2, 0, -1),
    )
    expert_TX = kinds[number % len(kinds)]()
    expert_TX = np.where(expert_TX == E - 1, -1, expert_TX).astype(np.int32)
    is_local_T1 = ((expert_TX >= 0) & (expert_TX < E)).any(axis=1)[:, None]
    x_TD = np.where(is_local_T1, rng.normal(size=(T, D)), np.nan)
    return Routing(jnp.asarray(x_TD, jnp.bfloat16), expert_TX, rng.normal(size=(T, X)).astype(np.float32))


def compute_float64(routing: Routing, gate_up_E2FD: np.ndarray, down_EDF: np.ndarray) -> np.ndarray:
    """Each expert once, for all tokens that chose it."""
    x_TD = np.asarray(routing.x_TD.astype(jnp.float32), np.float64)
    y_TD = np.zeros(x_TD.shape)
    for expert in range(len(down_EDF)):
        weight_T = np.where(routing.expert_TX == expert, routing.weight_TX.astype(np.float64), 0.0).sum(axis=1)
        tokens = np.flatnonzero((routing.expert_TX == expert).any(axis=1))
        if len(tokens):
            gate_tF, up_tF = (x_TD[tokens] @ weight_FD.T for weight_FD in gate_up_E2FD[expert])
            y_tD = (gate_tF / (1 + np.exp(-gate_tF)) * up_tF) @ down_EDF[expert].T
            y_TD[tokens] += weight_T[tokens, None] * y_tD
    return y_TD


def measure_error(y_TD: np.ndarray, expected_TD: np.ndarray) -> float:
    """Relative norm error; of an output that should be zero, its largest value. Infinite if anything is not finite."""
    if not np.isfinite(y_TD).all():
        return np.inf
    if not expected_TD.any():
        return float(np.abs(y_TD).max())
    return float(np.linalg.norm(y_TD - expected_TD) / np.linalg.norm(expected_TD))


def choose_forms(x_TD: jax.ShapeDtypeStruct, experts: ExpertBlocks) -> dict[str, int4_spans.Config]:
    """The device's own form, and forms with steps, blocks and spans by which they add up in the same order."""
    own = choose_config(x_TD, experts)
    forms = (int4_spans.HOPPER, int4_spans.SMALL, int4_spans.AMPERE)
    same = {"num_blocks": own.num_blocks, "step_columns": BLOCK_COLUMNS, "free_tiles": 0}
    return {"own": own} | {name: dataclasses.replace(form, **same) for name, form in zip(EQUAL, forms, strict=True)}


def run_shape(number: int, form: str, num_routings: int) -> tuple[list[float], list[bytes]]:
    """Errors of a form over random routings of one of the shapes, and the outputs' bits.

    The last error is infinite if what is added, and the output's type, do not make the difference that they should.
    """
    problem = draw_problem(SHAPES[number])
    T, _, _, D, _ = problem.shape
    config = choose_forms(jax.ShapeDtypeStruct((T, D), jnp.bfloat16), problem.experts)[form]
    errors, outputs = run_routings(problem, jax.jit(functools.partial(int4_moe_gpu, config=config)), num_routings)
    call = jax.jit(functools.partial(int4_moe_gpu, config=config), static_argnames="dtype")
    return [*errors, 0.0 if adds_up(problem, call) else np.inf], outputs


def adds_up(problem: Problem, function: Callable[..., jax.Array]) -> bool:
    """Whether what is added comes last, in float32, and the sum is rounded once."""
    routing = draw_routing(problem.shape, 2)
    arguments = (routing.x_TD, jnp.asarray(routing.expert_TX), jnp.asarray(routing.weight_TX), problem.experts)
    added_TD = jax.random.normal(jax.random.key(2), routing.x_TD.shape, jnp.bfloat16)
    total_TD = function(*arguments, dtype=jnp.float32) + added_TD.astype(jnp.float32)
    same = (
        jnp.array_equal(function(*arguments, added_TD, dtype=dtype), total_TD.astype(dtype))
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    return all(map(bool, same))


def run_routings(
    problem: Problem, function: Callable[..., jax.Array], num_routings: int
) -> tuple[list[float], list[bytes]]:
    """Errors of ``function`` over random routings of a problem, and the outputs' bits."""
    errors, outputs = [], []
    for i in range(num_routings):
        routing = draw_routing(problem.shape, i)
        y_TD = function(routing.x_TD, jnp.asarray(routing.expert_TX), jnp.asarray(routing.weight_TX), problem.experts)
        expected_TD = compute_float64(routing, problem.gate_up_E2FD, problem.down_EDF)
        outputs.append(np.asarray(y_TD).tobytes())
        errors.append(measure_error(np.asarray(y_TD.astype(jnp.float32), np.float64), expected_TD))
    return errors, outputs


def run_shard(shard: Shard, nodes: int, form: str, times: int) -> tuple[bool, bytes]:
    """Whether the same inputs gave the same bits every time, and these bits."""
    experts = shard.draw_weights()
    x_TD = jax.random.normal(jax.random.key(1), (nodes, WIDTH), jnp.bfloat16)
    routing = tuple(map(jnp.asarray, shard.draw_routing(nodes, 0)))
    kernel = jax.jit(functools.partial(int4_moe_gpu, config=choose_forms(x_TD, experts)[form]))
    outputs = [kernel(x_TD, *routing, experts) for _ in range(times)]
    is_repeatable = all(bool(jnp.array_equal(output, outputs[0])) for output in outputs)
    return is_repeatable, np.asarray(outputs[0]).tobytes()


def check(num_routings: int) -> None:
    """Prints what agrees; a process a shape and form, since most of the time goes into tracing.

    Raises:
      AssertionError: something is wrong.
    """
    # For the processes to come: they share the device, and the cores by their number alone.
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    count = -(-num_routings // len(SHAPES))
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        few, many = ("own",), ("own", *EQUAL)
        shapes = [
            {name: pool.submit(run_shape, number, name, count) for name in (many if number in COMPARED else few)}
            for number in range(len(SHAPES))
        ]
        shards = [
            (shard, nodes, {name: pool.submit(run_shard, shard, nodes, name, 100) for name in names})
            for nodes, names in ((16, many), (1, few), (64, few))
            for shard in SHARDS
        ]
        is_right = all([_report_shape(SHAPES[number], forms) for number, forms in enumerate(shapes)])
        is_right &= all([_report_shard(*case) for case in shards])
    assert is_right, "see above"


def _find_unequal(bits: dict[str, Any]) -> list[str]:
    """Forms whose bits are not those of the first that adds up in the same order."""
    names = [name for name in EQUAL if name in bits]
    return [name for name in names if bits[name] != bits[names[0]]]


def _report_shape(shape: tuple[int, ...], forms: dict[str, concurrent.futures.Future]) -> bool:
    results = {name: form.result() for name, form in forms.items()}
    wrong = {
        name: [i for i, error in enumerate(errors) if not error < LARGEST_ERROR]
        for name, (errors, _) in results.items()
    }
    wrong = {name: routings for name, routings in wrong.items() if routings}
    unequal = _find_unequal({name: bits for name, (_, bits) in results.items()})
    largest = max(max(errors) for errors, _ in results.values())
    print(
        f"T, X, E, D, F = {shape}: {len(results['own'][0])} routings, {len(forms)} forms, largest error {largest:.5f}, "
        f"wrong {wrong}, not bit-equal {unequal}",
        flush=True,
    )
    return not wrong and not unequal


def _report_shard(shard: Shard, nodes: int, forms: dict[str, concurrent.futures.Future]) -> bool:
    results = {name: form.result() for name, form in forms.items()}
    changing = [name for name, (is_repeatable, _) in results.items() if not is_repeatable]
    unequal = _find_unequal({name: bits for name, (_, bits) in results.items()})
    print(
        f"{shard.mesh}, {nodes} nodes, {len(forms)} forms: not bit-equal in 100 runs {changing}, among forms {unequal}",
        flush=True,
    )
    return not changing and not unequal
