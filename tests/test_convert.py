"""The converter on the golden models: INT4 bit for bit, and every published tensor comes back from our arrays."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints_tools.blocks import BlockPacker
from checkpoints_tools.convert import check_key_map, convert
from checkpoints_tools.key_map import dflash_key_map, kimi_key_map
from ddtree_jax import checkpoint, dflash, kimi
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.expert_layout import words_of_blocks
from ddtree_jax.pallas.int4_blocks import pack_down, pack_gate_up
from ddtree_jax.quant import dequantize, pack_int4, unpack_int4
from ddtree_jax.sharding import make_mesh

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"
CONFIGS = Path(__file__).parent / "configs"
SOURCES = {
    "target": (GOLDEN / "target", "tensor=2"),
    "drafter": (GOLDEN / "drafter", "tensor=2"),
    "drafter_sliding": (GOLDEN / "drafter_sliding", "tensor=2"),
    "tiny": (ROOT / "experiments/tiny_kimi/target", "tensor=4"),
    "tiny_drafter": (ROOT / "experiments/tiny_kimi/drafter", "tensor=4"),
}
"""Folders, and the mesh that each is converted for."""


def read_source(directory):
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def write_source(directory, config, tensors):
    """A single-file source."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def load(out):
    """Config and arrays of a checkpoint, experts as published words."""
    metadata = checkpoint.read_metadata(out)
    config_type, model = {"kimi": (KimiConfig, kimi), "dflash": (DFlashConfig, dflash)}[metadata.kind]
    config = config_type.from_hf(metadata.config)
    arrays = checkpoint.load(out, model.parameters(config), make_mesh(None), jnp.bfloat16)
    return config, {part: {name: np.asarray(a) for name, a in table.items()} for part, table in arrays.items()}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Converted models by name; the experts of "tiny" are in blocks, those of "target" are not."""
    root = tmp_path_factory.mktemp("converted")
    for model, (source, mesh) in SOURCES.items():
        convert(source, root / model, mesh=mesh, report=lambda state: None)
    assert (root / "tiny/layer_1/down_EMKmw").is_dir() and (root / "target/layer_1/down_EDI").is_dir()
    return root


def published(model, config, arrays):
    """The tensors that arrays stand for, in published names and layout: written out by hand, apart from the key map."""
    return _published_drafter(arrays) if "drafter" in model else _published_target(config, arrays)


def _turn(weight, num_inputs=1):
    """[inputs..., outputs...] to [out, in]."""
    return weight.reshape(math.prod(weight.shape[:num_inputs]), -1).T


def _published_target(config, arrays):
    found = {
        "model.embed_tokens.weight": arrays["embed"]["embedding_VD"],
        "model.norm.weight": arrays["head"]["norm_D"],
        "lm_head.weight": arrays["head"]["unembedding_VD"],
    }
    for layer in range(config.num_hidden_layers):
        a, p = arrays[f"layer_{layer}"], f"model.layers.{layer}."
        up = np.concatenate([a["key_up_HPC"], a["value_up_HUC"]], axis=1)
        found |= {
            f"{p}input_layernorm.weight": a["input_norm_D"],
            f"{p}post_attention_layernorm.weight": a["post_attention_norm_D"],
            f"{p}self_attn.q_a_proj.weight": _turn(a["q_a_DA"]),
            f"{p}self_attn.q_a_layernorm.weight": a["q_norm_A"],
            f"{p}self_attn.q_b_proj.weight": _turn(a["q_b_AHO"]),
            f"{p}self_attn.kv_a_proj_with_mqa.weight": _turn(a["kv_a_DW"]),
            f"{p}self_attn.kv_a_layernorm.weight": a["kv_norm_C"],
            f"{p}self_attn.kv_b_proj.weight": up.reshape(-1, up.shape[-1]),
            f"{p}self_attn.o_proj.weight": _turn(a["o_HUD"], 2),
        }
        for name in ("gate", "up", "down"):
            if layer == 0:
                found[f"{p}mlp.{name}_proj.weight"] = _turn(a["down_FD" if name == "down" else f"{name}_DF"])
                continue
            shared = a["shared_down_FD" if name == "down" else f"shared_{name}_DF"]
            found[f"{p}mlp.shared_experts.{name}_proj.weight"] = _turn(shared)
            for expert in range(config.n_routed_experts):
                where = expert if name == "down" else (expert, ("gate", "up").index(name))
                words = a["down_EDI" if name == "down" else "gate_up_E2FI"][where]
                e = f"{p}mlp.experts.{expert}.{name}_proj."
                found[f"{e}weight_packed"] = words
                found[f"{e}weight_scale"] = a["down_scale_EDG" if name == "down" else "gate_up_scale_E2FG"][where]
                found[f"{e}weight_shape"] = np.array([words.shape[0], words.shape[1] * 8], np.int32)
        if layer > 0:
            found[f"{p}mlp.gate.weight"] = a["router_ED"]
            found[f"{p}mlp.gate.e_score_correction_bias"] = a["router_bias_E"]
    return {f"language_model.{name}": tensor for name, tensor in found.items()}


def _published_drafter(arrays):
    found = {
        "fc.weight": _turn(arrays["context"]["fc_YD"]),
        "hidden_norm.weight": arrays["context"]["hidden_norm_D"],
        "norm.weight": arrays["head"]["norm_D"],
    }
    for layer in range(len(arrays) - 2):
        a, p = arrays[f"layer_{layer}"], f"layers.{layer}."
        found |= {
            f"{p}input_layernorm.weight": a["input_norm_D"],
            f"{p}post_attention_layernorm.weight": a["post_attention_norm_D"],
            f"{p}self_attn.q_proj.weight": _turn(a["q_DJQR"]),
            f"{p}self_attn.k_proj.weight": _turn(a["k_DJR"]),
            f"{p}self_attn.v_proj.weight": _turn(a["v_DJR"]),
            f"{p}self_attn.o_proj.weight": _turn(a["o_JQRD"], 3),
            f"{p}self_attn.q_norm.weight": a["q_norm_R"],
            f"{p}self_attn.k_norm.weight": a["k_norm_R"],
            f"{p}mlp.gate_proj.weight": _turn(a["gate_DF"]),
            f"{p}mlp.up_proj.weight": _turn(a["up_DF"]),
            f"{p}mlp.down_proj.weight": _turn(a["down_FD"]),
        }
    return found


def assert_same_bits(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    np.testing.assert_array_equal(found.view(f"u{found.itemsize}"), expected.view(f"u{found.itemsize}"))


@pytest.mark.parametrize("case", ["a", "b", "c"])
def test_int4_equals_compressed_tensors(case):
    vectors = load_file(GOLDEN / "int4_packing.safetensors")
    integers = vectors[f"{case}_int"].astype(np.int32)
    np.testing.assert_array_equal(pack_int4(jnp.asarray(integers)), vectors[f"{case}_packed"])
    np.testing.assert_array_equal(unpack_int4(jnp.asarray(vectors[f"{case}_packed"])), integers)
    weights = dequantize(jnp.asarray(vectors[f"{case}_packed"]), jnp.asarray(vectors[f"{case}_scale"]))
    assert_same_bits(np.asarray(weights), vectors[f"{case}_dequant"])


def test_converted_experts_stand_for_the_reference_weights(converted):
    config, arrays = load(converted / "target")
    weights, histogram = {}, np.zeros(16, int)
    for layer in range(1, config.num_hidden_layers):
        a = arrays[f"layer_{layer}"]
        gate_up = np.asarray(dequantize(jnp.asarray(a["gate_up_E2FI"]), jnp.asarray(a["gate_up_scale_E2FG"])))
        down = np.asarray(dequantize(jnp.asarray(a["down_EDI"]), jnp.asarray(a["down_scale_EDG"])))
        for expert in range(config.n_routed_experts):
            for name, weight in zip(("gate", "up", "down"), (*gate_up[expert], down[expert]), strict=True):
                weights[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"] = weight
        for words in (a["gate_up_E2FI"], a["down_EDI"]):
            histogram += np.bincount(np.asarray(unpack_int4(jnp.asarray(words))).ravel() + 8, minlength=16)
    for name, expected in load_file(GOLDEN / "target_dequant_sample.safetensors").items():
        assert_same_bits(weights[name], expected)
    reference = json.loads((GOLDEN / "target_dequant_sums.json").read_text())
    sums = {name: [w.astype(np.float64).sum(), np.abs(w.astype(np.float64)).sum()] for name, w in weights.items()}
    assert sums == reference["sum_and_abs_sum"]
    assert histogram.tolist() == reference["value_histogram_minus8_to_7"]


@pytest.mark.parametrize("model", SOURCES)
def test_every_published_tensor_comes_back(converted, model):
    source = read_source(SOURCES[model][0])
    found = published(model, *load(converted / model))
    ignored = json.loads((GOLDEN / "target_dequant_sums.json").read_text())["ignored_tensors"]
    assert source.keys() - found.keys() == (set(ignored) if model == "target" else set())
    assert found.keys() <= source.keys()
    for name, tensor in found.items():
        assert_same_bits(np.ascontiguousarray(tensor), source[name])


def test_bare_text_model_with_int64_shapes_in_one_file_is_the_same_model(converted, tmp_path):
    config = json.loads((GOLDEN / "target/config.json").read_text())
    tensors = {
        name.removeprefix("language_model."): tensor.astype(np.int64) if name.endswith("weight_shape") else tensor
        for name, tensor in read_source(GOLDEN / "target").items()
        if not name.startswith(("vision_tower.", "mm_projector."))
    }
    convert(write_source(tmp_path / "bare", config["text_config"], tensors), tmp_path / "out")
    bare, golden = load(tmp_path / "out"), load(converted / "target")
    assert bare[0] == golden[0]
    for part, table in golden[1].items():
        for name, array in table.items():
            assert_same_bits(bare[1][part][name], array)


def test_key_maps_cover_the_published_models():
    target = KimiConfig.from_hf(json.loads((CONFIGS / "kimi_k26.json").read_text()))
    key_map = kimi_key_map(target, ["language_model.lm_head.weight"])
    width = {"BF16": 2, "I32": 4, "F32": 4}
    sizes = {piece.tensor: math.prod(piece.shape) * width[piece.dtype] for _, piece in key_map.all_pieces()}
    assert len(key_map.constants) == 69_120
    assert sum(sizes.values()) == 594_205_351_936
    assert {part: table.keys() for part, table in key_map.pieces.items()} == {
        part: table.keys() for part, table in kimi.parameters(target).items()
    }
    drafter = DFlashConfig.from_hf(json.loads((CONFIGS / "kimi_k26_dflash_reconstructed.json").read_text()))
    assert sum(math.prod(piece.shape) for _, piece in dflash_key_map(drafter).all_pieces()) == 3_479_277_056


def test_pieces_fit_when_every_axis_has_another_size():
    target = dataclasses.replace(
        KimiConfig.from_hf(json.loads((GOLDEN / "target/config.json").read_text())),
        vocab_size=53, hidden_size=96, num_hidden_layers=2, num_attention_heads=7, q_lora_rank=11, kv_lora_rank=13,
        qk_nope_head_dim=17, qk_rope_head_dim=6, v_head_dim=19, intermediate_size=23, moe_intermediate_size=64,
        n_routed_experts=5, n_shared_experts=3,
    )  # fmt: skip
    drafter = dataclasses.replace(
        DFlashConfig.from_hf(json.loads((GOLDEN / "drafter/config.json").read_text())),
        hidden_size=11, num_attention_heads=15, num_key_value_heads=5, head_dim=14, intermediate_size=17,
        target_layer_ids=(1, 2),
    )  # fmt: skip
    check_key_map(kimi_key_map(target, []), kimi.parameters(target))
    check_key_map(dflash_key_map(drafter), dflash.parameters(drafter))


def test_key_map_that_leaves_a_place_empty_or_fills_it_twice_is_noticed():
    target = KimiConfig.from_hf(json.loads((GOLDEN / "target/config.json").read_text()))
    for spoil in (
        lambda pieces: pieces["down_EDI"].pop(),
        lambda pieces: pieces["down_EDI"].append(pieces["down_EDI"][0]),
        lambda pieces: pieces.update(q_a_DA=pieces["kv_a_DW"]),
        lambda pieces: pieces.update(key_up_HPC=pieces["o_HUD"]),
    ):
        key_map = kimi_key_map(target, [])
        spoil(key_map.pieces["layer_1"])
        with pytest.raises(RuntimeError, match="key map: layer_1"):
            check_key_map(key_map, kimi.parameters(target))


@pytest.mark.parametrize(("F", "D", "group"), [(64, 160, 1), (256, 96, 2), (512, 128, 8)])
def test_numpy_packs_as_the_kernel_reads(F, D, group):
    rng = np.random.default_rng(F)

    def draw(*shape):
        words = rng.integers(0, 2**32, (*shape[:-1], shape[-1] // 8), np.uint32)
        return words, rng.integers(2**7, 2**14, (*shape[:-1], shape[-1] // 32), np.uint16)

    def as_jax(words, scale):
        return jnp.asarray(words.view(np.int32)), jnp.asarray(scale.view(jnp.bfloat16))

    gate_up, down = draw(2, F, D), draw(D, F)
    shards = [[np.split(part, F // 32 // group, axis=1)[i] for part in gate_up] for i in range(F // 32 // group)]
    expected = np.concatenate([jax.jit(pack_gate_up)(*as_jax(words, scale)) for words, scale in shards])
    found = np.empty(expected.shape, np.uint32)
    BlockPacker(D, found.shape[2]).pack_gate_up(*zip(*gate_up, strict=True), found[None, None])
    np.testing.assert_array_equal(found.view(np.int32), expected)
    expected = np.asarray(jax.jit(pack_down)(*as_jax(*down)))
    found = np.empty(expected.shape, np.uint32)
    BlockPacker(F, found.shape[2]).pack_down(*down, found[None, None])
    np.testing.assert_array_equal(found.view(np.int32), expected)
    words, scale = map(np.asarray, jax.jit(words_of_blocks)(jnp.asarray(expected)))
    np.testing.assert_array_equal(words[:D, : F // 8].view(np.uint32), down[0])
    np.testing.assert_array_equal(scale[:D, : F // 32].view(np.uint16), down[1])
