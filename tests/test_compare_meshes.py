"""What the comparison of meshes takes for a fault."""

from types import SimpleNamespace
from typing import Any

import jax

from experiments.compare_meshes import TEMPERATURES, compare


class FakeEngine:
    """Continues a prompt by what it is told; compiles something at every call, if that is asked for."""

    def __init__(self, token: int, compiles: bool):
        self.token, self.compiles = token, compiles

    def generate(self, prompts: list, sampling: Any, decode: Any) -> list[SimpleNamespace]:
        if self.compiles:
            jax.jit(lambda x: x + 1)(0)
        tokens = [self.token if decode.mode == "chain" else 1] * sampling.max_new_tokens
        return [SimpleNamespace(token_ids=tokens, stats=SimpleNamespace(accepted_lengths=[2], rounds=3))]


def test_a_token_or_a_program_too_many_is_a_fault():
    engines = {None: FakeEngine(1, False), "same": FakeEngine(1, False), "other": FakeEngine(2, True)}
    lines, faults = compare(engines.__getitem__, ["same", "other"], [[5], [6]], 4)
    differing = [(line["case"]["mesh"], line["case"]["mode"]) for line in lines if line["differing_texts"]]
    assert differing == [("other", "chain")] * len(TEMPERATURES)
    assert {line["rounds"] for line in lines} == {6}
    assert {line["tokens"] for line in lines} == {8}
    num_calls = len(lines) // 2 * 2  # Of two prompts.
    assert faults == [
        f"other: {num_calls} programs were compiled again",
        *(f"other, chain, temperature {temperature}: 2 texts of 2 differ" for temperature in TEMPERATURES),
    ]
