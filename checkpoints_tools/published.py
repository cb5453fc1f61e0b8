"""Where each value of a converted array stands in the published tensors, said a second time for `verify`.

Nothing here knows the converter: neither its key map nor how it packs. Formulas are those of the models' definitions and
of the block layout as `ddtree_jax.pallas.int4_blocks` describes it.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from ddtree_jax.checkpoint import StoredArray
from ddtree_jax.config import DFlashConfig, KimiConfig

PREFIX = "language_model."
IGNORED = re.compile(r"vision_tower\..*|mm_projector\..*|.*\.rotary_emb\.inv_freq")
EXPERT_ARRAYS = re.compile(r"(gate_up|down)_(E2FI|EDI|EMKmw|scale_E2FG|scale_EDG)")


class Place(NamedTuple):
    """A tensor's name, without a prefix, and how an index into our array becomes one into the tensor."""

    tensor: str
    find: Callable[..., tuple[int, ...]]


def _same(*index: int) -> tuple[int, ...]:
    return index


def _turned(i: int, o: int) -> tuple[int, int]:
    return o, i


def dense_places(config: KimiConfig | DFlashConfig, part: str) -> dict[str, Place]:
    """Places of all arrays of a part that are not experts."""
    layer = part.removeprefix("layer_") if part.startswith("layer_") else None
    if isinstance(config, DFlashConfig):
        return _drafter_layer(config, f"layers.{layer}.") if layer else _DRAFTER_ENDS[part]
    return _target_layer(config, int(layer)) if layer else _TARGET_ENDS[part]


_TARGET_ENDS = {
    "embed": {"embedding_VD": Place("model.embed_tokens.weight", _same)},
    "head": {"norm_D": Place("model.norm.weight", _same), "unembedding_VD": Place("lm_head.weight", _same)},
}
_DRAFTER_ENDS = {
    "context": {"fc_YD": Place("fc.weight", _turned), "hidden_norm_D": Place("hidden_norm.weight", _same)},
    "head": {"norm_D": Place("norm.weight", _same)},
}


def _target_layer(config: KimiConfig, layer: int) -> dict[str, Place]:
    P, R, U = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    name = f"model.layers.{layer}."
    attention = f"{name}self_attn."
    places = _norms(name) | {
        "q_a_DA": Place(f"{attention}q_a_proj.weight", _turned),
        "q_norm_A": Place(f"{attention}q_a_layernorm.weight", _same),
        "q_b_AHO": Place(f"{attention}q_b_proj.weight", lambda a, h, o: (h * (P + R) + o, a)),
        "kv_a_DW": Place(f"{attention}kv_a_proj_with_mqa.weight", _turned),
        "kv_norm_C": Place(f"{attention}kv_a_layernorm.weight", _same),
        "key_up_HPC": Place(f"{attention}kv_b_proj.weight", lambda h, p, c: (h * (P + U) + p, c)),
        "value_up_HUC": Place(f"{attention}kv_b_proj.weight", lambda h, u, c: (h * (P + U) + P + u, c)),
        "o_HUD": Place(f"{attention}o_proj.weight", lambda h, u, d: (d, h * U + u)),
    }
    if layer < config.first_k_dense_replace:
        return places | _mlp("", f"{name}mlp.")
    return places | {
        "router_ED": Place(f"{name}mlp.gate.weight", _same),
        "router_bias_E": Place(f"{name}mlp.gate.e_score_correction_bias", _same),
        **_mlp("shared_", f"{name}mlp.shared_experts."),
    }


def _drafter_layer(config: DFlashConfig, name: str) -> dict[str, Place]:
    R, Q = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    attention = f"{name}self_attn."
    return _norms(name) | {
        "q_DJQR": Place(f"{attention}q_proj.weight", lambda d, j, q, r: ((j * Q + q) * R + r, d)),
        "k_DJR": Place(f"{attention}k_proj.weight", lambda d, j, r: (j * R + r, d)),
        "v_DJR": Place(f"{attention}v_proj.weight", lambda d, j, r: (j * R + r, d)),
        "q_norm_R": Place(f"{attention}q_norm.weight", _same),
        "k_norm_R": Place(f"{attention}k_norm.weight", _same),
        "o_JQRD": Place(f"{attention}o_proj.weight", lambda j, q, r, d: (d, (j * Q + q) * R + r)),
        **_mlp("", f"{name}mlp."),
    }


def _norms(name: str) -> dict[str, Place]:
    kinds = ("input", "post_attention")
    return {f"{kind}_norm_D": Place(f"{name}{kind}_layernorm.weight", _same) for kind in kinds}


def _mlp(prefix: str, name: str) -> dict[str, Place]:
    return {
        f"{prefix}gate_DF": Place(f"{name}gate_proj.weight", _turned),
        f"{prefix}up_DF": Place(f"{name}up_proj.weight", _turned),
        f"{prefix}down_FD": Place(f"{name}down_proj.weight", _turned),
    }


class Weight(NamedTuple):
    """One INT4 weight: of an expert's projection "gate", "up" or "down", by row and column."""

    expert: int
    projection: str
    row: int
    column: int

    def tensor(self, layer: int, kind: str) -> str:
        """Name of its tensor of a kind: "weight_packed", "weight_scale" or "weight_shape"."""
        return f"model.layers.{layer}.mlp.experts.{self.expert}.{self.projection}_proj.{kind}"


class Bits(NamedTuple):
    """An array, an index into it, and from which bit on the value stands in that word."""

    array: str
    index: tuple[int, ...]
    shift: int


def integer_in_words(weight: Weight) -> Bits:
    """Where published words hold a weight's integer: column 8 i + j in bits 4 j of word i."""
    e, projection, row, column = weight
    word, shift = column // 8, 4 * (column % 8)
    if projection == "down":
        return Bits("down_EDI", (e, row, word), shift)
    return Bits("gate_up_E2FI", (e, int(projection == "up"), row, word), shift)


def scale_in_words(weight: Weight) -> Bits:
    e, projection, row, column = weight
    if projection == "down":
        return Bits("down_scale_EDG", (e, row, column // 32), 0)
    return Bits("gate_up_scale_E2FG", (e, int(projection == "up"), row, column // 32), 0)


def integer_in_blocks(weight: Weight, group: int) -> Bits:
    """Where blocks, ``group`` of them below each other, hold a weight's integer."""
    array, place, warp, row, half = _block_row(weight, group)
    inner = weight.column % 64
    word = 128 * warp + 4 * (4 * row + inner % 32 // 8) + 2 * (inner // 32) + half
    shift = 4 * (inner % 8 // 2) + 16 * (inner % 2)
    return Bits(array, (weight.expert, place // group, weight.column // 64, place % group, word), shift)


def scale_in_blocks(weight: Weight, group: int) -> Bits:
    array, place, warp, row, half = _block_row(weight, group)
    word = 512 + 16 * warp + 2 * row + weight.column % 64 // 32
    return Bits(array, (weight.expert, place // group, weight.column // 64, place % group, word), 16 * half)


def _block_row(weight: Weight, group: int) -> tuple[str, int, int, int, int]:
    if weight.projection == "down":
        block, inner = divmod(weight.row, 64)
        return "down_EMKmw", block, inner // 16, inner % 8, inner % 16 // 8
    block, inner = divmod(weight.row, 32)
    return "gate_up_EMKmw", block, inner // 8, inner % 8, int(weight.projection == "up")


class Tensor(NamedTuple):
    """What a published tensor must be: ``values`` are those that it must hold, if only those are right."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    values: tuple[int, ...] = ()


def all_tensors(config: KimiConfig | DFlashConfig, arrays: dict[str, dict[str, StoredArray]]) -> dict[str, Tensor]:
    """Every tensor that a model has by its name without a prefix, given its parts' arrays.

    A tensor's shape is that of the places that its arrays' last values come from.
    """
    found: dict[str, Tensor] = {}
    for part, table in arrays.items():
        for name, place in dense_places(config, part).items():
            shape = tuple(i + 1 for i in place.find(*(size - 1 for size in table[name].shape)))
            dtype = "F32" if name == "router_bias_E" else "BF16"
            found[place.tensor] = max(found.get(place.tensor, Tensor((), ())), Tensor(shape, (dtype,)))
        if any(map(EXPERT_ARRAYS.fullmatch, table)):
            found |= _expert_tensors(config, int(part.removeprefix("layer_")))
    return found


def _expert_tensors(config: KimiConfig, layer: int) -> dict[str, Tensor]:
    D, F = config.hidden_size, config.moe_intermediate_size
    found = {}
    for projection, rows, columns in (("gate", F, D), ("up", F, D), ("down", D, F)):
        for expert in range(config.n_routed_experts):
            name = Weight(expert, projection, 0, 0).tensor
            found[name(layer, "weight_packed")] = Tensor((rows, columns // 8), ("I32",))
            found[name(layer, "weight_scale")] = Tensor((rows, columns // 32), ("BF16",))
            found[name(layer, "weight_shape")] = Tensor((2,), ("I32", "I64"), (rows, columns))
    return found
