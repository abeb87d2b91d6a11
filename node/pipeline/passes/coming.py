"""Results of a device on their way to the CPU."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Coming:
    """A tensor of the CPU that a device still fills."""

    values: Tensor
    filled: torch.Event | None = None  # None: it is already

    def wait(self) -> Tensor:
        """Return the tensor once it is filled."""
        if self.filled is not None:
            self.filled.synchronize()
        return self.values

    def split(self, length: int) -> "list[Coming]":
        """Return the parts of this length along dimension 0."""
        return [Coming(values, self.filled) for values in torch.split(self.values, length)]


def coming(x: Tensor, *, ahead: bool) -> Coming:
    """Let a tensor come to the CPU. If its device runs ahead, only `wait` waits for that, and not
    for what the device is asked afterwards."""
    if not ahead:
        return Coming(x.cpu())
    values = x.to("cpu", non_blocking=True)  # into pinned memory, so the copy runs by itself
    filled = torch.Event(x.device)
    filled.record()
    return Coming(values, filled)
