"""Kills conversions at random moments and goes on with each: run by `test_convert_processes`.

::

    python kill_converter.py SOURCE FOLDER KILLS

Prints a JSON object: a digest of every output that was finished, that of an undisturbed run first; of each kill, at how many
finished parts it came; parts that were written twice.
"""

import hashlib
import json
import os
import random
import shutil
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


def digest(out: Path) -> str:
    """Of names and bytes of all files."""
    found = hashlib.sha256()
    for path in sorted(filter(Path.is_file, out.rglob("*"))):
        found.update(f"{path.relative_to(out)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()


def main(source: Path, folder: Path, num_kills: int) -> None:
    start = time.monotonic()
    os.waitpid(attempt(source, folder / "undisturbed"), 0)
    duration, rng = time.monotonic() - start, random.Random(0)
    digests, kills, twice, seen = [digest(folder / "undisturbed")], [], [], {}
    out = folder / "killed"
    while len(kills) < num_kills or out.exists():
        child = attempt(source, out)
        if len(kills) < num_kills:
            time.sleep(rng.uniform(0, duration))
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
            digests.append(digest(out))
            shutil.rmtree(out)
            seen = {}
    print(json.dumps({"digests": digests, "kills": kills, "twice": twice}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
