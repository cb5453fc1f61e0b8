"""The two sides that `verify` compares, read by other code than the converter's: published tensors, and chunk files."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints_tools import published
from checkpoints_tools.files import read_json
from checkpoints_tools.source import INDEX_FILE, SINGLE_FILE, read_index
from ddtree_jax.checkpoint import StoredArray

_DTYPES = {"bfloat16": "bfloat16", "<i4": "int32", "<f4": "float32"}
_ZARRAY = {
    "zarr_format": 2,
    "shape": [int],
    "chunks": [int],
    "dtype": str,
    "order": "C",
    "compressor": None,
    "filters": None,
    "fill_value": None,
    "dimension_separator": ".",
}


class SourceSide:
    """Single values of published tensors, by the safetensors library.

    ``errors`` lists what is wrong with the files, a sentence each; ``names`` are the tensors that can be read, ``lost`` those
    that should be in files that can't.
    """

    def __init__(self, directory: Path):
        self.errors: list[str] = []
        self.lost: set[str] = set()
        self._file_of: dict[str, safe_open] = {}
        self._directory = directory
        paths = {path.name: path for path in sorted(directory.glob("*.safetensors"))}
        try:
            index = read_index(directory)
            named = {SINGLE_FILE} if index is None else set(index.values())
        except ValueError as error:
            self.errors.append(str(error))
            index, named = None, set(paths)
        self.errors += [f"{paths[name]} belongs to no index or single file" for name in paths if name not in named]
        self.errors += [f"{directory / name} is missing" for name in sorted(named - paths.keys())]
        places = {tensor: name for name in paths if name in named for tensor in self._open(paths[name])}
        if index is not None:
            self._check_index(index, places)
        self.names = set(self._file_of)
        self.num_tensors = len(self.names)
        self.prefix = published.PREFIX if any(name.startswith(published.PREFIX) for name in self.names) else ""

    def _open(self, path: Path) -> list[str]:
        try:
            file = safe_open(path, framework="numpy")
            names = list(file.keys())
        except (SafetensorError, OSError, ValueError) as error:
            self.errors.append(f"{path} can't be read: {error}")
            return []
        for name in names:
            if self._file_of.setdefault(name, file) is not file:
                self.errors.append(f"{name} is in {path} and in another file")
        return names

    def _check_index(self, index: dict[str, str], places: dict[str, str]) -> None:
        readable = set(places.values())
        self.lost = {name for name, file in index.items() if file not in readable}
        for name in sorted((index.keys() | places) - self.lost):
            if name not in places:
                self.errors.append(f"{name} is not in {index[name]}, where {INDEX_FILE} has it")
            elif index.get(name) != places[name]:
                self.errors.append(f"{name} is in {places[name]}; {INDEX_FILE} says {index.get(name)}")

    def check_tensors(self, needed: dict[str, published.Tensor]) -> Iterator[str]:
        """What is wrong with names, shapes, dtypes and stated shapes, a sentence each. A wrong tensor is no longer read."""
        needed = {self.prefix + name: tensor for name, tensor in needed.items()}
        yield from (f"{name} is not in the source" for name in sorted(needed.keys() - self.names - self.lost))
        for name in sorted(self.names - needed.keys()):
            if not published.IGNORED.fullmatch(name):
                yield f"{name} in the source is neither part of the model nor left out on purpose"
        for name in sorted(needed.keys() & self.names):
            if fault := self._tensor_fault(name, needed[name]):
                self.names.remove(name)
                yield fault

    def _tensor_fault(self, name: str, needed: published.Tensor) -> str | None:
        view = self._file_of[name].get_slice(name)
        shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if shape != needed.shape or dtype not in needed.dtypes:
            found = StoredArray(shape, dtype)
            return f"{name} in the source is {found}; {StoredArray(needed.shape, ' or '.join(needed.dtypes))} is needed"
        if needed.values and (values := tuple(self._file_of[name].get_tensor(name).tolist())) != needed.values:
            return f"{name} in the source says {list(values)}; {list(needed.values)} is needed"
        return None

    def has(self, tensor: str) -> bool:
        return self.prefix + tensor in self.names

    def value(self, tensor: str, index: tuple[int, ...]) -> np.ndarray:
        name = self.prefix + tensor
        row = self._file_of[name].get_slice(name)[index[0] : index[0] + 1]
        return row[(0, *index[1:])]


class PartSide:
    """Single values of a part's arrays, from the chunk files."""

    def __init__(self, directory: Path, arrays: dict[str, StoredArray]):
        self._directory, self.arrays = directory, arrays
        self._chunks: dict[str, tuple[int, ...]] = {}

    def files(self) -> Iterator[str]:
        """Names of all files of a part whose arrays are as they should be."""
        yield "_METADATA"
        for name, array in self.arrays.items():
            yield f"{name}/.zarray"
            counts = (size // chunk for size, chunk in zip(array.shape, self._chunks[name], strict=True))
            yield from (f"{name}/{'.'.join(map(str, place))}" for place in np.ndindex(*counts))

    def check(self) -> Iterator[str]:
        """What is wrong with shapes, dtypes and files, a sentence each."""
        if not self._directory.is_dir():
            yield f"{self._directory} is missing"
            return
        for name in self.arrays:
            try:
                yield from self._check_array(name)
            except ValueError as error:
                yield str(error)
        found = {path.name for path in self._directory.iterdir() if path.is_dir()}
        yield from (f"{self._directory / name} is no array of the model" for name in sorted(found - self.arrays.keys()))
        path = self._directory / "_METADATA"
        try:
            listed = read_json(path).get("tree_metadata")
        except ValueError as error:
            yield str(error)
            return
        if not isinstance(listed, dict) or listed.keys() != {str((name,)) for name in self.arrays}:
            yield f"{path} does not list the arrays of the model"

    def _check_array(self, name: str) -> Iterator[str]:
        array, path = self.arrays[name], self._directory / name / ".zarray"
        values = read_json(path, _ZARRAY)
        shape, chunks = tuple(values["shape"]), tuple(values["chunks"])
        dtype = _DTYPES.get(values["dtype"], values["dtype"])
        if (shape, dtype) != (array.shape, array.dtype):
            yield f"{path} says {StoredArray(shape, dtype)}; {array} is needed"
        elif len(chunks) != len(shape) or any(c < 1 or size % c for size, c in zip(shape, chunks, strict=True)):
            yield f"{path} has chunks {list(chunks)}; divisors of {list(shape)} are needed"
        else:
            self._chunks[name] = chunks
            yield from self._check_files(name)

    def _check_files(self, name: str) -> Iterator[str]:
        array, chunks = self.arrays[name], self._chunks[name]
        needed = int(np.prod(chunks)) * np.dtype(array.dtype).itemsize
        for place in np.ndindex(*(size // chunk for size, chunk in zip(array.shape, chunks, strict=True))):
            path = self._directory / name / ".".join(map(str, place))
            if not path.is_file() or path.stat().st_size != needed:
                yield f"{path} is missing or not of {needed} bytes"

    def values(self, name: str, index: tuple[int, ...], count: int = 1) -> np.ndarray:
        """Values from an index on, along the last axis, which must not end before."""
        dtype, chunks = np.dtype(self.arrays[name].dtype), self._chunks[name]
        place, inner = zip(*map(divmod, index, chunks), strict=True)
        offset = int(np.ravel_multi_index(inner, chunks)) * dtype.itemsize
        with (self._directory / name / ".".join(map(str, place))).open("rb") as file:
            file.seek(offset)
            return np.frombuffer(file.read(count * dtype.itemsize), dtype)
