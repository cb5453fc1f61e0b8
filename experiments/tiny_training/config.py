"""The two ``config.json`` files of the tiny pair, spelled as Kimi K2.6 and its DFlash drafter spell theirs."""

from typing import Any

from ddtree_jax.tokenizer import NUM_SPECIAL

NUM_BASE = 3840
VOCAB_SIZE = NUM_BASE + NUM_SPECIAL
BOS, END_OF_TURN, MEDIA_PAD, MASK, PAD = (NUM_BASE + offset for offset in (0, 2, 21, 254, 255))

_ROPE = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 1024,
}
_MAX_POSITIONS = 4096
_THETA = 50000.0

_TARGET_SIZES = {
    "first_k_dense_replace": 1,
    "hidden_size": 192,
    "intermediate_size": 768,
    "kv_lora_rank": 64,
    "max_position_embeddings": _MAX_POSITIONS,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "routed_scaling_factor": 2.827,
    "v_head_dim": 32,
    "vocab_size": VOCAB_SIZE,
}

_DRAFTER_SIZES = {
    "block_size": 8,
    "head_dim": 32,
    "hidden_size": _TARGET_SIZES["hidden_size"],
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "num_target_layers": _TARGET_SIZES["num_hidden_layers"],
    "vocab_size": VOCAB_SIZE,
}

# What transformers writes into a text_config because it is a default; none of it concerns the text model.
_TRANSFORMERS_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(
        """bad_words_ids begin_suppress_tokens cross_attention_hidden_size decoder_start_token_id
        exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id prefix problem_type
        sep_token_id suppress_tokens task_specific_params tokenizer_class""".split()
    ),
    **dict.fromkeys(
        """add_cross_attention do_sample early_stopping is_decoder is_encoder_decoder output_attentions
        output_hidden_states output_scores remove_invalid_values return_dict_in_generate tf_legacy_loss
        tie_encoder_decoder tie_word_embeddings torchscript use_bfloat16""".split(),
        False,
    ),
    **dict.fromkeys("chunk_size_feed_forward encoder_no_repeat_ngram_size min_length no_repeat_ngram_size".split(), 0),
    **dict.fromkeys("num_beam_groups num_beams num_return_sequences".split(), 1),
    **dict.fromkeys("length_penalty repetition_penalty temperature top_p typical_p".split(), 1.0),
    "_name_or_path": "",
    "diversity_penalty": 0.0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "max_length": 20,
    "pruned_heads": {},
    "return_dict": True,
    "top_k": 50,
    "transformers_version": "4.56.2",
}

_QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def target_config() -> dict[str, Any]:
    """The target's ``config.json``."""
    text = {
        **_TRANSFORMERS_DEFAULTS,
        **_TARGET_SIZES,
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "aux_loss_alpha": 0.001,
        "bos_token_id": BOS,
        "dtype": "bfloat16",
        "eos_token_id": END_OF_TURN,
        "ep_size": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": "kimi_k2",
        "moe_layer_freq": 1,
        "n_group": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "pad_token_id": PAD,
        "pretraining_tp": 1,
        "quantization_config": _QUANTIZATION,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {**_ROPE, "type": "yarn"},
        "rope_theta": _THETA,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k25.KimiK25Config",
            "AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
        },
        "bos_token_id": BOS,
        "dtype": "bfloat16",
        "eos_token_id": END_OF_TURN,
        "ignore_index": -100,
        "media_placeholder_token_id": MEDIA_PAD,
        "model_type": "kimi_k25",
        "pad_token_id": PAD,
        "text_config": dict(sorted(text.items())),
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
    }


def drafter_config(target_layer_ids: list[int]) -> dict[str, Any]:
    """The drafter's ``config.json``: all layers slide but the last."""
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": target_layer_ids},
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["sliding_attention"] * (_DRAFTER_SIZES["num_hidden_layers"] - 1) + ["full_attention"],
        "max_position_embeddings": _MAX_POSITIONS,
        "model_type": "qwen3",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**_ROPE, "rope_theta": _THETA, "rope_type": "deepseek_yarn"},
        "sliding_window": 512,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": True,
        **_DRAFTER_SIZES,
    }
