"""Measures forms of the INT4 experts that are not chosen yet, beside the one that is: one H200, kernel time from CUPTI.

::

    python -m experiments.bench_int4_forms [--part decode,crossover,prefill] [--mesh tensor=8,expert=8] [--check 1000]

``decode``: routings that are uniform, skewed (Zipf: an expert is chosen the more often the lower its number in a random
order), and equal for all tokens. ``crossover``: 65 to 512 tokens through the decode kernel, in turns of 64, and through the
prefill kernels. ``prefill``: tuning of the prefill kernels. Prints a line a case and adds it to ``results/int4_forms.jsonl``.
``--check`` first compares the forms of decode with float64 and with each other, over so many random routings.
"""

import concurrent.futures
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from ddtree_jax.pallas import int4_prefill
from ddtree_jax.pallas.int4_moe import MAX_TOKENS, ExpertBlocks, choose_config, int4_moe_gpu
from experiments import check_int4_moe, kernel_times
from experiments.bench_int4_moe import (
    BYTES_PER_SECOND,
    NUM_EXPERTS,
    PER_TOKEN,
    SHARDS,
    WIDTH,
    Shard,
    relative_error,
    time_kernels,
)
from experiments.bench_int4_prefill import FLOPS_PER_SECOND, count_flops
from experiments.results_file import provenance, update_lines

ROUTINGS, RUNS = 4, 16
PARTS = ("decode", "crossover", "prefill")
ROUTING_KINDS = ("uniform", "zipf", "same")
DECODE_NODES = (8, 16, 64)
CROSSOVER_TOKENS = (65, 128, 192, 256, 512)
PREFILL_TOKENS = (2048, 4096)
DECODE_FORMS = {
    "now": {},
    "wide": {"unit_tokens": MAX_TOKENS},
    "subnormal": {"reads_subnormals": True},
    "wide subnormal": {"unit_tokens": MAX_TOKENS, "reads_subnormals": True},
}
CROSSOVER_FORMS = {"decode": ("now", "wide subnormal"), "prefill": ("now", "subnormal")}
PREFILL_FORMS = {
    "now": {},
    "subnormal": {"reads_subnormals": True},
    "subnormal, 4 stages": {"reads_subnormals": True, "unroll": 4},
    "subnormal, 1 operand": {"reads_subnormals": True, "operands": 1},
}


class Case(NamedTuple):
    """A program, and arguments of its turns for each of the routings."""

    name: dict[str, Any]
    program: Callable[..., jax.Array]
    calls: list[list[tuple[Any, ...]]]
    routings: list[tuple[np.ndarray, np.ndarray]]

    def run(self, i: int) -> list[jax.Array]:
        return [self.program(*turn) for turn in self.calls[i % len(self.calls)]]


def draw_routing(shard: Shard, kind: str, tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Experts and router weights; each token's experts differ."""
    if kind == "uniform":
        return shard.draw_routing(tokens, seed)
    rng = np.random.default_rng((tokens, seed, ROUTING_KINDS.index(kind)))
    if kind == "same":
        # The first are this shard's, whichever it is.
        expert_TX = np.broadcast_to(rng.permutation(shard.num_experts)[:PER_TOKEN], (tokens, PER_TOKEN))
    else:
        # The largest of log p + Gumbel noise: a draw without replacement.
        scores_TE = rng.gumbel(size=(tokens, NUM_EXPERTS)) - np.log(1.0 + rng.permutation(NUM_EXPERTS))
        expert_TX = np.argsort(-scores_TE, axis=1)[:, :PER_TOKEN]
    weight_TX = rng.random((tokens, PER_TOKEN)).astype(np.float32)
    return expert_TX.astype(np.int32), 2.5 * weight_TX / weight_TX.sum(axis=1, keepdims=True)


def count_largest(shard: Shard, expert_TX: np.ndarray) -> int:
    """Tokens of the shard's expert that has most."""
    return int(np.bincount(expert_TX[expert_TX < shard.num_experts], minlength=shard.num_experts).max())


def _compile(function: Callable, tokens: int, experts: ExpertBlocks) -> Any:
    shapes = [(tokens, WIDTH), (tokens, PER_TOKEN), (tokens, PER_TOKEN)]
    dtypes = [jnp.bfloat16, jnp.int32, jnp.float32]
    return jax.jit(function).lower(*map(jax.ShapeDtypeStruct, shapes, dtypes), experts).compile


def _decode(tokens: int, experts: ExpertBlocks, **changes: Any) -> Callable[..., jax.Array]:
    x_TD = jax.ShapeDtypeStruct((tokens, WIDTH), jnp.bfloat16)
    return functools.partial(int4_moe_gpu, config=dataclasses.replace(choose_config(x_TD, experts), **changes))


def _prefill(**changes: Any) -> Callable[..., jax.Array]:
    config = int4_prefill.Config(num_blocks=jax.devices()[0].core_count, **changes)

    def run(x_TD: jax.Array, expert_TX: jax.Array, weight_TX: jax.Array, experts: ExpertBlocks) -> jax.Array:
        return int4_prefill.int4_moe_prefill(x_TD, expert_TX, weight_TX, *experts, config)

    return run


def split_turns(size: int, experts: ExpertBlocks, *arrays: Any) -> list[tuple[Any, ...]]:
    """Arguments for turns of ``size`` tokens; what is missing to whole ones chooses no expert."""
    rest = -len(arrays[0]) % size
    padded = [np.pad(np.asarray(array), ((0, rest), (0, 0)), constant_values=-1) for array in arrays]
    turns = [[jnp.asarray(turn) for turn in np.split(array, len(array) // size)] for array in padded]
    return [(*turn, experts) for turn in zip(*turns, strict=True)]


def draw_tokens(tokens: int) -> jax.Array:
    return jax.random.normal(jax.random.key(tokens), (tokens, WIDTH), jnp.bfloat16)


class Plan(NamedTuple):
    """A case to be: what compiles its program, and for how many tokens a turn that is."""

    name: dict[str, Any]
    compile: Callable[[], Any]
    turn: int


def plan_part(part: str, experts: ExpertBlocks) -> Iterator[tuple[int, str, list[Plan]]]:
    """Number of tokens, kind of routing, and cases of a part that take the same inputs; what can be said of them once."""

    def decode(form: str, tokens: int) -> Plan:
        return Plan(
            {"form": form},
            _compile(_decode(tokens, experts, **DECODE_FORMS[form]), tokens, experts),
            tokens,
        )

    def prefill(form: str, tokens: int) -> Plan:
        return Plan({"form": form}, _compile(_prefill(**PREFILL_FORMS[form]), tokens, experts), tokens)

    if part == "decode":
        for nodes in DECODE_NODES:
            # Units of more than 8 tokens take as many nodes.
            plans = [decode(form, nodes) for form in DECODE_FORMS if nodes > 8 or "wide" not in form]
            yield from ((nodes, kind, plans) for kind in ROUTING_KINDS)
    if part == "crossover":
        turns = [decode(form, MAX_TOKENS) for form in CROSSOVER_FORMS["decode"]]
        turns = [plan._replace(name={"form": f"decode, {plan.name['form']}"}) for plan in turns]
        for tokens in CROSSOVER_TOKENS:
            whole = [prefill(form, tokens) for form in CROSSOVER_FORMS["prefill"]]
            whole = [plan._replace(name={"form": f"prefill, {plan.name['form']}"}) for plan in whole]
            yield tokens, "uniform", turns + whole
    if part == "prefill":
        yield from ((tokens, "uniform", [prefill(form, tokens) for form in PREFILL_FORMS]) for tokens in PREFILL_TOKENS)


def prepare_cases(part: str, shard: Shard, experts: ExpertBlocks) -> Iterator[list[Case]]:
    """Cases of a part, those of the same inputs together. All are compiled before the first."""
    planned = list(plan_part(part, experts))
    compilers = {id(plan.compile): plan.compile for _, _, plans in planned for plan in plans}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = dict(zip(compilers, pool.map(lambda run: run(), compilers.values()), strict=True))
    for tokens, kind, plans in planned:
        x_TD = draw_tokens(tokens)
        routings = [draw_routing(shard, kind, tokens, seed) for seed in range(ROUTINGS)]
        where = {"mesh": shard.mesh, "tokens": tokens, "routing": kind}
        cases = []
        for plan in plans:
            calls = [split_turns(plan.turn, experts, x_TD, *routing) for routing in routings]
            cases.append(Case(where | plan.name, programs[id(plan.compile)], calls, routings))
        yield cases


def measure_case(case: Case, shard: Shard, first_TD: np.ndarray | None) -> tuple[dict[str, Any], np.ndarray]:
    """A result line, and the output; ``first_TD`` is that of the first form of the same inputs."""
    outputs = np.concatenate([np.asarray(y_TD.astype(jnp.float32)) for y_TD in case.run(0)])
    y_TD = outputs[: len(case.routings[0][0])]
    seconds = float(np.median(time_kernels(case.run, RUNS)))
    kernels = {}
    if len(case.calls[0]) == 1:
        kernels = kernel_times.kernel_seconds(case.program, [call[0] for call in case.calls], RUNS)
    distinct = float(np.mean([shard.count_distinct(expert_TX) for expert_TX, _ in case.routings]))
    flops = float(np.mean([count_flops(shard, routing) for routing in case.routings]))
    ceiling = max(distinct * shard.expert_bytes / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)
    line = {
        "benchmark": "int4_forms",
        "case": case.name | {"seed": list(range(ROUTINGS))},
        "seconds": seconds,
        "ceiling_seconds": ceiling,
        "fraction_of_ceiling": ceiling / seconds,
        "distinct_experts": distinct,
        "largest_expert": max(count_largest(shard, expert_TX) for expert_TX, _ in case.routings),
        "kernels": kernels,
        "difference": 0.0 if first_TD is None else relative_error(y_TD, first_TD),
        "runs": RUNS,
    }
    return line, y_TD


def measure(parts: list[str], shards: list[Shard]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        experts = jax.block_until_ready(shard.draw_weights())
        for part in parts:
            for cases in prepare_cases(part, shard, experts):
                first_TD = None
                for case in cases:
                    line, y_TD = measure_case(case, shard, first_TD)
                    first_TD = y_TD if first_TD is None else first_TD
                    yield line


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments {arguments[1:]}")
    meshes = [shard.mesh for shard in SHARDS]
    for flag, allowed in ((_PART, PARTS), (_MESH, meshes)):
        if unknown := set(flag.value) - set(allowed):
            raise app.UsageError(f"--{flag.name} has {min(unknown)}; allowed: {', '.join(allowed)}")
    if jax.default_backend() != "gpu":
        sys.exit(f"bench_int4_forms: the device is {jax.devices()[0].device_kind}; a GPU is needed")
    made_by = provenance()
    if _CHECK.value:
        check_int4_moe.check(_CHECK.value, has_forms=True)
    shards = [shard for shard in SHARDS if shard.mesh in _MESH.value]
    print(f"{'us':>8} {'share':>6} {'distinct':>8} {'largest':>7} {'differs':>8}  case")
    for line in measure(_PART.value, shards):
        case = {name: value for name, value in line["case"].items() if name != "seed"}
        kernels = {name.removesuffix("_mosaic_gpu_kernel"): round(1e6 * s, 1) for name, s in line["kernels"].items()}
        print(
            f"{1e6 * line['seconds']:>8.1f} {line['fraction_of_ceiling']:>6.1%} {line['distinct_experts']:>8.1f} "
            f"{line['largest_expert']:>7} {line['difference']:>8.5f}  {case} {kernels if len(kernels) > 1 else ''}",
            flush=True,
        )
        update_lines("int4_forms", [line | made_by])


if __name__ == "__main__":
    _PART = flags.DEFINE_list("part", list(PARTS), "What to measure.")
    _MESH = flags.DEFINE_list("mesh", [shard.mesh for shard in SHARDS], "Of which shards.")
    _CHECK = flags.DEFINE_integer("check", 0, "Random routings to compare forms of decode over first.", lower_bound=0)
    app.run(main)
