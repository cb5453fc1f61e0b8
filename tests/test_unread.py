"""What holds no token is never read: padding nodes, padding of prompts, places of a batch that no prompt takes.

Nor is anything read for it: no expert's weights.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_pairs import make_pair

from ddtree_jax import DecodeConfig, Engine, SamplingParams, decode, kimi
from ddtree_jax.decode import MODES, RUNNING, STOPPED

RANDOM = np.random.default_rng(41)
PROMPTS = [RANDOM.integers(1, 37, length).tolist() for length in (3, 19, 30)]


@pytest.fixture
def engines() -> tuple[Engine, Engine]:
    """The same pair twice; the second one embeds token 0, which fills what holds no token, as NaN."""
    clean, poisoned = (make_pair("plain", max_length=97, prefill_chunk=16).engine for _ in range(2))
    weight = poisoned.models.target.embedding_VD
    weight[...] = weight[...].at[0].set(jnp.nan)
    return clean, poisoned


def poison(engine: Engine, monkeypatch) -> None:
    """Fills fresh caches with NaN: slots behind every length, the drafter's and those of empty places too."""
    init_context = engine._init_context

    def init_poisoned(*args):
        context = init_context(*args)
        for name in ("target_cache", "drafter_cache"):
            object.__setattr__(context, name, jax.tree.map(lambda slots: slots * jnp.nan, getattr(context, name)))
        return context

    monkeypatch.setattr(engine, "_init_context", init_poisoned)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_undefined_is_read(engines, monkeypatch, mode):
    """Budget 5 leaves padding nodes in a bucket of 7, three prompts leave a place in a batch of four."""
    clean, poisoned = engines
    poison(poisoned, monkeypatch)
    params = SamplingParams(
        max_new_tokens=25, temperature=0.6, top_p=0.9, seed=3, logprobs=True, logit_bias={0: -100.0},
        repetition_penalty=1.1, ignore_eos=True,
    )  # fmt: skip
    outputs = []
    for engine in engines:
        done = engine.generate(PROMPTS, params, DecodeConfig(mode=mode, budget=5))
        outputs.append([(one.token_ids, one.logprobs, one.stats.accepted_lengths) for one in done])
    assert outputs[0] == outputs[1]
    assert np.isfinite(outputs[1][0][1]).all()
    assert np.isnan(poisoned.score([0])).all()
    assert not np.isnan(clean.score([0])).any()


@pytest.fixture
def routed(monkeypatch) -> list[np.ndarray]:
    """Expert numbers [T, X] of every call of `int4_moe` outside of compiled programs."""
    run, routed = kimi._int4_moe, []

    def record(x_TD, expert_TX, *rest):
        if not isinstance(expert_TX, jax.core.Tracer):
            routed.append(np.asarray(expert_TX))
        return run(x_TD, expert_TX, *rest)

    monkeypatch.setattr(kimi, "_int4_moe", record)
    return routed


def state_of_batch(engine: Engine, mode: str) -> tuple[decode.State, tuple]:
    """The loop's state behind the prefill of `PROMPTS`; sampling, plan and budget of a round."""
    job = engine._job(
        engine._read_prompts(PROMPTS, True), SamplingParams(ignore_eos=True), DecodeConfig(mode=mode, budget=5)
    )
    return next(engine._run(job, 1)).state, (job.sampling, job.plan, jnp.int32(job.budget))


@pytest.mark.parametrize("mode", MODES)
def test_padding_and_finished_sequences_choose_no_expert(engines, routed, mode):
    """Three of four places, the second one finished, budget 5 in a bucket of 7 nodes."""
    engine, _ = engines
    models, config = engine.models, engine.models.target.config
    state, inputs = state_of_batch(engine, mode)
    finish_B = state.finish_B.at[1].set(STOPPED)
    assert finish_B.tolist()[::2] == [RUNNING] * 2 and finish_B[3] != RUNNING
    after = decode.decode_round(models, replace(state, finish_B=finish_B), *inputs)
    (expert_TX,) = routed
    count_B = np.where(finish_B == RUNNING, after.last.count_B, 0)
    assert count_B.tolist() == {"ar": [1, 0, 1, 0], "chain": [4, 0, 4, 0], "ddtree": [6, 0, 6, 0]}[mode]
    is_token_BN = np.arange(len(expert_TX) // 4)[None] < count_B[:, None]
    np.testing.assert_array_equal(expert_TX >= 0, np.repeat(is_token_BN.reshape(-1, 1), 2, axis=1))
    assert (expert_TX[~is_token_BN.ravel()] == -1).all()
    if mode == "ar":
        running = state.finish_B.at[1:].set(STOPPED)
        decode.decode_round(models, replace(state, finish_B=running), *inputs)
        assert len(set(routed[-1].ravel().tolist()) - {-1}) == config.num_experts_per_tok


def test_padding_of_a_prompt_chooses_no_expert(engines, routed):
    engine, _ = engines
    token_BT, count_B = jnp.zeros((3, 8), jnp.int32), jnp.array([3, 0, 8], jnp.int32)
    decode.prefill(engine.models, engine._new_context(3), token_BT, count_B)
    (expert_TX,) = routed
    is_token_BT = np.arange(8)[None] < np.asarray(count_B)[:, None]
    np.testing.assert_array_equal((expert_TX >= 0).all(axis=1), is_token_BT.ravel())
    np.testing.assert_array_equal((expert_TX == -1).all(axis=1), ~is_token_BT.ravel())
