"""The held-out sequences that a run is evaluated on, put together as the shards come that have a
part of them.

They are windows of one text: the first held-out tokens of each source, one source after the other.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farflock.node.assembly.text import MAX_HELD_OUT_TOKENS
from farflock.node.data.folder import copy_rows
from farflock.node.data.shard_table import ShardTable
from farflock.node.model.data import evaluation_starts
from farflock.node.tokens.tokenizer import TokenIds


class HeldOutShard(NamedTuple):
    """A shard of the text: its source, its number there, the position of its first token, and how
    many of its tokens belong to the text."""

    source: int
    number: int
    begin: int
    tokens: int


class HeldOutRows:
    """Windows of `seq` tokens of the sources with these tables, `sequences` at most, each with the
    token behind it. Raise `BadData` if there is too little text."""

    def __init__(self, tables: Sequence[ShardTable], seq: int, sequences: int) -> None:
        shards = list(_shards(tables))
        total = sum(shard.tokens for shard in shards)
        self._starts = evaluation_starts(total, seq, sequences)
        kind = tables[0].index.token_type
        self._rows: TokenIds = np.zeros((len(self._starts), seq + 1), dtype=kind)
        self.missing = [shard for shard in shards if len(self._touched(shard))]

    def take(self, shard: HeldOutShard, tokens: TokenIds) -> None:
        """Take in the tokens of a missing shard (n,)."""
        mine, rows = tokens[: shard.tokens], self._touched(shard)
        copy_rows(mine, shard.begin, self._starts, self._rows, rows)
        self.missing.remove(shard)  # last: another thread may ask for the rows

    @property
    def rows(self) -> TokenIds | None:
        """The windows (n, seq + 1); None as long as a shard is missing."""
        return None if self.missing else self._rows

    def _touched(self, shard: HeldOutShard) -> NDArray[np.int64]:
        """Return the windows that have a part of a shard."""
        ends, end = self._starts + self._rows.shape[1], shard.begin + shard.tokens
        return np.flatnonzero((self._starts < end) & (ends > shard.begin))


def _shards(tables: Sequence[ShardTable]) -> Iterator[HeldOutShard]:
    begin = 0
    for source, table in enumerate(tables):
        left = MAX_HELD_OUT_TOKENS // len(tables)
        for number in range(table.train, len(table)):
            tokens = min(table.tokens(number), left)
            if tokens:
                yield HeldOutShard(source, number, begin, tokens)
            begin, left = begin + tokens, left - tokens
