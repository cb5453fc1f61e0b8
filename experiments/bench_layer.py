"""Kernels between a layer's products: against plain JAX on the device, and their times beside XLA's. See `bench_kernels`.

Each time is taken twice: behind a kernel that reads and writes more than the second cache holds ("cold"), and behind the
same one on the same arrays ("warm"), which comes closer to a pass, where the kernel before has just written what is read.
Attention with the product of its heads' latents is compared with the kernels of one launch more, not with plain JAX.
"""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas import add_norm, attend_and_project, choose_experts, latent_rows
from experiments.bench_int4_moe import BYTES_PER_SECOND
from experiments.check_tree_mla import SCALE, draw_query, random_tree
from experiments.kernel_times import kernel_seconds, kernel_timeline

WIDTH, EXPERTS, CHOSEN, FACTOR = 7168, 384, 8, 2.827
QUERY, LATENT, ROTARY, TILE = 1536, 512, 64, 64
EPS, LATENT_EPS = 1e-5, 1e-6
HEADS, CONTEXT = 8, 1024
FLUSHED_BYTES = 160_000_000


class Case(NamedTuple):
    """A kernel and what it is compared with, functions of the same arrays."""

    name: str
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    arrays: Callable[[int, int], tuple]

    def num_bytes(self, nodes: int) -> int:
        """Read and written once."""
        arrays = jax.eval_shape(functools.partial(self.arrays, nodes, 0))
        outs = jax.eval_shape(self.reference, *arrays)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arrays, outs)))


def _normal(seed: int, index: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(jax.random.key(seed), index), shape, jnp.float32).astype(dtype)


def _rows(dtype: Any, nodes: int, seed: int) -> tuple:
    shape = (nodes, WIDTH)
    return _normal(seed, 0, shape), _normal(seed, 1, shape, dtype), 1 + 0.1 * _normal(seed, 2, (WIDTH,))


def _logits(nodes: int, seed: int) -> tuple:
    logits = _normal(seed, 0, (nodes, EXPERTS), jnp.float32)
    return logits, 0.1 * _normal(seed, 1, (EXPERTS,), jnp.float32), jnp.ones(nodes, bool)


def _projections(nodes: int, seed: int) -> tuple:
    angle = 1000 * _normal(seed, 4, (1, nodes, ROTARY // 2), jnp.float32)
    rows = _normal(seed, 0, (1, nodes, QUERY)), _normal(seed, 1, (1, nodes, LATENT + ROTARY))
    gains = 1 + 0.1 * _normal(seed, 2, (QUERY,)), 1 + 0.1 * _normal(seed, 3, (LATENT,))
    return (*rows, *gains, jnp.cos(angle), jnp.sin(angle))


def _attention(nodes: int, seed: int) -> tuple:
    width = LATENT + ROTARY
    cache, rows = _normal(seed, 0, (1, CONTEXT, width)), _normal(seed, 1, (1, nodes, width))
    query = draw_query(jax.random.key(seed), 1, nodes, HEADS)
    visible = jnp.asarray(random_tree(np.random.default_rng(seed), nodes))[None]
    tile = latent_rows.fill_tiles(rows, LATENT, TILE)
    blocks = _normal(seed, 2, (2 * HEADS, LATENT // TILE, TILE, TILE))
    return query, cache, rows, jnp.full(1, CONTEXT, jnp.int32), visible, tile, blocks


def _pair(name: str, module: Any) -> tuple[Callable, Callable]:
    return getattr(module, f"{name}_gpu"), getattr(module, f"{name}_reference")


_NORMS = [functools.partial(function, eps=EPS) for function in _pair("add_norm", add_norm)]
_CHOICES = [
    functools.partial(function, num_chosen=CHOSEN, factor=FACTOR)
    for function in _pair("choose_experts", choose_experts)
]
_LATENTS = [
    functools.partial(function, eps=LATENT_EPS, multiple=TILE) for function in _pair("latent_rows", latent_rows)
]
_ATTENTIONS = [
    functools.partial(getattr(attend_and_project, f"attend_and_project_{way}"), scale=SCALE) for way in ("gpu", "apart")
]
CASES = (
    Case("add_norm", *_NORMS, functools.partial(_rows, jnp.bfloat16)),
    Case("add_norm of float32", *_NORMS, functools.partial(_rows, jnp.float32)),
    Case("choose_experts", *_CHOICES, _logits),
    Case("latent_rows", *_LATENTS, _projections),
)
HOPPER_CASES = (Case("attend_and_project", *_ATTENTIONS, _attention),)


def cases_on(major: int) -> tuple[Case, ...]:
    """Those that a device of this compute capability takes."""
    return CASES + HOPPER_CASES if major == 9 else CASES


def _cases_here() -> tuple[Case, ...]:
    return cases_on(int(jax.devices()[0].compute_capability.split(".")[0]))


def cases_to_compile(major: int) -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """Name, function and shapes of its arguments, at 16 nodes."""
    for case in cases_on(major):
        yield case.name, case.kernel, jax.eval_shape(functools.partial(case.arrays, 16, 0))


def largest_errors(ours: Sequence[jax.Array], theirs: Sequence[jax.Array]) -> list[float]:
    """Of each output, relative to its largest value; of integers, how many differ."""
    errors = []
    for a, b in zip(ours, theirs, strict=True):
        if jnp.issubdtype(a.dtype, jnp.integer):
            errors.append(float(jnp.sum(a != b)))
        else:
            a, b = (np.asarray(x, np.float64) for x in (a, b))
            errors.append(float(np.abs(a - b).max() / np.abs(b).max()))
    return errors


def check(num_seeds: int, nodes: int = 16) -> dict[str, Any]:
    """Largest errors of each kernel against plain JAX on the same device, over so many draws."""
    found = {}
    for case in _cases_here():
        kernel, reference = jax.jit(case.kernel), jax.jit(case.reference)
        arrays = [case.arrays(nodes, seed) for seed in range(num_seeds)]
        errors = [largest_errors(*map(jax.tree.leaves, (kernel(*one), reference(*one)))) for one in arrays]
        found[case.name] = np.max(errors, axis=0).tolist()
    return found


def cold_seconds(call: Callable[..., Any], arrays: tuple, runs: int) -> float:
    """Sum of the medians of a call's kernels, each call behind one that takes the whole second cache."""
    filler = jnp.zeros(FLUSHED_BYTES // 4, jnp.float32)
    # Its kernel is named by what it does: nothing else here rounds up.
    flush = jax.jit(jnp.ceil)
    jax.block_until_ready((call(*arrays), flush(filler)))
    others = {name for name, _ in kernel_timeline([lambda: flush(filler)])}
    by_name: dict[str, list[float]] = {}
    for name, seconds in kernel_timeline([lambda: flush(filler), lambda: call(*arrays)] * runs):
        if name not in others:
            by_name.setdefault(name, []).append(seconds)
    return sum(statistics.median(times) * len(times) / runs for times in by_name.values())


def measure(nodes: Sequence[int], runs: int) -> Iterator[dict[str, Any]]:
    """Result lines without provenance; ``errors`` are those of `largest_errors`."""
    for case in _cases_here():
        for number in nodes:
            arrays = case.arrays(number, number)
            kernel, reference = (jax.jit(f).lower(*arrays).compile() for f in (case.kernel, case.reference))
            seconds, reference_seconds = (cold_seconds(call, arrays, runs) for call in (kernel, reference))
            warm, reference_warm = (kernel_seconds(call, [arrays], runs) for call in (kernel, reference))
            moved = case.num_bytes(number)
            yield {
                "benchmark": "layer",
                "case": {"kernel": case.name, "nodes": number, "seed": number},
                "seconds": seconds,
                "reference_seconds": reference_seconds,
                "warm_seconds": sum(warm.values()),
                "reference_warm_seconds": sum(reference_warm.values()),
                "reference_kernels": reference_warm,
                "ceiling_seconds": moved / BYTES_PER_SECOND,
                "ceiling": f"{moved / 1e6:.2f} MB at 4.57 TB/s",
                "fraction_of_ceiling": round(moved / BYTES_PER_SECOND / seconds, 3),
                "errors": largest_errors(*map(jax.tree.leaves, (kernel(*arrays), reference(*arrays)))),
                "runs": runs,
            }
