"""A replica without weights, for what asks a method only which streams it has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflock.optimizers.method import Tensors, What


@dataclass(frozen=True, slots=True)
class ShapeReplica:
    """A replica of which only the shapes are known: enough to say which streams a method has."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors, in order."""
        return tuple(self.shapes)

    def read(self, names: Sequence[str], what: What) -> dict[str, Tensor]:
        """Zeros."""
        return {name: torch.zeros(self.shapes[name]) for name in names}

    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None:
        """There is nothing to write to."""

    def inner_step(self, lr: float | None = None) -> None:
        """There is nothing to step."""
