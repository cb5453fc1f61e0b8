"""Norms, the query's second and absorbed products and the cache's rows of one of 8 ranks: one launch beside three.

See `bench_kernels`. Weights stay cold: calls go through copies that together are several times the second cache.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.pallas.latent_query import Config, LatentQuery, latent_query_gpu, multiply_query
from ddtree_jax.pallas.latent_rows import latent_rows_gpu
from ddtree_jax.pallas.skinny_gemm import Output, choose_config, device_config, skinny_gemm_gpu
from experiments.bench_int4_moe import BYTES_PER_SECOND
from experiments.kernel_times import kernel_timeline

HEADS, QUERY, LATENT, ROTARY = 8, 1536, 512, 64
OPTIONS = {
    "outputs": tuple(Output(width=HEADS * width) for width in (128, ROTARY, LATENT)),
    "num_heads": HEADS,
}
ROWS = {"eps": 1e-6, "multiple": 64}
BLOCKS = (HEADS * (128 + ROTARY) // 64, QUERY // 64), (HEADS * LATENT // 64, 2)
COLD_BYTES = 160e6


def draw(nodes: int) -> tuple[jax.Array, ...]:
    """First projections, gains, cosines and sines."""
    keys = iter(jax.random.split(jax.random.key(nodes), 5))

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    rows = normal(1, nodes, QUERY), normal(1, nodes, LATENT + ROTARY)
    gains = 1 + 0.1 * normal(QUERY), 1 + 0.1 * normal(LATENT)
    angle = 1000 * normal(1, nodes, ROTARY // 2, dtype=jnp.float32)
    return *rows, *gains, jnp.cos(angle), jnp.sin(angle)


@jax.jit
def draw_weights(seed: int) -> tuple[jax.Array, jax.Array]:
    """q_b and key_up in blocks, of a size that keeps products near 1."""
    keys = jax.random.split(jax.random.key(seed))
    q_b, key_up = (
        jax.random.normal(key, (*counts, 64, 64), jnp.bfloat16) * (64 * counts[1]) ** -0.5
        for key, counts in zip(keys, BLOCKS, strict=True)
    )
    return q_b, key_up


def in_one(config: Config, *arrays: jax.Array) -> LatentQuery:
    return latent_query_gpu(*arrays, **OPTIONS, **ROWS, config=config)


def in_three(config: Config, *arrays: jax.Array) -> LatentQuery:
    """Launches behind each other."""

    def multiply(x_TK: jax.Array, blocks: jax.Array, outputs: Sequence[Output], num_groups: int = 1) -> list:
        return skinny_gemm_gpu(x_TK, blocks, outputs, num_groups, choose_config(blocks, config.product))

    return multiply_query(multiply, latent_rows_gpu(*arrays[:6], **ROWS), *arrays[6:], **OPTIONS)


def cases_to_compile() -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """Names, functions and arguments' shapes."""
    for nodes in (1, 16, 24):
        arrays = jax.eval_shape(lambda nodes=nodes: (*draw(nodes), *draw_weights(0)))
        yield f"latent rows, q_b and key_up, {nodes} nodes", functools.partial(in_one, Config()), arrays


def seconds_in_order(program: Callable[..., Any], inputs: Sequence[tuple], runs: int) -> list[float]:
    """Median duration of each kernel of ours that a call starts, in their order: two have one name."""
    program(*inputs[0])
    calls = [functools.partial(program, *inputs[run % len(inputs)]) for run in range(runs)]
    times = [seconds for name, seconds in kernel_timeline(calls) if "mosaic_gpu" in name]
    num_kernels = len(times) // runs
    return [statistics.median(times[i::num_kernels]) for i in range(num_kernels)]


def measure(nodes: Sequence[int], runs: int) -> Iterator[dict[str, Any]]:
    """Result lines; ``reference_seconds`` is that of three launches, ``error`` how many numbers differ.

    Raises:
      AssertionError: one launch does not give the bits of three.
    """
    config = Config(product=device_config())
    weight_bytes = 2 * 64 * 64 * sum(map(math.prod, BLOCKS))
    weights = [draw_weights(seed) for seed in range(math.ceil(COLD_BYTES / weight_bytes))]
    for count in filter(config.max_tokens.__ge__, nodes):
        arrays = draw(count)
        inputs = [(*arrays, *copy) for copy in weights]
        one, three = (
            jax.jit(functools.partial(call, config)).lower(*inputs[0]).compile() for call in (in_one, in_three)
        )
        times, reference = (seconds_in_order(program, inputs, runs) for program in (one, three))
        found, expected = one(*inputs[0]), three(*inputs[0])
        num_different = sum(int(jnp.sum(a != b)) for a, b in zip(found, expected, strict=True))
        assert num_different == 0, f"{count} nodes: {num_different} numbers differ"
        num_bytes = weight_bytes + sum(x.nbytes for x in (*arrays, *found))
        seconds = sum(times)
        yield {
            "benchmark": "skinny_gemm",
            "case": {"projection": "latent rows, q_b, key_up", "nodes": count, "cluster": 6, "seed": 0},
            "seconds": seconds,
            "reference_seconds": sum(reference),
            "ceiling_seconds": num_bytes / BYTES_PER_SECOND,
            "ceiling": f"{num_bytes / 1e6:.1f} MB at {BYTES_PER_SECOND / 1e12} TB/s",
            "fraction_of_ceiling": num_bytes / BYTES_PER_SECOND / seconds,
            "reference_kernels": dict(zip(("latent_rows", "q_b", "key_up"), reference, strict=True)),
            "runs": runs,
            "error": num_different,
        }
