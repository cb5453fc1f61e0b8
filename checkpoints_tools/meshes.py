"""Which mesh a checkpoint is written for, spelled in one way, and whether a model divides over it."""

import math
from collections.abc import Mapping

from ddtree_jax.expert_layout import DEFAULT_MESH
from ddtree_jax.sharding import MESH_AXES, RULES, ArrayInfo, Parameters, mesh_sizes


def choose_mesh(text: str | None, parameters: Parameters) -> str:
    """A mesh in its one spelling, such as "tensor=2,expert=4"; without ``text`` the default, or of it what divides.

    Raises:
      ValueError: no mesh, or one over which a parameter does not divide.
    """
    divided = _divided_sizes(parameters)
    if text is None:
        sizes = {axis: math.gcd(size, divided[axis]) for axis, size in mesh_sizes(DEFAULT_MESH).items()}
    else:
        sizes = mesh_sizes(text)
    for axis, size in sizes.items():
        if divided[axis] % size:
            raise ValueError(f"mesh is {text!r}; allowed for {axis} are divisors of {divided[axis]}")
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "tensor=1"


def num_shards(info: ArrayInfo, sizes: Mapping[str, int]) -> int | None:
    """Into how many parts a mesh cuts a parameter, None if it does not divide."""
    counts = [sizes[RULES[axis]] if axis in RULES else 1 for axis in info.axes]
    if any(size % count for size, count in zip(info.shape, counts, strict=True)):
        return None
    return math.prod(counts)


def _divided_sizes(parameters: Parameters) -> dict[str, int]:
    """The greatest common divisor of all dimensions that lie on each mesh axis, 0 where none does."""
    found = dict.fromkeys(MESH_AXES, 0)
    for infos in parameters.values():
        for info in infos.values():
            for size, axis in zip(info.shape, info.axes, strict=True):
                if axis in RULES:
                    found[RULES[axis]] = math.gcd(found[RULES[axis]], size)
    return found
