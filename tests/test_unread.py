"""What holds no token is never read: padding nodes, padding of prompts, places of a batch that no prompt takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_pairs import make_pair

from ddtree_jax import DecodeConfig, Engine, SamplingParams
from ddtree_jax.decode import MODES

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
