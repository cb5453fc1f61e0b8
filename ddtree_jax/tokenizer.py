"""Kimi's tokenizer: a byte-level BPE vocabulary in tiktoken's file format, 256 special ids behind it, the chat format.

::

    0 ................ num_base - 1 | num_base ............... num_base + 255
    ranks of ``tiktoken.model``     | special ids: [BOS], <|im_end|>, <think>, ..., <|reserved_token_{id}|>
                    (163,584)       |          (163,840 ids in Kimi K2.6)
"""

import binascii
import codecs
import functools
import hashlib
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import tiktoken

from ddtree_jax.arguments import shown

NUM_SPECIAL = 256

# Ids of Kimi's specials less the number of base ranks, so that a small vocabulary has them in the same places.
STANDARD_SPECIALS = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>",
    6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>", 17: "<|im_middle|>",
    18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>",
    22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip

_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# Every cut is a token boundary, so these are part of the format: other numbers give other ids for the same text.
_MAX_CHUNK = 400_000
_MAX_RUN = 25_000
_RUN = re.compile(rf"\s{{1,{_MAX_RUN}}}|\S{{1,{_MAX_RUN}}}")

# What a role's header opens with, the keys that its messages need and those that they may have.
_ROLES = {
    "system": ("<|im_system|>", ("role", "content"), ()),
    "user": ("<|im_user|>", ("role", "content"), ()),
    "assistant": ("<|im_assistant|>", ("role", "content"), ("reasoning_content",)),
    "tool": ("<|im_system|>", ("role", "content", "tool_call_id"), ("name",)),
}


class Tokenizer:
    """Turns text and chat messages into ids and back.

    ``ranks`` maps the bytes of a base token to its id; ``special_names`` maps absolute ids to names, Kimi's standard
    names by default. Special ids come out of ``encode_chat`` and ``special_ids`` alone, never out of text.
    """

    def __init__(self, ranks: Mapping[bytes, int], special_names: Mapping[int, str] | None = None):
        num_base = len(ranks)
        if not special_names:
            special_names = {num_base + offset: name for offset, name in STANDARD_SPECIALS.items()}
        ids = range(num_base, num_base + NUM_SPECIAL)
        names = [special_names.get(token, f"<|reserved_token_{token}|>") for token in ids]
        self.special_ids: dict[str, int] = {}
        for token, name in zip(ids, names, strict=True):
            first = self.special_ids.setdefault(name, token)
            if first != token:
                raise ValueError(f"special name {name!r} stands for {first} and {token}; one id is allowed")
        self._bytes = sorted(ranks, key=ranks.__getitem__) + [name.encode() for name in names]
        self._missing = {byte for byte in range(256) if bytes([byte]) not in ranks}
        # The encoder is told of no special token: text cannot smuggle in what the encoder does not know.
        self._encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens={})

    @classmethod
    def from_directory(cls, directory: str | Path) -> "Tokenizer":
        """Reads ``tiktoken.model`` and, where it is there, the names in ``tokenizer_config.json``.

        Raises:
          ValueError: a file is missing or malformed; the message names it, and the line where there is one.
        """
        model, config = Path(directory) / "tiktoken.model", Path(directory) / "tokenizer_config.json"
        if not model.is_file():
            raise ValueError(f"directory is {str(directory)!r}; a directory that holds tiktoken.model is needed")
        ranks = _read_ranks(model)
        return cls(ranks, _read_special_names(config, len(ranks)) if config.is_file() else None)

    def __repr__(self) -> str:
        """The same for tokenizers whose ids stand for the same bytes, and for no others."""
        return f"Tokenizer({len(self._bytes)} ids, sha256 {self._digest})"

    @functools.cached_property
    def _digest(self) -> str:
        return hashlib.sha256(repr(self._bytes).encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; the name of a special token inside it is text like any other.

        Raises:
          ValueError: the text holds a byte that no token of an incomplete vocabulary stands for.
        """
        if self._missing:
            # Lone surrogates become U+FFFD here, as the encoder has it.
            encoded = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
            if (byte := next(filter(self._missing.__contains__, encoded), None)) is not None:
                allowed = f"the {256 - len(self._missing)} bytes that have one"
                raise ValueError(
                    f"text holds byte 0x{byte:02x}, for which this vocabulary has no token; allowed are {allowed}"
                )
        return [token for chunk in _chunks(text) for token in self._encoding.encode_ordinary(chunk)]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of ids; special ids appear as their names and bytes that are not UTF-8 as U+FFFD."""
        return self._join(ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        """Bytes that one id stands for; a special id stands for its name.

        Raises:
          ValueError: the id lies outside the vocabulary.
        """
        return self._join([token_id])

    def _join(self, ids: Iterable[SupportsIndex]) -> bytes:
        indices, size = list(map(operator.index, ids)), len(self._bytes)
        for index in indices:
            if not 0 <= index < size:
                raise ValueError(f"token id is {index}; allowed: 0 to {size - 1}")
        return b"".join([self._bytes[index] for index in indices])

    def stream_decoder(self) -> "StreamDecoder":
        return StreamDecoder(self)

    def encode_chat(self, messages: Any, thinking: bool = True) -> list[int]:
        """Ids of a conversation, ``[{"role": ..., "content": ...}, ...]``, up to the point where the assistant speaks.

        ::

            system, user  <|im_system|>system<|im_middle|>{content}<|im_end|>      (<|im_user|>user for a user)
            tool          <|im_system|>{name}<|im_middle|>## Return of {tool_call_id}\\n{content}<|im_end|>
            assistant     <|im_assistant|>assistant<|im_middle|><think></think>{content}<|im_end|>
            at the end    <|im_assistant|>assistant<|im_middle|><think>            (<think></think> if not thinking)

        No [BOS], no newlines, no system prompt of its own. Keys beside ``role`` and ``content``: ``tool_call_id`` and
        ``name`` ("tool" by default) of a tool's result; ``reasoning_content`` of an assistant's turn, which the format
        leaves out of earlier turns. Calls of tools (``tool_calls``) are not rendered and so are refused.

        Raises:
          ValueError: a message has a role, a key or a value that the format has no place for, or the vocabulary lacks a
            special token of the format.
        """
        # Annotated Any: a run-time type checker would speak before these messages, which name the culprit.
        if not isinstance(messages, (list, tuple)) or not messages:
            raise ValueError(f"messages is {shown(messages)}; a list of at least one message is needed")
        ids = []
        for index, message in enumerate(messages):
            role, name, content = _read_message(index, message)
            ids += self._header(role, name)
            if role == "assistant":
                ids += self._specials("<think>", "</think>")
            try:
                ids += self.encode(content) + self._specials("<|im_end|>")
            except ValueError as error:
                raise ValueError(f"messages[{index}]: {error}") from None
        ids += self._header("assistant", "assistant")
        return ids + self._specials("<think>", *(() if thinking else ("</think>",)))

    def _header(self, role: str, name: str) -> list[int]:
        return self._specials(_ROLES[role][0]) + self.encode(name) + self._specials("<|im_middle|>")

    def _specials(self, *names: str) -> list[int]:
        for name in names:
            if name not in self.special_ids:
                raise ValueError(f"tokenizer_config.json names no special token {name!r}; the chat format needs it")
        return [self.special_ids[name] for name in names]


class StreamDecoder:
    """Decodes ids as they come; all pieces together equal ``decode`` of all ids.

    Bytes of an unfinished character are held back until it is complete, is proven invalid, or ``finish`` is called.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[SupportsIndex]) -> str:
        return self._characters.decode(self._tokenizer._join(ids))

    def finish(self) -> str:
        return self._characters.decode(b"", final=True)


def _chunks(text: str) -> Iterator[str]:
    """Cuts text every 400,000 characters, then inside every run of (non-)whitespace after each 25,000.

    Kimi's own loader does so because longer input has made tiktoken panic. Whitespace is what ``str.isspace``
    says; Python's ``\\s`` agrees with it, the pattern's does not.
    """
    for begin in range(0, len(text), _MAX_CHUNK):
        chunk, start = text[begin : begin + _MAX_CHUNK], 0
        for run in _RUN.finditer(chunk) if len(chunk) > _MAX_RUN else ():
            cut = run.start()
            if cut and chunk[cut - 1].isspace() == chunk[cut].isspace():
                yield chunk[start:cut]
                start = cut
        yield chunk[start:]


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Base tokens of a ``tiktoken.model``: a line each, base64 of its bytes, a space, its rank."""
    lines = [(number, line.split()) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    ranks, taken = {}, set()
    for number, fields in lines:
        where = f"{path}, line {number}"
        try:
            encoded, digits = fields
            token, rank = binascii.a2b_base64(encoded, strict_mode=True), int(digits)
        except ValueError as error:
            needed = "base64 of a token, a space and its rank are needed"
            raise ValueError(f"{where}: {b' '.join(fields)!r}; {needed} ({error})") from None
        if token in ranks or rank in taken:
            raise ValueError(f"{where}: token {token!r} or rank {rank} stands in an earlier line; each is allowed once")
        # As many ranks as lines, all different and none too large: together that is "contiguous from 0".
        if not 0 <= rank < len(lines):
            raise ValueError(f"{where}: rank is {rank}; allowed: 0 to {len(lines) - 1}, without a gap")
        ranks[token] = rank
        taken.add(rank)
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise ValueError(f"{path}: byte 0x{byte:02x} is no token; all 256 are needed, or some text has no ids")
    return ranks


def _read_special_names(path: Path, num_base: int) -> dict[int, str]:
    """Names of special ids: ``added_tokens_decoder``, id -> {"content": name}."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8")).get("added_tokens_decoder") or {}
        names = {int(token): entry["content"] for token, entry in entries.items()}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f'{path}: added_tokens_decoder needs id -> {{"content": name}} ({error!r})') from None
    last = num_base + NUM_SPECIAL - 1
    for token, name in names.items():
        if not num_base <= token <= last or not isinstance(name, str) or not name:
            allowed = f"ids {num_base} to {last} and non-empty strings"
            raise ValueError(f"{path}: added_tokens_decoder names id {token} {name!r}; allowed: {allowed}")
    return names


def _read_message(index: int, message: Any) -> tuple[str, str, str]:
    """A message's role, the name in its header and the text behind it."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is {shown(message)}; a mapping with 'role' and 'content' is needed")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"{where}['role'] is {_show(message, 'role')}; allowed: {', '.join(map(repr, _ROLES))}")
    _, needed, optional = _ROLES[role]
    for key in (*message, *needed):
        if key not in needed + optional:
            known = ", ".join(map(repr, needed + optional))
            raise ValueError(f"{where}[{key!r}] is {_show(message, key)}; keys allowed for role {role!r}: {known}")
        if not isinstance(message.get(key), str):
            raise ValueError(f"{where}[{key!r}] is {_show(message, key)}; a string is needed")
    if role == "tool":
        return role, message.get("name", role), f"## Return of {message['tool_call_id']}\n{message['content']}"
    return role, role, message["content"]


def _show(message: Mapping, key: Any) -> str:
    return shown(message[key]) if key in message else "missing"
