"""The loop is one program: what may be traced is traced, nothing leaves the device, and slices change nothing."""

import collections
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from small_pairs import make_pair

from ddtree_jax import Completion, DecodeConfig, Engine, SamplingParams, Stats
from ddtree_jax.completion import TextStream
from ddtree_jax.decode import MODES, State
from ddtree_jax.generate import ALL_ROUNDS, STREAM_ROUNDS

pytest_plugins = ["engines"]

PROMPT = np.random.default_rng(5).integers(0, 500, 13).tolist()
TREE = DecodeConfig(mode="ddtree", budget=15)
PLAIN_AND_TREE = ("ar", "ddtree")
"""Modes whose loops differ most: a chain is a tree with one child a node."""
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations() -> Iterator[collections.Counter]:
    """Counts programs, even the smallest, that XLA compiles while the test runs."""
    counter = collections.Counter()

    def listen(event: str, seconds: float, **kwargs) -> None:
        counter[event] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counter
    jax.monitoring.unregister_event_duration_listener(listen)


def inputs_of_loop(engine: Engine, decode: DecodeConfig, sampling: SamplingParams, monkeypatch) -> tuple[tuple, dict]:
    """What the engine passes to its compiled loop for `PROMPT`. It is on the device already."""

    class Taken(Exception):
        pass

    def take(*args, **kwargs) -> State:
        raise Taken(args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_decode_rounds", take)
        with pytest.raises(Taken) as taken:
            engine.generate(PROMPT, sampling, decode)
    return taken.value.args


def test_settings_share_a_program(compilations):
    """Any budget in a bucket, any number of new tokens, seed and filter: one program. The next bucket: another."""
    engine = make_pair("plain", max_length=59).engine  # caches of a length that no other engine has
    one, other = [3, 1, 4, 1, 5, 9], [2, 7, 1]
    engine.generate(one, SamplingParams(max_new_tokens=3, logprobs=True), TREE)
    before, size = compilations[COMPILED], engine._decode_rounds._cache_size()
    for budget, params in (
        (15, SamplingParams(max_new_tokens=19)),
        (8, SamplingParams(max_new_tokens=2)),
        (11, SamplingParams(max_new_tokens=5, temperature=0.7, seed=2**32 - 1)),
        (13, SamplingParams(max_new_tokens=5, temperature=1.3, seed=1, top_p=0.9, top_k=7, min_p=0.01)),
        (15, SamplingParams(max_new_tokens=5, min_new_tokens=5, stop_token_ids=(3, 7), logprobs=True)),
    ):
        engine.generate(one, params, DecodeConfig(mode="ddtree", budget=budget))
        engine.generate(other, params, DecodeConfig(mode="ddtree", budget=budget))
    assert compilations[COMPILED] == before
    assert engine._decode_rounds._cache_size() == size
    engine.generate(one, SamplingParams(max_new_tokens=2), DecodeConfig(mode="ddtree", budget=3))
    assert compilations[COMPILED] > before
    assert engine._decode_rounds._cache_size() == size + 1


@pytest.mark.parametrize("mode", PLAIN_AND_TREE)
def test_second_call_compiles_nothing(golden_engine, compilations, mode):
    decode = DecodeConfig(mode=mode, budget=15)

    def call() -> list:
        return [
            golden_engine.generate(PROMPT, SamplingParams(max_new_tokens=9), decode)[0].token_ids,
            [
                token
                for piece in golden_engine.stream(PROMPT, SamplingParams(max_new_tokens=9), decode)
                for token in piece
            ],
        ]

    first = call()
    before = compilations[COMPILED]
    assert call() == first
    assert compilations[COMPILED] == before


@pytest.mark.parametrize("mode", PLAIN_AND_TREE)
def test_program_never_calls_back(golden_engine, monkeypatch, mode):
    """Neither the lowered program nor, of trees, the compiled one calls Python or talks to the host."""
    decode = DecodeConfig(mode=mode, budget=15)
    sampling = SamplingParams(max_new_tokens=9, temperature=0.5, top_p=0.5)
    args, kwargs = inputs_of_loop(golden_engine, decode, sampling, monkeypatch)
    # Lowering puts descriptions of arguments where annotations of the state say arrays.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    lowered = golden_engine._decode_rounds.lower(*args, **kwargs)
    calls_back = jax.jit(lambda x: jax.pure_callback(lambda x: x, x, x)).lower(jnp.ones(3))
    forms = (lambda program: program.as_text(), lambda program: program.compile().as_text())
    for form in forms if mode == "ddtree" else forms[:1]:
        assert "callback" in form(calls_back)
        text = form(lowered)
        assert "while" in text
        for word in ("callback", "infeed", "outfeed", "SendToHost", "RecvFromHost"):
            assert word not in text


def test_nothing_is_transferred_while_the_loop_runs(golden_engine, monkeypatch):
    args, kwargs = inputs_of_loop(golden_engine, TREE, SamplingParams(max_new_tokens=9), monkeypatch)
    with jax.transfer_guard("disallow"):
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jax.jit(jnp.negative)(np.int32(15))
        state = golden_engine._decode_rounds(*args, **kwargs)
        jax.block_until_ready(state)
    done = golden_engine.generate(PROMPT, SamplingParams(max_new_tokens=9), TREE)[0]
    assert np.asarray(state.emitted.token_BM)[0, :9].tolist() == done.token_ids


def test_whole_batch_is_one_call_of_the_loop(golden_engine, monkeypatch):
    limits = []
    run = golden_engine._decode_rounds

    def count(*args, **kwargs) -> State:
        limits.append(int(args[4]))
        return run(*args, **kwargs)

    monkeypatch.setattr(golden_engine, "_decode_rounds", count)
    done = golden_engine.generate(PROMPT, SamplingParams(max_new_tokens=19), TREE)[0]
    assert limits == [ALL_ROUNDS]
    limits.clear()
    assert len(list(golden_engine.stream(PROMPT, SamplingParams(max_new_tokens=19), TREE))) > 1
    num_slices = -(-done.stats.rounds // STREAM_ROUNDS)
    assert limits == [STREAM_ROUNDS * (number + 1) for number in range(num_slices)]


@pytest.mark.parametrize("mode", PLAIN_AND_TREE)
def test_pieces_of_ids_join_to_the_completion(golden_engine, mode):
    sampling, decode = SamplingParams(max_new_tokens=23, temperature=0.8, seed=4), DecodeConfig(mode=mode, budget=15)
    done = golden_engine.generate(PROMPT, sampling, decode)[0]
    pieces = list(golden_engine.stream(PROMPT, sampling, decode))
    assert [token for piece in pieces for token in piece] == done.token_ids
    assert len(pieces) == 1 + -(-done.stats.rounds // STREAM_ROUNDS)
    assert all(pieces)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pieces_of_text_join_to_the_completion(text_engine, seed):
    """Characters are broken across tokens and slices; a stop string may lie across slices too."""
    sampling = SamplingParams(max_new_tokens=31, temperature=2.0, seed=seed)
    whole = text_engine.generate("def f(x):", sampling, TREE)[0].text
    middle = whole[len(whole) // 2 :][:5]
    for stop in ((), (middle,), (whole[-2:],), ("no such text", middle[1:])):
        params = SamplingParams(max_new_tokens=31, temperature=2.0, seed=seed, stop=stop)
        done = text_engine.generate("def f(x):", params, TREE)[0]
        pieces = list(text_engine.stream("def f(x):", params, TREE))
        assert "".join(pieces) == done.text
        found = [at for text in stop if (at := whole.find(text)) >= 0]
        assert done.text == (whole[: min(found)] if found else whole)
        assert done.finish_reason == ("stop" if found else "length")


@pytest.mark.parametrize("mode", PLAIN_AND_TREE)
def test_first_complete_stop_string_wins(text_engine, mode):
    """A longer string that begins earlier but ends later does not count, however many tokens a round commits."""
    sampling = {"max_new_tokens": 31, "temperature": 2.0, "seed": 1}
    whole = text_engine.generate("def f(x):", SamplingParams(**sampling), DecodeConfig(mode="ar"))[0]
    early, late = whole.text[4:12], whole.text[6:8]
    params = SamplingParams(**sampling, stop=(early, late))
    done = text_engine.generate("def f(x):", params, DecodeConfig(mode=mode, budget=15))[0]
    assert done.text == whole.text[: whole.text.index(late)]
    assert done.finish_reason == "stop"
    assert done.token_ids == whole.token_ids[: len(done.token_ids)]
    assert late in text_engine.tokenizer.decode(done.token_ids)
    assert late not in text_engine.tokenizer.decode(done.token_ids[:-1])


def test_unfinished_character_is_no_stop_string(text_engine):
    """A character that a slice cuts in two is not yet a replacement character."""
    for seed in range(8):
        params = SamplingParams(max_new_tokens=23, temperature=3.0, seed=seed, stop=("\ufffd",))
        plain, tree = (text_engine.generate("f", params, DecodeConfig(mode=mode))[0] for mode in ("ar", "ddtree"))
        assert (plain.token_ids, plain.text, plain.finish_reason) == (tree.token_ids, tree.text, tree.finish_reason)


def test_committed_tokens_are_as_good_as_a_prompt(golden_engine):
    """Each greedy token is the arg max of the whole text's score; sampling goes on where another call stopped."""
    done = golden_engine.generate(PROMPT, SamplingParams(max_new_tokens=37), TREE)[0].token_ids
    best_T = golden_engine.score(PROMPT + done).argmax(axis=1)
    assert best_T[len(PROMPT) - 1 : -1].tolist() == done
    for temperature in (0.0, 0.8):
        sampling = {"temperature": temperature, "seed": 3}
        done = golden_engine.generate(PROMPT, SamplingParams(max_new_tokens=37, **sampling), TREE)[0].token_ids
        for start in (1, 2, 17):
            rest = golden_engine.generate(
                PROMPT + done[:start], SamplingParams(max_new_tokens=37 - start, **sampling), TREE
            )
            assert rest[0].token_ids == done[start:]


@pytest.mark.parametrize("mode", MODES)
def test_end_of_the_caches_changes_no_token(golden_engine, mode):
    """Blocks and trees reach past the last slot there; a completion ends exactly at ``max_length``."""
    num_new = golden_engine.max_length - len(PROMPT)
    whole = golden_engine.generate(
        PROMPT, SamplingParams(max_new_tokens=num_new, logprobs=True), DecodeConfig(mode="ar")
    )
    text = PROMPT + whole[0].token_ids
    assert len(text) == golden_engine.max_length
    sampling = SamplingParams(max_new_tokens=64, logprobs=True)
    for room in (1, 2, 5, 13):
        done = golden_engine.generate(text[:-room], sampling, DecodeConfig(mode=mode, budget=15))[0]
        assert done.token_ids == text[-room:]
        np.testing.assert_allclose(done.logprobs, whole[0].logprobs[-room:], rtol=0, atol=5e-5)
        assert done.finish_reason == "length"


def test_text_stream_never_ends_inside_a_character(text_engine):
    """However the tokens come in, the pieces so far are a prefix of the text, with no half of a character in it."""
    stats = Stats(
        rounds=0, accepted_lengths=[], target_passes=0, cached_tokens=0, prefill_seconds=0.0, decode_seconds=0.0
    )
    for seed in range(29):
        random = np.random.default_rng(seed)
        token_ids = random.integers(0, 256, 31).tolist()
        text, shown, stream = text_engine.tokenizer.decode(token_ids), "", TextStream(text_engine.tokenizer, ())
        assert "\xe9" in text
        for end in sorted(random.integers(0, 31, 7).tolist()):
            shown += stream.advance(token_ids[:end])
            assert text.startswith(shown)
        whole = Completion(
            token_ids=token_ids, text=text, finish_reason="length", logprobs=None, top_logprobs=None, stats=stats
        )
        assert shown + stream.finish(whole) == text
