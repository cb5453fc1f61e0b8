"""A conversion that died goes on; whatever stops one is named, and leaves a state from which the right run succeeds."""

import errno
import os
import shutil

import numpy as np
import pytest
from small_sources import write_target

from checkpoints_tools import orbax_item
from checkpoints_tools.convert import claim, convert
from checkpoints_tools.manifest import read_manifest
from checkpoints_tools.source import TensorSource, file_sha256
from ddtree_jax import checkpoint

INDEX = "model.safetensors.index.json"


def quiet(state):
    pass


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A source of several shards, and what an undisturbed run makes of it."""
    folder = tmp_path_factory.mktemp("written")
    write_target(folder / "source")
    convert(folder / "source", folder / "out", report=quiet)
    return folder


@pytest.fixture
def here(written, tmp_path):
    """A copy of that source to spoil."""
    shutil.copytree(written / "source", tmp_path / "source")
    return tmp_path / "source"


def contents(out):
    """Bytes of every file but the manifest, which knows when the source's files were changed."""
    paths = [path for path in out.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def assert_right_run_succeeds(written, folder, out):
    convert(folder, out, report=quiet)
    assert contents(out) == contents(written / "out")


def complaint(folder, out, **options):
    with pytest.raises((ValueError, OSError)) as error:
        convert(folder, out, report=quiet, **options)
    assert not (out / checkpoint.METADATA_FILE).exists()
    return str(error.value)


def overwrite(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def entry_of(folder, tensor):
    entry = TensorSource(folder).entries[f"language_model.model.{tensor}"]
    return folder / entry.file, entry


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_interrupted_conversion_is_no_checkpoint_until_it_is_run_again(written, tmp_path, parts):
    def interrupt(state):
        if state.parts == parts:
            raise KeyboardInterrupt

    out, folder = tmp_path / "out", written / "source"
    with pytest.raises(KeyboardInterrupt):
        convert(folder, out, report=interrupt)
    with pytest.raises(ValueError, match="out has no metadata.json: an unfinished conversion"):
        checkpoint.read_metadata(out)
    before = {path: path.stat().st_mtime_ns for part in read_manifest(out).parts for path in (out / part).rglob("*")}
    assert_right_run_succeeds(written, folder, out)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_disk_without_room_is_noticed_before_anything_is_written(written, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    message = complaint(written / "source", tmp_path / "out")
    assert "disk full" in message and "1,000 are free" in message
    monkeypatch.undo()
    assert_right_run_succeeds(written, written / "source", tmp_path / "out")


def test_disk_that_fills_up_keeps_what_is_finished(written, tmp_path, monkeypatch):
    write, room = os.write, [600_000]

    def write_while_there_is_room(fd, data):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(orbax_item.os, "write", write_while_there_is_room)
    message = complaint(written / "source", tmp_path / "out")
    assert (
        "disk full (No space left on device); finished parts are kept, and the next run goes on behind them" in message
    )
    assert not list((tmp_path / "out").glob("*.partial")), "what is of no use takes no room"
    monkeypatch.undo()
    kept = list(read_manifest(tmp_path / "out").parts)
    assert kept and "layer_2" not in kept
    assert_right_run_succeeds(written, written / "source", tmp_path / "out")


def test_shard_that_shrinks_while_it_is_read_is_named(written, here, tmp_path):
    path, entry = entry_of(here, "layers.2.mlp.experts.5.down_proj.weight_packed")

    def truncate(state):
        if state.parts == 2:
            os.truncate(path, entry.begin)

    with pytest.raises(ValueError, match="the file now has") as error:
        convert(here, tmp_path / "out", report=truncate)
    assert str(path) in str(error.value) and "layers.2.mlp.experts." in str(error.value)
    assert f"{here} can't be converted (3 of 5 parts are finished and kept)" in str(error.value)
    shutil.copyfile(written / "source" / path.name, path)
    assert_right_run_succeeds(written, here, tmp_path / "out")


def test_bytes_that_cannot_be_read_are_named_with_their_tensor(written, tmp_path, monkeypatch):
    path, entry = entry_of(written / "source", "layers.1.mlp.experts.3.up_proj.weight_packed")
    read, middle = os.preadv, (entry.begin + entry.end) // 2

    def read_from_bad_disk(fd, buffers, start):
        if os.path.sameopenfile(fd, spoiled.fileno()) and start <= middle < start + len(buffers[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, start)

    monkeypatch.setattr(os, "preadv", read_from_bad_disk)
    with path.open("rb") as spoiled:
        message = complaint(written / "source", tmp_path / "out")
    assert f"layers.1.mlp.experts.3.up_proj.weight_packed in {path} can't be read at bytes {entry.begin}" in message
    monkeypatch.undo()
    assert_right_run_succeeds(written, written / "source", tmp_path / "out")


def test_all_values_that_are_no_numbers_are_named_and_the_rest_is_converted(written, here, tmp_path):
    path, entry = entry_of(here, "layers.1.mlp.experts.3.down_proj.weight_scale")
    overwrite(path, entry.begin + 2 * (5 * entry.shape[1] + 7), b"\xc0\x7f")
    path, entry = entry_of(here, "layers.2.self_attn.q_a_proj.weight")
    overwrite(path, entry.begin + 2 * (3 * entry.shape[1] + 9), b"\x80\xff")
    path, entry = entry_of(here, "embed_tokens.weight")
    for row in (7, 200):  # in two chunks
        overwrite(path, entry.begin + 2 * (row * entry.shape[1] + 1), b"\xc0\x7f")
    message = complaint(here, tmp_path / "out")
    assert (
        message.count("embed_tokens.weight is nan at [") == message.count("embed_tokens.weight is nan at [7, 1]") == 1
    )
    assert "layers.1.mlp.experts.3.down_proj.weight_scale is nan at [5, 7]; finite numbers are needed" in message
    assert "layers.2.self_attn.q_a_proj.weight is -inf at [3, 9]; finite numbers are needed" in message
    assert "(2 of 5 parts are finished and kept)" in message
    shutil.copytree(written / "source", here, dirs_exist_ok=True)
    assert_right_run_succeeds(written, here, tmp_path / "out")


@pytest.mark.parametrize("listed_by", ["SHA256SUMS", "huggingface", "cache"])
def test_flipped_byte_in_a_shard_with_a_known_checksum(written, here, tmp_path, listed_by):
    shards = sorted(here.glob("*.safetensors"))
    digests = {path.name: file_sha256(path) for path in shards}
    if listed_by == "SHA256SUMS":
        (here / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    elif listed_by == "cache":
        (tmp_path / "blobs").mkdir()
        for path in shards:
            path.rename(tmp_path / "blobs" / digests[path.name])
            path.symlink_to(tmp_path / "blobs" / digests[path.name])
    else:
        (here / ".cache/huggingface/download").mkdir(parents=True)
        for name, digest in digests.items():
            (here / f".cache/huggingface/download/{name}.metadata").write_text(f"0123\n{digest}\n1.5\n")
    path, entry = entry_of(here, "layers.1.mlp.experts.3.down_proj.weight_packed")
    byte = path.read_bytes()[entry.begin]
    overwrite(path, entry.begin, bytes([byte ^ 16]))
    message = complaint(here, tmp_path / "out")
    assert message.count(f"{path} has SHA-256 ") == 1 and f"{digests[path.name]} is published: download it" in message
    overwrite(path, entry.begin, bytes([byte]))
    assert_right_run_succeeds(written, here, tmp_path / "out")
    assert read_manifest(tmp_path / "out").checked == digests


def test_changed_source_is_noticed_if_finished_parts_came_from_it(written, here, tmp_path):
    out = tmp_path / "out"
    path, entry = entry_of(here, "layers.2.self_attn.o_proj.weight")
    overwrite(path, entry.begin + 10, b"\x80\xff")  # keeps layer 2 from being finished
    complaint(here, out)
    shutil.copytree(written / "source", tmp_path / "other")
    path, entry = entry_of(tmp_path / "other", "layers.1.input_layernorm.weight")
    overwrite(path, entry.begin, b"\x01")
    message = complaint(tmp_path / "other", out)
    assert f"{tmp_path / 'other'} has changed since {out} was begun" in message
    assert f"layer_1 was converted from other bytes than {path.name}" in message and "layer_0" not in message
    assert "choose another folder, or delete layer_1 in this one to have them converted again" in message
    shutil.copytree(out, tmp_path / "mended")
    shutil.rmtree(tmp_path / "mended/layer_1")
    convert(tmp_path / "other", tmp_path / "mended", report=quiet)
    assert contents(tmp_path / "mended").keys() == contents(written / "out").keys()
    assert_right_run_succeeds(written, written / "source", out)


def test_another_copy_of_the_source_goes_on_without_converting_again(written, tmp_path, capsys):
    here = shutil.copytree(written / "source", tmp_path / "source", copy_function=shutil.copyfile)
    shutil.copytree(written / "out", tmp_path / "out")
    (tmp_path / "out/metadata.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("layer_*/*/*")}
    assert_right_run_succeeds(written, here, tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "layer_1 came from files that have changed; comparing with the source" in capsys.readouterr().err


def test_lost_or_shortened_files_of_a_part_are_made_again(written, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(written / "out", out)
    (out / "layer_1/q_a_DA/.zarray").unlink()
    (out / "layer_2/gate_up_EMKmw/3.0.0.0.0").write_bytes(b"short")
    assert_right_run_succeeds(written, written / "source", out)
    assert capsys.readouterr().err.count("is not as it was written; it is converted again") == 2


def test_two_conversions_do_not_share_a_folder(written, tmp_path):
    with claim(tmp_path / "out"), pytest.raises(ValueError, match="another run is converting into it"):
        convert(written / "source", tmp_path / "out", report=quiet)
    assert_right_run_succeeds(written, written / "source", tmp_path / "out")


def test_layout_for_another_mesh_needs_another_folder(written, tmp_path):
    shutil.copytree(written / "out", tmp_path / "out")
    with pytest.raises(ValueError, match="out is for mesh 'tensor=8', not 'tensor=4'; delete it or choose another"):
        convert(written / "source", tmp_path / "out", mesh="tensor=4", report=quiet)


def test_number_of_threads_does_not_matter(written, tmp_path):
    convert(written / "source", tmp_path / "out", workers=1, report=quiet)
    assert contents(tmp_path / "out") == contents(written / "out")
    with pytest.raises(ValueError, match="workers is 0; allowed are 1 to 256"):
        convert(written / "source", tmp_path / "other", workers=0)


def test_tensor_twice_in_one_header_and_twice_in_the_index(here, tmp_path):
    index = (here / INDEX).read_text()
    name = "language_model.lm_head.weight"
    (here / INDEX).write_text(index.replace('"weight_map": {', f'"weight_map": {{"{name}": "x.safetensors", '))
    assert f"{INDEX} is not valid JSON: {name} is in it twice" in complaint(here, tmp_path / "out")
    (here / INDEX).write_text(index)
    path = sorted(here.glob("*.safetensors"))[0]
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].replace(b'"mm_projector.proj.0.weight"', b'"vision_tower.patch_embed.proj.weight"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    assert f"{path} is truncated or not a safetensors file: vision_tower.patch_embed" in complaint(
        here, tmp_path / "out"
    )
    assert np.frombuffer(data[:8], "<u8")[0] == size
