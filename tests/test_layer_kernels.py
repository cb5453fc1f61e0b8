"""Norms, the router's choice and the cache's rows: the kernels' code on numpy against plain JAX, and lowered for a GPU."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simt_numpy import launch, shared

from ddtree_jax import layers
from ddtree_jax.config import RopeConfig
from ddtree_jax.pallas import add_norm, choose_experts, latent_rows, simt
from ddtree_jax.pallas.add_norm import Config, Row, add_and_norm
from ddtree_jax.pallas.latent_rows import Parts, make_rows
from ddtree_jax.pallas.simt import UINT

EPS = 1e-5


def run_add_norm(x: np.ndarray, y: np.ndarray, gain: np.ndarray, parts: int, max_threads: int) -> list[np.ndarray]:
    shape = Row.of(*x.shape, EPS, Config(max_parts=parts, max_threads=max_threads))

    def block(t: Any, *args: Any) -> None:
        add_and_norm(t, *args, shared(shape.num_threads // 32, np.float32), shape=shape)

    return launch(block, shape.num_threads, (len(x), parts), [x, y, gain], [(x.shape, jnp.bfloat16)] * 2)


def draw(rng: np.random.Generator, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> np.ndarray:
    return np.asarray(rng.normal(size=shape) * scale, dtype)


def assert_near(ours: np.ndarray, expected: Any, units: int = 1) -> None:
    """Equal but for so many units of bfloat16's last place."""
    ours, expected = np.asarray(ours, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_allclose(ours, expected, rtol=units * 2.0**-7, atol=1e-30)


@pytest.mark.parametrize(
    ("width", "parts", "max_threads", "of_added"),
    [(7168, 1, 1024, jnp.bfloat16), (1336, 3, 128, jnp.bfloat16), (264, 4, 1024, jnp.float32)],
)
def test_add_norm(width, parts, max_threads, of_added):
    rng = np.random.default_rng(width)
    x, gain, y = draw(rng, 3, width), draw(rng, width), draw(rng, 3, width, dtype=of_added)
    total, normed = run_add_norm(x, y, gain, parts, max_threads)
    expected_total, expected = add_norm.add_norm_reference(*map(jnp.asarray, (x, y, gain)), eps=EPS)
    np.testing.assert_array_equal(total, expected_total)
    assert_near(normed, expected)
    assert np.mean(normed == expected) > 0.99
    # A row's numbers depend on that row alone, not on how many blocks take it.
    alone = run_add_norm(x[1:2], y[1:2], gain, 1, max_threads)
    np.testing.assert_array_equal(alone[1], normed[1:2])
    x[0] = np.nan
    np.testing.assert_array_equal(run_add_norm(x, y, gain, parts, max_threads)[1][1:], normed[1:])


def run_choose(logits: np.ndarray, bias: np.ndarray, is_token: np.ndarray, num_chosen: int, factor: float) -> list:
    rider = choose_experts.make_rider(*map(jnp.asarray, (logits, bias, is_token)), num_chosen, factor)

    def block(t: Any, *args: Any) -> None:
        rider.function(t, *args, shared(rider.num_floats, np.float32))

    outs = [(out.shape, out.dtype) for out in rider.outs]
    return launch(block, rider.num_threads, (rider.num_blocks,), rider.arrays, outs)


@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(5, 384, 8), (3, 61, 3), (1, 130, 6), (2, 8, 8)])
def test_choice(tokens, experts, chosen):
    """Of few different scores, so that many are equal; others are further apart than a sigmoid's rounding."""
    rng = np.random.default_rng(experts)
    logits = rng.integers(-2, 3, (tokens, experts)).astype(np.float32)
    bias = rng.integers(0, 2, experts).astype(np.float32) / 4
    is_token = np.arange(tokens) != 2
    expert, weight = run_choose(logits, bias, is_token, chosen, 2.5)
    arrays = map(jnp.asarray, (logits, bias, is_token))
    expected, expected_weight = choose_experts.choose_experts_reference(*arrays, chosen, 2.5)
    np.testing.assert_array_equal(expert, expected)
    np.testing.assert_allclose(weight, expected_weight, rtol=1e-6)


def test_choice_of_what_is_not_finite():
    """Numbers stay those of experts, each at most once, and other tokens' are what they were."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(3, 40)).astype(np.float32)
    args = (np.zeros(40, np.float32), np.ones(3, bool), 4, 1.0)
    expert, weight = run_choose(logits, *args)
    logits[1], logits[2, 5] = np.nan, np.inf
    changed, changed_weight = run_choose(logits, *args)
    np.testing.assert_array_equal(changed[0], expert[0])
    np.testing.assert_array_equal(changed_weight[0], weight[0])
    assert len(set(changed[1].tolist())) == 4 and changed.min() >= 0 and changed.max() < 40
    assert changed[2, 0] == 5


def run_rows(arrays: Sequence, num_tokens: int, widths: tuple[int, int, int], multiple: int) -> list[np.ndarray]:
    batch, num_rows = len(arrays[0]), num_tokens + -num_tokens % multiple
    query, latent, rotary = widths
    shape = Parts(num_tokens=num_tokens, num_rows=num_rows, query=query, latent=latent, rotary=rotary, eps=EPS)
    num_warps = shape.num_threads // 32

    def block(t: Any, *args: Any) -> None:
        make_rows(t, *args, shared(num_warps, np.float32), shared(num_warps, UINT), shape=shape)

    sizes = (num_tokens, query), (num_tokens, latent + rotary), (num_rows, latent + rotary)
    outs = [((batch, *size), jnp.bfloat16) for size in sizes]
    return launch(block, shape.num_threads, (num_rows, batch), arrays, outs)


@pytest.mark.parametrize(
    ("batch", "tokens", "widths", "multiple"), [(1, 3, (1536, 512, 64), 4), (2, 2, (136, 264, 24), 3)]
)
def test_rows(batch, tokens, widths, multiple):
    rng = np.random.default_rng(tokens)
    query, latent, rotary = widths
    rope = RopeConfig(theta=50_000.0, factor=64.0, original_max_positions=4096)
    positions = jnp.asarray(rng.integers(0, 9000, (batch, tokens)), jnp.int32)
    angle = positions.astype(jnp.float32)[..., None] * layers.rope_frequencies(rope, rotary)[None, None]
    amplitude = 1.25
    turn = jnp.cos(angle) * amplitude, jnp.sin(angle) * amplitude
    projected = draw(rng, batch, tokens, query), draw(rng, batch, tokens, latent + rotary)
    gains = draw(rng, query), draw(rng, latent)
    arrays = (*projected, *gains, *map(np.asarray, turn))
    ours = run_rows(arrays, tokens, widths, multiple)
    reference = functools.partial(latent_rows.latent_rows_reference, eps=EPS, multiple=multiple)
    expected = reference(*map(jnp.asarray, arrays))
    for array, other in zip(ours, expected, strict=True):
        assert array.shape == other.shape
        assert np.mean(array == np.asarray(other)) > 0.99
        np.testing.assert_allclose(np.asarray(array, np.float32), np.asarray(other, np.float32), rtol=0.01, atol=0.02)
    # The key is turned as the layers do it.
    key = projected[1][..., None, latent:]
    turn = (of_pair[:, :, None] for of_pair in layers.Turns.of(positions, rope, rotary, amplitude))
    turned = latent_rows.turn_pairs(jnp.asarray(key), *turn)
    np.testing.assert_array_equal(expected.rows_BTW[..., latent:], turned[:, :, 0])
    for column in (0, latent + 1) if batch > 1 else ():
        broken_query, broken = (array.copy() for array in projected)
        broken_query[0, 0, 0], broken[0, 1, column] = np.nan, np.nan
        query_rows, rows, tile = run_rows((broken_query, broken, *arrays[2:]), tokens, widths, multiple)
        assert np.isnan(np.asarray(query_rows[0, 0], np.float32)).all()
        np.testing.assert_array_equal(query_rows[0, 1:], ours[0][0, 1:])
        others = np.arange(tokens) != 1
        np.testing.assert_array_equal(rows[0, others], ours[1][0, others])
        tile32 = np.asarray(tile, np.float32)
        assert (tile32[0, 1, :latent] == 0).all() and np.isnan(tile32[0, 1, latent:]).all()
        np.testing.assert_array_equal(np.delete(tile32[0], 1, 0), np.delete(np.asarray(ours[2], np.float32)[0], 1, 0))
        by_jax = reference(*map(jnp.asarray, (broken_query, broken, *arrays[2:])))
        assert np.array_equal(np.isnan(np.asarray(by_jax.tile_BtW, np.float32)), np.isnan(tile32))


def test_kernels_lower_for_a_gpu(monkeypatch):
    def layer(options, x, attended, gain, logits, bias, is_token, projected, gains, turn):
        total, normed = add_norm.add_norm(x, attended, gain, eps=EPS, **options)
        chosen = choose_experts.choose_experts(logits, bias, is_token, 8, 2.8, **options)
        rows = latent_rows.latent_rows(*projected, *gains, *turn, eps=EPS, multiple=64, **options)
        return total, normed, chosen, rows

    def like(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    f32 = jnp.float32
    arrays = (
        like(16, 7168),
        like(16, 7168, dtype=f32),
        like(7168),
        like(16, 384, dtype=f32),
        like(384, dtype=f32),
        like(16, dtype=bool),
        (like(1, 16, 1536), like(1, 16, 576)),
        (like(1536), like(512)),
        (like(1, 16, 32, dtype=f32),) * 2,
    )
    # The tests' several host devices would do without kernels, outside shard_map.
    monkeypatch.setattr(simt, "check_device", lambda: None)
    for has_kernels in (True, False):
        traced = jax.jit(functools.partial(layer, {"has_kernels": has_kernels})).trace(*arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        names = re.findall(r"add_norm|choose_experts|latent_rows", text)
        assert len(set(names)) == (3 if has_kernels else 0)
        assert traced.out_info[3].tile_BtW.shape == (1, 64, 576)


def test_unsupported_input_is_named():
    x, gain = jnp.zeros((2, 12), jnp.bfloat16), jnp.zeros(12, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="rows of 12"):
        add_norm.add_norm_gpu(x, x, gain, eps=EPS)
    with pytest.raises(NotImplementedError, match="float32, bfloat16, bfloat16"):
        add_norm.add_norm_gpu(x.astype(jnp.float32), x, gain, eps=EPS)
    logits, bias, is_token = jnp.zeros((2, 2048)), jnp.zeros(2048), jnp.ones(2, bool)
    with pytest.raises(NotImplementedError, match="8 of 2048 experts"):
        choose_experts.choose_experts_gpu(logits, bias, is_token, 8, 1.0)
    with pytest.raises(NotImplementedError, match="logits of bfloat16"):
        choose_experts.choose_experts_gpu(logits.astype(jnp.bfloat16), bias, is_token, 8, 1.0)
    turn = jnp.zeros((1, 2, 2))
    rows, gains = (jnp.zeros((1, 2, 16), jnp.bfloat16), jnp.zeros((1, 2, 12), jnp.bfloat16)), (gain[:8], gain[:8])
    with pytest.raises(NotImplementedError, match=r"widths \(8, 8, 4\)"):
        latent_rows.latent_rows_gpu(rows[0][..., :8], rows[1], *gains, turn, turn, eps=EPS, multiple=64)
