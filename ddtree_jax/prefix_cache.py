"""The caches of the last batch, for prompts that begin like one of its sequences, such as a conversation's next turn.

::

    kept      seq 0   a b c d e f         prompt 0   a b c x y    goes on behind c in a copy of seq 0
              seq 1   a b q               prompt 1   a b c d e    goes on behind d: one token at least is left to prefill
                                          prompt 2   z            starts with nothing
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from ddtree_jax.cache import Cache


class Prefixes(NamedTuple):
    """Caches of a batch whose sequence i holds the first ``lengths[i]`` tokens of prompt i."""

    target_cache: Cache
    drafter_cache: Cache
    lengths: list[int]


class PrefixCache:
    """Holds the caches of one batch at most. They belong to whoever takes them out, so that nothing is held twice."""

    def __init__(self, put: Callable[[np.ndarray], jax.Array]):
        """``put`` brings an array to the devices."""
        self._kept: deque[tuple[list[np.ndarray], Cache, Cache]] = deque(maxlen=1)
        self._put = put
        self._take_sequences = jax.jit(_take_sequences, static_argnames="sharding")

    def keep(self, token_ids: Sequence[Sequence[int]], target_cache: Cache, drafter_cache: Cache) -> None:
        """Takes caches over whose sequences hold ``token_ids`` in their first slots."""
        self._kept.append(([np.array(ids, np.int32) for ids in token_ids], target_cache, drafter_cache))

    def take(self, prompts: Sequence[Sequence[int]], batch: int) -> Prefixes | None:
        """Gives away what was kept, rearranged for ``batch`` sequences; None, and nothing is kept, if no prompt fits."""
        try:
            kept_ids, *caches = self._kept.pop()
        except IndexError:
            return None
        index_B, lengths = list(range(batch)), [0] * batch
        for number, prompt in enumerate(prompts):
            prompt_ids = np.array(prompt[:-1], np.int32)
            common = [_num_common(prompt_ids, ids) for ids in kept_ids]
            lengths[number] = max(common)
            # Its own place if no other is better: caches that stay where they are need no copy.
            is_best_here = lengths[number] == 0 or (number < len(common) and common[number] == lengths[number])
            index_B[number] = number if is_best_here else common.index(lengths[number])
        if not any(lengths):
            return None
        num_kept = jax.tree.leaves(caches)[0].shape[0]
        if index_B != list(range(num_kept)):
            caches = self._rearranged(caches, [min(index, num_kept - 1) for index in index_B])
        return Prefixes(*caches, lengths)

    def _rearranged(self, caches: list[Cache], index_B: list[int]) -> list[Cache]:
        """Copies array by array, each old one freed before the next is made."""
        index = self._put(np.array(index_B, np.int32))

        def rearranged(slots: jax.Array) -> jax.Array:
            taken = self._take_sequences(slots, index, sharding=slots.sharding)
            slots.delete()
            return taken

        return jax.tree.map(rearranged, caches)


def _take_sequences(slots: jax.Array, index_B: jax.Array, sharding: Sharding) -> jax.Array:
    """Sequences ``index_B``, where the old ones lie."""
    return jax.lax.with_sharding_constraint(slots[index_B], sharding)


def _num_common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if differs.size else length
