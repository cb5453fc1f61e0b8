"""Accept and commit: against `tree.walk_reference`, `take_rows` and `append`, and kernel times. See `bench_kernels`."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import cache, tree
from ddtree_jax.pallas import commit
from experiments.kernel_times import kernel_seconds

BYTES_PER_SECOND = 4.57e12
DEPTH, WIDTH, SLOTS = 7, 576, 32_768
# Layers, nodes, and the microseconds to stay below.
CASES = ((61, 16, 25), (61, 64, None), (1, 16, None))


def draw_case(layers: int, num_nodes: int) -> tuple:
    """Caches, rows, a tree that is a chain and then siblings, tokens that accept the whole chain, and a length."""
    rng = np.random.default_rng(0)
    parent = np.minimum(np.arange(num_nodes) - 1, DEPTH - 1).clip(0).astype(np.int32)
    depth = np.minimum(np.arange(num_nodes), DEPTH).astype(np.int32)
    token = rng.permutation(1000)[:num_nodes].astype(np.int32)
    drawn = np.append(token[1:], 0).astype(np.int32)
    nodes = (*(jnp.asarray(x)[None] for x in (token, parent, depth)), jnp.asarray([num_nodes], jnp.int32))
    slots = [jnp.zeros((1, SLOTS, WIDTH), jnp.bfloat16) for _ in range(layers)]
    rows = [jnp.asarray(rng.standard_normal((1, num_nodes, WIDTH), np.float32), jnp.bfloat16) for _ in range(layers)]
    return slots, rows, nodes, jnp.asarray(drawn)[None], jnp.asarray([SLOTS // 2], jnp.int32)


def by_kernels(slots: list, rows: list, nodes: tuple, drawn_BN: jax.Array, length_B: jax.Array) -> tuple:
    path_BT, accepted_B = commit.accept_path(*nodes, drawn_BN, DEPTH)
    return commit.commit_rows(slots, rows, path_BT, length_B, accepted_B), path_BT, accepted_B


def by_xla(slots: list, rows: list, nodes: tuple, drawn_BN: jax.Array, length_B: jax.Array) -> tuple:
    token_BN, parent_BN, depth_BN, count_B = nodes
    visible_BNn = jnp.zeros((*token_BN.shape, token_BN.shape[1]), bool)
    built = tree.Tree(
        token_BN=token_BN, parent_BN=parent_BN, depth_BN=depth_BN, count_B=count_B, visible_BNn=visible_BNn
    )
    path_BT, accepted_B = tree.walk_reference(built, drawn_BN, DEPTH)
    return cache.append(slots, cache.take_rows(rows, path_BT), length_B, accepted_B), path_BT, accepted_B


def _timed(call: Any, case: tuple, runs: int) -> tuple[dict[str, float], tuple]:
    """Caches are handed over from call to call, as a loop does."""
    slots, *rest = case
    held = {"out": (slots, None, None)}
    compiled = jax.jit(call, donate_argnums=0).lower(slots, *rest).compile()

    def step() -> jax.Array:
        held["out"] = compiled(held["out"][0], *rest)
        return held["out"][2]

    return kernel_seconds(step, [()], runs), held["out"]


def cases_to_compile() -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """Name, function and shapes of its arguments."""
    for layers, num_nodes, _ in CASES:
        arguments = jax.eval_shape(functools.partial(draw_case, layers, num_nodes))
        yield f"{layers} layers, {num_nodes} nodes", by_kernels, arguments


def measure(runs: int, cases: tuple = CASES) -> Iterator[dict[str, Any]]:
    """Result lines without provenance; ``differs`` says whether anything differs from what XLA does."""
    for layers, num_nodes, target in cases:
        make = functools.partial(draw_case, layers, num_nodes)
        times, ours = _timed(by_kernels, make(), runs)
        reference_times, theirs = _timed(by_xla, make(), runs)
        differs = any(
            bool(jnp.any(a != b)) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
        )
        moved = 2 * layers * int(ours[2][0]) * WIDTH * 2
        line = {
            "benchmark": "commit",
            "case": {"layers": layers, "nodes": num_nodes, "accepted": int(ours[2][0]), "seed": 0},
            "seconds": sum(times.values()),
            "reference_seconds": sum(reference_times.values()),
            "ceiling_seconds": moved / BYTES_PER_SECOND,
            "ceiling": f"{moved / 1e6:.2f} MB at 4.57 TB/s",
            "fraction_of_ceiling": round(moved / BYTES_PER_SECOND / sum(times.values()), 3),
            "kernels": times,
            "differs": differs,
            "runs": runs,
        }
        yield line if target is None else line | {"target_seconds": target * 1e-6}
