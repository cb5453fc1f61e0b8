"""Writes one Orbax item, array by array and chunk by chunk, so that no array is ever whole in memory.

::

    layer_3.partial/ ──► layer_3/           by one rename, behind everything in it
      _METADATA                             Orbax's list of arrays: plain Zarr 2, no OCDBT
      gate_up_EMKmw/.zarray                 shape, chunks, dtype; no compression, so that a chunk is a file of its bytes
      gate_up_EMKmw/0.3.0.0.0               chunk 3 of the second axis: one device's shard of 12 experts

Orbax's own writer takes arrays that are whole. What is written here is what it would write, and Orbax reads it.
"""

import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_tools.direct_io import write_file
from checkpoints_tools.files import naming
from ddtree_jax.checkpoint import StoredArray
from ddtree_jax.sharding import RULES, ArrayInfo

SHARDS = 8
"""Chunks divide an axis that a mesh may split into so many, as far as its size allows."""

DESCRIPTIONS = ("_METADATA", ".zarray")
"""Names of the files that describe an item and its arrays."""

MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1 << 14, 1 << 25


def chunk_shape(info: ArrayInfo, stored: StoredArray, sizes: dict[str, int]) -> tuple[int, ...]:
    """Shape of an array's chunks: no chunk crosses two shards of a mesh of these or smaller sizes, nor of 8 devices.

    Chunks divide the array evenly. They are cut further along the first axis until they have at most 32 MiB. A cut that
    would leave less than 16 KiB is not made: a file of its own would cost more than reading all of it.
    """
    shape, width = list(stored.shape), np.dtype(stored.dtype).itemsize
    for place, axis in enumerate(info.axes):
        cuts = math.gcd(shape[place], math.lcm(SHARDS, sizes[RULES[axis]])) if axis in RULES else 1
        room = max(math.prod(shape) * width // MIN_CHUNK_BYTES, 1)
        shape[place] //= next(cut for cut in range(min(cuts, room), 0, -1) if cuts % cut == 0)
    while math.prod(shape) * width > MAX_CHUNK_BYTES and shape[0] > 1:
        shape[0] //= next(factor for factor in range(2, shape[0] + 1) if shape[0] % factor == 0)
    return tuple(shape)


class ItemWriter:
    """Writes an item into a folder beside its place. Methods may be called from several threads."""

    def __init__(self, directory: Path, name: str, arrays: dict[str, tuple[StoredArray, tuple[int, ...]]]):
        """``arrays`` has each array's shape and dtype, and the shape of its chunks.

        ``described`` has size and CRC-32 of the files that describe the item and its arrays.
        """
        self.path = directory / name
        self._partial = self._partial_path(directory, name)
        self._arrays = list(arrays)
        self.described = {}
        self._partial.mkdir()
        try:
            self._describe(arrays)
        except OSError:
            self.abandon()
            raise

    def _describe(self, arrays: dict[str, tuple[StoredArray, tuple[int, ...]]]) -> None:
        for array in arrays:
            (self._partial / array).mkdir()
        texts = {f"{array}/.zarray": _array_metadata(*arrays[array]) for array in arrays}
        texts["_METADATA"] = _item_metadata(arrays)
        for name, text in texts.items():
            write_file(self._partial / name, text.encode())
            self.described[name] = (len(text.encode()), zlib.crc32(text.encode()))

    @staticmethod
    def _partial_path(directory: Path, name: str) -> Path:
        return directory / f"{name}.partial"

    @classmethod
    def remove_leftovers(cls, directory: Path, name: str) -> None:
        """Removes what a writer that died has left of an item."""
        remove(cls._partial_path(directory, name))

    def write_chunk(self, array: str, place: tuple[int, ...], values: np.ndarray) -> dict[str, tuple[int, int]]:
        """Writes a chunk of an array, by its place among all chunks; size and CRC-32 by file name."""
        data, name = values.reshape(-1).view(np.uint8), f"{array}/{'.'.join(map(str, place))}"
        write_file(self._partial / name, data)
        return {name: (data.nbytes, zlib.crc32(data))}

    def commit(self) -> None:
        """Gives the item its name, once everything in it is on the disk."""
        for path in filter(Path.is_file, self._partial.rglob("*")):
            finish_file(path)
        for array in self._arrays:
            sync_folder(self._partial / array)
        sync_folder(self._partial)
        remove(self.path)
        self._partial.rename(self.path)
        sync_folder(self.path.parent)

    def abandon(self) -> None:
        remove(self._partial)


def _item_metadata(arrays: Iterable[str]) -> str:
    def entry(name: str) -> dict[str, Any]:
        return {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }

    tree = {str((name,)): entry(name) for name in arrays}
    formats = {"use_ocdbt": False, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    return json.dumps({"tree_metadata": tree, **formats, "custom_metadata": None})


def _array_metadata(stored: StoredArray, chunks: tuple[int, ...]) -> str:
    dtype = np.dtype(stored.dtype)
    return json.dumps(
        {
            "zarr_format": 2,
            "shape": stored.shape,
            "chunks": chunks,
            "dtype": stored.dtype if dtype.kind == "V" else dtype.str,
            "order": "C",
            "compressor": None,
            "filters": None,
            "fill_value": None,
            "dimension_separator": ".",
        }
    )


def finish_file(path: Path) -> None:
    """Waits until a file is on the disk; it then needs no place in memory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file so that it holds the old or the new content, whatever happens."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        write_file(partial, data)
        finish_file(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
