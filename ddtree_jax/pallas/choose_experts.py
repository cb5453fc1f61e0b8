"""The router's choice in one launch: from logits to expert numbers and weights, a warp a token::

    load     a lane's logits and bias                            12 of 384 experts each
    keys     of sigmoid(logit) + bias, then the lower number     scores without the bias go to shared memory
    sort     each lane its own, best first                       a network of comparisons
    8 turns  the best of all lanes' first keys; the lane that had it moves on to its next one
    store    numbers; weights without the bias, over their sum

Bytes: 25 kB for 16 tokens, nothing; the turns, one behind the other, are what takes time.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int32

from ddtree_jax.pallas import simt
from ddtree_jax.pallas.rider import Rider
from ddtree_jax.pallas.simt import FLOAT, INT, UINT, WIDE
from ddtree_jax.pallas.tree_expand_top import key_of

_LANES = 32
MAX_EXPERTS = 1024
TINY = 1e-20


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A block takes ``num_warps`` tokens."""

    num_warps: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Static shape: a lane holds ``num_turns`` times ``width`` neighbouring experts; a block has ``num_warps``."""

    num_tokens: int
    num_experts: int
    num_chosen: int
    factor: float
    num_turns: int
    width: int
    num_warps: int

    @classmethod
    def of(
        cls, num_tokens: int, num_experts: int, num_chosen: int, factor: float, config: Config = Config()
    ) -> "Choice":
        width = next(width for width in (4, 2, 1) if num_experts % width == 0)
        return cls(
            num_tokens=num_tokens,
            num_experts=num_experts,
            num_chosen=num_chosen,
            factor=factor,
            num_turns=-(-num_experts // (_LANES * width)),
            width=width,
            num_warps=config.num_warps,
        )


def choose(
    t: Any,
    block: Any,
    logits: Any,
    bias: Any,
    is_token: Any,
    out_expert: Any,
    out_weight: Any,
    scores: Any,
    *,
    shape: Choice,
) -> None:
    """Global memory: logits [T, E], bias [E], is_token [T] as int32, outs [T, X]; shared: scores [warps, E]."""
    lane, warp = t.thread() & (_LANES - 1), t.thread() >> 5
    number = block * shape.num_warps + warp
    token = t.minimum(number, shape.num_tokens - 1)
    here = t.load(is_token, token)
    keys = _load_keys(t, shape, lane, token, logits, bias, scores, warp * shape.num_experts)
    keys = _sorted(t, keys)[: shape.num_chosen]
    chosen = t.value(INT, 0)
    for place in range(shape.num_chosen):
        high, low = t.cast(keys[0] >> 32, UINT), t.cast(keys[0], UINT)
        best = t.warp_maximum(high)
        is_best = t.is_equal(high, best)
        nearest = t.warp_maximum(t.select(is_best, low, 0))
        chosen = t.select(t.is_equal(lane, place), t.cast(~nearest, INT), chosen)
        is_taken = is_best & t.is_equal(low, nearest)
        keys = [t.select(is_taken, after, key) for key, after in zip(keys, [*keys[1:], t.value(WIDE, 0)], strict=True)]
    t.warp_barrier()
    is_place = lane < shape.num_chosen
    score = t.load(scores, warp * shape.num_experts + chosen)
    total = simt.warp_reduce(t, t.select(is_place, score, 0.0), operator.add)
    with t.when(is_place & (number < shape.num_tokens)):
        at = token * shape.num_chosen + lane
        t.store(out_expert, at, t.select(t.is_equal(here, 0), t.value(INT, -1), chosen))
        t.store(out_weight, at, score / (total + TINY) * shape.factor)


def _load_keys(t: Any, shape: Choice, lane: Any, token: Any, logits: Any, bias: Any, scores: Any, at: Any) -> list:
    """Keys of a lane's experts: larger is better; 0, which is worse than any, for what is no expert. Stores scores."""
    keys = []
    for turn in range(shape.num_turns):
        first = (lane + turn * _LANES) * shape.width
        inside = t.minimum(first, shape.num_experts - shape.width)
        logit = t.load_vector(logits, token * shape.num_experts + inside, shape.width)
        score = [t.value(FLOAT, 1) / (t.exp(x * -1.0) + 1.0) for x in logit]
        with t.when(first < shape.num_experts):
            t.store_vector(scores, at + first, score)
        for i, (x, b) in enumerate(zip(score, t.load_vector(bias, inside, shape.width), strict=True)):
            keys.append(t.select(first < shape.num_experts, key_of(t, x + b, first + i), 0))
    return keys


def _sorted(t: Any, keys: list) -> list:
    """Largest first, by merge exchange (Knuth, volume 3, algorithm 5.2.2M)."""
    keys, size = list(keys), len(keys)
    top = part = 1 << ((size - 1).bit_length() - 1) if size > 1 else 0
    while part:
        step, rest, distance = top, 0, part
        while True:
            for i in range(size - distance):
                if i & part == rest:
                    low, high = keys[i], keys[i + distance]
                    keys[i], keys[i + distance] = t.maximum(low, high), t.minimum(low, high)
            if step == part:
                break
            distance, step, rest = step - part, step // 2, part
        part //= 2
    return keys


def choose_experts(
    logits_TE: Float[Array, "T E"],
    bias_E: Float[Array, "E"],
    is_token_T: Bool[Array, "T"],
    num_chosen: int,
    factor: float,
    *,
    has_kernels: bool = True,
) -> tuple[Int32[Array, "T X"], Float[Array, "T X"]]:
    """The best experts of each token by sigmoid(logit) + bias, best first, and their weights; -1 where there is no token.

    A weight is the score without the bias, over the sum of those of all chosen, times ``factor``. Goes through the kernel
    where the program is compiled for a GPU and the kernel takes the input.
    """
    kernel, reference = (
        functools.partial(function, num_chosen=num_chosen, factor=factor)
        for function in (choose_experts_gpu, choose_experts_reference)
    )
    return simt.choose(kernel, reference, logits_TE, bias_E, is_token_T, has_kernels=has_kernels)


def choose_experts_reference(
    logits_TE: Float[Array, "T E"],
    bias_E: Float[Array, "E"],
    is_token_T: Bool[Array, "T"],
    num_chosen: int,
    factor: float,
) -> tuple[Int32[Array, "T X"], Float[Array, "T X"]]:
    """`choose_experts` in plain JAX."""
    score_TE = jax.nn.sigmoid(logits_TE)
    _, expert_TX = lax.top_k(score_TE + bias_E[None], num_chosen)
    weight_TX = jnp.take_along_axis(score_TE, expert_TX, axis=1)
    weight_TX = weight_TX / (jnp.sum(weight_TX, axis=1, keepdims=True) + TINY)
    return jnp.where(is_token_T[:, None], expert_TX, -1), weight_TX * factor


def choose_experts_gpu(
    logits_TE: Float[Array, "T E"],
    bias_E: Float[Array, "E"],
    is_token_T: Bool[Array, "T"],
    num_chosen: int,
    factor: float,
    *,
    config: Config = Config(),
) -> tuple[Int32[Array, "T X"], Float[Array, "T X"]]:
    """`choose_experts` by the kernel alone.

    Raises:
      NotImplementedError: for logits or a bias that are not float32, too many experts, or more chosen than a warp has lanes.
    """
    rider = make_rider(logits_TE, bias_E, is_token_T, num_chosen, factor, config)

    def body(*refs: Any) -> None:
        *arrays, scores = refs
        rider.run(lax.axis_index("block"), arrays, scores)

    return plgpu.kernel(
        body,
        out_type=rider.outs,
        grid=(rider.num_blocks,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((rider.num_floats,), jnp.float32)],
        **simt.options(rider.name, rider.num_threads),
    )(*rider.arrays)


def make_rider(
    logits_TE: Float[Array, "T E"],
    bias_E: Float[Array, "E"],
    is_token_T: Bool[Array, "T"],
    num_chosen: int,
    factor: float,
    config: Config = Config(),
) -> Rider:
    """The kernel, for a launch of its own or another one's. Raises NotImplementedError as `choose_experts_gpu` does."""
    num_tokens, num_experts = logits_TE.shape
    if {logits_TE.dtype.name, bias_E.dtype.name} != {"float32"}:
        raise NotImplementedError(f"logits of {logits_TE.dtype}, bias of {bias_E.dtype}; float32 is needed")
    if num_experts > MAX_EXPERTS or num_chosen > _LANES:
        raise NotImplementedError(
            f"{num_chosen} of {num_experts} experts; at most {_LANES} of {MAX_EXPERTS} can be chosen"
        )
    shape = Choice.of(num_tokens, num_experts, num_chosen, factor, config)
    return Rider(
        name="choose_experts",
        function=functools.partial(choose, shape=shape),
        arrays=(logits_TE, bias_E, is_token_T.astype(jnp.int32)),
        outs=tuple(jax.ShapeDtypeStruct((num_tokens, num_chosen), dtype) for dtype in (jnp.int32, jnp.float32)),
        num_blocks=-(-num_tokens // shape.num_warps),
        num_threads=_LANES * shape.num_warps,
        num_floats=shape.num_warps * num_experts,
    )
