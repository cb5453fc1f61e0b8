"""Converts a Hugging Face checkpoint of Kimi K2.6 or of a DFlash drafter to the engine's own format.

::

    python -m checkpoints_tools.convert --source DIR --out DIR [--mesh tensor=8] [--workers 8]

    source ──► headers, index, config ──► every complaint that needs no weights, together, before anything is written
           ──► part by part: threads read, hash, check, pack and write slabs ──► rename ──► manifest ──► next part
           ──► tokenizer files ──► metadata.json

Killed at any moment it goes on, run again, behind the last part in its manifest.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from absl import flags

from checkpoints_tools import command
from checkpoints_tools.folder import (
    check_folder,
    check_places,
    check_space,
    claim,
    is_finished,
    naming_a_full_disk,
    resume,
)
from checkpoints_tools.manifest import Manifest
from checkpoints_tools.meshes import choose_mesh
from checkpoints_tools.models import check_key_map, find_errors, make_key_map, recognise
from checkpoints_tools.orbax_item import replace_file
from checkpoints_tools.parts import Converter
from checkpoints_tools.progress import Progress, Reporter
from checkpoints_tools.source import (
    CONFIG_FILE,
    TOKENIZER_FILES,
    TensorSource,
    known_checksums,
    read_json,
    source_files,
)
from ddtree_jax.arguments import is_integer, shown
from ddtree_jax.checkpoint import METADATA_FILE, Metadata, stored_arrays
from ddtree_jax.expert_layout import DEFAULT_MESH, stored_parameters
from ddtree_jax.sharding import mesh_sizes

WORKERS, MAX_WORKERS = 8, 256


def convert(
    source: str | Path,
    out: str | Path,
    *,
    mesh: str | None = None,
    workers: int = WORKERS,
    report: Reporter | None = None,
) -> Metadata:
    """Converts a folder to another. A conversion that was begun is gone on with; a finished one is left alone.

    Args:
      mesh: that the layout is for; the result can be restored on any other, and on smaller ones without a copy. By default
        tensor=8, or less if the model does not divide over it.
      workers: threads, at most 256.
      report: called with the state of things as it changes; by default a progress bar.

    Raises:
      ValueError: something is wrong with the source or with what ``out`` holds. Every complaint names its file or tensor.
        What is finished is kept, and the right run goes on from there.
      OSError: ``out`` can't be written, as when the disk is full.
    """
    source, out = Path(source), Path(out)
    if not is_integer(workers) or not 1 <= workers <= MAX_WORKERS:
        raise ValueError(f"workers is {shown(workers)}; allowed are 1 to {MAX_WORKERS}")
    values = read_json(source / CONFIG_FILE)
    model = recognise(values, source)
    mesh = choose_mesh(mesh, model.parameters)
    tensors, checksums = TensorSource(source), known_checksums(source)
    key_map = make_key_map(model, tensors.entries)
    stored = stored_parameters(model.parameters, mesh)
    errors = tensors.errors + list(find_errors(tensors, key_map))
    check_key_map(key_map, stored)
    check_folder(out)
    if errors:
        raise ValueError(f"{source} can't be converted:\n  " + "\n  ".join(errors))
    fresh = Manifest(kind=model.kind, config=values, mesh=mesh, source=_identities(tensors))
    with claim(out), naming_a_full_disk(out):
        check_places(out, stored)
        manifest = resume(out, fresh, stored_arrays(stored), tensors, key_map)
        converter = Converter(out, stored, mesh_sizes(mesh), key_map, tensors, checksums, manifest)
        errors = converter.check_finished(workers)
        metadata = Metadata(
            kind=model.kind,
            config=values,
            mesh=mesh,
            source_files=source_files(tensors),
            source_checksums=manifest.source_checksums(),
            tokenizer_files=[name for name in TOKENIZER_FILES if (source / name).is_file()],
            arrays=stored_arrays(stored),
        )
        if is_finished(out, metadata, stored, source):
            print(
                f"{out} already holds {source}, converted; left as it is (by names and sizes: verify --full reads all)",
                file=sys.stderr,
            )
            return metadata
        (out / METADATA_FILE).unlink(missing_ok=True)
        check_space(out, converter.num_bytes_left())
        converter.remove_leftovers()
        errors += converter.run(workers, report or Progress())
        if errors:
            done = f"{len(manifest.parts)} of {len(stored)} parts are finished and kept"
            raise ValueError(f"{source} can't be converted ({done}):\n  " + "\n  ".join(errors))
        metadata = dataclasses.replace(metadata, source_checksums=manifest.source_checksums())
        _write_ending(source, out, metadata)
    return metadata


def _identities(tensors: TensorSource) -> dict[str, dict[str, Any]]:
    """What tells on a second run that files are the same: as in the metadata, and their times of change."""
    return {
        name: identity | {"mtime_ns": (tensors.directory / name).stat().st_mtime_ns}
        for name, identity in source_files(tensors).items()
    }


def _write_ending(source: Path, out: Path, metadata: Metadata) -> None:
    """What comes behind the parts: tokenizer files, and the metadata last."""
    for name in TOKENIZER_FILES:
        if name in metadata.tokenizer_files:
            replace_file(out / name, (source / name).read_bytes())
        elif (out / name).exists():
            print(f"{out / name} is removed; {source} has none", file=sys.stderr)
            (out / name).unlink()
    replace_file(out / METADATA_FILE, metadata.to_json().encode())


def main(arguments: list[str]) -> None:
    command.no_arguments(arguments)
    convert(_SOURCE.value, _OUT.value, mesh=_MESH.value, workers=_WORKERS.value)


if __name__ == "__main__":
    _SOURCE = flags.DEFINE_string("source", None, "Folder with config.json and safetensors.", required=True)
    _OUT = flags.DEFINE_string("out", None, "Folder for the converted checkpoint.", required=True)
    _MESH = flags.DEFINE_string(
        "mesh",
        None,
        f"Mesh that the layout of the experts is chosen for; {DEFAULT_MESH}, or less if that does not divide.",
    )
    _WORKERS = flags.DEFINE_integer("workers", WORKERS, f"Threads that read, pack and write; at most {MAX_WORKERS}.")
    command.run(main)
