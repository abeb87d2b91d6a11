"""A peer's batches, which no other peer has a say in, and fixed sequences for evaluation.

From prepared data they are its samples in turn (node/data/samples.py). From a text in memory they
are windows that a counter-based generator (Philox) draws, a pure function of (run seed, peer,
round, step).

Each sequence is new. With `recurring`, that many are drawn once and recur in epochs, each time in
another order, for fine-tuning and for codecs that remember samples (compression/aqsgd.py).
"""

import functools
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflock.node.data.random_order import philox_key, random_order, raw_outputs
from farflock.node.data.samples import SampleReader, Text
from farflock.node.data.shard_order import SampleStream
from farflock.node.tokens.tokenizer import TokenIds

MAX_RECURRING = 1 << 20  # samples per peer: each epoch sorts them again
_CURSOR_LIMIT = 1 << 63  # a round or step is a 64-bit counter


class BadData(ValueError):
    """Tokens that cannot be trained on; the message names the remedy."""


TrainingText = TokenIds | Text


class BatchStream(Protocol):
    """One peer's batches."""

    @property
    def batch_size(self) -> int: ...
    @property
    def seq(self) -> int: ...
    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return a step's inputs and next tokens, both int64 (batch_size, seq)."""
        ...

    def samples(self, step: int) -> tuple[int, ...]:
        """Return the batch's recurring samples, numbered from 0; only if some recur."""
        ...

    def cursor(self, step: int) -> bytes:
        """Return the place of a batch, for another life to begin there; nothing if the number is
        enough. Any thread may ask."""
        ...

    def first(self, trained: int) -> int:
        """Return the batch at which a new life begins in a run that has trained so many."""
        ...


class Start(NamedTuple):
    """The beginning of a life in its samples: batch number `batch` has those from `cursor` on."""

    cursor: bytes = b""
    batch: int = 0


@dataclass(frozen=True, slots=True)
class Batches:
    """The training batches of one peer, from tokens in memory.

    `tokens` may be a memmap: a batch touches `batch · (seq + 1)` of them. Each sequence starts at
    an independent, uniform position: a raw 64-bit Philox output modulo the number of positions
    (bias below 2^-32 for files under 4G tokens). Key: SHA-256 of run seed and peer. Counter: step,
    round.

    With `recurring` samples, the n-th sequence is number n mod `recurring` of epoch n div
    `recurring`. Another key gives the samples' starts (counter 0) and the order of each epoch, that
    of `recurring` outputs (counter: epoch, round + 1).
    """

    tokens: TokenIds
    run_seed: int
    peer: str
    batch_size: int
    seq: int
    recurring: int = field(default=0, kw_only=True)  # 0: each sequence is new

    def __post_init__(self) -> None:
        _require_batch(self.batch_size, self.seq, self.recurring)
        if len(self.tokens) <= self.seq:
            raise BadData(
                f"{len(self.tokens)} tokens are too few for a sequence of {self.seq} and its next "
                "token; use a longer text"
            )

    def batch(self, step: int, round: int = 0) -> tuple[Tensor, Tensor]:
        """Return a step's inputs and next tokens, both int64 (batch_size, seq)."""
        starts = self.starts(step, round)
        return _windows(self.tokens, starts, self.seq)

    def cursor(self, step: int) -> bytes:
        """Return nothing: the number of a batch is its place."""
        return b""

    def first(self, trained: int) -> int:
        """Return the run's position, so that no life begins again at the first batch."""
        return trained

    def starts(self, step: int, round: int = 0) -> NDArray[np.int64]:
        """Return the first positions of the batch's sequences."""
        count = np.uint64(len(self.tokens) - self.seq)
        if self.recurring:
            chosen = list(self.samples(step, round))
            draws = _sample_draws(self.run_seed, self.peer, self.recurring)[chosen]
            return (draws % count).astype(np.int64)
        _require_cursor(step, round)
        key = philox_key(f"farflock-data-order-v1 {self.run_seed} {self.peer}")
        draws = raw_outputs(key, (step, round), self.batch_size)
        return (draws % count).astype(np.int64)

    def samples(self, step: int, round: int = 0) -> tuple[int, ...]:
        """Return the batch's recurring samples, numbered from 0: the same in each of the peer's
        lives."""
        _require_cursor(step, round)
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        return _recurring(self.run_seed, self.peer, self.recurring, places, round)


class SampleBatches:
    """The training batches of one peer, from prepared data: its samples in turn.

    With `recurring`, these are the first samples of the peer, in the orders that `Batches` has
    too."""

    def __init__(
        self,
        text: Text,
        stream: SampleStream,
        batch_size: int,
        seq: int,
        recurring: int = 0,
        start: Start = Start(),  # noqa: B008 - it cannot change
    ) -> None:
        _require_batch(batch_size, seq, recurring)
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
        places = range(first, first + self.batch_size)
        return _recurring(self._stream.run_seed, self._stream.peer, self.recurring, places)

    def cursor(self, step: int) -> bytes:
        """Return the place of a batch."""
        number = self._sample(step)
        if self.recurring:  # the number is the place
            return self._reader.cursor(0)._replace(drawn=number).encode()
        return self._reader.cursor(number).encode()

    def first(self, trained: int) -> int:
        """Return the batch that begins this life."""
        return self._begin

    def _sample(self, step: int) -> int:
        """Return the number of a batch's first sample in the stream."""
        number = self._number + (step - self._begin) * self.batch_size
        _require_cursor(number)
        return number

    def _rows(self, step: int) -> NDArray[np.integer]:
        if not self.recurring:
            return self._reader.read(self._sample(step), self.batch_size)
        if self._all is None:
            self._all = self._reader.read(0, self.recurring)
        return self._all[list(self.samples(step))]


def batches_of(
    text: TrainingText,
    stream: SampleStream,
    batch_size: int,
    seq: int,
    recurring: int = 0,
    start: Start = Start(),  # noqa: B008 - it cannot change
) -> BatchStream:
    """Return the batches of a stream. A text in memory has no lanes and needs no start."""
    if isinstance(text, Text):
        return SampleBatches(text, stream, batch_size, seq, recurring, start)
    return Batches(text, stream.run_seed, stream.peer, batch_size, seq, recurring=recurring)


def _require_batch(batch_size: int, seq: int, recurring: int) -> None:
    if not 0 <= recurring <= MAX_RECURRING:
        raise BadData(
            f"the number of recurring samples is {recurring}; "
            f"it must be between 0 and {MAX_RECURRING}"
        )
    if batch_size < 1 or seq < 1:
        raise BadData(
            f"a batch of {batch_size} sequences of {seq} tokens is empty; use 1 or more of each"
        )


def _require_cursor(step: int, round: int = 0) -> None:
    if not (0 <= step < _CURSOR_LIMIT and 0 <= round < _CURSOR_LIMIT):
        raise BadData(
            f"step {step} of round {round} is out of range; use numbers from 0 to 2^63 - 1"
        )


def _recurring(
    run_seed: int, peer: str, recurring: int, places: range, round: int = 0
) -> tuple[int, ...]:
    """Return which recurring samples the sequences at `places` are: each once in each epoch."""
    found = [divmod(place, recurring) for place in places]
    return tuple(
        int(_epoch_order(run_seed, peer, recurring, round, epoch % _CURSOR_LIMIT)[place])
        for epoch, place in found
    )


def evaluation(held_out: TokenIds, seq: int, sequences: int) -> tuple[Tensor, Tensor]:
    """Return inputs and next tokens, int64 (n, seq), of n ≤ `sequences` held-out windows.

    The windows do not overlap, are evenly spread, and are the same on every peer.
    """
    return inputs_and_targets(evaluation_rows(held_out, seq, sequences))


def evaluation_rows(held_out: TokenIds, seq: int, sequences: int) -> TokenIds:
    """Return these windows, each with the token behind it (n, seq + 1)."""
    return _rows(held_out, evaluation_starts(len(held_out), seq, sequences), seq)


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
def _sample_draws(run_seed: int, peer: str, recurring: int) -> NDArray[np.uint64]:
    return raw_outputs(_samples_key(run_seed, peer), (0, 0), recurring)


@functools.lru_cache(maxsize=8)
def _epoch_order(
    run_seed: int, peer: str, recurring: int, round: int, epoch: int
) -> NDArray[np.int64]:
    return random_order(_samples_key(run_seed, peer), (epoch, round + 1), recurring)


def _samples_key(run_seed: int, peer: str) -> NDArray[np.uint64]:
    return philox_key(f"farflock-recurring-samples-v1 {run_seed} {peer}")


def _windows(tokens: TokenIds, starts: NDArray[np.int64], seq: int) -> tuple[Tensor, Tensor]:
    return inputs_and_targets(_rows(tokens, starts, seq))


def _rows(tokens: TokenIds, starts: NDArray[np.int64], seq: int) -> TokenIds:
    rows: TokenIds = tokens[starts[:, None] + np.arange(seq + 1)]
    return rows
