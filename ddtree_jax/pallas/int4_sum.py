"""The INT4 kernel's last sum: over each token's experts, of what blocks wrote of down, and what is added to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ddtree_jax.pallas import warps
from ddtree_jax.pallas.int4_spans import Config, Product
from ddtree_jax.pallas.int4_steps import TOKENS


@dataclass(frozen=True, kw_only=True, slots=True)
class LastSum:
    """A block's share of it: where pairs are, beginnings of tiles by pair in ``sums``, later parts by block in ``parts``."""

    config: Config
    product: Product
    index: Array
    warpgroup: Array
    num_units: Array
    places: Any
    router_weight: Any
    added: Sequence[Any]
    sums: Any
    parts: Any
    out: Any

    @property
    def layout(self) -> Any:
        rows = self.config.tile_rows
        return plgpu.Layout.WG_STRIDED((rows,), vec_size=rows // 128)

    def add_up(self, wait: Callable[[], None]) -> None:
        """A warpgroup a token and tile, in turns.

        ``wait`` waits for all blocks. Before, it is known whence the first are taken, and what is added is there.
        """
        product, rows = self.product, self.config.tile_rows
        num_tokens, per_token = self.router_weight.shape
        num_tasks, everyone = num_tokens * product.num_tiles, self.config.num_blocks * self.config.warpgroups
        first = self.index * self.config.warpgroups

        def add_up(turn: Array, carry: Array) -> Array:
            task = first + self.warpgroup + turn * everyone
            current = jnp.minimum(task, num_tasks - 1)
            token, tile = current // product.num_tiles, lax.rem(current, product.num_tiles)
            weights, places, owners, added = self._find_sources(token, tile)
            pl.when(turn == 0)(wait)
            values = [
                plgpu.load(self.sums.at[token * per_token + x, tile], layout=self.layout) for x in range(per_token)
            ]

            def load(x: int, block: Array, is_needed: Array | bool = True) -> Array:
                n = lax.rem(jnp.maximum(places[x], 0), TOKENS)
                return plgpu.load(self.parts.at[block, jnp.where(is_needed, n, 0)], layout=self.layout)

            values, owners = self._add_second(values, owners, load)
            total = jnp.zeros((rows,))
            for value, place, weight in zip(add_parts(values, owners, load, 1), places, weights, strict=True):
                # What a place outside of all units holds is undefined.
                total = total + jnp.where(place < 0, 0.0, value * weight)
            for array in added:
                total = total + array.astype(jnp.float32)

            @pl.when(task < num_tasks)
            def _() -> None:
                self.out[token, pl.ds(tile * rows, rows)] = total.astype(self.out.dtype)

            return carry

        lax.fori_loop(0, (num_tasks - first + everyone - 1) // everyone, add_up, 0)

    def _find_sources(
        self, token: Array, tile: Array
    ) -> tuple[list[Array], list[Array], list[tuple[Array, Array]], list[Array]]:
        """Of a token's tile: the router's weights, places, first and last blocks of its pairs, and what is added."""
        rows, per_token = self.config.tile_rows, self.router_weight.shape[1]
        weights = [self.router_weight[token, x] for x in range(per_token)]
        places = [self.places[token * per_token + x] for x in range(per_token)]
        owners = []
        for place in places:
            first, last = self.product.owners(self.num_units, jnp.maximum(place, 0) // TOKENS, tile)
            owners.append((first, jnp.where(place < 0, first, last)))
        warps.finish(*(block for blocks in owners for block in blocks))
        columns = pl.ds(tile * rows, rows)
        added = [plgpu.load(array.at[token, columns], layout=self.layout) for array in self.added]
        return weights, places, owners, added

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


def add_parts(
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
