"""Decodes held-out Python on meshes of devices and on one of them, in float32: no token may differ.

::

    python -m experiments.compare_meshes --meshes tensor=8,expert=8,expert=2:tensor=4

The tiny pair continues the same prompts on every mesh, one at a time, greedily and at temperature 0.8 with top-p 0.95,
plainly and with chains and trees. Once each way of decoding has been called nothing may be compiled any more. A difference,
or a program that is compiled again, ends the command with status 1. Lines of the same cases in ``results/meshes.jsonl`` are
replaced.

Devices are those that JAX finds: GPUs, or on a machine without any those of
``XLA_FLAGS=--xla_force_host_platform_device_count=8``.
"""

import collections
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from absl import app, flags, logging

from ddtree_jax import DecodeConfig, Engine, SamplingParams
from ddtree_jax.decode import MODES
from experiments.checkpoints import tiny_pair
from experiments.compare_kernels import windows
from experiments.results_file import provenance, update_lines

TEMPERATURES = 0.0, 0.8
BUDGET, MAX_LENGTH = 15, 256
COMPILED = "/jax/core/compile/backend_compile_duration"


class Run(NamedTuple):
    """What one way of decoding gave: tokens and accepted lengths of each prompt, and its cost."""

    texts: list[tuple[list[int], list[int]]]
    rounds: int
    seconds: float


def decode_all(engine: Engine, prompts: Sequence[list[int]], num_new: int) -> dict[tuple[str, float], Run]:
    """A run for each mode and temperature."""
    runs = {}
    for mode, temperature in itertools.product(MODES, TEMPERATURES):
        begun, texts, rounds = time.perf_counter(), [], 0
        for seed, prompt in enumerate(prompts):
            sampling = SamplingParams(
                temperature=temperature, top_p=0.95, seed=seed, max_new_tokens=num_new, ignore_eos=True
            )
            (done,) = engine.generate([prompt], sampling, DecodeConfig(mode=mode, budget=BUDGET))
            texts.append((done.token_ids, done.stats.accepted_lengths))
            rounds += done.stats.rounds
        runs[mode, temperature] = Run(texts, rounds, time.perf_counter() - begun)
    return runs


def count_compilations() -> collections.Counter[str]:
    """Counts programs as they are compiled from now on."""
    counter: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **_: counter.update([event]))
    return counter


def compare(
    load: Callable[[str | None], Engine], meshes: Sequence[str], prompts: Sequence[list[int]], num_new: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Result lines of all meshes, and what is wrong."""
    one_device = load(None)
    decode_all(one_device, prompts[:1], num_new)
    expected = decode_all(one_device, prompts, num_new)
    lines, faults, counter = [], [], count_compilations()
    for mesh in meshes:
        engine = load(mesh)
        decode_all(engine, prompts[:1], num_new)
        before = counter[COMPILED]
        runs = decode_all(engine, prompts, num_new)
        again = counter[COMPILED] - before
        if again:
            faults.append(f"{mesh}: {again} programs were compiled again")
        for (mode, temperature), run in runs.items():
            one = expected[mode, temperature]
            differing = sum(map(tuple.__ne__, run.texts, one.texts))
            name = f"{mesh}, {mode}, temperature {temperature}"
            if differing:
                faults.append(f"{name}: {differing} texts of {len(prompts)} differ")
            case = {"mesh": mesh, "mode": mode, "temperature": temperature, "prompts": len(prompts)}
            found = {
                "tokens": sum(len(tokens) for tokens, _ in run.texts),
                "differing_texts": differing,
                "rounds": run.rounds,
                "compiled_again": again,
                "seconds": round(run.seconds, 2),
                "seconds_on_one_device": round(one.seconds, 2),
            }
            lines.append({"benchmark": "meshes", "case": case | {"new_tokens": num_new}, **provenance(), **found})
            print(f"{name}: {run.rounds} rounds, {differing} texts differ", flush=True)
    return lines, faults


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    folders = tiny_pair()
    meshes = [mesh.replace(":", ",") for mesh in _MESHES.value]

    def load(mesh: str | None) -> Engine:
        return Engine.load(*folders, mesh=mesh, max_length=MAX_LENGTH, dtype="float32")

    try:
        prompts = windows(load(None).tokenizer, _NUM_PROMPTS.value, _PROMPT_TOKENS.value)
        lines, faults = compare(load, meshes, prompts, _NEW_TOKENS.value)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"written to {update_lines('meshes', lines)}")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    _MESHES = flags.DEFINE_list(
        "meshes", ["tensor=8", "expert=8", "expert=2:tensor=4"], "Meshes, axes of one parted by a colon."
    )
    _NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 16, "Windows of held-out files.", lower_bound=1)
    _PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "Tokens of each window that are given.", lower_bound=1)
    _NEW_TOKENS = flags.DEFINE_integer("new_tokens", 64, "Tokens to generate for each.", lower_bound=2)
    app.run(main)
