"""Which form computes, and attention whose heads lie on several devices. What a kernel computes is tested with the kernel."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_pairs import target_config

from ddtree_jax import generate, kimi, layers
from ddtree_jax.config import KimiConfig
from ddtree_jax.sharding import initialize, make_mesh, sharding_of

CONFIG = target_config(num_attention_heads=8, qk_rope_head_dim=64)
MESHES = ("tensor=2", "tensor=8", "expert=2,tensor=4")
TINY_TARGET = Path(__file__).parents[1] / "experiments" / "tiny_kimi" / "target"


def attention(mesh_text: str | None, dtype=jnp.float32, has_kernels: bool = False) -> kimi.Attention:
    """The same random attention, on a mesh or on none."""
    infos = kimi.Attention.parameters(CONFIG)
    arrays = initialize({"layer": infos}, jax.random.key(1), dtype)["layer"]
    mesh = make_mesh(mesh_text) if mesh_text else None
    if mesh:
        arrays = {name: jax.device_put(array, sharding_of(infos[name], mesh, name)) for name, array in arrays.items()}
    return kimi.Attention(CONFIG, arrays, mesh, has_kernels)


def inputs(dtype=jnp.float32) -> tuple:
    """Five rows, in a batch of two, behind 7 and 0 of 16 slots."""
    rng = np.random.default_rng(2)
    x_BTD = jnp.asarray(rng.normal(size=(2, 5, CONFIG.hidden_size)), dtype)
    cache_BSW = jnp.asarray(rng.normal(size=(2, 16, CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim)), dtype)
    visible_BTt = jnp.asarray(rng.random((2, 5, 5)) < 0.5) | jnp.eye(5, dtype=bool)[None]
    length_B = jnp.array([7, 0], jnp.int32)
    positions_BT = length_B[:, None] + jnp.arange(5)[None]
    turns = layers.Turns.of(positions_BT, CONFIG.rope, CONFIG.qk_rope_head_dim, CONFIG.rope.amplitude)
    return x_BTD, turns, visible_BTt, length_B, cache_BSW


@pytest.mark.parametrize("mesh", MESHES)
def test_heads_on_a_mesh_equal_one_device(mesh):
    expected, found = (jax.jit(attention(text).__call__)(*inputs()) for text in (None, mesh))
    for one, other in zip(expected, found, strict=True):
        assert np.abs(one).max() > 1e-3
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mesh", [*MESHES, "tensor=1"])
def test_attention_on_a_mesh_goes_through_the_kernel(mesh):
    """If it may, and nowhere but on a GPU."""
    for has_kernels, platform, expected in ((True, "cuda", True), (True, "cpu", False), (False, "cuda", False)):
        layer = attention(mesh, jnp.bfloat16, has_kernels)
        text = jax.jit(layer.__call__).trace(*inputs(jnp.bfloat16)).lower(lowering_platforms=(platform,)).as_text()
        assert ("mosaic_gpu" in text) == expected


@pytest.mark.parametrize("mesh", [None, "tensor=4", "expert=4,tensor=2"])
def test_kernels_take_the_tiny_target(mesh):
    config = KimiConfig.from_hf(json.loads((TINY_TARGET / "config.json").read_text()))
    kimi.check_kernels(config, make_mesh(mesh))
    for changes, named in (
        ({"kv_lora_rank": 640}, "640"),
        ({"qk_rope_head_dim": 96}, "96"),
        ({"hidden_size": 208}, "208"),
    ):
        with pytest.raises(NotImplementedError, match=named):
            kimi.check_kernels(replace(config, **changes), make_mesh(mesh))


def test_one_place_decides(monkeypatch):
    def choose(kernels: bool | None, dtype: str = "bfloat16", config: KimiConfig = CONFIG) -> bool:
        return generate._choose_kernels(kernels, config, make_mesh(None), dtype)

    assert [choose(kernels) for kernels in (None, False)] == [False, False]
    check = kimi.check_kernels
    monkeypatch.setattr(generate.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kimi, "check_kernels", lambda config, mesh: None)
    assert [choose(kernels) for kernels in (None, False, True)] == [True, False, True]
    assert [choose(kernels, "float32") for kernels in (None, False)] == [False, False]
    monkeypatch.setattr(kimi, "check_kernels", check)
    wide = replace(CONFIG, kv_lora_rank=640)
    assert choose(None, config=wide) is choose(False, config=wide) is False
    with pytest.raises(ValueError, match="kernels is True, but a latent of 640 .* allowed are None and False"):
        choose(True, config=wide)
