"""Tokens do not depend on the mesh, a round moves no more between devices than it must, and what does not divide is refused.

``ALL_MESHES=1`` runs every split of up to 8 devices in every mode; without it two of them stand for all.
"""

import functools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jaxtyping
import pytest

from ddtree_jax import DecodeConfig, Engine, SamplingParams, dflash, kimi
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.decode import MODES
from ddtree_jax.sharding import make_mesh, sharding_of
from experiments.abstract_engine import abstract_engine
from experiments.loop_text import parse, read_loop

pytest_plugins = ["engines"]

TINY = Path(__file__).parents[1] / "experiments" / "tiny_kimi"
SPLITS = [(tensor, expert) for tensor in (1, 2, 4, 8) for expert in (1, 2, 4, 8) if 2 <= tensor * expert <= 8]
CASES = [(tensor, expert, mode) for tensor, expert in SPLITS for mode in MODES]
FEW_CASES = [(2, 4, "ddtree"), (8, 1, "chain")]
TEXTS = "class Stack:\n    def __init__(self):", "with open(path) as file:\n"


@pytest.fixture(scope="module")
def folders(converted) -> tuple[Path, Path]:
    return converted(TINY / "target"), converted(TINY / "drafter")


@pytest.fixture(scope="module")
def expected(folders) -> Callable[[str], list]:
    """What one device writes in a mode."""
    engine = Engine.load(*folders, max_length=128, dtype="float32")
    return functools.cache(lambda mode: completions(engine, mode))


def completions(engine: Engine, mode: str) -> list[tuple[list[int], list[int]]]:
    """Tokens and accepted lengths, greedy and sampled."""
    found = []
    for text, temperature in zip(TEXTS, (0.0, 0.8), strict=True):
        sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=7, max_new_tokens=16, ignore_eos=True)
        done = engine.generate(engine.tokenizer.encode(text), sampling, DecodeConfig(mode=mode, budget=15))[0]
        assert mode == "ar" or done.stats.rounds < 15
        found.append((done.token_ids, done.stats.accepted_lengths))
    return found


@pytest.mark.parametrize(("tensor", "expert", "mode"), CASES if os.environ.get("ALL_MESHES") else FEW_CASES)
def test_many_devices_equal_one(folders, expected, tensor, expert, mode):
    """Weights are really spread over the axes of the mesh."""
    engine = Engine.load(*folders, mesh=f"expert={expert},tensor={tensor}", max_length=128, dtype="float32")
    weight_EDI = engine.models.target.blocks[1].experts.down_EDI[...]
    assert weight_EDI.addressable_shards[0].data.size * tensor * expert == weight_EDI.size
    assert completions(engine, mode) == expected(mode)


def tiny_configs() -> tuple[KimiConfig, DFlashConfig]:
    """Of the tiny pair, with one dense layer and one of experts, and a drafter of one layer."""
    target = KimiConfig.from_hf(json.loads((TINY / "target" / "config.json").read_text()))
    drafter = DFlashConfig.from_hf(json.loads((TINY / "drafter" / "config.json").read_text()))
    shorter = {"num_target_layers": 2, "target_layer_ids": (0, 1), "num_hidden_layers": 1, "sliding_layers": (False,)}
    return replace(target, num_hidden_layers=2), replace(drafter, **shorter)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (kimi, {"intermediate_size": 100}, "100, the width of gate_DF"),
        (dflash, {"num_key_value_heads": 4}, "4, the kv_heads of q_DJQR"),
    ],
)
def test_what_a_mesh_does_not_divide_is_refused_by_name(model, changes, message):
    """Vocabulary, target's heads, experts and their groups: see `bad_inputs`."""
    config = dict(zip((kimi, dflash), tiny_configs(), strict=True))[model]
    mesh = make_mesh("tensor=8")
    with pytest.raises(ValueError, match=f"^mesh has tensor=8; allowed are divisors of {message}"):
        for table in model.parameters(replace(config, **changes)).values():
            for name, info in table.items():
                sharding_of(info, mesh, name)


def test_devices_along_tensor_are_neighbours():
    assert [[device.id for device in shards] for shards in make_mesh("expert=2,tensor=4").devices.T] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def test_a_round_moves_no_more_than_it_must(monkeypatch):
    """One all-reduce behind attention and one behind the experts of a layer, one for the embedding; nothing cache-sized.

    The drafter's caches lie by heads before, in and behind the loop.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    target, drafter = tiny_configs()
    engine = abstract_engine(target, drafter, make_mesh("expert=4,tensor=2"), 256)
    compiled = engine.trace_rounds(DecodeConfig(budget=3), 1).lower().compile()
    text = compiled.as_text()
    found = read_loop(text).collectives
    assert {key: found[key] for key in found if key.split()[0] in ("draft", "verify", "commit")} == {
        "draft all-reduce": 1 + 2 * drafter.num_hidden_layers,
        "verify all-reduce": 1 + 2 * target.num_hidden_layers,
        "commit all-gather": 1,
    }
    (entry,) = (name for name in parse(text) if name.startswith("main"))
    assert [one.opcode for one in parse(text)[entry] if one.opcode.startswith(("all-", "collective"))] == []
    caches = jax.tree.leaves(compiled.output_shardings.drafter_cache)
    assert len(caches) == 2
    assert {cache.spec for cache in caches} == {jax.P(None, None, "tensor")}
    # Both caches are the arguments' own memory: the target's whole, the drafter's divided by two.
    row_width, kv_width = target.kv_lora_rank + target.qk_rope_head_dim, drafter.num_key_value_heads * drafter.head_dim
    num_bytes = 2 * 256 * (target.num_hidden_layers * row_width + 2 * kv_width // 2)
    assert compiled.memory_analysis().alias_size_in_bytes >= num_bytes
