"""What the target and the drafter have in common: parameter binding, products, rotary positions, the gated MLP."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int32

from ddtree_jax.config import RopeConfig
from ddtree_jax.pallas.block_attention import turn_halves
from ddtree_jax.projections import Packed, Product, Projection, named
from ddtree_jax.sharding import ArrayInfo


class Layer(nnx.Module):
    """A module whose parameters are the entries of ``parameters(config)``, taken by name out of a table of arrays.

    Those that the table has packed are held by their projections' names instead. ``mesh`` is where the arrays lie, if that is
    a mesh; ``has_kernels`` allows kernels where the program is for a GPU.
    """

    def __init__(
        self, config: Any, arrays: Mapping[str, Any], mesh: Mesh | None = None, has_kernels: bool = False
    ) -> None:
        self.config, self.mesh, self.has_kernels = config, mesh, has_kernels
        self.packed = nnx.data({name: arrays[name] for name in self.projections(config) if name in arrays})
        replaced = {name for leaf in arrays.values() if isinstance(leaf, Packed) for name in leaf.form.names}
        for name in self.parameters(config):
            if name not in replaced:
                setattr(self, name, nnx.Param(arrays[name]))

    @staticmethod
    def parameters(config: Any) -> dict[str, ArrayInfo]:
        raise NotImplementedError

    @staticmethod
    def projections(config: Any) -> dict[str, Projection]:
        """Products with weights that may be packed, by name."""
        return {}

    def multiply(self, name: str, x: Float[Array, "B T *rest"]) -> list[Array]:
        """The results of a projection, from packed weights or from natural arrays."""
        with jax.named_scope(name):
            if name in self.packed:
                return self.packed[name](x)
            projection = self.projections(self.config)[name]
            return projection(x, {name: getattr(self, name)[...] for name in projection.names})


def everywhere(function: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """``function`` on every device, of arrays that are whole everywhere: the partitioner could not divide its kernel."""
    if mesh is None:
        return function
    whole = PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)


def gain(size: int) -> ArrayInfo:
    """A norm's weight."""
    return ArrayInfo((size,), (None,), mean=1.0, deviation=0.0)


_GATE_UP = Product("BTD,DF->BTF", ("gate_DF", "up_DF"))
_DOWN = Product("BTF,FD->BTD", ("down_FD",))
MLP_PROJECTIONS = named(Projection("gate_up", (_GATE_UP,)), Projection("down", (_DOWN,)))


def run_mlp(layer: Layer, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The gated MLP of a layer with `MLP_PROJECTIONS`."""
    (hidden_BTF,) = layer.multiply("gate_up", x_BTD)
    (y_BTD,) = layer.multiply("down", hidden_BTF)
    return y_BTD


def gated_mlp(
    x_BTD: Float[Array, "B T D"],
    gate_DF: Float[Array, "D F"],
    up_DF: Float[Array, "D F"],
    down_FD: Float[Array, "F D"],
) -> Float[Array, "B T D"]:
    """The same from natural arrays."""
    (hidden_BTF,) = _GATE_UP(x_BTD, gate_DF, up_DF)
    (y_BTD,) = _DOWN(hidden_BTF, down_FD)
    return y_BTD


def rope_frequencies(rope: RopeConfig, dim: int) -> np.ndarray:
    """Angular frequencies, float32 [dim / 2].

    YaRN (arXiv 2309.00071, section 3.2): a dimension that turns more than ``beta_fast`` times over the original context
    keeps its frequency, one that turns less than ``beta_slow`` times is slowed by ``factor``, a linear ramp lies between.
    """
    frequency = 1.0 / rope.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.factor <= 1.0:
        return frequency.astype(np.float32)

    def dimension_of(turns: float) -> float:
        return dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_of(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_of(rope.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    return (frequency / rope.factor * ramp + frequency * (1 - ramp)).astype(np.float32)


class Turns(NamedTuple):
    """Cosines and sines that turn each pair of a vector by its row's position; the same for all layers."""

    cos_BTr: Float[Array, "B T r"]
    sin_BTr: Float[Array, "B T r"]

    @classmethod
    def of(cls, positions_BT: Int32[Array, "B T"], rope: RopeConfig, dim: int, amplitude: float) -> "Turns":
        """Of vectors of ``dim`` numbers."""
        angle_BTr = positions_BT.astype(jnp.float32)[..., None] * rope_frequencies(rope, dim)[None, None]
        return cls(jnp.cos(angle_BTr) * amplitude, jnp.sin(angle_BTr) * amplitude)

    def turn_halves(self, x: Float[Array, "B T heads R"]) -> Float[Array, "B T heads R"]:
        """Rotary embedding of pairs (i, i + R / 2)."""
        return turn_halves(x, self.cos_BTr[:, :, None], self.sin_BTr[:, :, None])
