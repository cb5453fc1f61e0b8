"""Sums of splits times a matrix a head: what a block's threads do, on numpy arrays, against the sum in plain JAX.

The product itself, and what blocks send each other, needs a GPU (see ``experiments/bench_layer.py``).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simt_numpy import NumpyThreads, memory_of, shared

from ddtree_jax.pallas.project_splits import (
    CLUSTER,
    OUTPUTS,
    SIDE,
    WIDTH,
    Config,
    Shape,
    add_slice,
    choose_shape,
    finish,
)
from ddtree_jax.pallas.simt import FLOAT, INT, UINT
from ddtree_jax.pallas.split_sum import sum_splits_reference
from ddtree_jax.pallas.tree_mla_split import tile_counts

NUM_THREADS, TILE, COPIES = 256, 64, 8


def draw(batch: int, nodes: int, heads: int, splits: int, lengths: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Splits, logarithms and lengths; NaN in splits without a tile and in rows that are none."""
    rng = np.random.default_rng(splits)
    rows = nodes * heads + -nodes * heads % 8
    part = rng.normal(size=(batch, rows, splits, WIDTH)).astype(jnp.bfloat16)
    lse = np.repeat(3 * rng.normal(size=(batch, rows, splits, 1)), COPIES, axis=3).astype(np.float32)
    length = np.asarray(lengths, np.int32)
    _, total, each = (np.asarray(x) for x in tile_counts(jnp.asarray(length), 1, splits, TILE))
    is_used = np.arange(splits)[None, None] * each[:, None, None] < total[:, None, None]
    is_read = is_used & (np.arange(rows) < nodes * heads)[None, :, None]
    part[~is_read], lse[~is_read] = np.nan, np.nan
    return part, lse, length


def shape_of(part: np.ndarray, lse: np.ndarray, nodes: int, heads: int, config: Config) -> Shape:
    blocks = jax.ShapeDtypeStruct((2 * heads, CLUSTER, SIDE, SIDE), jnp.bfloat16)
    return choose_shape(part, lse, blocks, nodes, heads, TILE, config)


@pytest.mark.parametrize(
    ("batch", "nodes", "heads", "splits", "lengths", "config"),
    [
        (1, 1, 3, 35, (900,), Config()),
        (1, 5, 2, 9, (0,), Config(in_flight=9)),
        (2, 3, 2, 20, (64 * 19, 65), Config(in_flight=2)),
        (1, 16, 8, 7, (200,), Config()),
        (1, 33, 1, 3, (5000,), Config(few_clusters=1)),
        (2, 8, 8, 20, (1, 64 * 19), Config(in_flight=2)),
    ],
)
def test_slices_of_all_blocks_are_the_sum(batch, nodes, heads, splits, lengths, config):
    part, lse, length = draw(batch, nodes, heads, splits, lengths)
    shape = shape_of(part, lse, nodes, heads, config)
    expected = sum_splits_reference(
        *map(jnp.asarray, (part, lse, length)), num_tiles=lambda length: tile_counts(length, 1, splits, TILE)[1]
    )
    expected = np.asarray(expected[:, : nodes * heads].astype(jnp.float32)).reshape(-1, heads, WIDTH)
    arrays = [memory_of(array) for array in (part, lse, length)]
    for i, first in enumerate(range(0, batch * nodes, shape.tokens)):
        head, rank = i % heads, -i % CLUSTER
        found = run_slice(shape, config, arrays, (first, head, rank))
        wanted = expected[first : first + shape.tokens, head, rank * SIDE : (rank + 1) * SIDE]
        np.testing.assert_allclose(found[: len(wanted)], wanted, rtol=2**-7, atol=1e-5)


def run_slice(shape: Shape, config: Config, arrays: list, numbers: tuple[int, ...]) -> np.ndarray:
    """Lines of shared memory, not swizzled any more [tokens, 64]."""
    t = NumpyThreads(NUM_THREADS)
    x = shared(shape.num_columns * SIDE // 2, UINT)
    scratch = shared(shape.num_sums, FLOAT), shared(NUM_THREADS // 32, FLOAT), shared(NUM_THREADS // 32, FLOAT)
    values = [t.value(INT, number) for number in numbers]
    add_slice(t, *values, *arrays, *scratch, x, shape=shape, config=config)
    lines = x.array.view(jnp.bfloat16).astype(np.float32).reshape(-1, SIDE // 8, 8)
    return np.stack([line[np.arange(SIDE // 8) ^ (i & 7)].reshape(SIDE) for i, line in enumerate(lines)])[
        : shape.tokens
    ]


@pytest.mark.parametrize(("batch", "nodes", "heads"), [(1, 16, 8), (1, 1, 2), (3, 13, 1)])
def test_what_blocks_send_is_added_up(batch, nodes, heads):
    part, lse, _ = draw(batch, nodes, heads, 2, (9,) * batch)
    shape = shape_of(part, lse, nodes, heads, Config(few_clusters=2))
    rng, num_tokens = np.random.default_rng(0), batch * nodes
    sums = rng.normal(size=(CLUSTER, num_tokens, heads, OUTPUTS)).astype(np.float32)
    out = shared(num_tokens * heads * OUTPUTS // 2, UINT)
    for head in range(heads):
        for first in range(0, num_tokens, shape.tokens):
            for rank in range(CLUSTER):
                received = np.full(
                    (CLUSTER, shape.num_columns, shape.num_received // CLUSTER // shape.num_columns), np.nan
                )
                here = sums[:, first : first + shape.tokens, head, rank * 16 : (rank + 1) * 16]
                received[:, : here.shape[1], :16] = here
                t = NumpyThreads(NUM_THREADS)
                numbers = [t.value(INT, number) for number in (first, head, rank)]
                finish(t, *numbers, memory_of(received.astype(np.float32)), out, shape=shape)
    expected = functools.reduce(np.add, sums).astype(jnp.bfloat16)
    found = out.array.view(jnp.bfloat16).reshape(num_tokens, heads, OUTPUTS)
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


def test_what_does_not_fit_is_refused():
    part, lse, _ = draw(1, 4, 2, 3, (9,))
    blocks = jax.ShapeDtypeStruct((4, CLUSTER, SIDE, SIDE), jnp.bfloat16)

    def refuse(match: str, part=part, nodes=4, heads=2, blocks=blocks) -> None:
        with pytest.raises(NotImplementedError, match=match):
            choose_shape(part, lse, blocks, nodes, heads, TILE)

    refuse("65 tokens", nodes=65)
    refuse("17 heads", heads=17)
    refuse("1 splits", part[:, :, :1])
    refuse("of 256 columns", part[..., :256])
    refuse("of float32; two", part.astype(np.float32))
    refuse(r"a weight of shape \(4, 8, 64, 64\)", heads=3)
    refuse("a weight of float32", blocks=blocks.update(dtype=jnp.float32))
