"""One table from logical axis names to mesh axes, and the tree that describes every parameter."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("tensor", "expert")

# Logical axes that are not here are replicated.
RULES: dict[str, str] = {
    "heads": "tensor",
    "kv_heads": "tensor",
    "width": "tensor",
    "expert_width": "tensor",
    "expert_groups": "tensor",
    "experts": "expert",
    "vocab": "tensor",
}


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Shape, dtype and logical axis names of one parameter, and how to draw it.

    ``dtype`` None means the compute dtype; packed INT4 words, their scales and the router's bias keep their own.
    ``mean`` and ``deviation`` are those of a normal distribution; integers are drawn uniformly over all bits.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: Any = None
    mean: float = 0.0
    deviation: float = 0.02

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"axes {self.axes} do not fit shape {self.shape}")


Parameters = dict[str, dict[str, ArrayInfo]]
"""Parts of a model ("embed", "layer_0", ..., "head"), each a flat table of parameter names."""


def mesh_sizes(text: Any) -> dict[str, int]:
    """Size of every mesh axis from text such as ``"tensor=8"`` or ``"expert=4,tensor=2"``; None is one device.

    Raises:
      ValueError: an unknown axis, a repeated one, or a size below 1.
    """
    sizes = dict.fromkeys(MESH_AXES, 1)
    seen = set()
    for part in [] if text is None else str(text).split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9]{1,9})\s*", part)
        if not match or match[1] not in sizes or match[1] in seen or int(match[2]) < 1:
            raise ValueError(f"mesh is {text!r}; allowed: sizes of {' and '.join(MESH_AXES)}, such as 'tensor=8'")
        seen.add(match[1])
        sizes[match[1]] = int(match[2])
    return sizes


def make_mesh(text: Any) -> Mesh:
    """Mesh from axis sizes, as `mesh_sizes` reads them.

    Raises:
      ValueError: as `mesh_sizes`; more devices than there are.
    """
    sizes = mesh_sizes(text)
    num_devices = math.prod(sizes.values())
    if num_devices > jax.device_count():
        raise ValueError(f"mesh {text!r} needs {num_devices} devices; there are {jax.device_count()}")
    devices = jax.devices()[:num_devices]
    if idle := set(range(jax.process_count())) - {device.process_index for device in devices}:
        raise ValueError(
            f"mesh {text!r} needs {num_devices} devices; of {jax.device_count()}, none of process {min(idle)}"
        )
    # Tensor shards of one expert shard are neighbours, so that they lie on one host where they can.
    array = np.array(devices).reshape(sizes["expert"], sizes["tensor"]).T
    return Mesh(array, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def partition(axes: Sequence[str | None]) -> PartitionSpec:
    """Mesh axes of logical ones, by `RULES`."""
    return PartitionSpec(*(RULES.get(axis) if axis else None for axis in axes))


def sharding_of(info: ArrayInfo, mesh: Mesh, name: str) -> NamedSharding:
    """Where a parameter lies on a mesh.

    Raises:
      ValueError: two dimensions would lie on one mesh axis, or a dimension does not divide.
    """
    spec = partition(info.axes)
    used = [axis for axis in spec if axis]
    if len(set(used)) != len(used):
        raise ValueError(f"{name}: two of its dimensions {info.axes} lie on one mesh axis")
    for size, logical, axis in zip(info.shape, info.axes, spec, strict=True):
        if axis and size % mesh.shape[axis]:
            raise ValueError(
                f"mesh has {axis}={mesh.shape[axis]}; allowed are divisors of {size}, the {logical} of {name}"
            )
    return NamedSharding(mesh, spec)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def initialize(parameters: Parameters, key: jax.Array, dtype: Any) -> dict[str, dict[str, jax.Array]]:
    """Random arrays for a parameter tree, in ``dtype`` where a parameter names none."""

    def draw(key: jax.Array, info: ArrayInfo) -> jax.Array:
        target = info.dtype or dtype
        if jnp.issubdtype(target, jnp.integer):
            return jax.lax.bitcast_convert_type(jax.random.bits(key, info.shape, jnp.uint32), target)
        return (info.mean + info.deviation * jax.random.normal(key, info.shape)).astype(target)

    leaves, structure = jax.tree.flatten(parameters)
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten(map(draw, keys, leaves))
