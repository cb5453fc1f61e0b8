"""What the host reads of the loop's state: completions and traces of rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from ddtree_jax.completion import Completion, RoundTrace, Stats, cut_at_stop
from ddtree_jax.decode import Emitted, State
from ddtree_jax.sampling_params import SamplingParams, stop_ids
from ddtree_jax.tokenizer import Tokenizer


class Tokens(NamedTuple):
    """What has been emitted and what has ended, fetched after each slice of rounds."""

    token_BM: np.ndarray
    num_tokens_B: np.ndarray
    finish_B: np.ndarray

    @classmethod
    def of(cls, state: State) -> "Tokens":
        return cls(*jax.device_get((state.emitted.token_BM, state.num_tokens_B, state.finish_B)))

    def ids(self, index: int) -> list[int]:
        return self.token_BM[index, : self.num_tokens_B[index]].tolist()


@dataclass(frozen=True, slots=True)
class Progress:
    """The loop's state after a slice of rounds, and what it has cost so far. The next slice consumes the state."""

    state: State
    tokens: Tokens
    num_chunks: int
    num_cached: list[int]
    prefill_seconds: float
    decode_seconds: float


def completions(
    progress: Progress, params: Sequence[SamplingParams], eos_token_ids: Sequence[int], tokenizer: Tokenizer | None
) -> list[Completion]:
    """One a sequence that has ``params``."""
    state = progress.state
    emitted, accepted_BM, num_rounds_B = jax.device_get((state.emitted, state.accepted_BM, state.num_rounds_B))

    def completion(index: int, one: SamplingParams) -> Completion:
        token_ids = progress.tokens.ids(index)
        ended_by_id = token_ids[-1] in stop_ids(one, eos_token_ids)
        cut = cut_at_stop(token_ids, ended_by_id=ended_by_id, stop=one.stop, tokenizer=tokenizer)
        num_tokens, num_rounds = len(cut.token_ids), int(num_rounds_B[index])
        return Completion(
            token_ids=cut.token_ids,
            text=cut.text,
            finish_reason="stop" if ended_by_id or cut.at_string else "length",
            logprobs=emitted.logprob_BM[index, :num_tokens].tolist() if one.logprobs else None,
            top_logprobs=_top_logprobs(emitted, index, num_tokens, one.top_logprobs) if one.top_logprobs else None,
            stats=Stats(
                rounds=num_rounds,
                accepted_lengths=accepted_BM[index, :num_rounds].tolist(),
                target_passes=progress.num_chunks + num_rounds,
                cached_tokens=progress.num_cached[index],
                prefill_seconds=progress.prefill_seconds,
                decode_seconds=progress.decode_seconds,
            ),
        )

    return [completion(index, one) for index, one in enumerate(params)]


def _top_logprobs(emitted: Emitted, index: int, num_tokens: int, num_best: int) -> list[list[tuple[int, float]]]:
    token_MK, logprob_MK = (
        array[index, :num_tokens, :num_best].tolist() for array in (emitted.top_token_BMK, emitted.top_logprob_BMK)
    )
    return [list(zip(*pair, strict=True)) for pair in zip(token_MK, logprob_MK, strict=True)]


def trace(state: State) -> RoundTrace | None:
    """The last round of sequence 0; None before the first one."""
    last = state.last
    accepted, count, length = (int(np.asarray(one)[0]) for one in (last.accepted_B, last.count_B, state.length_B))
    if accepted == 0:
        return None
    token_N, depth_N, parent_N = (
        np.asarray(column)[0, :count].tolist() for column in (last.token_BN, last.depth_BN, last.parent_BN)
    )
    return RoundTrace(
        start=length - accepted,
        token_ids=token_N,
        depths=depth_N,
        parents=parent_N,
        accepted=np.asarray(last.path_BT)[0, :accepted].tolist(),
    )
