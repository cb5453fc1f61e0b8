"""Converts one part after the other, each by a pool of threads, slab by slab."""

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

from checkpoints_tools.key_map import KeyMap
from checkpoints_tools.manifest import Manifest, PartRecord
from checkpoints_tools.orbax_item import ItemWriter, chunk_shape
from checkpoints_tools.progress import Reporter, State
from checkpoints_tools.slabs import Findings, Slab, examine, fill_slab, slabs_of
from checkpoints_tools.source import SourceError, TensorSource, file_sha256
from ddtree_jax.checkpoint import StoredArray, stored_arrays
from ddtree_jax.sharding import Parameters


class _Done(NamedTuple):
    """What one task of the pool did."""

    files: dict[str, tuple[int, int]]
    findings: Findings
    num_bytes: int


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
        with ThreadPoolExecutor(workers) as pool:
            for part in parts:
                found = self._check_files(part, pool) or self._convert(part, pool, report)
                errors += found
                if not found:
                    self._state = self._state._replace(parts=self._state.parts + 1)
                    report(self._state)
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

    def _convert(self, part: str, pool: ThreadPoolExecutor, report: Reporter) -> list[str]:
        self._state = self._state._replace(part=part)
        arrays = {name: (array, self._chunks[part][name]) for name, array in self._arrays[part].items()}
        writer = ItemWriter(self._out, part, arrays)
        stop = threading.Event()
        futures = [pool.submit(task, *args, stop) for task, *args in self._tasks(part, writer)]
        record, errors, start = PartRecord("", dict(writer.described)), [], self._state.num_bytes
        digests: dict[str, int] = {}
        try:
            for future in as_completed(futures):
                done = future.result()
                errors += done.findings.errors
                digests |= done.findings.digests
                record.files |= done.files
                self._state = self._state._replace(num_bytes=self._state.num_bytes + done.num_bytes)
                report(self._state)
        except BaseException:
            stop.set()
            wait(futures)
            writer.abandon()
            raise
        if errors:
            writer.abandon()
            self._state = self._state._replace(num_bytes=start + self._num_bytes(part))
            return sorted(set(errors))
        record.source_checksum = _combine(digests, self._source)
        record.files = dict(sorted(record.files.items()))
        writer.commit(pool)
        parts = self._manifest.parts | {part: record}
        self._manifest.parts = {name: parts[name] for name in self._arrays if name in parts}
        self._manifest.write(self._out)
        return []

    def _tasks(self, part: str, writer: ItemWriter) -> Iterator[tuple]:
        pieces = self._key_map.pieces[part]
        whole = {piece.tensor for table in pieces.values() for piece in table if not piece.index}
        for tensor in sorted(whole):
            yield self._examine, tensor
        for name, array in self._arrays[part].items():
            for slab in slabs_of(name, array, self._chunks[part][name]):
                yield self._write_slab, slab, array, part, writer

    def _examine(self, tensor: str, stop: threading.Event) -> _Done:
        if stop.is_set():
            return _Done({}, Findings(), 0)
        try:
            return _Done({}, examine(tensor, self._source), 0)
        except SourceError as error:
            return _Done({}, Findings(errors=[str(error)]), 0)

    def _write_slab(
        self, slab: Slab, array: StoredArray, part: str, writer: ItemWriter, stop: threading.Event
    ) -> _Done:
        if stop.is_set():
            return _Done({}, Findings(), 0)
        try:
            values, findings = fill_slab(slab, array, self._key_map.pieces[part], self._source)
        except SourceError as error:
            return _Done({}, Findings(errors=[str(error)]), 0)
        files = {} if findings.errors else writer.write_slab(slab.array, slab.start, values)
        return _Done(files, findings, values.nbytes)


def hash_part(part: str, key_map: KeyMap, source: TensorSource) -> str:
    """Checksum of all tensors that go into a part, as its record has it."""
    digests: dict[str, int] = {}
    for tensor in sorted(key_map.tensors_of(part)):
        digests |= examine(tensor, source).digests
    return _combine(digests, source)


def _combine(digests: dict[str, int], source: TensorSource) -> str:
    lines = (
        f"{name} {source.entries[name].dtype} {source.entries[name].shape} {digests[name]:08x}\n"
        for name in sorted(digests)
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def num_bytes(array: StoredArray) -> int:
    return int(np.prod(array.shape)) * np.dtype(array.dtype).itemsize


def _hash_or_error(path: Path) -> str:
    try:
        return file_sha256(path)
    except SourceError as error:
        return str(error)
