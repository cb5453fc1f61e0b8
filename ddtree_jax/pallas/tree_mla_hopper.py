"""Tree MLA for Hopper: ``wgmma`` on tiles of 64 rows (nodes x heads) by 64 slots, fed by the copy engine.

A block takes 64 rows and its split of the tiles, two tiles at a time. Of a pair, warpgroup w scores tile w alone, and
owns half w of the latent columns of the output. Each warpgroup's weights pass to the other through shared memory, in
the place of the tile's rotary part, which is no longer needed by then.

::

    copies       | L0 R1 T0 T1 R0 L1 of the next pair, each as soon as its place is free
    warpgroup 0  | Q (L0 T0 R0)'   softmax 0   O_L += P0 L0   take P1   O_L += P1 L1
    warpgroup 1  | Q (R1 T1 L1)'   softmax 1   O_R += P1 R1   take P0   O_R += P0 R0      time ->

    L, R: left and right half of a tile's latents (each in two buffers); T: its rotary part; O_L, O_R: output

A tile is read once for all nodes and heads of a block: 73,728 bytes, its latents serving as keys and as values. With 16
nodes of 8 heads (two row tiles) 4,096 tokens are 4.7 MB, 1.0 us at 4.57 TB/s. Splits are added by `tree_mla_split.combine`.

What lies behind the length, or in a node that a row does not see, gets a weight of zero; since zero times NaN is NaN,
values that are not finite are overwritten with zeros in the tiles where there can be such. Scores are taken before, so
that a row which does see a NaN yields NaN.
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

_TILE = 64
_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)
_PARTS = 2  # Buffers of half a tile's latents.
_COPIES = 8  # Of a row's logarithm: a sector of 32 bytes.


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """``num_sms`` is how many blocks run at once (one a multiprocessor); registers are those of a thread."""

    num_sms: int = 132
    copy_registers: int = 24
    compute_registers: int = 240


def tree_mla_hopper(
    query_BTHW: Float[Array, "B T H W"],
    cache_BSW: Float[Array, "B S W"],
    rows_BTW: Float[Array, "B T W"],
    length_B: Int32[Array, "B"],
    visible_BTt: Bool[Array, "B T T"],
    *,
    num_latent: int,
    scale: float,
    config: Config = Config(),
    interpret: object = None,
) -> BFloat16[Array, "B T H C"]:
    """See `tree_mla.tree_mla`. Any number of nodes: prefill chunks are trees whose mask is causal.

    Raises:
      NotImplementedError: for shapes and types that the tiles do not fit; the offending value is named.
    """
    batch, num_nodes, heads, width = query_BTHW.shape
    split.check(query_BTHW, cache_BSW, num_latent, 8)
    query_BnW = query_BTHW.reshape(batch, num_nodes * heads, width)
    query_BnW = jnp.pad(query_BnW, ((0, 0), (0, -query_BnW.shape[1] % 8), (0, 0)))
    rows_BTW = jnp.pad(rows_BTW, ((0, 0), (0, -num_nodes % 8), (0, 0)))
    words_Bwn = split.pack_visible(visible_BTt, heads, _TILE, _TILE)
    part_BnsC, lse_Bnsc = _attend_splits(
        query_BnW, cache_BSW, rows_BTW, length_B, words_Bwn, num_latent, scale, config, interpret
    )
    tree_tiles = pl.cdiv(num_nodes, _TILE)
    out_BnC = split.combine(part_BnsC, lse_Bnsc, length_B, tree_tiles=tree_tiles, tile=_TILE, interpret=interpret)
    return out_BnC[:, : num_nodes * heads].reshape(batch, num_nodes, heads, num_latent)


def _swizzled(*shape: int):
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def _spread(row, shape):
    return lax.broadcast_in_dim(row, shape, [0])


def _attend_splits(
    query_BnW: Array,
    cache_BSW: Array,
    rows_BTW: Array,
    length_B: Array,
    words_Bwn: Array,
    num_latent: int,
    scale: float,
    config: Config,
    interpret: object,
) -> tuple[BFloat16[Array, "B n s C"], Float[Array, "B n s c"]]:
    """Each split's output, divided by its sum of weights, and the base-2 logarithm of that sum."""
    batch, num_rows, width = query_BnW.shape
    num_nodes = rows_BTW.shape[1]
    half, rotary = num_latent // 2, width - num_latent
    part = half // _PARTS
    row_tiles, tree_tiles = pl.cdiv(num_rows, _TILE), pl.cdiv(num_nodes, _TILE)
    rows_a_tile, nodes_a_tile = min(num_rows, _TILE), min(num_nodes, _TILE)
    splits = split.num_splits(batch, row_tiles, cache_BSW.shape[1], _TILE, config.num_sms)
    factor = scale * math.log2(math.e)

    def columns(h, a):
        return pl.ds(h * half + a * part, part)

    def body(
        query_g, cache_g, tree_g, length_g, words_g, out_g, lse_g,
        query_s, query_rotary_s, latent_s, rotary_s, top_s, sum_s, lse_s,
        query_bar, latent_bar, latent_free, rotary_bar, rotary_free, scored_bar, weights_bar, done_bar,
    ):  # fmt: skip
        b, row_tile, s, warpgroup = (lax.axis_index(name) for name in ("batch", "row_tile", "split", "warpgroup"))
        at_rows, all_rows = pl.ds(row_tile * _TILE, rows_a_tile), pl.ds(row_tile * _TILE, _TILE)
        length = length_g[b]
        prefix_tiles, total, each = split.tile_counts(length, tree_tiles, splits, _TILE)
        first = s * each
        count = jnp.clip(total - first, 0, each)
        pairs = lax.div(count + 1, jnp.int32(2))

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(config.copy_registers, action="decrease")
            filled = pl.ds(0, rows_a_tile)
            for h in range(2):
                for a in range(_PARTS):
                    plgpu.copy_gmem_to_smem(query_g.at[b, at_rows, columns(h, a)], query_s.at[h, a, filled], query_bar)
            plgpu.copy_gmem_to_smem(
                query_g.at[b, at_rows, pl.ds(num_latent, rotary)], query_rotary_s.at[filled], query_bar
            )
            # A block without tiles must not end while its query is on the way.
            pl.when(count == 0)(lambda: plgpu.barrier_wait(query_bar))

            def fetch(i, t, at_columns, into, ready, free):
                tile = first + 2 * i + t

                @pl.when(2 * i + t < count)
                def _():
                    pl.when(i > 0)(lambda: plgpu.barrier_wait(free))

                    @pl.when(tile < prefix_tiles)
                    def _():
                        plgpu.copy_gmem_to_smem(cache_g.at[b, pl.ds(tile * _TILE, _TILE), at_columns], into, ready)

                    @pl.when(tile >= prefix_tiles)
                    def _():
                        start = (tile - prefix_tiles) * _TILE
                        plgpu.copy_gmem_to_smem(
                            tree_g.at[b, pl.ds(start, nodes_a_tile), at_columns],
                            into.at[pl.ds(0, nodes_a_tile)],
                            ready,
                        )

            @pl.loop(0, pairs)
            def _(i):
                # In the order in which the last pair's buffers become free.
                def fetch_latent(t, h, a):
                    number = 2 * _PARTS * t + _PARTS * h + a
                    fetch(i, t, columns(h, a), latent_s.at[t, h, a], latent_bar.at[number], latent_free.at[number])

                for a in range(_PARTS):
                    for t in range(2):
                        fetch_latent(t, t, a)
                for t in range(2):
                    fetch(i, t, pl.ds(num_latent, rotary), rotary_s.at[t], rotary_bar.at[t], rotary_free.at[t])
                for a in range(_PARTS):
                    for t in range(2):
                        fetch_latent(t, 1 - t, a)

        @pl.when((warpgroup < 2) & (count > 0))
        def _():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            column = plgpu.broadcasted_iota(jnp.int32, (_TILE, _TILE), 1, layout=_WGMMA)

            def load_words(tree_tile):
                at_words = (words_g.at[b, 2 * tree_tile + w, all_rows] for w in range(2))
                return [plgpu.load(ref, layout=_ROW, optimized=False) for ref in at_words]

            # Early, since they come from device memory. Prefill has too many to keep.
            early_words = load_words(0) if tree_tiles == 1 else None
            plgpu.barrier_wait(query_bar)

            def is_ragged(tile):
                return (tile >= prefix_tiles) | (length - tile * _TILE < _TILE)

            def mask(x, tile):
                def tree(x):
                    words = early_words or load_words(tile - prefix_tiles)
                    word = jnp.where(column < split.WORD, *(_spread(w, x.shape) for w in words))
                    bit = lax.shift_right_logical(word, column & (split.WORD - 1)) & 1
                    return jnp.where(bit != 0, x, -jnp.inf)

                def tail(x):
                    return jnp.where(column < length - tile * _TILE, x, -jnp.inf)

                def ragged(x):
                    return lax.cond(tile >= prefix_tiles, tree, tail, x)

                return lax.cond(is_ragged(tile), ragged, lambda x: x, x)

            def make_finite(tile, t, h):
                @pl.when(is_ragged(tile))
                def _():
                    @pl.loop(0, half // 64)
                    def _(c):
                        a, offset = lax.div(c, jnp.int32(part // 64)), lax.rem(c, jnp.int32(part // 64)) * 64
                        ref = latent_s.at[t, h, a, :, pl.ds(offset, 64)]
                        value = plgpu.load(ref, layout=_WGMMA)
                        is_finite = jnp.abs(value.astype(jnp.float32)) < jnp.inf
                        ref[...] = jnp.where(is_finite, value, jnp.bfloat16(0))

                    plgpu.commit_smem()

            def add_values(acc, alpha, weights, t, h):
                """Adds the weighted values; a buffer is free as soon as it has been multiplied."""
                acc = [x * _spread(alpha, x.shape) for x in acc]
                free = [latent_free.at[2 * _PARTS * t + _PARTS * h + a] for a in range(_PARTS)]
                if interpret is not None:
                    for a, bar in enumerate(free):
                        acc[a] += jnp.dot(weights, latent_s[t, h, a], preferred_element_type=jnp.float32)
                        plgpu.barrier_arrive(bar)
                    return acc

                def multiply(refs):
                    for a, ref in enumerate(refs):
                        plgpu.wgmma(ref, weights, latent_s.at[t, h, a])
                    for a, bar in enumerate(free):
                        plgpu.wgmma_wait(_PARTS - 1 - a)
                        plgpu.barrier_arrive(bar)

                return pl.run_state(multiply)([plgpu.ACC.init(x) for x in acc])

            def add_own(carry, tile, own, peer):
                acc, top, total_weight = carry

                def score(ref):
                    def score_half(h):
                        for a in range(_PARTS):
                            plgpu.barrier_wait(latent_bar.at[2 * _PARTS * own + _PARTS * h + a])
                            plgpu.wgmma(ref, query_s.at[h, a], latent_s.at[own, h, a].transpose((1, 0)))

                    score_half(own)
                    plgpu.barrier_wait(rotary_bar.at[own])
                    plgpu.wgmma(ref, query_rotary_s, rotary_s.at[own].transpose((1, 0)))
                    score_half(peer)
                    return ref[...]

                x = pl.run_scoped(score, plgpu.ACC((_TILE, _TILE), jnp.float32))
                plgpu.barrier_arrive(scored_bar.at[own])
                x = mask(x, tile)
                new_top = jnp.maximum(top, x.max(axis=1) * factor)
                weights = jnp.exp2(x * factor - _spread(new_top, x.shape))
                rounded = weights.astype(jnp.bfloat16)
                rotary_s[own] = rounded
                top_s[own] = new_top
                plgpu.commit_smem()
                plgpu.barrier_arrive(weights_bar.at[own])
                make_finite(tile, own, own)
                alpha = jnp.exp2(top - new_top)
                total_weight = total_weight * alpha + weights.sum(axis=1)
                return add_values(acc, alpha, rounded, own, own), new_top, total_weight

            def add_peer(carry, tile, own, peer):
                acc, top, total_weight = carry
                for a in range(_PARTS):
                    plgpu.barrier_wait(latent_bar.at[2 * _PARTS * peer + _PARTS * own + a])
                plgpu.barrier_wait(scored_bar.at[peer])
                make_finite(tile, peer, own)
                plgpu.barrier_wait(weights_bar.at[peer])
                weights = plgpu.load(rotary_s.at[peer], layout=_WGMMA)
                peer_top = plgpu.load(top_s.at[peer], layout=_ROW)
                plgpu.barrier_arrive(rotary_free.at[peer])
                new_top = jnp.maximum(top, peer_top)
                alpha = jnp.exp2(top - new_top)
                rescaled = weights.astype(jnp.float32) * _spread(jnp.exp2(peer_top - new_top), weights.shape)
                acc = add_values(acc, alpha, rescaled.astype(jnp.bfloat16), peer, own)
                return acc, new_top, total_weight * alpha

            def add_pair(i, carry):
                # Always the warpgroup's number, but ptxas must not know: it would compute all operand descriptors
                # before the loop and spill more than a hundred registers for them.
                own = warpgroup ^ (i & lax.shift_right_logical(length, jnp.int32(31)))
                peer = 1 - own
                for add, t in ((add_own, own), (add_peer, peer)):
                    step = functools.partial(add, tile=first + 2 * i + t, own=own, peer=peer)
                    carry = lax.cond(2 * i + t < count, step, lambda carry: carry, carry)
                return carry

            zeros = plgpu.layout_cast(jnp.zeros((_TILE,), jnp.float32), _ROW)
            acc = [plgpu.layout_cast(jnp.zeros((_TILE, part), jnp.float32), _WGMMA) for _ in range(_PARTS)]
            acc, top, total_weight = lax.fori_loop(0, pairs, add_pair, (acc, zeros + split.LOWEST, zeros))

            sum_s[warpgroup] = total_weight
            plgpu.barrier_arrive(done_bar)
            plgpu.barrier_wait(done_bar)
            total_weight = jnp.maximum(total_weight + plgpu.load(sum_s.at[1 - warpgroup], layout=_ROW), 1e-30)
            for a in range(_PARTS):
                query_s[warpgroup, a] = (acc[a] * _spread(1.0 / total_weight, acc[a].shape)).astype(jnp.bfloat16)

            @pl.when(warpgroup == 0)
            def _():
                lse = jnp.maximum(top + jnp.log2(total_weight), split.LOWEST)
                lse_s[...] = _spread(lse, lse_s.shape)

            plgpu.commit_smem()
            for a in range(_PARTS):
                plgpu.copy_smem_to_gmem(
                    query_s.at[warpgroup, a, pl.ds(0, rows_a_tile)], out_g.at[b, at_rows, s, columns(warpgroup, a)]
                )

            @pl.when(warpgroup == 0)
            def _():
                plgpu.copy_smem_to_gmem(lse_s.at[pl.ds(0, rows_a_tile)], lse_g.at[b, at_rows, s])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

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
            plgpu.Barrier(num_arrivals=2 * _PARTS + 1),
            plgpu.Barrier(num_barriers=4 * _PARTS),
            plgpu.Barrier(num_barriers=4 * _PARTS),
            *(plgpu.Barrier(num_barriers=2) for _ in range(4)),
            plgpu.Barrier(num_arrivals=2),
        ],
        interpret=interpret,
    )
    return kernel(query_BnW, cache_BSW, rows_BTW, length_B, words_Bwn)
