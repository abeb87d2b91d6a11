"""The assembly of one stage's server and its loop, over the node's peer and compute thread."""

import asyncio
import logging
import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch

from farflock.node.assembly.core import Core
from farflock.node.assembly.leaving import LOOK_EVERY_S, MERGE_S
from farflock.node.loop import Loop
from farflock.node.model.device import Device
from farflock.node.model.llama import Llama
from farflock.node.model.replica import PlainReplica, Storage, in_memory
from farflock.node.model.weights_folder import WeightsFolder, initial
from farflock.node.pipeline.lifecycle.features import edge_ends, weight_versions
from farflock.node.pipeline.lifecycle.frozen_embedding import FrozenEmbedding
from farflock.node.pipeline.lifecycle.left_out import watched
from farflock.node.pipeline.passes.constraint import (
    ConstrainedReplica,
    ConstrainedStage,
    Constraint,
)
from farflock.node.pipeline.passes.edges import Edges, basis_of
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.pipeline.recovery.rebuild import LR_BUMP
from farflock.node.pipeline.server.counting import Counting, stage_method
from farflock.node.pipeline.server.server import Pass, StageServer
from farflock.node.pipeline.server.task import BatchTrigger, StageTask, gated
from farflock.node.reporting import Report
from farflock.node.run.policies import shares_of
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.train.driver import Driver
from farflock.node.train.state_sync import Spool, StateSync
from farflock.node.train.task import Train
from farflock.optimizers.catalog import SUMMING
from farflock.optimizers.method import Exchange
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.parts.stateful import evaluated_weights
from farflock.swarm.compute import Compute
from farflock.swarm.peer.peer import Peer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeServices:
    """The services of a node's process: its computing, its reports, its memory and its device."""

    compute: Compute
    run_pass: Pass
    train: Train
    report: Report = lambda kind, fields: None
    memory_bytes: int = 1 << 62  # free for a stage, in case of a move
    needs_bytes: tuple[int, ...] = ()  # to serve each stage; empty: not checked
    storage: Storage = in_memory  # of methods' states
    spool: Spool | None = None  # of snapshots; None: `compute` writes them into memory
    device: Device = field(default_factory=Device)  # of stages
    weights: WeightsFolder | None = None  # that a founder's stages begin with; None: the seed's


@dataclass(frozen=True, slots=True)
class StageNode:
    """The part of a node that serves stage `index`."""

    index: int
    peer: Peer
    model: Llama
    state_sync: StateSync
    loop: Loop
    training_task: StageTask
    server: StageServer
    batch: BatchTrigger

    @property
    def counting(self) -> Counting | None:
        """The stage's method, if counts of their own name its microbatches."""
        return found if isinstance(found := self.loop.driver.method, Counting) else None

    @property
    def is_unmerged(self) -> bool:
        """True if work that counts is only at this server, until its next merge with another."""
        counting = self.counting
        will_merge = counting is not None and counting.tokens.will_merge
        return will_merge and self.loop.client.members() > 1

    async def merged(self) -> None:
        """Wait until what counts here is merged, for a few seconds at most."""
        until_s = self.loop.client.run_s() + MERGE_S
        while self.is_unmerged and self.loop.client.run_s() < until_s:  # noqa: ASYNC110 - a count
            await asyncio.sleep(LOOK_EVERY_S)


@dataclass(frozen=True, slots=True)
class Assembly:
    """Assembles the stage servers of one node; `whole` is true if it serves all stages."""

    plan: RunPlan
    pipeline: PipelinePlan
    peer: Peer
    means: NodeServices
    edges: Edges
    whole: bool
    embedding: FrozenEmbedding

    def serving(self, index: int, first: Exchange) -> StageNode:
        """Assemble a stage's server; `first` is an exchange of its stream with microbatch ids."""
        plan, peer, means, stream = self.plan, self.peer, self.means, first.key.stream
        stage, replica, inner = self._stage_and_replica(index)
        driver = Driver(stage_method(plan, self.pipeline.count_every), replica)
        staleness = self.pipeline.server.staleness * first.stride
        summing, pipeline = plan.method in SUMMING, self.pipeline
        share = shares_of(pipeline.policy, pipeline.layers, pipeline.paths)[index]

        def applied() -> int:
            return driver.position.rounds[stream]

        def marks() -> dict[str, int]:
            return core.state_sync.marks

        def stopping() -> bool:
            return core.loop.stop.requested

        def is_open() -> bool:
            # of all streams: before a result that is due at once, a method sends nothing more
            awaited = (
                each.exchange.key
                for each in driver.table
                if each.exchange.key.stream == stream or not each.exchange.apply_after
            )
            tasks = core.loop.under_way
            return any(key in tasks and not tasks[key].done() for key in awaited)

        async def before_step() -> bool:
            await core.state_sync.let_leave()
            return await left_out.may_step()

        def report_delay(fields: dict[str, object]) -> None:
            means.report("delay", {"stage": index, **fields})

        make_versions = weight_versions(pipeline.asynchronous)
        weights = staleness, stage.model, inner, driver
        versions = make_versions(
            *weights, applied=applied, marks=marks, summing=summing, report=report_delay
        )
        terms, life = replace(pipeline.server, staleness=staleness), peer.context.incarnation
        ends = edge_ends(self.edges)
        server = StageServer(
            index, stage, ends, terms, means, life=life, applied=applied, versions=versions
        )
        if not summing:  # those that are trained are this server's alone
            server.held_out.evaluated = lambda: evaluated_weights(driver.method, replica)
        accounts = server.accounts
        driver.contributions = (
            accounts if index else self.embedding.at_first(accounts, driver, applied)
        )
        schedule, microbatch_tokens = of_share(plan.schedule, share), self.edges.tokens
        task = StageTask(accounts, stage, replica, schedule, microbatch_tokens, summing)
        task.rate_factor = lambda: LR_BUMP if "bumped" in marks() else 1.0
        tokens, name = int(pipeline.batch_tokens * share), f"{stream}/{index}"
        group = peer.rounds, peer.tallies
        batch = BatchTrigger(accounts, *group, name, index, tokens, stopping, is_open)
        report, train = self._report_of(index), gated(batch, means.train, before_step)
        core = Core.over(
            peer, driver, task, means.compute, train, report, stage=index, spool=means.spool
        )
        left_out = watched(core, server, batch, index)
        if isinstance(counting := driver.method, Counting) and counting.shares_replica:
            core.state_sync.may_leave = lambda: counting.is_counted
        return StageNode(index, peer, stage.model, core.state_sync, core.loop, task, server, batch)

    def _report_of(self, index: int) -> Report:
        """Return the report callback of a stage's loop.

        A full replica has a loop for each stage. Their rounds are reported with the stage. Their
        steps coincide, so only the last stage's, which have a loss, are reported."""
        report, last = self.means.report, len(self.pipeline.stages) - 1
        if not self.whole:
            return report

        def with_stage(kind: str, fields: dict[str, object]) -> None:
            if kind != "step" or index == last:
                report(kind, fields if kind == "step" else {**fields, "stage": index})

        return with_stage

    def _stage_and_replica(self, index: int) -> tuple[Stage, PlainReplica, torch.optim.Optimizer]:
        """Return the stage and its replica with initial weights, and the inner optimizer.

        Weights are constrained if the codec needs it, except at a full replica of a run that
        constrains only pipelines."""
        plan, basis = self.plan, basis_of(self.plan, self.pipeline)
        device = self._device(is_projected=basis is not None)
        span = self.pipeline.stages[index]
        model = initial(plan.model, plan.run_seed, self.means.weights, span).to(self.edges.dtype)
        names = [name for name, _ in model.named_parameters()]
        constraint: Constraint | None = None
        if basis is not None:
            constraint = Constraint.on(names, self.pipeline.stages, basis)
            constraint.begin(model)
            constraint = constraint.placed(device.place)
        model = model.to(device.place)
        inner, clip = plan.inner_of(model), clip_of(plan, model)
        if constraint is None or (self.whole and self.pipeline.constrain == "pipelines"):
            plain = PlainReplica(model, inner, clip)
            plain.storage = self.means.storage
            return Stage(model, device), plain, inner
        replica = ConstrainedReplica(model, inner, clip, constraint)
        replica.storage = self.means.storage
        return ConstrainedStage(model, constraint, device), replica, inner

    def _device(self, *, is_projected: bool) -> Device:
        """Return the device of the stages: the CPU if they need float64, and the machine's has
        none."""
        device, terms = self.means.device, self.pipeline.asynchronous
        brakes = terms is not None and terms.correction == "braking"
        needs_float64 = is_projected or brakes or self.edges.dtype == torch.float64
        if device.has_float64 or not needs_float64:
            return device
        log.warning(
            "%s has no float64, which this run's stages need: they compute on the CPU", device.name
        )
        return Device()


def of_share(schedule: Schedule, share: Fraction) -> Schedule:
    """Return the schedule scaled to a stage that this share of the microbatches visits."""
    return replace(
        schedule,
        total_tokens=max(int(schedule.total_tokens * share), 1),
        warmup_tokens=int(schedule.warmup_tokens * share),
    )


def clip_of(plan: RunPlan, stage: Llama) -> float | None:
    """Return the maximum norm of a stage's gradient: the whole model's times the square root of
    the stage's share of the parameters, as if all gradients had the same size (node0's rule; no
    peer knows the whole norm)."""
    if plan.clip_norm is None:
        return None
    share = sum(parameter.numel() for parameter in stage.parameters()) / plan.model.parameters()
    return plan.clip_norm * math.sqrt(share)
