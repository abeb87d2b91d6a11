"""What trains at a node of a pipeline, put together: a trainer that asks the servers of stages, or
a full replica's own training. Features that few runs use are chosen here."""

from dataclasses import dataclass, replace

from farflock.node.model.data import Batches
from farflock.node.model.tokenizer import TokenIds
from farflock.node.pipeline.full_replica import FullLimits, FullTrainer, LocalStage, OwnMicrobatches
from farflock.node.pipeline.lifecycle.features import pass_weights, stage_inputs
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.server.server import Computing
from farflock.node.pipeline.trainer.in_flight import (
    MicrobatchSource,
    first_number,
)
from farflock.node.pipeline.trainer.stage_directory import StageDirectory
from farflock.node.pipeline.trainer.trainer import Trainer
from farflock.node.reporting import Report
from farflock.node.run.policies import lane_of, policy_of
from farflock.node.run.terms import PipelinePlan, RunPlan, TrainerTerms
from farflock.swarm.paths.policy import PathPolicy
from farflock.swarm.peer.peer import Peer


@dataclass(frozen=True, slots=True)
class TrainerAssembly:
    """Puts the training of one node together, on `tokens`, the run's text."""

    plan: RunPlan
    pipeline: PipelinePlan
    peer: Peer
    stage_directory: StageDirectory
    edges: Edges
    tokens: TokenIds
    report: Report

    def trainer(self) -> Trainer:
        """Of a node whose microbatches go from server to server."""
        policy, batches = self._policy(), self._batches()
        lane, first = lane_of(self.peer.me), first_number(self.peer.context.incarnation)
        source = MicrobatchSource(batches, self.edges, policy, lane, first, pass_weights(self.pipeline.asynchronous))
        inputs = stage_inputs(self.edges, batches)
        return Trainer(self.peer, self.stage_directory, policy, source, self.terms, self.report, inputs)

    def full(self, parts: list[LocalStage], computing: Computing) -> FullTrainer:
        """Of a full replica, whose microbatches never leave it."""
        first, lane = first_number(self.peer.context.incarnation), lane_of(self.peer.me)
        drawn = OwnMicrobatches(self._batches(), self._policy(), lane, self.edges.tokens)
        limits = FullLimits(self._max_late(), self.pipeline.trainer.kept)
        return FullTrainer(self.peer, self.stage_directory, parts, drawn, limits, computing, self.report, first)

    def _batches(self) -> Batches:
        plan, me = self.plan, self.peer.me
        cut = plan.batch, plan.seq
        return Batches(self.tokens, plan.run_seed, me, *cut, recurring=plan.samples)

    def _policy(self) -> PathPolicy:
        pipeline, me = self.pipeline, self.peer.me
        given = pipeline.layers, self.plan.run_seed, me
        return policy_of(pipeline.policy, *given, pipeline.paths)

    @property
    def terms(self) -> TrainerTerms:
        """No more microbatches on their way than may be late: the last stage would get too far
        ahead of the first, and find what comes then too old."""
        terms = self.pipeline.trainer
        return replace(terms, window=min(terms.window, self._max_late()))

    def _max_late(self) -> int:
        """The microbatches of as many batches as a gradient may be late."""
        rounds = max(self.pipeline.server.staleness, 1)
        return max(rounds * self.pipeline.batch_tokens // self.edges.tokens, 1)
