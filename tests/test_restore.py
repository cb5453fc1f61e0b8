"""Blocks in a checkpoint: the same arrays on every mesh, nothing read that is not needed, engines from the folder alone."""

import json
import shutil
import socket

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from forked import ROOT, programs
from small_sources import drafter_config, write_target

from checkpoints_tools.convert import convert
from checkpoints_tools.synthesize import synthesize
from ddtree_jax import Engine, checkpoint, generate, kimi
from ddtree_jax.config import KimiConfig
from ddtree_jax.pallas.int4_moe import ExpertBlocks
from ddtree_jax.sharding import make_mesh

MESHES = (None, "tensor=2", "expert=2", "tensor=4", "expert=2,tensor=2", "tensor=8", "expert=8", "expert=4,tensor=2")
SPARE = 1.2
"""A process may read this many times its own bytes."""


def quiet(state):
    pass


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("restore")
    sizes = {"hidden_size": 256, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "v_head_dim": 64}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 16}
    return write_target(folder / "source", num_layers=2, shard_gb=4e-3, **sizes)


@pytest.fixture(scope="module")
def converted(source):
    convert(source, source.parent / "out", report=quiet)
    return source.parent / "out"


@pytest.fixture(scope="module")
def server():
    with programs() as server:
        yield server


def parameters_of(out):
    return kimi.parameters(KimiConfig.from_hf(checkpoint.read_metadata(out).config))


def load(out, mesh):
    return checkpoint.load(out, parameters_of(out), make_mesh(mesh), jnp.bfloat16, as_blocks=True)


def bytes_read():
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def assert_same(found, expected):
    assert {part: set(table) for part, table in found.items()} == {part: set(table) for part, table in expected.items()}
    for part, table in expected.items():
        for name, array in table.items():
            a, b = np.asarray(found[part][name]), np.asarray(array)
            np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"), err_msg=f"{part}/{name}")


def test_every_mesh_restores_the_same_blocks_and_reads_them_once(converted):
    expected = load(converted, None)
    assert expected["layer_1"]["gate_up_EMKmw"].shape == (8, 8, 4, 2, 576)
    size = sum(array.nbytes for array in jax.tree.leaves(expected))
    for mesh in MESHES:
        before = bytes_read()
        found = load(converted, mesh)
        assert size <= bytes_read() - before <= SPARE * size, mesh
        assert_same(found, expected)
        blocks = found["layer_1"]["gate_up_EMKmw"]
        assert {shard.data.nbytes for shard in blocks.addressable_shards} == {blocks.nbytes // make_mesh(mesh).size}


@pytest.mark.parametrize(
    ("devices", "meshes"), [(1, ["tensor=2"]), (2, ["tensor=4"]), (4, ["tensor=8", "expert=8", "expert=2,tensor=4"])]
)
def test_a_process_reads_its_own_bytes(server, converted, devices, meshes):
    """Two processes, each with so many devices, restore together."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = [ROOT / "tests/restore_process.py", converted, port, 2]
    flags = f"--xla_force_host_platform_device_count={devices}"
    for result in server.run([*script, 0, *meshes], [*script, 1, *meshes], XLA_FLAGS=flags):
        assert result.returncode == 0, result.stderr
        lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
        assert [line["mesh"] for line in lines] == meshes
        for line in lines:
            assert line["own"] <= line["read"] <= SPARE * line["own"], line


def test_mesh_that_would_cut_blocks_gets_words(source, tmp_path):
    convert(source, tmp_path / "out", mesh="tensor=2", report=quiet)
    parameters, mesh = parameters_of(tmp_path / "out"), make_mesh("tensor=8")
    whole, cut = load(tmp_path / "out", "tensor=2"), load(tmp_path / "out", "tensor=8")
    assert whole["layer_1"]["gate_up_EMKmw"].shape == (8, 2, 4, 8, 576)
    assert cut["layer_1"]["down_EDI"].sharding.mesh == mesh
    assert cut["layer_1"]["down_EDI"].addressable_shards[0].data.shape == (8, 256, 8)
    for text in (None, "tensor=2", "expert=4,tensor=2"):
        assert_same(checkpoint.load(tmp_path / "out", parameters, make_mesh(text), jnp.bfloat16), cut)


def test_orbax_itself_reads_an_item_and_describes_it_alike(converted, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(converted / "layer_1")
    expected = load(converted, None)["layer_1"]
    assert_same({"layer_1": found}, {"layer_1": expected})
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
    ocp.Checkpointer(handler).save(tmp_path / "theirs", expected)
    ours, theirs = (
        json.loads((folder / "_METADATA").read_text()) for folder in (converted / "layer_1", tmp_path / "theirs")
    )
    for entry in theirs["tree_metadata"].values():
        entry["value_metadata"].pop("write_shape", None)
    assert ours == theirs
    for name in expected:
        ours, theirs = (
            json.loads((folder / name / ".zarray").read_text())
            for folder in (converted / "layer_1", tmp_path / "theirs")
        )
        assert ours | {"chunks": theirs["chunks"], "compressor": theirs["compressor"]} == theirs


def test_engines_start_from_the_folder_alone_whatever_mesh_it_was_written_for(source, converted, tmp_path):
    convert(source, tmp_path / "words", mesh="tensor=16", report=quiet)
    assert (tmp_path / "words/layer_1/down_EDI").is_dir(), "features do not fill whole blocks on 16 devices"
    convert(source, tmp_path / "two", mesh="tensor=2", report=quiet)
    moved = shutil.copytree(converted, tmp_path / "moved")
    ids, logits = [3, 1, 4, 1, 5], []
    cases = [(tmp_path / "words", None), (moved, "expert=4,tensor=2"), (tmp_path / "two", "tensor=8")]
    for folder, mesh in cases:
        logits.append(Engine.load(folder, mesh=mesh, max_length=16, dtype="float32").score(ids))
    assert np.abs(logits[0]).max() > 0.1
    for other in logits[1:]:
        np.testing.assert_allclose(other, logits[0], atol=2e-5)


def test_engine_with_kernels_gets_the_stored_blocks(converted, monkeypatch):
    plain = Engine.load(converted, max_length=16, dtype="float32")
    monkeypatch.setattr(generate, "_choose_kernels", lambda *_: True)
    monkeypatch.setattr(kimi, "pack_experts", lambda arrays, mesh: None)
    engine = Engine.load(converted, mesh="expert=4,tensor=2", max_length=16, dtype="float32")
    assert engine.models.target.blocks[1].experts.form is ExpertBlocks
    assert plain.models.target.blocks[1].experts.form is not ExpertBlocks
    np.testing.assert_allclose(engine.score([3, 1, 4]), plain.score([3, 1, 4]), atol=2e-5)


def test_drafter_for_another_target_and_another_version_are_refused_by_name(converted, tmp_path):
    synthesize(drafter_config("kimi_k26_dflash_reconstructed"), tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "drafter", report=quiet)
    with pytest.raises(ValueError, match="hidden_size is 64; this target allows 256"):
        Engine.load(converted, tmp_path / "drafter", max_length=16)
    with pytest.raises(ValueError, match="drafter holds a 'dflash' model; 'kimi' is needed here"):
        Engine.load(tmp_path / "drafter", max_length=16)
    values = json.loads((tmp_path / "drafter/metadata.json").read_text())
    (tmp_path / "drafter/metadata.json").write_text(json.dumps(values | {"format_version": 3}))
    with pytest.raises(ValueError, match="drafter/metadata.json: format_version is 3; this version reads 2"):
        Engine.load(converted, tmp_path / "drafter", max_length=16)
