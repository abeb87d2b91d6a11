"""Outer optimizers: they move the outer parameters by the mean pseudo-gradient (start minus end, so
it is subtracted).

Portable arithmetic: each multiplication and addition is its own float32 call, because all peers
must get the same bits.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Outer(Protocol):
    """Law: pure; zero pseudo-gradient and zero momentum leave the parameters as they are. It takes
    one tensor at a time, so that a model's step needs memory for one more tensor only."""

    def step(self, phi: Tensor, pseudo_grad: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
        """Return new parameters and new momentum of one tensor."""
        ...


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x · float32(factor): one rounding per value, the same on every machine."""
    return x * torch.tensor(factor, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class OuterSGD:
    """phi <- phi - lr · D. With lr 1 this is parameter averaging (FedAvg)."""

    lr: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(self.lr)

    def step(self, phi: Tensor, pseudo_grad: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
        """Step as in the class's equation."""
        return phi - scaled(pseudo_grad, self.lr), momentum


@dataclass(frozen=True, slots=True)
class OuterHeavyBall:
    """u <- mu·u + D;  phi <- phi - lr·u. NoLoCo's released code calls this Nesterov."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _require_positive(self.lr)
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"a momentum of {self.momentum} is out of range; choose one in [0, 1), usually 0.9"
            )

    def step(self, phi: Tensor, pseudo_grad: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
        """Step as in the class's equations."""
        u = scaled(momentum, self.momentum) + pseudo_grad
        return phi - scaled(u, self.lr), u


@dataclass(frozen=True, slots=True)
class OuterNesterov(OuterHeavyBall):
    """u <- mu·u + D;  phi <- phi - lr·(D + mu·u): torch's form of Nesterov momentum, dampening 0
    (DiLoCo, arXiv:2311.08105; torch.optim.SGD(nesterov=True))."""

    def step(self, phi: Tensor, pseudo_grad: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
        """Step as in the class's equations."""
        u = scaled(momentum, self.momentum) + pseudo_grad
        ahead = pseudo_grad + scaled(u, self.momentum)
        return phi - scaled(ahead, self.lr), u


def _require_positive(lr: float) -> None:
    if not 0 < lr <= 10:
        raise ValueError(
            f"an outer learning rate of {lr} is out of range; "
            "choose one in (0, 10], usually 0.3 to 1"
        )
