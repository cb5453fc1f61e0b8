"""A converted model on disk: one Orbax item a part, and a metadata file that is written last.

::

    metadata.json                 format version, model kind, Hugging Face config, source files, every array's shape
    embed/ layer_0/ ... head/     Orbax items; each appears whole or not at all
    tiktoken.model ...            tokenizer files, as they were

Arrays have the names, shapes and layout of ``parameters(config)``. Those of the compute dtype are stored as bfloat16.
A folder without ``metadata.json`` is an unfinished conversion.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from ddtree_jax.sharding import Parameters, sharding_of

FORMAT_VERSION = 1
KINDS = ("kimi", "dflash")
METADATA_FILE = "metadata.json"
STORED_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Shape and dtype of one array as it lies on disk."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """What a folder holds: enough to build the model from the folder alone and to recognise its source.

    ``config`` is the Hugging Face ``config.json`` as read; ``source_files`` has numbers that identify each file that
    was converted; ``arrays`` has the stored arrays of each part.
    """

    kind: str
    config: dict[str, Any]
    source_files: dict[str, dict[str, int]]
    arrays: dict[str, dict[str, StoredArray]]

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Metadata":
        """Inverse of `to_json`. Raises ValueError with what is wrong, without the file's name."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"is a {type(values).__name__}; a JSON object is needed")
        version = values.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version is {version!r}; this version reads {FORMAT_VERSION}: convert again")
        names = {field.name for field in dataclasses.fields(cls)}
        if values.keys() != names:
            raise ValueError(f"has {', '.join(sorted(values))}; exactly {', '.join(sorted(names))} are needed")
        if values["kind"] not in KINDS:
            raise ValueError(f"kind is {values['kind']!r}; allowed: {', '.join(map(repr, KINDS))}")
        arrays = {
            part: {name: StoredArray(tuple(array["shape"]), array["dtype"]) for name, array in table.items()}
            for part, table in values.pop("arrays").items()
        }
        return cls(arrays=arrays, **values)


def stored_arrays(parameters: Parameters) -> dict[str, dict[str, StoredArray]]:
    """How the parameters of a model are stored."""
    return {
        part: {name: StoredArray(info.shape, np.dtype(info.dtype or STORED_DTYPE).name) for name, info in infos.items()}
        for part, infos in parameters.items()
    }


def save_part(directory: str | Path, part: str, arrays: Mapping[str, np.ndarray | jax.Array]) -> None:
    """Writes one part. An interrupted call leaves nothing under the part's name; an older part is replaced."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(directory).absolute() / part, dict(arrays), force=True)


def write_metadata(directory: str | Path, metadata: Metadata) -> None:
    """Finishes a conversion: from now on the folder is a checkpoint.

    Raises:
      ValueError: a part has not been saved. It is named.
    """
    directory = Path(directory)
    missing = [part for part in metadata.arrays if not (directory / part).is_dir()]
    if missing:
        raise ValueError(f"{directory}: parts {', '.join(missing)} are not saved; all must be before the metadata")
    partial = directory / f"{METADATA_FILE}.partial"
    with partial.open("w") as file:
        file.write(metadata.to_json())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / METADATA_FILE)


def read_metadata(directory: str | Path, kind: str | None = None) -> Metadata:
    """Metadata of a finished checkpoint, of one kind of model if ``kind`` is given.

    Raises:
      ValueError: no checkpoint, an unfinished one, another format version, or another kind of model.
    """
    directory = Path(directory)
    path = directory / METADATA_FILE
    try:
        is_there = path.is_file()
    except OSError as error:  # such as a name that is too long
        raise ValueError(f"{directory} can't be read; a converted checkpoint is needed ({error.strerror})") from error
    if not is_there:
        raise ValueError(f"{directory} {_without_metadata(directory)}")
    try:
        metadata = Metadata.from_json(path.read_text())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError) as error:
        raise ValueError(f"{path}: {error}") from error
    if kind not in (None, metadata.kind):
        raise ValueError(f"{directory} holds a {metadata.kind!r} model; {kind!r} is needed here")
    return metadata


def _without_metadata(directory: Path) -> str:
    if not directory.is_dir():
        return "is not a folder; a converted checkpoint is needed"
    if any(directory.glob("*.safetensors")):
        return "is a Hugging Face checkpoint; convert it first: python -m checkpoints_tools.convert"
    if any(child.is_dir() for child in directory.iterdir()):
        return f"has no {METADATA_FILE}: an unfinished conversion; run the converter again to finish it"
    return f"has no {METADATA_FILE}; a converted checkpoint is needed"


def check(directory: str | Path, parameters: Parameters, mesh: Mesh) -> None:
    """Whether a checkpoint can be loaded, as far as its metadata tells.

    Raises:
      ValueError: as `read_metadata`; an array that ``parameters`` does not have, or the other way round; another shape
        or stored dtype; an array that does not divide over the mesh. All are named.
    """
    _check_arrays(Path(directory), read_metadata(directory).arrays, stored_arrays(parameters))
    for infos in parameters.values():
        for name, info in infos.items():
            sharding_of(info, mesh, name)


def load(directory: str | Path, parameters: Parameters, mesh: Mesh, dtype: Any) -> dict[str, dict[str, jax.Array]]:
    """Arrays of a checkpoint, each restored straight into its place on the mesh.

    ``dtype`` is the compute dtype, for the parameters that name none.

    Raises:
      ValueError: as `check`, before anything is read; a part that can't be read. It is named.
    """
    directory = Path(directory).absolute()
    check(directory, parameters, mesh)
    wanted = {
        part: {
            name: jax.ShapeDtypeStruct(info.shape, info.dtype or dtype, sharding=sharding_of(info, mesh, name))
            for name, info in infos.items()
        }
        for part, infos in parameters.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        return {part: _restore(checkpointer, directory / part, arrays) for part, arrays in wanted.items()}


def _restore(checkpointer: Any, path: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    try:
        return checkpointer.restore(path, wanted)
    except Exception as error:  # Orbax and its readers raise the bare class too.
        raise ValueError(f"{path} can't be read; convert again ({error})") from error


def _check_arrays(directory: Path, stored: Mapping[str, Any], needed: Mapping[str, Any]) -> None:
    stored, needed = (
        {f"{part}/{name}": array for part, table in tables.items() for name, array in table.items()}
        for tables in (stored, needed)
    )
    errors = [f"{name} is missing; {needed[name]} is needed" for name in needed if name not in stored]
    errors += [f"{name} is there, but the model has no such parameter" for name in stored if name not in needed]
    errors += [
        f"{name} is {stored[name]}; {needed[name]} is needed"
        for name in needed
        if name in stored and stored[name] != needed[name]
    ]
    if errors:
        raise ValueError(f"{directory}:\n  " + "\n  ".join(errors))
