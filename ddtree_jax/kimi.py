"""Kimi K2.6's text model (DeepSeek-V3 type) as Flax modules: latent attention (`latent_attention`), INT4 experts.

Formulas follow the published ``modeling_deepseek.py``. A call reads the latent cache and returns the new rows; it never
writes: whoever calls decides which rows are kept.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from ddtree_jax.config import INT4_GROUP_SIZE, KimiConfig
from ddtree_jax.latent_attention import Attention, check_attention
from ddtree_jax.layers import MLP_PROJECTIONS, Layer, Turns, everywhere, gain, gated_mlp, run_mlp
from ddtree_jax.pallas.add_norm import add_norm, rms_norm
from ddtree_jax.pallas.choose_and_multiply import choose_and_multiply
from ddtree_jax.pallas.choose_experts import choose_experts
from ddtree_jax.pallas.int4_moe import ExpertBlocks, ExpertWeights, choose_config, int4_moe
from ddtree_jax.pallas.int4_moe import pack_experts as pack_shard
from ddtree_jax.pallas.tree_mla import SLOT_MULTIPLE
from ddtree_jax.projections import Packed, Product, Projection, are_taken, named, pack_all
from ddtree_jax.quant import NIBBLES
from ddtree_jax.sharding import MESH_AXES, RULES, ArrayInfo, Parameters, partition, sharding_of

# Kernels take seconds to lower; these are lowered once for all layers.
_int4_moe = jax.jit(int4_moe, static_argnames="dtype")
_add_norm = jax.jit(add_norm, static_argnames=("eps", "has_kernels"))
_choose_experts = jax.jit(choose_experts, static_argnames=("num_chosen", "factor", "has_kernels"))
_choose_and_multiply = jax.jit(choose_and_multiply, static_argnames=("outputs", "num_chosen", "factor", "has_kernels"))


# A shard has whole experts' groups of features, and of down the words, groups or block columns that take them.
BLOCK_SPECS = ExpertBlocks(partition(("experts", "expert_width")), partition(("experts", None, "expert_width")))
_WORD_SPECS = ExpertWeights(
    *(partition(("experts", None, axis)) for axis in ("expert_width",) * 3 + ("expert_groups",))
)
EXPERT_SPECS = {ExpertBlocks: BLOCK_SPECS, ExpertWeights: _WORD_SPECS}
SHARED_SPECS = partition((None, "width")), partition((None, "width")), partition(("width", None))

_ROUTER_LOGITS = Product("BTD,ED->BTE", ("router_ED",), dtype=jnp.float32)


SharedWeights = tuple[Float[Array, "D F"], Float[Array, "D F"], Float[Array, "F D"]]
"""Gate, up and down of the shared expert."""
SharedParts = Float[Array, "shards T D"]
"""What the shared expert gives by each shard's part of its width."""
PARTS_SPEC = PartitionSpec(MESH_AXES)


class TargetOutput(NamedTuple):
    """What one pass over T tokens gives.

    ``rows`` has an array [B, T, W] a layer, to be appended to the cache; ``experts`` the chosen expert numbers
    [B * T, X] of each MoE layer, -1 in rows that hold no token.
    """

    hidden_BTD: Float[Array, "B T D"]
    features_BTY: Float[Array, "B T Y"]
    rows: list[Float[Array, "B T W"]]
    experts: list[Int32[Array, "tokens X"]]


class Router(Layer):
    """Sigmoid scores in float32; the bias takes part in the choice alone, never in the weights."""

    @staticmethod
    def parameters(config: KimiConfig) -> dict[str, ArrayInfo]:
        return {
            "router_ED": ArrayInfo((config.n_routed_experts, config.hidden_size), (None, None)),
            "router_bias_E": ArrayInfo((config.n_routed_experts,), (None,), jnp.float32, deviation=0.0),
        }

    def __call__(
        self, x_TD: Float[Array, "T D"], is_token_T: Bool[Array, "T"]
    ) -> tuple[Int32[Array, "T X"], Float[Array, "T X"]]:
        """Numbers of the chosen experts, -1 where there is no token, and their weights."""
        (logits_1TE,) = _ROUTER_LOGITS(x_TD[None], self.router_ED[...])
        return self.choose(logits_1TE[0], is_token_T)

    def choose(
        self, logits_TE: Float[Array, "T E"], is_token_T: Bool[Array, "T"]
    ) -> tuple[Int32[Array, "T X"], Float[Array, "T X"]]:
        choose = everywhere(functools.partial(_choose_experts, **self._options()), self.mesh)
        return choose(logits_TE, self.router_bias_E[...], is_token_T)

    def choose_and_multiply(
        self,
        logits_TE: Float[Array, "T E"],
        is_token_T: Bool[Array, "T"],
        hidden_BTF: Float[Array, "B T F"],
        down: Packed,
    ) -> tuple[Int32[Array, "T X"], Float[Array, "T X"], SharedParts]:
        """`choose`, and in the same launch the shared expert's last product."""
        whole = PartitionSpec()
        run = jax.shard_map(
            functools.partial(_choose_and_multiply_shard, **self._options()),
            mesh=down.form.mesh,
            in_specs=(whole, whole, whole, down.form.x_spec, down.form.blocks_spec),
            out_specs=(whole, whole, PARTS_SPEC),
            check_vma=False,
        )
        return run(logits_TE, self.router_bias_E[...], is_token_T, hidden_BTF, down)

    def _options(self) -> dict[str, Any]:
        config = self.config
        return {
            "num_chosen": config.num_experts_per_tok,
            "factor": config.routed_scaling_factor,
            "has_kernels": self.has_kernels,
        }


def _choose_and_multiply_shard(
    logits_TE: Float[Array, "T E"],
    bias_E: Float[Array, "E"],
    is_token_T: Bool[Array, "T"],
    hidden_BTF: Float[Array, "B T F"],
    down: Packed,
    **options: Any,
) -> tuple[Int32[Array, "T X"], Float[Array, "T X"], SharedParts]:
    hidden_TF = hidden_BTF.reshape(-1, hidden_BTF.shape[-1])
    with jax.named_scope("shared"):
        expert_TX, weight_TX, (part_TD,) = _choose_and_multiply(
            logits_TE, bias_E, is_token_T, hidden_TF, down.blocks, outputs=down.form.outputs, **options
        )
    return expert_TX, weight_TX, part_TD[None]


class Experts(Layer):
    """Routed experts in packed INT4: as they lie in the checkpoint, or in the kernel's blocks (see `pack_experts`).

    On a mesh every shard computes what its experts contribute, or its part of every expert.
    """

    def __init__(self, config: KimiConfig, arrays: Mapping[str, Array], mesh: Mesh | None = None):
        self.config = config
        self.form = ExpertBlocks if ExpertBlocks._fields[0] in arrays else ExpertWeights
        for name in self.form._fields:
            setattr(self, name, nnx.Param(arrays[name]))
        self.mesh = mesh

    @staticmethod
    def parameters(config: KimiConfig) -> dict[str, ArrayInfo]:
        E, D, F = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        gate_up_axes = ("experts", None, "expert_width", None)
        words_axes, groups_axes = ("experts", None, "expert_width"), ("experts", None, "expert_groups")
        scale = {"dtype": jnp.bfloat16, "mean": 0.01, "deviation": 0.001}
        return {
            "gate_up_E2FI": ArrayInfo((E, 2, F, D // NIBBLES), gate_up_axes, jnp.int32),
            "gate_up_scale_E2FG": ArrayInfo((E, 2, F, D // INT4_GROUP_SIZE), gate_up_axes, **scale),
            "down_EDI": ArrayInfo((E, D, F // NIBBLES), words_axes, jnp.int32),
            "down_scale_EDG": ArrayInfo((E, D, F // INT4_GROUP_SIZE), groups_axes, **scale),
        }

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        expert_TX: Int32[Array, "T X"],
        weight_TX: Float[Array, "T X"],
        shared: SharedWeights | SharedParts,
    ) -> Float[Array, "T D"]:
        """The weighted sum of each token's experts, plus the shared expert; on a mesh in float32, as it was summed."""
        experts = self.form(*(getattr(self, name)[...] for name in self.form._fields))
        if self.mesh is None:
            return _int4_moe(x_TD, expert_TX, weight_TX, experts, _run_shared(x_TD, shared))
        whole = PartitionSpec()
        shared_specs = SHARED_SPECS if isinstance(shared, tuple) else PARTS_SPEC
        run = jax.shard_map(
            _run_shard,
            mesh=self.mesh,
            in_specs=(whole, whole, whole, EXPERT_SPECS[self.form], shared_specs),
            out_specs=whole,
            check_vma=False,
        )
        return run(x_TD, expert_TX, weight_TX, experts, shared)


def _run_shard(
    x_TD: Float[Array, "T D"],
    expert_TX: Int32[Array, "T X"],
    weight_TX: Float[Array, "T X"],
    experts: ExpertWeights | ExpertBlocks,
    shared: SharedWeights | SharedParts,
) -> Float[Array, "T D"]:
    """The sum over all shards of what their experts, or their part of every expert, contribute, by one all-reduce.

    Of the shared expert a shard has a part of the width, the same one wherever it lies along ``expert``: one of them counts.
    """
    shared_TD = _run_shared(x_TD, shared)
    if jax.lax.axis_size(RULES["experts"]) > 1:
        number = jax.lax.axis_index(RULES["experts"])
        expert_TX = expert_TX - number * experts[0].shape[0]
        shared_TD = jnp.where(number == 0, shared_TD, 0)
    y_TD = _int4_moe(x_TD, expert_TX, weight_TX, experts, shared_TD, dtype=jnp.float32)
    return jax.lax.psum(y_TD, MESH_AXES)


def _run_shared(x_TD: Float[Array, "T D"], shared: SharedWeights | SharedParts) -> Float[Array, "T D"]:
    """A shard's part of the shared expert."""
    if not isinstance(shared, tuple):
        return shared[0]
    with jax.named_scope("shared"):
        return gated_mlp(x_TD[None], *shared)[0]


def pack_experts(arrays: dict[str, dict[str, Array]], mesh: Mesh) -> None:
    """Replaces every layer's experts by the kernel's blocks, each shard's packed where it lies, a layer at a time."""
    specs = (EXPERT_SPECS[ExpertWeights],)
    pack = jax.jit(jax.shard_map(pack_shard, mesh=mesh, in_specs=specs, out_specs=BLOCK_SPECS, check_vma=False))
    for table in arrays.values():
        if ExpertWeights._fields[0] in table:
            table |= pack(ExpertWeights(*(table.pop(name) for name in ExpertWeights._fields)))._asdict()


def pack_projections(arrays: dict[str, dict[str, Any]], config: KimiConfig, mesh: Mesh) -> None:
    """Replaces the weights of all projections by packed ones, if `skinny_gemm`'s kernel takes them all on this device."""
    tables = arrays, parameters(config), projections(config), mesh
    if are_taken(*tables):
        pack_all(*tables)


def check_kernels(config: KimiConfig, mesh: Mesh) -> None:
    """Raises NotImplementedError, which names the value, if a kernel does not take a shard of the target in bfloat16."""

    def choose(x_TD: Array, shard: ExpertWeights) -> None:
        choose_config(x_TD, pack_shard(shard))

    check_attention(config, mesh)
    infos = Experts.parameters(config)
    shard = ExpertWeights(
        *(
            jax.ShapeDtypeStruct(sharding_of(infos[name], mesh, name).shard_shape(infos[name].shape), infos[name].dtype)
            for name in ExpertWeights._fields
        )
    )
    jax.eval_shape(choose, jax.ShapeDtypeStruct((1, config.hidden_size), jnp.bfloat16), shard)


class DenseMLP(Layer):
    """Feed-forward part of the first layers."""

    @staticmethod
    def parameters(config: KimiConfig) -> dict[str, ArrayInfo]:
        return _mlp_parameters("", config.hidden_size, config.intermediate_size)

    @staticmethod
    def projections(config: KimiConfig) -> dict[str, Projection]:
        return MLP_PROJECTIONS

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return run_mlp(self, x_BTD)


class SharedExpert(Layer):
    """The expert that every token passes, summed with the routed ones (`Experts`).

    ``n_shared_experts`` of them are one of that many times the width.
    """

    @staticmethod
    def parameters(config: KimiConfig) -> dict[str, ArrayInfo]:
        width = config.moe_intermediate_size * config.n_shared_experts
        return _mlp_parameters("shared_", config.hidden_size, width)

    @staticmethod
    def projections(config: KimiConfig) -> dict[str, Projection]:
        return named(Projection("shared_down", (Product("BTF,FD->BTD", ("shared_down_FD",)),)))

    def weights(self) -> SharedWeights:
        return self.shared_gate_DF[...], self.shared_up_DF[...], self.shared_down_FD[...]


def _mlp_parameters(prefix: str, D: int, F: int) -> dict[str, ArrayInfo]:
    return {
        f"{prefix}gate_DF": ArrayInfo((D, F), (None, "width")),
        f"{prefix}up_DF": ArrayInfo((D, F), (None, "width")),
        f"{prefix}down_FD": ArrayInfo((F, D), ("width", None)),
    }


class Block(Layer):
    """One decoder layer: ``x += attention(norm(x))``, then ``x += mlp(norm(x))`` or the mixture of experts.

    Its first norm and its last sum belong to one launch with the neighbours' (`Kimi`).

    If weights are packed, the router's logits and the shared expert's gate and up are one launch, and so are the choice and
    the shared expert's down.
    """

    def __init__(
        self, config: KimiConfig, layer: int, arrays: Mapping[str, Array], mesh: Mesh | None, has_kernels: bool
    ):
        super().__init__(config, arrays, mesh, has_kernels)
        self.attention = Attention(config, arrays, mesh, has_kernels)
        self.is_dense = config.is_dense(layer)
        if self.is_dense:
            self.mlp = DenseMLP(config, arrays)
        else:
            self.router = Router(config, arrays, mesh, has_kernels)
            self.experts = Experts(config, arrays, mesh)
            self.shared = SharedExpert(config, arrays)

    @staticmethod
    def parameters(config: KimiConfig) -> dict[str, ArrayInfo]:
        return {"input_norm_D": gain(config.hidden_size), "post_attention_norm_D": gain(config.hidden_size)}

    @staticmethod
    def projections(config: KimiConfig) -> dict[str, Projection]:
        """Of layers that have experts."""
        hidden = Product("BTD,DF->BTF", ("shared_gate_DF", "shared_up_DF"))
        return named(Projection("router_shared", (_ROUTER_LOGITS, hidden)))

    def feed_forward(
        self, x_BTD: Float[Array, "B T D"], is_token_BT: Bool[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], list[Array]]:
        """Output for the normed input, and the expert numbers if this layer has experts: none for what is no token."""
        if self.is_dense:
            return self.mlp(x_BTD), []
        x_TD, is_token_T = x_BTD.reshape(-1, x_BTD.shape[-1]), is_token_BT.reshape(-1)
        if self.packed:
            logits_BTE, hidden_BTF = self.multiply("router_shared", x_BTD)
            logits_TE, down = logits_BTE.reshape(x_TD.shape[0], -1), self.shared.packed["shared_down"]
            expert_TX, weight_TX, shared = self.router.choose_and_multiply(logits_TE, is_token_T, hidden_BTF, down)
        else:
            expert_TX, weight_TX = self.router(x_TD, is_token_T)
            shared = self.shared.weights()
        y_TD = self.experts(x_TD, expert_TX, weight_TX, shared)
        return y_TD.reshape(x_BTD.shape), [expert_TX]

    def __call__(
        self,
        x_BTD: Array,
        normed_BTD: Array,
        turns: Turns,
        visible_BTt: Array,
        length_B: Array,
        cache_BSW: Array,
        is_token_BT: Array,
    ):
        """What comes in, as it is and normed; gives the sum behind attention, what is to be added to it, rows, experts."""
        with jax.named_scope("attention"):
            attended_BTD, rows_BTW = self.attention(normed_BTD, turns, visible_BTt, length_B, cache_BSW)
        with jax.named_scope("feed_forward"):
            x_BTD, normed_BTD = self.add_norm(x_BTD, attended_BTD, self.post_attention_norm_D[...])
            y_BTD, experts = self.feed_forward(normed_BTD, is_token_BT)
        return x_BTD, y_BTD, rows_BTW, experts

    def add_norm(self, x_BTD: Array, y_BTD: Array, gain_D: Array) -> tuple[Array, Array]:
        """Their sum, and its norm."""
        function = functools.partial(_add_norm, eps=self.config.rms_norm_eps, has_kernels=self.has_kernels)
        flat = (array_BTD.reshape(-1, x_BTD.shape[-1]) for array_BTD in (x_BTD, y_BTD))
        total_TD, normed_TD = everywhere(function, self.mesh)(*flat, gain_D)
        return total_TD.reshape(x_BTD.shape), normed_TD.reshape(x_BTD.shape)


class Kimi(Layer):
    """The target. ``capture`` names the layers whose outputs, concatenated, are the drafter's features.

    Experts and projections take their kernels if their arrays are the kernels' blocks (`pack_experts`,
    `pack_projections`), whatever ``has_kernels`` says.
    """

    def __init__(
        self,
        config: KimiConfig,
        arrays: Mapping[str, Mapping[str, Array]],
        capture: tuple[int, ...] = (),
        mesh: Mesh | None = None,
        has_kernels: bool = False,
    ):
        super().__init__(config, {**arrays["embed"], **arrays["head"]}, mesh, has_kernels)
        self.capture = capture
        self.blocks = nnx.List(
            Block(config, layer, arrays[f"layer_{layer}"], mesh, has_kernels)
            for layer in range(config.num_hidden_layers)
        )

    @staticmethod
    def parameters(config: KimiConfig) -> dict[str, ArrayInfo]:
        V, D = config.vocab_size, config.hidden_size
        return {
            "embedding_VD": ArrayInfo((V, D), ("vocab", None)),
            "norm_D": gain(D),
            "unembedding_VD": ArrayInfo((V, D), ("vocab", None)),
        }

    def embed(self, token_ids_BT: Int32[Array, "B T"]) -> Float[Array, "B T D"]:
        if self.mesh is None:
            return self.embedding_VD[...][token_ids_BT]
        rows = PartitionSpec(RULES["vocab"])
        run = jax.shard_map(
            _embed_shard, mesh=self.mesh, in_specs=(PartitionSpec(), rows), out_specs=PartitionSpec(), check_vma=False
        )
        return run(token_ids_BT, self.embedding_VD[...])

    def unembed(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits, float32."""
        return jnp.einsum("BTD,VD->BTV", hidden_BTD, self.unembedding_VD[...], preferred_element_type=jnp.float32)

    def init_cache(self, batch: int, num_slots: int) -> list[Float[Array, "B S W"]]:
        """An empty latent cache: 1 array a layer, [B, S, C + R] in the compute dtype, S filled up for the kernels."""
        width = self.config.kv_lora_rank + self.config.qk_rope_head_dim
        dtype = self.embedding_VD[...].dtype
        num_slots += -num_slots % SLOT_MULTIPLE
        return [jnp.zeros((batch, num_slots, width), dtype) for _ in self.blocks]

    def __call__(
        self,
        token_ids_BT: Int32[Array, "B T"],
        positions_BT: Int32[Array, "B T"],
        visible_BTt: Bool[Array, "B T T"],
        length_B: Int32[Array, "B"],
        cache: list[Float[Array, "B S W"]],
        is_token_BT: Bool[Array, "B T"] | None = None,
    ) -> TargetOutput:
        """One pass over T tokens behind the committed prefix of ``length_B`` slots. See `TargetOutput`.

        Where ``is_token_BT`` is False a row only fills a shape: no expert is read for it, and what it gives is undefined.
        """
        if is_token_BT is None:
            is_token_BT = jnp.ones(token_ids_BT.shape, bool)
        x_BTD = self.embed(token_ids_BT)
        first_D, *gains = (gain_D[...] for gain_D in (*(block.input_norm_D for block in self.blocks), self.norm_D))
        normed_BTD = rms_norm(x_BTD, first_D, self.config.rms_norm_eps)
        rope = self.config.rope
        turns = Turns.of(positions_BT, rope, self.config.qk_rope_head_dim, rope.amplitude)
        captured, rows, experts = {}, [], []
        for layer, (block, gain_D) in enumerate(zip(self.blocks, gains, strict=True)):
            with jax.named_scope(f"layer_{layer}"):
                x_BTD, y_BTD, rows_BTW, chosen = block(
                    x_BTD, normed_BTD, turns, visible_BTt, length_B, cache[layer], is_token_BT
                )
                x_BTD, normed_BTD = block.add_norm(x_BTD, y_BTD, gain_D)
            captured[layer] = x_BTD
            rows.append(rows_BTW)
            experts.extend(chosen)
        empty_BTY = jnp.zeros((*x_BTD.shape[:2], 0), x_BTD.dtype)
        features_BTY = jnp.concatenate([empty_BTY, *(captured[layer] for layer in self.capture)], axis=-1)
        return TargetOutput(normed_BTD, features_BTY, rows, experts)


def _embed_shard(token_ids_BT: Int32[Array, "B T"], embedding_VD: Float[Array, "V D"]) -> Float[Array, "B T D"]:
    """Embeddings from a shard's rows. Left to itself, XLA gathers all shards' rows to look one token up."""
    num_rows = embedding_VD.shape[0]
    row_BT = token_ids_BT - jax.lax.axis_index(RULES["vocab"]) * num_rows
    is_here_BT = (row_BT >= 0) & (row_BT < num_rows)
    found_BTD = jnp.where(is_here_BT[..., None], embedding_VD[jnp.where(is_here_BT, row_BT, 0)], 0)
    return jax.lax.psum(found_BTD, RULES["vocab"])


def parameters(config: KimiConfig) -> Parameters:
    """Every parameter of the target, by part: "embed", "layer_0", ..., "head"."""
    whole = Kimi.parameters(config)
    tree = {"embed": {"embedding_VD": whole["embedding_VD"]}}
    for layer in range(config.num_hidden_layers):
        feed_forward = (DenseMLP,) if config.is_dense(layer) else (Router, Experts, SharedExpert)
        modules = (Block, Attention, *feed_forward)
        tree[f"layer_{layer}"] = {name: info for module in modules for name, info in module.parameters(config).items()}
    tree["head"] = {name: whole[name] for name in ("norm_D", "unembedding_VD")}
    return tree


def projections(config: KimiConfig) -> dict[str, list[Projection]]:
    """Every projection of the target whose weights may be packed, by part."""
    tree = {}
    for layer in range(config.num_hidden_layers):
        modules = (Attention, DenseMLP) if config.is_dense(layer) else (Attention, Block, SharedExpert)
        tree[f"layer_{layer}"] = [one for module in modules for one in module.projections(config).values()]
    return tree
