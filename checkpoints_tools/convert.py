"""Converts a Hugging Face checkpoint of Kimi K2.6 or of a DFlash drafter to the engine's own format.

::

    python -m checkpoints_tools.convert --source DIR --out DIR [--mesh tensor=8] [--workers 8]

    source ──► headers, index, config ──► every complaint that needs no weights, together, before anything is written
           ──► part by part: threads read, hash, check, pack and write slabs ──► rename ──► manifest ──► next part
           ──► tokenizer files ──► metadata.json

Killed at any moment it goes on, run again, behind the last part in its manifest.
"""

import contextlib
import dataclasses
import errno
import fcntl
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags

from checkpoints_tools.key_map import KeyMap, dflash_key_map, kimi_key_map
from checkpoints_tools.manifest import Manifest, find_lost, read_manifest
from checkpoints_tools.orbax_item import replace_file
from checkpoints_tools.parts import Converter, hash_part
from checkpoints_tools.progress import Progress, Reporter
from checkpoints_tools.slabs import coverage_faults
from checkpoints_tools.source import (
    CONFIG_FILE,
    TOKENIZER_FILES,
    SourceError,
    TensorSource,
    known_checksums,
    read_json,
    source_files,
)
from ddtree_jax import dflash, kimi
from ddtree_jax.checkpoint import MANIFEST_FILE, METADATA_FILE, Metadata, read_metadata, stored_arrays
from ddtree_jax.config import ConfigError, DFlashConfig, KimiConfig
from ddtree_jax.expert_layout import DEFAULT_MESH, stored_parameters
from ddtree_jax.sharding import Parameters, mesh_sizes

MARKER = ".converting"
WORKERS = 8


class Model(NamedTuple):
    """What a source turned out to be. ``parameters`` are those of the model, ``stored`` as a checkpoint stores them."""

    kind: str
    config: KimiConfig | DFlashConfig
    parameters: Parameters


def convert(
    source: str | Path,
    out: str | Path,
    *,
    mesh: str = DEFAULT_MESH,
    workers: int = WORKERS,
    report: Reporter | None = None,
) -> Metadata:
    """Converts a folder to another. A conversion that was begun is gone on with; a finished one is left alone.

    Args:
      mesh: that the layout is for; the result can be restored on any other, and on smaller ones without a copy.
      workers: threads.
      report: called with the state of things as it changes; by default a progress bar.

    Raises:
      ValueError: something is wrong with the source or with what ``out`` holds. Every complaint names its file or tensor.
        What is finished is kept, and the right run goes on from there.
      OSError: ``out`` can't be written, as when the disk is full.
    """
    source, out = Path(source), Path(out)
    mesh_sizes(mesh)
    if workers < 1:
        raise ValueError(f"workers is {workers}; at least 1 is needed")
    values = read_json(source / CONFIG_FILE)
    model = recognise(values, source)
    tensors = TensorSource(source)
    key_map = make_key_map(model, tensors.entries)
    stored = stored_parameters(model.parameters, mesh)
    errors = tensors.errors + list(find_errors(tensors, key_map))
    check_key_map(key_map, stored)
    _check_folder(out)
    if errors:
        raise ValueError(f"{source} can't be converted:\n  " + "\n  ".join(errors))
    fresh = Manifest(kind=model.kind, config=values, mesh=mesh, source=_identities(tensors))
    with claim(out):
        manifest = _resume(out, fresh, tensors, key_map)
        converter = Converter(out, stored, mesh_sizes(mesh), key_map, tensors, known_checksums(source), manifest)
        metadata = Metadata(
            kind=model.kind,
            config=values,
            mesh=mesh,
            source_files=source_files(tensors),
            source_checksums=manifest.source_checksums(),
            tokenizer_files=[name for name in TOKENIZER_FILES if (source / name).is_file()],
            arrays=stored_arrays(stored),
        )
        if _is_finished(out, metadata, stored):
            print(f"{out} already holds {source}, converted; left as it is", file=sys.stderr)
            return metadata
        (out / METADATA_FILE).unlink(missing_ok=True)
        converter.remove_leftovers()
        _check_space(out, converter.num_bytes_left())
        with _naming_a_full_disk(out):
            errors = converter.run(workers, report or Progress())
            if errors:
                done = f"{len(manifest.parts)} of {len(stored)} parts are finished and kept"
                raise ValueError(f"{source} can't be converted ({done}):\n  " + "\n  ".join(errors))
            for name in metadata.tokenizer_files:
                replace_file(out / name, (source / name).read_bytes())
            metadata = dataclasses.replace(metadata, source_checksums=manifest.source_checksums())
            replace_file(out / METADATA_FILE, metadata.to_json().encode())
    return metadata


def recognise(values: dict[str, Any], source: Path) -> Model:
    """Target or drafter, by the presence of ``dflash_config``."""
    try:
        if "dflash_config" in values:
            drafter = DFlashConfig.from_hf(values)
            return Model("dflash", drafter, dflash.parameters(drafter))
        target = KimiConfig.from_hf(values)
        return Model("kimi", target, kimi.parameters(target))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def make_key_map(model: Model, tensors: Iterable[str]) -> KeyMap:
    """The key map of a model; a target's names tell whether it is wrapped."""
    if isinstance(model.config, DFlashConfig):
        return dflash_key_map(model.config)
    return kimi_key_map(model.config, tensors)


def check_key_map(key_map: KeyMap, stored: Parameters) -> None:
    """Raises RuntimeError if an array of the model would not be filled exactly once: the code's fault, not a source's."""
    faults = [
        f"{part}: {fault}"
        for part, arrays in stored_arrays(stored).items()
        for array, info in arrays.items()
        for fault in coverage_faults(array, info, key_map.pieces[part])
    ]
    if faults or key_map.pieces.keys() != stored.keys():
        raise RuntimeError("key map: " + "; ".join(faults or ["other parts than the model"]))


def _check_folder(out: Path) -> None:
    """Whether a folder is ours or free. Raises ValueError, with what it holds, if it is neither."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; a folder is needed")
    names = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if METADATA_FILE in names and MANIFEST_FILE not in names:
        read_metadata(out)
        raise ValueError(f"{out} holds a checkpoint without {MANIFEST_FILE}; delete it or choose another folder")
    if names and not {MARKER, MANIFEST_FILE} & set(names):  # a death leaves the marker
        raise ValueError(f"{out} holds {', '.join(names)}, not of an unfinished conversion; an empty folder is needed")


@contextlib.contextmanager
def claim(out: Path) -> Iterator[None]:
    """Makes a folder this run's alone, as long as it runs.

    Raises:
      ValueError: the folder can't be written to, or another run holds it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        marker = (out / MARKER).open("a")
    except OSError as error:
        raise ValueError(f"{out} can't be written: {error}") from error
    with marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{out}: another run is converting into it; wait until it ends") from error
        try:
            yield
        finally:
            (out / MARKER).unlink()


def _resume(out: Path, fresh: Manifest, tensors: TensorSource, key_map: KeyMap) -> Manifest:
    """The manifest to go on with, written.

    Raises:
      ValueError: the folder belongs to another model or mesh, or finished parts are of other bytes than the source has.
    """
    found = read_manifest(out)
    if found is None:
        fresh.write(out)
        return fresh
    if (found.kind, found.config) != (fresh.kind, fresh.config):
        names = sorted(
            name for name in found.config.keys() | fresh.config if found.config.get(name) != fresh.config.get(name)
        )
        raise ValueError(
            f"{out / MANIFEST_FILE} belongs to another model (other {', '.join(names)} in {CONFIG_FILE}); "
            "delete that folder or choose another one"
        )
    if found.mesh != fresh.mesh:
        raise ValueError(f"{out} is for mesh {found.mesh!r}, not {fresh.mesh!r}; delete it or choose another folder")
    lost = find_lost(out, found)
    for part in lost:
        print(f"{out / part} is not as it was written; it is converted again", file=sys.stderr)
    fresh.parts = {part: record for part, record in found.parts.items() if part not in lost}
    changed = {name for name in fresh.source.keys() | found.source if fresh.source.get(name) != found.source.get(name)}
    fresh.checked = {name: digest for name, digest in found.checked.items() if name not in changed}
    _check_unchanged(out, fresh, changed, tensors, key_map)
    if fresh != found:
        fresh.write(out)
    return fresh


def _check_unchanged(out: Path, manifest: Manifest, changed: set[str], tensors: TensorSource, key_map: KeyMap) -> None:
    """Whether finished parts that came from changed files are still what the source says, byte by byte."""
    others = []
    for part, record in manifest.parts.items():
        files = {tensors.entries[name].file for name in key_map.tensors_of(part)}
        if not files & changed:
            continue
        print(f"{part} came from files that have changed; comparing with the source", file=sys.stderr)
        if hash_part(part, key_map, tensors) != record.source_checksum:
            others.append(f"{part} was converted from other bytes than {', '.join(sorted(files))} now has")
    if others:
        raise ValueError(
            f"{tensors.directory} has changed since {out} was begun:\n  " + "\n  ".join(others) + "\n  delete that "
            "folder or choose another one"
        )


def _identities(tensors: TensorSource) -> dict[str, dict[str, Any]]:
    """What tells on a second run that files are the same: as in the metadata, and their times of change."""
    return {
        name: identity | {"mtime_ns": (tensors.directory / name).stat().st_mtime_ns}
        for name, identity in source_files(tensors).items()
    }


def _is_finished(out: Path, metadata: Metadata, stored: Parameters) -> bool:
    if not (out / METADATA_FILE).exists() or metadata.source_checksums.keys() != stored.keys():
        return False
    with contextlib.suppress(ValueError):
        return read_metadata(out) == metadata and all((out / name).exists() for name in metadata.tokenizer_files)
    return False


@contextlib.contextmanager
def _naming_a_full_disk(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        text = "disk full; finished parts are kept, and the next run goes on behind them"
        raise OSError(errno.ENOSPC, text, str(out)) from error


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"disk full: {needed:,} bytes are still to be written, {free:,} are free", str(out))


def find_errors(tensors: TensorSource, key_map: KeyMap) -> Iterator[str]:
    """Everything about the source's tensors that does not fit, a sentence each."""
    used = set(key_map.constants)
    for array, piece in key_map.all_pieces():
        if piece.tensor not in used:
            yield from _check_tensor(tensors, piece.tensor, piece.shape, (piece.dtype,), array)
        used.add(piece.tensor)
    for name, needed in key_map.constants.items():
        errors = list(_check_tensor(tensors, name, (len(needed),), ("I32", "I64"), "the shape of packed weights"))
        yield from errors
        if name in tensors.entries and not errors:
            yield from _check_constant(tensors, name, needed)
    for name, entry in tensors.entries.items():
        if name not in used and not key_map.is_ignored(name):
            yield f"{name} in {entry.file} is unexpected; it is neither used nor listed as ignored"


def _check_constant(tensors: TensorSource, name: str, needed: tuple[int, ...]) -> Iterator[str]:
    try:
        found = tuple(tensors.read_small(name).tolist())
    except SourceError as error:
        yield str(error)
        return
    if found != needed:
        yield f"{name} says {list(found)}; {list(needed)} is needed"


def _check_tensor(
    tensors: TensorSource, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], use: str
) -> Iterator[str]:
    entry = tensors.entries.get(name)
    if entry is None:
        if not tensors.is_lost(name):
            yield f"{name} is missing; it is needed for {use}"
        return
    if entry.shape != shape:
        yield f"{name} in {entry.file} has shape {list(entry.shape)}; {list(shape)} is needed"
    if entry.dtype not in dtypes:
        yield f"{name} in {entry.file} has dtype {entry.dtype}; {' or '.join(dtypes)} is needed"


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        sys.exit(f"convert: unknown argument {arguments[1]}")
    try:
        convert(_SOURCE.value, _OUT.value, mesh=_MESH.value, workers=_WORKERS.value)
    except (ValueError, OSError) as error:
        sys.exit(f"convert: {error}")


if __name__ == "__main__":
    _SOURCE = flags.DEFINE_string("source", None, "Folder with config.json and safetensors.", required=True)
    _OUT = flags.DEFINE_string("out", None, "Folder for the converted checkpoint.", required=True)
    _MESH = flags.DEFINE_string("mesh", DEFAULT_MESH, "Mesh that the layout of the experts is chosen for.")
    _WORKERS = flags.DEFINE_integer("workers", WORKERS, "Threads that read, pack and write.")
    app.run(main)
