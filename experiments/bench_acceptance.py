"""Plain decoding, chain and DDTree on held-out Python files: tokens a round, target passes and seconds, on one engine.

    python -m experiments.bench_acceptance

Prompts are beginnings of files of the standard library that training held out (by a hash of their content). All modes run
warmed up, one prompt at a time, and must write the same tokens.
"""

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging

from ddtree_jax import Completion, DecodeConfig, Engine, SamplingParams
from experiments.checkpoints import tiny_pair
from experiments.results_file import provenance, write_lines
from experiments.tiny_training.corpus import held_out_sources

_NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 16, "Held-out files, in the order of their hashes.", lower_bound=1)
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 96, "Tokens of each file that are given.", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 128, "Tokens to generate for each.", lower_bound=1)
_TEMPERATURES = flags.DEFINE_list("temperatures", ["0", "0.8"], "With top-p 0.95 where above 0.")

CASES = (DecodeConfig(mode="ar"), DecodeConfig(mode="chain")) + tuple(
    DecodeConfig(mode="ddtree", budget=budget) for budget in (1, 3, 7, 15, 31, 63)
)


def held_out_prompts(engine: Engine) -> list[list[int]]:
    """Beginnings of held-out files that are long enough to be continued."""
    prompts = []
    for source in sorted(held_out_sources(stdlib_only=True), key=lambda source: source.digest):
        token_ids = engine.tokenizer.encode(source.content.decode())
        if len(token_ids) >= 2 * _PROMPT_TOKENS.value:
            prompts.append(token_ids[: _PROMPT_TOKENS.value])
    return prompts[: _NUM_PROMPTS.value]


def measure(engine: Engine, prompts: list[list[int]], temperature: float) -> list[dict[str, Any]]:
    """A result line a case. Raises if a mode writes other tokens than plain decoding."""
    top_p = 0.95 if temperature > 0 else 1.0
    sampling = SamplingParams(temperature=temperature, top_p=top_p, max_new_tokens=_NEW_TOKENS.value)
    lines, expected = [], None
    for decode in CASES:
        engine.generate(prompts[:1], SamplingParams(temperature=temperature, top_p=top_p, max_new_tokens=2), decode)
        completions = []
        for index, prompt in enumerate(prompts):
            print(f"{decode.mode} {decode.budget}: {index + 1}/{len(prompts)}  ", end="\r", file=sys.stderr, flush=True)
            completions += engine.generate([prompt], sampling, decode)
        tokens = [done.token_ids for done in completions]
        expected = expected or tokens
        if tokens != expected:
            raise AssertionError(f"{decode} writes other tokens than plain decoding")
        lines.append(_line(decode, temperature, completions, engine.models.drafter.config.depth))
    return lines


def _line(decode: DecodeConfig, temperature: float, completions: list[Completion], depth: int) -> dict[str, Any]:
    stats = [done.stats for done in completions]
    rounds = sum(one.rounds for one in stats)
    committed = sum(sum(one.accepted_lengths) for one in stats)
    return {
        "benchmark": "acceptance",
        "case": {
            "mode": decode.mode,
            "budget": {"ar": 0, "chain": depth}.get(decode.mode, decode.budget),
            "temperature": temperature,
            "prompts": len(completions),
            "dtype": "float32",
        },
        **provenance(),
        "tokens_per_round": round(committed / max(rounds, 1), 3),
        "ceiling_tokens_per_round": 1 if decode.mode == "ar" else min(depth, decode.budget) + 1,
        "ceiling": "every drafted depth accepted, and the target's own token",
        "tokens": sum(len(done.token_ids) for done in completions),
        "target_passes": sum(one.target_passes for one in stats),
        "rounds": rounds,
        "seconds": round(sum(one.decode_seconds for one in stats), 3),
        "milliseconds_per_round": round(
            1e3 * statistics.median(one.decode_seconds / max(one.rounds, 1) for one in stats), 2
        ),
    }


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    engine = Engine.load(*tiny_pair(), max_length=1024, dtype="float32")
    prompts = held_out_prompts(engine)
    lines = [line for temperature in _TEMPERATURES.value for line in measure(engine, prompts, float(temperature))]
    print(
        f"{'mode':8}{'budget':>7}{'temperature':>12}{'tokens/round':>14}{'target passes':>15}{'seconds':>9}{'ms/round':>10}"
    )
    for line in lines:
        case = line["case"]
        print(
            f"{case['mode']:8}{case['budget']:>7}{case['temperature']:>12}{line['tokens_per_round']:>14.2f}"
            f"{line['target_passes']:>15}{line['seconds']:>9.2f}{line['milliseconds_per_round']:>10.2f}"
        )
    print(f"written to {write_lines('acceptance', lines)}")


if __name__ == "__main__":
    app.run(main)
