"""Says what a converted checkpoint holds: config, sizes by kind of tensor, quantization, and which meshes it fits.

::

    python -m checkpoints_tools.inspect DIR

Weights alone are counted; caches and activations need some of what is left. GB are 10^9 bytes.
"""

from collections.abc import Iterator
from pathlib import Path

from checkpoints_tools import command
from checkpoints_tools.meshes import num_shards
from checkpoints_tools.models import read_checkpoint, recognise
from checkpoints_tools.parts import num_bytes
from ddtree_jax.checkpoint import METADATA_FILE, Metadata, stored_arrays
from ddtree_jax.config import INT4_GROUP_SIZE
from ddtree_jax.expert_layout import loaded_as_stored, stored_parameters
from ddtree_jax.pallas.int4_blocks import BLOCK_WORDS, WEIGHT_WORDS
from ddtree_jax.sharding import mesh_sizes

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
            shards = num_shards(info, sizes)
            if shards is None:
                return None
            total += num_bytes(arrays[name]) // shards
    return total


def describe(directory: str | Path) -> Iterator[str]:
    """Lines to print.

    Raises:
      ValueError: no finished checkpoint, or one whose metadata is not that of its model.
    """
    metadata, model = read_checkpoint(Path(directory))
    if metadata.arrays != stored_arrays(stored_parameters(model.parameters, metadata.mesh)):
        raise ValueError(f"{Path(directory) / METADATA_FILE}: arrays are not those of the model in its config")
    yield f"{directory}: {'target' if metadata.kind == 'kimi' else 'DFlash drafter'}, laid out for {metadata.mesh}"
    yield ""
    yield from (f"  {name:<26} {getattr(model.config, name)}" for name in _SHOWN if hasattr(model.config, name))
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
    if len(arguments) != 1:
        raise ValueError("one folder is needed: python -m checkpoints_tools.inspect DIR")
    print("\n".join(describe(arguments[0])))


if __name__ == "__main__":
    command.run(main)
