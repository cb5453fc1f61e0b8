"""The 8-GPU benchmark's runs, on eight host devices with the tiny pair, shortened."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np

from ddtree_jax import DecodeConfig, decode, kimi
from ddtree_jax.pallas import simt
from ddtree_jax.pallas.int4_moe import int4_moe_reference
from ddtree_jax.pallas.tree_mla import tree_mla_reference
from ddtree_jax.sharding import make_mesh
from experiments import decode_runs
from experiments.abstract_engine import read_configs
from experiments.decode_runs import COMMUNICATION, Loop, all_reduce_seconds, draw_engine, parts_of, tokens_per_second
from experiments.programs import CONFIGS
from experiments.stage_times import UNKNOWN, Step, Steps


def zeros_like(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)


def test_rounds_and_passes_are_timed_on_a_mesh(monkeypatch):
    # Programs are traced over shapes, which annotations do not know; kernels and draws would take most of the time.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(decode, "_draw", lambda logits_BNV, *_: jnp.zeros(logits_BNV.shape[:2], jnp.int32))
    monkeypatch.setattr(decode_runs, "draw_arrays", lambda described, *_: jax.tree.map(zeros_like, described))
    monkeypatch.setattr(kimi, "check_kernels", lambda *_: None)
    monkeypatch.setattr(kimi, "_int4_moe", int4_moe_reference)
    monkeypatch.setattr(kimi, "_tree_mla", tree_mla_reference)
    monkeypatch.setattr(simt, "choose", lambda kernel, reference, *arrays, has_kernels=True: reference(*arrays))
    mesh = make_mesh("tensor=8")
    engine = draw_engine(*read_configs(*CONFIGS["tiny"], 2), mesh, 64, 0)
    loop = Loop(engine, mesh, DecodeConfig(mode="ar"), 2)
    found = loop.time(loop.draw_caches(1), 20, 2)
    assert found["nodes"] == loop.num_nodes == 1
    assert found["rest_seconds"] == found["seconds"] - found["pass_seconds"]
    assert found["compile_seconds"].keys() == {"round", "pass"}
    # What each device holds: an eighth of what is divided.
    (embedding,) = {shard.data.shape for shard in engine.models.target.embedding_VD[...].addressable_shards}
    assert embedding == (4096 // 8, engine.models.target.config.hidden_size)


def test_all_reduces_are_timed():
    assert isinstance(all_reduce_seconds(make_mesh("tensor=4,expert=2"), 3, 8, 2, 1), float)


def test_tokens_a_second():
    assert tokens_per_second(0.5, 8, 1) == {"1": 16.0}
    assert tokens_per_second(0.5, 1, 4) == {"2": 4.0, "3": 6.0, "4": 8.0}
    assert len(tokens_per_second(1.0, 1, 16)) == 7


def test_parts_of_a_round():
    """Two devices, two rounds; equal kernels belong to the first, collectives to communication."""
    steps = Steps([Step("norm", "draft/x"), Step("norm", "verify/x"), Step("moe", "verify/experts")], {"clear"})
    one = [("clear", 9.0), ("norm", 1.0), ("ncclDevKernel_AllReduce_Sum", 2.0), ("AllReduceKernelImpl", 1.0)]
    one += [("moe_mosaic_gpu_kernel", 4.0), ("strange", 8.0)]
    parts = parts_of(one * 4, steps, num_devices=2, rounds=2)
    assert parts == {"draft": 1.0, COMMUNICATION: 3.0, "verify": 4.0, UNKNOWN: 8.0}
