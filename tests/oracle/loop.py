"""A sequence's tokens one by one, where the completion ends, and how many tokens each round of drafting accepts."""

import codecs
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from oracle.drafter import Drafter
from oracle.noise import gumbel
from oracle.sampling import CLOSE, Options, draw, penalized
from oracle.target import Target
from oracle.tree import best_first, chain, log_softmax

ROUTER_CLOSE = 3e-6
"""Scores of experts that are closer than this may change places in float32."""


class Ending(NamedTuple):
    """How many tokens stand and why no more; ``text`` for a vocabulary of bytes, cut before a stop string."""

    num_tokens: int
    reason: str
    text: str | None
    at_string: bool


class Continuation:
    """Tokens behind a prompt, without an end: any number can be asked for, as if nothing ever stopped the sequence.

    ``close_at`` is the number of the first token that rounding could make another one: from there on nothing is known.
    """

    def __init__(self, target: Target, options: Options, prompt: Sequence[int], index: int, eos: Collection[int]):
        self.target = target
        self.options = options
        self.prompt = list(prompt)
        self.stop_ids = options.stop_ids(eos)
        self.close_at: int | None = None
        self.logprobs: list[np.ndarray] = []
        self._index = index
        self._tokens: list[int] = []

    def tokens(self, count: int) -> list[int]:
        while len(self._tokens) < count:
            self._draw()
        return self._tokens[:count]

    def is_close(self, count: int) -> bool:
        """Whether a near tie decided one of the first ``count`` tokens."""
        self.tokens(count)
        return self.close_at is not None and self.close_at < count

    def _draw(self) -> None:
        number = len(self._tokens)
        forward = self.target(self.prompt + self._tokens)
        raw_V = forward.logits_TV[-1]
        banned = self.stop_ids if number < self.options.min_new_tokens else ()
        row_V = penalized(raw_V, self.options, self.prompt, self._tokens, banned)
        noise_V = gumbel(self.options.seed, self._index, len(self.prompt) + number, len(row_V))
        token, is_close = draw(row_V, self.options, noise_V)
        if self.close_at is None and (is_close or forward.router_gap < ROUTER_CLOSE):
            self.close_at = number
        self._tokens.append(token)
        self.logprobs.append(log_softmax(raw_V))

    def ending(self, max_length: int, bytes_of: Sequence[bytes] | None = None) -> Ending:
        """Where the completion ends in a context of ``max_length``. ``bytes_of`` are those of each id that has any."""
        limit = min(self.options.max_new_tokens, max_length - len(self.prompt))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = ""
        for number in range(limit):
            token = self.tokens(number + 1)[-1]
            if token in self.stop_ids:
                return Ending(number + 1, "stop", _text(text, decoder, bytes_of), False)
            if bytes_of is None:
                continue
            text += decoder.decode(bytes_of[token])
            found = [(text.index(stop) + len(stop), text.index(stop)) for stop in self.options.stop if stop in text]
            if found:
                return Ending(number + 1, "stop", text[: min(found)[1]], True)
        return Ending(limit, "length", _text(text, decoder, bytes_of), False)

    def rounds(self, drafter: Drafter, mode: str, budget: int) -> Iterator["Round"]:
        """Rounds behind the first token, without end."""
        start = len(self.prompt)
        while True:
            emitted = start - len(self.prompt) + 1
            root = self.tokens(emitted)[-1]
            drafted = self._drafted(drafter, mode, budget, self.prompt + self.tokens(emitted - 1), root)
            prefix, margin = (), np.inf
            while drafted is not None:
                longer = (*prefix, self.tokens(emitted + len(prefix) + 1)[-1])
                margin = min(margin, drafted.margin(longer))
                if longer not in drafted:
                    break
                prefix = longer
            yield Round(start, len(prefix) + 1, emitted + len(prefix) + 1, margin < CLOSE)
            start += len(prefix) + 1

    def _drafted(self, drafter: Drafter, mode: str, budget: int, committed: list[int], root: int):
        if mode == "ar" or budget == 0:
            return None
        build: Callable = {"chain": chain, "ddtree": best_first}[mode]
        return build(log_softmax(drafter(committed, root)), budget)


class Round(NamedTuple):
    """Committed tokens before it, how many it commits (the root and the nodes followed), and how many tokens stand then."""

    start: int
    accepted: int
    num_tokens: int
    is_close: bool


def _text(text: str, decoder: codecs.IncrementalDecoder, bytes_of: Sequence[bytes] | None) -> str | None:
    return None if bytes_of is None else text + decoder.decode(b"", final=True)
