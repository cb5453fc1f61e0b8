"""Trains the drafter on the target's own sequences: masked blocks at many anchors, each behind its own context.

::

    position      0 ... a-1 | a     a+1   ...  a+7          a: an anchor inside what the target wrote
    sees          features  | root  MASK  ...  MASK         context strictly before the root
    label                   | -     t(a+1) ... t(a+7)       cross entropy, weighted exp(-(depth - 1) / gamma)
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, BFloat16, Float, Int32, UInt16

from ddtree_jax import dflash, sharding
from ddtree_jax.config import DFlashConfig
from ddtree_jax.layers import Turns
from ddtree_jax.pallas.add_norm import rms_norm
from ddtree_jax.pallas.block_attention import turn_halves, visible
from experiments.tiny_training.model import Arrays
from experiments.tiny_training.optimizer import Clock, apply_updates, learning_rate, make_optimizer
from experiments.tiny_training.samples import Samples
from experiments.tiny_training.target import take_label


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterTraining:
    """How the drafter is trained. A step takes ``batch`` sequences with ``anchors`` blocks in each."""

    batch: int = 128
    anchors: int = 32
    chunk: int = 50
    peak_rate: float = 6e-3
    adam_scale: float = 0.3
    gamma: float = 4.0
    dtype: str = "bfloat16"


class TrainState(NamedTuple):
    masters: Arrays
    optimizer: optax.OptState


class Metrics(NamedTuple):
    """Cross entropy in nats and share of right first choices, by depth."""

    loss_L: Float[Array, "L"]
    accuracy_L: Float[Array, "L"]


class AnchoredBlock(dflash.Block):
    """A drafter layer over blocks that share one context: ``n`` counts a sequence's anchors.

    Blocks are rows of a batch of B * n; the context stays [B, S, J, R] and is not repeated for each anchor.
    """

    def attend(self, x_BTD: Array, turns: Turns, length_B: Array, cache: dflash.KeyValue) -> Array:
        config = self.config
        q_BTJQR, key_BtJR, value_BtJR = self.multiply("qkv", x_BTD)
        key_BtJR = self.finish_key(key_BtJR, turns)
        q_BTJQR = rms_norm(q_BTJQR, self.q_norm_R[...], config.rms_norm_eps)
        q_BTJQR = turn_halves(q_BTJQR, *(turn_BTr[:, :, None, None] for turn_BTr in turns))
        key_bSJR, value_bSJR = cache
        num_sequences, num_slots = key_bSJR.shape[:2]
        positions_BT = length_B[:, None] + jnp.arange(x_BTD.shape[1], dtype=jnp.int32)[None]
        first_B = jnp.zeros_like(length_B)
        context_BTS, block_BTt = visible(positions_BT, length_B, first_B, num_slots, **self.sight)

        def by_anchor(x: Array) -> Array:
            return x.reshape(num_sequences, -1, *x.shape[1:])

        context_score = jnp.einsum(
            "bnTJQR,bSJR->bnJQTS", by_anchor(q_BTJQR), key_bSJR, preferred_element_type=jnp.float32
        )
        context_score = context_score.reshape(-1, *context_score.shape[2:])
        block_score = jnp.einsum("BTJQR,BtJR->BJQTt", q_BTJQR, key_BtJR, preferred_element_type=jnp.float32)
        score = jnp.concatenate([context_score, block_score], axis=-1) * config.head_dim**-0.5
        visible_BTS = jnp.concatenate([context_BTS, block_BTt], axis=-1)
        score = jnp.where(visible_BTS[:, None, None], score, -jnp.inf)
        weight = jax.nn.softmax(score, axis=-1).astype(x_BTD.dtype)
        context_weight, block_weight = weight[..., :num_slots], weight[..., num_slots:]
        attended = jnp.einsum("bnJQTS,bSJR->bnTJQR", by_anchor(context_weight), value_bSJR)
        attended_BTJQR = attended.reshape(q_BTJQR.shape)
        attended_BTJQR = attended_BTJQR + jnp.einsum("BJQTt,BtJR->BTJQR", block_weight, value_BtJR)
        return jnp.einsum("BTJQR,JQRD->BTD", attended_BTJQR, self.o_JQRD[...])


class AnchoredDFlash(dflash.DFlash):
    """The drafter with `AnchoredBlock` layers: the same weights, the same outputs."""

    block_type = AnchoredBlock

    def run(
        self,
        embedding_VD: Float[Array, "V D"],
        token_BM: Int32[Array, "B M"],
        feature_BMY: Float[Array, "B M Y"],
        anchor_Bn: Int32[Array, "B n"],
    ) -> Float[Array, "blocks T D"]:
        """Hidden states of a block [root, MASK, ...] at every anchor; blocks in the order of ``anchor_Bn``."""
        num_rows = self.config.block_size
        positions_BM = jnp.broadcast_to(jnp.arange(token_BM.shape[1], dtype=jnp.int32), token_BM.shape)
        cache = self.context(feature_BMY, positions_BM)
        root_Bn = jnp.take_along_axis(token_BM, anchor_Bn, axis=1)
        mask_token = jnp.full((root_Bn.size, num_rows - 1), self.config.mask_token_id, jnp.int32)
        ids = jnp.concatenate([root_Bn.reshape(-1, 1), mask_token], axis=1)
        return self(embedding_VD[ids], anchor_Bn.reshape(-1), cache)


def train_drafter(
    config: DFlashConfig,
    embedding_VD: Float[Array, "V D"],
    unembedding_VD: Float[Array, "V D"],
    batches: list[Samples],
    training: DrafterTraining,
    clock: Clock,
    seed: int,
    log: Callable[[str], None],
) -> tuple[Arrays, dict[str, Any]]:
    """Float32 masters after training, and what was measured; a chunk of steps draws from one batch of samples."""
    optimizer = make_optimizer(training.adam_scale)
    masters = sharding.initialize(dflash.parameters(config), jax.random.key(seed), jnp.float32)
    state = TrainState(masters, optimizer.init(masters))
    dtype = jnp.dtype(training.dtype)
    fixed = embedding_VD.astype(dtype), unembedding_VD.astype(dtype)
    step = functools.partial(_train_chunk, config, training, optimizer)
    rng = np.random.default_rng(seed)

    rates_S = np.zeros(training.chunk, np.float32)
    inputs = _draw_blocks(config, batches[0], training, rng)
    compiled = jax.jit(step, donate_argnums=0).lower(state, fixed, *inputs, rates_S).compile()
    memory = compiled.memory_analysis()
    log(f"drafter: compiled, temporaries {getattr(memory, 'temp_size_in_bytes', 0) / 1e9:.1f} GB")
    clock.start()
    history, anchors_a_chunk = [], training.chunk * training.batch * training.anchors
    while not clock.is_over:
        first, last = clock.progress(training.chunk)
        progress_S = np.linspace(first, last, training.chunk, endpoint=False)
        rates_S = [learning_rate(training.peak_rate, p, clock.step + i) for i, p in enumerate(progress_S)]
        inputs = _draw_blocks(config, batches[clock.step // training.chunk % len(batches)], training, rng)
        state, metrics = compiled(state, fixed, *inputs, np.float32(rates_S))
        loss_L, accuracy_L = np.asarray(metrics.loss_L), np.asarray(metrics.accuracy_L)
        clock.step += training.chunk
        speed = clock.step / training.chunk * anchors_a_chunk / clock.elapsed
        log(
            f"drafter: step {clock.step} ({last:.1%}) rate {rates_S[-1]:.2e} {speed / 1e3:.0f}k anchors/s, "
            f"loss {_format(loss_L)} top-1 {_format(accuracy_L)}"
        )
        history.append(float(loss_L.mean()))
        if not math.isfinite(history[-1]):
            raise FloatingPointError(f"the drafter's loss is {history[-1]} at step {clock.step}")
    return state.masters, {
        "steps": clock.step,
        "anchors": clock.step // training.chunk * anchors_a_chunk,
        "seconds": clock.elapsed,
        "anchors_per_second": clock.step // training.chunk * anchors_a_chunk / clock.elapsed,
        "train_loss": history[:: max(1, len(history) // 50)] + history[-1:],
        "train_loss_by_depth": loss_L.round(4).tolist(),
        "train_accuracy_by_depth": accuracy_L.round(4).tolist(),
    }


def largest_hidden_difference(config: DFlashConfig, arrays: Arrays, embedding_VD: Array, samples: Samples) -> float:
    """Largest difference in float32 between the package's drafter and the form that it is trained in."""
    with jax.default_matmul_precision("highest"):
        arrays, embedding_VD = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, embedding_VD))
        token_BM = samples.token_BM[:1].astype(jnp.int32)
        feature_BMY = samples.feature_BMY[:1].astype(jnp.float32)
        anchors = [int(samples.prompt_length_B[0]), token_BM.shape[1] - config.block_size]

        @jax.jit
        def hidden_states(arrays: Arrays) -> tuple[Array, Array]:
            trained = AnchoredDFlash(config, arrays).run(
                embedding_VD, token_BM, feature_BMY, jnp.array([anchors], jnp.int32)
            )
            module = dflash.DFlash(config, arrays)
            cache = module.context(feature_BMY, jnp.arange(token_BM.shape[1], dtype=jnp.int32)[None])
            blocks = []
            for anchor in anchors:
                ids_BT = jnp.full((1, config.block_size), config.mask_token_id).at[0, 0].set(token_BM[0, anchor])
                blocks.append(module(embedding_VD[ids_BT], jnp.array([anchor], jnp.int32), cache)[0])
            return trained, jnp.stack(blocks)

        trained, published = hidden_states(arrays)
        return float(jnp.max(jnp.abs(trained - published)))


def _draw_blocks(
    config: DFlashConfig, samples: Samples, training: DrafterTraining, rng: np.random.Generator
) -> tuple[Array, Array, Int32[np.ndarray, "S B"], Int32[np.ndarray, "S B n"]]:
    """A chunk's inputs: tokens and features, which sequences a step takes, and anchors in them.

    An anchor lies anywhere from the first token written to the last whole block.
    """
    num_sequences, length = samples.token_BM.shape
    row_SB = rng.integers(0, num_sequences, (training.chunk, training.batch))
    first_SB1 = samples.prompt_length_B[row_SB][..., None]
    num_places_SB1 = length - config.block_size + 1 - first_SB1
    uniform_SBn = rng.random((training.chunk, training.batch, training.anchors))
    anchor_SBn = first_SB1 + (uniform_SBn * num_places_SB1).astype(np.int32)
    return samples.token_BM, samples.feature_BMY, row_SB.astype(np.int32), anchor_SBn.astype(np.int32)


def _train_chunk(
    config: DFlashConfig,
    training: DrafterTraining,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    fixed: tuple[Array, Array],
    token_NM: UInt16[Array, "N M"],
    feature_NMY: BFloat16[Array, "N M Y"],
    row_SB: Int32[Array, "S B"],
    anchor_SBn: Int32[Array, "S B n"],
    rates_S: Float[Array, "S"],
) -> tuple[TrainState, Metrics]:
    """As many steps as there are rows of ``row_SB``, without a return to the host."""
    embedding_VD, unembedding_VD = fixed
    dtype = jnp.dtype(training.dtype)
    decay_L = jnp.exp(-jnp.arange(config.depth, dtype=jnp.float32) / training.gamma)

    def loss_of(masters: Arrays, row_B: Array, anchor_Bn: Array) -> tuple[Array, Metrics]:
        model = AnchoredDFlash(config, jax.tree.map(lambda master: master.astype(dtype), masters))
        token_BM = token_NM[row_B].astype(jnp.int32)
        hidden = model.run(embedding_VD, token_BM, feature_NMY[row_B].astype(dtype), anchor_Bn)
        logits = jnp.einsum("BLD,VD->BLV", hidden[:, 1:], unembedding_VD, preferred_element_type=jnp.float32)
        label = labels(token_BM, anchor_Bn, config.depth)
        loss_L = jnp.mean(jax.nn.logsumexp(logits, axis=-1) - take_label(logits, label), axis=0)
        accuracy_L = jnp.mean(jnp.argmax(logits, axis=-1) == label, axis=0, dtype=jnp.float32)
        return jnp.sum(loss_L * decay_L) / jnp.sum(decay_L), Metrics(loss_L, accuracy_L)

    def step(state: TrainState, inputs: tuple) -> tuple[TrainState, Metrics]:
        row_B, anchor_Bn, rate = inputs
        gradients, metrics = jax.grad(loss_of, has_aux=True)(state.masters, row_B, anchor_Bn)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.masters)
        return TrainState(apply_updates(state.masters, updates, rate), optimizer_state), metrics

    state, metrics = jax.lax.scan(step, state, (row_SB, anchor_SBn, rates_S))
    return state, jax.tree.map(lambda values: jnp.mean(values, axis=0), metrics)


def labels(token_BM: Int32[Array, "B M"], anchor_Bn: Int32[Array, "B n"], depth: int) -> Int32[Array, "blocks L"]:
    """Tokens behind each anchor."""
    index_BnL = anchor_Bn[..., None] + jnp.arange(1, depth + 1, dtype=jnp.int32)[None, None]
    taken = jnp.take_along_axis(token_BM, index_BnL.reshape(token_BM.shape[0], -1), axis=1)
    return taken.reshape(-1, depth)


def _format(values_L: Float[np.ndarray, "L"]) -> str:
    return " ".join(f"{value:.3f}" for value in values_L)
