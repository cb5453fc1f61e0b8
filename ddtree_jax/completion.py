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
    prefill, so that 1 + their sum is the number of tokens emitted before cuts: that of ``token_ids``, or more where a stop
    or the limit cut the last round, or some whole rounds behind a stop string, which the host finds between slices of
    rounds. ``target_passes`` counts prefill chunks and rounds. Of the prompt, ``cached_tokens`` were taken from the caches
    of the call before. Seconds are those of the whole batch.
    """

    rounds: int
    accepted_lengths: list[int]
    target_passes: int
    cached_tokens: int
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """New tokens of one prompt.

    ``token_ids`` end with the stop id if one was drawn; ``text`` (None without a tokenizer) leaves it out, as it leaves out a
    stop string. ``logprobs`` belong to ``token_ids``, under the target's distribution before bias, penalties and filters;
    ``top_logprobs`` are that distribution's best tokens there, best first, as (id, log-probability).
    """

    token_ids: list[int]
    text: str | None
    finish_reason: Literal["stop", "length"]
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[int, float]]] | None
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


def cut_at_stop(token_ids: list[int], *, ended_by_id: bool, stop: Sequence[str], tokenizer: Tokenizer | None) -> Cut:
    """Text without the stop id; text cut before a stop string, ids behind the token that completes it.

    Of several stop strings the one that is complete first counts, so that the cut does not depend on how much was decoded
    when somebody looked. No text holds a stop string.
    """
    if tokenizer is None:
        return Cut(token_ids, None, False)
    shown = token_ids[:-1] if ended_by_id else token_ids
    text = tokenizer.decode(shown)
    found = [(at + len(string), at) for string in stop if (at := text.find(string)) >= 0]
    if not found:
        return Cut(token_ids, text, False)
    end, start = min(found)
    decoder = tokenizer.stream_decoder()
    lengths = itertools.accumulate(len(decoder.push([token])) for token in shown)
    # A string may be complete only by what an unfinished last character is replaced with.
    num_ids = next((count for count, length in enumerate(lengths, 1) if length >= end), len(shown))
    return Cut(token_ids[:num_ids], text[:start], True)


class StopFinder:
    """Looks for stop strings in a growing text, of which it keeps no more than a string's length."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._decoder = tokenizer.stream_decoder()
        self._stop = stop
        self._text = ""
        self._num_pushed = 0

    def finds(self, token_ids: list[int]) -> bool:
        """Whether there is one in the whole text so far, which grows from call to call."""
        self._text += self._decoder.push(token_ids[self._num_pushed :])
        self._num_pushed = len(token_ids)
        found = any(string in self._text for string in self._stop)
        self._text = self._text[-max(map(len, self._stop)) :]
        return found


class IdStream:
    """Turns growing ids into pieces."""

    def __init__(self) -> None:
        self._num_sent = 0

    def advance(self, token_ids: list[int]) -> list[int]:
        """What is new in the ids of a sequence that goes on."""
        piece = token_ids[self._num_sent :]
        self._num_sent = len(token_ids)
        return piece

    def finish(self, completion: Completion) -> list[int]:
        return self.advance(completion.token_ids)


class TextStream:
    """Turns growing ids into pieces of text that never end inside a character or a possible stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._decoder = tokenizer.stream_decoder()
        self._num_held = max(map(len, stop), default=1) - 1
        self._num_pushed = 0
        self._held = ""
        self._num_sent = 0

    def advance(self, token_ids: list[int]) -> str:
        """What is new, and safe to show, of a sequence that goes on and holds no stop string yet."""
        self._held += self._decoder.push(token_ids[self._num_pushed :])
        self._num_pushed = len(token_ids)
        num_safe = max(len(self._held) - self._num_held, 0)
        piece, self._held = self._held[:num_safe], self._held[num_safe:]
        self._num_sent += num_safe
        return piece

    def finish(self, completion: Completion) -> str:
        return completion.text[self._num_sent :]
