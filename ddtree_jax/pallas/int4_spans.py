"""How the INT4 kernel's work is cut and shared out: tuning, and each block's span of steps."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ddtree_jax.pallas.int4_blocks import BLOCK_COLUMNS, BLOCK_ROWS


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tuning. ``num_blocks`` is the device's multiprocessors: all blocks must run at once, one on each.

    More than ``max_stages`` in flight share the memory's bandwidth, so that the first comes later and none is done sooner.
    Hidden rows of up to ``split_columns`` are kept as two terms: with few, the rounding of one may make most of the error.
    ``shared_bytes`` of shared memory a block, less than the device's limit by what the compiler adds. Without bulk copies
    the kernel also runs on devices before Hopper.

    The last ``free_tiles`` of down's of each unit are in no block's span: blocks take them one by one when they are through
    with their own, so that all are busy to the end, however much memory each one got.
    """

    num_blocks: int = 132
    warpgroups: int = 2
    tile_rows: int = 512
    step_columns: int = 128
    shared_bytes: int = 223_000
    max_stages: int = 3
    split_columns: int = 128
    combine_unroll: int = 16
    free_tiles: int = 0
    has_bulk_copies: bool = True

    @property
    def tile_blocks(self) -> int:
        return self.tile_rows // BLOCK_ROWS

    @property
    def warpgroup_blocks(self) -> int:
        return self.tile_blocks // self.warpgroups

    @property
    def step_blocks(self) -> int:
        return self.step_columns // BLOCK_COLUMNS

    @property
    def num_threads(self) -> int:
        """That compute."""
        return 128 * self.warpgroups


HOPPER = Config(free_tiles=3)
# 101,376 bytes a block, as on consumer Blackwell.
SMALL = Config(step_columns=64, shared_bytes=94_000)
AMPERE = Config(num_blocks=108, step_columns=64, shared_bytes=156_000, has_bulk_copies=False)


def divide(value: Array, divisor: Array) -> Array:
    """Quotient, rounded down, if it is below 2^20: in a third of the instructions that integers take."""
    quotient = (value.astype(jnp.float32) * (1.0 / divisor.astype(jnp.float32))).astype(jnp.int32)
    rest = value - quotient * divisor
    return quotient + (rest >= divisor).astype(jnp.int32) - (rest < 0).astype(jnp.int32)


@dataclass(frozen=True, slots=True)
class Product:
    """How a product's steps are counted: ``num_steps`` a tile, ``num_tiles`` a unit, equal spans for all blocks.

    The last ``num_free`` tiles of a unit are in no span.
    """

    blocks: Any
    config: Config
    num_free: int = 0

    @property
    def group(self) -> int:
        return self.blocks.shape[3]

    @property
    def num_tiles(self) -> int:
        return -(-self.blocks.shape[1] * self.group // self.config.tile_blocks)

    @property
    def num_own(self) -> int:
        """Tiles of a unit that spans hold."""
        return self.num_tiles - self.num_free

    @property
    def num_steps(self) -> int:
        return self.blocks.shape[2] // self.config.step_blocks

    @property
    def num_columns(self) -> int:
        return self.blocks.shape[2] * BLOCK_COLUMNS

    def sharing(self, num_units: Array) -> tuple[Array, Array]:
        """Number of steps, and of blocks that share them: all, or one a step, so that none between two is without any."""
        total = num_units * (self.num_own * self.num_steps)
        return total, jnp.clip(total, 1, self.config.num_blocks)

    def span(self, num_units: Array, block: Array) -> tuple[Array, Array]:
        total, sharing = self.sharing(num_units)
        first, second = (jnp.minimum(index, sharing) * total // sharing for index in (block, block + 1))
        return first, second

    def owner(self, num_units: Array, step: Array) -> Array:
        """Block whose span a step is in."""
        total, sharing = self.sharing(num_units)
        return divide((step + 1) * sharing - 1, jnp.maximum(total, 1))

    def owners(self, num_units: Array, unit: Array, tile: Array) -> tuple[Array, Array]:
        """First and last block that hold steps of a tile; the same one twice for a tile that is in no span."""
        begin = (unit * self.num_own + tile) * self.num_steps
        first, last = self.owner(num_units, begin), self.owner(num_units, begin + self.num_steps - 1)
        return first, jnp.where(tile < self.num_own, last, first)

    def position(self, step: Array) -> tuple[Array, Array, Array]:
        """Unit, tile of the unit, step of the tile."""
        tile = step // self.num_steps
        return tile // self.num_own, lax.rem(tile, self.num_own), lax.rem(step, self.num_steps)

    def free_tile(self, number: Array) -> tuple[Array, Array]:
        """Unit and tile of the unit."""
        return number // self.num_free, self.num_own + lax.rem(number, self.num_free)
