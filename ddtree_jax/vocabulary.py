"""The vocabulary on a mesh: every device works on the logits of its own columns, and little leaves it.

::

    shard         0            1           ...     logits [B, N, V / shards]: never gathered
    pieces    best, ids    best, ids       ...     [..., C, k], C pieces a shard: one gather of a few KB
                  └─────┬──────┘
    every device    the same merge                 what one device with all columns would find

What decides about a token does not depend on the number of shards: a merge prefers the lower id as `argmax` does, and sums
are sums of integers. Log-sum-exps, which order the draft's nodes and are reported, may differ in their last bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from ddtree_jax.sharding import RULES


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A device's part of the vocabulary: its share of the columns along mesh axis ``axis``, or all of them without one.

    With an axis, methods must be called under `jax.shard_map`. ``has_kernels`` allows kernels where a program is for a GPU.
    """

    axis: str | None = None
    has_kernels: bool = True

    def first_id(self, num_columns: int) -> Int32[Array, ""]:
        """The id of this shard's first column, of ``num_columns`` a shard."""
        return jnp.int32(0 if self.axis is None else jax.lax.axis_index(self.axis) * num_columns)

    def num_ids(self, num_columns: int) -> int:
        """Of the whole vocabulary."""
        return num_columns if self.axis is None else num_columns * jax.lax.axis_size(self.axis)

    def columns_of(self, token: Int32[Array, "*ids"], num_columns: int) -> tuple[Array, Bool[Array, "*ids"]]:
        """This shard's columns of ids, 0 where another has them, and whether this one has them."""
        column = token - self.first_id(num_columns)
        is_here = (column >= 0) & (column < num_columns)
        return jnp.where(is_here, column, 0), is_here

    def sum(self, x: Array) -> Array:
        """Over all shards."""
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def maximum(self, x: Array) -> Array:
        """Over all shards."""
        return x if self.axis is None else jax.lax.pmax(x, self.axis)

    def gather(self, *pieces: Array) -> tuple[Array, ...]:
        """Pieces [..., C, k] of this shard, int32 or float32, become those of all [..., shards * C, k] by one collective."""
        if self.axis is None:
            return pieces
        packed = jnp.concatenate([jax.lax.bitcast_convert_type(piece, jnp.int32) for piece in pieces], axis=-1)
        packed = jax.lax.all_gather(packed, self.axis, axis=packed.ndim - 2, tiled=True)
        ends = np.cumsum([piece.shape[-1] for piece in pieces])[:-1].tolist()
        parts = zip(jnp.split(packed, ends, axis=-1), pieces, strict=True)
        return tuple(jax.lax.bitcast_convert_type(part, piece.dtype) for part, piece in parts)

    def argmax(self, x: Float[Array, "*rows V"]) -> tuple[Float[Array, "*rows"], Int32[Array, "*rows"]]:
        """Each row's largest value and its id, the lower one of equals."""
        column = jnp.argmax(x, axis=-1, keepdims=True).astype(jnp.int32)
        value, token = jnp.take_along_axis(x, column, axis=-1), column + self.first_id(x.shape[-1])
        if self.axis is not None:
            value, token = (piece[..., 0] for piece in self.gather(value[..., None], token[..., None]))
            best = jnp.argmax(value, axis=-1, keepdims=True)
            value, token = (jnp.take_along_axis(of_shards, best, axis=-1) for of_shards in (value, token))
        return value[..., 0], token[..., 0]

    def top(
        self, x: Float[Array, "*rows V"], num_best: int
    ) -> tuple[Float[Array, "*rows K"], Int32[Array, "*rows K"], Float[Array, "*rows 1"]]:
        """Each row's ``num_best`` largest values, largest first and equal ones by lower id, their ids, and log-sum-exps."""
        value, token = jax.lax.top_k(x, min(num_best, x.shape[-1]))
        total = jax.nn.logsumexp(x, axis=-1, keepdims=True)
        if self.axis is not None:
            pieces = self.gather(*(y[..., None, :] for y in (value, token + self.first_id(x.shape[-1]), total)))
            value, token, total = (piece.reshape(*x.shape[:-1], -1) for piece in pieces)
            value, place = jax.lax.top_k(value, num_best)
            token, total = jnp.take_along_axis(token, place, axis=-1), jax.nn.logsumexp(total, axis=-1, keepdims=True)
        return value, token, total

    def log_sum_exp(self, x: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
        (parts,) = self.gather(jax.nn.logsumexp(x, axis=-1, keepdims=True)[..., None])
        return parts[..., 0, 0] if self.axis is None else jax.nn.logsumexp(parts[..., 0], axis=-1)

    def value_at(self, x: Float[Array, "*rows V"], token: Int32[Array, "*rows"]) -> Float[Array, "*rows"]:
        """Each row's value at an id."""
        column, is_here = self.columns_of(token, x.shape[-1])
        value = jnp.take_along_axis(x, column[..., None], axis=-1)[..., 0]
        return self.maximum(jnp.where(is_here, value, -jnp.inf))


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the loop's own parts run: on every device of a mesh, if there is one, and by kernels, if these are allowed.

    ``drafter_rows`` says how the drafter's cache [B, S, ...] and its rows [B, T, ...] are divided.
    """

    mesh: Mesh | None = None
    has_kernels: bool = True
    drafter_rows: PartitionSpec = PartitionSpec()

    @property
    def shard(self) -> Shard:
        axis = RULES["vocab"]
        is_split = self.mesh is not None and self.mesh.shape[axis] > 1
        return Shard(axis=axis if is_split else None, has_kernels=self.has_kernels)

    def run_on_rows(
        self, function: Callable[..., Any], cache: Any, rows: Any, *whole: Any, spec: PartitionSpec = PartitionSpec()
    ) -> Any:
        """``function(cache, rows, *whole)``, a new cache, on every device with its own part of cache and rows."""
        return self._on_devices(function, (cache, rows, *whole), (spec, spec), spec)

    def run_on_columns(self, function: Callable[..., Any], logits: Float[Array, "B N V"], *whole: Any) -> Any:
        """``function(logits, *whole)`` on every device with its own columns of the logits.

        Other arrays are whole on every device, and so is the result.
        """
        columns = PartitionSpec(None, None, RULES["vocab"])
        return self._on_devices(function, (logits, *whole), (columns,), PartitionSpec())

    def _on_devices(
        self,
        function: Callable[..., Any],
        arguments: tuple,
        first_specs: tuple[PartitionSpec, ...],
        out_spec: PartitionSpec,
    ) -> Any:
        if self.mesh is None:
            return function(*arguments)
        specs = (*first_specs, *[PartitionSpec()] * (len(arguments) - len(first_specs)))
        run = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_spec, check_vma=False)
        return run(*arguments)
