"""Writes a checkpoint of any Kimi or DFlash shape with random weights, in the published layout, in a stream.

::

    python -m checkpoints_tools.synthesize --config FILE --out DIR [--num_layers N] [--shard_gb 10] [--seed 0]

Names, shapes, dtypes and order are those that the converter expects; the scale of weights is such that activations keep
theirs. INT4 integers lie in -7..7, most of them near 0, as trained ones do. The same seed gives the same bytes.
"""

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from checkpoints_tools import command
from checkpoints_tools.files import naming
from checkpoints_tools.key_map import WRAPPER_PREFIX
from checkpoints_tools.models import Model, make_key_map, recognise
from checkpoints_tools.source import CONFIG_FILE, DTYPES, INDEX_FILE, SINGLE_FILE, read_json
from ddtree_jax.arguments import is_integer, is_number, shown

SHARD_GB = 10.0
_PIECE_WORDS = 1 << 20
_INTEGER_DEVIATION = math.sqrt(10.5)  # of the sum of two uniform 0..7, which integers are
_BF16_BIAS, _BF16_MANTISSA = 127, 7


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    values: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def synthesize(
    config: dict[str, Any],
    out: str | Path,
    *,
    num_layers: int | None = None,
    shard_gb: float = SHARD_GB,
    seed: int = 0,
    name: str | Path = CONFIG_FILE,
) -> None:
    """Writes config.json and safetensors; one file if they fit into ``shard_gb``, else shards and an index.

    Args:
      config: as in a published config.json.
      num_layers: keeps the first so many layers of a target.
      name: of the config, for complaints.

    Raises:
      ValueError: before anything is written: a config that the engine does not know, a number of layers that it does not
        have, a size or seed that is none, or ``out`` not empty.
      OSError: ``out`` can't be written. What was written so far stays.
    """
    out = Path(out)
    if not is_number(shard_gb) or not 0 < shard_gb < math.inf:
        raise ValueError(f"shard_gb is {shown(shard_gb)}; a finite number above 0 is needed")
    if not is_integer(seed) or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {shown(seed)}; allowed are 0 to 2^64 - 1")
    model = recognise(config, Path(name))
    if num_layers is not None:
        config = _cut(config, num_layers, model)
        model = recognise(config, Path(name))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is {'not empty' if out.is_dir() else 'a file'}; a new or an empty folder is needed")
    shards = list(_split(list(_tensors(config, model)), shard_gb * 1e9))
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=1))
    names = [f"model-{i:05}-of-{len(shards):06}.safetensors" for i in range(1, len(shards) + 1)]
    for name, tensors in zip(names if len(shards) > 1 else [SINGLE_FILE], shards, strict=True):
        _write_shard(out / name, tensors, seed)
    if len(shards) > 1:
        weight_map = {t.name: name for name, tensors in zip(names, shards, strict=True) for t in tensors}
        size = sum(t.num_bytes for tensors in shards for t in tensors)
        (out / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))


def _cut(config: dict[str, Any], num_layers: int, model: Model) -> dict[str, Any]:
    if model.kind != "kimi":
        raise ValueError(
            f"num_layers is {shown(num_layers)}; allowed for a target alone, and this config is a drafter's"
        )
    if not is_integer(num_layers) or not 1 <= num_layers <= model.config.num_hidden_layers:
        raise ValueError(f"num_layers is {shown(num_layers)}; allowed are 1 to {model.config.num_hidden_layers}")
    cut = config.get("text_config", config) | {"num_hidden_layers": num_layers}
    return config | {"text_config": cut} if "text_config" in config else cut


def _tensors(config: dict[str, Any], model: Model) -> Iterator[_Tensor]:
    """Every tensor, in the order of the layers, those that an engine leaves unread in front of them."""
    prefix = WRAPPER_PREFIX if "text_config" in config else ""
    if prefix:
        yield _Tensor("vision_tower.patch_embed.proj.weight", "BF16", (64, 3, 14, 14))
        yield _Tensor("mm_projector.proj.0.weight", "BF16", (64, 64))
    key_map = make_key_map(model, [f"{prefix}lm_head.weight"])
    seen = set()
    for _, piece in key_map.all_pieces():
        if piece.tensor in seen:
            continue
        seen.add(piece.tensor)
        yield _Tensor(piece.tensor, piece.dtype, piece.shape)
        constant = piece.tensor.replace("weight_scale", "weight_shape")
        if constant in key_map.constants:
            yield _Tensor(constant, "I32", (2,), key_map.constants[constant])


def _split(tensors: list[_Tensor], max_bytes: float) -> Iterator[list[_Tensor]]:
    shard, size = [], 0
    for tensor in tensors:
        if shard and size + tensor.num_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.num_bytes
    yield shard


def _write_shard(path: Path, tensors: list[_Tensor], seed: int) -> None:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with naming(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for data in _draw(tensor, seed):
                file.write(data.view(np.uint8).data)


def _draw(tensor: _Tensor, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(tensor.name.encode())]))
    count = math.prod(tensor.shape)
    if tensor.values:
        yield np.array(tensor.values, DTYPES[tensor.dtype])
    elif tensor.dtype == "I32":
        yield from (_draw_integers(rng, size) for size in _sizes(count))
    elif tensor.dtype == "F32":
        yield rng.normal(0, 0.01, count).astype(np.float32)
    elif len(tensor.shape) == 1:
        yield (1 + rng.normal(0, 0.05, count)).astype(DTYPES[tensor.dtype])
    else:
        is_scale = tensor.name.endswith("weight_scale")
        inputs = tensor.shape[1] * (32 if is_scale else 1)
        deviation = 1 / math.sqrt(inputs) / (_INTEGER_DEVIATION if is_scale else 1)
        yield from (_draw_bf16(rng, size, deviation, is_scale) for size in _sizes(count))


def _sizes(count: int) -> Iterator[int]:
    for start in range(0, count, _PIECE_WORDS):
        yield min(_PIECE_WORDS, count - start)


def _draw_integers(rng: np.random.Generator, num_words: int) -> np.ndarray:
    """Words of eight nibbles 1..15, value + 8: in each a sum of two uniform 0..7, and 1. No sum carries."""
    low, high = (rng.integers(0, 1 << 32, num_words, np.uint32) & np.uint32(0x77777777) for _ in range(2))
    return low + high + np.uint32(0x11111111)


def _draw_bf16(rng: np.random.Generator, count: int, deviation: float, is_positive: bool) -> np.ndarray:
    """Bits of numbers between 0.5 and 2 times a power of two near the deviation, of either sign unless positive."""
    bits = rng.integers(0, 1 << 16, count, np.uint16)
    exponent = _BF16_BIAS + round(math.log2(deviation)) - 1
    sign = bits & np.uint16(0 if is_positive else 0x8000)
    return (sign | (bits & np.uint16(0xFF))) + np.uint16(exponent << _BF16_MANTISSA)


def main(arguments: list[str]) -> None:
    command.no_arguments(arguments)
    config = read_json(Path(_CONFIG.value))
    options = {"num_layers": _LAYERS.value, "shard_gb": _SHARD_GB.value, "seed": _SEED.value}
    synthesize(config, _OUT.value, name=_CONFIG.value, **options)


if __name__ == "__main__":
    _CONFIG = flags.DEFINE_string("config", None, "A config.json of Kimi or of a DFlash drafter.", required=True)
    _OUT = flags.DEFINE_string("out", None, "Folder for the checkpoint; new or empty.", required=True)
    _LAYERS = flags.DEFINE_integer("num_layers", None, "Keeps the first so many layers of a target.")
    _SHARD_GB = flags.DEFINE_float("shard_gb", SHARD_GB, "Most GB a file.")
    _SEED = flags.DEFINE_integer("seed", 0, "Of the random numbers.")
    command.run(main)
