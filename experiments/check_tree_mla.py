"""Tree MLA, alone and with the product behind it, on the device against float64.

Trees, lengths and head counts are random, with NaN wherever nothing may be read.

See `bench_kernels`, ``--kernel tree_mla --check N``. The reference is computed in float64 on the same device.
"""

import concurrent.futures
import functools
import math
import multiprocessing
import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.attend_and_project import attend_and_project_gpu
from ddtree_jax.pallas.latent_rows import fill_tiles
from ddtree_jax.pallas.skinny_gemm import Output, pack_weights
from ddtree_jax.pallas.tree_mla import ROW_MULTIPLE
from ddtree_jax.pallas.tree_mla_hopper import tree_mla_hopper
from ddtree_jax.pallas.tree_mla_portable import tree_mla_portable
from ddtree_jax.pallas.tree_mla_split import Query

LATENT, WIDTH, SCALE = 512, 576, 0.1352
VALUE = 128
ROTARY = WIDTH - LATENT
LIMIT = 5e-3
"""Of the relative norm error of a sequence."""
FORMS = {"hopper": tree_mla_hopper, "portable": tree_mla_portable}
_BOTH, _PROJECTED = ("hopper", "portable"), ("hopper", "projected")
_ALL = *_BOTH, "projected"
_REPEATS = 20
_PORTABLE_CALLS = 12
_FEW_SLOTS, _MORE_SLOTS = 512, 65536  # Where a cache that is filled up with slots has to give the same.
_GAINS = (0.1, 1.0, 3.0)  # Of the queries: from nearly equal weights to a few that take all.


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One compiled program; trees of any size up to ``nodes`` are filled up with nodes that see themselves alone."""

    batch: int
    nodes: int
    heads: int
    slots: int
    share: int
    """Of all trees, in parts of `sum`."""
    forms: tuple[str, ...] = ("hopper",)
    """Those of `FORMS`, and "projected": what Hopper's heads attend to times a matrix each."""


SHAPES = (
    Shape(batch=1, nodes=1, heads=8, slots=4096, share=6, forms=_ALL),
    Shape(batch=1, nodes=16, heads=8, slots=1024, share=8, forms=_ALL),
    Shape(batch=1, nodes=32, heads=8, slots=1024, share=4, forms=_PROJECTED),
    Shape(batch=1, nodes=64, heads=8, slots=2048, share=8, forms=_PROJECTED),
    Shape(batch=1, nodes=16, heads=64, slots=2048, share=8),
    Shape(batch=8, nodes=16, heads=8, slots=1024, share=24, forms=_BOTH),
    Shape(batch=8, nodes=4, heads=8, slots=32768, share=16, forms=_PROJECTED),
    Shape(batch=8, nodes=2, heads=16, slots=32768, share=8, forms=_PROJECTED),
    Shape(batch=5, nodes=37, heads=3, slots=448, share=15, forms=_BOTH),
    Shape(batch=3, nodes=64, heads=1, slots=4096, share=9),
    Shape(batch=2, nodes=9, heads=48, slots=8192, share=6),
    Shape(batch=1, nodes=256, heads=8, slots=512, share=4, forms=_BOTH),
    Shape(batch=1, nodes=16, heads=8, slots=131072, share=8, forms=_ALL),
    Shape(batch=2, nodes=3, heads=16, slots=131072, share=4, forms=_PROJECTED),
)


def random_tree(rng: np.random.Generator, num_nodes: int) -> np.ndarray:
    """Ancestor mask of a tree in which each node's parent is any earlier node."""
    visible = np.eye(num_nodes, dtype=bool)
    for node in range(1, num_nodes):
        visible[node] |= visible[rng.integers(0, node)]
    return visible


def _draw_length(rng: np.random.Generator, slots: int) -> int:
    border = int(rng.choice([16, 64, 128])) * int(rng.integers(1, slots // 128 + 1)) + int(rng.integers(-1, 2))
    return min(slots, int(rng.choice([0, 1, border, border, slots - 1, slots, rng.integers(0, slots + 1)])))


def _draw_trees(rng: np.random.Generator, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Masks [B, T, T], and which nodes belong to the tree [B, T]."""
    visible_BTt = np.broadcast_to(np.eye(shape.nodes, dtype=bool), (shape.batch, shape.nodes, shape.nodes)).copy()
    num_nodes_B = rng.integers(1, shape.nodes + 1, shape.batch)
    for visible_Tt, count in zip(visible_BTt, num_nodes_B, strict=True):
        visible_Tt[:count, :count] = random_tree(rng, count)
    return visible_BTt, np.arange(shape.nodes) < num_nodes_B[:, None]


def draw_query(key: Any, batch: int, nodes: int, heads: int, gain: Any = 1) -> Query:
    """Normal numbers of bfloat16, and an angle for each pair of each node."""
    keys, gain = jax.random.split(key, 3), jnp.asarray(gain, jnp.bfloat16)
    latent_BTHC, rotary_BTHR = (
        jax.random.normal(key, (batch, nodes, heads, width), jnp.bfloat16) * gain
        for key, width in zip(keys[:2], (LATENT, ROTARY), strict=True)
    )
    angle_BTr = jax.random.uniform(keys[2], (batch, nodes, ROTARY // 2), maxval=2 * math.pi)
    return Query(latent_BTHC, rotary_BTHR, jnp.cos(angle_BTr), jnp.sin(angle_BTr))


@functools.partial(jax.jit, static_argnums=0)
def _draw(shape: Shape, seed: Any, gain: Any, length_B: Any, is_node_BT: Any) -> tuple[Query, jax.Array, jax.Array]:
    """Queries, cache and rows: NaN behind the lengths, in nodes that are none, and in sequences without a node."""
    query_key, *keys = jax.random.split(jax.random.key(seed), 3)
    query = draw_query(query_key, shape.batch, shape.nodes, shape.heads, gain)
    cache_BSW, rows_BTW = (
        jax.random.normal(key, (shape.batch, size, WIDTH), jnp.bfloat16)
        for key, size in zip(keys, (shape.slots, shape.nodes), strict=True)
    )
    is_read_BS = (jnp.arange(shape.slots)[None] < length_B[:, None]) & jnp.any(is_node_BT, axis=1)[:, None]
    cache_BSW = jnp.where(is_read_BS[..., None], cache_BSW, jnp.nan)
    return query, cache_BSW, jnp.where(is_node_BT[..., None], rows_BTW, jnp.nan)


def _draw_values(heads: int) -> jax.Array:
    """The heads' matrices [H, U, C]."""
    return jax.random.normal(jax.random.key(0), (heads, VALUE, LATENT), jnp.bfloat16)


def _kernel(form: str, heads: int) -> Any:
    """A jitted function of `_draw_inputs`' arrays."""
    if form in FORMS:
        return jax.jit(functools.partial(FORMS[form], scale=SCALE))
    blocks = pack_weights([_draw_values(heads).reshape(-1, LATENT)], (Output(width=heads * VALUE),))

    @jax.jit
    def call(blocks: Any, query: Query, cache_BSW: Any, rows_BTW: Any, length_B: Any, visible_BTt: Any) -> Any:
        tile_BtW = fill_tiles(rows_BTW, LATENT, ROW_MULTIPLE)
        arrays = query, cache_BSW, rows_BTW, length_B, visible_BTt, tile_BtW, blocks
        return attend_and_project_gpu(*arrays, scale=SCALE)

    return functools.partial(call, blocks)


@jax.jit
def _compare(
    out_BTHC: Any,
    query: Query,
    cache_BSW: Any,
    rows_BTW: Any,
    length_B: Any,
    visible_BTt: Any,
    value_HUC: Any,
) -> Any:
    """Each sequence's relative norm error against float64 over its nodes, and whether all others are NaN, and only they.

    The query is rounded once it is turned, as it is defined to be. To be traced with 64 bits.
    """
    is_node_BT = jnp.all(jnp.isfinite(rows_BTW), axis=-1)
    is_read_BS = jnp.arange(cache_BSW.shape[1])[None] < length_B[:, None]
    query_BTHW, cache_BSW, rows_BTW = (x.astype(jnp.float64) for x in (query.join(), cache_BSW, rows_BTW))
    cache_BSW = jnp.where(is_read_BS[..., None], cache_BSW, 0)
    key_BkW = jnp.concatenate([cache_BSW, jnp.where(is_node_BT[..., None], rows_BTW, 0)], axis=1)
    is_read_BTS = jnp.broadcast_to(is_read_BS[:, None], (*is_node_BT.shape, cache_BSW.shape[1]))
    is_seen_BTk = jnp.concatenate([is_read_BTS, visible_BTt], axis=-1)
    score_BTHk = jnp.einsum("BTHW,BkW->BTHk", query_BTHW, key_BkW) * SCALE
    weight_BTHk = jax.nn.softmax(jnp.where(is_seen_BTk[:, :, None], score_BTHk, -jnp.inf), axis=-1)
    expected_BTHC = jnp.einsum("BTHk,BkC->BTHC", weight_BTHk, key_BkW[..., :LATENT])
    if value_HUC is not None:
        expected_BTHC = jnp.einsum("BTHC,HUC->BTHU", expected_BTHC, value_HUC.astype(jnp.float64))
    is_compared = is_node_BT[..., None, None]
    difference_BTHC = jnp.where(is_compared, out_BTHC.astype(jnp.float64) - expected_BTHC, 0)
    expected_BTHC = jnp.where(is_compared, expected_BTHC, 0)
    squares = (jnp.sum(x**2, axis=(1, 2, 3)) for x in (difference_BTHC, expected_BTHC))
    return jnp.sqrt(functools.reduce(jnp.divide, squares)), jnp.all(jnp.isnan(out_BTHC) == ~is_compared)


def check(num_trees: int) -> None:
    """Prints a line a shape; raises AssertionError at a tree that is not as it should be.

    A process a shape, since most of the time goes into tracing.
    """
    parts = sum(shape.share for shape in SHAPES)
    calls = [max(2, math.ceil(num_trees * shape.share / parts / shape.batch)) for shape in SHAPES]
    # All of them on one GPU.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    worst, count, context = {}, 0, multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(mp_context=context) as pool:
        for shape, num_calls, errors in zip(SHAPES, calls, pool.map(_check_shape, SHAPES, calls), strict=True):
            count += num_calls * shape.batch
            worst |= {form: max(error, worst.get(form, 0.0)) for form, error in errors.items()}
            print(f"{num_calls * shape.batch:5} trees, {shape}: largest errors {_show(errors)}", flush=True)
    print(
        f"{count:5} trees: largest errors {_show(worst)}; {_REPEATS} runs bit-equal; hidden nodes reach none",
        flush=True,
    )


def _show(errors: dict[str, float]) -> str:
    return ", ".join(f"{error:.5f} ({form})" for form, error in errors.items())


def _check_shape(shape: Shape, calls: int) -> dict[str, float]:
    rng = np.random.default_rng((shape.batch, shape.nodes, shape.heads, shape.slots))
    kernels = {form: _kernel(form, shape.heads) for form in shape.forms}
    value_HUC = _draw_values(shape.heads)
    worst = dict.fromkeys(kernels, 0.0)
    for i in range(calls):
        inputs, is_node_BT = _draw_inputs(rng, shape, i)
        for form in kernels:
            if form == "portable" and i >= _PORTABLE_CALLS:
                continue
            out_BTHC = kernels[form](*inputs)
            with jax.enable_x64(True):
                error_B, is_clean = _compare(out_BTHC, *inputs, value_HUC if form == "projected" else None)
            error = np.asarray(error_B)[is_node_BT.any(axis=1)].max()
            assert error < LIMIT, f"{form}, {shape}, call {i}, lengths {inputs[3]}: error {error}"
            assert is_clean, f"{form}, {shape}, call {i}, lengths {inputs[3]}: NaN where it should not be, or none"
            worst[form] = max(worst[form], float(error))
    for form in set(kernels) - {"portable"}:
        _check_repeats(kernels[form], inputs)
    if shape.slots <= _FEW_SLOTS:
        _check_longer_cache(kernels["hopper"], inputs)
    if shape.nodes > 1:
        for kernel in kernels.values():
            _check_hiding(kernel, rng, shape)
    return worst


def _draw_inputs(rng: np.random.Generator, shape: Shape, i: int) -> tuple[tuple, np.ndarray]:
    """Arguments of the kernel, and which nodes are nodes of a tree; one sequence of many may be NaN altogether."""
    visible_BTt, is_node_BT = _draw_trees(rng, shape)
    length_B = np.asarray([_draw_length(rng, shape.slots) for _ in range(shape.batch)], np.int32)
    if shape.batch > 1 and i % 2:
        is_node_BT[rng.integers(shape.batch)] = False
    gain = np.asarray(_GAINS[i % len(_GAINS)], jnp.bfloat16)
    arrays = _draw(shape, rng.integers(1 << 30), gain, length_B, is_node_BT)
    return (*arrays, jnp.asarray(length_B), jnp.asarray(visible_BTt)), is_node_BT


def _check_repeats(kernel: Any, inputs: tuple) -> None:
    bits = [jax.lax.bitcast_convert_type(kernel(*inputs), jnp.uint16) for _ in range(_REPEATS)]
    assert all(bool(jnp.array_equal(bits[0], other)) for other in bits), "the same input gave other bits"


def _check_longer_cache(kernel: Any, inputs: tuple) -> None:
    """Slots behind the lengths do not change a bit."""
    query, cache_BSW, *rest = inputs
    longer_BSW = jnp.pad(cache_BSW, ((0, 0), (0, _MORE_SLOTS), (0, 0)), constant_values=jnp.nan)
    bits = [jax.lax.bitcast_convert_type(kernel(query, cache, *rest), jnp.uint16) for cache in (cache_BSW, longer_BSW)]
    assert bool(jnp.array_equal(*bits)), "a longer cache gave other bits"


def _check_hiding(kernel: Any, rng: np.random.Generator, shape: Shape) -> None:
    """Hiding a node from its descendants changes all of them and nothing else, bit for bit."""
    visible_BTt = np.stack([random_tree(rng, shape.nodes) for _ in range(shape.batch)])
    length_B = rng.integers(0, 100, shape.batch).astype(np.int32)
    is_node_BT = np.ones(visible_BTt.shape[:2], bool)
    arrays = _draw(shape, rng.integers(1 << 30), np.asarray(_GAINS[0], jnp.bfloat16), length_B, is_node_BT)
    hidden = int(rng.integers(max(1, shape.nodes // 4)))
    descends_BT = visible_BTt[:, :, hidden] & (np.arange(shape.nodes) != hidden)
    less_BTt = visible_BTt.copy()
    less_BTt[:, :, hidden] &= ~descends_BT
    before, after = (
        np.asarray(kernel(*arrays, length_B, mask).astype(jnp.float32)) for mask in (visible_BTt, less_BTt)
    )
    np.testing.assert_array_equal((before != after).any(axis=(2, 3)), descends_BT)
