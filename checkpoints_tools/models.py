"""What a folder is a checkpoint of, and whether its tensors are that model's."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints_tools.files import SourceError, read_json
from checkpoints_tools.key_map import KeyMap, dflash_key_map, kimi_key_map
from checkpoints_tools.slabs import coverage_faults
from checkpoints_tools.source import CONFIG_FILE, TensorSource
from ddtree_jax import dflash, kimi
from ddtree_jax.arguments import shown
from ddtree_jax.checkpoint import FORMAT_VERSION, METADATA_FILE, Metadata, read_metadata, stored_arrays
from ddtree_jax.config import ConfigError, DFlashConfig, KimiConfig
from ddtree_jax.sharding import Parameters, mesh_sizes

TARGET_TYPES = ("kimi_k25", "kimi_k2", "deepseek_v3")
MOST = 10_000
"""Layers, and experts a layer, beyond which a config is taken for damaged."""

_METADATA = {
    "format_version": int,
    "kind": str,
    "config": dict,
    "mesh": str,
    "source_files": {str: dict},
    "source_checksums": {str: str},
    "tokenizer_files": [str],
    "arrays": {str: {str: {"shape": [int], "dtype": str}}},
}


class Model(NamedTuple):
    """What a source turned out to be. ``parameters`` are those of the model, ``stored`` as a checkpoint stores them."""

    kind: str
    config: KimiConfig | DFlashConfig
    parameters: Parameters


def recognise(values: dict[str, Any], where: Path) -> Model:
    """Target or drafter, by the presence of ``dflash_config``. Raises ConfigError, beginning with ``where``."""
    try:
        return _recognise_drafter(values) if "dflash_config" in values else _recognise_target(values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where}: an entry of the config has another type than it needs: {error}") from error


def _recognise_drafter(values: dict[str, Any]) -> Model:
    config = DFlashConfig.from_hf(values)
    _check_size(config, "num_hidden_layers", "num_target_layers")
    return Model("dflash", config, dflash.parameters(config))


def _recognise_target(values: dict[str, Any]) -> Model:
    if values.get("model_type", TARGET_TYPES[0]) not in TARGET_TYPES:
        allowed = ", ".join(map(repr, TARGET_TYPES))
        raise ConfigError(
            f"{CONFIG_FILE}: model_type is {shown(values['model_type'])}; allowed are {allowed}, or a DFlash drafter"
        )
    config = KimiConfig.from_hf(values)
    _check_size(config, "num_hidden_layers", "n_routed_experts")
    return Model("kimi", config, kimi.parameters(config))


def _check_size(config: KimiConfig | DFlashConfig, *names: str) -> None:
    for name in names:
        if getattr(config, name) > MOST:
            raise ConfigError(f"{CONFIG_FILE}: {name} is {getattr(config, name)}; at most {MOST} are allowed")


def read_checkpoint(directory: Path) -> tuple[Metadata, Model]:
    """A finished checkpoint's metadata, and the model that it is of.

    Raises:
      ValueError: as `read_metadata`; an entry of the metadata has another form, or there is no such model or mesh.
    """
    path = directory / METADATA_FILE
    if path.is_file() and read_json(path).get("format_version") == FORMAT_VERSION:
        read_json(path, _METADATA)
    metadata = read_metadata(directory)
    model = recognise(metadata.config, path)
    if metadata.kind != model.kind:
        raise ValueError(f"{path}: kind is {metadata.kind!r}; its config is that of a {model.kind!r} model")
    try:
        mesh_sizes(metadata.mesh)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return metadata, model


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
