"""A Hugging Face checkpoint folder: ``config.json`` and safetensors in one file or in shards.

Tensors are read into memory that the caller gives, so that memory does not grow; a file that has shrunk and a bad disk are
errors with a name. Files stay open: what is put in their place meanwhile is not read.
"""

import errno
import hashlib
import math
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from checkpoints_tools.direct_io import ALIGNMENT, Buffer, open_file, read_range, room
from checkpoints_tools.files import SourceError, form_fault, parse_json, read_file, read_json

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")
CHECKSUM_FILE = "SHA256SUMS"
DTYPES = {
    "BF16": np.dtype(jnp.bfloat16), "F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8"),
    "I8": np.dtype("i1"), "U8": np.dtype("u1"), "BOOL": np.dtype("?"), "I16": np.dtype("<i2"), "U16": np.dtype("<u2"),
    "I32": np.dtype("<i4"), "U32": np.dtype("<u4"), "I64": np.dtype("<i8"), "U64": np.dtype("<u8"),
}  # fmt: skip
_ONE_BYTE = ("F8_E4M3", "F8_E5M2")
_HEADER = {str: {"dtype": str, "shape": [int], "data_offsets": (int, int)}}
_MAX_HEADER = 1 << 28
_PIECE_BYTES = 1 << 26


class Entry(NamedTuple):
    """Where a tensor lies and what its file's header says of it; ``dtype`` is spelled as in safetensors."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int


def read_index(directory: Path) -> dict[str, str] | None:
    """File of each tensor by ``model.safetensors.index.json``; None where there is a single file and no index."""
    if not (directory / INDEX_FILE).exists():
        if not (directory / SINGLE_FILE).is_file():
            raise SourceError(f"{directory} has neither {INDEX_FILE} nor {SINGLE_FILE}")
        return None
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if form_fault(weight_map, {str: str}):
        raise SourceError(f"{directory / INDEX_FILE}: weight_map must name a file for every tensor")
    return weight_map


def known_checksums(directory: Path) -> dict[str, str]:
    """SHA-256 of files as published.

    By ``SHA256SUMS``, by what ``hf download --local-dir`` leaves behind, or by the names of blobs in its cache.
    """
    paths = [path for path in directory.glob("*.safetensors") if path.is_symlink()]
    links = {path.name: os.path.basename(os.path.realpath(path)) for path in paths}  # takes links that go in a circle
    known = {name: blob for name, blob in links.items() if re.fullmatch("[0-9a-f]{64}", blob)}
    for path in sorted((directory / ".cache/huggingface/download").glob("*.metadata")):
        lines = read_file(path).decode(errors="replace").split()
        if len(lines) > 1 and re.fullmatch("[0-9a-f]{64}", lines[1]):  # of a file in Git LFS
            known[path.name.removesuffix(".metadata")] = lines[1]
    return known | _listed_checksums(directory / CHECKSUM_FILE)


def _listed_checksums(path: Path) -> dict[str, str]:
    known = {}
    try:
        text = read_file(path).decode() if path.exists() else ""
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}") from error
    for line in filter(None, map(str.strip, text.splitlines())):
        match = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line)
        if not match:
            raise SourceError(f"{path} has {line!r}; a SHA-256 and a file name are needed")
        known[match[2].removeprefix("./")] = match[1].lower()
    return known


class Shard:
    """One safetensors file, its header read and checked, held open."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                head = file.read(8)
                size = int.from_bytes(head, "little")
                if len(head) < 8 or size > _MAX_HEADER or 8 + size > self.num_bytes:
                    raise SourceError(f"{path} is truncated or not a safetensors file: it ends inside its header")
                header = file.read(size)
                self._fd = open_file(path, os.O_RDONLY)
        except OSError as error:
            raise SourceError(f"{path} can't be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._fd)
        self.header_sha256 = hashlib.sha256(head + header).hexdigest()
        self.entries = self._read_header(header, 8 + size)

    def _read_header(self, header: bytes, start: int) -> dict[str, Entry]:
        try:
            values = parse_json(header, self.path)
            values.pop("__metadata__", None)
            if fault := form_fault(values, _HEADER):
                raise ValueError(fault)
            entries = {name: self._entry(name, value, start) for name, value in values.items()}
        except ValueError as error:
            text = str(error).removeprefix(f"{self.path} ").removeprefix("is not valid JSON: ")
            raise SourceError(f"{self.path} is truncated or not a safetensors file: {text}") from error
        end = start
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != end:
                raise SourceError(f"{self.path}: {name} begins at byte {entry.begin}; the tensor before ends at {end}")
            end = entry.end
        if end != self.num_bytes:
            what = "is truncated" if end > self.num_bytes else "has bytes behind its last tensor"
            raise SourceError(f"{self.path} {what}: it has {self.num_bytes} bytes; its header needs {end}")
        return entries

    def _entry(self, name: str, value: dict[str, Any], start: int) -> Entry:
        (begin, end), shape, dtype = value["data_offsets"], tuple(value["shape"]), value["dtype"]
        width = 1 if dtype in _ONE_BYTE else DTYPES[dtype].itemsize if dtype in DTYPES else None
        if begin > end:
            raise ValueError(f"{name} ends at byte {end}, before it begins at {begin}")
        if width is not None and end - begin != math.prod(shape) * width:
            raise ValueError(f"{name} has {end - begin} bytes; {dtype}{list(shape)} takes {math.prod(shape) * width}")
        return Entry(self.path.name, shape, dtype, start + begin, start + end)

    def bytes_at(self, begin: int, end: int, name: str, memory: np.ndarray) -> np.ndarray:
        """Bytes of the file, read into memory. Raises SourceError, naming the tensor, if they can't be."""
        try:
            data = read_range(self._fd, begin, end, memory)
            if len(data) < end - begin:
                raise OSError(errno.EIO, "end of file")
        except OSError as error:
            raise self.unreadable(name, begin, end, error) from error
        return data

    def unreadable(self, name: str, begin: int, end: int, error: OSError) -> SourceError:
        """What to say of a tensor whose bytes can't be read."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < end:
            return SourceError(f"{name} in {self.path}: the file now has {size} bytes, it had {self.num_bytes}")
        return SourceError(f"{name} in {self.path} can't be read at bytes {begin} to {end}: {error.strerror}")


class TensorSource:
    """Tensors of a folder by name. ``errors`` lists, a sentence each, what is wrong with the files themselves."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.entries: dict[str, Entry] = {}
        self.errors: list[str] = []
        self.index = read_index(directory)
        self.shards: dict[str, Shard] = {}
        for name in [SINGLE_FILE] if self.index is None else sorted(set(self.index.values())):
            self._add_file(name)
        if self.index is not None:
            self._check_index(self.index)
        named = {SINGLE_FILE} if self.index is None else set(self.index.values())
        by = f"the source is {SINGLE_FILE} alone" if self.index is None else f"{INDEX_FILE} does not name it"
        paths = sorted(directory.glob("*.safetensors"))
        self.errors += [f"{path} is there, but {by}" for path in paths if path.name not in named]
        for name in TOKENIZER_FILES:
            if os.path.lexists(directory / name) and not (directory / name).is_file():
                self.errors.append(f"{directory / name} is not a file that can be read")

    def read(self, tensor: str, buffer: Buffer | None = None, rows: slice = slice(None)) -> np.ndarray:
        """Rows of a tensor, in memory of their own or in a buffer that holds them until it is used again."""
        entry = self.entries[tensor]
        start, stop, _ = rows.indices(entry.shape[0])
        width = (entry.end - entry.begin) // max(entry.shape[0], 1)
        first, last = entry.begin + start * width, entry.begin + stop * width
        memory = (buffer or Buffer()).take(room(first, last))
        data = self.shards[entry.file].bytes_at(first, last, tensor, memory)
        return data.view(DTYPES[entry.dtype]).reshape(stop - start, *entry.shape[1:])

    def read_together(self, tensors: list[str], buffer: Buffer) -> list[np.ndarray]:
        """Tensors, all of them in a buffer that holds them until it is used again."""
        entries = [self.entries[tensor] for tensor in tensors]
        rooms = [room(entry.begin, entry.end) for entry in entries]
        memory, arrays = buffer.take(sum(rooms)), []
        for tensor, entry, size in zip(tensors, entries, rooms, strict=True):
            data = self.shards[entry.file].bytes_at(entry.begin, entry.end, tensor, memory[:size])
            arrays.append(data.view(DTYPES[entry.dtype]).reshape(entry.shape))
            memory = memory[size:]
        return arrays

    def read_small(self, tensor: str) -> np.ndarray:
        """A copy of a tensor of a few bytes, without reading what lies around it."""
        entry = self.entries[tensor]
        shard = self.shards[entry.file]
        try:
            with shard.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                data = os.pread(file.fileno(), entry.end - entry.begin, entry.begin)
        except OSError as error:
            raise shard.unreadable(tensor, entry.begin, entry.end, error) from error
        if len(data) < entry.end - entry.begin:
            raise SourceError(f"{tensor} in {shard.path}: the file has become shorter than its header needs")
        return np.frombuffer(data, DTYPES[entry.dtype]).reshape(entry.shape)

    def pieces(self, tensor: str) -> Iterator[np.ndarray]:
        """All bytes of a tensor, up to 64 MiB at a time, each gone when the next is asked for."""
        entry, buffer = self.entries[tensor], Buffer()
        for begin in range(entry.begin, entry.end, _PIECE_BYTES):
            end = min(begin + _PIECE_BYTES, entry.end)
            memory = buffer.take(_PIECE_BYTES + ALIGNMENT)
            yield self.shards[entry.file].bytes_at(begin, end, tensor, memory)

    def is_lost(self, tensor: str) -> bool:
        """Whether a tensor should be in a file that can't be read, so that `errors` already accounts for it."""
        file = SINGLE_FILE if self.index is None else self.index.get(tensor)
        return file is not None and file not in self.shards

    def _add_file(self, name: str) -> None:
        path = self.directory / name
        if not path.is_file():
            what = "is not a file that can be read" if os.path.lexists(path) else f"is missing; {INDEX_FILE} names it"
            self.errors.append(f"{path} {what}")
            return
        try:
            shard = Shard(path)
        except SourceError as error:
            self.errors.append(str(error))
            return
        self.shards[name] = shard
        for tensor, entry in shard.entries.items():
            if self.entries.setdefault(tensor, entry) is not entry:
                self.errors.append(f"{tensor} is in both {self.entries[tensor].file} and {name}")

    def _check_index(self, index: dict[str, str]) -> None:
        for tensor, entry in self.entries.items():
            if index.get(tensor) != entry.file:
                self.errors.append(f"{tensor} is in {entry.file}; {INDEX_FILE} says {index.get(tensor)}")
        for tensor, file in index.items():
            if file in self.shards and tensor not in self.entries:
                self.errors.append(f"{tensor} is not in {file}, where {INDEX_FILE} has it")


def source_files(source: TensorSource) -> dict[str, dict[str, Any]]:
    """What identifies every file of a source: its size, and SHA-256 of its header, of small files of all of it."""
    files = {
        name: {"bytes": shard.num_bytes, "header_sha256": shard.header_sha256} for name, shard in source.shards.items()
    }
    for name in (CONFIG_FILE, INDEX_FILE, *TOKENIZER_FILES):
        if (path := source.directory / name).is_file():
            files[name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    return files


def file_sha256(path: Path) -> str:
    """SHA-256 of a whole file. Raises SourceError, naming it, if it can't be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror}") from error
