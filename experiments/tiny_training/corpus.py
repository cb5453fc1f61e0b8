"""Python source lying on this machine: the standard library and every installed package, split by content.

::

    sys.path ──► *.py ──► one of each content ──► written by hand ──┬─► training
                                                                    └─► held out: 1 in 50, by SHA-256 of the content

A file is held out because of its bytes alone, and so it is held out on every machine. Copies that differ in a byte can
still fall on both sides.
"""

import hashlib
import importlib.metadata
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_ONE_IN = 50

_MIN_BYTES, _MAX_BYTES = 200, 200_000
_MAX_LINE, _MAX_MEAN_LINE = 500, 100
_MIN_LETTERS = 0.3
_LETTERS = bytes(byte for byte in range(256) if chr(byte).isalpha() or byte >= 0x80)
_GENERATED = re.compile(
    rb"do not edit|@generated|(auto-?generated|generated (by|from|with|using)|created by: the resource compiler)",
    re.IGNORECASE,
)
_DATA_NAMES = re.compile(r"(_pb2(_grpc)?|_lextab|_parsetab|uni(code)?data)\.py$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file of the corpus; ``distribution`` is the installed package that it came with."""

    path: Path
    content: bytes
    digest: bytes
    distribution: str


def is_held_out(content: bytes) -> bool:
    """Whether a file of this content belongs to the held-out part, here and on any machine."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def is_plain_source(content: bytes) -> bool:
    """Whether a file looks written by hand: UTF-8, of ordinary size and lines, not generated, not a table."""
    if not _MIN_BYTES <= len(content) <= _MAX_BYTES or b"\r" in content or b"\0" in content:
        return False
    lines = content.split(b"\n")
    if max(map(len, lines)) > _MAX_LINE or len(content) / len(lines) > _MAX_MEAN_LINE:
        return False
    if _GENERATED.search(b"\n".join(lines[:20])):
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return len(content.translate(None, _LETTERS)) <= (1 - _MIN_LETTERS) * len(content)


def collect(stdlib_only: bool = False) -> list[Source]:
    """Every usable file once, in the order of the digests: the same files give the same list."""
    owner = {} if stdlib_only else _owners()
    paths = sorted({path for root in _roots(stdlib_only) for path in _python_files(root, stdlib_only)})

    def read(path: Path) -> Source | None:
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if _DATA_NAMES.search(path.name) or not is_plain_source(content):
            return None
        name = owner.get(str(path)) or _package_name(path)
        return Source(path=path, content=content, digest=hashlib.sha256(content).digest(), distribution=name)

    with ThreadPoolExecutor(16) as pool:
        sources = {source.digest: source for source in reversed(list(pool.map(read, paths))) if source}
    return [sources[digest] for digest in sorted(sources)]


def held_out_sources(stdlib_only: bool = False) -> list[Source]:
    """The held-out files on this machine."""
    return [source for source in collect(stdlib_only) if is_held_out(source.content)]


def licence_table(sources: list[Source]) -> list[dict[str, str | int]]:
    """A row for each distribution in the corpus: name, version, licence as its metadata states it, files, bytes."""
    rows: dict[str, dict[str, str | int]] = {}
    for source in sources:
        row = rows.setdefault(source.distribution, {"files": 0, "bytes": 0})
        row["files"] += 1
        row["bytes"] += len(source.content)
    table = []
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["bytes"]):
        version, licence = _version_and_licence(name)
        table.append({"distribution": name, "version": version, "licence": licence, **row})
    return table


def _roots(stdlib_only: bool) -> list[Path]:
    standard = Path(sysconfig.get_paths()["stdlib"])
    if stdlib_only:
        return [standard]
    here = Path(__file__).resolve().parents[1]
    others = [Path(entry).resolve() for entry in sys.path if entry and Path(entry).is_dir()]
    return [standard, *(path for path in others if path != here and path != Path.cwd())]


def _python_files(root: Path, stdlib_only: bool) -> Iterator[Path]:
    for path in root.resolve().rglob("*.py"):
        if not (stdlib_only and _is_installed(path)) and path.is_file():
            yield path.resolve()


def _is_installed(path: Path) -> bool:
    return "site-packages" in path.parts or "dist-packages" in path.parts


def _package_name(path: Path) -> str:
    """Name for a file that no distribution lists: the folder under ``site-packages``, or Python itself."""
    for folder, child in itertools.pairwise(path.parts):
        if folder in ("site-packages", "dist-packages"):
            return child.removesuffix(".py")
    return "python"


def _owners() -> dict[str, str]:
    """Absolute path of each installed Python file -> name of its distribution."""
    owners = {}
    for distribution in importlib.metadata.distributions():
        root, name = Path(distribution.locate_file("")).resolve(), distribution.metadata["Name"]
        for file in distribution.files or ():
            if file.suffix == ".py":
                owners[os.path.normpath(root / file)] = name
    return owners


def _version_and_licence(name: str) -> tuple[str, str]:
    if name == "python":
        return sys.version.split()[0], "PSF-2.0"
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return "", "not stated"
    classifiers = [
        entry.rsplit("::", 1)[1].strip()
        for entry in metadata.get_all("Classifier") or ()
        if entry.startswith("License ::") and entry.count("::") > 1
    ]
    text = (metadata.get("License") or "").strip()
    # Some distributions put the whole licence text into the field: its first line names it.
    licence = metadata.get("License-Expression") or ", ".join(classifiers) or text.split("\n")[0][:100]
    return metadata["Version"], licence or "not stated"
