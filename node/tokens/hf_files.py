"""A tokenizer's files as transformers reads them: the tokenizer, and what its tokens are for.

Evaluations and generation end at the token that ends a text, so it has a name there. For bytes it
is the id 255, which no text has.
"""

from typing import Any

import msgspec

from farflock.node.tokens.json_tokenizer import JSON_NAME, JsonTokenizer
from farflock.node.tokens.tokenizer import ByteTokenizer, Tokenizer
from farflock.node.tokens.tokenizer_training import END_OF_TEXT

ABOUT_NAME = "tokenizer_config.json"


def tokenizer_files(tokenizer: Tokenizer, context: int) -> dict[str, bytes]:
    """Return the files of a fast tokenizer: its own tokenizer.json, or one for bytes, and what is
    said about it; `context` is the longest text, in tokens."""
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
    }
    raw = byte_level()
    if isinstance(tokenizer, JsonTokenizer):
        raw, about["eos_token"] = tokenizer.raw, tokenizer.end_name
    return {JSON_NAME: raw, ABOUT_NAME: json_file(about)}


def tokenizer_in(raw: bytes, origin: str, end: int | None = None) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, which may be the one for bytes; `end` is the token
    that ends a text, if that is known. Raise `BadTokenizer` if it is no tokenizer's file."""
    return ByteTokenizer() if raw == byte_level() else JsonTokenizer(raw, end, origin)


def byte_level() -> bytes:
    """Return a tokenizer.json for bytes: byte-level BPE without merges, in which each byte is a
    token, and 255, which no text has, the end of text."""
    pieces = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    end = {
        "id": 255,
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    names = [*printable_bytes()[:255], END_OF_TEXT]
    vocabulary = {name: place for place, name in enumerate(names)}
    return json_file(
        {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": pieces,
            "decoder": pieces,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
    )


def printable_bytes() -> list[str]:
    """Return GPT-2's stand-in for each byte: itself if printable in Latin-1, else U+0100 and up."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(256))
    return [chr(byte) if byte in printable else chr(256 + next(others)) for byte in range(256)]


def json_file(value: dict[str, Any]) -> bytes:
    """Return the content of a JSON file for people too."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
