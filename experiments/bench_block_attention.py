"""The drafter's attention on the device: against float64, and its time beside plain JAX's. See `bench_kernels`.

Shapes are those of a rank of ``tensor=8``. Times are taken with all arrays cold in L2 and warm, as in `bench_layer`.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.block_attention import block_attention_gpu, block_attention_reference
from experiments.bench_int4_moe import BYTES_PER_SECOND
from experiments.bench_layer import cold_seconds
from experiments.kernel_times import kernel_seconds

GROUP, WIDTH, EPS, WINDOW, SLOTS = 8, 128, 1e-5, 2048, 139_264
SIGHTS = {"sliding": {"window": WINDOW, "is_causal": True}, "full": {"window": None, "is_causal": False}}
FORMS = block_attention_gpu, block_attention_reference
CONTEXTS = (1024, 8192, 32768)
LIMIT = 4e-3
"""Of the relative norm error of a sequence."""
_CHECKED_SLOTS, _REPEATS = 8192, 20
_CHECKED = ((8, 8), (1, 16), (3, 1), (2, 5))  # Sequences and rows of a block.


def shapes(batch: int, rows: int, slots: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of the kernel's arguments."""
    row, cache = (batch, rows, 1, WIDTH), (batch, slots, 1, WIDTH)
    sizes = (batch, rows, 1, GROUP, WIDTH), row, row, (WIDTH,), (WIDTH,)
    turns = (jax.ShapeDtypeStruct((batch, rows, WIDTH // 2), jnp.float32),) * 2
    arrays, caches = ([jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in x] for x in (sizes, (cache, cache)))
    return *arrays, *turns, *caches, jax.ShapeDtypeStruct((batch,), jnp.int32)


def cases_to_compile() -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """Name, function and shapes of its arguments."""
    for layer, sight in SIGHTS.items():
        for batch, rows in ((1, 8), (8, 16)):
            name = f"{layer}, {rows} rows, batch {batch}"
            yield name, functools.partial(block_attention_gpu, eps=EPS, **sight), shapes(batch, rows, SLOTS)


def draw(batch: int, rows: int, slots: int, seed: int) -> tuple[jax.Array, ...]:
    """Arguments up to the lengths. Gains of the keys are such that some slots weigh much more than others."""
    keys = jax.random.split(jax.random.key(seed), 8)
    *sizes, _ = shapes(batch, rows, slots)
    arrays = [
        jax.random.normal(key, size.shape, size.dtype)
        for key, size in zip(keys, (*sizes[:5], *sizes[7:], sizes[5]), strict=True)
    ]
    *rows_of_block, query_gain, key_gain, cached_keys, values, angle = arrays
    gains = 1 + 0.1 * query_gain, 1 + 0.1 * key_gain
    return *rows_of_block, *gains, jnp.cos(100 * angle), jnp.sin(100 * angle), cached_keys, values


def float64(arrays: tuple, length: int, sequence: int, window: int | None, is_causal: bool) -> np.ndarray:
    """One sequence's output [T, Q, R]."""
    query, key, value, query_gain, key_gain, cos, sin, keys, values = arrays
    query, key, value, cos, sin, keys, values = (
        np.asarray(x[sequence], np.float64) for x in (query, key, value, cos, sin, keys[:, :length], values[:, :length])
    )

    def finish(x: np.ndarray, gain: Any, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * np.asarray(gain, np.float64)
        first, second = np.split(normed, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    query_TQR = finish(query[:, 0], query_gain, cos[:, None], sin[:, None])
    keys_kR = np.concatenate([keys[:, 0], finish(key[:, 0], key_gain, cos, sin)])
    position_T, position_k = length + np.arange(len(query)), np.arange(len(keys_kR))
    distance_Tk = position_T[:, None] - position_k
    is_seen_Tk = (distance_Tk >= 0) if is_causal else np.ones(distance_Tk.shape, bool)
    if window is not None:
        is_seen_Tk &= abs(distance_Tk) < window
    score_TQk = query_TQR @ keys_kR.T * WIDTH**-0.5
    score_TQk = np.where(is_seen_Tk[:, None], score_TQk, -np.inf)
    weight_TQk = np.exp(score_TQk - score_TQk.max(-1, keepdims=True))
    return weight_TQk / weight_TQk.sum(-1, keepdims=True) @ np.concatenate([values, value])[:, 0]


@functools.partial(jax.jit, static_argnames="window")
def hide_unseen(cache: jax.Array, length_B: jax.Array, filler: Any, window: int | None) -> jax.Array:
    """Slots that no row sees hold ``filler``."""
    slot_1S = jnp.arange(cache.shape[1], dtype=jnp.int32)[None]
    is_seen_BS = slot_1S < length_B[:, None]
    if window is not None:
        is_seen_BS &= slot_1S > length_B[:, None] - window
    return jnp.where(is_seen_BS[..., None, None], cache, filler)


def _relative_error(out: Any, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(out, np.float64) - expected) / np.linalg.norm(expected))


def check(num_calls: int) -> dict[str, Any]:
    """Largest errors against float64 of the kernel and of plain JAX over so many calls of each shape.

    Lengths are random, and slots that no row sees hold NaN (zeros for plain JAX).

    Raises:
      AssertionError: a sequence's error is at `LIMIT`, or runs differ.
    """
    worst = {"kernel": 0.0, "plain JAX": 0.0}
    rng = np.random.default_rng(0)
    for (batch, rows), (layer, sight) in ((shape, sight) for shape in _CHECKED for sight in SIGHTS.items()):
        *rest, keys, values = draw(batch, rows, _CHECKED_SLOTS, seed=rows)
        host = jax.device_get((*rest, keys, values))
        programs = {
            "kernel": jax.jit(functools.partial(block_attention_gpu, eps=EPS, **sight)),
            "plain JAX": jax.jit(functools.partial(block_attention_reference, eps=EPS, **sight)),
        }
        for _ in range(num_calls):
            length_B = rng.choice([0, 1, 2047, 2048, 8192, *rng.integers(0, 8193, 8)], batch).astype(np.int32)
            fillers = zip(programs, (jnp.nan, 0.0), strict=True)
            hide = functools.partial(hide_unseen, length_B=length_B, window=sight["window"])
            inputs = {name: (*rest, *(hide(x, filler=filler) for x in (keys, values))) for name, filler in fillers}
            outs = {name: np.asarray(program(*inputs[name], length_B)) for name, program in programs.items()}
            for sequence, length in enumerate(length_B):
                expected = float64(host, int(length), sequence, **sight)
                errors = {name: _relative_error(out[sequence, :, 0], expected) for name, out in outs.items()}
                worst = {name: max(error, worst[name]) for name, error in errors.items()}
                assert errors["kernel"] < LIMIT, f"{layer}, {rows} rows, batch {batch}, length {length}: {errors}"
        for _ in range(_REPEATS):
            again = np.asarray(programs["kernel"](*inputs["kernel"], length_B))
            assert again.tobytes() == outs["kernel"].tobytes(), f"{layer}, {rows} rows, batch {batch}: runs differ"
    return worst


def measure(runs: int) -> Iterator[dict[str, Any]]:
    """Result lines without provenance."""
    for layer, sight in SIGHTS.items():
        for rows in (8, 16):
            arrays = draw(1, rows, SLOTS, seed=rows)
            lower = (jax.jit(functools.partial(f, eps=EPS, **sight)).lower(*shapes(1, rows, SLOTS)) for f in FORMS)
            kernel, reference = (lowered.compile() for lowered in lower)
            for context in CONTEXTS:
                inputs = *arrays, jnp.full((1,), context, jnp.int32)
                seconds, reference_seconds = (cold_seconds(call, inputs, runs) for call in (kernel, reference))
                warm, reference_warm = (kernel_seconds(call, [inputs], runs) for call in (kernel, reference))
                seen = min(context, WINDOW - 1) if layer == "sliding" else context
                moved = 4 * WIDTH * (seen + rows * (1 + GROUP))
                yield {
                    "benchmark": "block_attention",
                    "case": {"layer": layer, "rows": rows, "context": context, "slots": SLOTS, "seed": rows},
                    "seconds": seconds,
                    "reference_seconds": reference_seconds,
                    "warm_seconds": sum(warm.values()),
                    "reference_warm_seconds": sum(reference_warm.values()),
                    "kernels": warm,
                    "reference_kernels": len(reference_warm),
                    "ceiling_seconds": moved / BYTES_PER_SECOND,
                    "ceiling": f"{moved / 1e6:.2f} MB at 4.57 TB/s",
                    "fraction_of_ceiling": round(moved / BYTES_PER_SECOND / seconds, 3),
                    "error": _relative_error(kernel(*inputs)[0, :, 0], float64(arrays, context, 0, **sight)),
                    "runs": runs,
                }
