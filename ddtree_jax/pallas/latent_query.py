"""From the first projections to attention: norms, the query's second projection and absorbed one, the cache's rows, at once.

Clusters of 6 blocks have two tiles of q_b, a third of the columns a block. Of 8 heads (128 + 64 wide) the first 8 clusters
have one head's part without position each, and go on with it to the latent space; 4 have two heads' rotary parts each::

    fetch        parts of q_b and key_up, all in flight from the beginning ──────────────┐
    all warps    norm of the tokens' rows, the part's columns to shared memory           │
    warps 0-3                                          multiply ─► sums to shared memory ┤ cluster's barrier
    a head       all warps: add up both tiles of the cluster, round ─► warps 0-7: multiply by key_up, a tile a warpgroup
    the rest     warps 0-3: add up, store the rotary part; others: the cache's rows and the tile, as `latent_rows`

Every block reads all of the tokens' rows: their squares are added up where they are needed, which takes no launch and no
wait. Sums are those of `skinny_gemm` in its order, rounded where it rounds them.

Bytes at 8 heads: 5.8 MB of weights, 1.3 us at 4.57 TB/s; from the second cache 72 times the tokens' rows, 3.5 MB at 16.
An H200 takes 5.7 us at 16 tokens, and 7.1 us for three launches, 7.5 and 7.2 us at 24.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddtree_jax.pallas import simt, skinny_gemm_shape
from ddtree_jax.pallas.bfloat16_rows import UNIT
from ddtree_jax.pallas.latent_query_kernel import launch
from ddtree_jax.pallas.latent_query_threads import GROUP, Shape
from ddtree_jax.pallas.latent_rows import LatentRows, Parts, check_turns, latent_rows, latent_rows_reference
from ddtree_jax.pallas.skinny_gemm import (
    MAX_CLUSTER,
    choose_config,
    choose_shape,
    device_config,
    skinny_gemm,
    skinny_gemm_reference,
)
from ddtree_jax.pallas.skinny_gemm_shape import SIDE, Output

Outputs = tuple[Output, Output, Output]
"""Of all heads: their parts without position and rotary ones, which ``q_b`` gives, and what ``key_up`` gives."""


class LatentQuery(NamedTuple):
    """``rows`` and ``tile`` are those of `latent_rows`; the query's latent part, and its rotary part, not yet turned."""

    rows_BTW: Float[Array, "B T W"]
    tile_BtW: Float[Array, "B t W"]
    latent_BTHC: Float[Array, "B T H C"]
    rotary_BTHR: Float[Array, "B T H R"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Warpgroups of a block, rows that a warp loads before it adds up the first; ``product`` is that of `skinny_gemm`.

    Of more than ``max_tokens`` tokens one launch takes as long as three, or longer: each block adds up all of its cluster's
    sums, which come over from other multiprocessors.
    """

    max_tokens: int = 24
    num_warpgroups: int = 4
    rows_in_flight: int = 2
    product: skinny_gemm_shape.Config = skinny_gemm_shape.Config()


def latent_query(
    query_BTA: Float[Array, "B T A"],
    latent_BTW: Float[Array, "B T W"],
    query_gain_A: Float[Array, "A"],
    latent_gain_C: Float[Array, "C"],
    cos_BTr: Float[Array, "B T r"],
    sin_BTr: Float[Array, "B T r"],
    q_b: Float[Array, "M N 64 64"],
    key_up: Float[Array, "m n 64 64"],
    *,
    outputs: Outputs,
    num_heads: int,
    eps: float,
    multiple: int,
    has_kernels: bool = True,
) -> LatentQuery:
    """What `latent_rows` gives, its query multiplied by ``q_b``, and that part of each head by its matrix of ``key_up``.

    Weights are packed (`skinny_gemm.pack_weights`), ``outputs`` are theirs. One launch, where the program is compiled for a
    Hopper GPU and the kernel takes the input, gives the bits that these three give on it.
    """
    arrays = (query_BTA, latent_BTW, query_gain_A, latent_gain_C, cos_BTr, sin_BTr, q_b, key_up)
    options = {"outputs": outputs, "num_heads": num_heads, "eps": eps, "multiple": multiple}

    def kernel(*arrays: Array) -> LatentQuery:
        return latent_query_gpu(*arrays, **options, config=Config(product=device_config()))

    def apart(*arrays: Array) -> LatentQuery:
        made = latent_rows(*arrays[:6], eps=eps, multiple=multiple, has_kernels=has_kernels)
        return multiply_query(skinny_gemm, made, *arrays[6:], outputs, num_heads)

    return simt.choose(kernel, apart, *arrays, has_kernels=has_kernels)


def latent_query_reference(*arrays: Array, outputs: Outputs, num_heads: int, eps: float, multiple: int) -> LatentQuery:
    """`latent_query` in plain JAX."""
    made = latent_rows_reference(*arrays[:6], eps=eps, multiple=multiple)
    return multiply_query(skinny_gemm_reference, made, *arrays[6:], outputs, num_heads)


def multiply_query(
    multiply: Callable[..., list[Array]], made: LatentRows, q_b: Array, key_up: Array, outputs: Outputs, num_heads: int
) -> LatentQuery:
    """Both products behind `latent_rows`, by a function like `skinny_gemm`."""
    B, T, A = made.query_BTA.shape
    with jax.named_scope("q_b"):
        plain, rotary = multiply(made.query_BTA.reshape(B * T, A), q_b, outputs[:2])
    with jax.named_scope("key_up"):
        (latent,) = multiply(plain, key_up, outputs[2:], num_groups=num_heads)
    return LatentQuery(made.rows_BTW, made.tile_BtW, *(y.reshape(B, T, num_heads, -1) for y in (latent, rotary)))


def latent_query_gpu(
    query_BTA: Float[Array, "B T A"],
    latent_BTW: Float[Array, "B T W"],
    query_gain_A: Float[Array, "A"],
    latent_gain_C: Float[Array, "C"],
    cos_BTr: Float[Array, "B T r"],
    sin_BTr: Float[Array, "B T r"],
    q_b: Float[Array, "M N 64 64"],
    key_up: Float[Array, "m n 64 64"],
    *,
    outputs: Outputs,
    num_heads: int,
    eps: float,
    multiple: int,
    config: Config = Config(),
) -> LatentQuery:
    """`latent_query` by the kernel alone.

    Raises:
      NotImplementedError: the kernel does not take this input. It is named.
      ValueError: there is not one cosine and one sine for each pair of each token.
    """
    B, T, A = query_BTA.shape
    C, W = latent_gain_C.shape[0], latent_BTW.shape[-1]
    rows = Parts(num_tokens=T, num_rows=T + -T % multiple, query=A, latent=C, rotary=W - C, eps=eps)
    arrays = query_BTA, latent_BTW, query_gain_A, latent_gain_C
    types = [array.dtype.name for array in arrays]
    if set(types) != {"bfloat16"}:
        raise NotImplementedError(f"types are {', '.join(types)}; bfloat16 is needed")
    check_turns(cos_BTr, sin_BTr, (B, T, (W - C) // 2))
    if any(output.is_gated or output.dtype != jnp.bfloat16 for output in outputs):
        raise NotImplementedError(f"outputs are {outputs}; plain ones of bfloat16 are needed")
    shape = choose_latent_shape(rows, B, q_b, key_up, outputs, num_heads, config)
    blocks = (weight.reshape(-1, SIDE, SIDE) for weight in (q_b, key_up))
    rows_BTW, tile_BtW, *parts = launch(*arrays, cos_BTr, sin_BTr, *blocks, shape)
    return LatentQuery(rows_BTW, tile_BtW, *(y.reshape(B, T, num_heads, -1) for y in parts))


def choose_latent_shape(
    rows: Parts, batch: int, q_b: Any, key_up: Any, outputs: Outputs, num_heads: int, config: Config = Config()
) -> Shape:
    """How a launch divides the work.

    Raises:
      NotImplementedError: the kernel does not take this input. It is named.
    """
    num_tokens, widths = batch * rows.num_tokens, [output.width for output in outputs]
    if not 1 <= num_tokens <= config.max_tokens:
        raise NotImplementedError(f"{num_tokens} tokens; 1 to {config.max_tokens} are taken")
    if num_heads % 2 or widths != [width * num_heads for width in (2 * SIDE, SIDE, rows.latent)]:
        raise NotImplementedError(
            f"{num_heads} heads, {widths} for all; an even number of {2 * SIDE}, {SIDE} and {rows.latent} is needed"
        )
    if rows.latent % GROUP or rows.rotary % UNIT or rows.rotary > GROUP:
        raise NotImplementedError(
            f"rows of {rows.latent} + {rows.rotary}; a multiple of {GROUP}, and of {UNIT} up to {GROUP} are needed"
        )
    product = choose_config(q_b, config.product)
    tokens = (jax.ShapeDtypeStruct((num_tokens, width), q_b.dtype) for width in (rows.query, widths[0]))
    shape = Shape(
        rows=rows,
        batch=batch,
        q_b=choose_shape(next(tokens), q_b, outputs[:2], 1, product),
        key_up=choose_shape(next(tokens), key_up, outputs[2:], num_heads, config.product),
        num_warpgroups=config.num_warpgroups,
        rows_in_flight=config.rows_in_flight,
    )
    _check_clusters(shape, product)
    return shape


def _check_clusters(shape: Shape, config: skinny_gemm_shape.Config) -> None:
    """Raises NotImplementedError if clusters have unequal parts, or not all of them run at once."""
    parts, size = shape.q_b.cluster, shape.cluster
    if size > MAX_CLUSTER or shape.rows.query % (parts * GROUP) or shape.num_columns % shape.q_b.step_blocks:
        raise NotImplementedError(
            f"{shape.rows.query} columns of q_b in {parts} parts; 1 to 4 whole {GROUP} are needed"
        )
    room = (config.num_multiprocessors // config.group_size - 1) * (config.group_size // size)
    if shape.num_clusters > room or shape.shared_bytes > config.shared_bytes:
        raise NotImplementedError(
            f"{shape.num_clusters} clusters of {size} blocks of {shape.shared_bytes} bytes; "
            f"{room} of {config.shared_bytes} fit"
        )
    if shape.num_up_tiles > shape.num_warpgroups:
        raise NotImplementedError(f"{shape.key_up.tiles_a_group} tiles of key_up for {size} blocks")
