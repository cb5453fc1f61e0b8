"""Target sampling: the kernels' code run on numpy against `sampling.draw`, and lowered for a GPU."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simt_numpy import Memory, NumpyThreads, shared

from ddtree_jax import sampling
from ddtree_jax.pallas import sample
from ddtree_jax.pallas.sample_collect import (
    NOISE_RANGE,
    NUM_BUCKETS,
    Collection,
    add_up_piece,
    collect,
    perturb,
    pick_best,
)
from ddtree_jax.pallas.sample_draw import Draw, draw, merge_best
from ddtree_jax.pallas.sample_noise import gumbel, key_at
from ddtree_jax.pallas.tree_expand_top import Piece
from ddtree_jax.sampling_params import SamplingArrays, SamplingParams

THREADS, DEPTHS = 128, 3

_draw = jax.jit(sampling.draw, static_argnums=4)


def pieces_of(logits_RV: np.ndarray) -> Piece:
    return Piece.of(logits_RV.shape[1], 1, THREADS, 1)


def launch(function: Callable, shape: Piece, shards: list[np.ndarray], outs: tuple, *scratch: tuple[type, int]) -> list:
    """Outs [R, C, size] of a kernel with a block a piece, those of all shards side by side.

    ``function(threads, row, index, first_id, logits, *outs, *scratch)`` is a block's part; ``scratch``, like outs types and
    sizes, lies in shared memory.
    """
    parts = []
    for shard, logits_RV in enumerate(shards):
        num_pieces = len(logits_RV) * shape.num_pieces
        memories = [shared(num_pieces * size, kind) for kind, size in outs]
        logits = Memory(np.ascontiguousarray(logits_RV).reshape(-1))
        for block in np.ndindex(len(logits_RV), shape.num_pieces):
            threads = NumpyThreads(THREADS)
            numbers = (threads.value(np.int32, number) for number in (*block, shard * logits_RV.shape[1]))
            function(threads, *numbers, logits, *memories, *(shared(size, kind) for kind, size in scratch))
        parts.append([out.array.reshape(len(logits_RV), shape.num_pieces, -1) for out in memories])
    return [np.concatenate(arrays, axis=1).reshape(-1) for arrays in zip(*parts, strict=True)]


BEST = ((np.float32, 1), (np.int32, 1))
A_KEY_A_WARP = (np.uint64, THREADS // 32)


def run_greedy(logits_RV: np.ndarray, num_shards: int) -> np.ndarray:
    shards = np.split(logits_RV, num_shards, axis=1)
    piece = pieces_of(shards[0])
    best = launch(functools.partial(_pick, piece), piece, shards, BEST, A_KEY_A_WARP)
    out = shared(len(logits_RV), np.int32)
    for block in range(-(-len(logits_RV) // 4)):
        threads = NumpyThreads(128)
        number = threads.value(np.int32, block)
        merge_best(threads, len(logits_RV), num_shards * piece.num_pieces, number, *map(Memory, best), out)
    return out.array


def _pick(piece: Piece, t: NumpyThreads, *args: Any) -> None:
    pick_best(t, piece, *args)


def memories(*arrays: Any) -> list[Memory]:
    return [Memory(np.asarray(array).reshape(-1)) for array in arrays]


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def run_draw(
    logits_BNV: np.ndarray,
    filters: sample.Filters,
    depth_BN: np.ndarray,
    noise: sample.Noise,
    capacity: int = 512,
    num_kept: int = 2048,
    num_shards: int = 1,
) -> np.ndarray:
    batch, num_nodes, vocab = logits_BNV.shape
    shards = np.split(logits_BNV.reshape(-1, vocab), num_shards, axis=1)
    piece = pieces_of(shards[0])
    num_pieces = num_shards * piece.num_pieces
    rows = Collection(piece=piece, num_nodes=num_nodes, row_pieces=num_pieces, vocab=vocab, capacity=capacity)

    def add_up(t: NumpyThreads, row: Any, index: Any, first_id: Any, logits: Memory, *outs: Memory) -> None:
        add_up_piece(t, rows, row, index, logits, *memories(filters.temperature_B, best[0]), *outs)

    def list_tokens(t: NumpyThreads, row: Any, index: Any, first_id: Any, logits: Memory, *outs: Memory) -> None:
        collect(t, rows, row, index, first_id, logits, *memories(*filters, best[0], *sums), *outs)

    best = launch(functools.partial(_pick, piece), piece, shards, BEST, A_KEY_A_WARP)
    mass_and_counts = (np.uint64, 1), (np.int32, NUM_BUCKETS)
    sums = launch(add_up, piece, shards, mass_and_counts, A_KEY_A_WARP, (np.int32, NUM_BUCKETS))
    outs = (np.int32, 1), (np.float32, capacity), (np.int32, capacity)
    lists = launch(list_tokens, piece, shards, outs, (np.int32, 1), (np.int32, THREADS))
    shape = Draw(
        num_nodes=num_nodes,
        num_pieces=num_pieces,
        capacity=capacity,
        num_kept=num_kept,
        vocab=vocab,
        num_threads=THREADS,
    )
    out, num_warps = shared(batch * num_nodes, np.int32), THREADS // 32
    for row in range(batch * num_nodes):
        threads = NumpyThreads(THREADS)
        kept = [shared(num_kept, kind) for kind in (np.float32, np.int32, np.uint32)]
        scratch = shared(num_warps, np.uint64), shared(2 * num_warps, np.uint32)
        inputs = memories(depth_BN, *filters, *noise, *best, sums[0], *lists)
        draw(threads, shape, threads.value(np.int32, row), *inputs, out, *kept, *scratch)
    return out.array.reshape(batch, num_nodes)


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def run_perturbed(
    logits_BNV: np.ndarray, filters: sample.Filters, depth_BN: np.ndarray, noise: sample.Noise, num_shards: int = 1
) -> np.ndarray:
    batch, num_nodes, vocab = logits_BNV.shape
    shards = np.split(logits_BNV.reshape(-1, vocab), num_shards, axis=1)
    piece = pieces_of(shards[0])
    num_pieces = num_shards * piece.num_pieces
    shape = Collection(piece=piece, num_nodes=num_nodes, row_pieces=num_pieces, vocab=vocab, capacity=1)

    def perturb_piece(t: NumpyThreads, row: Any, index: Any, first_id: Any, logits: Memory, *outs: Memory) -> None:
        of_rows = memories(depth_BN, filters.temperature_B, filters.min_p_B, *noise, best[0])
        perturb(t, shape, row, index, first_id, logits, *of_rows, *outs)

    best = launch(functools.partial(_pick, piece), piece, shards, BEST, A_KEY_A_WARP)
    logit, token = launch(perturb_piece, piece, shards, BEST, A_KEY_A_WARP)
    order = np.lexsort((token.reshape(-1, num_pieces), -logit.reshape(-1, num_pieces)))
    return np.take_along_axis(token.reshape(-1, num_pieces), order[:, :1], 1).reshape(batch, num_nodes)


def arrays_of(params: list[SamplingParams], vocab: int) -> SamplingArrays:
    options = {"batch": len(params), "max_length": 100, "vocab_size": vocab, "eos_token_ids": []}
    return SamplingArrays.stack(params, [[0]] * len(params), **options)


def compare(
    logits_BNV: np.ndarray, params: list[SamplingParams], with_filters: bool = True, **sizes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the kernels and of `sampling.draw`; ``sizes`` are those of `run_draw`."""
    batch, num_nodes, vocab = logits_BNV.shape
    rng = np.random.default_rng(7)
    arrays, length_B = arrays_of(params, vocab), jnp.asarray(rng.integers(0, 1000, batch), jnp.int32)
    depth_BN = rng.integers(0, DEPTHS, (batch, num_nodes)).astype(np.int32)
    expected = _draw(jnp.asarray(logits_BNV), jnp.asarray(depth_BN), length_B, arrays, DEPTHS)
    filters = sample.Filters(arrays.temperature_B, arrays.top_k_B, arrays.top_p_B, arrays.min_p_B)
    run = run_draw if with_filters else run_perturbed
    return run(logits_BNV, filters, depth_BN, sample.Noise(arrays.key_B2, length_B), **sizes), np.asarray(expected)


@pytest.mark.parametrize(("levels", "num_shards"), [(None, 1), (2, 1), (2, 3)])
def test_greedy(levels, num_shards):
    logits_RV = np.random.default_rng(3).normal(size=(6, 1203)).astype(np.float32)
    if levels:
        logits_RV = np.round(logits_RV * levels) / np.float32(levels)
    logits_RV[4], logits_RV[5, 1:] = -np.inf, -np.inf
    np.testing.assert_array_equal(run_greedy(logits_RV, num_shards), logits_RV.argmax(axis=1))


FILTERS = {
    "none": {"temperature": 0.6},
    "hot": {"temperature": 30.0},
    "cold": {"temperature": 1e-6},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"temperature": 3.0, "top_p": 0.5},
    "large_top_p": {"temperature": 0.6, "top_p": 0.95},
    "small_top_p": {"temperature": 1.0, "top_p": 0.01},
    "min_p": {"temperature": 0.9, "min_p": 0.2},
    "all": {"temperature": 0.8, "top_k": 11, "top_p": 0.7, "min_p": 0.05},
}


@pytest.mark.parametrize("kind", FILTERS)
def test_draws_equal_the_reference(kind):
    """Two sequences with seeds of their own, one of them with other filters; many logits are equal."""
    rng = np.random.default_rng(len(kind))
    logits_BNV = np.round(rng.normal(size=(2, 6, 610)) * 3).astype(np.float32)
    logits_BNV[0, 3, 7:] = -np.inf
    logits_BNV[0, 4] = -np.inf
    logits_BNV[0, 4, 9] = 2
    logits_BNV[0, 5] = 0  # Flat: nothing may be left out.
    params = [SamplingParams(seed=5, **FILTERS[kind]), SamplingParams(seed=6, temperature=1.0, top_p=0.9)]
    drawn, expected = compare(logits_BNV, params)
    if kind == "all":  # Fewer tokens than top-k keeps: for all that the lists say, others might have some mass.
        assert drawn[0, 3:5].tolist() == [-1, -1]
        drawn[0, 3:5] = expected[0, 3:5]
    np.testing.assert_array_equal(drawn, expected)
    assert len(set(expected.ravel())) > 2


@pytest.mark.parametrize("filters", [{"top_k": 40}, {"top_k": 40, "top_p": 0.6}, {"top_p": 0.1}, {"min_p": 0.9}])
def test_lists_hold_little_more_than_the_filters_keep(filters):
    """Logits from 0 to -5, so close that any of them could be drawn, and lists for 80 of 488 a piece."""
    slope_BNV = -np.random.default_rng(2).permuted(np.tile(np.arange(488) / 98, (1, 8, 1)), axis=2).astype(np.float32)
    drawn, expected = compare(slope_BNV, [SamplingParams(temperature=1.0, **filters)], capacity=80)
    np.testing.assert_array_equal(drawn, expected)
    assert len(set(expected.ravel())) > 4


@pytest.mark.parametrize("with_filters", [True, False])
def test_a_sequence_without_a_temperature_gets_its_best_tokens(with_filters):
    logits_BNV = np.random.default_rng(4).normal(size=(2, 3, 610)).astype(np.float32)
    params = [SamplingParams(top_k=3, top_p=0.1), SamplingParams(temperature=2.0)]
    drawn, expected = compare(logits_BNV, params, with_filters)
    np.testing.assert_array_equal(drawn, expected)
    np.testing.assert_array_equal(drawn[0], logits_BNV[0].argmax(axis=1))
    assert (drawn[1] != logits_BNV[1].argmax(axis=1)).any()


@pytest.mark.parametrize("kind", ["none", "cold", "min_p"])
def test_draws_without_lists(kind):
    """Where top-k and top-p remove nothing, pieces draw for themselves."""
    logits_BNV = np.round(np.random.default_rng(len(kind)).normal(size=(2, 6, 610)) * 3).astype(np.float32)
    logits_BNV[0, 3, 7:] = -np.inf
    logits_BNV[0, 4, :600] = -np.inf
    params = [SamplingParams(seed=5, **FILTERS[kind]), SamplingParams(seed=6, temperature=1.0)]
    drawn, expected = compare(logits_BNV, params, with_filters=False)
    np.testing.assert_array_equal(drawn, expected)
    assert len(set(expected.ravel())) > 2


@pytest.mark.parametrize("with_filters", [True, False])
def test_shards_draw_what_one_device_draws(with_filters):
    """Five shards of 122 columns, one piece each, against two pieces."""
    logits_BNV = np.round(np.random.default_rng(5).normal(size=(1, 6, 610)) * 3).astype(np.float32)
    params = [SamplingParams(seed=5, temperature=1.3, **({"top_p": 0.8} if with_filters else {"min_p": 0.02}))]
    drawn, expected = compare(logits_BNV, params, with_filters, num_shards=5)
    np.testing.assert_array_equal(drawn, expected)
    assert len(set((expected // 122).ravel())) > 2


def test_what_does_not_fit_is_reported():
    """Flat logits, too many for one piece's list, unless nothing is drawn; top-k with top-p beyond what may be drawn."""
    flat = np.zeros((1, 2, 610), np.float32)
    flat[:, :, 512:], flat[0, 1, 0] = -np.inf, 50
    for temperature, unknown in ((1.0, -1), (0.0, 0)):
        drawn, expected = compare(flat, [SamplingParams(temperature=temperature)], capacity=64)
        assert drawn[0, 0] == unknown
        assert drawn[0, 1] == expected[0, 1] == 0
    steep = -np.arange(610, dtype=np.float32)[None, None] / 5
    drawn, _ = compare(steep, [SamplingParams(temperature=1.0, top_k=300, top_p=0.9)])
    assert drawn.tolist() == [[-1]]
    drawn, expected = compare(steep, [SamplingParams(temperature=1.0, top_k=30, top_p=0.9)])
    np.testing.assert_array_equal(drawn, expected)


@pytest.mark.parametrize("filters", [{"top_p": 0.7}, {"top_k": 400, "top_p": 0.7}])
def test_what_does_not_fit_into_shared_memory_is_drawn_from_the_lists(filters):
    logits_BNV = np.random.default_rng(6).normal(size=(1, 2, 610)).astype(np.float32)
    drawn, expected = compare(logits_BNV, [SamplingParams(seed=1, temperature=1.0, **filters)], num_kept=128)
    np.testing.assert_array_equal(drawn, expected)
    assert (drawn != logits_BNV.argmax(axis=2)).any()


def test_noise_is_that_of_jax():
    keys = jax.random.split(jax.random.key(3), 2)
    threads = NumpyThreads(1024)
    (words_B2,) = memories(jax.random.key_data(keys))
    words = key_at(threads, words_B2, *(threads.value(np.int32, number) for number in (1, 17)))
    key = jax.random.fold_in(keys[1], 17)
    noise = gumbel(threads, words, threads.thread())
    np.testing.assert_allclose(noise, jax.random.gumbel(key, (1024,), jnp.float32), rtol=1e-6, atol=1e-6)
    lowest, highest = np.float32(np.finfo(np.float32).tiny), np.float32(1 - 2**-23)
    extremes = -np.log(-np.log(np.array([lowest, highest], np.float64)))
    assert extremes[1] - extremes[0] < NOISE_RANGE


def test_kernels_lower_for_a_gpu():
    def run(logits, filters, depth, noise):
        zero, vocab = jnp.int32(0), 163_840
        best = sample.best_of_pieces(logits, zero)
        greedy = sample.merge_greedy(sample.perturb_pieces(logits, best, filters, noise, depth, zero, vocab))
        sums = sample.add_up_pieces(logits, best, filters, vocab)
        lists = sample.collect_pieces(logits, best, sums, filters, zero, vocab)
        return greedy, sample.draw_tokens(best, sums, lists, filters, noise, depth, vocab)

    def like(*shape: int, dtype: type = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    filters = sample.Filters(like(2), like(2, dtype=jnp.int32), like(2), like(2))
    noise = sample.Noise(like(2, 2, dtype=jnp.uint32), like(2, dtype=jnp.int32))
    traced = jax.jit(run).trace(like(2, 16, 163_840), filters, like(2, 16, dtype=jnp.int32), noise)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for name in ("sample_best", "sample_perturb", "sample_merge", "sample_add_up", "sample_collect", "sample_draw"):
        assert name in text
    assert [x.shape for x in traced.out_info] == [(32,), (2, 16)]


def test_unsupported_input_is_named():
    call = functools.partial(sample.best_of_pieces, first_id=jnp.int32(0))
    with pytest.raises(NotImplementedError, match="bfloat16"):
        jax.eval_shape(call, jax.ShapeDtypeStruct((1, 1, 8), jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="409600 columns"):
        jax.eval_shape(call, jax.ShapeDtypeStruct((1, 1, 409_600), jnp.float32))
