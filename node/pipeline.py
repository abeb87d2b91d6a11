"""One node's part in a pipeline, put together: a stage server, a trainer, or both, over one peer.

The server's stage is synced by the ordinary driver, courier, seat and loop; the trainer holds no weights. Processes and
simulations assemble their nodes here, alike.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from farflock.compression.activation_catalog import activation_codec
from farflock.node.checkpoint import Checkpoint
from farflock.node.courier import Courier
from farflock.node.data import Batches
from farflock.node.driver import Driver
from farflock.node.loop import Loop
from farflock.node.model import Llama, build
from farflock.node.participant import Compute, Participant, Plan, Report
from farflock.node.rebalancer import Balance, LifeOver, Rebalancer
from farflock.node.recovery import LR_BUMP
from farflock.node.replica import PlainReplica
from farflock.node.resume import cursors_of, take_up_state
from farflock.node.seat import Seat
from farflock.node.stage import Stage
from farflock.node.stage_edges import Edges
from farflock.node.stage_rolls import Rolls, StreamName
from farflock.node.stage_server import Pass, ServerTerms, StageServer
from farflock.node.stage_state import SCALE, begin_anew, fill, living, round_of, scale_snapshot
from farflock.node.stage_tensors import shapes_of
from farflock.node.stage_trainee import Batch, StageTrainee, gated
from farflock.node.stage_versions import ORIGIN, Asynchronous, origin_of, versions_of
from farflock.node.tokenizer import Tokens
from farflock.node.trainer import Trainer, TrainerTerms, first_number
from farflock.optimizers.catalog import SUMMING, method
from farflock.optimizers.method import Exchange, Key, Progress, Result, Tensors, What
from farflock.swarm.messages import Load
from farflock.swarm.paths import PathPolicy, Wired, fixed, mixed
from farflock.swarm.peer import Peer, Wait
from farflock.swarm.roles import NOTHING, role_of
from farflock.swarm.snapshots import Progress as Downloaded
from farflock.swarm.snapshots import Snapshot
from farflock.swarm.swapping import Swapped

ENDLESS = 2**62  # tokens
SETTLE_S = 3.0  # for the log of a stage's rounds to come, where nobody has its state


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How a run's model is cut, and what is agreed upon the way through it. A stage steps once its group has taken in
    `batch_tokens`; `policy` is one of `POLICIES`, `codec` an activation codec's name."""

    stages: tuple[range, ...]
    batch_tokens: int
    codec: str = "int8"
    policy: str = "swarm"
    server: ServerTerms = field(default_factory=ServerTerms)
    trainer: TrainerTerms = field(default_factory=TrainerTerms)
    balance: Balance = field(default_factory=Balance)
    asynchronous: Asynchronous | None = None  # backward passes use the weights that are there


# Of the stages' numbers of layers, the run's seed, and who asks.
Policy = Callable[[Sequence[int], int, str], PathPolicy]


def _wired(layers: Sequence[int], seed: int, me: str) -> PathPolicy:
    return Wired(len(layers), random.Random(f"{seed}/{me}/wiring"))


POLICIES: Mapping[str, Policy] = {
    "swarm": _wired,
    "fixed": lambda layers, seed, me: fixed(len(layers)),
    "noloco": lambda layers, seed, me: mixed(len(layers), seed),
    "swap": lambda layers, seed, me: Swapped(_wired(layers, seed, me), layers),
}


@dataclass(frozen=True, slots=True)
class Means:
    """What a node is given to work with: how it computes, and where it reports."""

    compute: Compute
    run_pass: Pass
    train: Callable[[Callable[[], float]], Awaitable[float]]
    report: Report = lambda kind, fields: None
    memory_bytes: int = 1 << 62  # for a stage, should this node go to another one
    needs_bytes: tuple[int, ...] = ()  # by stage, what it takes to serve it; nothing where room does not matter


@dataclass(slots=True)
class Serving(Participant):
    """The part of a node that serves stage `index`: like a replica, of one stage."""

    index: int = 0
    server: StageServer = field(kw_only=True)


class PipelineNode:
    """One life of one node. `stage` is the one that it serves, `NOTHING` for none; with `tokens`, the run's text, it trains;
    `saved` is its last checkpoint of that stage."""

    def __init__(
        self,
        plan: Plan,
        pipeline: PipelinePlan,
        peer: Peer,
        means: Means,
        stage: int,
        tokens: Tokens | None = None,
        saved: Checkpoint | None = None,
    ) -> None:
        self.peer, self.plan, self.pipeline, self._means, self._saved = peer, plan, pipeline, means, saved
        self._edges = edges_of(plan, pipeline)
        self._streams: dict[int, StreamName] = {}
        self._specimens: dict[int, list[Exchange]] = {}
        self._began_s = 0.0
        self.serving = self._serve(stage) if stage != NOTHING else None
        if self.serving is not None:  # a member is asked before it runs: calls that wait ban nobody, calls that fail do
            peer.calls.handler = self.serving.server
            if saved is not None:  # its steps are counted on from there: by them checkpoints are named, and kept
                self.serving.loop.step = self.serving.trainee.joined_at = saved.step
        self._others = [index for index in range(len(pipeline.stages)) if index != stage]
        for index in self._others:
            self._note_stream(index, self._specimens_of(index)[0])
        self.rolls = Rolls(peer, self._streams_of())
        self.trainer = self._trainer(tokens) if tokens is not None else None

    # beginning

    def found(self) -> None:
        """Found the run: the initial weights of my stage are its."""
        self.peer.found()
        self._look_on()
        if self.serving is not None:
            self._begin_from_disk(self.serving, {}, 0)

    async def join(
        self, records: Sequence[bytes], timeout_s: float, downloaded: Downloaded = lambda here, total: None
    ) -> None:
        """Join through these members: the stage's state is downloaded from whoever has it, or begun anew."""
        await self.peer.meet(list(records), timeout_s)
        self._look_on()
        if self.serving is not None:
            await self._find_state(self.serving, timeout_s, downloaded)
        self.peer.ask_in()

    async def _find_state(self, serving: Serving, timeout_s: float, downloaded: Downloaded) -> None:
        rounds: dict[str, int] = {}
        tokens = 0
        while True:
            if await self._adopted(serving, timeout_s, downloaded):
                self._serve_scale(serving)
                return
            rounds, tokens = await self._where(serving.index)
            if not self._is_served(serving.index):
                break
        after = max(rounds.values(), default=-1)
        begun = await begin_anew(self.peer, self.plan, self.pipeline.stages, serving.index, after, self._saved)
        self._means.report("stage", {"stage": serving.index, "from": begun.kind, "why": begun.reason, "round": after})
        if begun.tensors is not None:
            fill(serving.model, begun.tensors)
            serving.seat.marks["bumped"] = after
        if begun.kind == "snapshot":
            self._begin_from_disk(serving, rounds, tokens)
        else:
            self._begin_stage(rounds, tokens)

    async def _adopted(self, serving: Serving, timeout_s: float, downloaded: Downloaded) -> bool:
        """Download the state from others of the stage. False as soon as there are none and nothing has come: those whom the
        view lists may be back in other lives, and wait for this one's state as this one does for theirs."""
        comes = False

        def coming(here: int, total: int) -> None:
            nonlocal comes
            comes = True
            downloaded(here, total)

        if not self._is_served(serving.index):
            return False
        adopting = asyncio.ensure_future(serving.seat.adopt(timeout_s, coming))
        try:
            while not adopting.done() and (comes or self._is_served(serving.index)):
                await asyncio.wait([adopting], timeout=SETTLE_S / 10)
            if adopting.done():
                adopting.result()
            return adopting.done()
        finally:
            adopting.cancel()
            await asyncio.gather(adopting, return_exceptions=True)

    def _begin_from_disk(self, serving: Serving, rounds: Mapping[str, int], tokens: int) -> None:
        """With the last checkpoint's state, if there is one; where the run has no log of this stage, also at its rounds."""
        if self._saved is not None and round_of(self._saved) is not None:
            take_up_state(serving, self._saved)
            if max(rounds.values(), default=-1) < 0:
                place = cursors_of(self._saved).place
                rounds, tokens = place.rounds, place.agreed_tokens
        self._begin_stage(rounds, tokens)

    async def _where(self, index: int) -> tuple[dict[str, int], int]:
        """By stream the last round of a stage that nobody has the state of, and the tokens agreed upon by then."""
        specimens, rounds = self._specimens_of(index), self.peer.rounds
        self._open_as_onlooker(index)
        names = {entry.key.stream: f"{entry.key.stream}/{index}" for entry in specimens}
        before, newest = None, {stream: rounds.newest(name) for stream, name in names.items()}
        while before != newest and not self._is_served(index):
            await asyncio.sleep(SETTLE_S)
            before, newest = newest, {stream: rounds.newest(name) for stream, name in names.items()}
        tokens = rounds.tokens(self._streams[index].name)
        for name in names.values():
            rounds.close(name)
        return newest, tokens

    def _is_served(self, index: int) -> bool:
        return bool(living(self.peer, len(self.pipeline.stages))[index])

    def _begin_stage(self, rounds: Mapping[str, int], tokens: int) -> None:
        assert self.serving is not None
        driver = self.serving.loop.driver
        state = driver.method.snapshot(
            driver.replica
        )  # the round begins here, before anybody can ask for it beside a step
        if self.pipeline.asynchronous is not None and max(rounds.values(), default=-1) >= 0:
            self.serving.seat.marks[ORIGIN] = origin_of(state)
        for entry in self._specimens_of(self.serving.index):
            after = rounds.get(entry.key.stream, -1)
            if after >= entry.key.round:  # to the method, rounds that it has nothing of have failed
                missed = Result("failed", after + entry.stride, tokens=tokens)
                driver.replay(Key(entry.key.stream, after), missed, Progress(0, tokens))
        self.serving.seat.open(rounds, tokens)
        self._serve_scale(self.serving)

    def _serve_scale(self, serving: Serving) -> None:
        """Tell who has to make a stage from this one what its gradients weigh."""

        async def scale() -> Snapshot:
            assert isinstance(serving.trainee, StageTrainee)
            return scale_snapshot(serving.seat.applied_round, serving.trainee.scale)

        self.peer.snapshots.serve(f"{SCALE}/{serving.index}", scale)

    def _look_on(self) -> None:
        for index in self._others:
            self._open_as_onlooker(index)

    def _open_as_onlooker(self, index: int) -> None:
        courier = self._courier(index)
        for number, specimen in enumerate(self._specimens_of(index)):
            courier.look_on(specimen, noted=not number)

    # as its process sees it

    @property
    def role(self) -> str:
        """As its record says it."""
        return role_of(self.serving.index if self.serving is not None else NOTHING)

    @property
    def step(self) -> int:
        """Its stage's steps; of a trainer, microbatches."""
        return self.serving.loop.step if self.serving is not None else self.trainer.begun if self.trainer else 0

    @property
    def tokens(self) -> int:
        """What the slowest stage has agreed upon."""
        return self.rolls.tokens()

    @property
    def trained_tokens(self) -> int:
        """What has counted here, or was trained from here."""
        passes = self.serving.server.served["merged"] if self.serving is not None else 0
        return self._edges.tokens * max(passes, self.trainer.finished if self.trainer is not None else 0)

    @property
    def last_loss(self) -> float | None:
        """Of the last microbatches of a trainer, or of the last stage's last step."""
        if self.trainer is not None:
            return self.trainer.recent_loss
        return self.serving.loop.last_loss if self.serving is not None else None

    @property
    def work(self) -> dict[str, int]:
        """What a server has done, and what a trainer has on its way."""
        counts: dict[str, int] = {}
        if self.serving is not None:
            counts |= {name: self.serving.server.served[name] for name in ("forward", "backward", "merged", "busy")}
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
        parts = []
        if self.serving is not None:
            self._began_s = self._now()
            needs_bytes = self._means.needs_bytes or (0,) * len(self.pipeline.stages)
            rebalancer = Rebalancer(self.peer, self.pipeline.balance, needs_bytes, self._load)
            parts += [self.serving.server.run(), rebalancer.run()]
            parts += [self.serving.loop.run(ENDLESS, drain_s), self._end(total_tokens)]
        if self.trainer is not None:
            parts.append(self.trainer.run(lambda: self.rolls.tokens() >= total_tokens))
        tasks = [asyncio.ensure_future(part) for part in parts]
        rest = tasks[2:] if self.serving is not None else tasks  # the server itself serves until all else is over
        try:
            running = set(tasks)
            while running.intersection(rest):
                ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()  # a server that failed serves nobody: this life is over
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
        assert self.serving is not None
        while self.rolls.tokens() < total_tokens and not self.stopping:  # noqa: ASYNC110 - two parts' conditions
            await asyncio.sleep(SETTLE_S / 10)
        self.serving.loop.stop()

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        parts = (self.serving.loop if self.serving else None, self.trainer)
        return any(part is not None and part.stopping for part in parts)

    def stop(self) -> None:
        """End soon."""
        if self.serving is not None:
            self.serving.loop.stop()
        if self.trainer is not None:
            self.trainer.stopping = True

    # putting together

    def _serve(self, index: int) -> Serving:
        plan, peer, means = self.plan, self.peer, self._means
        model = build(plan.model, plan.run_seed, self.pipeline.stages[index]).to(self._edges.dtype)
        inner = plan.inner.build(model)
        stage, replica = Stage(model), PlainReplica(model, inner, clip_of(plan, model))
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
        trainee = StageTrainee(
            server, stage, replica, plan.schedule, self._edges.tokens, summing=plan.method in SUMMING
        )
        self._note_stream(index, first)
        batch = Batch(
            server,
            peer.rounds,
            peer.tallies,
            self._streams[index].name,
            index,
            self.pipeline.batch_tokens,
            stopping=lambda: loop.stopping,
        )
        trainee.rate_factor = lambda: LR_BUMP if "bumped" in seat.marks else 1.0
        loop = Loop(driver, seat, trainee, means.compute, gated(batch, means.train), means.report, adopt=self._over)
        return Serving(peer, model, seat, loop, trainee, role_of(index), index, server=server)

    async def _over(self, reason: str) -> None:
        raise LifeOver(reason)

    def _trainer(self, tokens: Tokens) -> Trainer:
        plan, pipeline, me = self.plan, self.pipeline, self.peer.me
        batches = Batches(tokens, plan.run_seed, me, plan.batch, plan.seq)
        policy = POLICIES[pipeline.policy]([len(span) for span in pipeline.stages], plan.run_seed, me)
        first, report = first_number(self.peer.port.incarnation), self._means.report
        return Trainer(self.peer, self.rolls, policy, self._edges, batches.batch, self._terms(), report, first=first)

    def _terms(self) -> TrainerTerms:
        """No more on their way than the batches that a microbatch may be late: the last stage would get too far ahead of the
        first, and find what comes then too old."""
        terms, rounds = self.pipeline.trainer, max(self.pipeline.server.staleness, 1)
        most = max(rounds * self.pipeline.batch_tokens // self._edges.tokens, 1)
        gone = terms.gone if self.pipeline.asynchronous is None else self.pipeline.asynchronous.gone
        return replace(terms, window=min(terms.window, most), gone=gone)

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
        self._streams[index] = StreamName(f"{first.key.stream}/{index}", first.key.round, first.stride)

    def _streams_of(self) -> dict[int, StreamName]:
        return dict(sorted(self._streams.items()))


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
    codec = activation_codec(pipeline.codec)
    return Edges(codec, plan.batch, plan.seq, config.dim, config.vocab_size, plan.run_seed, plan.dtype)
