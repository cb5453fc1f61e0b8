"""CPU with eight host devices, programs compiled quickly; implicit rank and dtype promotion are errors.

``ALL_PASSES=1`` compiles as a user's process does.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Half of the time goes into compiling: two sets of passes are left out, which make loops faster and round nothing anew.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
    * (not os.environ.get("ALL_PASSES"))
)

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


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
