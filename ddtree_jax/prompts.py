"""What a user may pass as prompts, turned into lists of token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ddtree_jax.arguments import BYTES, is_integer, shown
from ddtree_jax.tokenizer import Tokenizer

_ALLOWED = "a string, a list of strings, token ids, a list of lists of token ids, or chat messages"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and whether they came from text (so that output is wanted as text)."""

    token_ids: list[int]
    is_text: bool


class Limits(NamedTuple):
    """Ids that there are, how many of them fit, and what says so."""

    vocab_size: int
    num_tokens: int
    why: str


def read_prompts(
    prompts: Any, tokenizer: Tokenizer | None, thinking: bool, limits: Limits, num_prompts: int
) -> list[Prompt]:
    """One prompt or several, in any of the forms that `Engine.generate` takes.

    Raises:
      ValueError: another form, nothing at all, more than ``num_prompts``, what `read_token_ids` refuses, or text without a
        tokenizer.
    """
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, BYTES):
        raise ValueError(f"prompts is {shown(prompts)}; allowed: {_ALLOWED}")
    if isinstance(prompts, str):
        prompts = [prompts]
    if not prompts:
        raise ValueError(f"prompts is empty; allowed: {_ALLOWED}")
    first = prompts[0]
    if isinstance(first, Mapping):
        token_ids = _tokenizer(tokenizer).encode_chat(prompts, thinking=thinking)
        return [Prompt(read_token_ids(token_ids, "prompts[0]", limits), True)]
    if is_integer(first):
        return [Prompt(read_token_ids(prompts, "prompts[0]", limits), False)]
    if len(prompts) > num_prompts:
        raise ValueError(f"prompts holds {len(prompts)} prompts; allowed are at most {num_prompts}")
    if isinstance(first, str):
        return [Prompt(_encode(tokenizer, prompt, index, limits), True) for index, prompt in enumerate(prompts)]
    if not isinstance(first, (Sequence, np.ndarray)) or isinstance(first, BYTES):
        raise ValueError(f"prompts[0] is {shown(first)}; allowed: {_ALLOWED}")
    return [Prompt(read_token_ids(prompt, f"prompts[{index}]", limits), False) for index, prompt in enumerate(prompts)]


def read_token_ids(token_ids: Any, name: str, limits: Limits) -> list[int]:
    """One list of token ids. Raises ValueError if it is anything else, empty or too long, or if one is no token's."""
    if isinstance(token_ids, np.ndarray):
        token_ids = token_ids.tolist()
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, *BYTES)):
        raise ValueError(f"{name} is {shown(token_ids)}; a list of token ids is needed")
    if not token_ids:
        raise ValueError(f"{name} is empty; allowed are 1 to {limits.num_tokens} token ids")
    if len(token_ids) > limits.num_tokens:
        most = f"{limits.num_tokens} ({limits.why})"
        raise ValueError(f"{name} has {len(token_ids)} token ids; allowed are at most {most}")
    for index, token in enumerate(token_ids):
        if not is_integer(token) or not 0 <= token < limits.vocab_size:
            allowed = f"token ids from 0 to {limits.vocab_size - 1}"
            raise ValueError(f"{name} has {shown(token)} at index {index}; allowed are {allowed}")
    return [int(token) for token in token_ids]


def _encode(tokenizer: Tokenizer | None, text: Any, index: int, limits: Limits) -> list[int]:
    name = f"prompts[{index}]"
    if not isinstance(text, str):
        raise ValueError(f"{name} is {shown(text)}; a string is needed, as prompts[0] is one")
    encoder = _tokenizer(tokenizer)
    try:
        token_ids = encoder.encode(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return read_token_ids(token_ids, name, limits)


def _tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ValueError("prompts hold text, but the target's checkpoint has no tiktoken.model; allowed: token ids")
    return tokenizer
