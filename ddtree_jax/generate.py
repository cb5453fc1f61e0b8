"""The engine: loads a target and a drafter, and turns prompts into completions with one compiled loop a batch."""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ddtree_jax import checkpoint, decode, dflash, hosts, kimi
from ddtree_jax.arguments import shown
from ddtree_jax.completion import Completion, IdStream, RoundTrace, StopFinder, TextStream
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.decode import DecodeConfig, Models, Plan, State
from ddtree_jax.engine_options import DTYPES, check_loading, check_pair, check_prefill
from ddtree_jax.output import Progress, Tokens, completions, trace
from ddtree_jax.placement import Placement, constrained
from ddtree_jax.prefix_cache import PrefixCache
from ddtree_jax.prompts import Limits, Prompt, read_prompts, read_token_ids
from ddtree_jax.sampling_params import SamplingArrays, SamplingParams
from ddtree_jax.sharding import make_mesh
from ddtree_jax.tokenizer import Tokenizer
from ddtree_jax.vocabulary import Place

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Sequences a batch is filled up to; the last is the largest batch."""

PREFILL_BUCKETS = (16, 64, 256, 1024)
"""Tokens that a chunk of prefill is filled up to, if it is narrower than ``prefill_chunk``."""

ALL_ROUNDS = 2**31 - 1
STREAM_ROUNDS = 4
"""Rounds between two returns to the host while streaming."""


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
        prefill_chunk: int = 256,
        prefix_cache: bool = False,
        has_kernels: bool = True,
    ):
        """``has_kernels`` allows kernels for trees, draws and committed rows; attention and experts are the models' own."""
        check_prefill(prefill_chunk, prefix_cache)
        check_pair(target.config, drafter and drafter.config, max_length, tokenizer)
        if drafter is not None and target.capture != drafter.config.target_layer_ids:
            raise ValueError(
                f"target captures layers {target.capture}; the drafter allows {drafter.config.target_layer_ids} alone"
            )
        self.models = Models(target, drafter)
        self.max_length = max_length
        self.tokenizer = tokenizer
        self._placement = placement = Placement(mesh)
        self._place = Place(mesh=mesh, has_kernels=has_kernels, drafter_rows=placement.by_heads.spec)
        self._vocab_size = target.config.vocab_size
        self._chunk_widths = (*(width for width in PREFILL_BUCKETS if width < prefill_chunk), prefill_chunk)
        self._prefix_cache = PrefixCache(placement.put) if prefix_cache else None
        self._init_context = jax.jit(constrained(placement, decode.init_context), static_argnums=(1, 2))
        self._prefill = jax.jit(_prefill, static_argnums=0, donate_argnames="context")
        self._begin = jax.jit(constrained(placement, decode.begin), static_argnames=("plan", "capacity"))
        self._decode_rounds = jax.jit(
            constrained(placement, decode.decode_rounds), static_argnames="plan", donate_argnames="state"
        )
        out = {"out_shardings": placement.whole}
        self._draft_logits = jax.jit(decode.draft_once, static_argnames=("depth", "mask_token_id"), **out)
        self._unembed = jax.jit(kimi.Kimi.unembed, **out)
        self._no_round = jax.jit(decode.no_round, static_argnums=(0, 1), **out)

    @classmethod
    def load(
        cls,
        target: str | Path,
        drafter: str | Path | None = None,
        *,
        mesh: str | None = None,
        max_length: int = 4096,
        dtype: str = "bfloat16",
        prefill_chunk: int = 256,
        prefix_cache: bool = False,
        kernels: bool | None = None,
        drafter_rope_amplitude: float | None = None,
        drafter_sliding_causal: bool = True,
    ) -> "Engine":
        """Loads converted checkpoints (`checkpoints_tools.convert`).

        Args:
          target, drafter: folders. Without a drafter only mode "ar" can be used.
          mesh: axis sizes such as "tensor=8" or "expert=4,tensor=2"; one device by default. With several processes
            (`hosts.join`) the devices of all of them, and each makes the same calls and gets all completions.
          max_length: the most tokens of prompt and completion together; caches are that long.
          dtype: of weights and activations, "float32" or "bfloat16".
          prefill_chunk: the most tokens of each prompt that one pass takes in.
          prefix_cache: whether the caches of a batch are kept until the next one, whose prompts skip what they have in
            common with a sequence of it. In bfloat16 its rows may differ from those of a prefill by rounding.
          kernels: whether attention and experts are computed by GPU kernels (True) or in plain JAX (False). None takes the
            kernels where they run: on a GPU, in bfloat16, with shapes that they take. With them, small projections of few
            tokens and the drafter's attention take theirs if they can, on which True does not insist. Kernels for trees,
            draws and committed rows give what plain JAX gives, and are taken wherever they run, unless this is False.
          drafter_rope_amplitude: factor on the drafter's cos and sin, instead of what its config gives; some published
            drafters want 0.1 ln(factor) + 1.
          drafter_sliding_causal: whether sliding layers of the drafter are causal inside a block.

        Raises:
          ValueError: a wrong argument, a folder that is no finished checkpoint, or two models that do not fit.
        """
        options = mesh, max_length, dtype, prefill_chunk, prefix_cache, kernels, drafter_rope_amplitude
        hosts.check_same("options of Engine.load", lambda: (*options, drafter is None, drafter_sliding_causal))
        check_loading(
            target,
            drafter,
            dtype=dtype,
            prefill_chunk=prefill_chunk,
            prefix_cache=prefix_cache,
            kernels=kernels,
            drafter_rope_amplitude=drafter_rope_amplitude,
            drafter_sliding_causal=drafter_sliding_causal,
        )
        device_mesh = make_mesh(mesh)
        read = functools.partial(_read_checkpoints, target, drafter, device_mesh, max_length)
        found = hosts.check_same("checkpoints", lambda: read(drafter_rope_amplitude, drafter_sliding_causal))
        target_config, drafter_config, parameters = found.target, found.drafter, kimi.parameters(found.target)
        has_kernels = _choose_kernels(kernels, target_config, device_mesh, dtype)
        arrays = checkpoint.load(target, parameters, device_mesh, DTYPES[dtype], as_blocks=has_kernels)
        if has_kernels:
            kimi.pack_experts(arrays, device_mesh)
            kimi.pack_projections(arrays, target_config, device_mesh)
        capture = drafter_config.target_layer_ids if drafter_config else ()
        drafter_model = None
        if drafter_config:
            drafter_arrays = checkpoint.load(drafter, dflash.parameters(drafter_config), device_mesh, DTYPES[dtype])
            if has_kernels:
                dflash.pack_projections(drafter_arrays, drafter_config, device_mesh)
            drafter_model = dflash.DFlash(drafter_config, drafter_arrays, device_mesh, has_kernels)
        return cls(
            kimi.Kimi(target_config, arrays, capture, device_mesh, has_kernels),
            drafter_model,
            mesh=device_mesh,
            max_length=max_length,
            tokenizer=found.tokenizer,
            prefill_chunk=prefill_chunk,
            prefix_cache=prefix_cache,
            has_kernels=kernels is not False,
        )

    def generate(
        self,
        prompts: Any,
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        decode: DecodeConfig = DecodeConfig(),
        *,
        thinking: bool = True,
    ) -> list[Completion]:
        """Completes prompts, at most 64, all in one batch.

        Args:
          prompts: a string, a list of strings, token ids, a list of lists of token ids, or one conversation as chat messages.
          sampling: for all prompts, or one a prompt.
          decode: how to speculate; the output does not depend on it.
          thinking: for chat messages, whether the model is asked to think first.

        Raises:
          ValueError: a wrong argument, named. Nothing has been computed then.
        """
        job = self._job(functools.partial(self._read_prompts, prompts, thinking), sampling, decode)
        rounds = STREAM_ROUNDS if any(params.stop for params in job.params) else ALL_ROUNDS
        return self._completions(job, deque(self._run(job, rounds), maxlen=1).pop())

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
        return self._pieces(self._job(functools.partial(self._one_prompt, prompt, thinking), sampling, decode))

    def trace(
        self, prompt: Any, sampling: SamplingParams = SamplingParams(), decode: DecodeConfig = DecodeConfig()
    ) -> Iterator[RoundTrace]:
        """Decodes one prompt a round at a time and yields what each round drafted and accepted."""
        job = self._job(functools.partial(self._one_prompt, prompt, True), sampling, decode)
        return (traced for progress in self._run(job, 1) if (traced := trace(progress.state)) is not None)

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """The target's teacher-forced logits, float32 [T, V]: row t is the prediction behind token t."""
        token_ids = self._token_ids(token_ids)
        with self._precision():
            logits = [
                np.asarray(self._unembed(self.models.target, hidden_BTD))[0]
                for _, hidden_BTD in self._prefill_chunks(self._new_context(1), [token_ids])
            ]
        return np.concatenate(logits)[: len(token_ids)]

    def draft(self, token_ids: Sequence[int]) -> np.ndarray:
        """The drafter's logits with the last token as root, float32 [block - 1, V]: row j is for position len + j."""
        config = self._drafter_config("draft")
        token_ids = self._token_ids(token_ids)
        root_B = np.array(token_ids[-1:], np.int32)
        with self._precision():
            context, _ = deque(self._prefill_chunks(self._new_context(1), [token_ids[:-1]]), maxlen=1).pop()
            logits_BLV = self._draft_logits(
                self.models,
                self._placement.put(root_B),
                context.length_B,
                context.drafter_cache,
                depth=config.depth,
                mask_token_id=config.mask_token_id,
            )
        return np.asarray(logits_BLV)[0]

    def trace_rounds(self, decode_config: DecodeConfig, batch: int) -> jax.stages.Traced:
        """The loop's program for ``batch`` sequences, to be lowered and compiled; the models' arrays may be abstract."""
        plan = self._plan(decode_config, False)
        sampling = jax.eval_shape(lambda: self._sampling_arrays([SamplingParams()] * batch, [[0]] * batch))
        begin = functools.partial(decode.begin, plan=plan.undrafted, capacity=self.max_length)
        context = jax.eval_shape(lambda models: decode.init_context(models, batch, self.max_length), self.models)
        state = jax.eval_shape(begin, self.models, context, sampling)
        state = replace(state, last=jax.eval_shape(functools.partial(decode.no_round, batch, plan)))
        inputs = self._placement.describe((sampling, np.int32(0), np.int32(0)))
        with self._precision():
            return self._decode_rounds.trace(self.models, self._placement.describe_batch(state), *inputs, plan=plan)

    def _read_prompts(self, prompts: Any, thinking: Any) -> list[Prompt]:
        if not isinstance(thinking, bool):
            raise ValueError(f"thinking is {shown(thinking)}; allowed are True and False")
        limits = Limits(self._vocab_size, self.max_length - 1, f"max_length {self.max_length}, less 1 new token")
        return read_prompts(prompts, self.tokenizer, thinking, limits, BATCH_BUCKETS[-1])

    def _one_prompt(self, prompt: Any, thinking: Any) -> list[Prompt]:
        prompts = self._read_prompts(prompt, thinking)
        if len(prompts) != 1:
            raise ValueError(f"prompt holds {len(prompts)} prompts; allowed is 1")
        return prompts

    def _token_ids(self, token_ids: Any) -> list[int]:
        limits = Limits(self._vocab_size, self.max_length, "max_length")
        return hosts.check_same("token_ids", functools.partial(read_token_ids, token_ids, "token_ids", limits))

    def _drafter_config(self, needed_by: str) -> DFlashConfig:
        if self.models.drafter is None:
            raise ValueError(f"{needed_by} needs a drafter, but the engine was loaded without one; allowed: mode 'ar'")
        return self.models.drafter.config

    def _precision(self) -> AbstractContextManager:
        """float32 means float32: without this, a GPU rounds the factors of float32 products to TF32."""
        is_float32 = self.models.target.norm_D.dtype == jnp.float32
        return jax.default_matmul_precision("highest" if is_float32 else "default")

    def _job(self, read_prompts: Callable[[], list[Prompt]], sampling: Any, decode_config: DecodeConfig) -> "_Job":
        """Checks everything that can be wrong before anything is computed."""

        def check() -> tuple[list[Prompt], list[SamplingParams], DecodeConfig]:
            prompts = read_prompts()
            return prompts, self._params(sampling, len(prompts), decode_config), decode_config

        prompts, params, _ = hosts.check_same("prompts or options", check)
        plan = self._plan(decode_config, any(one.top_logprobs for one in params))
        arrays = self._sampling_arrays(params, [prompt.token_ids for prompt in prompts])
        return _Job(prompts, params, self._placement.put(arrays), plan, min(decode_config.budget, plan.num_nodes - 1))

    def _params(self, sampling: Any, num_prompts: int, decode_config: Any) -> list[SamplingParams]:
        """One a prompt, checked, and whether there is a way to decode."""
        if not isinstance(decode_config, DecodeConfig):
            raise ValueError(f"decode is {shown(decode_config)}; a DecodeConfig is needed")
        params = [sampling] * num_prompts if isinstance(sampling, SamplingParams) else sampling
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise ValueError(f"sampling is {shown(sampling)}; allowed is a SamplingParams, or a list of one a prompt")
        if len(params) != num_prompts:
            raise ValueError(f"sampling has {len(params)} entries; allowed are {num_prompts}, one a prompt")
        for one in params:
            for name, ids in (("stop_token_ids", one.stop_token_ids), ("logit_bias", one.logit_bias)):
                for token in ids:
                    if not 0 <= token < self._vocab_size:
                        raise ValueError(f"{name} has {shown(token)}; allowed are 0 to {self._vocab_size - 1}")
            if one.stop and self.tokenizer is None:
                raise ValueError(
                    f"stop is {shown(one.stop)}, but the checkpoint has no tokenizer; allowed: stop_token_ids"
                )
        return list(params)

    def _plan(self, decode_config: DecodeConfig, wants_top_logprobs: bool) -> Plan:
        depth, mask_token_id = 0, 0
        if decode_config.mode != "ar" and decode_config.budget > 0:
            drafter_config = self._drafter_config(f"mode {decode_config.mode!r}")
            depth, mask_token_id = drafter_config.depth, drafter_config.mask_token_id
        return Plan.of(decode_config, depth, mask_token_id, self._vocab_size, wants_top_logprobs, self._place)

    def _sampling_arrays(self, params: Sequence[SamplingParams], token_ids: list[list[int]]) -> SamplingArrays:
        return SamplingArrays.stack(
            params,
            token_ids,
            batch=next(size for size in BATCH_BUCKETS if size >= len(params)),
            max_length=self.max_length,
            vocab_size=self._vocab_size,
            eos_token_ids=self.models.target.config.eos_token_ids,
        )

    def _new_context(self, batch: int) -> decode.Context:
        return self._init_context(self.models, batch, self.max_length)

    def _prefill_chunks(
        self, context: decode.Context, prompts: list[list[int]]
    ) -> Iterator[tuple[decode.Context, jax.Array]]:
        """Appends the prompts to a context; yields it as it grows, and the hidden states of each chunk."""
        longest = max(1, *map(len, prompts))
        start = 0
        while start < longest:
            width = next((width for width in self._chunk_widths if width >= longest - start), self._chunk_widths[-1])
            chunks = [prompt[start : start + width] for prompt in prompts]
            token_BT = np.array([chunk + [0] * (width - len(chunk)) for chunk in chunks], np.int32)
            count_B = np.array([len(chunk) for chunk in chunks], np.int32)
            context, hidden_BTD = self._prefill(
                self._placement, self.models, context, *self._placement.put((token_BT, count_B))
            )
            yield context, hidden_BTD
            start += width

    def _context_of_prefixes(self, job: "_Job") -> tuple[decode.Context, list[int]]:
        """Where the prompts can go on from, and how many tokens of each lie behind that already."""
        batch = len(job.sampling.key_B2)
        prefixes = None
        if self._prefix_cache is not None:
            prefixes = self._prefix_cache.take([prompt.token_ids for prompt in job.prompts], batch)
        if prefixes is None:
            return self._new_context(batch), [0] * batch
        target = self.models.target
        hidden_BD = np.zeros((batch, target.config.hidden_size), target.norm_D.dtype)
        length_B, hidden_BD = self._placement.put((np.array(prefixes.lengths, np.int32), hidden_BD))
        caches = {"target_cache": prefixes.target_cache, "drafter_cache": prefixes.drafter_cache}
        return decode.Context(length_B=length_B, hidden_BD=hidden_BD, **caches), prefixes.lengths

    def _run(self, job: "_Job", rounds_per_slice: int) -> Iterator[Progress]:
        """Prefills, then yields after each slice of rounds until every sequence has finished."""
        started = time.perf_counter()
        finders = [StopFinder(self.tokenizer, one.stop) if one.stop else None for one in job.params]
        with self._precision():
            context, num_cached = self._context_of_prefixes(job)
            token_ids = [prompt.token_ids for prompt in job.prompts] + [[]] * (len(num_cached) - len(job.prompts))
            rests = [ids[num:] for ids, num in zip(token_ids, num_cached, strict=True)]
            num_chunks, (context, _) = deque(enumerate(self._prefill_chunks(context, rests), 1), maxlen=1).pop()
            # The caches need no part in drawing the first token: they move from the context to the state as they are. Nor
            # does the shape of rounds, so that all plans share the program.
            bare = replace(context, target_cache=[], drafter_cache=[])
            state = self._begin(self.models, bare, job.sampling, plan=job.plan.undrafted, capacity=self.max_length)
            caches = {"target_cache": context.target_cache, "drafter_cache": context.drafter_cache}
            state = replace(state, last=self._no_round(len(num_cached), job.plan), **caches)
            budget = self._placement.put(np.int32(job.budget))
        jax.block_until_ready(state.root_B)
        prefilled = time.perf_counter()
        limit = 0
        while True:
            state, tokens = self._stop_at_strings(finders, state)
            yield Progress(state, tokens, num_chunks, num_cached, prefilled - started, time.perf_counter() - prefilled)
            if not np.any(tokens.finish_B == decode.RUNNING):
                break
            limit = min(limit + rounds_per_slice, ALL_ROUNDS)
            with self._precision():
                state = self._decode_rounds(
                    self.models, state, job.sampling, budget, self._placement.put(np.int32(limit)), plan=job.plan
                )
            jax.block_until_ready(state.root_B)
        if self._prefix_cache is not None:
            known = self._committed(job, tokens, np.asarray(state.length_B))
            self._prefix_cache.keep(known, state.target_cache, state.drafter_cache)

    def _committed(self, job: "_Job", tokens: Tokens, length_B: np.ndarray) -> list[list[int]]:
        """Tokens that lie in both caches. Plain decoding leaves the drafter's where the prompt ends."""
        is_drafted = self.models.drafter is None or job.plan.depth > 0
        rows = [
            prompt.token_ids + (tokens.ids(index) if is_drafted else []) for index, prompt in enumerate(job.prompts)
        ]
        return [row[:length] for row, length in zip(rows, length_B.tolist(), strict=False)]

    def _stop_at_strings(self, finders: list[StopFinder | None], state: State) -> tuple[State, Tokens]:
        """Ends the sequences whose text holds one of their stop strings; ids alone cannot tell the device."""
        tokens = Tokens.of(state)
        found = [
            index
            for index, finder in enumerate(finders)
            if finder and tokens.finish_B[index] == decode.RUNNING and finder.finds(tokens.ids(index))
        ]
        if not found:
            return state, tokens
        finish_B = tokens.finish_B.copy()
        finish_B[found] = decode.STOPPED
        return replace(state, finish_B=self._placement.put(finish_B)), tokens._replace(finish_B=finish_B)

    def _completions(self, job: "_Job", progress: Progress) -> list[Completion]:
        return completions(progress, job.params, self.models.target.config.eos_token_ids, self.tokenizer)

    def _pieces(self, job: "_Job") -> Iterator[str | list[int]]:
        """What each slice adds."""
        sent = TextStream(self.tokenizer, job.params[0].stop) if job.prompts[0].is_text else IdStream()
        for progress in self._run(job, STREAM_ROUNDS):
            if progress.tokens.finish_B[0] == decode.RUNNING:
                piece = sent.advance(progress.tokens.ids(0))
            else:
                piece = sent.finish(self._completions(job, progress)[0])
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


def _prefill(
    placement: Placement, models: Models, context: decode.Context, token_BT: jax.Array, count_B: jax.Array
) -> tuple[decode.Context, jax.Array]:
    context, hidden_BTD = decode.prefill(models, context, token_BT, count_B)
    return placement.constrain(context), jax.lax.with_sharding_constraint(hidden_BTD, placement.whole)


def _choose_kernels(kernels: bool | None, config: KimiConfig, mesh: Mesh, dtype: str) -> bool:
    """Whether both models may take the kernels: whether the target can. This is the one place that decides."""
    if kernels is False:
        return False
    try:
        if (jax.default_backend(), dtype) != ("gpu", "bfloat16"):
            raise NotImplementedError(f"they need a GPU and bfloat16, not {jax.default_backend()} and {dtype}")
        kimi.check_kernels(config, mesh)
    except NotImplementedError as error:
        if kernels:
            raise ValueError(f"kernels is True, but {error}; allowed are None and False") from error
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Checkpoints:
    """What checked folders say of the models in them; hosts may tell by its ``repr`` that theirs are alike."""

    target: KimiConfig
    drafter: DFlashConfig | None
    tokenizer: Tokenizer | None


def _read_checkpoints(
    target: str | Path,
    drafter: str | Path | None,
    mesh: Mesh,
    max_length: Any,
    drafter_rope_amplitude: float | None,
    drafter_sliding_causal: bool,
) -> _Checkpoints:
    """Reads all but the arrays, and checks that those are there and what they must be."""
    config = KimiConfig.from_hf(checkpoint.read_metadata(target, "kimi").config)
    drafter_config = None
    if drafter is not None:
        drafter_config = _read_drafter_config(drafter, drafter_rope_amplitude, drafter_sliding_causal)
    ranks = Path(target) / "tiktoken.model"
    tokenizer = None
    if ranks.exists():
        try:
            tokenizer = Tokenizer.from_directory(target)
        except OSError as error:
            raise ValueError(f"{ranks} can't be read; a tokenizer is needed ({error.strerror})") from error
    check_pair(config, drafter_config, max_length, tokenizer)
    checkpoint.check(target, kimi.parameters(config), mesh)
    if drafter_config:
        checkpoint.check(drafter, dflash.parameters(drafter_config), mesh)
    return _Checkpoints(config, drafter_config, tokenizer)


def _read_drafter_config(directory: str | Path, rope_amplitude: float | None, sliding_causal: bool) -> DFlashConfig:
    """A drafter's config with the two switches on which published engines differ."""
    config = DFlashConfig.from_hf(checkpoint.read_metadata(directory, "dflash").config)
    amplitude = config.rope_amplitude if rope_amplitude is None else float(rope_amplitude)
    return replace(config, sliding_causal=sliding_causal, rope_amplitude=amplitude)
