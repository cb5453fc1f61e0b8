"""Which Hugging Face tensor becomes which part of which array: the converter's only place with their names.

Linear weights are published as [out, in] and kept as [in, out], with heads as axes of their own. Packed experts stay
[out, in / 8], an expert's gate and up projection one behind the other; where they are stored in blocks, `slabs` packs
what stands here. ::

    kv_b_proj [H * (P + U), C]          experts.e.gate_proj [F, D / 8] ──► gate_up_E2FI[e, 0]
      head 0: P rows ──► key_up_HPC     experts.e.up_proj   [F, D / 8] ──► gate_up_E2FI[e, 1]
              U rows ──► value_up_HUC   experts.e.down_proj [D, F / 8] ──► down_EDI[e]
      head 1: ...
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ddtree_jax.config import INT4_GROUP_SIZE, DFlashConfig, KimiConfig
from ddtree_jax.quant import NIBBLES

WRAPPER_PREFIX = "language_model."
_IGNORED_KIMI = (r"vision_tower\..*", r"mm_projector\..*", r".*\.rotary_emb\.inv_freq")
_IGNORED_DFLASH = (r".*\.rotary_emb\.inv_freq",)


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor's place in an array: ``array[index] = arrange(tensor)``; ``dtype`` is spelled as in safetensors.

    Of a linear weight, which ``is_turned``, the array is the transpose, its axes split.
    """

    tensor: str
    shape: tuple[int, ...]
    dtype: str = "BF16"
    index: tuple[int, ...] = ()
    is_turned: bool = False
    arrange: Callable[[np.ndarray], np.ndarray] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyMap:
    """Pieces of every array by part; integer tensors that must hold given values; names that may be left unread."""

    pieces: dict[str, dict[str, list[Piece]]]
    constants: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...]

    def is_ignored(self, tensor: str) -> bool:
        return any(re.fullmatch(pattern, tensor) for pattern in self.ignored)

    def tensors_of(self, part: str) -> set[str]:
        """Names of all tensors that go into a part."""
        return {piece.tensor for pieces in self.pieces[part].values() for piece in pieces}

    def all_pieces(self) -> Iterator[tuple[str, Piece]]:
        """Every piece, after the name of the array that it fills."""
        for part, arrays in self.pieces.items():
            for array, pieces in arrays.items():
                for piece in pieces:
                    yield f"{part}/{array}", piece


def kimi_key_map(config: KimiConfig, tensors: Iterable[str]) -> KeyMap:
    """Key map of the target. The names tell whether the text model lies inside K2.5's and K2.6's wrapper."""
    wrapped = any(tensor.startswith(WRAPPER_PREFIX) for tensor in tensors)
    prefix = WRAPPER_PREFIX if wrapped else ""
    vocab = (config.vocab_size, config.hidden_size)
    pieces = {"embed": {"embedding_VD": [Piece(f"{prefix}model.embed_tokens.weight", vocab)]}}
    constants = {}
    for layer in range(config.num_hidden_layers):
        name = f"{prefix}model.layers.{layer}."
        pieces[f"layer_{layer}"] = _norms(name, config.hidden_size) | _attention(config, f"{name}self_attn.")
        if config.is_dense(layer):
            feed_forward = _mlp("", f"{name}mlp.", config.hidden_size, config.intermediate_size)
        else:
            feed_forward = _experts(config, f"{name}mlp.")
            constants |= {f"{p.name}.weight_shape": (p.rows, p.columns) for p in _projections(config, f"{name}mlp.")}
        pieces[f"layer_{layer}"] |= feed_forward
    pieces["head"] = {
        "norm_D": [Piece(f"{prefix}model.norm.weight", (config.hidden_size,))],
        "unembedding_VD": [Piece(f"{prefix}lm_head.weight", vocab)],
    }
    return KeyMap(pieces=pieces, constants=constants, ignored=_IGNORED_KIMI)


def dflash_key_map(config: DFlashConfig) -> KeyMap:
    """Key map of the drafter, whose names have no prefix."""
    D, H, J, R = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    features = D * len(config.target_layer_ids)
    pieces = {
        "context": {
            "fc_YD": [_linear("fc", features, D)],
            "hidden_norm_D": [Piece("hidden_norm.weight", (D,))],
        }
    }
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}."
        attention = f"{name}self_attn."
        pieces[f"layer_{layer}"] = {
            **_norms(name, D),
            "q_DJQR": [_linear(f"{attention}q_proj", D, (J, H // J, R))],
            "k_DJR": [_linear(f"{attention}k_proj", D, (J, R))],
            "v_DJR": [_linear(f"{attention}v_proj", D, (J, R))],
            "q_norm_R": [Piece(f"{attention}q_norm.weight", (R,))],
            "k_norm_R": [Piece(f"{attention}k_norm.weight", (R,))],
            "o_JQRD": [_linear(f"{attention}o_proj", (J, H // J, R), D)],
            **_mlp("", f"{name}mlp.", D, config.intermediate_size),
        }
    pieces["head"] = {"norm_D": [Piece("norm.weight", (D,))]}
    return KeyMap(pieces=pieces, ignored=_IGNORED_DFLASH)


def _linear(name: str, inputs: int | tuple[int, ...], outputs: int | tuple[int, ...]) -> Piece:
    """A weight [out, in] for an array [in, out], either side split into axes."""
    inputs, outputs = (np.atleast_1d(sizes).tolist() for sizes in (inputs, outputs))
    return Piece(f"{name}.weight", (math.prod(outputs), math.prod(inputs)), is_turned=True)


def _norms(name: str, size: int) -> dict[str, list[Piece]]:
    return {
        f"{norm}_norm_D": [Piece(f"{name}{norm}_layernorm.weight", (size,))] for norm in ("input", "post_attention")
    }


def _attention(config: KimiConfig, name: str) -> dict[str, list[Piece]]:
    D, H, A, C = config.hidden_size, config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
    P, R, U = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim

    def up(rows: slice) -> list[Piece]:
        arrange = lambda weight: weight.reshape(H, P + U, C)[:, rows]  # noqa: E731
        return [Piece(f"{name}kv_b_proj.weight", (H * (P + U), C), arrange=arrange)]

    return {
        "q_a_DA": [_linear(f"{name}q_a_proj", D, A)],
        "q_norm_A": [Piece(f"{name}q_a_layernorm.weight", (A,))],
        "q_b_AHO": [_linear(f"{name}q_b_proj", A, (H, P + R))],
        "kv_a_DW": [_linear(f"{name}kv_a_proj_with_mqa", D, C + R)],
        "kv_norm_C": [Piece(f"{name}kv_a_layernorm.weight", (C,))],
        "key_up_HPC": up(slice(None, P)),
        "value_up_HUC": up(slice(P, None)),
        "o_HUD": [_linear(f"{name}o_proj", (H, U), D)],
    }


def _mlp(array_prefix: str, name: str, D: int, F: int) -> dict[str, list[Piece]]:
    return {
        f"{array_prefix}gate_DF": [_linear(f"{name}gate_proj", D, F)],
        f"{array_prefix}up_DF": [_linear(f"{name}up_proj", D, F)],
        f"{array_prefix}down_FD": [_linear(f"{name}down_proj", F, D)],
    }


class _Projection(NamedTuple):
    """One packed projection of one expert, and where its words and its scales go."""

    name: str
    words: str
    scales: str
    rows: int
    columns: int
    index: tuple[int, ...]


def _projections(config: KimiConfig, name: str) -> Iterator[_Projection]:
    D, F = config.hidden_size, config.moe_intermediate_size
    for expert in range(config.n_routed_experts):
        path = f"{name}experts.{expert}."
        yield _Projection(f"{path}gate_proj", "gate_up_E2FI", "gate_up_scale_E2FG", F, D, (expert, 0))
        yield _Projection(f"{path}up_proj", "gate_up_E2FI", "gate_up_scale_E2FG", F, D, (expert, 1))
        yield _Projection(f"{path}down_proj", "down_EDI", "down_scale_EDG", D, F, (expert,))


def _experts(config: KimiConfig, name: str) -> dict[str, list[Piece]]:
    E, D = config.n_routed_experts, config.hidden_size
    arrays = {
        "router_ED": [Piece(f"{name}gate.weight", (E, D))],
        "router_bias_E": [Piece(f"{name}gate.e_score_correction_bias", (E,), "F32")],
        **_mlp("shared_", f"{name}shared_experts.", D, config.moe_intermediate_size * config.n_shared_experts),
    }
    for p in _projections(config, name):
        words = Piece(f"{p.name}.weight_packed", (p.rows, p.columns // NIBBLES), "I32", index=p.index)
        scales = Piece(f"{p.name}.weight_scale", (p.rows, p.columns // INT4_GROUP_SIZE), index=p.index)
        arrays.setdefault(p.words, []).append(words)
        arrays.setdefault(p.scales, []).append(scales)
    return arrays
