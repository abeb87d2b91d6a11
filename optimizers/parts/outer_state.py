"""The outer state that most methods keep: the outer parameters phi and, beside each of them, a momentum."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from farflock.optimizers.method import Replica, State, Tensors
from farflock.optimizers.parts.outer import Outer
from farflock.optimizers.parts.state import Shapes, named, unnamed


@dataclass(slots=True)
class OuterState:
    """phi, which begins where the replica first stands, and a momentum, which begins at zero.

    In a state they are `phi.NAME` and `MOMENTUM.NAME`, where `momentum_name` is `MOMENTUM`; None for a method without
    one. Tensors are replaced and never changed in place, so that they may be handed out.
    """

    momentum_name: str | None = "momentum"
    phi: dict[str, Tensor] = field(default_factory=dict)
    momentum: dict[str, Tensor] = field(default_factory=dict)

    def begin(self, replica: Replica) -> bool:
        """Start at the replica's parameters unless it has started; True if it did just now."""
        if self.phi:
            return False
        self.phi = dict(replica.read(replica.names, "param"))
        if self.momentum_name is not None:
            self.momentum = {name: torch.zeros_like(tensor) for name, tensor in self.phi.items()}
        return True

    def pseudo_gradient(self, theta: Tensors) -> dict[str, Tensor]:
        """Start minus end: phi - theta, of the tensors that theta has."""
        return {name: self.phi[name] - x for name, x in theta.items()}

    def step(self, name: str, outer: Outer, pseudo_grad: Tensor) -> Tensor:
        """One tensor's outer step; returns its new phi."""
        self.phi[name], self.momentum[name] = outer.step(self.phi[name], pseudo_grad, self.momentum[name])
        return self.phi[name]

    def parameters(self, replica: Replica) -> dict[str, Tensor]:
        """A copy of phi."""
        self.begin(replica)
        return {name: tensor.clone() for name, tensor in self.phi.items()}

    def snapshot(self, replica: Replica) -> State:
        """A copy of all of it."""
        self.begin(replica)
        return self.part(self.phi)

    def part(self, names: Iterable[str]) -> State:
        """A copy of what belongs to these parameters."""
        chosen = list(names)
        state = named("phi", {name: self.phi[name] for name in chosen})
        if self.momentum_name is None:
            return state
        return state | named(self.momentum_name, {name: self.momentum[name] for name in chosen})

    def read(self, state: State, shapes: Shapes) -> "OuterState":
        """The outer state in a snapshot, as another object; `WrongState` unless all of it is there and fits `shapes`."""
        momentum = {} if self.momentum_name is None else unnamed(self.momentum_name, state, shapes)
        return OuterState(self.momentum_name, unnamed("phi", state, shapes), momentum)

    def adopt(self, other: "OuterState") -> None:
        """Become `other`."""
        self.phi, self.momentum = other.phi, other.momentum

    def restore(self, replica: Replica, new: "OuterState", mode: Literal["adopt", "carry"]) -> bool:
        """Become `new` and move the replica there; `carry` puts its work since the old phi on top of the new one. Returns
        whether there was any work to carry."""
        carried = mode == "carry" and bool(self.phi)
        theta: Tensors = new.phi
        if carried:
            own = replica.read(replica.names, "param")
            theta = {name: x + (own[name] - self.phi[name]) for name, x in new.phi.items()}
        replica.write(theta, "param")
        self.adopt(new)
        return carried
