"""Norms, the query's products and the cache's rows in one launch: its threads' code on numpy, when it is one, refusals.

Its threads and those of the launches that it stands for must give the same bits here; that the launch does is checked on a
GPU (`experiments.bench_skinny_gemm`).
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simt_numpy import Memory, NumpyThreads, launch, memory_of, shared

from ddtree_jax.pallas import latent_query, latent_rows, simt
from ddtree_jax.pallas.bfloat16_rows import add_warp_sums
from ddtree_jax.pallas.latent_query import choose_latent_shape, latent_query_reference
from ddtree_jax.pallas.latent_query_threads import Shape, add_pairs, add_query, make_rows, norm_tokens
from ddtree_jax.pallas.latent_rows import Parts
from ddtree_jax.pallas.simt import UINT
from ddtree_jax.pallas.skinny_gemm import Config, Output

EPS = 1e-5
HEADS, QUERY, LATENT, ROTARY, MULTIPLE = 8, 1536, 512, 64, 64
OUTPUTS = tuple(Output(width=HEADS * width) for width in (128, 64, LATENT))
BLOCKS = (3 * HEADS, QUERY // 64), (HEADS * LATENT // 64, 2)


def like(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def parts(num_tokens: int, **changes: int) -> Parts:
    num_rows = num_tokens + -num_tokens % MULTIPLE
    widths = {"query": QUERY, "latent": LATENT, "rotary": ROTARY}
    return Parts(num_tokens=num_tokens, num_rows=num_rows, eps=EPS, **widths | changes)


def shape_of(batch: int, num_tokens: int, **config: Any) -> Shape:
    blocks = (like(*counts, 64, 64) for counts in BLOCKS)
    config = latent_query.Config(**config)
    return choose_latent_shape(parts(num_tokens), batch, *blocks, OUTPUTS, HEADS, config)


def draw(batch: int, num_tokens: int) -> list[np.ndarray]:
    """First projections, gains, cosines and sines."""
    rng = np.random.default_rng(num_tokens)

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32).astype(dtype)

    rows = normal(batch, num_tokens, QUERY), normal(batch, num_tokens, LATENT + ROTARY)
    turn = (normal(batch, num_tokens, ROTARY // 2, dtype=np.float32) for _ in range(2))
    return [*rows, normal(QUERY), normal(LATENT), *turn]


def made_apart(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """What the threads of `latent_rows` give: query, rows, tile."""
    batch, num_tokens = arrays[0].shape[:2]
    shape = parts(num_tokens)
    num_warps = shape.num_threads // 32

    def block(t: Any, *args: Any) -> None:
        latent_rows.make_rows(t, *args, shared(num_warps, np.float32), shared(num_warps, UINT), shape=shape)

    sizes = (num_tokens, QUERY), (num_tokens, LATENT + ROTARY), (shape.num_rows, LATENT + ROTARY)
    outs = [((batch, *size), jnp.bfloat16) for size in sizes]
    return launch(block, shape.num_threads, (shape.num_rows, batch), arrays, outs)


def read_tokens(memory: Memory, shape: Shape) -> np.ndarray:
    """[tokens, columns] of what lies in lines of 128 bytes, their eight units moved by the line's number."""
    lines = memory.array.view(jnp.bfloat16).reshape(-1, shape.q_b.num_tokens, 8, 8)
    token, unit = np.ogrid[: shape.q_b.num_tokens, :8]
    return np.concatenate([block[token, unit ^ (token % 8)].reshape(len(block), 64) for block in lines], axis=1)


def bits(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).view(np.uint16)


@pytest.mark.parametrize(
    ("batch", "tokens", "config"), [(1, 5, {}), (2, 9, {"num_warpgroups": 3}), (1, 23, {"rows_in_flight": 1})]
)
def test_a_block_norms_its_columns(batch, tokens, config):
    arrays, shape = draw(batch, tokens), shape_of(batch, tokens, **config)
    arrays[0][0, 2] = np.nan
    query, gain = memory_of(arrays[0]), memory_of(arrays[2])
    found = []
    for part in range(shape.q_b.cluster):
        memory = shared(shape.num_columns * shape.q_b.num_tokens * 32, UINT)
        threads = NumpyThreads(shape.num_warpgroups * 128)
        norm_tokens(threads, threads.value(np.int32, part), query, gain, memory, shape=shape)
        found.append(read_tokens(memory, shape))
    found = np.concatenate(found, axis=1)
    expected = made_apart(arrays)[0].reshape(-1, QUERY)
    assert np.isnan(expected[2].astype(np.float32)).all() and np.isfinite(expected[3:].astype(np.float32)).all()
    np.testing.assert_array_equal(bits(found[: batch * tokens]), bits(expected))


@pytest.mark.parametrize("count", range(1, 9))
def test_sums_of_groups_are_added_as_those_of_warps(count):
    rng = np.random.default_rng(count)
    for _ in range(20):
        sums = rng.uniform(size=count).astype(np.float32)
        threads = NumpyThreads(32)
        expected = add_warp_sums(threads, Memory(sums), threads.value(np.int32, 0), threads.value(np.int32, count))
        assert add_pairs(list(sums)) == expected[0]


@pytest.mark.parametrize(("batch", "tokens"), [(1, 17), (5, 3)])
def test_blocks_share_out_the_rows(batch, tokens):
    """More of them than warps, too; a row that is not finite is filled in the tile."""
    arrays, shape = draw(batch, tokens), shape_of(batch, tokens)
    arrays[1][0, 0, 3], arrays[1][-1, 1, LATENT + ROTARY - 1] = np.inf, np.nan
    total = batch * shape.rows.num_rows
    assert (total > shape.num_row_blocks * 12) == (batch == 5)

    def block(t: Any, *args: Any) -> None:
        make_rows(_Behind(t), *args, shape=shape)

    sizes = (tokens, LATENT + ROTARY), (shape.rows.num_rows, LATENT + ROTARY)
    outs = [((batch, *size), jnp.bfloat16) for size in sizes]
    inputs = [arrays[i] for i in (1, 3, 4, 5)]
    with np.errstate(invalid="ignore"):
        found = launch(block, (shape.num_warpgroups - 1) * 128, (shape.num_row_blocks,), inputs, outs)
        expected = made_apart(arrays)[1:]
    for ours, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(bits(ours), bits(other))


class _Behind:
    """Threads of all warpgroups but the first."""

    def __init__(self, threads: NumpyThreads) -> None:
        self._threads = threads

    def thread(self) -> np.ndarray:
        return self._threads.thread() + np.int32(128)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._threads, name)


@pytest.mark.parametrize("tokens", [3, 23])
def test_a_head_adds_up_both_tiles(tokens):
    """In order, and rounded once."""
    shape = shape_of(1, tokens)
    q_b = shape.q_b
    sums = np.random.default_rng(tokens).normal(size=(shape.cluster, q_b.num_tokens, q_b.sums_stride))
    # Of another order the sum would be another one.
    sums[::3], sums[1::3] = sums[::3] + 1e7, sums[1::3] - 1e7
    sums = sums.astype(np.float32)
    sums[4, 1, 7] = np.nan
    flat = sums.reshape(shape.cluster, -1)

    def load(rank: np.ndarray, index: np.ndarray) -> list[np.ndarray]:
        return [flat[rank, index + i] for i in range(4)]

    threads, memory = NumpyThreads(shape.num_warpgroups * 128), shared(2 * q_b.num_tokens * 32, UINT)
    add_query(threads, load, threads.barrier, memory, shape=shape)
    first, *others = np.moveaxis(sums[..., :64].reshape(2, q_b.cluster, q_b.num_tokens, 64), 1, 0)
    expected = np.concatenate(functools.reduce(np.add, others, first), axis=1).astype(jnp.bfloat16)
    np.testing.assert_array_equal(read_tokens(memory, shape), expected)


def test_clusters_of_a_rank_of_k26():
    shape = shape_of(1, 16)
    assert (shape.num_clusters, shape.cluster, shape.num_columns, shape.num_row_blocks) == (12, 6, 8, 24)
    assert (shape.num_heads, shape.num_up_tiles, shape.turned.outputs) == (HEADS, 2, OUTPUTS[1:2])
    assert shape_of(1, 24).shared_bytes == 142_464 < Config().shared_bytes


SMALL = {"outputs": OUTPUTS, "num_heads": HEADS, "eps": EPS, "multiple": MULTIPLE}


@pytest.mark.parametrize(
    ("shape", "has_kernels", "kernels"),
    [
        ((2, 3), True, ["latent_query"]),
        ((2, 3), False, ["skinny_gemm", "skinny_gemm"]),
        ((1, 25), True, ["latent_rows", "skinny_gemm", "skinny_gemm"]),
    ],
)
def test_few_tokens_are_one_launch(monkeypatch, shape, has_kernels, kernels):
    """More are the three that it is made of; on a CPU it is plain JAX."""
    monkeypatch.setattr(simt, "check_device", lambda: None)
    arrays = [*map(jnp.asarray, draw(*shape)), *(jnp.ones((*counts, 64, 64), jnp.bfloat16) for counts in BLOCKS)]
    function = jax.jit(functools.partial(latent_query.latent_query, has_kernels=has_kernels, **SMALL))
    traced = function.trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"(latent\w*|skinny_gemm\w*)_mosaic_gpu", text) == kernels
    B, T = shape
    shapes = [(B, T, 576), (B, T + -T % 64, 576), (B, T, HEADS, LATENT), (B, T, HEADS, ROTARY)]
    assert [out.shape for out in traced.out_info] == shapes
    if not has_kernels:
        expected = jax.jit(functools.partial(latent_query_reference, **SMALL))(*arrays)
        for ours, other in zip(function(*arrays), expected, strict=True):
            np.testing.assert_array_equal(ours, other)


@pytest.mark.parametrize(
    ("rows", "num_heads", "blocks", "config", "named"),
    [
        (parts(25), HEADS, BLOCKS, {}, "25 tokens"),
        (parts(4), 7, BLOCKS, {}, "7 heads"),
        (parts(4, latent=256), HEADS, BLOCKS, {}, r"128, 64 and 256 is needed"),
        (parts(4, rotary=60), HEADS, BLOCKS, {}, r"rows of 512 \+ 60"),
        (parts(4), 16, [(2 * tiles, columns) for tiles, columns in BLOCKS], {}, "24 clusters of 2 blocks"),
        (parts(4, query=1792), HEADS, [(24, 28), BLOCKS[1]], {}, "1792 columns of q_b in 3 parts"),
        (parts(24), HEADS, BLOCKS, {"shared_bytes": 142_000}, "of 142464 bytes; 14 of 142000 fit"),
        (parts(4), HEADS, BLOCKS, {"num_multiprocessors": 96}, "12 clusters of 6 blocks of .*; 10 of"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(rows, num_heads, blocks, config, named):
    """Three launches do it then; of 16 heads or more they take blocks without clusters."""
    arrays = (like(*counts, 64, 64) for counts in blocks)
    outputs = tuple(Output(width=num_heads * width) for width in (128, 64, LATENT))
    config = latent_query.Config(product=dataclasses.replace(Config(), **config))
    with pytest.raises(NotImplementedError, match=named):
        choose_latent_shape(rows, 1, *arrays, outputs, num_heads, config)


def test_other_types_are_refused():
    query, latent, *others = map(jnp.asarray, draw(1, 3))
    blocks = (jnp.zeros((*counts, 64, 64), jnp.bfloat16) for counts in BLOCKS)
    with pytest.raises(NotImplementedError, match="types are float32, bfloat16"):
        latent_query.latent_query_gpu(query.astype(jnp.float32), latent, *others, *blocks, **SMALL)


def test_turns_and_outputs_that_the_kernel_would_misread_are_refused():
    *arrays, cos, sin = map(jnp.asarray, draw(1, 3))
    blocks = [jnp.zeros((*counts, 64, 64), jnp.bfloat16) for counts in BLOCKS]
    with pytest.raises(NotImplementedError, match="cosines are bfloat16; float32"):
        latent_query.latent_query_gpu(*arrays, cos.astype(jnp.bfloat16), sin, *blocks, **SMALL)
    for kernel, others, options in (
        (latent_query.latent_query_gpu, blocks, SMALL),
        (latent_rows.latent_rows_gpu, [], {"eps": EPS, "multiple": MULTIPLE}),
    ):
        with pytest.raises(ValueError, match=r"cosines have the shape \(1, 3, 16\); \(1, 3, 32\) is needed"):
            kernel(*arrays, cos[..., :16], sin[..., :16], *others, **options)
    wide = {**SMALL, "outputs": tuple(dataclasses.replace(one, dtype=jnp.float32) for one in SMALL["outputs"])}
    with pytest.raises(NotImplementedError, match="outputs are .*float32"):
        latent_query.latent_query_gpu(*arrays, cos, sin, *blocks, **wide)
