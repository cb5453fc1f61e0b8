"""Benchmarks of the Pallas kernels on the device that is there.

::

    python -m experiments.bench_kernels --kernel int4_moe [--nodes 1,8,16,32,64] [--check 1000]

Prints a line a case (ceiling, reference, ours) and replaces ``results/KERNEL.jsonl``.
"""

import sys

import jax
from absl import app, flags

from experiments import bench_int4_moe
from experiments.results_file import provenance, write_lines

_KERNEL = flags.DEFINE_enum("kernel", None, ["int4_moe"], "Which kernel.", required=True)
_NODES = flags.DEFINE_list("nodes", ["1", "8", "16", "32", "64"], "Tokens in a call.")
_REFERENCE_NODES = flags.DEFINE_list("reference_nodes", ["16"], "Of these the plain-JAX form is timed as well.")
_RUNS = flags.DEFINE_integer("runs", 32, "Timed calls a case; their median counts.")
_CHECK = flags.DEFINE_integer("check", 0, "Random routings to compare with float64 first.")


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        sys.exit(f"bench_kernels: unknown argument {arguments[1]}")
    if jax.default_backend() != "gpu":
        sys.exit(f"bench_kernels: the device is {jax.devices()[0].device_kind}; a GPU is needed")
    if _CHECK.value:
        worst = bench_int4_moe.check_random(_CHECK.value)
        is_repeatable = bench_int4_moe.check_repeats(nodes=16, times=100)
        print(f"largest error {worst:.5f}; 100 runs bit-equal: {is_repeatable}", flush=True)
    lines = []
    print(
        f"{'mesh':<10} {'nodes':>5} {'experts':>7} {'ceiling us':>10} {'reference us':>12} {'ours us':>8} {'share':>6} error"
    )
    nodes, reference_nodes = (list(map(int, flag.value)) for flag in (_NODES, _REFERENCE_NODES))
    for line in bench_int4_moe.measure(nodes, _RUNS.value, reference_nodes):
        lines.append(line | provenance())
        case, reference = line["case"], line.get("reference_seconds")
        print(
            f"{case['mesh']:<10} {case['nodes']:>5} {case['distinct_experts']:>7.1f} {1e6 * line['ceiling_seconds']:>10.1f} "
            f"{'' if reference is None else f'{1e6 * reference:.0f}':>12} {1e6 * line['seconds']:>8.1f} "
            f"{line['fraction_of_ceiling']:>6.1%} {line['error']:.5f}",
            flush=True,
        )
        write_lines("int4_moe", lines)


if __name__ == "__main__":
    app.run(main)
