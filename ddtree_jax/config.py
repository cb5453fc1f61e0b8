"""Model shapes, read from Hugging Face ``config.json`` files, and the key to the axis letters of every array name.

Arrays are named after their axes, one letter an axis, and a letter means the same in every file:

====== ============================= ====== =============================
letter axis                          letter axis
====== ============================= ====== =============================
B      batch                         P      head dim without position
T      tokens in this call           R      rotary head dim
S      cache slots                   U      value head dim
N      tree nodes with the root      E      experts
L      draft depth                   X      experts a token
K      best of a distribution        F      feed-forward width
D      model width                   G      quantization groups
H      query heads                   I      packed int32 words (8 nibbles)
J      drafter key/value heads       V      vocabulary
A      query latent                  Y      features of a token (captured layers x D)
C      KV latent                     M      output slots of a sequence
====== ============================= ====== =============================

O is a query head's whole width (P + R), W a row of the latent cache (C + R), Q the query heads that share one drafter
key/value head, Z a sequence's slots for stop ids (z: for biased ids). A lower-case letter is a second axis of the same
kind.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

INT4_GROUP_SIZE = 32

_IGNORED_KIMI = frozenset(
    """_name_or_path add_cross_attention architectures attention_dropout auto_map aux_loss_alpha bad_words_ids
    begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping encoder_no_repeat_ngram_size ep_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_key_value_heads
    num_nextn_predict_layers num_return_sequences output_attentions output_hidden_states output_scores prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id seq_aux suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16
    use_cache""".split()
)
_IGNORED_WRAPPER = frozenset(
    """architectures auto_map bos_token_id dtype ignore_index media_placeholder_token_id model_type pad_token_id
    torch_dtype transformers_version use_unified_vision_chunk video_placeholder vision_config""".split()
)
_IGNORED_DFLASH = frozenset(
    """architectures attention_dropout auto_map bos_token_id dtype eos_token_id initializer_range max_window_layers
    model_type pad_token_id torch_dtype transformers_version use_cache""".split()
)


class ConfigError(ValueError):
    """A ``config.json`` says something that this engine does not do, or leaves out something that it needs."""


class _Attributes:
    """Takes attributes out of a config one by one; what nobody took in the end is refused by name."""

    def __init__(self, values: Mapping[str, Any], where: str, ignored: Iterable[str]):
        self._values = {name: value for name, value in values.items() if name not in frozenset(ignored)}
        self._where = where

    def take(self, name: str, kind: type, default: Any = ...) -> Any:
        value = self._values.pop(name, default)
        if value is ...:
            raise ConfigError(f"{self._where}: {name!r} is missing; a {kind.__name__} is needed")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise ConfigError(f"{self._where}: {name} is {value!r}; a {kind.__name__} is needed")
        return value

    def positive(self, name: str) -> int:
        value = self.take(name, int)
        if value < 1:
            raise ConfigError(f"{self._where}: {name} is {value}; at least 1 is allowed")
        return value

    def positive_float(self, name: str, default: Any = ...) -> float:
        value = self.take(name, float, default)
        if not 0 < value < math.inf:
            raise ConfigError(f"{self._where}: {name} is {value}; a finite number above 0 is needed")
        return value

    def require(self, name: str, *allowed: Any) -> None:
        """Consumes an attribute whose other values would need code that is not here. Absent counts as allowed."""
        value = self._values.pop(name, allowed[0])
        if value not in allowed:
            raise ConfigError(f"{self._where}: {name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")

    def finish(self) -> None:
        if self._values:
            names = ", ".join(sorted(self._values))
            raise ConfigError(f"{self._where}: unknown attribute {names}; it is neither used nor listed as ignored")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position frequencies: plain for ``factor`` 1, YaRN otherwise (arXiv 2309.00071; DeepSeek's ``mscale``)."""

    theta: float
    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_positions: int = 0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by: as ``transformers`` has it, a ratio of two ``mscale`` terms."""
        if self.factor <= 1.0:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """What DeepSeek-V3 multiplies the softmax scale by: ``mscale_all_dim``'s term, squared."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    @classmethod
    def from_hf(cls, values: Mapping[str, Any] | None, theta: float, where: str) -> "RopeConfig":
        """Reads ``rope_scaling`` or ``rope_parameters``; either may spell the type ``type`` or ``rope_type``."""
        if not values:
            return cls(theta=theta)
        attributes = _Attributes(values, where, ())
        kind = attributes.take("rope_type", str, None) or attributes.take("type", str, "default")
        attributes.require("type", kind)
        theta = attributes.positive_float("rope_theta", theta)
        if kind == "default":
            attributes.finish()
            return cls(theta=theta)
        if kind.lower() not in ("yarn", "deepseek_yarn"):
            raise ConfigError(f"{where}: rope type is {kind!r}; allowed: 'default', 'yarn', 'deepseek_yarn'")
        rope = cls(
            theta=theta,
            factor=attributes.positive_float("factor"),
            beta_fast=attributes.take("beta_fast", float, 32.0),
            beta_slow=attributes.take("beta_slow", float, 1.0),
            original_max_positions=attributes.positive("original_max_position_embeddings"),
            mscale=attributes.take("mscale", float, None),
            mscale_all_dim=attributes.take("mscale_all_dim", float, None),
            attention_factor=attributes.take("attention_factor", float, None),
        )
        attributes.finish()
        return rope


def _read_rope(attributes: _Attributes, where: str) -> RopeConfig:
    """RoPE by either spelling: ``rope_scaling`` beside ``rope_theta``, or ``rope_parameters`` with all in one."""
    scaling = attributes.take("rope_scaling", dict, None)
    parameters = attributes.take("rope_parameters", dict, None)
    if scaling and parameters:
        raise ConfigError(f"{where}: rope_scaling and rope_parameters are both there; only one of them is allowed")
    theta = attributes.positive_float("rope_theta", 10000.0)
    return RopeConfig.from_hf(scaling or parameters, theta, f"{where}: rope_scaling")


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiConfig:
    """Shape of a Kimi K2.6 text model (DeepSeek-V3 type). Attribute names are those of the published file."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    # Both latent norms are built without an epsilon in the published code and so keep that class's default.
    latent_norm_eps: float = 1e-6

    @property
    def softmax_scale(self) -> float:
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self.rope.softmax_factor

    def is_dense(self, layer: int) -> bool:
        return layer < self.first_k_dense_replace

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "KimiConfig":
        """Reads a published ``config.json``: K2.5/K2.6 with ``text_config`` inside, or a bare text model.

        Raises:
          ConfigError: an attribute is missing, has a value that needs other code, or is unknown. It is named.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"Kimi config is {type(values).__name__}; a JSON object is needed")
        text, where = values, "config.json"
        wrapper_eos = values.get("eos_token_id")
        if "text_config" in values:
            wrapper = _Attributes(values, where, _IGNORED_WRAPPER)
            text, where = wrapper.take("text_config", dict), "config.json: text_config"
            wrapper.require("tie_word_embeddings", False)
            wrapper.take("eos_token_id", object, None)
            wrapper.require("quantization_config", None)
            wrapper.finish()
        text = {name: value for name, value in text.items() if name not in ("bos_token_id", "pad_token_id")}
        attributes = _Attributes(text, where, _IGNORED_KIMI)
        for name, *allowed in _KIMI_FIXED:
            attributes.require(name, *allowed)
        _check_quantization(attributes.take("quantization_config", dict), where)
        eos = attributes.take("eos_token_id", object, wrapper_eos)
        config = cls(
            rope=_read_rope(attributes, where),
            eos_token_ids=_token_ids(wrapper_eos if wrapper_eos is not None else eos, f"{where}: eos_token_id"),
            routed_scaling_factor=attributes.positive_float("routed_scaling_factor"),
            rms_norm_eps=attributes.positive_float("rms_norm_eps"),
            first_k_dense_replace=attributes.take("first_k_dense_replace", int),
            **{name: attributes.positive(name) for name in _KIMI_SIZES},
        )
        attributes.finish()
        config._check(where)
        return config

    def _check(self, where: str) -> None:
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ConfigError(
                f"{where}: num_experts_per_tok is {self.num_experts_per_tok}; at most n_routed_experts "
                f"({self.n_routed_experts}) is allowed"
            )
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(self, name) % INT4_GROUP_SIZE:
                raise ConfigError(
                    f"{where}: {name} is {getattr(self, name)}; a multiple of the INT4 group size "
                    f"{INT4_GROUP_SIZE} is needed"
                )
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ConfigError(f"{where}: eos_token_id is {token}; allowed: 0 to {self.vocab_size - 1}")


_KIMI_SIZES = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim intermediate_size moe_intermediate_size n_routed_experts n_shared_experts "
    "num_experts_per_tok max_position_embeddings"
).split()
_KIMI_FIXED = (
    ("attention_bias", False),
    ("hidden_act", "silu"),
    ("moe_layer_freq", 1),
    ("n_group", 1),
    ("topk_group", 1),
    ("norm_topk_prob", True),
    ("scoring_func", "sigmoid"),
    ("topk_method", "noaux_tc"),
    ("tie_word_embeddings", False),
)


def _check_quantization(values: Mapping[str, Any], where: str) -> None:
    """Only INT4, symmetric, in groups of 32 along the input, as Kimi's routed experts are stored."""
    where = f"{where}: quantization_config"
    attributes = _Attributes(values, where, ("ignore", "quantization_status", "global_compression_ratio", "version"))
    attributes.require("quant_method", "compressed-tensors")
    attributes.require("format", "pack-quantized")
    attributes.require("kv_cache_scheme", None)
    groups = attributes.take("config_groups", dict)
    attributes.finish()
    if len(groups) != 1:
        raise ConfigError(f"{where}: config_groups has {len(groups)} groups; exactly 1 is allowed")
    ((name, group),) = groups.items()
    group = _Attributes(group, f"{where}: {name}", ("targets", "format"))
    group.require("input_activations", None)
    group.require("output_activations", None)
    weights = _Attributes(
        group.take("weights", dict), f"{where}: {name}: weights", ("observer", "observer_kwargs", "block_structure")
    )
    group.finish()
    weights.require("num_bits", 4)
    weights.require("type", "int")
    weights.require("symmetric", True)
    weights.require("strategy", "group")
    weights.require("group_size", INT4_GROUP_SIZE)
    weights.require("actorder", None)
    weights.require("dynamic", False)
    weights.finish()


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError(f"{where} is {value!r}; an id or a list of ids is needed")
    return tuple(ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashConfig:
    """Shape of a DFlash drafter (z-lab/dflash): Qwen3-like layers over features of the target.

    ``block_size`` counts the root, so a draft is ``block_size - 1`` deep. ``sliding_layers`` says of each layer whether it
    sees only the last ``sliding_window`` positions (itself included); ``sliding_causal`` says whether such a layer is
    causal inside the block. ``rope_amplitude`` multiplies cos and sin (engines differ in it: see ``RopeConfig``).
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    rope_amplitude: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    sliding_layers: tuple[bool, ...]
    sliding_window: int | None
    sliding_causal: bool = True

    @property
    def depth(self) -> int:
        return self.block_size - 1

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "DFlashConfig":
        """Reads a drafter's ``config.json`` with ``rope_scaling`` or ``rope_parameters``; errors as in ``KimiConfig``."""
        where = "drafter config.json"
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} is {type(values).__name__}; a JSON object is needed")
        attributes = _Attributes(values, where, (*_IGNORED_DFLASH, "max_position_embeddings"))
        attributes.require("attention_bias", False)
        attributes.require("hidden_act", "silu")
        attributes.require("tie_word_embeddings", False, True)
        dflash = _Attributes(attributes.take("dflash_config", dict), f"{where}: dflash_config", ())
        layer_ids = tuple(dflash.take("target_layer_ids", list))
        mask_token_id = dflash.take("mask_token_id", int)
        dflash.finish()
        rope = _read_rope(attributes, where)
        sizes = {name: attributes.positive(name) for name in _DFLASH_SIZES}
        layer_types = attributes.take("layer_types", list, None) or ["full_attention"] * sizes["num_hidden_layers"]
        config = cls(
            **sizes,
            rms_norm_eps=attributes.positive_float("rms_norm_eps"),
            rope=rope,
            rope_amplitude=rope.amplitude,
            mask_token_id=mask_token_id,
            target_layer_ids=layer_ids,
            sliding_layers=tuple(_is_sliding(kind, f"{where}: layer_types") for kind in layer_types),
            sliding_window=attributes.take("sliding_window", int, None),
        )
        if any(config.sliding_layers):
            attributes.require("use_sliding_window", True)
        attributes.take("use_sliding_window", bool, False)
        attributes.finish()
        config._check(where)
        return config

    def _check(self, where: str) -> None:
        if self.block_size < 2:
            raise ConfigError(
                f"{where}: block_size is {self.block_size}; at least 2 is needed (the root and one draft)"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{where}: num_key_value_heads is {self.num_key_value_heads}; a divisor of num_attention_heads "
                f"({self.num_attention_heads}) is needed"
            )
        if len(self.sliding_layers) != self.num_hidden_layers:
            raise ConfigError(
                f"{where}: layer_types has {len(self.sliding_layers)} entries; num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )
        if any(self.sliding_layers) and (self.sliding_window is None or self.sliding_window < 1):
            raise ConfigError(f"{where}: sliding_window is {self.sliding_window}; sliding layers need at least 1")
        for layer in self.target_layer_ids:
            if not isinstance(layer, int) or not 0 <= layer < self.num_target_layers:
                raise ConfigError(
                    f"{where}: target_layer_ids has {layer!r}; allowed: 0 to {self.num_target_layers - 1}"
                )
        if not self.target_layer_ids:
            raise ConfigError(f"{where}: target_layer_ids is empty; at least one layer is needed")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"{where}: mask_token_id is {self.mask_token_id}; allowed: 0 to {self.vocab_size - 1}")


_DFLASH_SIZES = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
    "block_size num_target_layers"
).split()


def _is_sliding(kind: Any, where: str) -> bool:
    if kind not in ("sliding_attention", "full_attention"):
        raise ConfigError(f"{where} has {kind!r}; allowed: 'sliding_attention', 'full_attention'")
    return kind == "sliding_attention"
