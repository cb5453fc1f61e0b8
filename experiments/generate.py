"""Completes a prompt, streams the text, then compares plain decoding, the DFlash chain and DDTree on it.

    python -m experiments.generate --prompt "def fibonacci(n):"

Without ``--target`` and ``--drafter`` it takes the tiny trained pair of this repository. Hugging Face folders are converted
on first use, into a cache folder; converted ones are taken as they are.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

from ddtree_jax import Completion, DecodeConfig, Engine, RoundTrace, SamplingParams, hosts
from ddtree_jax.decode import MODES
from experiments.checkpoints import TINY_PAIR, converted, default_cache_dir
from experiments.tree_text import draw_tree


def define_flags(values: flags.FlagValues) -> None:
    """Into the command's own flags if this is the command; tests have some of their own."""
    flags.DEFINE_string("prompt", "def fibonacci(n):", "What to complete.", flag_values=values)
    flags.DEFINE_string(
        "target",
        str(TINY_PAIR / "target"),
        "Folder of the target: Hugging Face layout or converted.",
        flag_values=values,
    )
    flags.DEFINE_string("drafter", str(TINY_PAIR / "drafter"), "Folder of the drafter, likewise.", flag_values=values)
    flags.DEFINE_enum(
        "mode", "all", ("all", *MODES), "all: stream ddtree, compare three; ar needs no drafter.", flag_values=values
    )
    flags.DEFINE_integer("budget", 15, "Tree nodes besides the root.", flag_values=values)
    flags.DEFINE_float("temperature", 0.0, "0 is greedy.", flag_values=values)
    flags.DEFINE_float("top_p", 1.0, "Nucleus; 1 is off.", flag_values=values)
    flags.DEFINE_integer("top_k", 0, "Only the best so many tokens; 0 is off.", flag_values=values)
    flags.DEFINE_float("min_p", 0.0, "Only tokens this probable, relative to the best; 0 is off.", flag_values=values)
    flags.DEFINE_float("repetition_penalty", 1.0, "Above 1: against tokens that stand already.", flag_values=values)
    flags.DEFINE_integer("seed", 0, "Seed of the sampling noise.", flag_values=values)
    flags.DEFINE_integer("max_new_tokens", 128, "The most tokens to generate.", flag_values=values)
    flags.DEFINE_integer("max_length", 1024, "The most tokens of prompt and completion together.", flag_values=values)
    flags.DEFINE_enum("dtype", "float32", ("float32", "bfloat16"), "Weights and activations.", flag_values=values)
    flags.DEFINE_string("mesh", None, "Axis sizes, such as tensor=8; one device by default.", flag_values=values)
    flags.DEFINE_bool("chat", False, "Send the prompt as a user's chat message.", flag_values=values)
    flags.DEFINE_bool(
        "show_tree", False, "Draw the tree of the round that committed the most tokens.", flag_values=values
    )
    flags.DEFINE_bool("json", False, "Print one JSON line instead of text and table.", flag_values=values)
    flags.DEFINE_string(
        "coordinator_address",
        os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "With several processes, host:port of process 0, which alone prints; JAX_COORDINATOR_ADDRESS by default.",
        flag_values=values,
    )
    flags.DEFINE_integer("num_processes", None, "How many processes there are; one by default.", flag_values=values)
    flags.DEFINE_integer("process_id", None, "The number of this one, from 0.", flag_values=values)
    flags.DEFINE_float("join_seconds", 300.0, "How long to wait for the other processes.", flag_values=values)
    flags.DEFINE_string("cache_dir", None, "Where conversions lie; ~/.cache/ddtree_jax by default.", flag_values=values)


def join_processes(values: flags.FlagValues) -> None:
    """Joins the other processes, if the flags speak of any; an address in the environment alone says nothing."""
    if values["coordinator_address"].present or (values.num_processes, values.process_id) != (None, None):
        hosts.join(values.coordinator_address, values.num_processes, values.process_id, values.join_seconds)


def load_engine(values: flags.FlagValues) -> Engine:
    """The engine that the flags ask for."""
    cache = Path(values.cache_dir) if values.cache_dir else default_cache_dir()
    jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
    return Engine.load(
        converted(values.target, cache),
        None if values.mode == "ar" else converted(values.drafter, cache),
        mesh=values.mesh,
        max_length=values.max_length,
        dtype=values.dtype,
    )


def compare(
    engine: Engine, prompt: Any, sampling: SamplingParams, modes: Sequence[str], budget: int
) -> dict[str, Completion]:
    """One completion a mode, each on programs that have run before."""
    completions = {}
    for index, mode in enumerate(modes):
        decode = DecodeConfig(mode=mode, budget=budget)
        _show_progress(2 * index, 2 * len(modes), f"{mode}: compiling")
        engine.generate(prompt, SamplingParams(max_new_tokens=2), decode)
        _show_progress(2 * index + 1, 2 * len(modes), f"{mode}: decoding")
        completions[mode] = engine.generate(prompt, sampling, decode)[0]
    _show_progress(1, 1, "")
    return completions


def _show_progress(done: int, total: int, text: str) -> None:
    """A bar in a line of the terminal that the next output overwrites; nothing once all is done."""
    if sys.stderr.isatty() and jax.process_index() == 0:
        bar = f"[{'#' * (24 * done // total):24}] {text}" if done < total else ""
        print(f"\r{bar:48}", end="\r", file=sys.stderr, flush=True)


def summary(completions: dict[str, Completion]) -> dict[str, Any]:
    """What ``--json`` prints."""
    modes = {
        mode: {
            "token_ids": done.token_ids,
            "text": done.text,
            "target_passes": done.stats.target_passes,
            "rounds": done.stats.rounds,
            "seconds": done.stats.decode_seconds,
        }
        for mode, done in completions.items()
    }
    return {"modes": modes, "identical": len({tuple(done.token_ids) for done in completions.values()}) == 1}


def table(completions: dict[str, Completion]) -> str:
    lines = [f"{'mode':8}{'tokens':>8}{'target passes':>15}{'tokens/round':>14}{'seconds':>9}"]
    for mode, done in completions.items():
        stats = done.stats
        per_round = sum(stats.accepted_lengths) / max(stats.rounds, 1)
        lines.append(
            f"{mode:8}{len(done.token_ids):>8}{stats.target_passes:>15}{per_round:>14.2f}{stats.decode_seconds:>9.3f}"
        )
    if len(completions) > 1:
        lines.append(f"tokens identical: {'yes' if summary(completions)['identical'] else 'NO'}")
    return "\n".join(lines)


def show_tree(engine: Engine, prompt: Any, sampling: SamplingParams, decode: DecodeConfig) -> str:
    """The tree of the round that committed the most tokens."""
    best: RoundTrace | None = max(
        engine.trace(prompt, sampling, decode), key=lambda trace: len(trace.accepted), default=None
    )
    if best is None:
        return "no tree: the first token, which comes from prefill, ended the completion"
    head = f"one round: {len(best.token_ids)} nodes behind {best.start} tokens, {len(best.accepted)} committed (*)"
    return f"{head}\n{draw_tree(best, lambda token: repr(engine.tokenizer.decode([token])))}"


def stream(engine: Engine, prompt: Any, sampling: SamplingParams, decode: DecodeConfig, started: float) -> None:
    """Prints the completion as it is committed."""
    _show_progress(0, 1, "compiling")
    print(prompt if isinstance(prompt, str) else prompt[0]["content"], end="", flush=True)
    first = None
    for piece in engine.stream(prompt, sampling, decode):
        first = first or time.perf_counter() - started
        print(piece, end="", flush=True)
    print(f"\n\n(first text {first or 0:.1f} s after the imports, conversion and compilation included)\n", flush=True)


def run(
    values: flags.FlagValues, modes: Sequence[str], sampling: SamplingParams, decode: DecodeConfig, started: float
) -> None:
    """Loads, completes and prints what the flags ask for."""
    engine = load_engine(values)
    prompt = [{"role": "user", "content": values.prompt}] if values.chat else values.prompt
    if not values.json:
        stream(engine, prompt, sampling, decode, started)
    completions = compare(engine, prompt, sampling, modes, values.budget)
    if values.json:
        print(json.dumps(summary(completions)))
        return
    print(table(completions))
    if values.show_tree:
        print(f"\n{show_tree(engine, prompt, sampling, decode)}")


def main(argv: Sequence[str], values: flags.FlagValues = flags.FLAGS) -> None:
    started = time.perf_counter()
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; the prompt goes behind --prompt")
    if values.json and values.show_tree:
        raise app.UsageError("--json and --show_tree exclude each other: one prints for programs, one for people")
    logging.set_verbosity(logging.WARNING)
    modes = MODES if values.mode == "all" else (values.mode,)
    try:
        sampling = SamplingParams(
            temperature=values.temperature,
            top_k=values.top_k,
            top_p=values.top_p,
            min_p=values.min_p,
            repetition_penalty=values.repetition_penalty,
            seed=values.seed,
            max_new_tokens=values.max_new_tokens,
        )
        decode = DecodeConfig(mode=modes[-1], budget=values.budget)
        join_processes(values)
        with contextlib.redirect_stdout(sys.stdout if jax.process_index() == 0 else None):
            run(values, modes, sampling, decode, started)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
