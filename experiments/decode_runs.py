"""The whole pair on a mesh of real devices: weights drawn in place, rounds and passes timed, kernels by part."""

import collections
import functools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ddtree_jax import DecodeConfig, Engine, dflash, kimi
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.placement import Placement
from experiments.abstract_engine import drafter_shapes, target_shapes
from experiments.loop_runs import Caches, Passes, Rounds, describe_state, draw_caches, lower_passes, seconds_each
from experiments.programs import Program, compile_loop
from experiments.stage_times import UNKNOWN, Steps, steps_of
from experiments.synthetic import draw_arrays

COMMUNICATION = "communication"
ACCEPTED = range(2, 9)
"""Accepted lengths that tokens a second are told for: with drawn weights the real ones mean nothing."""
_COLLECTIVE = re.compile(r"nccl|all.?reduce|all.?gather|reduce.?scatter|collective", re.IGNORECASE)


def draw_engine(target: KimiConfig, drafter: DFlashConfig, mesh: Mesh, max_length: int, seed: int) -> Engine:
    """An engine whose weights no checkpoint holds, the experts' in the kernel's blocks.

    Raises:
      ValueError: the mesh does not divide a parameter, which is named.
      NotImplementedError: the kernels do not take these shapes.
    """
    kimi.check_kernels(target, mesh)
    parameters, drafter_parameters = kimi.parameters(target), dflash.parameters(drafter)
    arrays = draw_arrays(target_shapes(target, parameters, mesh), parameters, seed)
    drafter_arrays = draw_arrays(drafter_shapes(drafter, drafter_parameters, mesh), drafter_parameters, seed + 1)
    return Engine(
        kimi.Kimi(target, arrays, drafter.target_layer_ids, mesh, True),
        dflash.DFlash(drafter, drafter_arrays, mesh, has_kernels=True),
        mesh=mesh,
        max_length=max_length,
    )


class Loop:
    """The compiled loop of one way to speculate, and target passes over as many nodes."""

    def __init__(self, engine: Engine, mesh: Mesh, decode: DecodeConfig, batch: int):
        target = engine.models.target
        self.placement, self.models = Placement(mesh), engine.models
        self.decode, self.batch = decode, batch
        lowered = engine.trace_rounds(decode, batch).lower()
        self.state = describe_state(lowered, self.placement)
        self.num_nodes = self.state.last.token_BN.shape[1]
        sizes = {"batch": batch, "num_slots": engine.max_length, "num_nodes": self.num_nodes}
        self.rounds: Program = compile_loop(lowered)
        self.passes: Program = compile_loop(lower_passes(target, self.placement, **sizes))

    @functools.cached_property
    def steps(self) -> Steps:
        """Kernels of a round by stage. Raises RuntimeError where XLA writes no plan."""
        return steps_of(self.rounds)

    def draw_caches(self, seed: int) -> Caches:
        return draw_caches(self.state.target_cache, self.state.drafter_cache, seed)

    def runners(self, caches: Caches) -> tuple[Rounds, Passes]:
        budget = min(self.decode.budget, self.num_nodes - 1)
        rounds = Rounds(self.rounds.compiled, self.models, self.state, budget, self.placement, caches)
        return rounds, Passes(self.passes.compiled, self.models, self.placement, caches)

    def time(self, caches: Caches, context: int, count: int) -> dict[str, Any]:
        """Wall seconds of a round and of a pass, compile seconds, tokens a second by accepted length."""
        rounds, passes = self.runners(caches)
        seconds, of_pass = (seconds_each(runner.run, context, count) for runner in (rounds, passes))
        return {
            "seconds": seconds,
            "pass_seconds": of_pass,
            "rest_seconds": seconds - of_pass,
            "tokens_per_second": tokens_per_second(seconds, self.batch, self.num_nodes),
            "compile_seconds": {"round": round(self.rounds.seconds, 1), "pass": round(self.passes.seconds, 1)},
            "nodes": self.num_nodes,
        }


def tokens_per_second(seconds: float, batch: int, num_nodes: int) -> dict[str, float]:
    """Of a batch, if each of its rounds accepted so many nodes; a tree of the root alone accepts one."""
    lengths = [length for length in ACCEPTED if length <= num_nodes] if num_nodes > 1 else [1]
    return {str(length): batch * length / seconds for length in lengths}


def parts_of(timeline: Sequence[tuple[str, float]], steps: Steps, num_devices: int, rounds: int) -> dict[str, float]:
    """Kernel seconds of a round and device, by part; collectives, the waiting in them included, are a part of their own.

    Records of several devices are mixed, so that a kernel's name alone says where it belongs: of equal kernels, the first.
    """
    part_of: dict[str | None, str] = {}
    for step in steps.inside:
        part_of.setdefault(step.kernel, step.stage.split("/")[0])
    seconds = collections.Counter()
    for name, duration in timeline:
        kernel = name.split("_mosaic_gpu")[0]
        if kernel in steps.outside:
            continue
        part = COMMUNICATION if _COLLECTIVE.search(name) else part_of.get(kernel, UNKNOWN)
        seconds[part] += duration / (num_devices * rounds)
    return dict(seconds)


def all_reduce_seconds(mesh: Mesh, num_rows: int, width: int, num_layers: int, count: int) -> float:
    """Wall seconds of one of a layer's two all-reduces, as many in a row as the target has, alone on the mesh.

    float32 rows, as the experts' sums are; each adds to what the one before gave, so that they do not overlap.
    """
    run = all_reduces(mesh, num_layers)
    placement = Placement(mesh)
    x_TD = placement.put(np.ones((num_rows, width), np.float32))

    def timed(_: int, rounds: int) -> float:
        numbers = placement.put(np.int32(rounds))
        jax.block_until_ready(numbers)
        begun = time.perf_counter()
        jax.block_until_ready(run(x_TD, numbers))
        return time.perf_counter() - begun

    return seconds_each(timed, 0, count) / (2 * num_layers)


def all_reduces(mesh: Mesh, num_layers: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A program of rows and a number of rounds: two means over the mesh's devices for every layer and round."""
    axes = mesh.axis_names
    spec = jax.sharding.PartitionSpec()

    def reduce_all(x_TD: jax.Array, count: jax.Array) -> jax.Array:
        def layers(_: jax.Array, x_TD: jax.Array) -> jax.Array:
            for _ in range(2 * num_layers):
                x_TD = jax.lax.psum(x_TD * (1 / mesh.size), axes)
            return x_TD

        return jax.lax.fori_loop(0, count, layers, x_TD)

    return jax.jit(jax.shard_map(reduce_all, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))
