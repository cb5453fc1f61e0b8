"""The folder that a conversion writes: whose it is, how far it is, and what of it can stay."""

import contextlib
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from checkpoints_tools.key_map import KeyMap
from checkpoints_tools.manifest import Manifest, PartRecord, changed_files, read_manifest
from checkpoints_tools.orbax_item import DESCRIPTIONS
from checkpoints_tools.parts import hash_part, num_bytes
from checkpoints_tools.source import CONFIG_FILE, TOKENIZER_FILES, TensorSource
from ddtree_jax.checkpoint import MANIFEST_FILE, METADATA_FILE, Metadata, StoredArray, read_metadata
from ddtree_jax.sharding import Parameters, mesh_sizes

MARKER = ".converting"
_SHOWN = 5


def check_folder(out: Path) -> None:
    """Whether a folder is ours or free. Raises ValueError, with what it holds, if it is neither."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; a folder is needed")
    names = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if METADATA_FILE in names and MANIFEST_FILE not in names:
        read_metadata(out)
        raise ValueError(f"{out} holds a checkpoint without {MANIFEST_FILE}; delete it or choose another folder")
    if names and not {MARKER, MANIFEST_FILE} & set(names):  # a death leaves the marker
        held = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        raise ValueError(f"{out} holds {held}, not of an unfinished conversion; an empty folder is needed")


def check_places(out: Path, parts: Iterable[str]) -> None:
    """Raises ValueError if a file stands where the conversion needs a folder, or the other way round."""
    for path in sorted(out.iterdir()):
        is_part = path.name.removesuffix(".partial") in parts
        is_ours = is_part or path.name in (MANIFEST_FILE, METADATA_FILE, *TOKENIZER_FILES)
        if is_ours and not (path.is_dir() if is_part else path.is_file()):
            kind = "folder" if is_part else "file"
            raise ValueError(f"{path} is no {kind}; the conversion needs a {kind} there: move it away")


@contextlib.contextmanager
def claim(out: Path) -> Iterator[None]:
    """Makes a folder this run's alone, as long as it runs.

    Raises:
      ValueError: the folder can't be written to, or another run holds it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        marker = _lock(out / MARKER)
    except BlockingIOError as error:
        raise ValueError(f"{out}: another run is converting into it; wait until it ends") from error
    except OSError as error:
        raise ValueError(f"{out} can't be written: {error}") from error
    with marker:
        try:
            yield
        finally:
            (out / MARKER).unlink(missing_ok=True)


def _lock(path: Path) -> IO[str]:
    """A file that nobody else has locked. Whoever has it removes it, so what was locked may no longer be what is there."""
    while True:
        marker = path.open("a")
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(marker.fileno()), path.stat()):
                return marker
        except FileNotFoundError:
            pass
        except OSError:
            marker.close()
            raise
        marker.close()


def resume(
    out: Path, fresh: Manifest, arrays: dict[str, dict[str, StoredArray]], tensors: TensorSource, key_map: KeyMap
) -> Manifest:
    """The manifest to go on with, written; without parts that are no longer as they were written.

    Raises:
      ValueError: the folder belongs to another model or mesh, or finished parts are of other bytes than the source has.
    """
    found = read_manifest(out)
    if found is None:
        fresh.write(out)
        return fresh
    _check_same_model(out, found, fresh, arrays)
    lost = [part for part, record in found.parts.items() if not _is_whole(out / part, record, arrays[part])]
    for part in lost:
        print(f"{out / part} is not as it was written; it is converted again", file=sys.stderr)
    fresh.parts = {part: record for part, record in found.parts.items() if part not in lost}
    changed = {name for name in fresh.source.keys() | found.source if fresh.source.get(name) != found.source.get(name)}
    fresh.checked = {name: digest for name, digest in found.checked.items() if name not in changed}
    _check_unchanged(out, fresh, changed, tensors, key_map)
    if fresh != found:
        fresh.write(out)
    return fresh


def _is_whole(folder: Path, record: PartRecord, arrays: dict[str, StoredArray]) -> bool:
    chunks = [size for name, (size, _) in record.files.items() if Path(name).name not in DESCRIPTIONS]
    return sum(chunks) == sum(map(num_bytes, arrays.values())) and not any(changed_files(folder, record))


def _check_same_model(out: Path, found: Manifest, fresh: Manifest, parts: Iterable[str]) -> None:
    if (found.kind, found.config) != (fresh.kind, fresh.config):
        names = sorted(
            name for name in found.config.keys() | fresh.config if found.config.get(name) != fresh.config.get(name)
        )
        raise ValueError(
            f"{out / MANIFEST_FILE} belongs to another model (other {', '.join(names)} in {CONFIG_FILE}); "
            "delete that folder or choose another one"
        )
    if mesh_sizes(found.mesh) != mesh_sizes(fresh.mesh):
        raise ValueError(f"{out} is for mesh {found.mesh!r}, not {fresh.mesh!r}; delete it or choose another folder")
    if unknown := sorted(found.parts.keys() - set(parts)):
        raise ValueError(
            f"{out / MANIFEST_FILE} has {', '.join(unknown[:_SHOWN])}, no part of the model; delete that folder or choose "
            "another one"
        )


def _check_unchanged(out: Path, manifest: Manifest, changed: set[str], tensors: TensorSource, key_map: KeyMap) -> None:
    """Whether finished parts that came from changed files are still what the source says, byte by byte."""
    others = {}
    for part, record in manifest.parts.items():
        files = {tensors.entries[name].file for name in key_map.tensors_of(part)}
        if not files & changed:
            continue
        print(f"{part} came from files that have changed; comparing with the source", file=sys.stderr)
        if hash_part(part, key_map, tensors) != record.source_checksum:
            others[part] = f"{part} was converted from other bytes than {', '.join(sorted(files))} now has"
    if others:
        raise ValueError(
            f"{tensors.directory} has changed since {out} was begun:\n  " + "\n  ".join(others.values()) + "\n  choose "
            f"another folder, or delete {', '.join(others)} in this one to have them converted again"
        )


def is_finished(out: Path, metadata: Metadata, stored: Parameters, source: Path) -> bool:
    """Whether a folder holds what ``metadata`` says, as far as can be told without reading all of it."""
    if not (out / METADATA_FILE).exists() or metadata.source_checksums.keys() != stored.keys():
        return False
    with contextlib.suppress(ValueError):
        return read_metadata(out) == metadata and all(
            (out / name).is_file() and (out / name).read_bytes() == (source / name).read_bytes()
            for name in metadata.tokenizer_files
        )
    return False


def check_space(out: Path, needed: int) -> None:
    """Raises OSError if the disk has no room for so many bytes."""
    free = shutil.disk_usage(out).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are still to be written, {free:,} are free", str(out))


@contextlib.contextmanager
def naming_a_full_disk(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = f"disk full ({error.strerror}); finished parts are kept, and the next run goes on behind them"
        raise OSError(error.errno, text, str(out)) from error
