"""How long layers of a rank's weights take from an Orbax checkpoint to the device."""

import os
import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.abstract_engine import ArrayShapes
from experiments.rank import Share
from experiments.synthetic import count_bytes, draw_arrays


def time_load(share: Share, tables: ArrayShapes, folder: str, num_layers: int) -> dict[str, Any]:
    """Writes the last ``num_layers`` layers to ``folder``, an Orbax item each as converted models have, and loads them.

    What was written is dropped from the page cache first. Returns bytes and seconds of both ways.

    Raises:
      FileExistsError: the folder is not empty.
    """
    directory = Path(folder).absolute()
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty; a new or an empty folder is needed")
    layers = [part for part in tables if part.startswith("layer_")][-num_layers:]
    tables = {part: tables[part] for part in layers}
    arrays = jax.block_until_ready(draw_arrays(tables, share.target_parameters, 0))
    with ocp.StandardCheckpointer() as checkpointer:
        begun = time.perf_counter()
        for part, table in arrays.items():
            checkpointer.save(directory / part, table)
        checkpointer.wait_until_finished()
        written = time.perf_counter()
        del arrays, table
        _drop_pages(directory)
        dropped = time.perf_counter()
        loaded = {part: checkpointer.restore(directory / part, table) for part, table in tables.items()}
        jax.block_until_ready(loaded)
        done = time.perf_counter()
    return {
        "layers": len(layers),
        "bytes": count_bytes(loaded),
        "save_seconds": written - begun,
        "seconds": done - dropped,
    }


def _drop_pages(directory: Path) -> None:
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
