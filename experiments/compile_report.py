"""Compiles the whole decoding loop for GPUs that are not there, and says what it needs and what it does in a round.

::

    python -m experiments.compile_report --config kimi_k26 --mesh tensor=8 --device h200|rtx6000pro

The program is the engine's own for one sequence, in bfloat16 through the kernels, over weights that are shapes alone; each
budget bucket is a program. The extra ``report`` or ``cuda13`` and ptxas are needed, a GPU is not. Lines in
``results/compile_report.jsonl`` of the same case are replaced.

* Bytes are those of one device: arguments (weights, caches, the state), temporaries, and outputs that take no argument's
  place.
* The longest context that fits: what grows with the slots of a cache is counted in the arguments, as a device holds them
  (latents whole, the drafter's cache by heads); temporaries are taken to grow as fast as the context, which none of them
  exceeds. A card counts 10^9 bytes for each GB of its name; the 7 % above that are left to CUDA, NCCL and the programs
  themselves.
* Kernels and collectives of a round are counted by stage, "other" where XLA keeps no name; all branches of conditions count.
* A round is one graph if XLA's plan of the loop's body is a command buffer and nothing else; else ``outside`` has what the
  host starts between graphs.
* Copies are those of a weight or a cache inside the loop (see `loop_text`). The exit status is 1 if there is one, or if
  the program does not fit.
"""

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from absl import app, flags

from ddtree_jax import DecodeConfig, Engine
from ddtree_jax.pallas import block_attention_kernel, tree_mla
from experiments.abstract_engine import NUM_DEVICES, abstract_engine, mesh_without_devices, read_configs
from experiments.devices import DEVICES
from experiments.loop_text import launches_of, read_loop
from experiments.programs import BUCKETS, CONFIGS, compile_loop, decode_config
from experiments.results_file import provenance, update_lines

CONTEXT_MULTIPLE = math.lcm(tree_mla.SLOT_MULTIPLE, block_attention_kernel.SLOT_MULTIPLE)
"""Slots that both models' caches are filled up to."""


def check_context(context: int) -> None:
    """Raises app.UsageError if caches would have more slots than that, and not be counted as what grows with the context."""
    if context % CONTEXT_MULTIPLE:
        raise app.UsageError(f"--context is {context}; allowed are multiples of {CONTEXT_MULTIPLE}")


def longest_context(memory: int, context: int, num_bytes: int, temporary: int, slot_bytes: int, most: int) -> int:
    """Slots that fit into ``memory`` where ``context`` of them take ``num_bytes``, ``temporary`` among them."""
    free = memory - num_bytes
    growth = slot_bytes + (temporary / context if free > 0 else 0)
    return min(max(0, context + int(free // growth)) // CONTEXT_MULTIPLE * CONTEXT_MULTIPLE, most)


def bytes_per_slot(compiled: jax.stages.Compiled, context: int) -> int:
    """What one more slot adds to a device's arguments, of which only the state and the sampling's arrays grow."""
    leaves = jax.tree.leaves(compiled.args_info[0][1:])
    # None where an argument is not used.
    places = jax.tree.leaves(compiled.input_shardings[0][1:], is_leaf=lambda place: place is None)
    shards = [
        (place.shard_shape(leaf.shape), leaf.dtype.itemsize)
        for leaf, place in zip(leaves, places, strict=True)
        if place is not None
    ]
    return sum(math.prod(shape) * itemsize // context for shape, itemsize in shards if context in shape)


def report(engine: Engine, decode: DecodeConfig, card: int) -> dict[str, Any]:
    """Compiles the loop for one sequence: what it takes of the ``card`` bytes of a device, and what a round does."""
    started = time.perf_counter()
    lowered = engine.trace_rounds(decode, 1).lower()
    lower_seconds = time.perf_counter() - started
    compiled, plan, _, seconds = compile_loop(lowered)
    memory, loop, outside = compiled.memory_analysis(), read_loop(compiled.as_text()), launches_of(plan)
    new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    num_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes + new_outputs
    slot_bytes = bytes_per_slot(compiled, engine.max_length)
    most = engine.models.target.config.max_position_embeddings
    return {
        "lower_seconds": round(lower_seconds, 1),
        "compile_seconds": round(seconds, 1),
        "bytes_per_device": num_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "output_bytes": new_outputs,
        "bytes_per_slot": slot_bytes,
        "longest_context": longest_context(
            card, engine.max_length, num_bytes, memory.temp_size_in_bytes, slot_bytes, most
        ),
        "fits": num_bytes <= card,
        "kernels": loop.kernels,
        "collectives": loop.collectives,
        "graphs": outside.pop("kCommandBuffer", 0),
        "outside": outside,
        "copies": loop.copies,
    }


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    if unknown := set(_BUDGETS.value) - set(BUCKETS):
        raise app.UsageError(f"--budgets has {', '.join(sorted(unknown))}; allowed: {', '.join(BUCKETS)}")
    check_context(_CONTEXT.value)
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    mesh = mesh_without_devices(_MESH.value, _DEVICE.value)
    target, drafter = read_configs(*CONFIGS[_CONFIG.value], _LAYERS.value)
    made_by, failures = provenance(), []
    with jax.default_device(mesh.devices.flat[0]):
        engine = abstract_engine(target, drafter, mesh, _CONTEXT.value)
        for bucket in _BUDGETS.value:
            case = {"device": _DEVICE.value, "config": _CONFIG.value, "mesh": _MESH.value}
            case |= {"layers": target.num_hidden_layers, "context": _CONTEXT.value, "budget": bucket}
            found = report(engine, decode_config(bucket), DEVICES[_DEVICE.value].nominal_memory)
            print(json.dumps(case | found, indent=1), flush=True)
            update_lines("compile_report", [{"benchmark": "compile_report", "case": case, **made_by, **found}])
            failures += [f"{bucket}: {len(found['copies'])} copies"] if found["copies"] else []
            failures += [] if found["fits"] else [f"{bucket}: {found['bytes_per_device']:,} bytes do not fit"]
    if failures:
        sys.exit("compile_report: " + "; ".join(failures))


if __name__ == "__main__":
    _CONFIG = flags.DEFINE_enum("config", "kimi_k26", list(CONFIGS), "The pair of models.")
    _MESH = flags.DEFINE_string("mesh", "tensor=8", "Axis sizes, of at most 8 devices.")
    _DEVICE = flags.DEFINE_enum("device", "h200", list(DEVICES), "The kind of device.")
    _LAYERS = flags.DEFINE_integer("layers", None, "Layers of the target; its own number by default.", lower_bound=2)
    _CONTEXT = flags.DEFINE_integer("context", 32768, "Slots of the caches.", lower_bound=1)
    _BUDGETS = flags.DEFINE_list(
        "budgets", list(BUCKETS), "Which programs: plain, chain, or tree nodes besides the root."
    )
    app.run(main)
