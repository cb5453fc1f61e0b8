"""The forms that the tiny pair is trained in compute what the package's modules compute."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import dflash, kimi, sharding
from ddtree_jax.tokenizer import Tokenizer
from experiments.tiny_training import checkpoint, corpus, drafter, model
from experiments.tiny_training.samples import Samples

TINY = Path(__file__).parents[1] / "experiments" / "tiny_kimi"


@pytest.fixture(scope="module")
def token_ids() -> np.ndarray:
    text = Path(__file__).read_text()
    return np.array(Tokenizer.from_directory(TINY / "target").encode(text)[:61], np.int32)


def test_target_with_dense_experts_equals_the_packed_one(token_ids):
    config, exported = checkpoint.read_target(TINY / "target")
    assert model.largest_logit_difference(config, exported, jnp.asarray(token_ids)[None]) < 2e-4


def test_drafter_with_shared_context_equals_the_module(token_ids):
    config, arrays = checkpoint.read_drafter(TINY / "drafter")
    embedding_VD = jax.random.normal(jax.random.key(0), (config.vocab_size, config.hidden_size))
    features = jax.random.normal(jax.random.key(1), (1, 61, arrays["context"]["fc_YD"].shape[0]), jnp.bfloat16)
    samples = Samples(
        token_BM=jnp.asarray(token_ids, jnp.uint16)[None], feature_BMY=features, prompt_length_B=np.array([5], np.int32)
    )
    assert drafter.largest_hidden_difference(config, arrays, embedding_VD, samples) < 1e-4


def test_held_out_is_a_matter_of_content_alone():
    """About one in fifty, and the same ones on every machine."""
    held_out = [number for number in range(5000) if corpus.is_held_out(f"x = {number}\n".encode())]
    assert 60 < len(held_out) < 140
    assert held_out[:3] == [102, 136, 151]


def test_pair_is_small_and_splits_over_eight_devices():
    assert checkpoint.num_bytes(TINY) <= 16_000_000
    config, _ = checkpoint.read_target(TINY / "target")
    drafter_config, _ = checkpoint.read_drafter(TINY / "drafter")
    for mesh in map(sharding.make_mesh, ("tensor=8", "expert=8", "expert=4,tensor=2")):
        for parameters in (kimi.parameters(config), dflash.parameters(drafter_config)):
            for part, infos in parameters.items():
                for name, info in infos.items():
                    sharding.sharding_of(info, mesh, f"{part}/{name}")
