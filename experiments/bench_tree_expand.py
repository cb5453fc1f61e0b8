"""Draft logits to a finished tree: random cases against the reference and the heap, and kernel times. See `bench_kernels`."""

import functools
import heapq
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import tree
from ddtree_jax.pallas.tree_expand import Candidates, Config, Expansion, expand_tree, top_candidates
from experiments.kernel_times import kernel_seconds

BYTES_PER_SECOND = 4.57e12
COLD_BYTES = 160e6  # More than twice the L2 lies between two uses of logits.
DEPTH, SHARDS = 7, 8
# Columns on this device, of which a vocabulary may have several, budget, and the microseconds to stay below.
CASES = (
    (163_840, 15, 20),
    (163_840, 31, 25),
    (163_840, 63, 35),
    (20_480, 15, 12),
    (20_480, 31, 16),
    (20_480, 63, 24),
)
VOCAB = 163_840
LARGEST_COMPARED = (
    129  # Nodes; larger trees are compared with the heap alone, since the reference takes minutes to compile.
)
CHECKED_LOGITS = 20_000_000  # Of a shape, sorted on the host.


class Shape(NamedTuple):
    depth: int
    vocab: int
    num_candidates: int
    budget: int
    num_nodes: int


# Candidates below, at and above the budget; budgets beyond what depth and vocabulary allow; a vocabulary of one token.
SHAPES = (
    Shape(7, 2048, 15, 15, 16),
    Shape(7, 30_011, 63, 63, 64),
    Shape(7, 12_000, 31, 20, 32),
    Shape(16, 999, 10, 40, 64),
    Shape(5, 2, 2, 100, 129),
    Shape(3, 1, 1, 7, 8),
    Shape(1, 50, 31, 31, 32),
    Shape(4, 30, 30, 17, 18),
    Shape(16, 3000, 256, 256, 257),
)


def draw_logits(rng: np.random.Generator, batch: int, depth: int, vocab: int) -> np.ndarray:
    """A quarter each: normal; rounded, so that many are equal; with columns and whole rows at -inf; all equal in a row."""
    x = (rng.standard_normal((batch, depth, vocab)) * 4).astype(np.float32)
    kind = np.arange(batch) % 4
    x[kind == 1] = np.round(x[kind == 1])
    impossible = rng.random((batch, depth, vocab)) < 0.7
    impossible |= (rng.random((batch, depth)) < 0.2)[..., None]
    x[(kind == 2)[:, None, None] & impossible] = -np.inf
    x[kind == 3] = np.round(x[kind == 3][..., :1])
    return x


def heap_tree(logp_LK: np.ndarray, budget: int) -> tuple[list[int], list[int], list[int]]:
    """Depths, parents and ranks by best-first search with a heap, in float64."""
    heap, parents, depths, ranks = [(-float(logp_LK[0, 0]), (0,), 0)], [0], [0], [0]
    while heap and len(parents) <= budget:
        cost, path, parent = heapq.heappop(heap)
        parents.append(parent)
        depths.append(len(path))
        ranks.append(path[-1])
        depth, rank = len(path), path[-1]
        if rank + 1 < logp_LK.shape[1]:
            step = float(logp_LK[depth - 1, rank]) - float(logp_LK[depth - 1, rank + 1])
            heapq.heappush(heap, (cost + step, (*path[:-1], rank + 1), parent))
        if depth < logp_LK.shape[0]:
            heapq.heappush(heap, (cost - float(logp_LK[depth, 0]), (*path, 0), len(parents) - 1))
    return depths, parents, ranks


def check(num_cases: int, seed: int = 0, shapes: tuple[Shape, ...] = SHAPES) -> dict[str, Any]:
    """Compares random cases; returns how many of them differ, and the largest error of a log-sum-exp.

    Candidates are compared with a stable sort, trees with `tree.expand_reference` on the CPU and, where all are finite, with
    the heap, all on the log-probabilities that the kernels use.
    """
    found = {"cases": 0, "heap_cases": 0, "candidates": 0, "trees": 0, "heap_trees": 0, "lse_error": 0.0}
    rng = np.random.default_rng(seed)
    sizes = [
        min(CHECKED_LOGITS // (shape.depth * shape.vocab), 100 if shape.num_nodes > 200 else num_cases)
        for shape in shapes
    ]
    while found["cases"] < num_cases:
        for shape, size in zip(shapes, sizes, strict=True):
            part = min(size, num_cases - found["cases"], num_cases // len(shapes) + 1)
            if part < 1:
                continue
            for name, value in _check_shape(shape, draw_logits(rng, part, shape.depth, shape.vocab)).items():
                found[name] = max(found[name], value) if name == "lse_error" else found[name] + value
    return found


def _check_shape(shape: Shape, logits_BLV: np.ndarray) -> dict[str, Any]:
    batch = len(logits_BLV)
    candidates = _candidates(shape)(jnp.asarray(logits_BLV), first_id=jnp.int32(0))
    order_BLK = np.argsort(-logits_BLV, axis=-1, kind="stable")[..., : shape.num_candidates].astype(np.int32)
    logit_BLK = np.take_along_axis(logits_BLV, order_BLK, axis=-1)
    # The sum over the pieces in one place, so that the kernel's own rounding of it is known.
    exact_BL, of_pieces_BL = (sum_exp(np.asarray(x, np.float64)) for x in (logits_BLV, candidates.lse_BLC))
    is_finite_BL = np.isfinite(exact_BL)
    error = np.abs(of_pieces_BL[is_finite_BL] - exact_BL[is_finite_BL]) / np.maximum(1, np.abs(exact_BL[is_finite_BL]))
    lse_BL = exact_BL.astype(np.float32)
    lse_BLC = np.full(candidates.lse_BLC.shape, -np.inf, np.float32)
    lse_BLC[..., 0] = lse_BL
    zeros_B = jnp.zeros(batch, jnp.int32)
    trees = _trees(shape)(zeros_B, zeros_B, candidates._replace(lse_BLC=jnp.asarray(lse_BLC)), jnp.int32(shape.budget))
    with np.errstate(invalid="ignore"):
        logp_BLK = np.nan_to_num(logit_BLK - lse_BL[..., None], nan=-np.inf, neginf=-np.inf)
    wrong_B = np.zeros(batch, bool)
    if shape.num_nodes <= LARGEST_COMPARED:
        expected = _expected(shape, order_BLK, logp_BLK)
        fields = ("token_BN", "parent_BN", "depth_BN", "count_B", "visible_BNn")
        got = dict(zip(fields, (*trees[:3], trees.count_B, unpack(trees.visible_BNw)), strict=True))
        for field in fields:
            differs = np.asarray(got[field]) != np.asarray(getattr(expected, field))
            wrong_B |= differs.reshape(batch, -1).any(-1)
    heap_wrong, heap_cases = 0, 0
    for b in np.flatnonzero(np.isfinite(logits_BLV).all((1, 2))):
        depths, parents, ranks = heap_tree(logp_BLK[b], shape.budget)
        tokens = [int(order_BLK[b, depth - 1, rank]) for depth, rank in zip(depths[1:], ranks[1:], strict=True)]
        count = int(trees.count_B[b])
        got = [np.asarray(x[b, :count]).tolist() for x in trees[:3]]
        heap_wrong += got != [[0, *tokens], parents, depths]
        heap_cases += 1
    return {
        "cases": batch,
        "heap_cases": heap_cases,
        "candidates": int(_differ(candidates, order_BLK, logit_BLK).sum()),
        "trees": int(wrong_B.sum()),
        "heap_trees": heap_wrong,
        "lse_error": float(error.max(initial=0.0)),
    }


def sum_exp(x_BLV: np.ndarray) -> np.ndarray:
    """Log-sum-exp in float64."""
    peak_BL1 = np.maximum(x_BLV.max(-1, keepdims=True), -1e30)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(x_BLV - peak_BL1).sum(-1)) + peak_BL1[..., 0]


def _differ(candidates: Candidates, order_BLK: np.ndarray, logit_BLK: np.ndarray) -> np.ndarray:
    """Of each case, whether the pieces' candidates, merged, are not the best ones in their order."""
    shape = (*order_BLK.shape[:2], -1)
    logit, token = (np.asarray(x).reshape(shape) for x in candidates[:2])
    rank = np.lexsort((token, -logit, token < 0))[..., : order_BLK.shape[-1]]
    token, logit = np.take_along_axis(token, rank, -1), np.take_along_axis(logit, rank, -1)
    return ((token != order_BLK) | (logit != logit_BLK)).any((1, 2))


def unpack(visible_BNw: jax.Array) -> np.ndarray:
    num_nodes = visible_BNw.shape[1]
    bits = np.asarray(visible_BNw).view(np.uint32)[..., np.arange(num_nodes) // 32] >> np.arange(num_nodes) % 32
    return (bits & 1) != 0


@functools.cache
def _candidates(shape: Shape) -> Any:
    return jax.jit(functools.partial(top_candidates, num_candidates=shape.num_candidates))


@functools.cache
def _trees(shape: Shape) -> Any:
    return jax.jit(functools.partial(expand_tree, num_nodes=shape.num_nodes))


@functools.cache
def _reference(shape: Shape) -> Any:
    return jax.jit(functools.partial(tree.expand_reference, num_nodes=shape.num_nodes))


def _expected(shape: Shape, token_BLK: np.ndarray, logp_BLK: np.ndarray) -> tree.Tree:
    with jax.default_device(jax.devices("cpu")[0]):
        root_B = jnp.zeros(len(token_BLK), jnp.int32)
        return _reference(shape)(root_B, jnp.asarray(token_BLK), jnp.asarray(logp_BLK), jnp.int32(shape.budget))


def from_logits(
    logits_BLV: jax.Array, others: Candidates | None, budget: jax.Array, num_nodes: int, config: Config
) -> tuple[Expansion, Candidates]:
    """The tree of whole rows, or of a shard's rows and the candidates that a gather has brought from the other shards."""
    zeros_B = jnp.zeros(len(logits_BLV), jnp.int32)
    own = top_candidates(logits_BLV, num_nodes - 1, jnp.int32(0), config)
    return expand_tree(zeros_B, zeros_B, own if others is None else others, budget, num_nodes, config), own


def cases_to_compile() -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """Name, function and shapes of its arguments."""
    budget = jax.ShapeDtypeStruct((), jnp.int32)
    for nodes in (16, 64, 256):
        call = functools.partial(from_logits, num_nodes=nodes, config=Config())
        yield f"budget {nodes - 1}", call, (jax.ShapeDtypeStruct((1, DEPTH, VOCAB), jnp.float32), None, budget)


def measure(runs: int, config: Config = Config(), cases: tuple = CASES) -> Iterator[dict[str, Any]]:
    """Result lines without provenance; ``seconds`` is the sum of both kernels."""
    for columns, budget, target in cases:
        num_copies = int(COLD_BYTES / (4 * DEPTH * columns)) + 1
        logits = [jax.random.normal(jax.random.key(i), (1, DEPTH, columns)) * 4 for i in range(num_copies)]
        others = None
        if columns < VOCAB:
            shards = [top_candidates(x, budget, jnp.int32(i * columns), config) for i, x in enumerate(logits[:SHARDS])]
            others = Candidates(*(jnp.concatenate(parts, axis=2) for parts in zip(*shards, strict=True)))
        call = jax.jit(functools.partial(from_logits, num_nodes=budget + 1, config=config))
        times = kernel_seconds(call, [(x, others, jnp.int32(budget)) for x in logits], runs)
        kernels = {name: value for name, value in times.items() if name.startswith("tree_expand")}
        seconds, moved = sum(kernels.values()), 4 * DEPTH * columns
        yield {
            "benchmark": "tree_expand",
            "case": {"vocab": VOCAB, "columns": columns, "budget": budget, "depth": DEPTH, "seed": 0},
            "seconds": seconds,
            "ceiling_seconds": moved / BYTES_PER_SECOND,
            "ceiling": f"{moved / 1e6:.1f} MB at 4.57 TB/s",
            "fraction_of_ceiling": round(moved / BYTES_PER_SECOND / seconds, 3),
            "target_seconds": target * 1e-6,
            "kernels": kernels,
            "runs": runs,
        }
