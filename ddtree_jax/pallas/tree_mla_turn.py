"""The rotary part of a block's queries, turned in shared memory by one warpgroup.

::

    load    cosines and sines of a thread's units from device memory        while the copy engine fetches the rows
    turn    the units, in float32, and round them                           once they are there

A unit is eight neighbours of a row, four pairs (2i, 2i + 1). Rows are a node's heads, one node after the other; they lie as
the copy engine swizzles lines of 128 bytes.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas import simt
from ddtree_jax.pallas import warps as w
from ddtree_jax.pallas.bfloat16_rows import LINE, SWIZZLED, UNIT, load_unit, store_unit, swizzle
from ddtree_jax.pallas.latent_rows import turn_unit
from ddtree_jax.pallas.simt import FLOAT, INT, UINT

ROWS, WIDTH = 64, LINE
_WARPGROUP = 128
_UNITS = ROWS * WIDTH // (UNIT * _WARPGROUP)  # Of a thread.


def _units(t: Any) -> list[tuple[Any, Any]]:
    """Row and first column of each unit of a thread; a warp's units lie together."""
    units = [(t.thread() & (_WARPGROUP - 1)) + _WARPGROUP * i for i in range(_UNITS)]
    return [(unit >> 3, (unit & 7) * UNIT) for unit in units]


def load_turn(t: Any, shape: tuple[int, int, int], heads: int, sequence: Any, tile: Any, cos: Any, sin: Any) -> list:
    """Of each unit of a thread four cosines, then four sines, out of ``cos`` and ``sin``, whose shape is [B, T, pairs]."""
    _, num_nodes, num_pairs = shape
    turn = []
    for row, column in _units(t):
        # Rows behind the nodes are turned by anything.
        node = t.minimum(t.divide(tile * ROWS + row, heads), num_nodes - 1)
        index = (sequence * num_nodes + node) * num_pairs + (column >> 1)
        turn += t.load_vector(cos, index, UNIT // 2) + t.load_vector(sin, index, UNIT // 2)
    return turn


def turn_rows(t: Any, rows: Any, turn: list) -> None:
    """Turns a thread's units of ``rows`` in shared memory by what `load_turn` gave."""
    places = [swizzle(row, column) for row, column in _units(t)]
    units = [load_unit(t, rows, place) for place in places]
    for i, (place, unit) in enumerate(zip(places, units, strict=True)):
        store_unit(t, rows, place, turn_unit(unit, turn[UNIT * i : UNIT * (i + 1)]))


def load_on_gpu(cos_ref: Any, sin_ref: Any, heads: int, sequence: Any, tile: Any) -> tuple:
    """`load_turn` in a kernel's body: scalars, which differ from thread to thread."""
    scalar = plgpu.ShapeDtypeStruct((), jnp.float32, layout=w.SCALAR)

    @w.inline(2, 2, (), (scalar,) * (UNIT * _UNITS))
    def load(cos: Any, sin: Any, *numbers: Any) -> tuple:
        values, memories = (simt.Value(x, INT) for x in numbers), (simt.Memory(x, FLOAT) for x in (cos, sin))
        turn = load_turn(simt.Threads(), cos_ref.shape, heads, *values, *memories)
        return tuple(mgpu.FragmentedArray.splat(value.code, ()) for value in turn)

    return load(cos_ref, sin_ref, sequence, tile)


def turn_on_gpu(rows_ref: Any, turn: tuple) -> None:
    """`turn_rows` in a kernel's body; the tensor cores may read the rows behind it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), *(w.SCALAR,) * len(turn)))
    def call(_: Any, rows: Any, *turn: Any) -> None:
        values = [simt.Value(value.registers.item(), FLOAT) for value in turn]
        turn_rows(simt.Threads(), simt.Memory(rows, UINT), values)
        mgpu.utils.commit_shared()

    call(rows_ref, *turn)
