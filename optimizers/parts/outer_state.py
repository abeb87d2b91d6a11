"""The outer state that most methods keep: the outer parameters phi and, beside each of them, a momentum."""

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
    """phi, which begins where the replica first stands.

    Tensors are replaced and never changed in place, so that they may be handed out.
    """

    phi: dict[str, Tensor] = shared(dict)

    def begin(self, replica: Replica) -> bool:
        """Start at the replica's parameters unless it has started; True if it did just now."""
        if self.phi:
            return False
        self.phi = dict(replica.read(replica.names, "param"))
        return True

    def pseudo_gradient(self, theta: Tensors) -> dict[str, Tensor]:
        """Start minus end: phi - theta, of the tensors that theta has."""
        return {name: self.phi[name] - x for name, x in theta.items()}

    def move(self, replica: Replica, new: "Anchor", mode: Literal["adopt", "carry"]) -> bool:
        """Move the replica to `new`; `carry` puts its work since phi on top. Returns whether there was any work to carry."""
        carried = mode == "carry" and bool(self.phi)
        theta: Tensors = new.phi
        if carried:
            mine = replica.read(replica.names, "param")
            theta = {name: x + (mine[name] - self.phi[name]) for name, x in new.phi.items()}
        replica.write(theta, "param")
        return carried


@dataclass(slots=True)
class OuterState(Anchor):
    """phi and a momentum, which begins at zero; in a state its tensors are called `MOMENTUM.NAME`, after `momentum_name`."""

    momentum_name: str = "momentum"
    momentum: dict[str, Tensor] = shared(dict, "{0.momentum_name}")

    def begin(self, replica: Replica) -> bool:
        """Start at the replica's parameters unless it has started; True if it did just now."""
        begun = Anchor.begin(self, replica)
        if begun:
            self.momentum = {name: torch.zeros_like(tensor) for name, tensor in self.phi.items()}
        return begun

    def step(self, name: str, outer: Outer, pseudo_grad: Tensor) -> Tensor:
        """One tensor's outer step; returns its new phi."""
        self.phi[name], self.momentum[name] = outer.step(self.phi[name], pseudo_grad, self.momentum[name])
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
        """The outer step of these parameters; the replica follows where its work was taken. Returns whether it moved."""
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
    """One tensor of a replica after the outer step from `before` to `after`: phi_new where the message's work was taken, with
    what has been done since the message if that is more than `overlap` steps, and with `mix` of the local value; elsewhere
    theta. `memory` settles what it has of a message."""
    if not (taken := result.taken.get(name, ())):
        return theta
    assert result.sent is not None
    if name in memory.message:
        memory.settle(name, result.sent[name], taken)
    if result.steps_since > overlap:
        start = memory.start[name] if name in memory.start else before - result.sent[name]
        after = after + (theta - start)
    return choose(taken, scaled(theta, mix) + scaled(after, 1 - mix) if mix else after, theta)
