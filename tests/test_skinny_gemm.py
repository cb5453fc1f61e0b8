"""Products of few tokens: reference against float64, the kernel's sums interpreted, its code of threads run on numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from simt_numpy import Memory, NumpyThreads, shared

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
from ddtree_jax.pallas.skinny_gemm_shape import Shape, num_stages
from ddtree_jax.pallas.skinny_gemm_sums import finish, finish_cluster, store_part

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


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_reference_agrees_with_float64(warpgroups):
    x, weights = random_tokens(5, 192), random_weights(MIXED, 192)
    blocks = pack_weights(weights, MIXED, warpgroups)
    # 76, 20 and twice 36 rows begin with a block of 64 each.
    assert blocks.shape == (-(-5 // warpgroups), 3, warpgroups, 64, 64)
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
    """What the kernel's warpgroups sum up [T, rows], pieces added by tiles, and the launch's shape."""
    shape = choose_shape(x, blocks, outputs, num_groups, config)
    tokens = jnp.pad(x, ((0, shape.num_tokens - x.shape[0]), (0, 0)))
    pieces = np.asarray(launch(tokens, blocks.reshape(-1, 64, 64), shape, config, plgpu.InterpretGPUParams())[0])
    sums = np.zeros((shape.num_tiles, shape.rows, shape.num_tokens), np.float32)
    for block in range(shape.num_blocks):
        start, end = shape.span(block)
        tiles = range(start // shape.num_steps, (end - 1) // shape.num_steps + 1)
        for piece, tile in enumerate(tiles):
            sums[tile] += pieces[block, piece].reshape(shape.rows, -1)
    return sums.reshape(-1, shape.num_tokens).T[: x.shape[0]], shape


@pytest.mark.parametrize(
    ("num_tokens", "columns", "warpgroups", "num_groups", "num_blocks", "step_blocks"),
    [(9, 512, 2, 1, 3, 2), (8, 192, 1, 2, 3, 1)],
)
def test_kernel_sums_agree_with_float64(num_tokens, columns, warpgroups, num_groups, num_blocks, step_blocks):
    outputs = (Output(width=4 * 64),)
    x, (weight,) = random_tokens(num_tokens, num_groups * columns), random_weights(outputs, columns)
    blocks = pack_weights([weight], outputs, warpgroups)
    # Two stages: the ring is filled several times.
    config = Config(num_blocks=num_blocks, step_blocks=step_blocks, max_stages=2)
    sums, shape = interpreted_sums(x, blocks, outputs, num_groups, config)
    assert shape.num_steps > 2 and shape.max_pieces > 1
    split = np.asarray(weight, np.float64).reshape(num_groups, -1, columns)
    inputs = np.asarray(x, np.float64).reshape(num_tokens, num_groups, columns)
    assert error(sums, np.einsum("tgk,gok->tgo", inputs, split).reshape(num_tokens, -1)) < 1e-6


def split_shape(outputs, num_tokens, num_blocks, warpgroups, cluster=1):
    x = jax.ShapeDtypeStruct((num_tokens, 7 * 64), jnp.bfloat16)
    tiles = -(-sum(output.num_blocks for output in outputs) // warpgroups)
    blocks = jax.ShapeDtypeStruct((tiles, 7, warpgroups, 64, 64), jnp.bfloat16)
    config = Config(num_blocks=num_blocks, cluster=cluster, step_blocks=1 if cluster > 1 else 2)
    return choose_shape(x, blocks, outputs, 1, config)


@pytest.mark.parametrize("num_blocks", [1, 3, 5, 12, 35])
def test_spans_are_equal_and_have_owners(num_blocks):
    shape = split_shape((Output(width=5 * 64),), 8, num_blocks, 1)
    spans = [range(*shape.span(block)) for block in range(shape.num_blocks)]
    assert [step for span in spans for step in span] == list(range(shape.total_steps))
    assert [shape.owner(step) for step in range(shape.total_steps)] == [b for b, span in enumerate(spans) for _ in span]
    assert max(map(len, spans)) - min(map(len, spans)) <= 1
    assert shape.has_parts or all(span.start % shape.num_steps == 0 for span in spans)


@pytest.mark.parametrize(
    ("tiles", "columns", "num_blocks", "cluster"),
    [(33, 112, 132, 3), (14, 112, 132, 6), (24, 24, 132, 4), (112, 16, 112, 1), (16, 8, 16, 1), (320, 112, 132, 1)],
)
def test_tiles_are_shared_out_by_what_reading_them_takes(tiles, columns, num_blocks, cluster):
    blocks = jax.ShapeDtypeStruct((tiles, columns, 1, 64, 64), jnp.bfloat16)
    config = choose_config(blocks, Config())
    assert (config.num_blocks, config.cluster) == (num_blocks, cluster)


def as_words(dtype, size):
    return shared(size * np.dtype(dtype).itemsize // 4, np.uint32)


def run_finish(shape: Shape, sums_of: list[dict[int, np.ndarray]]) -> list[np.ndarray]:
    """Outputs of all blocks, of each the sums [tokens, rows] of the tiles that it has a piece of."""
    parts = shared(shape.num_blocks * shape.num_tokens * shape.rows, np.float32)
    outs = [as_words(output.dtype, shape.num_stored * output.width) for output in shape.outputs]
    waiting = []
    for block, pieces in enumerate(sums_of):
        for tile, sums in pieces.items():
            staged = np.zeros((shape.num_tokens, shape.sums_stride), np.float32)
            staged[:, : shape.rows] = sums
            threads, memory = NumpyThreads(shape.num_threads), Memory(staged.reshape(-1))
            if shape.span(block)[0] > tile * shape.num_steps:
                store_part(threads, shape, threads.value(np.int32, block), memory, parts)
            else:
                waiting.append((block, tile, threads, memory))
    written = Memory(parts.array)
    for block, tile, threads, memory in waiting:
        count = shape.owner((tile + 1) * shape.num_steps - 1) - block
        numbers = [threads.value(np.int32, number) for number in (tile, block + 1, count)]
        finish(threads, shape, *numbers, memory, written, *outs)
    return [
        out.array.view(output.dtype).reshape(shape.num_stored, output.width)
        for out, output in zip(outs, shape.outputs, strict=True)
    ]


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "warpgroups"), [(3, 13, 1), (16, 4, 2), (64, 35, 1), (9, 5, 1), (33, 2, 2)]
)
def test_parts_are_added_in_order_and_rounded_once(num_tokens, num_blocks, warpgroups):
    shape = split_shape(MIXED, num_tokens, num_blocks, warpgroups)
    rng = np.random.default_rng(num_tokens)
    totals = np.zeros((shape.num_tokens, shape.num_tiles, shape.rows), np.float32)
    sums_of = []
    for block in range(shape.num_blocks):
        start, end = shape.span(block)
        tiles = range(start // shape.num_steps, (end - 1) // shape.num_steps + 1)
        drawn = {tile: rng.standard_normal((shape.num_tokens, shape.rows), np.float32) for tile in tiles}
        drawn[tiles[-1]][0, :2] = [np.nan, np.inf]
        sums_of.append(drawn)
        for tile, sums in drawn.items():
            totals[:, tile] += sums
    found = run_finish(shape, sums_of)
    rows = totals.reshape(shape.num_tokens, -1)[:num_tokens]
    gates, ups = np.moveaxis(rows[:, 192 : 192 + 72].reshape(num_tokens, 18, 2, 2), 2, 0).reshape(2, num_tokens, 36)
    with np.errstate(invalid="ignore"):
        expected = rows[:, :76], rows[:, 128 : 128 + 20], silu(gates) * ups
    for y, exact, output in zip(found[:2], expected[:2], MIXED[:2], strict=True):
        np.testing.assert_array_equal(y, exact.astype(output.dtype))
    # Exponentials differ in their last bits.
    np.testing.assert_allclose(np.float32(found[2]), expected[2], rtol=2**-8)


def load_four(threads, memories, i, index):
    return threads.load_vector(memories[i], index, 4)


@pytest.mark.parametrize(("num_tokens", "cluster", "warpgroups"), [(3, 2, 1), (16, 5, 2), (64, 3, 1), (33, 7, 2)])
def test_a_cluster_shares_out_its_tile(num_tokens, cluster, warpgroups):
    shape = split_shape(MIXED, num_tokens, 132, warpgroups, cluster)
    assert shape.num_blocks == cluster * shape.num_tiles and not shape.has_parts
    rng = np.random.default_rng(cluster)
    sums = rng.standard_normal((shape.num_tiles, cluster, shape.num_tokens, shape.sums_stride), np.float32)
    outs = [as_words(output.dtype, num_tokens * output.width) for output in MIXED]
    for tile, rank in np.ndindex(shape.num_tiles, cluster):
        start, end = shape.span(tile * cluster + rank)
        assert tile * shape.num_steps <= start < end <= (tile + 1) * shape.num_steps
        threads, memories = NumpyThreads(shape.num_threads), [Memory(staged.reshape(-1)) for staged in sums[tile]]
        numbers = (threads.value(np.int32, number) for number in (tile, rank))
        finish_cluster(
            threads, shape, *numbers, functools.partial(load_four, threads, memories), threads.barrier, *outs
        )
    totals = functools.reduce(np.add, np.moveaxis(sums, 1, 0))[..., : shape.rows]
    rows = np.moveaxis(totals, 1, 0).reshape(shape.num_tokens, -1)[:num_tokens]
    for (y, begin), output in zip(((outs[0], 0), (outs[1], 128)), MIXED[:2], strict=True):
        found = y.array.view(output.dtype).reshape(num_tokens, output.width)
        np.testing.assert_array_equal(found, rows[:, begin : begin + output.width].astype(output.dtype))
    assert np.isfinite(outs[2].array.view(jnp.bfloat16).astype(np.float32)).all()


def test_a_tile_of_one_block_needs_no_parts():
    shape = split_shape(MIXED, 8, 5, 1)
    assert not shape.has_parts
    sums = [{tile: np.full((8, 64), tile, np.float32)} for tile in range(5)]
    found = run_finish(shape, sums)
    assert (found[0][:, :64] == 0).all() and (found[0][:, 64:] == 1).all() and (found[1] == 2).all()


def test_values_in_the_middle_are_rounded_to_even_and_nan_stays_nan():
    shape = split_shape(MIXED, 8, 5, 1)
    # A GPU's own NaN has all bits set, and rounding up would make it zero.
    bits = np.array([0x3F808000, 0x3F818000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0x7F7FFFFF], np.uint32)
    sums = np.zeros((8, 64), np.float32)
    sums[:, : bits.size] = bits.view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        found = run_finish(shape, [{tile: sums} for tile in range(5)])[0]
    np.testing.assert_array_equal(
        found[0, : bits.size].view(np.uint16), [0x3F80, 0x3F82, 0x7FC0, 0x7FC0, 0x7F80, 0x7F80]
    )


@pytest.mark.parametrize("config", [Config(num_blocks=3), Config(num_blocks=2), Config(cluster=2)])
def test_kernel_lowers_for_cuda(config):
    """Whole tiles, parts that go through device memory, and clusters; all kinds of outputs."""
    blocks = pack_weights(random_weights(MIXED, 256), MIXED, 2)
    kernel = functools.partial(skinny_gemm_gpu, outputs=MIXED, config=config)
    lowered = jax.jit(kernel).trace(random_tokens(9, 256), blocks).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
    assert [(y.shape, y.dtype) for y in lowered.out_info] == [((9, output.width), output.dtype) for output in MIXED]


def test_kernel_is_chosen_for_cuda_alone(monkeypatch):
    x, blocks = random_tokens(3, 128), pack_weights(random_weights(MIXED, 128), MIXED)

    def has_kernel():
        function = jax.jit(lambda x, blocks: skinny_gemm(x, blocks, MIXED))
        return "mosaic_gpu" in function.trace(x, blocks).lower(lowering_platforms=("cuda",)).as_text()

    # Several devices, which are not those of a shard_map.
    assert not has_kernel()
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert has_kernel()
    reference = jax.jit(functools.partial(skinny_gemm_reference, outputs=MIXED))
    function = jax.jit(lambda x, blocks: skinny_gemm(x, blocks, MIXED))
    for y, expected in zip(function(x, blocks), reference(x, blocks), strict=True):
        np.testing.assert_array_equal(y, expected)


X, BLOCKS = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2, 2, 1, 64, 64), jnp.bfloat16)


def changed(array, shape=None, dtype=None):
    return jax.ShapeDtypeStruct(shape or array.shape, dtype or array.dtype)


@pytest.mark.parametrize(
    ("x", "blocks", "output", "num_groups", "named"),
    [
        (changed(X, dtype=jnp.float32), BLOCKS, Output(width=128), 1, "x has dtype float32"),
        (X, changed(BLOCKS, dtype=jnp.float32), Output(width=128), 1, "the weight has dtype float32"),
        (changed(X, (65, 128)), BLOCKS, Output(width=128), 1, "65 tokens"),
        (changed(X, (0, 128)), BLOCKS, Output(width=128), 1, "0 tokens"),
        (changed(X, (8, 192)), BLOCKS, Output(width=128), 1, "x is 192 wide"),
        (changed(X, (8, 384)), BLOCKS, Output(width=128), 3, "3 groups of 2 tiles"),
        (changed(X, (8, 256)), BLOCKS, Output(width=124), 2, "2 groups of 2 tiles"),
        (X, changed(BLOCKS, (1, 2, 3, 64, 64)), Output(width=192), 1, "tiles of 3 blocks"),
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
    shape = choose_shape(X, BLOCKS, (Output(width=128),), 1, Config())
    assert num_stages(shape, Config()) * shape.stage_bytes <= 220_000


def test_weights_of_other_outputs_are_refused():
    weights = random_weights(MIXED, 64)
    with pytest.raises(ValueError, match=r"\(76, 64\); \(72,\) rows"):
        pack_weights(weights, (Output(width=72), *MIXED[1:]))
    with pytest.raises(ValueError, match=r"\(76, 64\); \(2, 76\) rows"):
        pack_weights(weights, (Output(width=76, is_gated=True), *MIXED[1:]))
