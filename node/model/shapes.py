"""A replica without weights, to ask a method which streams it has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflock.optimizers.method import Tensors, What
from farflock.optimizers.parts.blocks import BlocksOfWhole


@dataclass(frozen=True, slots=True)
class ShapeReplica(BlocksOfWhole):
    """A replica with shapes but no values, which is enough to list a method's streams."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names, in order."""
        return tuple(self.shapes)

    def read(self, names: Sequence[str], what: What) -> dict[str, Tensor]:
        """Return zeros."""
        return {name: torch.zeros(self.shapes[name], dtype=torch.float32) for name in names}

    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None:
        """Do nothing: there are no weights."""

    def inner_step(self, lr: float | None = None) -> None:
        """Do nothing: there are no weights."""
