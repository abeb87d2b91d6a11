"""Files of tokens that others have made, as documents: flat binary files, little-endian.

nanoGPT and its relatives write a .bin of tokens alone, where the end of text may stand between two
documents. datatrove writes a .ds of tokens and beside it a .ds.index: for each document the place
of its end in tokens, as uint64 (src/datatrove/pipeline/tokens/tokenizer.py there).
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from farflock.node.data.documents import BadDocuments, Part, ReadingOptions, parts_of
from farflock.node.data.sources import SourceFile
from farflock.node.tokens.tokenizer import TokenIds

BLOCK_TOKENS = 1 << 20  # read at a time
_INDEX_DTYPE = np.dtype("<u8")


def read_token_file(file: SourceFile, options: ReadingOptions) -> Iterator[Part]:
    """Yield the documents of a file of tokens, without the end of text; raise `BadDocuments` for
    one whose sizes or tokens are wrong. There is nothing to skip: no part of it can be trusted."""
    count, rest = divmod(file.size, options.token_bytes)
    if rest:
        raise BadDocuments(
            f"{file.path} has {file.size:,} bytes, no whole number of tokens of"
            f" {options.token_bytes} bytes; name their size with --token-bytes"
        )
    index = Path(f"{file.path}.index")
    if index.is_file():
        ends: Iterator[tuple[int, int]] = _listed_places(file, index, count)
    else:
        ends = _found_places(file, options, count)
    for start, end in ends:
        yield from parts_of(_pieces(file, options, start, end))


def _pieces(
    file: SourceFile, options: ReadingOptions, start: int, end: int
) -> Iterator[tuple[TokenIds, int]]:
    """Yield the tokens of one document, but for an end of text at its end."""
    for place in range(start, end, BLOCK_TOKENS):
        stop = min(place + BLOCK_TOKENS, end)
        tokens = _tokens(file, options, place, stop)
        if stop == end and tokens[-1] == options.end_of_text:
            tokens = tokens[:-1]
        if len(tokens):
            yield tokens, stop * options.token_bytes


def _tokens(file: SourceFile, options: ReadingOptions, start: int, end: int) -> TokenIds:
    """Read a stretch of tokens, in the type that the tokenizer would give."""
    with Path(file.path).open("rb", buffering=0) as stream:
        stream.seek(start * options.token_bytes)
        raw = stream.read((end - start) * options.token_bytes)
    if len(raw) != (end - start) * options.token_bytes:
        raise BadDocuments(f"{file.path} became shorter while it was read; start again")
    tokens: TokenIds = np.frombuffer(raw, dtype=f"<u{options.token_bytes}")
    if (highest := int(tokens.max())) >= options.vocabulary:
        raise BadDocuments(
            f"{file.path} has the token {highest:,}, and the tokenizer only {options.vocabulary:,};"
            " name the tokenizer that made it, and the size of its tokens with --token-bytes"
        )
    return tokens


def _found_places(
    file: SourceFile, options: ReadingOptions, count: int
) -> Iterator[tuple[int, int]]:
    """Yield where documents begin and end, by the ends of text among the tokens."""
    first = 0
    for start in range(0, count, BLOCK_TOKENS):
        block = _tokens(file, options, start, min(start + BLOCK_TOKENS, count))
        for found in np.flatnonzero(block == options.end_of_text).tolist():
            yield first, start + found + 1
            first = start + found + 1
    if first < count:
        yield first, count


def _listed_places(file: SourceFile, index: Path, count: int) -> Iterator[tuple[int, int]]:
    """Yield where documents begin and end, by a file that lists the ends."""
    size, first = index.stat().st_size, 0
    with index.open("rb") as stream:
        while raw := stream.read(BLOCK_TOKENS):
            for end in _ends(raw).tolist():
                if not first <= end <= count:
                    raise _contradiction(file, index)
                if end > first:
                    yield first, end
                first = end
    if first != count or size % _INDEX_DTYPE.itemsize:
        raise _contradiction(file, index)


def _ends(raw: bytes) -> NDArray[np.uint64]:
    whole = len(raw) - len(raw) % _INDEX_DTYPE.itemsize
    return np.frombuffer(raw[:whole], dtype=_INDEX_DTYPE)


def _contradiction(file: SourceFile, index: Path) -> BadDocuments:
    return BadDocuments(
        f"{index} does not list the ends of the documents in {Path(file.path).name}; copy both"
        " again, and name the size of their tokens with --token-bytes"
    )
