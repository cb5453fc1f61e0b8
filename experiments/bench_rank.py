"""The share of one of a mesh's ranks on one GPU: a round by stage, each beside the bytes that it must read.

::

    python -m experiments.bench_rank --mesh tensor=8 [--nodes 16,1,8,32,64] [--contexts 1024,8192,32768,131072]

Kimi K2.6 at full width and depth, divided by the mesh's rules; INT4 words, scales, bfloat16 weights and caches are drawn on
the device. All-reduces and gathers are left out, and a shard's sums taken for the whole ones. The router computes its choice,
but tokens are sent where a draw with a set number of distinct experts says: by default as many as uniform routing would
hit on average, over all ranks. So tokens mean nothing, and nothing is said of acceptance.

One program a number of nodes is the engine's whole loop ("round"), another the target's pass alone ("pass"), whose wall time
no other stage blurs; lengths are traced. Caches have the slots of the longest context whatever the context is: kernels read
what is committed, plain JAX all slots or a window of them. ``--slots`` and ``--contexts`` tell such costs apart.

* Kernel times are CUPTI's, of the captured loop. A kernel belongs to the stage of its instruction (see `stage_times`);
  stages sum to the round, what is of no stage ("other") and what no stage is known of ("unknown") among them.
* Wall time of a round less its kernels is "between kernels": launches, the host's look at the loop's condition, copies.
* Floors: bytes of weights, chosen experts, cache rows and logits, once each, at 4.57 TB/s. Activations are not counted.

``--compile_only`` needs no GPU (``JAX_PLATFORMS=cpu``, the extra ``report``): it compiles for an H200, and prints what a
program takes, its copies of weights and caches, and its kernels by stage. ``--load DIR`` does nothing but write the share to
converted checkpoints there, in a folder that is new or empty, and time their way back: 77 GB, or 1.25 for each of
``--layers`` and 3 more. Lines of the same cases in ``results/bench_rank.jsonl`` are replaced as they come.
"""

import concurrent.futures
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh

from ddtree_jax.decode import BUDGET_BUCKETS, Models
from ddtree_jax.placement import Placement
from ddtree_jax.sharding import make_mesh
from experiments import rank
from experiments.abstract_engine import mesh_without_devices, read_configs
from experiments.bench_int4_moe import BYTES_PER_SECOND
from experiments.kernel_times import kernel_timeline
from experiments.loop_runs import (
    ROOM,
    RUNS,
    Caches,
    Passes,
    Rounds,
    describe_state,
    draw_caches,
    lower_passes,
    seconds_each,
    slots_for,
)
from experiments.loop_text import read_loop
from experiments.programs import CONFIGS, Program, compile_loop, decode_config
from experiments.rank_floor import rest_bytes, target_bytes
from experiments.rank_load import time_load
from experiments.results_file import provenance, update_lines
from experiments.stage_times import Steps, add_up, steps_of
from experiments.synthetic import count_bytes

PROGRAMS = ("round", "pass")
RECORDED = 4
"""Rounds of which kernels are recorded."""
NOTE = "all-reduces and gathers left out"


class Bench:
    """One share and what is asked of it."""

    def __init__(self, share: rank.Share, mesh: Mesh, num_slots: int, seed: int):
        self.share, self.mesh, self.num_slots, self.seed = share, mesh, num_slots, seed
        self.tables = rank.Tables.of(share, mesh)

    def expected_distinct(self, num_nodes: int) -> int:
        return rank.expected_distinct(num_nodes, self.share.num_experts, self.share.target.num_experts_per_tok)

    def draw_caches(self, models: Models) -> Caches:
        """Of the slots of the programs."""
        placement = Placement(self.mesh)
        cache, drafter_cache = (
            jax.eval_shape(lambda model: model.init_cache(1, self.num_slots), model) for model in models
        )
        return draw_caches(placement.describe(cache), placement.describe(drafter_cache), self.seed)

    def lower(self, kind: str, num_nodes: int) -> jax.stages.Lowered:
        """A program for these nodes, over shapes."""
        models = rank.abstract_models(self.share, self.mesh, self.tables)
        placement = Placement(self.mesh)
        shape = jax.ShapeDtypeStruct((num_nodes, self.share.target.num_experts_per_tok), jnp.int32)
        routing = [placement.describe(shape)] * self.share.num_moe_layers
        engine = rank.engine_of(models, routing, self.mesh, self.num_slots)
        if kind == "round":
            return engine.trace_rounds(decode_config("plain" if num_nodes == 1 else str(num_nodes - 1)), 1).lower()
        return lower_passes(models.target, placement, batch=1, num_slots=self.num_slots, num_nodes=num_nodes)

    def floors(self, routing: Sequence[np.ndarray], context: int) -> dict[str, int]:
        """Bytes by stage."""
        num_nodes = len(routing[0])
        target = target_bytes(self.share, self.tables.target, routing, context)
        if num_nodes == 1:
            return target | {"accept": 4 * self.share.target.vocab_size}
        return target | rest_bytes(self.share, *self.tables, num_nodes, context)


class Compiled:
    """A program of a kind for a number of nodes, with the stages of its kernels."""

    def __init__(self, bench: Bench, kind: str, num_nodes: int):
        self.kind, self.num_nodes = kind, num_nodes
        begun = time.perf_counter()
        self.lowered = bench.lower(kind, num_nodes)
        self.lower_seconds = time.perf_counter() - begun
        self.program: Program = compile_loop(self.lowered)
        self.steps: Steps = steps_of(self.program)

    def describe(self) -> dict[str, Any]:
        """What the program takes, and what its loop copies."""
        memory = self.program.compiled.memory_analysis()
        new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return {
            "lower_seconds": round(self.lower_seconds, 1),
            "compile_seconds": round(self.program.seconds, 1),
            "program_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes + new_outputs,
            "copies": read_loop(self.program.compiled.as_text()).copies,
        }


def stage_lines(timeline: Sequence[tuple[str, float]], steps: Steps, floors: dict[str, int]) -> list[dict[str, Any]]:
    """Seconds, kernels and ceilings of one round: the whole of its kernels, its parts, and their stages."""
    seconds, kernels = add_up(timeline, steps)
    lines = []
    parts = dict.fromkeys(stage.split("/")[0] for stage in (*floors, *seconds))
    for part in parts:
        stages = sorted({stage for stage in (*floors, *seconds) if stage.split("/")[0] == part})
        groups = {part: stages} | ({stage: [stage] for stage in stages} if stages != [part] else {})
        for name, members in groups.items():
            took, num_kernels, num_bytes = (
                sum(table.get(stage, 0) for stage in members) for table in (seconds, kernels, floors)
            )
            lines.append(_line(name, took / RECORDED, num_bytes) | {"kernels": num_kernels / RECORDED})
    whole = sum(seconds.values()) / RECORDED
    kernels_of_all = {"kernels": sum(kernels.values()) / RECORDED}
    return [*lines, _line("all kernels", whole, sum(floors.values())) | kernels_of_all]


def _line(stage: str, seconds: float, num_bytes: int) -> dict[str, Any]:
    ceiling = num_bytes / BYTES_PER_SECOND
    line = {"stage": stage, "seconds": seconds}
    if num_bytes:
        line |= {"ceiling_seconds": ceiling, "ceiling": f"{num_bytes / 1e6:.1f} MB at 4.57 TB/s"}
        line |= {"fraction_of_ceiling": ceiling / seconds if seconds else None}
    return line


def measure(
    bench: Bench, compiled: Compiled, models: Models, caches: Caches, context: int, routing: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """Lines of one program at one context, by stage."""
    placement, floors = Placement(bench.mesh), bench.floors(routing, context)
    if compiled.kind == "pass":
        runner = Passes(compiled.program.compiled, models, placement, caches)
        floors = {stage: num_bytes for stage, num_bytes in floors.items() if stage.startswith("verify/")}
    else:
        state = describe_state(compiled.lowered, placement)
        runner = Rounds(compiled.program.compiled, models, state, compiled.num_nodes - 1, placement, caches)
    wall = seconds_each(runner.run, context, _ROUNDS.value)
    timeline = kernel_timeline([lambda: runner.run(context, RECORDED)])
    lines = stage_lines(timeline, compiled.steps, floors)
    kernels = lines[-1]["seconds"]
    whole = _line(compiled.kind, wall, sum(floors.values())) | {"kernel_seconds": kernels}
    if compiled.kind == "pass":
        return [whole | {"kernels": lines[-1]["kernels"]}]
    whole["tokens_a_round"] = runner.tokens_a_round
    return [*lines, {"stage": "between kernels", "seconds": wall - kernels}, whole]


def print_table(title: str, lines: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title}\n{'stage':58}{'kernels':>8}{'us':>10}{'floor us':>10}{'x floor':>9}")
    for line in lines:
        indent = "  " if "/" in line["stage"] else ""
        floor = line.get("ceiling_seconds")
        ratio = f"{line['seconds'] / floor:9.2f}" if floor else ""
        floor_text = f"{floor * 1e6:10.1f}" if floor else f"{'':10}"
        count = f"{line['kernels']:8.0f}" if "kernels" in line else f"{'':8}"
        print(f"{indent + line['stage']:58}{count}{line['seconds'] * 1e6:10.1f}{floor_text}{ratio}", flush=True)


def compile_all(bench: Bench, wanted: Sequence[tuple[str, int]], threads: int) -> Iterator[Compiled]:
    """Programs in the order asked for, so many compiled at a time; the first one alone, so that its time is its own."""
    yield Compiled(bench, *wanted[0])
    if threads == 1:
        yield from (Compiled(bench, *one) for one in wanted[1:])
    else:
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            # All of them before the next is measured: XLA tries kernels on the device while it compiles.
            yield from list(pool.map(lambda one: Compiled(bench, *one), wanted[1:]))


def report_compiled(programs: Iterator[Compiled]) -> None:
    for compiled in programs:
        print(f"\n{compiled.kind}, {compiled.num_nodes} nodes: {compiled.describe()}")
        for stage, count in sorted(Counter(step.stage for step in compiled.steps.inside).items()):
            print(f"  {count:6} {stage}", flush=True)


def run(bench: Bench, wanted: Sequence[tuple[str, int]], contexts: Sequence[int], case: dict[str, Any]) -> None:
    """Measures every program at every context; a line and a table as each is done."""
    made_by = provenance()
    begun = time.perf_counter()
    models = jax.block_until_ready(rank.drawn_models(bench.share, bench.mesh, bench.tables, bench.seed))
    print(f"weights: {count_bytes(models) / 1e9:.1f} GB drawn in {time.perf_counter() - begun:.1f} s", flush=True)
    caches = None
    for compiled in compile_all(bench, wanted, _COMPILE_THREADS.value):
        facts = compiled.describe() | {"collectives": NOTE}
        print(f"\n{compiled.kind}, {compiled.num_nodes} nodes: {facts}", flush=True)
        distinct = _DISTINCT.value or bench.expected_distinct(compiled.num_nodes)
        routing = rank.draw_routing(bench.share, compiled.num_nodes, distinct, bench.seed)
        models.target.send(Placement(bench.mesh).put(routing))
        caches = caches or bench.draw_caches(models)
        of_nodes = case | {"nodes": compiled.num_nodes, "distinct_experts": distinct}
        for context in contexts:
            lines = measure(bench, compiled, models, caches, context, routing)
            facts["peak_device_bytes_so_far"] = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
            print_table(f"{compiled.kind}, {compiled.num_nodes} nodes, {context} tokens ({NOTE})", lines)
            update_lines(
                "bench_rank",
                [
                    {"benchmark": "bench_rank", "case": of_nodes | {"context": context, "stage": line.pop("stage")}}
                    | line
                    | ({"runs": RUNS} | facts if "kernel_seconds" in line else {"runs": RECORDED})
                    | made_by
                    for line in lines
                ],
            )


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    nodes, contexts = (list(map(int, flag.value)) for flag in (_NODES, _CONTEXTS))
    allowed = (1, *(budget + 1 for budget in BUDGET_BUCKETS))
    if unknown := set(nodes) - set(allowed):
        raise app.UsageError(f"--nodes has {min(unknown)}; allowed: {', '.join(map(str, allowed))}")
    if unknown := set(_PROGRAMS.value) - set(PROGRAMS):
        raise app.UsageError(f"--programs has {min(unknown)}; allowed: {', '.join(PROGRAMS)}")
    share = rank.Share.of(*read_configs(*CONFIGS[_CONFIG.value], _LAYERS.value), _MESH.value)
    slots = _SLOTS.value or slots_for(max(contexts))
    if slots < max(contexts) + ROOM:
        raise app.UsageError(f"--slots is {slots}; at least {max(contexts) + ROOM} are needed, {ROOM} for what is run")
    for num_nodes in nodes if _DISTINCT.value else ():
        try:
            rank.check_distinct(share, num_nodes, _DISTINCT.value)
        except ValueError as error:
            raise app.UsageError(f"--{error}") from error
    wanted = [(kind, num_nodes) for num_nodes in nodes for kind in _PROGRAMS.value]
    if _COMPILE_ONLY.value:
        mesh = mesh_without_devices("tensor=1", "h200")
        with jax.default_device(mesh.devices.flat[0]):
            report_compiled(compile_all(Bench(share, mesh, slots, _SEED.value), wanted, 1))
        return
    if jax.default_backend() != "gpu":
        sys.exit(f"bench_rank: the device is {jax.devices()[0].device_kind}; a GPU is needed, or --compile_only")
    case = {"config": _CONFIG.value, "mesh": _MESH.value, "layers": share.target.num_hidden_layers}
    if _LOAD.value:
        made_by = provenance()
        line = {"benchmark": "bench_rank", "case": case | {"stage": "load"}}
        line |= time_load(share, _LOAD.value, make_mesh(None))
        print(line, flush=True)
        update_lines("bench_rank", [line | made_by])
        return
    bench = Bench(share, make_mesh(None), slots, _SEED.value)
    case |= {"slots": slots, "seed": _SEED.value}
    run(bench, wanted, contexts, case)


if __name__ == "__main__":
    _CONFIG = flags.DEFINE_enum("config", "kimi_k26", list(CONFIGS), "The pair of models.")
    _MESH = flags.DEFINE_string("mesh", "tensor=8", "The mesh that one rank is taken from.")
    _LAYERS = flags.DEFINE_integer("layers", None, "Layers of the target; its own number by default.", lower_bound=2)
    _NODES = flags.DEFINE_list("nodes", ["16", "1", "8", "32", "64"], "Nodes of the tree, root included.")
    _CONTEXTS = flags.DEFINE_list("contexts", ["1024", "8192", "32768", "131072"], "Committed tokens.")
    _SLOTS = flags.DEFINE_integer("slots", None, "Slots of the caches; by default as the longest context needs.")
    _DISTINCT = flags.DEFINE_integer("distinct", None, "Distinct experts a layer over all ranks.", lower_bound=1)
    _SEED = flags.DEFINE_integer("seed", 0, "Of weights, caches and routing.")
    _PROGRAMS = flags.DEFINE_list("programs", list(PROGRAMS), "Which programs: round, pass.")
    _ROUNDS = flags.DEFINE_integer(
        "rounds", 16, "Rounds of a timed run, and twice as many.", lower_bound=1, upper_bound=64
    )
    _COMPILE_THREADS = flags.DEFINE_integer("compile_threads", 9, "Programs compiled at a time, behind the first.")
    _COMPILE_ONLY = flags.DEFINE_bool("compile_only", False, "Compile for an H200 that need not be there.")
    _LOAD = flags.DEFINE_string("load", None, "A new or empty folder to write the share to and load it from.")
    app.run(main)
