"""Benchmarks of the Pallas kernels on the device that is there.

::

    python -m experiments.bench_kernels --kernel int4_moe [--nodes 1,8,16,32,64] [--tokens 256,2048] [--check 1000]
    python -m experiments.bench_kernels --kernel tree_mla [--form hopper] [--check 1000]
    python -m experiments.bench_kernels --kernel tree_expand [--check 10000]
    python -m experiments.bench_kernels --kernel sample [--check 10]
    python -m experiments.bench_kernels --kernel commit
    python -m experiments.bench_kernels --kernel layer [--nodes 1,8,16,64] [--check 100]
    python -m experiments.bench_kernels --kernel skinny_gemm [--nodes 1,8,16,32,64]
    python -m experiments.bench_kernels --kernel block_attention [--check 20]

Prints a line a case and replaces ``results/KERNEL.jsonl``.
"""

import sys
from collections.abc import Iterator
from typing import Any

import jax
from absl import app, flags

from experiments import (
    bench_block_attention,
    bench_commit,
    bench_int4_moe,
    bench_int4_prefill,
    bench_latent_query,
    bench_layer,
    bench_prefill_attention,
    bench_sample,
    bench_skinny_gemm,
    bench_tree_expand,
    bench_tree_mla,
    check_int4_moe,
    check_tree_mla,
)
from experiments.results_file import provenance, write_lines

_KERNELS = ["int4_moe", "tree_mla", "tree_expand", "sample", "commit", "layer", "skinny_gemm", "block_attention"]
_KERNEL = flags.DEFINE_enum("kernel", None, _KERNELS, "Which kernel.", required=True)
_NODES = flags.DEFINE_list(
    "nodes", ["1", "8", "16", "32", "64"], "int4_moe, layer, skinny_gemm: tokens in a call of decoding."
)
_TOKENS = flags.DEFINE_list("tokens", ["256", "1024", "2048", "4096"], "int4_moe: tokens in a call of prefill.")
_REFERENCE_NODES = flags.DEFINE_list(
    "reference_nodes", ["16"], "int4_moe: of these the plain-JAX form is timed as well."
)
_FORM = flags.DEFINE_enum("form", "hopper", list(bench_tree_mla.FORMS), "tree_mla: which form.")
_RUNS = flags.DEFINE_integer("runs", 32, "Timed calls a case; their median counts.")
_CHECK = flags.DEFINE_integer(
    "check", 0, "Random routings, trees, logits, rows or batches of draws to compare with the reference first."
)


_BENCHES = {"tree_expand": bench_tree_expand, "sample": bench_sample, "block_attention": bench_block_attention}
"""Modules with ``check`` and ``measure`` of a number."""


def measure() -> Iterator[dict[str, Any]]:
    if _KERNEL.value == "tree_mla":
        if _CHECK.value:
            check_tree_mla.check(_CHECK.value)
        yield from bench_tree_mla.run(_FORM.value, runs=_RUNS.value)
        yield from bench_prefill_attention.run() if _FORM.value == "hopper" else ()
        return
    if _KERNEL.value == "commit":
        yield from bench_commit.measure(_RUNS.value)
        return
    if _KERNEL.value == "skinny_gemm":
        nodes = list(map(int, _NODES.value))
        yield from bench_skinny_gemm.measure(nodes, _RUNS.value)
        yield from bench_skinny_gemm.measure_many(_RUNS.value)
        yield from bench_skinny_gemm.measure_choice(nodes, _RUNS.value)
        yield from bench_latent_query.measure(nodes, _RUNS.value)
        return
    if _KERNEL.value == "layer":
        if _CHECK.value:
            print(bench_layer.check(_CHECK.value), flush=True)
        yield from bench_layer.measure(list(map(int, _NODES.value)), _RUNS.value)
        return
    if bench := _BENCHES.get(_KERNEL.value):
        if _CHECK.value:
            print(bench.check(_CHECK.value), flush=True)
        yield from bench.measure(_RUNS.value)
        return
    if _CHECK.value:
        check_int4_moe.check(_CHECK.value)
        worst = bench_int4_prefill.check_random(_CHECK.value)
        is_repeatable = bench_int4_prefill.check_repeats(tokens=2048, times=100)
        print(f"prefill: largest error {worst:.5f}; 100 runs bit-equal: {is_repeatable}", flush=True)
    nodes, reference_nodes = (list(map(int, flag.value)) for flag in (_NODES, _REFERENCE_NODES))
    yield from bench_int4_moe.measure(nodes, _RUNS.value, reference_nodes)
    yield from bench_int4_prefill.measure(list(map(int, _TOKENS.value)), _RUNS.value)


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        sys.exit(f"bench_kernels: unknown argument {arguments[1]}")
    if jax.default_backend() != "gpu":
        sys.exit(f"bench_kernels: the device is {jax.devices()[0].device_kind}; a GPU is needed")
    # Before the first line is written, which changes the working tree.
    lines, made_by = [], provenance()
    print(f"{'ceiling us':>10} {'reference us':>12} {'ours us':>8} {'share':>6} {'error':>7}  case")
    for line in measure():
        lines.append(line | made_by)
        reference = line.get("reference_seconds")
        error = f"{line['error']:.5f}" if "error" in line else ""
        case = {name: value for name, value in line["case"].items() if name != "seed"}
        print(
            f"{1e6 * line['ceiling_seconds']:>10.1f} {'' if reference is None else f'{1e6 * reference:.0f}':>12} "
            f"{1e6 * line['seconds']:>8.1f} {line['fraction_of_ceiling']:>6.1%} {error:>7}  {case}",
            flush=True,
        )
        write_lines(_KERNEL.value, lines)


if __name__ == "__main__":
    app.run(main)
