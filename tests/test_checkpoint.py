"""Converted folders: restored as asked on any mesh, finished or refused, never half taken for whole."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_tools.convert import claim, convert
from ddtree_jax import checkpoint, dflash, kimi
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.sharding import make_mesh, sharding_of

GOLDEN = Path(__file__).parent / "golden"


def quiet(state):
    pass


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    out = tmp_path_factory.mktemp("target") / "out"
    convert(GOLDEN / "target", out, report=quiet)
    return out


@pytest.fixture
def drafter(tmp_path):
    convert(GOLDEN / "drafter", tmp_path / "drafter", report=quiet)
    return tmp_path / "drafter"


def target_parameters(out):
    return kimi.parameters(KimiConfig.from_hf(checkpoint.read_metadata(out, "kimi").config))


def drafter_parameters():
    return dflash.parameters(DFlashConfig.from_hf(json.loads((GOLDEN / "drafter/config.json").read_text())))


def load_drafter(out, parameters=None):
    return checkpoint.load(out, parameters or drafter_parameters(), make_mesh(None), jnp.bfloat16)


def leaves(arrays):
    return {(part, name): array for part, table in arrays.items() for name, array in table.items()}


def contents(out):
    """Name, bytes and time of change of every file."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.rglob("*") if path.is_file()}


def test_compute_dtype_is_given_to_the_parameters_without_one(target):
    parameters = target_parameters(target)
    stored = leaves(checkpoint.load(target, parameters, make_mesh(None), jnp.bfloat16))
    wide = leaves(checkpoint.load(target, parameters, make_mesh(None), jnp.float32))
    for key, info in leaves(parameters).items():
        assert stored[key].dtype == (info.dtype or jnp.bfloat16) and wide[key].dtype == (info.dtype or jnp.float32)
        np.testing.assert_array_equal(np.asarray(wide[key]), np.asarray(stored[key]).astype(wide[key].dtype))


def test_eight_devices_hold_what_one_holds(target):
    parameters, mesh = target_parameters(target), make_mesh("expert=4,tensor=2")
    whole = leaves(checkpoint.load(target, parameters, make_mesh(None), jnp.bfloat16))
    split = leaves(checkpoint.load(target, parameters, mesh, jnp.bfloat16))
    for key, info in leaves(parameters).items():
        assert split[key].sharding.is_equivalent_to(sharding_of(info, mesh, key[1]), len(info.shape))
        np.testing.assert_array_equal(np.asarray(split[key]), np.asarray(whole[key]))
    assert split["layer_1", "gate_up_E2FI"].addressable_shards[0].data.shape == (4, 2, 32, 16)


def test_metadata_survives_its_file_and_names_the_source(target):
    metadata = checkpoint.read_metadata(target)
    assert checkpoint.Metadata.from_json(metadata.to_json()) == metadata
    assert metadata.config == json.loads((GOLDEN / "target/config.json").read_text())
    assert set(metadata.source_files) == {path.name for path in (GOLDEN / "target").iterdir()}
    for name, identity in metadata.source_files.items():
        assert identity["bytes"] == (GOLDEN / "target" / name).stat().st_size


def test_tokenizer_files_travel_with_the_model(tmp_path):
    shutil.copytree(GOLDEN / "drafter", tmp_path / "source", copy_function=shutil.copyfile)
    (tmp_path / "source/tiktoken.model").write_bytes(b"IQ== 0\n")
    (tmp_path / "source/tokenizer_config.json").write_text("{}")
    metadata = convert(tmp_path / "source", tmp_path / "out", report=quiet)
    assert (tmp_path / "out/tiktoken.model").read_bytes() == b"IQ== 0\n"
    assert (tmp_path / "out/tokenizer_config.json").read_text() == "{}"
    assert "tiktoken.model" in metadata.source_files


def test_finished_output_is_left_alone(drafter, capsys):
    before = contents(drafter)
    convert(GOLDEN / "drafter", drafter)
    assert contents(drafter) == before
    assert "already holds" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["target", "drafter_sliding"])
def test_output_of_another_model_is_refused(drafter, other):
    before = contents(drafter)
    with pytest.raises(ValueError, match=f"{drafter}/manifest.json belongs to another model .other .*in config.json"):
        convert(GOLDEN / other, drafter)
    assert contents(drafter) == before


def test_new_weights_of_the_same_size_are_noticed(tmp_path, drafter):
    shutil.copytree(GOLDEN / "drafter", tmp_path / "source", copy_function=shutil.copyfile)
    weights = bytearray((tmp_path / "source/model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "source/model.safetensors").write_bytes(weights)
    with pytest.raises(
        ValueError, match="has changed since .*drafter was begun:\n  [a-z_0-9]+ was converted from other"
    ):
        convert(tmp_path / "source", drafter)


def test_folder_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("unsaved")
    with pytest.raises(ValueError, match="holds thesis.tex, not of an unfinished conversion"):
        convert(GOLDEN / "drafter", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_folder_named_like_a_part_is_not_ours(tmp_path):
    (tmp_path / "layer_0").mkdir()
    (tmp_path / "layer_0/precious.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds layer_0, not of an unfinished conversion"):
        convert(GOLDEN / "drafter", tmp_path)
    assert (tmp_path / "layer_0/precious.txt").read_text() == "mine"


def test_lost_part_comes_back_by_converting_again(drafter):
    whole = leaves(load_drafter(drafter))
    shutil.rmtree(drafter / "layer_1")
    convert(GOLDEN / "drafter", drafter, report=quiet)
    again = leaves(load_drafter(drafter))
    assert all(np.array_equal(again[key], array) for key, array in whole.items())


def test_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/out can't be written"):
        convert(GOLDEN / "drafter", tmp_path / "file" / "out", report=quiet)


def test_two_conversions_do_not_share_a_folder(tmp_path):
    with claim(tmp_path / "out"), pytest.raises(ValueError, match="another run is converting into it"):
        convert(GOLDEN / "drafter", tmp_path / "out", report=quiet)


def edit_metadata(out, **changes):
    values = json.loads((out / "metadata.json").read_text())
    (out / "metadata.json").write_text(json.dumps(values | changes))


@pytest.mark.parametrize(
    "spoil, complaint",
    [
        (shutil.rmtree, "is not a folder; a converted checkpoint is needed"),
        (lambda out: [shutil.rmtree(out), out.mkdir()], "has no metadata.json; a converted checkpoint is needed"),
        (lambda out: (out / "metadata.json").unlink(), "has no metadata.json: an unfinished conversion"),
        (
            lambda out: edit_metadata(out, format_version=1),
            "metadata.json: format_version is 1; this version reads 2: convert again",
        ),
        (lambda out: edit_metadata(out, kind="llama"), "metadata.json: kind is 'llama'; allowed: 'kimi', 'dflash'"),
        (lambda out: edit_metadata(out, color="red"), "metadata.json: has arrays, color, .* are needed"),
        (lambda out: (out / "metadata.json").write_text("{"), "metadata.json: Expecting"),
        (lambda out: shutil.rmtree(out / "layer_2"), "drafter/layer_2 can't be read; convert again"),
    ],
)
def test_bad_checkpoint_is_refused_by_name(drafter, spoil, complaint):
    spoil(drafter)
    with pytest.raises(ValueError, match=complaint) as error:
        load_drafter(drafter)
    assert str(drafter) in str(error.value)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:5]), lambda path: path.unlink()])
def test_damaged_part_is_refused_by_name(drafter, damage):
    # The part with a single array: of several, Orbax leaves the others' reads behind, to complain from their threads.
    damage(drafter / "head/norm_D/0")
    with pytest.raises(ValueError, match="drafter/head can't be read; convert again"):
        load_drafter(drafter)


def test_other_kind_of_model_and_unconverted_source_are_refused(target):
    with pytest.raises(ValueError, match="out holds a 'kimi' model; 'dflash' is needed here"):
        checkpoint.read_metadata(target, "dflash")
    with pytest.raises(ValueError, match="drafter is a Hugging Face checkpoint; convert it first"):
        checkpoint.read_metadata(GOLDEN / "drafter")


def test_arrays_that_are_not_the_models_are_all_named(drafter):
    parameters = drafter_parameters()
    parameters["layer_0"]["extra_D"] = parameters["layer_0"]["input_norm_D"]
    del parameters["layer_1"]["k_norm_R"]
    parameters["layer_2"]["gate_DF"] = dataclasses.replace(parameters["layer_2"]["gate_DF"], shape=(128, 319))
    parameters["head"]["norm_D"] = dataclasses.replace(parameters["head"]["norm_D"], dtype=jnp.float32)
    with pytest.raises(ValueError) as error:
        load_drafter(drafter, parameters)
    assert str(error.value).splitlines() == [
        f"{drafter}:",
        "  layer_0/extra_D is missing; bfloat16[128] is needed",
        "  layer_1/k_norm_R is there, but the model has no such parameter",
        "  layer_2/gate_DF is bfloat16[128, 320]; bfloat16[128, 319] is needed",
        "  head/norm_D is bfloat16[128]; float32[128] is needed",
    ]
