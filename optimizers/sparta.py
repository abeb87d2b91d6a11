"""SPARTA: every few local steps a small part of the parameters is averaged, a different part each
time (Beton et al., "Improving the efficiency of distributed training using sparse parameter
averaging", MCDC workshop at ICLR 2025).

    mask <- a share 1/n of all values, from seed and round alone: equal on all peers, none is sent
    theta_m[mask] <- mean_j sent_j[mask] + (theta_m - sent_m)[mask]

With a lossless codec and no delay the bracket is 0 and this is the paper's theta[mask] <- mean.
With a delay it holds the local steps since, and with a lossy codec the rounding error, so that
progress finer than the codec is not lost but stays in its replica until it counts. Deviations: the
mask is one value out of each run of n (the last run may be shorter), not an independent draw for
each value, so that a payload has a fixed length and costs P/n draws. `random` draws again each
round; `partition` draws a place in each run once per sweep and advances it by one each round, so n
rounds take each value exactly once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from farflock.optimizers.method import All, Exchange, ExchangeKey, Progress, Replica, Result, State
from farflock.optimizers.parts.feedback import choose
from farflock.optimizers.parts.options import require_options
from farflock.optimizers.parts.philox import below
from farflock.optimizers.parts.state import unnamed
from farflock.optimizers.parts.state_fields import nested, own, shared
from farflock.optimizers.parts.stateful import Mode, ReplicaMethod, mean_of
from farflock.optimizers.trial_options import Disaster, TrialOptions

STREAM = "mask"
VALUES = "values"  # the name of the one tensor of an exchange
Selector = Literal["random", "partition"]

_PLACES = 1  # the Philox stream that masks are drawn from


def masked(selector: Selector, one_in: int, seed: int, round_number: int, count: int) -> Tensor:
    """Return a round's mask of `count` values: ascending flat int64 places, one in each run of
    `one_in`. In the last run the place may be `count` or higher, where there is no value."""
    runs = -(-count // one_in)
    first = torch.arange(runs) * one_in
    if selector == "random":
        return first + below(one_in, seed, _PLACES, round_number, runs)
    sweep, turn = divmod(round_number, one_in)
    return first + (below(one_in, seed, _PLACES, sweep, runs) + turn) % one_in


@dataclass(slots=True)
class Mixing:
    """The stream of masked means, for SPARTA alone and inside another method. `period` is the
    number of local steps between exchanges, `delay` that until a result is wanted."""

    selector: Selector
    one_in: int
    period: int
    delay: int
    seed: int
    codec: str
    return_codec: str
    deadline_s: float
    round_key: str = "round"  # its name in a state
    round: int = shared(0, "{0.round_key}")
    since: int = own(0, f"{STREAM}.since")
    pending: bool = own(False, f"{STREAM}.pending")
    # True if the pending mean is of parameters that have been replaced since.
    void: bool = own(False, f"{STREAM}.void")

    def __post_init__(self) -> None:
        usual = "choose fp16, bf16 or fp32"
        require_options(self, f"parameters are sent as they are; {usual}", usual)
        if self.selector not in ("random", "partition"):
            raise ValueError(f"selector {self.selector!r} is not known; choose random or partition")
        if not 1 <= self.one_in < 1 << 31:
            raise ValueError(
                f"one value in {self.one_in} cannot be chosen; "
                "choose one_in from 1 (all) up, usually 200"
            )
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed {self.seed} does not fit into 64 bits; choose one from 0 up")
        if not 0 <= self.delay < self.period:
            raise ValueError(
                f"a delay of {self.delay} steps does not end before the next exchange, "
                f"{self.period} steps later; choose 0 to {self.period - 1}, or a longer period"
            )

    def template(self, replica: Replica) -> Exchange:
        """Return the stream's first exchange, with zeros."""
        return self._exchange(
            0, torch.zeros(-(-_size(replica) // self.one_in), dtype=torch.float32)
        )

    def due(self, replica: Replica) -> list[Exchange]:
        """Request the mean of the masked values, `period` local steps after the last one."""
        if self.since < self.period or self.pending:
            return []
        places = self._places(replica, self.round)
        chosen = []
        for name, _, at in _cut(replica, places):
            theta = replica.read([name], "param")[name].reshape(-1)
            chosen.append(theta[at.to(theta.device)])
        # A small model may have no value at any of these places.
        values = torch.cat(chosen) if chosen else replica.allocate((0,))
        missing = len(places) - len(values)  # the last place, if there is no value
        self.pending, self.since = True, 0
        return [self._exchange(self.round, torch.nn.functional.pad(values, (0, missing)))]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> None:
        """Move the masked values to the mean where it contains this peer's. A missed round
        changes nothing: its values are exchanged again later."""
        void = self.void
        if exchange.tensors:
            self.pending = self.void = False
        self.round = result.next_round
        taken = result.taken.get(VALUES, ())
        if not taken or void:
            return
        assert result.sent is not None, f"{exchange.key}: taken, but not sent"
        mean, sent = mean_of(exchange, result)[VALUES], result.sent[VALUES]
        inside = choose(taken, torch.ones_like(mean), torch.zeros_like(mean)) > 0
        for name, these, at in _cut(replica, self._places(replica, exchange.key.round)):
            theta = replica.read([name], "param")[name]
            at = at.to(theta.device)
            before = theta.reshape(-1)[at]
            theta.view(-1)[at] = torch.where(
                inside[these], mean[these] + (before - sent[these]), before
            )
            replica.write({name: theta}, "param")

    def disregard(self) -> None:
        """Keep a pending mean from moving the parameters, which are being replaced."""
        self.void = self.pending

    def _places(self, replica: Replica, number: int) -> Tensor:
        return masked(self.selector, self.one_in, self.seed, number, _size(replica))

    def _exchange(self, number: int, values: Tensor) -> Exchange:
        key, back, wait = ExchangeKey(STREAM, number), self.return_codec, self.deadline_s
        tensors, after = {VALUES: values}, self.delay
        return Exchange(
            key, "mean", All(), tensors, 1.0, self.codec, back, apply_after=after, deadline_s=wait
        )


@dataclass(slots=True)
class Sparta(ReplicaMethod):
    """One value in `one_in` is averaged every `period` steps, `delay` late; moments stay local."""

    selector: Selector = "random"
    one_in: int = 200
    period: int = 1
    delay: int = 0
    seed: int = 1337
    codec: str = "fp16"
    return_codec: str = "fp16"
    deadline_s: float = 30.0

    equality: ClassVar[Literal["per-peer"]] = "per-peer"
    trial: ClassVar[TrialOptions] = TrialOptions(
        law={"period": 1, "one_in": 3},
        quick={"period": 1, "one_in": 2},
        rest=6,
        disasters=(Disaster({"period": 3, "one_in": 3}, 9),),
    )
    _mixing: Mixing = nested()

    def __post_init__(self) -> None:
        codecs, wait = (self.codec, self.return_codec), self.deadline_s
        self._mixing = Mixing(
            self.selector, self.one_in, self.period, self.delay, self.seed, *codecs, wait
        )

    def streams(self, replica: Replica) -> list[Exchange]:
        """Return one template, of the masked values."""
        return [self._mixing.template(replica)]

    @property
    def due_steps(self) -> Mapping[str, tuple[int, int]]:
        """As `StepSchedule.due_steps`."""
        return {STREAM: (self.period, self.period)}

    def at_step(self, replica: Replica, step: int) -> None:
        """As `StepSchedule.at_step`."""
        self._mixing.since = step % self.period

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Make the inner update."""
        replica.inner_step()
        self._mixing.since += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Request the mean of the masked values every `period` local steps."""
        return self._mixing.due(replica)

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Move the masked values to the mean."""
        self._mixing.apply(replica, exchange, result)
        return []

    def move(self, replica: Replica, state: State, new: Self, mode: Mode) -> bool:
        """Adopt a snapshot's parameters; `carry` keeps ours, as no outer state must match."""
        theta = unnamed("param", state, replica.shapes)
        if mode == "adopt":
            replica.write(theta, "param")
        return mode == "carry"


def _size(replica: Replica) -> int:
    return sum(torch.Size(shape).numel() for shape in replica.shapes.values())


def _cut(replica: Replica, places: Tensor) -> Iterator[tuple[str, slice, Tensor]]:
    """Yield, for each tensor that contains places: its name, their slice of `places`, and their
    flat indices in it. `places` index all tensors, in order, as one flat vector."""
    start = low = 0
    for name, shape in replica.shapes.items():
        stop = start + torch.Size(shape).numel()
        high = int(torch.searchsorted(places, stop))
        if high > low:
            yield name, slice(low, high), places[low:high] - start
        start, low = stop, high
