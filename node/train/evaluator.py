"""A node's part in the evaluation of its run: it measures when it is drawn, tells what others
measured, and asks the guard what follows.

A member with the whole model acts between two local steps. It measures in the thread that trains,
on a skeleton of the model that is given the method's weights for evaluation, so training never sees
weights that are not its own. One of a pipeline measures through the servers of its stages
(node/pipeline/trainer/path_meter.py).
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.func import functional_call

from farflock.node.model.device import Device, is_out_of_memory
from farflock.node.model.evaluation import LossEstimate, sequence_means, summarise
from farflock.node.model.hf_model import AnyModel, model_of_shape
from farflock.node.reporting import Report
from farflock.node.run.evaluation_section import GuardSection
from farflock.node.train.driver import Driver
from farflock.node.train.ending import Barrier
from farflock.node.train.exchange_client import ExchangeClient, StopRequest
from farflock.node.train.guard import Alarm, alarm_at, first_alarm
from farflock.node.train.task import Loss, Train
from farflock.optimizers.method import Tensors
from farflock.optimizers.parts.stateful import live_state
from farflock.swarm.peer.evaluations import (
    MAX_LOSS,
    MAX_NORM,
    Evaluation,
    Evaluations,
    EvaluationSchedule,
)

UNEQUAL_BASES = 0.05  # of a loss beside weights that one holds in float32, another in four bits
TOLERANCE = 1e-3  # of a loss: two devices' rounding of the same weights' mean loss stays far below
AWAIT_S = 10.0  # for a value on which the guard decides, before training goes on without it
LOOK_EVERY_S = 0.1
MISSED = Evaluation("", 0, b"", 0, "missed")  # of which `say` fills in the round
DELAY = 2  # evaluated rounds from a bad one to the end: so that all members have the value

log = logging.getLogger(__name__)


class WeightsMeter(Protocol):
    """A measurement of a method's weights on the held-out text."""

    def measure(self, weights: Tensors) -> LossEstimate:
        """Return the mean loss of these weights, in nats per token. Raise torch's
        `OutOfMemoryError` if there is no room."""
        ...


@dataclass(frozen=True, slots=True)
class HeldOutMeter:
    """Measures weights on held-out windows, tokens and next tokens (n, seq), `at_once` at a time.

    `skeleton` has the model's shape, and no weights but frozen ones; `buffers` are the model's own.
    """

    skeleton: AnyModel
    buffers: Tensors
    device: Device
    windows: tuple[Tensor, Tensor]
    at_once: Callable[[], int]

    @torch.no_grad()
    def measure(self, weights: Tensors) -> LossEstimate:
        """Return the mean loss of these weights, in nats per token, in float32."""
        place = self.device.place
        tensors = {name: x.to(place) for name, x in weights.items()} | dict(self.buffers)
        x, y = (torch.split(part, self.at_once()) for part in self.windows)
        found = []
        for a, b in zip(x, y, strict=True):
            each = functional_call(self.skeleton, tensors, (a.to(place), b.to(place), "none"))
            found.append(sequence_means(each.cpu(), b))
        return summarise(torch.cat(found))


def meter_of(
    model: AnyModel, device: Device, windows: tuple[Tensor, Tensor], at_once: Callable[[], int]
) -> HeldOutMeter:
    """Return a meter for a model of this shape. One with frozen weights is its own skeleton: they
    are the same in every measurement."""
    skeleton = model
    if all(weight.requires_grad for weight in model.parameters()):
        with torch.device("meta"):
            skeleton = model_of_shape(model.config).eval()
        skeleton.logits_at_once = model.logits_at_once
    return HeldOutMeter(skeleton, dict(model.named_buffers()), device, windows, at_once)


@dataclass(slots=True)
class Pace:
    """The time that a node spends in local steps: `train` with a clock around it."""

    train: Train
    clock: Callable[[], float]
    busy_s: float = 0.0
    _before: tuple[float, float, int] | None = None  # clock, busy seconds, trained tokens

    async def __call__(self, work: Callable[[], Loss]) -> Loss | None:
        """Take a local step."""
        began_s = self.clock()
        try:
            return await self.train(work)
        finally:
            self.busy_s += self.clock() - began_s

    def since(self, tokens: int) -> tuple[float | None, float | None]:
        """Return the tokens per second and the busy share since the last call, once there was one;
        `tokens` are those trained by now."""
        now = self.clock(), self.busy_s, tokens
        before, self._before = self._before, now
        if before is None or now[0] <= before[0]:
            return None, None
        passed_s = now[0] - before[0]
        return (tokens - before[2]) / passed_s, min((now[1] - before[1]) / passed_s, 1.0)


class Measuring(Protocol):
    """One member's way to measure its run, and how far the run is. `unable` says why this member
    cannot measure; it is empty if it can."""

    unable: str

    @property
    def applied(self) -> int:
        """The last round of the evaluated stream that counts as applied here."""
        ...

    @property
    def repeats(self) -> bool:
        """True if two members measure the same weights after a round."""
        ...

    def begin(self) -> None:
        """Note that the run is evaluated from now on."""
        ...

    def is_timely(self, number: int) -> bool:
        """Return whether what is measured now is a value of this due round."""
        ...

    async def measured(self) -> Evaluation:
        """Return a measurement, whose outcome is "missed" if none could be made. Its stream, round,
        view and place are left open."""
        ...


@dataclass(slots=True)
class WholeModel:
    """The measuring of a member that has the whole model, in the thread that trains it. `trained`
    returns this node's own tokens."""

    driver: Driver
    pace: Pace
    trained: Callable[[], int] = lambda: 0
    meter: WeightsMeter | None = None
    unable: str = "the held-out text is not here yet"

    @property
    def applied(self) -> int:
        """The last applied round of the method's first stream."""
        name = self.driver.streams[0].key.stream
        return self.driver.position.rounds[name]

    @property
    def repeats(self) -> bool:
        """True if an exact method applies whole rounds: then all members have the same weights."""
        return self.driver.method.equality == "exact" and len(self.driver.streams) == 1

    def begin(self) -> None:
        """Measure the pace from now on."""
        self.pace.since(self.trained())

    def is_timely(self, number: int) -> bool:
        """Return whether no later round is in the weights."""
        return number == self.applied

    def measures_with(self, meter: WeightsMeter) -> None:
        """Measure with this meter from now on."""
        self.meter, self.unable = meter, ""

    async def measured(self) -> Evaluation:
        """Return what the weights of the method measure now, and this node's pace."""
        found: list[LossEstimate] = []
        tokens_per_s, busy = self.pace.since(self.trained())
        norms: list[float | None] = [None]  # of the last step's gradient, which a device may hold
        await self.pace.train(lambda: self._measure(found, norms))
        norm = norms[-1]
        missed = replace(
            MISSED,
            tokens=self.driver.tokens,
            gradient_norm=None if norm is None else _bounded(norm),
            tokens_per_s=tokens_per_s,
            busy=busy,
        )
        return with_loss(missed, found[0]) if found else missed

    def _measure(self, found: list[LossEstimate], norms: list[float | None]) -> float:
        """Measure, in the worker that trains; leave `found` empty if it cannot be done."""
        norms.append(getattr(self.driver.replica, "gradient_norm", None))
        if self.meter is None:
            log.info("this node was drawn to evaluate, and does not: %s", self.unable)
            return math.nan
        driver = self.driver
        try:
            found.append(self.meter.measure(live_state(driver.method, driver.replica).model))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            log.warning("this node has no room to evaluate: %s", error)
        return found[0].mean if found else math.nan


@dataclass(slots=True)
class Evaluator:
    """One node's evaluations."""

    evaluations: Evaluations
    measuring: Measuring
    schedule: EvaluationSchedule
    guard: GuardSection
    report: Report
    stop: StopRequest
    tolerance: float = TOLERANCE  # between two values of the same weights, as a share of a loss
    alarm: Alarm | None = None  # that the newest evaluation raised
    ended_by: Alarm | None = None  # that ends the run
    difference: str = ""  # between the values of two members for the same weights, in words
    _begun: bool = field(default=False, init=False)
    _seen: int = field(default=-1, init=False)  # the last round that was looked at
    _given_up: int = field(default=-1, init=False)  # of the rounds that were waited for
    _differing: int = field(default=-1, init=False)  # the last round whose values were apart

    @property
    def applied(self) -> int:
        """The last applied round of the stream that is evaluated."""
        return self.measuring.applied

    def begin(self) -> None:
        """Take part from the present round on."""
        self._begun, self._seen = True, self.applied
        self.evaluations.open(self.schedule, self._seen)
        self.measuring.begin()

    async def at_start(self) -> None:
        """Measure the weights with which the run begins, for this node's own record: nobody was
        drawn for that."""
        if self.measuring.unable:
            log.info("the first weights are not evaluated: %s", self.measuring.unable)
            return
        value = await self.measuring.measured()
        said = f"{value.loss:.4f} ± {value.standard_error:.4f}"
        log.info("held-out loss at the start: %s", said if value.outcome == "ok" else value.outcome)
        self.report(
            "start",
            {
                "outcome": value.outcome,
                "loss": value.loss if value.outcome == "ok" else None,
                "standard_error": value.standard_error,
                "sequences": value.sequences,
            },
        )

    async def between_steps(self) -> None:
        """Measure if a round made this node due, and look at what others measured."""
        if not self._begun:
            return
        applied = self.applied
        if applied != self._seen:
            self.evaluations.reached(applied)
            for number in self.schedule.between(self._seen, applied):
                await self._take_part(number)
            self._seen = applied
        if self.guard.on == "end":
            await self._await_value(applied)
        self._tell()

    def measurements(self) -> list[Evaluation]:
        """Return the first members' values in the order of rounds."""
        return [each for (_, place), each in self.evaluations.known.items() if place == 0]

    @property
    def newest(self) -> Evaluation | None:
        """The newest value that was measured."""
        measured = [each for each in self.measurements() if each.outcome != "missed"]
        return measured[-1] if measured else None

    @property
    def good(self) -> int | None:
        """The last evaluated round at which the run was well: that of the best loss, or the one
        that an alarm names."""
        alarm = self.ended_by or self.alarm
        if alarm is not None:
            return alarm.good
        finite = [each for each in self.measurements() if each.outcome == "ok"]
        return min(finite, key=lambda each: each.loss).round if finite else None

    def facts(self) -> dict[str, object]:
        """Return what a checkpoint says of the newest value, and of the guard's end of the run."""
        found: dict[str, object] = {}
        newest, alarm = self.newest, self.ended_by
        if newest is not None and newest.outcome == "ok":
            names = ("round", "loss", "standard_error", "sequences", "tokens")
            by = self.evaluations.signer((newest.round, newest.place))
            found["evaluation"] = {name: getattr(newest, name) for name in names} | {"by": by}
        if alarm is not None:
            found["ended_by"] = {"round": alarm.round, "good": alarm.good, "reason": alarm.reason}
        return found

    def is_over(self) -> bool:
        """Return whether the guard ends the run before the next round begins: by a bad value that
        every member has had the time to get."""
        if self.guard.on != "end" or self.ended_by is not None:
            return self.ended_by is not None
        known = [each for each in self.measurements() if each.round <= self._decisive(self.applied)]
        self.ended_by = first_alarm(known, self.guard.rising)
        return self.ended_by is not None

    def _decisive(self, applied: int) -> int:
        """Return the last round whose value may end the run before the next one begins."""
        return applied + self.schedule.stride - DELAY * self.schedule.period

    async def _take_part(self, number: int) -> None:
        place = self.evaluations.mine(number)
        if place is None or (place and not self.measuring.repeats):
            return
        timely = self.measuring.is_timely(number)
        value = await self.measuring.measured() if timely else MISSED
        self.evaluations.say(number, place, value)

    async def _await_value(self, applied: int) -> None:
        """Wait a while for the value that may end the run before the next round."""
        wanted = self.schedule.between(self._given_up, self._decisive(applied))[-1:]
        now, evaluations = asyncio.get_running_loop().time, self.evaluations
        for number in wanted:
            until_s = now() + AWAIT_S
            while evaluations.lacks(number) and now() < until_s:
                if self.stop.requested:
                    return
                await asyncio.sleep(LOOK_EVERY_S)
            self._given_up = number

    def _tell(self) -> None:
        """Report the values that came, and what is wrong with them."""
        fresh = self.evaluations.fresh
        if not fresh:
            return
        while fresh:
            round_number, place = fresh.popleft()
            value = self.evaluations.known.get((round_number, place))
            if value is not None:
                self._tell_value(value)
        self._compare()
        before, self.alarm = self.alarm, alarm_at(self.measurements(), self.guard.rising)
        if self.alarm is not None and (before is None or before.kind != self.alarm.kind):
            self._warn(self.alarm)

    def _tell_value(self, value: Evaluation) -> None:
        self.report(
            "evaluation",
            {
                "round": value.round,
                "by": self.evaluations.signer((value.round, value.place)),
                "repeated": bool(value.place),
                "outcome": value.outcome,
                "loss": value.loss if value.outcome == "ok" else None,
                "standard_error": value.standard_error,
                "sequences": value.sequences,
                "tokens": value.tokens,
                "gradient_norm": value.gradient_norm,
                "tokens_per_s": value.tokens_per_s,
                "busy": value.busy,
            },
        )

    def _agree(self, first: Evaluation, second: Evaluation) -> bool:
        """Return whether two values of the same weights differ by no more than they may."""
        if "missed" in (first.outcome, second.outcome):
            return True
        if first.outcome != second.outcome:
            return False
        return abs(first.loss - second.loss) <= self.tolerance * max(first.loss, second.loss)

    def _compare(self) -> None:
        """Say it if two members measured the same weights, and not the same loss."""
        known = self.evaluations.known
        for (number, place), second in known.items():
            first = known.get((number, 0))
            if not place or first is None or number <= self._differing:
                continue
            if self._agree(first, second):
                continue
            self._differing = number
            names = [self.evaluations.signer((number, each)) for each in (0, 1)]
            self.difference = (
                f"two members evaluated the same weights after round {number} and differ:"
                f" {names[0]} says {_said(first)}, and {names[1]} says {_said(second)};"
                " one of them computes wrongly or lies"
            )
            log.warning("%s", self.difference)
            self.report(
                "difference",
                {
                    "round": number,
                    "by": names,
                    "losses": [_said(first), _said(second)],
                },
            )

    def _warn(self, alarm: Alarm) -> None:
        if self.guard.on == "off":
            return
        ends = alarm.round + DELAY * self.schedule.period
        follows = f"the run ends before round {ends}" if self.guard.on == "end" else "it goes on"
        log.warning(
            "the training may have gone wrong: %s (round %d); %s",
            *(alarm.reason, alarm.round, follows),
        )
        self.report(
            "guard",
            {
                "alarm": alarm.kind,
                "round": alarm.round,
                "good": alarm.good,
                "reason": alarm.reason,
                "does": self.guard.on,
            },
        )


@dataclass(frozen=True, slots=True)
class GuardedEnd:
    """The end of a run that its guard may end before it has its tokens; `inner` is how it ends
    otherwise (None: by the node's own estimate, `tokens`)."""

    evaluator: Evaluator
    inner: Barrier | None
    tokens: Callable[[], int]

    def is_due(self, total_tokens: int) -> bool:
        """Return whether the run is over."""
        if self.evaluator.is_over():
            return True
        if self.inner is None:
            return self.tokens() >= total_tokens
        return self.inner.is_due(total_tokens)

    async def end(
        self, take_in: Callable[[], Awaitable[None]], stopping: Callable[[], bool]
    ) -> None:
        """Wait until all peers have ended alike, if the method is exact."""
        if self.inner is not None:
            await self.inner.end(take_in, stopping)


def schedule_of(driver: Driver, client: ExchangeClient, every: int) -> EvaluationSchedule:
    """Return the rounds of the method's first stream that are evaluated."""
    first = driver.streams[0]
    name = first.key.stream if client.stage is None else f"{first.key.stream}/{client.stage}"
    return EvaluationSchedule(name, every, first.stride, first.key.round)


def with_loss(missed: Evaluation, found: LossEstimate) -> Evaluation:
    """Return a value with what was measured."""
    value = replace(missed, sequences=found.sequences)
    if not (math.isfinite(found.mean) and found.mean <= MAX_LOSS):
        return replace(value, outcome="not finite")
    error = min(found.standard_error, MAX_LOSS) if math.isfinite(found.standard_error) else 0.0
    return replace(value, outcome="ok", loss=max(found.mean, 0.0), standard_error=error)


def _said(value: Evaluation) -> str:
    return f"{value.loss:.4f}" if value.outcome == "ok" else value.outcome


def _bounded(norm: float) -> float:
    return norm if math.isfinite(norm) and 0.0 <= norm <= MAX_NORM else MAX_NORM
