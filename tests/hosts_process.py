"""One of two processes with four devices each: run by `test_hosts`.

::

    python hosts_process.py TARGET DRAFTER ADDRESS NUMBER

Prints a JSON object: what it wrote, and what it was refused.
"""

import json
import sys

from ddtree_jax import DecodeConfig, Engine, SamplingParams, hosts

PROMPTS = "class Stack:\n    def __init__(self):", "with open(path) as file:\n"
SAMPLING = (
    SamplingParams(max_new_tokens=12, ignore_eos=True),
    SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.8, top_p=0.95, seed=7),
)
MESH = "expert=2,tensor=4"


def load(target: str, drafter: str, mesh: str | None) -> Engine:
    return Engine.load(target, drafter, mesh=mesh, max_length=128, dtype="float32")


def completions(engine: Engine, mode: str) -> list[list[int]]:
    """Greedy and sampled."""
    prompts = map(engine.tokenizer.encode, PROMPTS)
    pairs = zip(prompts, SAMPLING, strict=True)
    return [engine.generate(prompt, sampling, DecodeConfig(mode=mode))[0].token_ids for prompt, sampling in pairs]


def refusal(call, *args) -> str:
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return "none"


def main(target: str, drafter: str, address: str, number: str) -> None:
    hosts.join(address, 2, int(number), 120)
    engine = load(target, drafter, MESH)
    written = completions(engine, "ddtree")
    refused = [refusal(load, target, drafter, "tensor=4"), refusal(engine.generate, [int(number)])]
    print(json.dumps({"written": written, "refused": refused}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
