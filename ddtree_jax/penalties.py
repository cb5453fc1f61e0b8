"""Logit bias and penalties: what each node of a tree adds to its own history, and nobody else's.

::

    emitted    a b a           node 3's history is what was emitted and its own path: a b a, b, c.
    root       a  (node 0)     The root is the last emitted token, and so is counted already.
               ├ b  (1)        Node 2 is no ancestor: its token counts for nothing here, whether or not
               │ └ c  (3)      it will be rejected.
               └ d  (2)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from ddtree_jax.sampling_params import SamplingArrays
from ddtree_jax.vocabulary import Shard


def adjusted(
    logits_BNV: Float[Array, "B N V"],
    token_BN: Int32[Array, "B N"],
    visible_BNn: Bool[Array, "B N N"],
    emitted_BM: Int32[Array, "B M"],
    num_emitted_B: Int32[Array, "B"],
    sampling: SamplingArrays,
    shard: Shard = Shard(),
) -> Float[Array, "B N V"]:
    """The target's logits behind each node with bias and penalties in them; float32, unchanged where a sequence has none.

    ``visible_BNn`` says which nodes are a node's ancestors or itself; node 0 is the root. The logits may be those of a shard.
    """
    num_columns = logits_BNV.shape[-1]
    prompt_BV = jax.lax.dynamic_slice_in_dim(sampling.prompt_BV, shard.first_id(num_columns), num_columns, axis=1)
    history = shard.columns_of(token_BN, num_columns), visible_BNn, shard.columns_of(emitted_BM, num_columns)
    rates = sampling.repetition_penalty_B, sampling.presence_penalty_B, sampling.frequency_penalty_B
    biased_BNV = _biased(logits_BNV, sampling, shard)
    return jax.vmap(_penalized)(biased_BNV, *history, num_emitted_B, prompt_BV, rates)


def _biased(logits_BNV: Array, sampling: SamplingArrays, shard: Shard) -> Array:
    batch, num_nodes, num_columns = logits_BNV.shape
    column_Bz, is_here_Bz = shard.columns_of(sampling.biased_Bz, num_columns)
    column_Bz = jnp.where(is_here_Bz, column_Bz, num_columns)
    bias_BzN = jnp.broadcast_to(sampling.bias_Bz[..., None], (*sampling.bias_Bz.shape, num_nodes))
    return logits_BNV.at[jnp.arange(batch)[:, None], :, column_Bz].add(bias_BzN, mode="drop")


def _penalized(
    logits_NV: Array,
    node_columns: tuple[Array, Array],
    visible_Nn: Array,
    emitted_columns: tuple[Array, Array],
    num_emitted: Array,
    prompt_V: Array,
    rates: tuple[Array, Array, Array],
) -> Array:
    """One sequence: every id by how often it was emitted, then the ids on each node's path by their full count.

    Ids of the nodes and of what was emitted come as `Shard.columns_of` gives them.
    """
    (column_N, is_here_N), (column_M, is_here_M) = node_columns, emitted_columns
    num_columns = logits_NV.shape[1]
    is_emitted_M = is_here_M & (jnp.arange(column_M.shape[0]) < num_emitted)
    count_V = jnp.zeros(num_columns, jnp.float32).at[column_M].add(is_emitted_M.astype(jnp.float32))

    node_n = jnp.arange(column_N.shape[0])
    on_path_Nn = visible_Nn & (is_here_N & (node_n != 0))[None]
    same_token_nn = (column_N[:, None] == column_N[None]).astype(jnp.float32)
    count_Nn = count_V[column_N][None] + on_path_Nn.astype(jnp.float32) @ same_token_nn
    on_path_logits_Nn = _with_rates(logits_NV[:, column_N], count_Nn, prompt_V[column_N][None], rates)

    penalized_NV = _with_rates(logits_NV, count_V[None], prompt_V[None], rates)
    column_Nn = jnp.where(on_path_Nn, column_N[None], num_columns)
    return penalized_NV.at[node_n[:, None], column_Nn].set(on_path_logits_Nn, mode="drop")


def _with_rates(logits: Array, count: Array, is_in_prompt: Array, rates: tuple[Array, Array, Array]) -> Array:
    """Penalties for ids that stand ``count`` times in the completion."""
    repetition, presence, frequency = rates
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(is_in_prompt | (count > 0), repeated, logits)
    return logits - frequency * count - jnp.where(count > 0, presence, 0.0)
