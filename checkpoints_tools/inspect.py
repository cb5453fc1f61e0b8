"""Says what a converted checkpoint holds: config, sizes by kind of tensor, quantization, and which meshes it fits.

::

    python -m checkpoints_tools.inspect DIR

Weights alone are counted; caches and activations need some of what is left. GB are 10^9 bytes.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from absl import app

from checkpoints_tools.convert import recognise
from ddtree_jax.checkpoint import METADATA_FILE, Metadata, StoredArray, read_metadata, stored_arrays
from ddtree_jax.config import INT4_GROUP_SIZE
from ddtree_jax.expert_layout import loaded_as_stored, stored_parameters
from ddtree_jax.pallas.int4_blocks import BLOCK_WORDS, WEIGHT_WORDS
from ddtree_jax.sharding import RULES, ArrayInfo, mesh_sizes

DEVICE_COUNTS = (1, 2, 4, 8)
DEVICE_GB = (80, 96, 141)
_SHOWN = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "intermediate_size",
    "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "vocab_size",
    "max_position_embeddings", "num_key_value_heads", "head_dim", "block_size", "target_layer_ids", "sliding_window",
)  # fmt: skip
_KINDS = {
    "embedding": ("embedding_VD",),
    "head": ("unembedding_VD",),
    "attention": (
        "q_a_DA", "q_b_AHO", "kv_a_DW", "key_up_HPC", "value_up_HUC", "o_HUD", "q_DJQR", "k_DJR", "v_DJR", "o_JQRD",
    ),
    "router": ("router_ED", "router_bias_E"),
    "shared experts": ("shared_gate_DF", "shared_up_DF", "shared_down_FD"),
    "feed-forward": ("gate_DF", "up_DF", "down_FD"),
    "context features": ("fc_YD",),
    "routed experts": ("gate_up_EMKmw", "down_EMKmw", "gate_up_E2FI", "down_EDI"),
    "scales of routed experts": ("gate_up_scale_E2FG", "down_scale_EDG"),
}  # fmt: skip


def num_bytes(array: StoredArray) -> int:
    return math.prod(array.shape) * np.dtype(array.dtype).itemsize


def sizes_by_kind(metadata: Metadata) -> dict[str, int]:
    """Bytes of every kind of tensor. Scales inside blocks count as scales."""
    kind_of = {name: kind for kind, names in _KINDS.items() for name in names}
    sizes = dict.fromkeys((*_KINDS, "norms"), 0)
    for table in metadata.arrays.values():
        for name, array in table.items():
            size = num_bytes(array)
            scales = size - size * WEIGHT_WORDS // BLOCK_WORDS if name.endswith("_EMKmw") else 0
            sizes[kind_of.get(name, "norms")] += size - scales
            sizes["scales of routed experts"] += scales
    return {kind: size for kind, size in sizes.items() if size}


def bytes_a_device(metadata: Metadata, mesh: str) -> int | None:
    """Bytes of weights on each device of a mesh, None if they do not divide over it."""
    sizes, total = mesh_sizes(mesh), 0
    parameters = recognise(metadata.config, Path()).parameters
    for part, infos in stored_parameters(parameters, metadata.mesh).items():
        infos = infos if loaded_as_stored(infos, sizes) else parameters[part]
        arrays = stored_arrays({part: infos})[part]
        for name, info in infos.items():
            shards = _num_shards(info, sizes)
            if shards is None:
                return None
            total += num_bytes(arrays[name]) // shards
    return total


def _num_shards(info: ArrayInfo, sizes: dict[str, int]) -> int | None:
    counts = [sizes[RULES[axis]] if axis in RULES else 1 for axis in info.axes]
    if any(size % count for size, count in zip(info.shape, counts, strict=True)):
        return None
    return math.prod(counts)


def describe(directory: str | Path) -> Iterator[str]:
    """Lines to print.

    Raises:
      ValueError: no finished checkpoint.
    """
    metadata = read_metadata(directory)
    yield f"{directory}: {'target' if metadata.kind == 'kimi' else 'DFlash drafter'}, laid out for {metadata.mesh}"
    config = recognise(metadata.config, Path(directory) / METADATA_FILE).config
    yield ""
    yield from (f"  {name:<26} {getattr(config, name)}" for name in _SHOWN if hasattr(config, name))
    yield from ("", *_quantization(metadata), "")
    sizes = sizes_by_kind(metadata)
    yield from (f"  {kind:<26} {size / 1e9:>12,.4f} GB" for kind, size in sizes.items())
    yield f"  {'all':<26} {sum(sizes.values()) / 1e9:>12,.4f} GB"
    yield ""
    yield f"  {'devices':<12}{'GB of weights each':>20}" + "".join(f"{f'of {gb} GB':>14}" for gb in DEVICE_GB)
    meshes = [f"{axis}={count}" for count in DEVICE_COUNTS for axis in ("tensor", "expert")]
    yield from (_mesh_line(metadata, mesh) for mesh in meshes if mesh != "expert=1")


def _quantization(metadata: Metadata) -> Iterator[str]:
    names = {name for table in metadata.arrays.values() for name in table}
    if "gate_up_EMKmw" in names:
        yield f"  routed experts: INT4, a bfloat16 scale for {INT4_GROUP_SIZE} inputs, in the kernel's blocks"
    elif "gate_up_E2FI" in names:
        yield f"  routed experts: INT4, a bfloat16 scale for {INT4_GROUP_SIZE} inputs, in words as published"
    yield "  everything else: bfloat16, the router's bias float32" if metadata.kind == "kimi" else "  bfloat16"


def _mesh_line(metadata: Metadata, mesh: str) -> str:
    size = bytes_a_device(metadata, mesh)
    if size is None:
        return f"  {mesh:<12}{'does not divide':>20}"
    cells = (f"{gb - size / 1e9:.1f} left" if size < gb * 1e9 else "too small" for gb in DEVICE_GB)
    return f"  {mesh:<12}{size / 1e9:>20,.4f}" + "".join(f"{cell:>14}" for cell in cells)


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        sys.exit("inspect: one folder is needed: python -m checkpoints_tools.inspect DIR")
    try:
        print("\n".join(describe(arguments[1])))
    except (ValueError, OSError) as error:
        sys.exit(f"inspect: {error}")


if __name__ == "__main__":
    app.run(main)
