"""Weights that no checkpoint holds, drawn on the devices where they lie."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.int4_blocks import BLOCK_WORDS, WEIGHT_WORDS
from ddtree_jax.pallas.int4_moe import ExpertBlocks
from ddtree_jax.projections import Packed
from ddtree_jax.sharding import ArrayInfo, Parameters
from experiments.abstract_engine import ArrayShapes

# Two bfloat16 a word, from 0.0098 to 0.0102.
_SCALE_BITS, _SCALE_NOISE = 0x3C20_3C20, 0x0007_0007
# Mean and deviation of what has no entry among the parameters: a weight's.
_PACKED = 0.0, ArrayInfo((), ()).deviation


def draw_arrays(described: ArrayShapes, parameters: Parameters, seed: int) -> dict[str, dict[str, jax.Array]]:
    """Arrays of a model as ``described``: experts in blocks, all else by the means and deviations of ``parameters``.

    Packed weights are drawn as any weight is.
    """
    arrays = {}
    for part, key in zip(described, jax.random.split(jax.random.key(seed), len(described)), strict=True):
        normal = {name: (info.mean, info.deviation) for name, info in parameters[part].items()}
        leaves = tuple((name, leaf, *normal.get(name, _PACKED)) for name, leaf in described[part].items())
        arrays[part] = _program(leaves)(key)
    return arrays


def count_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


@functools.cache
def _program(leaves: tuple[tuple[str, Any, float, float], ...]) -> Callable[..., dict[str, jax.Array]]:
    """What draws one part of a model; layers of one shape share it."""

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(leaves))
        return {name: _draw(keys[i], name, *rest) for i, (name, *rest) in enumerate(leaves)}

    return jax.jit(
        draw, out_shardings={name: jax.tree.map(lambda leaf: leaf.sharding, leaf) for name, leaf, *_ in leaves}
    )


def _draw(key: jax.Array, name: str, leaf: Any, mean: float, deviation: float) -> Any:
    if isinstance(leaf, Packed):
        return replace(leaf, blocks=_draw(key, name, leaf.blocks, mean, deviation))
    if name in ExpertBlocks._fields:
        bits = jax.random.bits(key, leaf.shape, jnp.uint32)
        is_scale = jnp.arange(BLOCK_WORDS).reshape((1,) * (len(leaf.shape) - 1) + (-1,)) >= WEIGHT_WORDS
        bits = jnp.where(is_scale, bits & jnp.uint32(_SCALE_NOISE) | jnp.uint32(_SCALE_BITS), bits)
        return jax.lax.bitcast_convert_type(bits, leaf.dtype)
    if deviation == 0:
        return jnp.full(leaf.shape, mean, leaf.dtype)
    # Uniform, as programs that draw normal numbers take long to compile.
    reach = math.sqrt(3) * deviation
    return jax.random.uniform(key, leaf.shape, minval=mean - reach, maxval=mean + reach).astype(leaf.dtype)
