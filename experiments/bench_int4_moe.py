"""Measures the INT4 experts of one rank of Kimi K2.6: every case against float64 and against the bytes it must read.

Weights are random and stay cold: calls go through several routings, whose experts together fill the second cache many times
over. A call's time is that of all its kernels on the device, as CUPTI reports it.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.int4_blocks import BLOCK_WORDS, WEIGHT_WORDS
from ddtree_jax.pallas.int4_moe import (
    ExpertBlocks,
    choose_config,
    device_config,
    expand,
    int4_moe_gpu,
    int4_moe_reference,
)

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
