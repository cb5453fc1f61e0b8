"""Kills the converter again and again at random moments: run by `test_convert_resume` in a process of its own.

::

    python kill_converter.py SOURCE FOLDER KILLS

Children are forked from a process that has imported everything, so that an attempt takes a fraction of a second. Prints a
JSON object: output folders that were finished, kills, at how many finished parts each came, and parts written twice.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from checkpoints_tools.convert import convert
from checkpoints_tools.manifest import read_manifest


def attempt(source: Path, out: Path) -> int:
    """Starts a conversion in a child; returns its process id."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        status = 1
        try:
            convert(source, out, report=lambda state: None)
            status = 0
        finally:
            os._exit(status)
    return child


def times(out: Path, part: str) -> dict[str, tuple[int, int]]:
    """Inode and time of change of every file of a part."""
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in (out / part).rglob("*")}


def main(source: Path, folder: Path, num_kills: int) -> None:
    start = time.monotonic()
    os.waitpid(attempt(source, folder / "undisturbed"), 0)
    duration, rng = time.monotonic() - start, random.Random(0)
    finished, kills, twice, seen = ["undisturbed"], [], [], {}
    out = folder / "killed_0"
    while len(kills) < num_kills or out.exists():
        child = attempt(source, out)
        if len(kills) < num_kills:
            time.sleep(rng.uniform(0, duration / 2))
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        manifest = read_manifest(out) if out.exists() else None
        parts = list(manifest.parts) if manifest else []
        twice += [part for part in seen if part not in parts or times(out, part) != seen[part]]
        seen = {part: times(out, part) for part in parts}
        if os.WIFSIGNALED(status):
            kills.append(len(parts))
        elif os.WEXITSTATUS(status):
            sys.exit(f"the converter failed behind {len(kills)} kills")
        else:
            finished.append(out.name)
            out, seen = folder / f"killed_{len(finished) - 1}", {}
    print(json.dumps({"finished": finished, "kills": kills, "twice": twice}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
