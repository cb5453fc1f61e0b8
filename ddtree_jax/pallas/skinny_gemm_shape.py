"""How a launch of `skinny_gemm` divides the work: tuning, outputs, and what is static of its tiles and spans."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

SIDE = 64
"""Rows and columns of a weight block: the rows of ``wgmma``, and a line of 128 bytes."""
WARPGROUP = 128
_PAD = 4  # Floats behind a token's sums, so that a warp's stores meet all banks.


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """``num_blocks`` run at once, one a multiprocessor; a step has ``step_blocks`` blocks of 64 columns.

    With a ``cluster`` above 1 there are that many blocks for every tile, whatever ``num_blocks`` is.

    The times decide how tiles are shared out (`skinny_gemm.choose_config`): what it costs to add up parts through device
    memory or in a cluster, and what one block and all of them read. They are estimates: the kernel has not run on a GPU
    yet, and only what all blocks read at best, 4.57 TB/s, was measured, with another kernel on an H200. Clusters lie in
    groups of multiprocessors.
    """

    num_blocks: int = 132
    cluster: int = 1
    step_blocks: int = 2
    max_stages: int = 16
    shared_bytes: int = 220_000
    group_size: int = 16
    split_microseconds: float = 2.0
    cluster_microseconds: float = 1.0
    block_bytes_a_microsecond: float = 60e3
    bytes_a_microsecond: float = 4.57e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """A result [T, width]; of a gated one it is ``silu(gate) * up`` of two weights of that width."""

    width: int
    dtype: Any = jnp.bfloat16
    is_gated: bool = False

    @property
    def num_blocks(self) -> int:
        """Of 64 weight rows."""
        return -(-self.width * (2 if self.is_gated else 1) // SIDE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is static in a launch. ``num_tokens`` is a multiple of 8, of which ``num_stored`` are written."""

    num_tokens: int
    num_stored: int
    num_tiles: int
    num_columns: int
    """Blocks of 64 columns in a tile."""
    warpgroups: int
    tiles_a_group: int
    num_blocks: int
    cluster: int
    """Blocks of a tile that read each other's sums; 1: parts go through device memory."""
    step_blocks: int
    outputs: tuple[Output, ...]

    @property
    def num_steps(self) -> int:
        """In a tile."""
        return self.num_columns // self.step_blocks

    @property
    def total_steps(self) -> int:
        return self.num_tiles * self.num_steps

    @property
    def has_parts(self) -> bool:
        """Whether any tile lies in several blocks that are no cluster."""
        return self.cluster == 1 and self.num_tiles % self.num_blocks != 0

    @property
    def rows(self) -> int:
        """Of a tile."""
        return SIDE * self.warpgroups

    @property
    def num_threads(self) -> int:
        """That multiply."""
        return WARPGROUP * self.warpgroups

    @property
    def stage_bytes(self) -> int:
        return 2 * SIDE * self.step_blocks * (self.rows + self.num_tokens)

    @property
    def sums_stride(self) -> int:
        """Floats from a token's sums to the next one's."""
        return self.rows + _PAD

    def span(self, block: Any) -> tuple[Any, Any]:
        return block * self.total_steps // self.num_blocks, (block + 1) * self.total_steps // self.num_blocks

    def owner(self, step: Any) -> Any:
        """The block whose span has the step."""
        return ((step + 1) * self.num_blocks - 1) // self.total_steps

    @property
    def max_pieces(self) -> int:
        """Most tiles that a block has a part of."""
        spans = map(self.span, range(self.num_blocks))
        return max((end - 1) // self.num_steps - start // self.num_steps + 1 for start, end in spans)


def num_stages(shape: Shape, config: Config) -> int:
    """Of the ring, as many as shared memory holds beside the sums."""
    free = config.shared_bytes - 4 * shape.num_tokens * shape.sums_stride
    return min(config.max_stages, free // shape.stage_bytes)
