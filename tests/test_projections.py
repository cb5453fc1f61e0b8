"""Both models with packed weights, beside the same ones with natural arrays: on one device, on meshes, and as programs."""

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from small_pairs import drafter_config, draw_arrays, target_config

from ddtree_jax import dflash, kimi, projections
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.pallas import skinny_gemm
from ddtree_jax.projections import Packed, Product, Projection
from ddtree_jax.sharding import ArrayInfo, make_mesh, sharding_of

SLOTS, LENGTH = 16, 7
MODELS = {"target": kimi, "drafter": dflash}


@functools.cache
def configs() -> tuple[KimiConfig, DFlashConfig]:
    """A layer of each kind, in widths whose halves the kernel takes."""
    sizes = dict(hidden_size=128, num_attention_heads=4, q_lora_rank=64, kv_lora_rank=64)
    sizes |= dict(qk_nope_head_dim=64, qk_rope_head_dim=16, v_head_dim=64)
    target = target_config(intermediate_size=256, moe_intermediate_size=128, vocab_size=40, n_routed_experts=8, **sizes)
    sizes = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=16, intermediate_size=128)
    return target, drafter_config(target, **sizes)


def place(name: str, mesh: jax.sharding.Mesh, dtype=jnp.float32) -> dict[str, dict[str, jax.Array]]:
    """The same random natural arrays of a model on every mesh."""
    config, module = configs()[name == "drafter"], MODELS[name]
    infos = module.parameters(config)
    drawn = draw_arrays(infos, np.random.default_rng(3))
    return {
        part: {
            leaf: jax.device_put(
                array.astype(dtype) if infos[part][leaf].dtype is None else array,
                sharding_of(infos[part][leaf], mesh, leaf),
            )
            for leaf, array in table.items()
        }
        for part, table in drawn.items()
    }


def pack(name: str, arrays: dict, mesh: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs arrays of any type."""
    monkeypatch.setattr(projections, "check", lambda *_: None)
    MODELS[name].pack_projections(arrays, configs()[name == "drafter"], mesh)


def target_call(model: kimi.Kimi, num_tokens: int = 5) -> tuple[Callable, tuple]:
    """A pass over two sequences, and what it takes."""
    rng = np.random.default_rng(5)
    width = model.config.kv_lora_rank + model.config.qk_rope_head_dim
    cache = [jnp.asarray(rng.normal(size=(2, SLOTS, width)), model.norm_D.dtype) for _ in model.blocks]
    token_BT = jnp.asarray(rng.integers(0, model.config.vocab_size, (2, num_tokens)), jnp.int32)
    length_B = jnp.asarray([LENGTH, 0], jnp.int32)
    positions_BT = length_B[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    visible_BTt = jnp.broadcast_to(jnp.tri(num_tokens, dtype=bool), (2, num_tokens, num_tokens))
    return jax.jit(lambda model, *args: model(*args)), (model, token_BT, positions_BT, visible_BTt, length_B, cache)


def drafter_call(model: dflash.DFlash) -> tuple[Callable, tuple]:
    """Hidden rows of a block, and rows of the context."""
    rng = np.random.default_rng(6)
    config = model.config
    shapes = [(2, 4, config.hidden_size), (2, 4, 2 * config.hidden_size)]
    embedded_BTD, features_BTY = (jnp.asarray(rng.normal(size=shape), model.norm_D.dtype) for shape in shapes)
    positions_BT = jnp.broadcast_to(LENGTH + jnp.arange(4, dtype=jnp.int32), (2, 4))
    cache = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), model.init_cache(2, SLOTS))
    length_B = jnp.full(2, LENGTH, jnp.int32)

    def run(model: dflash.DFlash, positions_BT: jax.Array, length_B: jax.Array) -> tuple:
        return model(embedded_BTD, length_B, cache), model.context(features_BTY, positions_BT)

    return jax.jit(run), (model, positions_BT, length_B)


def call_of(name: str, arrays: dict, mesh: jax.sharding.Mesh, **options) -> tuple[Callable, tuple]:
    if name == "target":
        return target_call(kimi.Kimi(configs()[0], arrays, (0, 1), mesh), **options)
    return drafter_call(dflash.DFlash(configs()[1], arrays, mesh))


@functools.cache
def expected(name: str) -> list[np.ndarray]:
    """From natural arrays, on one device."""
    run, args = call_of(name, place(name, make_mesh(None)), make_mesh(None))
    return list(map(np.asarray, jax.tree.leaves(run(*args))))


@pytest.mark.parametrize("name", MODELS)
def test_packed_weights_give_what_natural_ones_give(monkeypatch, name):
    """In float32, where both forms are plain JAX: hidden states, features, cache rows, chosen experts.

    A mesh sums once behind attention and once behind the experts, and gathers the drafter's context alone.
    """
    mesh = make_mesh("expert=2,tensor=2")
    arrays = place(name, mesh)
    pack(name, arrays, mesh, monkeypatch)
    leaves = {leaf: array for table in arrays.values() for leaf, array in table.items()}
    replaced = {name for leaf in leaves.values() if isinstance(leaf, Packed) for name in leaf.form.names}
    assert len(replaced) >= 8 and not replaced & leaves.keys(), "natural arrays are given up"
    run, args = call_of(name, arrays, mesh)
    with monkeypatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        compiled = run.lower(*args).compile()
    for found, exact in zip(jax.tree.leaves(compiled(*args)), expected(name), strict=True):
        assert np.abs(exact).max() > 0.1
        np.testing.assert_allclose(found, exact, rtol=0, atol=2e-5 * np.abs(exact).max())
    kinds = re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(", compiled.as_text())
    sums = {"target": 1 + 2 * 2, "drafter": 2}
    assert sorted(kinds) == ["all-gather"] * (name == "drafter") + ["all-reduce"] * sums[name]


@pytest.mark.parametrize(("name", "mesh"), [("target", "expert=2,tensor=2"), ("drafter", "tensor=1")])
def test_kernels_are_taken_for_few_tokens(monkeypatch, name, mesh):
    """One a projection, as lowered for a Hopper GPU; many tokens are multiplied by unpacked weights.

    Attention's second and absorbed ones are made with its rows. The shared expert's last one has the choice in its launch,
    where it is one launch.
    """
    mesh = make_mesh(mesh)
    arrays = place(name, mesh, jnp.bfloat16)
    MODELS[name].pack_projections(arrays, configs()[name == "drafter"], mesh)
    num_packed = sum(isinstance(leaf, Packed) for table in arrays.values() for leaf in table.values())
    assert num_packed == {"target": 2 * 5 + 2 + 2, "drafter": 2 + 4}[name]
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)

    def count(**options) -> tuple[set[str], int]:
        run, args = call_of(name, arrays, mesh, **options)
        # Other kernels take their time.
        for block in args[0].blocks if name == "target" else ():
            if not block.is_dense:
                block.router.has_kernels = True
        text = run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        # A function for each shape, called by every layer.
        num_calls = len(re.findall(r"call @_?(?:skinny_gemm|choose_and_multiply|latent_query)\w*\(", text))
        return set(re.findall(r"(skinny_gemm\w*|choose_experts)_mosaic_gpu", text)), num_calls

    few = {"skinny_gemm", "skinny_gemm_choose_experts"} if name == "target" else {"skinny_gemm"}
    num_calls = num_packed - 2 if name == "target" else num_packed
    assert count() == (few, num_calls)
    if name == "target":
        assert count(num_tokens=128) == (few, num_calls)
        assert count(num_tokens=129) == ({"choose_experts"}, num_calls)


def test_what_the_kernel_does_not_take_stays_natural(monkeypatch):
    mesh, (config, _) = make_mesh(None), configs()
    arrays = place("target", mesh)
    before = {part: list(table) for part, table in arrays.items()}
    tables = arrays, kimi.parameters(config), kimi.projections(config), mesh
    with pytest.raises(NotImplementedError, match="x has dtype float32"):
        projections.check(*tables)
    kimi.pack_projections(arrays, config, mesh)
    assert {part: list(table) for part, table in arrays.items()} == before

    def refuse() -> None:
        raise NotImplementedError("compute capability 12.0; 9.0 is needed")

    monkeypatch.setattr(projections, "device_config", refuse)
    # Not even joined: that takes a copy.
    monkeypatch.setattr(dflash, "_keys_and_values", None)
    for name, config in zip(MODELS, configs(), strict=True):
        arrays = place(name, mesh, jnp.bfloat16)
        before = {part: list(table) for part, table in arrays.items()}
        MODELS[name].pack_projections(arrays, config, mesh)
        assert {part: list(table) for part, table in arrays.items()} == before


def test_rows_are_those_of_the_equation():
    """Heads of their own, several axes of a result, pieces of its last axis, gate and up."""
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    product = Product("BTA,AHO->BTHO", ("w",), (3, 2))
    w_AHO = draw(7, 4, 5)
    first, second = product.rows(w_AHO)
    np.testing.assert_array_equal(first, np.moveaxis(w_AHO[..., :3], 0, -1).reshape(-1, 7))
    np.testing.assert_array_equal(second, np.moveaxis(w_AHO[..., 3:], 0, -1).reshape(-1, 7))
    (rows,) = Product("BTHP,HPC->BTHC", ("w",)).rows(w_AHO)
    np.testing.assert_array_equal(rows, np.swapaxes(w_AHO, 1, 2).reshape(-1, 4))
    (both,) = Product("BTD,DF->BTF", ("gate", "up")).rows(w_AHO[:, 0], w_AHO[:, 1])
    np.testing.assert_array_equal(both, np.stack([w_AHO[:, 0].T, w_AHO[:, 1].T]))
    x = draw(2, 3, 7)
    for found, exact in zip(product(x, w_AHO), np.split(np.einsum("BTA,AHO->BTHO", x, w_AHO), [3], -1), strict=True):
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5)
    float32 = Product("BTD,ED->BTE", ("w",), dtype=jnp.float32)
    assert float32(x.astype(jnp.bfloat16), draw(4, 7).astype(jnp.bfloat16))[0].dtype == jnp.float32


def test_outputs_begin_with_tiles_of_their_own():
    mesh = make_mesh(None)
    projection = Projection("two", (Product("BTD,DA->BTA", ("a",)), Product("BTD,DW->BTW", ("b",))))
    rng = np.random.default_rng(2)
    table = {name: jnp.asarray(rng.normal(size=(128, width)), jnp.float32) for name, width in (("a", 64), ("b", 72))}
    infos = {name: ArrayInfo(array.shape, (None, None)) for name, array in table.items()}
    arrays = {"layer": dict(table)}
    projections.pack_all(arrays, {"layer": infos}, {"layer": [projection]}, mesh)
    packed = arrays["layer"]["two"]
    assert packed.blocks.shape == (3, 2, 64, 64)
    for rows, array in zip(skinny_gemm.unpack_weights(packed.blocks, packed.form.outputs), table.values(), strict=True):
        np.testing.assert_array_equal(rows, array.T)
