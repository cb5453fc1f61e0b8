"""Times tree MLA against its ceiling, with caches that are cold in L2 and random trees. See `bench_kernels`."""

import concurrent.futures
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.tree_mla import tree_mla_gpu
from experiments.check_tree_mla import FORMS, LATENT, SCALE, WIDTH, random_tree
from experiments.kernel_times import kernel_seconds

BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.57e12, 790e12
# More than twice the L2 lies between two uses of a cache.
COLD_BYTES = 160e6

# Heads, nodes, context, batch, and the microseconds that the kernel is meant to stay below.
CASES = (
    (8, 1, 1024, 1, 8),
    (8, 1, 4096, 1, 10),
    (8, 1, 32768, 1, 24),
    (8, 16, 1024, 1, 9),
    (8, 16, 4096, 1, 12),
    (8, 16, 32768, 1, 26),
    (8, 16, 131072, 1, 85),
    (8, 64, 1024, 1, 12),
    (8, 64, 4096, 1, 18),
    (8, 64, 32768, 1, 55),
    (64, 16, 1024, 1, 16),
    (64, 16, 4096, 1, 26),
    (64, 16, 32768, 1, 100),
    (8, 16, 4096, 8, 60),
)


def shapes(heads: int, nodes: int, context: int, batch: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of the kernel's arguments."""
    sizes = ((batch, nodes, heads, WIDTH), (batch, context, WIDTH), (batch, nodes, WIDTH))
    arrays = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
    visible_BTt = jax.ShapeDtypeStruct((batch, nodes, nodes), bool)
    return *arrays, jax.ShapeDtypeStruct((batch,), jnp.int32), visible_BTt


def cases_to_compile() -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """A name, `tree_mla_gpu`, which takes the form that the default device wants, and shapes of its arguments."""
    for case in ((8, 1, 1024, 1), (8, 16, 4096, 8), (64, 64, 131072, 1), (8, 2048, 4096, 1)):
        name = "{} heads, {} nodes, {} slots, batch {}".format(*case)
        yield name, functools.partial(tree_mla_gpu, num_latent=LATENT, scale=SCALE), shapes(*case)


def compile_cases(form: str, cases: tuple) -> list[Callable[..., Any]]:
    """One program a case; they are compiled side by side."""
    kernel = jax.jit(functools.partial(FORMS[form], num_latent=LATENT, scale=SCALE))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = [pool.submit(kernel.lower(*shapes(*case[:4])).compile) for case in cases]
        return [program.result() for program in programs]


def float64(query: Any, cache: Any, rows: Any, length: Any, visible: Any) -> np.ndarray:
    """The first sequence's output."""
    query, rows = (np.asarray(x[0], np.float64) for x in (query, rows))
    keys = np.concatenate([np.asarray(cache[0, : int(length[0])], np.float64), rows])
    score = np.einsum("nhw,sw->nhs", query, keys, optimize=True) * SCALE
    committed = np.ones((rows.shape[0], keys.shape[0] - rows.shape[0]), bool)
    seen = np.concatenate([committed, np.asarray(visible[0])], axis=1)
    score = np.where(seen[:, None], score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    return np.einsum("nhs,sc->nhc", weight, keys[:, :LATENT], optimize=True)


def run(form: str = "hopper", cases: tuple = CASES, runs: int = 30, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Result lines, one a case, without provenance. ``seconds`` is the sum over the kernels of `FORMS`."""
    programs = compile_cases(form, cases)
    for kernel, (heads, nodes, context, batch, target) in zip(programs, cases, strict=True):
        rng = np.random.default_rng(seed)
        draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        num_caches = max(2, math.ceil(COLD_BYTES / (batch * context * WIDTH * 2)))
        caches = [draw(jax.random.key(i), (batch, context, WIDTH)) for i in range(num_caches)]
        query = draw(jax.random.key(num_caches), (batch, nodes, heads, WIDTH))
        rows = draw(jax.random.key(num_caches + 1), (batch, nodes, WIDTH))
        visible = jnp.asarray(np.stack([random_tree(rng, nodes) for _ in range(batch)]))
        length = jnp.full(batch, context, jnp.int32)
        inputs = [(query, cache, rows, length, visible) for cache in caches]
        times = kernel_seconds(kernel, inputs, runs)
        seconds = sum(value for name, value in times.items() if name.startswith("tree_mla"))
        out, expected = np.asarray(kernel(*inputs[0])[0], np.float64), float64(*inputs[0])
        slots = batch * (context + nodes)
        moved = 2 * (slots * WIDTH + batch * nodes * heads * (WIDTH + LATENT))
        flops = 2 * slots * nodes * heads * (WIDTH + LATENT)
        ceiling = max(moved / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)
        yield {
            "benchmark": "tree_mla",
            "case": {"heads": heads, "nodes": nodes, "context": context, "batch": batch, "form": form, "seed": seed},
            "seconds": seconds,
            "ceiling_seconds": ceiling,
            "ceiling": f"{moved / 1e6:.1f} MB at 4.57 TB/s, {flops / 1e9:.1f} GFLOP at 790 TFLOP/s",
            "fraction_of_ceiling": round(ceiling / seconds, 3),
            "target_seconds": target * 1e-6,
            "kernels": {name: value for name, value in times.items() if name.startswith("tree_mla")},
            "runs": runs,
            "error": float(np.linalg.norm(out - expected) / np.linalg.norm(expected)),
        }
