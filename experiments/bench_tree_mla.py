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
from ddtree_jax.pallas.tree_mla_split import Query
from experiments.check_tree_mla import FORMS, LATENT, SCALE, WIDTH, draw_query, random_tree
from experiments.kernel_times import kernel_seconds

BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.57e12, 790e12
# More than twice the L2 lies between two uses of a cache.
COLD_BYTES = 160e6

LONG = 139_264
"""Slots of a cache that is far longer than what is committed of it."""
_SEED = 0

# Heads, nodes, context, slots, batch, and the microseconds that the kernel is meant to stay below.
CASES = (
    (8, 1, 1024, 1024, 1, 8),
    (8, 1, 4096, 4096, 1, 10),
    (8, 1, 32768, 32768, 1, 24),
    (8, 16, 1024, 1024, 1, 9),
    (8, 16, 4096, 4096, 1, 12),
    (8, 16, 32768, 32768, 1, 26),
    (8, 16, 131072, 131072, 1, 85),
    (8, 64, 1024, 1024, 1, 12),
    (8, 64, 4096, 4096, 1, 18),
    (8, 64, 32768, 32768, 1, 55),
    (64, 16, 1024, 1024, 1, 16),
    (64, 16, 4096, 4096, 1, 26),
    (64, 16, 32768, 32768, 1, 100),
    (8, 16, 4096, 4096, 8, 60),
    (8, 16, 1024, LONG, 1, 9),
    (8, 16, 8192, LONG, 1, None),
    (8, 16, 32768, LONG, 1, 26),
)


def shapes(heads: int, nodes: int, slots: int, batch: int) -> tuple[Any, ...]:
    """Of the kernel's arguments."""
    query = jax.eval_shape(lambda: draw_query(jax.random.key(_SEED), batch, nodes, heads))
    arrays = [jax.ShapeDtypeStruct((batch, size, WIDTH), jnp.bfloat16) for size in (slots, nodes)]
    visible_BTt = jax.ShapeDtypeStruct((batch, nodes, nodes), bool)
    return query, *arrays, jax.ShapeDtypeStruct((batch,), jnp.int32), visible_BTt


def cases_to_compile() -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """A name, `tree_mla_gpu`, which takes the form that the default device wants, and shapes of its arguments."""
    for case in ((8, 1, 1024, 1), (8, 16, 4096, 8), (64, 64, 131072, 1), (8, 2048, 4096, 1)):
        name = "{} heads, {} nodes, {} slots, batch {}".format(*case)
        yield name, functools.partial(tree_mla_gpu, scale=SCALE), shapes(*case)


def compile_cases(form: str, cases: tuple) -> list[Callable[..., Any]]:
    """One program a case; they are compiled side by side."""
    kernel = jax.jit(functools.partial(FORMS[form], scale=SCALE))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = [pool.submit(kernel.lower(*shapes(*case[:2], *case[3:5])).compile) for case in cases]
        return [program.result() for program in programs]


def float64(query: Query, cache: Any, rows: Any, length: Any, visible: Any) -> np.ndarray:
    """The first sequence's output."""
    query, rows = (np.asarray(x[0], np.float64) for x in (query.join(), rows))
    keys = np.concatenate([np.asarray(cache[0, : int(length[0])], np.float64), rows])
    score = np.einsum("nhw,sw->nhs", query, keys, optimize=True) * SCALE
    committed = np.ones((rows.shape[0], keys.shape[0] - rows.shape[0]), bool)
    seen = np.concatenate([committed, np.asarray(visible[0])], axis=1)
    score = np.where(seen[:, None], score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    return np.einsum("nhs,sc->nhc", weight, keys[:, :LATENT], optimize=True)


def _behind_sweep(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A call that finds the little that is committed of a long cache cold, but its query not."""
    buffer, sweep = jnp.zeros(int(COLD_BYTES) // 4), jax.jit(lambda x: x + 1)
    copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))

    def call(query: Query, *rest: Any) -> Any:
        sweep(buffer)
        return kernel(copy(query), *rest)

    return call


def run(form: str = "hopper", cases: tuple = CASES, runs: int = 30, seed: int = _SEED) -> Iterator[dict[str, Any]]:
    """Result lines, one a case, without provenance. ``seconds`` is the sum over the kernels of `FORMS`."""
    programs = compile_cases(form, cases)
    for kernel, (heads, nodes, context, slots, batch, target) in zip(programs, cases, strict=True):
        rng = np.random.default_rng(seed)
        draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        num_caches = max(2, math.ceil(COLD_BYTES / (batch * slots * WIDTH * 2)))
        caches = [draw(jax.random.key(i), (batch, slots, WIDTH)) for i in range(num_caches)]
        query = draw_query(jax.random.key(num_caches), batch, nodes, heads)
        rows = draw(jax.random.key(num_caches + 1), (batch, nodes, WIDTH))
        visible = jnp.asarray(np.stack([random_tree(rng, nodes) for _ in range(batch)]))
        length = jnp.full(batch, context, jnp.int32)
        inputs = [(query, cache, rows, length, visible) for cache in caches]
        times = kernel_seconds(kernel if slots == context else _behind_sweep(kernel), inputs, runs)
        seconds = sum(value for name, value in times.items() if name.startswith("tree_mla"))
        out, expected = np.asarray(kernel(*inputs[0])[0], np.float64), float64(*inputs[0])
        num_rows = batch * (context + nodes)
        moved = 2 * (num_rows * WIDTH + batch * nodes * heads * (WIDTH + LATENT))
        flops = 2 * num_rows * nodes * heads * (WIDTH + LATENT)
        ceiling = max(moved / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)
        line = {
            "benchmark": "tree_mla",
            "case": {"heads": heads, "nodes": nodes, "context": context, "slots": slots, "batch": batch}
            | {"form": form, "seed": seed},
            "seconds": seconds,
            "ceiling_seconds": ceiling,
            "ceiling": f"{moved / 1e6:.1f} MB at 4.57 TB/s, {flops / 1e9:.1f} GFLOP at 790 TFLOP/s",
            "fraction_of_ceiling": round(ceiling / seconds, 3),
            "kernels": {name: value for name, value in times.items() if name.startswith("tree_mla")},
            "runs": runs,
            "error": float(np.linalg.norm(out - expected) / np.linalg.norm(expected)),
        }
        yield line if target is None else line | {"target_seconds": target * 1e-6}
