"""Products of up to 256 tokens a launch with a weight, in which reading the weight is what takes time.

``y[T, O] = x[T, K] @ weight[O, K].T`` in bfloat16, summed in float32. Several weights that take the same input are one
launch with an output each: the query's and the latent's first projections, or the router and the shared expert's gate and
up. `pack_weights` lays them out when they are loaded; nothing in a step of decoding moves them.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.rider import Rider
from ddtree_jax.pallas.skinny_gemm_kernel import launch
from ddtree_jax.pallas.skinny_gemm_shape import SIDE, WARPGROUP, Config, Output, Shape, join_steps, num_stages

MAX_TOKENS = 256
"""For more, unpacking the weight takes less time than reading it in several launches."""
FILLED_TOKENS = 8
"""Up to so many the kernel's copies fill up with zeros; more must be whole tiles of 8."""
MAX_CLUSTER = 8


def pack_weights(weights: Sequence[Float[Array, "... K"]], outputs: Sequence[Output]) -> Float[Array, "M N 64 64"]:
    """Blocks of 64 rows by 64 columns, each contiguous, in the order in which a launch reads them.

    A weight is [O, K], of a gated output [2, F, K]: gate, then up. Blocks next to each other make a tile, tiles stand below
    each other. Every output begins with a tile of its own, and four rows of a gated one are gate, gate, up, up of two
    features. Rows behind an output are zeros.

    Raises:
      ValueError: for weights that are not those of the outputs.
      NotImplementedError: columns that are no multiple of 64.
    """
    rows = []
    for weight, output in zip(weights, outputs, strict=True):
        expected = (2,) * output.is_gated + (output.width,)
        if weight.shape[:-1] != expected:
            raise ValueError(f"a weight has shape {weight.shape}; {expected} rows are needed")
        if weight.shape[-1] % SIDE:
            raise NotImplementedError(f"a weight has {weight.shape[-1]} columns; a multiple of {SIDE} is needed")
        if output.is_gated:
            if output.width % 2:
                raise NotImplementedError(f"a gated output is {output.width} wide; a multiple of 2 is needed")
            K = weight.shape[-1]
            weight = jnp.moveaxis(weight.reshape(2, output.width // 2, 2, K), 0, 1).reshape(-1, K)
        rows.append(jnp.pad(weight, ((0, -weight.shape[0] % SIDE), (0, 0))))
    weight_RK = jnp.concatenate(rows)
    split = weight_RK.reshape(-1, SIDE, weight_RK.shape[1] // SIDE, SIDE)
    return jnp.moveaxis(split, 2, 1)


def unpack_weights(blocks: Float[Array, "M N 64 64"], outputs: Sequence[Output]) -> list[Array]:
    """The weights that were packed."""
    weight_RK = jnp.moveaxis(blocks, 1, 2).reshape(-1, blocks.shape[1] * SIDE)
    weights, begin = [], 0
    for output in outputs:
        rows = weight_RK[begin : begin + output.width * (2 if output.is_gated else 1)]
        if output.is_gated:
            split = rows.reshape(output.width // 2, 2, 2, rows.shape[1])
            rows = jnp.moveaxis(split, 1, 0).reshape(2, output.width, rows.shape[1])
        weights.append(rows)
        begin += output.num_blocks * SIDE
    return weights


def skinny_gemm(
    x_TK: Float[Array, "T K"],
    blocks: Float[Array, "M N 64 64"],
    outputs: Sequence[Output],
    num_groups: int = 1,
) -> list[Float[Array, "T _"]]:
    """An array [T, width] of its output's dtype for each of ``outputs``.

    For every weight ``y[t, o] = sum_k x[t, k] w[o, k]`` with products and sums in float32, rounded once to the output's
    dtype; of a gated one ``silu(y_gate) * y_up`` is computed in float32 and rounded once. The order of a sum is fixed by
    the weight's shape and the device, and by neither the number of tokens nor their place: what the kernel gives for a token
    has the same bits in every call. Columns of tokens are independent: NaN in one reaches no other.

    With ``num_groups`` x has that many inputs side by side, and the rows of the weight as many parts, each of which takes
    its own: heads that have a matrix each.

    Goes through the kernel where the program is compiled for a Hopper GPU and the kernel takes the input, which may be the
    256 nodes of a tree; else through `skinny_gemm_reference`, which unpacks the weight inside the program.
    """
    outputs = tuple(outputs)
    reference = functools.partial(skinny_gemm_reference, outputs=outputs, num_groups=num_groups)

    def kernel(x_TK: Array, blocks: Array) -> list[Array]:
        return skinny_gemm_gpu(x_TK, blocks, outputs, num_groups, choose_config(blocks, device_config()))

    return simt.choose(kernel, reference, x_TK, blocks)


def skinny_gemm_gpu(
    x_TK: BFloat16[Array, "T K"],
    blocks: BFloat16[Array, "M N 64 64"],
    outputs: Sequence[Output],
    num_groups: int = 1,
    config: Config = Config(),
    rider: Rider | None = None,
) -> list[Array]:
    """`skinny_gemm` by the kernel alone; behind its results those of a rider, which takes part in the launch.

    Raises:
      NotImplementedError: the kernel does not take this input. It is named.
    """
    shape = choose_shape(x_TK, blocks, tuple(outputs), num_groups, config)
    if rider and (shape.cluster, rider.num_threads) != (1, WARPGROUP):
        raise NotImplementedError(
            f"clusters of {shape.cluster} blocks, a rider of {rider.num_threads} threads; 1 and {WARPGROUP} are needed"
        )
    if x_TK.shape[0] > FILLED_TOKENS:
        x_TK = jnp.pad(x_TK, ((0, shape.num_tokens - shape.num_stored), (0, 0)))
    return launch(x_TK, blocks.reshape(-1, SIDE, SIDE), join_steps(shape, config), config, rider=rider)


def device_config() -> Config:
    """Tuning for the device that is there, Hopper's where there is none.

    Raises:
      NotImplementedError: for a device that has no ``wgmma``.
    """
    device = jax.config.jax_default_device or jax.devices()[0]
    capability = getattr(device, "compute_capability", "9.0")
    if not capability.startswith("9."):
        raise NotImplementedError(f"compute capability {capability}; 9.0 is needed")
    return Config(num_multiprocessors=getattr(device, "core_count", Config().num_multiprocessors))


def choose_config(blocks: Any, config: Config) -> Config:
    """The cluster that is fastest by the times of ``config``, whatever the number of tokens."""
    tiles, num_bytes = blocks.shape[0], 2 * math.prod(blocks.shape)

    def microseconds(size: int) -> float:
        rate = min(tiles * size * config.block_bytes_a_microsecond, config.bytes_a_microsecond)
        extra = config.cluster_microseconds + size * config.rank_microseconds if size > 1 else 0
        return num_bytes / rate + extra

    def fits(size: int) -> bool:
        # Multiprocessors that a group has left over hold no cluster, and one group may be short of some.
        room = (config.num_multiprocessors // config.group_size - 1) * (config.group_size // size)
        return tiles <= room and size <= blocks.shape[1] // config.step_blocks

    sizes = [1, *filter(fits, range(2, MAX_CLUSTER + 1))]
    return dataclasses.replace(config, cluster=min(sizes, key=microseconds))


def choose_shape(
    x_TK: Any, blocks: Any, outputs: tuple[Output, ...], num_groups: int = 1, config: Config = Config()
) -> Shape:
    """How a launch divides the work.

    Raises:
      NotImplementedError: the kernel does not take this input. It is named.
    """
    for name, array in (("x", x_TK), ("the weight", blocks)):
        if array.dtype != jnp.bfloat16:
            raise NotImplementedError(f"{name} has dtype {array.dtype}; bfloat16 is needed")
    T, K = x_TK.shape
    tiles, columns = blocks.shape[:2]
    if not 1 <= T <= MAX_TOKENS:
        raise NotImplementedError(f"{T} tokens; 1 to {MAX_TOKENS} fit")
    if num_groups * columns * SIDE != K:
        raise NotImplementedError(f"x is {K} wide; {num_groups} x {columns} blocks of {SIDE} columns are needed")
    if tiles % num_groups or (num_groups > 1 and outputs[0].width != tiles * SIDE):
        raise NotImplementedError(f"{num_groups} groups of {tiles} tiles; whole tiles are needed")
    if sum(output.num_blocks for output in outputs) != tiles:
        raise NotImplementedError(f"{tiles} tiles; other widths {[output.width for output in outputs]}")
    for output in outputs:
        if output.width % 4:
            raise NotImplementedError(f"an output is {output.width} wide; a multiple of 4 is needed")
        if output.dtype not in (jnp.bfloat16, jnp.float32):
            raise NotImplementedError(f"an output has dtype {output.dtype}; bfloat16 or float32 is needed")
    cut_blocks = math.gcd(columns, config.step_blocks)
    step_blocks = cut_blocks if config.many_tokens >= T else 1
    cluster = min(config.cluster, columns // cut_blocks)
    if not 1 <= cluster <= MAX_CLUSTER:
        raise NotImplementedError(f"a cluster of {config.cluster} blocks; 1 to {MAX_CLUSTER} are needed")
    shape = Shape(
        num_tokens=T + -T % 8,
        num_stored=T,
        num_tiles=tiles,
        num_columns=columns,
        tiles_a_group=tiles // num_groups,
        cluster=cluster,
        step_blocks=step_blocks,
        steps_a_cut=cut_blocks // step_blocks,
        outputs=outputs,
    )
    num_stages(shape, config)  # Raises if there are too few.
    return shape


def skinny_gemm_reference(
    x_TK: Float[Array, "T K"],
    blocks: Float[Array, "M N 64 64"],
    outputs: Sequence[Output],
    num_groups: int = 1,
) -> list[Float[Array, "T _"]]:
    """`skinny_gemm` in plain JAX, for any type and number of tokens."""
    x_TGK = x_TK.reshape(x_TK.shape[0], num_groups, -1)
    results = []
    for weight, output in zip(unpack_weights(blocks, outputs), outputs, strict=True):
        split = weight.reshape(*weight.shape[:-2], num_groups, -1, weight.shape[-1])
        axes = "TGK,2GOK->2TGO" if output.is_gated else "TGK,GOK->TGO"
        y = jnp.einsum(axes.replace("2", "h"), x_TGK, split, preferred_element_type=jnp.float32)
        y = jax.nn.silu(y[0]) * y[1] if output.is_gated else y
        results.append(y.reshape(x_TK.shape[0], output.width).astype(output.dtype))
    return results
