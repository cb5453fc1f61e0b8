"""Routed experts with INT4 group-32 weights: each distinct expert is read once, however many tokens chose it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int32

from ddtree_jax.quant import dequantize


class ExpertWeights(NamedTuple):
    """Packed INT4 words and group scales of all experts; ``gate_up`` holds gate at 0 and up at 1 of its second axis."""

    gate_up_E2FI: Int32[Array, "E 2 F I"]
    gate_up_scale_E2FG: BFloat16[Array, "E 2 F G"]
    down_EDI: Int32[Array, "E D i"]
    down_scale_EDG: BFloat16[Array, "E D g"]


def int4_moe(
    x_TD: Float[Array, "T D"],
    expert_TX: Int32[Array, "T X"],
    weight_TX: Float[Array, "T X"],
    experts: ExpertWeights,
) -> Float[Array, "T D"]:
    """Weighted sum of each token's experts, ``down(silu(gate x) * up x)``.

    ``weight_TX`` is float32, and so is the sum over experts, which runs in the order of expert numbers. Experts are
    expanded one at a time, so that the memory in use is one expert's.
    """

    def add_expert(total_TD: Array, inputs: tuple) -> tuple[Array, None]:
        number, expert = inputs
        chosen_TX = expert_TX == number

        def with_expert() -> Array:
            gate_up_2FD = dequantize(expert.gate_up_E2FI, expert.gate_up_scale_E2FG, x_TD.dtype)
            down_DF = dequantize(expert.down_EDI, expert.down_scale_EDG, x_TD.dtype)
            gate_TF, up_TF = (jnp.einsum("TD,FD->TF", x_TD, weight_FD) for weight_FD in gate_up_2FD)
            y_TD = jnp.einsum("TF,DF->TD", jax.nn.silu(gate_TF) * up_TF, down_DF)
            weight_T = jnp.sum(jnp.where(chosen_TX, weight_TX, 0.0), axis=1)
            return total_TD + y_TD.astype(jnp.float32) * weight_T[:, None]

        return jax.lax.cond(jnp.any(chosen_TX), with_expert, lambda: total_TD), None

    zeros_TD = jnp.zeros(x_TD.shape, jnp.float32)
    numbers_E = jnp.arange(experts.down_EDI.shape[0], dtype=jnp.int32)
    total_TD, _ = jax.lax.scan(add_expert, zeros_TD, (numbers_E, experts))
    return total_TD.astype(x_TD.dtype)
