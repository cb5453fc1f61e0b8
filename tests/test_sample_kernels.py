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
from ddtree_jax.pallas.sample_collect import NOISE_RANGE, Collection, add_up_piece, collect, perturb, pick_best
from ddtree_jax.pallas.sample_draw import Draw, draw, merge_best
from ddtree_jax.pallas.sample_noise import gumbel
from ddtree_jax.pallas.tree_expand_top import Piece
from ddtree_jax.sampling_params import SamplingArrays, SamplingParams

THREADS, DEPTHS = 128, 3

_draw = jax.jit(sampling.draw, static_argnums=5)


def pieces_of(logits_RV: np.ndarray) -> Piece:
    return Piece.of(logits_RV.shape[1], 1, THREADS, 1)


def launch(function: Callable, shape: Piece, shards: list[np.ndarray], outs: tuple, *scratch: type) -> list:
    """Outs [R, C, size] of a kernel with a block a piece, those of all shards side by side.

    ``function(threads, row, index, first_id, logits, *outs, *scratch)`` is a block's part; ``scratch`` lies in shared memory.
    """
    parts = []
    for shard, logits_RV in enumerate(shards):
        num_pieces = len(logits_RV) * shape.num_pieces
        memories = [shared(num_pieces * size, kind) for kind, size in outs]
        logits = Memory(np.ascontiguousarray(logits_RV).reshape(-1))
        for block in np.ndindex(len(logits_RV), shape.num_pieces):
            threads = NumpyThreads(THREADS)
            numbers = (threads.value(np.int32, number) for number in (*block, shard * logits_RV.shape[1]))
            function(threads, *numbers, logits, *memories, *(shared(THREADS // 32, kind) for kind in scratch))
        parts.append([out.array.reshape(len(logits_RV), shape.num_pieces, -1) for out in memories])
    return [np.concatenate(arrays, axis=1).reshape(-1) for arrays in zip(*parts, strict=True)]


BEST = ((np.float32, 1), (np.int32, 1))


def run_greedy(logits_RV: np.ndarray, num_shards: int) -> np.ndarray:
    shards = np.split(logits_RV, num_shards, axis=1)
    piece = pieces_of(shards[0])
    best = launch(functools.partial(_pick, piece), piece, shards, BEST, np.uint64)
    out = shared(len(logits_RV), np.int32)
    for block in range(-(-len(logits_RV) // 4)):
        threads = NumpyThreads(128)
        number = threads.value(np.int32, block)
        merge_best(threads, len(logits_RV), num_shards * piece.num_pieces, number, *map(Memory, best), out)
    return out.array


def _pick(piece: Piece, t: NumpyThreads, *args: Any) -> None:
    pick_best(t, piece, *args)


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def run_draw(
    logits_BNV: np.ndarray,
    filters: sample.Filters,
    depth_BN: np.ndarray,
    key_BT2: np.ndarray,
    capacity: int = 512,
    num_kept: int = 2000,
    num_shards: int = 1,
) -> np.ndarray:
    batch, num_nodes, vocab = logits_BNV.shape
    shards = np.split(logits_BNV.reshape(-1, vocab), num_shards, axis=1)
    piece = pieces_of(shards[0])
    num_pieces = num_shards * piece.num_pieces
    rows = Collection(piece=piece, num_nodes=num_nodes, row_pieces=num_pieces, capacity=capacity)
    of_sequences = filters.temperature_B, filters.cutoff_B(vocab), filters.floor_B()
    temperature, cutoff, floor = (Memory(np.asarray(x)) for x in of_sequences)

    def add_up(t: NumpyThreads, row: Any, index: Any, first_id: Any, logits: Memory, out: Memory, sums: Memory) -> None:
        add_up_piece(t, rows, row, index, logits, temperature, Memory(best[0]), out, sums)

    def list_tokens(t: NumpyThreads, row: Any, index: Any, first_id: Any, logits: Memory, *outs: Memory) -> None:
        of_row = temperature, cutoff, floor, Memory(best[0]), Memory(sums[0])
        collect(t, rows, row, index, first_id, logits, *of_row, *outs)

    best = launch(functools.partial(_pick, piece), piece, shards, BEST, np.uint64)
    sums = launch(add_up, piece, shards, ((np.uint64, 1),), np.uint64)
    lists = launch(list_tokens, piece, shards, ((np.int32, 1), (np.float32, capacity), (np.int32, capacity)), np.int32)
    shape = Draw(
        num_nodes=num_nodes,
        num_pieces=num_pieces,
        capacity=capacity,
        num_kept=num_kept,
        num_depths=key_BT2.shape[1],
        vocab=vocab,
        num_threads=THREADS,
    )
    of_sequence = [filters.top_k_B, filters.top_p_B, jnp.log(filters.min_p_B), key_BT2.reshape(-1)]
    out, num_warps = shared(batch * num_nodes, np.int32), THREADS // 32
    for row in range(batch * num_nodes):
        threads = NumpyThreads(THREADS)
        memory = [shared(num_kept, np.float32), shared(num_kept, np.int32), shared(num_warps, np.uint64)]
        memory += [shared(num_warps, np.uint32), shared(1, np.int32)]
        inputs = Memory(depth_BN.reshape(-1)), temperature, *(Memory(np.asarray(x)) for x in of_sequence)
        pieces = map(Memory, (*best, *sums, *lists))
        draw(threads, shape, threads.value(np.int32, row), *inputs, *pieces, out, *memory)
    return out.array.reshape(batch, num_nodes)


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def run_perturbed(
    logits_BNV: np.ndarray, filters: sample.Filters, depth_BN: np.ndarray, key_BT2: np.ndarray, num_shards: int = 1
) -> np.ndarray:
    batch, num_nodes, vocab = logits_BNV.shape
    shards = np.split(logits_BNV.reshape(-1, vocab), num_shards, axis=1)
    piece = pieces_of(shards[0])
    num_pieces = num_shards * piece.num_pieces
    shape = Collection(piece=piece, num_nodes=num_nodes, row_pieces=num_pieces, capacity=1, num_depths=DEPTHS)
    inputs = [depth_BN, filters.temperature_B, jnp.log(filters.min_p_B), key_BT2]

    def perturb_piece(t: NumpyThreads, row: Any, index: Any, first_id: Any, logits: Memory, *outs: Memory) -> None:
        of_rows = (Memory(np.asarray(x).reshape(-1)) for x in (*inputs, best[0]))
        perturb(t, shape, row, index, first_id, logits, *of_rows, *outs)

    best = launch(functools.partial(_pick, piece), piece, shards, BEST, np.uint64)
    logit, token = launch(perturb_piece, piece, shards, BEST, np.uint64)
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
    zeros_B = jnp.zeros(batch, jnp.int32)
    expected = _draw(jnp.asarray(logits_BNV), jnp.asarray(depth_BN), length_B, zeros_B, arrays, DEPTHS)
    filters = sample.Filters(arrays.temperature_B, arrays.top_k_B, arrays.top_p_B, arrays.min_p_B)
    key_BT2 = np.zeros((batch, DEPTHS, 2), np.uint32)
    for b, depth in np.ndindex(batch, DEPTHS):
        key = jax.random.fold_in(jax.random.key(arrays.seed_B[b]), arrays.sequence_B[b])
        key_BT2[b, depth] = jax.random.key_data(jax.random.fold_in(key, length_B[b] + 1 + depth))
    run = run_draw if with_filters else run_perturbed
    return run(logits_BNV, filters, depth_BN, key_BT2, **sizes), np.asarray(expected)


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
    """Flat logits: too many for a piece's list, or for shared memory; top-k with top-p beyond what may be drawn."""
    flat = np.zeros((1, 2, 610), np.float32)
    flat[0, 1, 0] = 50
    warm = [SamplingParams(temperature=1.0)]
    for sizes in ({"capacity": 64}, {"num_kept": 300}):
        drawn, expected = compare(flat, warm, **sizes)
        assert drawn[0, 0] == -1
        assert drawn[0, 1] == expected[0, 1] == 0
    steep = -np.arange(610, dtype=np.float32)[None, None] / 5
    drawn, _ = compare(steep, [SamplingParams(temperature=1.0, top_k=300, top_p=0.9)])
    assert drawn.tolist() == [[-1]]
    drawn, expected = compare(steep, [SamplingParams(temperature=1.0, top_k=30, top_p=0.9)])
    np.testing.assert_array_equal(drawn, expected)


def test_noise_is_that_of_jax():
    key = jax.random.fold_in(jax.random.key(3), 17)
    threads = NumpyThreads(1024)
    words = tuple(threads.value(np.uint32, word) for word in np.asarray(jax.random.key_data(key)))
    noise = gumbel(threads, words, threads.thread())
    np.testing.assert_allclose(noise, jax.random.gumbel(key, (1024,), jnp.float32), rtol=1e-6, atol=1e-6)
    lowest, highest = np.float32(np.finfo(np.float32).tiny), np.float32(1 - 2**-23)
    extremes = -np.log(-np.log(np.array([lowest, highest], np.float64)))
    assert extremes[1] - extremes[0] < NOISE_RANGE


def test_kernels_lower_for_a_gpu():
    def run(logits, filters, depth, key):
        zero, vocab = jnp.int32(0), 163_840
        best = sample.best_of_pieces(logits, zero)
        greedy = sample.merge_greedy(sample.perturb_pieces(logits, best, filters, depth, key, zero))
        sums = sample.add_up_pieces(logits, best, filters)
        lists = sample.collect_pieces(logits, best, sums, filters, zero, vocab)
        return greedy, sample.draw_tokens(best, sums, lists, filters, depth, key, vocab)

    def like(*shape: int, dtype: type = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    filters = sample.Filters(like(2), like(2, dtype=jnp.int32), like(2), like(2))
    arrays = like(2, 16, 163_840), filters, like(2, 16, dtype=jnp.int32), like(2, 8, 2, dtype=jnp.uint32)
    traced = jax.jit(run).trace(*arrays)
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
