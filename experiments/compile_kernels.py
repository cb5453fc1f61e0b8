"""Compiles the Pallas kernels for a GPU that need not be there, and prints what a block of them takes.

::

    python -m experiments.compile_kernels --kernel int4_moe --device rtx6000pro

Needs a CUDA plugin (the extra ``cuda12`` or ``cuda13``), no GPU. One device a process. The exit status is 1 if a block
takes more shared memory than the device gives one.
"""

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

from experiments import bench_int4_moe, bench_tree_mla


class Device(NamedTuple):
    """What the compiler is told about a GPU; sizes in bytes."""

    name: str
    capability: tuple[int, int]
    cores: int
    shared_a_core: int
    shared_a_block: int
    threads_a_core: int
    l2: int
    memory: int
    bytes_per_second: int
    gigahertz: float

    @property
    def target_config(self) -> str:
        """Text of XLA's ``GpuTargetConfigProto``."""
        major, minor = self.capability
        # Mosaic compiles for sm_90a, sm_120a: what an architecture has alone.
        extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
              core_count: {self.cores}
              shared_memory_per_core: {self.shared_a_core}
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared_a_block}
              threads_per_core_limit: {self.threads_a_core}
              threads_per_block_limit: 1024
              threads_per_warp: 32
              fpus_per_core: 128
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              thread_dim_limit_x: 1024
              thread_dim_limit_y: 1024
              thread_dim_limit_z: 64
              l2_cache_size: {self.l2}
              device_memory_size: {self.memory}
              memory_bandwidth: {self.bytes_per_second}
              clock_rate_ghz: {self.gigahertz}
              driver_version: "13.0.0"
              runtime_version: "12.8.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.name}"
        """


DEVICES = {
    "h200": Device("NVIDIA H200", (9, 0), 132, 233472, 232448, 2048, 50 << 20, 141 << 30, 4_800_000_000_000, 1.98),
    "rtx6000pro": Device(
        "NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 131072, 101376, 1536, 128 << 20, 96 << 30, 1_792_000_000_000, 2.6
    ),
    "a100": Device("NVIDIA A100", (8, 0), 108, 167936, 166912, 2048, 40 << 20, 80 << 30, 2_039_000_000_000, 1.41),
}


class Case(NamedTuple):
    """A function to compile, and shapes of its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


KERNELS: dict[str, Callable[[Device], Iterator[Case]]] = {
    "int4_moe": lambda device: map(Case._make, bench_int4_moe.cases_to_compile(device.capability[0], device.cores)),
    "tree_mla": lambda _: map(Case._make, bench_tree_mla.cases_to_compile()),
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
