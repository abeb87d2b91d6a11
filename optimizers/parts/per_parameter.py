"""Optimizers whose step is that of each parameter by itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class PerParameter(torch.optim.Optimizer):
    """A subclass says how one parameter with a gradient steps."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step, with the loss of `closure` if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, parameter.grad, group)
        return loss

    def step_one(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        """Change a parameter and its moments."""
        raise NotImplementedError
