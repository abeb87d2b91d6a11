"""Synchronous data parallelism: the mean gradient of all, every step (the line that saved bytes are measured against)."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflock.optimizers.method import All, Exchange, Key, Progress, Replica, Result, State, Tensors
from farflock.optimizers.outer import scaled
from farflock.optimizers.state import named, unnamed

STREAM = "grad"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(slots=True)
class DDP:
    """Gradients are exchanged after every local step and applied by everybody, also by who was late: all replicas, with their
    inner moments, stay bit-equal. While an exchange is open gradients add up and count by their number of steps."""

    codec: str = "bf16"
    return_codec: str = "bf16"
    deadline_s: float = 30.0

    equality: ClassVar[Literal["exact"]] = "exact"
    _round: int = 0
    _steps: int = 0  # gradients accumulated in the replica
    _sent_steps: int = 0
    _pending: bool = False
    _sent: dict[str, Tensor] = field(default_factory=dict)

    def streams(self, replica: Replica) -> list[Exchange]:
        """One: the gradients."""
        return [self._exchange({name: torch.zeros(shape) for name, shape in replica.shapes.items()}, 1)]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Only count: the gradient stays in the replica."""
        self._steps += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """The mean of the gradients since the last exchange, weighted by their number."""
        if self._pending or not self._steps:
            return []
        sums = replica.read(replica.names, "grad")
        share = 1 / self._steps
        self._sent = {name: scaled(total, share) for name, total in sums.items()}
        replica.write({name: torch.zeros_like(total) for name, total in sums.items()}, "grad")
        self._pending, self._sent_steps, self._steps = True, self._steps, 0
        return [self._exchange(self._sent, self._sent_steps)]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """An inner step with the mean gradient; gradients that nobody took go back to those that wait."""
        mine = result.sent is not None or bool(exchange.tensors)
        self._round = result.next_round
        since = replica.read(replica.names, "grad")
        steps = self._steps
        if mine:
            self._pending = False
        if mine and not _all_taken(result):
            since = {name: since[name] + scaled(self._sent[name], float(self._sent_steps)) for name in since}
            steps += self._sent_steps
        if result.status != "failed":
            assert result.mean is not None, f"{exchange.key}: {result.status} without a mean"
            replica.write(result.mean, "grad")
            replica.inner_step()
        replica.write(since, "grad")
        self._steps = steps
        return []

    def snapshot(self, replica: Replica) -> State:
        """Parameters, inner moments and the round: a joiner must be bit-equal."""
        state = named("param", dict(replica.read(replica.names, "param")))
        for moment in MOMENTS:
            state |= named(moment, replica.read(replica.names, moment))
        return {**state, "round": torch.tensor(self._round)}

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over everything; unsent gradients are carried or dropped."""
        replica.write(unnamed("param", state), "param")
        for moment in MOMENTS:
            replica.write(unnamed(moment, state), moment)
        if mode == "adopt":
            replica.write({name: torch.zeros(shape) for name, shape in replica.shapes.items()}, "grad")
            self._steps = 0
        self._round, self._pending = int(state["round"]), False

    def eval_params(self, replica: Replica) -> Tensors:
        """The replica's parameters."""
        return replica.read(replica.names, "param")

    def _exchange(self, tensors: dict[str, Tensor], steps: int) -> Exchange:
        return Exchange(
            Key(STREAM, self._round),
            "mean",
            All(),
            tensors,
            weight=float(steps),
            codec=self.codec,
            return_codec=self.return_codec,
            deadline_s=self.deadline_s,
        )


def _all_taken(result: Result) -> bool:
    """Whether every shard was taken: a gradient that is only partly in counts as in, for its parts differ by shard."""
    return result.status != "failed" and any(result.taken.values())
