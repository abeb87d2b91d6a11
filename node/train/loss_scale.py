"""Loss scaling for fp16, whose smallest number is 6e-8: gradients below that would be lost.

The loss is multiplied by a power of two before the backward pass, and the gradients are divided by
it after. The scale is dynamic, as in Micikevicius et al. (arXiv:1710.03740, section 3.2) and in
torch's GradScaler, but for one point: GradScaler skips a step whose gradients overflowed. A peer
that skips steps falls out of step with the others' rounds, so here the step is taken again at half
the scale.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FIRST_SCALE = 2.0**16
MIN_SCALE = 1.0
GROWS_AFTER = 2000  # steps without an overflow


@dataclass(slots=True)
class LossScale:
    """A factor for the loss, a power of two so that scaling rounds nothing but the smallest
    values."""

    value: float = FIRST_SCALE
    good_steps: int = 0  # since the value changed

    def overflowed(self) -> bool:
        """Halve the scale; return False if it is as small as it gets."""
        before, self.good_steps = self.value, 0
        self.value = max(before / 2, MIN_SCALE)
        return before > MIN_SCALE

    def stepped(self) -> None:
        """Count a good step; after `GROWS_AFTER` of them, double the scale."""
        self.good_steps += 1
        if self.good_steps == GROWS_AFTER:
            self.value, self.good_steps = self.value * 2, 0


def unscale(parameters: Iterable[nn.Parameter], scale: float) -> Tensor:
    """Divide the gradients by the scale; return the largest absolute value, which is not finite
    if any value is not. It stays on their device, so nothing waits for it."""
    largest = []
    for one in parameters:
        if one.grad is not None:
            one.grad.mul_(1 / scale)
            largest.append(torch.linalg.vector_norm(one.grad, math.inf))
    return torch.stack(largest).amax()
