"""What holds no token is never read: padding nodes, padding of prompts, places of a batch that no prompt takes.

Nor is anything read for it: no expert's weights.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from small_pairs import make_pair

from ddtree_jax import DecodeConfig, Engine, SamplingParams, decode, kimi
from ddtree_jax.decode import RUNNING, STOPPED

RANDOM = np.random.default_rng(41)
PROMPTS = [RANDOM.integers(1, 37, length).tolist() for length in (3, 19, 30)]


@pytest.fixture
def engines() -> tuple[Engine, Engine]:
    """The same pair twice; the second one embeds token 0, which fills what holds no token, as NaN."""
    options = {"max_length": 97, "prefill_chunk": 16}
    clean, poisoned = (make_pair("plain", **options).engine for _ in range(2))
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


@pytest.mark.parametrize("mode", ["ar", "ddtree"])
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
def routed_by(monkeypatch) -> Callable:
    """Calls a step of the loop as one program; also returns the expert numbers [T, X] that its MoE layer is given."""
    run, routed = kimi._int4_moe, []

    def record(x_TD, expert_TX, *rest):
        routed.append(expert_TX)
        return run(x_TD, expert_TX, *rest)

    def routed_by(step: Callable, *args: Any) -> tuple[Any, np.ndarray]:
        routed.clear()
        after, expert_TX = jax.jit(lambda *args: (step(*args), *routed))(*args)
        return after, np.asarray(expert_TX)

    monkeypatch.setattr(kimi, "_int4_moe", record)
    return routed_by


@pytest.mark.parametrize("mode", ["ar", "ddtree"])
def test_padding_and_finished_sequences_choose_no_expert(engines, routed_by, mode):
    """Three of four places, the second one finished, budget 5 in a bucket of 7 nodes."""
    engine, _ = engines
    decode_config = DecodeConfig(mode=mode, budget=5)
    job = engine._job(lambda: engine._read_prompts(PROMPTS, True), SamplingParams(ignore_eos=True), decode_config)
    state = next(engine._run(job, 1)).state

    def round_with(finish_B: Array) -> tuple[decode.State, np.ndarray]:
        step = functools.partial(decode.decode_round, plan=job.plan, budget=jnp.int32(job.budget))
        return routed_by(step, engine.models, replace(state, finish_B=finish_B), job.sampling)

    finish_B = state.finish_B.at[1].set(STOPPED)
    assert (finish_B == RUNNING).tolist() == [True, False, True, False]
    after, expert_TX = round_with(finish_B)
    count_B = np.where(finish_B == RUNNING, after.last.count_B, 0)
    assert count_B.tolist() == {"ar": [1, 0, 1, 0], "ddtree": [6, 0, 6, 0]}[mode]
    is_token_T = (np.arange(len(expert_TX) // 4)[None] < count_B[:, None]).ravel()
    assert (expert_TX[is_token_T] >= 0).all()
    assert (expert_TX[~is_token_T] == -1).all()
    if mode == "ar":
        _, expert_TX = round_with(finish_B.at[2].set(STOPPED))
        assert len(np.unique(expert_TX[expert_TX >= 0])) == engine.models.target.config.num_experts_per_tok


def test_padding_of_a_prompt_chooses_no_expert(engines, routed_by):
    engine, _ = engines
    token_BT, count_B = jnp.zeros((3, 8), jnp.int32), jnp.array([3, 0, 8], jnp.int32)
    _, expert_TX = routed_by(decode.prefill, engine.models, engine._new_context(3), token_BT, count_B)
    is_token_T = (np.arange(8)[None] < np.asarray(count_B)[:, None]).ravel()
    assert (expert_TX[is_token_T] >= 0).all()
    assert (expert_TX[~is_token_T] == -1).all()
