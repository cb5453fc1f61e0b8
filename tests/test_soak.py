"""Ten thousand rounds in one process: memory stays where it is, and nothing is compiled again."""

import collections
import gc
import itertools
import resource
from pathlib import Path

import jax
import numpy as np
from small_pairs import make_pair

from ddtree_jax import DecodeConfig, SamplingParams
from ddtree_jax.decode import MODES
from ddtree_jax.generate import STREAM_ROUNDS

NUM_ROUNDS = 10_000
MAX_LENGTH = 509
COMPILED = "/jax/core/compile/backend_compile_duration"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_ten_thousand_rounds():
    # One width of chunks: fewer programs.
    engine = make_pair("least", max_length=MAX_LENGTH, prefix_cache=True, prefill_chunk=16).engine
    decodes = [DecodeConfig(mode=mode, budget=7) for mode in MODES]
    random, seeds = np.random.default_rng(3), itertools.count()

    def cycle() -> int:
        """All modes, in batches and streams, with prompts of many lengths; gives the rounds that it took."""
        num_rounds = 0
        for decode in decodes:
            prompts = [random.integers(0, 19, random.integers(1, 60)).tolist() for _ in range(2)]
            params = SamplingParams(
                max_new_tokens=440,
                temperature=0.9,
                seed=next(seeds),
                ignore_eos=True,
                logprobs=True,
                frequency_penalty=0.1,
            )
            done = engine.generate(prompts, params, decode)
            num_rounds += max(one.stats.rounds for one in done)
            again = engine.generate([prompts[0] + done[0].token_ids[:20], prompts[1]], params, decode)
            num_rounds += max(one.stats.rounds for one in again)
            for _ in zip(engine.stream(prompts[0], params, decode), range(5), strict=False):
                num_rounds += STREAM_ROUNDS
        return num_rounds

    counter = collections.Counter()
    for _ in range(2):
        cycle()
    jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **kwargs: counter.update([event]))
    gc.collect()
    arrays_before, resident_before = sorted(array.nbytes for array in jax.live_arrays()), resident_bytes()
    num_rounds = 0
    while num_rounds < NUM_ROUNDS:
        num_rounds += cycle()
    gc.collect()
    assert counter[COMPILED] == 0
    assert sorted(array.nbytes for array in jax.live_arrays()) == arrays_before
    growth = resident_bytes() - resident_before
    print(f"{num_rounds} rounds, {growth / 1e6:.1f} MB more resident")
    assert growth < 20e6
