"""NoLoCo: outer steps in random pairs, without any all-reduce (arXiv:2506.10911, section 3;
equations as in its released code).

    D_j = phi_j - theta_j                                       (start minus end)
    d_i <- a·d_i - b·mean_j D_j - g·(phi_i - mean_j phi_j)
    phi_i <- phi_i + d_i;  theta_i <- phi_i

For g = b this equals d_i <- a·d_i + b·(mean_j theta_j - phi_i), so only theta is exchanged (half
the bytes). Deviations: the stability bound below is ours (exact mean-square analysis of the update
with zero gradients; the paper's printed window is neither necessary nor sufficient), g differs from
b only where both vectors are sent, and a joiner also takes over the momentum of the peer it joins
from, so that a snapshot is all that a resumed peer needs.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from farflock.optimizers.method import Exchange, RandomGroups, Replica, Result, TensorBlock, Tensors
from farflock.optimizers.parts.blocks import LazyTensors, read
from farflock.optimizers.parts.feedback import choose
from farflock.optimizers.parts.options import require_options
from farflock.optimizers.parts.outer import scaled
from farflock.optimizers.parts.outer_state import OuterState
from farflock.optimizers.parts.state import zeros
from farflock.optimizers.parts.state_fields import nested
from farflock.optimizers.parts.stateful import PeriodicMethod, mean_of
from farflock.optimizers.trial_options import Disaster, TrialOptions


def stability_bound(alpha: float, group: int = 2) -> float:
    """Return the largest g at which replicas converge: 2(1-a²) / (1 - a(n-2)/n); pairs: 2(1-a²)."""
    return 2 * (1 - alpha**2) / (1 - alpha * (group - 2) / group)


@dataclass(slots=True)
class NoLoCo(PeriodicMethod):
    """Rounds of `period` local steps; outer momentum `alpha`, rate `beta`, pull `gamma` to the
    mean."""

    period: int = 50
    alpha: float = 0.5
    beta: float = 0.7
    gamma: float = 0.7
    codec: str = "fp16"
    deadline_s: float = 30.0

    equality: ClassVar[Literal["per-peer"]] = "per-peer"
    trial: ClassVar[TrialOptions] = TrialOptions(
        rest=6, disasters=(Disaster({"period": 3, "codec": "fp32"}, 3),)
    )
    stream: ClassVar[str] = "pairs"
    _state: OuterState = nested(lambda: OuterState(momentum_name="delta"))

    def __post_init__(self) -> None:
        require_options(self, "NoLoCo has no feedback; choose fp16, bf16 or int8")
        if not 0 <= self.alpha < 1 or not 0 < self.beta <= 10:
            raise ValueError(
                f"alpha={self.alpha}, beta={self.beta}: alpha lies in [0, 1) and beta in (0, "
                "10] (0.5 and 0.7)"
            )
        bound = stability_bound(self.alpha)
        if not 0 < self.gamma < bound:
            raise ValueError(
                f"gamma={self.gamma} lies outside (0, {bound:.3f}), "
                f"the stable region for alpha={self.alpha}: replicas would drift apart without "
                "end; lower gamma or alpha"
            )
        if self.gamma > 0.9 * bound:
            warnings.warn(
                f"gamma={self.gamma} is within 10 % of the stability bound {bound:.3f}",
                stacklevel=3,
            )

    def streams(self, replica: Replica) -> list[Exchange]:
        """Return one template: theta, or pseudo-gradient and phi if gamma differs from beta."""
        shapes = replica.shapes
        return [self._exchange(zeros(shapes if self._one_vector else _both(shapes)))]

    def _message(self, replica: Replica) -> LazyTensors:
        """Return theta, or pseudo-gradient and phi if gamma differs from beta."""
        if self._one_vector:
            return LazyTensors(replica.shapes, partial(_parameters, replica))
        delta, phi = self._state.pseudo_gradient(replica, replica.names), self._state.phi

        def compute(name: str, start: int, stop: int) -> Tensor:
            what, _, tensor = name.partition(".")
            block = TensorBlock(tensor, start, stop)
            return delta.read(*block) if what == "delta" else block.of(phi[tensor])

        return LazyTensors(_both(replica.shapes), compute)

    def _take(self, replica: Replica, exchange: Exchange, result: Result) -> None:
        """Make the outer step with the peers that took part; without any, make a heavy-ball step on
        our own pseudo-gradient. A round replayed from a log, between other peers, changes nothing.
        """
        if result.sent is None:
            return
        mean, sent = mean_of(exchange, result), result.sent
        alone, late = result.status == "alone", result.steps_since > 0

        def change(block: TensorBlock, theta: Tensor) -> tuple[Tensor]:
            message = block if self._one_vector else _named("delta", block)
            phi, delta = (block.of(x[block.name]) for x in (self._state.phi, self._state.momentum))
            delta.copy_(self._outer_step(delta, phi, mean, block, alone=alone))
            before = phi.clone()
            phi.add_(delta)
            after = phi
            if late:
                told = read(sent, message)
                after = after + (theta - (told if self._one_vector else before - told))
            return (choose(message.within(result.taken.get(message.name, ())), after, theta),)

        replica.update(replica.names, ("param",), change)

    def _outer_step(
        self, delta: Tensor, phi: Tensor, mean: Tensors, block: TensorBlock, *, alone: bool
    ) -> Tensor:
        kept = scaled(delta, self.alpha)
        if self._one_vector:
            return kept + scaled(read(mean, block) - phi, self.beta)
        moved = kept - scaled(read(mean, _named("delta", block)), self.beta)
        if alone:  # the mean of phi is this peer's own phi, except for codec loss
            return moved
        return moved - scaled(phi - read(mean, _named("phi", block)), self.gamma)

    @property
    def _one_vector(self) -> bool:
        return self.gamma == self.beta

    def _exchange(self, tensors: Tensors, weight: float = 1.0) -> Exchange:
        return replace(PeriodicMethod._exchange(self, tensors, weight), group=RandomGroups(2))


def _parameters(replica: Replica, name: str, start: int, stop: int) -> Tensor:
    return replica.block(name, "param", start, stop)


def _named(what: str, block: TensorBlock) -> TensorBlock:
    return block._replace(name=f"{what}.{block.name}")


def _both(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a message of two vectors."""
    return {f"{what}.{name}": shape for what in ("delta", "phi") for name, shape in shapes.items()}
