"""Each bad source is refused with its complaint, before anything is written; the right one then converts as ever."""

import errno
import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_sources import target_config, write_target

from checkpoints_tools.convert import convert
from checkpoints_tools.synthesize import synthesize

GOLDEN = Path(__file__).parent / "golden"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DEEP = b'{"a":' * 100_000


def quiet(state):
    pass


def contents(out):
    """Bytes of every file but the manifest, which knows when the source's files were changed."""
    paths = [path for path in out.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """What the drafter in two files becomes, from a source that is as it should be."""
    out = tmp_path_factory.mktemp("right") / "out"
    convert(GOLDEN / "drafter_sliding", out, report=quiet)
    return contents(out)


@pytest.fixture
def source(tmp_path):
    return shutil.copytree(GOLDEN / "drafter_sliding", tmp_path / "source", copy_function=shutil.copyfile)


def refuse(source, **options):
    """The complaint about a source. Nothing may have been written."""
    out = source.parent / "out"
    with pytest.raises(ValueError) as error:
        convert(source, out, report=quiet, **options)
    assert not out.exists()
    return str(error.value)


def edit_tensors(path, edit):
    tensors = load_file(path)
    edit(tensors)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)


def edit_header(path, edit):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = edit(data[8 : 8 + size])
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


def edit_entry(**changes):
    """An edit of the entry of ``norm.weight``, which lies in the second file, 128 bfloat16."""

    def edit(header):
        values = json.loads(header)
        values["norm.weight"] |= changes
        return json.dumps(values).encode()

    return lambda source: edit_header(source / SECOND, edit)


def edit_config(**changes):
    def edit(source):
        values = json.loads((source / "config.json").read_text()) | changes
        (source / "config.json").write_text(json.dumps(values))

    return edit


def write(name, data):
    return lambda source: (source / name).write_bytes(data)


def replace_by_folder(name):
    return lambda source: [(source / name).unlink(missing_ok=True), (source / name).mkdir()]


def _truncate(source):
    os.truncate(source / SECOND, (source / SECOND).stat().st_size - 1)


def _link_to_itself(source):
    (source / SECOND).unlink()
    (source / SECOND).symlink_to(SECOND)


def _duplicate(source):
    edit_tensors(source / SECOND, lambda t: t.update({"fc.weight": load_file(source / FIRST)["fc.weight"]}))


def _misplace(source):
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["fc.weight"] = SECOND
    (source / INDEX).write_text(json.dumps(index))


def _name_nothing(source):
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["fc.bias"] = FIRST
    (source / INDEX).write_text(json.dumps(index))


def _make_single(source):
    tensors = load_file(source / FIRST) | load_file(source / SECOND)
    save_file(tensors, source / "model.safetensors")
    (source / INDEX).unlink()
    (source / SECOND).unlink()


NO_SHARD = "{0}/" + SECOND + " is truncated or not a safetensors file: "
NO_INTEGER = "; an integer from 0 to 9223372036854775807 is needed"

FILES = {
    "truncated shard": (_truncate, "{0}/" + SECOND + " is truncated: it has {1} bytes; its header needs {2}"),
    "no safetensors": (write(SECOND, b"not a safetensors file"), NO_SHARD + "it ends inside its header"),
    "empty shard": (write(SECOND, b""), NO_SHARD + "it ends inside its header"),
    "missing shard": (lambda s: (s / SECOND).unlink(), "{0}/" + f"{SECOND} is missing; {INDEX} names it"),
    "unreadable shard": (replace_by_folder(SECOND), "{0}/" + f"{SECOND} is not a file that can be read"),
    "shard that links to itself": (_link_to_itself, "{0}/" + f"{SECOND} is not a file that can be read"),
    "stray shard": (
        lambda s: shutil.copyfile(s / SECOND, s / "model-00003.safetensors"),
        "{0}/model-00003.safetensors is there, but " + f"{INDEX} does not name it",
    ),
    "shard beside a single file": (
        _make_single,
        "{0}/" + f"{FIRST} is there, but the source is model.safetensors alone",
    ),
    "duplicate tensor": (_duplicate, f"fc.weight is in both {FIRST} and {SECOND}"),
    "misplaced tensor": (_misplace, f"fc.weight is in {FIRST}; {INDEX} says {SECOND}"),
    "tensor in the index alone": (_name_nothing, f"fc.bias is not in {FIRST}, where {INDEX} has it"),
    "float shape": (edit_entry(shape=[128.0]), NO_SHARD + "norm.weight: shape: 0 is 128.0" + NO_INTEGER),
    "negative shape": (edit_entry(shape=[-1, -128]), NO_SHARD + "norm.weight: shape: 0 is -1" + NO_INTEGER),
    "float offset": (edit_entry(data_offsets=[0.0, 256]), NO_SHARD + "norm.weight: data_offsets: 0 is 0.0" + NO_INTEGER),
    "three offsets": (
        edit_entry(data_offsets=[0, 1, 2]), NO_SHARD + "norm.weight: data_offsets is [0, 1, 2]; 2 entries are needed"
    ),
    "backward offsets": (edit_entry(data_offsets=[2, 1]), NO_SHARD + "norm.weight ends at byte 1, before it begins at 2"),
    "unknown dtype": (edit_entry(dtype="Q3"), f"norm.weight in {SECOND} has dtype Q3; BF16 is needed"),
    "F8": (
        edit_entry(dtype="F8_E4M3", shape=[256]),
        f"norm.weight in {SECOND} has dtype F8_E4M3; BF16 is needed\n  "
        f"norm.weight in {SECOND} has shape [256]; [128] is needed",
    ),
    "deep header": (lambda s: edit_header(s / SECOND, lambda _: DEEP), NO_SHARD + "it is nested too deeply"),
    "header of a list": (
        lambda s: edit_header(s / SECOND, lambda _: b"[]"), NO_SHARD + "holds a list; a JSON object is needed"
    ),
    "tokenizer that is no file": (replace_by_folder("tiktoken.model"), "{0}/tiktoken.model is not a file that can be read"),
}  # fmt: skip

CONVERTED_AFTERWARDS = ("truncated shard", "missing shard", "unreadable shard", "duplicate tensor")


@pytest.mark.parametrize("case", FILES)
def test_bad_files_are_named_and_the_right_ones_converted(source, right, case):
    spoil, complaints = FILES[case]
    size = (source / SECOND).stat().st_size
    spoil(source)
    lines = [line.strip().format(source, size - 1, size) for line in complaints.split("\n")]
    message = refuse(source)
    assert message.splitlines()[0] == f"{source} can't be converted:"
    assert sorted(line.strip() for line in message.splitlines()[1:]) == sorted(lines)
    if case not in CONVERTED_AFTERWARDS:
        return
    shutil.rmtree(source)
    shutil.copytree(GOLDEN / "drafter_sliding", source, copy_function=shutil.copyfile)
    convert(source, source.parent / "out", report=quiet)
    assert contents(source.parent / "out") == right


LLAMA = b'{"model_type": "llama", "hidden_size": 64}'


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: (s / INDEX).unlink(), "{0} has neither " + f"{INDEX} nor model.safetensors"),
        (write(INDEX, b'{"weight_map": 3}'), "{0}/" + f"{INDEX}: weight_map must name a file for every tensor"),
        (write(INDEX, b'{"weight_map": {"a": 3}}'), "{0}/" + f"{INDEX}: weight_map must name a file for every tensor"),
        (write(INDEX, DEEP), "{0}/" + f"{INDEX} is not valid JSON: it is nested too deeply"),
        (lambda s: (s / "config.json").unlink(), "{0}/config.json is missing"),
        (replace_by_folder("config.json"), "{0}/config.json can't be read: Is a directory"),
        (write("config.json", b"{'a': 1}"), "{0}/config.json is not valid JSON: Expecting property name enclosed in double "
         "quotes: line 1 column 2 (char 1)"),
        (write("config.json", b"\xff"), "{0}/config.json is not valid JSON: 'utf-8' codec can't decode byte 0xff in position "
         "0: invalid start byte"),
        (write("config.json", b"[]"), "{0}/config.json holds a list; a JSON object is needed"),
        (write("config.json", LLAMA), "{0}: config.json: model_type is 'llama'; allowed are 'kimi_k25', 'kimi_k2', "
         "'deepseek_v3', or a DFlash drafter"),
        (edit_config(attention_sinks=4), "{0}: drafter config.json: unknown attribute attention_sinks; it is neither used "
         "nor listed as ignored"),
        (edit_config(num_target_layers=10**9), "{0}: config.json: num_target_layers is 1000000000; at most 10000 are "
         "allowed"),
        (write("SHA256SUMS", b"\xff\n"), "{0}/SHA256SUMS is no text in UTF-8: invalid start byte at byte 0"),
        (write("SHA256SUMS", b"hello\n"), "{0}/SHA256SUMS has 'hello'; a SHA-256 and a file name are needed"),
        (replace_by_folder("SHA256SUMS"), "{0}/SHA256SUMS can't be read: Is a directory"),
    ],
)  # fmt: skip
def test_source_that_tells_no_model_is_one_message(source, spoil, message):
    spoil(source)
    assert refuse(source) == message.format(source)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mesh": "tensor=999999999"},
            "mesh is 'tensor=999999999'; allowed for tensor are divisors of 2",
        ),
        (
            {"mesh": "expert=2,tensor=3"},
            "mesh is 'expert=2,tensor=3'; allowed for tensor are divisors of 2",
        ),
        ({"mesh": "tensor"}, "mesh is 'tensor'; allowed: sizes of tensor and expert, such as 'tensor=8'"),
        ({"workers": 0}, "workers is 0; allowed are 1 to 256"),
        ({"workers": 257}, "workers is 257; allowed are 1 to 256"),
        ({"workers": 2.5}, "workers is 2.5; allowed are 1 to 256"),
    ],
)
def test_wrong_options_are_refused_before_any_work(source, options, message):
    assert refuse(source, **options) == message


def test_all_wrong_tensors_are_named_at_once(source, right):
    def spoil(tensors):
        del tensors["layers.1.self_attn.k_norm.weight"]
        tensors["layers.0.mlp.gate_proj.weight"] = tensors["layers.0.mlp.gate_proj.weight"][:, :-1]
        tensors["norm.weight"] = tensors["norm.weight"].astype(np.float32)
        tensors["layers.3.input_layernorm.weight"] = np.zeros(128, jnp.bfloat16)

    single = shutil.copytree(GOLDEN / "drafter", source.parent / "single", copy_function=shutil.copyfile)
    edit_tensors(single / "model.safetensors", spoil)
    assert sorted(refuse(single).splitlines()[1:]) == [
        "  layers.0.mlp.gate_proj.weight in model.safetensors has shape [320, 127]; [320, 128] is needed",
        "  layers.1.self_attn.k_norm.weight is missing; it is needed for layer_1/k_norm_R",
        "  layers.3.input_layernorm.weight in model.safetensors is unexpected; it is neither used nor listed as ignored",
        "  norm.weight in model.safetensors has dtype F32; BF16 is needed",
    ]
    convert(source, source.parent / "out", report=quiet)
    assert contents(source.parent / "out") == right


def test_packed_weights_are_held_against_their_stated_shape_and_dtype(tmp_path):
    """Stated shapes of int64 are as good as those of int32; other values or dtypes are not."""
    synthesize(target_config(2), tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "right", report=quiet)
    expert = "language_model.model.layers.1.mlp.experts.7.down_proj"
    whole = (tmp_path / "source/model.safetensors").read_bytes()

    def spoil(tensors):
        tensors[f"{expert}.weight_shape"] = np.array([512, 64], np.int32)
        tensors[f"{expert}.weight_packed"] = tensors[f"{expert}.weight_packed"].view(np.uint32)

    edit_tensors(tmp_path / "source/model.safetensors", spoil)
    assert sorted(refuse(tmp_path / "source").splitlines()[1:]) == [
        f"  {expert}.weight_packed in model.safetensors has dtype U32; I32 is needed",
        f"  {expert}.weight_shape says [512, 64]; [64, 512] is needed",
    ]
    (tmp_path / "source/model.safetensors").write_bytes(whole)
    stated = {f"{expert}.weight_shape": np.array([64, 512], np.int64)}
    edit_tensors(tmp_path / "source/model.safetensors", lambda tensors: tensors.update(stated))
    convert(tmp_path / "source", tmp_path / "out", report=quiet)
    found, right = contents(tmp_path / "out"), contents(tmp_path / "right")
    assert found.keys() == right.keys()
    assert [name for name in right if found[name] != right[name]] == ["metadata.json"], "which has the header's hash"


def test_stated_shape_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    synthesize(target_config(2), tmp_path / "source")

    def read_from_bad_disk(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", read_from_bad_disk)
    line = refuse(tmp_path / "source").splitlines()[1]
    assert "experts.0.gate_proj.weight_shape in " in line and line.endswith(": Input/output error")
    assert f"{tmp_path}/source/model.safetensors can't be read at bytes" in line


def test_mesh_is_spelled_in_one_way_and_by_default_one_that_fits(tmp_path):
    """Blanks and order do not matter to the layout, nor to going on."""
    write_target(tmp_path / "source", num_layers=2)
    made = convert(tmp_path / "source", tmp_path / "out", mesh=" expert = 4 ,tensor=2", report=quiet)
    assert made.mesh == "tensor=2,expert=4"
    before = (tmp_path / "out/manifest.json").stat().st_mtime_ns
    convert(tmp_path / "source", tmp_path / "out", mesh="tensor=2,expert=4", report=quiet)
    assert (tmp_path / "out/manifest.json").stat().st_mtime_ns == before
    assert convert(GOLDEN / "drafter_sliding", tmp_path / "drafter", report=quiet).mesh == "tensor=2"
