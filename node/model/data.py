"""A peer's batches, which no other peer has a say in, and fixed sequences for evaluation.

Batches are a peer's samples in turn (node/data/samples.py). With `recurring`, the first so many
samples recur in epochs, each time in another order, for fine-tuning and for codecs that remember
samples (compression/aqsgd.py).
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflock.node.data.random_order import philox_key, random_order
from farflock.node.data.samples import SampleReader, Text
from farflock.node.data.shard_order import SampleStream
from farflock.node.tokens.tokenizer import TokenIds

MAX_RECURRING = 1 << 20  # samples per peer: each epoch sorts them again
_NUMBERS = 1 << 63  # of samples: a 64-bit counter


class BadData(ValueError):
    """Tokens that cannot be trained on; the message names the remedy."""


class Start(NamedTuple):
    """The beginning of a life in its samples: batch number `batch` has those from `cursor` on."""

    cursor: bytes = b""
    batch: int = 0


class Batches:
    """The training batches of one stream, which begin at `start`.

    Each sequence is new, until an epoch is over. With `recurring` samples, the n-th sequence is
    number n mod `recurring` in the order of epoch n div `recurring`: that of as many outputs of a
    key (counter: epoch, 1)."""

    def __init__(
        self,
        text: Text,
        stream: SampleStream,
        batch_size: int,
        seq: int,
        recurring: int = 0,
        start: Start = Start(),  # noqa: B008 - it cannot change
    ) -> None:
        if not 0 <= recurring <= MAX_RECURRING:
            raise BadData(
                f"the number of recurring samples is {recurring}; "
                f"it must be between 0 and {MAX_RECURRING}"
            )
        if batch_size < 1 or seq < 1:
            raise BadData(
                f"a batch of {batch_size} sequences of {seq} tokens is empty; use 1 or more of each"
            )
        self.batch_size, self.seq, self.recurring, self._stream = batch_size, seq, recurring, stream
        self._reader = SampleReader(text, stream, seq + 1, start.cursor)
        self._begin, self._number = start.batch, self._reader.start
        self._last: tuple[int, NDArray[np.integer]] | None = None
        self._all: NDArray[np.integer] | None = None

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return a step's inputs and next tokens, both int64 (batch_size, seq)."""
        if self._last is None or self._last[0] != step:  # a step may be taken again
            self._last = step, self._rows(step)
        return inputs_and_targets(self._last[1])

    def samples(self, step: int) -> tuple[int, ...]:
        """Return the batch's recurring samples, numbered from 0: the same in each of the peer's
        lives."""
        first = self._sample(step)
        found = [divmod(place, self.recurring) for place in range(first, first + self.batch_size)]
        return tuple(
            int(_epoch_order(self._stream, self.recurring, epoch)[place]) for epoch, place in found
        )

    def cursor(self, step: int) -> bytes:
        """Return the place of a batch."""
        number = self._sample(step)
        if self.recurring:  # the number is the place
            return self._reader.cursor(0)._replace(drawn=number).encode()
        return self._reader.cursor(number).encode()

    def _sample(self, step: int) -> int:
        """Return the number of a batch's first sample in the stream."""
        number = self._number + (step - self._begin) * self.batch_size
        if not 0 <= number < _NUMBERS:
            raise BadData(f"batch {step} is out of range; use numbers from {self._begin} on")
        return number

    def _rows(self, step: int) -> NDArray[np.integer]:
        if not self.recurring:
            return self._reader.read(self._sample(step), self.batch_size)
        if self._all is None:
            self._all = self._reader.read(0, self.recurring)
        return self._all[list(self.samples(step))]


def evaluation(held_out: TokenIds, seq: int, sequences: int) -> tuple[Tensor, Tensor]:
    """Return inputs and next tokens, int64 (n, seq), of n ≤ `sequences` held-out windows.

    The windows do not overlap, are evenly spread, and are the same on every peer.
    """
    return inputs_and_targets(evaluation_rows(held_out, seq, sequences))


def evaluation_rows(held_out: TokenIds, seq: int, sequences: int) -> TokenIds:
    """Return these windows, each with the token behind it (n, seq + 1)."""
    starts = evaluation_starts(len(held_out), seq, sequences)
    rows: TokenIds = held_out[starts[:, None] + np.arange(seq + 1)]
    return rows


def evaluation_starts(tokens: int, seq: int, sequences: int) -> NDArray[np.int64]:
    """Return the first positions of these windows in a text of so many tokens, (n,)."""
    fitting = (tokens - 1) // seq
    if fitting < 1 or sequences < 1:
        raise BadData(
            f"{tokens} held-out tokens are too few for {sequences} sequences of {seq}; "
            "hold out more text"
        )
    count = min(fitting, sequences)
    return np.arange(count, dtype=np.int64) * fitting // count * seq


def inputs_and_targets(rows: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
    """Return inputs and next tokens, int64 (n, seq), of windows with the token behind each."""
    both = torch.from_numpy(rows.astype(np.int64))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


@functools.lru_cache(maxsize=8)
def _epoch_order(stream: SampleStream, recurring: int, epoch: int) -> NDArray[np.int64]:
    key = philox_key(f"farflock-recurring-samples-v1 {stream.run_seed} {stream.peer}")
    return random_order(key, (epoch, 1), recurring)
