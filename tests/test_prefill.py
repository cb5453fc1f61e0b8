"""Prefill in chunks: their width changes nothing. The drafter's masks. bfloat16."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_pairs import make_pair

from ddtree_jax import DecodeConfig, Engine, SamplingParams, dflash
from ddtree_jax.config import DFlashConfig, RopeConfig
from ddtree_jax.layers import Turns
from ddtree_jax.pallas import block_attention
from ddtree_jax.sharding import initialize

pytest_plugins = ["engines"]


@pytest.mark.parametrize("prefill_chunk", [1, 5, 16, 300])
def test_any_chunk_size_gives_the_same_tokens(prefill_chunk):
    """The last chunk of a prompt is as narrow as a bucket allows, and later chunks hold nothing of shorter prompts.

    Accepted lengths are the same too.
    """
    random = np.random.default_rng(9)
    prompts = [random.integers(4, 60, length).tolist() for length in (1, 21, 37)]
    params = SamplingParams(max_new_tokens=17, temperature=0.4, seed=1, repetition_penalty=1.1)
    expected, done = (
        make_pair("yarn", max_length=71, prefill_chunk=chunk).engine.generate(prompts, params, DecodeConfig(budget=7))
        for chunk in (64, prefill_chunk)
    )
    for one, other in zip(expected, done, strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats.accepted_lengths == other.stats.accepted_lengths
        num_chunks = -(-37 // prefill_chunk)
        assert other.stats.target_passes == other.stats.rounds + num_chunks


def test_width_of_chunks_changes_nothing(golden_engine, monkeypatch):
    """One chunk or nine. Tokens of batches: see `test_any_chunk_size_gives_the_same_tokens`."""
    text = np.random.default_rng(4).integers(0, 500, 130).tolist()

    def outputs() -> tuple[np.ndarray, np.ndarray, int]:
        with golden_engine._precision():
            chunks = list(golden_engine._prefill_chunks(golden_engine._new_context(1), [text]))
        return golden_engine.score(text), golden_engine.draft(text), len(chunks)

    *narrow, num_narrow = outputs()
    monkeypatch.setattr(golden_engine, "_chunk_widths", (256,))
    *wide, num_wide = outputs()
    assert (num_narrow, num_wide) == (9, 1)
    for one, other in zip(narrow, wide, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


def test_bfloat16_stays_near_the_best_token(golden, converted):
    """Modes may differ where rounding decides; every token is the best one or close to it, and most are the best."""
    models = converted(golden / "target"), converted(golden / "drafter")
    engine = Engine.load(*models, max_length=128, dtype="bfloat16", kernels=False)
    prompt = np.random.default_rng(7).integers(0, 500, 19).tolist()
    for mode in ("ar", "ddtree"):
        done = engine.generate(prompt, SamplingParams(max_new_tokens=40), DecodeConfig(mode=mode, budget=15))[0]
        logits_TV = engine.score(prompt + done.token_ids)[len(prompt) - 1 : -1]
        assert logits_TV.dtype == np.float32
        gap_T = logits_TV.max(axis=1) - logits_TV[np.arange(40), done.token_ids]
        assert gap_T.max() < 1.0
        assert np.mean(gap_T == 0) > 0.9


WINDOW, NUM_ROWS = 5, 3


def drafter_layer(sliding: bool, sliding_causal: bool) -> dflash.Block:
    config = DFlashConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        intermediate_size=8, rms_norm_eps=1e-5, rope=RopeConfig(theta=1e4), rope_amplitude=1.0, block_size=NUM_ROWS,
        mask_token_id=0, target_layer_ids=(0,), num_target_layers=1, sliding_layers=(sliding,), sliding_window=WINDOW,
        sliding_causal=sliding_causal,
    )  # fmt: skip
    arrays = initialize({"layer": dflash.Block.parameters(config)}, jax.random.key(0), jnp.float32)
    return dflash.Block(config, 0, arrays["layer"])


@pytest.mark.parametrize("sliding_causal", [True, False])
@pytest.mark.parametrize("sliding", [True, False])
def test_what_a_drafter_layer_sees(sliding, sliding_causal):
    """Window, causality inside the block, and full layers, against the definition written out."""
    length, first, num_slots = 7, 2, 11
    layer = drafter_layer(sliding, sliding_causal)
    positions_BT = length + jnp.arange(NUM_ROWS)[None]
    context_BTS, block_BTt = block_attention.visible(
        positions_BT, jnp.array([length]), jnp.array([first]), num_slots, **layer.sight
    )
    for row in range(NUM_ROWS):
        position = length + row
        for slot in range(first, first + num_slots):
            expected = slot < length and (not sliding or position - slot < WINDOW)
            assert bool(context_BTS[0, row, slot - first]) == expected
        for other in range(NUM_ROWS):
            expected = not sliding or not sliding_causal or other <= row
            assert bool(block_BTt[0, row, other]) == expected


@pytest.mark.parametrize("sliding", [True, False])
def test_a_drafter_layer_reads_a_window_of_many_slots(sliding, monkeypatch):
    """Lengths at both ends of a cache and between, in one batch; slots that no row sees hold what is not finite."""
    layer, num_slots, lengths = drafter_layer(sliding, True), 4 * WINDOW + 1, [0, 2, 5, 11, 18]
    random = np.random.default_rng(2)
    x_BTD = jnp.asarray(random.normal(size=(5, NUM_ROWS, 8)), jnp.float32)
    cache = tuple(random.normal(size=(5, num_slots, 1, 4)).astype(np.float32) for _ in range(2))
    length_B = jnp.asarray(lengths, jnp.int32)
    positions_BT = length_B[:, None] + jnp.arange(NUM_ROWS, dtype=jnp.int32)[None]
    turns = Turns.of(positions_BT, layer.config.rope, layer.config.head_dim, 1.0)

    def attend() -> np.ndarray:
        return np.asarray(layer.attend(x_BTD, turns, length_B, tuple(map(jnp.asarray, cache))))

    with monkeypatch.context() as patch:
        patch.setattr(block_attention, "_LEAST_WINDOWS", num_slots)
        expected = attend()
    if sliding:
        for part, (sequence, length) in itertools.product(cache, enumerate(lengths)):
            part[sequence, : max(0, length - WINDOW)] = np.nan
    np.testing.assert_allclose(attend(), expected, rtol=1e-5, atol=1e-6)
