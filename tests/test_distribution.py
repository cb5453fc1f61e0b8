"""Many draws have the exact distribution of the target, in every mode; faults of the kinds that bias it are found.

The probability of each triple of first tokens comes from the oracle. Prompt, options and seeds are fixed, so that nothing
here is left to chance.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax import Array
from oracle.sampling import Options, distribution, penalized
from oracle.target import Target
from scipy import stats
from small_pairs import Pair, make_pair

from ddtree_jax import DecodeConfig, Engine, SamplingParams, decode, sampling
from ddtree_jax.decode import MODES

BATCH = 64
NUM_DRAWS = 50_000
NUM_FAULTY_DRAWS = 5_000
NUM_TOKENS = 3
MAX_LENGTH = 16
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
OPTIONS = Options(temperature=1.0, top_k=7, top_p=0.95, max_new_tokens=NUM_TOKENS, ignore_eos=True)
LEAST_EXPECTED = 5
"""Cells with a smaller expectation are counted as one: below it a chi-square distribution does not fit."""

BUDGET = {"ar": 0, "chain": 2, "ddtree": 7}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair("least", max_length=MAX_LENGTH)


@pytest.fixture(scope="module")
def exact(pair) -> np.ndarray:
    """Probability of each triple of tokens behind the prompt, [V, V, V]."""
    exact_VVV = np.zeros((len(pair.target.embedding_VD),) * NUM_TOKENS)

    def extend(path: tuple[int, ...], reached: float) -> None:
        if len(path) == NUM_TOKENS:
            exact_VVV[path] = reached
            return
        for token, probability in enumerate(next_probabilities(pair.target, list(path))):
            if probability > 0:
                extend((*path, token), reached * probability)

    extend((), 1.0)
    return exact_VVV


def next_probabilities(target: Target, output: list[int]) -> np.ndarray:
    logits_V = target(PROMPT + output).logits_TV[-1]
    return distribution(penalized(logits_V, OPTIONS, PROMPT, output, ()), OPTIONS)


@pytest.fixture
def count_draws(monkeypatch) -> Callable:
    """`draws`, without checks of every call's types, which would take a third of the time. Others hold them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    return draws


def draws(engine: Engine, mode: str, num_draws: int) -> tuple[np.ndarray, float]:
    """How often each triple was drawn, [V, V, V], and the tokens a round committed."""
    counts_VVV = np.zeros((engine.models.target.config.vocab_size,) * NUM_TOKENS, int)
    accepted = []
    for seed in range(-(-num_draws // BATCH)):
        params = SamplingParams(**(dataclasses.asdict(OPTIONS) | {"seed": seed}))
        completions = engine.generate([PROMPT] * BATCH, params, DecodeConfig(mode=mode, budget=BUDGET[mode]))
        np.add.at(counts_VVV, tuple(zip(*(completion.token_ids for completion in completions), strict=True)), 1)
        accepted.extend(length for completion in completions for length in completion.stats.accepted_lengths)
    return counts_VVV, float(np.mean(accepted))


def p_value(counts: np.ndarray, exact: np.ndarray) -> float:
    """Of Pearson's chi-square test; 0 if something was drawn that cannot be."""
    if counts[exact == 0].any():
        return 0.0
    expected = exact * counts.sum()
    is_large = expected >= LEAST_EXPECTED
    observed, expected = (np.append(cells[is_large], cells[~is_large].sum()) for cells in (counts, expected))
    statistic = np.sum((observed - expected) ** 2 / np.maximum(expected, 1e-9))
    return float(stats.chi2.sf(statistic, len(expected) - 1))


@pytest.mark.parametrize("mode", MODES)
def test_draws_have_the_exact_distribution(pair, exact, count_draws, mode):
    counts, accepted = count_draws(pair.engine, mode, NUM_DRAWS)
    assert np.sum(exact * NUM_DRAWS >= LEAST_EXPECTED) > 100
    assert p_value(counts, exact) > 1e-3
    assert accepted > 1.5 or mode == "ar", "drafts must be accepted, or they test nothing"


def share_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """All depths of a tree get the root's noise."""
    noise = sampling.noise

    def of_first_position(params: sampling.SamplingArrays, position_BT: Array, *columns: Any) -> Array:
        return noise(params, jnp.broadcast_to(position_BT[:, :1], position_BT.shape), *columns)

    monkeypatch.setattr(sampling, "noise", of_first_position)


def accept_by_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain's draft is accepted with probability min(1, p / q), else the token is drawn from the whole target."""
    draft_logits, draw = decode.draft_logits, decode._draw
    drafted = []

    def kept_draft_logits(*args) -> Array:
        drafted.append(draft_logits(*args))
        return drafted[-1]

    def ratio_draw(logits_BNV, tree, length_B, emitted_BM, num_tokens_B, params, plan) -> Array:
        drawn_BN = draw(logits_BNV, tree, length_B, emitted_BM, num_tokens_B, params, plan)
        if tree.token_BN.shape[1] == 1:
            return drawn_BN
        child_BL1 = tree.token_BN[:, 1:, None]
        over_nodes = jax.vmap(sampling.filtered, in_axes=(0, None, None, None))
        scaled_BNV = logits_BNV / params.temperature_B[:, None, None]
        kept_BNV = jax.vmap(over_nodes)(scaled_BNV, params.top_k_B, params.top_p_B, params.min_p_B)
        p_BL, q_BL = (
            jnp.take_along_axis(jax.nn.softmax(row_BLV), child_BL1, axis=-1)[..., 0]
            for row_BLV in (kept_BNV[:, :-1], drafted[-1])
        )
        keys_B = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(params.key_B2), 2**30 + length_B)
        coin_BL = jax.vmap(lambda key: jax.random.uniform(key, p_BL.shape[1:]))(keys_B)
        accepted_BL = jnp.where(coin_BL * q_BL < p_BL, child_BL1[..., 0], drawn_BN[:, :-1])
        return jnp.concatenate([accepted_BL, drawn_BN[:, -1:]], axis=1)

    monkeypatch.setattr(decode, "draft_logits", kept_draft_logits)
    monkeypatch.setattr(decode, "_draw", ratio_draw)


def filter_after_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is drawn from all; one that the filters would have removed becomes the best one."""
    draw, filtered = sampling.draw, sampling.filtered

    def late_draw(logits_BNV, depth_BN, length_B, params, num_depths, shard) -> Array:
        drawn_BN = draw(logits_BNV, depth_BN, length_B, params, num_depths, shard)
        over_nodes = jax.vmap(filtered, in_axes=(0, None, None, None))
        scaled_BNV = logits_BNV / params.temperature_B[:, None, None]
        kept_BNV = jax.vmap(over_nodes)(scaled_BNV, params.top_k_B, params.top_p_B, params.min_p_B)
        is_kept_BN1 = jnp.isfinite(jnp.take_along_axis(kept_BNV, drawn_BN[..., None], axis=-1))
        return jnp.where(is_kept_BN1[..., 0], drawn_BN, jnp.argmax(logits_BNV, axis=-1).astype(jnp.int32))

    monkeypatch.setattr(sampling, "filtered", lambda logits_V, top_k, top_p, min_p, shard: logits_V)
    monkeypatch.setattr(sampling, "draw", late_draw)


FAULTS = ((share_noise, "ddtree"), (accept_by_ratio, "chain"), (filter_after_draw, "ar"))


@pytest.mark.parametrize(("number", "plant", "mode"), [(number, *fault) for number, fault in enumerate(FAULTS, 1)])
def test_planted_faults_are_found(exact, count_draws, monkeypatch, number, plant, mode):
    # Caches of another length, so that programs are traced anew, and are nobody else's afterwards.
    engine = make_pair("least", max_length=MAX_LENGTH + number).engine
    plant(monkeypatch)
    counts, _ = count_draws(engine, mode, NUM_FAULTY_DRAWS)
    assert p_value(counts, exact) < 1e-9
