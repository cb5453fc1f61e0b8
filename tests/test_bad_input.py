"""Wrong inputs get the messages of `bad_inputs`, word for word, and cost nobody anything: the engine goes on as before."""

import copy
import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bad_inputs
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from absl import flags
from safetensors.numpy import save_file
from small_pairs import make_pair

from checkpoints_tools.convert import convert
from checkpoints_tools.key_map import dflash_key_map
from ddtree_jax import DecodeConfig, Engine, SamplingParams, checkpoint
from ddtree_jax.config import DFlashConfig
from ddtree_jax.sharding import make_mesh
from ddtree_jax.tokenizer import Tokenizer
from experiments import generate

pytest_plugins = ["engines"]

PROMPT = [3, 4, 6, 9]
PARAMS = SamplingParams(max_new_tokens=12, temperature=0.7, seed=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def no_type_checks(monkeypatch):
    """Users have no run-time type checks, which would speak first here: the messages must be the package's own."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Ids 0 to 31, a stop id 5, no tokenizer; it has answered once and keeps the caches of that."""
    engine = make_pair("least", prefix_cache=True).engine
    engine.generate(PROMPT, PARAMS)
    return engine


@pytest.fixture(scope="module")
def tokens(engine) -> list[int]:
    return engine.generate(PROMPT, PARAMS)[0].token_ids


def refuses(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def refuses_everywhere(engine: Engine, prompts: Any, message: str, **arguments: Any) -> None:
    """Refused by the calls themselves, before anybody asks for a first piece."""
    for call in (engine.generate, engine.stream, engine.trace):
        if call != engine.trace or "thinking" not in arguments:
            refuses(lambda call=call: call(prompts, **arguments), message)


def works(engine: Engine, tokens: list[int]) -> None:
    """The tokens of before, and the caches that the last good call left are there still."""
    done = engine.generate(PROMPT, PARAMS)[0]
    assert done.token_ids == tokens
    assert done.stats.cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize(("prompts", "message"), bad_inputs.PROMPTS)
def test_prompts(engine, tokens, prompts, message):
    refuses_everywhere(engine, prompts, message)
    works(engine, tokens)


@pytest.mark.parametrize(("arguments", "message"), [*bad_inputs.ARGUMENTS, *bad_inputs.THINKING])
def test_arguments(engine, tokens, arguments, message):
    refuses_everywhere(engine, PROMPT, message, **arguments)
    works(engine, tokens)


@pytest.mark.parametrize("method", ["score", "draft"])
@pytest.mark.parametrize(("token_ids", "message"), bad_inputs.TOKEN_IDS)
def test_token_ids(engine, tokens, method, token_ids, message):
    refuses(lambda: getattr(engine, method)(token_ids), message)
    works(engine, tokens)


@pytest.mark.parametrize(("prompts", "message"), bad_inputs.TEXTS)
def test_texts(text_engine, prompts, message):
    refuses_everywhere(text_engine, prompts, message)


@pytest.mark.parametrize(("settings", "message"), bad_inputs.SETTINGS)
def test_settings(settings, message):
    refuses(lambda: SamplingParams(**settings), message)


@pytest.mark.parametrize(("settings", "message"), bad_inputs.DECODE)
def test_decode(settings, message):
    refuses(lambda: DecodeConfig(**settings), message)


def test_several_prompts_where_one_is_meant(engine, tokens):
    for call in (engine.stream, engine.trace):
        refuses(lambda call=call: call([PROMPT, PROMPT]), "prompt holds 2 prompts; allowed is 1")
    refuses(lambda: engine.generate([PROMPT, PROMPT], [PARAMS]), "sampling has 1 entries; allowed are 2, one a prompt")
    works(engine, tokens)


def test_drafting_without_a_drafter(engine):
    alone = Engine(engine.models.target, None, mesh=make_mesh(None), max_length=48)
    needs = "needs a drafter, but the engine was loaded without one; allowed: mode 'ar'"
    refuses_everywhere(alone, PROMPT, f"mode 'ddtree' {needs}")
    refuses_everywhere(alone, PROMPT, f"mode 'chain' {needs}", decode=DecodeConfig(mode="chain"))
    refuses(lambda: alone.draft(PROMPT), f"draft {needs}")


def test_nothing_has_run_when_an_argument_is_refused(engine, monkeypatch):
    for program in ("_init_context", "_prefill", "_begin", "_decode_rounds"):
        monkeypatch.setattr(engine, program, None)
    refuses_everywhere(engine, [32], "prompts[0] has 32 at index 0; allowed are token ids from 0 to 31")


# What looks odd and is allowed.


def test_numbers_of_numpy_are_numbers(engine, tokens):
    params = SamplingParams(
        max_new_tokens=np.uint8(12), temperature=np.float64(0.7), seed=np.uint32(5), ignore_eos=np.True_,
        top_k=np.int8(0), stop_token_ids=[np.int64(5)][:0], logit_bias={np.int32(3): np.float16(0)},
    )  # fmt: skip
    decode = DecodeConfig(mode=np.str_("ddtree"), budget=np.int8(15))
    prompts = (np.array(PROMPT), np.array([PROMPT], np.uint8), [np.int16(token) for token in PROMPT])
    for prompt in prompts:
        assert engine.generate(prompt, params, decode)[0].token_ids == tokens


@pytest.mark.parametrize("tiny", [5e-324, 1e-45, 1e-38, np.finfo(np.float32).tiny])
def test_the_smallest_numbers_are_near_greedy(engine, tiny):
    """Where float32 has no such number: a temperature is 0 then, and of a nucleus the best token is left."""
    greedy = engine.generate(PROMPT, SamplingParams(max_new_tokens=12))[0].token_ids
    for settings in ({"temperature": tiny}, {"temperature": 1.0, "top_p": tiny}):
        params = SamplingParams(max_new_tokens=12, **settings)
        assert engine.generate(PROMPT, params)[0].token_ids == greedy, settings


# Arguments belong to the caller.


def test_arguments_are_left_as_they_are(engine):
    stop, bias = [7, 8], {3: 0.5, 4: -0.5}
    prompts, sampling = [[3, 4]], [SamplingParams(stop_token_ids=stop, logit_bias=bias)]
    before = copy.deepcopy((stop, bias, prompts, sampling))
    engine.generate(prompts, sampling)
    assert (stop, bias, prompts, sampling) == before
    for copied in (pickle.loads(pickle.dumps(sampling)), copy.deepcopy(sampling)):
        assert copied == sampling
    assert hash(sampling[0]) == hash(before[3][0])


def test_a_running_stream_is_nobodys_to_change(engine, tokens):
    """Neither the arguments that it was given, nor refused calls, nor other sequences on the same engine."""
    prompt, stop, bias = list(PROMPT), [31], {5: 0.0}
    sampling = [
        SamplingParams(
            max_new_tokens=12, temperature=0.7, seed=5, ignore_eos=True, stop_token_ids=stop, logit_bias=bias
        )
    ]
    assert 31 not in tokens
    stream = engine.stream(prompt, sampling)  # not begun
    prompt[:], stop[:], bias[tokens[0]] = [8], [tokens[1]], -100.0
    sampling[0] = SamplingParams()
    pieces = [next(stream)]
    refuses_everywhere(engine, prompt + [99], "prompts[0] has 99 at index 1; allowed are token ids from 0 to 31")
    other = engine.stream(PROMPT, PARAMS)
    assert engine.generate(PROMPT, PARAMS)[0].token_ids == tokens
    pairs = list(itertools.zip_longest(stream, other, fillvalue=[]))
    assert sum((one for one, _ in pairs), pieces[0]) == tokens
    assert sum((two for _, two in pairs), []) == tokens


def test_stop_strings_of_a_running_stream_stay():
    engine, decode, stop = make_pair("text").engine, DecodeConfig(mode="ar"), ["d\n"]
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, ignore_eos=True, stop=stop)
    text = engine.generate("ab", params, decode)[0].text
    stream = engine.stream("ab", params, decode)
    stop[:] = [text[0]]
    assert len(text) > 3
    assert "".join(stream) == text


# Engines, their folders, and pairs that do not fit.


@pytest.fixture
def no_weights(monkeypatch):
    """No part of a checkpoint can be read: whatever is refused is refused before that."""
    monkeypatch.setattr(checkpoint, "_restore", None)


@pytest.fixture(scope="module")
def folders(golden, converted) -> dict[str, Path]:
    return {name: converted(golden / name) for name in ("target", "drafter")}


@pytest.mark.parametrize(("arguments", "message"), bad_inputs.LOAD)
def test_load(folders, no_weights, arguments, message):
    refuses(lambda: Engine.load(**(folders | {"max_length": 64} | arguments)), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [case for case in bad_inputs.LOAD if case.values[0].keys() & {"prefill_chunk", "prefix_cache", "max_length"}],
)
def test_engine(engine, arguments, message):
    """The same arguments, where an engine is built of models; this one's have 512 positions."""
    message = message.replace("4096 (the target's", "512 (the target's")
    refuses(lambda: Engine(*engine.models, **({"mesh": make_mesh(None), "max_length": 48} | arguments)), message)


def test_a_tokenizer_needs_a_text_for_every_id(engine):
    for num_tokens, num_ids in ((3, 259), (400, 656)):
        tokenizer = Tokenizer({bytes([number % 256] * (1 + number // 256)): number for number in range(num_tokens)})
        refuses(
            lambda tokenizer=tokenizer: Engine(
                *engine.models, mesh=make_mesh(None), max_length=48, tokenizer=tokenizer
            ),
            f"tokenizer has {num_ids} ids; this target allows 32",
        )


def test_folders(golden, folders, tmp_path, no_weights):
    target, drafter = folders["target"], folders["drafter"]
    wanted, unfinished, odd = "a converted checkpoint is needed", tmp_path / "unfinished", tmp_path / "odd"
    for folder in (unfinished / "layer_0", odd):
        folder.mkdir(parents=True)
    (odd / "metadata.json").write_text("[" * 100_000)
    long = tmp_path / ("x" * 5000)
    for folder, message in (
        (tmp_path / "none", f"is not a folder; {wanted}"),
        (target / "metadata.json", f"is not a folder; {wanted}"),
        (long, f"can't be read; {wanted} (File name too long)"),
        (golden / "target", "is a Hugging Face checkpoint; convert it first: python -m checkpoints_tools.convert"),
        (unfinished, "has no metadata.json: an unfinished conversion; run the converter again to finish it"),
        (drafter, "holds a 'dflash' model; 'kimi' is needed here"),
    ):
        refuses(lambda folder=folder: Engine.load(folder), f"{folder} {message}")
    refuses(lambda: Engine.load(target, target), f"{target} holds a 'kimi' model; 'dflash' is needed here")
    with pytest.raises(RecursionError) as too_deep:
        json.loads((odd / "metadata.json").read_text())
    refuses(lambda: Engine.load(odd), f"{odd / 'metadata.json'}: {too_deep.value}")


def write_drafter(source: Path, folder: Path, **sizes: int) -> Path:
    """A drafter in Hugging Face's layout, like the one in ``source`` but for some sizes, of zeros."""
    values = json.loads((source / "config.json").read_text()) | sizes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    pieces = dflash_key_map(DFlashConfig.from_hf(values)).all_pieces()
    save_file({piece.tensor: np.zeros(piece.shape, jnp.bfloat16) for _, piece in pieces}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("sizes", "message"),
    bad_inputs.cases(
        ({"hidden_size": 96}, "drafter: hidden_size is 96; this target allows 128"),
        ({"vocab_size": 544}, "drafter: vocab_size is 544; this target allows 512"),
        ({"num_target_layers": 61}, "drafter: num_target_layers is 61; this target allows 6"),
        ({"num_target_layers": 4}, "drafter: num_target_layers is 4; this target allows 6"),
    ),
)
def test_a_drafter_of_another_target(golden, folders, tmp_path, no_weights, sizes, message):
    convert(write_drafter(golden / "drafter", tmp_path / "source", **sizes), tmp_path / "drafter")
    refuses(lambda: Engine.load(folders["target"], tmp_path / "drafter"), message)


def test_a_drafter_whose_metadata_was_made_to_fit(golden, folders, tmp_path, no_weights):
    sizes = {"hidden_size": 96, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    out = tmp_path / "drafter"
    convert(write_drafter(golden / "drafter", tmp_path / "source", **sizes), out)
    metadata = json.loads((out / "metadata.json").read_text())
    metadata["config"]["hidden_size"] = 128
    (out / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(ValueError) as error:
        Engine.load(folders["target"], out)
    assert str(error.value).splitlines()[:2] == [
        f"{out}:",
        "  context/fc_YD is bfloat16[288, 96]; bfloat16[384, 128] is needed",
    ]


def test_a_target_of_other_widths(folders, tmp_path, no_weights):
    metadata = json.loads((folders["target"] / "metadata.json").read_text())
    metadata["config"]["text_config"]["intermediate_size"] = 192
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(ValueError) as error:
        Engine.load(tmp_path)
    assert str(error.value).splitlines()[:2] == [
        f"{tmp_path}:",
        "  layer_0/gate_DF is bfloat16[128, 256]; bfloat16[128, 192] is needed",
    ]


# The command line.


@pytest.mark.parametrize(("values", "message"), bad_inputs.FLAGS)
def test_flags(monkeypatch, values, message):
    monkeypatch.setattr(generate, "load_engine", None)
    own = flags.FlagValues()
    generate.define_flags(own)
    own(["generate", *(f"--{name}={value}" for name, value in values.items())])
    with pytest.raises(SystemExit) as error:
        generate.main(["generate"], own)
    assert str(error.value) == message
