"""A plain module as the methods see it: full float32 copies out, new values in, one inner step at a time."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from farflock.optimizers.method import Tensors, What


class PlainReplica:
    """One process, one module, one inner optimizer. `lr` is set by the loop before each step."""

    def __init__(self, module: nn.Module, inner: torch.optim.Optimizer, clip_norm: float | None = 1.0) -> None:
        self._parameters = dict(module.named_parameters())  # a tied parameter is named once
        self._inner, self._clip_norm = inner, clip_norm
        self.lr: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names, in the module's order."""
        return tuple(self._parameters)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name."""
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def read(self, names: Sequence[str], what: What) -> dict[str, Tensor]:
        """Float32 copies on the CPU; what was never there yet (a gradient, a moment) reads as zeros."""
        return {name: self._find(name, what).detach().to("cpu", torch.float32, copy=True) for name in names}

    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None:
        """x <- (1 - mix)·x + mix·new, each product and the sum rounded by itself."""
        with torch.no_grad():
            for name, new in tensors.items():
                target = self._ensure(name, what)
                value = new.to(target.device, target.dtype)
                target.copy_(value if mix == 1.0 else target * (1 - mix) + value * mix)

    def inner_step(self, lr: float | None = None) -> None:
        """Clip the gradient's norm, step the inner optimizer, zero the gradients."""
        rate = self.lr if lr is None else lr
        if rate is not None:
            for group in self._inner.param_groups:
                group["lr"] = rate
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self._clip_norm)
        self._inner.step()
        self._inner.zero_grad(set_to_none=False)

    def _find(self, name: str, what: What) -> Tensor:
        parameter = self._parameters[name]
        if what == "param":
            return parameter
        if what == "grad":
            return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        stored = self._inner.state.get(parameter, {}).get(what)
        if stored is None:
            return torch.zeros(()) if what == "step" else torch.zeros_like(parameter)
        return torch.as_tensor(stored)

    def _ensure(self, name: str, what: What) -> Tensor:
        """The tensor to write to, made if it is not there yet."""
        parameter = self._parameters[name]
        if what == "param":
            return parameter
        if what == "grad":
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            return parameter.grad
        state = self._inner.state[parameter]
        if what not in state:
            state[what] = torch.zeros(()) if what == "step" else torch.zeros_like(parameter)
        stored: Tensor = state[what]
        return stored
