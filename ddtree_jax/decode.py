"""The decoding loop: draft, expand, verify, accept, commit, as one jitted ``while_loop``.

Plain decoding ("ar") is the loop with a tree of the root alone, the DFlash chain is the loop with one candidate a depth;
all three share every other line. The loop knows the models only by the two protocols below.

On a mesh the models divide their own work. What lies between them is done by every device, on its own columns of the logits
where there are any, so that logits stay where they are made (`vocabulary.Place`)::

    draft  ──► logits [B, L, V / shards] ─► candidates ──gather──► tree on every device
    verify ──► logits [B, N, V / shards] ─► candidates ──gather──► draws, path, commit on every device
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from ddtree_jax import penalties
from ddtree_jax import sampling as sampling_lib
from ddtree_jax import tree as tree_lib
from ddtree_jax.arguments import is_integer, shown
from ddtree_jax.cache import Cache, append, clear_unused, commit, take_rows
from ddtree_jax.sampling_params import MAX_TOP_LOGPROBS, SamplingArrays
from ddtree_jax.tree import Tree
from ddtree_jax.vocabulary import Place

MODES = ("ar", "chain", "ddtree")
BUDGET_BUCKETS = (3, 7, 15, 31, 63, 127, 255)

RUNNING, STOPPED, FULL = 0, 1, 2


class Target(Protocol):
    """A language model that verifies nodes: masks and positions in, hidden states, features and cache rows out."""

    def init_cache(self, batch: int, num_slots: int) -> Cache: ...

    def embed(self, token_ids_BT: Array) -> Array: ...

    def unembed(self, hidden_BTD: Array) -> Array: ...

    def __call__(
        self,
        token_ids_BT: Array,
        positions_BT: Array,
        visible_BTt: Array,
        length_B: Array,
        cache: Cache,
        is_token_BT: Array,
    ) -> Any:
        """An object with ``hidden_BTD``, ``features_BTY`` and ``rows``, undefined where ``is_token_BT`` is False."""


class Drafter(Protocol):
    """A block drafter: context rows from the target's features, hidden states of a block of masks."""

    def init_cache(self, batch: int, num_slots: int) -> Cache: ...

    def context(self, features_BTY: Array, positions_BT: Array) -> Cache: ...

    def __call__(self, embedded_BTD: Array, length_B: Array, cache: Cache) -> Array:
        """Rows stand behind ``length_B`` slots of the cache, in order. What lies there holds nothing, but is finite."""


class Models(NamedTuple):
    target: Target
    drafter: Drafter | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """How to speculate; the output does not depend on it.

    "ar" decodes a token a pass. "chain" verifies the drafter's best token at each depth, "ddtree" the ``budget`` most
    probable prefixes. A chain is at most ``budget`` long, and no longer than the drafter's block.
    """

    mode: Literal["ar", "chain", "ddtree"] = "ddtree"
    budget: int = 15

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or self.mode not in MODES:
            raise ValueError(f"mode is {shown(self.mode)}; allowed: {', '.join(map(repr, MODES))}")
        if not is_integer(self.budget) or not 0 <= self.budget <= BUDGET_BUCKETS[-1]:
            raise ValueError(f"budget is {shown(self.budget)}; allowed is an integer from 0 to {BUDGET_BUCKETS[-1]}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The static shape of a round: what a program is compiled for.

    ``depth`` 0 means that nothing is drafted, ``num_top_logprobs`` 0 that nobody asked for alternatives. ``place`` is where
    trees, draws and commits are made.
    """

    num_nodes: int
    num_candidates: int
    depth: int
    mask_token_id: int
    num_top_logprobs: int
    place: Place = Place()

    @classmethod
    def of(
        cls,
        decode: DecodeConfig,
        depth: int,
        mask_token_id: int,
        vocab_size: int,
        wants_top_logprobs: bool,
        place: Place = Place(),
    ) -> "Plan":
        """Plan for a mode; DDTree budgets share the smallest bucket that holds them."""
        if decode.mode == "ar" or decode.budget == 0:
            num_nodes, num_candidates, depth = 1, 1, 0
        elif decode.mode == "chain":
            num_nodes, num_candidates = depth + 1, 1
        else:
            bucket = next(size for size in BUDGET_BUCKETS if size >= decode.budget)
            num_nodes, num_candidates = bucket + 1, min(bucket, vocab_size)
        return cls(
            num_nodes=num_nodes,
            num_candidates=num_candidates,
            depth=depth,
            mask_token_id=mask_token_id,
            num_top_logprobs=min(MAX_TOP_LOGPROBS, vocab_size) if wants_top_logprobs else 0,
            place=place,
        )

    @property
    def undrafted(self) -> "Plan":
        """Without anything that differs between modes and budgets: enough to draw the token behind a prompt."""
        return replace(self, num_nodes=1, num_candidates=1, depth=0, mask_token_id=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Context:
    """Committed tokens of a batch: the first ``length_B`` slots of both caches, and the hidden state of the last one."""

    target_cache: Cache
    drafter_cache: Cache
    length_B: Int32[Array, "B"]
    hidden_BD: Float[Array, "B D"]


class Emitted(NamedTuple):
    """Tokens with their log-probabilities and the best alternatives; M are the places of an output, or those of one round."""

    token_BM: Int32[Array, "B M"]
    logprob_BM: Float[Array, "B M"]
    top_token_BMK: Int32[Array, "B M K"]
    top_logprob_BMK: Float[Array, "B M K"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Round:
    """What the last round did: its tree, the accepted path (node numbers, root first) and the path's length."""

    token_BN: Int32[Array, "B N"]
    parent_BN: Int32[Array, "B N"]
    depth_BN: Int32[Array, "B N"]
    count_B: Int32[Array, "B"]
    path_BT: Int32[Array, "B T"]
    accepted_B: Int32[Array, "B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class State:
    """All that the loop carries.

    ``root_B`` is the last emitted token of a sequence that runs; no cache holds it yet. Of ``emitted`` the first
    ``num_tokens_B`` places are filled, of ``accepted_BM``, the lengths of accepted paths, the first ``num_rounds_B``.
    ``finish_B`` is RUNNING, STOPPED (a stop id, or by the host) or FULL (as many tokens as allowed).
    """

    target_cache: Cache
    drafter_cache: Cache
    length_B: Int32[Array, "B"]
    root_B: Int32[Array, "B"]
    emitted: Emitted
    num_tokens_B: Int32[Array, "B"]
    accepted_BM: Int32[Array, "B M"]
    num_rounds_B: Int32[Array, "B"]
    finish_B: Int32[Array, "B"]
    rounds: Int32[Array, ""]
    last: Round


def init_context(models: Models, batch: int, num_slots: int) -> Context:
    """Empty caches of ``num_slots`` slots a sequence."""
    target_cache = models.target.init_cache(batch, num_slots)
    hidden = jax.eval_shape(models.target.embed, jax.ShapeDtypeStruct((batch, 1), jnp.int32))
    return Context(
        target_cache=target_cache,
        drafter_cache=models.drafter.init_cache(batch, num_slots) if models.drafter else [],
        length_B=jnp.zeros(batch, jnp.int32),
        hidden_BD=jnp.zeros((batch, hidden.shape[-1]), hidden.dtype),
    )


def prefill(
    models: Models, context: Context, token_BT: Int32[Array, "B T"], count_B: Int32[Array, "B"]
) -> tuple[Context, Float[Array, "B T D"]]:
    """Commits the first ``count_B`` of T tokens behind each sequence; what follows them is padding.

    Returns:
      The grown context and the hidden states of the chunk.
    """
    num_rows = token_BT.shape[1]
    row_T = jnp.arange(num_rows, dtype=jnp.int32)
    positions_BT = context.length_B[:, None] + row_T[None]
    causal_BTt = jnp.broadcast_to(row_T[:, None] >= row_T[None], (*token_BT.shape, num_rows))
    is_token_BT = row_T[None] < count_B[:, None]
    with jax.named_scope("prefill"):
        out = models.target(token_BT, positions_BT, causal_BTt, context.length_B, context.target_cache, is_token_BT)
    drafter_cache = context.drafter_cache
    if models.drafter:
        rows = models.drafter.context(out.features_BTY, positions_BT)
        drafter_cache = append(drafter_cache, rows, context.length_B, count_B)
    last_BD = jnp.take_along_axis(out.hidden_BTD, jnp.maximum(count_B - 1, 0)[:, None, None], axis=1)[:, 0]
    grown = Context(
        target_cache=append(context.target_cache, out.rows, context.length_B, count_B),
        drafter_cache=drafter_cache,
        length_B=context.length_B + count_B,
        hidden_BD=jnp.where((count_B > 0)[:, None], last_BD, context.hidden_BD),
    )
    return grown, out.hidden_BTD


def draft_logits(
    models: Models, root_B: Array, length_B: Array, drafter_cache: Cache, depth: int, mask_token_id: int
) -> Float[Array, "B L V"]:
    """The drafter's rows for the ``depth`` positions behind the root, float32."""
    masks_BL = jnp.full((root_B.shape[0], depth), mask_token_id, jnp.int32)
    block_BT = jnp.concatenate([root_B[:, None], masks_BL], axis=1)
    hidden_BTD = models.drafter(models.target.embed(block_BT), length_B, drafter_cache)
    return models.target.unembed(hidden_BTD[:, 1:])


def draft_once(models: Models, root_B: Array, length_B: Array, drafter_cache: Cache, **shape: int) -> Array:
    """`draft_logits` outside the loop: whatever lies past the lengths."""
    return draft_logits(models, root_B, length_B, clear_unused(drafter_cache, length_B), **shape)


def begin(models: Models, context: Context, sampling: SamplingArrays, plan: Plan, capacity: int) -> State:
    """Draws each sequence's first token behind its prompt and makes the state of the loop, which takes the caches over.

    ``plan`` is undrafted, so that one program serves all: a loop of another plan needs a `no_round` of its own.
    """
    batch = context.length_B.shape[0]
    zeros_B = jnp.zeros(batch, jnp.int32)
    logits_B1V = models.target.unembed(context.hidden_BD[:, None])
    zeros_BMK = jnp.zeros((batch, capacity, plan.num_top_logprobs), jnp.float32)
    state = State(
        target_cache=context.target_cache,
        drafter_cache=context.drafter_cache,
        length_B=context.length_B,
        root_B=zeros_B,
        emitted=Emitted(
            token_BM=jnp.zeros((batch, capacity), jnp.int32),
            logprob_BM=jnp.zeros((batch, capacity), jnp.float32),
            top_token_BMK=zeros_BMK.astype(jnp.int32),
            top_logprob_BMK=zeros_BMK,
        ),
        num_tokens_B=zeros_B,
        accepted_BM=jnp.zeros((batch, capacity), jnp.int32),
        num_rounds_B=zeros_B,
        finish_B=zeros_B,
        rounds=jnp.int32(0),
        last=no_round(batch, plan),
    )
    # The last prompt token stands where a tree's root would: one position before the token that is drawn.
    root = tree_lib.root_only(zeros_B)
    *_, first = _accept(logits_B1V, root, context.length_B - 1, state, sampling, plan)
    return _emit(replace(state, root_B=first.token_BM[:, 0]), first, zeros_B + 1, sampling)


def _accept(
    logits_BNV: Array, tree: Tree, length_B: Array, state: State, sampling: SamplingArrays, plan: Plan
) -> tuple[Int32[Array, "B T"], Int32[Array, "B"], Emitted]:
    """The path that the target draws in a tree whose root lies at position ``length_B``, its length, and what it emits.

    Every device does so with its own columns of the logits.
    """
    accept = functools.partial(_accept_shard, plan=plan)
    history = state.emitted.token_BM, state.num_tokens_B
    return plan.place.run_on_columns(accept, logits_BNV, tree, length_B, *history, sampling)


def _accept_shard(
    logits_BNV: Array,
    tree: Tree,
    length_B: Array,
    emitted_BM: Array,
    num_tokens_B: Array,
    sampling: SamplingArrays,
    plan: Plan,
) -> tuple[Int32[Array, "B T"], Int32[Array, "B"], Emitted]:
    drawn_BN = _draw(logits_BNV, tree, length_B, emitted_BM, num_tokens_B, sampling, plan)
    path_BT, accepted_B = tree_lib.walk(tree, drawn_BN, plan.depth, has_kernels=plan.place.has_kernels)
    emitted_BT = jnp.take_along_axis(drawn_BN, path_BT, axis=1)
    return path_BT, accepted_B, _emission(logits_BNV, path_BT, emitted_BT, sampling, plan)


def _draw(
    logits_BNV: Array,
    tree: Tree,
    length_B: Array,
    emitted_BM: Array,
    num_tokens_B: Array,
    sampling: SamplingArrays,
    plan: Plan,
) -> Int32[Array, "B N"]:
    """One token behind every node; the token behind depth d would be number ``num_tokens_B + d`` of its sequence."""
    shard = plan.place.shard
    too_early_BN = num_tokens_B[:, None] + tree.depth_BN < sampling.min_new_tokens_B[:, None]

    def adjusted(logits_BNV: Array) -> Array:
        history = tree.token_BN, tree.visible_BNn, emitted_BM, num_tokens_B
        logits_BNV = penalties.adjusted(logits_BNV, *history, sampling, shard)
        return sampling_lib.without_early_stops(logits_BNV, too_early_BN, sampling, shard)

    # One condition round all: each one costs a copy of the logits, which are read again for log-probabilities. Where it is
    # too early behind any node, it is behind the root.
    is_adjusted = sampling.is_adjusted | jnp.any(num_tokens_B < sampling.min_new_tokens_B)
    logits_BNV = jax.lax.cond(is_adjusted, adjusted, lambda logits_BNV: logits_BNV, logits_BNV)
    return sampling_lib.draw(logits_BNV, tree.depth_BN, length_B, sampling, plan.depth + 1, shard)


def _emission(logits_BNV: Array, path_BT: Array, token_BT: Array, sampling: SamplingArrays, plan: Plan) -> Emitted:
    shard = plan.place.shard
    logits_BTV = jnp.take_along_axis(logits_BNV, path_BT[..., None], axis=1)
    top_token_BTK, top_logprob_BTK = sampling_lib.best(logits_BTV, plan.num_top_logprobs, shard)
    return Emitted(
        token_BM=token_BT,
        logprob_BM=sampling_lib.log_probability(logits_BNV, path_BT, token_BT, sampling, shard),
        top_token_BMK=top_token_BTK,
        top_logprob_BMK=top_logprob_BTK,
    )


def no_round(batch: int, plan: Plan) -> Round:
    """What stands in a state before its first round."""
    nodes_BN = jnp.zeros((batch, plan.num_nodes), jnp.int32)
    return Round(
        token_BN=nodes_BN,
        parent_BN=nodes_BN,
        depth_BN=nodes_BN,
        count_B=nodes_BN[:, 0],
        path_BT=jnp.zeros((batch, plan.depth + 1), jnp.int32),
        accepted_B=nodes_BN[:, 0],
    )


def _emit(state: State, emission: Emitted, count_B: Array, sampling: SamplingArrays) -> State:
    """Appends up to ``count_B`` tokens to the output, ends at the first stop id among them or at the last one allowed."""
    token_BT = emission.token_BM
    index_T = jnp.arange(token_BT.shape[1], dtype=jnp.int32)
    room_B = sampling.max_new_tokens_B - state.num_tokens_B
    kept_B = jnp.minimum(count_B, room_B)
    stops_BT = sampling_lib.is_stop(token_BT, sampling) & (index_T[None] < kept_B[:, None])
    stopped_B = jnp.any(stops_BT, axis=1)
    kept_B = jnp.where(stopped_B, jnp.argmax(stops_BT, axis=1).astype(jnp.int32) + 1, kept_B)
    reason_B = jnp.where(stopped_B, STOPPED, jnp.where(kept_B >= room_B, FULL, RUNNING)).astype(jnp.int32)
    return replace(
        state,
        emitted=append(state.emitted, emission, state.num_tokens_B, kept_B),
        num_tokens_B=state.num_tokens_B + kept_B,
        finish_B=jnp.where(state.finish_B == RUNNING, reason_B, state.finish_B),
    )


def draft_tree(models: Models, state: State, plan: Plan, budget: Int32[Array, ""]) -> Tree:
    """The tree of this round: the root alone, a chain, or the best prefixes of a draft."""
    if plan.depth == 0:
        return tree_lib.root_only(state.root_B)
    with jax.named_scope("draft"):
        logits_BLV = draft_logits(
            models, state.root_B, state.length_B, state.drafter_cache, plan.depth, plan.mask_token_id
        )
    with jax.named_scope("expand"):
        sizes = {"num_nodes": plan.num_nodes, "num_candidates": plan.num_candidates, "shard": plan.place.shard}

        def grow(logits_BLV: Array, root_B: Array, budget: Array) -> Tree:
            return tree_lib.grow(root_B, logits_BLV, budget, **sizes)

        return plan.place.run_on_columns(grow, logits_BLV, state.root_B, budget)


def decode_round(models: Models, state: State, sampling: SamplingArrays, plan: Plan, budget: Int32[Array, ""]) -> State:
    """One round. Sequences that have finished pass through it unchanged."""
    tree = draft_tree(models, state, plan, budget)
    with jax.named_scope("verify"):
        out = _verify(models, state, tree)
        logits_BNV = models.target.unembed(out.hidden_BTD)
    with jax.named_scope("accept"):
        path_BT, accepted_B, emission = _accept(logits_BNV, tree, state.length_B, state, sampling, plan)
        accepted_B = jnp.where(state.finish_B == RUNNING, accepted_B, 0)
    with jax.named_scope("commit"):
        state = _commit(models, state, plan, out, path_BT, accepted_B)
        last_B1 = jnp.maximum(accepted_B - 1, 0)[:, None]
        state = replace(
            state,
            root_B=jnp.where(
                accepted_B > 0, jnp.take_along_axis(emission.token_BM, last_B1, axis=1)[:, 0], state.root_B
            ),
            last=Round(
                token_BN=tree.token_BN,
                parent_BN=tree.parent_BN,
                depth_BN=tree.depth_BN,
                count_B=tree.count_B,
                path_BT=path_BT,
                accepted_B=accepted_B,
            ),
            rounds=state.rounds + 1,
        )
        return _emit(state, emission, accepted_B, sampling)


def _verify(models: Models, state: State, tree: Tree) -> Any:
    """The target's pass over all nodes. Of a sequence that has finished it reads neither the cache nor any expert."""
    is_running_B = state.finish_B == RUNNING
    node_N = jnp.arange(tree.token_BN.shape[1], dtype=jnp.int32)
    is_token_BN = (node_N[None] < tree.count_B[:, None]) & is_running_B[:, None]
    positions_BN = state.length_B[:, None] + tree.depth_BN
    length_B = jnp.where(is_running_B, state.length_B, 0)
    return models.target(tree.token_BN, positions_BN, tree.visible_BNn, length_B, state.target_cache, is_token_BN)


def _commit(models: Models, state: State, plan: Plan, out: Any, path_BT: Array, accepted_B: Array) -> State:
    """Writes the accepted nodes' rows behind the prefix: the target's, and the drafter's from the nodes' features."""
    place = plan.place
    write = functools.partial(place.run_on_rows, functools.partial(commit, has_kernels=place.has_kernels))
    drafter_cache = state.drafter_cache
    if plan.depth > 0:
        features_BTY = take_rows(out.features_BTY, path_BT)
        positions_BT = state.length_B[:, None] + jnp.arange(plan.depth + 1, dtype=jnp.int32)[None]
        rows = models.drafter.context(features_BTY, positions_BT)
        in_order_BT = jnp.broadcast_to(jnp.arange(plan.depth + 1, dtype=jnp.int32)[None], path_BT.shape)
        numbers = in_order_BT, state.length_B, accepted_B
        drafter_cache = write(drafter_cache, rows, *numbers, spec=place.drafter_rows)
    is_active_B = (accepted_B > 0).astype(jnp.int32)
    return replace(
        state,
        target_cache=write(state.target_cache, out.rows, path_BT, state.length_B, accepted_B),
        drafter_cache=drafter_cache,
        length_B=state.length_B + accepted_B,
        accepted_BM=append(state.accepted_BM, accepted_B[:, None], state.num_rounds_B, is_active_B),
        num_rounds_B=state.num_rounds_B + is_active_B,
    )


def should_continue(state: State, round_limit: Int32[Array, ""]) -> Bool[Array, ""]:
    """The loop ends when every sequence has finished, or when this slice of rounds is done."""
    some_sequence_runs = jnp.any(state.finish_B == RUNNING)
    slice_is_open = state.rounds < round_limit
    return some_sequence_runs & slice_is_open


def decode_rounds(
    models: Models,
    state: State,
    sampling: SamplingArrays,
    budget: Int32[Array, ""],
    round_limit: Int32[Array, ""],
    plan: Plan,
) -> State:
    """Runs rounds until all sequences have finished or ``state.rounds`` reaches ``round_limit``."""
    if plan.depth > 0:
        state = replace(state, drafter_cache=clear_unused(state.drafter_cache, state.length_B))
    return jax.lax.while_loop(
        lambda state: should_continue(state, round_limit),
        lambda state: decode_round(models, state, sampling, plan, budget),
        state,
    )
