"""Multi-head latent attention of Kimi K2.6 in absorbed form: its projections, the rows of the cache, heads on a mesh.

Formulas follow the published ``modeling_deepseek.py``.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from ddtree_jax.config import KimiConfig
from ddtree_jax.layers import Layer, Turns, everywhere, gain
from ddtree_jax.pallas.attend_and_project import attend_and_project
from ddtree_jax.pallas.latent_query import LatentQuery, latent_query
from ddtree_jax.pallas.latent_rows import LatentRows, latent_rows
from ddtree_jax.pallas.tree_mla import ROW_MULTIPLE, SLOT_MULTIPLE, tree_mla, tree_mla_gpu, tree_mla_reference
from ddtree_jax.pallas.tree_mla_split import Query
from ddtree_jax.projections import Packed, Product, Projection, named
from ddtree_jax.sharding import RULES, ArrayInfo

# Kernels take seconds to lower; these are lowered once for all layers.
_tree_mla = jax.jit(tree_mla, static_argnames=("scale",))
_attend_and_project = jax.jit(attend_and_project, static_argnames=("scale",))
_latent_rows = jax.jit(latent_rows, static_argnames=("eps", "multiple", "has_kernels"))
_latent_query = jax.jit(latent_query, static_argnames=("outputs", "num_heads", "eps", "multiple", "has_kernels"))

_HEADS, _WHOLE = PartitionSpec(None, None, RULES["heads"]), PartitionSpec()
_IN_SPECS = Query(_HEADS, _HEADS, _WHOLE, _WHOLE), *(_WHOLE,) * 5


class Attention(Layer):
    """Multi-head latent attention. Keys and values are never expanded: queries move into the latent space instead.

    On a mesh every shard attends with its own heads.
    """

    @staticmethod
    def parameters(config: KimiConfig) -> dict[str, ArrayInfo]:
        D, H, A, C = config.hidden_size, config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
        P, R, U = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        return {
            "q_a_DA": ArrayInfo((D, A), (None, None)),
            "q_norm_A": gain(A),
            "q_b_AHO": ArrayInfo((A, H, P + R), (None, "heads", None)),
            "kv_a_DW": ArrayInfo((D, C + R), (None, None)),
            "kv_norm_C": gain(C),
            "key_up_HPC": ArrayInfo((H, P, C), ("heads", None, None)),
            "value_up_HUC": ArrayInfo((H, U, C), ("heads", None, None)),
            "o_HUD": ArrayInfo((H, U, D), ("heads", None, None)),
        }

    @staticmethod
    def projections(config: KimiConfig) -> dict[str, Projection]:
        query_sizes = config.qk_nope_head_dim, config.qk_rope_head_dim
        return named(
            Projection("qkv_a", (Product("BTD,DA->BTA", ("q_a_DA",)), Product("BTD,DW->BTW", ("kv_a_DW",)))),
            Projection("q_b", (Product("BTA,AHO->BTHO", ("q_b_AHO",), query_sizes),)),
            Projection("key_up", (Product("BTHP,HPC->BTHC", ("key_up_HPC",)),)),
            Projection("value_up", (Product("BTHC,HUC->BTHU", ("value_up_HUC",)),)),
            Projection("o", (Product("BTHU,HUD->BTD", ("o_HUD",)),)),
        )

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        turns: Turns,
        visible_BTt: Bool[Array, "B T T"],
        length_B: Int32[Array, "B"],
        cache_BSW: Float[Array, "B S W"],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T W"]]:
        made = self._make_query(*self.multiply("qkv_a", x_BTD), turns)
        query = Query(made.latent_BTHC, made.rotary_BTHR, *turns)
        value_BTHU = self._attend(query, cache_BSW, made.rows_BTW, length_B, visible_BTt, made.tile_BtW)
        (y_BTD,) = self.multiply("o", value_BTHU)
        return y_BTD, made.rows_BTW

    def _make_query(self, query_BTA: Array, latent_BTW: Array, turns: Turns) -> LatentQuery:
        """From both first projections; a shard makes its own heads' part, and the rows all alike."""
        arrays = query_BTA, latent_BTW, self.q_norm_A[...], self.kv_norm_C[...], *turns
        options = {"eps": self.config.latent_norm_eps, "multiple": ROW_MULTIPLE, "has_kernels": self.has_kernels}
        if "q_b" in self.packed:
            packed = self.packed["q_b"], self.packed["key_up"]
            make = _with_own_blocks(functools.partial(_latent_query, **options), *packed)
            return make(*arrays, *(one.blocks for one in packed))
        made: LatentRows = everywhere(functools.partial(_latent_rows, **options), self.mesh)(*arrays)
        q_BTHP, q_BTHR = self.multiply("q_b", made.query_BTA)
        (q_BTHC,) = self.multiply("key_up", q_BTHP)
        return LatentQuery(made.rows_BTW, made.tile_BtW, q_BTHC, q_BTHR)

    def _attend(self, query: Query, *arrays: Array) -> Float[Array, "B T H U"]:
        """Values that the heads attend to."""
        scale = self.config.softmax_scale
        if self.has_kernels and "value_up" in self.packed:
            packed = self.packed["value_up"]
            return _with_own_values(functools.partial(_attend_and_project, scale=scale), packed)(query, *arrays)
        attend = functools.partial(_tree_mla if self.has_kernels else tree_mla_reference, scale=scale)
        (value_BTHU,) = self.multiply("value_up", _with_own_heads(attend, self.mesh)(query, *arrays))
        return value_BTHU


def _with_own_heads(attend: Callable[..., Array], mesh: Mesh | None) -> Callable[..., Array]:
    """``attend`` on every shard's own heads; all else is whole everywhere."""
    if mesh is None:
        return attend
    return jax.shard_map(attend, mesh=mesh, in_specs=_IN_SPECS, out_specs=_HEADS, check_vma=False)


def _with_own_values(attend: Callable[..., Array], value_up: Packed) -> Callable[..., Array]:
    """The same with every shard's own blocks behind the other arrays."""
    form = value_up.form
    in_specs, (out_specs,) = (*_IN_SPECS, form.blocks_spec), form.result_specs
    run = jax.shard_map(attend, mesh=form.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return lambda *arrays: run(*arrays, value_up.blocks)


def _with_own_blocks(make: Callable[..., LatentQuery], q_b: Packed, key_up: Packed) -> Callable[..., LatentQuery]:
    """``make`` of whole arrays and every shard's own blocks; rows are whole, heads a shard's own."""
    whole, (latent,), (_, rotary) = PartitionSpec(), key_up.form.result_specs, q_b.form.result_specs
    outputs = *q_b.form.outputs, *key_up.form.outputs
    return jax.shard_map(
        functools.partial(make, outputs=outputs, num_heads=key_up.form.num_groups),
        mesh=q_b.form.mesh,
        in_specs=(*(whole,) * 6, q_b.form.blocks_spec, key_up.form.blocks_spec),
        out_specs=LatentQuery(whole, whole, latent, rotary),
        check_vma=False,
    )


def check_attention(config: KimiConfig, mesh: Mesh) -> None:
    """Raises NotImplementedError, which names the value, if the kernel does not take a shard's heads in bfloat16."""
    H, C, R = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    W = C + R
    attend = _with_own_heads(functools.partial(tree_mla_gpu, scale=config.softmax_scale), mesh)
    shapes = (1, 1, H, C), (1, 1, H, R), *((1, 1, R // 2),) * 2
    query = Query(*map(jax.ShapeDtypeStruct, shapes, (jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32)))
    shapes = (1, SLOT_MULTIPLE, W), (1, 1, W), (1,), (1, 1, 1), (1, ROW_MULTIPLE, W)
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.int32, bool, jnp.bfloat16)
    jax.eval_shape(attend, query, *map(jax.ShapeDtypeStruct, shapes, dtypes))
