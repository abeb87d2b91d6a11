"""A step's gradients as torch's own optimizers treat them: they stay when it is over, and a
`GradScaler` may have scaled them, or found that they overflowed.

A scaler calls `step` after an overflow too if an optimizer says that it takes the scale itself.
Such a step changes nothing here, but it counts: peers stay in step, and nobody waits for this one.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from farflock.node.library.own_defaults import Closure
from farflock.optimizers.method import Method, Replica, Tensors
from farflock.optimizers.parts.blocks import set_gradients


def asked_by_a_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Return True to torch's scaler alone: Lightning refuses to clip the gradients of an optimizer
    that takes the scale itself, but it unscales them before, as ours allows."""
    return str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")


def take_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Divide the gradients by the scale that a scaler has left on the optimizer, if any; return
    True if it found that they are not finite."""
    found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found is not None and bool(found):
        return True
    if scale is not None:  # else they are unscaled already
        inverse = scale.double().reciprocal().float()
        for gradient in _gradients(optimizer):
            if gradient.dtype == torch.float16:  # as torch says it
                raise ValueError("Attempting to unscale FP16 gradients.")
            gradient.mul_(inverse.to(gradient.device))
    return False


@contextlib.contextmanager
def kept(optimizer: torch.optim.Optimizer, closure: Closure | None) -> Iterator[Closure | None]:
    """At the end of the block put back the gradients that are there now, or those that the closure
    makes, which is yielded for that."""
    noted: list[tuple[Tensor, Tensor | None]] = []

    def note() -> None:
        noted[:] = [(x, x.grad) for group in optimizer.param_groups for x in group["params"]]

    def then_note() -> object:
        assert closure is not None
        returned = closure()
        note()
        return returned

    if closure is None:
        note()
    yield closure and then_note
    for parameter, gradient in noted:
        parameter.grad = gradient


class Held:
    """Gradients of this program that a method has yet to send (DDP), between two steps.

    They are no gradients of the program's: `model.zero_grad()` or a scaler, which know nothing of
    them, would drop or scale them. So a step adds them to those that it finds."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.gradients: Tensors = {}

    def note(self, method: Method) -> None:
        """Note those that are left at the end of a step."""
        left = self._replica.read(self._replica.names, "grad") if method.keeps_gradients else {}
        self.gradients = left if any(bool(gradient.any()) for gradient in left.values()) else {}

    def add(self) -> None:
        """Add them to the present gradients, whose tensors, the program's own, stay as they are."""
        if self.gradients:
            present = self._replica.read(self._replica.names, "grad")
            sums = {name: x + self.gradients[name] for name, x in present.items()}
            set_gradients(self._replica, sums)
            self.gradients = {}

    def apart_from(self, closure: Closure, method: Method) -> Closure:
        """Return a closure that makes the program's gradients, and then adds these."""

        def called() -> Any:  # noqa: ANN401 - torch's
            self.note(method)
            # a closure that zeroes no gradients would count them twice
            none = {name: torch.zeros_like(x) for name, x in self.gradients.items()}
            set_gradients(self._replica, none)
            returned = closure()
            self.add()
            return returned

        return called


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad
