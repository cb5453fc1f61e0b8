"""Wrong inputs, each beside the whole message that it gets. `test_bad_input` tries them."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import DecodeConfig, SamplingParams

NAN, INF = float("nan"), float("inf")
HUGE = 10**30
ENDLESS = 10**5000
"""An integer that Python itself refuses to print."""

FORMS = "a string, a list of strings, token ids, a list of lists of token ids, or chat messages"
NO_FORM = f"; allowed: {FORMS}"
FALSE_OR_TRUE = "; allowed are True and False"
A_LIST = "; a list of token ids is needed"

generator = (token for token in (3, 5))
holds_itself: list[Any] = []
holds_itself.append(holds_itself)
deep: list[Any] = []
for _ in range(100_000):
    deep = [deep]


def cases(*rows: tuple[Any, ...]) -> list[Any]:
    """Rows as parameters of a test, called by their message."""
    return [pytest.param(*row, id=re.sub("0x[0-9a-f]+", "...", row[-1])[:80]) for row in rows]


# Prompts of an engine with ids 0 to 31, 48 tokens and no tokenizer.

IDS = "; allowed are token ids from 0 to 31"
AT_MOST_47 = "token ids; allowed are at most 47 (max_length 48, less 1 new token)"
NO_TOKENIZER = "prompts hold text, but the target's checkpoint has no tiktoken.model; allowed: token ids"

PROMPTS = cases(
    # Nothing.
    ([], f"prompts is empty{NO_FORM}"),
    ((), f"prompts is empty{NO_FORM}"),
    (np.array([], int), f"prompts is empty{NO_FORM}"),
    ([[]], "prompts[0] is empty; allowed are 1 to 47 token ids"),
    ([[3], []], "prompts[1] is empty; allowed are 1 to 47 token ids"),
    (np.zeros((1, 0), int), "prompts[0] is empty; allowed are 1 to 47 token ids"),
    # Other types.
    (None, f"prompts is None{NO_FORM}"),
    (7, f"prompts is 7{NO_FORM}"),
    (2.5, f"prompts is 2.5{NO_FORM}"),
    (True, f"prompts is True{NO_FORM}"),
    (b"def", f"prompts is b'def'{NO_FORM}"),
    (bytearray(b"def"), f"prompts is bytearray(b'def'){NO_FORM}"),
    ({3, 5}, f"prompts is {{3, 5}}{NO_FORM}"),
    ({"role": "user"}, f"prompts is {{'role': 'user'}}{NO_FORM}"),
    ({3: 5}.keys(), f"prompts is dict_keys([3]){NO_FORM}"),
    (generator, f"prompts is {generator!r}{NO_FORM}"),
    (np.array(3), f"prompts is 3{NO_FORM}"),
    (jnp.array([3, 5]), f"prompts is Array([3, 5], dtype=int32){NO_FORM}"),
    ([1.0, 2.0], f"prompts[0] is 1.0{NO_FORM}"),
    ([NAN], f"prompts[0] is nan{NO_FORM}"),
    ([True, False], f"prompts[0] is True{NO_FORM}"),
    ([None, 3], f"prompts[0] is None{NO_FORM}"),
    ([b"def"], f"prompts[0] is b'def'{NO_FORM}"),
    ([{3}], f"prompts[0] is {{3}}{NO_FORM}"),
    (np.array([3.0, 5.0]), f"prompts[0] is 3.0{NO_FORM}"),
    (np.array([True]), f"prompts[0] is True{NO_FORM}"),
    ([3, None], f"prompts[0] has None at index 1{IDS}"),
    ([3, [5]], f"prompts[0] has [5] at index 1{IDS}"),
    ([3, "5"], f"prompts[0] has '5' at index 1{IDS}"),
    ([[3, 2.5]], f"prompts[0] has 2.5 at index 1{IDS}"),
    ([[True]], f"prompts[0] has True at index 0{IDS}"),
    (np.array([[3.0]]), f"prompts[0] has 3.0 at index 0{IDS}"),
    (np.ones((2, 3, 1), int), f"prompts[0] has [1] at index 0{IDS}"),
    (np.array([[3, "x"]], object), f"prompts[0] has 'x' at index 1{IDS}"),
    (holds_itself, f"prompts[0] has [[[[[...]]]]] at index 0{IDS}"),
    (deep, f"prompts[0] has [[[[[...]]]]] at index 0{IDS}"),
    ([[3], 5], f"prompts[1] is 5{A_LIST}"),
    ([[3], "def"], f"prompts[1] is 'def'{A_LIST}"),
    ([[3], None], f"prompts[1] is None{A_LIST}"),
    ([[3], bytearray(b"def")], f"prompts[1] is bytearray(b'def'){A_LIST}"),
    ([[3], {"role": "user"}], f"prompts[1] is {{'role': 'user'}}{A_LIST}"),
    (np.array([[3], None], object), f"prompts[1] is None{A_LIST}"),
    # Ids that are no token's.
    ([3, 32], f"prompts[0] has 32 at index 1{IDS}"),
    ([[3], [4, 5, -1]], f"prompts[1] has -1 at index 2{IDS}"),
    (np.array([[3, 2**31 - 1]]), f"prompts[0] has 2147483647 at index 1{IDS}"),
    ([HUGE], f"prompts[0] has {HUGE} at index 0{IDS}"),
    ([-HUGE], f"prompts[0] has -{HUGE} at index 0{IDS}"),
    ([ENDLESS], f"prompts[0] has int of too many digits at index 0{IDS}"),
    # Too many.
    ([3] * 48, f"prompts[0] has 48 {AT_MOST_47}"),
    ([[3], [3] * 1_000_000], f"prompts[1] has 1000000 {AT_MOST_47}"),
    (range(10**12), f"prompts[0] has 1000000000000 {AT_MOST_47}"),
    ([[3]] * 65, "prompts holds 65 prompts; allowed are at most 64"),
    (["def"] * 1_000_000, "prompts holds 1000000 prompts; allowed are at most 64"),
    # Text.
    ("def f(x):", NO_TOKENIZER),
    (["def", "class"], NO_TOKENIZER),
    ([{"role": "user", "content": "hi"}], NO_TOKENIZER),
)

TOKEN_IDS = cases(
    ([], "token_ids is empty; allowed are 1 to 48 token ids"),
    (None, f"token_ids is None{A_LIST}"),
    ("def", f"token_ids is 'def'{A_LIST}"),
    (b"def", f"token_ids is b'def'{A_LIST}"),
    (3, f"token_ids is 3{A_LIST}"),
    ({3}, f"token_ids is {{3}}{A_LIST}"),
    (np.array(3), f"token_ids is 3{A_LIST}"),
    ([[3]], f"token_ids has [3] at index 0{IDS}"),
    ([3, 2.5], f"token_ids has 2.5 at index 1{IDS}"),
    ([3, "a"], f"token_ids has 'a' at index 1{IDS}"),
    ([True], f"token_ids has True at index 0{IDS}"),
    ([3, 4, 32], f"token_ids has 32 at index 2{IDS}"),
    ([-1], f"token_ids has -1 at index 0{IDS}"),
    ([HUGE], f"token_ids has {HUGE} at index 0{IDS}"),
    ([3] * 49, "token_ids has 49 token ids; allowed are at most 48 (max_length)"),
)

# Text for an engine whose vocabulary has the 128 bytes of ASCII alone, and 256 tokens of context.

NO_BYTE = "for which this vocabulary has no token; allowed are the 128 bytes that have one"
ROLES = "allowed: 'system', 'user', 'assistant', 'tool'"

TEXTS = cases(
    ("", "prompts[0] is empty; allowed are 1 to 255 token ids"),
    (["def", ""], "prompts[1] is empty; allowed are 1 to 255 token ids"),
    ("x = 1\n" * 99, "prompts[0] has 594 token ids; allowed are at most 255 (max_length 256, less 1 new token)"),
    ("a" * 10**6, "prompts[0] has 1000000 token ids; allowed are at most 255 (max_length 256, less 1 new token)"),
    (["def", [3]], "prompts[1] is [3]; a string is needed, as prompts[0] is one"),
    (["def", None], "prompts[1] is None; a string is needed, as prompts[0] is one"),
    (["def", b"class"], "prompts[1] is b'class'; a string is needed, as prompts[0] is one"),
    (["def", {"role": "user"}], "prompts[1] is {'role': 'user'}; a string is needed, as prompts[0] is one"),
    ("caf\u00e9", f"prompts[0]: text holds byte 0xc3, {NO_BYTE}"),
    (["def", "\ud800"], f"prompts[1]: text holds byte 0xef, {NO_BYTE}"),
    ("\ud83d\ude00", f"prompts[0]: text holds byte 0xf0, {NO_BYTE}"),
    ([{"role": "user", "content": "\u00e9"}], f"messages[0]: text holds byte 0xc3, {NO_BYTE}"),
    ([{"role": "user", "content": "\udfff"}], f"messages[0]: text holds byte 0xef, {NO_BYTE}"),
    ([{}], f"messages[0]['role'] is missing; {ROLES}"),
    ([{"content": "hi"}], f"messages[0]['role'] is missing; {ROLES}"),
    ([{"role": "robot", "content": "hi"}], f"messages[0]['role'] is 'robot'; {ROLES}"),
    ([{"role": None, "content": "hi"}], f"messages[0]['role'] is None; {ROLES}"),
    ([{"role": ["user"], "content": "hi"}], f"messages[0]['role'] is ['user']; {ROLES}"),
    ([{"role": "user"}], "messages[0]['content'] is missing; a string is needed"),
    ([{"role": "user", "content": None}], "messages[0]['content'] is None; a string is needed"),
    ([{"role": "user", "content": 5}], "messages[0]['content'] is 5; a string is needed"),
    ([{"role": "user", "content": ["hi"]}], "messages[0]['content'] is ['hi']; a string is needed"),
    (
        [{"role": "user", "content": "hi", "name": "me"}],
        "messages[0]['name'] is 'me'; keys allowed for role 'user': 'role', 'content'",
    ),
    (
        [{"role": "tool", "content": "hi"}],
        "messages[0]['tool_call_id'] is missing; a string is needed",
    ),
    (
        [{"role": "assistant", "content": "", "tool_calls": []}],
        "messages[0]['tool_calls'] is []; keys allowed for role 'assistant': 'role', 'content', 'reasoning_content'",
    ),
    (
        [{"role": "user", "content": "hi"}, "def"],
        "messages[1] is 'def'; a mapping with 'role' and 'content' is needed",
    ),
    ([{"role": "user", "content": "hi"}, 3], "messages[1] is 3; a mapping with 'role' and 'content' is needed"),
    (
        [{"role": "user", "content": "x" * 256}],
        "prompts[0] has 275 token ids; allowed are at most 255 (max_length 256, less 1 new token)",
    ),
)

# Settings: every value of a row gets the row's message.

_VALUES: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("temperature", "a finite number from 0 to 1e+06", (-0.1, NAN, INF, -INF, 1e400, HUGE, "1", None, True, [1.0])),
    ("top_p", "a number above 0, up to 1", (0, 0.0, -0.5, 1.1, NAN, INF, HUGE, "1", None, False)),
    ("min_p", "a number from 0 to 1", (-0.1, 1.1, NAN, INF, -HUGE, "0", None, True)),
    ("top_k", "an integer from 0 to 2147483647", (-1, 2**31, HUGE, 1.5, 2.0, NAN, "5", None, True)),
    ("seed", "an integer from 0 to 4294967295", (-1, 2**32, HUGE, 0.5, NAN, "5", None, True)),
    ("max_new_tokens", "an integer from 1 to 2147483647", (0, -1, 2**31, HUGE, 1.5, INF, "5", None, True)),
    ("min_new_tokens", "an integer from 0 to 256 (max_new_tokens)", (-1, 257, HUGE, 1.5, NAN, "5", None, True)),
    ("top_logprobs", "an integer from 0 to 20", (-1, 21, HUGE, 1.5, NAN, "5", None, True, False)),
    ("logprobs", "True and False", (0, 1, "yes", None, 5)),
    ("ignore_eos", "True and False", (0, 1, "yes", None, NAN)),
    ("repetition_penalty", "a number from 0.01 to 100", (0, 0.0, -1.0, 101, NAN, INF, HUGE, "1", None, True)),
    ("presence_penalty", "a number from -2 to 2", (-2.1, 2.1, NAN, -INF, -HUGE, "0", None, True)),
    ("frequency_penalty", "a number from -2 to 2", (-2.1, 2.1, NAN, -INF, -HUGE, "0", None, True)),
    ("stop", "a list of non-empty strings", ("stop", b"stop", 5, None, {"stop"}, {"stop": 1}, generator)),
    ("stop_token_ids", "a list of at most 16 integers", (5, "5", b"5", bytearray(b"5"), 1.5, None, {5}, generator)),
    ("logit_bias", "a dict from token ids to numbers", ([3], [(3, 1.0)], "3", 3, None, {3})),
)

SETTINGS = cases(
    *(
        ({name: value}, f"{name} is {value!r}; allowed {'are' if allowed.startswith('True') else 'is'} {allowed}")
        for name, allowed, values in _VALUES
        for value in values
    ),
    ({"seed": ENDLESS}, "seed is int of too many digits; allowed is an integer from 0 to 4294967295"),
    ({"temperature": np.array(0.5)}, "temperature is array(0.5); allowed is a finite number from 0 to 1e+06"),
    ({"temperature": np.float16(-1)}, "temperature is -1.0; allowed is a finite number from 0 to 1e+06"),
    ({"top_p": np.float32(0)}, "top_p is 0.0; allowed is a number above 0, up to 1"),
    ({"top_k": np.int64(-1)}, "top_k is -1; allowed is an integer from 0 to 2147483647"),
    ({"stop": ("",)}, "stop[0] is ''; allowed is a list of non-empty strings"),
    ({"stop": ("a", 5)}, "stop[1] is 5; allowed is a list of non-empty strings"),
    ({"stop": ["a", b"b"]}, "stop[1] is b'b'; allowed is a list of non-empty strings"),
    ({"stop": [None]}, "stop[0] is None; allowed is a list of non-empty strings"),
    ({"stop_token_ids": (1.5,)}, "stop_token_ids[0] is 1.5; allowed is a list of at most 16 integers"),
    ({"stop_token_ids": (3, "5")}, "stop_token_ids[1] is '5'; allowed is a list of at most 16 integers"),
    ({"stop_token_ids": (True,)}, "stop_token_ids[0] is True; allowed is a list of at most 16 integers"),
    ({"stop_token_ids": range(17)}, "stop_token_ids has 17 entries; allowed is a list of at most 16 integers"),
    (
        {"stop_token_ids": range(10**12)},
        "stop_token_ids has 1000000000000 entries; allowed is a list of at most 16 integers",
    ),
    ({"logit_bias": {"3": 1.0}}, "logit_bias has '3'; allowed is a dict from token ids to numbers"),
    ({"logit_bias": {2.0: 1.0}}, "logit_bias has 2.0; allowed is a dict from token ids to numbers"),
    ({"logit_bias": {True: 1.0}}, "logit_bias has True; allowed is a dict from token ids to numbers"),
    ({"logit_bias": {None: 1.0}}, "logit_bias has None; allowed is a dict from token ids to numbers"),
    *(
        ({"logit_bias": {3: value}}, f"logit_bias[3] is {value!r}; allowed is a number from -100 to 100")
        for value in (100.5, -101, NAN, INF, HUGE, "1", None, True, [1.0])
    ),
    ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias has 301 entries; allowed are at most 300"),
    # Contradictions.
    (
        {"min_new_tokens": 9, "max_new_tokens": 8},
        "min_new_tokens is 9; allowed is an integer from 0 to 8 (max_new_tokens)",
    ),
    ({"top_logprobs": 3}, "top_logprobs is 3 without logprobs; allowed is 0, or logprobs=True"),
)

DECODE = cases(
    *(
        ({"mode": value}, f"mode is {value!r}; allowed: 'ar', 'chain', 'ddtree'")
        for value in ("tree", "DDTree", "", b"ar", None, 0, ["ar"])
    ),
    *(
        ({"budget": value}, f"budget is {value!r}; allowed is an integer from 0 to 255")
        for value in (-1, 256, HUGE, -HUGE, 1.5, 7.0, NAN, INF, "7", None, True, [7])
    ),
    ({"budget": ENDLESS}, "budget is int of too many digits; allowed is an integer from 0 to 255"),
)

# Arguments of `generate`, `stream` and `trace` that an engine with 32 ids and no tokenizer refuses for one prompt.

ONE_SAMPLING = "; allowed is a SamplingParams, or a list of one a prompt"
_sampling = SamplingParams(temperature=0.5)

ARGUMENTS = cases(
    ({"sampling": {"temperature": 0.5}}, f"sampling is {{'temperature': 0.5}}{ONE_SAMPLING}"),
    ({"sampling": None}, f"sampling is None{ONE_SAMPLING}"),
    ({"sampling": 0.5}, f"sampling is 0.5{ONE_SAMPLING}"),
    ({"sampling": "greedy"}, f"sampling is 'greedy'{ONE_SAMPLING}"),
    ({"sampling": SamplingParams}, f"sampling is {SamplingParams!r}{ONE_SAMPLING}"),
    ({"sampling": [None]}, f"sampling is [None]{ONE_SAMPLING}"),
    ({"sampling": [{"seed": 3}]}, f"sampling is [{{'seed': 3}}]{ONE_SAMPLING}"),
    ({"sampling": generator}, f"sampling is {generator!r}{ONE_SAMPLING}"),
    ({"sampling": []}, "sampling has 0 entries; allowed are 1, one a prompt"),
    ({"sampling": [_sampling] * 2}, "sampling has 2 entries; allowed are 1, one a prompt"),
    ({"decode": "ddtree"}, "decode is 'ddtree'; a DecodeConfig is needed"),
    ({"decode": None}, "decode is None; a DecodeConfig is needed"),
    ({"decode": {"mode": "ar"}}, "decode is {'mode': 'ar'}; a DecodeConfig is needed"),
    ({"decode": DecodeConfig}, f"decode is {DecodeConfig!r}; a DecodeConfig is needed"),
    ({"sampling": SamplingParams(stop_token_ids=(3, 32))}, "stop_token_ids has 32; allowed are 0 to 31"),
    ({"sampling": SamplingParams(stop_token_ids=(-1,))}, "stop_token_ids has -1; allowed are 0 to 31"),
    ({"sampling": SamplingParams(stop_token_ids=(HUGE,))}, f"stop_token_ids has {HUGE}; allowed are 0 to 31"),
    (
        {"sampling": SamplingParams(stop_token_ids=range(6, 22))},
        "stop_token_ids and the model's own are 17; allowed are 16",
    ),
    ({"sampling": SamplingParams(logit_bias={3: 1.0, 32: 1.0})}, "logit_bias has 32; allowed are 0 to 31"),
    ({"sampling": SamplingParams(logit_bias={-1: 1.0})}, "logit_bias has -1; allowed are 0 to 31"),
    ({"sampling": SamplingParams(logit_bias={HUGE: 1.0})}, f"logit_bias has {HUGE}; allowed are 0 to 31"),
    (
        {"sampling": SamplingParams(stop=["\n"])},
        "stop is ('\\n',), but the checkpoint has no tokenizer; allowed: stop_token_ids",
    ),
)

THINKING = cases(
    *(({"thinking": value}, f"thinking is {value!r}{FALSE_OR_TRUE}") for value in (0, 1, None, "yes", NAN))
)

# Arguments of `Engine.load` for the golden pair, with eight devices, 512 ids and 4096 positions.

MESH = "; allowed: sizes of tensor and expert, such as 'tensor=8'"
FOLDER = "; allowed is the folder of a converted checkpoint"
MAX_LENGTH = "; allowed is an integer from 2 to 4096 (the target's max_position_embeddings)"

LOAD = cases(
    *(
        ({"dtype": value}, f"dtype is {value!r}; allowed: 'float32', 'bfloat16'")
        for value in ("float16", "", "FLOAT32", b"float32", np.float32, None, 32)
    ),
    *(
        ({"max_length": value}, f"max_length is {value!r}{MAX_LENGTH}")
        for value in (1, 0, -5, 4097, HUGE, 64.0, NAN, "64", None, True, [64])
    ),
    *(
        ({"prefill_chunk": value}, f"prefill_chunk is {value!r}; allowed is an integer from 1 to 4096")
        for value in (0, -1, 4097, HUGE, 16.0, NAN, "16", None, True)
    ),
    *(({"prefix_cache": value}, f"prefix_cache is {value!r}{FALSE_OR_TRUE}") for value in (0, 1, "yes", None, NAN)),
    *(
        ({"kernels": value}, f"kernels is {value!r}; allowed are None, True and False")
        for value in (0, 1, "auto", "", NAN, [True])
    ),
    *(
        (
            {"kernels": True, "dtype": dtype},
            f"kernels is True, but they need a GPU and bfloat16, not cpu and {dtype}; allowed are None and False",
        )
        for dtype in ("float32", "bfloat16")
    ),
    *(
        ({"mesh": value}, f"mesh is {value!r}{MESH}")
        for value in (
            "data=2", "tensor", "tensor=", "tensor=0", "tensor=-2", "tensor=2.0", "tensor=2,tensor=2", "tensor=2,", "",
            "tensor=2;expert=2", "TENSOR=2", f"tensor={HUGE}", 8, ["tensor=2"], {"tensor": 2},
        )
    ),
    ({"mesh": "tensor=16"}, "mesh 'tensor=16' needs 16 devices; there are 8"),
    ({"mesh": "expert=4,tensor=4"}, "mesh 'expert=4,tensor=4' needs 16 devices; there are 8"),
    ({"mesh": "tensor=3"}, "mesh has tensor=3; allowed are divisors of 512, the vocab of embedding_VD"),
    ({"mesh": "tensor=4"}, "mesh has tensor=4; allowed are divisors of 2, the expert_groups of down_scale_EDG"),
    ({"mesh": "tensor=8"}, "mesh has tensor=8; allowed are divisors of 4, the heads of q_b_AHO"),
    ({"mesh": "expert=3"}, "mesh has expert=3; allowed are divisors of 16, the experts of gate_up_E2FI"),
    *(
        ({"drafter_rope_amplitude": value}, f"drafter_rope_amplitude is {value!r}; allowed is a number from 0.001 to 1000.0")
        for value in (0.0, -1.0, NAN, INF, 1e300, HUGE, "1", True, [1.0])
    ),
    *(
        ({"drafter_sliding_causal": value}, f"drafter_sliding_causal is {value!r}{FALSE_OR_TRUE}")
        for value in (0, 1, "yes", None)
    ),
    # Contradictions.
    (
        {"drafter": None, "drafter_rope_amplitude": 1.4},
        "drafter_rope_amplitude is 1.4 without a drafter; allowed is None",
    ),
    (
        {"drafter": None, "drafter_sliding_causal": False},
        "drafter_sliding_causal is False without a drafter; allowed is True",
    ),
    *(({"target": value}, f"target is {value!r}{FOLDER}") for value in ("", None, 5, b"target", ["target"], {})),
    *(({"drafter": value}, f"drafter is {value!r}{FOLDER}") for value in ("", 5, b"drafter", ["drafter"], False)),
)  # fmt: skip

# Flags of `experiments.generate`, refused before anything is loaded.

FLAGS = cases(
    ({"temperature": NAN}, "error: temperature is nan; allowed is a finite number from 0 to 1e+06"),
    ({"temperature": INF}, "error: temperature is inf; allowed is a finite number from 0 to 1e+06"),
    ({"top_p": 0.0}, "error: top_p is 0.0; allowed is a number above 0, up to 1"),
    ({"seed": -1}, "error: seed is -1; allowed is an integer from 0 to 4294967295"),
    ({"max_new_tokens": 0}, "error: max_new_tokens is 0; allowed is an integer from 1 to 2147483647"),
    ({"budget": 256}, "error: budget is 256; allowed is an integer from 0 to 255"),
)
