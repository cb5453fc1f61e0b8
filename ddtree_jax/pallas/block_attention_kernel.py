"""Kernel of `block_attention`.

Queries and the block's keys come as they were projected: each multiprocessor norms and turns the queries of its rows while
its first slots are on their way, and who has the block's own tile does so with its keys. ::

    copies   | tile 0  tile 1     | tile 2 | tile 3 |        each into the buffer that has just been left
    compute  | queries   | tile 0 | tile 1 | tile 2          time ->

Rows are pairs of a block's row and a head, 64 a multiprocessor; n stands for their axis, b for pairs (B, J). Slots are split
among multiprocessors, and `split_sum` adds the splits up: two launches. Bytes: 512 a slot and head, 1 MB of a
window of 2,048, 0.2 us; what takes time is one access to memory behind another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.block_attention_split import Splits
from ddtree_jax.pallas.latent_rows import check_turns
from ddtree_jax.pallas.split_sum import LOWEST, sum_splits, sum_splits_reference
from ddtree_jax.pallas.split_sum import Config as SumConfig

SLOT_MULTIPLE = 64
"""Slots of the cache must be a multiple of so many."""

WIDTH = 128
"""Of a head."""

_ROWS, _COPIES = 64, 32  # Copies of a row's logarithm.
_HALF = WIDTH // 2
_CORE = 8  # Rows that swizzled shared memory is made of.
_BF16 = jnp.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """``tile`` slots at a time, 32 or 64; ``num_sms`` blocks run at once."""

    tile: int = 32
    num_buffers: int = 3
    num_sms: int = 132


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """What is static: of the arrays, and of what is seen."""

    num_tokens: int
    group: int
    num_rows: int
    heads: int
    eps: float
    window: int | None
    is_causal: bool
    splits: Splits


def block_attention_gpu(
    query_BTJQR: Float[Array, "B T J Q R"],
    key_BTJR: Float[Array, "B T J R"],
    value_BTJR: Float[Array, "B T J R"],
    query_gain_R: Float[Array, "R"],
    key_gain_R: Float[Array, "R"],
    cos_BTr: Float[Array, "B T r"],
    sin_BTr: Float[Array, "B T r"],
    keys_BSJR: Float[Array, "B S J R"],
    values_BSJR: Float[Array, "B S J R"],
    length_B: Int32[Array, "B"],
    *,
    eps: float,
    window: int | None,
    is_causal: bool,
    config: Config | None = None,
    interpret: object = None,
) -> Float[Array, "B T J Q R"]:
    """See `block_attention.block_attention`; what slots hold that no row sees, never matters.

    Raises:
      NotImplementedError: for shapes, types and devices that the tiles do not fit; the offending value is named.
      ValueError: there is not one cosine and one sine for each pair of each row.
    """
    batch, num_tokens, heads, group, width = query_BTJQR.shape
    config = config or _config()
    _check((query_BTJQR, key_BTJR, value_BTJR, query_gain_R, key_gain_R, keys_BSJR, values_BSJR), config.tile)
    check_turns(cos_BTr, sin_BTr, (batch, num_tokens, width // 2))
    num_rows, num_slots = pl.cdiv(num_tokens * group, _ROWS) * _ROWS, keys_BSJR.shape[1]
    most = max(1, config.num_sms // (num_rows // _ROWS * heads * batch))
    num_splits = min(most, Splits.most(num_slots, window, config.tile))
    shape = _Shape(
        num_tokens=num_tokens,
        group=group,
        num_rows=num_rows,
        heads=heads,
        eps=eps,
        window=window,
        is_causal=is_causal,
        splits=Splits(num_slots=num_slots, window=window, tile=config.tile, num_splits=num_splits),
    )
    query_BJnR = jnp.moveaxis(query_BTJQR, 2, 1).reshape(batch, heads, num_tokens * group, width)
    key_BJtR, value_BJtR = (
        _pad_rows(jnp.moveaxis(x, 2, 1), num_tokens + -num_tokens % _CORE) for x in (key_BTJR, value_BTJR)
    )
    part_bnsR, lse_bnsc = _attend_splits(
        (_pad_rows(query_BJnR, shape.num_rows), key_BJtR, value_BJtR),
        (query_gain_R, key_gain_R),
        _turns_of_rows(jnp.concatenate([cos_BTr, sin_BTr], axis=-1), shape, config.tile),
        [x.reshape(*x.shape[:2], heads * width) for x in (keys_BSJR, values_BSJR)],
        length_B,
        shape,
        config,
        interpret,
    )
    out_BnR = _add_up(part_bnsR, lse_bnsc, length_B, shape, most, config, interpret)
    out_BJnR = out_BnR.reshape(batch, heads, num_rows, width)[:, :, : num_tokens * group]
    return jnp.moveaxis(out_BJnR.reshape(batch, heads, num_tokens, group, width), 1, 2)


def _add_up(
    part_bnsR: Array,
    lse_bnsc: Array,
    length_B: Array,
    shape: _Shape,
    most: int,
    config: Config,
    interpret: object,
) -> Float[Array, "B n R"]:
    """Sum over the splits, of which there are ``most`` if the cache is long; all heads' rows one after the other."""

    def num_tiles(length: Array) -> Array:
        return shape.splits.tiles(length, jnp.maximum)[1] + 1

    part_BnsR, lse_Bnsc = (x.reshape(length_B.shape[0], -1, *x.shape[2:]) for x in (part_bnsR, lse_bnsc))
    # The sum's own code is not Pallas, which alone is interpreted.
    if interpret is not None:
        return sum_splits_reference(part_BnsR, lse_Bnsc, length_B, num_tiles=num_tiles)
    return sum_splits(
        part_BnsR,
        lse_Bnsc,
        length_B,
        num_tiles=num_tiles,
        most=most,
        name="block_attention_sum",
        config=SumConfig(num_sms=config.num_sms),
    )


def _config() -> Config:
    """For the device at hand."""
    simt.check_device()
    device = jax.config.jax_default_device or jax.devices()[0]
    capability = getattr(device, "compute_capability", "9.0")
    if int(capability.split(".")[0]) < 9:
        raise NotImplementedError(f"compute capability {capability}; at least 9.0 is needed")
    return Config(num_sms=getattr(device, "core_count", Config().num_sms))


def _check(arrays: Sequence[Array], tile: int) -> None:
    query_BTJQR, *_, keys_BSJR, _ = arrays
    types = {array.dtype.name for array in arrays}
    if types != {"bfloat16"}:
        raise NotImplementedError(f"types are {', '.join(sorted(types))}; bfloat16 is needed")
    if query_BTJQR.shape[-1] != WIDTH:
        raise NotImplementedError(f"heads are {query_BTJQR.shape[-1]} wide; {WIDTH} is needed")
    if query_BTJQR.shape[1] > tile:
        raise NotImplementedError(f"the block has {query_BTJQR.shape[1]} rows; at most {tile} fit")
    if keys_BSJR.shape[1] % SLOT_MULTIPLE:
        raise NotImplementedError(f"the cache has {keys_BSJR.shape[1]} slots; a multiple of {SLOT_MULTIPLE} is needed")


def _pad_rows(x: Float[Array, "B J n R"], num_rows: int) -> Float[Array, "B J m R"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, num_rows - x.shape[2]), (0, 0)))


def _turns_of_rows(turn_BTR: Float[Array, "B T R"], shape: _Shape, tile: int) -> Float[Array, "B m R"]:
    """Those of the queries' rows, then those of the keys', filled up to whole tiles: made once for all layers."""
    of_queries, of_keys = jnp.repeat(turn_BTR, shape.group, axis=1), turn_BTR
    parts = zip((of_queries, of_keys), (shape.num_rows, tile), strict=True)
    return jnp.concatenate([jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0))) for x, size in parts], axis=1)


def _attend_splits(
    rows: Sequence[Array],
    gains: Sequence[Array],
    turn_BmR: Array,
    cache: Sequence[Array],
    length_B: Array,
    shape: _Shape,
    config: Config,
    interpret: object,
) -> tuple[Float[Array, "b n s R"], Float[Array, "b n s c"]]:
    """Each split's output, divided by its sum of weights, and the base-2 logarithm of that sum."""
    blocks, tile = length_B.shape[0] * shape.heads, config.tile
    num_splits, row_tiles = shape.splits.num_splits, shape.num_rows // _ROWS
    factor = WIDTH**-0.5 * math.log2(math.e)
    lhs, rhs, acc_layout = (
        kind(_BF16, m_warps=_ROWS // 16) for kind in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    row_layout, of_tile = acc_layout.reduce(1), plgpu.Layout.MMA_LHS(_BF16, m_warps=tile // 16)
    halves = [pl.ds(start, _HALF) for start in (0, _HALF)]

    def multiply_add(acc, a, b):
        if interpret is not None:
            return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
        return plgpu.mma(acc, a, b)

    def spread(x, like, axis=0):
        return lax.broadcast_in_dim(x, like.shape, [axis])

    def norm_and_turn(parts, layout, gain_g, turn_g):
        """Of rows in two halves; the cosines and sines are those of the same rows. Rounded once, at the end."""
        parts = [part.astype(jnp.float32) for part in parts]
        squares = (parts[0] * parts[0] + parts[1] * parts[1]).sum(axis=1)
        scale = spread(lax.rsqrt(squares * (1 / WIDTH) + shape.eps), parts[0])

        def apply_gain(part, columns):
            gain = plgpu.load(gain_g.at[columns], layout=layout.reduce(0), optimized=False)
            return part * scale * spread(gain.astype(jnp.float32), part, 1)

        first, second = (apply_gain(part, columns) for part, columns in zip(parts, halves, strict=True))
        cos, sin = (plgpu.load(turn_g.at[:, columns], layout=layout, optimized=False) for columns in halves)
        return (first * cos - second * sin).astype(_BF16), (second * cos + first * sin).astype(_BF16)

    def body(query_g, key_g, value_g, query_gain_g, key_gain_g, turn_g, keys_g, values_g, length_g, *rest):
        out_g, lse_g, keys_s, values_s, weights_s, ready = rest
        s, row_tile, block = (lax.axis_index(name) for name in ("split", "row_tile", "block"))
        b, j = lax.div(block, jnp.int32(shape.heads)), lax.rem(block, jnp.int32(shape.heads))
        first_row, at_rows = row_tile * _ROWS, pl.ds(row_tile * _ROWS, _ROWS)
        length = length_g[b]
        first_tile, num_prefix = shape.splits.tiles(length, jnp.maximum)
        total = num_prefix + 1
        each = lax.div(total + (num_splits - 1), jnp.int32(num_splits))
        first = s * each
        count = jnp.clip(total - first, 0, each)

        def buffer_of(i):
            return lax.rem(i, jnp.int32(config.num_buffers))

        def fetch(i):
            buffer = buffer_of(i)

            def from_prefix():
                slots, columns = pl.ds((first_tile + first + i) * tile, tile), pl.ds(j * WIDTH, WIDTH)
                for source_g, into_s in ((keys_g, keys_s), (values_g, values_s)):
                    plgpu.copy_gmem_to_smem(source_g.at[b, slots, columns], into_s.at[buffer], ready.at[buffer])

            def from_block():
                for source_g, into_s in ((key_g, keys_s), (value_g, values_s)):
                    into = into_s.at[buffer, pl.ds(0, source_g.shape[2])]
                    plgpu.copy_gmem_to_smem(source_g.at[b, j], into, ready.at[buffer])

            pl.when(first + i < num_prefix)(from_prefix)
            pl.when(first + i >= num_prefix)(from_block)

        def finish_keys(buffer):
            parts = [plgpu.load(keys_s.at[buffer, :, columns], layout=of_tile) for columns in halves]
            parts = norm_and_turn(parts, of_tile, key_gain_g, turn_g.at[b, pl.ds(shape.num_rows, tile)])
            for columns, part in zip(halves, parts, strict=True):
                keys_s[buffer, :, columns] = part

        def clear_values(buffer, low, high):
            """Zeroes those that nobody sees, since a weight of zero times NaN would still be NaN."""
            for columns in halves:
                value = plgpu.load(values_s.at[buffer, :, columns], layout=of_tile)
                row = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=of_tile)
                values_s[buffer, :, columns] = jnp.where((row >= low) & (row < high), value, _BF16(0))
            plgpu.commit_smem()

        def score(queries, buffer):
            x = plgpu.layout_cast(jnp.zeros((_ROWS, tile), jnp.float32), acc_layout)
            for query, columns in zip(queries, halves, strict=True):
                key = plgpu.load(keys_s.at[buffer, :, columns].transpose((1, 0)), layout=rhs)
                x = multiply_add(x, query, key)
            return x

        def mask(x, start, is_block):
            """``start`` is the first column's position from the length on. Row n is the block's n // group."""
            column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=acc_layout)
            row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=acc_layout) + first_row
            position = column + start
            # Those of the prefix lie before the length, those of the block from it on.
            is_seen = position < lax.select(is_block, jnp.int32(shape.num_tokens), jnp.int32(0))
            if shape.window is not None:
                is_seen &= row < (position + shape.window) * shape.group
                is_seen &= row >= (position - (shape.window - 1)) * shape.group
            if shape.is_causal:
                is_seen &= row >= position * shape.group
            return jnp.where(is_seen, x, -jnp.inf)

        def add_tile(i, carry, queries):
            accs, top, total_weight = carry
            buffer, is_block = buffer_of(i), first + i >= num_prefix
            slot = (first_tile + first + i) * tile
            start = lax.select(is_block, jnp.int32(0), slot - length)
            low = jnp.int32(0) if shape.window is None else shape.splits.lowest_slot(length, jnp.maximum) - slot
            low = lax.select(is_block, jnp.int32(0), low)
            high = lax.select(is_block, jnp.int32(shape.num_tokens), length - slot)
            plgpu.barrier_wait(ready.at[buffer])
            pl.when(is_block)(lambda: finish_keys(buffer))
            pl.when((low > 0) | (high < tile))(lambda: clear_values(buffer, low, high))
            is_whole = ~is_block & (high >= tile)
            if shape.window is not None:
                # Seen by the last row as well.
                is_whole &= start > shape.num_tokens - 1 - shape.window
            x = score(queries, buffer)
            x = lax.cond(is_whole, lambda x: x, lambda x: mask(x, start, is_block), x)
            new_top = jnp.maximum(top, x.max(axis=1) * factor)
            alpha = jnp.exp2(top - new_top)
            weights = jnp.exp2(x * factor - spread(new_top, x))
            total_weight = total_weight * alpha + weights.sum(axis=1)
            weights_s[...] = weights.astype(_BF16)
            weights = plgpu.load(weights_s, layout=lhs)

            def add_values(acc, columns):
                value = plgpu.load(values_s.at[buffer, :, columns], layout=rhs)
                return multiply_add(acc * spread(alpha, acc), weights, value)

            accs = tuple(add_values(*pair) for pair in zip(accs, halves, strict=True))
            plgpu.commit_smem()
            pl.when(i + config.num_buffers < count)(lambda: fetch(i + config.num_buffers))
            return accs, new_top, total_weight

        @pl.when(count > 0)
        def _():
            for i in range(config.num_buffers):
                pl.when(i < count)(lambda i=i: fetch(jnp.int32(i)))
            parts = [plgpu.load(query_g.at[b, j, at_rows, columns], layout=lhs, optimized=False) for columns in halves]
            queries = norm_and_turn(parts, lhs, query_gain_g, turn_g.at[b, at_rows])
            zeros = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), row_layout)
            acc = plgpu.layout_cast(jnp.zeros((_ROWS, _HALF), jnp.float32), acc_layout)
            carry = (acc, acc), zeros + LOWEST, zeros
            accs, top, total_weight = lax.fori_loop(0, count, lambda i, carry: add_tile(i, carry, queries), carry)
            total_weight = jnp.maximum(total_weight, 1e-30)
            for acc, columns in zip(accs, halves, strict=True):
                out_g[block, at_rows, s, columns] = acc * spread(1.0 / total_weight, acc)
            lse = jnp.maximum(top + jnp.log2(total_weight), LOWEST)
            copies = lax.broadcast_in_dim(lse, (_ROWS, _COPIES), [0])
            lse_g[block, at_rows, s] = plgpu.layout_cast(copies, acc_layout)

    def buffers(*shape):
        return plgpu.SMEM(shape, _BF16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))

    def partial(width):
        return jax.ShapeDtypeStruct((blocks, shape.num_rows, num_splits, width), jnp.float32)

    kernel = plgpu.kernel(
        body,
        out_type=(partial(WIDTH), partial(_COPIES)),
        grid=(num_splits, row_tiles, blocks),
        grid_names=("split", "row_tile", "block"),
        kernel_name="block_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[
            buffers(config.num_buffers, tile, WIDTH),
            buffers(config.num_buffers, tile, WIDTH),
            plgpu.SMEM((_ROWS, tile), _BF16),
            plgpu.Barrier(num_arrivals=2, num_barriers=config.num_buffers),
        ],
        interpret=interpret,
    )
    return kernel(*rows, *gains, turn_BmR, *cache, length_B)
