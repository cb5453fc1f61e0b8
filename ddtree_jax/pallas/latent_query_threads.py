"""What single threads of `latent_query` do: norms, the cache's rows, the products' sums.

A warp takes a row, so that nobody waits for anybody; numbers are added in the order in which `latent_rows` adds them. ``t``
is what a thread can do, on a GPU (`simt`) or on numpy in tests.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_jax.pallas import simt, skinny_gemm_shape
from ddtree_jax.pallas.bfloat16_rows import UNIT, add_squares, apply_norm, load_unit, pack, swizzle, unpack
from ddtree_jax.pallas.latent_rows import NAN, Parts, is_not_finite, load_turn, turn_unit
from ddtree_jax.pallas.simt import UINT
from ddtree_jax.pallas.skinny_gemm_shape import SIDE, WARPGROUP
from ddtree_jax.pallas.skinny_gemm_sums import pack_sums

_LANES = 32
GROUP = UNIT * _LANES
"""Numbers that a warp takes of a row at once."""
_WORDS = UNIT // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is static in a launch. Cluster k has tiles 2k and 2k + 1 of q_b: those of a head without position come first.

    ``q_b`` and ``key_up`` are the two products as `skinny_gemm` divides them.
    """

    rows: Parts
    batch: int
    q_b: skinny_gemm_shape.Shape
    key_up: skinny_gemm_shape.Shape
    num_warpgroups: int
    rows_in_flight: int

    @property
    def num_heads(self) -> int:
        return self.key_up.num_tiles // self.key_up.tiles_a_group

    @property
    def num_clusters(self) -> int:
        return self.q_b.num_tiles // 2

    @property
    def cluster(self) -> int:
        """Blocks, each of which has a part of the columns of one of two tiles."""
        return 2 * self.q_b.cluster

    @property
    def turned(self) -> skinny_gemm_shape.Shape:
        """q_b's second result alone, the part that is turned by the position."""
        return dataclasses.replace(self.q_b, outputs=self.q_b.outputs[1:])

    @property
    def num_columns(self) -> int:
        """Blocks of 64 columns of q_b in a part."""
        return self.q_b.num_columns // self.q_b.cluster

    @property
    def num_up_tiles(self) -> int:
        """Tiles of key_up that a block has at most, each of a warpgroup of its own."""
        return -(-self.key_up.tiles_a_group // self.cluster)

    @property
    def num_row_blocks(self) -> int:
        """Blocks of clusters that have no head, which make the cache's rows."""
        return (self.num_clusters - self.num_heads) * self.cluster

    @property
    def shared_bytes(self) -> int:
        """Without barriers."""
        tokens, weights = self.num_columns * self.q_b.num_tokens, self.num_columns + 2 * self.num_up_tiles
        sums = (1 + self.num_up_tiles) * skinny_gemm_shape.num_floats(self.q_b)
        return 2 * SIDE * (tokens + weights * SIDE) + 4 * sums


def _place(shape: Shape, block: Any, token: Any, column: Any) -> Any:
    """Word of a token's column in a block of 64 columns."""
    return (block * (shape.q_b.num_tokens * SIDE) + swizzle(token, column)) >> 1


def add_pairs(values: Sequence[Any]) -> Any:
    """Adds neighbours, then neighbours' sums, as lanes do that hold one each and zeros behind them."""
    values = list(values)
    while len(values) > 1:
        values = [functools.reduce(operator.add, values[i : i + 2]) for i in range(0, len(values), 2)]
    return values[0]


def _scale(t: Any, units: Sequence[list], width: int, eps: float) -> Any:
    """Reciprocal of the root of a row's mean square, of which a lane has a unit in each group."""
    sums = [simt.warp_reduce(t, add_squares(values), operator.add) for values in units]
    return t.rsqrt(add_pairs(sums) * (1 / width) + eps)


def norm_tokens(t: Any, part: Any, query: Any, gain: Any, tokens: Any, *, shape: Shape) -> None:
    """The part's columns of all tokens, normalised, from query [B, T, A] to ``tokens``, as the tensor cores read them."""
    rows, num_warps = shape.rows, shape.num_warpgroups * WARPGROUP // _LANES
    lane, warp = t.thread() & (_LANES - 1), t.thread() >> 5
    num_groups = rows.query // GROUP
    own = num_groups // shape.q_b.cluster
    gains = [t.load_vector(gain, ((part * own + j) * GROUP + lane * UNIT) >> 1, _WORDS) for j in range(own)]
    turns = range(-(-shape.q_b.num_tokens // num_warps))
    for first in turns[:: shape.rows_in_flight]:
        places = [warp + turn * num_warps for turn in turns[first : first + shape.rows_in_flight]]
        loaded = []
        for token in places:
            # A token behind the last one is like it: nothing is kept of it.
            start = t.minimum(token, shape.q_b.num_stored - 1) * rows.query + lane * UNIT
            loaded.append([t.load_vector(query, (start + i * GROUP) >> 1, _WORDS) for i in range(num_groups)])
        for token, groups in zip(places, loaded, strict=True):
            scale = _scale(t, [unpack(t, words) for words in groups], rows.query, rows.eps)
            with t.when(token < shape.q_b.num_tokens):
                for j, factors in enumerate(gains):
                    values = unpack(t, _pick(t, part, groups[j::own]))
                    block = t.divide(lane, SIDE // UNIT) + j * (GROUP // SIDE)
                    place = _place(shape, block, token, (lane & (SIDE // UNIT - 1)) * UNIT)
                    t.store_vector(tokens, place, pack(t, apply_norm(t, values, scale, unpack(t, factors))))


def _pick(t: Any, index: Any, choices: Sequence[list]) -> list:
    """The one of several lists of words."""
    picked = choices[0]
    for i, words in enumerate(choices[1:], 1):
        picked = [t.select(t.is_equal(index, i), word, other) for word, other in zip(words, picked, strict=True)]
    return picked


def make_rows(
    t: Any,
    block: Any,
    latent: Any,
    gain: Any,
    cos: Any,
    sin: Any,
    out_rows: Any,
    out_tile: Any,
    *,
    shape: Shape,
) -> None:
    """The cache's rows and the tile, by all warpgroups of a block but the first; arrays are those of `latent_rows`."""
    num_warps = (shape.num_warpgroups - 1) * WARPGROUP // _LANES
    warp = (t.thread() >> 5) - WARPGROUP // _LANES
    total = shape.batch * shape.rows.num_rows
    for turn in range(-(-total // (num_warps * shape.num_row_blocks))):
        index = (warp + turn * num_warps) * shape.num_row_blocks + block
        with t.when(index < total):
            _make_row(t, index, latent, gain, cos, sin, out_rows, out_tile, shape.rows)


def _make_row(
    t: Any, index: Any, latent: Any, gain: Any, cos: Any, sin: Any, out_rows: Any, out_tile: Any, rows: Parts
) -> None:
    lane, width = t.thread() & (_LANES - 1), rows.latent + rows.rotary
    sequence = t.divide(index, rows.num_rows)
    row = index - sequence * rows.num_rows
    is_token = row < rows.num_tokens
    token = sequence * rows.num_tokens + t.minimum(row, rows.num_tokens - 1)
    columns = [lane * UNIT + first for first in range(0, rows.latent, GROUP)]
    # A lane behind the key repeats its last unit.
    of_key = t.minimum(lane * UNIT, rows.rotary - UNIT)
    units = [load_unit(t, latent, token * width + column) for column in columns]
    key = load_unit(t, latent, token * width + rows.latent + of_key)
    gains = [load_unit(t, gain, column) for column in columns]
    turn = load_turn(t, cos, sin, token * (rows.rotary // 2) + (of_key >> 1))

    scale = _scale(t, units, rows.latent, rows.eps)
    words = [pack(t, apply_norm(t, values, scale, factors)) for values, factors in zip(units, gains, strict=True)]
    words.append(pack(t, turn_unit(key, turn)))
    is_bad = functools.reduce(operator.or_, [is_not_finite(t, unit) for unit in words])
    is_good = t.is_equal(t.warp_maximum(t.cast(is_bad, UINT)), 0)
    fillers = [0] * len(columns) + [NAN << 16 | NAN]
    insides = [lane < _LANES] * len(columns) + [lane * UNIT < rows.rotary]
    for column, unit, filler, is_inside in zip([*columns, of_key + rows.latent], words, fillers, insides, strict=True):
        with t.when(is_inside & is_token):
            t.store_vector(out_rows, (token * width + column) >> 1, unit)
        kept = [t.select(is_token, t.select(is_good, word, filler), 0) for word in unit]
        with t.when(is_inside):
            t.store_vector(out_tile, (index * width + column) >> 1, kept)


def add_query(t: Any, load: Callable, let_go: Callable[[], None], tokens: Any, *, shape: Shape) -> None:
    """A head's query without position, added up and rounded as `skinny_gemm` does it, to ``tokens``.

    ``load(rank, index)`` gives four sums of a block of the cluster; after ``let_go()`` none are loaded any more.
    """
    q_b, num_threads, vectors = shape.q_b, shape.num_warpgroups * WARPGROUP, SIDE // 4
    places, totals = [], []
    for turn in range(-(-q_b.num_tokens * 2 * vectors // num_threads)):
        index = t.thread() + turn * num_threads
        token = t.divide(index, 2 * vectors)
        tile = t.divide(index, vectors) & 1
        row = (index & (vectors - 1)) * 4
        places.append((token, tile, row))
        source = t.minimum(token, q_b.num_tokens - 1) * q_b.sums_stride + row
        total, *others = [load(tile * q_b.cluster + i, source) for i in range(q_b.cluster)]
        for values in others:
            total = [x + value for x, value in zip(total, values, strict=True)]
        totals.append(total)
    let_go()
    for (token, tile, row), total in zip(places, totals, strict=True):
        with t.when(token < q_b.num_tokens):
            words = [pack_sums(t, *total[i : i + 2]) for i in range(0, len(total), 2)]
            t.store_vector(tokens, _place(shape, tile, token, row), words)
