"""The engine emits what a slow oracle in numpy emits, token for token, on random settings; the oracle is what is published.

`oracle/` shares nothing with the engine but the weights. ``ORACLE_EXAMPLES`` says how many settings are drawn, a third of
them for each pair of models; above `CI_EXAMPLES` they are of all shapes, else of a few, as each compiles programs of its own.
"""

import dataclasses
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from oracle import noise
from oracle.drafter import Drafter
from oracle.loop import Continuation, Ending
from oracle.sampling import Options
from oracle.target import Target
from small_pairs import MAX_LENGTH, Pair, make_pair

from ddtree_jax import Completion, DecodeConfig, SamplingParams, checkpoint, dflash, kimi
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.generate import STREAM_ROUNDS
from ddtree_jax.sharding import make_mesh

pytest_plugins = ["engines"]

CI_EXAMPLES = 60
NUM_EXAMPLES = int(os.environ.get("ORACLE_EXAMPLES", CI_EXAMPLES))
FEW_CLOSE = 3
MOST_CLOSE = 0.02
"""Sequences that may come so close to a tie that the rest of them is not compared: a few, or this share of many."""

GOLDEN = {"rtol": 0, "atol": 1e-5}
MODE_OF = {"ar": "ar", "dflash": "chain", "ddtree": "ddtree"}
ENGINE_OPTIONS = {"plain": {"prefill_chunk": 8}, "yarn": {"prefill_chunk": 16}, "text": {"prefix_cache": True}}
PREAMBLES = ([7, 1, 4], [2, 9, 9, 0, 3, 11, 6, 2, 8, 10])


class Shape(NamedTuple):
    """What programs of a pair are compiled for: a mode with budgets of one bucket, a bucket of batches.

    Without ``has_top_logprobs`` nobody asks for alternatives, with it somebody may; in a short run somebody does, as one
    program serves all who may then.
    """

    mode: str
    budgets: tuple[int, int]
    batches: tuple[int, int]
    has_top_logprobs: bool


PLANS = (("ar", (0, 63)), ("chain", (0, 8)), *(("ddtree", b) for b in ((0, 3), (4, 7), (8, 15), (16, 31), (32, 63))))
BATCHES = ((1, 1), (2, 2), (3, 4), (5, 5))
ALL_SHAPES = {
    pair: [
        Shape(*plan, batches, (row + column) % 2 == 0)
        for row, plan in enumerate(PLANS)
        for column, batches in enumerate(BATCHES)
    ]
    for pair in ENGINE_OPTIONS
}
CI_SHAPES = {
    "plain": [
        Shape("ar", (0, 63), (3, 4), True),
        Shape("chain", (1, 8), (3, 4), False),
        Shape("ddtree", (4, 7), (3, 4), False),
    ],
    "yarn": [
        Shape("ddtree", (8, 15), (1, 1), False),
        Shape("chain", (1, 8), (1, 1), False),
        Shape("ddtree", (32, 63), (1, 1), True),
    ],
    "text": [Shape("ddtree", (16, 31), (2, 2), False), Shape("ddtree", (4, 7), (2, 2), True)],
}
IS_CI = NUM_EXAMPLES <= CI_EXAMPLES
SHAPES = CI_SHAPES if IS_CI else ALL_SHAPES


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the engine, and perhaps a second one whose prompts go on where the completions ended."""

    mode: str
    budget: int
    prompts: list[list[int]]
    options: list[Options]
    second_turn: list[int] | None


def or_off(off: Any, strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(st.just(off), strategy)


@st.composite
def options(draw: st.DrawFn, token_ids: st.SearchStrategy, has_text: bool, has_top_logprobs: bool) -> Options:
    max_new_tokens = draw(st.one_of(st.integers(1, 6), st.integers(7, 20), st.just(60)))
    bias = st.one_of(st.floats(-8, 8, width=32), st.sampled_from((-100.0, 100.0)))
    penalties = st.fixed_dictionaries(
        {
            "repetition_penalty": or_off(1.0, st.floats(0.5, 3.0, width=32)),
            "presence_penalty": or_off(0.0, st.floats(-2.0, 2.0, width=32)),
            "frequency_penalty": or_off(0.0, st.floats(-2.0, 2.0, width=32)),
            "logit_bias": or_off({}, st.dictionaries(token_ids, bias, max_size=4)),
        }
    )
    logprobs = draw(st.booleans())
    text = st.text(alphabet="abcdefé ", min_size=1, max_size=3)
    return Options(
        temperature=draw(or_off(0.0, st.floats(0.125, 2.0, width=32))),
        top_k=draw(or_off(0, st.one_of(st.integers(1, 4), st.integers(1, 40)))),
        top_p=draw(or_off(1.0, st.floats(0.0625, 1.0, width=32))),
        min_p=draw(or_off(0.0, st.floats(0.0, 0.5, width=32))),
        seed=draw(st.integers(0, 2**32 - 1)),
        max_new_tokens=max_new_tokens,
        min_new_tokens=draw(or_off(0, st.integers(0, max_new_tokens))),
        stop_token_ids=tuple(draw(or_off((), st.lists(token_ids, max_size=4)))),
        stop=tuple(draw(or_off((), st.lists(text, max_size=3)))) if has_text else (),
        ignore_eos=draw(st.booleans()),
        logprobs=logprobs,
        top_logprobs=draw(st.integers(0, 5)) if logprobs and has_top_logprobs else 0,
        **draw(or_off({}, penalties)),
    )


@st.composite
def cases(draw: st.DrawFn, shapes: list[Shape], num_ids: int, has_text: bool) -> Case:
    shape = draw(st.sampled_from(shapes))
    token_ids = st.integers(0, num_ids - 1)
    batch = draw(st.integers(*shape.batches))

    def prompt() -> list[int]:
        preamble = draw(st.sampled_from(([], *PREAMBLES)))
        length = draw(st.one_of(st.integers(1, 12), st.integers(1, MAX_LENGTH - 1 - len(preamble))))
        return preamble + draw(st.lists(token_ids, min_size=length, max_size=length))

    case = Case(
        mode=shape.mode,
        budget=draw(st.integers(*shape.budgets)),
        prompts=[prompt() for _ in range(batch)],
        options=[draw(options(token_ids, has_text, shape.has_top_logprobs)) for _ in range(batch)],
        second_turn=draw(or_off(None, st.lists(token_ids, min_size=1, max_size=3))),
    )
    return ask_for_alternatives(case) if IS_CI and shape.has_top_logprobs else case


def ask_for_alternatives(case: Case) -> Case:
    first, *others = case.options
    asked = dataclasses.replace(first, logprobs=True, top_logprobs=max(first.top_logprobs, 1))
    return dataclasses.replace(case, options=[asked, *others])


def well_drafted(shape: Shape) -> Case:
    """Long sequences that the drafter is often right about, whatever else is drawn."""
    batch, option = shape.batches[0], Options(temperature=0.7, seed=1, max_new_tokens=30, ignore_eos=True)
    prompts = [[*PREAMBLES[index % 2], index] for index in range(batch)]
    case = Case(shape.mode, shape.budgets[1], prompts, [option] * batch, None)
    return ask_for_alternatives(case) if IS_CI and shape.has_top_logprobs else case


@pytest.mark.parametrize("name", ENGINE_OPTIONS)
def test_engine_equals_oracle(name, request):
    """Ids, reasons, texts, log-probabilities and accepted lengths, wherever no near tie decides."""
    if not IS_CI:
        # A process has room for the programs of one pair, not of all.
        request.addfinalizer(jax.clear_caches)
    pair = make_pair(name, **ENGINE_OPTIONS[name])
    has_text = pair.bytes_of is not None
    num_ids = len(pair.bytes_of if has_text else pair.target.embedding_VD)
    tally = Counter()

    @hypothesis.settings(
        max_examples=-(-NUM_EXAMPLES // len(ENGINE_OPTIONS)),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases(SHAPES[name], num_ids, has_text))
    @hypothesis.example(well_drafted(SHAPES[name][-1]))
    def engine_equals_oracle(case: Case) -> None:
        tally["settings"] += 1
        completions = compare(pair, case, case.prompts, tally)
        if case.second_turn is None:
            return
        turns = zip(case.prompts, completions, strict=True)
        longer = [[*prompt, *done.token_ids, *case.second_turn][: MAX_LENGTH - 1] for prompt, done in turns]
        compare(pair, case, longer, tally)

    engine_equals_oracle()
    print(f"\n{name}: {dict(tally)}")
    assert tally["close to a tie"] <= max(FEW_CLOSE, MOST_CLOSE * tally["sequences"])
    assert tally["drafts accepted"] > tally["rounds"] / 25, "the drafter must be right often enough to test anything"


def compare(pair: Pair, case: Case, prompts: list[list[int]], tally: Counter) -> list[Completion]:
    """Runs the engine on a batch and holds each completion against the oracle's."""
    completions = pair.engine.generate(
        prompts,
        [SamplingParams(**dataclasses.asdict(one)) for one in case.options],
        DecodeConfig(mode=case.mode, budget=case.budget),
    )
    eos = pair.target.config.eos_token_ids
    for index, completion in enumerate(completions):
        expected = Continuation(pair.target, case.options[index], prompts[index], index, eos)
        ending = expected.ending(MAX_LENGTH, pair.bytes_of)
        tally["sequences"] += 1
        tally["tokens"] += ending.num_tokens
        is_whole = compare_tokens(expected, ending, completion)
        is_whole &= compare_rounds(pair, case, expected, ending, completion, tally)
        tally["close to a tie"] += not is_whole
    return completions


def compare_tokens(expected: Continuation, ending: Ending, completion: Completion) -> bool:
    """Compares what a user sees; False if it had to stop at a near tie."""
    is_whole = expected.close_at is None or expected.close_at >= ending.num_tokens
    num_known = ending.num_tokens if is_whole else expected.close_at
    assert completion.token_ids[:num_known] == expected.tokens(num_known)
    if is_whole:
        assert len(completion.token_ids) == ending.num_tokens
        assert (completion.finish_reason, completion.text) == (ending.reason, ending.text)
    compare_logprobs(expected, completion, num_known)
    return is_whole


def compare_logprobs(expected: Continuation, completion: Completion, num_known: int) -> None:
    """Those of the tokens, and the best ones: ids of equal probability may change places."""
    asked, num_top = expected.options.logprobs, expected.options.top_logprobs
    assert (completion.logprobs is not None) == asked
    assert (completion.top_logprobs is not None) == (num_top > 0)
    for number, token in enumerate(completion.token_ids[:num_known] if asked else ()):
        logprob_V = expected.logprobs[number]
        np.testing.assert_allclose(completion.logprobs[number], logprob_V[token], rtol=0, atol=1e-4)
        if num_top:
            ids, values = zip(*completion.top_logprobs[number], strict=True)
            best = np.sort(logprob_V)[::-1][:num_top]
            assert len(set(ids)) == num_top
            np.testing.assert_allclose(values, best, rtol=0, atol=1e-4)
            np.testing.assert_allclose(logprob_V[list(ids)], best, rtol=0, atol=1e-4)


def compare_rounds(
    pair: Pair, case: Case, expected: Continuation, ending: Ending, completion: Completion, tally: Counter
) -> bool:
    """Compares accepted lengths, and that rounds end when the sequence does; False if a near tie came first.

    Near the end of the context, where a whole block has no room, rounds may be shorter. Behind a stop string, which the host
    looks for between slices, there may be some more.
    """
    accepted = completion.stats.accepted_lengths
    assert completion.stats.rounds == len(accepted)
    num_tokens, num_needed = 1, None
    for number, round_ in enumerate(expected.rounds(pair.drafter, case.mode, case.budget)):
        if num_needed is None and num_tokens >= ending.num_tokens:
            num_needed = number
        if num_needed is not None:
            assert num_needed <= len(accepted) <= num_needed + (STREAM_ROUNDS if ending.at_string else 0)
            if number == len(accepted):
                break
        if round_.start + pair.drafter.config.block_size > MAX_LENGTH:
            break
        if round_.is_close or expected.is_close(round_.num_tokens):
            return False
        assert number < len(accepted) and accepted[number] == round_.accepted
        num_tokens = round_.num_tokens
        tally["rounds"] += case.mode != "ar"
        tally["drafts accepted"] += round_.accepted - 1
        tally["rounds that accept three or more"] += round_.accepted > 3
    return True


def test_noise_is_that_of_jax():
    for seed, sequence, position in ((0, 0, 0), (5, 3, 77), (2**32 - 1, 63, 262143)):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(np.uint32(seed)), sequence), position)
        folded = noise.fold_in(noise.fold_in(noise.key_of_seed(seed), sequence), position)
        assert tuple(jax.random.key_data(key).tolist()) == folded
        unit = jax.random.uniform(key, (101,), jnp.float32, minval=np.finfo(np.float32).tiny)
        assert np.array_equal(np.asarray(unit), noise.uniform(folded, 101))
        expected = np.asarray(jax.random.gumbel(key, (101,), jnp.float32))
        np.testing.assert_allclose(noise.gumbel(seed, sequence, position, 101), expected, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def published(golden, converted) -> tuple[Target, Drafter, Drafter]:
    """The golden models as oracles: the target, its drafter, and the drafter with sliding layers."""

    def read(name: str, model: Any, config_of: Any) -> tuple[Any, dict]:
        folder: Path = converted(golden / name)
        config = config_of.from_hf(checkpoint.read_metadata(folder).config)
        arrays = checkpoint.load(folder, model.parameters(config), make_mesh(None), jnp.float32)
        return config, jax.tree.map(np.asarray, arrays)

    target = Target(*read("target", kimi, KimiConfig))
    return target, *(Drafter(*read(name, dflash, DFlashConfig), target) for name in ("drafter", "drafter_sliding"))


def test_oracle_equals_published_logits(golden, published):
    target, drafter, sliding = published
    with np.load(golden / "target_golden.npz") as expected:
        prompts = {name: expected[f"{name}_ids"].tolist() for name in ("p0", "p1", "p2")}
        for name, prompt in prompts.items():
            np.testing.assert_allclose(target(prompt).logits_TV, expected[f"{name}_logits"], **GOLDEN)
    with np.load(golden / "drafter_golden.npz") as expected:
        for name, prompt in prompts.items():
            root = int(expected[f"{name}_round0_block_ids"][0])
            np.testing.assert_allclose(drafter(prompt, root), expected[f"{name}_round0_logits"], **GOLDEN)
            np.testing.assert_allclose(sliding(prompt, root), expected[f"{name}_round0_sliding_logits"], **GOLDEN)


def test_oracle_equals_published_runs(golden, published):
    """All greedy runs behind the first prompt; rounds that the reference cut short near its end are its own."""
    target, drafter, _ = published
    with np.load(golden / "target_golden.npz") as numbers:
        prompt = numbers["p0_ids"].tolist()
    runs = [run for run in json.loads((golden / "ddtree_runs.json").read_text()) if run["prompt"] == 0]
    assert {run["method"] for run in runs} == set(MODE_OF)
    for run in runs:
        options = Options(max_new_tokens=64, stop_token_ids=tuple(run["stop_token_ids"] or ()))
        continuation = Continuation(target, options, prompt, 0, target.config.eos_token_ids)
        ending = continuation.ending(max_length=4096)
        assert continuation.tokens(ending.num_tokens) == run["new_ids"]
        lengths = run["acceptance_lengths"]
        is_cut = [traced["block_cut_short"] for traced in run.get("rounds", ())] or [False] * len(lengths)
        budget = run["budget"] or (0 if run["method"] == "ddtree" else drafter.config.block_size - 1)
        rounds = continuation.rounds(drafter, MODE_OF[run["method"]], budget)
        for length, round_, cut in zip(lengths, rounds, is_cut, strict=False):
            assert cut or length == round_.accepted
