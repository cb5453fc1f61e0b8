"""Compiles the whole decoding loop for GPUs that are not there, and says what it needs and what it does in a round.

    python -m experiments.compile_report --mesh tensor=8 --device h200 --layers 4

The program is the engine's own, in bfloat16 through the kernels, over weights that are shapes alone. ``--layers`` shortens
the target's stack. JAX's CUDA plugin (extra ``cuda13``) and ptxas are needed, a GPU is not. Kernels are counted by stage,
"other" where XLA keeps no name.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from ddtree_jax import DecodeConfig, Engine, dflash, kimi
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.pallas.int4_moe import ExpertBlocks
from ddtree_jax.sharding import Parameters, make_mesh, sharding_of
from experiments.loop_text import read_loop
from experiments.results_file import provenance, write_lines

SPECS = Path(__file__).parent / "gpu_specs"
CONFIGS = Path(__file__).parents[1] / "tests" / "configs"
NUM_DEVICES = 8
DEVICES = tuple(sorted(path.stem for path in SPECS.glob("*.txtpb")))


def mesh_without_devices(text: str, device: str) -> Mesh:
    """A mesh of GPUs that can be compiled for."""
    like = make_mesh(text)
    spec = (SPECS / f"{device}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=spec, topology=f"1x1x{NUM_DEVICES}")
    devices = np.array(topology.devices[: like.size]).reshape(like.devices.shape)
    return Mesh(devices, like.axis_names, axis_types=like.axis_types)


def read_configs(target: str, drafter: str, num_layers: int | None) -> tuple[KimiConfig, DFlashConfig]:
    """Both configs; if the target is shortened, the drafter takes its features from the layers that are left."""
    target_config = KimiConfig.from_hf(json.loads(Path(target).read_text()))
    drafter_config = DFlashConfig.from_hf(json.loads(Path(drafter).read_text()))
    if num_layers is None:
        return target_config, drafter_config
    num_features = len(drafter_config.target_layer_ids)
    taken = tuple(index * num_layers // num_features for index in range(num_features))
    return (
        replace(target_config, num_hidden_layers=num_layers),
        replace(drafter_config, num_target_layers=num_layers, target_layer_ids=taken),
    )


def abstract_engine(target: KimiConfig, drafter: DFlashConfig, mesh: Mesh, max_length: int) -> Engine:
    """An engine whose weights are shapes, with the kernels in bfloat16.

    Raises:
      NotImplementedError: the kernels do not take these shapes.
    """
    kimi.check_kernels(target, mesh)
    target_arrays = _abstract(kimi.parameters(target), mesh)
    packed = jax.eval_shape(lambda arrays: _packed(arrays, mesh), target_arrays)
    blocks = {name: NamedSharding(mesh, spec) for name, spec in kimi.BLOCK_SPECS._asdict().items()}
    for part, table in packed.items():
        for name, leaf in table.items():
            sharding = blocks[name] if name in ExpertBlocks._fields else target_arrays[part][name].sharding
            table[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return Engine(
        kimi.Kimi(target, packed, drafter.target_layer_ids, mesh, True),
        dflash.DFlash(drafter, _abstract(dflash.parameters(drafter), mesh)),
        mesh=mesh,
        max_length=max_length,
    )


def _abstract(parameters: Parameters, mesh: Mesh) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    return {
        part: {
            name: jax.ShapeDtypeStruct(info.shape, info.dtype or jnp.bfloat16, sharding=sharding_of(info, mesh, name))
            for name, info in table.items()
        }
        for part, table in parameters.items()
    }


def _packed(arrays: dict[str, dict[str, jax.Array]], mesh: Mesh) -> dict[str, dict[str, jax.Array]]:
    kimi.pack_experts(arrays, mesh)
    return arrays


def report(engine: Engine, budget: int) -> dict[str, Any]:
    """Compiles the loop for one sequence: what it takes on a device, and what a round does."""
    started = time.perf_counter()
    lowered = engine.trace_rounds(DecodeConfig(mode="ddtree" if budget else "ar", budget=budget), 1).lower()
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - lowered_at
    memory, loop = compiled.memory_analysis(), read_loop(compiled.as_text())
    return {
        "lower_seconds": round(lowered_at - started, 1),
        "compile_seconds": round(seconds, 1),
        "bytes_per_device": memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "kernels": loop.kernels,
        "collectives": loop.collectives,
        "copies": loop.copies,
    }


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    mesh = mesh_without_devices(_MESH.value, _DEVICE.value)
    target, drafter = read_configs(_TARGET.value, _DRAFTER.value, _LAYERS.value)
    engine = abstract_engine(target, drafter, mesh, _CONTEXT.value)
    lines = []
    for budget in map(int, _BUDGETS.value):
        case = {
            "device": _DEVICE.value,
            "mesh": _MESH.value,
            "layers": target.num_hidden_layers,
            "context": _CONTEXT.value,
            "budget": budget,
        }
        found = report(engine, budget)
        print(json.dumps(case | found, indent=1), flush=True)
        lines.append({"benchmark": "compile_report", "case": case, **provenance(), **found})
    print(f"written to {write_lines('compile_report', lines)}")


if __name__ == "__main__":
    _TARGET = flags.DEFINE_string("target", str(CONFIGS / "kimi_k26.json"), "The target's config.json.")
    _DRAFTER = flags.DEFINE_string("drafter", str(CONFIGS / "kimi_k26_dflash_reconstructed.json"), "The drafter's.")
    _MESH = flags.DEFINE_string("mesh", "tensor=8", "Axis sizes, of at most 8 devices.")
    _DEVICE = flags.DEFINE_enum("device", "h200", DEVICES, "The kind of device.")
    _LAYERS = flags.DEFINE_integer("layers", None, "Layers of the target; its own number by default.", lower_bound=2)
    _CONTEXT = flags.DEFINE_integer("context", 32768, "Slots of the caches.", lower_bound=16)
    _BUDGETS = flags.DEFINE_list("budgets", ["0", "15"], "Tree nodes besides the root; 0 is plain decoding.")
    app.run(main)
