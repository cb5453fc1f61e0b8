"""A small byte-level BPE vocabulary in Kimi's form, trained on the corpus, and the corpus as one stream of ids."""

import base64
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from ddtree_jax.tokenizer import NUM_SPECIAL, PATTERN, STANDARD_SPECIALS, Tokenizer


def train_ranks(texts: Iterable[str], num_base: int) -> dict[bytes, int]:
    """Bytes -> rank of ``num_base`` tokens: the 256 bytes first, then what the merges made, in their order."""
    tokenizer = tokenizers.Tokenizer(BPE())
    split = Split(tokenizers.Regex(PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = BpeTrainer(
        vocab_size=num_base, initial_alphabet=sorted(ByteLevel.alphabet()), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    byte_of = _byte_of_letter()
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(byte_of[letter] for letter in token) for token, _ in by_id if len(token) > 1]
    tokens = [bytes([byte]) for byte in range(256)] + merged
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) != num_base or len(tokens) != num_base:
        raise ValueError(f"the sample gave {len(tokens)} tokens; num_base {num_base} is needed: take more text")
    _check_ranks(ranks)
    return ranks


def _byte_of_letter() -> dict[str, int]:
    """The inverse of GPT-2's printable stand-ins for bytes, which ``tokenizers`` spells its vocabulary in."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _check_ranks(ranks: dict[bytes, int]) -> None:
    """Ranks are contiguous from 0 and begin with the 256 bytes, so that any text can be encoded."""
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{len(ranks)} tokens do not have the ranks 0 to {len(ranks) - 1}")
    missing = [byte for byte in range(256) if ranks.get(bytes([byte]), 256) >= 256]
    if missing:
        raise ValueError(f"bytes {missing} are not among the first 256 ranks")


def _encoding(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def write_tokenizer(directory: Path, ranks: dict[bytes, int]) -> None:
    """Writes ``tiktoken.model`` and ``tokenizer_config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    added = {
        str(len(ranks) + offset): {
            "content": name, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": True,
        }
        for offset, name in STANDARD_SPECIALS.items()
    }  # fmt: skip
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": [name for offset, name in STANDARD_SPECIALS.items() if 2 < offset < 254],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def read_ranks(directory: Path) -> dict[bytes, int]:
    tokenizer = Tokenizer.from_directory(directory)
    return {tokenizer.token_bytes(rank): rank for rank in range(tokenizer.vocab_size - NUM_SPECIAL)}


def encode_files(directory: Path, texts: list[str], end_of_file: int) -> np.ndarray:
    """All files as one stream, ``end_of_file`` behind each; uint16.

    Equal to `Tokenizer.encode`, which cuts only runs far longer than any in the corpus; that is checked on a sample.
    """
    encoding = _encoding(read_ranks(directory))
    pieces = encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
    tokenizer = Tokenizer.from_directory(directory)
    for index in range(0, len(texts), max(1, len(texts) // 20)):
        if tokenizer.encode(texts[index]) != pieces[index]:
            raise ValueError(f"file {index} has other ids in Tokenizer.encode")
    return np.concatenate([np.array([*piece, end_of_file], np.uint16) for piece in pieces])


def token_lengths(directory: Path, vocab_size: int) -> np.ndarray:
    """Bytes of text that each id stands for; 0 for special ids. int32 [V]."""
    lengths = np.zeros(vocab_size, np.int32)
    for token, rank in read_ranks(directory).items():
        lengths[rank] = len(token)
    return lengths
