"""One of several processes that restore a checkpoint together: run by `test_restore`.

::

    python restore_process.py CHECKPOINT PORT NUM_PROCESSES NUMBER MESH...

Prints a JSON object a mesh: bytes that this process read from files, and bytes of the shards that it has, each once.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from ddtree_jax import checkpoint, kimi
from ddtree_jax.config import KimiConfig
from ddtree_jax.sharding import make_mesh


def bytes_read() -> int:
    """So far, from all files of all arrays."""
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def own_bytes(array: jax.Array) -> int:
    """Bytes of the shards on this process's devices; copies of one shard count once."""
    shards = {str(shard.index): shard.data for shard in array.addressable_shards}
    return sum(np.asarray(data).nbytes for data in shards.values())


def main(folder: str, port: str, num_processes: str, number: str, *meshes: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", int(num_processes), int(number))
    parameters = kimi.parameters(KimiConfig.from_hf(checkpoint.read_metadata(folder).config))
    for mesh in meshes:
        before = bytes_read()
        arrays = checkpoint.load(folder, parameters, make_mesh(mesh), jnp.bfloat16, as_blocks=True)
        read = bytes_read() - before
        print(json.dumps({"mesh": mesh, "read": read, "own": sum(map(own_bytes, jax.tree.leaves(arrays)))}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
