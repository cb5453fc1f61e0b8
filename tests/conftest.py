"""CPU with eight host devices; implicit rank and dtype promotion are errors."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests run in one process, and so do all files of the golden engine: they share its compiled programs."""
    is_golden = {item.path: False for item in items}
    for item in items:
        is_golden[item.path] |= "golden_engine" in getattr(item, "fixturenames", ())
    for item in items:
        item.add_marker(pytest.mark.xdist_group("golden" if is_golden[item.path] else item.path.stem))


@pytest.fixture(scope="session")
def golden() -> Path:
    return Path(__file__).parent / "golden"


MAX_MAPPINGS = 40_000
"""Linux allows a process some 65,000 memory mappings, of which each compiled program takes a few."""


@pytest.fixture(autouse=True, scope="module")
def room_for_programs() -> Iterator[None]:
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_text().count("\n") > MAX_MAPPINGS:
        jax.clear_caches()
