"""Kernel durations from CUPTI, the driver's own clock: launch gaps and the host are not in them."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax


def kernel_timeline(calls: Sequence[Callable[[], Any]]) -> list[tuple[str, float]]:
    """Name and seconds of every kernel that the calls start, in the order of the driver's records."""
    from jax._src.lib import mosaic_gpu  # There only with a CUDA plugin.

    cupti = mosaic_gpu._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        for call in calls:
            out = call()
        jax.block_until_ready(out)
    finally:
        times = cupti._cupti_get_timings(True)
    return [(name, milliseconds * 1e-3) for name, milliseconds in times]


def kernel_seconds(call: Callable[..., Any], inputs: Sequence[tuple], runs: int) -> dict[str, float]:
    """Median duration of each kernel that ``call`` starts, over ``runs`` calls that take the inputs in turn."""
    jax.block_until_ready([call(*arrays) for arrays in inputs[:2]])
    by_name: dict[str, list[float]] = {}
    for name, seconds in kernel_timeline([lambda run=run: call(*inputs[run % len(inputs)]) for run in range(runs)]):
        by_name.setdefault(name, []).append(seconds)
    return {name: statistics.median(values) * len(values) / runs for name, values in by_name.items()}
