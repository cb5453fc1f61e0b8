"""Compiles the Pallas kernels for a GPU that need not be there, and prints what a block of them takes.

::

    python -m experiments.compile_kernels --kernel int4_moe --device rtx6000pro

Needs a CUDA plugin (the extra ``cuda12`` or ``cuda13``), no GPU. One device a process. The exit status is 1 if a block
takes more shared memory than the device gives one.
"""

import itertools
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from absl import app, flags
from jax.experimental import topologies

from experiments import (
    bench_block_attention,
    bench_commit,
    bench_int4_moe,
    bench_latent_query,
    bench_layer,
    bench_sample,
    bench_skinny_gemm,
    bench_tree_expand,
    bench_tree_mla,
)
from experiments.devices import DEVICES, Device


class Case(NamedTuple):
    """A function to compile, and shapes of its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def _hopper_cases(device: Device) -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """Of `skinny_gemm` and what has its products, written for Hopper's ``wgmma`` alone."""
    _check_capability("skinny_gemm", device, device.capability[0] == 9, "9.0")
    return itertools.chain(bench_skinny_gemm.cases_to_compile(), bench_latent_query.cases_to_compile())


def _copying_cases(device: Device) -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """Of `block_attention`, which needs the copy engine that there is from Hopper on."""
    _check_capability("block_attention", device, device.capability[0] >= 9, "at least 9.0")
    return bench_block_attention.cases_to_compile()


def _check_capability(kernel: str, device: Device, is_enough: bool, needed: str) -> None:
    if not is_enough:
        capability = ".".join(map(str, device.capability))
        sys.exit(f"compile_kernels: {kernel} needs compute capability {needed}; {device.name} has {capability}")


KERNELS: dict[str, Callable[[Device], Iterator[Case]]] = {
    "int4_moe": lambda device: map(Case._make, bench_int4_moe.cases_to_compile(device.capability[0], device.cores)),
    "tree_mla": lambda _: map(Case._make, bench_tree_mla.cases_to_compile()),
    "tree_expand": lambda _: map(Case._make, bench_tree_expand.cases_to_compile()),
    "sample": lambda _: map(Case._make, bench_sample.cases_to_compile()),
    "commit": lambda _: map(Case._make, bench_commit.cases_to_compile()),
    "layer": lambda device: map(Case._make, bench_layer.cases_to_compile(device.capability[0])),
    "block_attention": lambda device: map(Case._make, _copying_cases(device)),
    "skinny_gemm": lambda device: map(Case._make, _hopper_cases(device)),
}


def compile_case(case: Case, device: Device) -> dict[str, Any]:
    """Compiles for the device; returns what a block of the kernel takes, shared memory in bytes."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=device.target_config, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), case.arguments
    )
    with tempfile.TemporaryDirectory() as folder, jax.default_device(topology.devices[0]):
        # Mosaic GPU writes what it finds out to files there.
        os.environ.update(MOSAIC_GPU_DUMP_TO=folder, MOSAIC_GPU_DUMP_RESOURCES="1")
        start = time.perf_counter()
        jax.jit(case.function).lower(*arguments).compile()
        seconds = time.perf_counter() - start
        resources, assembler = (
            "".join(path.read_text() for path in Path(folder).glob(pattern))
            for pattern in ("*.resources.txt", "*.ptxas")
        )
    return {
        "seconds": seconds,
        "shared": _largest(r"smem_scratch_bytes=(\d+)", resources),
        "registers": _largest(r"Used (\d+) registers", assembler),
        "spilled": _largest(r"(\d+) bytes spill stores", assembler),
    }


def _largest(pattern: str, text: str) -> int:
    """Of the numbers in text, of which there must be one."""
    found = re.findall(pattern, text)
    if not found:
        sys.exit(f"compile_kernels: the compiler's output has nothing like {pattern}")
    return max(map(int, found))


_KERNEL = flags.DEFINE_enum("kernel", None, list(KERNELS), "Which kernel.", required=True)
_DEVICE = flags.DEFINE_enum("device", "h200", list(DEVICES), "For which device.")


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        sys.exit(f"compile_kernels: unknown argument {arguments[1]}")
    device = DEVICES[_DEVICE.value]
    print(f"{device.name}: {device.shared_a_block:,} bytes of shared memory a block")
    print(f"{'shared':>8} {'registers':>9} {'spilled':>7} {'seconds':>7}  case")
    is_within = True
    for case in KERNELS[_KERNEL.value](device):
        taken = compile_case(case, device)
        is_within &= taken["shared"] <= device.shared_a_block
        print(
            f"{taken['shared']:>8,} {taken['registers']:>9} {taken['spilled']:>7} {taken['seconds']:>7.1f}  {case.name}",
            flush=True,
        )
    if not is_within:
        sys.exit("compile_kernels: a block takes more shared memory than there is")


if __name__ == "__main__":
    app.run(main)
