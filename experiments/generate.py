"""Completes a prompt, streams the text, then compares plain decoding, the DFlash chain and DDTree on it.

    python -m experiments.generate --prompt "def fibonacci(n):"

Without ``--target`` and ``--drafter`` it takes the tiny trained pair of this repository. Hugging Face folders are converted
on first use, into a cache folder; converted ones are taken as they are.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

from ddtree_jax import Completion, DecodeConfig, Engine, RoundTrace, SamplingParams
from ddtree_jax.decode import MODES
from experiments.checkpoints import TINY_PAIR, converted, default_cache_dir
from experiments.tree_text import draw_tree

_PROMPT = flags.DEFINE_string("prompt", "def fibonacci(n):", "What to complete.")
_TARGET = flags.DEFINE_string(
    "target", str(TINY_PAIR / "target"), "Folder of the target: Hugging Face layout or converted."
)
_DRAFTER = flags.DEFINE_string("drafter", str(TINY_PAIR / "drafter"), "Folder of the drafter, likewise.")
_MODE = flags.DEFINE_enum("mode", "all", ("all", *MODES), "all: stream ddtree, compare three; ar needs no drafter.")
_BUDGET = flags.DEFINE_integer("budget", 15, "Tree nodes besides the root.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Nucleus; 1 is off.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Only the best so many tokens; 0 is off.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Only tokens this probable, relative to the best; 0 is off.")
_REPETITION_PENALTY = flags.DEFINE_float("repetition_penalty", 1.0, "Above 1: against tokens that stand already.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling noise.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "The most tokens to generate.")
_MAX_LENGTH = flags.DEFINE_integer("max_length", 1024, "The most tokens of prompt and completion together.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ("float32", "bfloat16"), "Weights and activations.")
_MESH = flags.DEFINE_string("mesh", None, "Axis sizes, such as tensor=8; one device by default.")
_CHAT = flags.DEFINE_bool("chat", False, "Send the prompt as a user's chat message.")
_SHOW_TREE = flags.DEFINE_bool("show_tree", False, "Draw the tree of the round that committed the most tokens.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON line instead of text and table.")
_CACHE_DIR = flags.DEFINE_string("cache_dir", None, "Where conversions lie; ~/.cache/ddtree_jax by default.")


def load_engine() -> Engine:
    """The engine that the flags ask for."""
    cache = Path(_CACHE_DIR.value) if _CACHE_DIR.value else default_cache_dir()
    jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
    return Engine.load(
        converted(_TARGET.value, cache),
        None if _MODE.value == "ar" else converted(_DRAFTER.value, cache),
        mesh=_MESH.value,
        max_length=_MAX_LENGTH.value,
        dtype=_DTYPE.value,
    )


def compare(engine: Engine, prompt: Any, sampling: SamplingParams, modes: Sequence[str]) -> dict[str, Completion]:
    """One completion a mode, each on programs that have run before."""
    completions = {}
    for index, mode in enumerate(modes):
        decode = DecodeConfig(mode=mode, budget=_BUDGET.value)
        _show_progress(2 * index, 2 * len(modes), f"{mode}: compiling")
        engine.generate(prompt, SamplingParams(max_new_tokens=2), decode)
        _show_progress(2 * index + 1, 2 * len(modes), f"{mode}: decoding")
        completions[mode] = engine.generate(prompt, sampling, decode)[0]
    _show_progress(1, 1, "")
    return completions


def _show_progress(done: int, total: int, text: str) -> None:
    """A bar in a line of the terminal that the next output overwrites; nothing once all is done."""
    if sys.stderr.isatty():
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


def show_tree(engine: Engine, prompt: Any, sampling: SamplingParams) -> str:
    """The tree of the round that committed the most tokens."""
    decode = DecodeConfig(mode="ddtree" if _MODE.value == "all" else _MODE.value, budget=_BUDGET.value)
    best: RoundTrace | None = max(
        engine.trace(prompt, sampling, decode), key=lambda trace: len(trace.accepted), default=None
    )
    if best is None:
        return "no tree: the first token, which comes from prefill, ended the completion"
    head = f"one round: {len(best.token_ids)} nodes behind {best.start} tokens, {len(best.accepted)} committed (*)"
    return f"{head}\n{draw_tree(best, lambda token: repr(engine.tokenizer.decode([token])))}"


def stream(engine: Engine, prompt: Any, sampling: SamplingParams, mode: str, started: float) -> None:
    """Prints the completion as it is committed."""
    _show_progress(0, 1, "compiling")
    print(_PROMPT.value, end="", flush=True)
    first = None
    for piece in engine.stream(prompt, sampling, DecodeConfig(mode=mode, budget=_BUDGET.value)):
        first = first or time.perf_counter() - started
        print(piece, end="", flush=True)
    print(f"\n\n(first text {first or 0:.1f} s after the imports, conversion and compilation included)\n", flush=True)


def main(argv: Sequence[str]) -> None:
    started = time.perf_counter()
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; the prompt goes behind --prompt")
    if _JSON.value and _SHOW_TREE.value:
        raise app.UsageError("--json and --show_tree exclude each other: one prints for programs, one for people")
    logging.set_verbosity(logging.WARNING)
    modes = MODES if _MODE.value == "all" else (_MODE.value,)
    try:
        sampling = SamplingParams(
            temperature=_TEMPERATURE.value,
            top_k=_TOP_K.value,
            top_p=_TOP_P.value,
            min_p=_MIN_P.value,
            repetition_penalty=_REPETITION_PENALTY.value,
            seed=_SEED.value,
            max_new_tokens=_MAX_NEW_TOKENS.value,
        )
        DecodeConfig(budget=_BUDGET.value)
        engine = load_engine()
        prompt = [{"role": "user", "content": _PROMPT.value}] if _CHAT.value else _PROMPT.value
        if not _JSON.value:
            stream(engine, prompt, sampling, modes[-1], started)
        completions = compare(engine, prompt, sampling, modes)
        if _JSON.value:
            print(json.dumps(summary(completions)))
            return
        print(table(completions))
        if _SHOW_TREE.value:
            print(f"\n{show_tree(engine, prompt, sampling)}")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)
