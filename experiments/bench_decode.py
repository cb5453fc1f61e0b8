"""Decoding on a mesh of GPUs with drawn weights: seconds a round and a target pass, by batch, context and speculation.

::

    python -m experiments.bench_decode --config kimi_k26 --synthetic --mesh tensor=8

Both models are drawn where they lie; the router's choice is its own. What drawn weights accept means nothing, so that
tokens a second are those that accepted lengths of 2 to 8 would give. A target pass is timed alone, over as many nodes, in a
program of its own; what a round takes beyond it is draft, tree, draws and commit. Kernel times are CUPTI's, a mean over the
devices; "communication" has the waiting of a device for the others in it. ``all_reduce_seconds`` is one all-reduce of a
layer, alone on the mesh. Lines of the same cases in ``results/bench_decode.jsonl`` are replaced as they come.
"""

import os
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
from absl import app, flags

from ddtree_jax.sharding import make_mesh
from experiments.abstract_engine import read_configs
from experiments.decode_runs import Loop, all_reduce_seconds, draw_engine, parts_of
from experiments.kernel_times import kernel_timeline
from experiments.loop_runs import slots_for
from experiments.programs import BUCKETS, CONFIGS, decode_config
from experiments.results_file import provenance, update_lines
from experiments.synthetic import count_bytes

RECORDED = 4
"""Rounds of which kernels are recorded."""


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    if not _SYNTHETIC.value:
        raise app.UsageError("--synthetic is needed: there are no other weights here")
    if unknown := set(_BUDGETS.value) - set(BUCKETS):
        raise app.UsageError(f"--budgets has {min(unknown)}; allowed: {', '.join(BUCKETS)}")
    if jax.default_backend() != "gpu":
        sys.exit(f"bench_decode: the device is {jax.devices()[0].device_kind}; a GPU is needed")
    contexts, batches = (list(map(int, flag.value)) for flag in (_CONTEXTS, _BATCHES))
    target, drafter = read_configs(*CONFIGS[_CONFIG.value], _LAYERS.value)
    mesh, made_by, max_length = make_mesh(_MESH.value), provenance(), slots_for(max(contexts))
    begun = time.perf_counter()
    engine = draw_engine(target, drafter, mesh, max_length, _SEED.value)
    jax.block_until_ready(jax.tree.leaves(engine.models))
    num_bytes = count_bytes(engine.models)
    print(f"weights: {num_bytes / 1e9:.1f} GB drawn in {time.perf_counter() - begun:.1f} s", flush=True)
    case = {"config": _CONFIG.value, "mesh": _MESH.value, "layers": target.num_hidden_layers, "slots": max_length}
    for batch in batches:
        caches = None
        for bucket in _BUDGETS.value:
            loop = Loop(engine, mesh, decode_config(bucket), batch)
            caches = caches or loop.draw_caches(_SEED.value)
            rows = batch * loop.num_nodes
            alone = all_reduce_seconds(mesh, rows, target.hidden_size, target.num_hidden_layers, _ROUNDS.value)
            rounds, _ = loop.runners(caches)
            for context in contexts:
                found = loop.time(caches, context, _ROUNDS.value)
                timeline = kernel_timeline([lambda context=context, rounds=rounds: rounds.run(context, RECORDED)])
                line = {
                    "benchmark": "bench_decode",
                    "case": case | {"batch": batch, "budget": bucket, "context": context},
                    **found,
                    "all_reduce_seconds": alone,
                    "kernel_seconds": parts_of(timeline, loop.steps, mesh.size, RECORDED),
                    "peak_device_bytes_so_far": jax.devices()[0].memory_stats()["peak_bytes_in_use"],
                }
                print(line, flush=True)
                update_lines("bench_decode", [line | made_by])


if __name__ == "__main__":
    _CONFIG = flags.DEFINE_enum("config", "kimi_k26", list(CONFIGS), "The pair of models.")
    _SYNTHETIC = flags.DEFINE_bool("synthetic", False, "Weights are drawn on the devices.")
    _MESH = flags.DEFINE_string("mesh", "tensor=8", "Axis sizes.")
    _LAYERS = flags.DEFINE_integer("layers", None, "Layers of the target; its own number by default.", lower_bound=2)
    _BATCHES = flags.DEFINE_list("batches", ["1", "8"], "Sequences.")
    _CONTEXTS = flags.DEFINE_list("contexts", ["1024", "8192", "65536"], "Committed tokens of each.")
    _BUDGETS = flags.DEFINE_list("budgets", ["plain", "chain", "7", "15", "31", "63"], "Ways to speculate.")
    _ROUNDS = flags.DEFINE_integer(
        "rounds", 16, "Rounds of a timed run, and twice as many.", lower_bound=1, upper_bound=64
    )
    _SEED = flags.DEFINE_integer("seed", 0, "Of weights and caches.")
    app.run(main)
