"""Makes some rows of a stored array from the source's tensors: what one thread of the converter does at a time.

A slab is as many rows of an array's first axis as its chunks have. Experts' tensors are looked at once: hashed, checked
and packed while they are in the cache. Other tensors may lie in several slabs and are hashed and checked by themselves.
"""

import itertools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from checkpoints_tools.blocks import BlockPacker
from checkpoints_tools.key_map import Piece
from checkpoints_tools.source import DTYPES, TensorSource
from ddtree_jax.checkpoint import StoredArray
from ddtree_jax.pallas.int4_moe import ExpertWeights

PUBLISHED = {
    "gate_up_EMKmw": ExpertWeights._fields[:2],
    "down_EMKmw": ExpertWeights._fields[2:],
}
"""Arrays of words and of scales from which blocks are made."""

_TURNED_ROWS = 256
_FLOATS = {"BF16": (np.uint16, 0x7F80), "F32": (np.uint32, 0x7F800000)}


class Slab(NamedTuple):
    """Rows ``start`` to ``stop`` of an array."""

    array: str
    start: int
    stop: int


@dataclass
class Findings:
    """CRC-32 of tensors that were looked at, and what is wrong with their values, a sentence each."""

    digests: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def slabs_of(array: str, stored: StoredArray, chunks: tuple[int, ...]) -> Iterator[Slab]:
    for start in range(0, stored.shape[0], chunks[0]):
        yield Slab(array, start, start + chunks[0])


def coverage_faults(array: str, stored: StoredArray, pieces: dict[str, list[Piece]]) -> Iterator[str]:
    """What keeps an array from being filled exactly once, a sentence each: a fault of the key map, not of a source."""
    for name in PUBLISHED.get(array, (array,)):
        indices = sorted(piece.index for piece in pieces.get(name, []))
        if array in PUBLISHED:
            sizes = (stored.shape[0], 2) if name.startswith("gate_up") else stored.shape[:1]
        else:
            sizes = stored.shape[: len(indices[0])] if indices else ()
            yield from (f"{piece.tensor} does not fit {stored}" for piece in pieces[name] if not _fits(stored, piece))
        if indices != list(itertools.product(*map(range, sizes))):
            yield f"{name} is not filled once"


def _fits(stored: StoredArray, piece: Piece) -> bool:
    shape = stored.shape[len(piece.index) :]
    if DTYPES[piece.dtype] != np.dtype(stored.dtype):
        return False
    if piece.is_turned:
        inputs, outputs = piece.shape[1], piece.shape[0]
        cuts = list(itertools.accumulate(shape, int.__mul__))
        return inputs in cuts and math.prod(shape) == inputs * outputs
    if piece.arrange is not None:
        return piece.arrange(np.broadcast_to(np.int8(0), piece.shape)).shape == shape
    return piece.shape == shape


def fill_slab(slab: Slab, stored: StoredArray, pieces: dict[str, list[Piece]], source: TensorSource) -> tuple:
    """The slab's values [stop - start, ...] and what was found in experts' tensors on the way (`Findings`)."""
    findings = Findings()
    values = np.empty((slab.stop - slab.start, *stored.shape[1:]), stored.dtype)
    if slab.array in PUBLISHED:
        _fill_blocks(slab, values, pieces, source, findings)
        return values, findings
    for piece in pieces[slab.array]:
        if not piece.index:
            _fill_whole(slab, stored, values, piece, source)
        elif slab.start <= piece.index[0] < slab.stop:
            place = (piece.index[0] - slab.start, *piece.index[1:])
            values[place] = _look_at(piece.tensor, source, findings)
            source.release(piece.tensor)
    return values, findings


def examine(tensor: str, source: TensorSource) -> Findings:
    """Hash and check of one tensor, in bounded memory."""
    entry, findings, digest, done = source.entries[tensor], Findings(), 0, 0
    for data in source.pieces(tensor):
        digest = zlib.crc32(data, digest)
        if not findings.errors:
            findings.errors += _find_non_finite(tensor, data, entry.dtype, entry.shape, done)
        done += data.nbytes
    findings.digests[tensor] = digest
    return findings


def _fill_whole(slab: Slab, stored: StoredArray, values: np.ndarray, piece: Piece, source: TensorSource) -> None:
    if piece.is_turned:
        width = piece.shape[1] // stored.shape[0]  # inputs a row of the array has
        weight = source.read(piece.tensor)[:, slab.start * width : slab.stop * width]
        turned = values.reshape(weight.shape[1], weight.shape[0])
        for row in range(0, len(weight), _TURNED_ROWS):  # so many at a time stay in the cache
            turned[:, row : row + _TURNED_ROWS] = weight[row : row + _TURNED_ROWS].T
        source.release(piece.tensor)
    elif piece.arrange is None:
        values[...] = source.read(piece.tensor, slice(slab.start, slab.stop))
    else:
        values[...] = piece.arrange(source.read(piece.tensor))[slab.start : slab.stop]
        source.release(piece.tensor)


def _fill_blocks(
    slab: Slab, values: np.ndarray, pieces: dict[str, list[Piece]], source: TensorSource, findings: Findings
) -> None:
    tensors = [{piece.index: piece.tensor for piece in pieces[name]} for name in PUBLISHED[slab.array]]
    packer = None

    def look_at(*index: int) -> tuple[np.ndarray, np.ndarray]:
        words, scale = (_look_at(table[index], source, findings) for table in tensors)
        return words.view(np.uint32), scale.view(np.uint16)

    for expert in range(slab.start, slab.stop):
        out_MKmw = values[expert - slab.start].view(np.uint32)
        halves = [look_at(expert, half) for half in range(2)] if (expert, 0) in tensors[0] else [look_at(expert)]
        packer = packer or BlockPacker(halves[0][0].shape[1] * 8)
        if len(halves) == 2:
            packer.pack_gate_up(*halves, out_MKmw)
        else:
            packer.pack_down(*halves[0], out_MKmw)
        for table in tensors:
            for index in ((expert, 0), (expert, 1), (expert,)):
                if index in table:
                    source.release(table[index])


def _look_at(tensor: str, source: TensorSource, findings: Findings) -> np.ndarray:
    entry, values = source.entries[tensor], source.read(tensor)
    data = values.reshape(-1).view(np.uint8)
    findings.digests[tensor] = zlib.crc32(data)
    findings.errors += _find_non_finite(tensor, data, entry.dtype, entry.shape, 0)
    return values


def _find_non_finite(tensor: str, data: np.ndarray, dtype: str, shape: tuple[int, ...], offset: int) -> list[str]:
    """A sentence on the first value that is no finite number; ``data`` are bytes of the tensor from ``offset`` on."""
    if dtype not in _FLOATS:
        return []
    bits, exponent = _FLOATS[dtype]
    is_bad = (data.view(bits) & bits(exponent)) == bits(exponent)
    if not is_bad.any():
        return []
    first = int(is_bad.argmax())
    place = np.unravel_index(offset // np.dtype(bits).itemsize + first, shape)
    value = data.view(bits)[first : first + 1].view(DTYPES[dtype]).astype(np.float32)[0]
    where = ", ".join(str(int(i)) for i in place)
    return [f"{tensor} is {value} at [{where}]; finite numbers are needed"]
