"""What an engine returns: completions, their cost, traces of rounds, and text cut and streamed at the right places."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ddtree_jax.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What a completion cost.

    ``accepted_lengths`` are the tokens that each round committed, before anything was cut. The first token comes from
    prefill, so that their sum is the number of tokens - 1, or more where a stop or the limit cut the last round; behind
    a stop string, which the host finds between slices of rounds, some whole rounds more. ``target_passes`` counts
    prefill chunks and rounds. Seconds are those of the whole batch.
    """

    rounds: int
    accepted_lengths: list[int]
    target_passes: int
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """New tokens of one prompt.

    ``token_ids`` end with the stop id if one was drawn; ``text`` (None without a tokenizer) leaves it out, as it leaves out a
    stop string. ``logprobs`` belong to ``token_ids``, under the target's distribution before filters.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: Literal["stop", "length"]
    logprobs: list[float] | None
    stats: Stats


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTrace:
    """One round of one sequence: its tree (node 0 is the root), and the accepted path from the root down."""

    start: int
    token_ids: list[int]
    depths: list[int]
    parents: list[int]
    accepted: list[int]


class Cut(NamedTuple):
    """Ids and text up to the first stop string, and whether there was one."""

    token_ids: list[int]
    text: str | None
    at_string: bool


def cut_at_stop(
    token_ids: list[int], *, is_running: bool, ended_by_id: bool, stop: Sequence[str], tokenizer: Tokenizer | None
) -> Cut:
    """Text without the stop id; text cut before a stop string, ids behind the token that completes it.

    Of several stop strings the one that is complete first counts, so that the cut does not depend on how much was decoded
    when somebody looked. While a sequence runs, its text ends before an unfinished character.
    """
    if tokenizer is None:
        return Cut(token_ids, None, False)
    shown = token_ids[:-1] if ended_by_id else token_ids
    text = tokenizer.stream_decoder().push(shown) if is_running else tokenizer.decode(shown)
    found = [(at + len(string), at) for string in stop if (at := text.find(string)) >= 0]
    if not found:
        return Cut(token_ids, text, False)
    end, start = min(found)
    decoder = tokenizer.stream_decoder()
    lengths = itertools.accumulate(len(decoder.push([token])) for token in shown)
    num_ids = next((count for count, length in enumerate(lengths, 1) if length >= end), len(shown))
    return Cut(token_ids[:num_ids], text[:start], True)


class IdStream:
    """Turns growing completions into pieces of ids."""

    def __init__(self) -> None:
        self._sent = 0

    def advance(self, completion: Completion, is_running: bool) -> list[int]:
        piece = completion.token_ids[self._sent :]
        self._sent = len(completion.token_ids)
        return piece


class TextStream:
    """Turns growing completions into pieces of text that never end inside a character or a possible stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._decoder = tokenizer.stream_decoder()
        self._held = max(map(len, stop), default=1) - 1
        self._num_pushed = 0
        self._text = ""
        self._sent = 0

    def advance(self, completion: Completion, is_running: bool) -> str:
        self._text += self._decoder.push(completion.token_ids[self._num_pushed :])
        self._num_pushed = len(completion.token_ids)
        if is_running and completion.finish_reason != "stop":
            safe = self._text[: max(len(self._text) - self._held, self._sent)]
        else:
            safe = completion.text
        piece = safe[self._sent :]
        self._sent = len(safe)
        return piece
