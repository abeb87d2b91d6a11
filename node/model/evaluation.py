"""Held-out losses with their standard errors, for a model and for the simplest baseline.

A trained model must beat the baseline, which is a unigram model (token frequencies) of the corpus.
Losses are in nats per token, which are nats per byte with the byte tokenizer.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from farflock.node.model.data import evaluation
from farflock.node.model.llama import Llama, cross_entropy
from farflock.node.tokens.tokenizer import TokenIds


@dataclass(frozen=True, slots=True)
class LossEstimate:
    """A mean held-out loss and the standard error of that mean, which is infinite for one
    sequence."""

    mean: float
    standard_error: float
    sequences: int


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out sequences: tokens and next tokens, int64 (n, seq), and the bytes of text that the
    next tokens are; None if the tokenizer does not say how many."""

    x: Tensor
    y: Tensor
    text_bytes: int | None

    def bits_per_byte(self, loss: float) -> float | None:
        """Return a mean loss in nats a token as bits a byte of text, by which models of different
        tokenizers compare."""
        if not self.text_bytes:
            return None
        return loss * self.y.numel() / math.log(2) / self.text_bytes


def held_out_of(
    tokens: TokenIds, seq: int, sequences: int, lengths: NDArray[np.int64] | None
) -> HeldOut:
    """Return at most so many sequences of a held-out text, the same ones everywhere; `lengths` are
    the bytes of each token (`bytes_of_tokens`). Raise `BadData` if the text is too short."""
    x, y = evaluation(tokens, seq, sequences)
    return HeldOut(x, y, None if lengths is None else int(lengths[y.numpy()].sum()))


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
