"""Products of few tokens: reference against float64, the kernel's sums interpreted, its code of threads run on numpy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from simt_numpy import Memory, NumpyThreads, shared

from ddtree_jax.pallas import skinny_gemm as skinny_gemm_module
from ddtree_jax.pallas.skinny_gemm import (
    Config,
    Output,
    choose_config,
    choose_shape,
    pack_weights,
    skinny_gemm,
    skinny_gemm_gpu,
    skinny_gemm_reference,
    unpack_weights,
)
from ddtree_jax.pallas.skinny_gemm_kernel import launch
from ddtree_jax.pallas.skinny_gemm_ring import Ring
from ddtree_jax.pallas.skinny_gemm_shape import TOKENS_A_GROUP, Shape, join_steps, num_stages
from ddtree_jax.pallas.skinny_gemm_sums import finish, received_place, staged_place

MIXED = (Output(width=76), Output(width=20, dtype=jnp.float32), Output(width=36, is_gated=True))


def random_weights(outputs, columns, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(*(2,) * output.is_gated, output.width, columns) for output in outputs]
    return [jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in shapes]


def random_tokens(num_tokens, columns, seed=1):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((num_tokens, columns), np.float32), jnp.bfloat16)


def silu(x):
    return x / (1 + np.exp(-x))


def in_float64(x, weights, outputs):
    x, weights = np.asarray(x, np.float64), [np.asarray(weight, np.float64) for weight in weights]
    products = [np.einsum("tk,...ok->...to", x, weight) for weight in weights]
    return [silu(y[0]) * y[1] if output.is_gated else y for y, output in zip(products, outputs, strict=True)]


def error(y, expected):
    return np.linalg.norm(np.asarray(y, np.float64) - expected) / np.linalg.norm(expected)


def test_reference_agrees_with_float64():
    x, weights = random_tokens(5, 192), random_weights(MIXED, 192)
    blocks = pack_weights(weights, MIXED)
    # 76, 20 and twice 36 rows begin with a block of 64 each.
    assert blocks.shape == (5, 3, 64, 64)
    for packed, unpacked in zip(weights, unpack_weights(blocks, MIXED), strict=True):
        np.testing.assert_array_equal(packed, unpacked)
    found = skinny_gemm_reference(x, blocks, MIXED)
    for y, expected, output, limit in zip(found, in_float64(x, weights, MIXED), MIXED, (3e-3, 1e-6, 3e-3), strict=True):
        assert y.dtype == output.dtype and y.shape == (5, output.width)
        assert error(y, expected) < limit


def test_groups_take_inputs_of_their_own():
    outputs = (Output(width=3 * 64, dtype=jnp.float32),)
    x, (weight,) = random_tokens(4, 3 * 128), random_weights(outputs, 128)
    (y,) = skinny_gemm_reference(x, pack_weights([weight], outputs), outputs, num_groups=3)
    per_head = np.asarray(weight, np.float64).reshape(3, 64, 128)
    expected = np.einsum("tgk,gok->tgo", np.asarray(x, np.float64).reshape(4, 3, 128), per_head)
    assert error(y, expected.reshape(4, -1)) < 1e-6


def interpreted_sums(x, blocks, outputs, num_groups, config):
    """What the blocks of the kernel sum up [tile, rank, 64, T], and the launch's shape."""
    shape = join_steps(choose_shape(x, blocks, outputs, num_groups, config), config)
    tokens = jnp.pad(x, ((0, shape.num_tokens - x.shape[0]), (0, 0)))
    (sums,) = launch(tokens, blocks.reshape(-1, 64, 64), shape, config, plgpu.InterpretGPUParams())
    return np.asarray(sums).reshape(shape.num_tiles, shape.cluster, 64, -1)[..., : x.shape[0]], shape


@pytest.mark.parametrize(
    ("num_tokens", "columns", "num_groups", "cluster", "step_blocks"),
    [(9, 512, 1, 3, 1), (8, 384, 2, 1, 2), (9, 768, 1, 1, 2), (136, 192, 1, 1, 1)],
)
def test_kernel_sums_agree_with_float64(num_tokens, columns, num_groups, cluster, step_blocks):
    outputs = (Output(width=4 * 64),)
    x, (weight,) = random_tokens(num_tokens, num_groups * columns), random_weights(outputs, columns)
    blocks = pack_weights([weight], outputs)
    # Two stages: the ring is filled several times.
    config = Config(cluster=cluster, step_blocks=step_blocks, max_stages=2)
    sums, shape = interpreted_sums(x, blocks, outputs, num_groups, config)
    assert shape.num_steps > 2 and shape.cluster == cluster
    split = np.asarray(weight, np.float64).reshape(num_groups, -1, columns)
    inputs = np.asarray(x, np.float64).reshape(num_tokens, num_groups, columns)
    expected = np.einsum("tgk,gok->tgo", inputs, split).reshape(num_tokens, -1)
    assert error(sums.sum(1).reshape(-1, num_tokens).T, expected) < 1e-6


def test_sums_of_a_token_depend_on_neither_its_place_nor_the_others():
    """Nor on how many there are: steps are cut by the weight alone."""
    outputs = (Output(width=64),)
    x, blocks = random_tokens(9, 512), pack_weights(random_weights(outputs, 512), outputs)
    config = Config(cluster=2, step_blocks=1)
    others = jnp.full((7, 512), jnp.nan, jnp.bfloat16)
    few, many = (
        interpreted_sums(tokens, blocks, outputs, 1, config)[0] for tokens in (x, jnp.concatenate([others, x]))
    )
    np.testing.assert_array_equal(few, many[..., 7:])
    for tokens in (1, 16, 128):
        shape = choose_shape(random_tokens(tokens, 512), blocks, outputs, 1, config)
        assert [shape.span(rank) for rank in range(2)] == [(0, 4), (4, 8)]


def test_sums_of_many_tokens_are_those_of_few():
    """Steps of one block instead of two, and the same columns for each block of the cluster: 2, 2 and 4."""
    outputs, config = (Output(width=64),), Config(cluster=3)
    x, blocks = random_tokens(130, 512), pack_weights(random_weights(outputs, 512), outputs)
    few, of_few = interpreted_sums(x[:2], blocks, outputs, 1, config)
    many, of_many = interpreted_sums(x, blocks, outputs, 1, config)
    assert [of_few.span(rank) for rank in range(3)] == [(0, 1), (1, 2), (2, 4)] and of_few.step_blocks == 2
    assert [of_many.span(rank) for rank in range(3)] == [(0, 2), (2, 4), (4, 8)] and of_many.step_blocks == 1
    # A CPU adds up in another order for another width.
    np.testing.assert_allclose(few, many[..., :2], rtol=0, atol=1e-4)


def split_shape(outputs, num_tokens, cluster=1):
    x = jax.ShapeDtypeStruct((num_tokens, 7 * 64), jnp.bfloat16)
    blocks = jax.ShapeDtypeStruct((sum(output.num_blocks for output in outputs), 7, 64, 64), jnp.bfloat16)
    return choose_shape(x, blocks, outputs, 1, Config(cluster=cluster, step_blocks=1))


def test_a_launch_has_joined_steps(monkeypatch):
    shapes = []
    monkeypatch.setattr(skinny_gemm_module, "launch", lambda x, blocks, shape, *_, **__: shapes.append(shape) or [])
    outputs = (Output(width=64),)
    for num_tokens in (16, 17):
        skinny_gemm_gpu(random_tokens(num_tokens, 512), pack_weights(random_weights(outputs, 512), outputs), outputs)
    assert [shape.step_blocks for shape in shapes] == [4, 2]


def test_a_stage_is_filled_again_when_its_last_step_has_been_read(monkeypatch):
    """A barrier's phases alternate: full ones end with a step's bytes, free ones when it has been read."""
    waits = []
    monkeypatch.setattr(
        "ddtree_jax.pallas.warps.wait_barrier", lambda _, index, parity: waits.append((int(index), int(parity)))
    )
    stages = 3
    ring = Ring(split_shape(MIXED, 8), None, None, np.zeros(stages), None, None)
    for step in range(stages, 4 * stages):
        waits.clear()
        ring.wait_free(jnp.int32(step))
        ring.wait_full(jnp.int32(step))
        turn, stage = divmod(step, stages)
        assert waits == [(stages + stage, (turn - 1) % 2), (stage, turn % 2)]


@pytest.mark.parametrize(
    ("num_tokens", "columns", "cluster", "joined"),
    [(16, 112, 2, 4), (1, 4, 1, 4), (16, 24, 3, 4), (17, 112, 2, 2), (16, 14, 1, 2), (16, 20, 2, 2), (130, 112, 2, 1)],
)
def test_steps_are_joined_where_blocks_keep_their_columns(num_tokens, columns, cluster, joined):
    x = jax.ShapeDtypeStruct((num_tokens, columns * 64), jnp.bfloat16)
    blocks = jax.ShapeDtypeStruct((3, columns, 64, 64), jnp.bfloat16)
    config = Config(cluster=cluster)
    before = choose_shape(x, blocks, (Output(width=3 * 64),), 1, config)
    shape = join_steps(before, config)
    assert shape.step_blocks == joined
    for rank in range(cluster):
        found, expected = (tuple(step * each.step_blocks for step in each.span(rank)) for each in (shape, before))
        assert found == expected


@pytest.mark.parametrize("cluster", [1, 2, 3, 7])
def test_spans_cover_a_tile_once(cluster):
    shape = split_shape((Output(width=5 * 64),), 8, cluster)
    spans = [range(*shape.span(rank)) for rank in range(cluster)]
    assert [step for span in spans for step in span] == list(range(7))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1


# Tiles, columns and measured microseconds of clusters at 16 tokens on an H200, when blocks still read each other's sums.
MEASURED = {
    "q_a, kv_a": (33, 112, {2: 10.35, 3: 10.62, 4: 13.02}),
    "router, shared gate and up": (14, 112, {2: 7.68, 3: 6.14, 4: 5.82, 7: 6.02, 8: 6.05}),
    "q_b": (24, 24, {1: 4.00, 2: 4.26, 3: 3.95, 4: 4.06, 5: 6.54}),
    "value_up": (16, 8, {1: 2.75, 2: 3.12, 3: 3.01, 4: 3.38}),
    "drafter q, k, v": (20, 112, {2: 7.90, 3: 7.17, 4: 7.30, 5: 7.42}),
    "drafter context k, v": (24, 112, {2: 8.51, 3: 8.19, 4: 8.37, 5: 11.10}),
    "drafter fc": (14, 672, {2: 34.78, 3: 24.13, 4: 19.79, 7: 20.75, 8: 20.18}),
    # As many blocks as there is room for, without a cluster.
    "o": (112, 16, {1: 5.47}),
    "shared down": (112, 4, {1: 3.01}),
    "key_up": (64, 2, {1: 2.40}),
    "dense gate and up": (72, 112, {1: 17.65}),
    "dense down": (112, 36, {1: 9.92}),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_cluster_that_was_fastest_is_chosen(name):
    tiles, columns, measured = MEASURED[name]
    blocks = jax.ShapeDtypeStruct((tiles, columns, 64, 64), jnp.bfloat16)
    assert measured[choose_config(blocks, Config()).cluster] <= 1.03 * min(measured.values())


def as_words(dtype, size):
    return shared(size * np.dtype(dtype).itemsize // 4, np.uint32)


def run_finish(shape: Shape, sums: np.ndarray) -> list[np.ndarray]:
    """Outputs of all blocks, of which ``sums`` [tile, rank, tokens, 64] are the own ones."""
    outs = [as_words(output.dtype, shape.num_stored * output.width) for output in shape.outputs]
    for tile, rank in np.ndindex(sums.shape[:2]):
        threads = NumpyThreads(128)
        if shape.cluster == 1:
            sources, place = [sums[tile, 0]], staged_place
        else:
            # Groups of tokens that come to the rank; what lies behind them was not sent.
            groups = sums[tile].reshape(shape.cluster, -1, TOKENS_A_GROUP, 64)[:, rank :: shape.cluster]
            sources = np.full((shape.cluster, shape.received_stride // shape.sums_stride, 64), np.nan, np.float32)
            sources[:, : groups.shape[1] * TOKENS_A_GROUP] = groups.reshape(shape.cluster, -1, 64)
            place = received_place
        memories = [Memory(np.pad(one, ((0, 0), (0, shape.sums_stride - 64))).reshape(-1)) for one in sources]
        numbers = (threads.value(np.int32, number) for number in (tile, rank))
        load = functools.partial(load_four, threads, memories)
        finish(threads, shape, *numbers, load, threads.barrier, *outs, place=place)
    return [
        out.array.view(output.dtype).reshape(shape.num_stored, output.width)
        for out, output in zip(outs, shape.outputs, strict=True)
    ]


def load_four(threads, memories, i, index):
    return threads.load_vector(memories[i], index, 4)


@pytest.mark.parametrize(("num_tokens", "cluster"), [(3, 2), (16, 1), (16, 5), (256, 3), (33, 7)])
def test_a_cluster_shares_out_its_tile(num_tokens, cluster):
    """Parts are added in order, and rounded once."""
    shape = split_shape(MIXED, num_tokens, cluster)
    assert shape.num_blocks == cluster * shape.num_tiles
    rng = np.random.default_rng(cluster)
    sums = rng.standard_normal((shape.num_tiles, cluster, shape.num_tokens, 64), np.float32)
    sums[:, -1, 0, :2] = [np.nan, np.inf]
    found = run_finish(shape, sums)
    totals = functools.reduce(np.add, np.moveaxis(sums, 1, 0))
    rows = np.moveaxis(totals, 1, 0).reshape(shape.num_tokens, -1)[:num_tokens]
    gates, ups = np.moveaxis(rows[:, 192 : 192 + 72].reshape(num_tokens, 18, 2, 2), 2, 0).reshape(2, num_tokens, 36)
    with np.errstate(invalid="ignore"):
        expected = rows[:, :76], rows[:, 128 : 128 + 20], silu(gates) * ups
    for y, exact, output in zip(found[:2], expected[:2], MIXED[:2], strict=True):
        np.testing.assert_array_equal(y, exact.astype(output.dtype))
    # Exponentials differ in their last bits.
    np.testing.assert_allclose(np.float32(found[2]), expected[2], rtol=2**-8)


def test_values_in_the_middle_are_rounded_to_even_and_nan_stays_nan():
    shape = split_shape(MIXED, 8)
    # A GPU's own NaN has all bits set, and rounding up would make it zero.
    bits = np.array([0x3F808000, 0x3F818000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0x7F7FFFFF], np.uint32)
    sums = np.zeros((5, 1, 8, 64), np.float32)
    sums[..., : bits.size] = bits.view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        found = run_finish(shape, sums)[0]
    np.testing.assert_array_equal(
        found[0, : bits.size].view(np.uint16), [0x3F80, 0x3F82, 0x7FC0, 0x7FC0, 0x7F80, 0x7F80]
    )


@pytest.mark.parametrize(("num_tokens", "config"), [(9, Config()), (1, Config(cluster=2))])
def test_kernel_lowers_for_cuda(num_tokens, config):
    """Whole tiles and clusters, fewer tokens than a multiple of 8; all kinds of outputs."""
    blocks = pack_weights(random_weights(MIXED, 256), MIXED)
    kernel = functools.partial(skinny_gemm_gpu, outputs=MIXED, config=config)
    lowered = jax.jit(kernel).trace(random_tokens(num_tokens, 256), blocks).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
    found = [(y.shape, y.dtype) for y in lowered.out_info]
    assert found == [((num_tokens, output.width), output.dtype) for output in MIXED]


@pytest.mark.parametrize(("num_tokens", "num_launches"), [(3, 1), (256, 1), (257, 0)])
def test_kernel_is_chosen_for_cuda_alone(monkeypatch, num_tokens, num_launches):
    """A tree of 256 nodes is one launch; for more tokens, the weight is unpacked."""
    x, blocks = random_tokens(num_tokens, 128), pack_weights(random_weights(MIXED, 128), MIXED)

    def count_kernels():
        function = jax.jit(lambda x, blocks: skinny_gemm(x, blocks, MIXED))
        text = function.trace(x, blocks).lower(lowering_platforms=("cuda",)).as_text()
        return len(re.findall(r"custom_call @mosaic_gpu", text))

    # Several devices, which are not those of a shard_map.
    assert count_kernels() == 0
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert count_kernels() == num_launches
    reference = jax.jit(functools.partial(skinny_gemm_reference, outputs=MIXED))
    function = jax.jit(lambda x, blocks: skinny_gemm(x, blocks, MIXED))
    for y, expected in zip(function(x, blocks), reference(x, blocks), strict=True):
        np.testing.assert_array_equal(y, expected)


X, BLOCKS = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2, 2, 64, 64), jnp.bfloat16)


def changed(array, shape=None, dtype=None):
    return jax.ShapeDtypeStruct(shape or array.shape, dtype or array.dtype)


@pytest.mark.parametrize(
    ("x", "blocks", "output", "num_groups", "named"),
    [
        (changed(X, dtype=jnp.float32), BLOCKS, Output(width=128), 1, "x has dtype float32"),
        (X, changed(BLOCKS, dtype=jnp.float32), Output(width=128), 1, "the weight has dtype float32"),
        (changed(X, (257, 128)), BLOCKS, Output(width=128), 1, "257 tokens"),
        (changed(X, (0, 128)), BLOCKS, Output(width=128), 1, "0 tokens"),
        (changed(X, (8, 192)), BLOCKS, Output(width=128), 1, "x is 192 wide"),
        (changed(X, (8, 384)), BLOCKS, Output(width=128), 3, "3 groups of 2 tiles"),
        (changed(X, (8, 256)), BLOCKS, Output(width=124), 2, "2 groups of 2 tiles"),
        (X, BLOCKS, Output(width=192), 1, "other widths .192."),
        (X, BLOCKS, Output(width=126), 1, "126 wide"),
        (X, BLOCKS, Output(width=128, dtype=jnp.float16), 1, "dtype .*float16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(x, blocks, output, num_groups, named):
    with pytest.raises(NotImplementedError, match=named):
        choose_shape(x, blocks, (output,), num_groups)


def test_shared_memory_that_holds_no_ring_is_refused():
    with pytest.raises(NotImplementedError, match="more than 30000 bytes"):
        choose_shape(X, BLOCKS, (Output(width=128),), 1, Config(shared_bytes=30_000))
    blocks = changed(BLOCKS, (2, 100, 64, 64))
    shape = choose_shape(changed(X, (64, 6400)), blocks, (Output(width=128),), 1, Config())
    stages = num_stages(shape, Config())
    assert stages * shape.stage_bytes <= 220_000 < (stages + 1) * shape.stage_bytes


@pytest.mark.parametrize(
    ("columns", "cluster", "expected"), [(2, 1, 2), (8, 1, 4), (14, 2, 4), (14, 3, 3), (60, 1, 10)]
)
def test_a_ring_has_no_stages_that_a_block_does_not_fill(columns, cluster, expected):
    config = Config(cluster=cluster)
    blocks = changed(BLOCKS, (2, columns, 64, 64))
    shape = choose_shape(changed(X, (16, 64 * columns)), blocks, (Output(width=128),), 1, config)
    assert num_stages(shape, config) == expected
    assert expected in (2, 10, max(last - first for first, last in map(shape.span, range(cluster))))


def test_weights_of_other_outputs_are_refused():
    weights = random_weights(MIXED, 64)
    with pytest.raises(ValueError, match=r"\(76, 64\); \(72,\) rows"):
        pack_weights(weights, (Output(width=72), *MIXED[1:]))
    with pytest.raises(ValueError, match=r"\(76, 64\); \(2, 76\) rows"):
        pack_weights(weights, (Output(width=76, is_gated=True), *MIXED[1:]))


def test_weights_that_blocks_do_not_fill_are_refused():
    for columns, output, message in (
        (96, Output(width=8), "96 columns"),
        (64, Output(width=9, is_gated=True), "9 wide"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            pack_weights(random_weights((output,), columns), (output,))
