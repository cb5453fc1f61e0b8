"""Times attention of a prefill chunk: tree MLA with a causal mask against cuDNN's attention on expanded keys and values.

::

    latents        query W_k' (absorb)  ->  tree MLA on latents (576 wide, values 512)   ->  W_v (absorb)
    expanded       latents W_k, W_v (expand, whole prefix)  ->  cuDNN (192 wide, values 128, filled up to 192)

See `bench_kernels`, ``--kernel tree_mla``. Behind a prefix `jax.nn.dot_product_attention` has only masks that are read as a
bias, so it is also timed without a mask, as if every query saw everything: somewhat more than a causal kernel needs.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.pallas.tree_mla_hopper import tree_mla_hopper
from experiments.check_tree_mla import LATENT, SCALE, WIDTH
from experiments.kernel_times import kernel_seconds

FLOPS_PER_SECOND = 790e12
CHUNK, HEAD, VALUE = 2048, 128, 128
CASES = tuple((heads, prefix) for heads in (8, 64) for prefix in (0, 4096, 32768))


def _ours(query_BTHW: Any, cache_BSW: Any, rows_BTW: Any, length_B: Any, visible_BTt: Any) -> jax.Array:
    return tree_mla_hopper(query_BTHW, cache_BSW, rows_BTW, length_B, visible_BTt, num_latent=LATENT, scale=SCALE)


def _absorb(query_BTHP: Any, key_HPC: Any, out_BTHC: Any, value_HCU: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.einsum("BTHP,HPC->BTHC", query_BTHP, key_HPC), jnp.einsum("BTHC,HCU->BTHU", out_BTHC, value_HCU)


def _expand(latent_BSW: Any, key_HPC: Any, value_HCU: Any) -> tuple[jax.Array, jax.Array]:
    """Keys with their rotary part, and values as wide (`jax.nn.dot_product_attention` wants it), of every head."""
    latent_BSC, rotary_BSR = jnp.split(latent_BSW, [LATENT], axis=-1)
    key_BSHP = jnp.einsum("BSC,HPC->BSHP", latent_BSC, key_HPC)
    rotary_BSHR = jnp.broadcast_to(rotary_BSR[:, :, None], (*key_BSHP.shape[:3], WIDTH - LATENT))
    value_BSHU = jnp.einsum("BSC,HCU->BSHU", latent_BSC, value_HCU)
    return jnp.concatenate([key_BSHP, rotary_BSHR], -1), jnp.pad(value_BSHU, ((0, 0),) * 3 + ((0, WIDTH - LATENT),))


_CUDNN = functools.partial(jax.nn.dot_product_attention, scale=SCALE, implementation="cudnn")
_cudnn_causal = functools.partial(_CUDNN, is_causal=True)


def _cudnn_masked(query_BTHO: Any, key_BSHO: Any, value_BSHU: Any, mask_11TS: Any) -> jax.Array:
    return _CUDNN(query_BTHO, key_BSHO, value_BSHU, mask=mask_11TS)


def _time(call: Any, inputs: tuple, runs: int) -> float | str:
    """Seconds of all kernels, or what the library says instead."""
    try:
        return sum(kernel_seconds(jax.jit(call), [inputs], runs).values())
    except (NotImplementedError, RuntimeError, ValueError) as refusal:
        return str(refusal).splitlines()[0][:200]


def run(runs: int = 8, cases: tuple = CASES) -> Iterator[dict[str, Any]]:
    """Result lines, one a case, without provenance."""
    for heads, prefix in cases:
        keys = iter(jax.random.split(jax.random.key(heads + prefix), 9))

        def draw(*shape: int, keys: Any = keys) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.bfloat16)

        slots = max(prefix, 64)
        visible_BTt = jnp.tril(jnp.ones((1, CHUNK, CHUNK), bool))
        cache_BSW, rows_BTW = draw(1, slots, WIDTH), draw(1, CHUNK, WIDTH)
        latent_inputs = draw(1, CHUNK, heads, WIDTH), cache_BSW, rows_BTW, jnp.asarray([prefix], jnp.int32), visible_BTt
        weights = draw(heads, HEAD, LATENT), draw(heads, LATENT, VALUE)
        absorb_inputs = draw(1, CHUNK, heads, HEAD), weights[0], draw(1, CHUNK, heads, LATENT), weights[1]
        all_BSW = jnp.concatenate([cache_BSW[:, :prefix], rows_BTW], axis=1)
        expanded = draw(1, CHUNK, heads, HEAD + WIDTH - LATENT), *jax.jit(_expand)(all_BSW, *weights)
        mask = jnp.concatenate([jnp.ones((1, CHUNK, prefix), bool), visible_BTt], axis=-1)[:, None]
        seconds = {
            "seconds": _time(_ours, latent_inputs, runs),
            "absorb_seconds": _time(_absorb, absorb_inputs, runs),
            "expand_seconds": _time(_expand, (all_BSW, *weights), runs),
            "cudnn_seconds": _time(_cudnn_causal, expanded, runs)
            if prefix == 0
            else _time(_cudnn_masked, (*expanded, mask), runs),
            "cudnn_unmasked_seconds": _time(_CUDNN, expanded, runs),
        }
        flops = 2 * CHUNK * heads * (prefix + CHUNK // 2) * (WIDTH + LATENT)
        yield {
            "benchmark": "tree_mla",
            "case": {"heads": heads, "nodes": CHUNK, "context": prefix, "batch": 1, "form": "hopper", "mask": "causal"},
            **seconds,
            "ceiling_seconds": flops / FLOPS_PER_SECOND,
            "ceiling": f"{flops / 1e9:.1f} GFLOP at 790 TFLOP/s",
            "fraction_of_ceiling": round(flops / FLOPS_PER_SECOND / seconds["seconds"], 3),
            "runs": runs,
        }
