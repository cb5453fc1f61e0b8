"""The sum of what the splits of an attention leave, in one launch, a block a row or, of few rows, a part of one's columns::

    groups   0     1     2     3        of threads take splits in turn, all loads at once, a vector of columns a thread
    splits   0     1     2     3
             4     5     6     .        as many as the length needs; others are not read
    threads                             then add up what the groups have, two columns each

Bytes of 128 rows, 16 nodes of 8 heads, 512 wide: of each split 0.14 MB in bfloat16, and 0.13 MB of result; 2.4 MB of the 17
splits that 1,024 tokens have, 9.1 MB of 66; 0.5 and 2.0 us at 4.57 TB/s, out of the second cache as a rule.

A split is so many tiles, the last one with any has less, others have none: see `tree_mla_split`.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int32

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.bfloat16_rows import unpack
from ddtree_jax.pallas.simt import FLOAT, INT, UINT

LOWEST = -1e30
"""Stands for the maximum over no scores: finite, so that differences of maxima are never NaN."""

_WARPGROUP = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Threads load ``turns`` splits each where there are enough of them.

    Few threads a block where a row has few splits, since much of what a warp does takes as long however little it adds up;
    rows that are fewer than the multiprocessors, ``num_sms``, are divided into up to ``most_parts``.
    """

    num_sms: int = 132
    turns: int = 4
    most_threads: int = 512
    most_groups: int = 16
    most_parts: int = 4
    least_threads_a_group: int = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is static; the logarithm of each row's sum of weights stands ``copies`` times, vectors are 16 bytes."""

    splits: int
    width: int
    copies: int
    vector: int
    parts: int
    groups: int

    @classmethod
    def of(cls, part_BnsC: Any, copies: int, most: int, config: Config) -> "Shape":
        """``most`` splits: how many there would be of a long cache, so that its size does not change the order of a sum."""
        batch, rows, splits, width = part_BnsC.shape
        vector = 16 // part_BnsC.dtype.itemsize
        parts = 1
        while (
            2 * parts <= config.most_parts
            and 2 * parts * rows * batch <= config.num_sms
            and width // (2 * parts * vector) >= config.least_threads_a_group
        ):
            parts *= 2
        threads_a_group = width // (parts * vector)
        groups = max(1, _WARPGROUP // threads_a_group)
        limit = min(config.most_groups, config.most_threads // threads_a_group)
        while groups * config.turns < most and 2 * groups <= limit:
            groups *= 2
        return cls(splits=splits, width=width, copies=copies, vector=vector, parts=parts, groups=groups)

    @property
    def columns(self) -> int:
        """Of a block."""
        return self.width // self.parts

    @property
    def threads_a_group(self) -> int:
        return self.columns // self.vector

    @property
    def turns(self) -> int:
        """Splits of a thread."""
        return -(-self.splits // self.groups)

    @property
    def num_threads(self) -> int:
        return self.threads_a_group * self.groups

    @property
    def scratch(self) -> tuple[int, int, int]:
        """Sizes of `add_splits`' arrays in shared memory."""
        return self.groups * self.columns, self.groups, self.groups


def add_splits(
    t: Any,
    row: Any,
    part_number: Any,
    total: Any,
    each: Any,
    part: Any,
    lse: Any,
    out: Any,
    sums: Any,
    tops: Any,
    weights: Any,
    *,
    shape: Shape,
) -> None:
    """Global memory: part [rows, s, C], lse [rows, s, c], out [rows, C]; shared: sums [groups, columns], others [groups].

    ``total`` tiles are ``each`` a split. Groups and turns without a split add zeros, so that it does not matter how many of
    them there are.
    """
    group = t.divide(t.thread(), shape.threads_a_group)
    column = (t.thread() - group * shape.threads_a_group) * shape.vector
    at_column = part_number * shape.columns + column
    nothing = [t.value(part.kind, 0)] * 4 + [t.value(FLOAT, LOWEST)]

    def load(number: Any) -> list[Any]:
        at = row * shape.splits + number
        start = at * shape.width + at_column
        words = t.load_vector(part, start if part.kind == FLOAT else start >> 1, 4)
        return [*words, t.load(lse, at * shape.copies)]

    numbers = [group + turn * shape.groups for turn in range(shape.turns)]
    is_used = [number * each < total for number in numbers]
    loaded = [
        t.branch(used, functools.partial(load, number), nothing) for number, used in zip(numbers, is_used, strict=True)
    ]
    # All are on their way before anything waits for one: no access is moved past a barrier.
    t.barrier()
    logs = [log for *_, log in loaded]
    top = functools.reduce(t.maximum, logs)
    terms = [t.select(used, t.exp2(log - top), 0) for used, log in zip(is_used, logs, strict=True)]
    acc = [t.value(FLOAT, 0)] * shape.vector
    for used, (*words, _), term in zip(is_used, loaded, terms, strict=True):
        acc = t.branch(used, functools.partial(_add, t, part.kind, words, term, acc), acc)
    for start in range(0, shape.vector, 4):
        t.store_vector(sums, group * shape.columns + column + start, acc[start : start + 4])
    with t.when(t.is_equal(column, 0)):
        t.store(tops, group, top)
        t.store(weights, group, functools.reduce(operator.add, terms))
    t.barrier()
    _add_groups(t, row * shape.width + part_number * shape.columns, out, sums, tops, weights, shape)


def share_out(t: Any, total: Any, parts: Any) -> Any:
    """``total`` by ``parts``, rounded up."""
    return t.divide(total + (parts - 1), parts)


def _add(t: Any, kind: Any, words: list, term: Any, acc: list) -> list:
    values = words if kind == FLOAT else unpack(t, words)
    return [t.fma(value, term, x) for value, x in zip(values, acc, strict=True)]


def _add_groups(t: Any, start: Any, out: Any, sums: Any, tops: Any, weights: Any, shape: Shape) -> None:
    """Two neighbouring columns a thread and turn, in the order of the groups."""
    groups = [t.value(INT, g) for g in range(shape.groups)]
    logs = [t.load(tops, g) for g in groups]
    top = functools.reduce(t.maximum, logs)
    terms = [t.exp2(log - top) for log in logs]

    def add(values: list) -> Any:
        first, *others = zip(values, terms, strict=True)
        return functools.reduce(lambda total, pair: t.fma(*pair, total), others, operator.mul(*first))

    scale = t.value(FLOAT, 1) / add([t.load(weights, g) for g in groups])
    for turn in range(-(-shape.columns // (2 * shape.num_threads))):
        column = (t.thread() + turn * shape.num_threads) * 2
        with t.when(column < shape.columns):
            pairs = [t.load_vector(sums, g * shape.columns + column, 2) for g in groups]
            low, high = (add(list(values)) * scale for values in zip(*pairs, strict=True))
            t.store(out, (start + column) >> 1, t.pair(low, high))


def sum_splits(
    part_BnsC: Float[Array, "B n s C"],
    lse_Bnsc: Float[Array, "B n s c"],
    length_B: Int32[Array, "B"],
    *,
    num_tiles: Callable[[Any], Any],
    most: int,
    name: str,
    config: Config = Config(),
) -> BFloat16[Array, "B n C"]:
    """The sum over splits of ``part``, each already divided by its own sum of weights, whose base-2 logarithm is ``lse``.

    ``lse`` holds each number c times, so that a row's numbers are sectors that no other block writes. ``num_tiles`` of a
    length are divided among the splits, of which there are ``most`` if the cache is long.
    """
    batch, rows, splits, width = part_BnsC.shape
    if splits == 1:
        return part_BnsC[:, :, 0].astype(jnp.bfloat16)
    shape = Shape.of(part_BnsC, lse_Bnsc.shape[-1], most, config)
    kinds = (FLOAT if part_BnsC.dtype == jnp.float32 else UINT, FLOAT, UINT, FLOAT, FLOAT, FLOAT)

    def body(part: Any, lse: Any, length: Any, *refs: Any) -> None:
        part_number, row, b = (lax.axis_index(axis) for axis in ("part", "row", "batch"))
        numbers = [b * rows + row, part_number, *_share(num_tiles(length[b]), splits)]
        memories = list(zip((part, lse, *refs), kinds, strict=True))
        simt.run(functools.partial(add_splits, shape=shape), memories, numbers)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, rows, width), jnp.bfloat16),
        grid=(shape.parts, rows, batch),
        grid_names=("part", "row", "batch"),
        scratch_types=[plgpu.SMEM((size,), jnp.float32) for size in shape.scratch],
        **simt.options(name, shape.num_threads),
    )(part_BnsC, lse_Bnsc, length_B)


def _share(total: Any, splits: int) -> tuple[Any, Any]:
    """Tiles in all, and of a split."""
    return total, lax.div(total + (splits - 1), jnp.full_like(total, splits))


def sum_splits_reference(
    part_BnsC: Float[Array, "B n s C"],
    lse_Bnsc: Float[Array, "B n s c"],
    length_B: Int32[Array, "B"],
    *,
    num_tiles: Callable[[Any], Any],
) -> BFloat16[Array, "B n C"]:
    """`sum_splits` in plain JAX, where the kernels before it are interpreted."""
    splits = part_BnsC.shape[2]
    total_B, each_B = _share(num_tiles(length_B), splits)
    is_used_Bs = jnp.arange(splits, dtype=jnp.int32)[None] * each_B[:, None] < total_B[:, None]
    lse_Bns = jnp.where(is_used_Bs[:, None], lse_Bnsc[..., 0], LOWEST)
    weight_Bns = jnp.where(is_used_Bs[:, None], jnp.exp2(lse_Bns - jnp.max(lse_Bns, axis=-1, keepdims=True)), 0)
    part_BnsC = jnp.where(is_used_Bs[:, None, :, None], part_BnsC.astype(jnp.float32), 0)
    sum_BnC = jnp.einsum("Bns,BnsC->BnC", weight_Bns, part_BnsC)
    return (sum_BnC / jnp.sum(weight_Bns, axis=-1)[..., None]).astype(jnp.bfloat16)
