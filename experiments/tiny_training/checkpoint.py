"""Writes and reads the tiny pair in the layout of the published checkpoints: names, shapes and dtypes alike.

The converter has a key map of its own, which is tested against real files; this one makes such files.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from ddtree_jax.config import DFlashConfig, KimiConfig
from experiments.tiny_training.model import Arrays

Tensors = dict[str, np.ndarray]

_PREFIX = "language_model."
_NUM_SHARDS = 3


class _Linear(NamedTuple):
    """A linear layer [out, in] on disk, and how our array of it is laid out.

    ``num_inputs`` of our first axes are the input (the others the output) if ``input_first``, of our last axes if not.
    """

    name: str
    input_first: bool = True
    num_inputs: int = 1


_ATTENTION = {
    "q_a_DA": _Linear("self_attn.q_a_proj"),
    "q_b_AHO": _Linear("self_attn.q_b_proj"),
    "kv_a_DW": _Linear("self_attn.kv_a_proj_with_mqa"),
    "o_HUD": _Linear("self_attn.o_proj", num_inputs=2),
}
_TARGET_LINEARS = _ATTENTION | {
    "gate_DF": _Linear("mlp.gate_proj"),
    "up_DF": _Linear("mlp.up_proj"),
    "down_FD": _Linear("mlp.down_proj"),
    "router_ED": _Linear("mlp.gate", input_first=False),
    "shared_gate_DF": _Linear("mlp.shared_experts.gate_proj"),
    "shared_up_DF": _Linear("mlp.shared_experts.up_proj"),
    "shared_down_FD": _Linear("mlp.shared_experts.down_proj"),
}
_TARGET_VECTORS = {
    "input_norm_D": "input_layernorm.weight",
    "post_attention_norm_D": "post_attention_layernorm.weight",
    "q_norm_A": "self_attn.q_a_layernorm.weight",
    "kv_norm_C": "self_attn.kv_a_layernorm.weight",
    "router_bias_E": "mlp.gate.e_score_correction_bias",
}
_DRAFTER_LINEARS = {
    "q_DJQR": _Linear("self_attn.q_proj"),
    "k_DJR": _Linear("self_attn.k_proj"),
    "v_DJR": _Linear("self_attn.v_proj"),
    "o_JQRD": _Linear("self_attn.o_proj", num_inputs=3),
    "gate_DF": _Linear("mlp.gate_proj"),
    "up_DF": _Linear("mlp.up_proj"),
    "down_FD": _Linear("mlp.down_proj"),
}
_DRAFTER_VECTORS = {
    "input_norm_D": "input_layernorm.weight",
    "post_attention_norm_D": "post_attention_layernorm.weight",
    "q_norm_R": "self_attn.q_norm.weight",
    "k_norm_R": "self_attn.k_norm.weight",
}
_WHOLE = {
    "embedding_VD": "model.embed_tokens.weight",
    "norm_D": "model.norm.weight",
    "unembedding_VD": "lm_head.weight",
}


def write_target(directory: Path, values: dict[str, Any], exported: Arrays) -> None:
    """Writes ``config.json``, ``generation_config.json`` and the target's shards with their index."""
    config = KimiConfig.from_hf(values)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", values)
    generation = {"eos_token_id": values["eos_token_id"], "max_length": config.max_position_embeddings}
    _write_json(directory / "generation_config.json", generation)
    tensors = target_tensors(config, exported)
    _write_shards(directory, {_PREFIX + name: tensor for name, tensor in tensors.items()})


def read_target(directory: Path) -> tuple[KimiConfig, Arrays]:
    """The package's parameter tree out of what `write_target` wrote."""
    config = KimiConfig.from_hf(json.loads((directory / "config.json").read_text()))
    tensors: Tensors = {}
    for path in sorted(directory.glob("model-*.safetensors")):
        tensors |= {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(path).items()}
    arrays: Arrays = {
        "embed": {"embedding_VD": tensors[_WHOLE["embedding_VD"]]},
        "head": {name: tensors[_WHOLE[name]] for name in ("norm_D", "unembedding_VD")},
    }
    for layer in range(config.num_hidden_layers):
        arrays[f"layer_{layer}"] = _read_target_layer(config, tensors, f"model.layers.{layer}.")
    return config, _to_device(arrays)


def target_tensors(config: KimiConfig, exported: Arrays) -> Tensors:
    """Tensors by their published names, without the prefix."""
    tensors = {
        _WHOLE[name]: np.asarray(exported[part][name])
        for part, name in (("embed", "embedding_VD"), ("head", "norm_D"), ("head", "unembedding_VD"))
    }
    for layer in range(config.num_hidden_layers):
        table = {name: np.asarray(array) for name, array in exported[f"layer_{layer}"].items()}
        prefix = f"model.layers.{layer}."
        tensors |= _plain_tensors(prefix, table, _TARGET_LINEARS, _TARGET_VECTORS)
        # [H, P, C] and [H, U, C]: a head's keys, then its values.
        kv_b = np.concatenate([table["key_up_HPC"], table["value_up_HUC"]], axis=1)
        tensors[f"{prefix}self_attn.kv_b_proj.weight"] = kv_b.reshape(-1, config.kv_lora_rank)
        if not config.is_dense(layer):
            tensors |= _expert_tensors(config, table, f"{prefix}mlp.experts.")
    return tensors


def _expert_tensors(config: KimiConfig, table: Tensors, prefix: str) -> Tensors:
    tensors = {}
    for expert in range(config.n_routed_experts):
        gate_up = table["gate_up_E2FI"][expert], table["gate_up_scale_E2FG"][expert]
        down = table["down_EDI"][expert], table["down_scale_EDG"][expert]
        parts = {
            "gate_proj": tuple(part[0] for part in gate_up),
            "up_proj": tuple(part[1] for part in gate_up),
            "down_proj": down,
        }
        for name, (words, scale) in parts.items():
            shape = np.array([words.shape[0], 8 * words.shape[1]], np.int32)
            tensors[f"{prefix}{expert}.{name}.weight_packed"] = words
            tensors[f"{prefix}{expert}.{name}.weight_scale"] = scale
            tensors[f"{prefix}{expert}.{name}.weight_shape"] = shape
    return tensors


def _read_target_layer(config: KimiConfig, tensors: Tensors, prefix: str) -> Tensors:
    H, P, U = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    sizes = {"H": H, "O": P + config.qk_rope_head_dim, "U": U}
    table = _read_plain(tensors, prefix, _TARGET_LINEARS, _TARGET_VECTORS, sizes)
    kv_b = tensors[f"{prefix}self_attn.kv_b_proj.weight"].reshape(H, P + U, -1)
    table["key_up_HPC"], table["value_up_HUC"] = kv_b[:, :P], kv_b[:, P:]
    if f"{prefix}mlp.gate.weight" in tensors:

        def stack(projection: str, kind: str) -> np.ndarray:
            names = (f"{prefix}mlp.experts.{e}.{projection}.{kind}" for e in range(config.n_routed_experts))
            return np.stack([tensors[name] for name in names])

        for ours, down, kind in (
            ("gate_up_E2FI", "down_EDI", "weight_packed"),
            ("gate_up_scale_E2FG", "down_scale_EDG", "weight_scale"),
        ):
            table[ours] = np.stack([stack("gate_proj", kind), stack("up_proj", kind)], axis=1)
            table[down] = stack("down_proj", kind)
    return table


def write_drafter(directory: Path, values: dict[str, Any], arrays: Arrays) -> None:
    """Writes ``config.json`` and the drafter's one file, all in bfloat16."""
    config = DFlashConfig.from_hf(values)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", values)
    rounded = {
        part: {name: np.asarray(array).astype(jnp.bfloat16) for name, array in table.items()}
        for part, table in arrays.items()
    }
    tensors = {
        "fc.weight": rounded["context"]["fc_YD"].T,
        "hidden_norm.weight": rounded["context"]["hidden_norm_D"],
        "norm.weight": rounded["head"]["norm_D"],
    }
    for layer in range(config.num_hidden_layers):
        tensors |= _plain_tensors(f"layers.{layer}.", rounded[f"layer_{layer}"], _DRAFTER_LINEARS, _DRAFTER_VECTORS)
    _save(directory / "model.safetensors", tensors)


def read_drafter(directory: Path) -> tuple[DFlashConfig, Arrays]:
    """The drafter's parameter tree out of what `write_drafter` wrote."""
    config = DFlashConfig.from_hf(json.loads((directory / "config.json").read_text()))
    tensors = load_file(directory / "model.safetensors")
    arrays: Arrays = {
        "context": {"fc_YD": tensors["fc.weight"].T, "hidden_norm_D": tensors["hidden_norm.weight"]},
        "head": {"norm_D": tensors["norm.weight"]},
    }
    J = config.num_key_value_heads
    sizes = {"J": J, "Q": config.num_attention_heads // J, "R": config.head_dim}
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        arrays[f"layer_{layer}"] = _read_plain(tensors, prefix, _DRAFTER_LINEARS, _DRAFTER_VECTORS, sizes)
    return config, _to_device(arrays)


def num_bytes(directory: Path) -> int:
    """Bytes of all files under a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _plain_tensors(prefix: str, table: Tensors, linears: dict[str, _Linear], vectors: dict[str, str]) -> Tensors:
    tensors = {prefix + vectors[name]: array for name, array in table.items() if name in vectors}
    for name, linear in linears.items():
        if name in table:
            array = table[name]
            if linear.input_first:
                array = array.reshape(int(np.prod(array.shape[: linear.num_inputs])), -1).T
            tensors[f"{prefix}{linear.name}.weight"] = array
    return tensors


def _read_plain(
    tensors: Tensors, prefix: str, linears: dict[str, _Linear], vectors: dict[str, str], sizes: dict[str, int]
) -> Tensors:
    """``sizes`` has the axes that a published matrix holds as one; the one that it lacks is what is left."""
    table = {name: tensors[prefix + key] for name, key in vectors.items() if prefix + key in tensors}
    for name, linear in linears.items():
        key = f"{prefix}{linear.name}.weight"
        if key in tensors:
            matrix = tensors[key].T if linear.input_first else tensors[key]
            axes = name.rsplit("_", 1)[-1]
            if linear.num_inputs > 1:
                shape = (*(sizes[axis] for axis in axes[:-1]), matrix.shape[1])
            else:
                shape = (matrix.shape[0], *((sizes[axis] for axis in axes[1:]) if len(axes) > 2 else (-1,)))
            table[name] = matrix.reshape(shape)
    return table


def _write_shards(directory: Path, tensors: Tensors) -> None:
    """Shards of about equal size in the order of the tensors, and the index."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    weight_map, done = {}, 0
    for name, tensor in tensors.items():
        shard = min(_NUM_SHARDS, 1 + done * _NUM_SHARDS // total)
        weight_map[name] = f"model-{shard:05d}-of-{_NUM_SHARDS:06d}.safetensors"
        done += tensor.nbytes
    for file in sorted(set(weight_map.values())):
        _save(directory / file, {name: tensors[name] for name in tensors if weight_map[name] == file})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / "model.safetensors.index.json", index)


def _save(path: Path, tensors: Tensors) -> None:
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path, {"format": "pt"})
    path.chmod(0o644)


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _to_device(arrays: Arrays) -> Arrays:
    convert: Callable[[np.ndarray], Any] = jnp.asarray
    return {part: {name: convert(array) for name, array in table.items()} for part, table in arrays.items()}
