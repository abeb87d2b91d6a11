"""Synchronous data parallelism: the mean gradient of all peers, every step. It is the baseline
for saved bytes."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from farflock.optimizers.method import (
    All,
    Exchange,
    ExchangeKey,
    Progress,
    Replica,
    Result,
    State,
    Tensors,
)
from farflock.optimizers.parts.blocks import set_gradients
from farflock.optimizers.parts.corrections import TREND
from farflock.optimizers.parts.options import require_options
from farflock.optimizers.parts.outer import scaled
from farflock.optimizers.parts.state import zeros
from farflock.optimizers.parts.state_fields import Kind, own, shared
from farflock.optimizers.parts.stateful import Mode, ReplicaMethod, mean_of
from farflock.optimizers.trial_options import Disaster, TrialOptions

STREAM = "grad"
WEIGHTS = Kind(
    lambda key, pair: {key: torch.tensor(pair, dtype=torch.float64)},
    lambda key, state, shapes: tuple(float(weight) for weight in state[key]),
)


@dataclass(slots=True)
class DDP(ReplicaMethod):
    """Gradients are exchanged after every local step, and every peer applies every mean, even if
    late: all replicas and their inner moments stay bit-equal. While an exchange is open,
    gradients add up and count by their number of steps, or by the weights of those steps
    (`Progress.weight`)."""

    codec: str = "bf16"
    return_codec: str = "bf16"
    deadline_s: float = 30.0

    equality: ClassVar[Literal["exact"]] = "exact"
    keeps_gradients: ClassVar[bool] = True
    trial: ClassVar[TrialOptions] = TrialOptions(
        rest=6, disasters=(Disaster({"codec": "fp32", "return_codec": "fp32"}, 4, 3.0),)
    )
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "step")
    rare_moments: ClassVar[tuple[str, ...]] = ("momentum_buffer", "mu_product", TREND)
    _round: int = shared(0)
    _sent: dict[str, Tensor] = own(dict)
    _steps: int = own(0, stays=True)  # gradients accumulated in the replica
    _sent_steps: int = own(0)
    _pending: bool = own(False)
    # the weights of the accumulated and of the sent gradients
    _weights: tuple[float, float] = own(lambda: (0.0, 0.0), kind=WEIGHTS, stays=True)

    def __post_init__(self) -> None:
        require_options(self, "DDP has no feedback; choose bf16 or fp32")

    def streams(self, replica: Replica) -> list[Exchange]:
        """Return one template, for the gradients."""
        return [self._exchange(zeros(replica.shapes), 1)]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Count the step; its gradient stays in the replica."""
        self._steps += 1
        self._weights = self._weights[0] + progress.weight, self._weights[1]

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Request the mean of the gradients since the last exchange, weighted by their number."""
        if self._pending or not self._steps:
            return []
        sums = replica.read(replica.names, "grad")
        weight, _ = self._weights
        share = 1 / weight if weight else 0.0  # an explicit 0: the others need not wait
        self._sent = {name: scaled(total, share) for name, total in sums.items()}
        set_gradients(replica, zeros(replica.shapes))
        self._pending, self._sent_steps, self._steps = True, self._steps, 0
        self._weights = 0.0, weight
        return [self._exchange(self._sent, weight)]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Take an inner step with the mean gradient; put this peer's back if it was not taken."""
        self._round = result.next_round
        if exchange.tensors:
            # Taken as a whole or not at all, because the gradient has one weight.
            if result.status == "failed" or not any(result.taken.values()):
                self._take_back(replica)
            self._pending, self._sent = False, {}
        if result.status == "failed":
            return []
        mean = mean_of(exchange, result)
        since = replica.read(replica.names, "grad")
        set_gradients(replica, mean)
        replica.inner_step()
        set_gradients(replica, since)
        return []

    def _take_back(self, replica: Replica) -> None:
        """Add the pending gradient to those that wait for the next exchange."""
        since, (weight, sent_weight) = replica.read(replica.names, "grad"), self._weights
        back = {name: since[name] + scaled(self._sent[name], sent_weight) for name in since}
        set_gradients(replica, back)
        self._steps += self._sent_steps
        self._weights = weight + sent_weight, sent_weight

    def move(self, replica: Replica, state: State, new: Self, mode: Mode) -> bool:
        """Take over all state; carry or drop the gradients that are in no mean yet, including the
        pending one."""
        carried = ReplicaMethod.move(self, replica, state, new, mode)
        if carried and new._pending:
            new._take_back(replica)
        return carried

    def _exchange(self, tensors: Tensors, weight: float) -> Exchange:
        key, back, wait = ExchangeKey(STREAM, self._round), self.return_codec, self.deadline_s
        return Exchange(
            key, "mean", All(), tensors, weight, self.codec, back, uniform=True, deadline_s=wait
        )
