"""What a user may pass as prompts, turned into lists of token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_jax.sampling_params import is_integer
from ddtree_jax.tokenizer import Tokenizer

_ALLOWED = "a string, a list of strings, token ids, a list of lists of token ids, or chat messages"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and whether they came from text (so that output is wanted as text)."""

    token_ids: list[int]
    is_text: bool


def read_prompts(prompts: Any, tokenizer: Tokenizer | None, thinking: bool) -> list[Prompt]:
    """One prompt or several, in any of the forms that `Engine.generate` takes.

    Raises:
      ValueError: another form, nothing at all, or text without a tokenizer.
    """
    if isinstance(prompts, str):
        return [Prompt(_tokenizer(tokenizer).encode(prompts), True)]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ValueError(f"prompts is {prompts!r}; allowed: {_ALLOWED}")
    if not prompts:
        raise ValueError(f"prompts is empty; allowed: {_ALLOWED}")
    if all(isinstance(prompt, str) for prompt in prompts):
        return [Prompt(_tokenizer(tokenizer).encode(prompt), True) for prompt in prompts]
    if all(isinstance(prompt, Mapping) for prompt in prompts):
        return [Prompt(_tokenizer(tokenizer).encode_chat(prompts, thinking=thinking), True)]
    if all(is_integer(prompt) for prompt in prompts):
        return [Prompt([int(token) for token in prompts], False)]
    return [Prompt(_read_one_of_many(prompt, index), False) for index, prompt in enumerate(prompts)]


def read_token_ids(token_ids: Any, name: str) -> list[int]:
    """One list of token ids. Raises ValueError if it is anything else."""
    if isinstance(token_ids, np.ndarray):
        token_ids = token_ids.tolist()
    if (
        not isinstance(token_ids, Sequence)
        or isinstance(token_ids, (str, bytes))
        or not all(map(is_integer, token_ids))
    ):
        raise ValueError(f"{name} is {token_ids!r}; a list of token ids is needed")
    return [int(token) for token in token_ids]


def check_token_ids(token_ids: Sequence[int], name: str, vocab_size: int, most: int, why: str) -> None:
    """Raises ValueError for an empty prompt, one of more than ``most`` ids, or an id outside the vocabulary."""
    if not token_ids:
        raise ValueError(f"{name} is empty; allowed are 1 to {most} token ids")
    if len(token_ids) > most:
        raise ValueError(f"{name} has {len(token_ids)} token ids; allowed are at most {most} ({why})")
    for index, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}: token id {token} at index {index}; allowed are 0 to {vocab_size - 1}")


def _read_one_of_many(prompt: Any, index: int) -> list[int]:
    try:
        return read_token_ids(prompt, f"prompts[{index}]")
    except ValueError as error:
        raise ValueError(f"{error}, as prompts may be {_ALLOWED}") from None


def _tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ValueError("prompts hold text, but the target's checkpoint has no tiktoken.model; allowed: token ids")
    return tokenizer
