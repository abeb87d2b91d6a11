"""Batches as a pure function of (run seed, peer, round, step), and fixed sequences for evaluation.

A peer's order of data must not depend on the other peers, and must resume from two integers. So a
batch's windows come from a counter-based generator (Philox), which need not be run forward.

Each batch draws new windows. With `recurring`, that many windows are drawn once and recur in
epochs, each time in another order, for fine-tuning and for codecs that remember samples
(compression/aqsgd.py).
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflock.node.model.loss import IGNORED
from farflock.node.model.random_order import philox_key, random_order, raw_outputs
from farflock.node.tokens.marks import PLAIN
from farflock.node.tokens.tokenizer import TokenIds

MAX_RECURRING = 1 << 20  # samples per peer: each epoch sorts them again
_CURSOR_LIMIT = 1 << 63  # a round or step is a 64-bit counter


class BadData(ValueError):
    """Tokens that cannot be trained on; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Batches:
    """The training batches of one peer.

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
        require_batch(self.batch_size, self.seq, self.recurring)
        if len(self.tokens) <= self.seq:
            raise BadData(
                f"{len(self.tokens)} tokens are too few for a sequence of {self.seq} and its next "
                "token; use a longer text"
            )

    def batch(self, step: int, round: int = 0) -> tuple[Tensor, Tensor]:
        """Return a step's inputs and next tokens, both int64 (batch_size, seq)."""
        starts = self.starts(step, round)
        return _windows(self.tokens, starts, self.seq)

    def starts(self, step: int, round: int = 0) -> NDArray[np.int64]:
        """Return the first positions of the batch's sequences."""
        count = np.uint64(len(self.tokens) - self.seq)
        if self.recurring:
            chosen = list(self.samples(step, round))
            draws = _sample_draws(self.run_seed, self.peer, self.recurring)[chosen]
            return (draws % count).astype(np.int64)
        require_cursor(step, round)
        key = philox_key(f"farflock-data-order-v1 {self.run_seed} {self.peer}")
        draws = raw_outputs(key, (step, round), self.batch_size)
        return (draws % count).astype(np.int64)

    def samples(self, step: int, round: int = 0) -> tuple[int, ...]:
        """Return the batch's recurring samples, numbered from 0: the same in each of the peer's
        lives."""
        require_cursor(step, round)
        first, given = step * self.batch_size, (self.run_seed, self.peer, self.recurring)
        return recurring_samples(*given, range(first, first + self.batch_size), round)


def require_batch(batch_size: int, seq: int, recurring: int) -> None:
    """Raise `BadData` for an empty batch, or an impossible number of recurring samples."""
    if not 0 <= recurring <= MAX_RECURRING:
        raise BadData(
            f"the number of recurring samples is {recurring}; "
            f"it must be between 0 and {MAX_RECURRING}"
        )
    if batch_size < 1 or seq < 1:
        raise BadData(
            f"a batch of {batch_size} sequences of {seq} tokens is empty; use 1 or more of each"
        )


def require_cursor(step: int, round: int = 0) -> None:
    """Raise `BadData` unless both are 64-bit counters."""
    if not (0 <= step < _CURSOR_LIMIT and 0 <= round < _CURSOR_LIMIT):
        raise BadData(
            f"step {step} of round {round} is out of range; use numbers from 0 to 2^63 - 1"
        )


def recurring_samples(
    run_seed: int, peer: str, recurring: int, places: range, round: int = 0
) -> tuple[int, ...]:
    """Return which of a peer's recurring samples its sequences at `places` are: each of them once
    in each epoch of `recurring` sequences."""
    found = []
    for place in places:
        epoch, at = divmod(place, recurring)
        order = _epoch_order(run_seed, peer, recurring, round, epoch % _CURSOR_LIMIT)
        found.append(int(order[at]))
    return tuple(found)


def evaluation(held_out: TokenIds, seq: int, sequences: int) -> tuple[Tensor, Tensor]:
    """Return inputs and next tokens, int64 (n, seq), of n ≤ `sequences` held-out windows.

    The windows do not overlap, are evenly spread, and are the same on every peer. Those in which
    the loss counts no token are left out; raise `BadData` if that leaves none, or there are too few
    tokens.
    """
    fitting = (len(held_out) - 1) // seq
    if fitting < 1 or sequences < 1:
        raise BadData(
            f"{len(held_out)} held-out tokens are too few for {sequences} sequences of {seq}; "
            "hold out more text"
        )
    count = min(fitting, sequences)
    starts = np.arange(count, dtype=np.int64) * fitting // count * seq
    return with_targets(*_windows(held_out, starts, seq))


def with_targets(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequences, (n, seq) inputs and next tokens, in which any next token counts; raise
    `BadData` if there is none."""
    counts = (y != IGNORED).any(dim=1)
    if not counts.any():
        raise BadData(
            f"no answer is in any of {len(y)} held-out sequences of {y.shape[1]} tokens, so there"
            " is no loss to measure; hold out more text"
        )
    return (x, y) if counts.all() else (x[counts], y[counts])


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
    return shifted(np.stack([tokens[start : start + seq + 1] for start in starts]))


def shifted(rows: NDArray[Any]) -> tuple[Tensor, Tensor]:
    """Return the inputs and the next tokens, int64 (n, seq), of n rows of seq + 1 tokens. Negative
    ones have a mark (node/tokens/marks.py): as next tokens they are `IGNORED`."""
    both = torch.from_numpy(rows.astype(np.int64))
    x, y = both[:, :-1].contiguous(), both[:, 1:].contiguous()
    if rows.dtype.kind == "u":
        return x, y
    return x & PLAIN, y.masked_fill(y < 0, IGNORED)
