"""A conversation's next turn goes on from the caches of the one before, and nobody can tell by the tokens."""

import gc
import itertools

import jax
import numpy as np
import pytest
from small_pairs import make_pair

from ddtree_jax import Completion, DecodeConfig, Engine, SamplingParams
from ddtree_jax.decode import MODES

RANDOM = np.random.default_rng(31)
FIRST_IDS = itertools.cycle(range(4, 60))
MAX_LENGTH = 131


def make_engine(prefix_cache: bool) -> Engine:
    """The same pair with and without a prefix cache, in chunks of four tokens."""
    return make_pair("yarn", max_length=MAX_LENGTH, prefill_chunk=4, prefix_cache=prefix_cache).engine


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    return make_engine(prefix_cache=True), make_engine(prefix_cache=False)


def ids(count: int) -> list[int]:
    """Random ids that begin like no others of late."""
    return [next(FIRST_IDS), *RANDOM.integers(4, 60, count - 1).tolist()]


def turns(engine: Engine, first: list[list[int]], questions: list[list[list[int]]], params, decode) -> list[list]:
    """A conversation a prompt: each turn's prompt is all that was said before, and a question."""
    said, outputs = first, []
    for question in questions:
        outputs.append(engine.generate(said, params, decode))
        said = [[*one, *done.token_ids, *more] for one, done, more in zip(said, outputs[-1], question, strict=True)]
    return outputs


def same(one: Completion, other: Completion) -> None:
    assert one.token_ids == other.token_ids
    assert one.finish_reason == other.finish_reason
    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("batch", "mode"), [*((1, mode) for mode in MODES), (3, "ddtree")])
def test_turns_equal_those_from_scratch(engines, mode, batch):
    """Tokens, and rounds too: the drafter's context goes on as well as the target's."""
    params = SamplingParams(max_new_tokens=13, temperature=0.3, seed=2, logprobs=True, ignore_eos=True)
    decode = DecodeConfig(mode=mode, budget=15)
    first = [ids(9 + number) for number in range(batch)]
    questions = [[ids(3 + number) for number in range(batch)] for _ in range(4)]
    cached, plain = (turns(engine, first, questions, params, decode) for engine in engines)
    for turn, outputs in enumerate(zip(cached, plain, strict=True)):
        for index, (done, scratch) in enumerate(zip(*outputs, strict=True)):
            same(done, scratch)
            assert done.stats.accepted_lengths == scratch.stats.accepted_lengths
            num_prompt = len(first[index]) + sum(13 + len(questions[before][index]) for before in range(turn))
            num_said = num_prompt - len(questions[turn - 1][index]) if turn else 0
            # All that was said, but perhaps for the last token; a mode without drafts leaves the drafter behind.
            num_unknown = num_said - done.stats.cached_tokens
            assert num_unknown in ((0,) if turn == 0 else (13,) if mode == "ar" else (0, 1))
            assert scratch.stats.cached_tokens == 0
            assert done.stats.target_passes - done.stats.rounds <= scratch.stats.target_passes - scratch.stats.rounds
    assert sum(done.stats.target_passes for done in cached[-1]) < sum(done.stats.target_passes for done in plain[-1])


def test_a_turn_without_drafts_costs_the_next_no_acceptance(engines):
    """Plain decoding grows no drafter context; a tree behind it is drafted from a whole one all the same."""
    engine, _ = engines
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, logprobs=True)
    prompt = ids(12)
    said = [*prompt, *engine.generate(prompt, params, DecodeConfig(mode="ar"))[0].token_ids]
    done, scratch = (one.generate(said, params)[0] for one in engines)
    same(done, scratch)
    assert done.stats.accepted_lengths == scratch.stats.accepted_lengths
    assert done.stats.cached_tokens == len(prompt)


def test_sequences_may_move_grow_in_number_and_share_a_beginning(engines):
    """Another order, two branches of one conversation, a prompt that is known whole; then one sequence, then three."""
    engine, plain = engines
    params, decode = SamplingParams(max_new_tokens=9, logprobs=True), DecodeConfig()
    first = [ids(17), ids(11), ids(23)]
    outputs = engine.generate(first, params, decode)
    said = [one + done.token_ids for one, done in zip(first, outputs, strict=True)]
    prompts = [[*said[2], 7], ids(5), said[0][:12], [*said[2], 8]]
    again = engine.generate(prompts, params, decode)
    num_cached = [done.stats.cached_tokens for done in again]
    assert num_cached[1:3] == [0, 11]
    for number in (0, 3):
        assert num_cached[number] in (len(said[2]) - 1, len(said[2]))
    for done, scratch in zip(again, plain.generate(prompts, params, decode), strict=True):
        same(done, scratch)
    once_more = engine.generate(prompts[1], params, decode)[0]
    assert once_more.stats.cached_tokens == 4
    same(once_more, plain.generate(prompts[1], params, decode)[0])
    known = prompts[1] + once_more.token_ids
    grown = [ids(7), [*known, 3], [*known[:7], 2]]
    more = engine.generate(grown, params, decode)
    assert more[1].stats.cached_tokens in (len(known) - 1, len(known))
    assert [more[number].stats.cached_tokens for number in (0, 2)] == [0, 7]
    for done, scratch in zip(more, plain.generate(grown, params, decode), strict=True):
        same(done, scratch)


def test_what_a_cut_left_behind_is_no_prefix(engines):
    """Rounds commit tokens behind a stop or the limit, which nobody was shown."""
    engine, plain = engines
    decode, long = DecodeConfig(), SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompt, lengths = max(
        ((prompt, plain.generate(prompt, long, decode)[0].stats.accepted_lengths) for prompt in map(ids, range(5, 15))),
        key=lambda pair: max(pair[1]),
    )
    assert max(lengths) > 2
    ends = list(itertools.accumulate(lengths, initial=1))
    cuts = {end - back for end, length in zip(ends[1:], lengths, strict=True) for back in range(2, length)}
    for number in sorted(cuts)[:9]:
        params = SamplingParams(max_new_tokens=number, ignore_eos=True, logprobs=True)
        done = engine.generate(prompt, params, decode)[0]
        following = [*prompt, *done.token_ids, 0, 0, 11]  # 0 fills outputs behind their end
        after = engine.generate(following, params, decode)[0]
        assert after.stats.cached_tokens <= len(prompt) + len(done.token_ids)
        same(after, plain.generate(following, params, decode)[0])


def test_a_context_that_is_full_goes_on_from_its_prefix(engines):
    engine, plain = engines
    prompt = ids(MAX_LENGTH - 6)
    params = SamplingParams(max_new_tokens=64, ignore_eos=True, logprobs=True)
    done = engine.generate(prompt, params)[0]
    assert (len(done.token_ids), done.finish_reason) == (6, "length")
    whole = prompt + done.token_ids
    again = engine.generate(whole[:-1], params)[0]
    assert again.stats.cached_tokens == MAX_LENGTH - 2
    same(again, plain.generate(whole[:-1], params)[0])


def test_streams_leave_a_prefix_when_they_end_and_nothing_when_they_are_closed(engines):
    engine, _ = engines
    prompt, params = ids(20), SamplingParams(max_new_tokens=40, ignore_eos=True)
    said = [*prompt, *itertools.chain.from_iterable(engine.stream(prompt, params)), 8]
    assert engine.generate(said, params)[0].stats.cached_tokens in (len(said) - 2, len(said) - 1)
    stream = engine.stream(said, params)
    assert next(stream)
    stream.close()
    assert engine.generate(said, params)[0].stats.cached_tokens == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_closing_a_stream_frees_what_it_held(prefix_cache):
    engine = make_engine(prefix_cache)

    def num_bytes() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    before = num_bytes()
    for _ in range(3):
        stream = engine.stream([3, 4, 6], params)
        assert next(stream)
        assert num_bytes() > before
        stream.close()
        assert num_bytes() == before
    # A stream that nobody has read yet holds its request, and no caches.
    unread = engine.stream([3, 4, 6], params)
    num_cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.models.target.init_cache(1, MAX_LENGTH)))
    assert 0 < num_bytes() - before < num_cache_bytes
    unread.close()
    del unread
    assert num_bytes() == before
    engine.generate([3, 4, 6], params)
    assert (num_bytes() > before) == prefix_cache
    stream = engine.stream([3, 4, 6], params)
    next(stream)
    stream.close()
    assert num_bytes() == before
