"""How the INT4 kernel's steps get to the ring: copies of blocks, and of the tokens that they are multiplied with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.int4_blocks import BLOCK_COLUMNS, BLOCK_WORDS
from ddtree_jax.pallas.int4_steps import TOKENS, find_pair, stage_bytes, token_stride


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """Sizes of the ring that steps go through, and whether there is an engine that copies to it."""

    step_blocks: int
    tile_blocks: int
    num_stages: int
    has_bulk_copies: bool

    @property
    def weight_bytes(self) -> int:
        """Of a stage, before its tokens."""
        return self.tile_blocks * self.step_blocks * BLOCK_WORDS * 4

    @property
    def token_bytes(self) -> int:
        """Of a token's columns."""
        return 2 * self.step_blocks * BLOCK_COLUMNS


class _Source(NamedTuple):
    """Where a step's weights and tokens are: a run of blocks a group, a row a token."""

    run_bytes: int
    group_stride: int
    num_runs: ir.Value
    weights: ir.Value
    tokens: ir.Value
    token_stride: int


class _Hooks(NamedTuple):
    """What the thread that copies does when the stage is free, and before it copies tokens."""

    when_free: Callable[[], None] = lambda: None
    before_tokens: Callable[[], None] = lambda: None


def fetch_step(
    blocks: Any,
    ring_s: Any,
    barriers: Any,
    tokens: Any,
    pairs: Any,
    *scalars: jax.Array,
    ring: Ring,
    per_token: int,
) -> None:
    """A warp waits until a stage is free and starts a step's copies to it: a run of blocks a group, and tokens.

    Scalars: expert, group, block column, stage, parity, unit, number of tokens (0: none are copied). With bulk copies one
    thread starts them all; without, every thread copies 16 bytes at a time.
    """

    @w.inline(5, 7)
    def call(*operands: ir.Value) -> None:
        _fetch(operands[:5], operands[5:], _Hooks(), ring, per_token)

    call(blocks, ring_s, barriers, tokens, pairs, *scalars)


def fetch_free_step(
    blocks: Any,
    ring_s: Any,
    barriers: Any,
    hidden: Any,
    pairs: Any,
    numbers: Any,
    *scalars: jax.Array,
    ring: Ring,
    semaphores: w.Semaphores,
) -> None:
    """`fetch_step` of a tile that is in no block's span: its number goes to ``numbers[stage]``, hidden rows are tokens.

    Scalars: those, then the tile's number, and a semaphore's place and the count (0: none) that says when hidden rows are
    written.
    """

    @w.inline(6, 10)
    def call(*operands: ir.Value) -> None:
        *refs, numbers = operands[:6]
        *scalars, number, semaphore, count = operands[6:]

        def wait_for_hidden() -> None:
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.sgt, count, w.i32(0))):
                semaphores.spin(semaphore, count)
                # Others wrote them, copies read them.
                mgpu.utils.inline_ptx("fence.proxy.async;", has_side_effects=True)

        _, _, _, stage, *_ = scalars
        hooks = _Hooks(lambda: _store_number(numbers, stage, number), wait_for_hidden)
        _fetch(refs, scalars, hooks, ring, per_token=1)

    call(blocks, ring_s, barriers, hidden, pairs, numbers, *scalars)


def fetch_end(barriers: Any, numbers: Any, stage: jax.Array, parity: jax.Array, *, ring: Ring) -> None:
    """A stage that has nothing but the word, -1, that no tile follows."""

    @w.inline(2, 2)
    def call(barriers: ir.Value, numbers: ir.Value, stage: ir.Value, parity: ir.Value) -> None:
        with mgpu.utils.when(_is_lane_below(1)):
            w.wait(barriers, arith.addi(stage, w.i32(ring.num_stages)), parity)
            _store_number(numbers, stage, w.i32(-1))
            mgpu.utils.inline_ptx(
                "mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];",
                w.barrier(barriers, stage),
                has_side_effects=True,
            )

    call(barriers, numbers, stage, parity)


def _store_number(numbers: ir.Value, stage: ir.Value, number: ir.Value) -> None:
    llvm.store(number, w.at(w.pointer(numbers), w.scaled(stage, 4), w.SHARED))


def _is_lane_below(count: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.slt, arith.andi(w.thread(), w.i32(31)), w.i32(count))


def _fetch(refs: Sequence[ir.Value], scalars: Sequence[ir.Value], hooks: _Hooks, ring: Ring, per_token: int) -> None:
    blocks, ring_s, barriers, tokens, pairs = refs
    expert, row, column, stage, parity, unit, count = scalars
    _, num_groups, num_columns, group, _ = ir.MemRefType(blocks.type).shape
    width = ir.MemRefType(tokens.type).shape[-1]
    block_bytes = BLOCK_WORDS * 4
    first = arith.muli(w.wide(w.add(w.scaled(expert, num_groups), row)), w.i64(num_columns))
    offset = arith.muli(arith.addi(first, w.wide(column)), w.i64(group * block_bytes))
    source = _Source(
        run_bytes=group * ring.step_blocks * block_bytes,
        group_stride=num_columns * group * block_bytes,
        num_runs=arith.minsi(w.i32(ring.tile_blocks // group), arith.subi(w.i32(num_groups), row)),
        weights=w.at(w.gmem(blocks), offset, w.GLOBAL),
        tokens=w.at(w.gmem(tokens), w.wide(w.scaled(column, 2 * BLOCK_COLUMNS)), w.GLOBAL),
        token_stride=2 * width,
    )
    place = w.at(w.pointer(ring_s), w.scaled(stage, stage_bytes(ring.tile_blocks, ring.step_blocks)), w.SHARED)
    free = arith.addi(stage, w.i32(ring.num_stages))

    def token_row(n: ir.Value) -> ir.Value:
        token = arith.divui(find_pair(pairs, unit, n), w.i32(per_token))
        return w.at(source.tokens, w.wide(w.scaled(token, source.token_stride)), w.GLOBAL)

    copy = _copy_bulk if ring.has_bulk_copies else _copy_by_thread
    with mgpu.utils.when(_is_lane_below(1 if ring.has_bulk_copies else 32)):
        w.wait(barriers, free, parity)
        hooks.when_free()
        copy(source, place, w.barrier(barriers, stage), count, token_row, hooks, ring)


def _copy_bulk(
    source: _Source,
    place: ir.Value,
    full: ir.Value,
    count: ir.Value,
    token_row: Callable[[ir.Value], ir.Value],
    hooks: _Hooks,
    ring: Ring,
) -> None:
    """One arrival at ``full``, and the copies' bytes."""
    num_bytes = w.add(w.scaled(source.num_runs, source.run_bytes), w.scaled(count, ring.token_bytes))
    nvvm.mbarrier_arrive_expect_tx(full, num_bytes)
    # Weights pass through; what stays in the second cache is tokens, hidden rows and sums.
    evict_first = mgpu.utils.inline_ptx(
        "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", result_types=w.i64_type(), has_side_effects=True
    )

    def copy(to: ir.Value, origin: ir.Value, size: int, is_needed: ir.Value, *policy: ir.Value) -> None:
        hint, operand = (".L2::cache_hint", ", $4") if policy else ("", "")
        mgpu.utils.inline_ptx(
            f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint} [$0], [$1], $2, [$3]{operand};",
            to,
            origin,
            w.i32(size),
            full,
            *policy,
            predicate=is_needed,
            has_side_effects=True,
        )

    run = source.run_bytes
    for i in range(ring.weight_bytes // run):
        is_needed = arith.cmpi(arith.CmpIPredicate.slt, w.i32(i), source.num_runs)
        origin = w.at(source.weights, w.i64(i * source.group_stride), w.GLOBAL)
        copy(w.at(place, w.i32(i * run), w.SHARED), origin, run, is_needed, evict_first)

    def copy_token(n: ir.Value) -> None:
        to = w.at(place, _token_place(n, ring), w.SHARED)
        copy(to, token_row(n), ring.token_bytes, arith.cmpi(arith.CmpIPredicate.slt, n, count))

    hooks.before_tokens()
    _each_token(count, copy_token)


def _copy_by_thread(
    source: _Source,
    place: ir.Value,
    full: ir.Value,
    count: ir.Value,
    token_row: Callable[[ir.Value], ir.Value],
    hooks: _Hooks,
    ring: Ring,
) -> None:
    """Each of the 32 threads arrives at ``full`` when its copies are done."""
    del hooks
    lane = arith.andi(w.thread(), w.i32(31))
    run, turn = source.run_bytes, 32 * 16

    def copy(to: ir.Value, origin: ir.Value, size: int, start: int) -> None:
        offset = arith.addi(w.scaled(lane, 16), w.i32(start))
        mgpu.utils.inline_ptx(
            "cp.async.cg.shared.global [$0], [$1], 16;",
            w.at(to, offset, w.SHARED),
            w.at(origin, w.wide(offset), w.GLOBAL),
            predicate=arith.cmpi(arith.CmpIPredicate.slt, offset, w.i32(size)),
            has_side_effects=True,
        )

    for i in range(ring.weight_bytes // run):
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, w.i32(i), source.num_runs)):
            to = w.at(place, w.i32(i * run), w.SHARED)
            for start in range(0, run, turn):
                copy(to, w.at(source.weights, w.i64(i * source.group_stride), w.GLOBAL), run, start)

    def copy_token(n: ir.Value) -> None:
        copy(w.at(place, _token_place(n, ring), w.SHARED), token_row(n), ring.token_bytes, 0)

    _each_token(count, copy_token)
    mgpu.utils.inline_ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", full, has_side_effects=True)


def _each_token(count: ir.Value, function: Callable[[ir.Value], None]) -> None:
    """Calls ``function(n)`` for n below ``count``."""
    for n in range(TOKENS):
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, w.i32(n), count)):
            function(w.i32(n))


def _token_place(n: ir.Value, ring: Ring) -> ir.Value:
    return w.add(w.i32(ring.weight_bytes), w.scaled(n, token_stride(ring.step_blocks * BLOCK_COLUMNS)))
