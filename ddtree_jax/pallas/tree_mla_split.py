"""What both forms of tree MLA share: the query, how the slots are split among blocks, mask words, the sum of the splits.

Rows are pairs of a node and a head; n stands for their axis, s for that of the splits.

::

    tiles    0   1   2   3   4   5   6        prefix tiles 0 to 5, as many as the length needs; tile 6 is the tree
    split    0   0   1   1   2   2   3        4 splits of ceil(7 / 4) tiles; the last one has less, others may have none

Where the cache has fewer tiles than there may be splits, each tile has one. So how many slots a cache has besides those that
are committed changes neither the tiles of a split nor, since `split_sum` and `project_splits` have one order each to add
them in, a bit of the result.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Bool, Float, Int32

from ddtree_jax.pallas.latent_rows import check_turns, turn_pairs
from ddtree_jax.pallas.split_sum import Config as SumConfig
from ddtree_jax.pallas.split_sum import sum_splits, sum_splits_reference

LATENTS, ROTARY = (256, 512), 64
"""Widths that the tiles are made for."""

WORD = 32


class Query(NamedTuple):
    """Latent and rotary parts of the heads' queries, and what the rotary ones are still to be turned by.

    Cosines and sines are float32, one for each pair (2i, 2i + 1).
    """

    latent_BTHC: Float[Array, "B T H C"]
    rotary_BTHR: Float[Array, "B T H R"]
    cos_BTr: Float[Array, "B T r"]
    sin_BTr: Float[Array, "B T r"]

    def join(self) -> Float[Array, "B T H W"]:
        """Both parts side by side, the rotary one turned, and rounded as it was."""
        turn = (of_pair_BTr[:, :, None] for of_pair_BTr in (self.cos_BTr, self.sin_BTr))
        return jnp.concatenate([self.latent_BTHC, turn_pairs(self.rotary_BTHR, *turn)], axis=-1)


def check(query: Query, cache_BSW: Array, slot_multiple: int) -> None:
    """Refuses what a form's tiles do not fit.

    Raises:
      NotImplementedError: for types, widths and numbers of slots; the offending value is named.
      ValueError: there is not one cosine and one sine for each pair of each node.
    """
    types = query.latent_BTHC.dtype, query.rotary_BTHR.dtype, cache_BSW.dtype
    if set(types) != {jnp.dtype(jnp.bfloat16)}:
        raise NotImplementedError(f"query and cache are {', '.join(map(str, types))}; only bfloat16 is supported")
    num_latent, rotary = query.latent_BTHC.shape[-1], query.rotary_BTHR.shape[-1]
    if num_latent not in LATENTS:
        raise NotImplementedError(f"the latent part is {num_latent} wide; only {LATENTS} are supported")
    if rotary != ROTARY:
        raise NotImplementedError(f"the rotary part is {rotary} wide; only {ROTARY} is supported")
    check_turns(query.cos_BTr, query.sin_BTr, (*query.rotary_BTHR.shape[:2], rotary // 2))
    if cache_BSW.shape[1] % slot_multiple:
        raise NotImplementedError(
            f"the cache has {cache_BSW.shape[1]} slots; only multiples of {slot_multiple} are supported"
        )


def most_splits(batch: int, row_tiles: int, num_sms: int) -> int:
    """Blocks along the slots that fill the GPU."""
    return max(1, num_sms // (row_tiles * batch))


def num_splits(most: int, num_slots: int, tree_tiles: int, tile: int) -> int:
    """Blocks along the slots: at most one a tile."""
    return min(most, pl.cdiv(num_slots, tile) + tree_tiles)


def tile_counts(length: Array, tree_tiles: int, splits: int, tile: int) -> tuple[Array, Array, Array]:
    """Tiles of the committed prefix, all tiles, and tiles a split, for each length."""
    prefix = lax.div(length + (tile - 1), jnp.int32(tile))
    total = prefix + tree_tiles
    return prefix, total, lax.div(total + (splits - 1), jnp.int32(splits))


def pack_visible(visible_BTt: Bool[Array, "B T T"], heads: int, tile: int, row_tile: int) -> Int32[Array, "B w n"]:
    """Bit c % 32 of word c // 32 says whether the row sees row c of the call. Words and rows are filled up to whole tiles."""
    batch, num_nodes, _ = visible_BTt.shape
    wide = jnp.pad(visible_BTt, ((0, 0), (0, 0), (0, -num_nodes % max(tile, WORD))))
    bits = wide.reshape(batch, num_nodes, -1, WORD).astype(jnp.uint32)
    bits <<= lax.broadcasted_iota(jnp.uint32, bits.shape, 3)
    words_BTw = lax.bitcast_convert_type(jnp.sum(bits, axis=-1, dtype=jnp.uint32), jnp.int32)
    words_Bwn = jnp.repeat(words_BTw.transpose(0, 2, 1), heads, axis=2)
    return jnp.pad(words_Bwn, ((0, 0), (0, 0), (0, -words_Bwn.shape[2] % row_tile)))


def combine(
    part_BnsC: Float[Array, "B n s C"],
    lse_Bnsc: Float[Array, "B n s c"],
    length_B: Int32[Array, "B"],
    *,
    tree_tiles: int,
    tile: int,
    most: int,
    num_sms: int,
    interpret: object = None,
) -> BFloat16[Array, "B n C"]:
    """The sum over splits, see `split_sum.sum_splits`; ``most`` is that of `most_splits`."""

    def num_tiles(length: Array) -> Array:
        return tile_counts(length, tree_tiles, part_BnsC.shape[2], tile)[1]

    # The sum's own code is not Pallas, which alone is interpreted.
    if interpret is not None:
        return sum_splits_reference(part_BnsC, lse_Bnsc, length_B, num_tiles=num_tiles)
    config = SumConfig(num_sms=num_sms)
    return sum_splits(
        part_BnsC, lse_Bnsc, length_B, num_tiles=num_tiles, most=most, name="tree_mla_combine", config=config
    )
