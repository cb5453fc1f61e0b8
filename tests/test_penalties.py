"""Bias and penalties: each node has a history of its own, and no mode sees another one."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_pairs import make_pair

from ddtree_jax import DecodeConfig, SamplingParams, penalties
from ddtree_jax.sampling_params import SamplingArrays

pytest_plugins = ["engines"]

PROMPT = np.random.default_rng(12).integers(0, 500, 17).tolist()


def plain(logits_V: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    """The definition, for one position: an id after the other."""
    logits_V, counts = logits_V.astype(np.float64), Counter(output)
    for token, bias in params.logit_bias.items():
        logits_V[token] += bias
    for token in {*prompt, *output}:
        logit = logits_V[token]
        logits_V[token] = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
    for token, count in counts.items():
        logits_V[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits_V


def random_tree(random: np.random.Generator, num_nodes: int) -> tuple[list[int], np.ndarray]:
    """Parents, and who sees whom."""
    parents = [0, *(int(random.integers(0, node)) for node in range(1, num_nodes))]
    visible_NN = np.eye(num_nodes, dtype=bool)
    for node in range(1, num_nodes):
        visible_NN[node] |= visible_NN[parents[node]]
    return parents, visible_NN


SETTINGS = (
    {},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.1},
    {"frequency_penalty": -0.7},
    {"logit_bias": {3: 5.0, 0: -100.0, 12: 0.25}},
    {"repetition_penalty": 1.3, "presence_penalty": -0.4, "frequency_penalty": 0.9, "logit_bias": {7: -2.0, 1: 3.5}},
)


@pytest.mark.parametrize("seed", range(7))
def test_each_node_has_its_own_history(seed):
    """Thirteen ids, so that they repeat: in the prompt, in the output, on a path, and on paths of others."""
    random, vocab, num_nodes, capacity = np.random.default_rng(seed), 13, 11, 23
    batch = len(SETTINGS)
    params = [SamplingParams(**settings) for settings in SETTINGS]
    prompts = [random.integers(0, vocab, 3).tolist() for _ in params]
    emitted_BM = random.integers(0, vocab, (batch, capacity))
    num_emitted_B = random.integers(1, capacity, batch)
    logits_BNV = random.normal(size=(batch, num_nodes, vocab)).astype(np.float32) * 3
    token_BN = random.integers(0, vocab, (batch, num_nodes))
    token_BN[:, 0] = emitted_BM[np.arange(batch), num_emitted_B - 1]
    parents, visible = zip(*(random_tree(random, num_nodes) for _ in params), strict=True)
    sampling = SamplingArrays.stack(params, prompts, batch=batch, max_length=100, vocab_size=vocab, eos_token_ids=())
    ours_BNV = jax.jit(penalties.adjusted)(
        jnp.asarray(logits_BNV),
        jnp.asarray(token_BN, jnp.int32),
        jnp.asarray(np.stack(visible)),
        jnp.asarray(emitted_BM, jnp.int32),
        jnp.asarray(num_emitted_B, jnp.int32),
        sampling,
    )
    for row, node in itertools.product(range(batch), range(num_nodes)):
        path, at = [], node
        while at:
            path.append(int(token_BN[row, at]))
            at = parents[row][at]
        output = emitted_BM[row, : num_emitted_B[row]].tolist() + path
        expected_V = plain(logits_BNV[row, node], prompts[row], output, params[row])
        np.testing.assert_allclose(ours_BNV[row, node], expected_V, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ours_BNV[0], logits_BNV[0])


@pytest.mark.parametrize("mode", ["ar", "ddtree"])
@pytest.mark.parametrize("settings", SETTINGS[1:])
def test_greedy_tokens_follow_the_penalized_scores(golden_engine, mode, settings):
    params = SamplingParams(max_new_tokens=24, **settings)
    done = golden_engine.generate(PROMPT, params, DecodeConfig(mode=mode, budget=15))[0].token_ids
    score_TV = golden_engine.score(PROMPT + done)[len(PROMPT) - 1 : -1]
    for number, logits_V in enumerate(score_TV):
        adjusted_V = plain(logits_V, PROMPT, done[:number], params)
        assert done[number] == adjusted_V.argmax(), number
        assert np.diff(np.sort(adjusted_V)[-2:]) > 1e-3, "a near tie decides nothing"


def test_penalties_speculate_and_matter(golden_engine):
    """Sampled, with penalties: equal with trees and without, in fewer rounds, and other tokens than without penalties."""
    sampling = {"max_new_tokens": 40, "temperature": 0.2, "seed": 3}
    free = golden_engine.generate(PROMPT, SamplingParams(**sampling))[0]
    params = SamplingParams(**sampling, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2)
    plain_done, tree = (
        golden_engine.generate(PROMPT, params, DecodeConfig(mode=mode, budget=15))[0] for mode in ("ar", "ddtree")
    )
    assert tree.token_ids == plain_done.token_ids
    assert tree.stats.rounds < plain_done.stats.rounds
    assert plain_done.token_ids != free.token_ids
    assert len(set(plain_done.token_ids)) > len(set(free.token_ids))


def test_a_bias_can_force_and_forbid(golden_engine):
    free = golden_engine.generate(PROMPT, SamplingParams(max_new_tokens=9))[0].token_ids
    forced = golden_engine.generate(PROMPT, SamplingParams(max_new_tokens=5, logit_bias={77: 100}))[0].token_ids
    assert forced == [77] * 5
    forbidden = dict.fromkeys(free, -100)
    done = golden_engine.generate(PROMPT, SamplingParams(max_new_tokens=9, logit_bias=forbidden))[0].token_ids
    assert not set(done) & set(free)


def test_neighbours_penalties_are_their_own():
    engine = make_pair("least").engine
    free, penalized = (SamplingParams(max_new_tokens=19, ignore_eos=True, repetition_penalty=x) for x in (1.0, 5.0))

    def tokens(*params: SamplingParams) -> list[list[int]]:
        return [done.token_ids for done in engine.generate([[3, 1, 4]] * 2, params, DecodeConfig(mode="ar"))]

    expected = tokens(free, free)
    assert tokens(free, penalized)[0] == expected[0]
    assert tokens(penalized, free)[1] == expected[1]
    assert tokens(free, penalized)[1] != expected[1]
