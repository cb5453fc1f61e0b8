"""What `Engine` and `Engine.load` may be asked, and which target and drafter fit together."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ddtree_jax.arguments import is_integer, is_number, shown
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.tokenizer import Tokenizer

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
MAX_CHUNK = 4096
AMPLITUDES = (0.001, 1000.0)
"""Smallest and largest ``drafter_rope_amplitude``."""


def check_loading(
    target: Any,
    drafter: Any,
    *,
    dtype: Any,
    prefill_chunk: Any,
    prefix_cache: Any,
    kernels: Any,
    drafter_rope_amplitude: Any,
    drafter_sliding_causal: Any,
) -> None:
    """Checks those arguments of `Engine.load` that need neither a mesh nor a checkpoint.

    Raises:
      ValueError: a wrong one, named.
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype is {shown(dtype)}; allowed: {', '.join(map(repr, DTYPES))}")
    check_prefill(prefill_chunk, prefix_cache)
    if kernels is not None and not isinstance(kernels, bool):
        raise ValueError(f"kernels is {shown(kernels)}; allowed are None, True and False")
    _check_drafter_options(drafter, drafter_rope_amplitude, drafter_sliding_causal)
    for name, folder in (("target", target), ("drafter", drafter)):
        is_folder = isinstance(folder, (str, Path)) and folder != ""
        if not is_folder and (name, folder) != ("drafter", None):
            raise ValueError(f"{name} is {shown(folder)}; allowed is the folder of a converted checkpoint")


def check_prefill(prefill_chunk: Any, prefix_cache: Any) -> None:
    """Raises ValueError where one is not allowed."""
    if not is_integer(prefill_chunk) or not 1 <= prefill_chunk <= MAX_CHUNK:
        raise ValueError(f"prefill_chunk is {shown(prefill_chunk)}; allowed is an integer from 1 to {MAX_CHUNK}")
    if not isinstance(prefix_cache, bool):
        raise ValueError(f"prefix_cache is {shown(prefix_cache)}; allowed are True and False")


def _check_drafter_options(drafter: Any, rope_amplitude: Any, sliding_causal: Any) -> None:
    low, high = AMPLITUDES
    if rope_amplitude is not None and not (is_number(rope_amplitude) and low <= rope_amplitude <= high):
        raise ValueError(f"drafter_rope_amplitude is {shown(rope_amplitude)}; allowed is a number from {low} to {high}")
    if not isinstance(sliding_causal, bool):
        raise ValueError(f"drafter_sliding_causal is {shown(sliding_causal)}; allowed are True and False")
    if drafter is None and rope_amplitude is not None:
        raise ValueError(f"drafter_rope_amplitude is {shown(rope_amplitude)} without a drafter; allowed is None")
    if drafter is None and not sliding_causal:
        raise ValueError("drafter_sliding_causal is False without a drafter; allowed is True")


def check_pair(target: KimiConfig, drafter: DFlashConfig | None, max_length: Any, tokenizer: Tokenizer | None) -> None:
    """Checks that a target takes this drafter, tokenizer and length.

    Raises:
      ValueError: what does not fit, named.
    """
    if not is_integer(max_length) or not 2 <= max_length <= target.max_position_embeddings:
        raise ValueError(
            f"max_length is {shown(max_length)}; allowed is an integer from 2 to {target.max_position_embeddings} "
            "(the target's max_position_embeddings)"
        )
    # Fewer would do until the target draws an id without text.
    if tokenizer is not None and tokenizer.vocab_size != target.vocab_size:
        raise ValueError(f"tokenizer has {tokenizer.vocab_size} ids; this target allows {target.vocab_size}")
    if drafter is None:
        return
    for name, needed in (
        ("vocab_size", target.vocab_size),
        ("hidden_size", target.hidden_size),
        ("num_target_layers", target.num_hidden_layers),
    ):
        if getattr(drafter, name) != needed:
            raise ValueError(f"drafter: {name} is {getattr(drafter, name)}; this target allows {needed}")
