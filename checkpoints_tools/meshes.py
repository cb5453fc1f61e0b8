"""Which mesh a checkpoint is written for, spelled in one way, and whether a model divides over it."""

import math
from collections.abc import Mapping

from ddtree_jax.expert_layout import DEFAULT_MESH
from ddtree_jax.sharding import RULES, ArrayInfo, Parameters, mesh_sizes


def choose_mesh(text: str | None, parameters: Parameters) -> str:
    """A mesh in its one spelling, such as "tensor=2,expert=4"; without ``text`` the default, halved until it fits.

    Raises:
      ValueError: no mesh, or one over which a parameter does not divide.
    """
    if text is None:
        sizes = mesh_sizes(DEFAULT_MESH)
        while _find_fault(parameters, sizes):
            sizes = {axis: max(size // 2, 1) for axis, size in sizes.items()}
    else:
        sizes = mesh_sizes(text)
        if fault := _find_fault(parameters, sizes):
            raise ValueError(f"mesh is {text!r}; {fault}")
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "tensor=1"


def num_shards(info: ArrayInfo, sizes: Mapping[str, int]) -> int | None:
    """Into how many parts a mesh cuts a parameter, None if it does not divide."""
    counts = [_count(axis, sizes) for axis in info.axes]
    if any(size % count for size, count in zip(info.shape, counts, strict=True)):
        return None
    return math.prod(counts)


def _count(axis: str | None, sizes: Mapping[str, int]) -> int:
    return sizes[RULES[axis]] if axis in RULES else 1


def _find_fault(parameters: Parameters, sizes: Mapping[str, int]) -> str | None:
    """What of a mesh does not divide the first parameter that it does not divide."""
    for infos in parameters.values():
        for name, info in infos.items():
            for size, axis in zip(info.shape, info.axes, strict=True):
                if size % _count(axis, sizes):
                    return f"allowed for {RULES[axis]} are divisors of {size}, a dimension of {name}"
    return None
