"""The DFlash drafter as Flax modules: one pass over [root, MASK, ...] gives a draft for each of the next positions.

Follows z-lab/dflash's ``model.py``. Keys and values of the committed context come from the target's features alone, which
never pass through the drafter's layers; the block's own keys and values live for one call.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from ddtree_jax.config import DFlashConfig
from ddtree_jax.layers import MLP_PROJECTIONS, Layer, Turns, gain, run_mlp
from ddtree_jax.pallas.add_norm import rms_norm
from ddtree_jax.pallas.block_attention import block_attention, block_attention_reference
from ddtree_jax.pallas.block_attention_kernel import SLOT_MULTIPLE
from ddtree_jax.projections import Product, Projection, are_taken, named, pack_all
from ddtree_jax.sharding import ArrayInfo, Parameters, partition

KeyValue = tuple[Array, Array]
"""Rotated keys and values of a layer, each [B, S, J, R]."""

CACHE_AXES = (None, None, "kv_heads", None)
"""Logical axes of cached keys and values, and of the weights [D, m, J, R] of all layers' keys and values."""

# A kernel takes seconds to lower; this is lowered once for all layers that see alike.
_block_attention = jax.jit(block_attention, static_argnames=("eps", "window", "is_causal"))


class Block(Layer):
    """One drafter layer: grouped-query attention with normed queries and keys, then a gated MLP."""

    def __init__(
        self,
        config: DFlashConfig,
        layer: int,
        arrays: Mapping[str, Array],
        mesh: Mesh | None = None,
        has_kernels: bool = False,
    ):
        super().__init__(config, arrays, mesh, has_kernels)
        self.window = config.sliding_window if config.sliding_layers[layer] else None

    @staticmethod
    def parameters(config: DFlashConfig) -> dict[str, ArrayInfo]:
        D, H, J, R = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        F = config.intermediate_size
        return {
            "input_norm_D": gain(D),
            "q_DJQR": ArrayInfo((D, J, H // J, R), (None, "kv_heads", None, None)),
            "k_DJR": ArrayInfo((D, J, R), (None, "kv_heads", None)),
            "v_DJR": ArrayInfo((D, J, R), (None, "kv_heads", None)),
            "q_norm_R": gain(R),
            "k_norm_R": gain(R),
            "o_JQRD": ArrayInfo((J, H // J, R, D), ("kv_heads", None, None, None)),
            "post_attention_norm_D": gain(D),
            "gate_DF": ArrayInfo((D, F), (None, "width")),
            "up_DF": ArrayInfo((D, F), (None, "width")),
            "down_FD": ArrayInfo((F, D), ("width", None)),
        }

    @staticmethod
    def projections(config: DFlashConfig) -> dict[str, Projection]:
        products = (
            Product("BTD,DJQR->BTJQR", ("q_DJQR",)),
            *(Product("BTD,DJR->BTJR", (n,)) for n in ("k_DJR", "v_DJR")),
        )
        output = Product("BTJQR,JQRD->BTD", ("o_JQRD",))
        return named(Projection("qkv", products), Projection("o", (output,))) | MLP_PROJECTIONS

    def finish_key(self, key_BTJR: Float[Array, "B T J R"], turns: Turns) -> Float[Array, "B T J R"]:
        """Norm and rotation of projected keys."""
        return turns.turn_halves(rms_norm(key_BTJR, self.k_norm_R[...], self.config.rms_norm_eps))

    @property
    def sight(self) -> dict[str, Any]:
        """What rows see, in the words of `block_attention`."""
        return {"window": self.window, "is_causal": self.window is not None and self.config.sliding_causal}

    def attend(self, x_BTD: Array, turns: Turns, length_B: Array, cache: KeyValue) -> Array:
        attend = _block_attention if self.has_kernels else block_attention_reference
        attend = functools.partial(attend, eps=self.config.rms_norm_eps, **self.sight)
        gains = self.q_norm_R[...], self.k_norm_R[...]
        arrays = *self.multiply("qkv", x_BTD), *gains, *turns, *cache, length_B
        attended_BTJQR = _with_own_heads(attend, self.mesh)(*arrays)
        (y_BTD,) = self.multiply("o", attended_BTJQR)
        return y_BTD

    def __call__(self, x_BTD: Array, turns: Turns, length_B: Array, cache: KeyValue) -> Array:
        eps = self.config.rms_norm_eps
        normed_BTD = rms_norm(x_BTD, self.input_norm_D[...], eps)
        x_BTD = x_BTD + self.attend(normed_BTD, turns, length_B, cache)
        normed_BTD = rms_norm(x_BTD, self.post_attention_norm_D[...], eps)
        return x_BTD + run_mlp(self, normed_BTD)


def _with_own_heads(attend: Callable[..., Array], mesh: Mesh | None) -> Callable[..., Array]:
    """``attend`` on every shard's own heads and their cache; gains, turns and lengths are whole everywhere."""
    if mesh is None:
        return attend
    heads, whole = partition(CACHE_AXES), PartitionSpec()
    specs = partition((None, None, "kv_heads")), heads, heads, *(whole,) * 4, heads, heads, whole
    return jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)


class DFlash(Layer):
    """The drafter. It has neither an embedding nor a head: both are the target's.

    Context rows of all layers are one product with ``key_value_DmJR``; m are keys of every layer, then their values.
    These weights are here a second time, since neither a part of them nor their concatenation is free inside a loop.
    """

    block_type = Block

    def __init__(
        self,
        config: DFlashConfig,
        arrays: Mapping[str, Mapping[str, Array]],
        mesh: Mesh | None = None,
        has_kernels: bool = False,
    ):
        super().__init__(config, {**arrays["context"], **arrays["head"]}, mesh, has_kernels)
        self.blocks = nnx.List(
            self.block_type(config, layer, arrays[f"layer_{layer}"], mesh, has_kernels)
            for layer in range(config.num_hidden_layers)
        )
        if "context_kv" not in self.packed:
            self.key_value_DmJR = nnx.Param(_keys_and_values(arrays, config, mesh))

    @staticmethod
    def parameters(config: DFlashConfig) -> dict[str, ArrayInfo]:
        D, Y = config.hidden_size, config.hidden_size * len(config.target_layer_ids)
        return {"fc_YD": ArrayInfo((Y, D), (None, "width")), "hidden_norm_D": gain(D), "norm_D": gain(D)}

    @staticmethod
    def projections(config: DFlashConfig) -> dict[str, Projection]:
        return named(
            Projection("fc", (Product("BTY,YD->BTD", ("fc_YD",)),)),
            Projection("context_kv", (Product("BTD,DmJR->BTmJR", ("key_value_DmJR",)),)),
        )

    def init_cache(self, batch: int, num_slots: int) -> list[KeyValue]:
        """An empty context cache: keys and values [B, S, J, R] a layer, in the compute dtype.

        With kernels it has slots up to a whole piece of theirs.
        """
        num_slots += -num_slots % SLOT_MULTIPLE if self.has_kernels else 0
        shape = (batch, num_slots, self.config.num_key_value_heads, self.config.head_dim)
        dtype = self.norm_D[...].dtype
        return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in self.blocks]

    def context(self, features_BTY: Float[Array, "B T Y"], positions_BT: Int32[Array, "B T"]) -> list[KeyValue]:
        """Cache rows of T committed tokens, from the target's features of them."""
        context_BTD = self.project(features_BTY)
        context_BTD = rms_norm(context_BTD, self.hidden_norm_D[...], self.config.rms_norm_eps)
        (rows_BTmJR,) = self.multiply("context_kv", context_BTD)
        rows_mBTJR = jnp.moveaxis(rows_BTmJR, 2, 0)
        keys, values = rows_mBTJR[: len(self.blocks)], rows_mBTJR[len(self.blocks) :]
        turns = self.turns(positions_BT)
        return [
            (block.finish_key(key_BTJR, turns), value_BTJR)
            for block, key_BTJR, value_BTJR in zip(self.blocks, keys, values, strict=True)
        ]

    def turns(self, positions_BT: Int32[Array, "B T"]) -> Turns:
        config = self.config
        return Turns.of(positions_BT, config.rope, config.head_dim, config.rope_amplitude)

    def project(self, features_BTY: Float[Array, "B T Y"]) -> Float[Array, "B T D"]:
        """What all layers' keys and values of the context are made from, whole on every device."""
        (context_BTD,) = self.multiply("fc", features_BTY)
        if self.mesh is not None:
            # Gathered here, once: left to itself, XLA sums norms, keys and values of parts, or gathers the weight.
            for axes in ((None, None, "width"), (None, None, None)):
                place = NamedSharding(self.mesh, partition(axes))
                context_BTD = jax.lax.with_sharding_constraint(context_BTD, place)
        return context_BTD

    def __call__(
        self,
        embedded_BTD: Float[Array, "B T D"],
        length_B: Int32[Array, "B"],
        cache: list[KeyValue],
    ) -> Float[Array, "B T D"]:
        """Normed hidden states of the block [root, MASK, ...], whose row j stands at position ``length_B + j`` and predicts
        the token there.

        Slots of the cache from ``length_B`` on are not seen, but must be finite: plain JAX multiplies their values by zero.
        """
        row_T = jnp.arange(embedded_BTD.shape[1], dtype=jnp.int32)
        x_BTD, turns = embedded_BTD, self.turns(length_B[:, None] + row_T[None])
        for layer, block in enumerate(self.blocks):
            with jax.named_scope(f"layer_{layer}"):
                x_BTD = block(x_BTD, turns, length_B, cache[layer])
        return rms_norm(x_BTD, self.norm_D[...], self.config.rms_norm_eps)


def pack_projections(arrays: dict[str, dict[str, Any]], config: DFlashConfig, mesh: Mesh) -> None:
    """Replaces the weights of all projections by packed ones, if `skinny_gemm`'s kernel takes them all on this device."""
    J, R = config.num_key_value_heads, config.head_dim
    together = ArrayInfo((config.hidden_size, 2 * config.num_hidden_layers, J, R), CACHE_AXES)
    infos = parameters(config)
    infos["context"]["key_value_DmJR"] = together
    tables = infos, projections(config), mesh
    shape = jax.ShapeDtypeStruct(together.shape, arrays["layer_0"]["k_DJR"].dtype)
    if are_taken(arrays | {"context": arrays["context"] | {"key_value_DmJR": shape}}, *tables):
        arrays["context"]["key_value_DmJR"] = _keys_and_values(arrays, config, mesh)
        pack_all(arrays, *tables)


def _keys_and_values(arrays: Mapping[str, Mapping[str, Array]], config: DFlashConfig, mesh: Mesh | None) -> Array:
    """Weights [D, m, J, R] of the keys of all layers, then of their values."""
    layers = [arrays[f"layer_{layer}"] for layer in range(config.num_hidden_layers)]
    place = None if mesh is None else NamedSharding(mesh, partition(CACHE_AXES))
    return _side_by_side([table[name] for name in ("k_DJR", "v_DJR") for table in layers], place=place)


@functools.partial(jax.jit, static_argnames="place")
def _side_by_side(parts: list[Array], place: NamedSharding | None) -> Float[Array, "D m J R"]:
    """m arrays [D, J, R] as one, by one program: nothing lies anywhere else in between."""
    stacked_DmJR = jnp.stack(parts, axis=1)
    return stacked_DmJR if place is None else jax.lax.with_sharding_constraint(stacked_DmJR, place)


def parameters(config: DFlashConfig) -> Parameters:
    """Every parameter of the drafter, by part: "context", "layer_0", ..., "head"."""
    whole = DFlash.parameters(config)
    tree = {"context": {name: whole[name] for name in ("fc_YD", "hidden_norm_D")}}
    for layer in range(config.num_hidden_layers):
        tree[f"layer_{layer}"] = Block.parameters(config)
    tree["head"] = {"norm_D": whole["norm_D"]}
    return tree


def projections(config: DFlashConfig) -> dict[str, list[Projection]]:
    """Every projection of the drafter whose weights may be packed, by part."""
    layers = {f"layer_{layer}": list(Block.projections(config).values()) for layer in range(config.num_hidden_layers)}
    return {"context": list(DFlash.projections(config).values())} | layers
