"""Each bad source is refused with its complaint, before anything is written."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints_tools.convert import convert

GOLDEN = Path(__file__).parent / "golden"
INDEX = "model.safetensors.index.json"


def copy_source(model, tmp_path):
    shutil.copytree(GOLDEN / model, tmp_path / "source", copy_function=shutil.copyfile)
    return tmp_path / "source"


def refuse(source, tmp_path):
    """The complaint about a source. Nothing may have been written."""
    with pytest.raises(ValueError) as error:
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    return str(error.value)


def edit_tensors(path, edit):
    tensors = load_file(path)
    edit(tensors)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)


def test_all_wrong_tensors_are_named_at_once(tmp_path):
    source = copy_source("drafter", tmp_path)

    def spoil(tensors):
        del tensors["layers.1.self_attn.k_norm.weight"]
        tensors["layers.0.mlp.gate_proj.weight"] = tensors["layers.0.mlp.gate_proj.weight"][:, :-1]
        tensors["norm.weight"] = tensors["norm.weight"].astype(np.float32)
        tensors["layers.3.input_layernorm.weight"] = np.zeros(128, jnp.bfloat16)

    edit_tensors(source / "model.safetensors", spoil)
    assert sorted(refuse(source, tmp_path).splitlines()[1:]) == [
        "  layers.0.mlp.gate_proj.weight in model.safetensors has shape [320, 127]; [320, 128] is needed",
        "  layers.1.self_attn.k_norm.weight is missing; it is needed for layer_1/k_norm_R",
        "  layers.3.input_layernorm.weight in model.safetensors is unexpected; it is neither used nor listed as ignored",
        "  norm.weight in model.safetensors has dtype F32; BF16 is needed",
    ]


def test_packed_weights_are_held_against_their_stated_shape_and_dtype(tmp_path):
    source = copy_source("target", tmp_path)
    expert = "language_model.model.layers.2.mlp.experts.7.down_proj"
    shard = json.loads((source / INDEX).read_text())["weight_map"][f"{expert}.weight_shape"]

    def spoil(tensors):
        tensors[f"{expert}.weight_shape"] = np.array([64, 128], np.int32)
        tensors[f"{expert}.weight_packed"] = tensors[f"{expert}.weight_packed"].view(np.uint32)

    edit_tensors(source / shard, spoil)
    assert sorted(refuse(source, tmp_path).splitlines()[1:]) == [
        f"  {expert}.weight_packed in {shard} has dtype U32; I32 is needed",
        f"  {expert}.weight_shape says [64, 128]; [128, 64] is needed",
    ]


SECOND = "model-00002-of-00002.safetensors"


def _truncate(source):
    data = (source / SECOND).read_bytes()
    (source / SECOND).write_bytes(data[:-1])


def _overwrite(source):
    (source / SECOND).write_bytes(b"not a safetensors file")


def _duplicate(source):
    first = load_file(source / "model-00001-of-00002.safetensors")
    save_file(load_file(source / SECOND) | {"fc.weight": first["fc.weight"]}, source / SECOND)


def _add_shard(source):
    shutil.copyfile(source / SECOND, source / "model-00003.safetensors")


def _misplace(source):
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["fc.weight"] = SECOND
    (source / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "spoil, complaints",
    [
        (_truncate, [f"{SECOND} is truncated: it has", "its header needs"]),
        (_overwrite, [f"{SECOND} is truncated or not a safetensors file"]),
        (lambda source: (source / SECOND).unlink(), [f"{SECOND} is missing; {INDEX} names it"]),
        (_duplicate, [f"fc.weight is in both model-00001-of-00002.safetensors and {SECOND}"]),
        (_add_shard, [f"model-00003.safetensors is there, but {INDEX} does not name it"]),
        (_misplace, [f"fc.weight is in model-00001-of-00002.safetensors; {INDEX} says {SECOND}"]),
        (lambda source: (source / INDEX).unlink(), [f"neither {INDEX} nor model.safetensors"]),
        (lambda source: (source / INDEX).write_text('{"weight_map": 3}'), [f"{INDEX}: weight_map must name"]),
        (lambda source: (source / "config.json").unlink(), ["config.json is missing"]),
        (lambda source: (source / "config.json").write_text("{'a': 1}"), ["config.json is not valid JSON"]),
        (lambda source: (source / "config.json").write_text("[]"), ["config.json holds a list"]),
    ],
)
def test_bad_file_is_named(tmp_path, spoil, complaints):
    source = copy_source("drafter_sliding", tmp_path)
    spoil(source)
    message = refuse(source, tmp_path)
    assert str(source) in message
    for complaint in complaints:
        assert complaint in message
    # A file that can't be read is one complaint, not one more for each of its tensors.
    assert "it is needed for" not in message


def test_unknown_config_attribute_is_named_with_its_folder(tmp_path):
    source = copy_source("drafter", tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"attention_sinks": 4}))
    message = refuse(source, tmp_path)
    assert str(source) in message and "attention_sinks" in message
