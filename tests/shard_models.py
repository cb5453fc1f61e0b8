"""The least pair of models that the loop runs on a mesh: what follows a token depends on that token alone.

The target's embedding and unembedding lie on the mesh as a real target's do. The drafter follows the target's best tokens,
by tables a little off.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ddtree_jax.decode import Models
from ddtree_jax.sharding import RULES

VOCAB, WIDTH = 8 * 13, 11


class Output(NamedTuple):
    hidden_BTD: Array
    features_BTY: Array
    rows: list[Array]


class Tables(NamedTuple):
    embedding_VD: Array
    unembedding_VD: Array

    def init_cache(self, batch: int, num_slots: int) -> list[Array]:
        return [jnp.zeros((batch, num_slots, 1), jnp.float32)]

    def embed(self, token_ids_BT: Array) -> Array:
        return self.embedding_VD[token_ids_BT]

    def unembed(self, hidden_BTD: Array) -> Array:
        return jnp.einsum("BTD,VD->BTV", hidden_BTD, self.unembedding_VD)


class Target(Tables):
    def __call__(self, token_ids_BT: Array, positions_BT: Array, visible_BTt, length_B, cache, is_token_BT) -> Output:
        hidden_BTD = self.embed(token_ids_BT)
        return Output(hidden_BTD, hidden_BTD, [positions_BT[..., None].astype(jnp.float32)])


class Drafter(Tables):
    def context(self, features_BTY: Array, positions_BT: Array) -> list[Array]:
        return [positions_BT[..., None].astype(jnp.float32)]

    def __call__(self, embedded_BTD: Array, length_B: Array, cache: list[Array]) -> Array:
        rows = [embedded_BTD[:, :1]] * 2
        while len(rows) < embedded_BTD.shape[1]:
            rows.append(self.embed(jnp.argmax(self.unembed(rows[-1]), axis=-1)))
        return jnp.concatenate(rows, axis=1)


def make_models(mesh: Mesh | None) -> Models:
    random = np.random.default_rng(3)
    tables = [random.normal(size=(VOCAB, WIDTH)).astype(np.float32) for _ in range(2)]
    drafter = Drafter(*(jnp.asarray(table + 0.2 * random.normal(size=table.shape), jnp.float32) for table in tables))
    if mesh is not None:
        tables = jax.device_put(tables, NamedSharding(mesh, PartitionSpec(RULES["vocab"])))
        drafter = jax.device_put(drafter, NamedSharding(mesh, PartitionSpec()))
    return Models(Target(*map(jnp.asarray, tables)), drafter)
