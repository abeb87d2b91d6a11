"""A node's part in the evaluation of a pipeline: like that of a node with the whole model
(node/train/evaluator.py), but beside its training, and through the servers of all stages.

Evaluations follow the rounds of the first stage, which every member knows. The other stages may be
at others: a value belongs to about this round (decision 035)."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace
from torch import Tensor

from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.trainer.blame import Quarantine
from farflock.node.pipeline.trainer.edge_codecs import EdgeCodecs
from farflock.node.pipeline.trainer.path_meter import PathMeter
from farflock.node.pipeline.trainer.stage_client import StageClient
from farflock.node.pipeline.trainer.stage_directory import StageDirectory, StreamName
from farflock.node.reporting import Report
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.train.evaluator import MISSED, Evaluator, Pace, with_loss
from farflock.node.train.exchange_client import StopRequest
from farflock.swarm.paths.policy import fixed
from farflock.swarm.peer.evaluations import Evaluation, EvaluationSchedule
from farflock.swarm.peer.peer import Peer

LOOK_EVERY_S = 0.25  # at the rounds of the first stage, and at what others measured

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ThroughStages:
    """The measuring of one member of a pipeline. Rounds are those of `stream`, evaluated ones
    `period` apart; `trained` returns this node's own tokens."""

    peer: Peer
    stage_directory: StageDirectory
    stream: StreamName
    period: int
    pace: Pace
    trained: Callable[[], int]
    meter: PathMeter | None = None
    unable: str = "the held-out text is not here yet"

    @property
    def applied(self) -> int:
        """The last round of the first stage that this node knows to be over."""
        return self.peer.rounds.newest(self.stream.name)

    @property
    def repeats(self) -> bool:
        """False: weights change while they are measured."""
        return False

    def begin(self) -> None:
        """Measure the pace from now on."""
        self.pace.since(self.trained())

    def is_timely(self, number: int) -> bool:
        """Return whether no later round is due."""
        return number > self.applied - self.period

    async def measured(self) -> Evaluation:
        """Return what the servers' weights measure now, and this node's pace."""
        tokens_per_s, _ = self.pace.since(self.trained())
        missed = replace(MISSED, tokens=self.stage_directory.tokens(), tokens_per_s=tokens_per_s)
        if self.meter is None:
            log.info("this node was drawn to evaluate, and does not: %s", self.unable)
            return missed
        found = await self.meter.measure()
        return missed if found is None else with_loss(missed, found)


def stage_evaluator(
    plan: RunPlan,
    peer: Peer,
    stage_directory: StageDirectory,
    pace: Pace,
    trained: Callable[[], int],
    report: Report,
) -> Evaluator:
    """Return the evaluator of a pipeline's member, which cannot measure yet."""
    stream, every = stage_directory.streams[0], plan.evaluation.every
    schedule = EvaluationSchedule(stream.name, every, stream.stride, stream.first)
    measuring = ThroughStages(peer, stage_directory, stream, schedule.period, pace, trained)
    return Evaluator(peer.evaluations, measuring, schedule, plan.guard, report, StopRequest())


def path_meter(
    peer: Peer,
    stage_directory: StageDirectory,
    edges: Edges,
    pipeline: PipelinePlan,
    windows: tuple[Tensor, Tensor],
) -> PathMeter:
    """Return a meter of these windows, tokens and next tokens (n, seq), with the waits of
    training."""
    codecs, stages = EdgeCodecs(edges, peer.codec_offers.of), len(pipeline.stages)
    terms, policy = pipeline.trainer, fixed(stages)  # which is never asked
    waits = terms.forward_timeout_s, terms.backward_timeout_s
    client = StageClient(
        peer, stage_directory, policy, codecs, Quarantine(), *waits, direct=terms.direct
    )
    return PathMeter(client, stage_directory, codecs, windows, min(stages, terms.window))


async def evaluate_beside(evaluator: Evaluator) -> None:
    """Take part in the run's evaluations beside all else, until cancelled."""
    evaluator.begin()
    while True:
        await evaluator.between_steps()
        await asyncio.sleep(LOOK_EVERY_S)
