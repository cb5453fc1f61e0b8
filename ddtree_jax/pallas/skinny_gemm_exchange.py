"""What blocks of a cluster send each other: sums of a tile, to the block that adds up and writes these tokens.

Rank r of the cluster gets groups of 8 tokens r, r + cluster, ... from every rank, itself too, each at a place of its own in
shared memory; its barrier counts the bytes::

    rank p   makes its barrier, arrives ┐            p sends its sums ───────┐ ``st.async``: the value, then its bytes
                                        ├ all have                           ▼
    rank r   makes its barrier, arrives ┘            r waits for its barrier, adds up in the order of the ranks

Why each step may trust the one before:

* No rank sends to a barrier that is not made. The thread that makes it fences that (``fence.mbarrier_init.release.cluster``)
  and arrives at the cluster's barrier afterwards; those that will send wait there, with acquire, until all threads have
  arrived. Only then do ranks wait for each other, and it lies before their products: the first bytes are on their way.
* All sums are there when r reads them. A phase of its barrier ends when its one arrival and all bytes have come; the
  arrival, r's own, says how many. Bytes may come before the arrival: they count below zero, and the phase cannot end
  without it. A ``st.async`` releases its value with the count of its bytes, and threads that see the phase's end acquire it.
* Nothing is written to a block that has ended, though nobody waits for the others at the end: r ends behind its phase, so
  all that is ever sent to it has come. A rank without tokens is sent nothing. What p sends comes from registers, and
  it may end while it is under way.
* Sums take no place that is used for anything else before.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm
from jaxtyping import Array

from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.skinny_gemm_shape import SIDE, TOKENS_A_GROUP, Shape

_GROUP_BYTES = 4 * TOKENS_A_GROUP * SIDE


def expect(barriers_ref: Any, index: int, rank: Array, shape: Shape) -> None:
    """A warpgroup's: says how many bytes will come to this rank."""

    @w.inline(1, 1)
    def call(barriers: Any, rank: Any) -> None:
        more = arith.subi(w.i32(shape.num_groups + shape.cluster - 1), rank)
        num_bytes = w.scaled(arith.divui(more, w.i32(shape.cluster)), shape.cluster * _GROUP_BYTES)
        is_first = mgpu.utils.single_thread_predicate(scope=mgpu.utils.ThreadSubset.WARPGROUP)
        nvvm.mbarrier_arrive_expect_tx(w.barrier(barriers, w.i32(index)), num_bytes, predicate=is_first)

    call(barriers_ref, rank)


def send(received_ref: Any, barriers_ref: Any, index: int, rank: Array, acc: Array, shape: Shape) -> None:
    """A warpgroup's sums [64, tokens] to the ranks that add them up; their barriers ``index`` count the bytes."""

    @w.inline(2, 1, (plgpu.Layout.WGMMA,))
    def call(received: Any, barriers: Any, rank: Any, acc: Any) -> None:
        r, t = w.lane()
        row = w.add(w.scaled(w.warp(), 16), r)
        place = w.add(row, w.scaled(t, 2 * shape.sums_stride), w.scaled(rank, shape.received_stride))
        start, own = w.at(w.pointer(received), w.scaled(place, 4), w.SHARED), w.barrier(barriers, w.i32(index))
        registers = list(acc.registers.flat)
        for to in range(min(shape.cluster, shape.num_groups)):
            there, barrier = _in_rank(start, to), _in_rank(own, to)
            # Registers: 8 tokens after 8, of each the upper and the lower half of the warp's 16 rows.
            for turn, group in enumerate(range(to, shape.num_groups, shape.cluster)):
                for half in range(2):
                    for j, value in enumerate(w.elements(registers[2 * group + half], 2)):
                        offset = 4 * ((TOKENS_A_GROUP * turn + j) * shape.sums_stride + 8 * half)
                        ptx = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32"
                        ptx = f"{ptx} [$0+{offset}], $1, [$2];"
                        mgpu.utils.inline_ptx(ptx, there, value, barrier, has_side_effects=True)

    call(received_ref, barriers_ref, rank, acc)


def _in_rank(pointer: ir.Value, rank: int) -> ir.Value:
    """Where this place of shared memory is in another block of the cluster."""
    ptx = "mapa.shared::cluster.u32 $0, $1, $2;"
    return mgpu.utils.inline_ptx(ptx, pointer, w.i32(rank), result_types=w.i32(), has_side_effects=True)
