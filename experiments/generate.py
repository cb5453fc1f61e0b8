"""Completes a prompt, streams the text, then compares plain decoding, the DFlash chain and DDTree on it.

    python -m experiments.generate --prompt "def fibonacci(n):"

Without ``--target`` and ``--drafter`` it takes the tiny trained pair of this repository. Hugging Face folders are converted
on first use, into a cache folder; converted ones are taken as they are.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

from checkpoints_tools.convert import convert
from ddtree_jax import Completion, DecodeConfig, Engine, RoundTrace, SamplingParams
from ddtree_jax.checkpoint import FORMAT_VERSION, METADATA_FILE
from ddtree_jax.decode import MODES
from experiments.tree_text import draw_tree

TINY_PAIR = Path(__file__).parent / "tiny_kimi"

_PROMPT = flags.DEFINE_string("prompt", "def fibonacci(n):", "What to complete.")
_TARGET = flags.DEFINE_string(
    "target", str(TINY_PAIR / "target"), "Folder of the target: Hugging Face layout or converted."
)
_DRAFTER = flags.DEFINE_string("drafter", str(TINY_PAIR / "drafter"), "Folder of the drafter, likewise.")
_MODE = flags.DEFINE_enum("mode", "all", ("all", *MODES), "What to run; 'all' streams ddtree and compares the three.")
_BUDGET = flags.DEFINE_integer("budget", 15, "Tree nodes besides the root.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Nucleus; 1 is off.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling noise.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "The most tokens to generate.")
_MAX_LENGTH = flags.DEFINE_integer("max_length", 1024, "The most tokens of prompt and completion together.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ("float32", "bfloat16"), "Weights and activations.")
_MESH = flags.DEFINE_string("mesh", None, "Axis sizes, such as tensor=8; one device by default.")
_CHAT = flags.DEFINE_bool("chat", False, "Send the prompt as a user's chat message.")
_SHOW_TREE = flags.DEFINE_bool("show_tree", False, "Draw the tree of the round that committed the most tokens.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON line instead of text and table.")
_CACHE_DIR = flags.DEFINE_string("cache_dir", None, "Where conversions lie; ~/.cache/ddtree_jax by default.")


def default_cache_dir() -> Path:
    """Folder for conversions and compiled programs, under XDG_CACHE_HOME or the home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddtree_jax"


def converted(source: str, cache: Path) -> Path:
    """The converted form of a checkpoint folder: itself, or its place in the cache, filled on first use."""
    folder = Path(source).resolve()
    if not folder.is_dir():
        raise ValueError(f"checkpoint folder is {source!r}; an existing folder is needed")
    if (folder / METADATA_FILE).exists():
        return folder
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())]
    key = hashlib.sha256(repr((str(folder), files, FORMAT_VERSION)).encode()).hexdigest()[:16]
    out = cache / f"{folder.name}-{key}"
    if not (out / METADATA_FILE).exists():
        print(f"converting {source} (once)", file=sys.stderr)
        convert(folder, out)
    return out


def load_engine() -> Engine:
    """The engine that the flags ask for."""
    cache = Path(_CACHE_DIR.value) if _CACHE_DIR.value else default_cache_dir()
    jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
    return Engine.load(
        converted(_TARGET.value, cache),
        converted(_DRAFTER.value, cache),
        mesh=_MESH.value,
        max_length=_MAX_LENGTH.value,
        dtype=_DTYPE.value,
    )


def compare(engine: Engine, prompt: Any, sampling: SamplingParams, modes: Sequence[str]) -> dict[str, Completion]:
    """One completion a mode, each on programs that have run before."""
    completions = {}
    for mode in modes:
        decode = DecodeConfig(mode=mode, budget=_BUDGET.value)
        _status(f"{mode}: compiling, then decoding")
        engine.generate(prompt, SamplingParams(max_new_tokens=2), decode)
        completions[mode] = engine.generate(prompt, sampling, decode)[0]
    _status("")
    return completions


def _status(text: str) -> None:
    """Shows what is going on in a line that the next output overwrites."""
    if sys.stderr.isatty():
        print(f"\r{text:40}", end="\r", file=sys.stderr, flush=True)


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
    best: RoundTrace = max(engine.trace(prompt, sampling, decode), key=lambda trace: len(trace.accepted))
    head = f"one round: {len(best.token_ids)} nodes behind {best.start} tokens, {len(best.accepted)} committed (*)"
    return f"{head}\n{draw_tree(best, lambda token: repr(engine.tokenizer.decode([token])))}"


def stream(engine: Engine, prompt: Any, sampling: SamplingParams, mode: str, started: float) -> None:
    """Prints the completion as it is committed."""
    _status("compiling")
    print(_PROMPT.value, end="", flush=True)
    first = None
    for piece in engine.stream(prompt, sampling, DecodeConfig(mode=mode, budget=_BUDGET.value)):
        first = first or time.perf_counter() - started
        print(piece, end="", flush=True)
    print(f"\n\n(first text after {first or 0:.1f} s, compilation included)\n", flush=True)


def main(argv: Sequence[str]) -> None:
    started = time.perf_counter()
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; the prompt goes behind --prompt")
    logging.set_verbosity(logging.WARNING)
    modes = MODES if _MODE.value == "all" else (_MODE.value,)
    try:
        sampling = SamplingParams(
            temperature=_TEMPERATURE.value, top_p=_TOP_P.value, seed=_SEED.value, max_new_tokens=_MAX_NEW_TOKENS.value
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
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)
