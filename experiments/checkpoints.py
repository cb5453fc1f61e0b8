"""Where experiments find their models: the tiny trained pair, and a cache of converted checkpoints."""

import hashlib
import os
import sys
from pathlib import Path

import jax

from checkpoints_tools.convert import convert
from ddtree_jax.checkpoint import FORMAT_VERSION, METADATA_FILE

TINY_PAIR = Path(__file__).parent / "tiny_kimi"


def default_cache_dir() -> Path:
    """Folder for conversions and compiled programs, under XDG_CACHE_HOME or the home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddtree_jax"


def tiny_pair() -> list[Path]:
    """Converted target and drafter of the tiny trained pair."""
    cache = default_cache_dir()
    return [converted(TINY_PAIR / name, cache) for name in ("target", "drafter")]


def converted(source: str | Path, cache: Path) -> Path:
    """The converted form of a checkpoint folder: itself, or its place in the cache, filled on first use.

    Raises:
      ValueError: no such folder, or one that the converter refuses; with several processes, one that is not converted yet.
    """
    folder = Path(source).resolve()
    if not source or not folder.is_dir():
        raise ValueError(f"checkpoint folder is {str(source)!r}; an existing folder is needed")
    if (folder / METADATA_FILE).exists():
        return folder
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())]
    key = hashlib.sha256(repr((str(folder), files, FORMAT_VERSION)).encode()).hexdigest()[:16]
    out = cache / f"{folder.name}-{key}"
    if not (out / METADATA_FILE).exists():
        if jax.process_count() > 1:
            raise ValueError(f"checkpoint folder is {str(source)!r}; with several processes a converted one is needed")
        print(f"converting {source} (once)", file=sys.stderr)
        convert(folder, out)
    return out
