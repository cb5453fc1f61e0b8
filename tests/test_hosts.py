"""Two processes decode together and find what one device finds; who does not come, or comes to another call, is named."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hosts_process
import jax
import jaxtyping
import pytest
from small_sources import drafter_config, target_config

from checkpoints_tools.convert import convert
from checkpoints_tools.synthesize import synthesize
from ddtree_jax import hosts

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    """One below those that systems give to outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("localhost", port))
            return port


def write_pair(folder: Path) -> list[str]:
    """A converted random pair: a dense layer and one of experts, and a drafter of one layer."""
    drafter = drafter_config("kimi_k26_dflash_reconstructed")
    drafter["dflash_config"] |= {"target_layer_ids": [0, 1]}
    drafter |= {"num_target_layers": 2, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    for name, config in (("target", target_config(2)), ("drafter", drafter)):
        synthesize(config, folder / name)
        convert(folder / name, folder / "converted" / name)
    return [str(folder / "converted" / name) for name in ("target", "drafter")]


def test_two_processes_of_four_devices_find_what_one_device_finds(tmp_path):
    folders = write_pair(tmp_path)
    command = [sys.executable, str(ROOT / "tests/hosts_process.py"), *folders, f"localhost:{free_port()}"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "no_proxy": "localhost",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",  # nearly all of the time is compiling
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen([*command, str(number)], env=environment, stdout=subprocess.PIPE, text=True)
            )
            for number in range(2)
        ]
        for process in processes:
            stack.callback(process.kill)
        expected = hosts_process.findings(hosts_process.load(*folders, None), "ar")
        for number, process in enumerate(processes):
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0
            result = json.loads(output.splitlines()[-1])
            assert result["found"] == expected
            mesh, *differ, options, checkpoints = result["refused"]
            assert mesh == "mesh 'tensor=4' needs 4 devices; of 8, none of process 1"
            names = ["prompts or options"] * 3 + ["token_ids"]
            expected_differ = [
                f"{name} of process 1 differ from those of process 0; all must be alike" for name in names
            ]
            if number == 1:
                expected_differ[2] = "prompts[0] has 1000000000 at index 0; allowed are token ids from 0 to 255"
            assert differ == expected_differ
            alike = "of process 1 differ from those of process 0; all must be alike"
            assert options == f"options of Engine.load {alike}"
            missing = f"{folders[0]}/none is not a folder; a converted checkpoint is needed"
            assert checkpoints == (missing if number == 1 else f"checkpoints {alike}")


@pytest.fixture
def no_jax(monkeypatch):
    """What is refused is refused before JAX is asked, which would abort the process; by the package's own checks."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(jax.distributed, "initialize", None)
    monkeypatch.setattr(hosts, "_LATE_SECONDS", 0.5)


def outcomes(calls: list[tuple[int, int]], seconds: float) -> list[str]:
    """What processes, each with its idea of how many there are and its number, say about each other."""
    address = f"localhost:{free_port()}"

    def join(call: tuple[int, int]) -> str:
        with pytest.raises(ValueError) as error:
            hosts.join(address, *call, seconds)
        return str(error.value).replace(address, "ADDRESS")

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(join, calls))


@pytest.mark.parametrize(
    ("calls", "seconds", "message"),
    [
        ([(2, 1)], 0.3, "coordinator_address is 'ADDRESS', but process 0 did not answer there"),
        ([(4, 0)], 0.3, "num_processes is 4, but of process 1, 2, 3 nothing was heard"),
        ([(3, 0), (3, 2)], 5, "num_processes is 3, but of process 1 nothing was heard"),
        ([(3, 0), (2, 1)], 60, "num_processes is 3 for process 0, but 2 for process 1"),
        ([(2, 0), (3, 2)], 60, "num_processes is 2 for process 0, but 3 for process 2"),
        ([(3, 0), (3, 1), (3, 1)], 60, "process_id is 1 for two processes"),
        ([(3, 0), (2, 1), (3, 2)], 60, "num_processes is 3 for process 0, but 2 for process 1"),
    ],
)
def test_whoever_is_missing_or_wrong_is_named(no_jax, calls, seconds, message):
    assert outcomes(calls, seconds) == [message] * len(calls)


def call(port: int) -> socket.socket:
    """A connection, as soon as somebody listens."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("localhost", port), 60)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_strangers_at_the_port_are_ignored(no_jax):
    port = free_port()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(hosts.join, f"localhost:{port}", 2, 0, 60)
        lines = b"[1]\n", b"null\n", b"\xff\n", b"[Infinity, 2]\n", b"[" * 4000 + b"\n"
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"", *lines):
            with call(port) as stranger:
                stranger.sendall(words)
        with pytest.raises(ValueError, match="but 3 for process 1"):
            hosts.join(f"localhost:{port}", 3, 1, 60)
        with pytest.raises(ValueError, match="but 3 for process 1"):
            first.result()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("node0", 2, 0), "coordinator_address is 'node0'; allowed is 'host:port'"),
        (("node0:70000", 2, 0), "coordinator_address is 'node0:70000'; allowed is 'host:port'"),
        ((None, 2, 0), "coordinator_address is None; allowed is 'host:port'"),
        (("node0:1234", 0, 0), "num_processes is 0; allowed is an integer from 1"),
        (("node0:1234", None, 0), "num_processes is None; allowed is an integer from 1"),
        (("node0:1234", 2, 2), "process_id is 2; allowed is an integer from 0 to 1"),
        (("node0:1234", 2, None), "process_id is None; allowed is an integer from 0 to 1"),
        (("node0:1234", 2, 1, 0), "timeout_seconds is 0; allowed is a number above 0"),
    ],
)
def test_arguments(no_jax, arguments, message):
    with pytest.raises(ValueError) as error:
        hosts.join(*arguments)
    assert str(error.value) == message


def test_a_port_that_is_taken_is_named(no_jax):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"coordinator_address has port {port}; a free one is needed"):
            hosts.join(f"localhost:{port}", 2, 0, 60)
