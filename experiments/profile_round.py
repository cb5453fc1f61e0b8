"""One round of the loop by stage: kernels, their time, launches, and what wall time adds to them.

::

    python -m experiments.profile_round [--model tiny|wide] [--nodes 1,8,16,32]

Random weights, batch 1: "tiny" has the shapes of the tiny pair, "wide" a shortened stack of Kimi K2.6's widths as one of
eight devices holds them (heads and experts divided by eight, the vocabulary whole, no collectives). Kernel times are
CUPTI's; a kernel belongs to the stage in whose scope its instruction stands. Launches are what the host starts for a
round: graphs, and whatever no graph took in, read from XLA's plan of the program. Replaces ``results/round.jsonl``.
"""

import collections
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from ddtree_jax import decode, dflash, kimi
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.sampling_params import SamplingArrays, SamplingParams
from ddtree_jax.sharding import initialize, make_mesh
from experiments.kernel_times import kernel_seconds
from experiments.loop_text import launches_of
from experiments.results_file import provenance, write_lines

STAGES = ("draft", "expand", "verify", "accept", "commit")
# Kernels of our own carry their names, not those of instructions.
OWN = {
    "skinny_gemm": "projections",
    "tree_expand": "expand",
    "sample": "accept",
    "accept_path": "accept",
    "commit_rows": "commit",
}
SLICES = 7
WIDE_LAYERS, TENSOR = 4, 8
TINY_PAIR = Path(__file__).parent / "tiny_kimi"
KIMI_K26 = Path(__file__).parents[1] / "tests/configs/kimi_k26.json"
DFLASH_K26 = Path(__file__).parents[1] / "tests/configs/kimi_k26_dflash_reconstructed.json"


def configs(name: str) -> tuple[KimiConfig, DFlashConfig]:
    if name == "tiny":
        folders = TINY_PAIR / "target", TINY_PAIR / "drafter"
        values = [json.loads((folder / "config.json").read_text()) for folder in folders]
        return KimiConfig.from_hf(values[0]), DFlashConfig.from_hf(values[1])
    target = KimiConfig.from_hf(json.loads(KIMI_K26.read_text()))
    drafter = DFlashConfig.from_hf(json.loads(DFLASH_K26.read_text()))
    target = replace(
        target,
        num_hidden_layers=WIDE_LAYERS,
        num_attention_heads=target.num_attention_heads // TENSOR,
        intermediate_size=target.intermediate_size // TENSOR,
        moe_intermediate_size=target.moe_intermediate_size // TENSOR,
    )
    drafter = replace(
        drafter,
        num_hidden_layers=1,
        num_attention_heads=drafter.num_attention_heads // TENSOR,
        num_key_value_heads=drafter.num_key_value_heads // TENSOR,
        intermediate_size=drafter.intermediate_size // TENSOR,
        target_layer_ids=tuple(range(WIDE_LAYERS)),
        num_target_layers=WIDE_LAYERS,
        sliding_layers=drafter.sliding_layers[-1:],
    )
    return target, drafter


def models_of(target: KimiConfig, drafter: DFlashConfig) -> decode.Models:
    mesh = make_mesh("tensor=1")
    arrays = initialize(kimi.parameters(target), jax.random.key(0), jnp.bfloat16)
    kimi.pack_experts(arrays, mesh)
    kimi.pack_projections(arrays, target, mesh)
    drafter_arrays = initialize(dflash.parameters(drafter), jax.random.key(1), jnp.bfloat16)
    dflash.pack_projections(drafter_arrays, drafter, mesh)
    model = kimi.Kimi(target, arrays, drafter.target_layer_ids, mesh, has_kernels=True)
    return decode.Models(model, dflash.DFlash(drafter, drafter_arrays, has_kernels=True))


def start(models: decode.Models, plan: decode.Plan, context: int, capacity: int) -> tuple[decode.State, SamplingArrays]:
    """A state of a sequence that goes on for ``capacity`` tokens behind caches of zeros."""
    vocab = models.target.config.vocab_size
    params = [SamplingParams(max_new_tokens=capacity, ignore_eos=True)]
    options = {"batch": 1, "max_length": context + capacity, "vocab_size": vocab, "eos_token_ids": ()}
    sampling = jax.device_put(SamplingArrays.stack(params, [[0]], **options))
    empty = decode.init_context(models, 1, context + capacity)
    hidden_BD = jax.random.normal(jax.random.key(2), empty.hidden_BD.shape, empty.hidden_BD.dtype)
    bare = replace(
        empty, target_cache=[], drafter_cache=[], length_B=jnp.array([context], jnp.int32), hidden_BD=hidden_BD
    )
    begin = jax.jit(decode.begin, static_argnames=("plan", "capacity"))
    state = begin(models, bare, sampling, plan=plan.undrafted, capacity=capacity)
    state = replace(state, target_cache=empty.target_cache, drafter_cache=empty.drafter_cache)
    return replace(state, last=decode.no_round(1, plan)), sampling


def stages_of(program: str) -> dict[str, str]:
    """Stage of each instruction of a compiled program, by the name that its kernel has."""
    found = {}
    for name, scope in re.findall(r'%?([\w.-]+) = [^\n]*?op_name="([^"]*)"', program):
        stage = next((part for part in scope.split("/") if part in STAGES), None)
        if stage:
            found[re.sub(r"[.-]", "_", name)] = stage
    return found


def stage_of(kernel: str, stages: dict[str, str]) -> str:
    """Library kernels and what lies between the stages are "other"; projections share one kernel wherever they stand."""
    own = next((stage for prefix, stage in OWN.items() if kernel.startswith(prefix)), None)
    if own is None and kernel.startswith(("tree_mla", "project_splits", "int4_moe")):
        return "verify"
    return own or stages.get(kernel, "other")


def measure(name: str, models: decode.Models, num_nodes: int, context: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Result lines of one size of tree: the whole round, and each of its stages."""
    config, drafter = models.target.config, models.drafter.config
    mode = decode.DecodeConfig(mode="ddtree" if num_nodes > 1 else "ar", budget=num_nodes - 1)
    plan = decode.Plan.of(mode, drafter.depth, drafter.mask_token_id, config.vocab_size, False)
    capacity = (SLICES + 4) * rounds * (plan.depth + 1)
    state, sampling = start(models, plan, context, capacity)
    budget = jnp.int32(num_nodes - 1)
    lowered = jax.jit(decode.decode_rounds, static_argnames="plan", donate_argnames="state").lower(
        models, state, sampling, budget, jnp.int32(0), plan=plan
    )
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        texts = [path.read_text() for path in Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")]
    launches = launches_of(max(texts, key=len, default=""))
    held = {"state": state, "limit": 0}

    def run_slice() -> jax.Array:
        held["limit"] += rounds
        held["state"] = compiled(models, held["state"], sampling, budget, jnp.int32(held["limit"]))
        return held["state"].root_B

    seconds = []
    for _ in range(SLICES):
        begun = time.perf_counter()
        jax.block_until_ready(run_slice())
        seconds.append((time.perf_counter() - begun) / rounds)
    wall = statistics.median(seconds[2:])
    times = kernel_seconds(run_slice, [()], 1)
    stages, counts = stages_of(compiled.as_text()), collections.Counter()
    for kernel, total in times.items():
        counts[stage_of(kernel, stages)] += total / rounds
    case = {"model": name, "nodes": num_nodes, "context": context, "layers": config.num_hidden_layers}
    kernel_total = sum(counts.values())
    yield {
        "benchmark": "round",
        "case": case | {"launches": sum(launches.values())},
        "launches": launches,
        "kernel_seconds": kernel_total,
        "seconds": wall,
        "overhead_seconds": wall - kernel_total,
        "stage_seconds": dict(counts),
        "distinct_kernels": len(times),
        "runs": SLICES - 2,
    }


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        sys.exit(f"profile_round: unknown argument {arguments[1]}")
    if jax.default_backend() != "gpu":
        sys.exit(f"profile_round: the device is {jax.devices()[0].device_kind}; a GPU is needed")
    # Before the first line is written, which changes the working tree.
    lines, made_by = [], provenance()
    for name in _MODEL.value:
        models = models_of(*configs(name))
        for num_nodes in map(int, _NODES.value):
            for line in measure(name, models, num_nodes, _CONTEXT.value, _ROUNDS.value):
                lines.append(line | made_by)
                print(json.dumps({key: line[key] for key in line if key != "benchmark"}), flush=True)
                write_lines("round", lines)


if __name__ == "__main__":
    _MODEL = flags.DEFINE_list("model", ["tiny", "wide"], "Which models.")
    _NODES = flags.DEFINE_list("nodes", ["1", "8", "16", "32"], "Sizes of the tree, root included.")
    _CONTEXT = flags.DEFINE_integer("context", 1024, "Committed tokens before the first round.", lower_bound=1)
    _ROUNDS = flags.DEFINE_integer("rounds", 16, "Rounds of a timed slice.", lower_bound=1)
    app.run(main)
