"""Programs of the loop as experiments compile and run them: by bucket, with XLA's plan, over caches that are full."""

import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax

from ddtree_jax import DecodeConfig
from ddtree_jax.decode import BUDGET_BUCKETS

ROOT = Path(__file__).parents[1]
CONFIGS = {
    "kimi_k26": (ROOT / "tests/configs/kimi_k26.json", ROOT / "tests/configs/kimi_k26_dflash_reconstructed.json"),
    "tiny": tuple(ROOT / "experiments/tiny_kimi" / model / "config.json" for model in ("target", "drafter")),
}
BUCKETS = ("plain", "chain", *map(str, BUDGET_BUCKETS))


def decode_config(bucket: str) -> DecodeConfig:
    if bucket in ("plain", "chain"):
        return DecodeConfig(mode="ar" if bucket == "plain" else "chain")
    return DecodeConfig(mode="ddtree", budget=int(bucket))


class Program(NamedTuple):
    """A compiled program, XLA's plan of its launches and what that says of each of them; both are empty where XLA has none.

    What reads a plan raises RuntimeError if it is empty (`loop_text.lines_of_loop`).
    """

    compiled: jax.stages.Compiled
    plan: str
    launches: str
    seconds: float


def compile_loop(lowered: jax.stages.Lowered) -> Program:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        seconds = time.perf_counter() - started
        plan, launches = (
            max((path.read_text() for path in Path(folder).glob(f"*{kind}.txt")), key=len, default="")
            for kind in ("thunk_sequence_after_thunk_passes", "thunk_metadata")
        )
    return Program(compiled, plan, launches, seconds)
