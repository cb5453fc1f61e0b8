"""Result lines: one JSON object a measurement, with what is needed to judge and to repeat it."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

RESULTS = Path(__file__).parent / "results"


def provenance() -> dict[str, str]:
    """Device, JAX version, commit of the working tree, and the command that is running."""
    root = Path(__file__).parent.parent
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    module = getattr(sys.modules["__main__"], "__spec__", None)
    name = f"-m {module.name}" if module else Path(sys.argv[0]).name
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": git.stdout.strip() or "unknown",
        "command": f"python {name} {shlex.join(sys.argv[1:])}".strip(),
    }


def write_lines(name: str, lines: list[dict[str, Any]]) -> Path:
    """Replaces ``results/NAME.jsonl``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def update_lines(name: str, lines: list[dict[str, Any]]) -> Path:
    """Replaces those lines of ``results/NAME.jsonl`` that are of the same cases, and adds the others."""
    path = RESULTS / f"{name}.jsonl"
    old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    cases = [line["case"] for line in lines]
    return write_lines(name, [line for line in old if line["case"] not in cases] + lines)
