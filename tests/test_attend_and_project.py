"""Attention and the product behind it: what they give without a GPU, which launches they are, and a layer with them."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from small_pairs import draw_arrays, target_config

from ddtree_jax import projections
from ddtree_jax.latent_attention import Attention
from ddtree_jax.layers import Turns
from ddtree_jax.pallas.attend_and_project import attend_and_project, attend_and_project_gpu
from ddtree_jax.pallas.latent_rows import fill_tiles
from ddtree_jax.pallas.skinny_gemm import Output, pack_weights
from ddtree_jax.pallas.tree_mla import ROW_MULTIPLE, tree_mla_reference
from ddtree_jax.pallas.tree_mla_split import Query
from ddtree_jax.sharding import make_mesh, sharding_of

SCALE = 0.3
CONFIG = target_config(
    **dict(hidden_size=128, num_attention_heads=4, q_lora_rank=64, kv_lora_rank=512),
    **dict(qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128),
)


def draw(num_nodes: int, heads: int, latent: int, rotary: int, outputs: int, dtype=jnp.bfloat16) -> tuple:
    """Arguments, and the matrices of the heads."""
    rng = np.random.default_rng(num_nodes)

    def normal(*shape: int, dtype=dtype) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)

    angle_BTr = normal(2, num_nodes, rotary // 2, dtype=jnp.float32)
    parts = normal(2, num_nodes, heads, latent), normal(2, num_nodes, heads, rotary)
    query = Query(*parts, jnp.cos(angle_BTr), jnp.sin(angle_BTr))
    cache_BSW, rows_BTW = (normal(2, size, latent + rotary) for size in (32, num_nodes))
    visible_BTt = jnp.broadcast_to(jnp.tri(num_nodes, dtype=bool), (2, num_nodes, num_nodes))
    weight_HUC = normal(heads, outputs, latent)
    blocks = pack_weights([weight_HUC.reshape(-1, latent)], (Output(width=heads * outputs),))
    tile_BtW = fill_tiles(rows_BTW, latent, ROW_MULTIPLE)
    return (query, cache_BSW, rows_BTW, jnp.asarray([19, 0], jnp.int32), visible_BTt, tile_BtW, blocks), weight_HUC


def test_without_a_gpu_it_is_both_in_plain_jax():
    arrays, weight_HUC = draw(5, 3, 128, 16, 64, jnp.float32)
    attended_BTHC = tree_mla_reference(*arrays[:-1], scale=SCALE)
    expected = jnp.einsum("BTHC,HUC->BTHU", attended_BTHC, weight_HUC)
    found = jax.jit(functools.partial(attend_and_project, scale=SCALE))(*arrays)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def launches(function: Callable, *args) -> set[str]:
    """Of those that can be meant, lowered for a GPU that is not there."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return set(re.findall(r"(tree_mla_combine|tree_mla|project_splits|skinny_gemm)_mosaic_gpu", text))


@pytest.mark.parametrize(
    ("num_nodes", "expected"),
    [(32, {"tree_mla", "project_splits"}), (33, {"tree_mla", "tree_mla_combine", "skinny_gemm"})],
)
def test_few_tokens_are_two_launches(monkeypatch, num_nodes, expected):
    """Of two sequences."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    arrays, _ = draw(num_nodes, 2, 512, 64, 128)
    assert launches(functools.partial(attend_and_project, scale=SCALE), *arrays) == expected


def test_what_does_not_fit_is_refused_before_attention_is_traced():
    arrays, _ = draw(3, 2, 256, 64, 128)
    with pytest.raises(NotImplementedError, match=r"a weight of shape \(4, 4, 64, 64\)"):
        attend_and_project_gpu(*arrays, scale=SCALE)


def layer(dtype: Any, mesh_text: str | None, has_kernels: bool) -> Attention:
    """The same random attention: on a mesh its weights are packed."""
    infos, mesh = Attention.parameters(CONFIG), make_mesh(mesh_text)
    table = draw_arrays({"layer": infos}, np.random.default_rng(3))["layer"]
    table = {
        name: jax.device_put(array.astype(dtype), sharding_of(infos[name], mesh, name)) for name, array in table.items()
    }
    if mesh_text:
        arrays = {"layer": table}
        packed = {"layer": list(Attention.projections(CONFIG).values())}
        projections.pack_all(arrays, {"layer": infos}, packed, mesh)
    return Attention(CONFIG, table, mesh if mesh_text else None, has_kernels)


def layer_inputs(dtype: Any) -> tuple:
    rng = np.random.default_rng(4)
    x_BTD, cache_BSW = (
        jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32).astype(dtype) for shape in ((5, 128), (16, 576))
    )
    turns = Turns.of(jnp.arange(10, dtype=jnp.int32).reshape(2, 5), CONFIG.rope, 64, CONFIG.rope.amplitude)
    visible_BTt = jnp.broadcast_to(jnp.tri(5, dtype=bool), (2, 5, 5))
    return x_BTD, turns, visible_BTt, jnp.asarray([7, 0], jnp.int32), cache_BSW


@pytest.mark.parametrize("mesh", ["tensor=2", "expert=2,tensor=4"])
def test_packed_layers_give_what_natural_ones_give(monkeypatch, mesh):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    natural, packed = layer(jnp.float32, None, False), layer(jnp.float32, mesh, True)
    expected, found = (jax.jit(one.__call__)(*layer_inputs(jnp.float32)) for one in (natural, packed))
    for one, other in zip(expected, found, strict=True):
        assert np.abs(one).max() > 1e-3
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_a_layer_has_no_other_launch_behind_attention(monkeypatch):
    """Of a shard's own heads; without kernels weights that are packed are multiplied by themselves."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    found = {
        has_kernels: launches(layer(jnp.bfloat16, "tensor=2", has_kernels).__call__, *layer_inputs(jnp.bfloat16))
        for has_kernels in (True, False)
    }
    assert found == {True: {"tree_mla", "project_splits", "skinny_gemm"}, False: {"skinny_gemm"}}
