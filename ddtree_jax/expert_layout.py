"""How routed experts lie in a checkpoint: in the blocks that the kernel reads, or as published where blocks do not fit.

::

    gate_up_EMKmw [E, M, K, m, 576]   sharded over E and M        a shard of a mesh with tensor=T is a slice of the whole
    down_EMKmw    [E, N, k, n, 576]   sharded over E and k        as long as T divides M and k

A checkpoint is written for a mesh. Its experts are in blocks if a shard of that mesh has whole block columns of
features, with as many blocks a group as one shard has (at most 8), so that smaller meshes have slices of whole groups.
On a mesh whose shards would cut a group or a block, blocks are turned back to published words while they are loaded.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, BFloat16, Int32

from ddtree_jax.pallas.int4_blocks import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    BLOCK_WORDS,
    MAX_GROUP,
    WEIGHT_WORDS,
    split_halves,
)
from ddtree_jax.pallas.int4_moe import ExpertBlocks, ExpertWeights
from ddtree_jax.sharding import RULES, ArrayInfo, Parameters, mesh_sizes

DEFAULT_MESH = "tensor=8"
_FEATURES = BLOCK_ROWS // 2
_NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def stored_parameters(parameters: Parameters, mesh: str) -> Parameters:
    """Parameters as a checkpoint for this mesh stores them: in blocks where they fit.

    Raises:
      ValueError: ``mesh`` is none.
    """
    tensor = mesh_sizes(mesh)[RULES["expert_width"]]
    return {part: _store(infos, tensor) for part, infos in parameters.items()}


def _store(infos: dict[str, ArrayInfo], tensor: int) -> dict[str, ArrayInfo]:
    words = [infos.get(name) for name in ExpertWeights._fields]
    if words[0] is None or words[0].shape[2] % (BLOCK_COLUMNS * tensor):
        return infos
    (E, _, F, _), D = words[0].shape, words[2].shape[1]
    group = math.gcd(F // tensor // _FEATURES, MAX_GROUP)
    rows = -(-D // BLOCK_ROWS)
    down_group = math.gcd(rows, MAX_GROUP)
    gate_up = (E, F // _FEATURES // group, -(-D // BLOCK_COLUMNS), group, BLOCK_WORDS)
    down = (E, rows // down_group, F // BLOCK_COLUMNS, down_group, BLOCK_WORDS)
    blocks = ExpertBlocks(
        ArrayInfo(gate_up, ("experts", "expert_width", None, None, None), jnp.int32),
        ArrayInfo(down, ("experts", None, "expert_width", None, None), jnp.int32),
    )
    return {name: info for name, info in infos.items() if name not in ExpertWeights._fields} | blocks._asdict()


def loaded_as_stored(stored: Mapping[str, ArrayInfo], sizes: Mapping[str, int]) -> bool:
    """Whether every shard of a mesh, given as its axes' sizes, is a slice of the stored blocks. True where none are."""
    blocks = [stored[name] for name in ExpertBlocks._fields if name in stored]
    return all(
        size % sizes[RULES[axis]] == 0
        for info in blocks
        for size, axis in zip(info.shape, info.axes, strict=True)
        if axis
    )


def over_experts_alone(info: ArrayInfo) -> ArrayInfo:
    """The same array, sharded over its experts only."""
    return dataclasses.replace(info, axes=tuple(axis if axis == "experts" else None for axis in info.axes))


def unpack_experts(blocks: ExpertBlocks, words: dict[str, ArrayInfo], mesh: Mesh) -> dict[str, Array]:
    """Published words and scales of blocks, in the sharding of ``words``."""
    D, F = words["down_EDI"].shape[1], words["gate_up_E2FI"].shape[2]

    def unpack(blocks: ExpertBlocks) -> ExpertWeights:
        gate_up = [split_halves(array)[..., :F, :] for array in words_of_blocks(blocks.gate_up_EMKmw)]
        down = [array[..., :D, :] for array in words_of_blocks(blocks.down_EMKmw)]
        arrays = ExpertWeights(*gate_up, *down)
        return ExpertWeights(*(a[..., : words[name].shape[-1]] for name, a in zip(arrays._fields, arrays, strict=True)))

    specs = {name: PartitionSpec(*(RULES.get(axis) for axis in words[name].axes)) for name in ExpertWeights._fields}
    shardings = ExpertWeights(**{name: NamedSharding(mesh, spec) for name, spec in specs.items()})
    return jax.jit(unpack, out_shardings=shardings)(blocks)._asdict()


def words_of_blocks(
    blocks: Int32[Array, "*batch M K m w"],
) -> tuple[Int32[Array, "*batch rows words"], BFloat16[Array, "*batch rows groups"]]:
    """Published words and scales, in the blocks' own row order; nothing is expanded."""
    *batch, _, num_columns, _, _ = blocks.shape
    blocks = jnp.swapaxes(blocks, -3, -2).reshape(*batch, -1, num_columns, BLOCK_WORDS)
    num_rows = blocks.shape[-3]
    words = blocks[..., :WEIGHT_WORDS].reshape(*batch, num_rows, num_columns, 4, 8, 4, 2, 2)
    # [..., M, K, warp, r, t, q, half] -> [..., M, warp, half, r, K, q, t]
    words = _reorder(jnp.moveaxis(words, (-6, -5, -4, -3, -2, -1), (-3, -6, -4, -1, -2, -5)))
    halves: Any = jnp.asarray(blocks[..., WEIGHT_WORDS:]).view(jnp.bfloat16)
    # [..., M, K, warp, r, q, half] -> [..., M, warp, half, r, K, q]
    scale = jnp.moveaxis(
        halves.reshape(*batch, num_rows, num_columns, 4, 8, 2, 2), (-5, -4, -3, -2, -1), (-2, -5, -3, -1, -4)
    )
    rows = num_rows * BLOCK_ROWS
    return words.reshape(*batch, rows, num_columns * 8), scale.reshape(*batch, rows, num_columns * 2)


def _reorder(words: Array) -> Array:
    """Nibble ``_NIBBLE_ORDER[i]`` of the result is nibble i of the word."""
    nibbles = [((words >> 4 * i) & 15) << 4 * place for i, place in enumerate(_NIBBLE_ORDER)]
    result = nibbles[0]
    for nibble in nibbles[1:]:
        result = result | nibble
    return result
