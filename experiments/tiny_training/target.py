"""Trains the target on a stream of ids: next-token loss, INT4 in the loop, experts kept equally busy by their bias."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int32, UInt16

from ddtree_jax import kimi, sharding
from ddtree_jax.config import KimiConfig
from ddtree_jax.layers import Turns
from experiments.tiny_training import model as tiny_model
from experiments.tiny_training.optimizer import Clock, apply_updates, learning_rate, make_optimizer

Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetTraining:
    """How the target is trained. A step takes ``batch`` windows of ``length`` tokens.

    ``attention`` is "auto" (cuDNN's where it works) or "xla".
    """

    batch: int = 64
    length: int = 1024
    chunk: int = 50
    peak_rate: float = 6e-3
    adam_scale: float = 0.6
    bias_rate: float = 1e-3
    dtype: str = "bfloat16"
    attention: str = "auto"


class TrainState(NamedTuple):
    masters: tiny_model.Arrays
    optimizer: optax.OptState


class Metrics(NamedTuple):
    """Means over a chunk of steps; ``load_LE`` is each expert's share of the choices, a row for each MoE layer."""

    loss: Float[Array, ""]
    load_LE: Float[Array, "L E"]


def train_target(
    config: KimiConfig, stream: np.ndarray, training: TargetTraining, clock: Clock, seed: int, log: Log
) -> tuple[tiny_model.Arrays, dict[str, Any]]:
    """Float32 masters after training, and what was measured on the way."""
    optimizer = make_optimizer(training.adam_scale)
    masters = sharding.initialize(tiny_model.trainable_parameters(config), jax.random.key(seed), jnp.float32)
    state = TrainState(masters, optimizer.init(masters))
    attention = choose_attention(config, training, log)
    step = functools.partial(_train_chunk, config, training, attention, optimizer)
    tokens = jnp.asarray(stream, jnp.uint16)
    windows = _windows(len(stream), training, seed)

    starts_SB, rates_S = next(windows), np.zeros(training.chunk, np.float32)
    compiled = jax.jit(step, donate_argnums=0).lower(state, tokens, starts_SB, rates_S, rates_S).compile()
    memory = compiled.memory_analysis()
    log(f"target: compiled, temporaries {getattr(memory, 'temp_size_in_bytes', 0) / 1e9:.1f} GB")
    clock.start()
    losses, tokens_a_chunk = [], training.chunk * training.batch * training.length
    while not clock.is_over:
        first, last = clock.progress(training.chunk)
        progress_S = np.linspace(first, last, training.chunk, endpoint=False)
        rates_S = [learning_rate(training.peak_rate, p, clock.step + i) for i, p in enumerate(progress_S)]
        bias_S = [learning_rate(training.bias_rate, p, clock.step, num_warmup=1) for p in progress_S]
        state, metrics = compiled(state, tokens, starts_SB, np.float32(rates_S), np.float32(bias_S))
        starts_SB = next(windows)
        losses.append(float(metrics.loss))
        clock.step += training.chunk
        speed = clock.step / training.chunk * tokens_a_chunk / clock.elapsed
        log(
            f"target: step {clock.step} ({last:.1%}) loss {losses[-1]:.4f} rate {rates_S[-1]:.2e} "
            f"{speed / 1e3:.0f}k tokens/s, load {_describe_load(metrics.load_LE)}"
        )
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the target's loss is {losses[-1]} at step {clock.step}")
    return state.masters, {
        "steps": clock.step,
        "tokens": clock.step // training.chunk * tokens_a_chunk,
        "epochs": clock.step // training.chunk * tokens_a_chunk / len(stream),
        "seconds": clock.elapsed,
        "tokens_per_second": clock.step // training.chunk * tokens_a_chunk / clock.elapsed,
        "attention": attention.__name__,
        "train_loss": losses[:: max(1, len(losses) // 50)] + losses[-1:],
        "final_load": np.asarray(metrics.load_LE).round(4).tolist(),
    }


def choose_attention(config: KimiConfig, training: TargetTraining, log: Log) -> type[kimi.Attention]:
    """cuDNN's fused attention where it compiles and agrees with the plain one, else the plain one."""
    if training.attention == "xla" or jax.default_backend() != "gpu" or training.dtype != "bfloat16":
        return tiny_model.ExpandedAttention
    infos = kimi.Attention.parameters(config)
    arrays = sharding.initialize({"layer": infos}, jax.random.key(0), jnp.bfloat16)["layer"]
    x_BTD = jax.random.normal(jax.random.key(1), (2, training.length, config.hidden_size), jnp.bfloat16)
    positions_BT = jnp.broadcast_to(jnp.arange(training.length, dtype=jnp.int32), x_BTD.shape[:2])

    def total(arrays: dict[str, Array], kind: type[kimi.Attention]) -> Array:
        turns = Turns.of(positions_BT, config.rope, config.qk_rope_head_dim, config.rope.amplitude)
        attended_BTD, _ = kind(config, arrays)(x_BTD, turns, None, None, None)
        return jnp.sum(jnp.square(attended_BTD.astype(jnp.float32)))

    try:
        compute = jax.jit(jax.grad(total), static_argnums=1)
        plain, fused = (compute(arrays, kind) for kind in (tiny_model.ExpandedAttention, tiny_model.CudnnAttention))
        error = max(_relative_error(fused[name], plain[name]) for name in plain)
    except Exception as failure:  # Whatever stops cuDNN here, training goes on without it.
        log(f"target: no cuDNN attention ({type(failure).__name__}: {str(failure)[:200]})")
        return tiny_model.ExpandedAttention
    log(f"target: cuDNN attention's gradients are within {error:.1e} of the plain ones")
    return tiny_model.CudnnAttention if error < 0.05 else tiny_model.ExpandedAttention


def _relative_error(x: Array, reference: Array) -> float:
    x, reference = x.astype(jnp.float32), reference.astype(jnp.float32)
    return float(jnp.linalg.norm(x - reference) / (jnp.linalg.norm(reference) + 1e-9))


def evaluate(
    config: KimiConfig,
    arrays: tiny_model.Arrays,
    stream: np.ndarray,
    lengths_V: np.ndarray,
    training: TargetTraining,
    max_windows: int,
) -> dict[str, float]:
    """Held-out loss of `TrainableKimi` arrays: nats a token, bits a byte of text."""
    num_windows = min(max_windows, (len(stream) - 1) // training.length)
    batch = min(training.batch, num_windows)
    if not num_windows:
        raise ValueError(f"the held-out stream has {len(stream)} tokens; more than {training.length} are needed")
    nats = num_bytes = num_tokens = 0
    for first in range(0, num_windows - batch + 1, batch):
        starts_B = (first + np.arange(batch)) * training.length
        window_BT = stream[starts_B[:, None] + np.arange(training.length + 1)].astype(np.int32)
        nats += float(_sum_losses(config, arrays, window_BT))
        num_bytes += int(lengths_V[window_BT[:, 1:]].sum())
        num_tokens += batch * training.length
    return {
        "nats_per_token": nats / num_tokens,
        "bits_per_byte": nats / num_bytes / math.log(2),
        "tokens": num_tokens,
        "bytes": num_bytes,
    }


@functools.partial(jax.jit, static_argnums=0)
def _sum_losses(config: KimiConfig, arrays: tiny_model.Arrays, window_BT: Int32[Array, "B T"]) -> Float[Array, ""]:
    model = tiny_model.TrainableKimi(config, arrays)
    return jnp.sum(_token_losses(model, model.run(window_BT[:, :-1]).hidden_BTD, window_BT[:, 1:]))


def _windows(num_tokens: int, training: TargetTraining, seed: int) -> Iterator[Int32[np.ndarray, "S B"]]:
    """Starts of windows, a chunk at a time: each epoch cuts the stream anew at a random offset and shuffles."""
    rng = np.random.default_rng(seed)
    size, pool = training.chunk * training.batch, np.zeros(0, np.int64)
    num_windows = (num_tokens - 1) // training.length - 1
    if num_windows < 1:
        raise ValueError(f"the training stream has {num_tokens} tokens; more than {2 * training.length} are needed")
    while True:
        while len(pool) < size:
            pool = np.concatenate(
                [pool, rng.integers(training.length) + training.length * rng.permutation(num_windows)]
            )
        yield pool[:size].reshape(training.chunk, training.batch).astype(np.int32)
        pool = pool[size:]


def _train_chunk(
    config: KimiConfig,
    training: TargetTraining,
    attention: type[kimi.Attention],
    optimizer: optax.GradientTransformation,
    state: TrainState,
    tokens: UInt16[Array, "stream"],
    starts_SB: Int32[Array, "S B"],
    rates_S: Float[Array, "S"],
    bias_rates_S: Float[Array, "S"],
) -> tuple[TrainState, Metrics]:
    """As many steps as there are rows of ``starts_SB``, without a return to the host."""

    def loss_of(masters: tiny_model.Arrays, window_BT: Int32[Array, "B T"]) -> tuple[Array, Array]:
        arrays = tiny_model.compute_weights(masters, jnp.dtype(training.dtype))
        model = tiny_model.TrainableKimi(config, arrays, attention=attention)
        output = model.run(window_BT[:, :-1])
        one_hot_LTXE = jax.nn.one_hot(jnp.stack(output.experts), config.n_routed_experts, dtype=jnp.float32)
        return jnp.mean(_token_losses(model, output.hidden_BTD, window_BT[:, 1:])), jnp.mean(one_hot_LTXE, axis=(1, 2))

    def step(state: TrainState, inputs: tuple) -> tuple[TrainState, Metrics]:
        starts_B, rate, bias_rate = inputs
        offset_T = jnp.arange(training.length + 1, dtype=jnp.int32)
        window_BT = tokens[starts_B[:, None] + offset_T[None]].astype(jnp.int32)
        (loss, load_LE), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.masters, window_BT)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.masters)
        masters = apply_updates(state.masters, updates, rate)
        return TrainState(_balance(config, masters, load_LE, bias_rate), optimizer_state), Metrics(loss, load_LE)

    state, metrics = jax.lax.scan(step, state, (starts_SB, rates_S, bias_rates_S))
    return state, jax.tree.map(lambda values: jnp.mean(values, axis=0), metrics)


def _token_losses(
    model: kimi.Kimi, hidden_BTD: Float[Array, "B T D"], label_BT: Int32[Array, "B T"]
) -> Float[Array, "B T"]:
    """Cross entropy in nats."""
    logits_BTV = jnp.einsum("BTD,VD->BTV", hidden_BTD, model.unembedding_VD[...], preferred_element_type=jnp.float32)
    return jax.nn.logsumexp(logits_BTV, axis=-1) - take_label(logits_BTV, label_BT)


def take_label(logits: Float[Array, "*rows V"], label: Int32[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Logit of each row's label. A sum over a mask, since the gradient of indexing is a slow scatter."""
    token_V = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.sum(jnp.where(token_V == label[..., None], logits, 0), axis=-1)


def _balance(
    config: KimiConfig, masters: tiny_model.Arrays, load_LE: Float[Array, "L E"], rate: Float[Array, ""]
) -> tiny_model.Arrays:
    """Moves each expert's bias a step toward equal load (arXiv 2408.15664); no loss term is needed."""
    masters = {part: dict(table) for part, table in masters.items()}
    moe_layers = [layer for layer in range(config.num_hidden_layers) if not config.is_dense(layer)]
    for load_E, layer in zip(load_LE, moe_layers, strict=True):
        masters[f"layer_{layer}"][tiny_model.ROUTER_BIAS] += rate * jnp.sign(jnp.mean(load_E) - load_E)
    return masters


def _describe_load(load_LE: Float[Array, "L E"]) -> str:
    """Smallest and largest share of an expert, relative to an equal share."""
    relative_LE = np.asarray(load_LE) * load_LE.shape[1]
    return f"{relative_LE.min():.2f}..{relative_LE.max():.2f}"
