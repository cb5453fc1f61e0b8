"""Several hosts, a process each, as one set of devices: whoever is missing is named before JAX, which would abort, is asked.

::

    process 0  ── listens on the coordinator's port ── has all? ── tells all ── hands the port to JAX ─┐
    process 1  ── knocks until it is let in: its number, how many it expects ── is told ──────────────┴─ all join

Every process then makes the same calls in the same order: `Engine.generate` with the same prompts, and so on. Each gets all
completions.
"""

import contextlib
import hashlib
import json
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ddtree_jax.arguments import is_integer, is_number, shown

_KNOCK_SECONDS = 0.2
_LINE_SECONDS = 2.0
"""How long process 0 listens to one who knocks."""
_LATE_SECONDS = 3.0
"""How long it waits for the others once it knows that something is wrong, so that they hear of it too."""
_GRACE_SECONDS = 5.0
"""How much longer than process 0 the others wait, so that they hear of who did not come."""
_MAX_LINE = 4096


def join(coordinator_address: str, num_processes: int, process_id: int, timeout_seconds: float = 300.0) -> None:
    """Joins this process with the others, as `jax.distributed.initialize`; to be called before JAX has devices.

    Args:
      coordinator_address: "host:port" of process 0, which every host can reach; the port is free there.
      num_processes: how many there are.
      process_id: the number of this one, from 0.
      timeout_seconds: how long to wait for the others.

    Raises:
      ValueError: a wrong argument; process 0 can't be reached, a process is missing when time is up, two have one number
        or other ideas of how many there are. All that are there raise it.
    """
    host, port = _read_address(coordinator_address)
    if not is_integer(num_processes) or num_processes < 1:
        raise ValueError(f"num_processes is {shown(num_processes)}; allowed is an integer from 1")
    if not is_integer(process_id) or not 0 <= process_id < num_processes:
        raise ValueError(f"process_id is {shown(process_id)}; allowed is an integer from 0 to {num_processes - 1}")
    if not is_number(timeout_seconds) or timeout_seconds <= 0:
        raise ValueError(f"timeout_seconds is {shown(timeout_seconds)}; allowed is a number above 0")
    deadline = time.monotonic() + timeout_seconds
    if process_id == 0:
        _call_roll(port, num_processes, deadline)
    else:
        _answer(host, port, num_processes, process_id, deadline)
    seconds = max(1, round(timeout_seconds))
    jax.distributed.initialize(coordinator_address, num_processes, process_id, initialization_timeout=seconds)


def check_same[Value](what: str, make: Callable[[], Value]) -> Value:
    """``make()``, if all processes make the same of it, told by its ``repr``. A `ValueError` of it counts as what it makes.

    Raises:
      ValueError: that of ``make``; or processes differ, which all raise that have none of their own.
    """
    if jax.process_count() == 1:
        return make()
    error = value = None
    try:
        value = make()
    except ValueError as refusal:
        error = refusal
    digest = np.frombuffer(hashlib.sha256(repr((value, error)).encode()).digest(), np.uint8)
    digests = np.asarray(multihost_utils.process_allgather(digest))
    if error is not None:
        raise error
    differing = [number for number, other in enumerate(digests) if not np.array_equal(other, digests[0])]
    if differing:
        raise ValueError(f"{what} of process {differing[0]} differ from those of process 0; all must be alike")
    return value


def _read_address(address: Any) -> tuple[str, int]:
    match = re.fullmatch(r"\[?([^\s\[\]]+?)\]?:([0-9]{1,5})", address) if isinstance(address, str) else None
    if not match or not 0 < int(match[2]) < 1 << 16:
        raise ValueError(f"coordinator_address is {shown(address)}; allowed is 'host:port'")
    return match[1], int(match[2])


def _call_roll(port: int, num_processes: int, deadline: float) -> None:
    """Process 0: waits for all others, then tells each of them what is wrong, or nothing."""
    connections: list[socket.socket] = []
    with _listen(port) as listener:
        error = _hear_all(listener, num_processes, deadline, connections)
        for connection in connections:
            with connection, contextlib.suppress(OSError):  # who has gone will be missed when all join
                connection.sendall(f"{json.dumps(error)}\n".encode())
    if error:
        raise ValueError(error)


def _hear_all(
    listener: socket.socket, num_processes: int, deadline: float, connections: list[socket.socket]
) -> str | None:
    """Collects a connection of each other process. What is wrong with them, if anything: the first thing heard."""
    missing, error = set(range(1, num_processes)), None
    while missing and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(OSError):  # nobody came, or has gone again
            connection, _ = listener.accept()
            try:
                number, expected = map(int, json.loads(_read_line(connection, _LINE_SECONDS)))
            except (OSError, ValueError, TypeError, ArithmeticError, RecursionError):  # somebody else
                connection.close()
                continue
            connections.append(connection)
            wrong = None
            if expected != num_processes:
                wrong = f"num_processes is {num_processes} for process 0, but {expected} for process {number}"
            elif number not in missing:
                wrong = f"process_id is {number} for two processes"
            if wrong:
                deadline = min(deadline, time.monotonic() + _LATE_SECONDS)
            error = error or wrong
            missing.discard(number)
    if missing and not error:
        names = ", ".join(map(str, sorted(missing)))
        return f"num_processes is {num_processes}, but of process {names} nothing was heard"
    return error


def _answer(host: str, port: int, num_processes: int, process_id: int, deadline: float) -> None:
    """Another process: knocks until process 0 has heard it, then waits for what it says."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as connection:
                connection.sendall(f"{json.dumps([process_id, num_processes])}\n".encode())
                answer = json.loads(_read_line(connection, left + _GRACE_SECONDS))
        except (OSError, ValueError):
            time.sleep(_KNOCK_SECONDS)
            continue
        if answer:
            raise ValueError(answer)
        return
    raise ValueError(f"coordinator_address is '{host}:{port}', but process 0 did not answer there")


def _listen(port: int) -> socket.socket:
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
    except OSError as error:
        raise ValueError(f"coordinator_address has port {port}; a free one is needed ({error.strerror})") from error


def _read_line(connection: socket.socket, seconds: float) -> str:
    line, deadline = b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(_MAX_LINE)
        if not piece or len(line) > _MAX_LINE:
            raise OSError("the connection ended")
        line += piece
    return line.decode()
