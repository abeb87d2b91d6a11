"""Outer steps one round late, so that a whole round hides the exchange: naive, with own pending work, or eager (eager updates,
Kale et al., arXiv:2502.12996).

    round r:   D_r = start - theta,  sent;  it is applied when round r+1 ends:  phi, u <- Outer(phi, u, mean D_r)
    start of r+1:   naive         phi                   own work of round r is missing until its mean comes
                    keep_pending  phi - D_r             phi and all of the own work
                    eager         phi + lead            phi and the own work at its share, through the outer optimizer

The eager replica of the paper steps with D~_r = D_r/M + (mean D_(r-1) - D_(r-1)/M), or with a·D_r + (1-a)·mean D_(r-1).
The outer step is linear, so what it makes of the own terms is kept apart, as `lead`: phi itself stays equal at all peers.
Deviations: M is that of the last round, 1 before any, and what was added of D is exactly what is taken back, so that a new
M needs no repair; every `refresh` rounds the lead starts from zero (ours: the second form drifts). Work that was not taken
is sent again with the next message.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflock.optimizers.feedback import choose
from farflock.optimizers.method import All, Exchange, Key, Progress, Ranges, Replica, Result, State, Tensors
from farflock.optimizers.options import require_deadline, require_period, require_unbiased
from farflock.optimizers.outer import Outer, OuterNesterov, scaled
from farflock.optimizers.state import Shapes, counter, kept, named, unnamed

STREAM = "delta"

Mode = Literal["naive", "keep_pending", "eager"]
Delay = Literal[0, 1]


def require_delay(delay: int, period: int) -> None:
    """`ValueError` unless the delay is none or one round, and a round can hide something."""
    if delay not in (0, 1):
        raise ValueError(f"a delay of {delay} rounds is not known; choose 1, or 0 to wait for each exchange")
    if delay and period < 2:
        raise ValueError(f"a period of {period} step hides no exchange; choose 2 or more, usually 30, or delay=0")


def wanted_after(delay: int, period: int) -> int:
    """Local steps until a result is wanted: one before the next exchange, because rounds that were decided without this peer
    are replayed while its stream is idle."""
    return period - 1 if delay else 0


@dataclass(slots=True)
class Flight:
    """A peer's own side of delayed exchanges: where its local steps began, and its work that no mean contains yet.

    `work` is what was sent, from `leave` to `land`, and what must be sent again, from then on.
    """

    start: dict[str, Tensor] = field(default_factory=dict)
    work: dict[str, Tensor] = field(default_factory=dict)
    since: int = 0
    pending: bool = False

    def leave(self, theta: Tensors) -> dict[str, Tensor]:
        """The work to be sent now: that of this round, start minus end, and what was left behind before."""
        work = {name: self.start[name] - theta[name] for name in theta}
        self.work = {name: x + self.work[name] for name, x in work.items()} if self.work else work
        self.since, self.pending = 0, True
        return dict(self.work)

    def land(self, taken: Mapping[str, Ranges]) -> None:
        """Forget the work that was taken."""
        self.work = {name: choose(taken.get(name, ()), torch.zeros_like(x), x) for name, x in self.work.items()}
        self.pending = False

    def carried(self, theta: Tensors) -> dict[str, Tensor]:
        """All work that is not in phi, whether it was sent or not."""
        work = {name: self.start[name] - theta[name] for name in theta}
        return {name: x + self.work[name] for name, x in work.items()} if self.work else work

    def begin_anew(self, phi: Tensors) -> None:
        """Nothing is on its way, and the next steps begin at phi."""
        self.start, self.work, self.since, self.pending = dict(phi), {}, 0, False

    def personal(self) -> State:
        """All of it, copied."""
        counters = {"since": torch.tensor(self.since), "pending": torch.tensor(int(self.pending))}
        return {**counters, **named("start", self.start), **named("work", self.work)}

    def resume(self, state: State, shapes: Shapes) -> None:
        """Go on from `personal`."""
        self.since, self.pending = counter("since", state), bool(counter("pending", state))
        self.start, self.work = kept("start", state, shapes), kept("work", state, shapes)


def follow(theta: Tensor, before: Tensor, after: Tensor, name: str, result: Result) -> Tensor:
    """Without a delay: theta <- phi_new + what has been done since the snapshot, where the snapshot's work was taken."""
    taken = result.taken.get(name, ())
    if not taken:
        return theta
    assert result.sent is not None
    late = result.steps_since > 0
    return choose(taken, after + (theta - (before - result.sent[name])) if late else after, theta)


@dataclass(slots=True)
class Delayed:
    """`period` local steps a round; `mode` is where a round begins while the last one's message is on its way. `eager_mix` None
    replaces the own share, a number a mixes; `delay` 0 waits for each result, which is DiLoCo whatever the mode."""

    period: int = 30
    mode: Mode = "eager"
    eager_mix: float | None = None
    refresh: int = 20
    delay: Delay = 1
    outer: Outer = field(default_factory=lambda: OuterNesterov(lr=0.4))
    codec: str = "fp16"
    return_codec: str = "bf16"
    deadline_s: float = 30.0

    equality: ClassVar[Literal["exact"]] = "exact"
    _phi: dict[str, Tensor] = field(default_factory=dict)
    _momentum: dict[str, Tensor] = field(default_factory=dict)
    _round: int = 0
    _members: int = 1  # participants of the last round
    _flight: Flight = field(default_factory=Flight)
    _lead: dict[str, Tensor] = field(default_factory=dict)  # eager: what the outer steps made of the own terms
    _lead_momentum: dict[str, Tensor] = field(default_factory=dict)
    _owed: dict[str, Tensor] = field(default_factory=dict)  # eager: what the next own term takes back

    def __post_init__(self) -> None:
        require_period(self.period)
        require_delay(self.delay, self.period)
        require_deadline(self.deadline_s)
        require_unbiased("codec", self.codec, "delayed steps have no feedback; choose fp16, bf16 or int8")
        require_unbiased("return codec", self.return_codec, "choose bf16 or fp32")
        if self.mode not in ("naive", "keep_pending", "eager"):
            raise ValueError(f"mode {self.mode!r} is not known; choose naive, keep_pending or eager")
        if self.eager_mix is not None and self.mode != "eager":
            raise ValueError(
                f"eager_mix={self.eager_mix} means nothing in mode {self.mode}; choose mode eager, or None"
            )
        if self.eager_mix is not None and not 0 <= self.eager_mix <= 1:
            raise ValueError(f"an eager_mix of {self.eager_mix} is no share; choose one in [0, 1], or None to replace")
        if not 1 <= self.refresh < math.inf:
            raise ValueError(f"a refresh every {self.refresh} rounds is none; choose 1 or more, usually 20")

    def streams(self, replica: Replica) -> list[Exchange]:
        """One: the pseudo-gradients."""
        return [self._exchange({name: torch.zeros(shape) for name, shape in replica.shapes.items()})]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """The inner update; the first one remembers where the run began."""
        self._begin(replica)
        replica.inner_step()
        self._flight.since += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """The round's work, after `period` local steps since the last exchange and when its result is in phi."""
        if self._flight.since < self.period or self._flight.pending:
            return []
        work = self._flight.leave(replica.read(replica.names, "param"))
        if self.delay:
            self._flight.start = self._next_start(work)
            replica.write(self._flight.start, "param")
        else:
            self._flight.work = {}  # it is still in theta
        return [self._exchange(work)]

    def _next_start(self, work: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.mode == "naive":
            return dict(self._phi)
        if self.mode == "keep_pending":
            return {name: self._phi[name] - x for name, x in work.items()}
        self._step_lead(work)
        return {name: x + self._lead[name] for name, x in self._phi.items()}

    def _step_lead(self, work: dict[str, Tensor]) -> None:
        """The own terms of this round's eager step: the fresh one, minus what of older ones has come back in a mean."""
        zeros = {name: torch.zeros_like(x) for name, x in work.items()}
        if not self._lead or (self._members > 1 and self._round % self.refresh == 0):
            self._lead, self._lead_momentum = dict(zeros), dict(zeros)
            self._owed = self._owed if self._owed and self.eager_mix is not None else dict(zeros)
        share = 1 / self._members if self.eager_mix is None else self.eager_mix
        for name, x in work.items():
            fresh = scaled(x, share)
            self._lead[name], self._lead_momentum[name] = self.outer.step(
                self._lead[name], fresh - self._owed[name], self._lead_momentum[name]
            )
            self._owed[name] = fresh if self.eager_mix is None else zeros[name]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """The outer step. With a delay the replica follows at the next exchange, else at once, as in DiLoCo."""
        self._round = result.next_round
        if result.sent is not None or exchange.tensors:
            self._flight.land(result.taken)
        if result.status != "failed":
            self._begin(replica)
            self._members = len(result.participants)
            before = dict(self._phi)
            self._outer_step(result)
            if not self.delay:
                self._catch_up(replica, before, result)
        return []

    def _outer_step(self, result: Result) -> None:
        assert result.mean is not None, f"round {self._round}: {result.status} without a mean"
        for name, phi in self._phi.items():
            mean = result.mean[name]
            self._phi[name], self._momentum[name] = self.outer.step(phi, mean, self._momentum[name])
            if self.eager_mix is not None and self._owed:
                self._owed[name] = self._owed[name] + scaled(mean, self.eager_mix)

    def _catch_up(self, replica: Replica, before: Tensors, result: Result) -> None:
        self._flight.start = dict(self._phi)
        theta = replica.read(tuple(result.taken), "param")
        replica.write(
            {name: follow(x, before[name], self._phi[name], name, result) for name, x in theta.items()}, "param"
        )

    def snapshot(self, replica: Replica) -> State:
        """phi, the outer momentum, the round, and how many took part in the last one. A joiner replays the pending round."""
        self._begin(replica)
        counters = {"round": torch.tensor(self._round), "members": torch.tensor(self._members)}
        return {**named("phi", self._phi), **named("momentum", self._momentum), **counters}

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over phi and momentum; `carry` puts all work that is in no mean yet on top of the new phi."""
        new, momentum = unnamed("phi", state, replica.shapes), unnamed("momentum", state, replica.shapes)
        self._round, self._members = counter("round", state), counter("members", state)
        theta = new
        if mode == "carry" and self._phi:
            work = self._flight.carried(replica.read(replica.names, "param"))
            theta = {name: new[name] - work[name] for name in new}
        replica.write(theta, "param")
        self._phi, self._momentum = new, momentum
        self._flight.begin_anew(new)
        self._lead, self._lead_momentum, self._owed = {}, {}, {}

    def personal(self, replica: Replica) -> State:
        """Where in the round this peer is, its work that no mean contains, and its lead."""
        self._begin(replica)
        lists = {"lead": self._lead, "lead_momentum": self._lead_momentum, "owed": self._owed}
        mine = {key: value for what, held in lists.items() for key, value in named(what, held).items()}
        return {**self._flight.personal(), **mine}

    def resume(self, replica: Replica, state: State) -> None:
        """Go on where this peer stopped."""
        shapes = replica.shapes
        self._phi, self._momentum = (unnamed(what, state, shapes) for what in ("phi", "momentum"))
        self._round, self._members = counter("round", state), counter("members", state)
        self._flight.resume(state, shapes)
        self._lead, self._lead_momentum, self._owed = (
            kept(what, state, shapes) for what in ("lead", "lead_momentum", "owed")
        )

    def agreed(self, replica: Replica, stream: str) -> State:
        """The whole state."""
        return self.snapshot(replica)

    def eval_params(self, replica: Replica) -> Tensors:
        """phi."""
        self._begin(replica)
        return {name: tensor.clone() for name, tensor in self._phi.items()}

    def _begin(self, replica: Replica) -> None:
        if not self._phi:
            self._phi = dict(replica.read(replica.names, "param"))
            self._momentum = {name: torch.zeros_like(tensor) for name, tensor in self._phi.items()}
            self._flight.begin_anew(self._phi)

    def _exchange(self, tensors: dict[str, Tensor]) -> Exchange:
        return Exchange(
            Key(STREAM, self._round),
            "mean",
            All(),
            tensors,
            codec=self.codec,
            return_codec=self.return_codec,
            apply_after=wanted_after(self.delay, self.period),
            deadline_s=self.deadline_s,
        )
