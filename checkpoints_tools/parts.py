"""Converts one part after the other by a pool of threads, slab by slab.

While a part waits for its last slabs and for the disk, threads go on with the next::

    threads   part 0 ────────────────► part 1 ────────────────► part 2 ───
    run       begin 0, begin 1, finish 0 ──► rename, manifest, begin 2, finish 1 ──►
"""

import hashlib
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

from checkpoints_tools.checksums import join_crc32
from checkpoints_tools.key_map import KeyMap
from checkpoints_tools.manifest import Manifest, PartRecord
from checkpoints_tools.orbax_item import ItemWriter, chunk_shape
from checkpoints_tools.progress import Reporter, State
from checkpoints_tools.slabs import Digest, Findings, Memory, Slab, examine, fill_slab, slabs_of
from checkpoints_tools.source import SourceError, TensorSource, file_sha256
from ddtree_jax.checkpoint import StoredArray, stored_arrays
from ddtree_jax.sharding import Parameters


class _Done(NamedTuple):
    """What one task of the pool did."""

    files: dict[str, tuple[int, int]]
    findings: Findings
    num_bytes: int


class _Begun(NamedTuple):
    """A part whose slabs are being written; ``writer`` is None where errors kept it from that."""

    part: str
    writer: ItemWriter | None
    futures: list[Future[_Done]]
    errors: list[str]

    def abandon(self) -> None:
        wait(self.futures)
        if self.writer:
            self.writer.abandon()


class Converter:
    """Writes the parts that a manifest does not have yet, and enters each into it."""

    def __init__(
        self,
        out: Path,
        stored: Parameters,
        sizes: dict[str, int],
        key_map: KeyMap,
        source: TensorSource,
        checksums: dict[str, str],
        manifest: Manifest,
    ):
        self._out, self._key_map, self._source, self._manifest = out, key_map, source, manifest
        self._checksums = checksums
        self._arrays = stored_arrays(stored)
        self._chunks = {
            part: {name: chunk_shape(infos[name], array, sizes) for name, array in self._arrays[part].items()}
            for part, infos in stored.items()
        }
        self._bad_files: set[str] = set()
        self._of_thread = threading.local()

    def remove_leftovers(self) -> None:
        """Removes what a run that died has left of parts in hand."""
        for part in self._arrays:
            ItemWriter.remove_leftovers(self._out, part)

    def num_bytes_left(self) -> int:
        """Bytes of the parts that are still to be written."""
        return sum(self._num_bytes(part) for part in self._arrays if part not in self._manifest.parts)

    def check_finished(self, workers: int) -> list[str]:
        """Looks at published checksums that were not known when parts were finished, a file at a time.

        Returns what is wrong, a sentence each; parts that came from damaged files are not finished any more.
        """
        before, errors = dict(self._manifest.checked), []
        with ThreadPoolExecutor(workers) as pool:
            found = {part: self._check_files(part, pool) for part in self._manifest.parts}
        for part in filter(found.get, found):
            errors += found[part]
            del self._manifest.parts[part]
        if errors or self._manifest.checked != before:
            self._manifest.write(self._out)
        return errors

    def run(self, workers: int, report: Reporter) -> list[str]:
        """Converts all that is left. Returns what is wrong with the source, a sentence each; the rest is finished."""
        errors: list[str] = []
        parts = [part for part in self._arrays if part not in self._manifest.parts]
        self._state = State(len(self._manifest.parts), len(self._arrays), 0, self.num_bytes_left(), "")
        begun: deque[_Begun] = deque()
        stop = threading.Event()
        with ThreadPoolExecutor(workers) as pool:
            try:
                for part in parts:
                    begun.append(self._begin(part, pool, stop))
                    if len(begun) > 1:
                        errors += self._finish(begun[0], report)
                        begun.popleft()
                if begun:
                    errors += self._finish(begun[0], report)
            except BaseException:
                stop.set()
                for part in begun:
                    part.abandon()
                raise
        return errors

    def _num_bytes(self, part: str) -> int:
        return sum(num_bytes(array) for array in self._arrays[part].values())

    def _check_files(self, part: str, pool: ThreadPoolExecutor) -> list[str]:
        """Compares files that a part needs with their published checksums, where there are any, once a file."""
        files = sorted({self._source.entries[name].file for name in self._key_map.tensors_of(part)})
        unknown = [f for f in files if f in self._checksums and f not in self._bad_files]
        unknown = [file for file in unknown if self._manifest.checked.get(file) != self._checksums[file]]
        errors = []
        paths = [self._source.directory / file for file in unknown]
        for file, found in zip(unknown, pool.map(_hash_or_error, paths), strict=True):
            if found == self._checksums[file]:
                self._manifest.checked[file] = found
                continue
            self._bad_files.add(file)
            path = self._source.directory / file
            errors.append(f"{path} has SHA-256 {found}; {self._checksums[file]} is published: download it again")
        if self._bad_files & set(files) and not errors:
            errors.append(f"{part} needs {', '.join(sorted(self._bad_files & set(files)))}, which is damaged")
        return errors

    def _begin(self, part: str, pool: ThreadPoolExecutor, stop: threading.Event) -> _Begun:
        errors = self._check_files(part, pool)
        if errors:
            return _Begun(part, None, [], errors)
        arrays = {name: (array, self._chunks[part][name]) for name, array in self._arrays[part].items()}
        writer = ItemWriter(self._out, part, arrays)
        futures = [pool.submit(self._write_slab, slab, part, writer, stop) for slab in self._slabs(part)]
        return _Begun(part, writer, futures, [])

    def _finish(self, begun: _Begun, report: Reporter) -> list[str]:
        part, writer = begun.part, begun.writer
        self._state = self._state._replace(part=part)
        start, files, findings = self._state.num_bytes, {}, Findings()
        for future in as_completed(begun.futures):
            done = future.result()
            findings.add(done.findings)
            files |= done.files
            self._state = self._state._replace(num_bytes=self._state.num_bytes + done.num_bytes)
            report(self._state)
        errors = begun.errors + _first_errors(findings)
        if writer is None or errors:
            begun.abandon()
            self._state = self._state._replace(num_bytes=start + self._num_bytes(part))
            return errors
        writer.commit()
        record = PartRecord(_combine(findings.digests, self._source), dict(sorted((writer.described | files).items())))
        parts = self._manifest.parts | {part: record}
        self._manifest.parts = {name: parts[name] for name in self._arrays if name in parts}
        self._manifest.write(self._out)
        self._state = self._state._replace(parts=self._state.parts + 1)
        report(self._state)
        return []

    def _slabs(self, part: str) -> Iterator[Slab]:
        for name, array in self._arrays[part].items():
            yield from slabs_of(name, array, self._chunks[part][name], self._key_map.pieces[part])

    def _write_slab(self, slab: Slab, part: str, writer: ItemWriter, stop: threading.Event) -> _Done:
        if stop.is_set():
            return _Done({}, Findings(), 0)
        if not hasattr(self._of_thread, "memory"):
            self._of_thread.memory = Memory()
        array, chunk_shape = self._arrays[part][slab.array], self._chunks[part][slab.array]
        pieces, files, num_bytes = self._key_map.pieces[part], {}, 0
        try:
            findings, chunks = fill_slab(slab, array, chunk_shape, pieces, self._source, self._of_thread.memory)
        except SourceError as error:
            return _Done({}, Findings(errors={(str(error), 0): str(error)}), 0)
        if not findings.errors:
            for chunk in chunks:
                files |= writer.write_chunk(slab.array, *chunk)
                num_bytes += chunk.values.nbytes
        return _Done(files, findings, num_bytes)


def hash_part(part: str, key_map: KeyMap, source: TensorSource) -> str:
    """Checksum of all tensors that go into a part, as its record has it."""
    findings = Findings()
    for tensor in sorted(key_map.tensors_of(part)):
        findings.add(examine(tensor, source))
    return _combine(findings.digests, source)


def _first_errors(findings: Findings) -> list[str]:
    """A sentence a tensor: on the first place where it is wrong."""
    first = {tensor: text for (tensor, _), text in sorted(findings.errors.items(), reverse=True)}
    return sorted(first.values())


def _combine(digests: dict[tuple[str, int], Digest], source: TensorSource) -> str:
    whole: dict[str, int] = {}
    for (tensor, _), digest in sorted(digests.items()):
        whole[tensor] = join_crc32(whole.get(tensor, 0), digest.crc32, digest.num_bytes)
    lines = (
        f"{name} {source.entries[name].dtype} {source.entries[name].shape} {whole[name]:08x}\n"
        for name in sorted(whole)
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def num_bytes(array: StoredArray) -> int:
    return int(np.prod(array.shape)) * np.dtype(array.dtype).itemsize


def _hash_or_error(path: Path) -> str:
    try:
        return file_sha256(path)
    except SourceError as error:
        return str(error)
