"""The main job as a user starts it: text soon, the same tokens from all modes, one conversion."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import programs

from ddtree_jax import RoundTrace
from experiments.tree_text import draw_tree

ROOT = Path(__file__).parents[1]
SECONDS_TO_FIRST_TEXT = 60


def start(cache: Path, *flags: str) -> subprocess.Popen:
    """Compiles as a user's process does, not as quickly as the tests (`conftest`)."""
    command = [sys.executable, "-m", "experiments.generate", f"--cache_dir={cache}", "--max_new_tokens=24", *flags]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server():
    with programs() as server:
        yield server


def test_first_text_comes_soon_and_the_table_follows(cache):
    prompt = "def fibonacci(n):"
    started = time.monotonic()
    with start(cache, f"--prompt={prompt}", "--show_tree") as process:
        assert process.stdout.read(len(prompt) + 1).startswith(prompt)
        assert time.monotonic() - started < SECONDS_TO_FIRST_TEXT
        out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert errors.count("converting") == 2
    assert "tokens identical: yes" in out
    assert all(mode in out for mode in ("ar ", "chain ", "ddtree "))
    assert "committed (*)\n* '" in out


def test_json_line_and_second_run_converts_nothing(cache):
    with start(cache, "--prompt=import os\n", "--json", "--temperature=0.8", "--top_p=0.95", "--seed=3") as process:
        out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "converting" not in errors
    (line,) = out.splitlines()
    result = json.loads(line)
    assert result["identical"] is True
    assert list(result["modes"]) == ["ar", "chain", "ddtree"]
    passes = []
    for done in result["modes"].values():
        assert set(done) == {"token_ids", "text", "target_passes", "rounds", "seconds"}
        assert done["token_ids"] == result["modes"]["ar"]["token_ids"]
        assert done["text"] and done["seconds"] > 0
        passes.append(done["target_passes"])
    assert passes[0] > passes[1] >= passes[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt="], "error: prompts[0] is empty"),
        (["--budget=-1"], "error: budget is -1"),
        (["--target=no/such/folder"], "error: checkpoint folder is 'no/such/folder'"),
        (["--json", "--show_tree"], "exclude each other"),
    ],
)
def test_wrong_flags_end_in_a_sentence(server, cache, flags, message):
    (result,) = server.run(["experiments.generate", f"--cache_dir={cache}", *flags])
    assert result.returncode != 0
    assert message in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_drawn_tree():
    trace = RoundTrace(
        start=3, token_ids=[9, 5, 7, 5, 8], depths=[0, 1, 1, 2, 2], parents=[0, 0, 0, 1, 1], accepted=[0, 1, 4]
    )
    assert draw_tree(trace, str) == "\n".join(["* 9", "|-- * 5", "|   |-- 5", "|   `-- * 8", "`-- 7"])
