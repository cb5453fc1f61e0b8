"""What a warp does with its registers in the INT4 kernel: pieces that Pallas has no word for, as inline Mosaic GPU.

Lane l of a warp is (r, t) = (l // 4, l % 4) throughout, as in PTX's picture of ``mma.m16n8k16``. Every function here runs
in all threads of a warpgroup; sizes are static, the rest are scalars.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf, vector

from ddtree_jax.pallas.int4_blocks import BLOCK_COLUMNS, BLOCK_ROWS, BLOCK_WORDS, WEIGHT_WORDS

TOKENS = 8
SCALAR = plgpu.Layout.WG_SPLAT(())
REF = plgpu.RefType()
ACCUMULATOR = plgpu.Layout.MMA_ACC(jnp.bfloat16)
_GROUPS = BLOCK_COLUMNS // 32
_NIBBLE_MASK, _BF16_128 = 0x000F000F, 0x43004300
_BF16_MINUS_136 = 0xC308C308
_GLOBAL, _SHARED = 1, 3


def _i32(value: int | None = None) -> Any:
    kind = ir.IntegerType.get_signless(32)
    return kind if value is None else arith.constant(kind, ir.IntegerAttr.get(kind, _signed(value)))


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _i64(value: int) -> ir.Value:
    kind = ir.IntegerType.get_signless(64)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def _f32() -> ir.Type:
    return ir.F32Type.get()


def _thread() -> ir.Value:
    return mgpu.utils.thread_idx()


def _lane() -> tuple[ir.Value, ir.Value]:
    lane = arith.andi(_thread(), _i32(31))
    return arith.shrui(lane, _i32(2)), arith.andi(lane, _i32(3))


def _warp() -> ir.Value:
    """Of the warpgroup, 0 to 3."""
    return arith.andi(arith.shrui(_thread(), _i32(5)), _i32(3))


def _at(pointer: ir.Value, num_bytes: ir.Value, space: int) -> ir.Value:
    """Pointer moved by a number of bytes."""
    kind = llvm.PointerType.get(space)
    return llvm.getelementptr(
        kind, pointer, [num_bytes], [-(1 << 31)], ir.IntegerType.get_signless(8), llvm.GEPNoWrapFlags.none
    )


def _pointer(ref: ir.Value) -> ir.Value:
    return mgpu.utils.memref_ptr(ref)


def _gmem(ref: ir.Value) -> ir.Value:
    return llvm.addrspacecast(llvm.PointerType.get(_GLOBAL), _pointer(ref))


def _wide(value: ir.Value) -> ir.Value:
    return arith.extsi(ir.IntegerType.get_signless(64), value)


def _add(*values: ir.Value) -> ir.Value:
    return functools.reduce(arith.addi, values)


def _scaled(value: ir.Value, factor: int) -> ir.Value:
    return arith.muli(value, _i32(factor))


def _load(kind: ir.Type, pointer: ir.Value, num_words: int) -> list[ir.Value]:
    loaded = llvm.load(ir.VectorType.get((num_words,), kind), pointer, alignment=4 * num_words)
    return _elements(loaded, num_words)


def _elements(register: ir.Value, size: int) -> list[ir.Value]:
    return [vector.extract(register, [], ir.DenseI64ArrayAttr.get([i])) for i in range(size)]


def _register(values: Sequence[ir.Value]) -> ir.Value:
    return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), list(values))


def _scalar(value: mgpu.FragmentedArray) -> ir.Value:
    return value.registers.item()


def inline(num_refs: int, num_scalars: int, arrays: tuple = (), result: Any = None) -> Callable:
    """Decorator for a function of refs, then scalars (given as values), then arrays of the given layouts."""

    def decorate(function: Callable) -> Callable:
        def body(context: Any, *args: Any) -> Any:
            del context
            refs, scalars = args[:num_refs], args[num_refs : num_refs + num_scalars]
            return function(*refs, *map(_scalar, scalars), *args[num_refs + num_scalars :])

        wrapped = plgpu.inline_mgpu(arg_types=(REF,) * num_refs + (SCALAR,) * num_scalars + arrays, return_type=result)
        return wrapped(body)

    return decorate


def init_barriers(barriers: Any, counts: Sequence[int]) -> None:
    """Makes ``barriers`` (int64 in shared memory) usable, barrier i with ``counts[i]`` arrivals; all threads wait."""

    @inline(1, 0)
    def call(ref: ir.Value) -> None:
        first = mgpu.utils.single_thread_predicate(scope=mgpu.utils.ThreadSubset.BLOCK)
        for i, count in enumerate(counts):
            nvvm.mbarrier_init(_at(_pointer(ref), _i32(8 * i), _SHARED), _i32(count), predicate=first)
        mgpu.utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)
        gpu.barrier()

    call(barriers)


def warp_index() -> jax.Array:
    """Of the warpgroup, 0 to 3; threads of different warps hold different values."""

    @inline(0, 0, (), plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def call() -> mgpu.FragmentedArray:
        return mgpu.FragmentedArray.splat(_warp(), (), is_signed=True)

    return call()


def _barrier(ref: ir.Value, index: ir.Value) -> ir.Value:
    return _at(_pointer(ref), _scaled(index, 8), _SHARED)


def _wait(ref: ir.Value, index: ir.Value, parity: ir.Value) -> None:
    nvvm.mbarrier_try_wait_parity(_barrier(ref, index), parity, _i32(10_000_000))


def wait_barrier(barriers: Any, index: jax.Array, parity: jax.Array) -> None:
    inline(1, 2)(_wait)(barriers, index, parity)


def arrive_warp(barriers: Any, index: jax.Array) -> None:
    """One arrival a warp, after all of its lanes got here."""

    @inline(1, 1)
    def call(ref: ir.Value, index: ir.Value) -> None:
        mgpu.utils.warp_barrier()
        first = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(_thread(), _i32(31)), _i32(0))
        mgpu.utils.inline_ptx(
            "mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];",
            _barrier(ref, index),
            predicate=first,
            has_side_effects=True,
        )

    call(barriers, index)


def stage_bytes(tile_blocks: int, step_blocks: int) -> int:
    """Of a ring's stage: a step's blocks, then its tokens."""
    return tile_blocks * step_blocks * BLOCK_WORDS * 4 + TOKENS * token_stride(step_blocks * BLOCK_COLUMNS)


def token_stride(num_columns: int) -> int:
    """Bytes from token to token in shared memory: off by half of the banks, so that two tokens are read at once."""
    return 2 * num_columns + 64


def fetch_step(
    blocks: Any,
    ring: Any,
    barriers: Any,
    tokens: Any,
    rows: Any,
    *scalars: jax.Array,
    step_blocks: int,
    tile_blocks: int,
    num_stages: int,
    per_row: int,
    hint: bool = False,
) -> None:
    """A thread of the warp waits until a stage is free and starts a step's copies: a run a group of blocks, and tokens.

    Scalars: expert, group, block column, stage, parity, unit, number of tokens (0: none are copied).
    """
    token_bytes = 2 * step_blocks * BLOCK_COLUMNS

    @inline(5, 7)
    def call(source, target, barriers, tokens, rows, expert, row, column, stage, parity, unit, count) -> None:
        _, num_groups, num_columns, group, _ = ir.MemRefType(source.type).shape
        run = group * step_blocks * BLOCK_WORDS * 4
        first = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(_thread(), _i32(31)), _i32(0))
        with mgpu.utils.when(first):
            width = ir.MemRefType(tokens.type).shape[1]
            _wait(barriers, arith.addi(stage, _i32(num_stages)), parity)
            full = _barrier(barriers, stage)
            num_runs = arith.minsi(_i32(tile_blocks // group), arith.subi(_i32(num_groups), row))
            nvvm.mbarrier_arrive_expect_tx(full, _add(_scaled(num_runs, run), _scaled(count, token_bytes)))
            start_group = _wide(arith.addi(_scaled(expert, num_groups), row))
            offset = arith.addi(arith.muli(start_group, _i64(num_columns)), _wide(column))
            start = _at(_gmem(source), arith.muli(offset, _i64(group * BLOCK_WORDS * 4)), _GLOBAL)
            place = _at(_pointer(target), _scaled(stage, stage_bytes(tile_blocks, step_blocks)), _SHARED)

            if hint:
                policy = mgpu.utils.inline_ptx(
                    "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", result_types=_long(), has_side_effects=True)

            def copy(to: ir.Value, origin: ir.Value, size: int, is_needed: ir.Value, is_weight: bool = False) -> None:
                if hint and is_weight:
                    mgpu.utils.inline_ptx(
                        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1], $2, [$3], $4;",
                        to, origin, _i32(size), full, policy, predicate=is_needed, has_side_effects=True)
                    return
                mgpu.utils.inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
                    to,
                    origin,
                    _i32(size),
                    full,
                    predicate=is_needed,
                    has_side_effects=True,
                )

            table = _at(_gmem(rows), _wide(_scaled(unit, 4 * TOKENS)), _GLOBAL)
            for i in range(tile_blocks // group):
                is_needed = arith.cmpi(arith.CmpIPredicate.slt, _i32(i), num_runs)
                step = _i64(i * num_columns * group * BLOCK_WORDS * 4)
                copy(_at(place, _i32(i * run), _SHARED), _at(start, step, _GLOBAL), run, is_needed, True)
            for n in range(TOKENS):
                is_needed = arith.cmpi(arith.CmpIPredicate.slt, _i32(n), count)
                with mgpu.utils.when(is_needed):
                    pair = llvm.load(_i32(), _at(table, _i64(4 * n), _GLOBAL))
                    token = arith.divui(pair, _i32(per_row)) if per_row > 1 else pair
                    shift = _add(_scaled(token, 2 * width), _scaled(column, 2 * BLOCK_COLUMNS))
                    to = _i32(tile_blocks * step_blocks * BLOCK_WORDS * 4 + n * token_stride(step_blocks * BLOCK_COLUMNS))
                    copy(_at(place, to, _SHARED), _at(_gmem(tokens), _wide(shift), _GLOBAL), token_bytes, is_needed)

    call(blocks, ring, barriers, tokens, rows, *scalars)


def _mma(a: Sequence[ir.Value], b: Sequence[ir.Value], c: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
    """16 x 8 x 16: ``a b + c`` of one warp."""
    return mgpu.utils.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        *a,
        *b,
        *c,
        result_types=[_f32()] * 4,
        convergent=True,
    )


def _unpack(word: ir.Value) -> list[ir.Value]:
    """The 8 nibbles of a word as 4 pairs of bfloat16 128 + nibble."""
    pairs = []
    for i in range(4):
        shifted = arith.shrui(word, _i32(4 * i)) if i else word
        pairs.append(
            mgpu.utils.inline_ptx(
                "lop3.b32 $0, $1, $2, $3, 0xEA;",
                shifted,
                _i32(_NIBBLE_MASK),
                _i32(_BF16_128),
                result_types=_i32(),
            )
        )
    return pairs


def _fma(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return mgpu.utils.inline_ptx("fma.rn.f32 $0, $1, $2, $3;", a, b, c, result_types=_f32())


def _scales(word: ir.Value) -> tuple[ir.Value, ir.Value]:
    low = arith.shli(word, _i32(16))
    high = arith.andi(word, _i32(0xFFFF0000))
    return arith.bitcast(_f32(), low), arith.bitcast(_f32(), high)


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
) -> jax.Array:
    """Adds a step's product with the tokens to the warpgroup's sums [64 * warpgroup_blocks, 8].

    Scalars: stage, warpgroup, where the first token's columns begin in ``tokens``, in bytes, and how many tokens there
    are. ``stride`` bytes from a token to the next. Places without a token repeat the first.

    A warp multiplies 128 + nibble, exact in bfloat16. The 136 too many a weight are taken off by starting every group's
    sum at -136 times the sum of the tokens, which the tensor cores compute, once for all rows. A group's sum then is
    multiplied by its scale in float32.
    """
    shape = (BLOCK_ROWS * warpgroup_blocks, TOKENS)

    @inline(2, 4, (ACCUMULATOR,), plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=ACCUMULATOR))
    def call(ring, tokens, stage, warpgroup, start, count, sums) -> mgpu.FragmentedArray:
        r, t = _lane()
        lane = arith.andi(_thread(), _i32(31))
        block = BLOCK_WORDS * 4
        is_inside = group > warpgroup_blocks
        offset = _add(
            _scaled(stage, stage_bytes(tile_blocks, step_blocks)),
            _scaled(warpgroup, warpgroup_blocks * block * (1 if is_inside else step_blocks)),
        )
        place = _at(_pointer(ring), offset, _SHARED)
        words_at = _at(place, _add(_scaled(_warp(), 512), _scaled(lane, 16)), _SHARED)
        scales_at = _at(place, _add(_scaled(_warp(), 64), _scaled(r, 8), _i32(4 * WEIGHT_WORDS)), _SHARED)
        token = arith.select(arith.cmpi(arith.CmpIPredicate.slt, r, count), r, _i32(0))
        tokens_at = _at(_pointer(tokens), _add(start, _scaled(token, stride), _scaled(t, 16)), _SHARED)
        token_words = [
            _load(_i32(), _at(tokens_at, _i32(64 * i), _SHARED), 4) for i in range(_GROUPS * step_blocks)
        ]
        totals = [_elements(register, 2) for register in sums.registers.flat]
        totals = [[*totals[2 * i], *totals[2 * i + 1]] for i in range(warpgroup_blocks)]
        zero = arith.constant(_f32(), 0.0)
        offsets = [_i32(_BF16_MINUS_136)] * 4
        for k in range(step_blocks):
            starts = []
            for q in range(_GROUPS):
                b = token_words[_GROUPS * k + q]
                starts.append(_mma(offsets, b[2:], _mma(offsets, b[:2], [zero] * 4)))
            for m in range(warpgroup_blocks):
                shift = _i32(((m // group * step_blocks + k) * group + m % group) * block)
                words = _load(_i32(), _at(words_at, shift, _SHARED), 4)
                scales = _load(_i32(), _at(scales_at, shift, _SHARED), 2)
                for q in range(_GROUPS):
                    b = token_words[_GROUPS * k + q]
                    below, above = _unpack(words[2 * q]), _unpack(words[2 * q + 1])
                    products = _mma([below[0], above[0], below[1], above[1]], b[:2], starts[q])
                    products = _mma([below[2], above[2], below[3], above[3]], b[2:], products)
                    low, high = _scales(scales[q])
                    pairs = zip((low, low, high, high), products, totals[m], strict=True)
                    totals[m] = [_fma(scale, product, total) for scale, product, total in pairs]
        flat = [_register(total[2 * h : 2 * h + 2]) for total in totals for h in range(2)]
        registers = np.asarray(flat, dtype=object).reshape(sums.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=None)

    return call(ring, tokens, *scalars, sums)


def store_sums(
    sums: jax.Array,
    whole: Any,
    partial: Any,
    rows: Any,
    *scalars: jax.Array,
    warpgroup_blocks: int,
    tile_blocks: int,
    has_halves: bool,
) -> None:
    """Writes a warpgroup's sums, a token's rows together: to ``whole[pair, tile]``, or to ``partial[block, place]``.

    Scalars: unit, tile, block (the kernel's), whether the sums go to ``partial``, warpgroup. With halves (gate and up) a
    tile's first half is gate's features, its second up's.
    """
    tile_rows = tile_blocks * BLOCK_ROWS

    @inline(3, 5, (ACCUMULATOR,))
    def call(whole, partial, rows, unit, tile, block, is_partial, warpgroup, sums) -> None:
        num_tiles = ir.MemRefType(whole.type).shape[1]
        r, t = _lane()
        table = _at(_gmem(rows), _wide(_scaled(unit, 4 * TOKENS)), _GLOBAL)
        to_partial = arith.cmpi(arith.CmpIPredicate.ne, is_partial, _i32(0))
        step = 1 if not has_halves else 2
        row = _add(
            _scaled(warpgroup, warpgroup_blocks * BLOCK_ROWS // step), _scaled(_warp(), 16 // step), r
        )
        half_rows = tile_rows // 2 if has_halves else 8
        totals = [_elements(register, 2) for register in sums.registers.flat]
        for j in range(2):
            place = arith.addi(_scaled(t, 2), _i32(j))
            pair = llvm.load(_i32(), _at(table, _wide(_scaled(place, 4)), _GLOBAL))
            is_token = arith.cmpi(arith.CmpIPredicate.sge, pair, _i32(0))
            to_whole = _add(_scaled(pair, num_tiles), tile)
            target = arith.select(to_partial, _add(_scaled(block, TOKENS), place), to_whole)
            base = arith.select(to_partial, llvm.ptrtoint(_long(), _gmem(partial)), llvm.ptrtoint(_long(), _gmem(whole)))
            base = llvm.inttoptr(llvm.PointerType.get(_GLOBAL), base)
            offset = arith.addi(arith.muli(_wide(target), _i64(4 * tile_rows)), _wide(_scaled(row, 4)))
            start = _at(base, offset, _GLOBAL)
            for m in range(warpgroup_blocks):
                for h in range(2):
                    shift = 4 * (m * BLOCK_ROWS // step + h * half_rows)
                    mgpu.utils.inline_ptx(
                        "st.global.f32 [$0], $1;",
                        _at(start, _i64(shift), _GLOBAL),
                        totals[2 * m + h][j],
                        predicate=is_token,
                        has_side_effects=True,
                    )

    call(whole, partial, rows, *scalars, sums)


def sync_threads(num_threads: int) -> None:
    """All ``num_threads`` computing threads of the block wait for each other."""

    @inline(0, 0)
    def call() -> None:
        mgpu.utils.inline_ptx(f"bar.sync 15, {num_threads};", has_side_effects=True)

    call()


def _long() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def sync_grid(semaphores: Any, index: jax.Array, target: jax.Array, num_threads: int) -> None:
    """All ``num_threads`` computing threads of all blocks wait for each other; what they wrote is seen by all."""

    @inline(1, 2)
    def call(ref, index, target) -> None:
        wait_all = functools.partial(mgpu.utils.inline_ptx, f"bar.sync 15, {num_threads};", has_side_effects=True)
        wait_all()
        first = arith.cmpi(arith.CmpIPredicate.eq, _thread(), _i32(0))
        with mgpu.utils.when(first):
            pointer = _at(_gmem(ref), _wide(_scaled(index, 4)), _GLOBAL)
            mgpu.utils.inline_ptx("red.release.gpu.global.add.u32 [$0], $1;", pointer, _i32(1), has_side_effects=True)
            loop = scf.WhileOp([], [])
            with ir.InsertionPoint(loop.before.blocks.append()):
                seen = mgpu.utils.inline_ptx(
                    "ld.acquire.gpu.global.b32 $0, [$1];", pointer, result_types=_i32(), has_side_effects=True
                )
                scf.condition(arith.cmpi(arith.CmpIPredicate.slt, seen, target), [])
            with ir.InsertionPoint(loop.after.blocks.append()):
                scf.yield_([])
        wait_all()

    call(semaphores, index, target)
