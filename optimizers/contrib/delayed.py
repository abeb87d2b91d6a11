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

from farflock.optimizers.diloco import follow
from farflock.optimizers.method import All, Exchange, ExchangeKey, Progress, Ranges, Replica, Result, State, Tensors
from farflock.optimizers.parts.feedback import choose
from farflock.optimizers.parts.options import require_deadline, require_period, require_unbiased
from farflock.optimizers.parts.outer import Outer, OuterNesterov, scaled
from farflock.optimizers.parts.outer_state import OuterState
from farflock.optimizers.parts.round_book import RoundBook
from farflock.optimizers.parts.state import counter, kept, numbers, tables, zeros
from farflock.optimizers.trial_options import Disaster, TrialOptions

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
    """The rounds of a method whose outer steps may come a round late: its outer state, and a peer's own side of it, namely
    where its local steps began and its work that no mean contains yet.

    `work` is what was sent, from `leave` to `land`, and what must be sent again, from then on.
    """

    state: OuterState = field(default_factory=OuterState)
    book: RoundBook = field(default_factory=RoundBook)
    start: dict[str, Tensor] = field(default_factory=dict)
    work: dict[str, Tensor] = field(default_factory=dict)

    def begin(self, replica: Replica) -> None:
        """Remember where the run begins, once."""
        if self.state.begin(replica):
            self._begin_round(0)

    def local_step(self, replica: Replica) -> None:
        """The inner update."""
        self.begin(replica)
        replica.inner_step()
        self.book.since += 1

    def leave(self, replica: Replica, delay: Delay) -> dict[str, Tensor]:
        """The work to be sent now: that of this round, start minus end, and what was left behind before. It is kept if the
        replica is to move on without it."""
        self.book.leave()
        work = self.carried(replica.read(replica.names, "param"))
        self.work = dict(work) if delay else {}
        return work

    def depart(self, replica: Replica, start: Mapping[str, Tensor]) -> None:
        """Move the replica to where the next round's steps begin."""
        self.start = dict(start)
        replica.write(self.start, "param")

    def land(self, exchange: Exchange, result: Result) -> None:
        """Go on to the next round, and forget the work that was taken."""
        if exchange.tensors or result.sent is not None:
            self.work = {name: _left(x, result.taken.get(name, ())) for name, x in self.work.items()}
        self.book.close(exchange, result)

    def catch_up(self, replica: Replica, before: Tensors, result: Result) -> None:
        """Without a delay: follow the outer step from `before` at once, as in DiLoCo."""
        after = self.state.phi
        self.start = dict(after)
        theta = replica.read(tuple(result.taken), "param")
        moved = {name: follow(x, before[name], after[name], name, result) for name, x in theta.items()}
        replica.write(moved, "param")

    def carried(self, theta: Tensors) -> dict[str, Tensor]:
        """All work of a replica at `theta` that is not in phi, whether it was sent or not."""
        work = {name: self.start[name] - x for name, x in theta.items()}
        return {name: x + self.work[name] for name, x in work.items()} if self.work else work

    def restore(self, replica: Replica, new: OuterState, number: int, mode: Literal["adopt", "carry"]) -> None:
        """Take over an outer state and its round; `carry` puts all work that is in no mean yet on top of the new phi."""
        theta: Tensors = new.phi
        if mode == "carry" and self.state.phi:
            work = self.carried(replica.read(replica.names, "param"))
            theta = {name: x - work[name] for name, x in new.phi.items()}
        replica.write(theta, "param")
        self.state.adopt(new)
        self._begin_round(number)

    def snapshot(self, replica: Replica) -> State:
        """The outer state and the round."""
        self.begin(replica)
        return self.state.snapshot(replica) | self.book.snapshot()

    def personal(self, replica: Replica) -> State:
        """This peer's side."""
        self.begin(replica)
        return self.book.personal() | tables({"start": self.start, "work": self.work})

    def resume(self, replica: Replica, state: State) -> None:
        """Go on from `snapshot` and `personal`."""
        shapes = replica.shapes
        self.state.adopt(self.state.read(state, shapes))
        self.book.resume(state)
        self.start, self.work = kept("start", state, shapes), kept("work", state, shapes)

    def _begin_round(self, number: int) -> None:
        """Nothing is on its way, and the next steps begin at phi."""
        self.start, self.work = dict(self.state.phi), {}
        self.book.restart(number)


def _left(work: Tensor, taken: Ranges) -> Tensor:
    return choose(taken, torch.zeros_like(work), work)


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
    trial: ClassVar[TrialOptions] = TrialOptions(
        disasters=(Disaster({"period": 3, "codec": "fp32", "return_codec": "fp32"}, 12),)
    )
    _flight: Flight = field(default_factory=Flight)
    _members: int = 1  # how many took part in the last round
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
        return [self._exchange(zeros(replica.shapes))]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """The inner update; the first one remembers where the run began."""
        self._flight.local_step(replica)

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """The round's work, after `period` local steps since the last exchange and when its result is in phi."""
        if not self._flight.book.is_due(self.period):
            return []
        work = self._flight.leave(replica, self.delay)
        if self.delay:
            self._flight.depart(replica, self._next_start(work))
        return [self._exchange(work)]

    def _next_start(self, work: dict[str, Tensor]) -> dict[str, Tensor]:
        phi = self._flight.state.phi
        if self.mode == "naive":
            return phi
        if self.mode == "keep_pending":
            return {name: phi[name] - x for name, x in work.items()}
        self._step_lead(work)
        return {name: x + self._lead[name] for name, x in phi.items()}

    def _step_lead(self, work: dict[str, Tensor]) -> None:
        """The own terms of this round's eager step: the fresh one, minus what of older ones has come back in a mean."""
        none = {name: torch.zeros_like(x) for name, x in work.items()}
        if not self._lead or (self._members > 1 and self._flight.book.number % self.refresh == 0):
            self._lead, self._lead_momentum = dict(none), dict(none)
            self._owed = self._owed if self._owed and self.eager_mix is not None else dict(none)
        share = 1 / self._members if self.eager_mix is None else self.eager_mix
        for name, x in work.items():
            fresh = scaled(x, share)
            self._lead[name], self._lead_momentum[name] = self.outer.step(
                self._lead[name], fresh - self._owed[name], self._lead_momentum[name]
            )
            self._owed[name] = fresh if self.eager_mix is None else none[name]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """The outer step. With a delay the replica follows at the next exchange, else at once, as in DiLoCo."""
        self._flight.land(exchange, result)
        if result.status != "failed":
            self._flight.begin(replica)
            self._members = len(result.participants)
            before = dict(self._flight.state.phi)
            self._outer_step(result)
            if not self.delay:
                self._flight.catch_up(replica, before, result)
        return []

    def _outer_step(self, result: Result) -> None:
        assert result.mean is not None, f"round {self._flight.book.number}: {result.status} without a mean"
        for name in self._flight.state.phi:
            mean = result.mean[name]
            self._flight.state.step(name, self.outer, mean)
            if self.eager_mix is not None and self._owed:
                self._owed[name] = self._owed[name] + scaled(mean, self.eager_mix)

    def snapshot(self, replica: Replica) -> State:
        """phi, the outer momentum, the round, and how many took part in the last one. A joiner replays the pending round."""
        return self._flight.snapshot(replica) | numbers({"members": self._members})

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over phi and momentum; `carry` puts all work that is in no mean yet on top of the new phi."""
        new, number = self._flight.state.read(state, replica.shapes), self._flight.book.read(state)
        self._members = counter("members", state)
        self._flight.restore(replica, new, number, mode)
        self._lead, self._lead_momentum, self._owed = {}, {}, {}

    def personal(self, replica: Replica) -> State:
        """Where in the round this peer is, its work that no mean contains, and its lead."""
        lead = {"lead": self._lead, "lead_momentum": self._lead_momentum, "owed": self._owed}
        return self._flight.personal(replica) | tables(lead)

    def resume(self, replica: Replica, state: State) -> None:
        """Go on where this peer stopped."""
        self._flight.resume(replica, state)
        self._members = counter("members", state)
        self._lead, self._lead_momentum, self._owed = (
            kept(what, state, replica.shapes) for what in ("lead", "lead_momentum", "owed")
        )

    def agreed(self, replica: Replica, stream: str) -> State:
        """The whole state."""
        return self.snapshot(replica)

    def eval_params(self, replica: Replica) -> Tensors:
        """phi."""
        self._flight.begin(replica)
        return self._flight.state.parameters(replica)

    def _exchange(self, tensors: Tensors) -> Exchange:
        key, back, after = (
            ExchangeKey(STREAM, self._flight.book.number),
            self.return_codec,
            wanted_after(self.delay, self.period),
        )
        return Exchange(
            key, "mean", All(), tensors, 1.0, self.codec, back, apply_after=after, deadline_s=self.deadline_s
        )
