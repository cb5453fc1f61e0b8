"""How long a rank's weights take from converted checkpoints to the device, by the steps of `Engine.load`."""

import functools
import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from checkpoints_tools.direct_io import Buffer, open_file, read_range, room
from checkpoints_tools.orbax_item import ItemWriter, chunk_shape
from ddtree_jax import checkpoint, dflash, kimi
from ddtree_jax.checkpoint import Metadata, StoredArray
from ddtree_jax.expert_layout import stored_parameters
from ddtree_jax.sharding import Parameters, mesh_sizes
from experiments.rank import Share
from experiments.synthetic import count_bytes

LAYOUT = "tensor=1"
"""Mesh that a share is laid out for: it is a model of one device."""
WORKERS = 8


def time_load(share: Share, folder: str, mesh: Mesh) -> dict[str, Any]:
    """Writes both models of a share to ``folder`` as the converter lays them out, and loads and packs them.

    What is written are random bytes: loading moves them and computes nothing with them. They are dropped from the page
    cache first. Returns bytes and seconds; the ceiling is what it takes to read the same files past the page cache into
    memory that is used again.

    Raises:
      FileExistsError: the folder is not empty.
    """
    directory = Path(folder).absolute()
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty; a new or an empty folder is needed")
    target, drafter = directory / "target", directory / "drafter"
    _write(target, "kimi", share.target_parameters)
    _write(drafter, "dflash", share.drafter_parameters)
    _drop_pages(directory)
    begun = time.perf_counter()
    _read_files(directory)
    ceiling = time.perf_counter() - begun
    _drop_pages(directory)
    begun = time.perf_counter()
    loaded = (
        checkpoint.load(target, share.target_parameters, mesh, jnp.bfloat16, as_blocks=True),
        checkpoint.load(drafter, share.drafter_parameters, mesh, jnp.bfloat16),
    )
    jax.block_until_ready(loaded)
    read = time.perf_counter() - begun
    kimi.pack_experts(loaded[0], mesh)
    kimi.pack_projections(loaded[0], share.target, mesh)
    dflash.pack_projections(loaded[1], share.drafter, mesh)
    jax.block_until_ready(jax.tree.leaves(loaded))
    return {
        "bytes": count_bytes(loaded),
        "read_seconds": read,
        "seconds": time.perf_counter() - begun,
        "ceiling_seconds": ceiling,
        "ceiling": f"the same files read by {WORKERS} threads",
    }


def _write(directory: Path, kind: str, parameters: Parameters) -> None:
    """A checkpoint that `checkpoint.load` takes, of random bytes, without a config or a source."""
    stored = stored_parameters(parameters, LAYOUT)
    arrays = checkpoint.stored_arrays(stored)
    chunks = {
        part: {name: chunk_shape(infos[name], array, mesh_sizes(LAYOUT)) for name, array in arrays[part].items()}
        for part, infos in stored.items()
    }
    directory.mkdir(parents=True)
    sizes = [
        np.prod(chunk) * np.dtype(array.dtype).itemsize
        for part, table in arrays.items()
        for array, chunk in zip(table.values(), chunks[part].values(), strict=True)
    ]
    memory = Buffer().take(int(max(sizes)))
    memory[:] = np.frombuffer(np.random.default_rng(0).bytes(len(memory)), np.uint8)
    with ThreadPoolExecutor(WORKERS) as pool:
        for part, table in arrays.items():
            writer = ItemWriter(directory, part, {name: (array, chunks[part][name]) for name, array in table.items()})
            for name, array in table.items():
                chunk = chunks[part][name]
                values = memory[: int(np.prod(chunk)) * np.dtype(array.dtype).itemsize]
                write = functools.partial(writer.write_chunk, name, values=values)
                list(pool.map(write, _places(array, chunk)))
            writer.commit()
    metadata = Metadata(
        kind=kind, config={}, mesh=LAYOUT, source_files={}, source_checksums={}, tokenizer_files=[], arrays=arrays
    )
    (directory / checkpoint.METADATA_FILE).write_text(metadata.to_json())


def _places(array: StoredArray, chunk: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(size // part) for size, part in zip(array.shape, chunk, strict=True)))


def _read_files(directory: Path) -> None:
    of_thread = threading.local()

    def read(path: Path) -> None:
        if not hasattr(of_thread, "buffer"):
            of_thread.buffer = Buffer()
        descriptor = open_file(path, os.O_RDONLY)
        try:
            size = path.stat().st_size
            read_range(descriptor, 0, size, of_thread.buffer.take(room(0, size)))
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(read, filter(Path.is_file, directory.rglob("*"))))


def _drop_pages(directory: Path) -> None:
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
