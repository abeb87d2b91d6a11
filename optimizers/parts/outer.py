"""Outer optimizers: they move the outer parameters by the mean pseudo-gradient (start minus end, so
it is subtracted).

Portable arithmetic: each multiplication and addition is its own float32 call, because all peers
must get the same bits.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from farflock.compression.elementwise import nesterov_


class Outer(Protocol):
    """Law: each value depends on its own place alone; zero pseudo-gradient and zero momentum leave
    the parameters as they are. It takes one block at a time, so that a model's step needs no memory
    of the model's size."""

    def step_(self, phi: Tensor, pseudo_grad: Tensor, momentum: Tensor) -> None:
        """Change parameters and momentum in place."""
        ...

    def step(self, phi: Tensor, pseudo_grad: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
        """Return new parameters and new momentum."""
        after, u = phi.clone(), momentum.clone()
        self.step_(after, pseudo_grad, u)
        return after, u


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x · float32(factor): one rounding per value, the same on every machine."""
    return x * torch.tensor(factor, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class OuterSGD(Outer):
    """phi <- phi - lr · D. With lr 1 this is parameter averaging (FedAvg)."""

    lr: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(self.lr)

    def step_(self, phi: Tensor, pseudo_grad: Tensor, momentum: Tensor) -> None:
        """Step as in the class's equation."""
        phi.sub_(scaled(pseudo_grad, self.lr))


@dataclass(frozen=True, slots=True)
class OuterHeavyBall(Outer):
    """u <- mu·u + D;  phi <- phi - lr·u. NoLoCo's released code calls this Nesterov."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _require_positive(self.lr)
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"a momentum of {self.momentum} is out of range; choose one in [0, 1), usually 0.9"
            )

    def step_(self, phi: Tensor, pseudo_grad: Tensor, momentum: Tensor) -> None:
        """Step as in the class's equations."""
        momentum.mul_(self.momentum).add_(pseudo_grad)
        phi.sub_(scaled(momentum, self.lr))


@dataclass(frozen=True, slots=True)
class OuterNesterov(OuterHeavyBall):
    """u <- mu·u + D;  phi <- phi - lr·(D + mu·u): torch's form of Nesterov momentum, dampening 0
    (DiLoCo, arXiv:2311.08105; torch.optim.SGD(nesterov=True))."""

    def step_(self, phi: Tensor, pseudo_grad: Tensor, momentum: Tensor) -> None:
        """Step as in the class's equations."""
        nesterov_(phi, pseudo_grad, momentum, self.lr, self.momentum)


def _require_positive(lr: float) -> None:
    if not 0 < lr <= 10:
        raise ValueError(
            f"an outer learning rate of {lr} is out of range; "
            "choose one in (0, 10], usually 0.3 to 1"
        )
