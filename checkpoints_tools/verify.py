"""Holds a converted checkpoint against its source: counts, shapes, dtypes, sampled values, INT4 histogram.

::

    python -m checkpoints_tools.verify --source DIR --checkpoint DIR [--samples 64] [--full]

Sampled values are read from the files of both sides, each by its own code (see `published`), not by the converter's.
``--full`` also reads every byte of both and compares it with the checksums in the manifest.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import flags

from checkpoints_tools import command, published
from checkpoints_tools.files import SourceError, read_file, read_json
from checkpoints_tools.manifest import Manifest, PartRecord, changed_files, read_manifest
from checkpoints_tools.models import Model, make_key_map, read_checkpoint, recognise
from checkpoints_tools.parts import hash_part
from checkpoints_tools.published import Bits, Weight
from checkpoints_tools.sides import PartSide, SourceSide
from checkpoints_tools.source import CONFIG_FILE, TOKENIZER_FILES, TensorSource
from ddtree_jax.arguments import is_integer, shown
from ddtree_jax.checkpoint import MANIFEST_FILE, METADATA_FILE, Metadata, stored_arrays
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


def verify(source: str | Path, checkpoint: str | Path, *, samples: int = SAMPLES, full: bool = False) -> Report:
    """Compares both sides. ``samples`` values of every array are looked at; ``full`` reads everything.

    Raises:
      ValueError: no finished checkpoint, a config that is none, or no samples.
    """
    if not is_integer(samples) or samples < 1:
        raise ValueError(f"samples is {shown(samples)}; at least 1 is needed")
    source, checkpoint = Path(source), Path(checkpoint)
    metadata, _ = read_checkpoint(checkpoint)
    values = read_json(source / CONFIG_FILE)
    model, tensors = recognise(values, source), SourceSide(source)
    needed = stored_arrays(stored_parameters(model.parameters, metadata.mesh))
    errors = tensors.errors + list(tensors.check_tensors(published.all_tensors(model.config, needed)))
    if (metadata.kind, metadata.config) != (model.kind, values):
        errors.append(f"{checkpoint / METADATA_FILE} has another model's config than {source}")
    errors += _compare_tables(checkpoint / METADATA_FILE, metadata.arrays, needed)
    errors += _compare_tokenizers(source, checkpoint, metadata)
    manifest, faults = _read_manifest(checkpoint, metadata, needed)
    errors += faults
    if full and manifest is not None:
        errors += _compare_bytes(source, model, manifest)
    histogram, num_values = np.zeros(16, np.int64), 0
    rng = np.random.default_rng(0)
    for part, table in needed.items():
        arrays, record = PartSide(checkpoint / part, table), manifest and manifest.parts.get(part)
        faults = list(arrays.check())
        if record:
            errors += _compare_record(checkpoint / part, record, full)
        if faults:
            errors += faults
            continue
        if record and record.files.keys() != set(arrays.files()):
            errors.append(f"{checkpoint / MANIFEST_FILE}: files of {part} are not those of its arrays")
        for name, place in published.dense_places(model.config, part).items():
            errors += _compare_dense(arrays, f"{part}/{name}", name, place, tensors, samples, rng)
            num_values += samples
        if any(published.EXPERT_ARRAYS.fullmatch(name) for name in table):
            errors += _compare_experts(arrays, part, model.config, tensors, samples, rng)
            num_values += 2 * samples
            histogram += _histogram(arrays, rng)
    if histogram.sum() and (fault := _convention_fault(histogram)):
        errors.append(fault)
    return Report(
        list(dict.fromkeys(errors)), tensors.num_tensors, sum(map(len, needed.values())), num_values, histogram
    )


def _compare_tables(path: Path, found: dict[str, Any], needed: dict[str, Any]) -> Iterator[str]:
    for part in sorted(needed.keys() ^ found.keys()):
        yield f"{part} is not in {path}" if part in needed else f"{part} in {path} is no part of the model"
    for part in needed.keys() & found.keys():
        if found[part] != needed[part]:
            yield f"{path}: arrays of {part} are not the model's"


def _compare_tokenizers(source: Path, checkpoint: Path, metadata: Metadata) -> Iterator[str]:
    for name in TOKENIZER_FILES:
        theirs, ours = source / name, checkpoint / name
        if not theirs.is_file():
            if ours.exists() or name in metadata.tokenizer_files:
                yield f"{ours} is there or in {METADATA_FILE}, but {source} has none"
        elif not ours.is_file() or name not in metadata.tokenizer_files:
            yield f"{ours} is missing there or in {METADATA_FILE}, but {source} has one"
        elif read_file(ours) != read_file(theirs):
            yield f"{ours} is not the one of {source}"


def _read_manifest(
    checkpoint: Path, metadata: Metadata, needed: dict[str, Any]
) -> tuple[Manifest | None, Iterable[str]]:
    """The record of the conversion, and what is wrong with it."""
    path = checkpoint / MANIFEST_FILE
    try:
        manifest = read_manifest(checkpoint)
    except ValueError as error:
        return None, [str(error)]
    if manifest is None:
        return None, [f"{path} is missing"]
    errors = list(_compare_tables(path, dict.fromkeys(manifest.parts), dict.fromkeys(needed)))
    if (manifest.kind, manifest.config, manifest.mesh) != (metadata.kind, metadata.config, metadata.mesh):
        errors.append(f"{path} has another model's config or another mesh than {METADATA_FILE}")
    checksums, others = metadata.source_checksums, manifest.source_checksums()
    differing = [part for part in needed if part in others and checksums.get(part) != others[part]]
    return manifest, errors + [
        f"{path}: source_checksum of {part} is not that of {METADATA_FILE}" for part in differing
    ]


def _compare_record(folder: Path, record: PartRecord, full: bool) -> Iterator[str]:
    """Files whose size alone is as it was written, by content: those that describe the part, or all."""
    for path in changed_files(folder, record, read_all=full):
        if path.is_file() and path.stat().st_size == record.files[str(path.relative_to(folder))][0]:
            yield f"{path} is not as it was written; to have it made again, delete {folder} and convert again"


def _compare_bytes(source: Path, model: Model, manifest: Manifest) -> Iterator[str]:
    """Whether parts came from the bytes that the source has, as far as it has their tensors."""
    try:
        tensors = TensorSource(source)
        key_map = make_key_map(model, tensors.entries)
        for part in manifest.parts.keys() & key_map.pieces:
            is_there = key_map.tensors_of(part) <= tensors.entries.keys()
            if is_there and hash_part(part, key_map, tensors) != manifest.parts[part].source_checksum:
                yield f"{part} was converted from other bytes than {source} has"
    except SourceError as error:
        yield str(error)


def _compare_dense(
    arrays: PartSide, label: str, name: str, place: published.Place, tensors: SourceSide, samples: int, rng: Any
) -> Iterator[str]:
    for _ in range(samples):
        index = tuple(int(rng.integers(size)) for size in arrays.arrays[name].shape)
        where = place.find(*index)
        if not tensors.has(place.tensor):
            return  # said already
        found, needed = arrays.values(name, index)[0], tensors.value(place.tensor, where)
        if found.tobytes() != needed.tobytes():
            yield f"{label}{list(index)} is {found}; {place.tensor}{list(where)} is {needed}"
            return


def _compare_experts(
    arrays: PartSide, part: str, config: Any, tensors: SourceSide, samples: int, rng: Any
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
        if not all(map(tensors.has, words)):
            continue
        word = int(tensors.value(words[0], (weight.row, weight.column // 8))) >> 4 * (weight.column % 8)
        needed_scale = int(tensors.value(words[1], (weight.row, weight.column // 32)).view(np.uint16))
        if (integer, scale) != (word & 15, needed_scale):
            yield (
                f"{part}: {weight} is {integer - 8} times {_as_float(scale)}; "
                f"the source has {(word & 15) - 8} times {_as_float(needed_scale)}"
            )
            return


def _read_bits(arrays: PartSide, where: Bits, width: int) -> int:
    value = arrays.values(where.array, where.index)
    return int(value.view(f"u{value.itemsize}")[0]) >> where.shift & (1 << width) - 1


def _as_float(bits: int) -> float:
    return float(np.array(bits, np.uint16).view(jnp.bfloat16))


def _histogram(arrays: PartSide, rng: Any) -> np.ndarray:
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


def main(arguments: list[str]) -> None:
    command.no_arguments(arguments)
    report = verify(_SOURCE.value, _CHECKPOINT.value, samples=_SAMPLES.value, full=_FULL.value)
    if report.histogram.sum():
        print(f"INT4 values, {report.histogram.sum():,} of them:\n{draw_histogram(report.histogram)}")
    print(f"{report.num_tensors:,} source tensors, {report.num_arrays:,} arrays, {report.num_values:,} values compared")
    if report.errors:
        sys.exit(f"verify: {len(report.errors)} faults\n  " + "\n  ".join(report.errors))
    print("as it should be")


if __name__ == "__main__":
    _SOURCE = flags.DEFINE_string("source", None, "Folder with config.json and safetensors.", required=True)
    _CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder that was converted from it.", required=True)
    _SAMPLES = flags.DEFINE_integer("samples", SAMPLES, "Values of every array that are compared.")
    _FULL = flags.DEFINE_bool("full", False, "Reads every byte and compares it with the checksums of the conversion.")
    command.run(main)
