"""Attention of tree nodes and the product of what each head attends to with its own matrix: two launches, not three.

::

    tree_mla          splits of the slots
    project_splits    their sum, rounded, and the product

Bytes: those of `tree_mla` and of the matrices, of which a launch takes few microseconds, whatever it does.

`project_splits` and o in one launch, o's weight on its way while the splits are added up, was slower on an H200: the splits
come as late as the weight beside them, and blocks wait for each other as long as the next launch takes to begin.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, BFloat16, Bool, Float, Int32

from ddtree_jax.pallas import simt
from ddtree_jax.pallas import tree_mla_hopper as hopper
from ddtree_jax.pallas.project_splits import check, project_splits
from ddtree_jax.pallas.skinny_gemm import Output, device_config, skinny_gemm, skinny_gemm_reference
from ddtree_jax.pallas.skinny_gemm_shape import SIDE
from ddtree_jax.pallas.tree_mla import tree_mla, tree_mla_reference
from ddtree_jax.pallas.tree_mla_split import Query


def attend_and_project(
    query: Query,
    cache_BSW: Float[Array, "B S W"],
    rows_BTW: Float[Array, "B T W"],
    length_B: Int32[Array, "B"],
    visible_BTt: Bool[Array, "B T T"],
    tile_BtW: Float[Array, "B t W"],
    blocks: Float[Array, "M N 64 64"],
    *,
    scale: float,
) -> Float[Array, "B T H U"]:
    """`tree_mla`'s result times a matrix [U, C] a head; ``blocks`` are these, as `skinny_gemm.pack_weights` lays them out.

    What the heads attend to is rounded, products are summed in float32 and rounded once, as `skinny_gemm` does; the order of
    the sums differs from its own.

    Two launches where the program is compiled for a Hopper GPU and the kernels take the input, else `tree_mla` and
    `skinny_gemm`, which choose for themselves.
    """
    arrays = (query, cache_BSW, rows_BTW, length_B, visible_BTt, tile_BtW, blocks)
    kernel, apart, reference = (
        functools.partial(function, scale=scale)
        for function in (attend_and_project_gpu, attend_and_project_apart, attend_and_project_reference)
    )
    try:
        simt.check_device()
        return jax.lax.platform_dependent(*arrays, cuda=kernel, default=reference)
    except NotImplementedError:
        return apart(*arrays)


def attend_and_project_gpu(
    query: Query,
    cache_BSW: BFloat16[Array, "B S W"],
    rows_BTW: BFloat16[Array, "B T W"],
    length_B: Int32[Array, "B"],
    visible_BTt: Bool[Array, "B T T"],
    tile_BtW: BFloat16[Array, "B t W"],
    blocks: BFloat16[Array, "M N 64 64"],
    *,
    scale: float,
) -> BFloat16[Array, "B T H U"]:
    """`attend_and_project` by the kernels alone.

    Raises:
      NotImplementedError: they do not take this input, or are not the faster way. It is named.
    """
    B, T, H = query.latent_BTHC.shape[:3]
    config = hopper.Config(num_sms=device_config().num_multiprocessors)
    check(B * T, H, blocks)
    part_BnsC, lse_Bnsc = hopper.attend_splits(
        query, cache_BSW, rows_BTW, length_B, visible_BTt, tile_BtW, scale=scale, config=config
    )
    value_TV = project_splits(part_BnsC, lse_Bnsc, length_B, blocks, nodes=T, heads=H, tile=hopper.ROW_MULTIPLE)
    return value_TV.reshape(B, T, H, -1)


def attend_and_project_reference(*arrays: Any, scale: float) -> Float[Array, "B T H U"]:
    """`attend_and_project` in plain JAX."""
    return _compose(tree_mla_reference, skinny_gemm_reference, *arrays, scale=scale)


def attend_and_project_apart(*arrays: Any, scale: float) -> Float[Array, "B T H U"]:
    """`attend_and_project` by `tree_mla` and `skinny_gemm`."""
    return _compose(tree_mla, skinny_gemm, *arrays, scale=scale)


def _compose(attend: Callable, multiply: Callable, *arrays: Any, scale: float) -> Array:
    *arrays, blocks = arrays
    attended_BTHC = attend(*arrays, scale=scale)
    B, T, H = attended_BTHC.shape[:3]
    outputs = (Output(width=blocks.shape[0] * SIDE, dtype=blocks.dtype),)
    with jax.named_scope("value_up"):
        (value_TV,) = multiply(attended_BTHC.reshape(B * T, -1), blocks, outputs, num_groups=H)
    return value_TV.reshape(B, T, H, -1)
