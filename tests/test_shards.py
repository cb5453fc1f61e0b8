"""What every device makes of its own columns of the vocabulary, put together, is what one device makes of all."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import Mesh
from shard_models import VOCAB, make_models

from ddtree_jax import SamplingParams, decode, sampling, tree
from ddtree_jax.decode import DecodeConfig, Plan, State
from ddtree_jax.sampling_params import SamplingArrays
from ddtree_jax.sharding import make_mesh
from ddtree_jax.vocabulary import Place

MESHES = ("tensor=8", "expert=4,tensor=2")
CAPACITY, NODES, DEPTH = 40, 8, 3
# A batch of all that can be asked for.
PARAMS = [
    SamplingParams(max_new_tokens=30, **params)
    for params in (
        {},
        {"logprobs": True, "top_logprobs": 7},
        {"temperature": 0.8},
        {"temperature": 1.5, "top_k": 9, "seed": 3},
        {"temperature": 1.2, "top_p": 0.9, "seed": 4},
        {"temperature": 2.0, "min_p": 0.05, "seed": 5},
        {"temperature": 1.1, "top_k": 40, "top_p": 0.8, "min_p": 0.01, "logprobs": True},
        {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": -0.4, "frequency_penalty": 0.9},
        {"logit_bias": {0: 3.0, 12: -100.0, 13: 2.5, 103: 1.0}, "repetition_penalty": 1.6},
        {"min_new_tokens": 25, "stop_token_ids": (1, 26, 90, 103), "temperature": 0.7},
    )
]
SAMPLING = SamplingArrays.stack(
    PARAMS, [[n, 50 + n] for n in range(10)], batch=10, max_length=CAPACITY, vocab_size=VOCAB, eos_token_ids=(7,)
)


@functools.cache
def place_of(mesh: str | None, has_kernels: bool = True) -> Place:
    return Place(mesh=make_mesh(mesh) if mesh else None, has_kernels=has_kernels)


def random_logits(seed: int, num_nodes: int) -> jax.Array:
    """Of ten sequences: many equal ones, both zeros, and what nobody can draw."""
    logits_BNV = np.round(np.random.default_rng(seed).normal(size=(10, num_nodes, VOCAB)) * 4) / 2
    logits_BNV[:, 1] *= np.where(np.arange(VOCAB) % 2, 0.0, -0.0)
    logits_BNV[:, 2, 20:] = -np.inf
    logits_BNV[::3, -1] = -np.inf
    logits_BNV[::3, -1, 77] = 1.0
    return jnp.asarray(logits_BNV, jnp.float32)


@functools.cache
def draws(mesh: str | None) -> list[np.ndarray]:
    """Tokens behind the nodes of a tree, and what is said of them."""
    place = place_of(mesh)
    plan = Plan(num_nodes=NODES, num_candidates=7, depth=DEPTH, mask_token_id=0, num_top_logprobs=20, place=place)
    random = np.random.default_rng(1)
    nodes = tree.grow(jnp.arange(10, dtype=jnp.int32), random_logits(2, DEPTH), jnp.int32(NODES - 1), NODES, NODES - 1)
    emitted_BM = jnp.asarray(random.integers(0, VOCAB, (10, CAPACITY)), jnp.int32)
    number_B = jnp.asarray(random.integers(1, CAPACITY, 10), jnp.int32)
    row_BN = jnp.broadcast_to(jnp.arange(NODES, dtype=jnp.int32), (10, NODES))

    def of_shard(logits_BNV: jax.Array, *rest: jax.Array) -> tuple:
        drawn_BN = decode._draw(logits_BNV, nodes, number_B + 17, emitted_BM, number_B, SAMPLING, plan)
        return drawn_BN, decode._emission(logits_BNV, row_BN, drawn_BN, SAMPLING, plan)

    drawn = jax.jit(functools.partial(place.run_on_columns, of_shard))(random_logits(1, NODES))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(drawn)]


@pytest.mark.parametrize("mesh", MESHES)
def test_draws_are_those_of_one_device(mesh):
    one, *others = (draws(place) for place in (None, mesh))
    for name, expected, found in zip(("drawn", *decode.Emitted._fields), one, others[0], strict=True):
        if "logprob" in name:  # Sums of floats, which decide nothing.
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(found, expected, err_msg=name)
    drawn_BN, *_ = one
    assert np.bincount(drawn_BN.ravel() // 13, minlength=8).all(), "draws lie in all shards"


@functools.cache
def grown(mesh: str | None) -> list[np.ndarray]:
    """A tree of more candidates than a shard of eight has columns."""
    place, num_nodes = place_of(mesh), 18

    def of_shard(logits_BLV: jax.Array) -> tree.Tree:
        sizes = {"num_nodes": num_nodes, "num_candidates": num_nodes - 1, "shard": place.shard}
        return tree.grow(jnp.arange(10, dtype=jnp.int32), logits_BLV, jnp.int32(num_nodes - 1), **sizes)

    grow = jax.jit(functools.partial(place.run_on_columns, of_shard))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(grow(random_logits(4, DEPTH)))]


@pytest.mark.parametrize("mesh", MESHES)
def test_trees_are_those_of_one_device(mesh):
    for expected, found in zip(grown(None), grown(mesh), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_noise_of_a_shard_is_that_of_its_ids():
    """Bit for bit, and that of `jax.random`."""
    position_BT = jnp.asarray([[3, 9], [4, 2**30]], jnp.int32)
    sizes = {"batch": 2, "max_length": CAPACITY, "vocab_size": VOCAB, "eos_token_ids": (7,)}
    params = SamplingArrays.stack(PARAMS[3:5], [[], []], **sizes)
    make = jax.jit(sampling.noise, static_argnums=2)
    whole_BTV = np.asarray(make(params, position_BT, 1001))
    for first, num in ((0, 1001), (0, 125), (125, 125), (876, 125), (1000, 1)):
        np.testing.assert_array_equal(
            make(params, position_BT, num, jnp.int32(first)), whole_BTV[..., first:][..., :num]
        )
    keys_BT = sampling.noise_keys(params, position_BT)
    np.testing.assert_array_equal(whole_BTV[1, 1], jax.random.gumbel(keys_BT[1, 1], (1001,), jnp.float32))


def loop_of(mesh: Mesh | None, place: Place) -> tuple[Callable[..., State], decode.Models, Callable[..., State]]:
    """The loop behind prompts of a token each, its models, and what makes its state of them.

    The models lie on ``mesh``; wherever ``place`` is, they work there.
    """
    models, plan = make_models(mesh), Plan.of(DecodeConfig(budget=7), DEPTH, 0, VOCAB, True, place)
    prompt_B1 = jnp.arange(10, dtype=jnp.int32)[:, None] * 9

    def begin(models: decode.Models) -> State:
        empty = decode.init_context(models, 10, CAPACITY)
        context, _ = decode.prefill(models, empty, prompt_B1, jnp.ones(10, jnp.int32))
        state = decode.begin(models, context, SAMPLING, plan.undrafted, CAPACITY)
        return replace(state, last=decode.no_round(10, plan))

    def run(models: decode.Models, state: State) -> State:
        return decode.decode_rounds(models, state, SAMPLING, jnp.int32(7), jnp.int32(CAPACITY), plan)

    return run, models, begin


def test_the_loop_emits_what_one_device_emits():
    def emitted(place: Place) -> tuple[np.ndarray, np.ndarray, int]:
        run, models, begin = loop_of(place.mesh, place)
        state = jax.jit(lambda models: run(models, begin(models)))(models)
        return np.asarray(state.emitted.token_BM), np.asarray(state.num_tokens_B), int(state.rounds)

    one, other = emitted(place_of(None)), emitted(place_of("tensor=8"))
    for expected, found in zip(one, other, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert one[2] < 30 and len(np.unique(one[0])) > 50


def lower(monkeypatch: pytest.MonkeyPatch, place: Place, platform: str) -> jax.stages.Lowered:
    """The loop of models that lie on eight devices."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    run, models, begin = loop_of(make_mesh("tensor=8"), place)
    return jax.jit(run).trace(models, jax.eval_shape(begin, models)).lower(lowering_platforms=(platform,))


def collectives_of(program: str) -> list[tuple[str, list[int]]]:
    """Kind and sizes of what each collective of a compiled program gives."""
    found = re.findall(r"= (\(.*?\)|\S+) (all-gather|all-reduce|all-to-all|collective-permute)[\w-]*\(", program)
    return [(kind, sorted(map(int, re.findall(r"\d+", re.sub(r"\{.*?\}|\w+\[", "[", shape))))) for shape, kind in found]


@pytest.mark.parametrize("mesh", ["tensor=8", None])
def test_logits_are_never_gathered(monkeypatch, mesh):
    """In the loop's compiled program. The same search finds that they are where nothing runs on shards."""
    program = lower(monkeypatch, place_of(mesh), "cpu").compile().as_text()
    sizes = [sizes for _, sizes in collectives_of(program)]
    assert sizes
    assert any(VOCAB in each for each in sizes) == (mesh is None)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_shards_take_the_kernels(monkeypatch, has_kernels):
    program = lower(monkeypatch, place_of("tensor=8", has_kernels), "cuda").as_text()
    names = ("tree_expand_top", "tree_expand_grow", "sample_best", "sample_merge", "sample_add_up", "sample_collect")
    for name in (*names, "sample_draw", "sample_perturb", "accept_path", "commit_rows"):
        assert (f"{name}_mosaic_gpu" in program) == has_kernels
