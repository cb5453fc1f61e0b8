"""The engine: loads a target and a drafter, and turns prompts into completions with one compiled loop a batch."""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ddtree_jax import checkpoint, decode, dflash, kimi, sharding
from ddtree_jax.completion import Completion, Cut, IdStream, RoundTrace, Stats, TextStream, cut_at_stop
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.decode import DecodeConfig, Models, Plan, State
from ddtree_jax.prompts import Prompt, check_token_ids, read_prompts, read_token_ids
from ddtree_jax.sampling import SamplingArrays, SamplingParams, is_integer
from ddtree_jax.tokenizer import Tokenizer

PREFILL_BUCKETS = (16, 64, 256)
"""Chunk widths of prefill, in tokens; a longer prompt takes several of the widest."""

ALL_ROUNDS = 2**31 - 1
STREAM_ROUNDS = 4
"""Rounds between two returns to the host while streaming."""

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class Engine:
    """A target with its drafter on a mesh, and the compiled programs of both."""

    def __init__(
        self,
        target: kimi.Kimi,
        drafter: dflash.DFlash | None,
        *,
        mesh: Mesh,
        max_length: int,
        tokenizer: Tokenizer | None = None,
    ):
        _check_pair(target.config, drafter and drafter.config, max_length, tokenizer)
        if drafter is not None and target.capture != drafter.config.target_layer_ids:
            raise ValueError(
                f"target captures layers {target.capture}; the drafter allows {drafter.config.target_layer_ids} alone"
            )
        self.models = Models(target, drafter)
        self.max_length = max_length
        self.tokenizer = tokenizer
        self._replicated = sharding.replicated(mesh)
        self._vocab_size = target.config.vocab_size
        out = {"out_shardings": self._replicated}
        self._init_context = jax.jit(decode.init_context, static_argnums=(1, 2), **out)
        self._prefill = jax.jit(decode.prefill, donate_argnames="context", **out)
        self._begin = jax.jit(decode.begin, static_argnames=("plan", "capacity"), **out)
        self._decode_rounds = jax.jit(decode.decode_rounds, static_argnames="plan", donate_argnames="state", **out)
        self._draft_logits = jax.jit(decode.draft_logits, static_argnames=("depth", "mask_token_id"), **out)
        self._unembed = jax.jit(kimi.Kimi.unembed, **out)

    @classmethod
    def load(
        cls,
        target: str | Path,
        drafter: str | Path | None = None,
        *,
        mesh: str | None = None,
        max_length: int = 4096,
        dtype: str = "bfloat16",
        drafter_rope_amplitude: float | None = None,
        drafter_sliding_causal: bool = True,
    ) -> "Engine":
        """Loads converted checkpoints (`checkpoints_tools.convert`).

        Args:
          target, drafter: folders. Without a drafter only mode "ar" can be used.
          mesh: axis sizes such as "tensor=8" or "expert=4,tensor=2"; one device by default.
          max_length: the most tokens of prompt and completion together; caches are that long.
          dtype: of weights and activations, "float32" or "bfloat16".
          drafter_rope_amplitude: factor on the drafter's cos and sin, instead of what its config gives; some published
            drafters want 0.1 ln(factor) + 1.
          drafter_sliding_causal: whether sliding layers of the drafter are causal inside a block.

        Raises:
          ValueError: a wrong argument, a folder that is no finished checkpoint, or two models that do not fit.
        """
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(map(repr, _DTYPES))}")
        for name, folder in (("target", target), ("drafter", drafter)):
            if not isinstance(folder, (str, Path)) and (name, folder) != ("drafter", None):
                raise ValueError(f"{name} is {folder!r}; allowed is the folder of a converted checkpoint")
        device_mesh = sharding.make_mesh(mesh)
        target_config = KimiConfig.from_hf(checkpoint.read_metadata(target, "kimi").config)
        drafter_config = None
        if drafter is not None:
            drafter_config = _read_drafter_config(drafter, drafter_rope_amplitude, drafter_sliding_causal)
        has_tokenizer = (Path(target) / "tiktoken.model").exists()
        tokenizer = Tokenizer.from_directory(target) if has_tokenizer else None
        _check_pair(target_config, drafter_config, max_length, tokenizer)
        arrays = checkpoint.load(target, kimi.parameters(target_config), device_mesh, _DTYPES[dtype])
        if jax.default_backend() == "gpu" and dtype == "bfloat16":
            arrays = kimi.pack_experts(arrays, device_mesh)
        capture = drafter_config.target_layer_ids if drafter_config else ()
        drafter_model = None
        if drafter_config:
            drafter_arrays = checkpoint.load(drafter, dflash.parameters(drafter_config), device_mesh, _DTYPES[dtype])
            drafter_model = dflash.DFlash(drafter_config, drafter_arrays)
        return cls(
            kimi.Kimi(target_config, arrays, capture),
            drafter_model,
            mesh=device_mesh,
            max_length=max_length,
            tokenizer=tokenizer,
        )

    def generate(
        self,
        prompts: Any,
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        decode: DecodeConfig = DecodeConfig(),
        *,
        thinking: bool = True,
    ) -> list[Completion]:
        """Completes prompts, all in one batch.

        Args:
          prompts: a string, a list of strings, token ids, a list of lists of token ids, or one conversation as chat messages.
          sampling: for all prompts, or one a prompt.
          decode: how to speculate; the output does not depend on it.
          thinking: for chat messages, whether the model is asked to think first.

        Raises:
          ValueError: a wrong argument, named. Nothing has been computed then.
        """
        job = self._job(self._read_prompts(prompts, thinking), sampling, decode)
        rounds = STREAM_ROUNDS if any(params.stop for params in job.params) else ALL_ROUNDS
        progress = deque(self._run(job, rounds), maxlen=1).pop()
        return [self._completion(job, progress, index) for index in range(len(job.prompts))]

    def stream(
        self,
        prompt: Any,
        sampling: SamplingParams = SamplingParams(),
        decode: DecodeConfig = DecodeConfig(),
        *,
        thinking: bool = True,
    ) -> Iterator[str | list[int]]:
        """Yields the completion of one prompt as it is committed: text for text and chat, lists of ids for ids.

        The same loop as `generate`, in slices of rounds; the pieces join to its ``text`` or ``token_ids``. Errors as there,
        raised by the call itself.
        """
        return self._pieces(self._job(self._one_prompt(prompt, thinking), sampling, decode))

    def trace(
        self, prompt: Any, sampling: SamplingParams = SamplingParams(), decode: DecodeConfig = DecodeConfig()
    ) -> Iterator[RoundTrace]:
        """Decodes one prompt a round at a time and yields what each round drafted and accepted."""
        job = self._job(self._one_prompt(prompt, True), sampling, decode)
        return (trace for progress in self._run(job, 1) if (trace := _trace(progress.state)) is not None)

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """The target's teacher-forced logits, float32 [T, V]: row t is the prediction behind token t."""
        token_ids = self._token_ids(token_ids)
        with self._precision():
            logits = [
                np.asarray(self._unembed(self.models.target, hidden_BTD)[0])
                for _, hidden_BTD in self._prefill_chunks([token_ids])
            ]
        return np.concatenate(logits)[: len(token_ids)]

    def draft(self, token_ids: Sequence[int]) -> np.ndarray:
        """The drafter's logits with the last token as root, float32 [block - 1, V]: row j is for position len + j."""
        config = self._drafter_config("draft")
        token_ids = self._token_ids(token_ids)
        root_B = np.array(token_ids[-1:], np.int32)
        with self._precision():
            context, _ = deque(self._prefill_chunks([token_ids[:-1]]), maxlen=1).pop()
            logits_BLV = self._draft_logits(
                self.models,
                self._put(root_B),
                context.length_B,
                context.drafter_cache,
                depth=config.depth,
                mask_token_id=config.mask_token_id,
            )
        return np.asarray(logits_BLV[0])

    def _read_prompts(self, prompts: Any, thinking: Any) -> list[Prompt]:
        if not isinstance(thinking, bool):
            raise ValueError(f"thinking is {thinking!r}; allowed are True and False")
        return read_prompts(prompts, self.tokenizer, thinking)

    def _one_prompt(self, prompt: Any, thinking: Any) -> list[Prompt]:
        prompts = self._read_prompts(prompt, thinking)
        if len(prompts) != 1:
            raise ValueError(f"prompt holds {len(prompts)} prompts; allowed is 1")
        return prompts

    def _token_ids(self, token_ids: Any) -> list[int]:
        checked = read_token_ids(token_ids, "token_ids")
        check_token_ids(checked, "token_ids", self._vocab_size, self.max_length, "max_length")
        return checked

    def _drafter_config(self, needed_by: str) -> DFlashConfig:
        if self.models.drafter is None:
            raise ValueError(f"{needed_by} needs a drafter, but the engine was loaded without one; allowed: mode 'ar'")
        return self.models.drafter.config

    def _precision(self) -> AbstractContextManager:
        """float32 means float32: without this, a GPU rounds the factors of float32 products to TF32."""
        is_float32 = self.models.target.norm_D[...].dtype == jnp.float32
        return jax.default_matmul_precision("highest" if is_float32 else "default")

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self._replicated)

    def _job(self, prompts: list[Prompt], sampling: Any, decode_config: DecodeConfig) -> "_Job":
        """Checks everything that can be wrong before anything is computed."""
        if not isinstance(decode_config, DecodeConfig):
            raise ValueError(f"decode is {decode_config!r}; a DecodeConfig is needed")
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise ValueError(f"sampling is {sampling!r}; allowed is a SamplingParams, or a list of one a prompt")
        if len(params) != len(prompts):
            raise ValueError(f"sampling has {len(params)} entries; allowed are {len(prompts)}, one a prompt")
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            name = f"prompts[{index}]"
            most = self.max_length - 1
            check_token_ids(
                prompt.token_ids, name, self._vocab_size, most, f"max_length {self.max_length}, less 1 new token"
            )
            for token in one.stop_token_ids:
                if not 0 <= token < self._vocab_size:
                    raise ValueError(f"stop_token_ids has {token}; allowed are 0 to {self._vocab_size - 1}")
            if one.stop and self.tokenizer is None:
                raise ValueError(f"stop is {one.stop!r}, but the checkpoint has no tokenizer; allowed: stop_token_ids")
        depth, mask_token_id = 0, 0
        if decode_config.mode != "ar" and decode_config.budget > 0:
            drafter_config = self._drafter_config(f"mode {decode_config.mode!r}")
            depth, mask_token_id = drafter_config.depth, drafter_config.mask_token_id
        plan = Plan.of(decode_config, depth, mask_token_id, self._vocab_size)
        room = [self.max_length - len(prompt.token_ids) for prompt in prompts]
        arrays = SamplingArrays.stack(params, self.models.target.config.eos_token_ids, room)
        return _Job(prompts, list(params), self._put(arrays), plan, min(decode_config.budget, plan.num_nodes - 1))

    def _prefill_chunks(self, prompts: list[list[int]]) -> Iterator[tuple[decode.Context, jax.Array]]:
        """Runs the prompts through both models; yields the growing caches and the hidden states of each chunk."""
        longest = max(1, *map(len, prompts))
        width = next((bucket for bucket in PREFILL_BUCKETS if bucket >= longest), PREFILL_BUCKETS[-1])
        context = self._init_context(self.models, len(prompts), self.max_length)
        for start in range(0, longest, width):
            chunks = [prompt[start : start + width] for prompt in prompts]
            token_BT = np.array([chunk + [0] * (width - len(chunk)) for chunk in chunks], np.int32)
            count_B = np.array([len(chunk) for chunk in chunks], np.int32)
            context, hidden_BTD = self._prefill(self.models, context, *self._put((token_BT, count_B)))
            yield context, hidden_BTD

    def _run(self, job: "_Job", rounds_per_slice: int) -> Iterator["_Progress"]:
        """Prefills, then yields after each slice of rounds until every sequence has finished."""
        started = time.perf_counter()
        with self._precision():
            chunks = enumerate(self._prefill_chunks([prompt.token_ids for prompt in job.prompts]), 1)
            num_chunks, (context, _) = deque(chunks, maxlen=1).pop()
            # The caches need no part in drawing the first token: they move from the context to the state as they are.
            bare = replace(context, target_cache=[], drafter_cache=[])
            state = self._begin(self.models, bare, job.sampling, plan=job.plan, capacity=self.max_length)
            state = replace(state, target_cache=context.target_cache, drafter_cache=context.drafter_cache)
            budget = self._put(np.int32(job.budget))
        jax.block_until_ready(state.root_B)
        prefilled = time.perf_counter()
        limit = 0
        while True:
            yield _Progress(state, num_chunks, prefilled - started, time.perf_counter() - prefilled)
            if not np.any(np.asarray(state.finish_B) == decode.RUNNING):
                return
            state = self._finish_at_stop_strings(job, state)
            limit = min(limit + rounds_per_slice, ALL_ROUNDS)
            with self._precision():
                state = self._decode_rounds(
                    self.models, state, job.sampling, budget, self._put(np.int32(limit)), plan=job.plan
                )
            jax.block_until_ready(state.root_B)

    def _finish_at_stop_strings(self, job: "_Job", state: State) -> State:
        """Ends the sequences whose text holds one of their stop strings; ids alone cannot tell the device."""
        if not any(params.stop for params in job.params):
            return state
        finish_B = np.array(state.finish_B)
        for index, params in enumerate(job.params):
            if finish_B[index] != decode.RUNNING:
                continue
            if self._cut(params, state, index, ended_by_id=False).at_string:
                finish_B[index] = decode.STOPPED
        return replace(state, finish_B=self._put(finish_B))

    def _cut(self, params: SamplingParams, state: State, index: int, ended_by_id: bool) -> Cut:
        return cut_at_stop(
            _token_ids(state, index),
            is_running=int(state.finish_B[index]) == decode.RUNNING,
            ended_by_id=ended_by_id,
            stop=params.stop,
            tokenizer=self.tokenizer,
        )

    def _completion(self, job: "_Job", progress: "_Progress", index: int) -> Completion:
        state, params = progress.state, job.params[index]
        ended_by_id = int(state.finish_B[index]) == decode.STOPPED and self._ends_with_stop(job, state, index)
        cut = self._cut(params, state, index, ended_by_id)
        num_rounds = int(state.num_rounds_B[index])
        return Completion(
            token_ids=cut.token_ids,
            text=cut.text,
            finish_reason="stop" if ended_by_id or cut.at_string else "length",
            logprobs=np.asarray(state.logprobs_BM[index])[: len(cut.token_ids)].tolist() if params.logprobs else None,
            stats=Stats(
                rounds=num_rounds,
                accepted_lengths=np.asarray(state.accepted_BM[index])[:num_rounds].tolist(),
                target_passes=progress.num_chunks + num_rounds,
                prefill_seconds=progress.prefill_seconds,
                decode_seconds=progress.decode_seconds,
            ),
        )

    def _ends_with_stop(self, job: "_Job", state: State, index: int) -> bool:
        return _token_ids(state, index)[-1] in np.asarray(job.sampling.stop_BZ[index]).tolist()

    def _pieces(self, job: "_Job") -> Iterator[str | list[int]]:
        """What each slice adds."""
        sent = TextStream(self.tokenizer, job.params[0].stop) if job.prompts[0].is_text else IdStream()
        for progress in self._run(job, STREAM_ROUNDS):
            is_running = int(progress.state.finish_B[0]) == decode.RUNNING
            piece = sent.advance(self._completion(job, progress, 0), is_running)
            if piece:
                yield piece


@dataclass(frozen=True, slots=True)
class _Job:
    """A checked request: prompts with their sampling, on the host and on the device, and the shape of its rounds."""

    prompts: list[Prompt]
    params: list[SamplingParams]
    sampling: SamplingArrays
    plan: Plan
    budget: int


@dataclass(frozen=True, slots=True)
class _Progress:
    """The loop's state after a slice of rounds, and what it has cost so far. The next slice consumes the state."""

    state: State
    num_chunks: int
    prefill_seconds: float
    decode_seconds: float


def _token_ids(state: State, index: int) -> list[int]:
    return np.asarray(state.tokens_BM[index])[: int(state.num_tokens_B[index])].tolist()


def _trace(state: State) -> RoundTrace | None:
    """The last round of sequence 0; None before the first one."""
    last = state.last
    accepted = int(last.accepted_B[0])
    if accepted == 0:
        return None
    token_N, depth_N, parent_N = (
        np.asarray(column[0])[: int(last.count_B[0])].tolist()
        for column in (last.token_BN, last.depth_BN, last.parent_BN)
    )
    return RoundTrace(
        start=int(state.length_B[0]) - accepted,
        token_ids=token_N,
        depths=depth_N,
        parents=parent_N,
        accepted=np.asarray(last.path_BT[0])[:accepted].tolist(),
    )


def _read_drafter_config(directory: str | Path, rope_amplitude: Any, sliding_causal: Any) -> DFlashConfig:
    """A drafter's config with the two switches on which published engines differ."""
    config = DFlashConfig.from_hf(checkpoint.read_metadata(directory, "dflash").config)
    if not isinstance(sliding_causal, bool):
        raise ValueError(f"drafter_sliding_causal is {sliding_causal!r}; allowed are True and False")
    if rope_amplitude is None:
        return replace(config, sliding_causal=sliding_causal)
    is_number = isinstance(rope_amplitude, (int, float)) and not isinstance(rope_amplitude, bool)
    if not is_number or not 0 < rope_amplitude < math.inf:
        raise ValueError(f"drafter_rope_amplitude is {rope_amplitude!r}; allowed is a finite number above 0")
    return replace(config, sliding_causal=sliding_causal, rope_amplitude=float(rope_amplitude))


def _check_pair(target: KimiConfig, drafter: DFlashConfig | None, max_length: Any, tokenizer: Tokenizer | None) -> None:
    if not is_integer(max_length) or not 2 <= max_length <= target.max_position_embeddings:
        raise ValueError(
            f"max_length is {max_length!r}; allowed is an integer from 2 to {target.max_position_embeddings} "
            "(the target's max_position_embeddings)"
        )
    if tokenizer is not None and tokenizer.vocab_size > target.vocab_size:
        raise ValueError(f"tokenizer has {tokenizer.vocab_size} ids; the target allows {target.vocab_size}")
    if drafter is None:
        return
    for name, needed in (
        ("vocab_size", target.vocab_size),
        ("hidden_size", target.hidden_size),
        ("num_target_layers", target.num_hidden_layers),
    ):
        if getattr(drafter, name) != needed:
            raise ValueError(f"drafter: {name} is {getattr(drafter, name)}; this target allows {needed}")
