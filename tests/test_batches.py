"""Batches: up to 64 sequences that end at different rounds, filled up to few shapes, each as if it were alone."""

import itertools

import numpy as np
import pytest
from small_pairs import make_pair

from ddtree_jax import DecodeConfig, Engine, SamplingParams
from ddtree_jax.decode import MODES

RANDOM = np.random.default_rng(21)
PROMPTS = [RANDOM.integers(0, 37, RANDOM.integers(1, 40)).tolist() for _ in range(64)]
PARAMS = [
    SamplingParams(
        max_new_tokens=1 + 7 * number % 23,
        temperature=(0.0, 0.7, 1.2)[number % 3],
        top_k=(0, 5)[number % 2],
        seed=number,
        repetition_penalty=(1.0, 1.3)[number % 5 == 4],
        stop_token_ids=(int(RANDOM.integers(0, 37)),),
        ignore_eos=number % 4 == 1,
        logprobs=number % 7 == 0,
        top_logprobs=3 * (number % 14 == 0),
    )
    for number in range(64)
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_pair("plain", max_length=133, prefill_chunk=64).engine


@pytest.mark.parametrize("mode", MODES)
def test_64_sequences_end_each_in_its_round(engine, mode):
    """Greedy ones are as when alone; all obey their own limits, and their stats add up."""
    decode = DecodeConfig(mode=mode, budget=7)
    whole = engine.generate(PROMPTS, PARAMS, decode)
    for index in [index for index in range(64) if PARAMS[index].temperature == 0][::3]:
        alone, done = engine.generate(PROMPTS[index], PARAMS[index], decode)[0], whole[index]
        assert (done.token_ids, done.finish_reason) == (alone.token_ids, alone.finish_reason)
        assert done.stats.accepted_lengths == alone.stats.accepted_lengths
    for done, params in zip(whole, PARAMS, strict=True):
        stats = done.stats
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else (5,))}
        assert not stops & set(done.token_ids[:-1])
        assert done.finish_reason == ("stop" if done.token_ids[-1] in stops else "length")
        assert done.finish_reason == "stop" or len(done.token_ids) == params.max_new_tokens
        assert stats.rounds == len(stats.accepted_lengths)
        assert stats.target_passes == stats.rounds + 1
        assert 1 + sum(stats.accepted_lengths[:-1]) < len(done.token_ids) or stats.rounds == 0
        assert 1 + sum(stats.accepted_lengths) >= len(done.token_ids)
    assert len({done.stats.rounds for done in whole}) > 5


def test_a_sequence_is_a_function_of_its_prompt_params_and_number(engine):
    """Neighbours of all kinds, more of them, or fewer: sequence 2 stays what it is; under another number it does not."""
    prompt, params = PROMPTS[5], SamplingParams(max_new_tokens=17, temperature=0.9, seed=4, top_p=0.9, logprobs=True)
    outputs = []
    few = (range(10, 12), "ddtree"), (range(20, 23), "ar")
    for neighbours, mode in (*few, *((range(1, 64), mode) for mode in MODES)):
        prompts, settings = [PROMPTS[number] for number in neighbours], [PARAMS[number] for number in neighbours]
        prompts.insert(2, prompt)
        settings.insert(2, params)
        outputs.append(engine.generate(prompts, settings, DecodeConfig(mode=mode, budget=7))[2])
    for output in outputs[1:]:
        assert output.token_ids == outputs[0].token_ids
        np.testing.assert_allclose(output.logprobs, outputs[0].logprobs, rtol=0, atol=1e-5)
    assert engine.generate([prompt] * 4, params, DecodeConfig(budget=7))[3].token_ids != outputs[0].token_ids


def test_finished_sequences_cost_no_tokens(engine):
    """One sequence goes on for 99 rounds; the others have ended with what was asked."""
    short, long = (SamplingParams(max_new_tokens=number, ignore_eos=True) for number in (2, 100))
    done = engine.generate(PROMPTS[1:4], [short, long, short], DecodeConfig(mode="ar"))
    assert [one.stats.rounds for one in done] == [1, 99, 1]
    assert [one.stats.target_passes for one in done] == [2, 100, 2]
    assert [len(one.token_ids) for one in done] == [2, 100, 2]


def test_number_of_programs_is_bounded(engine):
    """Lengths of prompts and sizes of batches share programs: no more than the buckets say."""
    programs = engine._prefill, engine._begin, engine._decode_rounds
    other = make_pair("plain", max_length=137).engine
    before = [program._cache_size() for program in programs]

    def grown() -> list[int]:
        return [program._cache_size() - size for program, size in zip(programs, before, strict=True)]

    for size, length in itertools.product((1, 3, 4), (1, 16, 17, 64)):
        prompt = RANDOM.integers(0, 37, length).tolist()
        other.generate([prompt] * size, SamplingParams(max_new_tokens=2), DecodeConfig(mode="ar"))
    num_sizes, num_widths = 2, 2  # filled up to 1 or 4 sequences, and to 16 or 64 tokens
    assert grown() == [num_sizes * num_widths, num_sizes, num_sizes]
    for budget in (1, 2, 3):
        other.generate([[3]], SamplingParams(max_new_tokens=2), DecodeConfig(budget=budget))
    assert grown() == [num_sizes * num_widths, num_sizes, num_sizes + 1], "one bucket of budgets, begun alike"
    for top_logprobs in (0, 1, 5):
        params = SamplingParams(max_new_tokens=2, logprobs=True, top_logprobs=top_logprobs)
        other.generate([[3]], params, DecodeConfig(mode="ar"))
    assert grown() == [num_sizes * num_widths, num_sizes + 1, num_sizes + 2], "with alternatives and without"
