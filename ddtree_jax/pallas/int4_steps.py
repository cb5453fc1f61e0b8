"""A step of the INT4 kernel: 512 rows by 128 columns of one expert, and up to 8 tokens.

::

    int4_fetch    blocks and tokens ──► stage of the ring
    a warp        64 rows of it: words ──► bfloat16 weights ──► mma with the tokens ──► float32 sums
    a tile's end  sums ──► hidden rows, or partial sums of a tile that blocks share
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.int4_blocks import BLOCK_COLUMNS, BLOCK_ROWS, BLOCK_WORDS, WEIGHT_WORDS
from ddtree_jax.pallas.int4_unpack import expand_pair, widen_scales

TOKENS = 8
ACCUMULATOR = plgpu.Layout.MMA_ACC(jnp.bfloat16)
_GROUPS = BLOCK_COLUMNS // 32


def stage_bytes(tile_blocks: int, step_blocks: int) -> int:
    """Of a ring's stage: a step's blocks, then up to 8 tokens."""
    return tile_blocks * step_blocks * BLOCK_WORDS * 4 + TOKENS * token_stride(step_blocks * BLOCK_COLUMNS)


def token_stride(num_columns: int) -> int:
    """Bytes from token to token in shared memory: off by half of the banks, so that two tokens are read at once."""
    return 2 * num_columns + 64


def _mma(a: Sequence[ir.Value], b: Sequence[ir.Value], c: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
    """16 x 8 x 16: ``a b + c`` of one warp."""
    return mgpu.utils.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        *a,
        *b,
        *c,
        result_types=[w.f32()] * 4,
        convergent=True,
    )


def multiply_step(
    ring: Any,
    tokens: Any,
    sums: jax.Array,
    *scalars: jax.Array,
    step_blocks: int,
    warpgroup_blocks: int,
    tile_blocks: int,
    group: int,
    stride: int,
    term_bytes: Sequence[int],
) -> jax.Array:
    """Adds a step's product with the tokens to the warpgroup's sums [64 * warpgroup_blocks, 8].

    Scalars: stage, warpgroup, where the first token's columns begin in ``tokens``, in bytes, and how many tokens there
    are. ``stride`` bytes from a token to the next; its terms, to be added, ``term_bytes`` behind its beginning. Places
    without a token repeat the first.

    The weights are those that `quant.dequantize` defines, bit for bit, times 2^-32 (see `int4_unpack`). Scaling a
    group's sum in float32 instead takes fewer instructions, gained 2 % at 64 tokens, and computes other weights.
    """

    @w.inline(2, 4, (ACCUMULATOR,), plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=ACCUMULATOR))
    def call(ring, tokens, stage, warpgroup, start, count, sums) -> mgpu.FragmentedArray:
        r, t = w.lane()
        lane = arith.andi(w.thread(), w.i32(31))
        block = BLOCK_WORDS * 4
        # Warpgroups that share a group of blocks, or have whole groups.
        sharing = w.i32(max(1, group // warpgroup_blocks))
        in_group = w.scaled(arith.remui(warpgroup, sharing), warpgroup_blocks)
        groups = w.scaled(arith.divui(warpgroup, sharing), max(group, warpgroup_blocks) * step_blocks)
        stage_at = w.scaled(stage, stage_bytes(tile_blocks, step_blocks))
        place = w.at(w.pointer(ring), w.add(stage_at, w.scaled(w.add(in_group, groups), block)), w.SHARED)
        words_at = w.at(place, w.add(w.scaled(w.warp(), 512), w.scaled(lane, 16)), w.SHARED)
        scales_at = w.at(place, w.add(w.scaled(w.warp(), 64), w.scaled(r, 8), w.i32(4 * WEIGHT_WORDS)), w.SHARED)
        token = arith.select(arith.cmpi(arith.CmpIPredicate.slt, r, count), r, w.i32(0))
        tokens_at = w.at(w.pointer(tokens), w.add(start, w.scaled(token, stride), w.scaled(t, 16)), w.SHARED)
        totals = _split_sums(sums)

        def expand(words: Sequence, scales: Sequence, part: int) -> list[ir.Value]:
            """Operand A of 16 columns: rows below and above, of the nearer columns, then of the others."""
            return [expand_pair(words[half], 2 * part + i, scales, half) for i in range(2) for half in range(2)]

        def load_tokens(i: int) -> list[list[ir.Value]]:
            """Terms of 32 columns."""
            places = [w.at(tokens_at, w.i32(term + 64 * i), w.SHARED) for term in term_bytes]
            return [w.load(w.i32(), place, 4) for place in places]

        loaded = [load_tokens(i) for i in range(_GROUPS * step_blocks)]
        for k, m in itertools.product(range(step_blocks), range(warpgroup_blocks)):
            shift = w.i32(((m // group * step_blocks + k) * group + m % group) * block)
            words = w.load(w.i32(), w.at(words_at, shift, w.SHARED), 2 * _GROUPS)
            scales = [widen_scales(scale) for scale in w.load(w.i32(), w.at(scales_at, shift, w.SHARED), _GROUPS)]
            for q in range(_GROUPS):
                weights = [expand(words[2 * q : 2 * q + 2], scales[q], part) for part in range(2)]
                for term in loaded[_GROUPS * k + q]:
                    for part in range(2):
                        totals[m] = _mma(weights[part], term[2 * part : 2 * part + 2], totals[m])
        flat = [w.register(total[2 * h : 2 * h + 2]) for total in totals for h in range(2)]
        registers = np.asarray(flat, dtype=object).reshape(sums.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=None)

    return call(ring, tokens, *scalars, sums)


def _split_sums(sums: mgpu.FragmentedArray) -> list[list[ir.Value]]:
    """By block of 64 rows: rows r of two tokens, then rows r + 8."""
    registers = [w.elements(register, 2) for register in sums.registers.flat]
    return [[*registers[2 * i], *registers[2 * i + 1]] for i in range(len(registers) // 2)]


def store_sums(
    sums: jax.Array, whole: Any, partial: Any, pairs: Any, *scalars: jax.Array, warpgroup_blocks: int, tile_blocks: int
) -> None:
    """Writes a warpgroup's sums, a token's rows together: to ``whole[pair, tile]``, or to ``partial[block, n]``.

    Scalars: unit, tile, block (the kernel's), whether the sums go to ``partial``, warpgroup. If an array's last axes are
    [2, rows / 2], the block rows' halves go there: gate's features, then up's.
    """

    @w.inline(3, 5, (ACCUMULATOR,))
    def call(whole, partial, pairs, unit, tile, block, is_partial, warpgroup, sums) -> None:
        _, num_tiles, *row_axes = ir.MemRefType(whole.type).shape
        step = len(row_axes)
        tile_rows = tile_blocks * BLOCK_ROWS
        r, t = w.lane()
        row = w.add(w.scaled(warpgroup, warpgroup_blocks * BLOCK_ROWS // step), w.scaled(w.warp(), 16 // step), r)
        half_rows = tile_rows // 2 if step == 2 else 8
        totals = _split_sums(sums)
        to_partial = arith.cmpi(arith.CmpIPredicate.ne, is_partial, w.i32(0))
        base = arith.select(
            to_partial, llvm.ptrtoint(w.i64_type(), w.gmem(partial)), llvm.ptrtoint(w.i64_type(), w.gmem(whole))
        )
        base = llvm.inttoptr(llvm.PointerType.get(w.GLOBAL), base)
        for j in range(2):
            n = arith.addi(w.scaled(t, 2), w.i32(j))
            pair, is_token = _find_token(pairs, unit, n)
            to_whole = w.add(w.scaled(pair, num_tiles), tile)
            target = arith.select(to_partial, w.add(w.scaled(block, TOKENS), n), to_whole)
            offset = arith.addi(arith.muli(w.wide(target), w.i64(4 * tile_rows)), w.wide(w.scaled(row, 4)))
            start = w.at(base, offset, w.GLOBAL)
            for m in range(warpgroup_blocks):
                for h in range(2):
                    shift = 4 * (m * BLOCK_ROWS // step + h * half_rows)
                    mgpu.utils.inline_ptx(
                        "st.global.f32 [$0], $1;",
                        w.at(start, w.i64(shift), w.GLOBAL),
                        totals[m][2 * h + j],
                        predicate=is_token,
                        has_side_effects=True,
                    )

    call(whole, partial, pairs, *scalars, sums)


def find_pair(pairs: ir.Value, unit: ir.Value, n: ir.Value) -> ir.Value:
    return llvm.load(w.i32(), w.at(w.pointer(pairs), w.scaled(w.add(w.scaled(unit, TOKENS), n), 4), w.SHARED))


def _find_token(pairs: ir.Value, unit: ir.Value, n: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The pair at one of a unit's places, and whether there is one."""
    pair = find_pair(pairs, unit, n)
    return pair, arith.cmpi(arith.CmpIPredicate.sge, pair, w.i32(0))


def store_hidden(
    sums: jax.Array, hidden: Any, pairs: Any, *scalars: jax.Array, warpgroup_blocks: int, num_features: int
) -> None:
    """Writes ``silu(gate) * up`` of a warpgroup's finished sums to ``hidden[pair]``, zero from ``num_features`` on.

    Of two terms the second is what the first's rounding left. Scalars: unit, the tile's first feature, warpgroup.
    """

    @w.inline(2, 3, (ACCUMULATOR,))
    def call(hidden, pairs, unit, first, warpgroup, sums) -> None:
        _, num_terms, width = ir.MemRefType(hidden.type).shape
        r, t = w.lane()
        feature = w.add(first, w.scaled(warpgroup, warpgroup_blocks * BLOCK_ROWS // 2), w.scaled(w.warp(), 8), r)
        totals = _split_sums(sums)
        for j in range(2):
            pair, is_token = _find_token(pairs, unit, arith.addi(w.scaled(t, 2), w.i32(j)))
            offset = arith.addi(arith.muli(w.wide(pair), w.i64(2 * num_terms * width)), w.wide(w.scaled(feature, 2)))
            start = w.at(w.gmem(hidden), offset, w.GLOBAL)
            for m in range(warpgroup_blocks):
                gate, up = totals[m][j], totals[m][2 + j]
                value = arith.mulf(arith.mulf(gate, sigmoid(gate)), up)
                is_feature = arith.cmpi(arith.CmpIPredicate.slt, feature, w.i32(num_features - m * BLOCK_ROWS // 2))
                value = arith.select(is_feature, value, arith.constant(w.f32(), 0.0))
                for term in range(num_terms):
                    narrow = arith.truncf(ir.BF16Type.get(), value)
                    value = arith.subf(value, arith.extf(w.f32(), narrow))
                    mgpu.utils.inline_ptx(
                        "st.global.b16 [$0], $1;",
                        w.at(start, w.i64(2 * term * width + m * BLOCK_ROWS), w.GLOBAL),
                        arith.bitcast(ir.IntegerType.get_signless(16), narrow),
                        predicate=is_token,
                        has_side_effects=True,
                    )

    call(hidden, pairs, *scalars, sums)


def sigmoid(value: ir.Value) -> ir.Value:
    log2e = arith.constant(w.f32(), -1.4426950408889634)
    power = mgpu.utils.inline_ptx("ex2.approx.f32 $0, $1;", arith.mulf(value, log2e), result_types=w.f32())
    denominator = arith.addf(power, arith.constant(w.f32(), 1.0))
    return mgpu.utils.inline_ptx("rcp.approx.f32 $0, $1;", denominator, result_types=w.f32())


def load_hidden(
    hidden: Any, tokens: Any, pairs: Any, unit: jax.Array, count: jax.Array, *, num_columns: int, num_threads: int
) -> None:
    """Copies the hidden rows of a unit's ``count`` pairs to shared memory, 16 bytes a thread and turn.

    A token's ``num_columns`` of each of the terms lie behind each other.
    """
    per_term = num_columns // 8

    @w.inline(3, 2)
    def call(hidden, tokens, pairs, unit, count) -> None:
        _, num_terms, width = ir.MemRefType(hidden.type).shape
        vector_type = ir.VectorType.get((4,), w.i32())
        moves = []
        for turn in range(-(-TOKENS * num_terms * per_term // num_threads)):
            index = arith.addi(w.thread(), w.i32(turn * num_threads))
            token = arith.divui(index, w.i32(num_terms * per_term))
            chunk = arith.remui(index, w.i32(num_terms * per_term))
            is_needed = arith.cmpi(arith.CmpIPredicate.slt, token, count)
            pair = find_pair(pairs, unit, arith.select(is_needed, token, w.i32(0)))
            row = w.add(w.scaled(pair, num_terms), arith.divui(chunk, w.i32(per_term)))
            column = w.scaled(arith.remui(chunk, w.i32(per_term)), 16)
            offset = arith.addi(arith.muli(w.wide(row), w.i64(2 * width)), w.wide(column))
            value = llvm.load(vector_type, w.at(w.gmem(hidden), offset, w.GLOBAL), alignment=16)
            moves.append((is_needed, token, chunk, value))
        for is_needed, token, chunk, value in moves:
            with mgpu.utils.when(is_needed):
                place = w.add(w.scaled(token, token_stride(num_terms * num_columns)), w.scaled(chunk, 16))
                llvm.store(value, w.at(w.pointer(tokens), place, w.SHARED), alignment=16)

    call(hidden, tokens, pairs, unit, count)
