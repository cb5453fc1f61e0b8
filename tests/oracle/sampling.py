"""From a row of logits to a token, in the order in which the options apply. All that is close to a tie is said to be."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

CLOSE = 1e-4
"""Logits, and borders of filters, that are closer than this may fall either way in float32."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a sequence is sampled; the names are those of the engine's own options."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def stop_ids(self, eos_token_ids: Collection[int]) -> set[int]:
        return {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}


def penalized(
    logits_V: np.ndarray, options: Options, prompt: Sequence[int], output: Sequence[int], banned: Iterable[int]
) -> np.ndarray:
    """Logits after bias and penalties, without the ``banned`` ids. ``output`` is what was emitted so far."""
    row_V = logits_V.copy()
    for token, bias in options.logit_bias.items():
        row_V[token] += bias
    for token in {*prompt, *output}:
        if row_V[token] > 0:
            row_V[token] /= options.repetition_penalty
        else:
            row_V[token] *= options.repetition_penalty
    for token in set(output):
        row_V[token] -= options.frequency_penalty * output.count(token)
        row_V[token] -= options.presence_penalty
    row_V[list(banned)] = -np.inf
    return row_V


@dataclass(frozen=True)
class Filters:
    """Borders of the filters. A slack moves one of them: the filter keeps more for +1, less for -1, but always the best."""

    options: Options
    top_k_slack: int = 0
    top_p_slack: int = 0
    min_p_slack: int = 0

    def keep(self, scaled_V: np.ndarray) -> np.ndarray:
        """Which tokens are left of logits that have been divided by the temperature."""
        options, best_V = self.options, scaled_V == scaled_V.max()
        kept_V = np.isfinite(scaled_V)
        if 0 < options.top_k < len(scaled_V):
            *_, first_out, last_in = np.sort(scaled_V)[: len(scaled_V) - options.top_k + 1]
            # Without slack, with one more kept that is close, and without one that is close to being left out.
            borders = (last_in, last_in - tolerance(options), max(last_in, first_out + tolerance(options)))
            kept_V &= (scaled_V >= borders[self.top_k_slack]) | best_V
        if options.top_p < 1.0:
            probability_V = probabilities(scaled_V, kept_V)
            above_V = (probability_V > probability_V[:, None]) @ probability_V
            kept_V &= (above_V < options.top_p + self.top_p_slack * CLOSE) | best_V
        if options.min_p > 0:
            probability_V = probabilities(scaled_V, kept_V)
            least = (options.min_p - self.min_p_slack * CLOSE) * probability_V.max()
            kept_V &= (probability_V >= least) | best_V
        return kept_V


def probabilities(scaled_V: np.ndarray, kept_V: np.ndarray) -> np.ndarray:
    row_V = np.where(kept_V, scaled_V, -np.inf)
    weights_V = np.exp(row_V - row_V.max())
    return weights_V / weights_V.sum()


def distribution(row_V: np.ndarray, options: Options) -> np.ndarray:
    """Probability [V] of each token for a temperature above 0."""
    scaled_V = row_V / options.temperature
    return probabilities(scaled_V, Filters(options).keep(scaled_V))


def tolerance(options: Options) -> float:
    """`CLOSE` for logits that were divided by the temperature, and so was their rounding."""
    return CLOSE / min(options.temperature or 1.0, 1.0)


def draw(row_V: np.ndarray, options: Options, noise_V: np.ndarray) -> tuple[int, bool]:
    """The token, and whether rounding could make it another one."""
    if options.temperature == 0:
        return _arg_max(row_V, CLOSE)
    scaled_V = row_V / options.temperature

    def draw_among(kept_V: np.ndarray) -> tuple[int, bool]:
        return _arg_max(np.where(kept_V, scaled_V + noise_V, -np.inf), tolerance(options))

    token, is_close = draw_among(Filters(options).keep(scaled_V))
    moved = (Filters(options, *slacks).keep(scaled_V) for slacks in itertools.product((-1, 1), repeat=3))
    return token, is_close or any(draw_among(kept_V)[0] != token for kept_V in moved)


def _arg_max(row_V: np.ndarray, least_gap: float) -> tuple[int, bool]:
    """The highest logit's id, the lowest of equal ones; and whether another one is within ``least_gap``."""
    token = int(np.argmax(row_V))
    return token, bool(np.sum(row_V > row_V[token] - least_gap) > 1)
