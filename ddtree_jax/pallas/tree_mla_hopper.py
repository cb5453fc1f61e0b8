"""Tree MLA for Hopper: ``wgmma`` on tiles of 64 rows (nodes x heads) by 64 slots, fed by the copy engine.

A block takes 64 rows and its split of the tiles, two tiles at a time. Of a pair, the left warpgroup scores tile 0 alone, the
right one tile 1, and each owns its half of the latent columns of the output. Their weights pass to the other one through
shared memory, in the place of the tile's rotary part, which is no longer needed by then.

::

    tensor cores     | Q (L0 R0 T0)' | Q (R1 L1 T1)' | O_L += P0 L0  O_R += P0 R0 | O_L += P1 L1  O_R += P1 R1 |
    left warpgroup                   | softmax 0     |
    right warpgroup                                  | softmax 1                  |
    copies                                             L0 R0 of the next pair     | R1 L1 of the next pair       time ->

    L, R: left and right half of a tile's latents (each in two buffers); T: its rotary part; O_L, O_R: output

The query's rotary part comes as its projection leaves it; the right warpgroup turns it while the first tile is on its way.
It and the query's first part are fetched while the length is, the other parts in turn with those of the first tile: both are
as large, and a product begins with the first parts. ::

    copies           | length, Q.T, Q.L0 | L0, Q.L1, L1, Q.R0, R0, Q.R1, R1, T |
    left warpgroup                              | Q.L0 L0' | Q.L1 L1' | ...                          time ->

A tile is read once for all nodes and heads of a block: 73,728 bytes, its latents serving as keys and as values. With 16
nodes of 8 heads (two row tiles) 4,096 tokens are 4.7 MB, 1.0 us at 4.57 TB/s. Splits are added by `split_sum`.

The maximum that weights refer to moves only where a tile's own is more than 2^8 times larger, so that the sums hardly ever
have to be rescaled. With 64 heads products are what takes time: 64 rows by 64 slots read as much shared memory as they can.

What lies behind the length, or in a node that a row does not see, gets a weight of zero; since zero times NaN is NaN,
values that are not finite become zeros: in the rows of the tree before the kernel, in the last tile of the prefix in
shared memory. Scores are taken before, so that a row which does see a NaN yields NaN.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Bool, Float, Int32

from ddtree_jax.pallas import tree_mla_split as split
from ddtree_jax.pallas.bfloat16_rows import SWIZZLED
from ddtree_jax.pallas.latent_rows import fill_tiles, turn_pairs
from ddtree_jax.pallas.split_sum import LOWEST
from ddtree_jax.pallas.tree_mla_split import Query
from ddtree_jax.pallas.tree_mla_turn import load_on_gpu, turn_on_gpu
from ddtree_jax.pallas.tree_mla_weights import ROW, WGMMA, any_in_warp, spread, store_weights, zeros

_TILE = ROW_MULTIPLE = 64
_PARTS = 2  # Buffers of half a tile's latents.
# Halves and parts of both tiles' latents, in the order in which the last pair's buffers become free.
_ORDER = (((0, 0), (0, 1), (1, 0), (1, 1)), ((1, 0), (0, 0), (1, 1), (0, 1)))
_SLACK = 8.0  # Binary orders of magnitude.
_COPIES = 8  # Of a row's logarithm: a sector of 32 bytes.


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """``num_sms`` is how many blocks run at once (one a multiprocessor); registers are those of a thread.

    ``early_parts``, of four, of the query's latents are fetched before the length is known. Blocks without tiles fetch them
    as well, and all blocks at once take longer.
    """

    num_sms: int = 132
    copy_registers: int = 24
    compute_registers: int = 240
    early_parts: int = 1


def tree_mla_hopper(
    query: Query,
    cache_BSW: Float[Array, "B S W"],
    rows_BTW: Float[Array, "B T W"],
    length_B: Int32[Array, "B"],
    visible_BTt: Bool[Array, "B T T"],
    *,
    scale: float,
    tile_BtW: Float[Array, "B t W"] | None = None,
    config: Config = Config(),
    interpret: object = None,
) -> BFloat16[Array, "B T H C"]:
    """See `tree_mla.tree_mla`. Any number of nodes: prefill chunks are trees whose mask is causal.

    Raises:
      NotImplementedError: for shapes and types that the tiles do not fit; the offending value is named.
    """
    batch, num_nodes, heads, num_latent = query.latent_BTHC.shape
    part_BnsC, lse_Bnsc = attend_splits(
        query, cache_BSW, rows_BTW, length_B, visible_BTt, tile_BtW, scale=scale, config=config, interpret=interpret
    )
    out_BnC = split.combine(
        part_BnsC,
        lse_Bnsc,
        length_B,
        tree_tiles=pl.cdiv(num_nodes, _TILE),
        tile=_TILE,
        most=split.most_splits(batch, pl.cdiv(part_BnsC.shape[1], _TILE), config.num_sms),
        num_sms=config.num_sms,
        interpret=interpret,
    )
    return out_BnC[:, : num_nodes * heads].reshape(batch, num_nodes, heads, num_latent)


def attend_splits(
    query: Query,
    cache_BSW: Float[Array, "B S W"],
    rows_BTW: Float[Array, "B T W"],
    length_B: Int32[Array, "B"],
    visible_BTt: Bool[Array, "B T T"],
    tile_BtW: Float[Array, "B t W"] | None = None,
    *,
    scale: float,
    config: Config = Config(),
    interpret: object = None,
) -> tuple[BFloat16[Array, "B n s C"], Float[Array, "B n s c"]]:
    """What `tree_mla_split.combine` makes `tree_mla_hopper`'s result of: rows are nodes x heads, then some that are none.

    Raises:
      NotImplementedError: as `tree_mla_hopper`.
    """
    num_nodes, heads, num_latent = query.latent_BTHC.shape[1:]
    split.check(query, cache_BSW, 8)
    filler = ((0, 0), (0, -num_nodes * heads % 8), (0, 0))
    query_BnC, query_BnR = (
        jnp.pad(x.reshape(x.shape[0], num_nodes * heads, -1), filler) for x in (query.latent_BTHC, query.rotary_BTHR)
    )
    if tile_BtW is None:
        tile_BtW = fill_tiles(rows_BTW, num_latent, ROW_MULTIPLE)
    words_Bwn = split.pack_visible(visible_BTt, heads, _TILE, _TILE)
    arrays = query_BnC, query_BnR, query.cos_BTr, query.sin_BTr, cache_BSW, tile_BtW, length_B, words_Bwn
    return _attend_splits(*arrays, heads, scale, config, interpret)


def _swizzled(*shape: int):
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)


def _attend_splits(
    query_BnC: Array,
    query_BnR: Array,
    cos_BTr: Array,
    sin_BTr: Array,
    cache_BSW: Array,
    rows_BTW: Array,
    length_B: Array,
    words_Bwn: Array,
    heads: int,
    scale: float,
    config: Config,
    interpret: object,
) -> tuple[BFloat16[Array, "B n s C"], Float[Array, "B n s c"]]:
    """Each split's output, divided by its sum of weights, and the base-2 logarithm of that sum."""
    (batch, num_rows, num_latent), rotary = query_BnC.shape, query_BnR.shape[-1]
    half, num_nodes = num_latent // 2, cos_BTr.shape[1]
    part = half // _PARTS
    row_tiles, tree_tiles = pl.cdiv(num_rows, _TILE), pl.cdiv(rows_BTW.shape[1], _TILE)
    rows_a_tile = min(num_rows, _TILE)
    most = split.most_splits(batch, row_tiles, config.num_sms)
    splits = split.num_splits(most, cache_BSW.shape[1], tree_tiles, _TILE)
    factor = scale * math.log2(math.e)

    def columns(h, a):
        return pl.ds(h * half + a * part, part)

    def buffer(t, h, a):
        return 2 * _PARTS * t + _PARTS * h + a

    def body(
        query_g, query_rotary_g, cos_g, sin_g, cache_g, tree_g, length_g, words_g, out_g, lse_g,
        query_s, query_rotary_s, latent_s, rotary_s, top_s, sum_s, lse_s,
        query_bar, query_rotary_bar, turned_bar, latent_bar, latent_free, rotary_bar, rotary_free,
        scored_bar, weights_bar, done_bar,
    ):  # fmt: skip
        b, row_tile, s, warpgroup = (lax.axis_index(name) for name in ("batch", "row_tile", "split", "warpgroup"))
        at_rows, all_rows = pl.ds(row_tile * _TILE, rows_a_tile), pl.ds(row_tile * _TILE, _TILE)

        def fetch_query(h, a):
            into = query_s.at[h, a, pl.ds(0, rows_a_tile)]
            plgpu.copy_gmem_to_smem(query_g.at[b, at_rows, columns(h, a)], into, query_bar.at[_PARTS * h + a])

        def fetch_query_rotary():
            into = query_rotary_s.at[pl.ds(0, rows_a_tile)]
            plgpu.copy_gmem_to_smem(query_rotary_g.at[b, at_rows], into, query_rotary_bar)

        early = _ORDER[0][: config.early_parts]

        @pl.when(warpgroup == 2)
        def _():
            # Before the length has come.
            fetch_query_rotary()
            for h, a in early:
                fetch_query(h, a)

        length = length_g[b]
        prefix_tiles, total, each = split.tile_counts(length, tree_tiles, splits, _TILE)
        first = s * each
        count = jnp.clip(total - first, 0, each)
        pairs = lax.div(count + 1, jnp.int32(2))

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(config.copy_registers, action="decrease")

            @pl.when(count == 0)
            def _():
                # A block must not end while its query is on the way.
                plgpu.barrier_wait(query_rotary_bar)
                for h, a in early:
                    plgpu.barrier_wait(query_bar.at[_PARTS * h + a])

            def fetch(i, t, at_columns, into, ready, free):
                tile = first + 2 * i + t

                @pl.when(2 * i + t < count)
                def _():
                    pl.when(i > 0)(lambda: plgpu.barrier_wait(free))

                    @pl.when(tile < prefix_tiles)
                    def _():
                        source = cache_g.at[b, pl.ds(tile * _TILE, _TILE), at_columns]
                        plgpu.copy_gmem_to_smem(source, into, ready)

                    @pl.when(tile >= prefix_tiles)
                    def _():
                        source = tree_g.at[b, pl.ds((tile - prefix_tiles) * _TILE, _TILE), at_columns]
                        plgpu.copy_gmem_to_smem(source, into, ready)

            @pl.loop(0, pairs)
            def _(i):
                for t, order in enumerate(_ORDER):
                    for h, a in order:
                        if t == 0 and (h, a) not in early:
                            pl.when(i == 0)(functools.partial(fetch_query, h, a))
                        number = buffer(t, h, a)
                        fetch(i, t, columns(h, a), latent_s.at[t, h, a], latent_bar.at[number], latent_free.at[number])
                    fetch(i, t, pl.ds(num_latent, rotary), rotary_s.at[t], rotary_bar.at[t], rotary_free.at[t])

        def is_cut(tile):
            return (tile < prefix_tiles) & (length - tile * _TILE < _TILE)

        def load_words(tree_tile):
            at_words = (words_g.at[b, 2 * tree_tile + i, all_rows] for i in range(2))
            return [plgpu.load(ref, layout=ROW, optimized=False) for ref in at_words]

        def mask(x, tile, early_words):
            column = plgpu.broadcasted_iota(jnp.int32, (_TILE, _TILE), 1, layout=WGMMA)

            def tree(x):
                words = early_words or load_words(tile - prefix_tiles)
                word = jnp.where(column < split.WORD, *(spread(word, x.shape) for word in words))
                bit = lax.shift_right_logical(word, column & (split.WORD - 1)) & 1
                return jnp.where(bit != 0, x, -jnp.inf)

            def tail(x):
                return jnp.where(column < length - tile * _TILE, x, -jnp.inf)

            def cut(x):
                return lax.cond(tile >= prefix_tiles, tree, tail, x)

            return lax.cond((tile >= prefix_tiles) | is_cut(tile), cut, lambda x: x, x)

        def make_finite(tile, t, h):
            """Slots behind the length may hold anything, and a weight of zero times NaN would be NaN."""

            @pl.when(is_cut(tile))
            def _():
                @pl.loop(0, half // 64)
                def _(c):
                    a, offset = lax.div(c, jnp.int32(part // 64)), lax.rem(c, jnp.int32(part // 64)) * 64
                    ref = latent_s.at[t, h, a, :, pl.ds(offset, 64)]
                    value = plgpu.load(ref, layout=WGMMA)
                    is_finite = jnp.abs(value.astype(jnp.float32)) < jnp.inf
                    ref[...] = jnp.where(is_finite, value, jnp.bfloat16(0))

                plgpu.commit_smem()

        def score(i, t, which):
            """Scores of tile t of a pair; its parts are taken as they arrive."""

            def multiply(ref):
                for h, a in _ORDER[t]:
                    pl.when(i == 0)(functools.partial(plgpu.barrier_wait, query_bar.at[_PARTS * h + a]))
                    plgpu.barrier_wait(latent_bar.at[buffer(t, h, a)])
                    plgpu.wgmma(ref, query_s.at[which[h], a], latent_s.at[which[t], h, a].transpose((1, 0)))
                plgpu.barrier_wait(rotary_bar.at[t])
                if t == 0:
                    pl.when(i == 0)(lambda: plgpu.barrier_wait(turned_bar))
                plgpu.wgmma(ref, query_rotary_s, rotary_s.at[which[t]].transpose((1, 0)))
                # A little early, so that the tensor cores never wait for the peer's next products.
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(scored_bar.at[t])
                return ref[...]

            return pl.run_scoped(multiply, plgpu.ACC((_TILE, _TILE), jnp.float32))

        def weigh(x, top, t):
            """Weights of tile t by a reference that moves only if a maximum is far above it; both go to the peer as well."""
            highest = x.max(axis=1) * factor
            new_top = jnp.where(highest > top + _SLACK, highest, top)
            weights = jnp.exp2(x * factor - spread(new_top, x.shape))
            rounded = weights.astype(jnp.bfloat16)
            if interpret is None:
                store_weights(rotary_s.at[t], top_s.at[t], rounded, new_top)
            else:
                rotary_s[t] = rounded
                top_s[t] = new_top
            plgpu.commit_smem()
            plgpu.barrier_arrive(weights_bar.at[t])
            return rounded, new_top, weights.sum(axis=1)

        def receive(tile, t, h):
            """Waits for the peer's weights of tile t; returns their reference."""
            for a in range(_PARTS):
                plgpu.barrier_wait(latent_bar.at[buffer(t, h, a)])
            plgpu.barrier_wait(weights_bar.at[t])
            make_finite(tile, t, h)
            return plgpu.load(top_s.at[t], layout=ROW)

        def rescale(acc, total_weight, top, new_top, has_sums=True):
            def multiply(acc, total_weight):
                alpha = jnp.exp2(top - new_top)
                return [x * spread(alpha, x.shape) for x in acc], total_weight * alpha

            has_moved = any_in_warp(top != new_top) if interpret is None else jnp.any(top != new_top)
            return lax.cond(has_moved & has_sums, multiply, lambda *same: same, acc, total_weight)

        def add_values(acc, t, h, which, own_weights=None, meanwhile=lambda: [], results=()):
            """Adds the weighted values, the peer's unless own weights are given; a buffer is free once multiplied."""

            def add(multiply, wait):
                weights = rotary_s.at[which[t]] if own_weights is None else own_weights
                for a in range(_PARTS):
                    multiply(a, weights)
                results = meanwhile()
                for a in range(_PARTS):
                    wait(_PARTS - 1 - a)
                    plgpu.barrier_arrive(latent_free.at[buffer(t, h, a)])
                return results

            if interpret is not None:
                acc = list(acc)

                def multiply(a, weights):
                    acc[a] += jnp.dot(weights[...], latent_s[t, h, a], preferred_element_type=jnp.float32)

                return acc, add(multiply, lambda n: None)

            def run(refs):
                acc_refs, result_refs = refs

                def multiply(a, weights):
                    plgpu.wgmma(acc_refs[a], weights, latent_s.at[which[t], h, a])

                values = add(multiply, plgpu.wgmma_wait)
                for ref, value in zip(result_refs, values, strict=True):
                    ref[...] = value

            return pl.run_state(run)(([plgpu.ACC.init(x) for x in acc], list(results)))

        def add_pair_left(i, carry, early_words):
            acc, top, total_weight = carry
            tile, which = first + 2 * i, indices(i)
            x = mask(score(i, 0, which), tile, early_words)
            rounded, new_top, sums = weigh(x, top, 0)
            pl.when(2 * i + 1 < count)(lambda: plgpu.barrier_wait(scored_bar.at[1]))
            make_finite(tile, 0, 0)
            acc, total_weight = rescale(acc, total_weight, top, new_top, i > 0)
            acc, _ = add_values(acc, 0, 0, which, rounded)

            def add_peer(acc, top, total_weight):
                new_top = receive(tile + 1, 1, 0)
                acc, total_weight = rescale(acc, total_weight, top, new_top)
                acc, _ = add_values(acc, 1, 0, which)
                plgpu.barrier_arrive(rotary_free.at[1])
                return acc, new_top, total_weight

            carry = acc, new_top, total_weight + sums
            return lax.cond(2 * i + 1 < count, add_peer, lambda *same: same, *carry)

        def add_pair_right(i, carry, early_words):
            tile, which = first + 2 * i + 1, indices(i)
            # The tensor cores do one thing at a time, so that one warpgroup's softmax is over when the other's products are.
            plgpu.barrier_wait(scored_bar.at[0])

            def add_peer(acc, top, total_weight, *meanwhile):
                new_top = receive(tile - 1, 0, 1)
                acc, total_weight = rescale(acc, total_weight, top, new_top, i > 0)
                acc, results = add_values(acc, 0, 1, which, None, *meanwhile)
                plgpu.barrier_arrive(rotary_free.at[0])
                return acc, new_top, total_weight, results

            def add_both(acc, top, total_weight):
                x = mask(score(i, 1, which), tile, early_words)

                def weigh_own():
                    return weigh(x, plgpu.load(top_s.at[0], layout=ROW), 1)

                row = zeros((_TILE,), ROW)
                empty = [zeros((_TILE, _TILE), WGMMA).astype(jnp.bfloat16), row, row]
                acc, top, total_weight, results = add_peer(acc, top, total_weight, weigh_own, empty)
                rounded, new_top, sums = results
                make_finite(tile, 1, 1)
                acc, total_weight = rescale(acc, total_weight, top, new_top)
                acc, _ = add_values(acc, 1, 1, which, rounded)
                return acc, new_top, total_weight + sums

            def add_left(*carry):
                return add_peer(*carry)[:3]

            return lax.cond(2 * i + 1 < count, add_both, add_left, *carry)

        def indices(i):
            # Always 0 and 1, but ptxas must not know: it would compute all operand descriptors before the loop and spill
            # more than a hundred registers for them.
            zero = i & lax.shift_right_logical(length, jnp.int32(31))
            return zero, zero + 1

        def turn_query():
            """The right warpgroup, which is the later one to score, turns the rotary part for both."""
            if interpret is None:
                turn = load_on_gpu(cos_g, sin_g, heads, b, row_tile)
                plgpu.barrier_wait(query_rotary_bar)
                turn_on_gpu(query_rotary_s, turn)
            else:
                plgpu.barrier_wait(query_rotary_bar)
                query_rotary_s[...] = turn_pairs(query_rotary_s[...], *(turn_of_rows(x[b]) for x in (cos_g, sin_g)))
            plgpu.barrier_arrive(turned_bar)

        def turn_of_rows(turn_Tr):
            turn_nr = jnp.pad(jnp.repeat(turn_Tr, heads, axis=0), ((0, -num_nodes * heads % _TILE), (0, 0)))
            return lax.dynamic_slice_in_dim(turn_nr, row_tile * _TILE, _TILE)

        def compute(add_pair, h):
            plgpu.set_max_registers(config.compute_registers, action="increase")
            # Early, since they come from device memory. Prefill has too many to keep.
            early_words = load_words(0) if tree_tiles == 1 else None
            if h == 1:
                turn_query()
            row = zeros((_TILE,), ROW)
            carry = [zeros((_TILE, part), WGMMA) for _ in range(_PARTS)], row + LOWEST, row
            add_pair = functools.partial(add_pair, early_words=early_words)
            acc, top, total_weight = lax.fori_loop(0, pairs, add_pair, carry)

            sum_s[h] = total_weight
            plgpu.barrier_arrive(done_bar)
            plgpu.barrier_wait(done_bar)
            total_weight = jnp.maximum(total_weight + plgpu.load(sum_s.at[1 - h], layout=ROW), 1e-30)
            for a in range(_PARTS):
                query_s[h, a] = (acc[a] * spread(1.0 / total_weight, acc[a].shape)).astype(jnp.bfloat16)
            if h == 0:
                lse = jnp.maximum(top + jnp.log2(total_weight), LOWEST)
                lse_s[...] = spread(lse, lse_s.shape)
            plgpu.commit_smem()
            for a in range(_PARTS):
                filled = query_s.at[h, a, pl.ds(0, rows_a_tile)]
                plgpu.copy_smem_to_gmem(filled, out_g.at[b, at_rows, s, columns(h, a)])
            if h == 0:
                plgpu.copy_smem_to_gmem(lse_s.at[pl.ds(0, rows_a_tile)], lse_g.at[b, at_rows, s])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when((warpgroup == 0) & (count > 0))(lambda: compute(add_pair_left, 0))
        pl.when((warpgroup == 1) & (count > 0))(lambda: compute(add_pair_right, 1))

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, num_rows, splits, num_latent), jnp.bfloat16),
            jax.ShapeDtypeStruct((batch, num_rows, splits, _COPIES), jnp.float32),
        ),
        grid=(splits, row_tiles, batch),
        grid_names=("split", "row_tile", "batch"),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="tree_mla",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[
            _swizzled(2, _PARTS, _TILE, part),
            _swizzled(_TILE, rotary),
            _swizzled(2, 2, _PARTS, _TILE, part),
            _swizzled(2, _TILE, rotary),
            plgpu.SMEM((2, _TILE), jnp.float32),
            plgpu.SMEM((2, _TILE), jnp.float32),
            plgpu.SMEM((_TILE, _COPIES), jnp.float32),
            plgpu.Barrier(num_barriers=2 * _PARTS),
            *(plgpu.Barrier() for _ in range(2)),
            plgpu.Barrier(num_barriers=4 * _PARTS),
            plgpu.Barrier(num_barriers=4 * _PARTS),
            *(plgpu.Barrier(num_barriers=2) for _ in range(4)),
            plgpu.Barrier(num_arrivals=2),
        ],
        interpret=interpret,
    )
    return kernel(query_BnC, query_BnR, cos_BTr, sin_BTr, cache_BSW, rows_BTW, length_B, words_Bwn)
