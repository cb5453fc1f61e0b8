"""The target: DeepSeek-V3's decoder over a whole sequence at once, with keys and values of every head spelled out."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from oracle.layers import (
    gated_mlp,
    masked_softmax,
    mscale,
    rms_norm,
    rope_amplitude,
    rope_frequencies,
    rotate,
    scores_of_pairs,
    sigmoid,
)

LATENT_NORM_EPS = 1e-6
"""Of ``q_a_layernorm`` and ``kv_a_layernorm``, whatever the config says of the others."""

GROUP = 32
MAX_REMEMBERED = 2000

Arrays = Mapping[str, np.ndarray]


class Forward(NamedTuple):
    """Logits [T, V], layer outputs [layers, T, D], and how near the router came to another choice.

    ``router_gap`` is the least distance between the last expert taken and the first left out, over tokens and layers.
    """

    logits_TV: np.ndarray
    outputs: list[np.ndarray]
    router_gap: float


def dequantize(words: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Weights [..., columns] of INT4 [..., columns / 8] and scales [..., columns / 32].

    Column 8i + k lies in bits 4k to 4k + 3 of word i, as value + 8. The product with the scale is rounded to bfloat16.
    """
    nibbles = np.stack([(words.view(np.uint32) >> (4 * k)) & 15 for k in range(8)], axis=-1)
    integers = nibbles.reshape(*words.shape[:-1], -1).astype(np.float32) - 8
    return round_to_bfloat16(integers * np.repeat(scales.astype(np.float32), GROUP, axis=-1)).astype(np.float64)


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The nearest float32 whose lower 16 bits are zero; of two, the one that ends in an even bit."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & 0xFFFF0000).view(np.float32)


class Target:
    """Runs token ids through the whole model; equal prefixes are looked up instead of computed again."""

    def __init__(self, config: Any, parts: Mapping[str, Arrays]):
        self.config = config
        self.embedding_VD = parts["embed"]["embedding_VD"].astype(np.float64)
        self.norm_D = parts["head"]["norm_D"].astype(np.float64)
        self.unembedding_VD = parts["head"]["unembedding_VD"].astype(np.float64)
        self._layers = [_expand(parts[f"layer_{layer}"]) for layer in range(config.num_hidden_layers)]
        self._remembered: dict[tuple[int, ...], Forward] = {}

    def __call__(self, token_ids: Sequence[int]) -> Forward:
        token_ids = tuple(token_ids)
        if token_ids not in self._remembered:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[token_ids] = self._run(token_ids)
        return self._remembered[token_ids]

    def _run(self, token_ids: tuple[int, ...]) -> Forward:
        eps = self.config.rms_norm_eps
        x_TD = self.embedding_VD[list(token_ids)]
        outputs, gaps = [], [np.inf]
        for layer, arrays in enumerate(self._layers):
            x_TD = x_TD + self._attend(rms_norm(x_TD, arrays["input_norm_D"], eps), arrays)
            normed_TD = rms_norm(x_TD, arrays["post_attention_norm_D"], eps)
            if layer < self.config.first_k_dense_replace:
                x_TD = x_TD + gated_mlp(normed_TD, *(arrays[name] for name in ("gate_DF", "up_DF", "down_FD")))
            else:
                routed_TD, gap = self._mix(normed_TD, arrays)
                shared = (arrays[f"shared_{name}"] for name in ("gate_DF", "up_DF", "down_FD"))
                x_TD = x_TD + routed_TD + gated_mlp(normed_TD, *shared)
                gaps.append(gap)
            outputs.append(x_TD)
        logits_TV = rms_norm(x_TD, self.norm_D, eps) @ self.unembedding_VD.T
        return Forward(logits_TV, outputs, min(gaps))

    def _attend(self, x_TD: np.ndarray, arrays: Arrays) -> np.ndarray:
        """Causal attention. The rotary part of a key is one for all heads; pairs are interleaved, (2i, 2i + 1)."""
        config = self.config
        C, P, R = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
        num_tokens = len(x_TD)
        position_T = np.arange(num_tokens)
        frequencies = rope_frequencies(config.rope, R)

        query_TA = rms_norm(x_TD @ arrays["q_a_DA"], arrays["q_norm_A"], LATENT_NORM_EPS)
        query_THO = np.einsum("TA,AHO->THO", query_TA, arrays["q_b_AHO"])
        down_TW = x_TD @ arrays["kv_a_DW"]
        latent_TC = rms_norm(down_TW[:, :C], arrays["kv_norm_C"], LATENT_NORM_EPS)
        key_THP = np.einsum("TC,HPC->THP", latent_TC, arrays["key_up_HPC"])
        value_THU = np.einsum("TC,HUC->THU", latent_TC, arrays["value_up_HUC"])

        turned_query = rotate(_interleaved(query_THO[..., P:]), position_T, frequencies)
        turned_key = rotate(_interleaved(down_TW[:, C:]), position_T, frequencies)
        scores_HTt = np.einsum("THP,tHP->HTt", query_THO[..., :P], key_THP)
        amplitude = rope_amplitude(config.rope) ** 2
        scores_HTt = scores_HTt + amplitude * scores_of_pairs(turned_query, turned_key, "THr,tr->HTt")
        scale = (P + R) ** -0.5
        if config.rope.mscale_all_dim:
            scale *= mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
        weights_HTt = masked_softmax(scores_HTt * scale, position_T[:, None] >= position_T)
        return np.einsum("HTt,tHU,HUD->TD", weights_HTt, value_THU, arrays["o_HUD"], optimize=True)

    def _mix(self, x_TD: np.ndarray, arrays: Arrays) -> tuple[np.ndarray, float]:
        """The routed experts' weighted sum, and the router's gap. The bias chooses, the scores alone weigh."""
        num_chosen = self.config.num_experts_per_tok
        score_TE = sigmoid(x_TD @ arrays["router_ED"].T)
        choice_TE = score_TE + arrays["router_bias_E"]
        order_TE = np.argsort(-choice_TE, axis=1, kind="stable")
        chosen_TE = np.zeros(score_TE.shape, bool)
        np.put_along_axis(chosen_TE, order_TE[:, :num_chosen], True, axis=1)
        weight_TE = np.where(chosen_TE, score_TE, 0.0)
        weight_TE /= weight_TE.sum(axis=1, keepdims=True) + 1e-20
        weight_TE *= self.config.routed_scaling_factor

        gate_ETF, up_ETF = (x_TD @ arrays["gate_up_E2FD"][:, half].swapaxes(1, 2) for half in (0, 1))
        inner_ETF = gate_ETF * sigmoid(gate_ETF) * up_ETF
        expert_ETD = inner_ETF @ arrays["down_EDF"].swapaxes(1, 2)
        ordered_TE = np.take_along_axis(choice_TE, order_TE, axis=1)
        gaps = ordered_TE[:, num_chosen - 1 : num_chosen] - ordered_TE[:, num_chosen : num_chosen + 1]
        return np.einsum("TE,ETD->TD", weight_TE, expert_ETD), gaps.min(initial=np.inf)


def _interleaved(x: np.ndarray) -> np.ndarray:
    return x[..., 0::2] + 1j * x[..., 1::2]


def _expand(arrays: Arrays) -> dict[str, np.ndarray]:
    """A layer's weights in float64, experts unpacked."""
    packed = {"gate_up_E2FD": ("gate_up_E2FI", "gate_up_scale_E2FG"), "down_EDF": ("down_EDI", "down_scale_EDG")}
    stored = {name for pair in packed.values() for name in pair}
    expanded = {name: array.astype(np.float64) for name, array in arrays.items() if name not in stored}
    for name, (words, scales) in packed.items():
        if words in arrays:
            expanded[name] = dequantize(arrays[words], arrays[scales])
    return expanded
