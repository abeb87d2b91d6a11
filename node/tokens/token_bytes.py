"""The bytes of text that each token stands for, so that losses in bits a byte compare models of
different tokenizers."""

import re

import msgspec
import numpy as np
from numpy.typing import NDArray

from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import ByteTokenizer, Tokenizer

_SPACE = "▁"  # stands for a space in the names of SentencePiece's tokens
_BYTE = re.compile(r"<0x[0-9A-F]{2}>", re.ASCII)


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Pattern(msgspec.Struct, frozen=True):
    String: str = ""


class _Decoder(msgspec.Struct):
    type: str
    decoders: list["_Decoder"] = []
    pattern: _Pattern = _Pattern()
    content: str = ""


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Definition(msgspec.Struct):
    """The fields of a tokenizer.json that say how many bytes a token is."""

    model: _Model
    decoder: _Decoder | None = None
    added_tokens: list[_Added] = []

    def names(self) -> dict[str, int]:
        """Return the ids of the tokens by their names."""
        vocab = self.model.vocab
        if isinstance(vocab, dict):
            return vocab
        return {name: place for place, (name, _) in enumerate(vocab)}


def bytes_of_tokens(tokenizer: Tokenizer) -> NDArray[np.int64] | None:
    """Return how many bytes of text each token is, 0 for special ones (vocabulary,); None for a
    tokenizer whose tokens' names do not say it: neither bytes, nor byte-level, nor SentencePiece's.

    SentencePiece may put a space in front of a text, which is counted."""
    if isinstance(tokenizer, ByteTokenizer):
        lengths = np.ones(tokenizer.vocab_size, dtype=np.int64)
        lengths[tokenizer.end_of_text] = 0
        return lengths
    return _of_names(tokenizer) if isinstance(tokenizer, JsonTokenizer) else None


def _of_names(tokenizer: JsonTokenizer) -> NDArray[np.int64] | None:
    try:
        found = msgspec.json.decode(tokenizer.raw, type=_Definition)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # another kind of model: the file itself was read before
    kinds = [] if found.decoder is None else [found.decoder, *found.decoder.decoders]
    is_byte_level = any(each.type == "ByteLevel" for each in kinds)
    if not is_byte_level and not any(map(_makes_spaces, kinds)):
        return None
    has_bytes = any(each.type == "ByteFallback" for each in kinds)
    lengths = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for name, place in found.names().items():
        # byte-level tokens are spelled with one character a byte
        lengths[place] = len(name) if is_byte_level else _length(name, has_bytes)
    for token in found.added_tokens:
        lengths[token.id] = 0 if token.special else len(token.content.encode())
    if tokenizer.end_of_text is not None:
        lengths[tokenizer.end_of_text] = 0
    return lengths


def _makes_spaces(decoder: _Decoder) -> bool:
    replaces = decoder.pattern.String == _SPACE and decoder.content == " "
    return decoder.type == "Metaspace" or (decoder.type == "Replace" and replaces)


def _length(name: str, has_bytes: bool) -> int:
    if has_bytes and _BYTE.fullmatch(name):
        return 1
    return len(name.replace(_SPACE, " ").encode())
