"""Where a batch lies on a mesh: the drafter's caches by heads, all else whole on every device."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ddtree_jax import dflash
from ddtree_jax.decode import Context, State
from ddtree_jax.sharding import partition, replicated


@dataclass(frozen=True)
class Placement:
    """The two shardings of a batch on a mesh, the same between programs and inside them."""

    mesh: Mesh

    @property
    def whole(self) -> NamedSharding:
        return replicated(self.mesh)

    @property
    def by_heads(self) -> NamedSharding:
        return NamedSharding(self.mesh, partition(dflash.CACHE_AXES))

    def put(self, tree: Any) -> Any:
        """Values of the host on every device. Several hosts must have the same ones."""

        def put(value: Any) -> jax.Array:
            array = np.asarray(value)
            return jax.make_array_from_callback(array.shape, self.whole, lambda index: array[index])

        return jax.tree.map(put, tree)

    def constrain(self, batch: Context | State) -> Context | State:
        """A batch in its place, for the end of a program."""
        rest = replace(batch, drafter_cache=[])
        return replace(
            jax.lax.with_sharding_constraint(rest, self.whole),
            drafter_cache=jax.lax.with_sharding_constraint(batch.drafter_cache, self.by_heads),
        )

    def describe(self, tree: Any) -> Any:
        """Shapes of arrays that are whole on every device."""
        return _describe(tree, self.whole)

    def describe_batch(self, batch: Context | State) -> Context | State:
        """Shapes of a batch in its place."""
        rest = self.describe(replace(batch, drafter_cache=[]))
        return replace(rest, drafter_cache=_describe(batch.drafter_cache, self.by_heads))


@functools.cache
def constrained(placement: Placement, program: Callable[..., Context | State]) -> Callable[..., Context | State]:
    """The program with its result in its place; one function a mesh, so that engines share what is compiled."""

    @functools.wraps(program)
    def run(*args: Any, **kwargs: Any) -> Context | State:
        return placement.constrain(program(*args, **kwargs))

    return run


def _describe(tree: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
