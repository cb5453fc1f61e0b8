"""What a conversion has finished so far: a file beside the parts, replaced whole behind every part.

::

    source   {file: bytes, SHA-256 of its header or of all of it, time of change}
    parts    {part: checksum of the source tensors that went in, {file: bytes and CRC-32}}
    checked  {shard: SHA-256, as published and as found}

A part that stands here is on the disk and is not converted again. It stays true of another copy of the source as long as
the bytes that went in are the same.
"""

import dataclasses
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints_tools.files import naming, read_json
from checkpoints_tools.orbax_item import DESCRIPTIONS, replace_file
from ddtree_jax.arguments import shown
from ddtree_jax.checkpoint import FORMAT_VERSION, MANIFEST_FILE
from ddtree_jax.sharding import mesh_sizes

_FORM = {
    "format_version": int,
    "kind": str,
    "config": dict,
    "mesh": str,
    "source": {str: dict},
    "parts": {str: {"source_checksum": str, "files": {str: (int, int)}}},
    "checked": {str: str},
}
_PIECE_BYTES = 1 << 24


@dataclass(slots=True)
class PartRecord:
    """A finished part.

    ``source_checksum`` is the SHA-256 of names, dtypes, shapes and CRC-32 of its tensors; ``files`` has size and CRC-32 of
    every file, relative to the part's folder.
    """

    source_checksum: str
    files: dict[str, tuple[int, int]]


@dataclass(kw_only=True, slots=True)
class Manifest:
    """See the module. ``config`` and ``mesh`` say what is being converted, and into which layout."""

    kind: str
    config: dict[str, Any]
    mesh: str
    source: dict[str, dict[str, Any]]
    parts: dict[str, PartRecord] = field(default_factory=dict)
    checked: dict[str, str] = field(default_factory=dict)

    def source_checksums(self) -> dict[str, str]:
        return {part: record.source_checksum for part, record in self.parts.items()}

    def write(self, out: Path) -> None:
        values = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        replace_file(out / MANIFEST_FILE, json.dumps(values).encode())


def read_manifest(out: Path) -> Manifest | None:
    """The manifest of a folder, None where there is none.

    Raises:
      ValueError: it is damaged, or of another format version. The file is named.
    """
    path = out / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        values = read_json(path)
        version = values.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise ValueError(f"{path}: format_version is {shown(version)}; this version writes {FORMAT_VERSION}")
        read_json(path, _FORM)
        if fault := _mesh_fault(values["mesh"]):
            raise ValueError(f"{path}: {fault}")
    except ValueError as error:
        raise ValueError(f"{error}: delete the folder or choose another") from error
    parts = {
        part: PartRecord(record["source_checksum"], {name: tuple(entry) for name, entry in record["files"].items()})
        for part, record in values["parts"].items()
    }
    del values["format_version"]
    return Manifest(**values | {"parts": parts})


def _mesh_fault(mesh: str) -> str | None:
    try:
        mesh_sizes(mesh)
    except ValueError as error:
        return str(error)
    return None


def changed_files(folder: Path, record: PartRecord, *, read_all: bool = False) -> Iterator[Path]:
    """Files of a part that are not as they were written: by size and, of those that describe the part or all, by content."""
    for name, (size, crc) in record.files.items():
        path = folder / name
        is_read = read_all or path.name in DESCRIPTIONS
        if not path.is_file() or path.stat().st_size != size or (is_read and _crc32(path) != crc):
            yield path


def _crc32(path: Path) -> int:
    digest = 0
    with naming(path), path.open("rb") as file:
        while data := file.read(_PIECE_BYTES):
            digest = zlib.crc32(data, digest)
    return digest
