"""What the finished target really writes: continuations of corpus text, with the features that a drafter sees.

All sequences of a batch move in step, one position a pass. While a sequence is inside its prompt, the next token is the
prompt's; behind it, the target's. ::

    position      0   1   2   3   4   5   6
    sequence 0    p   p   p   g   g   g   g        prompt length 3: token 3 was drawn from the logits of position 2
    sequence 1    p   p   p   p   p   g   g        prompt length 5
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Int32, UInt16

from ddtree_jax import kimi
from ddtree_jax.config import KimiConfig
from experiments.tiny_training import model as tiny_model

_SLOT_STEP = 128
_GUMBEL_FLOOR = 1e-20


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """One batch of sequences [B, M] with the target's captured features, and where each one's prompt ends."""

    token_BM: UInt16[Array, "B M"]
    feature_BMY: BFloat16[Array, "B M Y"]
    prompt_length_B: Int32[np.ndarray, "B"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How much is sampled. Of a batch, ``temperatures`` has (temperature, share)."""

    num_sequences: int
    length: int = 512
    batch: int = 4096
    max_prompt: int = 160
    min_prompt: int = 4
    file_starts: float = 0.4
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.6), (0.8, 0.25), (1.0, 0.15))
    dtype: str = "bfloat16"


def draw_prompts(
    stream: np.ndarray, end_of_file: int, sampling: Sampling, seed: int, prompt_length: int | None = None
) -> tuple[Int32[np.ndarray, "N M"], Int32[np.ndarray, "N"]]:
    """Text from a stream, at the beginnings of files and anywhere, and how much of it is each sequence's prompt.

    All prompts have ``prompt_length`` where it is given.
    """
    rng = np.random.default_rng(seed)
    count, last = sampling.num_sequences, len(stream) - sampling.length - 1
    begins = np.concatenate([[0], np.flatnonzero(stream[:-1] == end_of_file) + 1])
    begins = begins[begins <= last]
    start_N = rng.integers(0, last + 1, count)
    is_start_N = rng.random(count) < sampling.file_starts
    start_N = np.where(is_start_N, rng.choice(begins, count), start_N)
    length_N = rng.integers(sampling.min_prompt, sampling.max_prompt + 1, count)
    token_NM = stream[start_N[:, None] + np.arange(sampling.max_prompt)].astype(np.int32)
    if prompt_length is not None:
        length_N[:] = prompt_length
    return token_NM, length_N.astype(np.int32)


def sample(
    config: KimiConfig,
    exported: tiny_model.Arrays,
    capture: tuple[int, ...],
    prompt_NM: Int32[np.ndarray, "N M"],
    prompt_length_N: Int32[np.ndarray, "N"],
    sampling: Sampling,
    seed: int,
    log: Callable[[str], None],
) -> list[Samples]:
    """Continues every prompt to ``sampling.length`` tokens with the exported weights, a batch at a time."""
    arrays = tiny_model.expand(exported, jnp.dtype(sampling.dtype))
    temperature_B = _temperatures(sampling)
    batches = []
    for index in range(len(prompt_NM) // sampling.batch):
        rows = slice(index * sampling.batch, (index + 1) * sampling.batch)
        key = jax.random.fold_in(jax.random.key(seed), index)
        prompts = prompt_NM[rows], prompt_length_N[rows]
        token_BM, feature_BMY = _generate(config, capture, sampling.length, arrays, *prompts, temperature_B, key)
        batches.append(Samples(token_BM=token_BM, feature_BMY=feature_BMY, prompt_length_B=prompt_length_N[rows]))
        if index % 4 == 0:
            token_BM.block_until_ready()
            log(f"samples: {rows.stop * sampling.length / 1e6:.1f}M tokens")
    if not batches:
        raise ValueError(f"num_sequences is {len(prompt_NM)}; at least one batch of {sampling.batch} is needed")
    jax.block_until_ready(batches[-1].token_BM)
    return batches


def _temperatures(sampling: Sampling) -> Float[np.ndarray, "B"]:
    """Each temperature's share of a batch, in a block."""
    ends = np.cumsum([share for _, share in sampling.temperatures])
    index_B = np.searchsorted(ends, (np.arange(sampling.batch) + 0.5) / sampling.batch * ends[-1])
    return np.array([temperature for temperature, _ in sampling.temperatures], np.float32)[index_B]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(
    config: KimiConfig,
    capture: tuple[int, ...],
    length: int,
    arrays: tiny_model.Arrays,
    prompt_BM: Int32[Array, "B M"],
    prompt_length_B: Int32[Array, "B"],
    temperature_B: Float[Array, "B"],
    key: Array,
) -> tuple[UInt16[Array, "B M"], BFloat16[Array, "B M Y"]]:
    """Tokens and features of ``length`` positions; the cache grows by parts, so that early passes stay cheap."""
    model = tiny_model.TrainableKimi(config, arrays, capture, attention=kimi.Attention)
    batch, max_prompt = prompt_BM.shape
    visible_BTt = jnp.ones((batch, 1, 1), bool)

    def step(carry: tuple, position: Array) -> tuple[tuple, tuple]:
        cache, token_B = carry
        length_B = jnp.full(batch, position, jnp.int32)
        output = model(token_B[:, None], length_B[:, None], visible_BTt, length_B, cache)
        cache = [
            jax.lax.dynamic_update_slice_in_dim(slots, rows, position, axis=1)
            for slots, rows in zip(cache, output.rows, strict=True)
        ]
        logits_BV = model.unembed(output.hidden_BTD)[:, 0]
        drawn_B = _draw(logits_BV, temperature_B, jax.random.fold_in(key, position))
        following = jnp.minimum(position + 1, max_prompt - 1)
        next_B = jnp.where(position + 1 < prompt_length_B, prompt_BM[:, following], drawn_B)
        return (cache, next_B), (token_B.astype(jnp.uint16), output.features_BTY[:, 0].astype(jnp.bfloat16))

    cache, token_B = model.init_cache(batch, 0), prompt_BM[:, 0]
    parts = []
    for first in range(0, length, _SLOT_STEP):
        last = min(length, first + _SLOT_STEP)
        cache = [jnp.pad(slots, ((0, 0), (0, last - first), (0, 0))) for slots in cache]
        (cache, token_B), part = jax.lax.scan(step, (cache, token_B), jnp.arange(first, last, dtype=jnp.int32))
        parts.append(part)
    token_MB, feature_MBY = (jnp.concatenate(part) for part in zip(*parts, strict=True))
    return token_MB.T, jnp.swapaxes(feature_MBY, 0, 1)


def _draw(logits_BV: Float[Array, "B V"], temperature_B: Float[Array, "B"], key: Array) -> Int32[Array, "B"]:
    """Gumbel arg max; temperature 0 has no noise."""
    uniform_BV = jax.random.uniform(key, logits_BV.shape, minval=_GUMBEL_FLOOR)
    noise_BV = -jnp.log(-jnp.log(uniform_BV))
    return jnp.argmax(logits_BV + temperature_B[:, None] * noise_BV, axis=-1).astype(jnp.int32)
