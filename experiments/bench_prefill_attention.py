"""Times two ways of a prefill chunk's attention: tree MLA with a causal mask, and cuDNN on expanded keys and values.

::

    latent     query W_k'  ->  tree MLA on latents (576 wide, values 512), prefix and chunk in one  ->  W_v
    expanded   latents W_k, latents W_v, of prefix and chunk
               query  ->  cuDNN (192 wide) on the prefix, and on the chunk (causal)  ->  both added by their log-sum-exps

cuDNN's causal mask begins at the first key, so that it takes two calls; values (128) are filled up to 192, as
`jax.nn.dot_product_attention` wants them. See `bench_kernels`, ``--kernel tree_mla``.
"""

import concurrent.futures
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.pallas.tree_mla_hopper import tree_mla_hopper
from ddtree_jax.pallas.tree_mla_split import Query
from experiments.check_tree_mla import LATENT, WIDTH
from experiments.kernel_times import kernel_seconds

FLOPS_PER_SECOND = 790e12
CHUNK, HEAD, ROTARY = 2048, 128, WIDTH - LATENT
SCALE = (HEAD + ROTARY) ** -0.5
CASES = tuple((heads, prefix) for heads in (8, 64) for prefix in (0, 4096, 32768))
_attend = functools.partial(jax.nn.dot_product_attention, scale=SCALE, implementation="cudnn", return_residual=True)


def attend_latent(
    query_BTHO: Any, cache_BSW: Any, rows_BTW: Any, length_B: Any, key_HPC: Any, value_HCU: Any
) -> jax.Array:
    query_BTHP, query_BTHR = jnp.split(query_BTHO, [HEAD], axis=-1)
    # Turned by nothing, as cuDNN's queries are turned before.
    turn = (of_pair((1, CHUNK, ROTARY // 2), jnp.float32) for of_pair in (jnp.ones, jnp.zeros))
    query = Query(jnp.einsum("BTHP,HPC->BTHC", query_BTHP, key_HPC), query_BTHR, *turn)
    visible_BTt = jnp.tril(jnp.ones((1, CHUNK, CHUNK), bool))
    out_BTHC = tree_mla_hopper(query, cache_BSW, rows_BTW, length_B, visible_BTt, scale=SCALE)
    return jnp.einsum("BTHC,HCU->BTHU", out_BTHC, value_HCU)


def attend_expanded(
    query_BTHO: Any, cache_BSW: Any, rows_BTW: Any, length_B: Any, key_HPC: Any, value_HCU: Any, *, has_prefix: bool
) -> jax.Array:
    out_BTHO, lse_BTH = _attend(query_BTHO, *expand(rows_BTW, key_HPC, value_HCU), is_causal=True)
    if has_prefix:
        prefix = expand(cache_BSW, key_HPC, value_HCU)
        prefix_BTHO, prefix_lse_BTH = _attend(query_BTHO, *prefix, key_value_seq_lengths=length_B)
        weight_BTH = jax.nn.sigmoid(prefix_lse_BTH - lse_BTH)[..., None]
        out_BTHO = prefix_BTHO * weight_BTH + out_BTHO * (1 - weight_BTH)
    return out_BTHO[..., :HEAD].astype(query_BTHO.dtype)


def expand(latent_BSW: Any, key_HPC: Any, value_HCU: Any) -> tuple[jax.Array, jax.Array]:
    """Keys with their rotary part, and values, of every head."""
    latent_BSC, rotary_BSR = jnp.split(latent_BSW, [LATENT], axis=-1)
    key_BSHP = jnp.einsum("BSC,HPC->BSHP", latent_BSC, key_HPC)
    rotary_BSHR = jnp.broadcast_to(rotary_BSR[:, :, None], (*key_BSHP.shape[:3], ROTARY))
    value_BSHU = jnp.einsum("BSC,HCU->BSHU", latent_BSC, value_HCU)
    return jnp.concatenate([key_BSHP, rotary_BSHR], -1), jnp.pad(value_BSHU, ((0, 0),) * 3 + ((0, ROTARY),))


def draw_inputs(heads: int, prefix: int) -> tuple[jax.Array, ...]:
    """Arguments of both ways."""
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    query_key, cache_key, rows_key, up_key, value_key = jax.random.split(jax.random.key(heads + prefix), 5)
    return (
        draw(query_key, (1, CHUNK, heads, HEAD + ROTARY)),
        draw(cache_key, (1, max(prefix, 64), WIDTH)),
        draw(rows_key, (1, CHUNK, WIDTH)),
        jnp.asarray([prefix], jnp.int32),
        draw(up_key, (heads, HEAD, LATENT)) * LATENT**-0.5,
        draw(value_key, (heads, LATENT, HEAD)) * LATENT**-0.5,
    )


def compile_cases(cases: tuple) -> list[tuple[Any, Any]]:
    """Both ways of each case; they are compiled side by side."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = []
        for heads, prefix in cases:
            shapes = jax.eval_shape(functools.partial(draw_inputs, heads, prefix))
            ways = attend_latent, functools.partial(attend_expanded, has_prefix=prefix > 0)
            programs.append([pool.submit(jax.jit(way).lower(*shapes).compile) for way in ways])
        return [(latent.result(), expanded.result()) for latent, expanded in programs]


def run(runs: int = 8, cases: tuple = CASES) -> Iterator[dict[str, Any]]:
    """Result lines, one a case, without provenance. ``distance`` is that of the two ways' outputs, relative."""
    for (latent, expanded), (heads, prefix) in zip(compile_cases(cases), cases, strict=True):
        inputs = draw_inputs(heads, prefix)
        times = kernel_seconds(latent, [inputs], runs)
        seconds, expanded_seconds = (sum(x.values()) for x in (times, kernel_seconds(expanded, [inputs], runs)))
        out, other = (call(*inputs).astype(jnp.float32) for call in (latent, expanded))
        flops = 2 * CHUNK * heads * (prefix + CHUNK // 2) * (WIDTH + LATENT)
        yield {
            "benchmark": "tree_mla",
            "case": {"heads": heads, "nodes": CHUNK, "context": prefix, "batch": 1, "form": "hopper", "mask": "causal"},
            "seconds": seconds,
            "expanded_seconds": expanded_seconds,
            "ceiling_seconds": flops / FLOPS_PER_SECOND,
            "ceiling": f"{flops / 1e9:.1f} GFLOP at 790 TFLOP/s",
            "fraction_of_ceiling": round(flops / FLOPS_PER_SECOND / seconds, 3),
            "kernels": {name: value for name, value in times.items() if name.startswith("tree_mla")},
            "runs": runs,
            "distance": float(jnp.linalg.norm(out - other) / jnp.linalg.norm(other)),
        }
