"""Bytes that one rank must read in a round, by stage: what a program that does nothing else would take."""

import collections
from collections.abc import Sequence

import numpy as np

from ddtree_jax.pallas.int4_moe import ExpertBlocks
from experiments.abstract_engine import ArrayShapes
from experiments.rank import Share
from experiments.stage_times import ELEMENTWISE
from experiments.synthetic import count_bytes

# Natural arrays, and packed ones by their projections.
_TARGET = {
    "qkv_a": "q_a and kv_a",
    "q_b": "latent rows, q_b and key_up",
    "key_up": "latent rows, q_b and key_up",
    "value_up": "attention",
    "o": "o",
    "router_shared": "router's logits, shared gate and up",
    "shared_down": "shared expert",
    "gate_up": "dense MLP",
    "down": "dense MLP",
    "q_a_DA": "q_a and kv_a",
    "kv_a_DW": "q_a and kv_a",
    "q_b_AHO": "latent rows, q_b and key_up",
    "key_up_HPC": "latent rows, q_b and key_up",
    "value_up_HUC": "attention",
    "o_HUD": "o",
    "router_ED": "router",
    "router_bias_E": "shared expert",  # Read in one launch with shared_down.
    "shared_gate_DF": "shared expert",
    "shared_up_DF": "shared expert",
    "shared_down_FD": "shared expert",
    "gate_DF": "dense MLP",
    "up_DF": "dense MLP",
    "down_FD": "dense MLP",
    "unembedding_VD": "lm_head",
}
_DRAFTER = {
    "qkv": "q, k, v",
    "o": "o",
    "gate_up": "MLP",
    "down": "MLP",
    "q_DJQR": "q, k, v",
    "k_DJR": "q, k, v",
    "v_DJR": "q, k, v",
    "o_JQRD": "o",
    "gate_DF": "MLP",
    "up_DF": "MLP",
    "down_FD": "MLP",
}
_CONTEXT = "commit/drafter's context"


def target_bytes(share: Share, tables: ArrayShapes, routing: Sequence[np.ndarray], context: int) -> dict[str, int]:
    """A target pass: all weights once, of embeddings a row a node, of experts those that are here and chosen."""
    found = collections.Counter()
    num_nodes = len(routing[0])
    chosen = iter(routing)
    for table in tables.values():
        for name, leaf in table.items():
            num_bytes = count_bytes(leaf)
            if name == "embedding_VD":
                found["verify/embedding"] += num_bytes // leaf.shape[0] * num_nodes
            elif name not in ExpertBlocks._fields:
                found[f"verify/{_TARGET.get(name, ELEMENTWISE)}"] += num_bytes
        if ExpertBlocks._fields[0] in table:
            blocks = [table[name] for name in ExpertBlocks._fields]
            num_here = np.count_nonzero(np.unique(next(chosen)) >= 0)
            found["verify/experts"] += num_here * (count_bytes(blocks) // blocks[0].shape[0])
    config = share.target
    row_bytes = 2 * (config.kv_lora_rank + config.qk_rope_head_dim)
    found["verify/attention"] += config.num_hidden_layers * context * row_bytes
    return dict(found)


def rest_bytes(share: Share, target: ArrayShapes, drafter: ArrayShapes, num_nodes: int, context: int) -> dict[str, int]:
    """What surrounds a target pass over more than the root: draft, expand, accept, commit.

    Logits are counted as they are read, float32; of a sliding layer's cache, what lies in its window.
    """
    found = collections.Counter()
    config, depth = share.drafter, share.drafter.depth
    for part, table in drafter.items():
        for name, leaf in table.items():
            if part == "context":
                found[_CONTEXT] += count_bytes(leaf)
            else:
                found[f"draft/{_DRAFTER.get(name, ELEMENTWISE)}"] += count_bytes(leaf)
            if name in ("k_DJR", "v_DJR"):  # Once more, in the product of all layers.
                found[_CONTEXT] += count_bytes(leaf)
    unembedding, embedding = target["head"]["unembedding_VD"], target["embed"]["embedding_VD"]
    found["draft/lm_head"] += count_bytes(unembedding)
    found["draft/embedding"] += count_bytes(embedding) // embedding.shape[0] * (depth + 1)
    slot_bytes = 2 * 2 * config.num_key_value_heads * config.head_dim
    for is_sliding in config.sliding_layers:
        found["draft/attention"] += slot_bytes * (min(context, config.sliding_window) if is_sliding else context)
    found["expand"] += 4 * depth * config.vocab_size
    found["accept"] += 4 * num_nodes * config.vocab_size
    return dict(found)
