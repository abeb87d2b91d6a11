"""One node's part in a pipeline, put together: a stage server, a trainer, both, or a full replica, over one peer.

The server's stage is synced by the ordinary driver, courier, seat and loop; the trainer holds no weights. A full replica is the
union of its stages: a server of each, and microbatches of its own that never leave it (node/full_trainer.py). Processes and
simulations assemble their nodes here, alike.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from farflock.compression.activation_catalog import activation_codec, subspace_terms
from farflock.compression.subspace import Basis
from farflock.node.checkpoint import Checkpoint
from farflock.node.constraint import ConstrainedReplica, ConstrainedStage, Constraint
from farflock.node.courier import Courier
from farflock.node.data import Batches
from farflock.node.driver import Driver
from farflock.node.end_copies import EndCopies
from farflock.node.full_trainer import FullTrainer, Part
from farflock.node.loop import Loop
from farflock.node.model import Llama, build
from farflock.node.participant import Compute, Plan, Report
from farflock.node.policies import SWAP, lane_of, policy_of, shares_of
from farflock.node.rebalancer import Balance, LifeOver, Rebalancer
from farflock.node.recovery import LR_BUMP
from farflock.node.replica import PlainReplica
from farflock.node.run_basis import require_digest, run_basis
from farflock.node.seat import Seat
from farflock.node.stage import Stage
from farflock.node.stage_beginning import SETTLE_S, Beginning, Serving
from farflock.node.stage_dispatch import Dispatch
from farflock.node.stage_edges import Edges
from farflock.node.stage_rolls import Rolls, StreamName
from farflock.node.stage_server import Pass, ServerTerms, StageServer
from farflock.node.stage_tensors import shapes_of
from farflock.node.stage_trainee import Batch, StageTrainee, gated
from farflock.node.stage_versions import Asynchronous, versions_of
from farflock.node.tokenizer import Tokens
from farflock.node.trainer import Trainer, TrainerTerms, first_number
from farflock.optimizers.catalog import SUMMING, method
from farflock.optimizers.method import Exchange, Tensors, What
from farflock.optimizers.schedule import Schedule
from farflock.swarm.messages import Load
from farflock.swarm.paths import Microbatch, PathPolicy
from farflock.swarm.peer import Peer, Wait
from farflock.swarm.roles import EVERY, NOTHING, role_of
from farflock.swarm.snapshots import Progress as Downloaded

ENDLESS = 2**62  # tokens


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How a run's model is cut, and what is agreed upon the way through it. A stage that all microbatches visit steps once its
    group has taken in `batch_tokens`, others once they have their share; `policy` is a path policy's name, `codec` an
    activation codec's, `basis` the digest of what all peers share for it, if the manifest names one. After every
    `end_copies` rounds, if any, the stages beside the ends copy what those hold besides layers."""

    stages: tuple[range, ...]
    batch_tokens: int
    codec: str = "int8"
    policy: str = "swarm"
    server: ServerTerms = field(default_factory=ServerTerms)
    trainer: TrainerTerms = field(default_factory=TrainerTerms)
    balance: Balance = field(default_factory=Balance)
    end_copies: int = 0
    basis: str | None = None
    asynchronous: Asynchronous | None = None  # backward passes use the weights that are there

    @property
    def layers(self) -> tuple[int, ...]:
        """How many each stage has."""
        return tuple(map(len, self.stages))

    def share(self, stage: int) -> Fraction:
        """Of all microbatches, how many visit this stage."""
        return shares_of(self.policy, self.layers)[stage]


@dataclass(frozen=True, slots=True)
class Means:
    """What a node is given to work with: how it computes, and where it reports."""

    compute: Compute
    run_pass: Pass
    train: Callable[[Callable[[], float]], Awaitable[float]]
    report: Report = lambda kind, fields: None
    memory_bytes: int = 1 << 62  # for a stage, should this node go to another one
    needs_bytes: tuple[int, ...] = ()  # by stage, what it takes to serve it; nothing where room does not matter


class PipelineNode:
    """One life of one node. `stage` is the one that it serves, `NOTHING` for none, `EVERY` for a full replica; with `tokens`,
    the run's text, it trains; `saved` are its last checkpoints, by stage."""

    def __init__(
        self,
        plan: Plan,
        pipeline: PipelinePlan,
        peer: Peer,
        means: Means,
        stage: int,
        tokens: Tokens | None = None,
        saved: Mapping[int, Checkpoint] | None = None,
    ) -> None:
        self.peer, self.plan, self.pipeline, self._means = peer, plan, pipeline, means
        self._stage, self._saved = stage, saved or {}
        self._edges = edges_of(plan, pipeline)
        self._streams: dict[int, StreamName] = {}
        self._specimens: dict[int, list[Exchange]] = {}
        self._began_s = 0.0
        stages = range(len(pipeline.stages))
        self.servings = tuple(self._serve(index) for index in stages if stage in (index, EVERY))
        if self.servings:  # a member is asked before it runs: calls that wait ban nobody, calls that fail do
            peer.calls.handler = Dispatch({serving.index: serving.server for serving in self.servings})
        for serving in self.servings:
            if (before := self._saved.get(serving.index)) is not None:  # by its steps checkpoints are named, and kept
                serving.loop.step = serving.trainee.joined_at = before.step
        self._others = [index for index in stages if stage not in (index, EVERY)]
        for index in self._others:
            self._note_stream(index, self._specimens_of(index)[0])
        self.rolls = Rolls(peer, self._streams_of())
        self.trainer = self._trainer(tokens) if tokens is not None else None

    # beginning

    def found(self) -> None:
        """Found the run: the initial weights of my stage are its."""
        self.peer.found()
        self._look_on()
        for serving in self.servings:
            self._beginning(serving).found()

    async def join(
        self, records: Sequence[bytes], timeout_s: float, downloaded: Downloaded = lambda here, total: None
    ) -> None:
        """Join through these members: the stage's state is downloaded from whoever has it, or begun anew. A full replica does
        so for all stages at once: one that waited for the others' would be behind by then."""
        await self.peer.meet(list(records), timeout_s)
        self._look_on()
        comes = _Together(downloaded)
        beginnings = [self._beginning(serving).join(timeout_s, comes.part()) for serving in self.servings]
        tasks = [asyncio.ensure_future(beginning) for beginning in beginnings]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _ended(tasks)
        self.peer.ask_in()

    def _beginning(self, serving: Serving) -> Beginning:
        index = serving.index
        specimens, saved = self._specimens_of(index), self._saved.get(index)
        look_on = partial(self._open_as_onlooker, index)
        pipeline, report = self.pipeline, self._means.report
        copied, swapping = pipeline.end_copies > 0, pipeline.policy == SWAP
        versioned = pipeline.asynchronous is not None
        return Beginning(
            self.plan, pipeline.stages, serving, specimens, saved, look_on, report, copied, swapping, versioned
        )

    def _look_on(self) -> None:
        for index in self._others:
            self._open_as_onlooker(index)

    def _open_as_onlooker(self, index: int) -> None:
        courier = self._courier(index)
        for number, specimen in enumerate(self._specimens_of(index)):
            courier.look_on(specimen, noted=not number)

    # as its process sees it

    @property
    def serving(self) -> Serving | None:
        """Of who serves one stage, that one; of a full replica the first."""
        return self.servings[0] if self.servings else None

    @property
    def role(self) -> str:
        """As its record says it."""
        return role_of(self._stage)

    @property
    def step(self) -> int:
        """Its stage's steps, of several those of the one that is behind; of a trainer, microbatches."""
        if self.servings:
            return min(serving.loop.step for serving in self.servings)
        return self.trainer.begun if self.trainer else 0

    @property
    def tokens(self) -> int:
        """What the slowest stage has agreed upon."""
        return self.rolls.tokens()

    @property
    def trained_tokens(self) -> int:
        """What has counted here, or was trained from here."""
        passes = max((serving.server.served["merged"] for serving in self.servings), default=0)
        return self._edges.tokens * max(passes, self.trainer.finished if self.trainer is not None else 0)

    @property
    def last_loss(self) -> float | None:
        """Of the last microbatches of a trainer, or of the last stage's last step."""
        if self.trainer is not None:
            return self.trainer.recent_loss
        return self.serving.loop.last_loss if self.serving is not None else None

    @property
    def work(self) -> dict[str, int]:
        """What a server has done, of all its stages, and what a trainer has on its way."""
        counts: dict[str, int] = {}
        if self.servings:
            served = [serving.server.served for serving in self.servings]
            counts |= {name: sum(each[name] for each in served) for name in ("forward", "backward", "merged", "busy")}
        if self.trainer is not None:
            counts |= {
                "microbatches": self.trainer.finished,
                "under way": self.trainer.kept,
                "in doubt": self.trainer.lost,
                "dropped": self.trainer.dropped,
                "doubled": self.trainer.doubled,
            }
        return counts

    def waits(self) -> list[Wait]:
        """Open rounds, and what its trainer has asked for."""
        return self.peer.waits() + (self.trainer.waits() if self.trainer is not None else [])

    # running

    async def run(self, total_tokens: int, drain_s: float = 0.0) -> None:
        """Serve and train until every stage has the run's tokens, or until `stop`."""
        self._began_s = self._now()
        serve = [serving.server.run() for serving in self.servings]  # until all else is over
        if self._stage not in (NOTHING, EVERY):  # a full replica stays where it is: everywhere
            needs_bytes = self._means.needs_bytes or (0,) * len(self.pipeline.stages)
            serve.append(Rebalancer(self.peer, self.pipeline.balance, needs_bytes, self._load).run())
        if self.pipeline.end_copies:
            names = {index: stream.name for index, stream in self._streams.items()}
            serve += [EndCopies(self.peer, each, names, self.pipeline.end_copies).run() for each in self.servings]
        train = [serving.loop.run(ENDLESS, drain_s) for serving in self.servings]
        if self.servings:
            train.append(self._end(total_tokens))
        if self.trainer is not None:
            train.append(self.trainer.run(lambda: self.rolls.tokens() >= total_tokens))
        tasks = [asyncio.ensure_future(part) for part in (*serve, *train)]
        rest, running = tasks[len(serve) :], set(tasks)
        try:
            while running.intersection(rest):
                ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()  # a server that failed serves nobody: this life is over
        finally:
            await _ended(tasks)

    def _load(self, number: int) -> Load:
        """This server's numbers. Who also trains stays where it is: as if nothing else had room here."""
        assert self.serving is not None
        server, room = self.serving.server, self._means.memory_bytes if self.trainer is None else 0
        return Load(number, float(server.waiting), server.rate, room, self._now() - self._began_s)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _end(self, total_tokens: int) -> None:
        """Stop the loop once every stage has agreed upon the run's tokens: it goes by estimates of its own stage's itself, and
        would end before the round that the others wait for."""
        while self.rolls.tokens() < total_tokens and not self.stopping:  # noqa: ASYNC110 - two parts' conditions
            await asyncio.sleep(SETTLE_S / 10)
        for serving in self.servings:
            serving.loop.stop()

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        parts = (*(serving.loop for serving in self.servings), self.trainer)
        return any(part is not None and part.stopping for part in parts)

    def stop(self) -> None:
        """End soon."""
        for serving in self.servings:
            serving.loop.stop()
        if self.trainer is not None:
            self.trainer.stopping = True

    # putting together

    def _serve(self, index: int) -> Serving:
        plan, peer, means, share = self.plan, self.peer, self._means, self.pipeline.share(index)
        schedule = of_share(plan.schedule, share)
        stage, replica, inner = self._stage_and_replica(index)
        model = stage.model
        driver = Driver(method(plan.method, **plan.options), replica)
        first = driver.method.streams(replica)[0]
        terms = replace(self.pipeline.server, staleness=self.pipeline.server.staleness * first.stride)
        versions = versions_of(
            self.pipeline.asynchronous,
            terms.staleness,
            model,
            inner,
            driver,
            applied=lambda: seat.place.rounds[first.key.stream],
            marks=lambda: seat.marks,
            summing=plan.method in SUMMING,
            report=lambda fields: means.report("delay", {"stage": index, **fields}),
        )
        server = StageServer(
            index,
            stage,
            self._edges,
            terms,
            life=peer.port.incarnation,
            compute=means.compute,
            run_pass=means.run_pass,
            now=lambda: asyncio.get_running_loop().time(),
            applied=lambda: seat.place.rounds[first.key.stream],
            versions=versions,
        )
        seat = Seat(peer, driver, self._courier(index), means.compute, index, server)
        trainee = StageTrainee(server, stage, replica, schedule, self._edges.tokens, summing=plan.method in SUMMING)
        self._note_stream(index, first)
        batch = Batch(
            server,
            peer.rounds,
            peer.tallies,
            self._streams[index].name,
            index,
            int(self.pipeline.batch_tokens * share),
            stopping=lambda: loop.stopping,
        )
        trainee.rate_factor = lambda: LR_BUMP if "bumped" in seat.marks else 1.0
        report = self._report_of(index)
        loop = Loop(driver, seat, trainee, means.compute, gated(batch, means.train), report, adopt=self._over)
        return Serving(peer, model, seat, loop, trainee, role_of(index), index, server=server, batch=batch)

    def _report_of(self, index: int) -> Report:
        """What a stage's loop says. A full replica has a loop for each: rounds say of which stage they are, and of the steps,
        which stages take together, those are noted that know a loss."""
        report, last = self._means.report, len(self.pipeline.stages) - 1
        if self._stage != EVERY:
            return report

        def with_stage(kind: str, fields: dict[str, object]) -> None:
            if kind != "step" or index == last:
                report(kind, fields if kind == "step" else {**fields, "stage": index})

        return with_stage

    def _stage_and_replica(self, index: int) -> tuple[Stage, PlainReplica, torch.optim.Optimizer]:
        """With initial weights, constrained ones where the codec asks for that; and the inner optimizer."""
        plan, basis = self.plan, basis_of(self.plan, self.pipeline)
        model = build(plan.model, plan.run_seed, self.pipeline.stages[index]).to(self._edges.dtype)
        names = [name for name, _ in model.named_parameters()]
        constraint = Constraint.on(names, self.pipeline.stages, basis) if basis is not None else None
        if constraint is not None:
            constraint.begin(model)
        inner, clip = plan.inner.build(model), clip_of(plan, model)
        if constraint is None:
            return Stage(model), PlainReplica(model, inner, clip), inner
        return ConstrainedStage(model, constraint), ConstrainedReplica(model, inner, clip, constraint), inner

    async def _over(self, reason: str) -> None:
        raise LifeOver(reason)

    def _trainer(self, tokens: Tokens) -> Trainer | FullTrainer:
        plan, me = self.plan, self.peer.me
        batches = Batches(tokens, plan.run_seed, me, plan.batch, plan.seq)
        if self._stage == EVERY:
            return self._full_trainer(batches)
        first, report = first_number(self.peer.port.incarnation), self._means.report
        return Trainer(
            self.peer, self.rolls, self._policy(), self._edges, batches.batch, self._terms(), report, lane_of(me), first
        )

    def _full_trainer(self, batches: Batches) -> FullTrainer:
        first, means, ahead = first_number(self.peer.port.incarnation), self._means, self._most_late()
        parts = [Part(serving.server, serving.batch) for serving in self.servings]
        policy, lane = self._policy(), lane_of(self.peer.me)

        def order(number: int) -> tuple[int, ...]:
            return policy.stage_order(Microbatch(number, 0, lane))

        work = parts, batches.batch, self._edges.tokens, ahead, self.pipeline.trainer.kept, order
        return FullTrainer(self.peer, self.rolls, *work, means.run_pass, means.report, first)

    def _policy(self) -> PathPolicy:
        pipeline = self.pipeline
        return policy_of(pipeline.policy, pipeline.layers, self.plan.run_seed, self.peer.me)

    def _terms(self) -> TrainerTerms:
        """No more on their way than the batches that a microbatch may be late: the last stage would get too far ahead of the
        first, and find what comes then too old."""
        terms, asynchronous = self.pipeline.trainer, self.pipeline.asynchronous
        gone = terms.gone if asynchronous is None else asynchronous.gone
        return replace(terms, window=min(terms.window, self._most_late()), gone=gone)

    def _most_late(self) -> int:
        """The microbatches of so many batches."""
        rounds = max(self.pipeline.server.staleness, 1)
        return max(rounds * self.pipeline.batch_tokens // self._edges.tokens, 1)

    def _courier(self, index: int) -> Courier:
        return Courier(self.peer, self.plan.run_seed, self._means.compute, index)

    def _specimens_of(self, index: int) -> list[Exchange]:
        """One of each stream of a stage. Only shapes are asked of them: tensors would be the whole model, of which this node is
        to hold a part."""
        if index not in self._specimens:
            shapes = shapes_of(self.plan.model, self.pipeline.stages[index])
            with torch.device("meta"):
                self._specimens[index] = method(self.plan.method, **self.plan.options).streams(Shapes(shapes))
        return self._specimens[index]

    def _note_stream(self, index: int, first: Exchange) -> None:
        share = self.pipeline.share(index)
        self._streams[index] = StreamName(f"{first.key.stream}/{index}", first.key.round, first.stride, share)

    def _streams_of(self) -> dict[int, StreamName]:
        return dict(sorted(self._streams.items()))


class _Together:
    """Several downloads as one: chunks that are here, and all, added up."""

    def __init__(self, downloaded: Downloaded) -> None:
        self._downloaded, self._parts = downloaded, list[tuple[int, int]]()

    def part(self) -> Downloaded:
        """Where one of them says how far it is."""
        place = len(self._parts)
        self._parts.append((0, 0))

        def coming(here: int, total: int) -> None:
            self._parts[place] = here, total
            self._downloaded(sum(part[0] for part in self._parts), sum(part[1] for part in self._parts))

        return coming


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """End them, and wait until they have."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Shapes:
    """A replica of which only the shapes are known: enough to say which streams a method has."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors, in order."""
        return tuple(self.shapes)

    def read(self, names: Sequence[str], what: What) -> dict[str, Tensor]:
        """Zeros."""
        return {name: torch.zeros(self.shapes[name]) for name in names}

    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None:
        """There is nothing to write to."""

    def inner_step(self, lr: float | None = None) -> None:
        """There is nothing to step."""


def of_share(schedule: Schedule, share: Fraction) -> Schedule:
    """The same schedule for a stage that this share of the microbatches visit: it is as far along after as much less."""
    return replace(
        schedule,
        total_tokens=max(int(schedule.total_tokens * share), 1),
        warmup_tokens=int(schedule.warmup_tokens * share),
    )


def clip_of(plan: Plan, stage: Llama) -> float | None:
    """The greatest norm of a stage's gradient: that of the whole model's by the root of the stage's share of the parameters, as
    if all were of one size (node0's rule; a norm of the whole is known to nobody)."""
    if plan.clip_norm is None:
        return None
    share = sum(parameter.numel() for parameter in stage.parameters()) / plan.model.parameters()
    return plan.clip_norm * math.sqrt(share)


def edges_of(plan: Plan, pipeline: PipelinePlan) -> Edges:
    """What all peers of a run know of the edges between its stages."""
    config = plan.model
    codec = activation_codec(pipeline.codec, basis=basis_of(plan, pipeline))
    return Edges(codec, plan.batch, plan.seq, config.dim, config.vocab_size, plan.run_seed, plan.dtype)


def basis_of(plan: Plan, pipeline: PipelinePlan) -> Basis | None:
    """What all peers of a run share for its codec, if that needs something; `Incompatible` if this machine makes another one
    than the manifest names."""
    terms = subspace_terms(pipeline.codec)
    if terms is None:
        return None
    made = run_basis(plan.run_seed, plan.model.dim, terms.rank, plan.model.vocab_size)
    return require_digest(made, pipeline.basis)
