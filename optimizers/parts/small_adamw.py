"""AdamW whose moments take two bytes a value, or one, where torch's take four.

With weights and gradients in float32, a parameter takes 16 bytes with AdamW's moments in float32,
12 with bf16 ones, and 10 with int8 ones.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from farflock.optimizers.parts.packed_moment import BLOCK, TURN, PackedMoment, thresholds
from farflock.optimizers.parts.per_parameter import PerParameter

MomentType = Literal["fp32", "bf16", "int8"]
MOMENTS = ("exp_avg", "exp_avg_sq")

SMALLEST = 4096  # values; smaller tensors, such as norms, keep moments in float32 (section 2.3)
PIECE = 2**21  # values that a step expands to float32 at once, 8 MiB for each temporary
APART = 32_768  # turns between the two moments' thresholds, so that they are not rounded alike

assert PIECE % BLOCK == PIECE % TURN == 0  # so that pieces' thresholds are the whole's


class SmallAdamW(PerParameter):
    """AdamW (arXiv:1711.05101) with moments in `kind`; a step's arithmetic is that of
    torch.optim.AdamW in float32, piece by piece.

    bf16 moments are rounded up or down by thresholds, like packed ones (packed_moment.py): with
    eight bits, a change of a thousandth would otherwise be lost."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        kind: MomentType,
        smallest: int = SMALLEST,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._kind, self._smallest = kind, smallest

    def first_state(self, parameter: nn.Parameter) -> dict[str, Tensor | PackedMoment]:
        """Return the moments, all zero, and the step count with which a parameter starts."""
        step = torch.zeros((), dtype=torch.float32)
        return {"step": step, **{what: self._first(parameter, what) for what in MOMENTS}}

    def _first(self, parameter: nn.Parameter, what: str) -> Tensor | PackedMoment:
        kind = "fp32" if parameter.numel() < self._smallest else self._kind
        if kind == "int8":
            return PackedMoment(parameter.shape, parameter.device, what == "exp_avg_sq")
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)

    def step_one(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        """Step piece by piece, with the moments of each piece in float32."""
        state = self.state[parameter]
        for name, first in self.first_state(parameter).items() if not state else ():
            state[name] = first
        state["step"] += 1
        turn = int(state["step"])
        # A view, as what is changed has to be the weights themselves.
        weights, gradient = parameter.view(-1), gradient.reshape(-1)
        for start in range(0, parameter.numel(), PIECE):
            stop = min(start + PIECE, parameter.numel())
            piece = slice(start, stop)
            first, second = (expanded(state[what], start, stop) for what in MOMENTS)
            _adamw_(weights[piece], gradient[piece], first, second, group, turn)
            keep(state["exp_avg"], start, first, turn)
            keep(state["exp_avg_sq"], start, second, turn + APART)


def _adamw_(
    weights: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    group: Mapping[str, Any],
    step: int,
) -> None:
    """Change weights and moments by one step, in torch's order of operations."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    weights.mul_(1 - rate * group["weight_decay"])
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    size = second.sqrt().div_(math.sqrt(bias2)).add_(group["eps"])
    weights.addcdiv_(first, size, value=-rate / bias1)


def expanded(moment: Tensor | PackedMoment, start: int, stop: int) -> Tensor:
    """Return flat values of a moment in float32: those of a float32 tensor themselves."""
    if isinstance(moment, PackedMoment):
        return moment.read(start, stop)
    return moment.view(-1)[start:stop].to(torch.float32)


def keep(moment: Tensor | PackedMoment, start: int, values: Tensor, turn: int) -> None:
    """Store what became of `expanded`, rounded by this turn's thresholds."""
    if isinstance(moment, PackedMoment):
        moment.write(start, values, turn)
    elif moment.dtype == torch.bfloat16:
        moment.view(-1)[start : start + values.numel()] = to_bf16(values, turn)


def to_bf16(values: Tensor, turn: int) -> Tensor:
    """Return finite values in bf16, each rounded away from zero if the bits that it loses are
    more than its threshold."""
    lost = thresholds(values, turn).mul_(65_536).to(torch.int32)
    bits = values.view(torch.int32) + lost
    kept = bits.bitwise_and_(torch.tensor(-65_536, dtype=torch.int32)).view(torch.float32)
    is_finite = values - values == 0
    return torch.where(is_finite, kept, values).to(torch.bfloat16)
