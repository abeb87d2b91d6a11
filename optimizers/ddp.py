"""Synchronous data parallelism: the mean gradient of all, every step (the line that saved bytes are measured against)."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflock.optimizers.method import All, Exchange, ExchangeKey, Progress, Replica, Result, State, Tensors
from farflock.optimizers.parts.corrections import TREND
from farflock.optimizers.parts.options import require_deadline, require_unbiased
from farflock.optimizers.parts.outer import scaled
from farflock.optimizers.parts.state import counter, counters, kept, named, numbers, unnamed, zeros
from farflock.optimizers.trial_options import Disaster, TrialOptions

STREAM = "grad"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
OTHERS = ("momentum_buffer", "mu_product", TREND)  # in the state only where the inner optimizer has them


@dataclass(slots=True)
class DDP:
    """Gradients are exchanged after every local step and applied by everybody, also by who was late: all replicas, with their
    inner moments, stay bit-equal. While an exchange is open gradients add up and count by their number of steps, or by what
    those weigh (`Progress.weight`)."""

    codec: str = "bf16"
    return_codec: str = "bf16"
    deadline_s: float = 30.0

    equality: ClassVar[Literal["exact"]] = "exact"
    trial: ClassVar[TrialOptions] = TrialOptions(
        rest=6, disasters=(Disaster({"codec": "fp32", "return_codec": "fp32"}, 4, 3.0),)
    )
    _round: int = 0
    _steps: int = 0  # gradients accumulated in the replica
    _weight: float = 0.0  # and how often they count together
    _sent_steps: int = 0
    _sent_weight: float = 0.0
    _pending: bool = False
    _sent: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_deadline(self.deadline_s)
        require_unbiased("codec", self.codec, "DDP has no feedback; choose bf16 or fp32")
        require_unbiased("return codec", self.return_codec, "choose bf16 or fp32")

    def streams(self, replica: Replica) -> list[Exchange]:
        """One: the gradients."""
        return [self._exchange(zeros(replica.shapes), 1)]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Only count: the gradient stays in the replica."""
        self._steps += 1
        self._weight += progress.weight

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """The mean of the gradients since the last exchange, weighted by their number."""
        if self._pending or not self._steps:
            return []
        sums = replica.read(replica.names, "grad")
        share = 1 / self._weight if self._weight else 0.0  # nothing, said so, is not waited for
        self._sent = {name: scaled(total, share) for name, total in sums.items()}
        replica.write({name: torch.zeros_like(total) for name, total in sums.items()}, "grad")
        self._pending, self._sent_steps, self._steps = True, self._steps, 0
        self._sent_weight, self._weight = self._weight, 0.0
        return [self._exchange(self._sent, self._sent_weight)]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """An inner step with the mean gradient; a gradient that nobody took goes back to those that wait."""
        self._round = result.next_round
        if exchange.tensors:
            if result.status == "failed" or not _counted(result):
                self._take_back(replica)
            self._pending, self._sent = False, {}
        if result.status == "failed":
            return []
        assert result.mean is not None, f"{exchange.key}: {result.status} without a mean"
        since = replica.read(replica.names, "grad")
        replica.write(result.mean, "grad")
        replica.inner_step()
        replica.write(since, "grad")
        return []

    def _take_back(self, replica: Replica) -> None:
        """Add the pending gradient to those that wait for the next exchange."""
        since = replica.read(replica.names, "grad")
        back = {name: since[name] + scaled(self._sent[name], self._sent_weight) for name in since}
        replica.write(back, "grad")
        self._steps += self._sent_steps
        self._weight += self._sent_weight

    def snapshot(self, replica: Replica) -> State:
        """Parameters, inner moments and the round: a joiner must be bit-equal."""
        state = named("param", dict(replica.read(replica.names, "param")))
        for moment in MOMENTS:
            state |= named(moment, replica.read(replica.names, moment))
        for moment in OTHERS:
            state |= named(moment, replica.read(replica.names, moment)) if _has(replica, moment) else {}
        return state | numbers({"round": self._round})

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over everything; gradients that did not count yet, the pending one too, are carried or dropped."""
        shapes = {moment: _shapes(replica, moment) for moment in (*MOMENTS, *OTHERS)}
        new = {what: unnamed(what, state, shapes.get(what, replica.shapes)) for what in ("param", *MOMENTS)}
        new |= {what: _other(what, state, replica, shapes[what]) for what in OTHERS}
        self._round = counter("round", state)
        for what, tensors in new.items():
            replica.write(tensors, what)
        if mode == "adopt":
            replica.write(zeros(replica.shapes), "grad")
            self._steps, self._weight = 0, 0.0
        elif self._pending:
            self._take_back(replica)
        self._pending, self._sent = False, {}

    def personal(self, replica: Replica) -> State:
        """How many gradients wait in the replica, and the pending one."""
        counts = {"steps": self._steps, "sent_steps": self._sent_steps, "pending": self._pending}
        weights = torch.tensor([self._weight, self._sent_weight], dtype=torch.float64)
        return named("sent", self._sent) | numbers(counts) | {"weights": weights}

    def resume(self, replica: Replica, state: State) -> None:
        """Go on where this peer stopped."""
        self._round, self._steps, self._sent_steps, pending = counters(state, "round", "steps", "sent_steps", "pending")
        self._pending = bool(pending)
        self._weight, self._sent_weight = (float(weight) for weight in state["weights"])
        self._sent = kept("sent", state, replica.shapes)

    def agreed(self, replica: Replica, stream: str) -> State:
        """The whole state."""
        return self.snapshot(replica)

    def eval_params(self, replica: Replica) -> Tensors:
        """The replica's parameters."""
        return replica.read(replica.names, "param")

    def _exchange(self, tensors: Tensors, weight: float) -> Exchange:
        key, back, wait = ExchangeKey(STREAM, self._round), self.return_codec, self.deadline_s
        return Exchange(key, "mean", All(), tensors, weight, self.codec, back, uniform=True, deadline_s=wait)


def _counted(result: Result) -> bool:
    """Whether mine is in: as a whole or not at all, for it has one weight, and its parts cannot wait for different rounds."""
    return any(result.taken.values())


def _has(replica: Replica, moment: str) -> bool:
    """Whether anything is there that a joiner would lack; looked at tensor by tensor, for most optimizers have nothing."""
    return any(bool(replica.read((name,), moment)[name].any()) for name in replica.names)


def _other(what: str, state: State, replica: Replica, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """A moment that a state need not have; without it zeros, where this replica has something in its place."""
    new = kept(what, state, shapes)
    return new if new or not _has(replica, what) else {name: torch.zeros(shape) for name, shape in shapes.items()}


def _shapes(replica: Replica, moment: str) -> dict[str, tuple[int, ...]]:
    """A moment's shapes: mostly the parameters', but the step count is a scalar."""
    return {name: tuple(tensor.shape) for name, tensor in replica.read(replica.names, moment).items()}
