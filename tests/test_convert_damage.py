"""What is damaged behind a conversion is found by verify, by name, and mended by converting again."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from small_sources import write_target
from test_convert_refusals import DEEP, GOLDEN, INDEX, contents, edit_header, edit_tensors, quiet

from checkpoints_tools import inspect, orbax_item
from checkpoints_tools.convert import convert
from checkpoints_tools.folder import claim
from checkpoints_tools.manifest import read_manifest
from checkpoints_tools.verify import verify

SECOND = "model-00002-of-000004.safetensors"
GATE = "language_model.model.layers.1.mlp.shared_experts.gate_proj.weight"
SHAPE = "language_model.model.layers.1.mlp.experts.0.up_proj.weight_shape"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A source in four files, with a tokenizer, and what it becomes."""
    folder = tmp_path_factory.mktemp("whole")
    write_target(folder / "source", num_layers=2, shard_gb=3e-4)
    (folder / "source/tiktoken.model").write_bytes(b"IQ== 0\n")
    convert(folder / "source", folder / "out", report=quiet)
    assert (folder / "source" / SECOND).is_file()
    return folder


@pytest.fixture
def here(whole, tmp_path):
    """Copies of both to damage."""
    for name in ("source", "out"):
        shutil.copytree(whole / name, tmp_path / name)
    return tmp_path


def faults(here, *, full=False):
    return verify(here / "source", here / "out", samples=1, full=full).errors


def assert_right_run_mends(whole, here):
    convert(here / "source", here / "out", report=quiet)
    assert contents(here / "out") == contents(whole / "out")
    assert faults(here, full=True) == []


def flip(path, place=-1):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def edit_json(path, edit):
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def edit_zarray(**changes):
    return lambda here: edit_json(here / "out/layer_0/o_HUD/.zarray", lambda values: values.update(changes))


def edit_manifest(edit):
    return lambda here: edit_json(here / "out/manifest.json", edit)


def edit_metadata(edit):
    return lambda here: edit_json(here / "out/metadata.json", edit)


AGAIN = "is not as it was written; to have it made again, delete {out}/layer_%d and convert again"
ZARRAY = "{out}/layer_0/o_HUD/.zarray"

MENDED = {
    "chunk is lost": (
        lambda here: (here / "out/layer_1/down_EMKmw/3.0.0.0.0").unlink(),
        ["{out}/layer_1/down_EMKmw/3.0.0.0.0 is missing or not of 18432 bytes"],
    ),
    "part is lost": (lambda here: shutil.rmtree(here / "out/layer_1"), ["{out}/layer_1 is missing"]),
    "_METADATA is lost": (
        lambda here: (here / "out/layer_1/_METADATA").unlink(),
        ["{out}/layer_1/_METADATA is missing"],
    ),
    "_METADATA is damaged": (
        lambda here: flip(here / "out/layer_1/_METADATA", 5),
        ["{out}/layer_1/_METADATA " + AGAIN % 1, "{out}/layer_1/_METADATA does not list the arrays of the model"],
    ),
    "other order": (edit_zarray(order="F"), [f"{ZARRAY} {AGAIN % 0}", f"{ZARRAY}: order is 'F'; 'C' is needed"]),
    "odd chunks": (
        edit_zarray(chunks=[0, 16, 64]),
        [f"{ZARRAY} {AGAIN % 0}", f"{ZARRAY} has chunks [0, 16, 64]; divisors of [8, 16, 64] are needed"],
    ),
    "chunks of a string": (edit_zarray(chunks="ab"), [f"{ZARRAY}: chunks is 'ab'; a list is needed"]),
    "other dtype": (
        edit_zarray(dtype="bogus"),
        [f"{ZARRAY} says bogus[8, 16, 64]; bfloat16[8, 16, 64] is needed"],
    ),
    "tokenizer is lost": (
        lambda here: (here / "out/tiktoken.model").unlink(),
        ["{out}/tiktoken.model is missing there or in metadata.json, but {source} has one"],
    ),
    "tokenizer is damaged": (
        lambda here: flip(here / "out/tiktoken.model"),
        ["{out}/tiktoken.model is not the one of {source}"],
    ),
    "part without a record": (
        edit_manifest(lambda values: values["parts"].pop("layer_1")),
        ["layer_1 is not in {out}/manifest.json"],
    ),
    "record without files": (
        edit_manifest(lambda values: values["parts"]["layer_1"].update(files={})),
        ["{out}/manifest.json: files of layer_1 are not those of its arrays"],
    ),
    "other arrays": (
        edit_metadata(lambda values: values["arrays"].pop("layer_1")),
        ["layer_1 is not in {out}/metadata.json"],
    ),
}


@pytest.mark.parametrize("case", MENDED)
def test_damage_of_an_output_is_found_and_mended(whole, here, case):
    damage, expected = MENDED[case]
    damage(here)
    names = {"out": here / "out", "source": here / "source"}
    assert faults(here) == [fault.format(**names) for fault in expected]
    assert_right_run_mends(whole, here)


def test_flipped_byte_of_a_chunk_is_found_by_reading_all_and_mended_by_deleting_the_part(whole, here, capsys):
    path = here / "out/layer_1/down_EMKmw/3.0.0.0.0"
    flip(path)
    convert(here / "source", here / "out", report=quiet)
    assert "left as it is (by names and sizes: verify --full reads all)" in capsys.readouterr().err
    assert faults(here, full=True) == [f"{path} {AGAIN.format(out=here / 'out') % 1}"]
    shutil.rmtree(here / "out/layer_1")
    assert_right_run_mends(whole, here)


def test_tokenizer_that_the_source_has_no_longer_does_not_stay(here, capsys):
    (here / "source/tiktoken.model").unlink()
    assert faults(here) == [f"{here}/out/tiktoken.model is there or in metadata.json, but {here}/source has none"]
    convert(here / "source", here / "out", report=quiet)
    assert f"{here}/out/tiktoken.model is removed; {here}/source has none" in capsys.readouterr().err
    assert faults(here, full=True) == []


UNUSABLE = {
    "manifest of a list": ("{out}/manifest.json holds a list; a JSON object is needed", b"[]"),
    "deep manifest": ("{out}/manifest.json is not valid JSON: it is nested too deeply", DEEP),
    "manifest of another version": ("{out}/manifest.json: format_version is 1; this version writes 2", {"format_version": 1}),
    "manifest of no mesh": (
        "{out}/manifest.json: mesh is 'banana'; allowed: sizes of tensor and expert, such as 'tensor=8'",
        {"mesh": "banana"},
    ),
    "odd record": (
        "{out}/manifest.json: parts: embed: files: a: 0 is 1.5; an integer from 0 to 9223372036854775807 is needed",
        {"parts": {"embed": {"source_checksum": "0", "files": {"a": [1.5, 2]}}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_manifest_is_named_by_both(whole, here, case):
    message, data = UNUSABLE[case]
    path = here / "out/manifest.json"
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        edit_json(path, lambda values: values.update(data))
    message = f"{message.format(out=here / 'out')}: delete the folder or choose another"
    assert faults(here) == [message]
    with pytest.raises(ValueError) as error:
        convert(here / "source", here / "out", report=quiet)
    assert str(error.value) == message
    shutil.rmtree(here / "out")
    assert_right_run_mends(whole, here)


def test_part_that_the_model_does_not_have(here):
    edit_manifest(lambda values: values["parts"].update(layer_9=values["parts"]["layer_1"]))(here)
    assert faults(here, full=True) == [f"layer_9 in {here}/out/manifest.json is no part of the model"]
    with pytest.raises(
        ValueError, match="manifest.json has layer_9, no part of the model; delete that folder or choose"
    ):
        convert(here / "source", here / "out", report=quiet)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrays": 3}, "arrays is 3; an object is needed"),
        ({"mesh": "banana"}, "mesh is 'banana'; allowed: sizes of tensor and expert, such as 'tensor=8'"),
        ({"config": {}}, "config.json: 'quantization_config' is missing; a dict is needed"),
        ({"kind": "dflash"}, "kind is 'dflash'; its config is that of a 'kimi' model"),
        ({"tokenizer_files": "ab"}, "tokenizer_files is 'ab'; a list is needed"),
    ],
)
def test_odd_metadata_is_named_by_verify_and_inspect_and_written_anew(whole, here, changes, message):
    edit_metadata(lambda values: values.update(changes))(here)
    for look in (faults, lambda here: list(inspect.describe(here / "out"))):
        with pytest.raises(ValueError) as error:
            look(here)
        assert str(error.value) == f"{here}/out/metadata.json: {message}"
    assert_right_run_mends(whole, here)


@pytest.mark.parametrize("name", ["layer_1", "layer_1.partial", "manifest.json", "metadata.json", "tiktoken.model"])
def test_what_stands_in_the_way_is_named_and_left_alone(whole, here, name):
    path, kind = here / "out" / name, "a folder" if name.startswith("layer") else "a file"
    with contextlib.suppress(FileNotFoundError):
        path.rename(here / "aside")
    path.write_text("mine") if kind == "a folder" else path.mkdir()
    with pytest.raises(ValueError) as error:
        convert(here / "source", here / "out", report=quiet)
    assert str(error.value) == f"{path} is no {kind[2:]}; the conversion needs {kind} there: move it away"
    assert path.read_text() == "mine" if kind == "a folder" else path.is_dir()
    path.unlink() if kind == "a folder" else path.rmdir()
    if (here / "aside").exists():
        (here / "aside").rename(path)
    assert_right_run_mends(whole, here)


def edit_entry(**changes):
    def edit(header):
        values = json.loads(header)
        values[GATE] |= changes
        return json.dumps(values).encode()

    return lambda source: edit_header(source / SECOND, edit)


def remove_index_entry(source):
    edit_json(source / INDEX, lambda values: values["weight_map"].pop(GATE))


def overwrite_shape(source):
    (path,) = (path for path in source.glob("*.safetensors") if SHAPE.encode() in path.read_bytes())
    edit_tensors(path, lambda tensors: tensors.update({SHAPE: np.array([64, 512], np.int32)}))


INCOMPLETE = "{source}/%s can't be read: Error while deserializing header: incomplete metadata, file not fully covered"

SOURCES = {
    "missing shard": (lambda s: (s / SECOND).unlink(), "{source}/" + f"{SECOND} is missing"),
    "truncated shard": (lambda s: os.truncate(s / SECOND, (s / SECOND).stat().st_size - 2), INCOMPLETE % SECOND),
    "missing index": (lambda s: (s / INDEX).unlink(), "{source} has neither " + f"{INDEX} nor model.safetensors"),
    "stray shard": (
        lambda s: shutil.copyfile(s / SECOND, s / "a.safetensors"),
        "{source}/a.safetensors belongs to no index or single file",
    ),
    "tensor that the index lacks": (remove_index_entry, f"{GATE} is in {SECOND}; {INDEX} says None"),
    "wrong shape": (edit_entry(shape=[64, 512]), f"{GATE} in the source is BF16[64, 512]; BF16[512, 64] is needed"),
    "F8": (
        edit_entry(shape=[512, 128], dtype="F8_E4M3"),
        f"{GATE} in the source is F8_E4M3[512, 128]; BF16[512, 64] is needed",
    ),
    "other stated shape": (overwrite_shape, f"{SHAPE} in the source says [64, 512]; [512, 64] is needed"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_fault_of_a_source_is_named_by_verify(here, case):
    damage, message = SOURCES[case]
    damage(here / "source")
    assert message.format(source=here / "source") in (found := faults(here))
    assert len(found) == 1
    assert set(found) <= set(faults(here, full=True)), "which must not fail on it either"


def test_published_checksums_that_arrive_later_are_used(whole, here):
    before = {path: path.stat().st_mtime_ns for path in (here / "out").rglob("*") if path.name != "manifest.json"}
    shards = sorted(path.name for path in (here / "source").glob("*.safetensors"))
    digests = {name: hashlib.sha256((here / "source" / name).read_bytes()).hexdigest() for name in shards}
    lines = [f"{digest.upper()} *./{name}\r\n\n" for name, digest in digests.items()]
    (here / "source/SHA256SUMS").write_text("".join(lines))
    convert(here / "source", here / "out", report=quiet)
    assert read_manifest(here / "out").checked == digests
    assert {path: path.stat().st_mtime_ns for path in before} == before
    wrong = "0" * 64
    (here / "source/SHA256SUMS").write_text("".join(lines).replace(digests[SECOND].upper(), wrong))
    with pytest.raises(ValueError) as error:
        convert(here / "source", here / "out", report=quiet)
    path = here / "source" / SECOND
    assert str(error.value).splitlines() == [
        f"{here}/source can't be converted (3 of 4 parts are finished and kept):",
        f"  {path} has SHA-256 {digests[SECOND]}; {wrong} is published: download it again",
        f"  layer_1 needs {SECOND}, which is damaged",
    ]
    (here / "source/SHA256SUMS").write_text("".join(lines))
    assert_right_run_mends(whole, here)


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EIO])
def test_write_that_fails_names_its_file(whole, here, monkeypatch, number):
    shutil.rmtree(here / "out")
    write, room = os.write, [300_000]

    def fail_some_time(fd, data):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(number, os.strerror(number))
        return write(fd, data)

    monkeypatch.setattr(orbax_item.os, "write", fail_some_time)
    with pytest.raises(OSError, match=rf"\[Errno {number}\] {os.strerror(number)}: '{here}/out/.*\.partial"):
        convert(here / "source", here / "out", report=quiet)
    monkeypatch.undo()
    assert_right_run_mends(whole, here)


def test_folder_of_another_model_is_left_alone(whole, here):
    with pytest.raises(ValueError, match="out/manifest.json belongs to another model .* delete that folder or choose"):
        convert(GOLDEN / "drafter", here / "out", report=quiet)
    assert_right_run_mends(whole, here)


@pytest.mark.parametrize("is_there_again", [False, True])
def test_lock_of_a_file_that_the_other_run_has_removed_is_none(tmp_path, monkeypatch, is_there_again):
    """Between opening and locking, the run that had the folder ends and removes its marker; a third may make one anew."""
    lock = fcntl.flock

    def end_other_run(*arguments):
        monkeypatch.undo()
        (tmp_path / ".converting").unlink()
        if is_there_again:
            (tmp_path / ".converting").touch()
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", end_other_run)
    with claim(tmp_path):
        with pytest.raises(ValueError, match="another run is converting into it"), claim(tmp_path):
            pass
        (tmp_path / ".converting").unlink()
    assert not list(tmp_path.iterdir())
