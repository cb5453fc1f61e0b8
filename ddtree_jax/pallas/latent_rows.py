"""From the first projections to the query's second one and to the cache's row, in one launch, a block a row::

    warps 0 to 5   query's latent [A]:  RMSNorm, the input of its second projection
    warps 6, 7     latent [C]:          RMSNorm                                      ┐ the row of the cache
    warp 8         key [R]:             turned by the position, pairs (2i, 2i + 1)   ┘

All load at once, and wait for each other's sums of squares. Rows behind the tokens, up to whole tiles, are zeros, and of a
row that is not finite the latent is zero and the key NaN, as `tree_mla_hopper` reads them: ``tile``, a copy of the rows.

Bytes: 16 rows of 1,536 and 576, read once and written once, 0.15 MB; one access to memory after another takes time.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.add_norm import rms_norm
from ddtree_jax.pallas.bfloat16_rows import (
    UNIT,
    add_squares,
    add_warp_sums,
    apply_norm,
    load_unit,
    pack,
    store_warp_sum,
)
from ddtree_jax.pallas.simt import FLOAT, INT, UINT

_WARPGROUP, _LANES, _MAX_WARPS = 128, 32, 32
_WORDS = UNIT // 2
_INFINITE, NAN = 0x7F80, 0x7FC0


class LatentRows(NamedTuple):
    """``query``: normalised; ``rows``: for the cache; ``tile``: the same, filled up and finite, see the module."""

    query_BTA: Float[Array, "B T A"]
    rows_BTW: Float[Array, "B T W"]
    tile_BtW: Float[Array, "B t W"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Static shape: ``num_tokens`` rows of each sequence, filled up to ``num_rows``; widths of the parts."""

    num_tokens: int
    num_rows: int
    query: int
    latent: int
    rotary: int
    eps: float

    @property
    def num_warps(self) -> tuple[int, int, int]:
        """Of each part."""
        query, latent, rotary = (-(-width // (UNIT * _LANES)) for width in (self.query, self.latent, self.rotary))
        return query, latent, rotary

    @property
    def num_threads(self) -> int:
        return _WARPGROUP * -(-sum(self.num_warps) * _LANES // _WARPGROUP)


def make_rows(
    t: Any,
    row: Any,
    sequence: Any,
    query: Any,
    latent: Any,
    query_gain: Any,
    latent_gain: Any,
    cos: Any,
    sin: Any,
    out_query: Any,
    out_rows: Any,
    out_tile: Any,
    sums: Any,
    flags: Any,
    *,
    shape: Parts,
) -> None:
    """Global memory: query [B, T, A], latent [B, T, W], gains [A], [C], cos and sin [B, T, R / 2]; shared: [warps] each."""
    num_query, num_latent, num_rotary = shape.num_warps
    width, half = shape.latent + shape.rotary, shape.rotary // 2
    warp, token = t.thread() >> 5, sequence * shape.num_tokens + t.minimum(row, shape.num_tokens - 1)
    is_query = warp < num_query
    is_latent = (warp < num_query + num_latent) & ~is_query
    is_key = ~(is_query | is_latent)
    # The unit's first column in its part: a thread behind the part repeats the last unit's loads, and stores nothing.
    first = t.select(is_query, t.value(INT, 0), t.select(is_latent, t.value(INT, num_query), num_query + num_latent))
    part = t.select(is_query, t.value(INT, shape.query), t.select(is_latent, t.value(INT, shape.latent), shape.rotary))
    column = (t.thread() - first * _LANES) * UNIT
    is_inside = column < part
    column = t.minimum(column, part - UNIT)
    start = t.select(is_key, t.value(INT, shape.latent), 0) + column  # In a row of the cache, if it is one.

    zeros = [t.value(FLOAT, 0)] * UNIT
    in_row = t.minimum(start, width - UNIT)
    values = t.branch(
        is_query,
        lambda: load_unit(t, query, token * shape.query + column),
        load_unit(t, latent, token * width + in_row),
    )
    gain = t.branch(is_query, lambda: load_unit(t, query_gain, column), zeros)
    gain = t.branch(is_latent, lambda: load_unit(t, latent_gain, column), gain)
    turn = t.branch(is_key, lambda: load_turn(t, cos, sin, token * half + (column >> 1)), zeros)

    store_warp_sum(t, t.select(is_inside, add_squares(values), 0.0), sums)
    t.barrier()
    count = t.select(is_query, t.value(INT, num_query), t.select(is_latent, t.value(INT, num_latent), num_rotary))
    share = t.select(is_query, t.value(FLOAT, 1 / shape.query), 1 / shape.latent)
    scale = t.rsqrt(add_warp_sums(t, sums, first, count) * share + shape.eps)
    normed = pack(t, apply_norm(t, values, scale, gain))
    turned = pack(t, turn_unit(values, turn))
    words = [t.select(is_key, b, a) for a, b in zip(normed, turned, strict=True)]

    is_token = row < shape.num_tokens
    is_row = ~is_query & is_inside
    with t.when(is_query & is_inside & is_token):
        t.store_vector(out_query, (token * shape.query + column) >> 1, words)
    with t.when(is_row & is_token):
        t.store_vector(out_rows, (token * width + in_row) >> 1, words)
    _store_flags(t, shape, is_row, words, flags)
    t.barrier()
    any_bad = t.warp_maximum(t.load(flags, t.minimum(t.thread() & 31, shape.num_threads // _LANES - 1)))
    filler = t.select(is_key, t.value(UINT, NAN << 16 | NAN), 0)
    kept = [t.select(t.is_equal(any_bad, 0), word, filler) for word in words]
    kept = [t.select(is_token, word, t.value(UINT, 0)) for word in kept]
    with t.when(is_row):
        t.store_vector(out_tile, ((sequence * shape.num_rows + row) * width + in_row) >> 1, kept)


def load_turn(t: Any, cos: Any, sin: Any, index: Any) -> list:
    """Cosines and sines of a unit's four pairs."""
    return t.load_vector(cos, index, _WORDS) + t.load_vector(sin, index, _WORDS)


def turn_unit(values: list, turn: list) -> list:
    """Turns a unit's four pairs by their cosines, then sines."""
    pairs = zip(values[::2], values[1::2], turn[:_WORDS], turn[_WORDS:], strict=True)
    return [x for a, b, cos, sin in pairs for x in (a * cos - b * sin, b * cos + a * sin)]


def is_not_finite(t: Any, words: list) -> Any:
    """Whether one of the bfloat16 in a thread's words is infinite or NaN."""
    exponents = [word & bits for word in words for bits in (_INFINITE, _INFINITE << 16)]
    limits = [_INFINITE, _INFINITE << 16] * len(words)
    return functools.reduce(
        operator.or_, [t.is_equal(exponent, limit) for exponent, limit in zip(exponents, limits, strict=True)]
    )


def _store_flags(t: Any, shape: Parts, is_row: Any, words: list, flags: Any) -> None:
    """1 for every warp that has something not finite in a row of the cache."""
    flag = t.warp_maximum(t.cast(is_row & is_not_finite(t, words), UINT))
    with t.when(t.is_equal(t.thread() & 31, 0)):
        t.store(flags, t.thread() >> 5, flag)


def latent_rows(
    query_BTA: Float[Array, "B T A"],
    latent_BTW: Float[Array, "B T W"],
    query_gain_A: Float[Array, "A"],
    latent_gain_C: Float[Array, "C"],
    cos_BTr: Float[Array, "B T r"],
    sin_BTr: Float[Array, "B T r"],
    *,
    eps: float,
    multiple: int,
    has_kernels: bool = True,
) -> LatentRows:
    """What attention makes of its first projections; ``cos`` and ``sin`` are those of each pair of the key.

    Goes through the kernel where the program is compiled for a GPU and the kernel takes the input.
    """
    arrays = (query_BTA, latent_BTW, query_gain_A, latent_gain_C, cos_BTr, sin_BTr)
    kernel, reference = (
        functools.partial(function, eps=eps, multiple=multiple) for function in (latent_rows_gpu, latent_rows_reference)
    )
    return simt.choose(kernel, reference, *arrays, has_kernels=has_kernels)


def latent_rows_reference(
    query_BTA: Float[Array, "B T A"],
    latent_BTW: Float[Array, "B T W"],
    query_gain_A: Float[Array, "A"],
    latent_gain_C: Float[Array, "C"],
    cos_BTr: Float[Array, "B T r"],
    sin_BTr: Float[Array, "B T r"],
    *,
    eps: float,
    multiple: int,
) -> LatentRows:
    """`latent_rows` in plain JAX."""
    latent_BTC, key_BTR = jnp.split(latent_BTW, [latent_gain_C.shape[0]], axis=-1)
    latent_BTC = rms_norm(latent_BTC, latent_gain_C, eps)
    rows_BTW = jnp.concatenate([latent_BTC, turn_pairs(key_BTR, cos_BTr, sin_BTr)], axis=-1)
    tile_BtW = fill_tiles(rows_BTW, latent_gain_C.shape[0], multiple)
    return LatentRows(rms_norm(query_BTA, query_gain_A, eps), rows_BTW, tile_BtW)


def turn_pairs(
    x: Float[Array, "... R"], cos: Float[Array, "... r"], sin: Float[Array, "... r"]
) -> Float[Array, "... R"]:
    """Turns pairs (2i, 2i + 1) by the angles whose cosines and sines are given, in float32."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def fill_tiles(rows_BTW: Float[Array, "B T W"], num_latent: int, multiple: int) -> Float[Array, "B t W"]:
    """Rows filled up with zeros to a multiple of so many. Latents are finite; the key of a row that was not is NaN."""
    is_finite_BT1 = jnp.all(jnp.isfinite(rows_BTW), axis=-1, keepdims=True)
    filler_W = jnp.where(jnp.arange(rows_BTW.shape[-1]) < num_latent, 0, jnp.nan).astype(rows_BTW.dtype)
    kept_BTW = jnp.where(is_finite_BT1, rows_BTW, filler_W)
    return jnp.pad(kept_BTW, ((0, 0), (0, -rows_BTW.shape[1] % multiple), (0, 0)))


def check_turns(cos_BTr: Array, sin_BTr: Array, expected: tuple[int, int, int]) -> None:
    """Refuses cosines and sines that a kernel would misread.

    Raises:
      NotImplementedError: they are not float32.
      ValueError: there is not one of each for each pair of each row.
    """
    for name, turn_BTr in (("cosines", cos_BTr), ("sines", sin_BTr)):
        if turn_BTr.shape != expected:
            raise ValueError(f"{name} have the shape {turn_BTr.shape}; {expected} is needed")
        if turn_BTr.dtype != jnp.float32:
            raise NotImplementedError(f"{name} are {turn_BTr.dtype}; float32 is needed")


def latent_rows_gpu(
    query_BTA: Float[Array, "B T A"],
    latent_BTW: Float[Array, "B T W"],
    query_gain_A: Float[Array, "A"],
    latent_gain_C: Float[Array, "C"],
    cos_BTr: Float[Array, "B T r"],
    sin_BTr: Float[Array, "B T r"],
    *,
    eps: float,
    multiple: int,
) -> LatentRows:
    """`latent_rows` by the kernel alone.

    Raises:
      NotImplementedError: for other types than bfloat16, and float32 of cosines and sines, widths that are no multiple of 8,
        or more than a block's warps take.
      ValueError: there is not one cosine and one sine for each pair of each token.
    """
    batch, num_tokens, width = latent_BTW.shape
    (query_width,), (latent_width,) = query_gain_A.shape, latent_gain_C.shape
    shape = Parts(
        num_tokens=num_tokens,
        num_rows=num_tokens + -num_tokens % multiple,
        query=query_width,
        latent=latent_width,
        rotary=width - latent_width,
        eps=eps,
    )
    types = [array.dtype.name for array in (query_BTA, latent_BTW, query_gain_A, latent_gain_C)]
    if set(types) != {"bfloat16"}:
        raise NotImplementedError(f"types are {', '.join(types)}; bfloat16 is needed")
    check_turns(cos_BTr, sin_BTr, (batch, num_tokens, (width - latent_width) // 2))
    widths = shape.query, shape.latent, shape.rotary
    if any(part % UNIT for part in widths) or sum(shape.num_warps) > _MAX_WARPS:
        raise NotImplementedError(f"widths {widths}; multiples of {UNIT} are needed, and {_MAX_WARPS} warps for all")

    def body(*refs: Any) -> None:
        kinds = (UINT, UINT, UINT, UINT, FLOAT, FLOAT, UINT, UINT, UINT, FLOAT, UINT)
        numbers = [lax.axis_index("row"), lax.axis_index("sequence")]
        simt.run(functools.partial(make_rows, shape=shape), list(zip(refs, kinds, strict=True)), numbers)

    num_sums, bfloat16 = shape.num_threads // _LANES, jnp.bfloat16
    outs = (query_BTA.shape, latent_BTW.shape, (batch, shape.num_rows, width))
    return LatentRows(
        *plgpu.kernel(
            body,
            out_type=tuple(jax.ShapeDtypeStruct(out, bfloat16) for out in outs),
            grid=(shape.num_rows, batch),
            grid_names=("row", "sequence"),
            scratch_types=[plgpu.SMEM((num_sums,), jnp.float32), plgpu.SMEM((num_sums,), jnp.uint32)],
            **simt.options("latent_rows", shape.num_threads),
        )(query_BTA, latent_BTW, query_gain_A, latent_gain_C, cos_BTr, sin_BTr)
    )
