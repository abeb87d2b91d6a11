"""A node's part in the evaluation of a pipeline: when it is drawn, it measures the run through the
servers of all stages, beside its training and theirs, and tells all members.

Evaluations follow the rounds of the first stage, which every member hears of. A value of round N is
that of weights which had that round's tokens or more, perhaps those of the rounds that ended while
it was measured (decision 034). The founder's own trainer begins when it has measured the weights
that the run begins with."""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from farflock.node.model.evaluation import HeldOut
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.trainer.blame import Quarantine
from farflock.node.pipeline.trainer.edge_codecs import EdgeCodecs
from farflock.node.pipeline.trainer.path_meter import PathMeter
from farflock.node.pipeline.trainer.stage_client import StageClient
from farflock.node.pipeline.trainer.stage_directory import StageDirectory
from farflock.node.reporting import Report
from farflock.node.run.terms import PipelinePlan
from farflock.node.train.evaluation_watch import EvaluationWatch
from farflock.node.train.evaluator import Measured, evaluation_of
from farflock.swarm.paths.policy import fixed
from farflock.swarm.peer.peer import Peer
from farflock.swarm.protocol.evaluation_lot import EvaluationSchedule
from farflock.swarm.protocol.evaluation_progress import ENDED, STALLED_S

LOOK_EVERY_S = 0.25  # at the rounds of the first stage, and at what others measured
FIRST = 0  # the stage whose rounds evaluations follow

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PathEvaluator:
    """One node's evaluations of a pipeline, every so many rounds; `step` returns its own steps."""

    peer: Peer
    stage_directory: StageDirectory
    meter: PathMeter
    every: int
    report: Report
    step: Callable[[], int]
    watch: EvaluationWatch = field(init=False)
    _looked: int = field(default=-1, init=False)  # the last round that was looked at
    _holds: bool = field(default=False, init=False)  # this node's trainer, before the first value
    _moved_s: float = field(default=math.inf, init=False)  # of the last progress

    def __post_init__(self) -> None:
        self.watch = EvaluationWatch(self.peer.evaluations, self.report)
        stream, seed = self.stage_directory.streams[FIRST], self.peer.terms.seed
        self.peer.evaluations.open(
            EvaluationSchedule(stream.name, seed, self.every, stream.first, stream.stride, FIRST)
        )

    def joins(self) -> None:
        """Leave the first round, which had begun before this node came, to others."""
        self._looked = self.stage_directory.streams[FIRST].first

    def founds(self) -> None:
        """Measure the weights that the run begins with before this node's trainer changes them."""
        self._holds = True

    def may_train(self) -> bool:
        """Return whether this node's trainer may begin a microbatch. It waits for no measurement
        that stands still, nor once others have ended the first round."""
        is_begun = self._begun() > self.stage_directory.streams[FIRST].first
        return not self._holds or is_begun or _now() - self._moved_s >= STALLED_S

    async def record(self) -> None:
        """Record what members measured, until cancelled."""
        while True:
            self.watch.look(self.step())
            await asyncio.sleep(LOOK_EVERY_S)

    async def measure(self) -> None:
        """Measure whenever this node is drawn, until cancelled."""
        if self._begun() != self._due():
            self._looked = self._due()  # this life begins in the middle of the run
        self._moved_s = _now()
        while True:
            number = self._due()
            if number != self._looked:
                self._looked = number
                if self._begins(number) and await self._is_whole(number):
                    await self._evaluate(number)
            self._holds = False
            await asyncio.sleep(LOOK_EVERY_S)

    def _begins(self, number: int) -> bool:
        """Return whether this node is drawn, and none measures an earlier round."""
        evaluations = self.peer.evaluations
        return evaluations.is_mine(number) and not evaluations.is_another_under_way(number)

    def _begun(self) -> int:
        """Return the first stage's round that is not over."""
        stream = self.stage_directory.streams[FIRST]
        return max(self.peer.rounds.newest(stream.name) + stream.stride, stream.first)

    def _due(self) -> int:
        """Return the last round of the first stage that has begun and is evaluated."""
        stream, begun = self.stage_directory.streams[FIRST], self._begun()
        return begun - (begun - stream.first) % (self.every * stream.stride)

    async def _is_whole(self, number: int) -> bool:
        """Wait until each stage has a server; return False if the next evaluation is due before."""
        while not all(self.stage_directory.serving().stages):
            await asyncio.sleep(LOOK_EVERY_S)
            if self._due() != number:
                return False
        return True

    async def _evaluate(self, number: int) -> None:
        tokens, say = self.stage_directory.tokens(), self.peer.evaluations.say_progress

        def moved(percent: int) -> None:
            self._moved_s = _now()
            say(number, percent)

        try:
            found = await self.meter.measure(moved)
        finally:
            say(number, ENDED)
        if found is not None:
            measured = Measured(found.estimate, found.bits_per_byte)
            self.peer.evaluations.tell(evaluation_of(number, tokens, measured))


def path_meter(
    peer: Peer,
    stage_directory: StageDirectory,
    edges: Edges,
    pipeline: PipelinePlan,
    held_out: Callable[[], HeldOut | None],
) -> PathMeter:
    """Return a meter of these sequences, once they are here, with the waits of training."""
    codecs, stages = EdgeCodecs(edges, peer.codec_offers.of), len(pipeline.stages)
    terms, policy = pipeline.trainer, fixed(stages)  # which is never asked
    waits = terms.forward_timeout_s, terms.backward_timeout_s
    client = StageClient(
        peer, stage_directory, policy, codecs, Quarantine(), *waits, direct=terms.direct
    )
    return PathMeter(client, stage_directory, codecs, held_out, min(stages, terms.window))


def _now() -> float:
    return asyncio.get_running_loop().time()
