"""Measures the INT4 experts of one rank of Kimi K2.6: every case against float64 and against the bytes it must read.

Weights are random and stay cold: calls go through several routings, whose experts together fill the second cache many times
over. A call's time is that of all its kernels on the device, as CUPTI reports it.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas import int4_kernel
from ddtree_jax.pallas.int4_blocks import BLOCK_WORDS, WEIGHT_WORDS, pack_down, pack_gate_up
from ddtree_jax.pallas.int4_moe import (
    ExpertBlocks,
    choose_config,
    device_config,
    expand,
    int4_moe_gpu,
    int4_moe_reference,
)
from ddtree_jax.quant import dequantize

WIDTH = 7168
NUM_EXPERTS, PER_TOKEN = 384, 8
BYTES_PER_SECOND = 4.57e12
ROUTINGS = 16


class Shard(NamedTuple):
    """A rank's experts and their width."""

    mesh: str
    num_experts: int
    features: int

    @property
    def expert_bytes(self) -> int:
        return 3 * self.features * WIDTH * (16 + 2) // 32

    @property
    def block_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of gate and up, and of down, without the words of a block."""
        return (
            (self.num_experts, self.features // 256, WIDTH // 64, 8),
            (self.num_experts, WIDTH // 512, self.features // 64, 8),
        )

    def draw_weights(self) -> ExpertBlocks:
        return ExpertBlocks(*(draw_blocks(jax.random.key(i), shape) for i, shape in enumerate(self.block_shapes)))

    def draw_routing(self, nodes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Uniform; drawn again if the rank has none of the experts."""
        rng = np.random.default_rng(1000 * nodes + seed)
        while True:
            chosen = [rng.choice(NUM_EXPERTS, PER_TOKEN, replace=False) for _ in range(nodes)]
            expert_TX = np.stack(chosen).astype(np.int32)
            if (expert_TX < self.num_experts).any():
                weight_TX = rng.random((nodes, PER_TOKEN)).astype(np.float32)
                return expert_TX, 2.5 * weight_TX / weight_TX.sum(axis=1, keepdims=True)

    def count_distinct(self, expert_TX: np.ndarray) -> int:
        return len(np.unique(expert_TX[expert_TX < self.num_experts]))


SHARDS = (Shard("tensor=8", 384, 256), Shard("expert=8", 48, 2048))


def cases_to_compile(capability: int, num_blocks: int) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Names, functions and arguments' shapes for a device of compute capability ``capability``.x."""
    for shard in SHARDS:
        experts = ExpertBlocks(
            *(jax.ShapeDtypeStruct((*shape, BLOCK_WORDS), jnp.int32) for shape in shard.block_shapes)
        )
        for nodes in (1, 16, 64):
            x_TD = jax.ShapeDtypeStruct((nodes, WIDTH), jnp.bfloat16)
            routing = [jax.ShapeDtypeStruct((nodes, PER_TOKEN), dtype) for dtype in (jnp.int32, jnp.float32)]
            config = choose_config(x_TD, experts, device_config(capability, num_blocks))
            function = functools.partial(int4_moe_gpu, config=config)
            yield f"{shard.mesh}, {nodes} nodes", function, (x_TD, *routing, experts)


@functools.partial(jax.jit, static_argnums=1)
def draw_blocks(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Blocks of random integers, with scales round 0.01."""
    words_key, scales_key = jax.random.split(key)
    words = jax.random.bits(words_key, (*shape, WEIGHT_WORDS), jnp.uint32).view(jnp.int32)
    scales = 0.01 + 0.003 * jax.random.normal(scales_key, (*shape, BLOCK_WORDS - WEIGHT_WORDS, 2))
    return jnp.concatenate([words, jax.lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.int32)], axis=-1)


def compute_float64(x_TD: jax.Array, expert_TX: np.ndarray, weight_TX: np.ndarray, experts: ExpertBlocks) -> np.ndarray:
    """The sum over experts in float64, on the dequantized weights."""
    y_TD = np.zeros(x_TD.shape)
    with jax.enable_x64(True):

        @jax.jit
        def run_expert(x_TD: jax.Array, expert: ExpertBlocks) -> jax.Array:
            (gate_FD, up_FD), down_DF = expand(expert, WIDTH, jnp.float64)
            x_TD = x_TD.astype(jnp.float64)
            return (jax.nn.silu(x_TD @ gate_FD.T) * (x_TD @ up_FD.T)) @ down_DF.T

        for number in range(experts.down_EMKmw.shape[0]):
            if (expert_TX == number).any():
                expert = ExpertBlocks(*(blocks[number] for blocks in experts))
                weight_T = np.where(expert_TX == number, weight_TX, 0.0).sum(axis=1)
                y_TD += np.asarray(run_expert(x_TD, expert)) * weight_T[:, None]
    return y_TD


def relative_error(y: Any, reference: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(y, np.float64) - reference) / np.linalg.norm(reference))


def time_kernels(call: Callable[[int], Any], num_calls: int) -> list[float]:
    """Device seconds of each of ``num_calls`` calls, ``call(i)``, all of which start the same kernels."""
    from jax._src.lib import mosaic_gpu  # There is none without a GPU plugin.

    jax.block_until_ready([call(i) for i in range(ROUTINGS)])
    cupti = mosaic_gpu._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        jax.block_until_ready([call(i) for i in range(num_calls)])
    finally:
        milliseconds = [milliseconds for _, milliseconds in cupti._cupti_get_timings(False)]
    return (1e-3 * np.asarray(milliseconds).reshape(num_calls, -1).sum(axis=1)).tolist()


def measure_case(shard: Shard, experts: ExpertBlocks, nodes: int, runs: int, has_reference: bool) -> dict[str, Any]:
    """A result line, without where and with what it was measured."""
    x_TD = jax.random.normal(jax.random.key(nodes), (nodes, WIDTH), jnp.bfloat16)
    routings = [shard.draw_routing(nodes, seed) for seed in range(ROUTINGS)]
    on_device = [tuple(map(jnp.asarray, routing)) for routing in routings]
    config = choose_config(x_TD, experts)
    kernel = jax.jit(functools.partial(int4_moe_gpu, config=config))
    seconds = float(np.median(time_kernels(lambda i: kernel(x_TD, *on_device[i % ROUTINGS], experts), runs)))
    distinct = float(np.mean([shard.count_distinct(expert_TX) for expert_TX, _ in routings]))
    num_bytes = distinct * shard.expert_bytes
    error = relative_error(kernel(x_TD, *on_device[0], experts), compute_float64(x_TD, *routings[0], experts))
    line = {
        "benchmark": "int4_moe",
        "case": {"mesh": shard.mesh, "nodes": nodes, "distinct_experts": distinct, "seed": list(range(ROUTINGS))},
        "seconds": seconds,
        "ceiling_seconds": num_bytes / BYTES_PER_SECOND,
        "ceiling": f"{num_bytes / 1e6:.0f} MB at {BYTES_PER_SECOND / 1e12} TB/s",
        "fraction_of_ceiling": num_bytes / BYTES_PER_SECOND / seconds,
        "runs": runs,
        "error": error,
    }
    if has_reference:
        line["reference_seconds"] = time_reference(x_TD, on_device[0], experts)
    return line


def time_reference(x_TD: jax.Array, routing: tuple, experts: ExpertBlocks) -> float:
    """Wall seconds of the plain-JAX form: it returns to the host for every expert, so that no sum of kernels is its time."""
    reference = jax.jit(int4_moe_reference)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(reference(x_TD, *routing, experts))
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def measure(nodes: list[int], runs: int, reference_nodes: list[int]) -> Iterator[dict[str, Any]]:
    for shard in SHARDS:
        experts = jax.block_until_ready(shard.draw_weights())
        for count in nodes:
            yield measure_case(shard, experts, count, runs, count in reference_nodes)


FUZZ_SHAPES = (
    (1, 1, 8, 64, 32),
    (64, 8, 384, 128, 64),
    (33, 6, 20, 320, 160),
    (9, 4, 12, 1024, 512),
    (7, 3, 9, 576, 288),
    (5, 2, 16, 96, 96),
    (64, 8, 32, 256, 128),
    (16, 8, 48, 512, 1024),
)
"""T, X, E, D, F."""


def check_random(num_routings: int) -> float:
    """Largest error over random routings of small shapes; one of them also in the portable forms, bit for bit."""
    worst = 0.0
    for number, shape in enumerate(FUZZ_SHAPES):
        worst = max(worst, check_shape(shape, num_routings // len(FUZZ_SHAPES), number == 3))
        print(f"T, X, E, D, F = {shape}: largest error so far {worst:.5f}", flush=True)
    return worst


def check_shape(shape: tuple[int, ...], num_routings: int, is_compared: bool) -> float:
    T, X, E, D, F = shape
    rng = np.random.default_rng(shape)
    experts, gate_up_E2FD, down_EDF = _draw_small(rng, E, D, F)
    config = choose_config(jax.ShapeDtypeStruct((T, D), jnp.bfloat16), experts)
    kernel = jax.jit(functools.partial(int4_moe_gpu, config=config))
    portable = []
    if is_compared:
        for form in (int4_kernel.SMALL, int4_kernel.AMPERE):
            changed = dataclasses.replace(form, num_blocks=config.num_blocks, step_columns=config.step_columns)
            portable.append(jax.jit(functools.partial(int4_moe_gpu, config=changed)))
    worst = 0.0
    for i in range(num_routings):
        expert_TX, weight_TX = _draw_routing(rng, i, T, X, E)
        x_TD = jnp.asarray(rng.normal(size=(T, D)), jnp.bfloat16)
        x_TD = jnp.where(((expert_TX >= 0) & (expert_TX < E)).any(axis=1)[:, None], x_TD, jnp.nan)
        arguments = (x_TD, jnp.asarray(expert_TX), jnp.asarray(weight_TX), experts)
        y_TD = np.asarray(kernel(*arguments).astype(jnp.float32))
        for other in portable:
            np.testing.assert_array_equal(np.asarray(other(*arguments).astype(jnp.float32)), y_TD)
        expected_TD = np.zeros((T, D))
        x_TD = np.asarray(x_TD.astype(jnp.float32), np.float64)
        for (t, x), expert in np.ndenumerate(expert_TX):
            if 0 <= expert < E:
                gate_F, up_F = gate_up_E2FD[expert] @ x_TD[t]
                expected_TD[t] += weight_TX[t, x] * (down_EDF[expert] @ (gate_F / (1 + np.exp(-gate_F)) * up_F))
        error = relative_error(y_TD, expected_TD) if expected_TD.any() else float(np.abs(y_TD).max())
        if not error < 4e-3:
            print(f"routing {i} of {shape}: error {error}", flush=True)
        worst = max(worst, error if np.isfinite(error) else np.inf)
    return worst


def _draw_small(rng: np.random.Generator, E: int, D: int, F: int) -> tuple[ExpertBlocks, np.ndarray, np.ndarray]:
    """Random experts; the last one's scales are NaN."""
    parts = []
    for shape in ((E, 2, F, D), (E, D, F)):
        words = rng.integers(-(2**31), 2**31, (*shape[:-1], shape[-1] // 8)).astype(np.int32)
        scale = rng.normal(0.0, 0.05, (*shape[:-1], shape[-1] // 32))
        scale[-1] = np.nan
        parts.append((jnp.asarray(words), jnp.asarray(scale, jnp.bfloat16)))
    experts = ExpertBlocks(pack_gate_up(*parts[0]), pack_down(*parts[1]))
    dense = (np.asarray(dequantize(*part, jnp.float32), np.float64) for part in parts)
    return experts, *dense


def _draw_routing(rng: np.random.Generator, i: int, T: int, X: int, E: int) -> tuple[np.ndarray, np.ndarray]:
    """In turn: distinct experts, one for all, with foreign and repeated ones, few of them, all but one foreign."""
    kinds = (
        lambda: np.stack([rng.choice(E - 1, X, replace=X > E - 1) for _ in range(T)]),
        lambda: np.full((T, X), rng.integers(0, E - 1)),
        lambda: rng.integers(-3, E + 3, (T, X)),
        lambda: rng.integers(0, min(3, E - 1), (T, X)),
        lambda: np.where(np.arange(T * X).reshape(T, X) == T * X // 2, 0, -1),
    )
    expert_TX = kinds[i % len(kinds)]()
    return np.where(expert_TX == E - 1, -1, expert_TX).astype(np.int32), rng.normal(size=(T, X)).astype(np.float32)


def check_repeats(nodes: int, times: int) -> bool:
    """Whether the same inputs gave the same bits every time."""
    shard = SHARDS[0]
    experts = shard.draw_weights()
    x_TD = jax.random.normal(jax.random.key(1), (nodes, WIDTH), jnp.bfloat16)
    kernel = jax.jit(functools.partial(int4_moe_gpu, config=choose_config(x_TD, experts)))
    routing = tuple(map(jnp.asarray, shard.draw_routing(nodes, 0)))
    outputs = [kernel(x_TD, *routing, experts) for _ in range(times)]
    return all(bool(jnp.all(output == outputs[0])) for output in outputs)
