"""One of two processes with four devices each: run by `test_hosts`.

::

    python hosts_process.py TARGET DRAFTER ADDRESS NUMBER

Prints a JSON object: what it found, and what it was refused.
"""

import json
import sys

import jax
import numpy as np

from ddtree_jax import DecodeConfig, Engine, SamplingParams, hosts
from ddtree_jax.sharding import MESH_AXES, make_mesh

OTHER, PROMPT = [5, 80, 99, 23], [7, 111, 42]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.8, top_p=0.95, seed=7)
MESH = "expert=2,tensor=4"


def connect() -> None:
    """Collectives over every group of devices, by a program that compiles at once.

    Gloo, which stands for NCCL here, connects a group at its first collective, and gives up if one process comes 30 seconds
    after the other, as it may when it compiles the engine's programs on a busy machine.
    """

    def sums(x: jax.Array) -> list[jax.Array]:
        return [jax.lax.psum(x, axes) for axes in (*MESH_AXES, MESH_AXES)]

    whole = jax.P()
    run = jax.shard_map(sums, mesh=make_mesh(MESH), in_specs=whole, out_specs=whole, check_vma=False)
    jax.block_until_ready(jax.jit(run)(np.ones(1, np.float32)))


def load(target: str, drafter: str | None, mesh: str | None) -> Engine:
    return Engine.load(target, drafter, mesh=mesh, max_length=32, dtype="float32", prefix_cache=True)


def findings(engine: Engine, mode: str) -> dict[str, list]:
    """What each of the engine's methods gives; the second call goes on behind the second one of the first."""
    decode = DecodeConfig(mode=mode, budget=7)
    greedy = [done.token_ids for done in engine.generate([OTHER, PROMPT], GREEDY, decode)]
    text = PROMPT + greedy[1]
    return {
        "greedy": greedy,
        "sampled": engine.generate(text, SAMPLED, decode)[0].token_ids,
        "traced": [one.token_ids[node] for one in engine.trace(PROMPT, GREEDY, decode) for node in one.accepted],
        "scored": engine.score(text).argmax(axis=1).tolist(),
        "drafted": engine.draft(text).argmax(axis=1).tolist(),
    }


def refusal(call, *args) -> str:
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return "none"


def main(target: str, drafter: str, address: str, number: str) -> None:
    hosts.join(address, 2, int(number), 120)
    connect()
    engine = load(target, drafter, MESH)
    found = findings(engine, "ddtree")
    refused = [
        refusal(load, target, drafter, "tensor=4"),
        refusal(engine.generate, [int(number)]),
        refusal(engine.generate, PROMPT, SamplingParams(seed=int(number))),
        refusal(engine.generate, PROMPT if number == "0" else [10**9]),
        refusal(engine.score, [int(number)]),
        refusal(load, target, drafter if number == "0" else None, MESH),
        refusal(load, target if number == "0" else f"{target}/none", drafter, MESH),
    ]
    print(json.dumps({"found": found, "refused": refused}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
