"""How a launch of `skinny_gemm` divides the work: tuning, outputs, and what is static of its tiles."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

SIDE = 64
"""Rows and columns of a weight block: the rows of ``wgmma``, and a line of 128 bytes."""
WARPGROUP = 128
TOKENS_A_GROUP = 8
"""That a block of a cluster adds up at a time."""
_PAD = 4  # Floats behind a token's sums, so that a warp's stores meet all banks.


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A tile has a ``cluster`` of blocks; a step has ``step_blocks`` blocks of 64 columns, of up to ``few_tokens`` twice as
    many (`join_steps`), of more than ``many_tokens`` one.

    ``first_stages`` of the ring are filled before the block's threads wait for each other: an H200 fills one in 0.1 us.
    ``idle_clusters`` are clusters without a tile, with which a launch of clusters of two begins. An H200 was seen to place
    the first four on multiprocessors whose weights came last; without tiles there the projections q_a and kv_a of 16 tokens
    were 0.4 us faster.

    The other numbers decide how many blocks a tile gets (`skinny_gemm.choose_config`): multiprocessors, which clusters find
    free in groups, what one block and all of them read, and what a cluster costs and each of its blocks. They are fitted to
    times of 12 projections at 16 tokens on an H200, when blocks of a cluster still read each other's sums: with 2.2 us for a
    launch they tell them to 16 %, and choose clusters that are within 3 % of the fastest.
    """

    cluster: int = 1
    step_blocks: int = 2
    few_tokens: int = 16
    many_tokens: int = 128
    max_stages: int = 16
    first_stages: int = 2
    idle_clusters: int = 4
    shared_bytes: int = 220_000
    num_multiprocessors: int = 132
    group_size: int = 16
    block_bytes_a_microsecond: float = 80e3
    bytes_a_microsecond: float = 4.3e6
    cluster_microseconds: float = 0.6
    rank_microseconds: float = 0.1


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
    """What is static in a launch. ``num_tokens`` is a multiple of 8, of which ``num_stored`` are there."""

    num_tokens: int
    num_stored: int
    num_tiles: int
    num_columns: int
    """Blocks of 64 columns in a tile."""
    tiles_a_group: int
    cluster: int
    """Blocks of a tile, which send each other sums."""
    step_blocks: int
    steps_a_cut: int
    """Blocks of a cluster take whole multiples of so many steps."""
    outputs: tuple[Output, ...]

    @property
    def num_steps(self) -> int:
        """In a tile."""
        return self.num_columns // self.step_blocks

    @property
    def num_blocks(self) -> int:
        return self.num_tiles * self.cluster

    @property
    def stage_bytes(self) -> int:
        return 2 * SIDE * self.step_blocks * (SIDE + self.num_tokens)

    @property
    def sums_stride(self) -> int:
        """Floats from a token's sums to the next one's."""
        return SIDE + _PAD

    @property
    def num_groups(self) -> int:
        """Of tokens."""
        return self.num_tokens // TOKENS_A_GROUP

    @property
    def received_stride(self) -> int:
        """Floats from what one block of the cluster sends to what the next one does."""
        return -(-self.num_groups // self.cluster) * TOKENS_A_GROUP * self.sums_stride

    def span(self, rank: Any) -> tuple[Any, Any]:
        """Steps of its tile that a block of the cluster takes: the same columns for any number of tokens."""
        num_cuts = self.num_steps // self.steps_a_cut
        return tuple((rank + i) * num_cuts // self.cluster * self.steps_a_cut for i in range(2))


def join_steps(shape: Shape, config: Config) -> Shape:
    """Steps of twice as many blocks, of up to ``few_tokens``, where blocks of a cluster keep their columns by that."""
    twice = 2 * config.step_blocks
    joined = dataclasses.replace(shape, step_blocks=twice, steps_a_cut=1)
    is_short = shape.num_tokens <= config.few_tokens and shape.num_columns % twice == 0
    return joined if is_short and _columns(joined) == _columns(shape) else shape


def _columns(shape: Shape) -> list[tuple[int, ...]]:
    """First and last block of columns of each block of the cluster."""
    return [tuple(step * shape.step_blocks for step in shape.span(rank)) for rank in range(shape.cluster)]


def num_floats(shape: Shape, other: int = 0) -> int:
    """Of shared memory for a tile's sums, or for what another block of the launch takes."""
    return max(shape.num_tokens * shape.sums_stride, other)


def num_scratch_floats(shape: Shape, other: int = 0) -> int:
    """Of shared memory beside the ring: `num_floats`, or what a cluster's blocks send."""
    return num_floats(shape, other) if shape.cluster == 1 else shape.cluster * shape.received_stride


def num_stages(shape: Shape, config: Config, other: int = 0) -> int:
    """Of the ring: those that shared memory holds beside `num_scratch_floats`, but no more than a block has steps, or two.

    Each has barriers, which take time before anything else begins.

    Raises:
      NotImplementedError: it does not hold two.
    """
    free = config.shared_bytes - 4 * num_scratch_floats(shape, other)
    stages = min(config.max_stages, free // shape.stage_bytes)
    if stages < 2:
        raise NotImplementedError(f"two stages of {shape.stage_bytes} bytes need more than {config.shared_bytes} bytes")
    return min(stages, max(2, -(-shape.num_steps // shape.cluster)))
