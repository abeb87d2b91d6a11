"""Held-out losses with their standard errors, for a model and for the simplest baseline.

A trained model must beat the baseline, which is a unigram model (token frequencies) of the corpus.
Losses are in nats per token, which are nats per byte with the byte tokenizer. Models of different
tokenizers compare by bits a byte of the text.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from farflock.node.model.data import inputs_and_targets
from farflock.node.model.llama import Llama, cross_entropy
from farflock.node.tokens.tokenizer import TokenIds

SEQUENCES = 256  # unless somebody says how many
AT_ONCE = 4096  # tokens that are measured together


@dataclass(frozen=True, slots=True)
class LossEstimate:
    """A mean held-out loss and the standard error of that mean, which is infinite for one
    sequence."""

    mean: float
    standard_error: float
    sequences: int


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out sequences, each with the token behind it (n, seq + 1), and the bytes of each token,
    (vocabulary,); None if the tokenizer does not say how many they are."""

    rows: TokenIds
    lengths: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """A loss on held-out text: `estimate` in nats a token, over `tokens`."""

    estimate: LossEstimate
    tokens: int
    bits_per_byte: float | None  # None: the tokenizer does not say how many bytes its tokens are

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss; infinite where that is too large a number."""
        try:
            return math.exp(self.estimate.mean)
        except OverflowError:
            return math.inf


def unigram_loss(train: TokenIds, held_out: TokenIds, vocab_size: int) -> float:
    """Return the cross-entropy of `held_out` under the add-one token frequencies of `train`."""
    if not len(held_out):
        raise ValueError("no held-out tokens to measure the unigram baseline on; hold out a text")
    seen = np.bincount(train, minlength=vocab_size).astype(np.float64) + 1.0
    asked = np.bincount(held_out, minlength=vocab_size).astype(np.float64)
    return float(-(asked * np.log(seen / seen.sum())).sum() / asked.sum())


def copy_of(model: Llama, weights: Mapping[str, Tensor]) -> Llama:
    """Return a model with copies of these parameters, and of the other ones of `model`, on its
    device."""
    copy, own = Llama(model.config, model.span), dict(model.named_parameters())
    copy.to(next(iter(own.values())).device)
    copy.logits_at_once = model.logits_at_once
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            parameter.copy_(weights.get(name, own[name]))
    return copy


def evaluate(model: nn.Module, x: Tensor, y: Tensor, batch_size: int = 16) -> LossEstimate:
    """Return a model's loss on `x` with next tokens `y`, both (n, seq); see `data.evaluation`.

    The standard error is over sequences, because the tokens of one sequence are not independent.
    """
    return summarise(losses(model, x, y, batch_size))


def measure(
    model: nn.Module,
    rows: TokenIds,
    lengths: NDArray[np.int64] | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> HeldOutLoss:
    """Measure a model, on the device that it is on, on sequences with the token behind each,
    (n, seq + 1); see `data.evaluation_rows`. `lengths` are the bytes of each token
    (`bytes_of_tokens`), and `progress` is called with the share that is done."""
    count, seq = len(rows), rows.shape[1] - 1
    at_once, each = max(AT_ONCE // seq, 1), list[Tensor]()
    for first in range(0, count, at_once):
        x, y = inputs_and_targets(rows[first : first + at_once])
        each.append(losses(model, x, y, at_once))
        progress(min((first + at_once) / count, 1.0))
    return held_out_loss(torch.cat(each), rows, lengths)


def held_out_loss(
    losses: Tensor, rows: TokenIds, lengths: NDArray[np.int64] | None = None
) -> HeldOutLoss:
    """Return the loss on sequences with the token behind each, (n, seq + 1), given the mean loss of
    each, float64 (n,), and the bytes of each token, (vocabulary,), if they are known."""
    targets = rows[:, 1:]
    bits = None if lengths is None else _bits_per_byte(losses, targets, lengths)
    return HeldOutLoss(summarise(losses), targets.size, bits)


def _bits_per_byte(losses: Tensor, targets: TokenIds, lengths: NDArray[np.int64]) -> float | None:
    """Return the bits of all tokens over the bytes of all; None if those are none, as of special
    tokens."""
    count = sum(int(lengths[row].sum()) for row in targets)  # row by row: text may be long
    total = float(losses.sum()) * targets.shape[1]
    return total / math.log(2) / count if count else None


@torch.no_grad()
def losses(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    batch_size: int = 16,
    halted: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Return each held-out sequence's mean loss, float64 (n,); leave the model in its present
    mode. Once `halted` returns True, leave out the rest."""
    was_training = model.training
    model.eval()
    try:
        pairs = zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True)
        none = torch.zeros(0, dtype=torch.float64)
        return torch.cat([none, *(_losses(model, a, b) for a, b in pairs if not halted())])
    finally:
        model.train(was_training)


def summarise(losses: Tensor) -> LossEstimate:
    """Return the mean and standard error of one loss per sequence."""
    count = losses.numel()
    error = float(losses.std(correction=1)) / math.sqrt(count) if count > 1 else math.inf
    return LossEstimate(float(losses.mean()), error, count)


def _losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss of each sequence, float64 (n,)."""
    device = next(model.parameters()).device
    x, y = x.to(device), y.to(device)
    each = model(x, y, "none") if isinstance(model, Llama) else cross_entropy(model(x), y, "none")
    return each.double().mean(dim=1).cpu()
