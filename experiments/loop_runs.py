"""Runs of a compiled loop, or of target passes alone, over caches that are full: each from where the last one began."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.decode import Models, State
from ddtree_jax.placement import Placement
from ddtree_jax.sampling_params import SamplingArrays, SamplingParams

RUNS = 5
ROOM = 1024
"""Slots that runs need behind the longest context."""
_SLOT_STEP = 8192


def slots_for(context: int) -> int:
    """Slots of caches: so many that XLA does not fill the drafter's up in every round, to divide a product over them."""
    return -(-(context + ROOM) // _SLOT_STEP) * _SLOT_STEP


class Caches:
    """Both models' caches, which go from program to program: a loop takes them over and gives them back."""

    def __init__(self, target: Any, drafter: Any):
        self.target, self.drafter = target, drafter


class Rounds:
    """A compiled loop: greedy decoding that no token ends, of sequences that are equally long at the begin of a run."""

    def __init__(
        self, compiled: Any, models: Models, described: State, budget: int, placement: Placement, caches: Caches
    ):
        batch, capacity = described.emitted.token_BM.shape
        params = [SamplingParams(max_new_tokens=capacity - 1, ignore_eos=True)] * batch
        sizes = {"max_length": capacity, "vocab_size": models.target.config.vocab_size, "eos_token_ids": ()}
        sampling = SamplingArrays.stack(params, [[0]] * batch, batch=batch, **sizes)
        self._compiled, self._models, self._placement, self._caches = compiled, models, placement, caches
        self._inputs = placement.put((sampling, np.int32(budget)))
        self._blank = replace(described, target_cache=[], drafter_cache=[])
        self.tokens_a_round = 0.0

    def run(self, length: int, num_rounds: int) -> float:
        """Runs so many rounds behind ``length`` tokens; gives wall seconds."""
        state = self._begin(length)
        limit = self._placement.put(np.int32(num_rounds))
        jax.block_until_ready((state, limit))
        begun = time.perf_counter()
        state = jax.block_until_ready(self._compiled(self._models, state, *self._inputs, limit))
        seconds = time.perf_counter() - begun
        self._caches.target, self._caches.drafter = state.target_cache, state.drafter_cache
        self.tokens_a_round = float(np.mean(np.asarray(state.num_tokens_B) - 1)) / num_rounds
        return seconds

    def _begin(self, length: int) -> State:
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._blank)
        ones_B = np.ones(zeros.length_B.shape, np.int32)
        state = self._placement.put(replace(zeros, length_B=length * ones_B, num_tokens_B=ones_B))
        return replace(state, target_cache=self._caches.target, drafter_cache=self._caches.drafter)


class Passes:
    """Compiled `target_passes`."""

    def __init__(self, compiled: Any, models: Models, placement: Placement, caches: Caches):
        self._compiled, self._target, self._placement, self._caches = compiled, models.target, placement, caches

    def run(self, length: int, num_passes: int) -> float:
        """Runs so many passes behind ``length`` tokens; gives wall seconds."""
        batch = jax.tree.leaves(self._caches.target)[0].shape[0]
        numbers = self._placement.put((np.full(batch, length, np.int32), np.int32(num_passes)))
        jax.block_until_ready(numbers)
        begun = time.perf_counter()
        jax.block_until_ready(self._compiled(self._target, self._caches.target, *numbers))
        return time.perf_counter() - begun


def seconds_each(run: Callable[[int, int], float], length: int, count: int) -> float:
    """Wall seconds of a round or pass: medians of runs of ``count`` and of twice as many, what a call costs taken off."""
    run(length, count)
    one, two = (statistics.median(run(length, times * count) for _ in range(RUNS)) for times in (1, 2))
    return (two - one) / count


def describe_state(lowered: jax.stages.Lowered, placement: Placement) -> State:
    """Shapes and places of the state that a loop's program takes."""
    state = lowered.args_info[0][1]
    described = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    return placement.describe_batch(described)


def draw_caches(target: Any, drafter: Any, seed: int) -> Caches:
    """Caches of these shapes, in their places, of which every slot is drawn."""
    leaves, structure = jax.tree.flatten((target, drafter))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return Caches(*structure.unflatten(_draw_cache(leaf)(keys[index]) for index, leaf in enumerate(leaves)))


@functools.cache
def _draw_cache(leaf: jax.ShapeDtypeStruct) -> Callable[[jax.Array], jax.Array]:
    draw = functools.partial(jax.random.uniform, shape=leaf.shape, dtype=leaf.dtype, minval=-1, maxval=1)
    return jax.jit(draw, out_shardings=leaf.sharding)


def lower_passes(
    target: Any, placement: Placement, *, batch: int, num_slots: int, num_nodes: int
) -> jax.stages.Lowered:
    """`target_passes` of a target whose arrays may be shapes."""
    cache = placement.describe(jax.eval_shape(lambda target: target.init_cache(batch, num_slots), target))
    numbers = placement.describe((np.zeros(batch, np.int32), np.int32(0)))
    return jax.jit(target_passes, static_argnames="num_nodes").lower(target, cache, *numbers, num_nodes=num_nodes)


def target_passes(
    target: Any, cache: Any, length_B: jax.Array, num_passes: jax.Array, *, num_nodes: int
) -> tuple[jax.Array, jax.Array]:
    """So many passes over a chain of ``num_nodes`` behind the prefix, with logits; nothing is drafted, drawn or committed.

    Tokens of a pass depend on the logits before, so that no pass can be left out.
    """
    batch, vocab_size = length_B.shape[0], target.config.vocab_size
    row_N = jnp.arange(num_nodes, dtype=jnp.int32)
    causal_BNn = jnp.broadcast_to(row_N[:, None] >= row_N[None], (batch, num_nodes, num_nodes))
    positions_BN = length_B[:, None] + row_N[None]
    is_token_BN = jnp.ones((batch, num_nodes), bool)

    def verify(_: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token_BN, logits_BNV = carried
        with jax.named_scope("verify"):
            token_BN = (token_BN + (logits_BNV[..., 0] > 0).astype(jnp.int32)) % vocab_size
            out = target(token_BN, positions_BN, causal_BNn, length_B, cache, is_token_BN)
            return token_BN, target.unembed(out.hidden_BTD)

    token_BN = jnp.broadcast_to(row_N % vocab_size, (batch, num_nodes))
    logits_BNV = jnp.zeros((batch, num_nodes, vocab_size), jnp.float32)
    return jax.lax.fori_loop(0, num_passes, verify, (token_BN, logits_BNV))
