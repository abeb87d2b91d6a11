"""Experts: a layer's feed-forward net as several, of which a router chooses a few for each token.

The arithmetic and the names are those of Hugging Face's `MixtralForCausalLM` (arXiv:2401.04088):
the router's softmax over all experts in float32, the largest few of it scaled to sum to 1, and the
sum of these experts' outputs with these weights. No token is dropped.

What keeps experts in use is the balance of a layer (Fedus et al., arXiv:2101.03961, equations 4 to
6): E · Σ f·P over E experts, where f is an expert's share of the tokens' choices and P the mean of
its probability. It is 1 if all experts have the same share, and E if one has all. Unlike
transformers, which takes the shares over the tokens of all layers together, each layer has its own,
so that stages need not know each other's. It is that of the tokens that are computed at once.

Shapes: B sequences, L positions, D model width, T = B · L tokens, E experts, C chosen ones.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LinearOf = Callable[[int, int], nn.Linear]  # (inputs, outputs) -> a layer without values yet


class Expert(nn.Module):
    """SwiGLU: w2(silu(w1(x)) · w3(x)) (arXiv:2002.05202)."""

    def __init__(self, dim: int, hidden: int, linear: LinearOf) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = linear(dim, hidden), linear(hidden, dim), linear(dim, hidden)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Map (T, D) to (T, D); T may be 0."""
        y_TD: Tensor = self.w2(F.silu(self.w1(x_TD)) * self.w3(x_TD))
        return y_TD


class Experts(nn.Module):
    """`count` experts of a width `hidden`, and the router that chooses `used` of them."""

    def __init__(self, dim: int, hidden: int, count: int, used: int, linear: LinearOf) -> None:
        super().__init__()
        self.used = used
        self.gate = linear(dim, count)
        self.experts = nn.ModuleList(Expert(dim, hidden, linear) for _ in range(count))

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """Map (B, L, D) to (B, L, D), and return the balance (see above), a scalar.

        Each expert is called, for no token too, so that all weights have gradients on every peer.
        One after another adds its outputs, at most once a token: so sums have one order, and the
        same bits in each run."""
        x_TD = x_BLD.flatten(0, 1)
        odds_TE = _softmax(self.gate(x_TD))
        odds_TC, chosen_TC = odds_TE.topk(self.used, dim=-1)
        weights_TC = odds_TC / odds_TC.sum(dim=-1, keepdim=True)
        y_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            tokens, choices = torch.where(chosen_TC == number)
            found = expert(x_TD[tokens]) * weights_TC[tokens, choices, None]
            y_TD = y_TD.index_add(0, tokens, found.to(y_TD.dtype))
        return y_TD.view_as(x_BLD), balance_of(odds_TE, chosen_TC)


class AddedLoss(torch.autograd.Function):
    """The identity of `y`, which lets a scalar take part in the loss that will be computed from
    `y`: its gradient is 1, whatever that of `y` is."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scalar: Tensor) -> Tensor:  # noqa: ANN401 - torch's
        """Return `y`."""
        ctx.like = scalar.dtype, scalar.device
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - torch's
        """Return the gradients of both."""
        kind, place = ctx.like
        return grads[0], torch.ones((), dtype=kind, device=place)


def balance_of(odds_TE: Tensor, chosen_TC: Tensor) -> Tensor:
    """Return how unevenly tokens are spread: 1 if evenly. Only the odds have a gradient."""
    count = odds_TE.shape[-1]
    taken_E = F.one_hot(chosen_TC, count).sum(dim=(0, 1))
    share_E = taken_E.to(odds_TE.dtype) / chosen_TC.numel()
    return count * (share_E * odds_TE.mean(dim=0)).sum()


def _softmax(logits: Tensor) -> Tensor:
    return F.softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
