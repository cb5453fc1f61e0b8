"""What is said of a compiled loop, and the program that it is said of: the engine's loop over weights that are shapes."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from absl import app
from jax.sharding import NamedSharding, PartitionSpec

from ddtree_jax import DecodeConfig, dflash
from ddtree_jax.sharding import make_mesh, sharding_of
from experiments import loop_text, results_file
from experiments.abstract_engine import abstract_engine, read_configs
from experiments.compile_report import CONTEXT_MULTIPLE, bytes_per_slot, check_context, longest_context

TINY = Path(__file__).parents[1] / "experiments" / "tiny_kimi"


def compiled_loop(step: Callable) -> str:
    """Text of a loop whose state is a cache of 4 MiB, a weight of 1 MiB and a row."""

    def run(cache, weight, row):
        return jax.lax.while_loop(
            lambda state: jnp.sum(state[2]) < 1e9, lambda state: step(*state), (cache, weight, row)
        )

    shapes = (2048, 512), (512, 512), (8, 512)
    return jax.jit(run).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()


def work(cache, weight, row):
    """A product with the weight and one with the cache; the cache gets a row, in place."""
    with jax.named_scope("verify"):
        row = row @ weight + (row @ cache.T) @ cache
    return jax.lax.dynamic_update_slice(cache, row[:1], (7, 0)), weight, row


def test_large_results_of_small_inputs_are_no_copies():
    """A fusion may read a number that the loop carries, and write much: masked scores, for one."""

    def run(count, scores, table):
        def step(state):
            scores = jnp.where(jnp.arange(512)[None] < count, table @ state[1], 0.0)
            return state[0] + 1, scores[::-1]

        return jax.lax.while_loop(lambda state: state[0] < 9, step, (0, scores))

    shapes = jax.ShapeDtypeStruct((), jnp.int32), *[jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 2
    assert loop_text.read_loop(jax.jit(run).lower(*shapes).compile().as_text()).copies == []


@pytest.mark.parametrize(("num_rows", "is_copy"), [(640, False), (4096, True), (8192, True)])
def test_rows_looked_up_are_no_copy(num_rows, is_copy):
    """Embeddings of many nodes are as large as some weight; what gathers much of what it reads is a copy all the same."""

    def run(table, number_T):
        def step(state):
            table, number_T, total = state
            with jax.named_scope("verify"):
                rows = table[number_T] * total
                return table, jnp.argsort(rows[:, 0]).astype(jnp.int32), jnp.sum(rows @ rows[:8].T)

        return jax.lax.while_loop(lambda state: state[2] < 1e9, step, (table, number_T, 1.0))

    shapes = jax.ShapeDtypeStruct((8192, 512), jnp.float32), jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    text = jax.jit(run).lower(*shapes).compile().as_text()
    assert f"f32[{num_rows},512]" in text
    copies = loop_text.read_loop(text).copies
    assert bool(copies) == is_copy, copies


def test_work_is_no_copy():
    report = loop_text.read_loop(compiled_loop(work))
    assert report.copies == []
    assert report.kernels["verify"] >= 3
    assert report.collectives == {}


@pytest.mark.parametrize(
    "copy",
    [
        lambda cache, weight, row: (jnp.where(jnp.isnan(cache), 0, cache), weight, row),
        lambda cache, weight, row: (cache[::-1], weight, row),
        lambda cache, weight, row: (cache, weight.T, row),
    ],
    ids=["elementwise", "reversed", "transposed"],
)
def test_copies_of_what_the_loop_carries_are_found(copy):
    def step(cache, weight, row):
        cache, weight, row = copy(cache, weight, row)
        return work(cache, weight, row)

    assert loop_text.read_loop(compiled_loop(step)).copies


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (4000 + 128 * 20, 384),  # 128 slots more: 16 bytes each in the arguments, 4 in temporaries.
        (4000 + 128 * 20 - 1, 320),
        (4000, 256),
        (4000 - 1, 192),  # Temporaries are not taken to shrink with the context.
        (1600, 64),
        (10**9, 4096),
    ],
)
def test_longest_context(memory, expected):
    """4000 bytes at 256 slots, of which 1024 are temporary."""
    assert longest_context(memory, 256, 4000, 1024, 16, 4096) == expected


def test_contexts_that_caches_are_filled_up_to_are_refused(monkeypatch):
    """Of others, neither model's cache would have as many slots as the context has tokens."""
    with pytest.raises(app.UsageError, match="--context is 112; allowed are multiples of 64"):
        check_context(112)
    check_context(CONTEXT_MULTIPLE)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    target, drafter = read_configs(TINY / "target" / "config.json", TINY / "drafter" / "config.json", 2)
    models = abstract_engine(target, drafter, make_mesh(None), CONTEXT_MULTIPLE).models
    for model in models:
        for leaf in jax.tree.leaves(jax.eval_shape(lambda model: model.init_cache(1, CONTEXT_MULTIPLE), model)):
            assert leaf.shape[1] == CONTEXT_MULTIPLE


def test_a_slot_is_counted_as_a_device_holds_it():
    """A cache by heads and one that is whole; what is not used, has no slots or belongs to the models does not count."""
    mesh = make_mesh("tensor=8")

    def like(spec: tuple, *shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    heads = like((None, None, "tensor"), 1, 96, 16, 5)
    state = [heads, heads], like((), 1, 96, 7), like((), 1, 96, dtype=jnp.int32), like((), 96), like((), 13)

    def run(weight, state, count):
        by_heads, whole, numbers, _, other = state
        return weight, by_heads[0] + by_heads[1], whole, numbers, other + count

    compiled = jax.jit(run).lower(like((), 96), state, like(())).compile()
    assert bytes_per_slot(compiled, 96) == 2 * (16 // 8 * 5 * 2) + 7 * 2 + 4


def test_result_lines_replace_those_of_the_same_case(tmp_path, monkeypatch):
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    for case, value in ((1, "a"), (2, "b"), (1, "c")):
        path = results_file.update_lines("numbers", [{"case": {"n": case}, "value": value}])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["value"] for line in lines] == ["b", "c"]


def test_abstract_drafter_lies_where_the_real_one_does(monkeypatch):
    """Context weights are packed from sharded arrays, and stay sharded."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    target, drafter = read_configs(TINY / "target" / "config.json", TINY / "drafter" / "config.json", 2)
    mesh = make_mesh("tensor=8")
    arrays = {
        part: {
            name: jax.device_put(np.zeros(info.shape, jnp.bfloat16), sharding_of(info, mesh, name))
            for name, info in table.items()
        }
        for part, table in dflash.parameters(drafter).items()
    }
    real = jax.tree.leaves(dflash.DFlash(drafter, arrays, mesh))
    abstract = jax.tree.leaves(abstract_engine(target, drafter, mesh, 256).models.drafter)
    assert [(leaf.shape, leaf.dtype) for leaf in real] == [(leaf.shape, leaf.dtype) for leaf in abstract]
    for one, other in zip(real, abstract, strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


@pytest.mark.parametrize("mesh", ["tensor=1", "tensor=8", "expert=8"])
def test_whole_loop_goes_through_both_kernels(monkeypatch, mesh):
    """On every mesh; lowered, which needs no GPU."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    configs = read_configs(TINY / "target" / "config.json", TINY / "drafter" / "config.json", 2)
    engine = abstract_engine(*configs, make_mesh(mesh), 256)
    traced = engine.trace_rounds(DecodeConfig(mode="ddtree", budget=3), 2)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("int4_moe", "tree_mla", "tree_mla_combine"):
        assert f"{kernel}_mosaic_gpu" in text
