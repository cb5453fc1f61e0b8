"""The 8-GPU benchmark's runs, on eight host devices with the tiny pair, shortened."""

import numpy as np
from plain_runs import allow_shapes, leave_out_kernels

from ddtree_jax import DecodeConfig
from ddtree_jax.sharding import make_mesh
from experiments import decode_runs
from experiments.abstract_engine import read_configs
from experiments.decode_runs import (
    COMMUNICATION,
    Loop,
    all_reduce_seconds,
    all_reduces,
    draw_engine,
    parts_of,
    tokens_per_second,
)
from experiments.programs import CONFIGS
from experiments.stage_times import UNKNOWN, Step, Steps


def test_rounds_and_passes_run_on_a_mesh(monkeypatch):
    allow_shapes(monkeypatch)
    leave_out_kernels(monkeypatch, decode_runs)
    mesh = make_mesh("tensor=8")
    engine = draw_engine(*read_configs(*CONFIGS["tiny"], 2), mesh, 64, 0)
    loop = Loop(engine, mesh, DecodeConfig(mode="ar"), 2)
    caches = loop.draw_caches(1)
    before_BSW = np.asarray(caches.target[0], np.float32)
    found = loop.time(caches, 20, 2)
    assert found["nodes"] == loop.num_nodes == 1
    # Runs of two and of four rounds, each behind 20 tokens; passes write nothing.
    is_written_BS = np.any(before_BSW != np.asarray(caches.target[0], np.float32), axis=2)
    np.testing.assert_array_equal(is_written_BS, [np.isin(np.arange(64), range(20, 24))] * 2)
    # What each device holds: an eighth of what is divided.
    (embedding,) = {shard.data.shape for shard in engine.models.target.embedding_VD[...].addressable_shards}
    assert embedding == (4096 // 8, engine.models.target.config.hidden_size)


def test_a_layer_has_two_all_reduces(monkeypatch):
    mesh = make_mesh("tensor=4,expert=2")
    run, x_TD = all_reduces(mesh, num_layers=3), np.ones((5, 7), np.float32)
    assert run.lower(x_TD, np.int32(1)).as_text().count("stablehlo.all_reduce") == 2 * 3
    # Seconds of one of them, where a round takes 12.
    monkeypatch.setattr(decode_runs, "seconds_each", lambda run, length, count: 12.0)
    assert all_reduce_seconds(mesh, 5, 7, num_layers=3, count=1) == 2.0


def test_tokens_a_second():
    assert tokens_per_second(0.5, 8, 1) == {"1": 16.0}
    assert tokens_per_second(0.5, 1, 4) == {"2": 4.0, "3": 6.0, "4": 8.0}
    assert len(tokens_per_second(1.0, 1, 16)) == 7


def test_parts_of_a_round():
    """Two devices, two rounds; equal kernels belong to the first, collectives to communication."""
    steps = Steps([Step("norm", "draft/x"), Step("norm", "verify/x"), Step("moe", "verify/experts")], {"clear", "grow"})
    one = [
        ("clear", 9.0),
        ("grow_mosaic_gpu_kernel", 9.0),
        ("norm", 1.0),
        ("ncclDevKernel_AllReduce_Sum", 2.0),
        ("AllReduceKernelImpl", 1.0),
    ]
    one += [("moe_mosaic_gpu_kernel", 4.0), ("strange", 8.0)]
    parts = parts_of(one * 4, steps, num_devices=2, rounds=2)
    assert parts == {"draft": 1.0, COMMUNICATION: 3.0, "verify": 4.0, UNKNOWN: 8.0}
