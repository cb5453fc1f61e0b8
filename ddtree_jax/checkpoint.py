"""A converted model on disk: one Orbax item a part, and a metadata file that is written last.

::

    metadata.json                 format version, model kind, Hugging Face config, hashes of the source, arrays' shapes
    manifest.json                 the converter's record of finished parts, with checksums
    embed/ layer_0/ ... head/     Orbax items; each appears whole or not at all
    tiktoken.model ...            tokenizer files, as they were

Arrays have the names, shapes and layout of ``parameters(config)``, but for experts, which lie in blocks where those fit
(see `expert_layout`). Those of the compute dtype are stored as bfloat16. A folder without ``metadata.json`` is an
unfinished conversion.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from ddtree_jax.expert_layout import loaded_as_stored, over_experts_alone, stored_parameters, unpack_experts
from ddtree_jax.pallas.int4_moe import ExpertBlocks
from ddtree_jax.sharding import ArrayInfo, Parameters, sharding_of

FORMAT_VERSION = 2
KINDS = ("kimi", "dflash")
METADATA_FILE = "metadata.json"
MANIFEST_FILE = "manifest.json"
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

    ``config`` is the Hugging Face ``config.json`` as read; ``mesh`` the one that the layout was chosen for;
    ``source_files`` has size and SHA-256 (of the header alone where there is one) of each file that was converted;
    ``source_checksums`` the SHA-256 of names, dtypes, shapes and CRC-32 of each part's tensors; ``tokenizer_files`` names
    those beside this file; ``arrays`` has the stored arrays of each part.
    """

    kind: str
    config: dict[str, Any]
    mesh: str
    source_files: dict[str, dict[str, int | str]]
    source_checksums: dict[str, str]
    tokenizer_files: list[str]
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
            raise ValueError(
                f"format_version is {version!r}; this version reads {FORMAT_VERSION}: convert again, into a new folder"
            )
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
    if (directory / MANIFEST_FILE).exists() or any(directory.glob("layer_*")):
        return f"has no {METADATA_FILE}: an unfinished conversion; run the converter again to finish it"
    return f"has no {METADATA_FILE}; a converted checkpoint is needed"


def check(directory: str | Path, parameters: Parameters, mesh: Mesh) -> None:
    """Whether a checkpoint can be loaded, as far as its metadata tells.

    Raises:
      ValueError: as `read_metadata`; an array that ``parameters`` does not have, or the other way round; another shape
        or stored dtype; an array that does not divide over the mesh. All are named.
    """
    metadata = read_metadata(directory)
    _check_arrays(Path(directory), metadata.arrays, stored_arrays(stored_parameters(parameters, metadata.mesh)))
    for infos in parameters.values():
        for name, info in infos.items():
            sharding_of(info, mesh, name)


def load(
    directory: str | Path, parameters: Parameters, mesh: Mesh, dtype: Any, *, as_blocks: bool = False
) -> dict[str, dict[str, jax.Array]]:
    """Arrays of a checkpoint, each restored straight into its place on the mesh.

    With ``as_blocks`` experts that are stored in blocks come as blocks (`ExpertBlocks`), unless the mesh would cut them;
    otherwise they are turned back, a layer at a time, to words and scales as ``parameters`` has them. ``dtype`` is the
    compute dtype, for the parameters that name none.

    Raises:
      ValueError: as `check`, before anything is read; a part that can't be read. It is named.
    """
    directory = Path(directory).absolute()
    check(directory, parameters, mesh)
    stored = stored_parameters(parameters, read_metadata(directory).mesh)
    with ocp.StandardCheckpointer() as checkpointer:

        def load_part(part: str, infos: dict[str, ArrayInfo]) -> dict[str, jax.Array]:
            is_slice = loaded_as_stored(infos, mesh.shape)
            if not is_slice:
                infos = {n: over_experts_alone(i) if n in ExpertBlocks._fields else i for n, i in infos.items()}
            wanted = {
                name: jax.ShapeDtypeStruct(info.shape, info.dtype or dtype, sharding=sharding_of(info, mesh, name))
                for name, info in infos.items()
            }
            arrays = _restore(checkpointer, directory / part, wanted)
            if ExpertBlocks._fields[0] not in infos or (as_blocks and is_slice):
                return arrays
            blocks = ExpertBlocks(*(arrays.pop(name) for name in ExpertBlocks._fields))
            return arrays | unpack_experts(blocks, parameters[part], mesh)

        return {part: load_part(part, infos) for part, infos in stored.items()}


def _restore(checkpointer: Any, path: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    try:
        return checkpointer.restore(path, wanted)
    except Exception as error:  # Orbax and its readers raise the bare class too.
        raise ValueError(f"{path} can't be read; convert again ({str(error).split('. See full')[0]})") from error


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
