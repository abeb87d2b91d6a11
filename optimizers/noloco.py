"""NoLoCo: outer steps in random pairs, without any all-reduce (arXiv:2506.10911, section 3; equations as in its released code).

    D_j = phi_j - theta_j                                       (start minus end)
    d_i <- a·d_i - b·mean_j D_j - g·(phi_i - mean_j phi_j)
    phi_i <- phi_i + d_i;  theta_i <- phi_i

For g = b this equals d_i <- a·d_i + b·(mean_j theta_j - phi_i), so only theta is exchanged (half the bytes). Deviations:
the stability bound below is ours (exact mean-square analysis of the update with zero gradients; the paper's printed
window is neither necessary nor sufficient), g differs from b only where both vectors are sent, and a joiner takes over
its teacher's momentum too, so that a snapshot is all that a resumed peer needs.
"""

import warnings
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflock.optimizers.feedback import choose
from farflock.optimizers.method import Exchange, Key, Progress, RandomGroups, Replica, Result, State, Tensors
from farflock.optimizers.options import require_deadline, require_period, require_unbiased
from farflock.optimizers.outer import scaled
from farflock.optimizers.state import counter, named, unnamed

STREAM = "pairs"


def stability_bound(alpha: float, group: int = 2) -> float:
    """The largest g at which replicas still draw together: 2(1-a²) / (1 - a(n-2)/n); for pairs 2(1-a²)."""
    return 2 * (1 - alpha**2) / (1 - alpha * (group - 2) / group)


@dataclass(slots=True)
class NoLoCo:
    """`period` local steps a round; `alpha` outer momentum, `beta` outer rate, `gamma` pull to the pair's mean."""

    period: int = 50
    alpha: float = 0.5
    beta: float = 0.7
    gamma: float = 0.7
    codec: str = "fp16"
    deadline_s: float = 30.0

    equality: ClassVar[Literal["per-peer"]] = "per-peer"
    _phi: dict[str, Tensor] = field(default_factory=dict)
    _delta: dict[str, Tensor] = field(default_factory=dict)
    _round: int = 0
    _since: int = 0
    _pending: bool = False

    def __post_init__(self) -> None:
        require_period(self.period)
        require_deadline(self.deadline_s)
        require_unbiased("codec", self.codec, "NoLoCo has no feedback; choose fp16, bf16 or int8")
        if not 0 <= self.alpha < 1 or not 0 < self.beta <= 10:
            raise ValueError(
                f"alpha={self.alpha}, beta={self.beta}: alpha lies in [0, 1) and beta in (0, 10] (0.5 and 0.7)"
            )
        bound = stability_bound(self.alpha)
        if not 0 < self.gamma < bound:
            raise ValueError(
                f"gamma={self.gamma} lies outside (0, {bound:.3f}), the stable region for alpha={self.alpha}: "
                "replicas would drift apart without end; lower gamma or alpha"
            )
        if self.gamma > 0.9 * bound:
            warnings.warn(f"gamma={self.gamma} is within 10 % of the stability bound {bound:.3f}", stacklevel=3)

    def streams(self, replica: Replica) -> list[Exchange]:
        """One: theta, or pseudo-gradient and phi where gamma differs from beta."""
        zeros = {name: torch.zeros(shape) for name, shape in replica.shapes.items()}
        return [self._exchange(zeros if self._one_vector else {**named("delta", zeros), **named("phi", zeros)})]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """The inner update; the first one remembers where the round began."""
        self._begin(replica)
        replica.inner_step()
        self._since += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """After `period` local steps since the last exchange."""
        if self._since < self.period or self._pending:
            return []
        self._pending, self._since = True, 0
        theta = dict(replica.read(replica.names, "param"))
        if self._one_vector:
            return [self._exchange(theta)]
        delta = {name: self._phi[name] - theta[name] for name in theta}
        return [self._exchange({**named("delta", delta), **named("phi", self._phi)})]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """The outer step with whoever took part; alone it is heavy ball on the own pseudo-gradient. A round replayed from a log
        was between others and changes nothing here."""
        self._round = result.next_round
        if exchange.tensors:
            self._pending = False
        if result.status == "failed" or result.sent is None:
            return []
        assert result.mean is not None, f"{exchange.key}: {result.status} without a mean"
        theta = replica.read(replica.names, "param")
        moved = {}
        for name in replica.names:
            before = self._phi[name]
            self._delta[name] = self._outer_step(name, before, result)
            self._phi[name] = before + self._delta[name]
            after = self._phi[name]
            if result.steps_since:
                after = after + (theta[name] - self._theta_then(name, before, result))
            taken = result.taken.get(name if self._one_vector else f"delta.{name}", ())
            moved[name] = choose(taken, after, theta[name])
        replica.write(moved, "param")
        return []

    def _outer_step(self, name: str, phi: Tensor, result: Result) -> Tensor:
        assert result.mean is not None
        kept = scaled(self._delta[name], self.alpha)
        if self._one_vector:
            return kept + scaled(result.mean[name] - phi, self.beta)
        moved = kept - scaled(result.mean[f"delta.{name}"], self.beta)
        if result.status == "alone":  # the mean of phi is my own, but for what its codec lost
            return moved
        return moved - scaled(phi - result.mean[f"phi.{name}"], self.gamma)

    def _theta_then(self, name: str, phi: Tensor, result: Result) -> Tensor:
        assert result.sent is not None
        return result.sent[name] if self._one_vector else phi - result.sent[f"delta.{name}"]

    @property
    def _one_vector(self) -> bool:
        return self.gamma == self.beta

    def snapshot(self, replica: Replica) -> State:
        """phi, the momentum, and the round."""
        self._begin(replica)
        return {**named("phi", self._phi), **named("delta", self._delta), "round": torch.tensor(self._round)}

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over one peer's phi and momentum; `carry` puts this replica's unsent work on top of it."""
        new, delta = unnamed("phi", state, replica.shapes), unnamed("delta", state, replica.shapes)
        self._round = counter("round", state)
        if mode == "carry" and self._phi:
            theta = replica.read(replica.names, "param")
            replica.write({name: new[name] + (theta[name] - self._phi[name]) for name in new}, "param")
        else:
            replica.write(new, "param")
        self._phi, self._delta = new, delta
        self._since, self._pending = 0, False

    def personal(self, replica: Replica) -> State:
        """Where in the round this peer is."""
        return {"since": torch.tensor(self._since), "pending": torch.tensor(int(self._pending))}

    def resume(self, replica: Replica, state: State) -> None:
        """Go on where this peer stopped."""
        self._phi, self._delta = (unnamed(what, state, replica.shapes) for what in ("phi", "delta"))
        self._round, self._since = counter("round", state), counter("since", state)
        self._pending = bool(counter("pending", state))

    def agreed(self, replica: Replica, stream: str) -> State:
        """Nothing: each peer has its own."""
        return {}

    def eval_params(self, replica: Replica) -> Tensors:
        """phi."""
        self._begin(replica)
        return {name: tensor.clone() for name, tensor in self._phi.items()}

    def _begin(self, replica: Replica) -> None:
        if not self._phi:
            self._phi = dict(replica.read(replica.names, "param"))
            self._delta = {name: torch.zeros_like(tensor) for name, tensor in self._phi.items()}

    def _exchange(self, tensors: dict[str, Tensor]) -> Exchange:
        key = Key(STREAM, self._round)
        return Exchange(key, "mean", RandomGroups(2), tensors, codec=self.codec, deadline_s=self.deadline_s)
