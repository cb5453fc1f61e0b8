"""In float32 the tokens do not depend on how they were found: mode, budget and batch all give the same ones."""

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddtree_jax import Completion, DecodeConfig, Engine, SamplingParams

pytest_plugins = ["engines"]

TINY = Path(__file__).parents[1] / "experiments" / "tiny_kimi"
AR = DecodeConfig(mode="ar")
SPECULATION = [
    DecodeConfig(mode="chain"),
    *(DecodeConfig(mode="ddtree", budget=size) for size in (1, 3, 7, 15, 31, 63)),
]
BATCHED = (AR, SPECULATION[0], SPECULATION[4])
"""Those that batches are tried with: plain decoding, the chain, and trees of the usual budget."""
NUM_NEW = 24
TEXTS = (
    "def fibonacci(n):", "import os\n", "class Stack:\n    def __init__(self):", "for i in range(", "x",
    "def main():\n    parser = argparse.ArgumentParser(", "with open(path) as file:\n", "#", "if __name__ ==",
    "def test_add():\n    assert ", "from collections import", '"""Returns the sum of', "while True:\n    line = ",
    "return sorted(", "    raise ValueError(", "async def fetch(session, url):\n    ", "lambda x: x", "@property\ndef",
    "numbers = [1, 2, 3]\n", "try:\n    value = int(",
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(converted) -> Engine:
    """The trained pair."""
    models = converted(TINY / "target"), converted(TINY / "drafter")
    return Engine.load(*models, max_length=128, dtype="float32", prefill_chunk=16, kernels=False)


@pytest.fixture(scope="module")
def prompts(pair) -> list[list[int]]:
    """Twenty prompts of many lengths."""
    return [pair.tokenizer.encode(text) for text in TEXTS]


def settings(index: int, temperature: float, max_new_tokens: int = NUM_NEW) -> SamplingParams:
    """Of prompt ``index``: greedy, or with filters and a seed of its own."""
    if temperature == 0:
        return SamplingParams(max_new_tokens=max_new_tokens)
    return SamplingParams(temperature=temperature, top_p=0.95, seed=100 + index, max_new_tokens=max_new_tokens)


@pytest.fixture(scope="module")
def decode_all(pair, prompts):
    """Tokens of all prompts, each alone and, for `BATCHED`, in batches of three, and how many rounds they took alone.

    Both at once: most of the time goes into compiling, which takes one core.
    """
    order = [*range(len(prompts)), 0]

    @functools.cache
    def decode_all(decode: DecodeConfig, temperature: float) -> tuple[list, list, int]:
        def complete(batch: list[int]) -> list[Completion]:
            params = [settings(index, temperature) for index in batch]
            return pair.generate([prompts[index] for index in batch], params, decode)

        def complete_in_batches_of(size: int) -> list[Completion]:
            return [done for start in range(0, len(order), size) for done in complete(order[start : start + size])]

        with ThreadPoolExecutor() as threads:
            alone, *batched = threads.map(complete_in_batches_of, (1, 3) if decode in BATCHED else (1,))
        tokens = [[done.token_ids for done in completions] for completions in (alone, *batched)]
        return tokens[0], tokens[-1], sum(done.stats.rounds for done in alone)

    return decode_all


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("decode", SPECULATION, ids=lambda decode: f"{decode.mode}-{decode.budget}")
def test_speculation_changes_no_token(decode_all, decode, temperature):
    alone, batched, num_rounds = decode_all(decode, temperature)
    plain_alone, plain_batched, num_plain_rounds = decode_all(AR, temperature)
    assert alone == plain_alone
    assert batched == (plain_batched if decode in BATCHED else plain_alone)
    assert num_rounds < num_plain_rounds


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_company_changes_no_token(decode_all, temperature):
    """A greedy sequence is the same in every batch; a sampled one wherever it has the same number."""
    alone, batched, _ = decode_all(AR, temperature)
    step = 1 if temperature == 0 else 3
    assert batched[::step] == alone[::step]
    assert len({tuple(tokens) for tokens in alone}) > 15


def common_prefix(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_round_commits_fewer_tokens_than_the_chain(pair, prompts, temperature):
    """A tree as deep as d holds the chain's first d nodes; the chain itself commits exactly what it got right.

    ``text`` says what the target draws wherever a round starts, and `Engine.draft` what the chain would have been.
    """
    depth, num_deep = pair.models.drafter.config.depth, 0
    decodes = DecodeConfig(mode="chain"), *(DecodeConfig(mode="ddtree", budget=size) for size in (7, 15, 63, 63))
    for index, prompt in list(enumerate(prompts))[temperature == 0 :: 2]:
        decode = decodes[index % len(decodes)]
        longer = settings(index, temperature, NUM_NEW + depth + 1)
        text = prompt + pair.generate(prompt, longer, AR)[0].token_ids
        for traced in pair.trace(prompt, settings(index, temperature), decode):
            assert text[traced.start] == traced.token_ids[0]
            chain = pair.draft(text[: traced.start + 1]).argmax(axis=1).tolist()
            num_right = common_prefix(chain, text[traced.start + 1 :])
            committed = len(traced.accepted)
            if decode.mode == "chain" and traced.start + depth + 1 < len(text):
                assert traced.token_ids[1:] == chain
                assert committed == 1 + num_right
            assert committed >= 1 + min(num_right, max(traced.depths))
            num_deep += max(traced.depths) == depth and decode.mode == "ddtree"
    assert num_deep > 0
