"""A Hugging Face checkpoint folder: ``config.json`` and safetensors in one file or in shards, read by mmap."""

import contextlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax  # noqa: F401  (makes bfloat16 known to numpy, and so to safetensors)
import numpy as np
from safetensors import SafetensorError, safe_open

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")
_END_BYTES = 1 << 20


class Entry(NamedTuple):
    """Where a tensor lies and what its file's header says of it; ``dtype`` is spelled as in safetensors."""

    file: str
    shape: tuple[int, ...]
    dtype: str


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError, naming the file, if it is missing or holds something else."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; a JSON object is needed")
    return values


def read_index(directory: Path) -> dict[str, str] | None:
    """File of each tensor by ``model.safetensors.index.json``; None where there is a single file and no index."""
    if not (directory / INDEX_FILE).exists():
        if not (directory / SINGLE_FILE).is_file():
            raise ValueError(f"{directory} has neither {INDEX_FILE} nor {SINGLE_FILE}")
        return None
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{directory / INDEX_FILE}: weight_map must name a file for every tensor")
    return weight_map


def source_files(directory: Path) -> dict[str, dict[str, int]]:
    """Size of every file of the source, and a checksum of its first and last MiB: enough to notice another one."""
    index = read_index(directory)
    names = [CONFIG_FILE, *sorted({SINGLE_FILE} if index is None else {INDEX_FILE, *index.values()}), *TOKENIZER_FILES]
    return {name: _identity(directory / name) for name in names if (directory / name).is_file()}


def _identity(path: Path) -> dict[str, int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        checksum = zlib.crc32(file.read(_END_BYTES))
        file.seek(max(size - _END_BYTES, 0))
        checksum = zlib.crc32(file.read(), checksum)
    return {"bytes": size, "crc32_of_ends": checksum}


class TensorSource:
    """Tensors of a folder by name. ``errors`` lists, a sentence each, what is wrong with the files themselves."""

    def __init__(self, directory: Path, index: dict[str, str] | None, stack: contextlib.ExitStack):
        self.directory = directory
        self.entries: dict[str, Entry] = {}
        self.errors: list[str] = []
        self._index = index
        self._files: dict[str, Any] = {}
        for name in [SINGLE_FILE] if index is None else sorted(set(index.values())):
            self._add_file(name, stack)
        if index is not None:
            self._check_index(index)

    def read(self, tensor: str) -> np.ndarray:
        return self._files[self.entries[tensor].file].get_tensor(tensor)

    def is_lost(self, tensor: str) -> bool:
        """Whether a tensor should be in a file that can't be read, so that `errors` already accounts for it."""
        file = SINGLE_FILE if self._index is None else self._index.get(tensor)
        return file is not None and file not in self._files

    def _add_file(self, name: str, stack: contextlib.ExitStack) -> None:
        path = self.directory / name
        if not path.is_file():
            self.errors.append(f"{path} is missing; {INDEX_FILE} names it")
            return
        try:
            file = stack.enter_context(safe_open(path, framework="numpy"))
        except (SafetensorError, OSError) as error:
            self.errors.append(f"{path} is truncated or not a safetensors file: {error}")
            return
        self._files[name] = file
        for tensor in file.keys():
            header = file.get_slice(tensor)
            entry = Entry(name, tuple(header.get_shape()), header.get_dtype())
            if self.entries.setdefault(tensor, entry) is not entry:
                self.errors.append(f"{tensor} is in both {self.entries[tensor].file} and {name}")

    def _check_index(self, index: dict[str, str]) -> None:
        for tensor, entry in self.entries.items():
            if index.get(tensor) != entry.file:
                self.errors.append(f"{tensor} is in {entry.file}; {INDEX_FILE} says {index.get(tensor)}")
        for tensor, file in index.items():
            if file in self._files and tensor not in self.entries:
                self.errors.append(f"{tensor} is not in {file}, where {INDEX_FILE} has it")
        for path in sorted(self.directory.glob("*.safetensors")):
            if path.name not in index.values():
                self.errors.append(f"{path} is there, but {INDEX_FILE} does not name it")


@contextlib.contextmanager
def open_source(directory: Path) -> Iterator[TensorSource]:
    """Opens every safetensors file of a folder and reads their headers, not their data."""
    with contextlib.ExitStack() as stack:
        yield TensorSource(directory, read_index(directory), stack)
