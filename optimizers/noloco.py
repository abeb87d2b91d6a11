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
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from farflock.optimizers.method import Exchange, RandomGroups, Replica, Result, Tensors
from farflock.optimizers.parts.feedback import choose
from farflock.optimizers.parts.options import require_options
from farflock.optimizers.parts.outer import scaled
from farflock.optimizers.parts.outer_state import OuterState
from farflock.optimizers.parts.state import tables, zeros
from farflock.optimizers.parts.state_fields import part
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
    _state: OuterState = part(lambda: OuterState(momentum_name="delta"))

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
        none = zeros(replica.shapes)
        return [self._exchange(none if self._one_vector else tables({"delta": none, "phi": none}))]

    def _message(self, theta: dict[str, Tensor]) -> Tensors:
        """Return theta, or pseudo-gradient and phi if gamma differs from beta."""
        if self._one_vector:
            return theta
        return tables({"delta": self._state.pseudo_gradient(theta), "phi": self._state.phi})

    def _take(self, replica: Replica, exchange: Exchange, result: Result) -> None:
        """Make the outer step with the peers that took part; without any, make a heavy-ball step on
        our own pseudo-gradient. A round replayed from a log, between other peers, changes nothing.
        """
        if result.sent is None:
            return
        mean = mean_of(exchange, result)
        theta = replica.read(replica.names, "param")
        phi, delta = self._state.phi, self._state.momentum
        moved = {}
        for name in replica.names:
            before = phi[name]
            delta[name] = self._outer_step(name, before, mean, alone=result.status == "alone")
            after = phi[name] = before + delta[name]
            if result.steps_since:
                then = (
                    result.sent[name] if self._one_vector else before - result.sent[f"delta.{name}"]
                )
                after = after + (theta[name] - then)
            taken = result.taken.get(name if self._one_vector else f"delta.{name}", ())
            moved[name] = choose(taken, after, theta[name])
        replica.write(moved, "param")

    def _outer_step(self, name: str, phi: Tensor, mean: Tensors, *, alone: bool) -> Tensor:
        kept = scaled(self._state.momentum[name], self.alpha)
        if self._one_vector:
            return kept + scaled(mean[name] - phi, self.beta)
        moved = kept - scaled(mean[f"delta.{name}"], self.beta)
        if alone:  # the mean of phi is this peer's own phi, except for codec loss
            return moved
        return moved - scaled(phi - mean[f"phi.{name}"], self.gamma)

    @property
    def _one_vector(self) -> bool:
        return self.gamma == self.beta

    def _exchange(self, tensors: Tensors, weight: float = 1.0) -> Exchange:
        return replace(PeriodicMethod._exchange(self, tensors, weight), group=RandomGroups(2))
