"""Target sampling by the kernels: random cases against `sampling.sample_reference`, and kernel times. See `bench_kernels`."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import sampling
from ddtree_jax.pallas import sample
from ddtree_jax.pallas.sample import Filters
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


def greedy(logits_BNV: jax.Array) -> jax.Array:
    return sample.merge_greedy(sample.best_of_pieces(logits_BNV, jnp.int32(0)))


def drawn(logits_BNV: jax.Array, depth_BN: jax.Array, length_B: jax.Array, arrays: SamplingArrays) -> jax.Array:
    """Draws under top-k or top-p; -1 where the kernels leave them to the reference."""
    filters, key_BT2 = _inputs(length_B, arrays)
    best = sample.best_of_pieces(logits_BNV, jnp.int32(0))
    sums = sample.add_up_pieces(logits_BNV, best, filters)
    lists = sample.collect_pieces(logits_BNV, best, sums, filters, jnp.int32(0), VOCAB)
    return sample.draw_tokens(best, sums, lists, filters, depth_BN, key_BT2, VOCAB)


def perturbed(logits_BNV: jax.Array, depth_BN: jax.Array, length_B: jax.Array, arrays: SamplingArrays) -> jax.Array:
    """Draws without top-k and top-p."""
    filters, key_BT2 = _inputs(length_B, arrays)
    best = sample.best_of_pieces(logits_BNV, jnp.int32(0))
    noisy = sample.perturb_pieces(logits_BNV, best, filters, depth_BN, key_BT2, jnp.int32(0))
    return sample.merge_greedy(noisy).reshape(depth_BN.shape)


def _inputs(length_B: jax.Array, arrays: SamplingArrays) -> tuple[Filters, jax.Array]:
    filters = Filters(arrays.temperature_B, arrays.top_k_B, arrays.top_p_B, arrays.min_p_B)
    position_BT = length_B[:, None] + 1 + jnp.arange(DEPTHS, dtype=jnp.int32)[None]
    return filters, jax.random.key_data(sampling.noise_keys(arrays, position_BT))


def is_filtered(params: dict[str, Any]) -> bool:
    return "top_k" in params or params.get("top_p", 1.0) < 1


def arrays_of(**params: Any) -> SamplingArrays:
    options = {"batch": 1, "max_length": 8, "vocab_size": VOCAB, "eos_token_ids": []}
    return SamplingArrays.stack([SamplingParams(**params)], [[0]], **options)


def reference(logits_BNV: jax.Array, depth_BN: jax.Array, length_B: jax.Array, arrays: SamplingArrays) -> jax.Array:
    position_BT = length_B[:, None] + 1 + jnp.arange(DEPTHS, dtype=jnp.int32)[None]
    return sampling.sample_reference(logits_BNV, depth_BN, position_BT, arrays)


CHECKED = (
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 1.0},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1e-6},
)


def check(num_batches: int, num_nodes: int = 16) -> dict[str, int]:
    """Draws that differ from `sampling.sample_reference` on the same device, and those that the kernels leave to it."""
    found = {"draws": 0, "differ": 0, "left": 0, "greedy": 0}
    kernels, expected = {True: jax.jit(drawn), False: jax.jit(perturbed)}, jax.jit(reference)
    for turn in range(num_batches):
        rng = np.random.default_rng(turn)
        logits = jnp.asarray(draw_logits(rng, num_nodes))
        depth_BN = jnp.asarray(rng.integers(0, DEPTHS, (1, num_nodes)), jnp.int32)
        found["greedy"] += int(jnp.sum(greedy(logits) != jnp.argmax(logits[0], axis=-1)))
        for params in CHECKED:
            rest = depth_BN, jnp.asarray([turn], jnp.int32), arrays_of(seed=turn, **params)
            ours, theirs = np.asarray(kernels[is_filtered(params)](logits, *rest)), np.asarray(expected(logits, *rest))
            found["draws"] += ours.size
            found["left"] += int((ours < 0).sum())
            found["differ"] += int(((ours >= 0) & (ours != theirs)).sum())
    return found


def measure(runs: int, cases: tuple = CASES) -> Iterator[dict[str, Any]]:
    """Result lines without provenance; ``seconds`` is the sum over all kernels, those that make the keys too."""
    for num_nodes, temperature, top_p, target in cases:
        moved = 4 * num_nodes * VOCAB
        rng = np.random.default_rng(0)
        one = jnp.asarray(draw_logits(rng, num_nodes))
        copies = [jnp.roll(one, i, axis=-1) for i in range(int(COLD_BYTES / moved) + 1)]
        depth_BN = jnp.asarray(rng.integers(0, DEPTHS, (1, num_nodes)), jnp.int32)
        if temperature:
            rest = depth_BN, jnp.zeros(1, jnp.int32), arrays_of(seed=1, temperature=temperature, top_p=top_p)
            call = jax.jit(drawn if top_p < 1 else perturbed)
            times = kernel_seconds(call, [(x, *rest) for x in copies], runs)
        else:
            times = kernel_seconds(jax.jit(greedy), [(x,) for x in copies], runs)
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
