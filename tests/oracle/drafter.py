"""The drafter: DFlash's block [root, MASK, MASK, ...] over the features of all committed tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from oracle.layers import gated_mlp, masked_softmax, rms_norm, rope_frequencies, rotate, scores_of_pairs
from oracle.target import Arrays, Target


class Drafter:
    """Drafts behind a sequence whose last token, the root, the target has not seen. Embeds and unembeds with the target."""

    def __init__(self, config: Any, parts: Mapping[str, Arrays], target: Target):
        self.config = config
        self.target = target
        self._parts = {
            part: {name: array.astype(np.float64) for name, array in arrays.items()} for part, arrays in parts.items()
        }

    def __call__(self, committed: list[int], root: int) -> np.ndarray:
        """Logits [L, V]; row j is for position len(committed) + 1 + j. Nothing but the context is seen of ``committed``."""
        config = self.config
        outputs = self.target(committed).outputs
        features_TY = np.concatenate([outputs[layer] for layer in config.target_layer_ids], axis=1)
        shared = self._parts["context"]
        context_TD = rms_norm(features_TY @ shared["fc_YD"], shared["hidden_norm_D"], config.rms_norm_eps)
        block = [root] + [config.mask_token_id] * (config.block_size - 1)
        x_TD = self.target.embedding_VD[block]
        for layer in range(config.num_hidden_layers):
            arrays = self._parts[f"layer_{layer}"]
            normed_TD = rms_norm(x_TD, arrays["input_norm_D"], config.rms_norm_eps)
            x_TD = x_TD + self._attend(normed_TD, context_TD, arrays, config.sliding_layers[layer])
            normed_TD = rms_norm(x_TD, arrays["post_attention_norm_D"], config.rms_norm_eps)
            x_TD = x_TD + gated_mlp(normed_TD, arrays["gate_DF"], arrays["up_DF"], arrays["down_FD"])
        normed_TD = rms_norm(x_TD, self._parts["head"]["norm_D"], config.rms_norm_eps)
        return normed_TD[1:] @ self.target.unembedding_VD.T

    def _attend(self, block_TD: np.ndarray, context_SD: np.ndarray, arrays: Arrays, is_sliding: bool) -> np.ndarray:
        """The block sees the context, which goes into keys and values as it is, and itself in both directions.

        A sliding layer sees as far back as its window, the row itself included, and where it is causal no later row.
        """
        config = self.config
        key_position_t = np.arange(len(context_SD) + len(block_TD))
        position_T = key_position_t[len(context_SD) :]
        source_tD = np.concatenate([context_SD, block_TD])
        query = np.einsum("TD,DJQR->TJQR", block_TD, arrays["q_DJQR"])
        key = np.einsum("tD,DJR->tJR", source_tD, arrays["k_DJR"])
        value_tJR = np.einsum("tD,DJR->tJR", source_tD, arrays["v_DJR"])
        query = self._rotated(rms_norm(query, arrays["q_norm_R"], config.rms_norm_eps), position_T)
        key = self._rotated(rms_norm(key, arrays["k_norm_R"], config.rms_norm_eps), key_position_t)
        distance_Tt = position_T[:, None] - key_position_t
        visible_Tt = np.ones(distance_Tt.shape, bool)
        if is_sliding:
            visible_Tt &= np.abs(distance_Tt) < config.sliding_window
            visible_Tt &= (distance_Tt >= 0) | (not config.sliding_causal)
        scores = scores_of_pairs(query, key, "TJQr,tJr->JQTt") * config.head_dim**-0.5
        weights = masked_softmax(scores, visible_Tt)
        return np.einsum("JQTt,tJR,JQRD->TD", weights, value_tJR, arrays["o_JQRD"], optimize=True)

    def _rotated(self, x: np.ndarray, positions_T: np.ndarray) -> np.ndarray:
        """All of a head is rotated; pair i is made of elements i and i + R / 2."""
        half = self.config.head_dim // 2
        pairs = x[..., :half] + 1j * x[..., half:]
        frequencies = rope_frequencies(self.config.rope, self.config.head_dim)
        return self.config.rope_amplitude * rotate(pairs, positions_T, frequencies)
