"""The comparison of kernels with plain JAX passes what rounding does, and nothing more."""

import jax.numpy as jnp
import numpy as np
import pytest
from small_pairs import make_pair

from ddtree_jax import Engine
from experiments.compare_kernels import Difference, compare, first_differences, judge

PROMPTS = [np.random.default_rng(seed).integers(1, 30, 9).tolist() for seed in range(16)]


@pytest.fixture
def engines() -> dict[str, Engine]:
    """The same pair three times, two with the same small errors in the embedding, such as rounding makes."""
    engines = {form: make_pair("least", seed=3).engine for form in ("float32", "plain", "kernels")}
    for form in ("plain", "kernels"):
        weight = engines[form].models.target.embedding_VD
        error = 1 + 0.01 * np.random.default_rng(0).standard_normal(weight.shape)
        weight[...] = weight[...] * jnp.asarray(error, jnp.float32)
    return engines


def test_rounding_passes_and_a_fault_does_not(engines):
    """A gain that is a third too large in one layer is a fault; so is NaN."""
    lines, faults = compare(engines, PROMPTS, 24, 8)
    assert faults == []
    exact, rounded = lines[:3], lines[3:]
    assert [line["case"]["mode"] for line in lines] == ["ar", "chain", "ddtree"] * 3
    assert all(line["differing_tokens"] == line["rms_logits"] == line["bound"] == 0 for line in exact)
    assert all(line["differing_tokens"] > 0 for line in rounded)
    assert all(0 < line["largest_gap"] <= line["bound"] for line in rounded)
    gain_D = engines["kernels"].models.target.blocks[1].post_attention_norm_D
    for factor in (1.33, np.nan):
        gain_D[...] = gain_D[...] * factor
        _, faults = compare(engines, PROMPTS, 24, 8)
        assert len(faults) > 0 and all("kernels" in fault for fault in faults)


def test_where_texts_part():
    """Only the first difference counts, with the logits of its own row."""
    texts, others = [[1, 2, 0], [1, 1, 1], [2, 0, 0]], [[1, 0, 2], [1, 1, 1], [0, 2, 2]]
    logits_TV = np.array([[0.0, 0.5, 1.25], [0.5, 0.0, 2.0], [9.0, 9.0, 9.0]], np.float32)
    found = first_differences(texts, others, [logits_TV] * 3)
    assert found == [Difference(1, 1.5), None, Difference(0, 1.25)]
    assert judge(found, 3) == {"tokens_compared": 6, "differing_tokens": 2, "rate": 0.333, "largest_gap": 1.5}
