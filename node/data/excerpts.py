"""A few documents of prepared data, drawn by a seed, to look at."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from farflock.node.data.random_order import philox_key, raw_outputs
from farflock.node.tokens.tokenizer import TokenIds

EXCERPTS = 5
MAX_CHARS = 300  # of each that are shown


class TokenPlace(NamedTuple):
    """A token of several sources: its source, its shard there, and its position in the shard."""

    source: int
    shard: int
    token: int


def drawn_places(sizes: Sequence[Sequence[int]], seed: int, count: int) -> list[TokenPlace]:
    """Return `count` uniformly drawn tokens, given the tokens of each shard of each source: those
    of one seed are always the same. None if there are no tokens."""
    shards = [(source, n) for source, each in enumerate(sizes) for n in range(len(each))]
    ends = np.cumsum([size for each in sizes for size in each], dtype=np.uint64)
    if not len(ends):
        return []
    draws = raw_outputs(philox_key(f"farflock-excerpts-v1 {seed}"), (0, 0), count) % ends[-1]
    found = list[TokenPlace]()
    for draw in draws:
        place = int(np.searchsorted(ends, draw, side="right"))
        begin = int(ends[place - 1]) if place else 0
        found.append(TokenPlace(*shards[place], int(draw) - begin))
    return found


def document_around(tokens: TokenIds, end_of_text: int, token: int) -> TokenIds:
    """Return the document of a shard (n,) that has the token at this position, with its end."""
    ends = np.flatnonzero(tokens == end_of_text)
    place = int(np.searchsorted(ends, token))
    begin = int(ends[place - 1]) + 1 if place else 0
    return tokens[begin : int(ends[place]) + 1]


def shown(text: str) -> str:
    """Return the beginning of a text on one line, without what a terminal could obey."""
    words = "".join(char if char.isprintable() else " " for char in text[: 4 * MAX_CHARS]).split()
    line = " ".join(words)
    return line if len(line) <= MAX_CHARS else f"{line[: MAX_CHARS - 1]}…"
