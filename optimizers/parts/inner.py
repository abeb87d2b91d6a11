"""The inner optimizers, which a replica runs between exchanges.

Moments stay on the replica unless a method exchanges them by name (`exp_avg`, `exp_avg_sq`,
`momentum_buffer`, `step`, `mu_product`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from farflock.optimizers.parts.corrections import nadam
from farflock.optimizers.parts.muon import Muon, hidden_matrices
from farflock.optimizers.parts.small_adamw import MomentType, SmallAdamW

InnerName = Literal["adamw", "sgd", "muon", "nadam"]


@dataclass(frozen=True, slots=True)
class InnerConfig:
    """AdamW, SGD, Muon or NAdam; weight decay on matrices only, not on norms and biases.

    `momentum` is that of SGD (None: 0, plain SGD) or Muon (None: 0.95); `nesterov` is for SGD, Muon
    always has it. `betas` and `eps` are those of AdamW, also next to Muon, and of NAdam, whose
    weight decay is decoupled too.
    """

    name: InnerName = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    eps: float = 1e-8
    momentum: float | None = None
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.name not in get_args(InnerName):
            raise ValueError(
                f"inner optimizer {self.name!r} is not known; choose adamw, sgd, muon or nadam"
            )
        if not 0 < self.lr < math.inf:
            raise ValueError(
                f"a learning rate of {self.lr} is out of range; "
                "choose a finite one above 0, usually 1e-3"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"betas {self.betas} must be two numbers in [0, 1); usual are (0.9, 0.95)"
            )
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"a weight decay of {self.weight_decay} is out of range; "
                "choose 0 or more, usually 0.1"
            )
        if not 0 < self.eps < math.inf:
            raise ValueError(
                f"eps of {self.eps} does not keep the division finite; "
                "choose one above 0, usually 1e-8"
            )
        self._require_momentum()

    def _require_momentum(self) -> None:
        if self.momentum is not None:
            if self.name in ("adamw", "nadam"):
                raise ValueError(
                    f"{self.name} has no momentum of {self.momentum}; "
                    "set the first of betas, or choose sgd"
                )
            if not 0 <= self.momentum < 1:
                raise ValueError(
                    f"a momentum of {self.momentum} is out of range; "
                    "choose one in [0, 1), usually 0.9"
                )
        if self.nesterov and (self.name != "sgd" or not self.momentum):
            raise ValueError(
                f"nesterov is for sgd with momentum, not for {self.name}; "
                "e.g. sgd with momentum=0.9"
            )

    def build(
        self, module: nn.Module, *, fused: bool = False, moments: MomentType = "fp32"
    ) -> torch.optim.Optimizer:
        """Return the optimizer over those of a module's parameters that are trained.

        AdamW can be `fused`, for parameters on a device that has it, or keep its `moments` in
        fewer bytes; `ValueError` for such moments of another."""
        if moments != "fp32" and self.name != "adamw":
            raise ValueError(f"moments of {self.name} are float32, not {moments}; choose adamw")
        parameters = [one for one in module.parameters() if one.requires_grad]
        if self.name == "muon":
            hidden = hidden_matrices(module)
            inside = {id(parameter) for parameter in hidden}
            rest = self._groups(
                parameter for parameter in parameters if id(parameter) not in inside
            )
            momentum = 0.95 if self.momentum is None else self.momentum
            return Muon(self._groups(hidden), rest, self.lr, momentum, self.betas, self.eps)
        groups = self._groups(parameters)
        if self.name == "sgd":
            return torch.optim.SGD(
                groups, lr=self.lr, momentum=self.momentum or 0.0, nesterov=self.nesterov
            )
        if self.name == "nadam":
            return nadam(groups, self.lr, self.betas, self.eps)
        if moments != "fp32":
            return SmallAdamW(groups, self.lr, self.betas, self.eps, moments)
        return torch.optim.AdamW(
            groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused or None
        )

    def _groups(self, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        """Return a group of parameters that decay and one of those that do not, unless empty."""
        kinds: dict[float, list[nn.Parameter]] = {self.weight_decay: [], 0.0: []}
        for parameter in parameters:
            kinds[self.weight_decay if parameter.dim() >= 2 else 0.0].append(parameter)
        return [{"params": kind, "weight_decay": decay} for decay, kind in kinds.items() if kind]
