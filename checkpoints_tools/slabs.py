"""Makes some rows of a stored array from the source's tensors: what one thread of the converter does at a time.

A slab is as many rows of an array's first axis as its chunks have, or all of an array whose rows lie scattered in its
tensor. Each tensor is read once, hashed and checked while it is there, and goes from one piece of memory into chunks::

    experts'  words, scales ──► blocks, packed where their chunks lie ──────────────┐
    whole     tensor, or its rows ──► seen with the array's axes ──► chunk by chunk ─┴──► files
"""

import itertools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from checkpoints_tools.blocks import BlockPacker
from checkpoints_tools.direct_io import Buffer
from checkpoints_tools.key_map import Piece
from checkpoints_tools.source import DTYPES, TensorSource
from ddtree_jax.checkpoint import StoredArray
from ddtree_jax.pallas.int4_moe import ExpertWeights

PUBLISHED = {
    "gate_up_EMKmw": ExpertWeights._fields[:2],
    "down_EMKmw": ExpertWeights._fields[2:],
}
"""Arrays of words and of scales from which blocks are made."""

_TILE_COLUMNS = 256
_LOOK_BYTES = 1 << 18  # what is hashed is then still in a core's cache when it is checked
_FLOATS = {"BF16": (np.uint16, 0x7F80), "F32": (np.uint32, 0x7F800000)}


class Slab(NamedTuple):
    """Rows ``start`` to ``stop`` of an array."""

    array: str
    start: int
    stop: int


class Chunk(NamedTuple):
    """Values of one chunk, contiguous, by its place among the array's chunks. They stand until the next is asked for."""

    place: tuple[int, ...]
    values: np.ndarray


class Digest(NamedTuple):
    """CRC-32 of so many bytes of a tensor."""

    num_bytes: int
    crc32: int


@dataclass
class Findings:
    """Digests, and sentences on what is wrong, both by tensor and first byte of what was looked at."""

    digests: dict[tuple[str, int], Digest] = field(default_factory=dict)
    errors: dict[tuple[str, int], str] = field(default_factory=dict)

    def add(self, other: "Findings") -> None:
        self.digests |= other.digests
        self.errors |= other.errors


class Memory:
    """What one thread works in, used for slab after slab: tensors as read, values of indexed pieces, one chunk."""

    def __init__(self) -> None:
        self.tensors, self.values, self.chunk = Buffer(), Buffer(), Buffer()
        self._packers: dict[tuple[int, int], BlockPacker] = {}

    def packer(self, columns: int, group: int) -> BlockPacker:
        if (columns, group) not in self._packers:
            self._packers[columns, group] = BlockPacker(columns, group)
        return self._packers[columns, group]


def slabs_of(
    array: str, stored: StoredArray, chunks: tuple[int, ...], pieces: dict[str, list[Piece]]
) -> Iterator[Slab]:
    is_scattered = array in pieces and any(piece.is_turned or piece.arrange for piece in pieces[array])
    rows = stored.shape[0] if is_scattered else chunks[0]
    for start in range(0, stored.shape[0], rows):
        yield Slab(array, start, start + rows)


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


def fill_slab(
    slab: Slab,
    stored: StoredArray,
    chunks: tuple[int, ...],
    pieces: dict[str, list[Piece]],
    source: TensorSource,
    memory: Memory,
) -> tuple[Findings, Iterator[Chunk]]:
    """What was found in the slab's tensors, all of which have been looked at, and its chunks, made as they are asked for."""
    findings = Findings()
    if slab.array in PUBLISHED:
        return findings, _fill_blocks(slab, stored, chunks, pieces, source, memory, findings)
    if pieces[slab.array][0].index:
        values = _fill_indexed(slab, stored, pieces[slab.array], source, memory, findings)
    else:
        values = _see_whole(slab, stored, pieces[slab.array][0], source, memory, findings)
    return findings, _cut(slab, values, chunks, memory.chunk)


def examine(tensor: str, source: TensorSource) -> Findings:
    """Hash and check of one tensor, in bounded memory."""
    findings, done = Findings(), 0
    for data in source.pieces(tensor):
        _look_at(tensor, data, source, findings, done)
        done += data.nbytes
    return findings


def _see_whole(
    slab: Slab, stored: StoredArray, piece: Piece, source: TensorSource, memory: Memory, findings: Findings
) -> np.ndarray:
    """Rows of the array as a view of the tensor that holds them."""
    is_plain = not piece.is_turned and piece.arrange is None
    rows = slice(slab.start, slab.stop) if is_plain else slice(None)
    values = source.read(piece.tensor, memory.tensors, rows)
    _look_at(piece.tensor, values, source, findings, slab.start * values[:1].nbytes if is_plain else 0)
    if piece.is_turned:
        return values.T.reshape(stored.shape)
    return values if piece.arrange is None else piece.arrange(values)


def _fill_indexed(
    slab: Slab, stored: StoredArray, pieces: list[Piece], source: TensorSource, memory: Memory, findings: Findings
) -> np.ndarray:
    values = _shape_values(memory.values, (slab.stop - slab.start, *stored.shape[1:]), np.dtype(stored.dtype))
    for piece in pieces:
        if slab.start <= piece.index[0] < slab.stop:
            tensor = source.read(piece.tensor, memory.tensors)
            _look_at(piece.tensor, tensor, source, findings, 0)
            values[(piece.index[0] - slab.start, *piece.index[1:])] = tensor
    return values


def _cut(slab: Slab, values: np.ndarray, chunks: tuple[int, ...], buffer: Buffer) -> Iterator[Chunk]:
    bits = values.view(f"u{values.itemsize}")  # numpy copies integers faster than bfloat16
    first = slab.start // chunks[0]
    for place in np.ndindex(*(size // chunk for size, chunk in zip(values.shape, chunks, strict=True))):
        where = tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in zip(place, chunks, strict=True))
        chunk = _shape_values(buffer, chunks, bits.dtype)
        _copy_in_tiles(chunk, bits[where])
        yield Chunk((first + place[0], *place[1:]), chunk)


def _copy_in_tiles(out: np.ndarray, values: np.ndarray) -> None:
    """Copies values that may lie along another axis than the last, so many columns at a time that they stay in the cache."""
    for column in range(0, out.shape[-1], _TILE_COLUMNS):
        out[..., column : column + _TILE_COLUMNS] = values[..., column : column + _TILE_COLUMNS]


def _shape_values(buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return buffer.take(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def _fill_blocks(
    slab: Slab,
    stored: StoredArray,
    chunks: tuple[int, ...],
    pieces: dict[str, list[Piece]],
    source: TensorSource,
    memory: Memory,
    findings: Findings,
) -> Iterator[Chunk]:
    tables = [{piece.index: piece.tensor for piece in pieces[name]} for name in PUBLISHED[slab.array]]
    grid = [size // chunk for size, chunk in zip(stored.shape[1:3], chunks[1:3], strict=True)]
    values = _shape_values(memory.values, (*grid, *chunks), np.dtype(np.uint32))
    for expert in range(slab.start, slab.stop):
        indices = [(expert, 0), (expert, 1)] if (expert, 0) in tables[0] else [(expert,)]
        tensors = [table[index] for index in indices for table in tables]
        arrays = source.read_together(tensors, memory.tensors)
        for tensor, array in zip(tensors, arrays, strict=True):
            _look_at(tensor, array, source, findings, 0)
        words, scales = [a.view(np.uint32) for a in arrays[::2]], [a.view(np.uint16) for a in arrays[1::2]]
        packer = memory.packer(words[0].shape[1] * 8, chunks[3])
        pairs, out = list(zip(words, scales, strict=True)), values[:, :, expert - slab.start]
        if len(pairs) == 2:
            packer.pack_gate_up(*pairs, out)
        else:
            packer.pack_down(*pairs[0], out)
    first = slab.start // chunks[0]
    return (Chunk((first, *place, 0, 0), values[place]) for place in np.ndindex(*grid))


def _look_at(tensor: str, values: np.ndarray, source: TensorSource, findings: Findings, offset: int) -> None:
    """Hashes and checks values of a tensor that begin at a byte of it. Of wrong ones the first is told."""
    data, entry, digest, fault = values.reshape(-1).view(np.uint8), source.entries[tensor], 0, None
    for begin in range(0, len(data), _LOOK_BYTES):
        piece = data[begin : begin + _LOOK_BYTES]
        digest = zlib.crc32(piece, digest)
        fault = fault or _find_non_finite(tensor, piece, entry.dtype, entry.shape, offset + begin)
    findings.digests[tensor, offset] = Digest(len(data), digest)
    if fault:
        findings.errors[tensor, offset] = fault


def _find_non_finite(tensor: str, data: np.ndarray, dtype: str, shape: tuple[int, ...], offset: int) -> str | None:
    """A sentence on the first value that is no finite number; ``data`` are bytes of the tensor from ``offset`` on."""
    if dtype not in _FLOATS:
        return None
    bits, exponent = _FLOATS[dtype]
    exponents = data.view(bits) & bits(exponent)
    if exponents.max(initial=0) < exponent:
        return None
    first = int((exponents == exponent).argmax())
    place = np.unravel_index(offset // np.dtype(bits).itemsize + first, shape)
    value = data.view(bits)[first : first + 1].view(DTYPES[dtype]).astype(np.float32)[0]
    where = ", ".join(str(int(i)) for i in place)
    return f"{tensor} is {value} at [{where}]; finite numbers are needed"
