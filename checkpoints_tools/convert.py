"""Converts a Hugging Face checkpoint of Kimi K2.6 or of a DFlash drafter to the engine's own format.

::

    python -m checkpoints_tools.convert --source DIR --out DIR

One part (embedding, layer, head) is in memory at a time. Everything that can be known without reading weights is
checked before the first part is written, and all complaints are reported together.
"""

import contextlib
import fcntl
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags, logging

from checkpoints_tools.key_map import KeyMap, Piece, dflash_key_map, kimi_key_map
from checkpoints_tools.source import CONFIG_FILE, TOKENIZER_FILES, TensorSource, open_source, read_json, source_files
from ddtree_jax import dflash, kimi
from ddtree_jax.checkpoint import (
    METADATA_FILE,
    STORED_DTYPE,
    Metadata,
    read_metadata,
    save_part,
    stored_arrays,
    write_metadata,
)
from ddtree_jax.config import ConfigError, DFlashConfig, KimiConfig
from ddtree_jax.sharding import ArrayInfo, Parameters

MARKER = ".converting"

Progress = Callable[[str, int, int, int], None]
"""Called with the part just written, how many are written, how many there are, and bytes written so far."""


class Model(NamedTuple):
    """What a source turned out to be. ``key_map`` makes the key map from the names of the source's tensors."""

    kind: str
    parameters: Parameters
    key_map: Callable[[list[str]], KeyMap]


def convert(source: str | Path, out: str | Path, progress: Progress | None = None) -> Metadata:
    """Converts a folder to another. Nothing is done if ``out`` already holds this source, converted.

    Raises:
      ValueError: something is wrong with the source, or ``out`` holds something else. Every complaint names its file or
        tensor, and nothing has been written.
    """
    source, out = Path(source), Path(out)
    values = read_json(source / CONFIG_FILE)
    model = recognise(values, source)
    metadata = Metadata(
        kind=model.kind,
        config=values,
        source_files=source_files(source),
        arrays=stored_arrays(model.parameters),
    )
    if is_finished(out, metadata):
        print(f"{out} already holds {source}, converted; left as it is", file=sys.stderr)
        return metadata
    with open_source(source) as tensors:
        key_map = model.key_map(list(tensors.entries))
        errors = tensors.errors + list(find_errors(tensors, key_map))
        if errors:
            raise ValueError(f"{source} can't be converted:\n  " + "\n  ".join(errors))
        with claim(out):
            _write_parts(out, model.parameters, key_map, tensors, progress or show_progress)
            for name in TOKENIZER_FILES:
                if (source / name).is_file():
                    shutil.copyfile(source / name, out / name)
            write_metadata(out, metadata)
    return metadata


def recognise(values: dict[str, Any], source: Path) -> Model:
    """Target or drafter, by the presence of ``dflash_config``."""
    try:
        if "dflash_config" in values:
            drafter = DFlashConfig.from_hf(values)
            return Model("dflash", dflash.parameters(drafter), lambda names: dflash_key_map(drafter))
        target = KimiConfig.from_hf(values)
        return Model("kimi", kimi.parameters(target), lambda names: kimi_key_map(target, names))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def is_finished(out: Path, metadata: Metadata) -> bool:
    """Whether ``out`` holds this very conversion. False if it is new, empty or an unfinished one of this model.

    Raises:
      ValueError: it holds anything else.
    """
    if not out.exists():
        return False
    if not out.is_dir():
        raise ValueError(f"{out} is a file; a folder is needed")
    if (out / METADATA_FILE).exists():
        found = read_metadata(out)
        differences = [name for name in Metadata.__slots__ if getattr(found, name) != getattr(metadata, name)]
        if differences:
            raise ValueError(
                f"{out / METADATA_FILE} belongs to another source (other {', '.join(differences)}); "
                "delete that folder or choose another one"
            )
        return all((out / part).is_dir() for part in metadata.arrays)
    names = sorted(path.name for path in out.iterdir())
    if names and MARKER not in names:
        raise ValueError(f"{out} holds {', '.join(names)}, not of an unfinished conversion; an empty folder is needed")
    return False


@contextlib.contextmanager
def claim(out: Path) -> Iterator[None]:
    """Makes a folder this run's alone. While its marker lies there, what it holds is an unfinished conversion.

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
        (out / METADATA_FILE).unlink(missing_ok=True)
        yield
        (out / MARKER).unlink()


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
        if name in tensors.entries and not errors and (found := tuple(tensors.read(name).tolist())) != needed:
            yield f"{name} says {list(found)}; {list(needed)} is needed"
    for name, entry in tensors.entries.items():
        if name not in used and not key_map.is_ignored(name):
            yield f"{name} in {entry.file} is unexpected; it is neither used nor listed as ignored"


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


def _write_parts(out: Path, parameters: Parameters, key_map: KeyMap, tensors: TensorSource, progress: Progress) -> None:
    num_bytes = 0
    for done, (part, infos) in enumerate(parameters.items(), 1):
        pieces = key_map.pieces[part]
        if pieces.keys() != infos.keys():
            raise RuntimeError(f"key map: {part} differs from the model in {sorted(pieces.keys() ^ infos.keys())}")
        arrays = {name: assemble(info, pieces[name], tensors) for name, info in infos.items()}
        save_part(out, part, arrays)
        num_bytes += sum(array.nbytes for array in arrays.values())
        progress(part, done, len(parameters), num_bytes)


def assemble(info: ArrayInfo, pieces: list[Piece], tensors: TensorSource) -> np.ndarray:
    """One array, every element filled exactly once."""
    array = np.empty(info.shape, info.dtype or STORED_DTYPE)
    is_filled = np.zeros(info.shape[: len(pieces[0].index)], bool)
    for piece in pieces:
        values = piece.arrange(tensors.read(piece.tensor))
        if is_filled[piece.index] or values.shape != array[piece.index].shape or values.dtype != array.dtype:
            raise RuntimeError(f"key map: {piece.tensor} does not fit at {piece.index} of {info}")
        array[piece.index] = values
        is_filled[piece.index] = True
    if not is_filled.all():
        raise RuntimeError(f"key map: pieces after {pieces[-1].tensor} are missing in {info}")
    return array


def show_progress(part: str, done: int, total: int, num_bytes: int) -> None:
    """A bar on a terminal's stderr, a line a part elsewhere."""
    bar = "#" * (24 * done // total)
    line = f"[{bar:<24}] {done}/{total} parts, {num_bytes / 1e6:,.1f} MB, {part:<10}"
    is_terminal = sys.stderr.isatty()
    end = "" if is_terminal and done < total else "\n"
    print(f"\r{line}" if is_terminal else line, end=end, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        sys.exit(f"convert: unknown argument {arguments[1]}")
    if logging.get_verbosity() == logging.INFO:  # absl's default, at which Orbax fills a page for every part
        logging.set_verbosity(logging.WARNING)
    try:
        convert(_SOURCE.value, _OUT.value)
    except (ValueError, OSError) as error:
        sys.exit(f"convert: {error}")


if __name__ == "__main__":
    _SOURCE = flags.DEFINE_string("source", None, "Folder with config.json and safetensors.", required=True)
    _OUT = flags.DEFINE_string("out", None, "Folder for the converted checkpoint.", required=True)
    app.run(main)
