"""What the warpgroups of the prefill kernels do for a unit: rows of one expert by up to 64 of its tokens, all columns.

::

    copies        blocks (bulk) and token rows (16 bytes a thread, swizzled) of 64 columns ──► stage of the ring
    a warpgroup   a quarter of the rows: words ──► bfloat16 weights in registers ──► wgmma with the stage's tokens
    a unit's end  sums ──► bfloat16, transposed through shared memory ──► a token's rows together in device memory

Within 32 columns, token rows hold column ``8 t + 4 j + 2 h + i`` at ``16 j + 8 h + 2 t + i``: the order in which lane t of a
quad finds the weights of a block in its registers (`int4_blocks`). `permute_columns` brings inputs into it, the end of a gate
and up unit writes hidden rows in it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.int4_blocks import BLOCK_COLUMNS, BLOCK_ROWS, BLOCK_WORDS, WEIGHT_WORDS
from ddtree_jax.pallas.int4_prefill_words import cache_policy, narrow, sync_warpgroup
from ddtree_jax.pallas.int4_steps import sigmoid
from ddtree_jax.pallas.int4_unpack import WEIGHT_SCALE, expand_pair, widen_scales

TILE_BLOCKS = 8
TILE_ROWS = TILE_BLOCKS * BLOCK_ROWS
MAX_TOKENS = 64
_BLOCK_BYTES = 4 * BLOCK_WORDS
_WEIGHT_BYTES = TILE_BLOCKS * _BLOCK_BYTES
_ROW_BYTES = 2 * BLOCK_COLUMNS
STAGE_BYTES = _WEIGHT_BYTES + MAX_TOKENS * _ROW_BYTES
FULL_ARRIVALS = 129
"""Of a stage's barrier: the 128 threads that copy tokens, and the one that also starts the weights' copy."""
_PAD_BYTES = 16
_OPERANDS = BLOCK_COLUMNS // 16


class Sizes(NamedTuple):
    """What code for a unit is made for: stages a unit, places for tokens, stages of the ring, blocks a warpgroup.

    Products are started in groups of ``operands`` times 16 columns, and overlap across ``unroll`` stages.
    """

    num_columns: int
    num_tokens: int
    num_stages: int
    blocks: int
    operands: int
    unroll: int


def permute_columns(x: jax.Array) -> jax.Array:
    """Rows whose number of columns is a multiple of 32, in the order described above."""
    split = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 4, 2, 2, 2)
    axes = (*range(x.ndim), x.ndim + 1, x.ndim + 2, x.ndim, x.ndim + 3)
    return split.transpose(axes).reshape(x.shape)


def staging_bytes(features: int) -> int:
    """Of shared memory, for a warpgroup's finished rows of all tokens."""
    return MAX_TOKENS * (2 * features + _PAD_BYTES)


def fetch_unit(
    ring: Any,
    barriers: Any,
    blocks: Any,
    rows: Any,
    pairs: Any,
    *scalars: jax.Array,
    num_stages: int,
    per_row: int | None,
) -> None:
    """A warpgroup copies a unit's weights and token rows to the ring, a stage for every 64 columns.

    Scalars: stages filled before, expert, first of the unit's places, number of its tokens, tile of 512 rows. The row
    of place p is ``pairs[p] // per_row``, or p.
    """

    @w.inline(5, 5)
    def call(ring, barriers, blocks, rows, pairs, done, expert, first, count, tile) -> None:
        _, num_tiles, num_columns, _, _ = ir.MemRefType(blocks.type).shape
        width = ir.MemRefType(rows.type).shape[1]
        thread = arith.andi(w.thread(), w.i32(127))
        chunk, row = arith.andi(thread, w.i32(7)), arith.shrui(thread, w.i32(3))
        tile_index = arith.addi(w.scaled(expert, num_tiles), tile)
        weights = w.at(w.gmem(blocks), arith.muli(w.wide(tile_index), w.i64(num_columns * _WEIGHT_BYTES)), w.GLOBAL)
        sources, is_token = [], []
        for n in range(0, MAX_TOKENS, 16):
            is_token.append(arith.cmpi(arith.CmpIPredicate.slt, arith.addi(row, w.i32(n)), count))
            place = w.add(first, arith.minsi(arith.addi(row, w.i32(n)), arith.subi(count, w.i32(1))))
            if per_row is not None:
                pair = llvm.load(w.i32(), w.at(w.gmem(pairs), w.wide(w.scaled(place, 4)), w.GLOBAL))
                place = arith.divui(pair, w.i32(per_row))
            offset = arith.addi(arith.muli(w.wide(place), w.i64(2 * width)), w.wide(w.scaled(chunk, 16)))
            sources.append(w.at(w.gmem(rows), offset, w.GLOBAL))
        swizzled = arith.xori(chunk, arith.andi(row, w.i32(7)))
        token_offset = w.add(w.scaled(row, _ROW_BYTES), w.scaled(swizzled, 16), w.i32(_WEIGHT_BYTES))
        is_first = _equal(thread, 0)
        evict_first = cache_policy("evict_first")
        stage, parity = _split(done, num_stages)

        @mgpu.utils.fori(w.i32(num_columns), [stage, arith.xori(parity, w.i32(1))])
        def _(k: ir.Value, carry: list) -> list:
            stage, parity = carry
            full = w.barrier(barriers, stage)
            place = w.at(w.pointer(ring), w.scaled(stage, STAGE_BYTES), w.SHARED)
            w.wait(barriers, arith.addi(stage, w.i32(num_stages)), parity)
            with mgpu.utils.when(is_first):
                nvvm.mbarrier_arrive_expect_tx(full, w.i32(_WEIGHT_BYTES))
                mgpu.utils.inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                    "[$0], [$1], $2, [$3], $4;",
                    place,
                    w.at(weights, arith.muli(w.wide(k), w.i64(_WEIGHT_BYTES)), w.GLOBAL),
                    w.i32(_WEIGHT_BYTES),
                    full,
                    evict_first,
                    has_side_effects=True,
                )
            column = w.wide(w.scaled(k, _ROW_BYTES))
            for i, (source, is_needed) in enumerate(zip(sources, is_token, strict=True)):
                mgpu.utils.inline_ptx(
                    "cp.async.cg.shared.global [$0], [$1], 16;",
                    w.at(place, arith.addi(token_offset, w.i32(16 * i * _ROW_BYTES)), w.SHARED),
                    w.at(source, column, w.GLOBAL),
                    predicate=is_needed,
                    has_side_effects=True,
                )
            mgpu.utils.inline_ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", full, has_side_effects=True)
            return _advance(stage, parity, num_stages)

    call(ring, barriers, blocks, rows, pairs, *scalars)


def _equal(value: ir.Value, number: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, value, w.i32(number))


def _split(done: ir.Value, num_stages: int) -> tuple[ir.Value, ir.Value]:
    """Stage and parity of a ring in which ``done`` stages have been used."""
    return arith.remui(done, w.i32(num_stages)), arith.andi(arith.divui(done, w.i32(num_stages)), w.i32(1))


def _advance(stage: ir.Value, parity: ir.Value, num_stages: int) -> list[ir.Value]:
    is_last = _equal(stage, num_stages - 1)
    following = arith.select(is_last, w.i32(0), arith.addi(stage, w.i32(1)))
    return [following, arith.xori(parity, arith.extui(w.i32(), is_last))]


def _start_products(
    sums: Sequence[ir.Value], weights: Sequence, descriptor: ir.Value, first: int, accumulates: ir.Value
) -> list:
    """Adds 64 rows by 16 columns an operand of ``weights``, from the ``first`` 16 of the stage on, times the tokens.

    The sums are overwritten where ``accumulates`` is 0 and ``first`` too.
    """
    count, operands = len(sums), [register for operand in weights for register in operand]
    out = ",".join(f"${i}" for i in range(count))
    last = 2 * count + len(operands)
    lines = ["{ .reg .pred p; .reg .b64 d;", f"setp.ne.b32 p, ${last + 1}, 0;", "wgmma.fence.sync.aligned;"]
    for i in range(len(weights)):
        a = ",".join(f"${2 * count + 4 * i + j}" for j in range(4))
        scale = "1" if first + i else "p"
        shape = f"m64n{2 * count}k16"
        lines.append(f"add.s64 d, ${last}, {2 * (first + i)};")
        lines.append(f"wgmma.mma_async.sync.aligned.{shape}.f32.bf16.bf16 {{{out}}}, {{{a}}}, d, {scale}, 1, 1, 0;")
    lines.append("wgmma.commit_group.sync.aligned; }")
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["r"] * len(operands) + ["l", "r"]
    result = llvm.inline_asm(
        llvm.StructType.get_literal([w.f32()] * count),
        [*sums, *operands, descriptor, accumulates],
        "\n".join(lines),
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
        convergent=True,
    )
    return [llvm.extractvalue(w.f32(), result, [i]) for i in range(count)]


def _dequantize(words: Sequence[ir.Value], scales: Sequence[ir.Value]) -> Iterator[list[ir.Value]]:
    """The four register operands, of 16 columns each, that a thread's part of a block stands for."""
    for q in range(2):
        widened = widen_scales(scales[q])
        for pairs in ((0, 1), (2, 3)):
            yield [expand_pair(words[2 * q + h], i, widened, h) for i in pairs for h in range(2)]


def _wait_products(pending: int) -> None:
    mgpu.utils.inline_ptx(f"wgmma.wait_group.sync.aligned {pending};", has_side_effects=True, convergent=True)


def _multiply(
    ring: ir.Value, barriers: ir.Value, done: ir.Value, warpgroup: ir.Value, sizes: Sizes
) -> list[list[ir.Value]]:
    """A warpgroup's sums over all columns; for each of its blocks the registers of wgmma's result.

    A group's products run while the next group's weights are unpacked. A stage is given back when the first group of the
    next one has been started and those before it are over, the last of ``sizes.unroll`` when all are over.
    """
    per_block = sizes.num_tokens // 2
    zeros = [arith.constant(w.f32(), 0.0)] * (sizes.blocks * per_block)
    is_first = _equal(arith.andi(w.thread(), w.i32(31)), 0)
    unroll = math.gcd(sizes.num_columns, sizes.unroll)
    offsets = _block_offsets(warpgroup, sizes)

    def release(stage: ir.Value) -> None:
        mgpu.utils.inline_ptx(
            "mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];",
            w.barrier(barriers, arith.addi(stage, w.i32(sizes.num_stages))),
            predicate=is_first,
            has_side_effects=True,
        )

    @mgpu.utils.fori(w.i32(sizes.num_columns // unroll), [*_split(done, sizes.num_stages), *zeros])
    def loop(turn: ir.Value, carry: list) -> list:
        stage, parity, *sums = carry
        before = None
        for u in range(unroll):
            w.wait(barriers, stage, parity)
            # Tokens were copied by the generic proxy; wgmma reads through the asynchronous one.
            mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
            place = w.at(w.pointer(ring), w.scaled(stage, STAGE_BYTES), w.SHARED)
            descriptor = _describe_tokens(place)
            following = _load_block(place, offsets, 0)
            for m in range(sizes.blocks):
                operands = _dequantize(*following)
                if m + 1 < sizes.blocks:
                    following = _load_block(place, offsets, m + 1)
                own = slice(m * per_block, (m + 1) * per_block)
                for first in range(0, _OPERANDS, sizes.operands):
                    group = list(itertools.islice(operands, sizes.operands))
                    sums[own] = _start_products(sums[own], group, descriptor, first, turn if u == 0 else w.i32(1))
                    _wait_products(1)
                    if before is not None and m == first == 0:
                        release(before)
            before = stage
            stage, parity = _advance(stage, parity, sizes.num_stages)
        _wait_products(0)
        release(before)
        return [stage, parity, *sums]

    sums = loop.results[2:]
    return [sums[m * per_block : (m + 1) * per_block] for m in range(sizes.blocks)]


def _describe_tokens(place: ir.Value) -> ir.Value:
    """wgmma's descriptor of a stage's tokens: rows of 128 bytes in the swizzle of 128, 1,024 bytes from 8 to the next 8."""
    tokens = llvm.ptrtoint(w.i32(), w.at(place, w.i32(_WEIGHT_BYTES), w.SHARED))
    address = arith.shrui(arith.andi(tokens, w.i32(0x3FFFF)), w.i32(4))
    return arith.ori(arith.extui(w.i64_type(), address), w.i64((1 << 62) | (64 << 32) | (1 << 16)))


def _block_offsets(warpgroup: ir.Value, sizes: Sizes) -> tuple[ir.Value, ir.Value]:
    """Where in a stage a thread's words and scales of the warpgroup's first block are."""
    r, _ = w.lane()
    lane = arith.andi(w.thread(), w.i32(31))
    start = w.scaled(warpgroup, sizes.blocks * _BLOCK_BYTES)
    words = w.add(start, w.scaled(w.warp(), 512), w.scaled(lane, 16))
    return words, w.add(start, w.scaled(w.warp(), 64), w.scaled(r, 8), w.i32(4 * WEIGHT_WORDS))


def _load_block(place: ir.Value, offsets: tuple[ir.Value, ir.Value], m: int) -> tuple[list[ir.Value], list[ir.Value]]:
    """A thread's words and scales of the warpgroup's block m."""
    words_at, scales_at = (w.at(place, arith.addi(o, w.i32(m * _BLOCK_BYTES)), w.SHARED) for o in offsets)
    return w.load(w.i32(), words_at, 4), w.load(w.i32(), scales_at, 2)


def _store_transposed(matrices: Sequence[tuple[ir.Value, int, int]], base: ir.Value, pitch: int) -> None:
    """Stores 8 x 8 parts of a warp's result to ``base``, token by token.

    A part is a register (a feature's two tokens), its tokens' number / 8 and its features' place in bytes.
    """
    lane = arith.andi(w.thread(), w.i32(31))
    row, which = arith.andi(lane, w.i32(7)), arith.shrui(lane, w.i32(3))
    for start in range(0, len(matrices), 4):
        group = matrices[start : start + 4]
        size = 4 if len(group) == 4 else 2 if len(group) >= 2 else 1
        for begin in range(0, len(group), size):
            parts = group[begin : begin + size]
            offset = w.i32(parts[-1][1] * 8 * pitch + parts[-1][2])
            for i in reversed(range(len(parts) - 1)):
                is_this = _equal(which, i)
                offset = arith.select(is_this, w.i32(parts[i][1] * 8 * pitch + parts[i][2]), offset)
            registers = ",".join(f"${i + 1}" for i in range(len(parts)))
            mgpu.utils.inline_ptx(
                f"stmatrix.sync.aligned.m8n8.x{len(parts)}.trans.shared.b16 [$0], {{{registers}}};",
                w.at(base, arith.addi(offset, w.scaled(row, pitch)), w.SHARED),
                *(part[0] for part in parts),
                has_side_effects=True,
                convergent=True,
            )


def multiply_gate_up(
    ring: Any,
    barriers: Any,
    staging: Any,
    hidden: Any,
    *scalars: jax.Array,
    sizes: Sizes,
) -> None:
    """Writes ``silu(gate) * up`` of a unit to the rows of its places in ``hidden``, columns permuted.

    Scalars: stages used before, first place, number of tokens, tile of 512 rows, warpgroup.
    """

    @w.inline(4, 5)
    def call(ring, barriers, staging, hidden, done, first, count, tile, warpgroup) -> None:
        width = ir.MemRefType(hidden.type).shape[1]
        sums = _multiply(ring, barriers, done, warpgroup, sizes)
        scale = arith.constant(w.f32(), WEIGHT_SCALE)
        sums = [[arith.mulf(total, scale) for total in block] for block in sums]
        features = sizes.blocks * BLOCK_ROWS // 2
        pitch = 2 * features + _PAD_BYTES
        base = w.at(w.pointer(staging), w.scaled(warpgroup, staging_bytes(features)), w.SHARED)
        warp_base = w.at(base, w.scaled(w.warp(), 16), w.SHARED)
        # The last unit's rows have been read.
        sync_warpgroup(warpgroup)
        matrices = []
        for m, block in enumerate(sums):
            for j in range(sizes.num_tokens // 8):
                gate0, gate1, up0, up1 = block[4 * j : 4 * j + 4]
                value = narrow(
                    *(arith.mulf(arith.mulf(gate, sigmoid(gate)), up) for gate, up in ((gate0, up0), (gate1, up1)))
                )
                matrices.append((value, j, m * BLOCK_ROWS))
        _store_transposed(matrices, warp_base, pitch)
        sync_warpgroup(warpgroup)
        chunks = 2 * features // 16
        for turn in range(-(-sizes.num_tokens * chunks // 128)):
            index = arith.addi(arith.andi(w.thread(), w.i32(127)), w.i32(128 * turn))
            token, chunk = arith.divui(index, w.i32(chunks)), arith.remui(index, w.i32(chunks))
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, token, count)):
                group, part = arith.shrui(chunk, w.i32(2)), arith.andi(chunk, w.i32(3))
                source = w.at(base, w.add(w.scaled(token, pitch), w.scaled(group, 64), w.scaled(part, 4)), w.SHARED)
                words = [llvm.load(w.i32(), w.at(source, w.i32(16 * t), w.SHARED)) for t in range(4)]
                place = arith.muli(w.wide(arith.addi(first, token)), w.i64(2 * width))
                column = w.add(w.scaled(tile, TILE_ROWS), w.scaled(warpgroup, 2 * features), w.scaled(chunk, 16))
                target = w.at(w.gmem(hidden), arith.addi(place, w.wide(column)), w.GLOBAL)
                llvm.store(w.register(words), target, alignment=16)

    call(ring, barriers, staging, hidden, *scalars)


def multiply_down(
    ring: Any,
    barriers: Any,
    staging: Any,
    y: Any,
    pair_table: Any,
    *scalars: jax.Array,
    sizes: Sizes,
) -> None:
    """Starts to write a unit's product to ``y`` [slices, pairs, 512]: the pair of place p is ``pair_table[p]``.

    It is `WEIGHT_SCALE` times smaller, as the weights are.
    Scalars: stages used before, first place, number of tokens, tile of 512 rows (the slice), warpgroup.
    """

    @w.inline(5, 5)
    def call(ring, barriers, staging, y, pair_table, done, first, count, tile, warpgroup) -> None:
        _, num_pairs, width = ir.MemRefType(y.type).shape
        # A warp's threads start their copies one after the other: each warp has a quarter of the tokens.
        lane = arith.andi(w.thread(), w.i32(31))
        token = w.add(w.scaled(lane, 4), w.warp())
        is_token = arith.cmpi(arith.CmpIPredicate.slt, token, count)
        own = arith.addi(first, arith.minsi(token, arith.subi(count, w.i32(1))))
        pair = llvm.load(w.i32(), w.at(w.gmem(pair_table), w.wide(w.scaled(own, 4)), w.GLOBAL))
        sums = _multiply(ring, barriers, done, warpgroup, sizes)
        features = sizes.blocks * BLOCK_ROWS
        pitch = 2 * features + _PAD_BYTES
        base = w.at(w.pointer(staging), w.scaled(warpgroup, staging_bytes(features)), w.SHARED)
        warp_base = w.at(base, w.scaled(w.warp(), 32), w.SHARED)
        # The last unit's rows have been read.
        mgpu.utils.inline_ptx("cp.async.bulk.wait_group.read 0;", has_side_effects=True)
        sync_warpgroup(warpgroup)
        matrices = []
        for m, block in enumerate(sums):
            for j in range(sizes.num_tokens // 8):
                for h in range(2):
                    value = narrow(*block[4 * j + 2 * h : 4 * j + 2 * h + 2])
                    matrices.append((value, j, 2 * m * BLOCK_ROWS + 16 * h))
        _store_transposed(matrices, warp_base, pitch)
        mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
        sync_warpgroup(warpgroup)
        row = arith.addi(arith.muli(w.wide(tile), w.i64(num_pairs)), w.wide(pair))
        column = w.scaled(warpgroup, 2 * features)
        with mgpu.utils.when(is_token):
            mgpu.utils.inline_ptx(
                "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [$0], [$1], $2, $3;",
                w.at(w.gmem(y), arith.addi(arith.muli(row, w.i64(2 * width)), w.wide(column)), w.GLOBAL),
                w.at(base, w.scaled(token, pitch), w.SHARED),
                w.i32(2 * features),
                # The sum finds the last ones there.
                cache_policy("evict_last"),
                has_side_effects=True,
            )
        mgpu.utils.inline_ptx("cp.async.bulk.commit_group;", has_side_effects=True)

    call(ring, barriers, staging, y, pair_table, *scalars)


def finish_stores() -> None:
    """Waits for the stores that `multiply_down` started."""

    @w.inline(0, 0)
    def call() -> None:
        mgpu.utils.inline_ptx("cp.async.bulk.wait_group 0;", has_side_effects=True)

    call()
