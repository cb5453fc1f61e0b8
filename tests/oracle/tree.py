"""Draft trees: the reference's best-first heap over products of marginals, and the chain of best tokens."""

import heapq
from typing import NamedTuple

import numpy as np


class Tree(NamedTuple):
    """Prefixes of drafted tokens with their log-probabilities, in the order in which they were taken.

    ``runner_up`` is the log-probability of the best prefix that was left out.
    """

    logprobs_LV: np.ndarray
    scores: dict[tuple[int, ...], float]
    runner_up: float

    def __contains__(self, prefix: tuple[int, ...]) -> bool:
        return prefix in self.scores

    def margin(self, prefix: tuple[int, ...]) -> float:
        """By how many nats a prefix is in or out; its parent is in."""
        if prefix in self.scores:
            return self.scores[prefix] - self.runner_up
        if len(prefix) > len(self.logprobs_LV):
            return np.inf
        score = self.logprobs_LV[np.arange(len(prefix)), list(prefix)].sum()
        return min(self.scores.values(), default=np.inf) - score


class Chain(NamedTuple):
    """The drafter's best token of each depth."""

    logprobs_LV: np.ndarray
    token_ids: tuple[int, ...]

    def __contains__(self, prefix: tuple[int, ...]) -> bool:
        return len(prefix) <= len(self.token_ids) and prefix == self.token_ids[: len(prefix)]

    def margin(self, prefix: tuple[int, ...]) -> float:
        """By how many nats its last token is the best, or is not; its parent is in."""
        level = len(prefix) - 1
        if level >= len(self.token_ids):
            return np.inf
        row_V = self.logprobs_LV[level]
        others = np.delete(row_V, prefix[-1])
        return abs(row_V[prefix[-1]] - others.max())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def best_first(logprobs_LV: np.ndarray, budget: int) -> Tree:
    """The ``budget`` most probable prefixes; of equal ones the lower path of ranks, of equal logits the lower id."""
    depth, vocab_size = logprobs_LV.shape
    ranked_LV = np.argsort(-logprobs_LV, axis=1, kind="stable")

    def entry(ranks: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return -sum(logprobs_LV[level, ranked_LV[level, rank]] for level, rank in enumerate(ranks)), ranks

    waiting = [entry((0,))]
    scores = {}
    while waiting and len(scores) < budget:
        cost, ranks = heapq.heappop(waiting)
        scores[tuple(int(ranked_LV[level, rank]) for level, rank in enumerate(ranks))] = -cost
        if ranks[-1] + 1 < vocab_size:
            heapq.heappush(waiting, entry((*ranks[:-1], ranks[-1] + 1)))
        if len(ranks) < depth:
            heapq.heappush(waiting, entry((*ranks, 0)))
    return Tree(logprobs_LV, scores, -waiting[0][0] if waiting else -np.inf)


def chain(logprobs_LV: np.ndarray, budget: int) -> Chain:
    """The most probable token of each depth, ``budget`` deep at most."""
    return Chain(logprobs_LV, tuple(int(token) for token in np.argmax(logprobs_LV, axis=1)[:budget]))
