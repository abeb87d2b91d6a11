"""The outer state of most methods: the outer parameters phi, each with a momentum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from farflock.optimizers.method import Replica, Result, Tensors
from farflock.optimizers.parts.feedback import SenderFeedback, choose
from farflock.optimizers.parts.outer import Outer, scaled
from farflock.optimizers.parts.state_fields import shared


@dataclass(slots=True)
class Anchor:
    """phi, at first the replica's parameters. Tensors are replaced, never changed in place."""

    phi: dict[str, Tensor] = shared(dict)

    def begin(self, replica: Replica) -> bool:
        """Set phi to the replica's parameters unless it is set; return whether it was set now."""
        if self.phi:
            return False
        self.phi = dict(replica.read(replica.names, "param"))
        return True

    def pseudo_gradient(self, theta: Tensors) -> dict[str, Tensor]:
        """Return start minus end: phi - theta, for the tensors in theta."""
        return {name: self.phi[name] - x for name, x in theta.items()}

    def move(self, replica: Replica, new: "Anchor", mode: Literal["adopt", "carry"]) -> bool:
        """Move the replica to `new`; `carry` puts its work since phi on top. Return whether there
        was work to carry."""
        carried = mode == "carry" and bool(self.phi)
        theta: Tensors = new.phi
        if carried:
            mine = replica.read(replica.names, "param")
            theta = {name: x + (mine[name] - self.phi[name]) for name, x in new.phi.items()}
        replica.write(theta, "param")
        return carried


@dataclass(slots=True)
class OuterState(Anchor):
    """phi and its momentum, at first zero; in a state `MOMENTUM.NAME`, after `momentum_name`."""

    momentum_name: str = "momentum"
    momentum: dict[str, Tensor] = shared(dict, "{0.momentum_name}")

    def begin(self, replica: Replica) -> bool:
        """Set phi to the replica's parameters unless it is set; return whether it was set now."""
        begun = Anchor.begin(self, replica)
        if begun:
            self.momentum = {name: torch.zeros_like(tensor) for name, tensor in self.phi.items()}
        return begun

    def step(self, name: str, outer: Outer, pseudo_grad: Tensor) -> Tensor:
        """Make one tensor's outer step and return its new phi."""
        self.phi[name], self.momentum[name] = outer.step(
            self.phi[name], pseudo_grad, self.momentum[name]
        )
        return self.phi[name]

    def advance(
        self,
        replica: Replica,
        names: Sequence[str],
        outer: Outer,
        mean: Tensors,
        result: Result,
        memory: SenderFeedback,
        overlap: int = 0,
        mix: float = 0.0,
    ) -> bool:
        """Make the outer step of these parameters; the replica follows where its work was taken.
        Return whether it moved."""
        theta, moved = replica.read(names, "param") if result.taken else {}, {}
        for name in names:
            before = self.phi[name]
            after = self.step(name, outer, mean[name])
            if result.taken.get(name):
                moved[name] = follow(name, theta[name], before, after, result, memory, overlap, mix)
        if moved:
            replica.write(moved, "param")
        return bool(moved)


def follow(
    name: str,
    theta: Tensor,
    before: Tensor,
    after: Tensor,
    result: Result,
    memory: SenderFeedback,
    overlap: int = 0,
    mix: float = 0.0,
) -> Tensor:
    """Return one tensor of a replica after the outer step from `before` to `after`.

    Where its work was taken this is `after`, plus the steps made since the message if more than
    `overlap`, mixed with a share `mix` of the local value; elsewhere it is theta. `memory` settles
    a message that it holds.
    """
    if not (taken := result.taken.get(name, ())):
        return theta
    assert result.sent is not None
    if name in memory.message:
        memory.settle(name, result.sent[name], taken)
    if result.steps_since > overlap:
        start = memory.start[name] if name in memory.start else before - result.sent[name]
        after = after + (theta - start)
    return choose(taken, scaled(theta, mix) + scaled(after, 1 - mix) if mix else after, theta)
