"""Tree MLA: the reference against float64, both kernels interpreted on the CPU against it, and lowered for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec
from simt_numpy import Memory, NumpyThreads

from ddtree_jax.pallas import latent_rows
from ddtree_jax.pallas import tree_mla as mla
from ddtree_jax.pallas import tree_mla_hopper as hopper
from ddtree_jax.pallas import tree_mla_portable as portable
from ddtree_jax.pallas import tree_mla_split as split
from ddtree_jax.pallas.simt import UINT
from ddtree_jax.pallas.tree_mla_split import Query
from ddtree_jax.pallas.tree_mla_turn import load_turn, turn_rows
from experiments.check_tree_mla import random_tree

LATENT, ROTARY, WIDTH, SCALE = 512, 64, 576, 0.05
NAN = jnp.bfloat16(np.nan)


@functools.cache
def interpreted(kernel, config):
    options = {"scale": SCALE, "config": config, "interpret": plgpu.InterpretGPUParams()}
    return jax.jit(functools.partial(kernel, **options))


def run_hopper(*arrays, num_sms=6):
    return np.asarray(interpreted(hopper.tree_mla_hopper, hopper.Config(num_sms=num_sms))(*arrays), np.float32)


def run_portable(*arrays, num_sms=6):
    return np.asarray(interpreted(portable.tree_mla_portable, portable.Config(num_sms=num_sms))(*arrays), np.float32)


def run_reference(*arrays):
    return np.asarray(mla.tree_mla_reference(*jax.tree.map(jnp.asarray, arrays), scale=SCALE), np.float32)


FORMS = pytest.mark.parametrize("run", [run_hopper, run_portable], ids=["hopper", "portable"])


def random_query(rng, batch, num_nodes, heads, latent=LATENT, rotary=ROTARY):
    """In numpy, each pair of a node turned by an angle of its own."""
    parts = (draw(rng, batch, num_nodes, heads, width) for width in (latent, rotary))
    angle = rng.uniform(0, 2 * np.pi, (batch, num_nodes, rotary // 2)).astype(np.float32)
    return Query(*parts, np.cos(angle), np.sin(angle))


def draw(rng, *shape):
    return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)


def random_case(seed, num_nodes, heads, num_slots, lengths):
    """Query, cache (NaN behind the lengths), rows, lengths and masks, in numpy."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)
    query = random_query(rng, batch, num_nodes, heads)
    cache, rows = draw(rng, batch, num_slots, WIDTH), draw(rng, batch, num_nodes, WIDTH)
    length = np.asarray(lengths, np.int32)
    cache[np.arange(num_slots)[None] >= length[:, None]] = NAN
    visible = np.stack([random_tree(rng, num_nodes) for _ in lengths])
    return query, cache, rows, length, visible


def in_one(query):
    """Turned in complex numbers, then rounded as the model does."""
    pairs = np.asarray(query.rotary_BTHR, np.float32).reshape(*query.rotary_BTHR.shape[:3], -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * (query.cos_BTr + 1j * query.sin_BTr)[:, :, None]
    turned = np.stack([turned.real, turned.imag], axis=-1).reshape(query.rotary_BTHR.shape)
    return np.concatenate([query.latent_BTHC, turned.astype(jnp.bfloat16)], axis=-1)


def in_float64(query, cache, rows, length, visible):
    query, cache, rows = (np.asarray(x, np.float64) for x in (in_one(query), cache, rows))
    out = np.empty((*query.shape[:3], LATENT))
    for b, count in enumerate(np.asarray(length)):
        keys = np.concatenate([cache[b, :count], rows[b]])
        score = np.einsum("nhw,sw->nhs", query[b], keys) * SCALE
        seen = np.concatenate([np.ones((rows.shape[1], count), bool), np.asarray(visible[b])], axis=1)
        score = np.where(seen[:, None], score, -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        out[b] = np.einsum("nhs,sc->nhc", weight / weight.sum(-1, keepdims=True), keys[:, :LATENT])
    return out


def error(out, expected):
    return np.linalg.norm(out - expected) / np.linalg.norm(expected)


def test_reference_agrees_with_float64():
    case = random_case(0, num_nodes=5, heads=3, num_slots=48, lengths=[0, 7, 48])
    assert error(run_reference(*case), in_float64(*case)) < 5e-3


@FORMS
@pytest.mark.parametrize(
    ("num_nodes", "heads", "num_slots", "lengths"),
    [
        (5, 8, 192, [0, 1, 63]),
        (16, 8, 192, [64, 65]),
        (1, 8, 448, [447]),
        (3, 3, 128, [128]),
        (33, 2, 64, [16]),
        (70, 1, 64, [50]),
    ],
)
def test_kernels_agree_with_float64(run, num_nodes, heads, num_slots, lengths):
    case = random_case(len(lengths), num_nodes, heads, num_slots, lengths)
    out = run(*case)
    assert out.shape == (len(lengths), num_nodes, heads, LATENT)
    assert error(out, in_float64(*case)) < 5e-3


@FORMS
@pytest.mark.parametrize("num_sms", [1, 40])
def test_any_number_of_splits_gives_the_same(run, num_sms):
    case = random_case(7, num_nodes=4, heads=8, num_slots=320, lengths=[300, 64])
    assert error(run(*case, num_sms=num_sms), in_float64(*case)) < 5e-3


@FORMS
def test_maxima_may_grow_by_many_orders_of_magnitude(run):
    """From tile to tile, so that the sums so far have to be rescaled: inside a pair of tiles and between two.

    In the second sequence they shrink.
    """
    query, cache, rows, length, visible = random_case(11, num_nodes=4, heads=8, num_slots=320, lengths=[320, 320])
    gain_S = np.repeat(np.arange(1, 6, dtype=cache.dtype), 64)
    gain_BS = np.stack([gain_S, gain_S[::-1]])
    query = query._replace(
        latent_BTHC=query.latent_BTHC * jnp.bfloat16(8), rotary_BTHR=query.rotary_BTHR * jnp.bfloat16(8)
    )
    case = query, cache * gain_BS[..., None], rows, length, visible
    assert error(run(*case, num_sms=1), in_float64(*case)) < 5e-3


@FORMS
def test_sequences_and_hidden_nodes_do_not_reach_others(run):
    query, cache, rows, length, visible = random_case(3, num_nodes=9, heads=8, num_slots=64, lengths=[20, 30])
    # Node 8 sees itself alone, as the padding of a tree does.
    visible[:, 8] = np.arange(9) == 8
    clean = run(query, cache, rows, length, visible)
    cache[1], rows[1], rows[0, 8] = NAN, NAN, NAN
    poisoned = run(query, cache, rows, length, visible)
    np.testing.assert_array_equal(poisoned[0, :8], clean[0, :8])
    assert np.isnan(poisoned[0, 8]).all()
    assert np.isnan(poisoned[1]).all()


@FORMS
def test_hiding_an_ancestor_changes_its_descendants_alone(run):
    query, cache, rows, length, visible = random_case(5, num_nodes=9, heads=8, num_slots=64, lengths=[33, 64])
    ancestor = 1
    descends = visible[0, :, ancestor] & (np.arange(9) != ancestor)
    assert 0 < descends.sum() < 8
    hidden = visible.copy()
    hidden[0, descends, ancestor] = False
    before, after = (run(query, cache, rows, length, mask) for mask in (visible, hidden))
    changed_BT = (before != after).any(axis=(2, 3))
    np.testing.assert_array_equal(changed_BT, [descends, np.zeros(9, bool)])


@FORMS
def test_a_row_that_sees_nothing_is_zero(run):
    query, cache, rows, length, visible = random_case(6, num_nodes=9, heads=8, num_slots=64, lengths=[0, 1])
    visible[0, 1] = False
    out = run(query, cache, rows, length, visible)
    assert (out[0, 1] == 0).all()
    assert (out[0, 0] != 0).any()


def test_narrow_models_are_filled_up(monkeypatch):
    rng = np.random.default_rng(9)
    query = random_query(rng, 1, 3, 5, latent=64, rotary=16)
    arrays = (query, draw(rng, 1, 32, 80), draw(rng, 1, 3, 80), np.asarray([17], np.int32), random_tree(rng, 3)[None])
    arrays = jax.tree.map(jnp.asarray, arrays)
    interpreted = functools.partial(hopper.tree_mla_hopper, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setattr(mla, "_kernel", lambda _: interpreted)
    out, expected = mla.tree_mla_gpu(*arrays, scale=SCALE), mla.tree_mla_reference(*arrays, scale=SCALE)
    assert error(np.asarray(out, np.float32), np.asarray(expected, np.float32)) < 5e-3


def test_rows_that_are_filled_up_are_taken_as_they_are(monkeypatch):
    arrays = jax.tree.map(jnp.asarray, random_case(3, num_nodes=9, heads=8, num_slots=64, lengths=[20, 30]))
    tile = latent_rows.fill_tiles(arrays[2], LATENT, mla.ROW_MULTIPLE)
    np.testing.assert_array_equal(
        np.asarray(mla.tree_mla(*arrays, tile, scale=SCALE), np.float32), run_reference(*arrays)
    )
    filled = []
    monkeypatch.setattr(hopper, "fill_tiles", lambda *args: filled.append(args) or latent_rows.fill_tiles(*args))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    for rest, times in (((tile,), 0), ((), 1)):
        jax.jit(functools.partial(mla.tree_mla_gpu, scale=SCALE)).trace(*arrays, *rest)
        assert len(filled) == times


def test_mask_words_hold_the_visible_bits():
    visible = np.asarray(random_case(1, num_nodes=37, heads=1, num_slots=16, lengths=[0, 0])[-1])
    words = np.asarray(split.pack_visible(jnp.asarray(visible), 3, 64, 64)).view(np.uint32)
    assert words.shape == (2, 2, 128)
    bits = (words[:, np.arange(64) // 32] >> (np.arange(64) % 32)[:, None]) & 1
    np.testing.assert_array_equal(bits[:, :37, :111], np.repeat(visible.swapaxes(1, 2), 3, axis=2))
    assert not bits[:, 37:].any()
    assert not bits[:, :, 111:].any()


@pytest.mark.parametrize("num_slots", [64, 1024, 139264])
@pytest.mark.parametrize("tree_tiles", [1, 2, 4])
def test_a_cache_may_be_longer(num_slots, tree_tiles):
    """How the tiles are split depends on what is committed and on the GPU, not on slots that are unused."""
    lengths = jnp.arange(min(num_slots, 1 << 13) + 1, dtype=jnp.int32)
    splits, most = (
        split.num_splits(split.most_splits(1, 2, 132), slots, tree_tiles, 64) for slots in (num_slots, 1 << 20)
    )
    *_, each = split.tile_counts(lengths, tree_tiles, splits, 64)
    *_, expected = split.tile_counts(lengths, tree_tiles, most, 64)
    np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize(("num_nodes", "heads", "row_tile"), [(16, 8, 1), (5, 3, 0), (67, 2, 2)])
def test_queries_are_turned(num_nodes, heads, row_tile):
    """Where the copy engine puts them: of row r unit u stands in the place of u ^ (r % 8)."""
    query = random_query(np.random.default_rng(num_nodes), 2, num_nodes, heads)
    expected = in_one(query)[1, :, :, LATENT:].reshape(-1, ROTARY)[row_tile * 64 :][:64]
    rows = np.full((64, ROTARY), NAN)
    rows[: len(expected)] = query.rotary_BTHR[1].reshape(-1, ROTARY)[row_tile * 64 :][:64]
    units = np.arange(64)[:, None], np.arange(8)[None] ^ (np.arange(64)[:, None] % 8)
    memory = Memory(np.ascontiguousarray(rows.reshape(64, 8, 8)[units]).view(UINT).reshape(-1))
    t = NumpyThreads(128)
    numbers = t.value(np.int32, 1), t.value(np.int32, row_tile)
    pairs = (Memory(x.reshape(-1)) for x in (query.cos_BTr, query.sin_BTr))
    turn_rows(t, memory, load_turn(t, query.cos_BTr.shape, heads, *numbers, *pairs))
    turned = memory.array.view(jnp.bfloat16).reshape(64, 8, 8)[units].reshape(64, ROTARY)
    np.testing.assert_allclose(
        turned[: len(expected)].astype(np.float32), expected.astype(np.float32), rtol=2**-7, atol=1e-6
    )
    assert np.mean(turned[: len(expected)] == expected) > 0.99


@FORMS
def test_slots_that_are_unused_change_no_bit(run):
    query, cache, rows, length, visible = random_case(13, num_nodes=16, heads=8, num_slots=128, lengths=[100])
    more = np.concatenate([cache, np.full_like(cache, NAN)], axis=1)
    np.testing.assert_array_equal(
        run(query, more, rows, length, visible, num_sms=40), run(query, cache, rows, length, visible, num_sms=40)
    )


def abstract(num_nodes, heads, num_slots, dtype=jnp.bfloat16, latent=LATENT, rotary=ROTARY):
    parts = [jax.ShapeDtypeStruct((1, num_nodes, heads, width), dtype) for width in (latent, rotary)]
    query = Query(*parts, *(jax.ShapeDtypeStruct((1, num_nodes, rotary // 2), jnp.float32),) * 2)
    arrays = [jax.ShapeDtypeStruct((1, size, latent + rotary), dtype) for size in (num_slots, num_nodes)]
    return query, *arrays, jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1, num_nodes, num_nodes), bool)


@pytest.mark.parametrize("kernel", [hopper.tree_mla_hopper, portable.tree_mla_portable], ids=["hopper", "portable"])
@pytest.mark.parametrize(
    ("num_nodes", "heads", "num_slots"), [(16, 8, 4096), (64, 64, 131072), (1, 8, 1024), (256, 8, 512)]
)
def test_kernels_lower_for_a_gpu(kernel, num_nodes, heads, num_slots):
    run = functools.partial(kernel, scale=SCALE)
    lowered = jax.jit(run).trace(*abstract(num_nodes, heads, num_slots)).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("kernel", [hopper.tree_mla_hopper, portable.tree_mla_portable], ids=["hopper", "portable"])
@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        (abstract(4, 8, 64, dtype=jnp.float32), "float32"),
        (abstract(4, 8, 64, latent=384), "latent part is 384 wide"),
        (abstract(4, 8, 64, rotary=32), "rotary part is 32 wide"),
        (abstract(4, 8, 60), "60 slots"),
    ],
)
def test_unsupported_input_is_named(kernel, arrays, named):
    with pytest.raises(NotImplementedError, match=named):
        jax.eval_shape(functools.partial(kernel, scale=SCALE), *arrays)


@pytest.mark.parametrize("kernel", [hopper.tree_mla_hopper, portable.tree_mla_portable], ids=["hopper", "portable"])
@pytest.mark.parametrize("field", ["cos_BTr", "sin_BTr"])
def test_cosines_and_sines_are_checked(kernel, field):
    query, *rest = abstract(4, 8, 64)
    name = {"cos_BTr": "cosines", "sin_BTr": "sines"}[field]
    for size, dtype, error, named in (
        ((1, 4, 32), jnp.bfloat16, NotImplementedError, f"{name} are bfloat16"),
        ((1, 4, 16), jnp.float32, ValueError, rf"{name} have the shape \(1, 4, 16\); \(1, 4, 32\) is needed"),
        ((1, 3, 32), jnp.float32, ValueError, rf"{name} have the shape \(1, 3, 32\)"),
    ):
        wrong = query._replace(**{field: jax.ShapeDtypeStruct(size, dtype)})
        with pytest.raises(error, match=named):
            jax.eval_shape(functools.partial(kernel, scale=SCALE), wrong, *rest)


def test_one_place_chooses(monkeypatch):
    """One device: the kernel when compiled for a GPU, else the reference. What no kernel takes: the reference at once."""
    run = functools.partial(mla.tree_mla, scale=SCALE)
    traced = jax.jit(run).trace(*abstract(4, 8, 64))
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cuda",)).as_text()
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    traced = jax.jit(run).trace(*abstract(4, 8, 64, rotary=48))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    traced = jax.jit(run).trace(*abstract(4, 8, 64, dtype=jnp.float32))
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_heads_are_divided_among_devices():
    """Inside shard_map: the reference on the CPU, equal to that of one device, and the kernel when compiled for a GPU."""
    mesh = jax.make_mesh((4, 2), ("tensor", "expert"), axis_types=(AxisType.Auto, AxisType.Auto))
    heads, all_of_it = PartitionSpec(None, None, "tensor"), PartitionSpec()
    run = functools.partial(mla.tree_mla, scale=SCALE)
    specs = Query(heads, heads, all_of_it, all_of_it), *(all_of_it,) * 4
    sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False))
    case = random_case(8, num_nodes=5, heads=12, num_slots=48, lengths=[0, 7, 48])
    in_float32 = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == jnp.bfloat16 else x, case)
    np.testing.assert_allclose(sharded(*in_float32), jax.jit(run)(*in_float32), rtol=1e-5, atol=1e-5)
    assert "mosaic_gpu" in sharded.trace(*case).lower(lowering_platforms=("cuda",)).as_text()
