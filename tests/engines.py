"""Fixtures that several test files share: golden checkpoints, converted once a session, and engines on them.

A test file asks for them with ``pytest_plugins = ["engines"]``. Engines of one checkpoint have the same `OPTIONS`, so
that compiled programs are shared too; they have no kernels, whose tracing takes time, and one width of chunks.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints_tools.convert import convert
from ddtree_jax import Engine
from ddtree_jax.sharding import make_mesh
from ddtree_jax.tokenizer import Tokenizer

OPTIONS = {"max_length": 256, "prefill_chunk": 16}


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> Callable[[Path], Path]:
    """Converts a Hugging Face folder on the first call for it; gives the converted folder."""
    base, done = tmp_path_factory.mktemp("converted"), {}

    def converted_once(source: Path) -> Path:
        if source not in done:
            out = base / str(len(done)) / source.name
            convert(source, out)
            done[source] = out
        return done[source]

    return converted_once


@pytest.fixture(scope="session")
def golden_engine(golden, converted) -> Engine:
    target, drafter = converted(golden / "target"), converted(golden / "drafter")
    return Engine.load(target, drafter, dtype="float32", kernels=False, **OPTIONS)


@pytest.fixture(scope="session")
def text_engine(golden_engine) -> Engine:
    """The golden pair with text: 128 bytes of ASCII, 128 tokens that begin and end inside a character, 256 special ids."""
    ascii = [bytes([byte]) for byte in range(128)]
    straddling = [b"\xa9" + byte + b"\xc3" for byte in ascii]  # two in a row hold an e with an accent
    tokenizer = Tokenizer({token: rank for rank, token in enumerate(ascii + straddling)})
    models = golden_engine.models
    return Engine(
        models.target, models.drafter, mesh=make_mesh(None), tokenizer=tokenizer, has_kernels=False, **OPTIONS
    )
