"""Small random pairs of target and drafter, each as an engine and as the oracle of `oracle/`, with the same weights.

Both models of a pair draft alike now and then without training: all embeddings share a large part, which flows through
both residual streams, so that both predict much the same distribution over tokens whatever came before.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from oracle.drafter import Drafter
from oracle.target import Target

from ddtree_jax import Engine, dflash, kimi
from ddtree_jax.config import DFlashConfig, KimiConfig, RopeConfig
from ddtree_jax.sharding import make_mesh
from ddtree_jax.tokenizer import Tokenizer

MAX_LENGTH = 48
PLAIN = RopeConfig(theta=10000.0)
_MSCALES = {"mscale": 1.0, "mscale_all_dim": 1.0}
# Few pairs of few positions: the turns are such that some pair lies below, on and above the ramp.
YARN = RopeConfig(theta=10.0, factor=8.0, beta_fast=1.0, beta_slow=0.5, original_max_positions=16, **_MSCALES)
YARN_AMPLIFIED = RopeConfig(
    theta=50.0, factor=4.0, beta_fast=2.0, beta_slow=0.5, original_max_positions=32, mscale=0.7, mscale_all_dim=0.4
)

_TEXTS = "a b c d e f ab ba abc cab dd ee fa é ée".split()
BASE_TOKENS = (*(text.encode() for text in _TEXTS), b"\xc3", b"\xa9", b" ", b"\n")
"""A vocabulary of text: characters, strings that overlap, two halves of a character."""

FIRST_SPECIAL = b"[BOS]"


@dataclass(frozen=True)
class Pair:
    """An engine, and the oracle of the same models. ``bytes_of`` are those of all ids that occur, if ids stand for text."""

    engine: Engine
    target: Target
    drafter: Drafter
    bytes_of: tuple[bytes, ...] | None


def target_config(**changes: Any) -> KimiConfig:
    sizes = dict(
        vocab_size=37,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        q_lora_rank=13,
        kv_lora_rank=11,
        qk_nope_head_dim=5,
        qk_rope_head_dim=6,
        v_head_dim=7,
        intermediate_size=41,
        moe_intermediate_size=32,
        n_routed_experts=6,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope=PLAIN,
        eos_token_ids=(5,),
    )
    return KimiConfig(**(sizes | changes))


def drafter_config(target: KimiConfig, **changes: Any) -> DFlashConfig:
    sizes = dict(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        intermediate_size=43,
        rms_norm_eps=1e-5,
        rope=PLAIN,
        rope_amplitude=1.0,
        block_size=4,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=(0, 1),
        num_target_layers=target.num_hidden_layers,
        sliding_layers=(False,),
        sliding_window=None,
    )
    return DFlashConfig(**(sizes | changes))


def plain_configs() -> tuple[KimiConfig, DFlashConfig]:
    """Plain rotary positions, one dense layer and one of experts, a full drafter layer; drafts are 3 deep."""
    target = target_config()
    return target, drafter_config(target)


def yarn_configs() -> tuple[KimiConfig, DFlashConfig]:
    """YaRN, two layers of experts, an expert that is never left out, a causal sliding layer; drafts are 7 deep."""
    target = target_config(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=3,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        rope=YARN,
        eos_token_ids=(3, 61),
    )
    drafter = drafter_config(
        target,
        num_hidden_layers=2,
        rope=YARN_AMPLIFIED,
        rope_amplitude=1.2,
        block_size=8,
        target_layer_ids=(0, 2),
        sliding_layers=(True, False),
        sliding_window=6,
    )
    return target, drafter


def text_configs() -> tuple[KimiConfig, DFlashConfig]:
    """Ids that stand for text, two shared experts, a sliding layer that looks ahead; drafts are 5 deep."""
    target = target_config(
        vocab_size=len(BASE_TOKENS) + 256,
        num_hidden_layers=3,
        first_k_dense_replace=2,
        n_routed_experts=5,
        n_shared_experts=2,
        rope=YARN_AMPLIFIED,
        eos_token_ids=(len(BASE_TOKENS),),
    )
    drafter = drafter_config(
        target,
        num_hidden_layers=2,
        num_key_value_heads=1,
        rope=YARN,
        block_size=6,
        target_layer_ids=(1,),
        sliding_layers=(False, True),
        sliding_window=4,
        sliding_causal=False,
    )
    return target, drafter


def least_configs() -> tuple[KimiConfig, DFlashConfig]:
    """As small as a pair gets; drafts are 2 deep."""
    target = target_config(
        vocab_size=32,
        num_attention_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        intermediate_size=32,
        n_routed_experts=4,
    )
    sizes = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=32)
    return target, drafter_config(target, block_size=3, **sizes)


CONFIGS = {"plain": plain_configs, "yarn": yarn_configs, "text": text_configs, "least": least_configs}


def make_pair(name: str, *, seed: int = 0, max_length: int = MAX_LENGTH, **options: Any) -> Pair:
    """A pair by its name in `CONFIGS`; ``options`` are the engine's. Kernels, which no CPU runs, take time to trace."""
    target, drafter = CONFIGS[name]()
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    target_arrays = draw_arrays(kimi.parameters(target), rng)
    drafter_arrays = draw_arrays(dflash.parameters(drafter), rng)
    bytes_of = tokenizer = None
    if name == "text":
        bytes_of = (*BASE_TOKENS, FIRST_SPECIAL)
        tokenizer = Tokenizer({token: rank for rank, token in enumerate(BASE_TOKENS)})
        _make_rare(target_arrays, first=len(bytes_of))
    oracle = Target(target, target_arrays)
    engine = Engine(
        kimi.Kimi(target, on_device(target_arrays), drafter.target_layer_ids),
        dflash.DFlash(drafter, on_device(drafter_arrays)),
        mesh=make_mesh(None),
        max_length=max_length,
        tokenizer=tokenizer,
        has_kernels=False,
        **options,
    )
    return Pair(engine, oracle, Drafter(drafter, drafter_arrays, oracle), bytes_of)


def draw_arrays(parameters: Mapping[str, Mapping[str, Any]], rng: np.random.Generator) -> dict[str, dict]:
    """Arrays for a table of parameters, in the dtypes that an engine in float32 keeps them in."""
    return {part: {name: _draw(name, info, rng) for name, info in infos.items()} for part, infos in parameters.items()}


def on_device(arrays: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict]:
    return {part: {name: jnp.asarray(array) for name, array in table.items()} for part, table in arrays.items()}


def _draw(name: str, info: Any, rng: np.random.Generator) -> np.ndarray:
    if info.dtype == jnp.int32:
        return rng.integers(0, 2**32, info.shape, np.uint32).view(np.int32)
    if "_scale_" in name:
        columns = 32 * info.shape[-1]
        scale = rng.uniform(0.5, 1.5, info.shape) * 0.2 / np.sqrt(columns)
        return scale.astype(jnp.bfloat16)
    normal = rng.standard_normal(info.shape)
    if name == "embedding_VD":
        values = 0.4 * normal + rng.standard_normal(info.shape[1])
    elif "norm_" in name:
        values = 1.0 + 0.2 * normal
    elif name == "router_bias_E":
        values = 0.2 * normal
    else:
        gain = {"router_ED": 2.0, "unembedding_VD": 2.5}.get(name, 0.5)
        values = gain * normal / np.sqrt(_fan_in(name, info.shape))
    return values.astype(np.float32)


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    if name.startswith("o_"):
        return int(np.prod(shape[:-1]))
    return shape[-1] if name in ("key_up_HPC", "value_up_HUC", "router_ED", "unembedding_VD") else shape[0]


def _make_rare(target_arrays: dict[str, dict], first: int) -> None:
    """Turns the rows of ids from ``first`` on against the part that all embeddings share."""
    shared_D = target_arrays["embed"]["embedding_VD"].mean(axis=0)
    rows_VD = target_arrays["head"]["unembedding_VD"]
    rows_VD[first:] = -8.0 * shared_D / np.sqrt(len(shared_D)) + 0.1 * rows_VD[first:]
