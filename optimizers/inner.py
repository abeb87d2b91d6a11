"""The inner optimizers: what a replica does between exchanges.

Moments stay on the replica; only DDP, whose joiners must be bit-equal, ever sends them.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class InnerConfig:
    """AdamW or plain SGD; weight decay on matrices only (norms and biases are left alone)."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.name not in ("adamw", "sgd"):
            raise ValueError(f"inner optimizer {self.name!r} is not known; choose adamw or sgd")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"a learning rate of {self.lr} trains nothing; choose a finite one above 0, usually 1e-3")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must be two numbers in [0, 1); usual are (0.9, 0.95)")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"a weight decay of {self.weight_decay} makes weights grow; choose 0 or more, usually 0.1")
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps of {self.eps} does not keep the division finite; choose one above 0, usually 1e-8")

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over a module's parameters."""
        parameters = list(module.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if self.name == "sgd":
            return torch.optim.SGD(groups, lr=self.lr)
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps)
