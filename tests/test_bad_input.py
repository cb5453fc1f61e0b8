"""Every wrong argument is refused with a ValueError that names it, its value and what is allowed."""

import re
from dataclasses import replace

import jaxtyping
import numpy as np
import pytest

from ddtree_jax import DecodeConfig, Engine, SamplingParams
from ddtree_jax.sharding import make_mesh

pytest_plugins = ["engines"]

ALLOWED_PROMPTS = "a string, a list of strings, token ids, a list of lists of token ids, or chat messages"
FLOAT = "float32"


@pytest.fixture(autouse=True)
def no_type_checks(monkeypatch):
    """Users have no run-time type checks, which would speak first here: the messages must be the package's own."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def refuses(call, *fragments: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fragments[0])) as error:
        call()
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    ("prompts", "fragments"),
    [
        ([], ("prompts is empty", ALLOWED_PROMPTS)),
        ((), ("prompts is empty", ALLOWED_PROMPTS)),
        (None, ("prompts is None", ALLOWED_PROMPTS)),
        (7, ("prompts is 7", ALLOWED_PROMPTS)),
        (b"def", ("prompts is b'def'", ALLOWED_PROMPTS)),
        ({"role": "user"}, ("prompts is {'role': 'user'}", ALLOWED_PROMPTS)),
        ([[]], ("prompts[0] is empty", "1 to 255 token ids")),
        ([[3], []], ("prompts[1] is empty", "1 to 255 token ids")),
        ([3, 512], ("prompts[0]: token id 512 at index 1", "0 to 511")),
        ([[3], [4, 5, -1]], ("prompts[1]: token id -1 at index 2", "0 to 511")),
        (np.array([[3, 2**31 - 1]]), ("prompts[0]: token id 2147483647 at index 1", "0 to 511")),
        ([1] * 256, ("prompts[0] has 256 token ids", "at most 255", "max_length 256")),
        ([[1], [1] * 1000], ("prompts[1] has 1000 token ids", "at most 255", "max_length 256")),
        ([1, [2]], ("prompts[0] is 1", "a list of token ids is needed", ALLOWED_PROMPTS)),
        ([[1], 2], ("prompts[1] is 2", ALLOWED_PROMPTS)),
        ([[1], "def"], ("prompts[1] is 'def'", ALLOWED_PROMPTS)),
        (["def", [1]], ("prompts[0] is 'def'", ALLOWED_PROMPTS)),
        ([1.0, 2.0], ("prompts[0] is 1.0", ALLOWED_PROMPTS)),
        ([[1, 2.5]], ("prompts[0] is [1, 2.5]", ALLOWED_PROMPTS)),
        ([True, False], ("prompts[0] is True", ALLOWED_PROMPTS)),
        (np.ones((2, 3, 1), int), ("prompts[0] is [[1], [1], [1]]", ALLOWED_PROMPTS)),
        ("def f(x):", ("prompts hold text", "no tiktoken.model", "allowed: token ids")),
        (["def", "class"], ("prompts hold text", "no tiktoken.model", "allowed: token ids")),
        ([{"role": "user", "content": "hi"}], ("prompts hold text", "no tiktoken.model", "allowed: token ids")),
    ],
)
def test_prompts(golden_engine, prompts, fragments):
    refuses(lambda: golden_engine.generate(prompts), *fragments)
    if not fragments[0].startswith("prompts[1]"):  # these take one prompt
        refuses(lambda: golden_engine.stream(prompts), *fragments)
        refuses(lambda: golden_engine.trace(prompts), *fragments)


@pytest.mark.parametrize(
    ("prompts", "fragments"),
    [
        ("", ("prompts[0] is empty", "1 to 255 token ids")),
        (["def", ""], ("prompts[1] is empty", "1 to 255 token ids")),
        ("x = 1\n" * 99, ("prompts[0] has 594 token ids", "at most 255", "max_length 256")),
        (
            [{"role": "user", "content": "hi"}, "def"],
            ("prompts[0] is {'role': 'user', 'content': 'hi'}", ALLOWED_PROMPTS),
        ),
        ([{"role": "robot", "content": "hi"}], ("messages[0]['role'] is 'robot'", "'user'")),
        ([{"role": "user"}], ("messages[0]['content'] is missing", "a string is needed")),
    ],
)
def test_text_prompts(text_engine, prompts, fragments):
    refuses(lambda: text_engine.generate(prompts), *fragments)
    if not fragments[0].startswith("prompts[1]"):
        refuses(lambda: text_engine.stream(prompts), *fragments)


def test_stream_and_trace_take_one_prompt(golden_engine):
    refuses(lambda: golden_engine.stream([[1], [2]]), "prompt holds 2 prompts", "allowed is 1")
    refuses(lambda: golden_engine.trace([[1], [2]]), "prompt holds 2 prompts", "allowed is 1")


@pytest.mark.parametrize("method", ["score", "draft"])
@pytest.mark.parametrize(
    ("token_ids", "fragments"),
    [
        ([], ("token_ids is empty", "1 to 256 token ids")),
        ([3, 4, 512], ("token_ids: token id 512 at index 2", "0 to 511")),
        ([-1], ("token_ids: token id -1 at index 0", "0 to 511")),
        ([1] * 257, ("token_ids has 257 token ids", "at most 256", "max_length")),
        ([1, 2.5], ("token_ids", "2.5")),
        ([1, "a"], ("token_ids", "'a'")),
        ([True], ("token_ids", "True")),
    ],
)
def test_token_ids(golden_engine, method, token_ids, fragments):
    refuses(lambda: getattr(golden_engine, method)(token_ids), *fragments)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("temperature", (-0.1, NAN, INF, -INF, "1", None, True), "a finite number from 0"),
        ("top_p", (0.0, -0.5, 1.1, NAN, INF, "1", None), "a number above 0, up to 1"),
        ("min_p", (-0.1, 1.1, NAN, INF, "0", None), "a number from 0 to 1"),
        ("top_k", (-1, 2**31, 1.5, NAN, "5", None, True), "an integer from 0 to 2147483647"),
        ("seed", (-1, 2**32, 0.5, NAN, "5", None, True), "an integer from 0 to 4294967295"),
        ("max_new_tokens", (0, -1, 2**31, 1.5, INF, "5", None, True), "an integer from 1 to 2147483647"),
        ("min_new_tokens", (-1, 257, 1.5, NAN, "5", None, True), "an integer from 0 to 256"),
        ("stop_token_ids", (5, "5", (1.5,), ("5",), (True,), None), "a list of integers"),
        ("stop", ("stop", b"stop", ("",), (5,), 5, None), "a list of"),
        ("logprobs", (1, "yes", None), "True and False"),
    ],
)
def test_sampling(name, values, allowed):
    for value in values:
        refuses(lambda value=value: SamplingParams(**{name: value}), f"{name} is {value!r}; allowed", allowed)


@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ({"stop_token_ids": (512,)}, ("stop_token_ids has 512", "0 to 511")),
        ({"stop_token_ids": (3, -1)}, ("stop_token_ids has -1", "0 to 511")),
        ({"stop_token_ids": range(16)}, ("stop_token_ids and the model's own are 17", "allowed are 16")),
        ({"stop": ("\n",)}, ("stop is ('\\n',)", "no tokenizer", "allowed: stop_token_ids")),
    ],
)
def test_sampling_for_this_model(golden_engine, settings, fragments):
    refuses(lambda: golden_engine.generate([3, 5], SamplingParams(**settings)), *fragments)


def test_one_sampling_a_prompt(golden_engine):
    one = SamplingParams()
    refuses(lambda: golden_engine.generate([[3], [5]], [one]), "sampling has 1 entries", "allowed are 2, one a prompt")
    refuses(lambda: golden_engine.generate([3], [one, one]), "sampling has 2 entries", "allowed are 1, one a prompt")


@pytest.mark.parametrize("mode", ["tree", "DDTree", "", None, 0])
def test_mode(mode):
    refuses(lambda: DecodeConfig(mode=mode), f"mode is {mode!r}", "'ar', 'chain', 'ddtree'")


@pytest.mark.parametrize("budget", [-1, 256, 1.5, NAN, "7", None, True])
def test_budget(budget):
    refuses(lambda: DecodeConfig(budget=budget), f"budget is {budget!r}", "an integer from 0 to 255")


@pytest.fixture(scope="module")
def target(golden, converted):
    return converted(golden / "target")


@pytest.mark.parametrize(
    ("name", "value", "fragments"),
    [
        ("dtype", "float16", ("dtype is 'float16'", "'float32', 'bfloat16'")),
        ("dtype", "", ("dtype is ''", "'float32', 'bfloat16'")),
        ("max_length", 1, ("max_length is 1", "an integer from 2 to 4096")),
        ("max_length", -5, ("max_length is -5", "an integer from 2 to 4096")),
        ("max_length", 4097, ("max_length is 4097", "an integer from 2 to 4096")),
        ("max_length", True, ("max_length is True", "an integer from 2 to 4096")),
        ("mesh", "data=2", ("mesh is 'data=2'", "tensor and expert")),
        ("mesh", "tensor", ("mesh is 'tensor'", "such as 'tensor=8'")),
        ("mesh", "tensor=0", ("mesh is 'tensor=0'", "tensor and expert")),
        ("mesh", "tensor=-2", ("mesh is 'tensor=-2'", "tensor and expert")),
        ("mesh", "tensor=2,tensor=2", ("mesh is 'tensor=2,tensor=2'", "tensor and expert")),
        ("mesh", "tensor=2,", ("mesh is 'tensor=2,'", "tensor and expert")),
        ("mesh", "tensor=16", ("mesh 'tensor=16' needs 16 devices", "there are 8")),
        ("mesh", "expert=4,tensor=4", ("mesh 'expert=4,tensor=4' needs 16 devices", "there are 8")),
        ("mesh", "tensor=3", ("does not divide over mesh axis tensor=3",)),
        ("drafter_rope_amplitude", 0.0, ("drafter_rope_amplitude is 0.0", "a finite number above 0")),
        ("drafter_rope_amplitude", NAN, ("drafter_rope_amplitude is nan", "a finite number above 0")),
    ],
)
def test_load(golden, converted, target, name, value, fragments):
    drafter = converted(golden / "drafter")
    refuses(lambda: Engine.load(target, drafter, **({"dtype": FLOAT} | {name: value})), *fragments)


def test_folders(golden, converted, target, tmp_path):
    drafter = converted(golden / "drafter")
    refuses(
        lambda: Engine.load(tmp_path / "none", dtype=FLOAT), "none is not a folder", "a converted checkpoint is needed"
    )
    refuses(lambda: Engine.load(tmp_path, dtype=FLOAT), "metadata.json", "a converted checkpoint is needed")
    refuses(lambda: Engine.load(golden / "target", dtype=FLOAT), "Hugging Face checkpoint", "checkpoints_tools.convert")
    refuses(lambda: Engine.load(drafter, dtype=FLOAT), "holds a 'dflash' model", "'kimi' is needed")
    refuses(lambda: Engine.load(target, target, dtype=FLOAT), "holds a 'kimi' model", "'dflash' is needed")


@pytest.mark.parametrize(("name", "needed"), [("vocab_size", 512), ("hidden_size", 128), ("num_target_layers", 6)])
def test_drafter_of_another_target(golden_engine, monkeypatch, name, needed):
    target, drafter = golden_engine.models
    other = replace(drafter.config, **{name: needed + 1})
    monkeypatch.setattr(drafter, "config", other)
    refuses(
        lambda: Engine(target, drafter, mesh=make_mesh(None), max_length=golden_engine.max_length),
        f"drafter: {name} is {needed + 1}",
        f"allows {needed}",
    )


def test_drafting_without_a_drafter(golden_engine):
    engine = Engine(golden_engine.models.target, None, mesh=make_mesh(None), max_length=golden_engine.max_length)
    for mode in ("chain", "ddtree"):
        refuses(
            lambda mode=mode: engine.generate([3], decode=DecodeConfig(mode=mode)),
            f"mode '{mode}'",
            "allowed: mode 'ar'",
        )
    refuses(lambda: engine.draft([3]), "draft needs a drafter", "allowed: mode 'ar'")


def test_nothing_has_run_when_an_argument_is_refused(golden_engine, monkeypatch):
    """Errors come before the first program, and from `stream` and `trace` before the first piece is asked for."""
    monkeypatch.setattr(golden_engine, "_init_context", None)
    for call in (golden_engine.generate, golden_engine.stream, golden_engine.trace):
        refuses(lambda call=call: call([512]), "prompts[0]: token id 512")
