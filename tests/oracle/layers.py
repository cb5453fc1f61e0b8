"""What both models are made of: RMSNorm, the gated MLP, masked softmax, rotary positions with YaRN."""

import math
from typing import Any

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def gated_mlp(x_TD: np.ndarray, gate_DF: np.ndarray, up_DF: np.ndarray, down_FD: np.ndarray) -> np.ndarray:
    gate_TF = x_TD @ gate_DF
    return (gate_TF * sigmoid(gate_TF) * (x_TD @ up_DF)) @ down_FD


def masked_softmax(scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Over the last axis; what is not visible weighs nothing."""
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def mscale(factor: float, scale: float) -> float:
    """DeepSeek's length-dependent term: 0.1 scale ln(factor) + 1."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def rope_amplitude(rope: Any) -> float:
    """Factor on cos and sin, as in ``transformers``: a ratio of two `mscale` terms if the config gives both."""
    if rope.factor <= 1.0:
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim)
    return mscale(rope.factor, 1.0)


def rope_frequencies(rope: Any, dim: int) -> np.ndarray:
    """Radians a position for each of dim / 2 pairs.

    YaRN (arXiv 2309.00071): a pair that turns more than ``beta_fast`` times within the original context keeps its frequency,
    one that turns less than ``beta_slow`` times is slowed down by ``factor``, with a linear ramp between the two.
    """
    plain = rope.theta ** (-np.arange(0, dim, 2) / dim)
    if rope.factor <= 1.0:
        return plain

    def pair_that_turns(times: float) -> float:
        return dim * math.log(rope.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(rope.beta_slow)), dim - 1)
    slowed = np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    return plain / rope.factor * slowed + plain * (1.0 - slowed)


def rotate(pairs: np.ndarray, positions_T: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Rotates complex numbers [T, ..., dim / 2], one a pair, by position times frequency."""
    turn = np.exp(1j * positions_T[:, None] * frequencies)
    return pairs * turn.reshape(len(positions_T), *(1,) * (pairs.ndim - 2), -1)


def scores_of_pairs(query: np.ndarray, key: np.ndarray, subscripts: str) -> np.ndarray:
    """Dot products of rotated vectors, whose pairs are complex: real part of q times the conjugate of k."""
    return np.einsum(subscripts, query, key.conj()).real
