"""Work of single threads (`simt`): a kernel of its own, or blocks behind those of another one, in its launch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.simt import FLOAT


@dataclass(frozen=True, kw_only=True, slots=True)
class Rider:
    """What ``num_threads`` threads of each of ``num_blocks`` do: ``function(t, block, *arrays, *outs, scratch)``.

    Arrays and outs are of 32-bit types, in global memory; the scratch is ``num_floats`` floats of shared memory. Blocks do
    not wait for each other, and their warps do not either: another kernel's blocks may have more threads.
    """

    name: str
    function: Callable[..., None]
    arrays: tuple[jax.Array, ...]
    outs: tuple[jax.ShapeDtypeStruct, ...]
    num_blocks: int
    num_threads: int
    num_floats: int

    def run(self, block: Any, refs: Sequence[Any], scratch: Any) -> None:
        """In a kernel's body, where ``refs`` are those of the arrays and the outs."""
        kinds = [np.dtype(array.dtype) for array in (*self.arrays, *self.outs)]
        simt.run(self.function, [*zip(refs, kinds, strict=True), (scratch, FLOAT)], [block])
