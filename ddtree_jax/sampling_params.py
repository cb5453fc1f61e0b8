"""What a user may ask of sampling, checked on the host, and the same for a batch on the device."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from ddtree_jax.arguments import BYTES, is_integer, is_number, shown

MAX_STOP_IDS = 16
MAX_BIASED_IDS = 300
MAX_TOP_LOGPROBS = 20

Number = float | int

# Far beyond use; much larger ones have no reciprocal in float32.
_MAX_TEMPERATURE = 1e6
_ABOVE_ZERO = math.ulp(0.0)
_NUMBERS = (
    ("temperature", 0.0, _MAX_TEMPERATURE, f"a finite number from 0 to {_MAX_TEMPERATURE:g}"),
    ("top_p", _ABOVE_ZERO, 1.0, "a number above 0, up to 1"),
    ("min_p", 0.0, 1.0, "a number from 0 to 1"),
    ("repetition_penalty", 0.01, 100.0, "a number from 0.01 to 100"),
    ("presence_penalty", -2.0, 2.0, "a number from -2 to 2"),
    ("frequency_penalty", -2.0, 2.0, "a number from -2 to 2"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a sequence is sampled and when it ends.

    What is drawn behind a token, in this order:

    1. ``logit_bias`` adds to the logits of some ids.
    2. ``repetition_penalty`` divides positive logits of ids that stand in the prompt or the completion, and multiplies
       negative ones (arXiv 1909.05858, section 4.1).
    3. ``frequency_penalty`` is subtracted once for each time that an id stands in the completion, ``presence_penalty`` once
       if it stands there at all.
    4. Until ``min_new_tokens`` stand, no stop id is drawn.
    5. ``temperature`` divides; 0 is greedy, and nothing below matters then.
    6. ``top_k`` (0: off), ``top_p`` and ``min_p`` filter, each what the one before left, as in ``transformers``.

    ``stop_token_ids`` come on top of the model's own end-of-sequence ids, unless ``ignore_eos``; ``stop`` are strings, which
    count from the first token on and are cut from the text. ``logprobs`` and the ``top_logprobs`` best alternatives are
    taken before all of the above.

    Lists and dicts are copied.

    Raises:
      ValueError: a value out of range, named.
    """

    temperature: Number = 0.0
    top_k: int = 0
    top_p: Number = 1.0
    min_p: Number = 0.0
    seed: int = 0
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    repetition_penalty: Number = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: Mapping[int, Number] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for one in fields(self):
            if isinstance(value := getattr(self, one.name), np.generic):
                object.__setattr__(self, one.name, value.item())  # numpy compares in the narrower type
        for name, low, high, what in _NUMBERS:
            value = getattr(self, name)
            if not is_number(value) or not low <= value <= high:
                raise ValueError(f"{name} is {shown(value)}; allowed is {what}")
        for name, low, high in (
            ("top_k", 0, 2**31 - 1),
            ("seed", 0, 2**32 - 1),
            ("max_new_tokens", 1, 2**31 - 1),
            ("min_new_tokens", 0, self.max_new_tokens),
            ("top_logprobs", 0, MAX_TOP_LOGPROBS),
        ):
            value = getattr(self, name)
            if not is_integer(value) or not low <= value <= high:
                why = " (max_new_tokens)" if name == "min_new_tokens" else ""
                raise ValueError(f"{name} is {shown(value)}; allowed is an integer from {low} to {high}{why}")
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} is {shown(value)}; allowed are True and False")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs} without logprobs; allowed is 0, or logprobs=True")
        _check_sequence(
            "stop_token_ids", self.stop_token_ids, is_integer, f"at most {MAX_STOP_IDS} integers", MAX_STOP_IDS
        )
        _check_sequence("stop", self.stop, lambda text: isinstance(text, str) and text != "", "non-empty strings")
        _check_bias(self.logit_bias)
        for name, copied in (("stop_token_ids", tuple), ("stop", tuple), ("logit_bias", dict)):
            object.__setattr__(self, name, copied(getattr(self, name)))


def _check_sequence(
    name: str, values: Any, is_allowed: Callable[[Any], bool], what: str, most: int | None = None
) -> None:
    if isinstance(values, (str, *BYTES)) or not isinstance(values, Sequence):
        raise ValueError(f"{name} is {shown(values)}; allowed is a list of {what}")
    if most is not None and len(values) > most:
        raise ValueError(f"{name} has {len(values)} entries; allowed is a list of {what}")
    for index, value in enumerate(values):
        if not is_allowed(value):
            raise ValueError(f"{name}[{index}] is {shown(value)}; allowed is a list of {what}")


def _check_bias(bias: Any) -> None:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias is {shown(bias)}; allowed is a dict from token ids to numbers")
    if len(bias) > MAX_BIASED_IDS:
        raise ValueError(f"logit_bias has {len(bias)} entries; allowed are at most {MAX_BIASED_IDS}")
    for token, value in bias.items():
        if not is_integer(token):
            raise ValueError(f"logit_bias has {shown(token)}; allowed is a dict from token ids to numbers")
        if not is_number(value) or not -100 <= value <= 100:
            raise ValueError(f"logit_bias[{shown(token)}] is {shown(value)}; allowed is a number from -100 to 100")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingArrays:
    """`SamplingParams` of a batch on the device.

    The first four say whether any sequence asks for it: a bias or penalties, a temperature, top-k or top-p with it,
    log-probabilities. ``key_B2`` is what noise is made from, one key for each seed and number of a prompt; ``prompt_BV`` says
    which ids stand in the prompts. Unused places of ``stop_BZ`` hold -1, those of ``biased_Bz`` an id behind the vocabulary.
    """

    is_adjusted: Bool[Array, ""]
    is_sampled: Bool[Array, ""]
    is_filtered: Bool[Array, ""]
    wants_logprobs: Bool[Array, ""]
    temperature_B: Float[Array, "B"]
    top_k_B: Int32[Array, "B"]
    top_p_B: Float[Array, "B"]
    min_p_B: Float[Array, "B"]
    key_B2: UInt32[Array, "B 2"]
    max_new_tokens_B: Int32[Array, "B"]
    min_new_tokens_B: Int32[Array, "B"]
    stop_BZ: Int32[Array, "B Z"]
    repetition_penalty_B: Float[Array, "B"]
    presence_penalty_B: Float[Array, "B"]
    frequency_penalty_B: Float[Array, "B"]
    biased_Bz: Int32[Array, "B z"]
    bias_Bz: Float[Array, "B z"]
    prompt_BV: Bool[Array, "B V"]

    @classmethod
    def stack(
        cls,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        *,
        batch: int,
        max_length: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> "SamplingArrays":
        """Arrays for ``batch`` sequences, of which those without a prompt may not emit a token.

        Raises:
          ValueError: more stop ids than there is room for.
        """
        rows = [*params, *[SamplingParams()] * (batch - len(params))]
        room = [max_length - len(prompt) for prompt in prompts] + [0] * (batch - len(prompts))
        stop_BZ = np.full((batch, MAX_STOP_IDS), -1, np.int32)
        biased_Bz = np.full((batch, MAX_BIASED_IDS), vocab_size, np.int32)
        bias_Bz = np.zeros((batch, MAX_BIASED_IDS), np.float32)
        prompt_BV = np.zeros((batch, vocab_size), bool)
        for index, (one, prompt) in enumerate(zip(params, prompts, strict=True)):
            ids = stop_ids(one, eos_token_ids)
            if len(ids) > MAX_STOP_IDS:
                raise ValueError(f"stop_token_ids and the model's own are {len(ids)}; allowed are {MAX_STOP_IDS}")
            stop_BZ[index, : len(ids)] = ids
            biased_Bz[index, : len(one.logit_bias)] = list(one.logit_bias)
            bias_Bz[index, : len(one.logit_bias)] = list(one.logit_bias.values())
            prompt_BV[index, list(prompt)] = True

        def column(name: str, dtype: Any) -> Array:
            return jnp.asarray(np.array([getattr(row, name) for row in rows], dtype))

        def any_of(holds: Callable[[SamplingParams], bool]) -> Array:
            return jnp.asarray(any(map(holds, params)))

        most = [min(row.max_new_tokens, space) for row, space in zip(rows, room, strict=True)]
        return cls(
            is_adjusted=any_of(_is_adjusted),
            is_sampled=any_of(lambda row: row.temperature > 0),
            is_filtered=any_of(lambda row: row.temperature > 0 and (row.top_k > 0 or row.top_p < 1)),
            wants_logprobs=any_of(lambda row: row.logprobs),
            temperature_B=column("temperature", np.float32),
            top_k_B=column("top_k", np.int32),
            # Below this, float32 flushes to 0, and no token at all would be kept.
            top_p_B=jnp.maximum(column("top_p", np.float32), jnp.finfo(jnp.float32).tiny),
            min_p_B=column("min_p", np.float32),
            key_B2=_keys(column("seed", np.uint32), jnp.arange(batch, dtype=jnp.int32)),
            max_new_tokens_B=jnp.asarray(np.array(most, np.int32)),
            min_new_tokens_B=column("min_new_tokens", np.int32),
            stop_BZ=jnp.asarray(stop_BZ),
            repetition_penalty_B=column("repetition_penalty", np.float32),
            presence_penalty_B=column("presence_penalty", np.float32),
            frequency_penalty_B=column("frequency_penalty", np.float32),
            biased_Bz=jnp.asarray(biased_Bz),
            bias_Bz=jnp.asarray(bias_Bz),
            prompt_BV=jnp.asarray(prompt_BV),
        )


def _is_adjusted(params: SamplingParams) -> bool:
    """Whether there are a bias or penalties."""
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    return bool(params.logit_bias) or penalties != (1, 0, 0)


@jax.jit
def _keys(seed_B: UInt32[Array, "B"], sequence_B: Int32[Array, "B"]) -> UInt32[Array, "B 2"]:
    """Keys of sequences, once for all rounds."""
    key_B = jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(seed_B), sequence_B)
    return jax.random.key_data(key_B)


def stop_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> list[int]:
    """Ids that end a sequence, each once."""
    own = () if params.ignore_eos else eos_token_ids
    return [*dict.fromkeys((*own, *map(int, params.stop_token_ids)))]
