"""Target, drafter, verification and whole runs equal the reference's numbers, all through the real converter.

The reference is PyTorch code of others; `golden/README.md` says which, and what each array holds.
"""

import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import DecodeConfig, Engine, SamplingParams, checkpoint, kimi
from ddtree_jax.config import KimiConfig
from ddtree_jax.decode import Context
from ddtree_jax.sharding import make_mesh

pytest_plugins = ["engines"]

LOGITS = {"rtol": 0, "atol": 5e-5}
HIDDEN = {"rtol": 0, "atol": 2e-6}  # the residual stream is small: rms 0.1
MODES = {"ar": "ar", "dflash": "chain", "ddtree": "ddtree"}
CLOSE = 1e-4
"""Nodes whose scores are closer than this many nats may change places: draft logits carry rounding noise."""


@pytest.fixture(scope="module")
def target_numbers(golden) -> dict[str, np.ndarray]:
    with np.load(golden / "target_golden.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def drafter_numbers(golden) -> dict[str, np.ndarray]:
    with np.load(golden / "drafter_golden.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def runs(golden) -> list[dict]:
    return json.loads((golden / "ddtree_runs.json").read_text())


@pytest.fixture(scope="module")
def capturing_target(golden, converted) -> kimi.Kimi:
    """The golden target in float32 whose features are the outputs of all its six layers."""
    folder = converted(golden / "target")
    config = KimiConfig.from_hf(checkpoint.read_metadata(folder).config)
    arrays = checkpoint.load(folder, kimi.parameters(config), make_mesh(None), jnp.float32)
    return kimi.Kimi(config, arrays, capture=tuple(range(6)))


def run_causally(target: kimi.Kimi, token_ids: np.ndarray) -> kimi.TargetOutput:
    """One pass over a whole prompt with nothing cached, op by op."""
    num_tokens = len(token_ids)
    position_T = jnp.arange(num_tokens, dtype=jnp.int32)
    causal_TT = position_T[:, None] >= position_T[None]
    return target(
        jnp.asarray(token_ids)[None],
        position_T[None],
        causal_TT[None],
        jnp.zeros(1, jnp.int32),
        target.init_cache(1, 3),
    )


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_target_logits(golden_engine, target_numbers, prompt):
    logits_TV = golden_engine.score(target_numbers[f"p{prompt}_ids"].tolist())
    assert logits_TV.dtype == np.float32
    np.testing.assert_allclose(logits_TV, target_numbers[f"p{prompt}_logits"], **LOGITS)


def test_residual_stream_and_router(capturing_target, target_numbers, monkeypatch):
    """Every layer's output, the chosen experts and their weights, for the longest prompt."""
    routed = []
    route = kimi.Router.__call__
    monkeypatch.setattr(kimi.Router, "__call__", lambda *args: routed.append(route(*args)) or routed[-1])
    out = run_causally(capturing_target, target_numbers["p2_ids"])
    embedded_TD = capturing_target.embed(jnp.asarray(target_numbers["p2_ids"])[None])
    streams = [embedded_TD[0], *jnp.split(out.features_BTY[0], 6, axis=-1)]
    for layer, (stream_TD, expected_TD) in enumerate(zip(streams, target_numbers["p2_hidden"], strict=True)):
        np.testing.assert_allclose(stream_TD, expected_TD, **HIDDEN, err_msg=f"stream {layer}")
    np.testing.assert_allclose(out.hidden_BTD[0], target_numbers["p2_final_norm"], **LOGITS)

    assert len(routed) == len(out.experts) == 5
    for layer in (1, 5):
        expert_TX, weight_TX = map(np.asarray, routed[layer - 1])
        np.testing.assert_array_equal(out.experts[layer - 1], expert_TX)
        order_TX = np.argsort(expert_TX, axis=1)
        np.testing.assert_array_equal(
            np.take_along_axis(expert_TX, order_TX, axis=1), target_numbers[f"p2_router{layer}_idx"]
        )
        np.testing.assert_allclose(
            np.take_along_axis(weight_TX, order_TX, axis=1),
            target_numbers[f"p2_router{layer}_weight"],
            rtol=0,
            atol=1e-5,
        )


def prefilled(engine: Engine, token_ids: list[int]) -> Context:
    """What the engine's own programs leave in the caches."""
    with engine._precision():
        *_, (context, _) = engine._prefill_chunks(engine._new_context(1), [token_ids])
    return context


def test_latent_cache(golden_engine, target_numbers):
    """Cache rows are the normed latent and the rotated key, pairs interleaved."""
    prompt = target_numbers["p1_ids"].tolist()
    context = prefilled(golden_engine, prompt)
    row_TW = np.asarray(context.target_cache[1][0, : len(prompt)])
    expected_TW = np.concatenate(
        [target_numbers["p1_layer1_kv_latent"], target_numbers["p1_layer1_k_pe_interleaved"]], axis=1
    )
    np.testing.assert_allclose(row_TW, expected_TW, rtol=0, atol=2e-5)


@pytest.mark.parametrize("variant", ["", "sliding_", "amplitude_"])
def test_draft_logits(golden, converted, golden_engine, drafter_numbers, target_numbers, runs, variant):
    """Both rounds of each prompt; the second has the first one's accepted tokens in its context."""
    facts = json.loads((golden / "drafter_golden.json").read_text())
    engine = golden_engine
    if variant:
        engine = Engine.load(
            converted(golden / "target"),
            converted(golden / ("drafter_sliding" if variant == "sliding_" else "drafter")),
            max_length=golden_engine.max_length,
            prefill_chunk=golden_engine._chunk_widths[-1],
            dtype="float32",
            kernels=False,
            drafter_rope_amplitude=facts["rope_amplitude"]["other_amplitude"] if variant == "amplitude_" else None,
        )
    chains = {run["prompt"]: run for run in runs if run["method"] == "dflash" and not run["stop_token_ids"]}
    for fact in facts["prompts"]:
        name, prompt = f"p{fact['prompt']}_round{fact['round']}", target_numbers[f"p{fact['prompt']}_ids"].tolist()
        committed = prompt + chains[fact["prompt"]]["new_ids"][: fact["start"] - len(prompt)]
        root = int(drafter_numbers[f"{name}_block_ids"][0])
        logits_LV = engine.draft([*committed, root])
        assert logits_LV.dtype == np.float32
        np.testing.assert_allclose(logits_LV, drafter_numbers[f"{name}_{variant}logits"], **LOGITS, err_msg=name)


def test_drafter_context_rows(golden_engine, drafter_numbers):
    """Layer-0 keys (normed and rotated) and values of a prompt's context, from the reference's features."""
    features_TY = drafter_numbers["p1_prompt_features"]
    position_T = jnp.arange(len(features_TY), dtype=jnp.int32)
    key_BTJR, value_BTJR = golden_engine.models.drafter.context(jnp.asarray(features_TY)[None], position_T[None])[0]
    np.testing.assert_allclose(key_BTJR[0], drafter_numbers["p1_layer0_k"], **LOGITS)
    np.testing.assert_allclose(value_BTJR[0], drafter_numbers["p1_layer0_v"], **LOGITS)


def settings(run: dict) -> tuple[SamplingParams, DecodeConfig]:
    sampling = SamplingParams(max_new_tokens=64, stop_token_ids=tuple(run["stop_token_ids"] or ()))
    return sampling, DecodeConfig(mode=MODES[run["method"]], budget=15 if run["budget"] is None else run["budget"])


def num_whole_rounds(run: dict) -> int:
    """Rounds until the reference's token buffer gets too short for a whole block, near the end of some runs."""
    is_cut = [a_round["block_cut_short"] for a_round in run.get("rounds", [])]
    return is_cut.index(True) if any(is_cut) else len(run["acceptance_lengths"])


def test_complete_runs(golden_engine, target_numbers, runs):
    """Tokens and accepted lengths of all 33 runs.

    The reference goes on until the last root is committed too, so that it may have one round more, and changes its
    trees where its token buffer ends (`num_whole_rounds`).
    """
    for run in runs:
        prompt = target_numbers[f"p{run['prompt']}_ids"].tolist()
        done = golden_engine.generate([prompt], *settings(run))[0]
        where = {key: run[key] for key in ("prompt", "method", "budget", "stop_token_ids")}
        assert done.token_ids == run["new_ids"], where
        assert done.finish_reason == ("stop" if run["stop_token_ids"] else "length"), where
        lengths, expected = done.stats.accepted_lengths, run["acceptance_lengths"][: num_whole_rounds(run)]
        assert lengths[: len(expected)] == expected[: len(lengths)], where
        assert len(lengths) >= len(expected) - 1, where
        assert done.stats.rounds == len(lengths), where
        if not run["stop_token_ids"]:
            assert done.token_ids == target_numbers[f"p{run['prompt']}_greedy_ids"].tolist(), where
    assert len(runs) == 33


def token_paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """Tokens from the root down to each node but the root, whose number is 0."""
    paths = [()]
    for token, parent in zip(tokens, parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def test_trees_of_complete_runs(golden_engine, target_numbers, runs):
    """Every round's root, tree and accepted path, in order; only nearly equally probable nodes may swap places."""
    num_rounds = num_close = num_swapped = 0
    for run in (run for run in runs if run["method"] == "ddtree"):
        prompt = target_numbers[f"p{run['prompt']}_ids"].tolist()
        ours, reference = list(golden_engine.trace([prompt], *settings(run))), run["rounds"][: num_whole_rounds(run)]
        assert len(ours) >= len(reference) - 1
        for mine, theirs in zip(ours, reference, strict=False):
            where = (run["prompt"], run["budget"], theirs["start"])
            num_rounds += 1
            assert mine.start == theirs["start"], where
            assert mine.token_ids[0] == theirs["root"], where
            tokens, paths = mine.token_ids[1:], token_paths(mine.token_ids[1:], mine.parents)
            their_paths = token_paths(theirs["tokens"], theirs["parents"])
            assert set(paths) == set(their_paths) and len(paths) == len(their_paths), where
            accepted = [paths[node - 1] for node in mine.accepted[1:]]
            assert accepted == [their_paths[node - 1] for node in theirs["accepted_indices"][1:]], where
            assert mine.depths == [0, *map(len, paths)], where
            if theirs["order_margin"] is not None and theirs["order_margin"] < CLOSE:
                num_close += 1
                num_swapped += paths != their_paths
                continue
            assert (tokens, mine.depths[1:], mine.parents[1:], mine.accepted) == (
                theirs["tokens"],
                theirs["depths"],
                theirs["parents"][1:],
                theirs["accepted_indices"],
            ), where
    print(f"{num_rounds} rounds, {num_close} with nodes within {CLOSE} nats, {num_swapped} with nodes swapped")
    assert (num_rounds, num_close, num_swapped) == (581, 1, 0)


NUM_PLACES = 43


@pytest.fixture(scope="module")
def verifications(golden) -> dict[str, np.ndarray]:
    with np.load(golden / "tree_verify.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def verify(golden_engine) -> Callable:
    """Logits and features of tree nodes behind a prefix that lies in the cache; places behind the nodes are padding."""

    @jax.jit
    def run(target, token_BN, position_BN, visible_BNn, length_B, cache):
        out = target(token_BN, position_BN, visible_BNn, length_B, cache)
        return target.unembed(out.hidden_BTD), out.features_BTY

    def verify(prefix: np.ndarray, token_N: np.ndarray, position_N: np.ndarray, visible_NN: np.ndarray):
        num_nodes = len(token_N)
        context = prefilled(golden_engine, prefix.tolist())
        padded_NN = np.eye(NUM_PLACES, dtype=bool)
        padded_NN[:num_nodes, :num_nodes] = visible_NN
        nodes = (
            np.pad(token_N, (0, NUM_PLACES - num_nodes)),
            np.pad(position_N, (0, NUM_PLACES - num_nodes)),
            padded_NN,
        )
        nodes = (jnp.asarray(array)[None] for array in nodes)
        outputs = run(golden_engine.models.target, *nodes, context.length_B, context.target_cache)
        return [np.asarray(output[0, :num_nodes]) for output in outputs]

    return verify


@pytest.mark.parametrize("case", ["t0", "t1", "t2"])
def test_tree_verification(verify, verifications, case):
    """Logits and features equal the reference; hiding a node, or changing its token, reaches its descendants alone."""
    prefix, token_N, position_N, visible_NN = (
        verifications[f"{case}_{name}"] for name in ("prefix_ids", "input_ids", "position_ids", "visibility")
    )
    logits_NV, features_NY = verify(prefix, token_N, position_N, visible_NN)
    np.testing.assert_allclose(logits_NV, verifications[f"{case}_logits"], **LOGITS)
    np.testing.assert_allclose(features_NY, verifications[f"{case}_features"], rtol=0, atol=1e-5)

    node = int(np.argmax(visible_NN[:, 1:].sum(axis=0))) + 1  # the one with most descendants, but for the root
    is_node_N = np.arange(len(token_N)) == node
    descends_N = visible_NN[:, node]
    hidden_NN = np.where(is_node_N[None] & ~is_node_N[:, None], False, visible_NN)
    changed_N = np.where(is_node_N, (token_N + 1) % 500, token_N)
    for expected_N, *changes in (
        (descends_N & ~is_node_N, token_N, position_N, hidden_NN),
        (descends_N, changed_N.astype(np.int32), position_N, visible_NN),
    ):
        difference_N = np.abs(verify(prefix, *changes)[0] - logits_NV).max(axis=1)
        np.testing.assert_array_equal(difference_N > 1e-3, expected_N)
        assert difference_N[~expected_N].max() < 5e-5
    assert case == "t0" or descends_N.sum() > 3  # t0 has leaves alone


def test_what_lies_past_a_length_is_never_read(golden_engine, target_numbers, monkeypatch):
    """Caches that start as NaN give the same tokens, logits and drafts as caches that start as zeros."""
    prompt = target_numbers["p1_ids"].tolist()

    def outputs() -> list:
        sampling = SamplingParams(max_new_tokens=23, logprobs=True)
        completions = [
            golden_engine.generate(prompt, sampling, DecodeConfig(mode=mode, budget=7))[0] for mode in MODES.values()
        ]
        tokens = [(done.token_ids, done.logprobs, done.stats.accepted_lengths) for done in completions]
        return [*tokens, golden_engine.score(prompt).tolist(), golden_engine.draft(prompt).tolist()]

    clean = outputs()
    init_context, poisoned = golden_engine._init_context, []

    def init_poisoned(*args):
        context = init_context(*args)
        caches = context.target_cache, context.drafter_cache
        assert jax.tree.leaves(caches[0]) and jax.tree.leaves(caches[1])
        poisoned.append(jax.tree.map(lambda slots: slots * jnp.nan, caches))
        return type(context)(
            target_cache=poisoned[-1][0],
            drafter_cache=poisoned[-1][1],
            length_B=context.length_B,
            hidden_BD=context.hidden_BD,
        )

    monkeypatch.setattr(golden_engine, "_init_context", init_poisoned)
    assert outputs() == clean
    assert len(poisoned) == 5
