"""The drafter's attention: plain JAX and the kernel, interpreted on the CPU, against float64; its layer on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax import dflash
from ddtree_jax.config import DFlashConfig, RopeConfig
from ddtree_jax.layers import Turns
from ddtree_jax.pallas import block_attention as attention
from ddtree_jax.pallas import block_attention_kernel as kernel
from ddtree_jax.sharding import initialize, make_mesh

WIDTH, EPS = 128, 1e-5


def random_case(seed, lengths, rows, heads, group, num_slots, window):
    """Arguments in numpy; slots that no row sees hold NaN."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)

    def draw(*shape):
        return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)

    row, cache = (batch, rows, heads, WIDTH), (batch, num_slots, heads, WIDTH)
    rows_of_block = draw(batch, rows, heads, group, WIDTH), draw(*row), draw(*row)
    gains = [(1 + 0.1 * rng.standard_normal(WIDTH)).astype(jnp.bfloat16) for _ in range(2)]
    angle = rng.uniform(0, 7, (batch, rows, WIDTH // 2)).astype(np.float32)
    keys, values = draw(*cache), draw(*cache)
    for sequence, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window + 1)
        for x in (keys, values):
            x[sequence, :first], x[sequence, length:] = np.nan, np.nan
    return *rows_of_block, *gains, np.cos(angle), np.sin(angle), keys, values, np.asarray(lengths, np.int32)


def in_float64(query, key, value, query_gain, key_gain, cos, sin, keys, values, lengths, *, window, is_causal):
    query, key, value, keys, values, cos, sin = (
        np.asarray(x, np.float64) for x in (query, key, value, keys, values, cos, sin)
    )

    def finish(x, gain, cos, sin):
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * np.asarray(gain, np.float64)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    query = finish(query, query_gain, cos[:, :, None, None], sin[:, :, None, None])
    key = finish(key, key_gain, cos[:, :, None], sin[:, :, None])
    out = np.empty(query.shape)
    num_rows = query.shape[1]
    for b, t, j in np.ndindex(query.shape[:3]):
        first = 0 if window is None else max(0, lengths[b] + t - window + 1)
        others = [u for u in range(num_rows) if window is None or abs(t - u) < window]
        others = [u for u in others if u <= t or not is_causal]
        seen = np.concatenate([keys[b, first : lengths[b], j], key[b, others, j]])
        score = query[b, t, j] @ seen.T * WIDTH**-0.5
        weight = np.exp(score - score.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        out[b, t, j] = weight @ np.concatenate([values[b, first : lengths[b], j], value[b, others, j]])
    return out


def errors(out, expected):
    """Of each sequence."""
    out = np.asarray(out, np.float64)
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(out, expected, strict=True)]


def interpreted(config, **sight):
    options = {"eps": EPS, "config": config, "interpret": plgpu.InterpretGPUParams()} | sight
    return jax.jit(functools.partial(kernel.block_attention_gpu, **options))


# Whole tiles, tiles that the window and the length cut, more tiles than buffers; several tiles of rows; several heads.
CASES = [
    (
        {"lengths": [0, 130], "rows": 8, "heads": 1, "group": 8, "num_slots": 192},
        {"tile": 64, "num_buffers": 2},
        None,
        False,
    ),
    ({"lengths": [0, 300], "rows": 16, "heads": 1, "group": 5, "num_slots": 320}, {"num_sms": 4}, 250, True),
    ({"lengths": [90], "rows": 3, "heads": 2, "group": 2, "num_slots": 128}, {}, 2, False),
]


@pytest.mark.parametrize(("sizes", "config", "window", "is_causal"), CASES)
def test_kernel_agrees_with_float64(sizes, config, window, is_causal):
    """What no row sees holds NaN; so do, in the end, all of the last sequence's slots, which others do not notice."""
    sight = {"window": window, "is_causal": is_causal}
    *arrays, keys, values, lengths = random_case(sizes["rows"], window=window, **sizes)
    run = interpreted(kernel.Config(**config), **sight)
    out = np.asarray(run(*arrays, keys, values, lengths))
    assert max(errors(out, in_float64(*arrays, keys, values, lengths, **sight))) < 5e-3
    if len(lengths) > 1:
        keys[-1], values[-1] = np.nan, np.nan
        poisoned = np.asarray(run(*arrays, keys, values, lengths))
        np.testing.assert_array_equal(poisoned[:-1], out[:-1])
        assert np.isnan(poisoned[-1]).all()


@pytest.mark.parametrize(("window", "is_causal"), [(None, False), (20, True), (2, False)])
def test_plain_jax_agrees_with_float64(window, is_causal):
    arrays = random_case(5, [0, 3, 80], rows=3, heads=2, group=3, num_slots=96, window=window)
    sight = {"window": window, "is_causal": is_causal}
    expected = in_float64(*arrays, **sight)
    *arrays, keys, values, lengths = arrays
    finite = (np.nan_to_num(x.astype(np.float32)).astype(jnp.bfloat16) for x in (keys, values))
    run = jax.jit(functools.partial(attention.block_attention_reference, eps=EPS, **sight))
    out = run(*arrays, *finite, lengths)
    assert max(errors(out, expected)) < 5e-3


def drafter_config(sliding: bool) -> DFlashConfig:
    return DFlashConfig(
        vocab_size=17, hidden_size=16, num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=8,
        head_dim=WIDTH, intermediate_size=8, rms_norm_eps=EPS, rope=RopeConfig(theta=1e4), rope_amplitude=1.0,
        block_size=3, mask_token_id=0, target_layer_ids=(0,), num_target_layers=1, sliding_layers=(sliding,),
        sliding_window=20, sliding_causal=True,
    )  # fmt: skip


def test_a_layer_divides_its_heads_among_devices():
    """Lowered for a GPU it has the kernel, if kernels are allowed; on the CPU it equals the layer of one device."""
    config, mesh = drafter_config(sliding=True), make_mesh("tensor=8")
    arrays = initialize({"layer": dflash.Block.parameters(config)}, jax.random.key(0), jnp.bfloat16)["layer"]
    alone, divided, plain = (dflash.Block(config, 0, arrays, *options) for options in ((), (mesh, True), (mesh, False)))
    rng = np.random.default_rng(3)
    cache = tuple(jnp.asarray(rng.standard_normal((1, 64, 8, WIDTH)), jnp.bfloat16) for _ in range(2))
    x_BTD, length_B = jnp.asarray(rng.standard_normal((1, 3, 16)), jnp.bfloat16), jnp.array([40], jnp.int32)
    turns = Turns.of(length_B[:, None] + jnp.arange(3)[None], config.rope, WIDTH, 1.0)
    inputs = x_BTD, turns, length_B, cache
    expected, out = (np.asarray(jax.jit(block.attend)(*inputs), np.float32) for block in (alone, divided))
    np.testing.assert_allclose(out, expected, rtol=0.02, atol=1e-3)
    for block, names in ((divided, True), (plain, False)):
        text = jax.jit(block.attend).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
        assert ("block_attention" in text and "mosaic_gpu" in text) == names


def test_with_kernels_the_cache_has_whole_pieces():
    config = drafter_config(sliding=False)
    arrays = initialize(dflash.parameters(config), jax.random.key(0), jnp.float32)
    for has_kernels, expected in ((True, 128), (False, 70)):
        cache = dflash.DFlash(config, arrays, has_kernels=has_kernels).init_cache(2, 70)
        assert cache[0][0].shape == cache[0][1].shape == (2, expected, 8, WIDTH)


def test_unsupported_input_is_named(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    sizes = {"lengths": [5], "heads": 1, "group": 2, "window": None}
    *arrays, keys, values, length = random_case(0, rows=3, num_slots=64, **sizes)
    options = {"eps": EPS, "window": None, "is_causal": False}

    def run(*arrays):
        jax.eval_shape(functools.partial(kernel.block_attention_gpu, **options), *arrays)

    with pytest.raises(NotImplementedError, match="bfloat16, float32"):
        run(*arrays, keys.astype(np.float32), values, length)
    with pytest.raises(NotImplementedError, match="the cache has 63 slots"):
        run(*arrays, keys[:, :63], values[:, :63], length)
    with pytest.raises(NotImplementedError, match="the block has 33 rows"):
        run(*random_case(0, rows=33, num_slots=64, **sizes))
    with pytest.raises(NotImplementedError, match="heads are 64 wide"):
        run(
            *(x[..., :64] for x in arrays[:5]),
            *(x[..., :32] for x in arrays[5:]),
            keys[..., :64],
            values[..., :64],
            length,
        )
    for i, name in ((5, "cosines"), (6, "sines")):
        with pytest.raises(NotImplementedError, match=f"{name} are bfloat16"):
            run(*arrays[:i], arrays[i].astype(jnp.bfloat16), *arrays[i + 1 :], keys, values, length)
    with pytest.raises(ValueError, match=r"cosines have the shape \(1, 3, 32\); \(1, 3, 64\) is needed"):
        run(*arrays[:5], *(x[..., :32] for x in arrays[5:]), keys, values, length)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with pytest.raises(NotImplementedError, match="2 devices outside shard_map"):
        run(*arrays, keys, values, length)
