"""Filters equal a plain numpy implementation, draws follow the filtered softmax and depend on nothing but their key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_pairs import make_pair

from ddtree_jax import DecodeConfig, SamplingParams, sampling
from ddtree_jax.sampling_params import SamplingArrays

pytest_plugins = ["engines"]

PROMPT = np.random.default_rng(8).integers(0, 500, 11).tolist()
TREE = DecodeConfig(mode="ddtree", budget=15)


def softmax(logits_V: np.ndarray) -> np.ndarray:
    weight_V = np.exp(logits_V - logits_V.max())
    return weight_V / weight_V.sum()


def warp(logits_V: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The usual warpers one after the other, in float64, as `transformers` applies them."""
    logits_V = logits_V.astype(np.float64) / temperature
    if top_k:
        smallest = np.sort(logits_V)[-min(top_k, logits_V.size)]
        logits_V = np.where(logits_V < smallest, -np.inf, logits_V)
    if top_p < 1:
        ascending_V = np.argsort(logits_V, kind="stable")
        is_tail_V = np.cumsum(softmax(logits_V)[ascending_V]) <= 1 - top_p
        is_tail_V[-1] = False
        logits_V = logits_V.copy()
        logits_V[ascending_V[is_tail_V]] = -np.inf
    if min_p:
        probability_V = softmax(logits_V)
        logits_V = np.where(probability_V < min_p * probability_V.max(), -np.inf, logits_V)
    return logits_V


def arrays(*params: SamplingParams) -> SamplingArrays:
    return SamplingArrays.stack(
        params, [[0]] * len(params), batch=len(params), max_length=1000, vocab_size=101, eos_token_ids=()
    )


def draw(logits_BNV: np.ndarray, depth_BN: np.ndarray, length_B: np.ndarray, params: SamplingArrays, depths: int = 8):
    int32 = (jnp.asarray(array, jnp.int32) for array in (depth_BN, length_B))
    return np.asarray(jax.jit(sampling.draw, static_argnums=4)(jnp.asarray(logits_BNV), *int32, params, depths))


@pytest.mark.parametrize("top_k", [0, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 1.0])
def test_filters_equal_numpy(top_k, top_p, min_p):
    filtered = jax.jit(sampling.filtered)
    for seed in range(11):
        random = np.random.default_rng(seed)
        temperature = random.uniform(0.2, 2)
        logits_V = (random.normal(size=101) * random.uniform(0.5, 5)).astype(np.float32)
        expected_V = warp(logits_V, temperature, top_k, top_p, min_p)
        scaled_V = (logits_V / np.float32(temperature)).astype(np.float32)
        ours_V = np.asarray(filtered(jnp.asarray(scaled_V), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p)))
        np.testing.assert_array_equal(np.isfinite(ours_V), np.isfinite(expected_V))
        np.testing.assert_allclose(ours_V, expected_V, rtol=1e-5)


def test_order_of_filters_matters_and_is_kept():
    """Top-p acts on what top-k left, min-p on what both left: other orders keep other tokens here."""
    logits_V = np.log(np.array([0.4, 0.2, 0.15, 0.13, 0.12], np.float32))
    kept_V = np.isfinite(sampling.filtered(jnp.asarray(logits_V), jnp.int32(3), jnp.float32(0.7), jnp.float32(0)))
    assert kept_V.tolist() == [True, True, False, False, False]  # of 0.75 in all, 0.6 is enough; top-p first keeps 3
    assert np.isfinite(warp(logits_V, 1.0, 0, 0.7, 0.0)).sum() == 3


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 2.0, "top_k": 6, "top_p": 0.9}]
)
def test_frequencies_follow_the_filtered_softmax(params):
    """Chi-square of 1009 sequences x 5 positions on 7 tokens; by chance the bound is passed once in 10,000 times."""
    params = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    logits_V = np.array([0.3, -0.5, 1.1, 0.9, -1.2, 0.0, 0.6], np.float32)
    depth_BN = np.broadcast_to(np.arange(5), (1009, 5))
    logits_BNV = np.broadcast_to(logits_V, (1009, 5, 7))
    drawn_BN = draw(logits_BNV, depth_BN, np.arange(1009) % 13, arrays(*[SamplingParams(seed=3, **params)] * 1009))
    counts_V = np.bincount(drawn_BN.ravel(), minlength=7)
    expected_V = softmax(warp(logits_V, **params)) * drawn_BN.size
    is_possible_V = expected_V > 0
    assert counts_V[~is_possible_V].sum() == 0
    chi_square = ((counts_V - expected_V)[is_possible_V] ** 2 / expected_V[is_possible_V]).sum()
    assert chi_square < {6: 27.86, 5: 25.74, 4: 23.51, 3: 21.11, 2: 18.42}[is_possible_V.sum() - 1]
    # Neighbouring positions and sequences are independent: they agree as often as two draws do by chance.
    chance = (expected_V**2).sum() / drawn_BN.size**2
    for agrees in (drawn_BN[:, 1:] == drawn_BN[:, :-1], drawn_BN[1:] == drawn_BN[:-1]):
        assert abs(agrees.mean() - chance) < 4 * (chance * (1 - chance) / agrees.size) ** 0.5


@pytest.mark.parametrize(
    ("params", "asked"),
    [
        ({"min_new_tokens": 3}, set()),
        ({"top_k": 3, "top_p": 0.5}, set()),
        ({"temperature": 1, "min_p": 0.1}, {"is_sampled"}),
        ({"temperature": 1, "top_k": 3}, {"is_sampled", "is_filtered"}),
        ({"temperature": 1, "top_p": 0.9}, {"is_sampled", "is_filtered"}),
        ({"logit_bias": {3: 0.5}}, {"is_adjusted"}),
        ({"repetition_penalty": 1.1}, {"is_adjusted"}),
        ({"presence_penalty": 0.1}, {"is_adjusted"}),
        ({"frequency_penalty": -0.1}, {"is_adjusted"}),
        ({"logprobs": True}, {"wants_logprobs"}),
    ],
)
def test_what_any_sequence_asks_for_is_known(params, asked):
    found = arrays(SamplingParams(), SamplingParams(**params))
    flags = ("is_adjusted", "is_sampled", "is_filtered", "wants_logprobs")
    assert {name for name in flags if getattr(found, name)} == asked


def noise_at(seed: int, position: int, *, batch: int, row: int) -> np.ndarray:
    """Noise of one (seed, sequence ``row``, position), computed in a batch of others."""
    seeds = np.arange(batch) + 100
    seeds[row] = seed
    position_BT = np.random.default_rng(position).integers(0, 50, (batch, 3))
    position_BT[row, 1] = position
    params = arrays(*[SamplingParams(seed=int(one)) for one in seeds])
    return np.asarray(
        jax.jit(sampling.noise, static_argnums=2)(params, jnp.asarray(position_BT, jnp.int32), 17)[row, 1]
    )


def test_noise_is_a_function_of_seed_sequence_and_position():
    base_V = noise_at(5, 23, batch=3, row=2)
    for same_V in (noise_at(5, 23, batch=3, row=2), noise_at(5, 23, batch=7, row=2)):
        np.testing.assert_array_equal(same_V, base_V)
    for other_V in (noise_at(6, 23, batch=3, row=2), noise_at(5, 24, batch=3, row=2), noise_at(5, 23, batch=3, row=1)):
        assert not np.any(other_V == base_V)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), 2), 23)
    np.testing.assert_array_equal(base_V, jax.random.gumbel(key, (17,), jnp.float32))


def test_draw_does_not_depend_on_the_tree_around_a_node():
    """A node at one depth draws the same token whatever its number, its neighbours, and the number of depths."""
    random = np.random.default_rng(0)
    params = arrays(*[SamplingParams(temperature=0.9, top_p=0.95, seed=seed) for seed in (3, 11)])
    logits_BNV = random.normal(size=(2, 13, 19)).astype(np.float32)
    depth_BN = random.integers(0, 5, (2, 13))
    whole_BN = draw(logits_BNV, depth_BN, np.array([7, 31]), params)
    order_N = random.permutation(13)[:5]
    some_BN = draw(logits_BNV[:, order_N], depth_BN[:, order_N], np.array([7, 31]), params, depths=5)
    np.testing.assert_array_equal(some_BN, whole_BN[:, order_N])
    # The same logits at the same absolute position, one token later in the text.
    later_BN = draw(logits_BNV, depth_BN + 1, np.array([6, 30]), params)
    np.testing.assert_array_equal(later_BN, whole_BN)
    assert np.any(draw(logits_BNV, depth_BN, np.array([8, 32]), params) != whole_BN)


def test_greedy_and_sampled_sequences_share_a_batch():
    """Each sequence has its own settings; greedy rows are the arg max."""
    logits_BNV = np.random.default_rng(1).normal(size=(3, 2, 23)).astype(np.float32)
    depth_BN = np.broadcast_to(np.arange(2), (3, 2))
    one, two = SamplingParams(temperature=5.0, seed=1), SamplingParams(temperature=0.5, top_k=1, seed=1)
    drawn_BN = draw(logits_BNV, depth_BN, np.array([3, 3, 3]), arrays(SamplingParams(), one, two))
    np.testing.assert_array_equal(drawn_BN[[0, 2]], logits_BNV[[0, 2]].argmax(axis=-1))
    assert np.any(drawn_BN[1] != logits_BNV[1].argmax(axis=-1))


@pytest.mark.parametrize("temperature", [1e-30, 2e-38, 1e-45])
def test_smallest_temperatures_are_greedy(temperature):
    logits_BNV = np.random.default_rng(2).normal(size=(1, 3, 29)).astype(np.float32) * 10
    params = arrays(SamplingParams(temperature=temperature, top_p=0.9))
    drawn_BN = draw(logits_BNV, np.zeros((1, 3)), np.array([3]), params)
    np.testing.assert_array_equal(drawn_BN, logits_BNV.argmax(axis=-1))


@pytest.mark.parametrize("mode", ["ar", "ddtree"])
def test_minimum_of_new_tokens(golden_engine, mode):
    """No stop id is drawn too early, and the next best token takes its place; the first late one ends the text."""
    decode = DecodeConfig(mode=mode, budget=15)
    free = golden_engine.generate(PROMPT, SamplingParams(max_new_tokens=19), decode)[0].token_ids
    at = next(index for index in range(3, 9) if free[index] not in free[:index])
    for minimum, goes_on in ((at, False), (at + 1, True)):
        params = SamplingParams(max_new_tokens=19, min_new_tokens=minimum, stop_token_ids=(free[at],))
        done = golden_engine.generate(PROMPT, params, decode)[0].token_ids
        assert done[:at] == free[:at]
        assert (len(done) > at + 1 and done[at] != free[at]) == goes_on

    stops = (free[3], free[5])
    done = golden_engine.generate(
        PROMPT, SamplingParams(max_new_tokens=19, min_new_tokens=7, stop_token_ids=stops), decode
    )[0]
    score_TV = golden_engine.score(PROMPT + done.token_ids)[len(PROMPT) - 1 : -1]
    score_TV[:7, [*stops, 506]] = -np.inf
    assert done.token_ids == score_TV.argmax(axis=1).tolist()
    assert not set(done.token_ids[:7]) & set(stops)
    early = golden_engine.generate(PROMPT, SamplingParams(max_new_tokens=19, stop_token_ids=stops), decode)[0]
    assert early.token_ids == free[: min(free.index(stop) for stop in stops) + 1]
    assert early.finish_reason == "stop"


@pytest.mark.parametrize("mode", ["ar", "ddtree"])
def test_stop_on_the_last_token_allowed_is_a_stop(golden_engine, mode):
    decode = DecodeConfig(mode=mode, budget=15)
    free = golden_engine.generate(PROMPT, SamplingParams(max_new_tokens=19), decode)[0]
    assert free.finish_reason == "length"
    for number in (1, 2, 6, 9):
        stop = free.token_ids[number - 1]
        at = free.token_ids.index(stop) + 1
        done = golden_engine.generate(PROMPT, SamplingParams(max_new_tokens=at, stop_token_ids=(stop,)), decode)[0]
        assert (done.token_ids, done.finish_reason) == (free.token_ids[:at], "stop")
        if at > 1:
            done = golden_engine.generate(
                PROMPT, SamplingParams(max_new_tokens=at - 1, stop_token_ids=(stop,)), decode
            )[0]
            assert (done.token_ids, done.finish_reason) == (free.token_ids[: at - 1], "length")


@pytest.mark.parametrize("mode", ["ar", "ddtree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_are_the_scores_before_everything(golden_engine, temperature, mode):
    """Of the tokens and of the best alternatives: no temperature, filter, bias or penalty is in them."""
    params = SamplingParams(
        max_new_tokens=17, temperature=temperature, top_k=5, seed=2, logprobs=True, top_logprobs=7,
        repetition_penalty=1.5, logit_bias={3: 1.0, 4: -100.0}, min_new_tokens=9,
    )  # fmt: skip
    done = golden_engine.generate(PROMPT, params, DecodeConfig(mode=mode, budget=15))[0]
    score_TV = golden_engine.score(PROMPT + done.token_ids)[len(PROMPT) - 1 : -1].astype(np.float64)
    logprob_TV = np.stack([np.log(softmax(score_V)) for score_V in score_TV])
    np.testing.assert_allclose(done.logprobs, logprob_TV[np.arange(17), done.token_ids], rtol=0, atol=5e-5)
    assert [len(best) for best in done.top_logprobs] == [7] * 17
    for best, logprob_V in zip(done.top_logprobs, logprob_TV, strict=True):
        tokens, logprobs = zip(*best, strict=True)
        np.testing.assert_allclose(logprobs, np.sort(logprob_V)[: -7 - 1 : -1], rtol=0, atol=5e-5)
        np.testing.assert_allclose(logprobs, logprob_V[list(tokens)], rtol=0, atol=5e-5)
        assert len(set(tokens)) == 7


def test_logprobs_come_to_those_who_asked():
    engine = make_pair("least").engine
    params = [
        SamplingParams(max_new_tokens=5, ignore_eos=True),
        SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=True),
        SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=True, top_logprobs=1),
    ]
    neither, one, both = engine.generate([[3, 1, 4]] * 3, params, DecodeConfig(mode="ar"))
    assert (neither.logprobs, neither.top_logprobs, one.top_logprobs) == (None, None, None)
    assert (len(one.logprobs), len(both.logprobs)) == (3, 4)
    assert [best for (best,) in both.top_logprobs] == list(zip(both.token_ids, both.logprobs, strict=True))


@pytest.mark.parametrize("mode", ["ar", "ddtree"])
def test_end_of_sequence_may_be_ignored(golden_engine, mode):
    """Then it is a token like any other, and other stop ids go on counting."""
    decode, (eos,) = DecodeConfig(mode=mode, budget=15), golden_engine.models.target.config.eos_token_ids
    likely = {"max_new_tokens": 19, "logit_bias": {eos: 9.0}, "temperature": 0.7, "seed": 6}
    ended = golden_engine.generate(PROMPT, SamplingParams(**likely), decode)[0]
    assert (ended.token_ids[-1], ended.finish_reason) == (eos, "stop")
    free = golden_engine.generate(PROMPT, SamplingParams(**likely, ignore_eos=True), decode)[0]
    assert free.token_ids[: len(ended.token_ids)] == ended.token_ids
    assert (len(free.token_ids), free.finish_reason) == (19, "length")
    asked = SamplingParams(**likely, ignore_eos=True, stop_token_ids=(eos,))
    assert golden_engine.generate(PROMPT, asked, decode)[0].token_ids == ended.token_ids
