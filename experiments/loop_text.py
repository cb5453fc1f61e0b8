"""What the text of a compiled program says about the decoding loop: kernels a stage, collectives, copies of what it carries.

A copy is an instruction that reads a weight or a cache, of at least `LARGE` bytes, which the loop carries, and writes as
many without a product, sum or update of rows: a copy, or a fusion of moves and elementwise steps. One that gathers less than
1 / `LOOK_UP` of what it reads looks rows up, such as the embeddings of a tree's nodes, which may be as large as some weight.
"""

import collections
import math
import re
from typing import NamedTuple

LARGE = 1 << 20
LOOK_UP = 8
STAGES = ("draft", "expand", "verify", "accept", "commit")
COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"}

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s64": 64, "u64": 64, "f64": 64}
_WORK = set("dot convolution reduce reduce-window scatter dynamic-update-slice sort custom-call".split()) | COLLECTIVES
_CONTROL = {"while", "conditional", "call"}
_NO_KERNEL = set("parameter constant bitcast get-tuple-element tuple after-all".split())
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


class Instruction(NamedTuple):
    """One instruction: its bytes are those of all arrays that it gives, ``called`` the computations that it names.

    ``scope`` is where it stands in the loop's body, without that or outside the loop "".
    """

    name: str
    opcode: str
    shape: str
    num_bytes: int
    operands: list[str]
    called: list[str]
    scope: str

    @property
    def stage(self) -> str:
        """The round's part that the scope lies in."""
        part = self.scope.split("/")[0]
        return part if part in STAGES else "other"


class LoopReport(NamedTuple):
    """Kernels and collectives of one round, by stage; branches of conditions are counted once each. Copies as text."""

    kernels: dict[str, int]
    collectives: dict[str, int]
    copies: list[str]


def read_loop(text: str) -> LoopReport:
    """Reads the outermost loop of a program's text (``compiled.as_text()``)."""
    computations = parse(text)
    body = _outermost_body(computations)
    kernels, collectives = collections.Counter(), collections.Counter()
    for instruction in _reachable(computations, body):
        opcode = instruction.opcode.removesuffix("-start")
        inside = _inside(computations, instruction) if opcode == "fusion" else {opcode}
        if collective := inside & COLLECTIVES:
            collectives[f"{instruction.stage} {min(collective)}"] += 1
        elif opcode not in _NO_KERNEL | _CONTROL and not opcode.endswith("-done"):
            kernels[instruction.stage] += 1
    return LoopReport(dict(kernels), dict(collectives), list(_copies(computations, body)))


def launches_of(plan: str) -> dict[str, int]:
    """Graphs and single launches in the body of a program's loop, from XLA's text of its plan (a thunk a line)."""
    inside = lines_of_loop(plan)
    outermost = min((len(x) - len(x.lstrip()) for x in inside if re.match(r"\s*\d+:", x)), default=0)
    kinds = [re.search(r"\bk[A-Z]\w+", x) for x in inside if len(x) - len(x.lstrip()) == outermost]
    return dict(collections.Counter(kind[0] for kind in kinds if kind))


def lines_of_loop(plan: str) -> list[str]:
    """Those lines of XLA's plan that are inside its loop, none if it has none. Raises RuntimeError for an empty plan."""
    if not plan:
        raise RuntimeError("XLA wrote no plan")
    lines = plan.splitlines()
    begin = next((i for i, line in enumerate(lines) if re.search(r"\bkWhile\b", line)), None)
    if begin is None:
        return []
    indent = len(lines[begin]) - len(lines[begin].lstrip())
    inside = []
    for line in lines[begin + 1 :]:
        if line.strip() and len(line) - len(line.lstrip()) <= indent and re.match(r"\s*\d+:", line):
            break
        inside.append(line)
    return inside


def parse(text: str) -> dict[str, list[Instruction]]:
    """Instructions of every computation."""
    computations: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations.setdefault(head[1], [])
        elif found := _INSTRUCTION.match(line):
            name, shape, opcode, rest = found.groups()
            scope = re.search(r'op_name="[^"]*?while/body/([^"]*)"', rest)
            current.append(
                Instruction(
                    name=name,
                    opcode=opcode,
                    shape=shape,
                    num_bytes=sum(map(_num_bytes, _ARRAY.findall(shape))),
                    operands=re.findall(r"%([\w.\-]+)", rest.split("), ")[0]),
                    called=_called(rest),
                    scope=scope[1] if scope else "",
                )
            )
    return computations


def _num_bytes(array: tuple[str, str]) -> int:
    dtype, sizes = array
    return _BITS.get(dtype, 32) * math.prod(map(int, filter(None, sizes.split(",")))) // 8


def _called(rest: str) -> list[str]:
    named = re.findall(
        r"(?:calls|body|to_apply|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)", rest
    )
    return [name.strip(" %") for group in named for name in group.strip("{}").split(",")]


def _outermost_body(computations: dict[str, list[Instruction]]) -> str:
    """The body of the loop that lies in no other loop's body."""
    loops = [
        instruction
        for instructions in computations.values()
        for instruction in instructions
        if instruction.opcode == "while"
    ]
    bodies = {loop.called[0] for loop in loops}
    inner = {
        called
        for body in bodies
        for instruction in _reachable(computations, body)
        if instruction.opcode == "while"
        for called in instruction.called
    }
    (outermost,) = bodies - inner
    return outermost


def _reachable(computations: dict[str, list[Instruction]], start: str) -> list[Instruction]:
    """Instructions that a computation runs as steps of their own: not those inside fusions and reductions."""
    found, waiting, seen = [], [start], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for instruction in computations.get(name, []):
            found.append(instruction)
            if instruction.opcode in _CONTROL:
                waiting += instruction.called
    return found


def _inside(computations: dict[str, list[Instruction]], fusion: Instruction) -> set[str]:
    return {inner.opcode for called in fusion.called for inner in computations[called]}


def _copies(computations: dict[str, list[Instruction]], body: str) -> list[str]:
    (state,) = (one.name for one in computations[body] if one.opcode == "parameter")
    carried, found = {}, []  # Bytes by name.
    for one in computations[body]:
        inside = _inside(computations, one) if one.opcode == "fusion" else {one.opcode}
        read = [carried[name] for name in one.operands if name in carried]
        is_carried = one.opcode == "get-tuple-element" and one.operands == [state] and one.num_bytes >= LARGE
        if is_carried or (one.opcode == "bitcast" and read):
            carried[one.name] = one.num_bytes
        elif read and one.num_bytes >= LARGE and not inside & _WORK and one.opcode not in _NO_KERNEL:
            is_look_up = "gather" in inside and LOOK_UP * one.num_bytes < min(read)
            found += [] if is_look_up else [f"{one.stage}: {one.opcode} {one.name} {one.shape.split('{')[0]}"]
    return found
