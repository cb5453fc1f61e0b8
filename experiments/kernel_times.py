"""Kernel durations from CUPTI, the driver's own clock: launch gaps and the host are not in them."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax


def kernel_seconds(call: Callable[..., Any], inputs: Sequence[tuple], runs: int) -> dict[str, float]:
    """Median duration of each kernel that ``call`` starts, over ``runs`` calls that take the inputs in turn."""
    from jax._src.lib import mosaic_gpu  # There only with a CUDA plugin.

    jax.block_until_ready([call(*arrays) for arrays in inputs[:2]])
    cupti = mosaic_gpu._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        for run in range(runs):
            out = call(*inputs[run % len(inputs)])
        jax.block_until_ready(out)
    finally:
        times = cupti._cupti_get_timings(True)
    by_name: dict[str, list[float]] = {}
    for name, milliseconds in times:
        by_name.setdefault(name, []).append(milliseconds * 1e-3)
    return {name: statistics.median(values) * len(values) / runs for name, values in by_name.items()}
