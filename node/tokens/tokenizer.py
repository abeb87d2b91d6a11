"""Text to token ids and back; bytes by default.

Peers of one run must tokenize alike, so a tokenizer is known by the BLAKE3 hash of its file
(json_tokenizer.py). Bytes need no file.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_VOCABULARY = 2**32
BYTES = "bytes"

TokenIds = NDArray[np.uint16] | NDArray[np.uint32]


class BadTokenizer(ValueError):
    """A tokenizer that cannot be read or used; the message names the remedy."""


class Tokenizer(Protocol):
    """A map from text to token ids and back.

    Law: every id is below `vocab_size`, which is at most 2^32; arrays are as `token_array` makes
    them; `encode_batch` equals `encode` of each text; `decode` takes any ids below `vocab_size`,
    leaves `end_of_text` out, and shows bytes that are not UTF-8 as U+FFFD. With bytes and
    byte-level BPE, `decode(encode(text)) == text`; others may normalize the text.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_text(self) -> int | None:
        """The id that ends a document; None if nothing says which one does."""
        ...

    def encode(self, text: str) -> TokenIds: ...
    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return `encode` of each text, which may be computed by several threads."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """One token per byte of UTF-8, so the id is the byte; 0xFF, which never occurs in UTF-8, ends a
    document."""

    vocab_size = 256
    end_of_text = 255

    def encode(self, text: str) -> TokenIds:
        """Return the text's UTF-8 bytes as ids."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these bytes; raise `ValueError` for an id above 255."""
        return bytes(i for i in ids if i != self.end_of_text).decode(errors="replace")


def token_array(ids: Sequence[int] | NDArray[np.unsignedinteger], vocabulary: int) -> TokenIds:
    """Return ids as uint16 if the vocabulary has at most 65,536 tokens, otherwise as uint32."""
    if vocabulary <= 2**16:
        return np.asarray(ids, dtype=np.uint16)
    return np.asarray(ids, dtype=np.uint32)
