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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints_tools.orbax_item import replace_file
from ddtree_jax.checkpoint import FORMAT_VERSION, MANIFEST_FILE


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
        values = json.loads(path.read_text())
        version = values.pop("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(
                f"format_version is {version!r}; this version writes {FORMAT_VERSION}: delete the folder or choose another"
            )
        parts = {
            part: PartRecord(
                record["source_checksum"], {name: (size, crc) for name, (size, crc) in record["files"].items()}
            )
            for part, record in values.pop("parts").items()
        }
        return Manifest(parts=parts, **values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def find_lost(out: Path, manifest: Manifest) -> list[str]:
    """Recorded parts that are no longer there as they were written, as far as names and sizes tell."""

    def is_whole(part: str, record: PartRecord) -> bool:
        files = {name: out / part / name for name in record.files}
        return all(path.is_file() and path.stat().st_size == record.files[name][0] for name, path in files.items())

    return [part for part, record in manifest.parts.items() if not is_whole(part, record)]
