"""Routed experts with INT4 group-32 weights on a GPU: one kernel from routing to output.

A block has 2 or 4 computing warpgroups and 1 that fetches. Both products are cut into steps of 512 rows by 128 columns of one
unit (an expert and its tokens, see `int4_schedule`), in the order (unit, tile of 512 rows, columns), and every block takes an
equal span of them, wherever tiles begin or end::

    fetch    schedule | gate and up ──────────────► down, as far as the ring holds ┊ down ───────►
    compute  schedule | gate and up ─► sums ─► combine split tile ─► down ─► sums ─► sync ─► add up
                        step: unpack, x scale, mma                   hidden rows
                                                                     to shared memory

The ring never drains between tiles, units and products. A tile that lies in one block becomes hidden rows in its registers.
Of a tile that blocks share, the part that begins it goes to an array by pair, later parts to one by block, and whoever
needs the sum adds them in the order of blocks: the same on every run. Blocks wait for no more than they need: the block
with a tile's beginning for its other parts, a unit's second product for its hidden rows, the last sum for everything.

Bytes: every unit's expert once (3.1 MB at 256 features and 7,168 columns), 4.57 TB/s on an H200 at best.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int32

from ddtree_jax.pallas import int4_steps as steps
from ddtree_jax.pallas import warps
from ddtree_jax.pallas.int4_blocks import BLOCK_ROWS, BLOCK_WORDS
from ddtree_jax.pallas.int4_schedule import UnitTable, build_schedule, scratch_words
from ddtree_jax.pallas.int4_spans import Config, Product
from ddtree_jax.pallas.int4_steps import TOKENS
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
    semaphores: warps.Semaphores

    @property
    def num_stages(self) -> int:
        return self.ring.shape[0] * 4 // self.stage_bytes

    @property
    def stage_bytes(self) -> int:
        return steps.stage_bytes(self.config.tile_blocks, self.config.step_blocks)

    @property
    def products(self) -> tuple[Product, Product]:
        _, gate_up, down, *_ = self.inputs
        return Product(gate_up, self.config), Product(down, self.config)

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

    def _fetch_product(self, product: Product, is_first: bool, start: Array, end: Array, done: Array) -> None:
        config = self.config
        tokens, per_token = self.inputs[0], self.inputs[3].shape[1]
        warp, num_warps = warps.warp_index(), num_fetching_warps(self.num_stages)
        first = start + lax.rem(warp - done + num_warps * (done // num_warps + 1), num_warps)

        def fetch(turn: Array, carry: Array) -> Array:
            step = first + num_warps * turn
            count = done + step - start
            unit, tile, k = product.position(step)
            expert, num_tokens = self.table.split(self.units[unit])
            steps.fetch_step(
                product.blocks,
                self.ring,
                self.barriers,
                tokens,
                self.pairs,
                expert,
                tile * (config.tile_blocks // product.group),
                k * config.step_blocks,
                lax.rem(count, self.num_stages),
                1 - lax.rem(count // self.num_stages, 2),
                unit,
                num_tokens if is_first else jnp.int32(0),
                step_blocks=config.step_blocks,
                tile_blocks=config.tile_blocks,
                num_stages=self.num_stages,
                per_token=per_token,
                has_bulk_copies=config.has_bulk_copies,
            )
            return carry

        turns = jnp.maximum(end - first + num_warps - 1, 0) // num_warps
        lax.fori_loop(0, jnp.where(warp < num_warps, turns, 0), fetch, 0)

    def compute(self) -> None:
        """Both products and what lies between and behind them."""
        _, first_sums, hidden, second_sums, first_parts, second_parts = self.outputs
        gate_up, down = self.products
        self.semaphores.clear_next(self.index, self.config.num_blocks)
        stage = (jnp.int32(0), jnp.int32(0))
        stage = self._multiply(gate_up, stage, first_sums, first_parts, hidden)
        self._combine()
        self._multiply(down, stage, second_sums, second_parts, None)
        self.semaphores.signal(jnp.int32(0))
        task = self.index * self.config.warpgroups + self.warpgroup
        sources = self._find_sources(task)
        self.semaphores.wait(jnp.int32(0), jnp.int32(self.config.num_blocks))
        pl.when(self.index == 0)(self.semaphores.close)
        self._add_up(task, sources)

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
            unit, tile = index // product.num_tiles, lax.rem(index, product.num_tiles)
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
                where = (unit, tile, self.index, (begin > 0).astype(_INT), self.warpgroup)
                blocks = {"tile_blocks": self.config.tile_blocks, "warpgroup_blocks": self.config.warpgroup_blocks}
                steps.store_sums(sums, sums_ref, parts_ref, self.pairs, *where, **blocks)

            if is_first:
                pl.when(begin > 0)(lambda: self.semaphores.signal(self._has_parts(unit, tile)))
            return (*ring, count)

        return lax.fori_loop(first, last, multiply_tile, (*stage, jnp.int32(0)))[:2]

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

                ((gate, up),) = _add_parts([value], [owners], load, self.config.combine_unroll)
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

    def _find_sources(self, task: Array) -> tuple[list[Array], list[Array], list[tuple[Array, Array]], list[Array]]:
        """Of a token's tile: the router's weights, places, first and last blocks of its pairs, and what is added."""
        product, router_weight = self.products[1], self.inputs[3]
        rows = self.config.tile_rows
        layout = plgpu.Layout.WG_STRIDED((rows,), vec_size=rows // 128)
        num_tokens, per_token = router_weight.shape
        token, tile = jnp.minimum(task // product.num_tiles, num_tokens - 1), lax.rem(task, product.num_tiles)
        weights = [router_weight[token, x] for x in range(per_token)]
        places = [self.places[token * per_token + x] for x in range(per_token)]
        owners = []
        for place in places:
            first, last = product.owners(self.num_units, jnp.maximum(place, 0) // TOKENS, tile)
            owners.append((first, jnp.where(place < 0, first, last)))
        columns = pl.ds(tile * rows, rows)
        added = [plgpu.load(array.at[token, columns], layout=layout) for array in self.inputs[4:]]
        return weights, places, owners, added

    def _add_up(self, task: Array, sources: tuple) -> None:
        """Sums over tokens' experts, and what is added to them: a warpgroup a token and tile, in turns.

        Whence the first are taken is known, and so is what is added.
        """
        product, rows = self.products[1], self.config.tile_rows
        out, _, _, sums_ref, _, parts_ref = self.outputs
        num_tokens, per_token = self.inputs[3].shape
        layout = plgpu.Layout.WG_STRIDED((rows,), vec_size=rows // 128)
        everyone = self.config.num_blocks * self.config.warpgroups

        def add_up(turn: Array, sources: tuple) -> tuple:
            current = task + turn * everyone
            token, tile = current // product.num_tiles, lax.rem(current, product.num_tiles)
            weights, places, owners, added = sources
            values = [plgpu.load(sums_ref.at[token * per_token + x, tile], layout=layout) for x in range(per_token)]

            def load(x: int, block: Array, is_needed: Array | bool = True) -> Array:
                n = lax.rem(jnp.maximum(places[x], 0), TOKENS)
                return plgpu.load(parts_ref.at[block, jnp.where(is_needed, n, 0)], layout=layout)

            if self.config.has_early_parts:
                values, owners = self._add_second(values, owners, load)
            total = jnp.zeros((rows,))
            for value, place, weight in zip(_add_parts(values, owners, load, 1), places, weights, strict=True):
                # What a place outside of all units holds is undefined.
                total = total + jnp.where(place < 0, 0.0, value * weight)
            for array in added:
                total = total + array.astype(jnp.float32)
            out[token, pl.ds(tile * rows, rows)] = total.astype(out.dtype)
            return self._find_sources(current + everyone)

        lax.fori_loop(0, (num_tokens * product.num_tiles - task + everyone - 1) // everyone, add_up, sources)

    def _add_second(
        self, values: list[Array], owners: list[tuple[Array, Array]], load: Callable[..., Array]
    ) -> tuple[list[Array], list[tuple[Array, Array]]]:
        """Adds the second parts, which are asked for together with the first: some tile nearly always has one.

        Where there is none, the block reads something of its own for nothing.
        """
        is_split = [first < last for first, last in owners]
        blocks = [jnp.where(split, first + 1, self.index) for split, (first, _) in zip(is_split, owners, strict=True)]
        parts = [load(x, *where) for x, where in enumerate(zip(blocks, is_split, strict=True))]
        values = [
            value + jnp.where(split, part, 0.0) for value, split, part in zip(values, is_split, parts, strict=True)
        ]
        return values, [(first + 1, last) for first, last in owners]


def _add_parts(
    values: Sequence[Any], owners: Sequence[tuple[Array, Array]], load: Callable[[int, Array], Any], unroll: int
) -> list[Any]:
    """Adds to value i the parts ``load(i, block)`` of the blocks after the first to the last, in order."""
    most = owners[0][1] - owners[0][0]
    for first, last in owners[1:]:
        most = jnp.maximum(most, last - first)

    def add(turn: Array, values: list) -> list:
        sums = []
        for i, (value, (first, last)) in enumerate(zip(values, owners, strict=True)):
            blocks = [first + 1 + turn * unroll + j for j in range(unroll)]
            parts = [load(i, jnp.minimum(block, last)) for block in blocks]
            for is_owner, part in zip([block <= last for block in blocks], parts, strict=True):
                value = jax.tree.map(lambda v, p, is_owner=is_owner: v + jnp.where(is_owner, p, 0.0), value, part)
            sums.append(value)
        return sums

    return lax.fori_loop(0, (most + unroll - 1) // unroll, add, list(values))


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
        added, outputs, (ring, barriers, hidden_s, units, pairs, places) = refs[:-12], refs[-12:-6], refs[-6:]
        fetching = 1 if config.has_bulk_copies else 32
        index = lax.axis_index("block")
        threads = config.num_threads + 128
        num_semaphores = 1 + table.num_units * (1 + gate_up_product.num_tiles)
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
            *(plgpu.SMEM((size,), _INT) for size in table.num_words),
        ],
    )(x_TD, expert_TX.reshape(-1), gate_up_EMKmw, down_EMKmw, weight_TX, *added)
    return out_TD[:, : x_TD.shape[1]]
