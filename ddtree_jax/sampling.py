"""What the target draws: filters, noise that depends on nothing but (seed, sequence, position), and arg max.

A token is ``argmax(filter(logits / temperature) + gumbel(seed, sequence, position))``, which is a draw from the filtered
softmax (Gumbel-max). The noise is a function of the absolute position of the token that is drawn, so that the same token
comes out whichever node, tree, batch or mode asked for it. Greedy decoding is the case without noise.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from ddtree_jax.pallas import sample, simt
from ddtree_jax.sampling_params import SamplingArrays


def filtered(logits_V: Float[Array, "V"], top_k: Array, top_p: Array, min_p: Array) -> Float[Array, "V"]:
    """Logits (already divided by the temperature) with what the filters remove at -inf.

    All three filters keep the tokens from some logit up, equal ones together, so that one threshold serves. It is found by
    bisection over the ordered bits of float32: exact, and without sorting the vocabulary.
    """
    order_V = _ordered_bits(logits_V)
    num_kept = jnp.where(top_k > 0, top_k, logits_V.shape[0])
    top_k_order = _first_order(lambda order: jnp.sum(order_V > order) < num_kept)
    kept_V = jnp.where(order_V >= top_k_order, logits_V, -jnp.inf)
    probability_V = jax.nn.softmax(kept_V)
    # A token stays if those above it do not yet reach top_p.
    top_p_order = _first_order(lambda order: jnp.sum(jnp.where(order_V > order, probability_V, 0.0)) < top_p)
    order = jnp.maximum(top_k_order, jnp.where(top_p < 1, top_p_order, top_k_order))
    is_kept_V = (order_V >= order) & (logits_V >= jnp.max(logits_V) + jnp.log(min_p))
    return jnp.where(is_kept_V, logits_V, -jnp.inf)


def _ordered_bits(x: Float[Array, "V"]) -> Int32[Array, "V"]:
    """Integers in the order of the floats; both zeros alike."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, jnp.bitwise_xor(bits, jnp.int32(2**31 - 1)), bits)


def _first_order(holds: Callable[[Array], Array]) -> Int32[Array, ""]:
    """Smallest 32-bit integer at which a predicate holds that goes on holding above it."""

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # The mean of two integers of any sign, without overflow.
        middle = (low & high) + jnp.right_shift(low ^ high, 1)
        is_above = holds(middle)
        return jnp.where(is_above, low, middle + 1), jnp.where(is_above, middle, high)

    def bisect(is_unrolled: bool) -> Array:
        bounds = jnp.int32(-(2**31)), jnp.int32(2**31 - 1)
        return jax.lax.fori_loop(0, 32, halve, bounds, unroll=is_unrolled)[1]

    # A GPU's graphs take in no loops by default, and this one would cut the round's graph in three. Elsewhere it would take
    # longer to compile.
    return jax.lax.platform_dependent(cuda=lambda: bisect(True), default=lambda: bisect(False))


def noise(sampling: SamplingArrays, position_BT: Int32[Array, "B T"], vocab_size: int) -> Float[Array, "B T V"]:
    """Gumbel noise for the tokens at absolute positions ``position_BT``."""

    def draw(key: Array) -> Array:
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(jax.vmap(draw))(noise_keys(sampling, position_BT))


def noise_keys(sampling: SamplingArrays, position_BT: Int32[Array, "B T"]) -> Array:
    """Random keys [B, T]; the noise of a token is a function of its sequence's seed and number and of its position."""

    def of_position(seed: Array, sequence: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sequence), position)

    along_positions = jax.vmap(of_position, in_axes=(None, None, 0))
    return jax.vmap(along_positions)(sampling.seed_B, sampling.sequence_B, position_BT)


def draw(
    logits_BNV: Float[Array, "B N V"],
    depth_BN: Int32[Array, "B N"],
    length_B: Int32[Array, "B"],
    num_tokens_B: Int32[Array, "B"],
    sampling: SamplingArrays,
    num_depths: int,
) -> Int32[Array, "B N"]:
    """Draws one token behind every node.

    Args:
      logits_BNV: float32.
      depth_BN: depths of the nodes, below ``num_depths``. The node lies at position ``length_B + depth``.
      num_tokens_B: how many tokens each sequence has emitted; the token behind depth d would be number ``num_tokens_B + d``.
    """
    logits_BNV = _without_stops(logits_BNV, num_tokens_B[:, None] + depth_BN, sampling)
    greedy_BN = simt.choose(_best_by_kernels, lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32), logits_BNV)

    def with_noise() -> Array:
        position_BT = length_B[:, None] + 1 + jnp.arange(num_depths, dtype=jnp.int32)[None]
        arrays = logits_BNV, depth_BN, position_BT, sampling
        sampled_BN = simt.choose(_sample_by_kernels, sample_reference, *arrays)
        return jnp.where(sampling.temperature_B[:, None] > 0, sampled_BN, greedy_BN)

    return jax.lax.cond(jnp.any(sampling.temperature_B > 0), with_noise, lambda: greedy_BN)


def _best_by_kernels(logits_BNV: Array) -> Int32[Array, "B N"]:
    token_R = sample.merge_greedy(sample.best_of_pieces(logits_BNV, jnp.int32(0)))
    return token_R.reshape(logits_BNV.shape[:2])


def _sample_by_kernels(
    logits_BNV: Array, depth_BN: Array, position_BT: Array, sampling: SamplingArrays
) -> Int32[Array, "B N"]:
    """`sample_reference` by the kernels; by itself where the kernels cannot know the draw."""
    vocab_size = logits_BNV.shape[-1]
    filters = sample.Filters(
        _temperature(sampling),
        sampling.top_k_B,
        sampling.top_p_B,
        sampling.min_p_B,
    )
    key_BT2 = jax.random.key_data(noise_keys(sampling, position_BT))

    def with_filters() -> Array:
        sums = sample.add_up_pieces(logits_BNV, filters, jnp.int32(0))
        lists = sample.collect_pieces(logits_BNV, sums, filters, jnp.int32(0), vocab_size)
        token_BN = sample.draw_tokens(sums, lists, filters, depth_BN, key_BT2, vocab_size)
        is_unknown_BN = (token_BN < 0) & (sampling.temperature_B[:, None] > 0)
        return jax.lax.cond(
            jnp.any(is_unknown_BN),
            lambda: sample_reference(logits_BNV, depth_BN, position_BT, sampling),
            lambda: token_BN,
        )

    def without() -> Array:
        best = sample.best_of_pieces(logits_BNV, jnp.int32(0))
        noisy = sample.perturb_pieces(logits_BNV, best, filters, depth_BN, key_BT2, jnp.int32(0))
        return sample.merge_greedy(noisy).reshape(depth_BN.shape)

    return jax.lax.cond(jnp.any((sampling.top_k_B > 0) | (sampling.top_p_B < 1)), with_filters, without)


def _temperature(sampling: SamplingArrays) -> Float[Array, "B"]:
    return jnp.where(sampling.temperature_B > 0, sampling.temperature_B, 1.0)


def sample_reference(
    logits_BNV: Float[Array, "B N V"],
    depth_BN: Int32[Array, "B N"],
    position_BT: Int32[Array, "B T"],
    sampling: SamplingArrays,
) -> Int32[Array, "B N"]:
    """Draws with noise, in plain JAX; a token behind depth d gets the noise of position ``position_BT[:, d]``."""
    # The best logit at 0, so that the smallest temperature overflows toward greedy decoding and not to NaN.
    above_BNV = logits_BNV - jnp.max(logits_BNV, axis=-1, keepdims=True)
    scaled_BNV = above_BNV / _temperature(sampling)[:, None, None]
    is_filtered = (sampling.top_k_B > 0) | (sampling.top_p_B < 1) | (sampling.min_p_B > 0)
    over_nodes = jax.vmap(filtered, in_axes=(0, None, None, None))
    scaled_BNV = jax.lax.cond(
        jnp.any(is_filtered),
        lambda: jax.vmap(over_nodes)(scaled_BNV, sampling.top_k_B, sampling.top_p_B, sampling.min_p_B),
        lambda: scaled_BNV,
    )
    noise_BTV = noise(sampling, position_BT, logits_BNV.shape[-1])
    noisy_BNV = scaled_BNV + jnp.take_along_axis(noise_BTV, depth_BN[..., None], axis=1)
    return jnp.argmax(noisy_BNV, axis=-1).astype(jnp.int32)


def _without_stops(logits_BNV: Array, number_BN: Array, sampling: SamplingArrays) -> Array:
    """Stop ids at -inf where fewer than ``min_new_tokens`` tokens would stand before them."""
    too_early_BN = number_BN < sampling.min_new_tokens_B[:, None]

    def without() -> Array:
        vocab_size = logits_BNV.shape[-1]
        id_V = jnp.arange(vocab_size, dtype=jnp.int32)
        is_stop_BV = jnp.any(sampling.stop_BZ[..., None] == id_V[None, None], axis=1)
        return jnp.where(too_early_BN[..., None] & is_stop_BV[:, None], -jnp.inf, logits_BNV)

    return jax.lax.cond(jnp.any(too_early_BN), without, lambda: logits_BNV)


def is_stop(token_BT: Int32[Array, "B T"], sampling: SamplingArrays) -> Bool[Array, "B T"]:
    return jnp.any(token_BT[..., None] == sampling.stop_BZ[:, None], axis=-1)


def log_probability(
    logits_BTV: Float[Array, "B T V"], token_BT: Int32[Array, "B T"], sampling: SamplingArrays
) -> Float[Array, "B T"]:
    """Log-probability of tokens under the target's own distribution, if any sequence wants it, else 0."""

    def of_tokens() -> Array:
        chosen_BT1 = jnp.take_along_axis(logits_BTV, token_BT[..., None], axis=-1)
        return chosen_BT1[..., 0] - jax.nn.logsumexp(logits_BTV, axis=-1)

    zeros_BT = jnp.zeros(token_BT.shape, jnp.float32)
    return jax.lax.cond(jnp.any(sampling.wants_logprobs_B), of_tokens, lambda: zeros_BT)


def best(logits_BTV: Float[Array, "B T V"], num_best: int) -> tuple[Int32[Array, "B T K"], Float[Array, "B T K"]]:
    """Each row's most probable tokens, best first and equal logits by lower id, and their log-probabilities."""
    if num_best == 0:
        return jnp.zeros((*logits_BTV.shape[:2], 0), jnp.int32), jnp.zeros((*logits_BTV.shape[:2], 0), jnp.float32)
    top_BTK, token_BTK = jax.lax.top_k(logits_BTV, num_best)
    return token_BTK, top_BTK - jax.nn.logsumexp(logits_BTV, axis=-1, keepdims=True)
