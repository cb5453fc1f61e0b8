"""The package's target in the form it is trained in: float experts, all computed densely, and keys expanded.

::

    masters (float32) ──► compute weights: experts through INT4 and back, the rest rounded ──► TrainableKimi
        │                 (the gradient passes straight through the rounding)                      ║ equal, by test
        └──► quantize: the package's own parameter tree ─────────────────────────────────────► kimi.Kimi
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from ddtree_jax import kimi, quant
from ddtree_jax.config import KimiConfig
from ddtree_jax.layers import Layer, Turns, gated_mlp
from ddtree_jax.pallas.add_norm import rms_norm
from ddtree_jax.pallas.latent_rows import turn_pairs
from ddtree_jax.sharding import ArrayInfo, Parameters

Arrays = dict[str, dict[str, Array]]

ROUTER_BIAS = "router_bias_E"
# Float name of an expert weight -> names of its packed words and of its group scales.
_PACKED = {
    "gate_up_E2FD": ("gate_up_E2FI", "gate_up_scale_E2FG"),
    "down_EDF": ("down_EDI", "down_scale_EDG"),
}


class DenseExperts(Layer):
    """All experts for all tokens as two matrix products; a token's weight is 0 for an expert that it did not choose."""

    @staticmethod
    def parameters(config: KimiConfig) -> dict[str, ArrayInfo]:
        E, D, F = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        return {
            "gate_up_E2FD": ArrayInfo((E, 2, F, D), ("experts", None, "expert_width", None)),
            "down_EDF": ArrayInfo((E, D, F), ("experts", None, "expert_width")),
        }

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        expert_TX: Int32[Array, "T X"],
        weight_TX: Float[Array, "T X"],
        shared: tuple[Float[Array, "D F"], Float[Array, "D F"], Float[Array, "F D"]],
    ) -> Float[Array, "T D"]:
        one_hot_TXE = jax.nn.one_hot(expert_TX, self.config.n_routed_experts, dtype=weight_TX.dtype)
        weight_TE = jnp.einsum("TXE,TX->TE", one_hot_TXE, weight_TX)
        both_TE2F = jnp.einsum("TD,EZFD->TEZF", x_TD, self.gate_up_E2FD[...])
        hidden_TEF = jax.nn.silu(both_TE2F[:, :, 0]) * both_TE2F[:, :, 1]
        hidden_TEF = hidden_TEF * weight_TE[:, :, None].astype(x_TD.dtype)
        return jnp.einsum("TEF,EDF->TD", hidden_TEF, self.down_EDF[...]) + gated_mlp(x_TD[None], *shared)[0]


class ExpandedAttention(kimi.Attention):
    """Causal attention of a call to itself, with keys and values expanded to heads; the cache is not read."""

    def __call__(self, x_BTD: Array, turns: Turns, visible_BTt: Any, length_B: Any, cache_BSW: Any):
        config = self.config
        q_BTA = rms_norm(jnp.einsum("BTD,DA->BTA", x_BTD, self.q_a_DA[...]), self.q_norm_A[...], config.latent_norm_eps)
        q_BTHO = jnp.einsum("BTA,AHO->BTHO", q_BTA, self.q_b_AHO[...])
        q_BTHP, q_BTHR = jnp.split(q_BTHO, [config.qk_nope_head_dim], axis=-1)
        kv_BTW = jnp.einsum("BTD,DW->BTW", x_BTD, self.kv_a_DW[...])
        latent_BTC, key_BTR = jnp.split(kv_BTW, [config.kv_lora_rank], axis=-1)
        latent_BTC = rms_norm(latent_BTC, self.kv_norm_C[...], config.latent_norm_eps)
        turn = [of_pair_BTr[:, :, None] for of_pair_BTr in turns]
        q_BTHR, key_BT1R = (turn_pairs(x, *turn) for x in (q_BTHR, key_BTR[:, :, None]))

        key_BTHP = jnp.einsum("BTC,HPC->BTHP", latent_BTC, self.key_up_HPC[...])
        value_BTHU = jnp.einsum("BTC,HUC->BTHU", latent_BTC, self.value_up_HUC[...])
        attended_BTHU = self._attend(
            jnp.concatenate([q_BTHP, q_BTHR], axis=-1),
            jnp.concatenate([key_BTHP, jnp.broadcast_to(key_BT1R, q_BTHR.shape)], axis=-1),
            value_BTHU,
        )
        rows_BTW = jnp.concatenate([latent_BTC, key_BT1R[:, :, 0]], axis=-1)
        return jnp.einsum("BTHU,HUD->BTD", attended_BTHU, self.o_HUD[...]), rows_BTW

    def _attend(self, q_BTHO: Array, key_BTHO: Array, value_BTHU: Array) -> Float[Array, "B T H U"]:
        score_BHTt = jnp.einsum("BTHO,BtHO->BHTt", q_BTHO, key_BTHO, preferred_element_type=jnp.float32)
        visible_Tt = jnp.tri(q_BTHO.shape[1], dtype=bool)
        score_BHTt = jnp.where(visible_Tt[None, None], score_BHTt * self.config.softmax_scale, -jnp.inf)
        weight_BHTt = jax.nn.softmax(score_BHTt, axis=-1).astype(value_BTHU.dtype)
        return jnp.einsum("BHTt,BtHU->BTHU", weight_BHTt, value_BTHU)


class CudnnAttention(ExpandedAttention):
    """The same with cuDNN's fused attention: no scores in memory. GPU and bfloat16 only."""

    def _attend(self, q_BTHO: Array, key_BTHO: Array, value_BTHU: Array) -> Float[Array, "B T H U"]:
        # Padded to the keys' width, which every version of cuDNN takes.
        padding = ((0, 0), (0, 0), (0, 0), (0, q_BTHO.shape[-1] - value_BTHU.shape[-1]))
        attended_BTHO = jax.nn.dot_product_attention(
            q_BTHO,
            key_BTHO,
            jnp.pad(value_BTHU, padding),
            scale=self.config.softmax_scale,
            is_causal=True,
            implementation="cudnn",
        )
        return attended_BTHO[..., : value_BTHU.shape[-1]]


class TrainableBlock(kimi.Block):
    """A decoder layer with dense experts and a choice of attention."""

    def __init__(self, config: KimiConfig, layer: int, arrays: Mapping[str, Array], attention: type[kimi.Attention]):
        Layer.__init__(self, config, arrays)
        self.attention = attention(config, arrays)
        self.is_dense = config.is_dense(layer)
        if self.is_dense:
            self.mlp = kimi.DenseMLP(config, arrays)
        else:
            self.router = kimi.Router(config, arrays)
            self.experts = DenseExperts(config, arrays)
            self.shared = kimi.SharedExpert(config, arrays)


class TrainableKimi(kimi.Kimi):
    """The target over float experts; everything else is the package's own module."""

    def __init__(
        self,
        config: KimiConfig,
        arrays: Mapping[str, Mapping[str, Array]],
        capture: tuple[int, ...] = (),
        attention: type[kimi.Attention] = ExpandedAttention,
    ):
        Layer.__init__(self, config, {**arrays["embed"], **arrays["head"]})
        self.capture = capture
        self.blocks = nnx.List(
            TrainableBlock(config, layer, arrays[f"layer_{layer}"], attention)
            for layer in range(config.num_hidden_layers)
        )

    def run(self, token_ids_BT: Int32[Array, "B T"]) -> kimi.TargetOutput:
        """One causal pass from position 0, without a cache."""
        batch, num_tokens = token_ids_BT.shape
        positions_BT = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), (batch, num_tokens))
        visible_BTt = jnp.broadcast_to(jnp.tri(num_tokens, dtype=bool), (batch, num_tokens, num_tokens))
        return self(
            token_ids_BT, positions_BT, visible_BTt, jnp.zeros(batch, jnp.int32), self.init_cache(batch, num_slots=0)
        )


def trainable_parameters(config: KimiConfig) -> Parameters:
    """The package's parameters with float weights in the place of packed experts."""
    packed = {name for names in _PACKED.values() for name in names}
    return {
        part: {name: info for name, info in table.items() if name not in packed}
        | (DenseExperts.parameters(config) if packed & table.keys() else {})
        for part, table in kimi.parameters(config).items()
    }


def compute_weights(masters: Arrays, dtype: Any, fake_int4: bool = True) -> Arrays:
    """Weights that a pass works with, in ``dtype``; experts have the values of INT4 if ``fake_int4``."""

    def convert(name: str, master: Array) -> Array:
        if name == ROUTER_BIAS:
            return jax.lax.stop_gradient(master)
        if name in _PACKED and fake_int4:
            rounded = quant.dequantize(*quant.quantize(master)).astype(master.dtype)
            master = master + jax.lax.stop_gradient(rounded - master)
        return master.astype(dtype)

    return _map_named(convert, masters)


def quantize(masters: Arrays) -> Arrays:
    """The package's parameter tree: INT4 experts, the rest rounded to bfloat16, the router's bias in float32."""
    exported = {}
    for part, table in masters.items():
        exported[part] = {}
        for name, master in table.items():
            if name in _PACKED:
                exported[part] |= dict(zip(_PACKED[name], quant.quantize(master), strict=True))
            else:
                exported[part][name] = master if name == ROUTER_BIAS else master.astype(jnp.bfloat16)
    return exported


def expand(exported: Arrays, dtype: Any) -> Arrays:
    """`TrainableKimi`'s arrays from the package's parameter tree: the same values, experts expanded."""
    expanded = {}
    for part, table in exported.items():
        packed = {name for names in _PACKED.values() for name in names}
        expanded[part] = {
            name: array if name == ROUTER_BIAS else array.astype(dtype)
            for name, array in table.items()
            if name not in packed
        }
        for name, (words, scale) in _PACKED.items():
            if words in table:
                expanded[part][name] = quant.dequantize(table[words], table[scale]).astype(dtype)
    return expanded


def largest_logit_difference(config: KimiConfig, exported: Arrays, token_ids_BT: Int32[Array, "B T"]) -> float:
    """Largest difference in float32 between the package's packed model and `TrainableKimi` over the same weights."""

    @jax.jit
    def difference(exported: Arrays) -> Float[Array, ""]:
        batch, num_tokens = token_ids_BT.shape
        packed = kimi.Kimi(config, _map_named(to_float, exported))
        positions_BT = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), (batch, num_tokens))
        visible_BTt = jnp.broadcast_to(jnp.tri(num_tokens, dtype=bool), (batch, num_tokens, num_tokens))
        length_B, cache = jnp.zeros(batch, jnp.int32), packed.init_cache(batch, 1)
        output = packed(token_ids_BT, positions_BT, visible_BTt, length_B, cache)
        trainable = TrainableKimi(config, expand(exported, jnp.float32))
        other = trainable.run(token_ids_BT)
        return jnp.max(jnp.abs(packed.unembed(output.hidden_BTD) - trainable.unembed(other.hidden_BTD)))

    def to_float(name: str, array: Array) -> Array:
        is_scale = any(name == scale for _, scale in _PACKED.values())
        return array if is_scale or array.dtype != jnp.bfloat16 else array.astype(jnp.float32)

    with jax.default_matmul_precision("highest"):
        return float(difference(exported))


def _map_named(convert: Any, arrays: Arrays) -> Arrays:
    return {part: {name: convert(name, array) for name, array in table.items()} for part, table in arrays.items()}
