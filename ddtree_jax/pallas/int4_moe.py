"""Routed experts with INT4 group-32 weights: each distinct expert is read once for every 8 tokens that chose it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int32

from ddtree_jax.pallas import int4_kernel, int4_prefill, int4_spans
from ddtree_jax.pallas.int4_blocks import BLOCK_COLUMNS, pack_down, pack_gate_up, split_halves, unpack_blocks
from ddtree_jax.quant import dequantize, round_products

MAX_TOKENS = 64
FEW_TOKENS = 2
"""Up to so many, blocks have so few steps that halved ones are shared out more evenly."""
SMALL_TILE = 4
"""Steps of a tile of down that are so few that blocks may take it as a whole."""


class ExpertWeights(NamedTuple):
    """Packed INT4 words and group scales of all experts; ``gate_up`` holds gate at 0 and up at 1 of its second axis."""

    gate_up_E2FI: Int32[Array, "E 2 F I"]
    gate_up_scale_E2FG: BFloat16[Array, "E 2 F G"]
    down_EDI: Int32[Array, "E D i"]
    down_scale_EDG: BFloat16[Array, "E D g"]


class ExpertBlocks(NamedTuple):
    """The same in the kernel's blocks (see `int4_blocks`): m of them below each other make a group."""

    gate_up_EMKmw: Int32[Array, "E M K m w"]
    down_EMKmw: Int32[Array, "E N k n w"]


def pack_experts(experts: ExpertWeights) -> ExpertBlocks:
    """Blocks of a shard's experts. Sharded experts are packed shard by shard: groups of blocks do not cross shards."""
    return ExpertBlocks(
        pack_gate_up(experts.gate_up_E2FI, experts.gate_up_scale_E2FG),
        pack_down(experts.down_EDI, experts.down_scale_EDG),
    )


def int4_moe(
    x_TD: Float[Array, "T D"],
    expert_TX: Int32[Array, "T X"],
    weight_TX: Float[Array, "T X"],
    experts: ExpertWeights | ExpertBlocks,
    added_TD: Float[Array, "T D"] | None = None,
    dtype: Any = None,
) -> Float[Array, "T D"]:
    """Weighted sum of each token's experts, ``down(silu(gate x) * up x)``, plus ``added_TD``, in ``dtype``, x's by default.

    ``weight_TX`` is float32, and so is the sum over experts. Experts that are none of ``experts``, by a number below 0 or
    above the last, contribute nothing and are not paid for: that is how padding and other shards' experts are marked. A
    padding row with experts of its own would have them read. Blocks go through the kernel where the program is for a CUDA
    device and the kernel takes the input, everything else through the reference.
    """
    arrays = (x_TD, expert_TX, weight_TX, experts, added_TD)
    reference = functools.partial(int4_moe_reference, dtype=dtype)
    if isinstance(experts, ExpertWeights):
        return reference(*arrays)
    try:
        config = choose_config(x_TD, experts)
    except NotImplementedError:
        return reference(*arrays)
    kernel = functools.partial(int4_moe_gpu, config=config, dtype=dtype)
    return lax.platform_dependent(*arrays, cuda=kernel, default=reference)


def device_config(capability: int, num_blocks: int) -> int4_spans.Config:
    """Tuning for a device of the compute capability ``capability``.x with ``num_blocks`` multiprocessors."""
    base = {8: int4_spans.AMPERE, 9: int4_spans.HOPPER}.get(capability, int4_spans.SMALL)
    return dataclasses.replace(base, num_blocks=num_blocks)


def choose_config(
    x_TD: Float[Array, "T D"], experts: ExpertBlocks, config: int4_spans.Config | None = None
) -> int4_spans.Config:
    """Tuning for this input, from ``config`` or that of the device that is there, Hopper's where there is none.

    Raises:
      NotImplementedError: the kernel does not take this input. It is named.
    """
    if x_TD.dtype != jnp.bfloat16:
        raise NotImplementedError(f"x has dtype {x_TD.dtype}; bfloat16 is needed")
    columns = experts.gate_up_EMKmw.shape[2] * BLOCK_COLUMNS
    if not columns - BLOCK_COLUMNS < x_TD.shape[1] <= columns or x_TD.shape[1] % 32:
        raise NotImplementedError(
            f"x is {x_TD.shape[1]} wide; blocks of {columns} columns take multiples of 32 in them"
        )
    if config is None:
        config = int4_spans.HOPPER
        device = jax.config.jax_default_device or jax.devices()[0]
        if capability := getattr(device, "compute_capability", None):
            config = device_config(int(capability.split(".")[0]), device.core_count)
    is_odd = any(blocks.shape[2] % config.step_blocks for blocks in experts)
    if is_odd or x_TD.shape[0] <= FEW_TOKENS:
        config = dataclasses.replace(config, step_columns=BLOCK_COLUMNS)
    if x_TD.shape[0] <= FEW_TOKENS or not _may_have_free_tiles(experts, config):
        config = dataclasses.replace(config, free_tiles=0)
    for blocks in experts:
        if config.tile_blocks % blocks.shape[3]:
            raise NotImplementedError(f"groups of {blocks.shape[3]}; a divisor of {config.tile_blocks} is needed")
    return config


def _may_have_free_tiles(experts: ExpertBlocks, config: int4_spans.Config) -> bool:
    """Whether tiles of down are so small, and a unit's so many, that blocks may share some of them out late.

    Their numbers and hidden rows come with bulk copies alone.
    """
    product = int4_spans.Product(experts.down_EMKmw, config, config.free_tiles)
    has_one_term = product.num_columns > config.split_columns
    return (
        config.has_bulk_copies
        and has_one_term
        and product.num_steps <= SMALL_TILE
        and product.num_own > product.num_free
    )


def int4_moe_gpu(
    x_TD: Float[Array, "T D"],
    expert_TX: Int32[Array, "T X"],
    weight_TX: Float[Array, "T X"],
    experts: ExpertBlocks,
    added_TD: Float[Array, "T D"] | None = None,
    *,
    config: int4_spans.Config,
    dtype: Any = None,
) -> Float[Array, "T D"]:
    """`int4_moe` on the kernels alone, in turns where there are more tokens than one of them takes."""
    T, D = x_TD.shape
    dtype = dtype or x_TD.dtype
    columns = experts.gate_up_EMKmw.shape[2] * BLOCK_COLUMNS
    x_TD = jnp.pad(x_TD, ((0, 0), (0, columns - D)))
    if T <= MAX_TOKENS:
        arrays = (x_TD, expert_TX, weight_TX, *experts)
        return int4_kernel.int4_moe_kernel(*arrays, added_TD, dtype=dtype, config=config)[:, :D]

    size, kernel = _choose_form(expert_TX, experts, config)
    turns = -(-T // size)
    if turns == 1:
        y_TD = kernel(x_TD, expert_TX, weight_TX)
    else:
        rest = ((0, turns * size - T), (0, 0))
        padded = (jnp.pad(x_TD, rest), jnp.pad(expert_TX, rest, constant_values=-1), jnp.pad(weight_TX, rest))
        split = [array.reshape(turns, size, array.shape[1]) for array in padded]
        y_TD = lax.map(lambda args: kernel(*args), tuple(split)).reshape(turns * size, columns)[:T]
    return _add(y_TD[:, :D], added_TD).astype(dtype)


def _add(y_TD: Float[Array, "T D"], added_TD: Float[Array, "T D"] | None) -> Float[Array, "T D"]:
    """The sum in float32, if there is something to add."""
    return y_TD if added_TD is None else y_TD.astype(jnp.float32) + added_TD.astype(jnp.float32)


def _choose_form(
    expert_TX: Int32[Array, "T X"], experts: ExpertBlocks, config: int4_spans.Config
) -> tuple[int, Callable]:
    """The most tokens of a turn, and the kernel that takes them: prefill's, or decode's where that does not fit."""

    def decode(x_TD: Array, expert_TX: Array, weight_TX: Array) -> Array:
        arrays = (x_TD, expert_TX, weight_TX, *experts)
        return int4_kernel.int4_moe_kernel(*arrays, None, dtype=x_TD.dtype, config=config)

    def prefill(x_TD: Array, expert_TX: Array, weight_TX: Array) -> Array:
        return int4_prefill.int4_moe_prefill(x_TD, expert_TX, weight_TX, *experts, prefill_config)

    try:
        prefill_config = int4_prefill.choose_config(expert_TX, *experts, config.num_blocks, config.shared_bytes)
    except NotImplementedError:
        return MAX_TOKENS, decode
    return int4_prefill.MAX_TOKENS, prefill


def int4_moe_reference(
    x_TD: Float[Array, "T D"],
    expert_TX: Int32[Array, "T X"],
    weight_TX: Float[Array, "T X"],
    experts: ExpertWeights | ExpertBlocks,
    added_TD: Float[Array, "T D"] | None = None,
    *,
    dtype: Any = None,
) -> Float[Array, "T D"]:
    """`int4_moe` in plain JAX. Experts are expanded one at a time, so that the memory in use is one expert's."""

    def add_expert(total_TD: Array, inputs: tuple) -> tuple[Array, None]:
        number, expert = inputs
        chosen_TX = expert_TX == number

        def with_expert() -> Array:
            gate_up_2FD, down_DF = expand(expert, x_TD.shape[1], x_TD.dtype)
            gate_TF, up_TF = (jnp.einsum("TD,FD->TF", x_TD, weight_FD) for weight_FD in gate_up_2FD)
            y_TD = jnp.einsum("TF,DF->TD", jax.nn.silu(gate_TF) * up_TF, down_DF)
            weight_T = jnp.sum(jnp.where(chosen_TX, weight_TX, 0.0), axis=1)
            is_chosen_T1 = jnp.any(chosen_TX, axis=1)[:, None]
            return total_TD + jnp.where(is_chosen_T1, y_TD.astype(jnp.float32) * weight_T[:, None], 0.0)

        return lax.cond(jnp.any(chosen_TX), with_expert, lambda: total_TD), None

    zeros_TD = jnp.zeros(x_TD.shape, jnp.float32)
    numbers_E = jnp.arange(experts[0].shape[0], dtype=jnp.int32)
    total_TD, _ = lax.scan(add_expert, zeros_TD, (numbers_E, experts))
    return _add(total_TD, added_TD).astype(dtype or x_TD.dtype)


def expand(
    expert: ExpertWeights | ExpertBlocks, D: int, dtype: jnp.dtype
) -> tuple[Float[Array, "2 F D"], Float[Array, "D F"]]:
    """Weights of one expert, given without its axis."""
    if isinstance(expert, ExpertWeights):
        gate_up, down = expert[:2], expert[2:]
        return dequantize(*gate_up, dtype), dequantize(*down, dtype)
    gate_up_2FD = split_halves(_expand_blocks(expert.gate_up_EMKmw, dtype))[..., :D]
    down_DF = _expand_blocks(expert.down_EMKmw, dtype)[:D]
    # Padding: columns of down to whole blocks, and features where those of down are fewer.
    F = min(gate_up_2FD.shape[1], down_DF.shape[1])
    return gate_up_2FD[:, :F], down_DF[:, :F]


def _expand_blocks(blocks_MKmw: Int32[Array, "M K m w"], dtype: jnp.dtype) -> Float[Array, "rows columns"]:
    """Weights that a projection's blocks stand for, in the blocks' row order."""
    integers, scale = unpack_blocks(blocks_MKmw)
    return round_products(integers.reshape(*scale.shape, -1), scale, dtype).reshape(integers.shape)
