"""The sequences that a peer trains on, from an array in memory or from packed shards.

This is the seam between text and training: a task, a trainer of a pipeline and a follower see a
`SequenceStream`. Law: `batch(step)` is a pure function of the text, the run seed, the peer and the
step, and does not depend on the other peers, nor on other calls.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, cast

import numpy as np
from torch import Tensor

from farflock.node.data.draws import Drawn, Draws
from farflock.node.data.index import DataIndex, DataShard
from farflock.node.data.packing import Packing, document_lengths, packing_of
from farflock.node.model.data import (
    BadData,
    Batches,
    recurring_samples,
    require_batch,
    require_cursor,
    shifted,
)
from farflock.node.tokens.marks import highest_id
from farflock.node.tokens.tokenizer import TokenIds

MAX_HELD_OUT_TOKENS = 2**28  # of all sources: they are in memory at once
_MAX_KEPT = 256  # packed shards: some megabytes each
_SPARE_KEPT = 2  # beside one of each source: the next are packed before all the former are done


class SequenceStream(Protocol):
    """One peer's batches."""

    @property
    def batch_size(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def recurring(self) -> int:
        """The number of samples that recur; 0 if each sequence is new."""
        ...

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return a step's inputs and next tokens, both int64 (batch_size, seq). A next token that
        the loss leaves out is `IGNORED`."""
        ...

    def samples(self, step: int) -> tuple[int, ...]:
        """Return the batch's recurring samples, numbered from 0; only if some recur."""
        ...


@dataclass(frozen=True, slots=True)
class ShardedText:
    """A run's prepared text, as a node holds it.

    `shards` has the shards that each source is trained on, in the order of its pages, and `mix` the
    weights of sources (`Draws`). `open_shard` maps a shard's tokens without reading them; if it is
    not here, it raises an error with a remedy."""

    index: DataIndex
    shards: Mapping[str, tuple[DataShard, ...]]
    mix: Mapping[str, float] | None
    open_shard: Callable[[DataShard], TokenIds]

    @property
    def dtype(self) -> "np.dtype[np.integer]":
        """The type of opened tokens: signed if some have a mark, which makes them negative."""
        return np.dtype("<i4") if self.index.counts_answers else self.index.dtype

    def opened(self, shard: DataShard) -> TokenIds:
        """Return the tokens of a shard, those with a mark negative (node/tokens/marks.py); raise
        `BadData` if they are not what the index says."""
        tokens = self.open_shard(shard)
        if len(tokens) != shard.tokens:
            raise BadData(
                f"{shard.name} has {len(tokens)} tokens, and its index says {shard.tokens}; "
                "delete it, so that it is fetched again"
            )
        has_marks = self.index.counts_answers
        highest = highest_id(tokens, has_marks) if len(tokens) else 0
        if highest >= self.index.vocabulary:
            raise BadData(
                f"{shard.name} has token {highest}, and the index's vocabulary ends at "
                f"{self.index.vocabulary - 1}; prepare the data again with its own tokenizer"
            )
        # `TokenIds` has no signed type: only `shifted` looks at the sign
        return cast(TokenIds, tokens.view(self.dtype)) if has_marks else tokens


Text = TokenIds | ShardedText


class PackedBatches:
    """The training batches of one peer from prepared text.

    Step s has the peer's draws number s · `batch_size` and on; each is a window of seq + 1 tokens
    of a packed shard. With `recurring` samples these are the first draws, in the orders that
    `Batches` has too."""

    def __init__(
        self,
        text: ShardedText,
        run_seed: int,
        peer: str,
        batch_size: int,
        seq: int,
        recurring: int = 0,
    ) -> None:
        require_batch(batch_size, seq, recurring)
        self.text, self.batch_size, self.seq, self.recurring = text, batch_size, seq, recurring
        self._stream = run_seed, peer
        sizes = {
            source: [shard.tokens for shard in shards] for source, shards in text.shards.items()
        }
        self._draws = Draws(sizes, seq + 1, run_seed, peer, text.mix)
        kept = max(len(sizes), len(self._draws.shards_needed(0, recurring))) + _SPARE_KEPT
        self._packed = lru_cache(min(kept, _MAX_KEPT))(self._pack)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return a step's inputs and next tokens, both int64 (batch_size, seq)."""
        rows = [self._row(self._draws.draw(number)) for number in self._numbers(step, 1)]
        return shifted(np.stack(rows))

    def samples(self, step: int) -> tuple[int, ...]:
        """Return the batch's recurring samples, numbered from 0: the same in each of the peer's
        lives."""
        assert self.recurring, "no sample recurs"
        return tuple(self._numbers(step, 1))

    def needed(self, step: int, steps: int) -> list[DataShard]:
        """Return the shards that the next `steps` steps draw from, in the order of first need."""
        if self.recurring:
            places = self._recurring_shards(step, steps)
        else:
            first = step * self.batch_size
            places = self._draws.shards_needed(first, steps * self.batch_size)
        return [self.text.shards[source][shard] for source, shard in places]

    def _numbers(self, step: int, steps: int) -> Iterator[int]:
        """Yield the numbers of the steps' draws."""
        require_cursor(step)
        first, end = step * self.batch_size, (step + steps) * self.batch_size
        if not self.recurring:
            yield from range(first, end)
            return
        for start in range(first, end, self.batch_size):
            places = range(start, start + self.batch_size)
            yield from recurring_samples(*self._stream, self.recurring, places)

    def _recurring_shards(self, step: int, steps: int) -> list[tuple[str, int]]:
        """Return the shards that the steps' samples are from. In a random order, all of them have
        soon come, and then the rest need not be looked at."""
        total, found = (
            len(self._draws.shards_needed(0, self.recurring)),
            dict[tuple[str, int], None](),
        )
        for number in self._numbers(step, steps):
            drawn = self._draws.draw(number)
            found[drawn.source, drawn.shard] = None
            if len(found) == total:
                break
        return list(found)

    def _row(self, drawn: Drawn) -> TokenIds:
        tokens, packing = self._packed(self.text.shards[drawn.source][drawn.shard])
        return packing.window(drawn.window, tokens)

    def _pack(self, shard: DataShard) -> tuple[TokenIds, Packing]:
        tokens = self.text.opened(shard)
        documents = document_lengths(tokens, self.text.index.end_of_text)
        return tokens, packing_of(documents, self.seq + 1)


def stream_of(
    text: Text, run_seed: int, peer: str, batch_size: int, seq: int, recurring: int = 0
) -> SequenceStream:
    """Return a peer's batches: `Batches` of an array, and `PackedBatches` of prepared text."""
    if isinstance(text, ShardedText):
        return PackedBatches(text, run_seed, peer, batch_size, seq, recurring)
    return Batches(text, run_seed, peer, batch_size, seq, recurring=recurring)


def held_out_tokens(text: ShardedText) -> TokenIds:
    """Return the held-out documents of all sources, one after another in the index's order; none
    if none are held out. Tokens with a mark are negative. Raise `BadData` if they are too many to
    be in memory at once."""
    shards = [shard for source in text.index.sources.values() for shard in source.held_out]
    if (total := sum(shard.tokens for shard in shards)) > MAX_HELD_OUT_TOKENS:
        raise BadData(
            f"{total} tokens are held out, and at most {MAX_HELD_OUT_TOKENS} can be evaluated; "
            "prepare the data again, and hold out less"
        )
    if len(shards) == 1:
        return text.opened(shards[0])
    nothing = cast(TokenIds, np.zeros(0, dtype=text.dtype))
    return np.concatenate([nothing, *map(text.opened, shards)])
