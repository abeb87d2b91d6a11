"""Documents of a shard packed into windows of equal length, with few of them cut.

A model trains on windows of L tokens. To chop a shard at multiples of L cuts a document at the end
of nearly each window, and its second part is learned without its first. Best-fit packing (Ding et
al., "Fewer Truncations Improve Language Modeling", arXiv:2404.10830) puts whole documents together
instead. There, gaps are padded; here none are left:

    1. A document of L tokens or more gives whole windows; what is left of it is a piece, and so is
       each other document.
    2. A window begins with the longest piece left, and takes the longest piece that fits in its
       gap, again and again.
    3. If none fits, the longest piece left is cut to fill the gap; its tail is a piece again.

So a shard of n tokens has exactly n // L windows, which is known before it is there. No token is
in two of them, and the fewer than L tokens left at the end, its shortest pieces, are in none. All
peers pack alike.
"""

from array import array
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farflock.node.tokens.tokenizer import TokenIds

_TOKENS_LIMIT = 2**31 - 1  # of one shard: positions are 32-bit
MAX_DOCUMENTS = 1 << 20  # told apart in one shard: each takes about 100 bytes while it is packed
_SCANNED_TOKENS = 1 << 22  # at a time, while ends of text are looked for

_Positions = NDArray[np.int64]
_Piece = tuple[int, int]  # first token, tokens


@dataclass(frozen=True, slots=True)
class Packing:
    """The windows of one shard. Window i consists of the runs from `first_runs[i]` up to
    `first_runs[i + 1]`; run r is `lengths[r]` tokens of the shard from `starts[r]` on."""

    length: int  # tokens in each window
    starts: NDArray[np.uint32]
    lengths: NDArray[np.uint32]
    first_runs: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.first_runs) - 1

    def runs(self, window: int) -> list[_Piece]:
        """Return the start and the length of each run of a window, in order."""
        if not 0 <= window < len(self):
            raise IndexError(f"there is no window {window} of {len(self)}")
        own = slice(int(self.first_runs[window]), int(self.first_runs[window + 1]))
        return list(zip(self.starts[own].tolist(), self.lengths[own].tolist(), strict=True))

    def window(self, window: int, tokens: TokenIds) -> TokenIds:
        """Return a window's `length` tokens, copied from those of the shard."""
        return np.concatenate(
            [tokens[start : start + length] for start, length in self.runs(window)]
        )


def document_lengths(
    tokens: TokenIds, end_of_text: int, max_documents: int = MAX_DOCUMENTS
) -> _Positions:
    """Return the length of each document in tokens, its end of text included.

    Tokens after the last end of text are one more document. If there are `max_documents` ends or
    more, the text is divided into cells, and documents that end in the same cell count as one: a
    stranger's shard may be nothing but ends of text."""
    assert max_documents > 1, "a cell's documents and what follows the last end are two"
    parts = range(0, len(tokens), _SCANNED_TOKENS)
    ended = [tokens[first : first + _SCANNED_TOKENS] == end_of_text for first in parts]
    cell_bits = 0  # so that a part has no cell in common with the next
    if sum(map(np.count_nonzero, ended)) >= max_documents:
        cell_bits = ((len(tokens) - 1) // (max_documents - 1)).bit_length()
    ends = [
        _last_of_each_cell(first + np.flatnonzero(part), cell_bits) + 1
        for first, part in zip(parts, ended, strict=True)
    ]
    edges: _Positions = np.concatenate([[0], *ends, [len(tokens)]])
    edges = np.unique(edges)
    return edges[1:] - edges[:-1]


def _last_of_each_cell(places: _Positions, cell_bits: int) -> _Positions:
    cells = places >> cell_bits
    is_last = np.append(cells[1:] != cells[:-1], True)
    last: _Positions = places[is_last[: len(places)]]
    return last


def packing_of(documents: _Positions, length: int) -> Packing:
    """Pack documents of these lengths, which lie one after another, into windows of `length`
    tokens: as many as the number of all tokens // `length`."""
    total = int(documents.sum())
    assert 0 < length <= _TOKENS_LIMIT, "a window has tokens, and no more than a shard may"
    assert total <= _TOKENS_LIMIT, "a shard's size is bounded before it is packed"
    firsts, whole = np.cumsum(documents) - documents, documents // length
    pieces = _Pieces(firsts + whole * length, documents % length, length)
    starts = np.repeat(firsts - (np.cumsum(whole) - whole) * length, whole)
    starts += np.arange(len(starts)) * length
    packed = _packed(pieces, total // length - len(starts))
    uint32 = [np.frombuffer(column, dtype=np.uint32) for column in packed]
    counts = np.concatenate([np.ones(len(starts), dtype=np.int64), uint32[2]])
    return Packing(
        length,
        np.concatenate([starts.astype(np.uint32), uint32[0]]),
        np.concatenate([np.full(len(starts), length, dtype=np.uint32), uint32[1]]),
        np.cumsum(np.insert(counts, 0, 0)).astype(np.uint32),
    )


class _Pieces:
    """Pieces of up to `longest` tokens by their lengths; of equal ones, the newest comes first."""

    def __init__(self, starts: _Positions, lengths: _Positions, longest: int) -> None:
        self.longest = longest
        self._starts: defaultdict[int, list[int]] = defaultdict(list)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            self._starts[length].append(start)
        self._starts.pop(0, None)
        # bit n: there is a piece of n tokens
        self._there = sum(1 << length for length in self._starts)

    def take(self, room: int) -> _Piece | None:
        """Remove and return the longest piece of at most `room` tokens; None if none fits."""
        there = self._there if room >= self.longest else self._there & ((2 << room) - 1)
        if not there:
            return None
        length = there.bit_length() - 1
        same = self._starts[length]
        start = same.pop()
        if not same:
            self._there ^= 1 << length
        return start, length

    def take_head(self, length: int) -> _Piece:
        """Cut the first `length` tokens off the longest piece of all, which is longer."""
        piece = self.take(self.longest)
        assert piece is not None, "a window is begun only if there are tokens for it"
        start, rest = piece[0], piece[1] - length
        self._starts[rest].append(start + length)
        self._there |= 1 << rest
        return start, length


def _packed(pieces: _Pieces, windows: int) -> tuple["array[int]", "array[int]", "array[int]"]:
    """Return the starts and the lengths of the windows' runs, and how many runs each has."""
    starts, lengths, counts = array("I"), array("I"), array("I")
    for _ in range(windows):
        gap, before = pieces.longest, len(starts)
        while gap:
            start, length = pieces.take(gap) or pieces.take_head(gap)
            starts.append(start)
            lengths.append(length)
            gap -= length
        counts.append(len(starts) - before)
    return starts, lengths, counts
