"""Caches: a tree of arrays [B, S, ...] a model, to which rows [B, T, ...] are appended behind each sequence's length.

What lies past a sequence's length is undefined, and no model reads it. A drafter may multiply it by zero, though: for
that the loop starts by clearing it (`clear_unused`), and appending leaves it as it is.

::

    slot      0   1   2   3   4   5   6   7        length_B = [3, 5], T = 2, count_B = [2, 1]
    seq 0     x   x   x   r   r   .   .   .        r: a row appended here
    seq 1     x   x   x   x   x   r   .   .        the second row of sequence 1 is past its count: not written
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.commit import commit_rows

Cache = Any
"""A tree of arrays [B, S, ...]; the matching tree of rows has [B, T, ...]."""


def append(cache: Cache, rows: Cache, length_B: Int32[Array, "B"], count_B: Int32[Array, "B"]) -> Cache:
    """Writes the first ``count_B`` rows of each sequence at slots ``length_B``, ``length_B + 1``, ..."""

    def write(slots: Array, new: Array) -> Array:
        batch, num_rows = new.shape[:2]
        offset_BT = jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32), (batch, num_rows))
        slot_BT = jnp.where(offset_BT < count_B[:, None], length_B[:, None] + offset_BT, slots.shape[1])
        return slots.at[jnp.arange(batch)[:, None], slot_BT].set(new.astype(slots.dtype), mode="drop")

    return jax.tree.map(write, cache, rows)


def clear_unused(cache: Cache, length_B: Int32[Array, "B"]) -> Cache:
    """Zeros where nothing is defined."""

    def clear(slots: Array) -> Array:
        is_used_BS = jnp.arange(slots.shape[1], dtype=jnp.int32)[None] < length_B[:, None]
        return jnp.where(is_used_BS.reshape(is_used_BS.shape + (1,) * (slots.ndim - 2)), slots, 0)

    return jax.tree.map(clear, cache)


def take_rows(rows: Cache, index_BT: Int32[Array, "B T"]) -> Cache:
    """Rows ``index_BT`` of each sequence."""

    def take(new: Array) -> Array:
        index = index_BT.reshape(index_BT.shape + (1,) * (new.ndim - 2))
        return jnp.take_along_axis(new, index, axis=1)

    return jax.tree.map(take, rows)


def commit(
    cache: Cache,
    rows: Cache,
    index_BT: Int32[Array, "B T"],
    length_B: Int32[Array, "B"],
    count_B: Int32[Array, "B"],
    *,
    has_kernels: bool = True,
) -> Cache:
    """Writes rows ``index_BT`` of each sequence as `append` does: the first ``count_B`` of them behind its length."""
    slots, treedef = jax.tree.flatten(cache)

    def by_kernel(slots: list[Array], rows: list[Array], *numbers: Array) -> list[Array]:
        return commit_rows(slots, rows, *numbers)

    def by_reference(slots: list[Array], rows: list[Array], index_BT: Array, *numbers: Array) -> list[Array]:
        return append(slots, take_rows(rows, index_BT), *numbers)

    arrays = slots, jax.tree.leaves(rows), index_BT, length_B, count_B
    updated = simt.choose(by_kernel, by_reference, *arrays, has_kernels=has_kernels)
    return jax.tree.unflatten(treedef, updated)
