"""Routed experts with INT4 group-32 weights on a GPU: one kernel from routing to output.

A block has 2 computing warpgroups and 1 that fetches. Both products are cut into steps of 512 rows by 128 columns of one
unit (an expert and its tokens, see `int4_schedule`), in the order (unit, tile of 512 rows, columns), and every block takes an
equal span of them, wherever tiles begin or end::

    fetch    schedule | gate and up ──────────────► down, as far as the ring holds ┊ down ─► free tiles
    compute  schedule | gate and up ─► sums ─► combine split tile ─► down ─► free tiles ─► sync ─► add up
                        step: unpack, x scale, mma                   hidden rows
                                                                     to shared memory

The ring never drains between tiles, units and products. A tile that lies in one block becomes hidden rows in its registers.
Of a tile that blocks share, the part that begins it goes to an array by pair, later parts to one by block, and whoever
needs the sum adds them in the order of blocks: the same on every run. Blocks wait for no more than they need: the block
with a tile's beginning for its other parts, a unit's second product for its hidden rows, the last sum for everything.

Equal spans take unequal times, since memory serves blocks in an order that differs from run to run: at 16 tokens on an H200
they ended between 78 and 86 us after the first one's start. So some tiles of down are in no span (``Config.free_tiles``).
Blocks take them one by one, each as a whole: who did makes no difference to the sum. Their hidden rows come through the
ring, as the tokens of gate and up do.

Bytes: every unit's expert once (3.1 MB at 256 features and 7,168 columns), 4.57 TB/s on an H200 at best.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int32

from ddtree_jax.pallas import int4_fetch as fetch
from ddtree_jax.pallas import int4_steps as steps
from ddtree_jax.pallas import warps
from ddtree_jax.pallas.int4_blocks import BLOCK_ROWS, BLOCK_WORDS
from ddtree_jax.pallas.int4_schedule import UnitTable, build_schedule, scratch_words
from ddtree_jax.pallas.int4_spans import Config, Product
from ddtree_jax.pallas.int4_steps import TOKENS
from ddtree_jax.pallas.int4_sum import LastSum, add_parts
from ddtree_jax.pallas.int4_unpack import WEIGHT_SCALE

_WARPS = 4
_INT = jnp.int32


def num_fetching_warps(num_stages: int) -> int:
    """A warp whose next step is more than a turn of the ring ahead could not tell whether that stage is free."""
    return min(_WARPS, num_stages)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block's refs and place; its methods are what its warpgroups do."""

    config: Config
    table: UnitTable
    num_features: int
    index: Array
    warpgroup: Array
    num_units: Array
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    ring: Any
    barriers: Any
    hidden_s: Any
    units: Any
    pairs: Any
    places: Any
    numbers: Any
    semaphores: warps.Semaphores

    @property
    def num_stages(self) -> int:
        return self.ring.shape[0] * 4 // self.stage_bytes

    @property
    def stage_bytes(self) -> int:
        return steps.stage_bytes(self.config.tile_blocks, self.config.step_blocks)

    @property
    def sizes(self) -> fetch.Ring:
        config = self.config
        return fetch.Ring(
            step_blocks=config.step_blocks,
            tile_blocks=config.tile_blocks,
            num_stages=self.num_stages,
            has_bulk_copies=config.has_bulk_copies,
        )

    @property
    def products(self) -> tuple[Product, Product]:
        _, gate_up, down, *_ = self.inputs
        return Product(gate_up, self.config), Product(down, self.config, self.config.free_tiles)

    @property
    def num_terms(self) -> int:
        """Of a hidden row."""
        return self.outputs[2].shape[1]

    def fetch(self) -> None:
        """Keeps the ring full. Warps take steps in turn, counted through both products."""
        done = jnp.int32(0)
        for product, is_first in zip(self.products, (True, False), strict=True):
            start, end = product.span(self.num_units, self.index)
            self._fetch_product(product, is_first, start, end, done)
            done = done + end - start
        if self.config.free_tiles:
            pl.when(warps.warp_index() == 0)(lambda: self._fetch_free(done))

    def _fetch_product(self, product: Product, is_first: bool, start: Array, end: Array, done: Array) -> None:
        config = self.config
        tokens, per_token = self.inputs[0], self.inputs[3].shape[1]
        warp, num_warps = warps.warp_index(), num_fetching_warps(self.num_stages)
        first = start + lax.rem(warp - done + num_warps * (done // num_warps + 1), num_warps)

        def fetch_step(turn: Array, carry: Array) -> Array:
            step = first + num_warps * turn
            unit, tile, k = product.position(step)
            expert, num_tokens = self.table.split(self.units[unit])
            group = tile * (config.tile_blocks // product.group)
            refs = (product.blocks, self.ring, self.barriers, tokens, self.pairs)
            where = (expert, group, k * config.step_blocks, *self._stage(done + step - start), unit)
            num_tokens = num_tokens if is_first else jnp.int32(0)
            fetch.fetch_step(*refs, *where, num_tokens, ring=self.sizes, per_token=per_token)
            return carry

        turns = jnp.maximum(end - first + num_warps - 1, 0) // num_warps
        lax.fori_loop(0, jnp.where(warp < num_warps, turns, 0), fetch_step, 0)

    def _fetch_free(self, done: Array) -> None:
        """A warp takes tiles that are in no span until there are no more; the next is asked for with each."""
        config, product = self.config, self.products[1]
        num_free = self.num_units * product.num_free

        def fetch_tile(number: Array, count: Array) -> None:
            unit, tile = product.free_tile(number)
            expert, num_tokens = self.table.split(self.units[unit])
            group = tile * (config.tile_blocks // product.group)
            refs = (product.blocks, self.ring, self.barriers, self.outputs[2], self.pairs, self.numbers)
            is_ready = self.semaphores.place(self._is_ready(unit))

            def fetch_step(k: Array, carry: Array) -> Array:
                where = (expert, group, k * config.step_blocks, *self._stage(count + k), unit, num_tokens, number)
                needed = jnp.where(k == 0, self.products[0].num_tiles, 0)
                fetch.fetch_free_step(*refs, *where, is_ready, needed, ring=self.sizes, semaphores=self.semaphores)
                return carry

            lax.fori_loop(0, product.num_steps, fetch_step, 0)

        def take(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            following, count, _ = carry
            number = warps.share(following)
            following = self.semaphores.take(self._free)
            is_over = number >= num_free
            pl.when(jnp.logical_not(is_over))(lambda: fetch_tile(number, count))
            return following, count + product.num_steps, is_over.astype(_INT)

        first = (self.semaphores.take(self._free), done, jnp.int32(0))
        _, count, _ = lax.while_loop(lambda carry: carry[2] == 0, take, first)
        fetch.fetch_end(self.barriers, self.numbers, *self._stage(count - product.num_steps), ring=self.sizes)

    def _stage(self, count: Array) -> tuple[Array, Array]:
        """Of the block's step ``count``: number, and what parity it is free by."""
        return lax.rem(count, self.num_stages), 1 - lax.rem(count // self.num_stages, 2)

    def compute(self) -> None:
        """Both products and what lies between and behind them."""
        out, first_sums, hidden, second_sums, first_parts, second_parts = self.outputs
        gate_up, down = self.products
        self.semaphores.clear_next(self.index, self.config.num_blocks)
        stage = (jnp.int32(0), jnp.int32(0))
        stage = self._multiply(gate_up, stage, first_sums, first_parts, hidden)
        self._combine()
        stage = self._multiply(down, stage, second_sums, second_parts, None)
        if self.config.free_tiles:
            self._multiply_free(stage)
        self.semaphores.signal(jnp.int32(0))
        _, _, _, router_weight, *added = self.inputs
        LastSum(
            config=self.config,
            product=down,
            index=self.index,
            warpgroup=self.warpgroup,
            num_units=self.num_units,
            places=self.places,
            router_weight=router_weight,
            added=added,
            sums=second_sums,
            parts=second_parts,
            out=out,
        ).add_up(self._wait_for_all)

    def _wait_for_all(self) -> None:
        self.semaphores.wait(jnp.int32(0), jnp.int32(self.config.num_blocks))
        pl.when(self.index == 0)(self.semaphores.close)

    @property
    def _free(self) -> Array:
        """Semaphore that counts the free tiles that blocks have taken."""
        return jnp.int32(1 + self.table.num_units * (1 + self.products[0].num_tiles))

    def _is_ready(self, unit: Array) -> Array:
        """Semaphore that counts the unit's tiles of gate and up whose hidden rows are written."""
        return 1 + unit

    def _has_parts(self, unit: Array, tile: Array) -> Array:
        """Semaphore that counts a tile's parts but the first."""
        return 1 + self.table.num_units + unit * self.products[0].num_tiles + tile

    def _multiply(
        self, product: Product, stage: tuple[Array, Array], sums_ref: Any, parts_ref: Any, hidden: Any
    ) -> tuple[Array, Array]:
        """Goes through the block's span of a product's steps; ``hidden`` takes tiles of gate and up that are whole."""
        num_steps = product.num_steps
        start, end = product.span(self.num_units, self.index)
        first = start // num_steps
        last = jnp.where(start < end, (end + num_steps - 1) // num_steps, first)
        is_first = hidden is not None

        def multiply_tile(index: Array, carry: tuple) -> tuple:
            *ring, count = carry
            unit, tile = index // product.num_own, lax.rem(index, product.num_own)
            is_new = (index == first) | (tile == 0)
            count = lax.cond(is_new, lambda: self._begin_unit(unit, is_first), lambda: count)
            begin = jnp.maximum(start - index * num_steps, 0)
            stop = jnp.minimum(end - index * num_steps, num_steps)
            is_whole = (begin == 0) & (stop == num_steps)

            *ring, sums = self._multiply_steps(product, begin, stop, count, ring, is_first)
            if is_first:
                pl.when(is_whole)(lambda: self._store_hidden(sums, hidden, unit, tile))

            @pl.when(jnp.logical_not(is_whole) if is_first else index >= 0)
            def _() -> None:
                self._store_sums(sums, sums_ref, parts_ref, unit, tile, (begin > 0).astype(_INT))

            if is_first:
                pl.when(begin > 0)(lambda: self.semaphores.signal(self._has_parts(unit, tile)))
            return (*ring, count)

        return lax.fori_loop(first, last, multiply_tile, (*stage, jnp.int32(0)))[:2]

    def _multiply_free(self, stage: tuple[Array, Array]) -> None:
        """Tiles of down as the ring brings them, with their hidden rows."""
        product = self.products[1]
        _, _, _, sums_ref, _, parts_ref = self.outputs

        def wait(stage: Array, parity: Array) -> Array:
            warps.wait_barrier(self.barriers, stage, parity)
            return self.numbers[stage]

        def multiply(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            *ring, number = carry
            unit, tile = product.free_tile(number)
            _, count = self.table.split(self.units[unit])
            *ring, sums = self._multiply_steps(product, jnp.int32(0), jnp.int32(product.num_steps), count, ring, True)
            self._store_sums(sums, sums_ref, parts_ref, unit, tile, jnp.int32(0))
            return (*ring, wait(*ring))

        lax.while_loop(lambda carry: carry[2] >= 0, multiply, (*stage, wait(*stage)))

    def _store_sums(self, sums: Array, sums_ref: Any, parts_ref: Any, unit: Array, tile: Array, is_part: Array) -> None:
        where = (unit, tile, self.index, is_part, self.warpgroup)
        blocks = {"tile_blocks": self.config.tile_blocks, "warpgroup_blocks": self.config.warpgroup_blocks}
        steps.store_sums(sums, sums_ref, parts_ref, self.pairs, *where, **blocks)

    def _multiply_steps(
        self, product: Product, begin: Array, stop: Array, count: Array, ring: Sequence[Array], is_first: bool
    ) -> tuple[Array, Array, Array]:
        """Steps ``begin`` to ``stop`` of a tile: where the ring is then, and the sums."""
        config = self.config
        tokens_at = config.tile_blocks * config.step_blocks * BLOCK_WORDS * 4
        zeros = jnp.zeros((BLOCK_ROWS * config.warpgroup_blocks, TOKENS))
        zeros = plgpu.layout_cast(zeros, steps.ACCUMULATOR)

        def step(k: Array, carry: tuple) -> tuple:
            stage, parity, sums = carry
            warps.wait_barrier(self.barriers, stage, parity)
            sums = steps.multiply_step(
                self.ring,
                self.ring if is_first else self.hidden_s,
                sums,
                stage,
                self.warpgroup,
                stage * self.stage_bytes + tokens_at if is_first else k * (2 * config.step_columns),
                count,
                step_blocks=config.step_blocks,
                warpgroup_blocks=config.warpgroup_blocks,
                tile_blocks=config.tile_blocks,
                group=product.group,
                stride=steps.token_stride(config.step_columns if is_first else self.num_terms * product.num_columns),
                term_bytes=[0] if is_first else [2 * term * product.num_columns for term in range(self.num_terms)],
            )
            warps.arrive_warp(self.barriers, stage + self.num_stages)
            is_last = stage + 1 == self.num_stages
            return jnp.where(is_last, 0, stage + 1), jnp.where(is_last, 1 - parity, parity), sums

        *ring, sums = lax.fori_loop(begin, stop, step, (*ring, zeros))
        return *ring, sums * WEIGHT_SCALE

    def _store_hidden(self, sums: Array, hidden: Any, unit: Array, tile: Array) -> None:
        feature = tile * (self.config.tile_rows // 2)
        blocks = {"num_features": self.num_features, "warpgroup_blocks": self.config.warpgroup_blocks}
        steps.store_hidden(sums, hidden, self.pairs, unit, feature, self.warpgroup, **blocks)
        self.semaphores.signal(self._is_ready(unit))

    def _begin_unit(self, unit: Array, is_first: bool) -> Array:
        """Number of the unit's tokens; for the second product their hidden rows are put into shared memory."""
        _, count = self.table.split(self.units[unit])
        if not is_first:
            self._load_hidden(unit, count)
        return count

    def _load_hidden(self, unit: Array, count: Array) -> None:
        threads = self.config.num_threads
        gate_up, down = self.products
        self.semaphores.wait(self._is_ready(unit), jnp.int32(gate_up.num_tiles))
        sizes = {"num_columns": down.num_columns, "num_threads": threads}
        steps.load_hidden(self.outputs[2], self.hidden_s, self.pairs, unit, count, **sizes)
        warps.sync_threads(threads)

    def _combine(self) -> None:
        """Hidden rows of the tile that begins in this block's span and ends in a later one's.

        Later blocks began with their parts of it, and have usually written them by then.
        """
        product, half = self.products[0], self.config.tile_rows // 2
        _, sums_ref, hidden, _, parts_ref, _ = self.outputs
        start, end = product.span(self.num_units, self.index)
        unit, tile, k = product.position(end - 1)
        begin, size = end - 1 - k, product.num_steps
        layout = plgpu.Layout.WG_STRIDED((half,), vec_size=half // 128)
        num_features = self.num_features

        @pl.when((start < end) & (begin >= start) & (begin + size > end))
        def _() -> None:
            owners = self.index, product.owner(self.num_units, begin + size - 1)
            self.semaphores.wait(self._has_parts(unit, tile), owners[1] - owners[0])
            _, count = self.table.split(self.units[unit])

            def combine(turn: Array, carry: Array) -> Array:
                n = turn * self.config.warpgroups + self.warpgroup
                pair = self.pairs[unit * TOKENS + n]
                value = [plgpu.load(sums_ref.at[pair, tile, j], layout=layout) for j in range(2)]

                def load(_: int, block: Array) -> list[Array]:
                    return [plgpu.load(parts_ref.at[block, n, j], layout=layout) for j in range(2)]

                ((gate, up),) = add_parts([value], [owners], load, self.config.combine_unroll)
                value = gate / (1.0 + jnp.exp(-gate)) * up
                if num_features % half:
                    feature = tile * half + plgpu.broadcasted_iota(_INT, (half,), 0, layout=layout)
                    value = jnp.where(feature < num_features, value, 0.0)
                for term in range(self.num_terms):
                    narrow = value.astype(jnp.bfloat16)
                    hidden[pair, term, pl.ds(tile * half, half)] = narrow
                    value = value - narrow.astype(jnp.float32)
                return carry

            turns = (count - self.warpgroup + self.config.warpgroups - 1) // self.config.warpgroups
            lax.fori_loop(0, turns, combine, 0)
            self.semaphores.signal(self._is_ready(unit))


def count_stages(table: UnitTable, hidden_bytes: int, config: Config) -> int:
    """Of the ring, beside the tables and ``hidden_bytes`` of hidden rows in a block's shared memory."""
    free_bytes = config.shared_bytes - hidden_bytes - 4 * sum(table.num_words)
    return min(config.max_stages, free_bytes // steps.stage_bytes(config.tile_blocks, config.step_blocks))


def int4_moe_kernel(
    x_TD: BFloat16[Array, "T D"],
    expert_TX: Int32[Array, "T X"],
    weight_TX: Float[Array, "T X"],
    gate_up_EMKmw: Int32[Array, "E M K m w"],
    down_EMKmw: Int32[Array, "E n k r w"],
    added_Td: BFloat16[Array, "T d"] | None,
    dtype: Any,
    config: Config,
) -> Float[Array, "T D"]:
    """Weighted sum of each token's experts. What `int4_moe` checks and documents; D is a multiple of 64 here."""
    (T, X), E = expert_TX.shape, gate_up_EMKmw.shape[0]
    P, half = T * X, config.tile_rows // 2
    gate_up_product, down_product = Product(gate_up_EMKmw, config), Product(down_EMKmw, config)
    num_features = gate_up_EMKmw.shape[1] * gate_up_product.group * BLOCK_ROWS // 2
    num_terms = 2 if down_product.num_columns <= config.split_columns else 1
    hidden_stride = steps.token_stride(num_terms * down_product.num_columns) // 2
    table = UnitTable(num_pairs=P, num_experts=E)
    stage_bytes = steps.stage_bytes(config.tile_blocks, config.step_blocks)
    num_stages = count_stages(table, 2 * TOKENS * hidden_stride, config)
    if num_stages < 2 or num_stages * stage_bytes < 4 * scratch_words(P, E):
        raise NotImplementedError(
            f"{T} tokens of {X} experts, {E} experts and width {num_features} need more than {config.shared_bytes} bytes "
            "of shared memory"
        )

    out_width = down_product.num_tiles * config.tile_rows
    added = [] if added_Td is None else [jnp.pad(added_Td, ((0, 0), (0, out_width - added_Td.shape[1])))]

    def body(x, expert, gate_up, down, weight, *refs) -> None:
        added, outputs, (ring, barriers, hidden_s, numbers, units, pairs, places) = (
            refs[:-13],
            refs[-13:-7],
            refs[-7:],
        )
        fetching = 1 if config.has_bulk_copies else 32
        index = lax.axis_index("block")
        threads = config.num_threads + 128
        num_semaphores = 2 + table.num_units * (1 + gate_up_product.num_tiles)
        semaphores = warps.open_semaphores(num_semaphores, config.num_threads)
        arrivals = [fetching] * num_stages + [_WARPS * config.warpgroups] * num_stages
        warps.init_barriers(barriers, arrivals, waits=False)
        build_schedule(expert, units, pairs, places, ring, table=table, num_threads=threads)
        warpgroup = lax.axis_index("warpgroup")
        block = _Block(
            config,
            table,
            num_features,
            index,
            warpgroup,
            units[table.num_units],
            (x, gate_up, down, weight, *added),
            outputs,
            ring,
            barriers,
            hidden_s,
            units,
            pairs,
            places,
            numbers,
            semaphores,
        )
        pl.when(warpgroup == config.warpgroups)(block.fetch)
        pl.when(warpgroup < config.warpgroups)(block.compute)

    f32, bf16 = jnp.float32, jnp.bfloat16
    out_TD, *_ = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((T, out_width), dtype),
            jax.ShapeDtypeStruct((P, gate_up_product.num_tiles, 2, half), f32),
            jax.ShapeDtypeStruct((P, num_terms, gate_up_product.num_tiles * half), bf16),
            jax.ShapeDtypeStruct((P, down_product.num_tiles, config.tile_rows), f32),
            jax.ShapeDtypeStruct((config.num_blocks, TOKENS, 2, half), f32),
            jax.ShapeDtypeStruct((config.num_blocks, TOKENS, config.tile_rows), f32),
        ),
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="int4_moe",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, approx_math=True
        ),
        scratch_types=[
            plgpu.SMEM((num_stages * stage_bytes // 4,), _INT),
            plgpu.SMEM((4 * num_stages,), _INT),
            plgpu.SMEM((TOKENS, hidden_stride), bf16),
            plgpu.SMEM((num_stages,), _INT),
            *(plgpu.SMEM((size,), _INT) for size in table.num_words),
        ],
    )(x_TD, expert_TX.reshape(-1), gate_up_EMKmw, down_EMKmw, weight_TX, *added)
    return out_TD[:, : x_TD.shape[1]]
