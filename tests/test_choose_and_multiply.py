"""The choice and a product in one launch: what it gives without a GPU, when it is one launch, what is refused.

What blocks do is tested with the kernels whose code they run.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.pallas import choose_experts, simt
from ddtree_jax.pallas.choose_and_multiply import (
    choose_and_multiply,
    choose_and_multiply_gpu,
    choose_and_multiply_reference,
)
from ddtree_jax.pallas.skinny_gemm import Config, Output, choose_shape, pack_weights, skinny_gemm_gpu
from ddtree_jax.pallas.skinny_gemm_shape import num_floats, num_stages

OUTPUTS = (Output(width=76), Output(width=36, dtype=jnp.float32))
SIZES = {"outputs": OUTPUTS, "num_chosen": 5, "factor": 2.5}


def draw(num_tokens: int, num_experts: int = 24, columns: int = 192) -> tuple[jax.Array, ...]:
    """Logits, bias, which are tokens, x and the weight."""
    rng = np.random.default_rng(num_tokens)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    weights = [normal(output.width, columns).astype(jnp.bfloat16) for output in OUTPUTS]
    is_token_T = jnp.arange(num_tokens) != 1
    x_TK = normal(num_tokens, columns).astype(jnp.bfloat16)
    return normal(num_tokens, num_experts), normal(num_experts), is_token_T, x_TK, pack_weights(weights, OUTPUTS)


@pytest.mark.parametrize(
    ("num_tokens", "columns", "has_kernels", "kernels"),
    [
        (3, 192, True, {"skinny_gemm_choose_experts"}),
        (3, 192, False, {"skinny_gemm"}),
        (3, 4096, True, {"choose_experts", "skinny_gemm"}),
        (257, 192, True, {"choose_experts"}),
    ],
)
def test_few_tokens_are_one_launch(monkeypatch, num_tokens, columns, has_kernels, kernels):
    """Clusters take no rider, and more tokens no kernel of the product; on a CPU it is plain JAX."""
    monkeypatch.setattr(simt, "check_device", lambda: None)
    arrays = draw(num_tokens, columns=columns)
    function = jax.jit(functools.partial(choose_and_multiply, has_kernels=has_kernels, **SIZES))
    text = function.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r"(skinny_gemm\w*|choose_experts)_mosaic_gpu", text)) == kernels
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == len(kernels)
    expected = jax.jit(functools.partial(choose_and_multiply_reference, **SIZES))(*arrays)
    found = function(*arrays)
    assert (found[0][1] == -1).all() and found[2][1].dtype == jnp.float32
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def test_blocks_that_do_not_ride_are_refused():
    *choice, x_TK, blocks = draw(3)
    with pytest.raises(NotImplementedError, match="clusters of 3 blocks"):
        choose_and_multiply_gpu(*choice, x_TK, blocks, config=Config(cluster=3, step_blocks=1), **SIZES)
    with pytest.raises(NotImplementedError, match="logits of bfloat16"):
        choose_and_multiply_gpu(choice[0].astype(jnp.bfloat16), *choice[1:], x_TK, blocks, **SIZES)
    rider = choose_experts.make_rider(*choice, 5, 2.5, choose_experts.Config(num_warps=8))
    with pytest.raises(NotImplementedError, match="a rider of 256 threads"):
        skinny_gemm_gpu(x_TK, blocks, OUTPUTS, rider=rider)


def test_scratch_of_a_rider_has_room_beside_the_ring():
    """Where it takes more than a block's sums do, a stage less fits."""
    *choice, x_TK, blocks = draw(3, num_experts=384, columns=640)
    rider = choose_experts.make_rider(*choice, 5, 2.5)
    shape = choose_shape(x_TK, blocks, OUTPUTS)
    sums, taken = (num_floats(shape, other) for other in (0, rider.num_floats))
    assert taken == 4 * 384 > sums
    config = Config(shared_bytes=4 * shape.stage_bytes + 4 * sums)
    assert [num_stages(shape, config, other) for other in (0, rider.num_floats)] == [4, 3]
    assert num_stages(shape, dataclasses.replace(config, max_stages=2), rider.num_floats) == 2
