"""The tools as processes: killed, several at once, and what their command lines say."""

import json
import tempfile
from pathlib import Path

import pytest
from forked import ROOT, programs
from kill_converter import digest
from small_sources import drafter_config, target_config, write_target

from checkpoints_tools.synthesize import synthesize

KILLS = 25
MEMORY = Path("/dev/shm")
"""Where the disk has nothing to wait for; a kill comes at the same places of the program."""


@pytest.fixture(scope="module")
def server():
    with programs() as server:
        yield server


@pytest.fixture(scope="module")
def run(server):
    """Runs one tool: what it ended with, and its output."""
    return lambda tool, *arguments: server.run([f"checkpoints_tools.{tool}", *arguments])[0]


@pytest.fixture
def folder(tmp_path):
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else tmp_path) as folder:
        yield Path(folder)


def test_killed_at_random_moments_it_goes_on_to_the_same_bytes(server, folder):
    synthesize(target_config(8), folder / "source", shard_gb=2e-3)
    (result,) = server.run([ROOT / "tests/kill_converter.py", folder / "source", folder, KILLS])
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["twice"] == []
    assert len(report["kills"]) == KILLS and len(set(report["kills"])) > 3, "kills at many stages"
    assert len(report["digests"]) > 1 and len(set(report["digests"])) == 1


def test_several_conversions_into_one_folder_are_one(server, folder):
    """Whoever comes while another has the folder says so; all others find it finished or finish it."""
    write_target(folder / "source", num_layers=2)
    command = ["checkpoints_tools.convert", f"--source={folder}/source"]
    server.run([*command, f"--out={folder}/alone"])
    busy = f"convert: {folder}/out: another run is converting into it; wait until it ends\n"
    results = [result for _ in range(3) for result in server.run(*[[*command, f"--out={folder}/out"]] * 6)]
    for result in results:
        assert (
            result.stderr == busy if result.returncode else "already holds" in result.stderr or "4/4" in result.stderr
        )
    assert {result.returncode for result in results} == {0, 1}
    assert digest(folder / "out") == digest(folder / "alone")
    assert sorted(path.name for path in (folder / "out").iterdir())[0] == "embed", "no marker is left"


def test_what_each_command_says(run, folder):
    (folder / "config.json").write_text(json.dumps(target_config(3)))
    source, out = folder / "source", folder / "out"
    written = run("synthesize", f"--config={folder}/config.json", f"--out={source}", "--num_layers=2")
    assert written == (0, "", "")
    made = run("convert", f"--source={source}", f"--out={out}", "--mesh=tensor=4", "--workers=2")
    assert made.returncode == 0 and "4/4 parts" in made.stderr
    again = run("convert", f"--source={source}", f"--out={out}", "--mesh= tensor = 4")
    text = f"{out} already holds {source}, converted; left as it is (by names and sizes: verify --full reads all)\n"
    assert again == (0, "", text)
    checked = run("verify", f"--source={source}", f"--checkpoint={out}", "--full")
    assert checked.returncode == 0 and checked.stdout.endswith("as it should be\n")
    shown = run("inspect", out)
    assert shown.returncode == 0 and "laid out for tensor=4" in shown.stdout
    (out / "head/norm_D/0").unlink()
    failed = run("verify", f"--source={source}", f"--checkpoint={out}")
    text = f"verify: 1 faults\n  {out}/head/norm_D/0 is missing or not of 128 bytes\n"
    assert (failed.returncode, failed.stderr) == (1, text)


@pytest.mark.parametrize("tool", ["convert", "verify", "inspect", "synthesize"])
def test_help_is_no_error(run, tool):
    result = run(tool, "--help")
    assert result.returncode == 0 and f"checkpoints_tools.{tool}" in result.stdout and result.stderr == ""


NEEDED = "Flag --{} must have a value other than None."


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("convert --source={0} --out={0}/out", "{0}/config.json is missing"),
        ("convert --out={0}/out", f"flag --source=None: {NEEDED.format('source')}"),
        ("convert --source={0} --out={0}/out --workers=x", "flag --workers=x: invalid literal for int() with base 10: 'x'"),
        ("convert --source={0} --out={0}/out --workers=999999", "workers is 999999; allowed are 1 to 256"),
        ("convert --source={0} --out={0}/out and", "unknown argument and"),
        ("convert --souce={0}", "Unknown command line flag 'souce'. Did you mean: source ?"),
        ("verify --source={0} --checkpoint={0}", "{0} has no metadata.json; a converted checkpoint is needed"),
        ("verify --source={0} --checkpoint={0} --samples=0", "samples is 0; at least 1 is needed"),
        ("verify --source={0} --checkpoint={0} --samples=-5", "samples is -5; at least 1 is needed"),
        ("inspect", "one folder is needed: python -m checkpoints_tools.inspect DIR"),
        ("inspect /etc", "/etc has no metadata.json; a converted checkpoint is needed"),
        ("inspect /no/such", "/no/such is not a folder; a converted checkpoint is needed"),
        ("synthesize --config={0}/none --out={0}/out", "{0}/none is missing"),
        ("synthesize --config={0}/odd.json --out={0}/out", "{0}/odd.json is not valid JSON: it is nested too deeply"),
        ("synthesize --config={0}/llama.json --out={0}/out", "{0}/llama.json: config.json: model_type is 'llama'; allowed "
         "are 'kimi_k25', 'kimi_k2', 'deepseek_v3', or a DFlash drafter"),
        ("synthesize --config={0}/drafter.json --out={0}/out --num_layers=2", "num_layers is 2; allowed for a target alone, "
         "and this config is a drafter's"),
        ("synthesize --config={0}/drafter.json --out={0}/out --seed=-1", "seed is -1; allowed are 0 to 2^64 - 1"),
        ("synthesize --config={0}/drafter.json --out={0}/out --shard_gb=nan", "shard_gb is nan; a finite number above 0 is "
         "needed"),
        ("synthesize --config={0}/drafter.json --out={0}", "{0} is not empty; a new or an empty folder is needed"),
    ],
)  # fmt: skip
def test_wrong_command_line_is_one_message(run, tmp_path, command, message):
    (tmp_path / "odd.json").write_text('{"a":' * 100_000)
    (tmp_path / "llama.json").write_text('{"model_type": "llama"}')
    (tmp_path / "drafter.json").write_text(json.dumps(drafter_config("kimi_k26_dflash_reconstructed")))
    before = sorted(tmp_path.iterdir())
    tool, *arguments = command.format(tmp_path).split()
    result = run(tool, *arguments)
    assert result == (1, "", f"{tool}: {message.format(tmp_path)}\n")
    assert sorted(tmp_path.iterdir()) == before
