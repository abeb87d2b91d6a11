"""Text to token ids and back; bytes by default."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.uint16]


class Tokenizer(Protocol):
    """A map from text to token ids and back. Law: `decode(encode(text)) == text`; every id is below
    `vocab_size`, which is at most 65,536; `decode` takes any ids below `vocab_size`, and shows
    bytes that are not UTF-8 as U+FFFD."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str) -> TokenIds: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """One token per byte of UTF-8; no special tokens, so the id is the byte."""

    vocab_size = 256

    def encode(self, text: str) -> TokenIds:
        """Return the text's UTF-8 bytes as ids."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these bytes; raise `ValueError` for an id above 255."""
        return bytes(ids).decode(errors="replace")


TOKENIZERS: dict[str, type[Tokenizer]] = {"bytes": ByteTokenizer}
