"""The loop's own kernels are taken where a program is compiled for one GPU and they take its sizes, else plain JAX."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from ddtree_jax import DecodeConfig, Engine, cache, sampling, tree
from ddtree_jax.pallas import simt
from ddtree_jax.sampling_params import SamplingArrays, SamplingParams

pytest_plugins = ["engines"]

VOCAB, NODES, DEPTH = 50, 16, 3


def grow(logits_BLV: jax.Array) -> tree.Tree:
    return tree.grow(jnp.zeros(2, jnp.int32), logits_BLV, jnp.int32(NODES - 1), NODES, NODES - 1)


def expand(logp_BLK: jax.Array) -> tree.Tree:
    token_BLK = jnp.zeros(logp_BLK.shape, jnp.int32)
    return tree.expand(jnp.zeros(2, jnp.int32), token_BLK, logp_BLK, jnp.int32(5), NODES)


def walk(drawn_BN: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tree.walk(grow(jnp.zeros((2, DEPTH, VOCAB))), drawn_BN, DEPTH)


def commit(slots_BSW: jax.Array) -> list[jax.Array]:
    index_BT, ones_B = jnp.zeros((2, 3), jnp.int32), jnp.ones(2, jnp.int32)
    return cache.commit([slots_BSW], [slots_BSW[:, :4]], index_BT, ones_B, ones_B)


def draw(logits_BNV: jax.Array) -> jax.Array:
    options = {"batch": 2, "max_length": 9, "vocab_size": VOCAB, "eos_token_ids": []}
    arrays = SamplingArrays.stack([SamplingParams(temperature=0.6, top_p=0.9)] * 2, [[0]] * 2, **options)
    zeros_B = jnp.zeros(2, jnp.int32)
    return sampling.draw(logits_BNV, jnp.zeros((2, NODES), jnp.int32), zeros_B, arrays, DEPTH + 1)


CALLS = [
    (grow, (2, DEPTH, VOCAB), ("tree_expand_top", "tree_expand_grow")),
    (expand, (2, DEPTH, 7), ("tree_expand_grow",)),
    (walk, (2, NODES), ("accept_path",)),
    (commit, (2, 20, 6), ("commit_rows",)),
    (draw, (2, NODES, VOCAB), ("sample_best", "sample_merge", "sample_add_up", "sample_collect", "sample_draw")),
]


@pytest.mark.parametrize(("call", "shape", "names"), CALLS, ids=["grow", "expand", "walk", "commit", "draw"])
def test_kernels_where_they_run(call: Callable, shape: tuple, names: tuple, monkeypatch):
    like = jax.ShapeDtypeStruct(shape, jnp.int32 if names == ("accept_path",) else jnp.float32)

    def program(platform: str) -> str:
        fresh = functools.partial(call)  # What is traced depends on the number of devices.
        return jax.jit(fresh).trace(like).lower(lowering_platforms=(platform,)).as_text()

    assert "mosaic_gpu" not in program("cuda")  # Several devices outside shard_map.
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert "mosaic_gpu" not in program("cpu")
    text = program("cuda")
    for name in names:
        assert name in text


@pytest.mark.parametrize("kernels", [None, False])
def test_an_engine_has_none_if_told_so(golden, converted, monkeypatch, kernels):
    """On one of several devices too."""
    folders = converted(golden / "target"), converted(golden / "drafter")
    engine = Engine.load(*folders, max_length=32, dtype="float32", kernels=kernels)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    traced = engine.trace_rounds(DecodeConfig(mode="ddtree", budget=3), 1)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    for name in ("tree_expand_top", "sample_best", "accept_path", "commit_rows"):
        assert (f"{name}_mosaic_gpu" in program) == (kernels is None)


def test_sizes_that_no_kernel_takes(monkeypatch):
    """A tree of more nodes than the kernel holds is grown by the reference."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    logp_BLK = jax.ShapeDtypeStruct((1, 1, 300), jnp.float32)

    def expand(logp_BLK: jax.Array) -> tree.Tree:
        return tree.expand(jnp.zeros(1, jnp.int32), jnp.zeros((1, 1, 300), jnp.int32), logp_BLK, jnp.int32(299), 300)

    assert "mosaic_gpu" not in jax.jit(expand).trace(logp_BLK).lower(lowering_platforms=("cuda",)).as_text()


def test_old_devices_have_no_kernels(monkeypatch):
    class Device:
        compute_capability = "7.5"

    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    with pytest.raises(NotImplementedError, match=r"7\.5"):
        simt.check_device()


def test_growing_is_choosing_and_expanding():
    """Both zeros are one logit; a row without any possible token does not spoil the others."""
    logits_BLV = np.round(np.random.default_rng(1).normal(size=(2, DEPTH, VOCAB))).astype(np.float32)
    logits_BLV[1, 1] = -np.inf
    built = grow(jnp.asarray(logits_BLV))
    order_BLK = np.argsort(-logits_BLV, axis=-1, kind="stable")[..., : NODES - 1].astype(np.int32)
    with np.errstate(invalid="ignore"):
        logp_BLV = logits_BLV - np.asarray(jax.nn.logsumexp(jnp.asarray(logits_BLV), axis=-1, keepdims=True))
    logp_BLK = np.nan_to_num(np.take_along_axis(logp_BLV, order_BLK, -1), nan=-np.inf, neginf=-np.inf)
    expected = tree.expand(
        jnp.zeros(2, jnp.int32), jnp.asarray(order_BLK), jnp.asarray(logp_BLK), jnp.int32(NODES - 1), NODES
    )
    for ours, theirs in zip(jax.tree.leaves(built), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_commit_is_taking_and_appending():
    rng = np.random.default_rng(2)
    slots = {"a": jnp.asarray(rng.normal(size=(2, 9, 5)), jnp.float32), "b": [jnp.zeros((2, 9, 2, 3), jnp.bfloat16)]}
    rows = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=(2, 4, *x.shape[2:])), x.dtype), slots)
    index_BT, length_B, count_B = jnp.array([[3, 0, 1], [2, 2, 0]]), jnp.array([4, 7]), jnp.array([2, 3])
    numbers = [x.astype(jnp.int32) for x in (index_BT, length_B, count_B)]
    done = cache.commit(slots, rows, *numbers)
    expected = cache.append(slots, cache.take_rows(rows, numbers[0]), *numbers[1:])
    for ours, theirs in zip(jax.tree.leaves(done), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
