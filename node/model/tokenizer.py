"""Text to token ids and back; bytes by default.

Peers of one run must cut text alike, so a tokenizer has a definition whose hash goes into the run's manifest.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.uint16]


class Tokenizer(Protocol):
    """Law: `decode(encode(text)) == text`; every id is below `vocab_size`, which is at most 65,536; `decode`
    takes any ids below `vocab_size`, and shows bytes that are no UTF-8 as U+FFFD.
    """

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str) -> TokenIds: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def definition(self) -> dict[str, Any]:
        """Everything that decides the ids, as plain JSON values."""
        ...


class ByteTokenizer:
    """One token a byte of UTF-8; no special tokens, so the id is the byte."""

    vocab_size = 256

    def encode(self, text: str) -> TokenIds:
        """Ids of the text's UTF-8 bytes."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these bytes; raise `ValueError` for an id above 255."""
        return bytes(ids).decode(errors="replace")

    def definition(self) -> dict[str, Any]:
        """Its name says it all."""
        return {"kind": "bytes", "vocab_size": self.vocab_size}


TOKENIZERS: dict[str, type[Tokenizer]] = {"bytes": ByteTokenizer}


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 of the definition as canonical JSON (sorted keys)."""
    return hashlib.sha256(msgspec.json.encode(tokenizer.definition(), order="deterministic")).hexdigest()
