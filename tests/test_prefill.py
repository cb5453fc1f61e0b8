"""Prefill in chunks: their width changes nothing. The drafter's masks. bfloat16."""

import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import DecodeConfig, Engine, SamplingParams, dflash
from ddtree_jax.config import DFlashConfig, RopeConfig

pytest_plugins = ["engines"]


def test_width_of_chunks_changes_nothing(golden_engine, monkeypatch):
    """One chunk or nine; in a batch, later chunks hold nothing of the shorter sequences."""
    random = np.random.default_rng(4)
    prompts = [random.integers(0, 500, length).tolist() for length in (5, 33, 130)]
    decode, sampling = DecodeConfig(budget=7), SamplingParams(max_new_tokens=17)

    def outputs() -> tuple:
        done = golden_engine.generate(prompts, sampling, decode)
        tokens = [(one.token_ids, one.stats.accepted_lengths) for one in done]
        passes = [one.stats.target_passes - one.stats.rounds for one in done]
        return golden_engine.score(prompts[2]), golden_engine.draft(prompts[2]), tokens, passes

    wide = outputs()
    monkeypatch.setattr(golden_engine, "_chunk_widths", (16,))
    narrow = outputs()
    for one, other in zip(wide[:2], narrow[:2], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)
    assert wide[2] == narrow[2]
    assert wide[3] == [1, 1, 1]
    assert narrow[3] == [9, 9, 9]


def test_bfloat16_stays_near_the_best_token(golden, converted):
    """Modes may differ where rounding decides; every token is the best one or close to it, and most are the best."""
    engine = Engine.load(converted(golden / "target"), converted(golden / "drafter"), max_length=128, dtype="bfloat16")
    prompt = np.random.default_rng(7).integers(0, 500, 19).tolist()
    for mode in ("ar", "ddtree"):
        done = engine.generate(prompt, SamplingParams(max_new_tokens=40), DecodeConfig(mode=mode, budget=15))[0]
        logits_TV = engine.score(prompt + done.token_ids)[len(prompt) - 1 : -1]
        assert logits_TV.dtype == np.float32
        gap_T = logits_TV.max(axis=1) - logits_TV[np.arange(40), done.token_ids]
        assert gap_T.max() < 1.0
        assert np.mean(gap_T == 0) > 0.9


@pytest.mark.parametrize("sliding_causal", [True, False])
@pytest.mark.parametrize("sliding", [True, False])
def test_what_a_drafter_layer_sees(sliding, sliding_causal):
    """Window, causality inside the block, and full layers, against the definition written out."""
    window, length, num_slots, num_rows = 5, 7, 11, 3
    config = DFlashConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        intermediate_size=8, rms_norm_eps=1e-5, rope=RopeConfig(theta=1e4), rope_amplitude=1.0, block_size=num_rows,
        mask_token_id=0, target_layer_ids=(0,), num_target_layers=1, sliding_layers=(sliding,), sliding_window=window,
        sliding_causal=sliding_causal,
    )  # fmt: skip
    arrays = {name: jnp.zeros(info.shape) for name, info in dflash.Block.parameters(config).items()}
    positions_BT = length + jnp.arange(num_rows)[None]
    context_BTS, block_BTt = dflash.Block(config, 0, arrays)._visible(positions_BT, jnp.array([length]), num_slots)
    for row in range(num_rows):
        position = length + row
        for slot in range(num_slots):
            expected = slot < length and (not sliding or position - slot < window)
            assert bool(context_BTS[0, row, slot]) == expected
        for other in range(num_rows):
            expected = not sliding or not sliding_causal or other <= row
            assert bool(block_BTt[0, row, other]) == expected
