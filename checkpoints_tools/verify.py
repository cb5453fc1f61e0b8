"""Holds a converted checkpoint against its source: counts, shapes, dtypes, sampled values, INT4 histogram.

::

    python -m checkpoints_tools.verify --source DIR --checkpoint DIR [--samples 64] [--full]

Sampled values are read from the files of both sides, each by its own code (see `published`), not by the converter's.
``--full`` also reads every byte of both and compares it with the checksums in the manifest.
"""

import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import app, flags
from safetensors import SafetensorError, safe_open

from checkpoints_tools import published
from checkpoints_tools.convert import make_key_map, recognise
from checkpoints_tools.manifest import read_manifest
from checkpoints_tools.parts import hash_part
from checkpoints_tools.published import Bits, Weight
from checkpoints_tools.source import CONFIG_FILE, TensorSource, read_json
from ddtree_jax.checkpoint import Metadata, StoredArray, read_metadata, stored_arrays
from ddtree_jax.expert_layout import stored_parameters

SAMPLES = 64
_RUNS = 8
_BLOCK_WORDS = 512
_BAR = 40


class Report(NamedTuple):
    """``errors`` a sentence each; ``num_values`` compared; ``histogram`` of INT4 values -8..7 that were looked at."""

    errors: list[str]
    num_tensors: int
    num_arrays: int
    num_values: int
    histogram: np.ndarray


class _Source:
    """Single values of published tensors, by the safetensors library."""

    def __init__(self, directory: Path):
        self._files = [safe_open(path, framework="numpy") for path in sorted(directory.glob("*.safetensors"))]
        self._file_of = {name: file for file in self._files for name in file.keys()}
        self.names = set(self._file_of)
        self.prefix = published.PREFIX if any(name.startswith(published.PREFIX) for name in self.names) else ""

    def value(self, tensor: str, index: tuple[int, ...]) -> np.ndarray:
        name = self.prefix + tensor
        row = self._file_of[name].get_slice(name)[index[0] : index[0] + 1]
        return row[(0, *index[1:])]


class _Arrays:
    """Single values of a part's arrays, from the chunk files."""

    def __init__(self, directory: Path, arrays: dict[str, StoredArray]):
        self._directory, self.arrays = directory, arrays
        self._chunks: dict[str, tuple[int, ...]] = {}

    def check(self) -> Iterator[str]:
        """What is wrong with shapes, dtypes and files, a sentence each."""
        for name, array in self.arrays.items():
            path = self._directory / name / ".zarray"
            try:
                values = json.loads(path.read_text())
            except (OSError, ValueError) as error:
                yield f"{path} can't be read: {error}"
                continue
            self._chunks[name] = tuple(values["chunks"])
            dtype = jnp.dtype(values["dtype"]).name
            if (tuple(values["shape"]), dtype) != (array.shape, array.dtype):
                yield f"{path} says {StoredArray(tuple(values['shape']), dtype)}; {array} is needed"
            yield from self._check_files(name)
        found = {path.name for path in self._directory.iterdir() if path.is_dir()}
        yield from (f"{self._directory / name} is no array of the model" for name in sorted(found - self.arrays.keys()))

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


def verify(source: str | Path, checkpoint: str | Path, *, samples: int = SAMPLES, full: bool = False) -> Report:
    """Compares both sides. ``samples`` values of every array are looked at; ``full`` reads everything.

    Raises:
      ValueError: no finished checkpoint, or a source that can't be opened.
    """
    source, checkpoint = Path(source), Path(checkpoint)
    metadata = read_metadata(checkpoint)
    model = recognise(read_json(source / CONFIG_FILE), source)
    try:
        tensors = _Source(source)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{source} can't be read: {error}") from error
    needed = stored_arrays(stored_parameters(model.parameters, metadata.mesh))
    errors = list(_compare_tables(metadata, model.kind, read_json(source / CONFIG_FILE), needed))
    errors += _check_tensors(tensors, model.config, list(needed))
    histogram, num_values = np.zeros(16, np.int64), 0
    rng = np.random.default_rng(0)
    for part, table in needed.items():
        arrays = _Arrays(checkpoint / part, table)
        faults = list(arrays.check()) if (checkpoint / part).is_dir() else [f"{checkpoint / part} is missing"]
        errors += faults
        if faults or errors and not tensors.names:
            continue
        for name, place in published.dense_places(model.config, part).items():
            errors += _compare_dense(arrays, f"{part}/{name}", name, place, tensors, samples, rng)
            num_values += samples
        if any(published.EXPERT_ARRAYS.fullmatch(name) for name in table):
            errors += _compare_experts(arrays, part, model.config, tensors, samples, rng)
            num_values += 2 * samples
            histogram += _histogram(arrays, rng)
    if histogram.sum() and (fault := _convention_fault(histogram)):
        errors.append(fault)
    if full:
        errors += _compare_checksums(source, checkpoint)
    return Report(errors, len(tensors.names), sum(map(len, needed.values())), num_values, histogram)


def _compare_tables(metadata: Metadata, kind: str, config: dict[str, Any], needed: dict[str, Any]) -> Iterator[str]:
    if (metadata.kind, metadata.config) != (kind, config):
        yield "metadata.json has another model's config than the source"
    for part in sorted(needed.keys() ^ metadata.arrays.keys()):
        yield f"{part} is {'not in metadata.json' if part in needed else 'no part of the model'}"
    for part in needed.keys() & metadata.arrays.keys():
        if metadata.arrays[part] != needed[part]:
            yield f"metadata.json: arrays of {part} are not the model's"


def _check_tensors(tensors: _Source, config: Any, parts: list[str]) -> Iterator[str]:
    needed = {tensors.prefix + name for name in published.all_tensors(config, parts)}
    yield from (f"{name} is not in the source" for name in sorted(needed - tensors.names))
    for name in sorted(tensors.names - needed):
        if not published.IGNORED.fullmatch(name):
            yield f"{name} in the source is neither part of the model nor left out on purpose"


def _compare_dense(
    arrays: _Arrays, label: str, name: str, place: published.Place, tensors: _Source, samples: int, rng: Any
) -> Iterator[str]:
    for _ in range(samples):
        index = tuple(int(rng.integers(size)) for size in arrays.arrays[name].shape)
        where = place.find(*index)
        if tensors.prefix + place.tensor not in tensors.names:
            return  # said already
        found, needed = arrays.values(name, index)[0], tensors.value(place.tensor, where)
        if found.tobytes() != needed.tobytes():
            yield f"{label}{list(index)} is {found}; {place.tensor}{list(where)} is {needed}"
            return


def _compare_experts(
    arrays: _Arrays, part: str, config: Any, tensors: _Source, samples: int, rng: Any
) -> Iterator[str]:
    layer = int(part.removeprefix("layer_"))
    groups = {name: array.shape[3] for name, array in arrays.arrays.items() if name.endswith("_EMKmw")}
    for _ in range(samples):
        projection = ("gate", "up", "down")[rng.integers(3)]
        sizes = (config.moe_intermediate_size, config.hidden_size)
        rows, columns = sizes[::-1] if projection == "down" else sizes
        expert = int(rng.integers(config.n_routed_experts))
        weight = Weight(expert, projection, int(rng.integers(rows)), int(rng.integers(columns)))
        if groups:
            group = groups["down_EMKmw" if projection == "down" else "gate_up_EMKmw"]
            bits = published.integer_in_blocks(weight, group), published.scale_in_blocks(weight, group)
        else:
            bits = published.integer_in_words(weight), published.scale_in_words(weight)
        integer, scale = (_read_bits(arrays, where, width) for where, width in zip(bits, (4, 16), strict=True))
        words = weight.tensor(layer, "weight_packed"), weight.tensor(layer, "weight_scale")
        if not {tensors.prefix + name for name in words} <= tensors.names:
            continue
        word = int(tensors.value(words[0], (weight.row, weight.column // 8))) >> 4 * (weight.column % 8)
        needed_scale = int(tensors.value(words[1], (weight.row, weight.column // 32)).view(np.uint16))
        if (integer, scale) != (word & 15, needed_scale):
            yield (
                f"{part}: {weight} is {integer - 8} times {_as_float(scale)}; "
                f"the source has {(word & 15) - 8} times {_as_float(needed_scale)}"
            )
            return


def _read_bits(arrays: _Arrays, where: Bits, width: int) -> int:
    value = arrays.values(where.array, where.index)
    return int(value.view(f"u{value.itemsize}")[0]) >> where.shift & (1 << width) - 1


def _as_float(bits: int) -> float:
    return float(np.array(bits, np.uint16).view(jnp.bfloat16))


def _histogram(arrays: _Arrays, rng: Any) -> np.ndarray:
    """Counts of -8..7 in some runs of words of every array with integers."""
    counts = np.zeros(16, np.int64)
    for name, array in arrays.arrays.items():
        if array.dtype != "int32":
            continue
        for _ in range(_RUNS):
            index = (*(int(rng.integers(size)) for size in array.shape[:-1]), 0)
            words = arrays.values(name, index, array.shape[-1]).view(np.uint32)
            if name.endswith("_EMKmw"):
                words, scales = words[:_BLOCK_WORDS], words[_BLOCK_WORDS:].view(np.uint16)
                if not scales.all():  # such as the padding of a last block
                    continue
            nibbles = words[:, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
            counts += np.bincount(nibbles.ravel(), minlength=16)
    return counts


def _convention_fault(histogram: np.ndarray) -> str | None:
    middle, ends = histogram[5:12].sum(), histogram[:4].sum() + histogram[13:].sum()
    if middle > ends:
        return None
    return (
        f"INT4 values of -3..3 are {middle / histogram.sum():.1%}, those beyond 4 {ends / histogram.sum():.1%}: trained "
        "weights lie near 0; nibbles are taken for value + 8, and these seem to be two's complement"
    )


def draw_histogram(histogram: np.ndarray) -> str:
    """A line a value, with a bar. Weights that are read rightly are a hill around 0; wrongly, two cliffs at both ends."""
    longest = histogram.max()
    return "\n".join(
        f"{value:>4} {'#' * round(_BAR * count / longest):<{_BAR}} {count / histogram.sum():6.2%}"
        for value, count in zip(range(-8, 8), histogram, strict=True)
    )


def _compare_checksums(source: Path, checkpoint: Path) -> Iterator[str]:
    manifest, tensors = read_manifest(checkpoint), TensorSource(source)
    if manifest is None:
        yield f"{checkpoint} has no manifest to compare checksums with"
        return
    key_map = make_key_map(recognise(manifest.config, source), tensors.entries)
    for part, record in manifest.parts.items():
        for name, (_, crc) in record.files.items():
            path = checkpoint / part / name
            if path.is_file() and zlib.crc32(path.read_bytes()) != crc:
                yield f"{path} is not as it was written"
        if hash_part(part, key_map, tensors) != record.source_checksum:
            yield f"{part} was converted from other bytes than {source} has"


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        sys.exit(f"verify: unknown argument {arguments[1]}")
    try:
        report = verify(_SOURCE.value, _CHECKPOINT.value, samples=_SAMPLES.value, full=_FULL.value)
    except (ValueError, OSError) as error:
        sys.exit(f"verify: {error}")
    if report.histogram.sum():
        print(f"INT4 values, {report.histogram.sum():,} of them:\n{draw_histogram(report.histogram)}")
    print(f"{report.num_tensors:,} source tensors, {report.num_arrays:,} arrays, {report.num_values:,} values compared")
    if report.errors:
        sys.exit("verify: " + f"{len(report.errors)} faults\n  " + "\n  ".join(report.errors))
    print("as it should be")


if __name__ == "__main__":
    _SOURCE = flags.DEFINE_string("source", None, "Folder with config.json and safetensors.", required=True)
    _CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder that was converted from it.", required=True)
    _SAMPLES = flags.DEFINE_integer("samples", SAMPLES, "Values of every array that are compared.")
    _FULL = flags.DEFINE_bool("full", False, "Reads every byte and compares it with the checksums of the conversion.")
    app.run(main)
