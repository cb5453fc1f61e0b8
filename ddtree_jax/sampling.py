"""What the target draws: filters, noise that depends on nothing but (seed, sequence, position), and arg max.

A token is ``argmax(filter(logits / temperature) + gumbel(seed, sequence, position))``, which is a draw from the filtered
softmax (Gumbel-max). The noise is a function of the absolute position of the token that is drawn, so that the same token
comes out whichever node, tree, batch or mode asked for it. Greedy decoding is the case without noise.

On a mesh every device does this for its own columns of the vocabulary (`vocabulary.Shard`), with the noise of their ids::

    greedy      best of a shard ──────────────────────────────────────────► gather ─► token
    kernels     best ─► gather ─► sums of the shard ─► gather ─► candidates ─► gather ─► filters, noise ─► token
    plain JAX   best ─► gather ─► thresholds by search, with sums over all shards ─► noise ─► best ─► gather ─► token

Sampling adds to the greedy case only if a sequence asks for it. Where the kernels cannot know a draw, plain JAX makes it, at
the price of some 20 small sums over the shards.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int32, UInt32

from ddtree_jax.pallas import sample, simt
from ddtree_jax.sampling_params import SamplingArrays
from ddtree_jax.vocabulary import Shard

_UNIT = 2.0**31
"""Masses are counted in units of 2**-31."""

_LIMB = 11
"""Bits of a part of a mass whose sum over any vocabulary fits into 32."""


def filtered(
    logits_V: Float[Array, "V"], top_k: Array, top_p: Array, min_p: Array, shard: Shard = Shard()
) -> Float[Array, "V"]:
    """Logits (already divided by the temperature) with what the filters remove at -inf.

    All three filters keep the tokens from some logit up, equal ones together, so that one threshold serves. It is found by
    search over the ordered bits of float32, without sorting the vocabulary. Counts and masses are integers, so that
    their sums are the same in any order and over any shards.
    """
    order_V = _ordered_bits(logits_V)
    num_kept = jnp.where(top_k > 0, top_k, jnp.int32(2**31 - 1))

    def add_up_above(order_n: Array, x_V: Array) -> Array:
        is_above_nV = order_V[None] > order_n[:, None]
        return shard.sum(jnp.sum(jnp.where(is_above_nV, x_V[None], 0), axis=1, dtype=x_V.dtype))

    ones_V = jnp.ones(order_V.shape, jnp.int32)
    top_k_order = _first_order(lambda order_n: add_up_above(order_n, ones_V) < num_kept)
    largest = shard.maximum(jnp.max(logits_V))
    mass_V = _masses(jnp.where(order_V >= top_k_order, logits_V, -jnp.inf), largest, shard)
    enough = jnp.maximum(jnp.round(top_p * _UNIT), 1).astype(jnp.uint32)
    # A token stays if those above it do not yet reach top_p.
    top_p_order = _first_order(lambda order_n: add_up_above(order_n, mass_V) < enough)
    order = jnp.maximum(top_k_order, jnp.where(top_p < 1, top_p_order, top_k_order))
    is_kept_V = (order_V >= order) & (logits_V >= largest + jnp.log(min_p))
    return jnp.where(is_kept_V, logits_V, -jnp.inf)


def _masses(logits_V: Float[Array, "V"], largest: Float[Array, ""], shard: Shard) -> UInt32[Array, "V"]:
    """The softmax in units of 2**-31. Weights are rounded to such units of the largest one before they are added up."""
    weight_V = jnp.exp(logits_V - largest)
    units_V = jnp.round(weight_V * _UNIT).astype(jnp.uint32)
    parts = [(units_V >> (_LIMB * limb)) & (2**_LIMB - 1) for limb in range(3)]
    sums = shard.sum(jnp.stack([jnp.sum(part, dtype=jnp.uint32) for part in parts])).astype(jnp.float32)
    total = (sums[2] * 2.0 ** (2 * _LIMB) + sums[1] * 2.0**_LIMB + sums[0]) / _UNIT
    return jnp.round(weight_V / total * _UNIT).astype(jnp.uint32)


def _ordered_bits(x: Float[Array, "V"]) -> Int32[Array, "V"]:
    """Integers in the order of the floats; both zeros alike."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, jnp.bitwise_xor(bits, jnp.int32(2**31 - 1)), bits)


def _first_order(holds: Callable[[Array], Array]) -> Int32[Array, ""]:
    """Smallest 32-bit integer at which a predicate holds that goes on holding above it.

    ``holds`` takes several integers at once. Four bits a step, so that sums over shards are few.
    """

    def choose_digit(step: Array, low: Array) -> Array:
        width = jnp.int32(1) << (28 - 4 * step)
        return low + width * jnp.sum(~holds(low + width * jnp.arange(1, 16) - 1), dtype=jnp.int32)

    def search(is_unrolled: bool) -> Array:
        return jax.lax.fori_loop(0, 8, choose_digit, jnp.int32(-(2**31)), unroll=is_unrolled)

    # A GPU's graphs take in no loops by default, and this one would cut the round's graph in three. Elsewhere an unrolled one
    # would take longer to compile.
    return jax.lax.platform_dependent(cuda=lambda: search(True), default=lambda: search(False))


def noise(
    sampling: SamplingArrays,
    position_BT: Int32[Array, "B T"],
    num_columns: int,
    first_id: Int32[Array, ""] | int = 0,
) -> Float[Array, "B T V"]:
    """Gumbel noise of the ids from ``first_id`` on for the tokens at absolute positions ``position_BT``.

    Element i of ``jax.random.gumbel`` with a position's key, for any number of ids, is that of id i.
    """
    id_V = (first_id + jnp.arange(num_columns, dtype=jnp.int32)).astype(jnp.uint32)
    count_2V = jnp.stack([jnp.zeros_like(id_V), id_V])
    lowest = jnp.finfo(jnp.float32).tiny

    def draw(key_2: Array) -> Array:
        bits_2V = threefry_2x32((key_2[0], key_2[1]), count_2V)
        one_to_two_V = jax.lax.bitcast_convert_type(((bits_2V[0] ^ bits_2V[1]) >> 9) | 0x3F800000, jnp.float32)
        return -jnp.log(-jnp.log(jnp.maximum(one_to_two_V - 1.0 + lowest, lowest)))

    return jax.vmap(jax.vmap(draw))(jax.random.key_data(noise_keys(sampling, position_BT)))


def noise_keys(sampling: SamplingArrays, position_BT: Int32[Array, "B T"]) -> Array:
    """Random keys [B, T]; the noise of a token is a function of its sequence's seed and number and of its position."""
    along_positions = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return jax.vmap(along_positions)(jax.random.wrap_key_data(sampling.key_B2), position_BT)


def draw(
    logits_BNV: Float[Array, "B N V"],
    depth_BN: Int32[Array, "B N"],
    length_B: Int32[Array, "B"],
    sampling: SamplingArrays,
    num_depths: int,
    shard: Shard = Shard(),
) -> Int32[Array, "B N"]:
    """Draws one token behind every node.

    Args:
      logits_BNV: float32; those of the shard.
      depth_BN: depths of the nodes, below ``num_depths``. The node lies at position ``length_B + depth``.
    """
    by_reference = functools.partial(_draw_by_reference, num_depths=num_depths, shard=shard)
    by_kernels = functools.partial(_draw_by_kernels, num_depths=num_depths, shard=shard)
    return simt.choose(
        by_kernels, by_reference, logits_BNV, depth_BN, length_B, sampling, has_kernels=shard.has_kernels
    )


def _draw_by_reference(
    logits_BNV: Array, depth_BN: Array, length_B: Array, sampling: SamplingArrays, *, num_depths: int, shard: Shard
) -> Int32[Array, "B N"]:
    largest_BN, greedy_BN = shard.argmax(logits_BNV)
    is_sampled_B = sampling.temperature_B > 0

    def sampled() -> Array:
        token_BN = _sample(logits_BNV, largest_BN, depth_BN, length_B, sampling, num_depths, shard)
        return jnp.where(is_sampled_B[:, None], token_BN, greedy_BN)

    return jax.lax.cond(sampling.is_sampled, sampled, lambda: greedy_BN)


def _draw_by_kernels(
    logits_BNV: Array, depth_BN: Array, length_B: Array, sampling: SamplingArrays, *, num_depths: int, shard: Shard
) -> Int32[Array, "B N"]:
    best = sample.best_of_pieces(logits_BNV, shard.first_id(logits_BNV.shape[-1]))
    best = sample.Best(*_gather_pieces(shard, *best))
    return jax.lax.cond(
        sampling.is_sampled,
        lambda: _sample_by_kernels(logits_BNV, best, depth_BN, length_B, sampling, num_depths, shard),
        lambda: sample.merge_greedy(best).reshape(depth_BN.shape),
    )


def _gather_pieces(shard: Shard, *arrays_RC: Array) -> list[Array]:
    """Numbers of a shard's pieces [R, C] become those of all pieces."""
    return [array_RC1[..., 0] for array_RC1 in shard.gather(*(array_RC[..., None] for array_RC in arrays_RC))]


def _sample_by_kernels(
    logits_BNV: Array,
    best: sample.Best,
    depth_BN: Array,
    length_B: Array,
    sampling: SamplingArrays,
    num_depths: int,
    shard: Shard,
) -> Int32[Array, "B N"]:
    """What `sample_reference` draws, by the kernels; by itself where the kernels cannot know the draw.

    Sequences without a temperature get their best tokens.
    """

    def with_filters() -> Array:
        token_BN = draw_filtered(logits_BNV, best, depth_BN, length_B, sampling, shard)

        def with_reference() -> Array:
            known_BN = sample_reference(logits_BNV, depth_BN, length_B, sampling, num_depths, shard)
            return jnp.where(token_BN < 0, known_BN, token_BN)

        return jax.lax.cond(jnp.any(token_BN < 0), with_reference, lambda: token_BN)

    def without() -> Array:
        first_id, num_ids = shard.first_id(logits_BNV.shape[-1]), shard.num_ids(logits_BNV.shape[-1])
        noisy = sample.perturb_pieces(logits_BNV, best, *_asked(sampling, length_B), depth_BN, first_id, num_ids)
        return sample.merge_greedy(sample.Best(*_gather_pieces(shard, *noisy))).reshape(depth_BN.shape)

    return jax.lax.cond(sampling.is_filtered, with_filters, without)


def draw_filtered(
    logits_BNV: Float[Array, "B N V"],
    best: sample.Best,
    depth_BN: Int32[Array, "B N"],
    length_B: Int32[Array, "B"],
    sampling: SamplingArrays,
    shard: Shard = Shard(),
) -> Int32[Array, "B N"]:
    """Draws under top-k and top-p by the kernels alone; -1 where they cannot know one. ``best`` are those of whole rows."""
    first_id, num_ids = shard.first_id(logits_BNV.shape[-1]), shard.num_ids(logits_BNV.shape[-1])
    filters, of_positions = _asked(sampling, length_B)
    config = sample.Config()
    if shard.axis is not None:  # Lists cross the mesh: a row's are no longer than what a block has room for.
        config = replace(config, capacity=min(config.capacity, config.num_kept // best.logit_RC.shape[1]))
    sums = sample.Sums(*shard.gather(*sample.add_up_pieces(logits_BNV, best, filters, num_ids, config)))
    lists = sample.collect_pieces(logits_BNV, best, sums, filters, first_id, num_ids, config)
    count_RC1, *candidates = shard.gather(lists.count_RC[..., None], *lists[1:])
    lists = sample.Lists(count_RC1[..., 0], *candidates)
    return sample.draw_tokens(best, sums, lists, filters, of_positions, depth_BN, num_ids, config)


def _asked(sampling: SamplingArrays, length_B: Array) -> tuple[sample.Filters, sample.Noise]:
    filters = sample.Filters(sampling.temperature_B, sampling.top_k_B, sampling.top_p_B, sampling.min_p_B)
    return filters, sample.Noise(sampling.key_B2, length_B)


def sample_reference(
    logits_BNV: Float[Array, "B N V"],
    depth_BN: Int32[Array, "B N"],
    length_B: Int32[Array, "B"],
    sampling: SamplingArrays,
    num_depths: int,
    shard: Shard = Shard(),
) -> Int32[Array, "B N"]:
    """Draws with noise, in plain JAX; arguments are those of `draw`."""
    largest_BN, _ = shard.argmax(logits_BNV)
    return _sample(logits_BNV, largest_BN, depth_BN, length_B, sampling, num_depths, shard)


def _sample(
    logits_BNV: Array,
    largest_BN: Array,
    depth_BN: Array,
    length_B: Array,
    sampling: SamplingArrays,
    num_depths: int,
    shard: Shard,
) -> Int32[Array, "B N"]:
    # The best logit at 0, so that the smallest temperature overflows toward greedy decoding and not to NaN.
    temperature_B = jnp.where(sampling.temperature_B > 0, sampling.temperature_B, 1.0)
    scaled_BNV = (logits_BNV - largest_BN[..., None]) / temperature_B[:, None, None]
    is_filtered = (sampling.top_k_B > 0) | (sampling.top_p_B < 1) | (sampling.min_p_B > 0)
    of_node = functools.partial(filtered, shard=shard)
    over_nodes = jax.vmap(of_node, in_axes=(0, None, None, None))
    scaled_BNV = jax.lax.cond(
        jnp.any(is_filtered),
        lambda: jax.vmap(over_nodes)(scaled_BNV, sampling.top_k_B, sampling.top_p_B, sampling.min_p_B),
        lambda: scaled_BNV,
    )
    num_columns = logits_BNV.shape[-1]
    position_BT = length_B[:, None] + 1 + jnp.arange(num_depths, dtype=jnp.int32)[None]
    noise_BTV = noise(sampling, position_BT, num_columns, shard.first_id(num_columns))
    return shard.argmax(scaled_BNV + jnp.take_along_axis(noise_BTV, depth_BN[..., None], axis=1))[1]


def without_early_stops(
    logits_BNV: Float[Array, "B N V"],
    too_early_BN: Bool[Array, "B N"],
    sampling: SamplingArrays,
    shard: Shard = Shard(),
) -> Float[Array, "B N V"]:
    """Stop ids at -inf behind the nodes where it is too early for one."""
    num_columns = logits_BNV.shape[-1]
    id_V = shard.first_id(num_columns) + jnp.arange(num_columns, dtype=jnp.int32)
    is_stop_BV = jnp.any(sampling.stop_BZ[..., None] == id_V[None, None], axis=1)
    return jnp.where(too_early_BN[..., None] & is_stop_BV[:, None], -jnp.inf, logits_BNV)


def is_stop(token_BT: Int32[Array, "B T"], sampling: SamplingArrays) -> Bool[Array, "B T"]:
    return jnp.any(token_BT[..., None] == sampling.stop_BZ[:, None], axis=-1)


def log_probability(
    logits_BNV: Float[Array, "B N V"],
    row_BT: Int32[Array, "B T"],
    token_BT: Int32[Array, "B T"],
    sampling: SamplingArrays,
    shard: Shard = Shard(),
) -> Float[Array, "B T"]:
    """Log-probability of tokens under the target's own distribution in rows of logits, if any sequence wants it, else 0."""

    def of_tokens() -> Array:
        logits_BTV = jnp.take_along_axis(logits_BNV, row_BT[..., None], axis=1)
        return shard.value_at(logits_BTV, token_BT) - shard.log_sum_exp(logits_BTV)

    return jax.lax.cond(sampling.wants_logprobs, of_tokens, lambda: jnp.zeros(token_BT.shape, jnp.float32))


def best(
    logits_BTV: Float[Array, "B T V"], num_best: int, shard: Shard = Shard()
) -> tuple[Int32[Array, "B T K"], Float[Array, "B T K"]]:
    """Each row's most probable tokens, best first and equal logits by lower id, and their log-probabilities."""
    if num_best == 0:
        return jnp.zeros((*logits_BTV.shape[:2], 0), jnp.int32), jnp.zeros((*logits_BTV.shape[:2], 0), jnp.float32)
    top_BTK, token_BTK, total_BT1 = shard.top(logits_BTV, num_best)
    return token_BTK, top_BTK - total_BT1
