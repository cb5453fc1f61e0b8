"""Target sampling by the kernels: random cases against `sampling.sample_reference`, and kernel times. See `bench_kernels`."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import sampling
from ddtree_jax.pallas import sample
from ddtree_jax.sampling_params import SamplingArrays, SamplingParams
from experiments.kernel_times import kernel_seconds

BYTES_PER_SECOND = 4.57e12
COLD_BYTES = 160e6  # More than twice the L2 lies between two uses of logits.
VOCAB, DEPTHS = 163_840, 8
# Nodes, temperature, top-p, and the microseconds to stay below.
CASES = (
    (1, 0.0, 1.0, None),
    (16, 0.0, 1.0, 8),
    (32, 0.0, 1.0, None),
    (16, 0.6, 0.95, 60),
    (16, 1.0, 1.0, None),
)


def draw_logits(rng: np.random.Generator, num_nodes: int) -> np.ndarray:
    """Like a language model's: most mass on a few tokens, at a peakedness that differs from node to node."""
    x = rng.standard_normal((1, num_nodes, VOCAB), np.float32) * 2.5
    few = rng.integers(0, VOCAB, (num_nodes, 12))
    x[0, np.arange(num_nodes)[:, None], few] += rng.uniform(6, 16, (num_nodes, 12)).astype(np.float32)
    return x


def drawn(logits_BNV: jax.Array, depth_BN: jax.Array, length_B: jax.Array, arrays: SamplingArrays) -> jax.Array:
    """All that the engine does for its draws, once bias and penalties are in the logits."""
    return sampling.draw(logits_BNV, depth_BN, length_B, arrays, DEPTHS)


def left(logits_BNV: jax.Array, depth_BN: jax.Array, length_B: jax.Array, arrays: SamplingArrays) -> jax.Array:
    """Which draws under top-k or top-p the kernels leave to plain JAX."""
    best = sample.best_of_pieces(logits_BNV, jnp.int32(0))
    return sampling.draw_filtered(logits_BNV, best, depth_BN, length_B, arrays) < 0


def is_filtered(params: dict[str, Any]) -> bool:
    return "top_k" in params or params.get("top_p", 1.0) < 1


def arrays_of(**params: Any) -> SamplingArrays:
    options = {"batch": 1, "max_length": 8, "vocab_size": VOCAB, "eos_token_ids": []}
    return SamplingArrays.stack([SamplingParams(**params)], [[0]], **options)


def reference(logits_BNV: jax.Array, depth_BN: jax.Array, length_B: jax.Array, arrays: SamplingArrays) -> jax.Array:
    return sampling.sample_reference(logits_BNV, depth_BN, length_B, arrays, DEPTHS)


CHECKED = (
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 1.5, "top_k": 64},
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1e-6},
)


def cases_to_compile() -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """Name, function and shapes of its arguments."""
    for num_nodes in (1, 16, 64):
        logits_BNV = jax.ShapeDtypeStruct((1, num_nodes, VOCAB), jnp.float32)
        whole_BN, of_B = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, num_nodes), (1,)))
        yield f"{num_nodes} nodes", drawn, (logits_BNV, whole_BN, of_B, arrays_of(temperature=0.6, top_p=0.95))


def check(num_batches: int, num_nodes: int = 16) -> dict[str, int]:
    """Draws that differ from `sampling.sample_reference` on the same device, and those that the kernels leave to it."""
    found = {"draws": 0, "differ": 0, "left": 0, "greedy": 0}
    ours, leaves, expected = jax.jit(drawn), jax.jit(left), jax.jit(reference)
    for turn in range(num_batches):
        rng = np.random.default_rng(turn)
        logits = jnp.asarray(draw_logits(rng, num_nodes))
        depth_BN = jnp.asarray(rng.integers(0, DEPTHS, (1, num_nodes)), jnp.int32)
        length_B = jnp.asarray([turn], jnp.int32)
        greedy = ours(logits, depth_BN, length_B, arrays_of())
        found["greedy"] += int(jnp.sum(greedy != jnp.argmax(logits, axis=-1)))
        for params in CHECKED:
            inputs = logits, depth_BN, length_B, arrays_of(seed=turn, **params)
            found["draws"] += num_nodes
            found["left"] += int(jnp.sum(leaves(*inputs))) if is_filtered(params) else 0
            found["differ"] += int(jnp.sum(ours(*inputs) != expected(*inputs)))
    return found


def measure(runs: int, cases: tuple = CASES) -> Iterator[dict[str, Any]]:
    """Result lines without provenance; ``seconds`` is the sum over all kernels, those that decide what is run too."""
    for num_nodes, temperature, top_p, target in cases:
        moved = 4 * num_nodes * VOCAB
        rng = np.random.default_rng(0)
        one = jnp.asarray(draw_logits(rng, num_nodes))
        copies = [jnp.roll(one, i, axis=-1) for i in range(int(COLD_BYTES / moved) + 1)]
        depth_BN = jnp.asarray(rng.integers(0, DEPTHS, (1, num_nodes)), jnp.int32)
        arrays = arrays_of(seed=1, temperature=temperature, top_p=top_p)
        times = kernel_seconds(jax.jit(drawn), [(x, depth_BN, jnp.zeros(1, jnp.int32), arrays) for x in copies], runs)
        seconds = sum(times.values())
        line = {
            "benchmark": "sample",
            "case": {"vocab": VOCAB, "nodes": num_nodes, "temperature": temperature, "top_p": top_p, "seed": 0},
            "seconds": seconds,
            "ceiling_seconds": moved / BYTES_PER_SECOND,
            "ceiling": f"{moved / 1e6:.1f} MB at 4.57 TB/s",
            "fraction_of_ceiling": round(moved / BYTES_PER_SECOND / seconds, 3),
            "kernels": times,
            "runs": runs,
        }
        yield line if target is None else line | {"target_seconds": target * 1e-6}
