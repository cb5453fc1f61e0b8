"""Published configs give the published model's numbers; what the engine does not do is refused by name."""

import copy
import json
from pathlib import Path

import pytest

from ddtree_jax.config import ConfigError, DFlashConfig, KimiConfig

HERE = Path(__file__).parent


def read(path):
    return json.loads((HERE / path).read_text())


def changed(values, path, value):
    """A copy with the value at a path such as "text_config.vocab_size" replaced, or removed if it is ``...``."""
    values = copy.deepcopy(values)
    *parents, name = path.split(".")
    inner = values
    for parent in parents:
        inner = inner[parent]
    if value is ...:
        del inner[name]
    else:
        inner[name] = value
    return values


K26 = read("configs/kimi_k26.json")
K26_DRAFTER = read("configs/kimi_k26_dflash_reconstructed.json")
K25_DRAFTER = read("configs/kimi_k25_dflash_reconstructed.json")
GROUP = "text_config.quantization_config.config_groups.group_0"


def test_kimi_k26():
    config = KimiConfig.from_hf(K26)
    assert config.softmax_scale == pytest.approx(0.144680, abs=5e-7)
    assert config.rope.amplitude == 1.0
    assert (config.rope.theta, config.rope.factor, config.rope.original_max_positions) == (50000.0, 64.0, 4096)
    assert (config.rope.beta_fast, config.rope.beta_slow) == (32.0, 1.0)
    assert (config.rms_norm_eps, config.latent_norm_eps) == (1e-5, 1e-6)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (163840, 7168, 61)
    assert (config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank) == (64, 1536, 512)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (128, 64, 128)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.n_shared_experts) == (384, 8, 1)
    assert (config.intermediate_size, config.moe_intermediate_size) == (18432, 2048)
    assert config.routed_scaling_factor == 2.827
    assert [layer for layer in range(61) if config.is_dense(layer)] == [0]
    assert config.eos_token_ids == (163586,)


def test_bare_text_model_is_the_wrapped_one():
    assert KimiConfig.from_hf(K26["text_config"]) == KimiConfig.from_hf(K26)


def test_golden_target():
    assert KimiConfig.from_hf(read("golden/target/config.json")).softmax_scale == pytest.approx(0.28936, abs=5e-6)


def test_wrapper_names_the_stop_tokens():
    assert KimiConfig.from_hf(changed(K26, "eos_token_id", [5, 7])).eos_token_ids == (5, 7)


def test_published_drafters():
    k26, k25 = DFlashConfig.from_hf(K26_DRAFTER), DFlashConfig.from_hf(K25_DRAFTER)
    assert k26.sliding_layers == (True,) * 5 + (False,) and k26.sliding_window == 2048
    assert k25.sliding_layers == (False,) * 6 and k25.sliding_window is None
    for config in (k26, k25):
        assert (config.block_size, config.depth, config.mask_token_id) == (8, 7, 163838)
        assert (config.target_layer_ids, config.num_target_layers) == ((1, 12, 24, 35, 47, 58), 61)
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (64, 8, 128)
        assert (config.rms_norm_eps, config.rope_amplitude) == (1e-5, 1.0)
    # `rope_scaling` with "yarn" and `rope_parameters` with "deepseek_yarn" say the same here.
    assert k26.rope == k25.rope and k26.rope.theta == 50000.0


def test_golden_drafters_differ_in_their_sliding_layers_alone():
    full = DFlashConfig.from_hf(read("golden/drafter/config.json"))
    sliding = DFlashConfig.from_hf(read("golden/drafter_sliding/config.json"))
    assert sliding.sliding_layers == (True, True, False) and sliding.sliding_window == 48
    assert full.sliding_layers == (False,) * 3
    assert full.rope == sliding.rope and full.target_layer_ids == sliding.target_layer_ids


def test_rope_amplitude_follows_the_mscale_keys():
    def amplitude(**mscales):
        rope = {name: value for name, value in K25_DRAFTER["rope_scaling"].items() if "mscale" not in name}
        return DFlashConfig.from_hf(K25_DRAFTER | {"rope_scaling": rope | mscales}).rope_amplitude

    assert amplitude() == pytest.approx(1.4158883)
    assert amplitude(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert amplitude(mscale=1.0, mscale_all_dim=0.5) == pytest.approx(1.4158883 / 1.2079442)
    assert amplitude(attention_factor=1.25) == 1.25


def test_drafter_without_rope_scaling_or_layer_types_is_plain():
    values = {name: value for name, value in K25_DRAFTER.items() if name not in ("rope_scaling", "layer_types")}
    config = DFlashConfig.from_hf(values)
    assert (config.rope.factor, config.rope_amplitude) == (1.0, 1.0)
    assert config.sliding_layers == (False,) * 6


@pytest.mark.parametrize(
    "where",
    [
        "",
        "text_config.",
        "text_config.rope_scaling.",
        "text_config.quantization_config.",
        f"{GROUP}.",
        f"{GROUP}.weights.",
    ],
)
def test_unknown_attribute_of_the_target_is_named(where):
    with pytest.raises(ConfigError, match="unknown attribute attention_sinks") as error:
        KimiConfig.from_hf(changed(K26, f"{where}attention_sinks", 4))
    # The innermost part of the path tells where it stands.
    assert all(part in str(error.value) for part in where.split(".")[-2:])


@pytest.mark.parametrize("where", ["", "dflash_config.", "rope_parameters."])
def test_unknown_attribute_of_the_drafter_is_named(where):
    with pytest.raises(ConfigError, match="unknown attribute attention_sinks"):
        DFlashConfig.from_hf(changed(K26_DRAFTER, f"{where}attention_sinks", 4))


@pytest.mark.parametrize(
    "path, value, complaint",
    [
        ("text_config.vocab_size", ..., "'vocab_size' is missing"),
        ("text_config.vocab_size", "many", "vocab_size is 'many'"),
        ("text_config.num_hidden_layers", True, "num_hidden_layers is True; a"),
        ("text_config.num_hidden_layers", 0, "num_hidden_layers is 0; at least 1"),
        ("text_config.hidden_act", "gelu", "hidden_act is 'gelu'; allowed: 'silu'"),
        ("text_config.attention_bias", True, "attention_bias is True; allowed: False"),
        ("text_config.moe_layer_freq", 2, "moe_layer_freq is 2; allowed: 1"),
        ("text_config.n_group", 8, "n_group is 8; allowed: 1"),
        ("text_config.norm_topk_prob", False, "norm_topk_prob is False; allowed: True"),
        ("text_config.scoring_func", "softmax", "scoring_func is 'softmax'; allowed: 'sigmoid'"),
        ("text_config.topk_method", "greedy", "topk_method is 'greedy'; allowed: 'noaux_tc'"),
        ("text_config.tie_word_embeddings", True, "tie_word_embeddings is True; allowed: False"),
        ("text_config.num_experts_per_tok", 385, r"num_experts_per_tok is 385; at most n_routed_experts \(384\)"),
        ("text_config.moe_intermediate_size", 2040, "moe_intermediate_size is 2040; a multiple of .* 32"),
        ("text_config.rope_scaling.type", "linear", "rope type is 'linear'; allowed: 'default', 'yarn'"),
        ("text_config.rope_scaling.factor", ..., "rope_scaling: 'factor' is missing"),
        ("text_config.quantization_config", ..., "'quantization_config' is missing"),
        ("text_config.quantization_config.format", "marlin-24", "format is 'marlin-24'; allowed: 'pack-quantized'"),
        ("text_config.quantization_config.config_groups", {}, "config_groups has 0 groups; exactly 1"),
        (f"{GROUP}.input_activations", {"num_bits": 8}, "input_activations is .*; allowed: None"),
        (f"{GROUP}.weights.num_bits", 8, "num_bits is 8; allowed: 4"),
        (f"{GROUP}.weights.symmetric", False, "symmetric is False; allowed: True"),
        (f"{GROUP}.weights.group_size", 128, "group_size is 128; allowed: 32"),
        (f"{GROUP}.weights.actorder", "group", "actorder is 'group'; allowed: None"),
        ("eos_token_id", 163840, "eos_token_id is 163840; allowed: 0 to 163839"),
        ("eos_token_id", "</s>", "eos_token_id is '</s>'; an id or a list of ids"),
        ("tie_word_embeddings", True, "tie_word_embeddings is True; allowed: False"),
    ],
)
def test_target_that_needs_other_code_is_refused(path, value, complaint):
    with pytest.raises(ConfigError, match=complaint):
        KimiConfig.from_hf(changed(K26, path, value))


@pytest.mark.parametrize(
    "path, value, complaint",
    [
        ("block_size", 1, "block_size is 1; at least 2"),
        ("num_key_value_heads", 7, "num_key_value_heads is 7; a divisor of num_attention_heads"),
        ("layer_types", ["full_attention"], "layer_types has 1 entries; num_hidden_layers is 6"),
        ("layer_types", ["chunked_attention"] * 6, "layer_types has 'chunked_attention'; allowed"),
        ("sliding_window", None, "sliding_window is None; sliding layers need at least 1"),
        ("use_sliding_window", None, "use_sliding_window is None; allowed"),
        ("dflash_config", ..., "'dflash_config' is missing"),
        ("dflash_config.mask_token_id", 163840, "mask_token_id is 163840; allowed: 0 to 163839"),
        ("dflash_config.target_layer_ids", [61], "target_layer_ids has 61; allowed: 0 to 60"),
        ("dflash_config.target_layer_ids", [], "target_layer_ids is empty"),
        ("rope_parameters.rope_type", "longrope", "rope type is 'longrope'"),
        ("attention_bias", True, "attention_bias is True; allowed: False"),
        ("hidden_act", "relu", "hidden_act is 'relu'; allowed: 'silu'"),
    ],
)
def test_drafter_that_needs_other_code_is_refused(path, value, complaint):
    with pytest.raises(ConfigError, match=complaint):
        DFlashConfig.from_hf(changed(K26_DRAFTER, path, value))
