"""One rank's share of both models on a mesh, as models of their own for one device.

Heads, widths, experts and columns of the vocabulary are divided by the rules of `ddtree_jax.sharding`; what every rank holds
whole stays whole. All-reduces and gathers are left out: a shard's sums are taken for the whole ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from ddtree_jax import Engine, dflash, kimi
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.decode import Models
from ddtree_jax.sharding import Parameters, mesh_sizes, replicated, sharding_of
from experiments.abstract_engine import ArrayShapes, drafter_shapes, target_shapes
from experiments.synthetic import draw_arrays


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Both models as one rank of a mesh holds them; ``num_experts`` are those of the whole model."""

    target: KimiConfig
    drafter: DFlashConfig
    target_parameters: Parameters
    drafter_parameters: Parameters
    num_experts: int
    tensor: int

    @classmethod
    def of(cls, target: KimiConfig, drafter: DFlashConfig, mesh: str) -> "Share":
        """Raises ValueError, which names the parameter, if the mesh does not divide it."""
        sizes = mesh_sizes(mesh)
        tensor, expert = sizes["tensor"], sizes["expert"]
        across = AbstractMesh(tuple(sizes.values()), tuple(sizes))

        def cut(parameters: Parameters) -> Parameters:
            return {
                part: {
                    name: replace(info, shape=sharding_of(info, across, f"{part}/{name}").shard_shape(info.shape))
                    for name, info in table.items()
                }
                for part, table in parameters.items()
            }

        return cls(
            target_parameters=cut(kimi.parameters(target)),
            drafter_parameters=cut(dflash.parameters(drafter)),
            target=replace(
                target,
                vocab_size=target.vocab_size // tensor,
                num_attention_heads=target.num_attention_heads // tensor,
                intermediate_size=target.intermediate_size // tensor,
                moe_intermediate_size=target.moe_intermediate_size // tensor,
                n_routed_experts=target.n_routed_experts // expert,
                eos_token_ids=(),
            ),
            drafter=replace(
                drafter,
                vocab_size=drafter.vocab_size // tensor,
                num_attention_heads=drafter.num_attention_heads // tensor,
                num_key_value_heads=drafter.num_key_value_heads // tensor,
                intermediate_size=drafter.intermediate_size // tensor,
                mask_token_id=drafter.vocab_size // tensor - 1,
            ),
            num_experts=target.n_routed_experts,
            tensor=tensor,
        )

    @property
    def num_moe_layers(self) -> int:
        return self.target.num_hidden_layers - self.target.first_k_dense_replace


class DrawnRouter(kimi.Router):
    """Computes its own choice and its weights, then sends tokens to the experts in ``drawn_TX`` all the same."""

    def __call__(self, x_TD: jax.Array, is_token_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("router"):
            return super().__call__(x_TD, is_token_T)

    def choose(self, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, weight_TX = super().choose(*arrays)
        return self.drawn_TX[...], weight_TX

    def choose_and_multiply(self, *arrays: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        _, weight_TX, parts = super().choose_and_multiply(*arrays)
        return self.drawn_TX[...], weight_TX, parts


class RankTarget(kimi.Kimi):
    """The target, with scopes round what has none, whose tokens go where they are sent (`send`)."""

    def __init__(self, share: Share, arrays: Mapping[str, Mapping[str, Any]], mesh: Mesh):
        super().__init__(share.target, arrays, share.drafter.target_layer_ids, mesh, has_kernels=True)
        for layer, block in enumerate(self.blocks):
            if not block.is_dense:
                block.router = DrawnRouter(share.target, arrays[f"layer_{layer}"], mesh, has_kernels=True)

    def send(self, routing: Sequence[Any]) -> None:
        """Sets the local numbers of each layer's experts, int32 [T, X]; -1 where another rank has the expert."""
        routers = [block.router for block in self.blocks if not block.is_dense]
        for router, drawn_TX in zip(routers, routing, strict=True):
            router.drawn_TX = nnx.Param(drawn_TX)

    def embed(self, token_ids_BT: jax.Array) -> jax.Array:
        with jax.named_scope("embedding"):
            return super().embed(token_ids_BT)

    def unembed(self, hidden_BTD: jax.Array) -> jax.Array:
        with jax.named_scope("lm_head"):
            return super().unembed(hidden_BTD)


class RankBlock(dflash.Block):
    """A drafter layer, with a scope round its attention."""

    def attend(self, *arrays: Any) -> jax.Array:
        with jax.named_scope("attention"):
            return super().attend(*arrays)


class RankDrafter(dflash.DFlash):
    """The drafter; its own part of what the context is made from stands for those of all ranks."""

    block_type = RankBlock

    def project(self, features_BTY: jax.Array) -> jax.Array:
        part_BTd = super().project(features_BTY)
        return jnp.tile(part_BTd, (1, 1, self.config.hidden_size // part_BTd.shape[-1]))


def expected_distinct(num_tokens: int, num_experts: int, per_token: int) -> int:
    """Experts that some token chose, if each chooses ``per_token`` uniformly: their expected number, rounded."""
    return round(num_experts * (1 - (1 - per_token / num_experts) ** num_tokens))


def check_distinct(share: Share, num_tokens: int, distinct: int) -> None:
    """Raises ValueError for fewer experts than a token chooses, or more than there are or the tokens can choose."""
    least = share.target.num_experts_per_tok
    most = min(share.num_experts, num_tokens * least)
    if not least <= distinct <= most:
        raise ValueError(f"distinct is {distinct}; allowed are {least} to {most} for {num_tokens} tokens")


def draw_routing(share: Share, num_tokens: int, distinct: int, seed: int) -> list[np.ndarray]:
    """Routing of each layer, int32 [T, X], with ``distinct`` experts over all ranks, the first rank's numbers kept.

    Of these, as many are this rank's as its share of all experts, rounded, and which ones differs from layer to layer. Each
    is chosen once, by tokens in turn; what a token has left to choose, it chooses uniformly among the others.

    Raises:
      ValueError: see `check_distinct`.
    """
    check_distinct(share, num_tokens, distinct)
    E, X, local = share.num_experts, share.target.num_experts_per_tok, share.target.n_routed_experts
    num_here = round(distinct * local / E)
    random = np.random.default_rng((seed, num_tokens, distinct))

    def draw() -> np.ndarray:
        here = random.choice(local, num_here, replace=False)
        elsewhere = local + random.choice(E - local, distinct - num_here, replace=False) if local < E else []
        chosen = random.permutation(np.concatenate([here, elsewhere]).astype(np.int32))
        tokens = [chosen[token::num_tokens] for token in range(num_tokens)]
        rests = [random.choice(np.setdiff1d(chosen, own), X - len(own), replace=False) for own in tokens]
        expert_TX = np.stack([np.concatenate(pair) for pair in zip(tokens, rests, strict=True)])
        return np.where(expert_TX < local, expert_TX, -1).astype(np.int32)

    return [draw() for _ in range(share.num_moe_layers)]


class Tables(NamedTuple):
    """Shapes of both models' arrays as the kernels read them."""

    target: ArrayShapes
    drafter: ArrayShapes

    @classmethod
    def of(cls, share: Share, mesh: Mesh) -> "Tables":
        """On a mesh of one device. Raises NotImplementedError if the kernels do not take these shapes."""
        kimi.check_kernels(share.target, mesh)
        return cls(
            target_shapes(share.target, share.target_parameters, mesh),
            drafter_shapes(share.drafter, share.drafter_parameters, mesh),
        )


def abstract_models(share: Share, mesh: Mesh, tables: Tables) -> Models:
    """Both models over shapes."""
    whole = replicated(mesh)
    drafter = jax.eval_shape(lambda arrays: RankDrafter(share.drafter, arrays, mesh, has_kernels=True), tables.drafter)
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), drafter)
    return Models(RankTarget(share, tables.target, mesh), placed)


def drawn_models(share: Share, mesh: Mesh, tables: Tables, seed: int) -> Models:
    """Both models over arrays drawn on the device."""
    arrays = draw_arrays(tables.target, share.target_parameters, seed)
    drafter_arrays = draw_arrays(tables.drafter, share.drafter_parameters, seed + 1)
    return Models(RankTarget(share, arrays, mesh), RankDrafter(share.drafter, drafter_arrays, mesh, has_kernels=True))


def engine_of(models: Models, routing: Sequence[Any], mesh: Mesh, max_length: int) -> Engine:
    """The engine of models whose tokens are sent as ``routing`` says (`RankTarget.send`)."""
    models.target.send(routing)
    return Engine(models.target, models.drafter, mesh=mesh, max_length=max_length)
