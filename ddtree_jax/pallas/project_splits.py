"""What `tree_mla_hopper` leaves of its splits, added up and multiplied with a matrix a head, in one launch.

A cluster has 8 blocks for some tokens of one head, a block 64 of the 512 latent columns and all of the head's outputs::

    copies       its columns of the matrix ────────────────────────────►
    threads      splits of its columns, added up and rounded ─► shared memory, as the copy engine swizzles
    tensor cores                                                           product over its 64 columns
    threads                                                                 ─► sums to the blocks of their 16 outputs
    threads                                                                       8 sums, in the blocks' order ─► result

Eight neighbouring threads take a line, 64 columns of a split of a token. Groups of them take a token's splits in turn.

Bytes of 16 nodes of 8 heads: 1.0 MB of matrices and, of each split, 0.14 MB: 2.3 MB of the 17 that 1,024 tokens have, 8.9 MB
of the 66 from 4,097 tokens on; 0.7 and 2.2 us at 4.57 TB/s. The launch before has left the splits in the second cache.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, BFloat16, Float, Int32

from ddtree_jax.pallas import simt
from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.bfloat16_rows import SWIZZLED, UNIT, fill, pack, swizzle, unpack
from ddtree_jax.pallas.simt import FLOAT, INT, UINT
from ddtree_jax.pallas.skinny_gemm_kernel import at_cluster_barrier
from ddtree_jax.pallas.skinny_gemm_shape import SIDE
from ddtree_jax.pallas.split_sum import LOWEST, share_out

CLUSTER, WARPGROUPS = 8, 2
WIDTH, OUTPUTS = CLUSTER * SIDE, WARPGROUPS * SIDE
"""Latent columns, and outputs of a head."""
MAX_TOKENS, MAX_HEADS = 64, 16
"""Of more heads there are more clusters than begin at once: with 64 heads this takes longer than two launches."""

_NUM_THREADS = WARPGROUPS * 128
_LINE = SIDE // UNIT  # Threads of a line.
_LINES = _NUM_THREADS // _LINE
_LINES_A_WARP = 32 // _LINE
_SHARE = OUTPUTS // CLUSTER  # Outputs that a block finishes: the rows of a warp.
_STRIDE = _SHARE + 4  # Floats from a token's sums to the next one's, so that a warp's stores meet all banks.
_WGMMA = plgpu.Layout.WGMMA


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Up to ``few_clusters`` are made by dividing ``few_tokens``, twice as many by dividing more; a thread has ``in_flight``
    splits on their way at once.

    They are kept low: a launch of more clusters takes longer to begin, and code that is run once is waited for.
    """

    few_tokens: int = 16
    few_clusters: int = 16
    in_flight: int = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is static. A sequence has ``nodes`` of ``heads`` rows each, and others up to ``rows``; a cluster has ``tokens``.

    The logarithm of each row's sum of weights stands ``copies`` times. ``tile`` slots are a tile, of which the tree has
    ``tree_tiles``.
    """

    batch: int
    nodes: int
    heads: int
    rows: int
    splits: int
    copies: int
    tokens: int
    tile: int
    tree_tiles: int

    @property
    def clusters_a_head(self) -> int:
        return pl.cdiv(self.batch * self.nodes, self.tokens)

    @property
    def num_columns(self) -> int:
        """Of the product: tokens, filled up."""
        return self.tokens + -self.tokens % 8

    @property
    def groups(self) -> int:
        """Of lines, which share out a token's splits: as many as threads allow, a power of two."""
        return _LINES // (1 << (self.tokens - 1).bit_length())

    @property
    def warps_a_token(self) -> int:
        return max(1, self.groups // _LINES_A_WARP)

    @property
    def num_sums(self) -> int:
        """Floats of shared memory in which warps leave what they have of a token."""
        return _NUM_THREADS // 32 * SIDE

    @property
    def num_received(self) -> int:
        """Floats of shared memory for what the cluster's blocks send."""
        return CLUSTER * self.num_columns * _STRIDE


def check(num_tokens: int, heads: int, blocks: Any) -> None:
    """Raises NotImplementedError, which names what the kernel does not take, before there are splits."""
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise NotImplementedError(f"{num_tokens} tokens; 1 to {MAX_TOKENS} fit")
    if heads > MAX_HEADS:
        raise NotImplementedError(f"{heads} heads; up to {MAX_HEADS} are multiplied here")
    expected = (heads * WARPGROUPS, CLUSTER, SIDE, SIDE)
    if blocks.shape != expected:
        raise NotImplementedError(f"a weight of shape {blocks.shape}; {expected} is needed")
    if blocks.dtype != jnp.bfloat16:
        raise NotImplementedError(f"a weight of {blocks.dtype}; bfloat16 is needed")


def choose_shape(
    part_BnsC: Any, lse_Bnsc: Any, blocks: Any, nodes: int, heads: int, tile: int, config: Config = Config()
) -> Shape:
    """How a launch divides the work.

    Raises:
      NotImplementedError: the kernel does not take this input. It is named.
    """
    batch, rows, splits, width = part_BnsC.shape
    num_tokens = batch * nodes
    check(num_tokens, heads, blocks)
    if width != WIDTH or splits == 1 or part_BnsC.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"{splits} splits of {width} columns of {part_BnsC.dtype}; two or more of {WIDTH} of bfloat16 are needed"
        )
    most_clusters = config.few_clusters * (2 if num_tokens > config.few_tokens else 1)
    clusters = min(max(1, most_clusters // heads), num_tokens)
    tokens = min(pl.cdiv(num_tokens, clusters), _LINES)
    return Shape(
        batch=batch,
        nodes=nodes,
        heads=heads,
        rows=rows,
        splits=splits,
        copies=lse_Bnsc.shape[-1],
        tokens=tokens,
        tile=tile,
        tree_tiles=pl.cdiv(nodes, tile),
    )


def add_slice(
    t: Any,
    first: Any,
    head: Any,
    rank: Any,
    part: Any,
    lse: Any,
    length: Any,
    sums: Any,
    tops: Any,
    weights: Any,
    x: Any,
    *,
    shape: Shape,
    config: Config,
) -> None:
    """Tokens from ``first`` on in the block's columns, rounded, to ``x`` [tokens, 64] in shared memory, swizzled.

    Global: part [B, rows, s, C], lse [B, rows, s, c], length [B]; shared: sums [warps, 64], tops and weights [warps].
    """
    unit, line = t.thread() & (_LINE - 1), t.divide(t.thread(), _LINE)
    in_cluster = t.divide(line, shape.groups)
    group = line - in_cluster * shape.groups
    is_token = (in_cluster < shape.tokens) & (first + in_cluster < shape.batch * shape.nodes)
    token = t.minimum(first + in_cluster, shape.batch * shape.nodes - 1)
    sequence = t.divide(token, shape.nodes)
    row = sequence * shape.rows + (token - sequence * shape.nodes) * shape.heads + head
    column = rank * SIDE + unit * UNIT

    total = t.divide(t.load(length, sequence) + (shape.tile - 1), shape.tile) + shape.tree_tiles
    each = share_out(t, total, shape.splits)
    num_used = t.select(is_token, share_out(t, total, each), 0)
    nothing = [t.value(UINT, 0)] * (UNIT // 2) + [t.value(FLOAT, LOWEST)]

    def load(number: Any) -> list[Any]:
        at = row * shape.splits + number
        return [*t.load_vector(part, (at * WIDTH + column) >> 1, UNIT // 2), t.load(lse, at * shape.copies)]

    def add_some(i: Any, top: Any, weight: Any, *acc: Any) -> list[Any]:
        numbers = [group + (i * config.in_flight + turn) * shape.groups for turn in range(config.in_flight)]
        is_used = [number < num_used for number in numbers]
        loaded = [
            t.branch(used, functools.partial(load, number), nothing)
            for number, used in zip(numbers, is_used, strict=True)
        ]
        # All are on their way before anything waits for one: no access is moved past a barrier.
        t.warp_barrier()
        logs = [log for *_, log in loaded]
        new_top = functools.reduce(t.maximum, logs, top)
        scale = t.exp2(top - new_top)
        values = [value * scale for value in (weight, *acc)]
        for used, (*words, log) in zip(is_used, loaded, strict=True):
            values = t.branch(used, functools.partial(_add, t, log - new_top, words, *values), values)
        return [new_top, *values]

    # Lanes of a warp may have tokens of different lengths, but take all turns together.
    count = t.warp_maximum(t.cast(share_out(t, num_used, shape.groups * config.in_flight), UINT))
    # Of tokens that are not there zeros are made.
    weight, zero = t.select(is_token, t.value(FLOAT, 0), 1), t.value(FLOAT, 0)
    top, *values = t.loop(t.cast(count, INT), add_some, [t.value(FLOAT, LOWEST), weight, *[zero] * UNIT])
    top, values = _add_lines(t, shape, top, values)
    if shape.warps_a_token == 1:
        with t.when(t.is_equal(group, 0) & (in_cluster < shape.tokens)):
            weight, *acc = values
            words = pack(t, [value / weight for value in acc])
            t.store_vector(x, swizzle(in_cluster, unit * UNIT) >> 1, words)
        return
    _add_warps(t, shape, top, values, x, sums, tops, weights)


def _add(t: Any, log: Any, words: list, weight: Any, *acc: Any) -> list:
    term = t.exp2(log)
    return [weight + term, *(total + value * term for total, value in zip(acc, unpack(t, words), strict=True))]


def _add_lines(t: Any, shape: Shape, top: Any, values: list) -> tuple[Any, list]:
    """What the lines of a warp that have the same token add up to, in each of them."""
    distances = [_LINE << i for i in range(min(shape.groups, _LINES_A_WARP).bit_length() - 1)]
    own = top
    for distance in distances:
        top = t.maximum(top, t.shuffle_xor(top, distance))
    scale = t.exp2(own - top)
    values = [value * scale for value in values]
    for distance in distances:
        values = [value + t.shuffle_xor(value, distance) for value in values]
    return top, values


def _add_warps(t: Any, shape: Shape, top: Any, values: list, x: Any, sums: Any, tops: Any, weights: Any) -> None:
    """Adds up what the warps of a token have, in their order, two columns a thread."""
    warp, lane = t.thread() >> 5, t.thread() & 31
    weight, *acc = values
    with t.when(lane < _LINE):
        for start in (0, 4):
            t.store_vector(sums, warp * SIDE + lane * UNIT + start, acc[start : start + 4])
    with t.when(t.is_equal(lane, 0)):
        t.store(tops, warp, top)
        t.store(weights, warp, weight)
    t.barrier()
    token = t.divide(t.thread(), SIDE // 2)
    column = (t.thread() - token * (SIDE // 2)) * 2
    with t.when(token < shape.tokens):
        warps = [token * shape.warps_a_token + i for i in range(shape.warps_a_token)]
        logs = [t.load(tops, i) for i in warps]
        top = functools.reduce(t.maximum, logs)
        scales = [t.exp2(log - top) for log in logs]
        pairs = [t.load_vector(sums, i * SIDE + column, 2) for i in warps]
        weight, low, high = (
            functools.reduce(operator.add, [value * scale for value, scale in zip(of_warps, scales, strict=True)])
            for of_warps in ([t.load(weights, i) for i in warps], *zip(*pairs, strict=True))
        )
        t.store(x, swizzle(token, column) >> 1, t.pair(low / weight, high / weight))


def finish(t: Any, first: Any, head: Any, rank: Any, received: Any, out: Any, *, shape: Shape) -> None:
    """Adds up what the blocks have sent, ``received`` [blocks, tokens, 16 and some], in their order, two outputs a thread."""
    pairs = _SHARE // 2
    for turn in range(pl.cdiv(shape.tokens * pairs, _NUM_THREADS)):
        index = t.thread() + turn * _NUM_THREADS
        token = t.divide(index, pairs)
        output = (index - token * pairs) * 2
        with t.when((token < shape.tokens) & (first + token < shape.batch * shape.nodes)):
            places = [(token + i * shape.num_columns) * _STRIDE + output for i in range(CLUSTER)]
            parts = [t.load_vector(received, place, 2) for place in places]
            sums = [functools.reduce(operator.add, values) for values in zip(*parts, strict=True)]
            at = ((first + token) * shape.heads + head) * OUTPUTS + rank * _SHARE + output
            t.store(out, at >> 1, t.pair(*sums))


def _expect(barriers_ref: Any, num_bytes: int) -> None:
    """Makes the barrier that waits for what the cluster's blocks send, so many bytes in all."""
    w.init_barriers(barriers_ref, (1,))

    @w.inline(1, 0)
    def call(barriers: Any) -> None:
        first = arith.cmpi(arith.CmpIPredicate.eq, w.thread(), w.i32(0))
        ptx = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {num_bytes};"
        mgpu.utils.inline_ptx(ptx, w.pointer(barriers), predicate=first, has_side_effects=True)

    call(barriers_ref)


def _send(received_ref: Any, barriers_ref: Any, warpgroup: Array, rank: Array, acc: Array, shape: Shape) -> None:
    """A warp's sums [16, tokens] to the block that finishes these outputs, which is told how many bytes have come."""

    @w.inline(2, 2, (_WGMMA,))
    def call(received: Any, barriers: Any, warpgroup: Any, rank: Any, acc: Any) -> None:
        row, t = w.lane()
        place = w.add(row, w.scaled(t, 2 * _STRIDE), w.scaled(rank, shape.num_columns * _STRIDE))
        start = w.at(w.pointer(received), w.scaled(place, 4), w.SHARED)
        to = w.add(w.scaled(warpgroup, 4), w.warp())
        there, barrier = (
            mgpu.utils.inline_ptx(
                "mapa.shared::cluster.u32 $0, $1, $2;", here, to, result_types=w.i32(), has_side_effects=True
            )
            for here in (start, w.pointer(barriers))
        )
        # Registers: 8 tokens after 8, of each the upper and the lower half of the warp's 16 rows.
        for i, register in enumerate(acc.registers.flat):
            for j, value in enumerate(w.elements(register, 2)):
                offset = 4 * ((8 * (i // 2) + j) * _STRIDE + 8 * (i % 2))
                ptx = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32"
                ptx = f"{ptx} [$0+{offset}], $1, [$2];"
                mgpu.utils.inline_ptx(ptx, there, value, barrier, has_side_effects=True)

    call(received_ref, barriers_ref, warpgroup, rank, acc)


def project_splits(
    part_BnsC: BFloat16[Array, "B n s C"],
    lse_Bnsc: Float[Array, "B n s c"],
    length_B: Int32[Array, "B"],
    blocks: BFloat16[Array, "M N 64 64"],
    *,
    nodes: int,
    heads: int,
    tile: int,
    config: Config = Config(),
) -> BFloat16[Array, "T HU"]:
    """The sum over splits, up to its order that of `tree_mla_split.combine`, of each head times its matrix.

    Products are summed in float32.

    Rows are ``nodes`` x ``heads``, and some that are not read. Heads' matrices stand below each other in blocks, as
    `skinny_gemm.pack_weights` lays them out.

    Raises:
      NotImplementedError: the kernel does not take this input. It is named.
    """
    shape = choose_shape(part_BnsC, lse_Bnsc, blocks, nodes, heads, tile, config)

    def body(part, lse, length, blocks, out, x_s, blocks_s, received_s, *rest):
        *scratch_s, barriers, full = rest
        index, rank, warpgroup = (lax.axis_index(name) for name in ("block", "rank", "warpgroup"))
        head = lax.div(index, jnp.int32(shape.clusters_a_head))
        first = lax.rem(index, jnp.int32(shape.clusters_a_head)) * shape.tokens

        @pl.when(warpgroup == 0)
        def _() -> None:
            for i in range(WARPGROUPS):
                source = blocks.at[head * WARPGROUPS + i, rank]
                plgpu.copy_gmem_to_smem(source, blocks_s.at[i], full)

        _expect(barriers, 4 * CLUSTER * _SHARE * shape.num_columns)
        at_cluster_barrier("arrive.relaxed")
        arrays = (part, UINT), (lse, FLOAT), (length, INT), *((ref, FLOAT) for ref in scratch_s)
        fill(functools.partial(add_slice, shape=shape, config=config), x_s, arrays, [first, head, rank])
        plgpu.barrier_wait(full)

        def multiply(acc_ref: Any) -> Array:
            plgpu.wgmma(acc_ref, blocks_s.at[warpgroup], x_s.transpose((1, 0)))
            return acc_ref[...]

        acc = pl.run_scoped(multiply, plgpu.ACC((SIDE, shape.num_columns), jnp.float32))
        # All blocks have made their barriers.
        at_cluster_barrier("wait.acquire")
        _send(received_s, barriers, warpgroup, rank, acc, shape)
        w.wait_barrier(barriers, *(jnp.int32(0),) * 2)
        simt.run(functools.partial(finish, shape=shape), [(received_s, FLOAT), (out, UINT)], [first, head, rank])

    num_warps = _NUM_THREADS // 32
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((shape.batch * nodes, heads * OUTPUTS), jnp.bfloat16),
        grid=(heads * shape.clusters_a_head,),
        grid_names=("block",),
        cluster=(CLUSTER,),
        cluster_names=("rank",),
        scratch_types=[
            plgpu.SMEM((shape.num_columns, SIDE), jnp.bfloat16, transforms=SWIZZLED),
            plgpu.SMEM((WARPGROUPS, SIDE, SIDE), jnp.bfloat16, transforms=SWIZZLED),
            plgpu.SMEM((shape.num_received,), jnp.float32),
            plgpu.SMEM((shape.num_sums,), jnp.float32),
            plgpu.SMEM((num_warps,), jnp.float32),
            plgpu.SMEM((num_warps,), jnp.float32),
            plgpu.SMEM((1,), jnp.int64),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        **simt.options("project_splits", _NUM_THREADS),
    )(part_BnsC, lse_Bnsc, length_B, blocks)
