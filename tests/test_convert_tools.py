"""What verify, inspect and synthesize say; each planted fault is found, by a reader that knows nothing of the converter."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from small_sources import CONFIGS, DRAFTERS, drafter_config, target_config, write_target

from checkpoints_tools import blocks, inspect, slabs
from checkpoints_tools.convert import convert
from checkpoints_tools.progress import State, describe
from checkpoints_tools.source import TensorSource
from checkpoints_tools.synthesize import synthesize
from checkpoints_tools.verify import draw_histogram, verify
from ddtree_jax import checkpoint, kimi
from ddtree_jax.checkpoint import Metadata, stored_arrays
from ddtree_jax.config import KimiConfig
from ddtree_jax.expert_layout import stored_parameters

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"


def quiet(state):
    pass


def converted_to(folder, source, **options):
    convert(source, folder, report=quiet, **options)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("tools") / "source", num_layers=2, shard_gb=3e-4)


@pytest.fixture
def here(source, tmp_path):
    return shutil.copytree(source, tmp_path / "source")


def overwrite(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("model", ["golden", "blocks", "tiny"])
def test_what_was_converted_well_is_found_well(source, tmp_path, model):
    folder, mesh = {
        "golden": (GOLDEN / "target", None),
        "blocks": (source, "tensor=8"),
        "tiny": (ROOT / "experiments/tiny_kimi/target", "tensor=4"),
    }[model]
    report = verify(folder, converted_to(tmp_path / "out", folder, mesh=mesh), full=True)
    assert report.errors == []
    assert report.num_tensors == len(TensorSource(folder).entries)
    assert report.histogram.argmax() in (7, 8, 9) and report.num_values > 1000


def test_published_histogram_of_the_golden_model_is_found(tmp_path):
    """The share of every value, as far as a sample tells."""
    report = verify(GOLDEN / "target", converted_to(tmp_path / "out", GOLDEN / "target"))
    reference = json.loads((GOLDEN / "target_dequant_sums.json").read_text())["value_histogram_minus8_to_7"]
    found, expected = (np.array(counts) / np.sum(counts) for counts in (report.histogram, reference))
    assert np.abs(found - expected).max() < 0.02


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("shard_gb", [10.0, 1e-4])
def test_drafters_in_one_file_and_in_shards(tmp_path, name, shard_gb):
    synthesize(drafter_config(name), tmp_path / "source", shard_gb=shard_gb)
    assert (tmp_path / "source/model.safetensors").exists() == (shard_gb == 10.0)
    out = converted_to(tmp_path / "out", tmp_path / "source")
    assert verify(tmp_path / "source", out, full=True).errors == []
    assert checkpoint.read_metadata(out, "dflash").config == drafter_config(name)


def swap_halves(monkeypatch):
    pack = blocks.BlockPacker.pack_gate_up
    monkeypatch.setattr(blocks.BlockPacker, "pack_gate_up", lambda self, gate, up, out: pack(self, up, gate, out))


def swap_nibbles(monkeypatch):
    monkeypatch.setattr(blocks, "_reorder", lambda words, scratch: None)


def shift_scales(monkeypatch):
    read = TensorSource.read_together

    def read_elsewhere(self, tensors, buffer):
        arrays = zip(tensors, read(self, tensors, buffer), strict=True)
        return [np.roll(a, 1, axis=0) if tensor.endswith("weight_scale") else a for tensor, a in arrays]

    monkeypatch.setattr(TensorSource, "read_together", read_elsewhere)


def turn_nothing(monkeypatch):
    see = slabs._see_whole

    def see_as_it_lies(slab, stored, piece, *args):
        values = see(slab, stored, piece, *args)
        return np.resize(values.reshape(*piece.shape[::-1]).T, stored.shape) if piece.is_turned else values

    monkeypatch.setattr(slabs, "_see_whole", see_as_it_lies)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (swap_halves, "layer_1: Weight("),
        (swap_nibbles, "layer_1: Weight("),
        (shift_scales, "layer_1: Weight("),
        (turn_nothing, "layer_0/q_a_DA["),
    ],
)
def test_converter_that_packs_wrongly_is_found(source, tmp_path, monkeypatch, spoil, message):
    spoil(monkeypatch)
    errors = verify(source, converted_to(tmp_path / "out", source)).errors
    assert any(error.startswith(message) for error in errors), errors


def test_wrong_nibble_convention_shows_at_a_glance(here, tmp_path):
    """Two's complement instead of value + 8 turns the highest bit of every nibble around."""
    tensors = TensorSource(here)
    for name, entry in tensors.entries.items():
        if name.endswith("weight_packed"):
            words = tensors.read(name).view(np.uint32) ^ np.uint32(0x88888888)
            overwrite(here / entry.file, entry.begin, words.tobytes())
    report = verify(here, converted_to(tmp_path / "out", here))
    assert len(report.errors) == 1 and "these seem to be two's complement" in report.errors[0]
    lines = [line.count("#") for line in draw_histogram(report.histogram).splitlines()]
    assert max(lines[6:10]) < 15 and lines[0] + lines[15] > 60, "low in the middle, high at both ends"


def test_faults_of_either_side_are_named(here, tmp_path):
    out = converted_to(tmp_path / "out", here)
    entry = TensorSource(here).entries["language_model.lm_head.weight"]
    overwrite(here / entry.file, entry.begin, np.zeros(entry.end - entry.begin, np.uint8).tobytes())
    (out / "layer_1/router_ED/0.0").unlink()
    (out / "layer_0/o_HUD/.zarray").write_text((out / "layer_0/o_HUD/.zarray").read_text().replace("[8, 16", "[4, 16"))
    (out / "embed/extra").mkdir()
    errors = verify(here, out).errors
    for message in (
        "head/unembedding_VD[",
        f"{out}/layer_1/router_ED/0.0 is missing",
        f"{out}/layer_0/o_HUD/.zarray says bfloat16[4, 16, 64]; bfloat16[8, 16, 64] is needed",
        f"{out}/embed/extra is no array of the model",
    ):
        assert any(error.startswith(message) for error in errors), (message, errors)


def test_flipped_bytes_on_either_side_are_found_by_reading_everything(here, tmp_path):
    out = converted_to(tmp_path / "out", here)
    path = out / "layer_1/down_EMKmw/3.0.0.0.0"
    overwrite(path, 5000, bytes([path.read_bytes()[5000] ^ 1]))
    entry = TensorSource(here).entries["language_model.model.norm.weight"]
    data = (here / entry.file).read_bytes()
    overwrite(here / entry.file, entry.begin + 1, bytes([data[entry.begin + 1] ^ 1]))
    errors = verify(here, out, samples=1, full=True).errors
    advice = f"to have it made again, delete {out}/layer_1 and convert again"
    assert f"{path} is not as it was written; {advice}" in errors
    assert f"head was converted from other bytes than {here} has" in errors


def test_tensors_that_the_source_lacks_or_has_too_many_are_named(here, tmp_path):
    out = converted_to(tmp_path / "out", here)
    for path in (sorted(here.glob("*.safetensors"))[0], here / "model.safetensors.index.json"):
        path.write_bytes(path.read_bytes().replace(b"vision_tower.patch_embed", b"visiom_tower.patch_embed"))
    message = "visiom_tower.patch_embed.proj.weight in the source is neither part of the model nor left out on purpose"
    assert verify(here, out).errors == [message]


def test_inspect_counts_what_k26_takes_on_each_mesh():
    config = json.loads((CONFIGS / "kimi_k26.json").read_text())
    stored = stored_parameters(kimi.parameters(KimiConfig.from_hf(config)), "tensor=8")
    metadata = Metadata(
        kind="kimi", config=config, mesh="tensor=8", source_files={}, source_checksums={}, tokenizer_files=[],
        arrays=stored_arrays(stored),
    )  # fmt: skip
    sizes = inspect.sizes_by_kind(metadata)
    experts = 60 * 384 * 3 * 2048 * 7168
    assert sizes["routed experts"] == experts // 2 and sizes["scales of routed experts"] == experts // 16
    assert sum(sizes.values()) == 594_205_351_936
    assert inspect.bytes_a_device(metadata, "tensor=1") == sum(sizes.values())
    eighth = inspect.bytes_a_device(metadata, "tensor=8")
    assert sum(sizes.values()) / 8 < eighth < sum(sizes.values()) / 8 + 2.5e9, "what is replicated"
    lines = {line.split()[0]: line for line in map(lambda m: inspect._mesh_line(metadata, m), ("tensor=4", "tensor=8"))}
    assert lines["tensor=4"].count("too small") == 3 and lines["tensor=8"].count("left") == 3


def test_inspect_describes_both_kinds(source, tmp_path):
    text = "\n".join(inspect.describe(converted_to(tmp_path / "out", source)))
    assert "routed experts: INT4, a bfloat16 scale for 32 inputs, in the kernel's blocks" in text
    assert "moe_intermediate_size      512" in text and "tensor=8" in text
    drafter = converted_to(tmp_path / "drafter", GOLDEN / "drafter_sliding")
    text = "\n".join(inspect.describe(drafter))
    assert "DFlash drafter" in text and "INT4" not in text and "tensor=4         does not divide" in text


def test_synthesized_weights_are_sensible_and_the_same_again(source, tmp_path):
    synthesize(target_config(2), tmp_path / "again", shard_gb=3e-4)
    paths = sorted(path.name for path in source.iterdir())
    assert paths == sorted(path.name for path in (tmp_path / "again").iterdir()) and len(paths) > 3
    assert all((source / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in paths)
    tensors = {}
    for path in source.glob("*.safetensors"):
        tensors |= load_file(path)
    expert = "language_model.model.layers.1.mlp.experts.2.gate_proj."
    words = tensors[f"{expert}weight_packed"].view(np.uint32)
    nibbles = (words[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).astype(int) - 8
    assert (nibbles.min(), nibbles.max()) == (-7, 7) and abs(nibbles.mean()) < 0.1
    scale = tensors[f"{expert}weight_scale"].astype(np.float32)
    assert (scale > 0).all() and 0.4 < np.std(nibbles) * scale.mean() * np.sqrt(64) < 2.5
    assert tensors[f"{expert}weight_shape"].tolist() == [512, 64]
    dense = tensors["language_model.lm_head.weight"].astype(np.float32)
    assert abs(dense.mean()) < 0.01 and 0.4 < dense.std() * np.sqrt(64) < 2.5
    assert all(np.isfinite(value.astype(np.float32)).all() for value in tensors.values() if value.dtype == jnp.bfloat16)


def test_synthesize_refuses_by_name(tmp_path):
    with pytest.raises(ValueError, match="num_layers is 9; allowed are 1 to 3"):
        synthesize(target_config(3), tmp_path / "out", num_layers=9)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("")
    with pytest.raises(ValueError, match="full is not empty"):
        synthesize(target_config(3), tmp_path / "full")
    with pytest.raises(ValueError, match="hidden_act"):
        synthesize(target_config(3, hidden_act="gelu"), tmp_path / "out")


def test_progress_tells_speed_and_time_left():
    line = describe(State(1, 4, 25_000_000_000, 100_000_000_000, "layer_3"), 50.0)
    assert line == "[######                  ] 1/4 parts, 25.00 of 100.00 GB, 0.50 GB/s, 2:30 left, layer_3   "
