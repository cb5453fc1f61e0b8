"""A residual's sum and its RMSNorm in one launch, one block or a few for a row::

    load     a thread's eight values of x, of y and of the gain                     16 bytes each, all in flight at once
    sums     of squares: a thread's in order, a warp's by halves, then the warps'   the order is fixed by the width alone
    store    the sum, and the sum normalised times the gain

Bytes: 16 rows of 7,168 are read twice and written twice, 0.9 MB, 0.2 us at 4.57 TB/s. What takes time is one access to memory
behind another, and what a single multiprocessor can move: so where rows are few, several blocks read all of a row, make
the same sum of it, and each stores its share.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.bfloat16_rows import (
    UNIT,
    add_squares,
    add_warp_sums,
    apply_norm,
    load_unit,
    rounded,
    store_unit,
    store_warp_sum,
)
from ddtree_jax.pallas.simt import FLOAT, INT, UINT

_WARPGROUP = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A row takes up to ``max_parts`` blocks, fewer where all rows together would take more than ``num_blocks``."""

    max_threads: int = 1024
    max_parts: int = 4
    num_blocks: int = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Static shape: a thread adds up ``num_turns`` units of a row of ``width``; ``num_parts`` blocks store a share each."""

    width: int
    eps: float
    num_turns: int
    num_threads: int
    num_parts: int

    @classmethod
    def of(cls, num_rows: int, width: int, eps: float, config: Config = Config()) -> "Row":
        num_units = width // UNIT
        num_turns = -(-num_units // config.max_threads)
        return cls(
            width=width,
            eps=eps,
            num_turns=num_turns,
            num_threads=_WARPGROUP * -(-num_units // (num_turns * _WARPGROUP)),
            num_parts=max(1, min(config.max_parts, config.num_blocks // num_rows)),
        )


def add_and_norm(
    t: Any, row: Any, part: Any, x: Any, y: Any, gain: Any, out_sum: Any, out_normed: Any, sums: Any, *, shape: Row
) -> None:
    """Global memory: x, y [T, D], gain [D], outs [T, D]; shared: sums [warps]."""
    num_units = shape.width // UNIT
    share = -(-num_units // shape.num_parts)
    units = [t.thread() + turn * shape.num_threads for turn in range(shape.num_turns)]
    is_mine = [(unit >= part * share) & (unit < (part + 1) * share) & (unit < num_units) for unit in units]
    columns = [t.minimum(unit, num_units - 1) * UNIT for unit in units]
    loaded = [[load_unit(t, memory, row * shape.width + column) for memory in (x, y)] for column in columns]
    ones = [t.value(FLOAT, 1)] * UNIT
    gains = [
        t.branch(mine, functools.partial(load_unit, t, gain, column), ones)
        for mine, column in zip(is_mine, columns, strict=True)
    ]
    totals, squares = [], t.value(FLOAT, 0)
    for unit, (own, other) in zip(units, loaded, strict=True):
        other = rounded(t, other) if y.kind == FLOAT else other
        total = rounded(t, [a + b for a, b in zip(own, other, strict=True)])
        totals.append(total)
        squares = squares + t.select(unit < num_units, add_squares(total), 0.0)
    store_warp_sum(t, squares, sums)
    t.barrier()
    whole = add_warp_sums(t, sums, t.value(INT, 0), t.value(INT, shape.num_threads // 32))
    scale = t.rsqrt(whole * (1 / shape.width) + shape.eps)
    for mine, column, total, factors in zip(is_mine, columns, totals, gains, strict=True):
        with t.when(mine):
            store_unit(t, out_sum, row * shape.width + column, total)
            store_unit(t, out_normed, row * shape.width + column, apply_norm(t, total, scale, factors))


def add_norm(
    x_TD: Float[Array, "T D"],
    y_TD: Float[Array, "T D"],
    gain_D: Float[Array, "D"],
    *,
    eps: float,
    has_kernels: bool = True,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """``x + y`` in the type of x, and its RMSNorm times the gain.

    Goes through the kernel where the program is compiled for a GPU and the kernel takes the input.
    """
    kernel, reference = (functools.partial(function, eps=eps) for function in (add_norm_gpu, add_norm_reference))
    return simt.choose(kernel, reference, x_TD, y_TD, gain_D, has_kernels=has_kernels)


def add_norm_reference(
    x_TD: Float[Array, "T D"], y_TD: Float[Array, "T D"], gain_D: Float[Array, "D"], *, eps: float
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """`add_norm` in plain JAX: y is cast, the sum rounded, and that normalised."""
    total_TD = x_TD + y_TD.astype(x_TD.dtype)
    return total_TD, rms_norm(total_TD, gain_D, eps)


def rms_norm(x: Float[Array, "*rows D"], gain_D: Float[Array, "D"], eps: float) -> Float[Array, "*rows D"]:
    """RMSNorm as published: normalised in float32, cast to the input's dtype, then multiplied by the gain."""
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * gain_D.reshape((1,) * (x.ndim - 1) + gain_D.shape)


def add_norm_gpu(
    x_TD: Float[Array, "T D"],
    y_TD: Float[Array, "T D"],
    gain_D: Float[Array, "D"],
    *,
    eps: float,
    config: Config = Config(),
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """`add_norm` by the kernel alone.

    Raises:
      NotImplementedError: for x and a gain that are not bfloat16, another y than of that or float32, widths that are no
        multiple of 8.
    """
    num_rows, width = x_TD.shape
    types = [array.dtype.name for array in (x_TD, y_TD, gain_D)]
    if types not in (["bfloat16"] * 3, ["bfloat16", "float32", "bfloat16"]):
        raise NotImplementedError(f"types are {', '.join(types)}; bfloat16 is needed, or float32 of what is added")
    if width % UNIT:
        raise NotImplementedError(f"rows of {width}; a multiple of {UNIT} is needed")
    shape = Row.of(num_rows, width, eps, config)
    kinds = (UINT, FLOAT if types[1] == "float32" else UINT, UINT, UINT, UINT, FLOAT)

    def body(*refs: Any) -> None:
        pairs = list(zip(refs, kinds, strict=True))
        numbers = [lax.axis_index("row"), lax.axis_index("part")]
        simt.run(functools.partial(add_and_norm, shape=shape), pairs, numbers)

    like = jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype)
    total_TD, normed_TD = plgpu.kernel(
        body,
        out_type=(like, like),
        grid=(num_rows, shape.num_parts),
        grid_names=("row", "part"),
        scratch_types=[plgpu.SMEM((shape.num_threads // 32,), jnp.float32)],
        **simt.options("add_norm", shape.num_threads),
    )(x_TD, y_TD, gain_D)
    return total_TD, normed_TD
