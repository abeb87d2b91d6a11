"""Inner optimizers for methods whose replicas all take the same steps: from the same weights,
moments and gradients, every machine gets the same bits.

Portable arithmetic, as outer.py has it: each operation is rounded by itself. torch's own optimizers
fuse products and sums, and round otherwise on other processors and devices. Moments have torch's
names and types, so checkpoints and joiners do not see a difference.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from farflock.compression.elementwise import root
from farflock.compression.payload import divided
from farflock.optimizers.parts.blocks import as_real
from farflock.optimizers.parts.norms import norm_of
from farflock.optimizers.parts.per_parameter import PerParameter

PIECE = 2**21  # values of a step at once, 8 MiB for each temporary
TORCHS_OWN = ("amsgrad", "maximize", "capturable", "differentiable", "dampening", "fused")
EPS = 1e-6  # of the division by a norm, as in torch.nn.utils.clip_grad_norm_


class _Portable(PerParameter):
    """One whose steps have the same bits on every machine."""


class PortableAdamW(_Portable, torch.optim.AdamW):
    """AdamW (arXiv:1711.05101): x <- x·(1 - lr·decay) - lr/b1 · m / (√v/√b2 + eps), with the means
    m <- beta1·m + (1 - beta1)·g and v <- beta2·v + (1 - beta2)·g², and their bias corrections b1
    and b2 = 1 - beta^t."""

    def step_one(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        rate, (beta1, beta2) = group["lr"], group["betas"]
        bias1, bias2 = (1 - beta ** int(state["step"]) for beta in (beta1, beta2))
        held = parameter, gradient, state["exp_avg"], state["exp_avg_sq"]
        for x, g, m, v in _pieces(*held):
            x.mul_(1 - rate * group["weight_decay"])
            m.mul_(beta1).add_(g * (1 - beta1))
            v.mul_(beta2).add_((g * g).mul_(1 - beta2))
            size = divided(root(v), math.sqrt(bias2)).add_(group["eps"])
            x.sub_((m / size).mul_(rate / bias1))


class PortableSGD(_Portable, torch.optim.SGD):
    """SGD with torch's momentum: u <- mu·u + g, where u begins as g, and x <- x - lr·u, or with
    Nesterov's x <- x - lr·(g + mu·u); g includes decay·x."""

    def step_one(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[parameter], group["momentum"]
        is_first = momentum and state.get("momentum_buffer") is None
        if is_first:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        held = [parameter, gradient, *([state["momentum_buffer"]] if momentum else [])]
        for x, g, *buffer in _pieces(*held):
            if group["weight_decay"]:
                g = g + x * group["weight_decay"]
            for u in buffer:
                u.copy_(g) if is_first else u.mul_(momentum).add_(g)
                g = g + u * momentum if group["nesterov"] else u
            x.sub_(g * group["lr"])


def _pieces(*held: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Yield pieces of tensors of one shape, flat, as views; of a shard, those of the values that
    are here. Tensors that lie in another order are one piece, and complex ones are seen as real."""
    here = [as_real(getattr(x, "to_local", x.detach)().detach()) for x in held]
    if not all(x.is_contiguous() for x in here):
        yield tuple(here)
        return
    flat = [x.view(-1) for x in here]
    for start in range(0, flat[0].numel(), PIECE):
        yield tuple(x[start : start + PIECE] for x in flat)


def make_portable(inner: torch.optim.Optimizer) -> None:
    """Let torch's AdamW or SGD step portably from now on. Others stay as they are, and so do these
    with options that only torch's own step knows."""
    if any(group.get(option) for group in inner.param_groups for option in TORCHS_OWN):
        return
    for plain, portable in ((torch.optim.AdamW, PortableAdamW), (torch.optim.SGD, PortableSGD)):
        if type(inner) is plain:
            inner.__class__ = portable  # which differs in its step alone
            inner._patch_step_function()  # for hooks; torch does it when it makes an optimizer


def is_portable(inner: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's steps have the same bits on every machine."""
    return isinstance(inner, _Portable)


def clip_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale all gradients down so that their norm together is `max_norm` at most."""
    gradients = [x.grad for x in parameters if x.grad is not None]
    # Apple's GPUs have no float64.
    norm = norm_of(x.cpu() if x.device.type == "mps" else x for x in gradients)
    if not norm <= max_norm:  # NaN too, as in torch
        for x in gradients:
            x.mul_(max_norm / (norm + EPS))
