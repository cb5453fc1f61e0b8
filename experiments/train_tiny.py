"""Trains the tiny Kimi-shaped target and its DFlash drafter on one GPU, and writes both as Hugging Face folders.

    python -m experiments.train_tiny --out DIR

::

    corpus   Python files of this machine ──► BPE ──► streams of ids           DIR/target/tiktoken.model, ...
    target   stream ──► float32 masters ──► INT4 + bfloat16                    DIR/target/*.safetensors
    drafter  what that target writes, with its features ──► masked blocks      DIR/drafter/model.safetensors

Each phase's files are complete before the next begins, and ``--phases`` goes on from what lies there.
"""

import dataclasses
import hashlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.tokenizer import Tokenizer
from experiments.results_file import provenance, write_lines
from experiments.tiny_training import checkpoint as tiny_checkpoint
from experiments.tiny_training import config as tiny_config
from experiments.tiny_training import corpus as tiny_corpus
from experiments.tiny_training import model as tiny_model
from experiments.tiny_training import tokenizer as tiny_tokenizer
from experiments.tiny_training.acceptance import measure_acceptance
from experiments.tiny_training.drafter import DrafterTraining, largest_hidden_difference, train_drafter
from experiments.tiny_training.optimizer import Clock
from experiments.tiny_training.samples import Samples, Sampling, draw_prompts, sample
from experiments.tiny_training.target import TargetTraining, evaluate, train_target

PHASES = ("corpus", "target", "drafter")
_LIMIT_BYTES = 16_000_000
_LIMIT_SECONDS = 1200
_SHOWN_PROMPTS = ("def fibonacci(n):\n", "class Stack:\n    def __init__(self", "import os\nimport sys\n\n\ndef main(")

_OUT = flags.DEFINE_string("out", None, "Folder that gets target/ and drafter/.", required=True)
_REPORT = flags.DEFINE_string("report", None, "JSON of measurements; train_tiny_report.json beside --out by default.")
_CACHE = flags.DEFINE_string(
    "cache", str(Path(tempfile.gettempdir()) / "train_tiny_streams.npz"), "File for the encoded corpus between phases."
)
_PHASES = flags.DEFINE_list("phases", list(PHASES), "Which of these to run; the files of the others must exist.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of everything drawn.")
_PUBLISH = flags.DEFINE_bool("publish", False, "Write the measurements to experiments/results/train_tiny.jsonl.")
_SMOKE = flags.DEFINE_bool("smoke", False, "A minute on a CPU: the standard library, a few steps, short sequences.")
_TARGET_MINUTES = flags.DEFINE_float("target_minutes", 8.0, "Time that the target trains, compilation aside.")
_DRAFTER_MINUTES = flags.DEFINE_float("drafter_minutes", 6.0, "Time that the drafter trains, sampling aside.")
_TARGET_STEPS = flags.DEFINE_integer("target_steps", None, "Steps instead of time: the same result for the same seed.")
_DRAFTER_STEPS = flags.DEFINE_integer("drafter_steps", None, "Steps instead of time.")
_TARGET_RATE = flags.DEFINE_float("target_rate", TargetTraining().peak_rate, "Peak learning rate of the target.")
_DRAFTER_RATE = flags.DEFINE_float("drafter_rate", DrafterTraining().peak_rate, "Peak learning rate of the drafter.")
_TARGET_BATCH = flags.DEFINE_integer("target_batch", TargetTraining().batch, "Windows a step.")
_TARGET_LENGTH = flags.DEFINE_integer("target_length", TargetTraining().length, "Tokens of a window.")
_ATTENTION = flags.DEFINE_enum("attention", "auto", ["auto", "xla"], "Attention of the target's training.")
_SEQUENCES = flags.DEFINE_integer("sequences", 65536, "Sequences that the drafter learns from.")
_LAYERS = flags.DEFINE_list("target_layer_ids", ["1", "2", "3"], "Layers whose outputs the drafter sees.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Everything that differs between a run and a smoke run."""

    stdlib_only: bool
    num_files: int | None
    bpe_bytes: int
    target: TargetTraining
    sampling: Sampling
    drafter: DrafterTraining
    held_out_windows: int
    held_out_prompts: int

    @classmethod
    def of_flags(cls) -> "Scale":
        if _SMOKE.value:
            return cls(
                stdlib_only=True,
                num_files=300,
                bpe_bytes=3_000_000,
                target=TargetTraining(batch=2, length=64, chunk=2),
                sampling=Sampling(num_sequences=8, length=64, batch=8, max_prompt=24),
                drafter=DrafterTraining(batch=2, anchors=3, chunk=2),
                held_out_windows=8,
                held_out_prompts=4,
            )
        return cls(
            stdlib_only=False,
            num_files=None,
            bpe_bytes=100_000_000,
            target=TargetTraining(
                batch=_TARGET_BATCH.value,
                length=_TARGET_LENGTH.value,
                peak_rate=_TARGET_RATE.value,
                attention=_ATTENTION.value,
            ),
            sampling=Sampling(num_sequences=_SEQUENCES.value),
            drafter=DrafterTraining(peak_rate=_DRAFTER_RATE.value),
            held_out_windows=1024,
            held_out_prompts=512,
        )


class Streams(NamedTuple):
    """Ids of the training and the held-out files, shuffled by file, each file closed by the end-of-turn id."""

    training: np.ndarray
    held_out: np.ndarray


class Reporter:
    """Prints lines with the time since the start, and keeps the measurements in a JSON file that is always current."""

    def __init__(self, path: Path):
        self._path, self._start = path, time.monotonic()
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def log(self, line: str) -> None:
        print(f"[{time.monotonic() - self._start:7.1f} s] {line}", flush=True)

    def record(self, phase: str, **values: Any) -> None:
        self.values.setdefault(phase, {}).update(values)
        self._path.write_text(json.dumps(self.values, indent=1) + "\n")
        for name, value in values.items():
            text = json.dumps(value)
            self.log(f"{phase}: {name} = {text if len(text) < 400 else text[:400] + ' ...'}")


def run_corpus(out: Path, scale: Scale, reporter: Reporter) -> Streams:
    """Collects the corpus, trains the vocabulary if it is not there or if the phase is asked for, and encodes."""
    begin = time.monotonic()
    sources = tiny_corpus.collect(scale.stdlib_only)
    random.Random(_SEED.value).shuffle(sources)
    sources = sources[: scale.num_files]
    parts = {
        "training": [s.content.decode() for s in sources if not tiny_corpus.is_held_out(s.content)],
        "held_out": [s.content.decode() for s in sources if tiny_corpus.is_held_out(s.content)],
    }
    num_bytes = {name: sum(len(text.encode()) for text in texts) for name, texts in parts.items()}
    reporter.record("corpus", files={name: len(texts) for name, texts in parts.items()}, bytes=num_bytes)
    (out / "sources.json").write_text(json.dumps(tiny_corpus.licence_table(sources), indent=0) + "\n")
    target = out / "target"
    if "corpus" in _PHASES.value:
        share = min(1.0, scale.bpe_bytes / num_bytes["training"])
        sample_texts = parts["training"][: max(1, int(share * len(parts["training"])))]
        tiny_tokenizer.write_tokenizer(target, tiny_tokenizer.train_ranks(sample_texts, tiny_config.NUM_BASE))
        reporter.log(f"corpus: vocabulary written, trained on {len(sample_texts)} files")
    encoded = {
        name: tiny_tokenizer.encode_files(target, texts, tiny_config.END_OF_TURN) for name, texts in parts.items()
    }
    reporter.record(
        "corpus",
        tokens={name: len(stream) for name, stream in encoded.items()},
        bytes_per_token=num_bytes["training"] / len(encoded["training"]),
        seconds=time.monotonic() - begin,
    )
    np.savez(_CACHE.value, vocabulary=_vocabulary_digest(out), **encoded)
    return Streams(**encoded)


def _read_cache(out: Path, reporter: Reporter) -> Streams | None:
    """The streams of an earlier corpus phase, if they were encoded with the vocabulary in ``out``."""
    if not Path(_CACHE.value).is_file():
        return None
    cached = np.load(_CACHE.value)
    if str(cached["vocabulary"]) != _vocabulary_digest(out):
        return None
    reporter.log(f"corpus: streams taken from {_CACHE.value}")
    return Streams(cached["training"], cached["held_out"])


def _vocabulary_digest(out: Path) -> str:
    return hashlib.sha256((out / "target" / "tiktoken.model").read_bytes()).hexdigest()


def run_target(out: Path, scale: Scale, streams: Streams, reporter: Reporter) -> None:
    """Trains and writes the target; measures what rounding costs and that both forms of the model agree."""
    begin = time.monotonic()
    values = tiny_config.target_config()
    config = KimiConfig.from_hf(values)
    clock = Clock(_TARGET_MINUTES.value, 4 if _SMOKE.value else _TARGET_STEPS.value)
    masters, measured = train_target(config, streams.training, scale.target, clock, _SEED.value, reporter.log)
    exported = tiny_model.quantize(masters)
    tiny_checkpoint.write_target(out / "target", values, jax.device_get(exported))
    reporter.record("target", settings=dataclasses.asdict(scale.target), training=measured)

    lengths_V = tiny_tokenizer.token_lengths(out / "target", config.vocab_size)
    forms = {
        "float32": tiny_model.compute_weights(masters, jnp.float32, fake_int4=False),
        "int4_experts_float32": tiny_model.compute_weights(masters, jnp.float32),
        "exported_float32": tiny_model.expand(exported, jnp.float32),
        "exported_bfloat16": tiny_model.expand(exported, jnp.bfloat16),
    }
    for name, arrays in forms.items():
        loss = evaluate(config, arrays, streams.held_out, lengths_V, scale.target, scale.held_out_windows)
        reporter.record("target", **{f"held_out_{name}": loss})
    _, read = tiny_checkpoint.read_target(out / "target")
    window_BT = jnp.asarray(streams.held_out[:64][None], jnp.int32)
    reporter.record(
        "target",
        largest_logit_difference_packed=tiny_model.largest_logit_difference(config, read, window_BT),
        bytes=tiny_checkpoint.num_bytes(out / "target"),
        seconds=time.monotonic() - begin,
    )


def run_drafter(out: Path, scale: Scale, streams: Streams, reporter: Reporter) -> None:
    """Samples from the written target, trains and writes the drafter, and measures what it gains on held-out code."""
    begin = time.monotonic()
    target_config, exported = tiny_checkpoint.read_target(out / "target")
    values = tiny_config.drafter_config([int(layer) for layer in _LAYERS.value])
    config = DFlashConfig.from_hf(values)
    embedding_VD, unembedding_VD = exported["embed"]["embedding_VD"], exported["head"]["unembedding_VD"]

    def continue_prompts(prompts: tuple[np.ndarray, np.ndarray], sampling: Sampling) -> list[Samples]:
        seed = _SEED.value
        return sample(target_config, exported, config.target_layer_ids, *prompts, sampling, seed, reporter.log)

    # One batch of the same shape, so that one compiled program serves for everything that is sampled.
    greedy = dataclasses.replace(scale.sampling, num_sequences=scale.sampling.batch, temperatures=((0.0, 1.0),))
    shown = continue_prompts(_shown_prompts(out / "target", greedy), greedy)[0]
    tokenizer = Tokenizer.from_directory(out / "target")
    texts = [tokenizer.decode(ids) for ids in np.asarray(shown.token_BM[: len(_SHOWN_PROMPTS), :200]).tolist()]
    reporter.record("drafter", target_writes=texts)
    prompt_length = scale.sampling.max_prompt // 2
    prompts = draw_prompts(streams.held_out, tiny_config.END_OF_TURN, greedy, _SEED.value + 1, prompt_length)
    held_out = continue_prompts(prompts, greedy)[0]
    prompts = draw_prompts(streams.training, tiny_config.END_OF_TURN, scale.sampling, _SEED.value + 2)
    batches = continue_prompts(prompts, scale.sampling)
    reporter.record(
        "drafter",
        sampled_tokens=len(batches) * batches[0].token_BM.size,
        feature_gigabytes=sum(samples.feature_BMY.nbytes for samples in batches) / 1e9,
        sampling_seconds=time.monotonic() - begin,
    )

    clock = Clock(_DRAFTER_MINUTES.value, 4 if _SMOKE.value else _DRAFTER_STEPS.value)
    masters, measured = train_drafter(
        config, embedding_VD, unembedding_VD, batches, scale.drafter, clock, _SEED.value, reporter.log
    )
    tiny_checkpoint.write_drafter(out / "drafter", values, jax.device_get(masters))
    reporter.record("drafter", settings=dataclasses.asdict(scale.drafter), training=measured)
    _, arrays = tiny_checkpoint.read_drafter(out / "drafter")
    reporter.record(
        "drafter",
        held_out=measure_acceptance(
            config,
            arrays,
            embedding_VD,
            unembedding_VD,
            held_out,
            target_config.eos_token_ids,
            scale.held_out_prompts,
        ),
        largest_difference_module=largest_hidden_difference(config, arrays, embedding_VD, held_out),
        bytes=tiny_checkpoint.num_bytes(out / "drafter"),
        seconds=time.monotonic() - begin,
    )


def _shown_prompts(directory: Path, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """A few prompts of our own in the first rows of a batch; the other rows do not matter."""
    tokenizer = Tokenizer.from_directory(directory)
    prompt_NM = np.zeros((sampling.num_sequences, sampling.max_prompt), np.int32)
    length_N = np.ones(sampling.num_sequences, np.int32)
    for row, text in enumerate(_SHOWN_PROMPTS):
        ids = tokenizer.encode(text)
        prompt_NM[row, : len(ids)], length_N[row] = ids, len(ids)
    return prompt_NM, length_N


def result_lines(report: dict[str, Any]) -> list[dict[str, Any]]:
    """A result line a phase, from the report of a whole run. ``chain`` and ``ddtree`` figures are for temperature 0."""
    run, corpus, target, drafter = (report[name] for name in ("run", *PHASES))
    common = {name: run[name] for name in ("device", "jax", "commit", "command")}
    case = {"seed": run["seed"], "training_bytes": corpus["bytes"]["training"], "bytes_of_pair": run["bytes"]}
    limit = {"ceiling_seconds": _LIMIT_SECONDS, "ceiling": "both models in 20 minutes on one GPU"}
    return [
        {
            "benchmark": "train_tiny",
            "case": {"phase": "target", **case, "tokens": target["training"]["tokens"]},
            **common,
            "seconds": round(target["seconds"], 1),
            **limit,
            "tokens_per_second": round(target["training"]["tokens_per_second"]),
            "held_out_float32": target["held_out_float32"],
            "held_out_exported": target["held_out_exported_float32"],
            "held_out_exported_bfloat16": target["held_out_exported_bfloat16"],
        },
        {
            "benchmark": "train_tiny",
            "case": {"phase": "drafter", **case, "blocks": drafter["training"]["anchors"]},
            **common,
            "seconds": round(drafter["seconds"], 1),
            **limit,
            "sampled_tokens": drafter["sampled_tokens"],
            "held_out": drafter["held_out"],
        },
        {
            "benchmark": "train_tiny",
            "case": {"phase": "all", **case},
            **common,
            "seconds": round(run["seconds"], 1),
            **limit,
        },
    ]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}")
    for phase in _PHASES.value:
        if phase not in PHASES:
            raise app.UsageError(f"--phases has {phase!r}; allowed: {', '.join(PHASES)}")
    if _PUBLISH.value and (set(_PHASES.value) != set(PHASES) or _SMOKE.value):
        raise app.UsageError("--publish is for a whole run: all phases, not --smoke")
    out = Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    reporter = Reporter(Path(_REPORT.value) if _REPORT.value else out.parent / "train_tiny_report.json")
    reporter.record("run", **provenance(), seed=_SEED.value, phases=_PHASES.value)
    scale = Scale.of_flags()
    begin = time.monotonic()
    streams = None if "corpus" in _PHASES.value else _read_cache(out, reporter)
    streams = streams or run_corpus(out, scale, reporter)
    if "target" in _PHASES.value:
        run_target(out, scale, streams, reporter)
    if "drafter" in _PHASES.value:
        run_drafter(out, scale, streams, reporter)
    num_bytes = tiny_checkpoint.num_bytes(out)
    reporter.record("run", bytes=num_bytes, seconds=time.monotonic() - begin)
    if num_bytes > _LIMIT_BYTES:
        raise ValueError(f"--out holds {num_bytes} bytes; at most {_LIMIT_BYTES} are allowed")
    if _PUBLISH.value:
        write_lines("train_tiny", result_lines(reporter.values))


if __name__ == "__main__":
    app.run(main)
