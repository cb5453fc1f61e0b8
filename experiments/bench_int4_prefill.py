"""Measures the INT4 experts of one rank of Kimi K2.6 with the many tokens of prefill, against the tensor cores' rate.

Weights are random; a call reads 1.2 GB of them, so that none stay in the second cache from one call to the next. A call's
time is that of all its kernels on the device, as CUPTI reports it. The error is that of 64 tokens, spread evenly, against
float64.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ddtree_jax.pallas.int4_moe import ExpertBlocks, ExpertWeights, choose_config, expand, int4_moe_gpu, pack_experts
from ddtree_jax.quant import dequantize
from experiments.bench_int4_moe import BYTES_PER_SECOND, SHARDS, WIDTH, Shard, relative_error, time_kernels

FLOPS_PER_SECOND = 790e12
SEEDS = range(4)
CHECKED_TOKENS = 64
RATE_SIZE = 8192


@jax.jit
def _sum_float64(x_TD: jax.Array, expert_TX: jax.Array, weight_TX: jax.Array, experts: ExpertBlocks) -> jax.Array:
    def add_expert(total_TD: jax.Array, inputs: tuple) -> tuple[jax.Array, None]:
        number, expert = inputs
        (gate_FD, up_FD), down_DF = expand(expert, WIDTH, jnp.float64)
        y_TD = (jax.nn.silu(x_TD @ gate_FD.T) * (x_TD @ up_FD.T)) @ down_DF.T
        weight_T = jnp.sum(jnp.where(expert_TX == number, weight_TX, 0.0), axis=1)
        return total_TD + y_TD * weight_T[:, None], None

    numbers_E = jnp.arange(experts.down_EMKmw.shape[0], dtype=jnp.int32)
    return lax.scan(add_expert, jnp.zeros_like(x_TD), (numbers_E, experts))[0]


def compute_float64(x_TD: jax.Array, expert_TX: np.ndarray, weight_TX: np.ndarray, experts: ExpertBlocks) -> np.ndarray:
    """The sum over experts in float64, on the dequantized weights."""
    with jax.enable_x64(True):
        return np.asarray(
            _sum_float64(x_TD.astype(jnp.float64), expert_TX, jnp.asarray(weight_TX, jnp.float64), experts)
        )


def count_flops(shard: Shard, routing: tuple[np.ndarray, np.ndarray]) -> float:
    """Of the local pairs' products."""
    return 6.0 * shard.features * WIDTH * int((routing[0] < shard.num_experts).sum())


def measure_rate(runs: int) -> float:
    """Operations a second of a large bfloat16 product of random numbers: what this device's tensor cores do."""
    a_NN, b_NN = (jax.random.normal(jax.random.key(seed), (RATE_SIZE, RATE_SIZE), jnp.bfloat16) for seed in range(2))
    product = jax.jit(jnp.matmul)
    return 2.0 * RATE_SIZE**3 / float(np.median(time_kernels(lambda i: product(a_NN, b_NN), runs)))


def measure_case(shard: Shard, experts: ExpertBlocks, tokens: int, runs: int, rate: float) -> dict[str, Any]:
    """A result line, without where and with what it was measured; ``rate`` is that of this device (`measure_rate`)."""
    x_TD = jax.random.normal(jax.random.key(tokens), (tokens, WIDTH), jnp.bfloat16)
    routings = [shard.draw_routing(tokens, seed) for seed in SEEDS]
    on_device = [tuple(map(jnp.asarray, routing)) for routing in routings]
    kernel = jax.jit(functools.partial(int4_moe_gpu, config=choose_config(x_TD, experts)))
    seconds = float(np.median(time_kernels(lambda i: kernel(x_TD, *on_device[i % len(SEEDS)], experts), runs)))
    flops = float(np.mean([count_flops(shard, routing) for routing in routings]))
    distinct = float(np.mean([shard.count_distinct(expert_TX) for expert_TX, _ in routings]))
    read_seconds = distinct * shard.expert_bytes / BYTES_PER_SECOND
    ceiling_seconds = max(flops / FLOPS_PER_SECOND, read_seconds)
    rows = np.linspace(0, tokens - 1, CHECKED_TOKENS).astype(int)
    expected_TD = compute_float64(x_TD[rows], *(array[rows] for array in routings[0]), experts)
    return {
        "benchmark": "int4_moe",
        "case": {"mesh": shard.mesh, "tokens": tokens, "distinct_experts": distinct, "seed": list(SEEDS)},
        "seconds": seconds,
        "ceiling_seconds": ceiling_seconds,
        "ceiling": f"{flops / 1e9:.0f} GFLOP at {FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s, "
        f"{distinct * shard.expert_bytes / 1e6:.0f} MB at {BYTES_PER_SECOND / 1e12} TB/s: the longer",
        "fraction_of_ceiling": ceiling_seconds / seconds,
        "fraction_of_tensor_cores": flops / FLOPS_PER_SECOND / seconds,
        "measured_flops_per_second": rate,
        "fraction_of_measured": flops / rate / seconds,
        "runs": runs,
        "error": relative_error(kernel(x_TD, *on_device[0], experts)[rows], expected_TD),
    }


def measure(tokens: list[int], runs: int) -> Iterator[dict[str, Any]]:
    rate = measure_rate(runs)
    for shard in SHARDS:
        experts = jax.block_until_ready(shard.draw_weights())
        for count in tokens:
            yield measure_case(shard, experts, count, runs, rate)


FUZZ_SHAPES = ((65, 8, 96, 512, 256), (300, 3, 12, 1024, 512), (777, 2, 5, 512, 1024), (1100, 8, 48, 512, 256))
"""T, X, E, D, F."""


def check_random(num_routings: int) -> float:
    """Largest error over random routings of small shapes, all calls of a routing twice, bit for bit."""
    worst = 0.0
    for shape in FUZZ_SHAPES:
        worst = max(worst, check_shape(shape, num_routings // len(FUZZ_SHAPES)))
        print(f"T, X, E, D, F = {shape}: largest error so far {worst:.5f}", flush=True)
    return worst


def check_shape(shape: tuple[int, ...], num_routings: int) -> float:
    """NaN stands in the last expert's scales, which no token chooses, and in tokens without an expert."""
    T, X, E, D, F = shape
    rng = np.random.default_rng(shape)
    experts, gate_up_E2FD, down_EDF = _draw_experts(rng, E, D, F)
    kernel = jax.jit(
        functools.partial(int4_moe_gpu, config=choose_config(jax.ShapeDtypeStruct((T, D), jnp.bfloat16), experts))
    )
    worst = 0.0
    for i in range(num_routings):
        expert_TX, weight_TX = draw_routing(rng, i, T, X, E)
        is_local_TX = (expert_TX >= 0) & (expert_TX < E)
        x_TD = jnp.asarray(rng.normal(size=(T, D)), jnp.bfloat16)
        x_TD = jnp.where(jnp.asarray(is_local_TX.any(axis=1)[:, None]), x_TD, jnp.nan)
        arguments = (x_TD, jnp.asarray(expert_TX), jnp.asarray(weight_TX), experts)
        y_TD = np.asarray(kernel(*arguments).astype(jnp.float32))
        np.testing.assert_array_equal(np.asarray(kernel(*arguments).astype(jnp.float32)), y_TD)
        x_TD = np.asarray(x_TD.astype(jnp.float32), np.float64)
        expected_TD = np.zeros((T, D))
        for expert in range(E):
            tokens, places = np.nonzero(expert_TX == expert)
            gate_NF, up_NF = (x_TD[tokens] @ weight_FD.T for weight_FD in gate_up_E2FD[expert])
            product_ND = (gate_NF / (1 + np.exp(-gate_NF)) * up_NF) @ down_EDF[expert].T
            np.add.at(expected_TD, tokens, product_ND * weight_TX[tokens, places, None])
        error = relative_error(y_TD, expected_TD) if expected_TD.any() else float(np.abs(y_TD).max())
        if not error < 4e-3:
            print(f"routing {i} of {shape}: error {error}", flush=True)
        worst = max(worst, error if np.isfinite(error) else np.inf)
    return worst


def _draw_experts(rng: np.random.Generator, E: int, D: int, F: int) -> tuple[ExpertBlocks, np.ndarray, np.ndarray]:
    """Random experts; the last one's scales are NaN."""
    parts = []
    for shape in ((E, 2, F, D), (E, D, F)):
        words = rng.integers(-(2**31), 2**31, (*shape[:-1], shape[-1] // 8)).astype(np.int32)
        scale = rng.normal(0.0, 0.05, (*shape[:-1], shape[-1] // 32))
        scale[-1] = np.nan
        parts += [jnp.asarray(words), jnp.asarray(scale, jnp.bfloat16)]
    dense = (np.asarray(dequantize(*pair, jnp.float32), np.float64) for pair in (parts[:2], parts[2:]))
    return pack_experts(ExpertWeights(*parts)), *dense


def draw_routing(rng: np.random.Generator, i: int, T: int, X: int, E: int) -> tuple[np.ndarray, np.ndarray]:
    """In turn: distinct experts, one for all, with foreign and repeated ones, few of them, all but one foreign, none."""
    kinds = (
        lambda: np.stack([rng.choice(E - 1, X, replace=X > E - 1) for _ in range(T)]),
        lambda: np.full((T, X), rng.integers(0, E - 1)),
        lambda: rng.integers(-3, E + 3, (T, X)),
        lambda: rng.integers(0, min(3, E - 1), (T, X)),
        lambda: np.where(np.arange(T * X).reshape(T, X) == T * X // 2, 0, -1),
        lambda: np.full((T, X), E),
    )
    expert_TX = kinds[i % len(kinds)]()
    return np.where(expert_TX == E - 1, -1, expert_TX).astype(np.int32), rng.normal(size=(T, X)).astype(np.float32)


def check_repeats(tokens: int, times: int) -> bool:
    """Whether the same inputs gave the same bits every time."""
    shard = SHARDS[0]
    experts = shard.draw_weights()
    x_TD = jax.random.normal(jax.random.key(1), (tokens, WIDTH), jnp.bfloat16)
    kernel = jax.jit(functools.partial(int4_moe_gpu, config=choose_config(x_TD, experts)))
    routing = tuple(map(jnp.asarray, shard.draw_routing(tokens, 0)))
    first_TD = kernel(x_TD, *routing, experts)
    return all(bool(jnp.all(kernel(x_TD, *routing, experts) == first_TD)) for _ in range(times - 1))
