"""Runs Python programs, each in a child of one process that has imported what is slow to import, so that each starts at once.

::

    test ──► one JSON line: programs, environment ──► forked.py ──fork──► child per program, side by side
         ◄── one JSON line: status, stdout, stderr of each ◄────────────── wait
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Programs:
    """``run`` takes programs as lists: a module's or a file's name, and arguments."""

    def __init__(self, process: subprocess.Popen):
        self._process = process

    def run(self, *programs: list[Any], **environment: str) -> list[Result]:
        """Runs programs side by side, with changes to their environment, until all have ended."""
        request = {"programs": [[str(word) for word in program] for program in programs], "environment": environment}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return [Result(*result) for result in json.loads(self._process.stdout.readline())]


@contextmanager
def programs() -> Iterator[Programs]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", __file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        yield Programs(process)
        process.stdin.close()


def execute(program: list[str]) -> int:
    """Runs a program in this process, as Python would; returns what it ends with."""
    name, *arguments = program
    sys.argv = [name, *arguments]
    try:
        if name.endswith(".py"):
            runpy.run_path(name, run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start(program: list[str], environment: dict[str, str], outputs: list[Path]) -> int:
    """Starts a program in a child; returns its process id."""
    child = os.fork()
    if child == 0:
        os.environ.update(environment)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        status = execute(program)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return child


def answer(programs: list[list[str]], environment: dict[str, str], folder: Path) -> list[tuple[int, str, str]]:
    """Runs programs side by side; status, stdout and stderr of each."""
    outputs = [[folder / f"{i}.{name}" for name in ("out", "err")] for i in range(len(programs))]
    children = [start(program, environment, paths) for program, paths in zip(programs, outputs, strict=True)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return [(status, *(path.read_text() for path in paths)) for status, paths in zip(statuses, outputs, strict=True)]


def serve() -> None:
    import checkpoints_tools.convert  # noqa: F401
    import checkpoints_tools.verify  # noqa: F401

    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(answer(**json.loads(line), folder=Path(folder))), flush=True)


if __name__ == "__main__":
    serve()
