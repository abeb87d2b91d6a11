"""Held-out losses with their standard errors, for a model and for the simplest baseline.

A trained model must beat the baseline, which is a unigram model (token frequencies) of the corpus.
Losses are in nats per token, which are nats per byte with the byte tokenizer.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from farflock.node.model.llama import Llama, cross_entropy
from farflock.node.tokens.tokenizer import TokenIds


@dataclass(frozen=True, slots=True)
class LossEstimate:
    """A mean held-out loss and the standard error of that mean, which is infinite for one
    sequence."""

    mean: float
    standard_error: float
    sequences: int


def unigram_loss(train: TokenIds, held_out: TokenIds, vocab_size: int) -> float:
    """Return the cross-entropy of `held_out` under the add-one token frequencies of `train`."""
    if not len(held_out):
        raise ValueError("no held-out tokens to measure the unigram baseline on; hold out a text")
    seen = np.bincount(train, minlength=vocab_size).astype(np.float64) + 1.0
    asked = np.bincount(held_out, minlength=vocab_size).astype(np.float64)
    return float(-(asked * np.log(seen / seen.sum())).sum() / asked.sum())


def evaluate(model: nn.Module, x: Tensor, y: Tensor, batch_size: int = 16) -> LossEstimate:
    """Return a model's loss on `x` with next tokens `y`, both (n, seq); see `data.evaluation`.

    The standard error is over sequences, because the tokens of one sequence are not independent.
    """
    return summarise(losses(model, x, y, batch_size))


@torch.no_grad()
def losses(model: nn.Module, x: Tensor, y: Tensor, batch_size: int = 16) -> Tensor:
    """Return each held-out sequence's mean loss, float64 (n,); leave the model in its present
    mode."""
    was_training = model.training
    model.eval()
    try:
        pairs = zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True)
        return torch.cat([_losses(model, a, b) for a, b in pairs])
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
