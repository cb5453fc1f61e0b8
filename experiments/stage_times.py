"""Which part of a round a kernel's time belongs to.

XLA's plan of a program lists the loop's kernels in order, and the instruction that each comes from; the instruction's scope
says where it stands. Equal kernels share a name, whose instruction is the first one's, and libraries have names of their
own: what a kernel that ran is, follows from its name and from what ran before it::

    plan      norm_1   gemm_1   (library)   norm_1   gemm_2   ...  again from the start
                 │        │         │          │        │
    records   norm_1   gemm_1   nvjet_sm90  norm_1   gemm_2
"""

import collections
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from experiments.loop_text import STAGES, lines_of_loop, parse
from experiments.programs import Program

UNKNOWN = "unknown"
ELEMENTWISE = "norms, sums and other elementwise work"
_NEAR = 8
"""Places that a record may come late, as kernels of a graph may run side by side, or lie from its call, if a library's."""
_NOT_KERNELS = {"kCopy", "kMemset", "kMemzero", "kMemset32BitValue", "kConditional", "kWhile", "kCommandBuffer"}
_NOT_KERNELS |= {"kSequential"}

# Projections and parts by their scope; the last one in a scope counts.
_TARGET = {
    "embedding": "embedding",
    "qkv_a": "q_a and kv_a",
    "jit(latent_rows)": "latent rows, q_b and key_up",
    "jit(latent_query)": "latent rows, q_b and key_up",
    "q_b": "latent rows, q_b and key_up",
    "key_up": "latent rows, q_b and key_up",
    "jit(tree_mla)": "attention",
    "jit(attend_and_project)": "attention",
    "value_up": "attention",
    "o": "o",
    "router_shared": "router's logits, shared gate and up",
    "router": "router",
    "jit(int4_moe)": "experts",
    "shared": "shared expert",
    "gate_up": "dense MLP",
    "down": "dense MLP",
    "lm_head": "lm_head",
}
_DRAFTER = {
    "embedding": "embedding",
    "qkv": "q, k, v",
    "attention": "attention",
    "o": "o",
    "gate_up": "MLP",
    "down": "MLP",
    "lm_head": "lm_head",
}
_COMMIT = {"fc": "drafter's context", "context_kv": "drafter's context"}
_DETAILS = {"verify": (_TARGET, ELEMENTWISE), "draft": (_DRAFTER, ELEMENTWISE), "commit": (_COMMIT, "rows and state")}


def stage_of(scope: str) -> str:
    """Stage of a scope in the loop's body, such as "verify/experts"."""
    inner = scope.split("/")
    part = next((part for part in inner if part in STAGES), None)
    if part is None:
        return "other"
    names, rest = _DETAILS.get(part, ({}, ""))
    detail = next((names[name] for name in reversed(inner) if name in names), rest)
    return f"{part}/{detail}" if detail else part


class Step(NamedTuple):
    """A kernel of the plan by its name, none where a library chooses it, and its stage."""

    kernel: str | None
    stage: str


class Steps(NamedTuple):
    """Kernels of a round in order, and the names of those that only run outside the loop."""

    inside: list[Step]
    outside: set[str]


def steps_of(program: Program) -> Steps:
    """The kernels of a program's loop. All branches of conditions are listed."""
    computations = parse(program.compiled.as_text())
    scopes = {}
    for one in itertools.chain.from_iterable(computations.values()):
        inner = (inner.scope for name in one.called for inner in computations.get(name, []) if inner.scope)
        scopes[one.name] = one.scope or next(inner, "")
    pairs = re.findall(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)', program.launches)
    instructions = {int(number): name for name, number in pairs}

    def steps(lines: Sequence[str]) -> list[Step]:
        found = []
        for line in lines:
            match = re.match(r"\s*(\d+): (k\w+)\s+\[[^\]]*\]\s*(\S*)", line)
            if match and match[2] not in _NOT_KERNELS:
                scope = scopes.get(instructions.get(int(match[1]), ""), "")
                found.append(Step(_kernel(match[2], match[3], scope), stage_of(scope)))
        return found

    inside = steps(lines_of_loop(program.plan))
    names = {step.kernel for step in inside}
    return Steps(inside, {step.kernel for step in steps(program.plan.splitlines()) if step.kernel} - names)


def _kernel(kind: str, name: str, scope: str) -> str | None:
    """Mosaic's kernels are named in the scope that they are called in."""
    if kind == "kCustomKernel":
        return name
    own = re.search(r"(\w+)/(?:mpmd_map|mosaic_gpu\w*|pallas_call|core_map)$", scope)
    return own[1] if own else None


def add_up(timeline: Sequence[tuple[str, float]], steps: Steps) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds and kernels of each stage in records of kernels, in order; those from outside the loop are left out."""
    places = collections.defaultdict(list)
    for place, step in enumerate(steps.inside):
        places[step.kernel].append(place)
    seconds, counts = collections.Counter(), collections.Counter()
    at, num_places = 0, len(steps.inside)

    def distance(place: int) -> int:
        """From ``at`` on, behind the last place comes the first; back, if it was just passed."""
        ahead = (place - at) % num_places
        return num_places - ahead if num_places - ahead <= min(_NEAR, ahead) else ahead

    for name, duration in timeline:
        kernel = name.split("_mosaic_gpu")[0]
        if kernel in steps.outside:
            continue
        candidates = places.get(kernel) or [place for place in places[None] if distance(place) <= _NEAR]
        place = min(candidates, key=distance, default=None)
        stage = UNKNOWN if place is None else steps.inside[place].stage
        at = at if place is None else place + 1
        seconds[stage] += duration
        counts[stage] += 1
    return dict(seconds), dict(counts)
