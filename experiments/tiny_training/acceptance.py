"""What a drafter gains on the target's own greedy text, from its rows at every position: exact, without an engine.

At temperature 0 the text is known, so a round is known from its start: how many tokens of the text the chain's or the
tree's best path has. Walking from round to round gives tokens a round.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from ddtree_jax import sampling, tree
from ddtree_jax.config import DFlashConfig
from experiments.tiny_training.drafter import AnchoredDFlash, labels
from experiments.tiny_training.model import Arrays
from experiments.tiny_training.samples import Samples
from experiments.tiny_training.target import take_label


class _Rows(NamedTuple):
    """Of every block: tokens that a round from it would commit, and of each depth: loss, rank of the right token."""

    chain: Int32[Array, "blocks"]
    ddtree: Int32[Array, "blocks"]
    loss_L: Float[Array, "blocks L"]
    rank_L: Int32[Array, "blocks L"]


def measure_acceptance(
    config: DFlashConfig,
    arrays: Arrays,
    embedding_VD: Float[Array, "V D"],
    unembedding_VD: Float[Array, "V D"],
    samples: Samples,
    stop_token_ids: tuple[int, ...],
    max_sequences: int,
    budget: int = 15,
    sequences_a_call: int = 8,
) -> dict[str, Any]:
    """Acceptance on greedy samples whose prompts are of one length; text behind a stop token does not count."""
    first = int(samples.prompt_length_B[0])
    if not np.all(samples.prompt_length_B == first):
        raise ValueError("prompt_length_B has several lengths; one is needed")
    num_sequences, length = min(max_sequences, samples.token_BM.shape[0]), samples.token_BM.shape[1]
    anchor_n = np.arange(first, length - config.block_size + 1, dtype=np.int32)
    run = jax.jit(functools.partial(_rows, config, budget))
    parts = []
    for begin in range(0, num_sequences, sequences_a_call):
        rows = slice(begin, min(begin + sequences_a_call, num_sequences))
        token_BM = samples.token_BM[rows].astype(jnp.int32)
        anchor_Bn = jnp.broadcast_to(anchor_n, (token_BM.shape[0], anchor_n.size))
        part = run(arrays, embedding_VD, unembedding_VD, token_BM, samples.feature_BMY[rows], anchor_Bn)
        parts.append([np.asarray(column).reshape(*anchor_Bn.shape, -1) for column in part])
    rows = _Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    last_B = _last_places(np.array(samples.token_BM[:num_sequences]), first, stop_token_ids)
    live_Bn = anchor_n[None] <= last_B[:, None]
    rank = rows.rank_L[live_Bn]
    return {
        "sequences": num_sequences,
        "blocks": int(live_Bn.sum()),
        "chain_tokens_per_round": _tokens_per_round(rows.chain[..., 0], live_Bn),
        f"ddtree_{budget}_tokens_per_round": _tokens_per_round(rows.ddtree[..., 0], live_Bn),
        "loss_by_depth": rows.loss_L[live_Bn].mean(axis=0).round(4).tolist(),
        "top1_by_depth": (rank == 0).mean(axis=0).round(4).tolist(),
        "top4_by_depth": (rank < 4).mean(axis=0).round(4).tolist(),
        # Where a chain stops: the share of rounds that get past a depth, among those that reach it.
        "top1_given_reached": _conditional(rank).round(4).tolist(),
    }


def _rows(
    config: DFlashConfig,
    budget: int,
    arrays: Arrays,
    embedding_VD: Array,
    unembedding_VD: Array,
    token_BM: Array,
    feature_BMY: Array,
    anchor_Bn: Array,
) -> _Rows:
    model = AnchoredDFlash(config, arrays)
    hidden = model.run(embedding_VD, token_BM, feature_BMY.astype(embedding_VD.dtype), anchor_Bn)
    logits = jnp.einsum("BLD,VD->BLV", hidden[:, 1:], unembedding_VD, preferred_element_type=jnp.float32)
    label = labels(token_BM, anchor_Bn, config.depth)
    label_logit = take_label(logits, label)
    root = jnp.take_along_axis(token_BM, anchor_Bn, axis=1).reshape(-1)
    return _Rows(
        chain=_committed(root, logits, label, config.depth, num_candidates=1),
        ddtree=_committed(root, logits, label, budget, num_candidates=budget),
        loss_L=jax.nn.logsumexp(logits, axis=-1) - label_logit,
        rank_L=jnp.sum(logits > label_logit[..., None], axis=-1, dtype=jnp.int32),
    )


def _committed(root: Array, logits: Array, label: Array, budget: int, num_candidates: int) -> Int32[Array, "blocks"]:
    """Tokens that a round commits when the target's text goes on with ``label``."""
    token, logp = sampling.best(logits, num_candidates)
    drafts = tree.expand(root, token, logp, jnp.int32(budget), budget + 1)
    # What the target says at a node of depth d on the path is label d; elsewhere it does not matter.
    drawn = jnp.take_along_axis(jnp.pad(label, ((0, 0), (0, 1)), constant_values=-1), drafts.depth_BN, axis=1)
    return tree.walk(drafts, drawn, label.shape[1])[1]


def _last_places(token_BM: np.ndarray, first: int, stop_token_ids: tuple[int, ...]) -> Int32[np.ndarray, "B"]:
    """Position of each sequence's first stop token behind its prompt, else its last position."""
    is_stop_BM = np.isin(token_BM, stop_token_ids)
    is_stop_BM[:, :first] = False
    is_stop_BM[:, -1] = True
    return np.argmax(is_stop_BM, axis=1)


def _tokens_per_round(committed_Bn: np.ndarray, live_Bn: np.ndarray) -> float:
    rounds = tokens = 0
    for committed_n, live_n in zip(committed_Bn, live_Bn, strict=True):
        place, end = 0, int(live_n.sum())
        while place < end:
            rounds, tokens, place = rounds + 1, tokens + int(committed_n[place]), place + int(committed_n[place])
    return tokens / max(rounds, 1)


def _conditional(rank: np.ndarray) -> Float[np.ndarray, "L"]:
    reached = np.cumprod(rank == 0, axis=1)
    before = np.concatenate([np.ones((len(rank), 1)), reached[:, :-1]], axis=1)
    return reached.sum(axis=0) / np.maximum(before.sum(axis=0), 1)
