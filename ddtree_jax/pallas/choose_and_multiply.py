"""The router's choice and a product that does not depend on it, the shared expert's last one, in one launch::

    blocks 0 to 111      `skinny_gemm`, a tile each, which leaves 20 of 132 multiprocessors free
           112 to 175    `choose_experts`, 4 of up to 256 tokens each; those of more than 80 wait for a free one

Bytes: those of the product. Neither waits for the other: an H200 takes 3.0 to 3.4 us for both at 16 tokens, and 4.9 us for
one behind the other.
"""

from collections.abc import Sequence

import jax
from jaxtyping import Array, BFloat16, Bool, Float, Int32

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.choose_experts import choose_experts, choose_experts_reference, make_rider
from ddtree_jax.pallas.skinny_gemm import (
    Config,
    Output,
    choose_config,
    device_config,
    skinny_gemm,
    skinny_gemm_gpu,
    skinny_gemm_reference,
)

ChosenAndProducts = tuple[Int32[Array, "T X"], Float[Array, "T X"], list[Float[Array, "T _"]]]


def choose_and_multiply(
    logits_TE: Float[Array, "T E"],
    bias_E: Float[Array, "E"],
    is_token_T: Bool[Array, "T"],
    x_TK: Float[Array, "T K"],
    blocks: Float[Array, "M N 64 64"],
    outputs: Sequence[Output],
    num_chosen: int,
    factor: float,
    *,
    has_kernels: bool = True,
) -> ChosenAndProducts:
    """What `choose_experts` gives, and the list that `skinny_gemm` gives, to the last bit.

    In one launch where the program is compiled for a Hopper GPU and the kernel takes the input, else by these two.
    ``has_kernels`` is that of `choose_experts`.
    """

    def kernel(*arrays: jax.Array) -> ChosenAndProducts:
        config = choose_config(blocks, device_config())
        return choose_and_multiply_gpu(*arrays, outputs, num_chosen, factor, config)

    def apart(logits_TE: Array, bias_E: Array, is_token_T: Array, x_TK: Array, blocks: Array) -> ChosenAndProducts:
        chosen = choose_experts(logits_TE, bias_E, is_token_T, num_chosen, factor, has_kernels=has_kernels)
        return *chosen, skinny_gemm(x_TK, blocks, outputs)

    return simt.choose(kernel, apart, logits_TE, bias_E, is_token_T, x_TK, blocks, has_kernels=has_kernels)


def choose_and_multiply_gpu(
    logits_TE: Float[Array, "T E"],
    bias_E: Float[Array, "E"],
    is_token_T: Bool[Array, "T"],
    x_TK: BFloat16[Array, "T K"],
    blocks: BFloat16[Array, "M N 64 64"],
    outputs: Sequence[Output],
    num_chosen: int,
    factor: float,
    config: Config = Config(),
) -> ChosenAndProducts:
    """`choose_and_multiply` by the kernel alone.

    Raises:
      NotImplementedError: one of the two kernels does not take this input, or the product is one of clusters.
    """
    rider = make_rider(logits_TE, bias_E, is_token_T, num_chosen, factor)
    *results, expert_TX, weight_TX = skinny_gemm_gpu(x_TK, blocks, outputs, config=config, rider=rider)
    return expert_TX, weight_TX, results


def choose_and_multiply_reference(
    logits_TE: Float[Array, "T E"],
    bias_E: Float[Array, "E"],
    is_token_T: Bool[Array, "T"],
    x_TK: Float[Array, "T K"],
    blocks: Float[Array, "M N 64 64"],
    outputs: Sequence[Output],
    num_chosen: int,
    factor: float,
) -> ChosenAndProducts:
    """`choose_and_multiply` in plain JAX."""
    chosen = choose_experts_reference(logits_TE, bias_E, is_token_T, num_chosen, factor)
    return *chosen, skinny_gemm_reference(x_TK, blocks, outputs)
