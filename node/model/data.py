"""Batches as a pure function of (run seed, peer, round, step), and fixed sequences for evaluation.

A peer's order of data must not depend on the other peers, and must resume from two integers. So a
batch's windows come from a counter-based generator (Philox), which need not be run forward.

Each batch draws new windows. With `recurring`, that many windows are drawn once and recur in
epochs, each time in another order, for fine-tuning and for codecs that remember samples
(compression/aqsgd.py).
"""

import functools
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflock.node.data.random_order import philox_key, random_order, raw_outputs
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
        if not 0 <= self.recurring <= MAX_RECURRING:
            raise BadData(
                f"the number of recurring samples is {self.recurring}; "
                f"it must be between 0 and {MAX_RECURRING}"
            )
        if self.batch_size < 1 or self.seq < 1:
            raise BadData(
                f"a batch of {self.batch_size} sequences of {self.seq} tokens is empty; "
                "use 1 or more of each"
            )
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
        self._require_cursor(step, round)
        key = philox_key(f"farflock-data-order-v1 {self.run_seed} {self.peer}")
        draws = raw_outputs(key, (step, round), self.batch_size)
        return (draws % count).astype(np.int64)

    def samples(self, step: int, round: int = 0) -> tuple[int, ...]:
        """Return the batch's recurring samples, numbered from 0: the same in each of the peer's
        lives."""
        self._require_cursor(step, round)
        first = step * self.batch_size
        places = [divmod(at, self.recurring) for at in range(first, first + self.batch_size)]
        given = self.run_seed, self.peer, self.recurring, round
        return tuple(
            int(_epoch_order(*given, epoch % _CURSOR_LIMIT)[place]) for epoch, place in places
        )

    def _require_cursor(self, step: int, round: int) -> None:
        if not (0 <= step < _CURSOR_LIMIT and 0 <= round < _CURSOR_LIMIT):
            raise BadData(
                f"step {step} of round {round} is out of range; use numbers from 0 to 2^63 - 1"
            )


def evaluation(held_out: TokenIds, seq: int, sequences: int) -> tuple[Tensor, Tensor]:
    """Return inputs and next tokens, int64 (n, seq), of n ≤ `sequences` held-out windows.

    The windows do not overlap, are evenly spread, and are the same on every peer.
    """
    fitting = (len(held_out) - 1) // seq
    if fitting < 1 or sequences < 1:
        raise BadData(
            f"{len(held_out)} held-out tokens are too few for {sequences} sequences of {seq}; "
            "hold out more text"
        )
    count = min(fitting, sequences)
    starts = np.arange(count, dtype=np.int64) * fitting // count * seq
    return _windows(held_out, starts, seq)


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
    rows = np.stack([tokens[start : start + seq + 1] for start in starts]).astype(np.int64)
    both = torch.from_numpy(rows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
