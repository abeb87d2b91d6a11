"""A node's own evaluations of a run of whole models: before the rounds for which it is drawn, it
measures a copy of the weights, beside its rounds and instead of its steps.

What it measured goes into its next offer (swarm/peer/evaluations.py). Among pairs, whose members
have weights of their own, it stays here.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from farflock.node.model.device import is_out_of_memory
from farflock.node.model.evaluation import LossEstimate
from farflock.node.reporting import Report
from farflock.node.train.absence import Absence, AbsentLoop
from farflock.node.train.driver import Driver
from farflock.node.train.evaluation_watch import EvaluationWatch
from farflock.node.train.task import Train
from farflock.optimizers.method import Exchange, RandomGroups, Tensors
from farflock.optimizers.parts.stateful import evaluated_weights
from farflock.swarm.compute import Compute
from farflock.swarm.messages import MAX_LOSS, Evaluation
from farflock.swarm.peer.peer import Peer
from farflock.swarm.protocol.evaluation_lot import EvaluationSchedule

log = logging.getLogger(__name__)


class Measured(NamedTuple):
    """The loss of weights on the held-out text, and a text that they wrote."""

    estimate: LossEstimate
    bits_per_byte: float | None
    sample: str = ""


class EvaluatedLoop(AbsentLoop, Protocol):
    """A loop, as its evaluator sees it (node/loop.py)."""

    driver: Driver
    compute: Compute
    step: int

    @property
    def train(self) -> Train:
        """The worker that trains."""
        ...

    @property
    def report(self) -> Report:
        """The callback that receives events."""
        ...


# measures a copy of weights; returns None once the condition that it is given holds
Measurement = Callable[[Callable[[], bool]], Measured | None]


class WeightsMeter(Protocol):
    """A way to measure weights."""

    def copy(self, weights: Tensors) -> Measurement | None:
        """Copy the weights, and return a function that measures the copy; None if the text to
        measure them on is not here yet."""
        ...


@dataclass(slots=True)
class Evaluator:
    """One node's evaluations; `is_over` tells whether the run has ended."""

    peer: Peer
    loop: EvaluatedLoop
    meter: WeightsMeter
    every: int
    is_over: Callable[[], bool] = lambda: False
    watch: EvaluationWatch = field(init=False)
    _looked: int = field(default=-1, init=False)  # the last round that was looked at
    _said: bool = field(default=False, init=False)  # that there is no room

    def __post_init__(self) -> None:
        key, stride = self._first.key, self._first.stride
        alone = isinstance(self._first.group, RandomGroups)
        self.watch = EvaluationWatch(self.peer.evaluations, self.loop.report, alone)
        schedule = EvaluationSchedule(
            key.stream, self.peer.terms.seed, self.every, key.round, stride
        )
        self.peer.evaluations.open(schedule, shared=not alone)

    @property
    def _first(self) -> Exchange:
        """A template of the evaluated stream, the method's first."""
        return self.loop.driver.streams[0]

    async def between_steps(self) -> None:
        """Evaluate if this node is drawn for the next round, and record what others measured."""
        number = self.loop.state_sync.next_rounds[self._first.key.stream]
        if number != self._looked:
            self._looked = number
            if self._is_mine(number):
                await self._evaluate(number)
        self.watch.look(self.loop.step)

    def _is_mine(self, number: int) -> bool:
        driver, me = self.loop.driver, self.peer.me
        drawn = self.peer.evaluations.drawn(number)
        same = driver.method.equality == "exact" and len(driver.streams) == 1
        return me in (drawn if same else drawn[:1])

    async def _evaluate(self, number: int) -> None:
        tokens = self.loop.driver.position.agreed_tokens
        try:
            measure = await self.loop.compute(self._copied)
            if measure is None:
                log.warning(
                    "this node passes its turn to evaluate the run before round %d: the held-out"
                    " text is still on its way here",
                    number,
                )
                return
            found = await Absence(self.peer, self.loop).during(self._measured(measure))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if not self._said:
                self._said = True
                log.warning("this node has no room to evaluate the run, and trains on: %s", error)
            return
        if found is None:
            return
        value = evaluation_of(number, tokens, found)
        if self.watch.alone:
            self.peer.evaluations.keep(value, found.sample)
        else:
            self.peer.evaluations.offer(value, found.sample)

    def _copied(self) -> Measurement | None:
        """Copy the weights, in the worker that applies rounds."""
        driver = self.loop.driver
        return self.meter.copy(evaluated_weights(driver.method, driver.replica))

    async def _measured(self, measure: Measurement) -> Measured | None:
        """Measure in the worker that trains."""
        found: list[Measured | None] = []

        def work() -> float:
            found.append(measure(lambda: self.loop.stop.requested or self.is_over()))
            return 0.0

        await self.loop.train(work)
        return found[0]


def evaluation_of(number: int, tokens: int, found: Measured) -> Evaluation:
    """Return what was measured before a round as members say it."""
    mean, error = found.estimate.mean, found.estimate.standard_error
    if not (math.isfinite(mean) and mean <= MAX_LOSS):
        return Evaluation(number, tokens, None, 0.0)
    # of one sequence it is infinite
    error = min(error, MAX_LOSS) if math.isfinite(error) else 0.0
    return Evaluation(number, tokens, max(mean, 0.0), error, found.bits_per_byte)
