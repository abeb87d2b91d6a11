"""The order of documents: that of a keyed hash of their text, so that it is shuffled, and the same
on every machine. Equal documents are neighbours.

The parts of a long text have the key of its first part and follow each other. Another part of the
hash decides whether a document is held out, so that no other document has a say in it.
"""

from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

_KEY = blake3(b"farflock: the order of documents in prepared data").digest()

# The numbers by which documents are ordered, the most significant first.
IDENTITY = np.dtype(
    [
        ("key_high", "<u8"),
        ("key_low", "<u8"),
        ("passage", "<u4"),
        ("own_high", "<u8"),
        ("own_low", "<u8"),
    ]
)


class DocumentId(NamedTuple):
    """A document's place in the order: the hash of its text's first passage, its number among
    the passages, and its own hash."""

    key_high: int
    key_low: int
    passage: int
    own_high: int
    own_low: int


class DocumentIds:
    """The identities of passages in the order of their texts; it remembers each first one."""

    def __init__(self) -> None:
        self._key = (0, 0)

    def of(self, digest: bytes, passage: int) -> DocumentId:
        """Return the identity of a text's next passage, by its own hash; number 0 is the first."""
        own = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")
        if passage == 0:
            self._key = own
        return DocumentId(*self._key, passage, *own)


def document_hash(text: bytes) -> bytes:
    """Return the keyed hash of a document's UTF-8."""
    return blake3(text, key=_KEY).digest()


def held_out_below(share: float) -> int:
    """Return the number below which `own_low` is of documents that are held out."""
    return int(share * 2**64)


def in_order(identities: NDArray[np.void]) -> NDArray[np.intp]:
    """Return the places of identities (n,) in their order; equal ones keep theirs."""
    fields = IDENTITY.names
    assert fields is not None
    return np.lexsort([identities[name] for name in reversed(fields)])


def begins(identities: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return where in an order (n,) an identity differs from the one before it."""
    fields = IDENTITY.names
    assert fields is not None
    first = np.ones(len(identities), dtype=np.bool_)
    if len(identities) > 1:
        first[1:] = np.any(
            [identities[name][1:] != identities[name][:-1] for name in fields], axis=0
        )
    return first
