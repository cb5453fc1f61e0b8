"""Decodes held-out Python through the GPU kernels and without them, and judges every token that differs by float32.

    python -m experiments.compare_kernels

Three engines of the tiny pair: float32 in plain JAX, bfloat16 in plain JAX, bfloat16 through the kernels. All continue the
same prompts greedily in all modes. In float32 the modes must agree. In bfloat16 a first token that differs from the float32
text is judged where the texts part: by how much do the two tokens' float32 logits differ? ::

    float32      def area ( self ) : return self . width      gap: logit of "width" less that of "w", both float32,
    bfloat16     def area ( self ) : return self . w ...           behind the common prefix

What rounding may do is measured as well: how far the plain bfloat16 form moves the float32 difference of the two best tokens,
root mean square over all positions, and its own largest gap, which is larger where rounding sent a token to other experts.
A gap of the kernels above both 6 times the former and the latter is no near tie but a fault, and so is any above 12 times the
former, and kernels that move logits by more than 1.25 times what the plain form moves them. Faults end the command with
status 1.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags, logging

from ddtree_jax import Completion, DecodeConfig, Engine, SamplingParams
from ddtree_jax.decode import MODES
from ddtree_jax.tokenizer import Tokenizer
from experiments.checkpoints import tiny_pair
from experiments.results_file import provenance, write_lines
from experiments.tiny_training.corpus import held_out_sources

BOUND_IN_SIGMA, MOST_IN_SIGMA = 6.0, 12.0
MOST_NOISE = 1.25
BYTES_PER_SECOND = 4.57e12
FORMS = {
    "float32": {"dtype": "float32", "kernels": False},
    "plain": {"dtype": "bfloat16", "kernels": False},
    "kernels": {"dtype": "bfloat16", "kernels": True},
}


class Noise(NamedTuple):
    """How far a form lies from float32 on the same texts, root mean square: all logits, the two best ones' difference."""

    logits: float
    margin: float


class Difference(NamedTuple):
    """Where a text parts from the float32 one: token number, and the float32 logits' difference there."""

    at: int
    gap: float


def windows(tokenizer: Tokenizer, num_prompts: int, prompt_tokens: int) -> list[list[int]]:
    """Pieces of held-out files, twice as far apart as they are long; the first of every file come first."""
    sources = sorted(held_out_sources(stdlib_only=True), key=lambda source: source.digest)
    files = [tokenizer.encode(source.content.decode()) for source in sources]
    pieces = []
    for start in range(0, max(map(len, files)), 2 * prompt_tokens):
        pieces += [ids[start : start + prompt_tokens] for ids in files if len(ids) >= start + prompt_tokens]
    return pieces[:num_prompts]


def complete(engine: Engine, prompts: list[list[int]], mode: str, num_new: int, size: int) -> list[Completion]:
    """Greedy completions of ``num_new`` tokens each, in batches of ``size``."""
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    return [
        done
        for start in range(0, len(prompts), size)
        for done in engine.generate(prompts[start : start + size], params, DecodeConfig(mode=mode))
    ]


def texts_of(completions: list[Completion]) -> list[list[int]]:
    return [done.token_ids for done in completions]


def scores(engine: Engine, prompts: list[list[int]], texts: list[list[int]]) -> list[np.ndarray]:
    """Logits [T, V] behind the common prefixes: row t of a text is for its token t."""
    return [engine.score(prompt + text[:-1])[len(prompt) - 1 :] for prompt, text in zip(prompts, texts, strict=True)]


def measure_noise(exact: list[np.ndarray], other: list[np.ndarray]) -> Noise:
    moved, margins = [], []
    for exact_TV, other_TV in zip(exact, other, strict=True):
        difference_TV = other_TV - exact_TV
        moved.append(np.mean(np.square(difference_TV, dtype=np.float64)))
        best_T2 = np.argsort(exact_TV, axis=1)[:, -2:]
        margins.append(np.diff(np.take_along_axis(difference_TV, best_T2, axis=1), axis=1)[:, 0])
    return Noise(float(np.sqrt(np.mean(moved))), float(np.sqrt(np.mean(np.square(np.concatenate(margins))))))


def first_differences(
    texts: list[list[int]], others: list[list[int]], logits: list[np.ndarray]
) -> list[Difference | None]:
    """Of each text, None where both agree to the end. ``logits`` are float32 and belong to ``texts``."""
    found = []
    for text, other, logits_TV in zip(texts, others, logits, strict=True):
        at = next((at for at, (one, two) in enumerate(zip(text, other, strict=True)) if one != two), None)
        found.append(None if at is None else Difference(at, float(logits_TV[at, text[at]] - logits_TV[at, other[at]])))
    return found


def judge(differences: list[Difference | None], num_new: int) -> dict[str, Any]:
    """Tokens that were compared, those that differ, and the largest gap. Behind a difference nothing is compared."""
    parted = [difference for difference in differences if difference]
    compared = sum(difference.at + 1 if difference else num_new for difference in differences)
    return {
        "tokens_compared": compared,
        "differing_tokens": len(parted),
        "rate": float(f"{len(parted) / compared:.3g}"),
        "largest_gap": round(max((difference.gap for difference in parted), default=0.0), 5),
    }


def compare(
    engines: dict[str, Engine], prompts: list[list[int]], num_new: int, size: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Result lines of all forms and modes, and what is wrong."""

    def decode(engine: Engine) -> list[list[list[int]]]:
        return [texts_of(complete(engine, prompts, mode, num_new, size)) for mode in MODES]

    with ThreadPoolExecutor() as threads:  # Most of the time goes into compiling, which takes one core.
        texts = dict(zip(engines, threads.map(decode, engines.values()), strict=True))
        exact = texts["float32"][0]
        logits = dict(
            zip(engines, threads.map(lambda engine: scores(engine, prompts, exact), engines.values()), strict=True)
        )
    noise = {form: measure_noise(logits["float32"], logits[form]) for form in engines}
    judged = {
        (form, mode): judge(first_differences(exact, found, logits["float32"]), num_new)
        for form in engines
        for mode, found in zip(MODES, texts[form], strict=True)
    }
    by_plain = max(judged["plain", mode]["largest_gap"] for mode in MODES)
    bound, most = (times * noise["plain"].margin for times in (BOUND_IN_SIGMA, MOST_IN_SIGMA))
    bounds = {"float32": 0.0, "plain": most, "kernels": min(max(bound, by_plain), most)}
    lines, faults = [], []
    if not noise["kernels"].logits <= MOST_NOISE * noise["plain"].logits:  # NaN is a fault too.
        faults.append(f"kernels move logits by {noise['kernels'].logits:.3g}, plain JAX by {noise['plain'].logits:.3g}")
    for form in engines:
        bound = bounds[form]
        for mode, found in zip(MODES, texts[form], strict=True):
            gap = judged[form, mode]["largest_gap"]
            if gap > bound or (form == "float32" and found != exact):
                faults.append(f"{form}, {mode}: a token's float32 logit is {gap} below the best one's")
            lines.append(
                {
                    "benchmark": "kernels_in_engine",
                    "case": {"form": form, "mode": mode, "prompts": len(prompts), "batch": size, "new_tokens": num_new},
                    **provenance(),
                    **judged[form, mode],
                    "bound": round(bound, 5),
                    "sequences_unlike_ar": sum(map(list.__ne__, found, texts[form][0])),
                    "rms_logits": float(f"{noise[form].logits:.3g}"),
                    "rms_margin": float(f"{noise[form].margin:.3g}"),
                }
            )
            print(f"{form} {mode}: {judged[form, mode]}, bound {bound}, {noise[form]}", flush=True)
    return lines, faults


def warm_up(engine: Engine, prompts: list[list[int]]) -> None:
    for mode in MODES:
        complete(engine, prompts[:1], mode, 2, 1)


def measure_speed(engine: Engine, prompts: list[list[int]], num_new: int) -> list[dict[str, Any]]:
    """A result line a mode: one prompt at a time, on programs that are warm."""
    weights = sum(array.nbytes for array in jax.tree.leaves(engine.models))
    lines = []
    for mode in MODES:
        stats = [done.stats for done in complete(engine, prompts, mode, num_new, 1)]
        seconds, passes = sum(one.decode_seconds for one in stats), sum(one.target_passes for one in stats)
        lines.append(
            {
                "benchmark": "kernels_in_engine",
                "case": {"form": "kernels", "mode": mode, "prompts": len(prompts), "batch": 1, "new_tokens": num_new},
                **provenance(),
                "seconds": round(seconds, 4),
                "target_passes": passes,
                "tokens_per_second": round(num_new * len(prompts) / seconds, 1),
                "milliseconds_per_round": round(1e3 * seconds / max(sum(one.rounds for one in stats), 1), 4),
                "ceiling_seconds": float(f"{passes * weights / BYTES_PER_SECOND:.3g}"),
                "ceiling": f"{weights / 1e6:.1f} MB of weights a pass at 4.57 TB/s",
            }
        )
        print(f"kernels {mode}: {seconds:.3f} s, {passes} passes", flush=True)
    return lines


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    folders = tiny_pair()
    try:
        engines = {form: Engine.load(*folders, max_length=1024, **options) for form, options in FORMS.items()}
    except ValueError as error:
        sys.exit(f"error: {error}")
    prompts = windows(engines["float32"].tokenizer, _NUM_PROMPTS.value, _PROMPT_TOKENS.value)
    with ThreadPoolExecutor(1) as thread:
        warmed_up = thread.submit(warm_up, engines["kernels"], prompts)
        lines, faults = compare(engines, prompts, _NEW_TOKENS.value, _BATCH.value)
        warmed_up.result()
    lines += measure_speed(engines["kernels"], prompts[: _NUM_TIMED.value], _NEW_TOKENS.value)
    print(f"written to {write_lines('kernels_in_engine', lines)}")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    _NUM_PROMPTS = flags.DEFINE_integer(
        "num_prompts", 256, "Windows of held-out files of the standard library.", lower_bound=1
    )
    _PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "Tokens of each window that are given.", lower_bound=1)
    _NEW_TOKENS = flags.DEFINE_integer("new_tokens", 128, "Tokens to generate for each.", lower_bound=2)
    _BATCH = flags.DEFINE_integer("batch", 16, "Sequences decoded together.", lower_bound=1, upper_bound=64)
    _NUM_TIMED = flags.DEFINE_integer("num_timed", 16, "Prompts that are timed, one at a time.", lower_bound=1)
    app.run(main)
