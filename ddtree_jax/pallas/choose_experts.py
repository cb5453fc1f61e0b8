"""The router's choice in one launch: from logits to expert numbers and weights, a warp a token::

    load     a lane's logits and bias                            12 of 384 experts each
    keys     of sigmoid(logit) + bias, in their order            equal ones: the lower number is better
    8 turns  the best key of all lanes, then the lowest number that has it; it is taken out
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
from ddtree_jax.pallas.simt import FLOAT, INT, UINT
from ddtree_jax.pallas.tree_expand_top import ordered

_LANES = 32
_WARPS = 4
MAX_EXPERTS = 1024
TINY = 1e-20


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Static shape: a lane holds ``turns`` times ``width`` neighbouring experts."""

    num_tokens: int
    num_experts: int
    num_chosen: int
    factor: float
    turns: int
    width: int

    @classmethod
    def of(cls, num_tokens: int, num_experts: int, num_chosen: int, factor: float) -> "Choice":
        width = next(width for width in (4, 2, 1) if num_experts % width == 0)
        turns = -(-num_experts // (_LANES * width))
        return cls(
            num_tokens=num_tokens,
            num_experts=num_experts,
            num_chosen=num_chosen,
            factor=factor,
            turns=turns,
            width=width,
        )


def choose(
    t: Any, shape: Choice, block: Any, logits: Any, bias: Any, is_token: Any, out_expert: Any, out_weight: Any
) -> None:
    """Global memory: logits [T, E], bias [E], is_token [T] as int32, outs [T, X]."""
    lane = t.thread() & (_LANES - 1)
    number = block * _WARPS + (t.thread() >> 5)
    token = t.minimum(number, shape.num_tokens - 1)
    score, key, expert = _load_scores(t, shape, lane, token, logits, bias)
    chosen, weight = t.value(INT, 0), t.value(FLOAT, 0)
    for place in range(shape.num_chosen):
        best = t.warp_maximum(functools.reduce(t.maximum, key))
        nearest = [t.select(t.is_equal(k, best), e, shape.num_experts) for k, e in zip(key, expert, strict=True)]
        found = t.cast(t.warp_minimum(t.cast(functools.reduce(t.minimum, nearest), UINT)), INT)
        is_found = [t.is_equal(e, found) for e in expert]
        own = functools.reduce(operator.add, [t.select(f, s, 0.0) for f, s in zip(is_found, score, strict=True)])
        owner = t.divide(found, shape.width) & (_LANES - 1)
        is_place = t.is_equal(lane, place)
        chosen = t.select(is_place, found, chosen)
        weight = t.select(is_place, t.shuffle(own, owner), weight)
        key = [t.select(f, t.value(UINT, 0), k) for f, k in zip(is_found, key, strict=True)]
    total = simt.warp_reduce(t, weight, operator.add)
    with t.when((lane < shape.num_chosen) & (number < shape.num_tokens)):
        at = token * shape.num_chosen + lane
        t.store(out_expert, at, t.select(t.is_equal(t.load(is_token, token), 0), t.value(INT, -1), chosen))
        t.store(out_weight, at, weight / (total + TINY) * shape.factor)


def _load_scores(t: Any, shape: Choice, lane: Any, token: Any, logits: Any, bias: Any) -> tuple[list, list, list]:
    """Scores, keys and numbers of a lane's experts; the key of what is no expert is 0, which is never the best."""
    score, key, expert = [], [], []
    for turn in range(shape.turns):
        first = (lane + turn * _LANES) * shape.width
        inside = t.minimum(first, shape.num_experts - shape.width)
        logit = t.load_vector(logits, token * shape.num_experts + inside, shape.width)
        for i, (x, b) in enumerate(zip(logit, t.load_vector(bias, inside, shape.width), strict=True)):
            sigmoid = t.value(FLOAT, 1) / (t.exp(x * -1.0) + 1.0)
            score.append(sigmoid)
            expert.append(first + i)
            key.append(t.select(first < shape.num_experts, ordered(t, sigmoid + b), 0))
    return score, key, expert


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
) -> tuple[Int32[Array, "T X"], Float[Array, "T X"]]:
    """`choose_experts` by the kernel alone.

    Raises:
      NotImplementedError: for logits or a bias that are not float32, too many experts, or more chosen than a warp has lanes.
    """
    num_tokens, num_experts = logits_TE.shape
    if {logits_TE.dtype.name, bias_E.dtype.name} != {"float32"}:
        raise NotImplementedError(f"logits of {logits_TE.dtype}, bias of {bias_E.dtype}; float32 is needed")
    if num_experts > MAX_EXPERTS or num_chosen > _LANES:
        raise NotImplementedError(
            f"{num_chosen} of {num_experts} experts; at most {_LANES} of {MAX_EXPERTS} can be chosen"
        )
    shape = Choice.of(num_tokens, num_experts, num_chosen, factor)

    def body(*refs: Any) -> None:
        pairs = list(zip(refs, (FLOAT, FLOAT, INT, INT, FLOAT), strict=True))
        simt.run(functools.partial(_choose, shape), pairs, [lax.axis_index("block")])

    outs = (num_tokens, num_chosen)
    expert_TX, weight_TX = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(outs, jnp.int32), jax.ShapeDtypeStruct(outs, jnp.float32)),
        grid=(-(-num_tokens // _WARPS),),
        grid_names=("block",),
        **simt.options("choose_experts", _LANES * _WARPS),
    )(logits_TE, bias_E, is_token_T.astype(jnp.int32))
    return expert_TX, weight_TX


def _choose(shape: Choice, t: Any, *args: Any) -> None:
    choose(t, shape, *args)
