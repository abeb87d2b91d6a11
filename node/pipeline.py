"""One node's part in a pipeline, put together: a stage server, a trainer, or both, over one peer.

The server's stage is synced by the ordinary driver, courier, seat and loop; the trainer holds no weights. Processes and
simulations assemble their nodes here, alike.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflock.compression.activation_catalog import activation_codec
from farflock.node.courier import Courier
from farflock.node.data import Batches
from farflock.node.driver import Driver
from farflock.node.loop import Loop
from farflock.node.model import Llama, build
from farflock.node.participant import Plan
from farflock.node.replica import PlainReplica
from farflock.node.seat import Seat
from farflock.node.stage import Stage
from farflock.node.stage_edges import Edges
from farflock.node.stage_rolls import Rolls, StreamName
from farflock.node.stage_server import Pass, ServerTerms, StageServer
from farflock.node.stage_tensors import shapes_of
from farflock.node.stage_trainee import Batch, StageTrainee, gated
from farflock.node.tokenizer import Tokens
from farflock.node.trainer import Trainer, TrainerTerms
from farflock.optimizers.catalog import SUMMING, method
from farflock.optimizers.method import Exchange, Tensors, What
from farflock.swarm.paths import PathPolicy, Wired, fixed, mixed
from farflock.swarm.peer import Peer
from farflock.swarm.roles import NOTHING

Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
Report = Callable[[str, dict[str, object]], None]
SETTLE_S = 3.0  # for the log of a stage's rounds to come, where nobody has its state


class LifeOver(Exception):
    """This node's stage has gone on without it, or it is to serve another one: it begins another life."""


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


POLICIES: Mapping[str, Callable[[int, int, str], PathPolicy]] = {
    "swarm": lambda stages, seed, me: Wired(stages, random.Random(f"{seed}/{me}/wiring")),
    "fixed": lambda stages, seed, me: fixed(stages),
    "noloco": lambda stages, seed, me: mixed(stages, seed),
}


@dataclass(frozen=True, slots=True)
class Means:
    """What a node is given to work with: how it computes, and where it reports."""

    compute: Compute
    run_pass: Pass
    train: Callable[[Callable[[], float]], Awaitable[float]]
    report: Report = lambda kind, fields: None


@dataclass(slots=True)
class Serving:
    """The part of a node that serves a stage."""

    index: int
    stage: Stage
    server: StageServer
    seat: Seat
    loop: Loop


class PipelineNode:
    """One life of one node. `stage` is the one that it serves, `NOTHING` for none; with `tokens`, the run's text, it trains."""

    def __init__(
        self, plan: Plan, pipeline: PipelinePlan, peer: Peer, means: Means, stage: int, tokens: Tokens | None = None
    ) -> None:
        self.peer, self.plan, self.pipeline, self._means = peer, plan, pipeline, means
        self._edges = edges_of(plan, pipeline)
        self._streams: dict[int, StreamName] = {}
        self.serving = self._serve(stage) if stage != NOTHING else None
        self._onlookers = {index: self._onlooker(index) for index in range(len(pipeline.stages)) if index != stage}
        self.rolls = Rolls(peer, self._streams_of())
        self.trainer = self._trainer(tokens) if tokens is not None else None

    # beginning

    def found(self) -> None:
        """Found the run: the initial weights of my stage are its."""
        self.peer.found()
        self._look_on()
        if self.serving is not None:
            self._begin_stage({}, 0)

    async def join(self, records: Sequence[bytes], timeout_s: float) -> None:
        """Join through these members: the stage's state is downloaded from whoever has it, or begun anew."""
        await self.peer.meet(list(records), timeout_s)
        self._look_on()
        if self.serving is not None:
            await self._find_state(timeout_s)
        self.peer.ask_in()

    async def _find_state(self, timeout_s: float) -> None:
        assert self.serving is not None
        view, port = self.peer.port.views.newest, self.peer.port
        mates = [view.peers[index] for index in view.serving(self.serving.index)]
        if any(not port.gone(view, mate) for mate in mates if mate != port.me):
            await self.serving.seat.adopt(timeout_s)
            return
        name = self._streams[self.serving.index].name
        courier = self._courier(self.serving.index)
        for number, specimen in enumerate(self._specimens(self.serving.index)):
            courier.look_on(specimen, noted=not number)
        await self._caught_up(name)
        after, tokens = self.peer.rounds.newest(name), self.peer.rounds.tokens(name)
        rounds = {specimen.key.stream: after for specimen in self._specimens(self.serving.index)}
        for specimen in self._specimens(self.serving.index):
            self.peer.rounds.close(f"{specimen.key.stream}/{self.serving.index}")
        self._begin_stage(rounds, tokens)

    async def _caught_up(self, name: str) -> None:
        """Until nothing has been heard of a stream's rounds for a while."""
        before = None
        while before != (before := self.peer.rounds.newest(name)):  # noqa: ASYNC110 - that nothing happens has no event
            await asyncio.sleep(SETTLE_S)

    def _begin_stage(self, rounds: Mapping[str, int], tokens: int) -> None:
        assert self.serving is not None
        driver = self.serving.loop.driver
        driver.method.snapshot(driver.replica)  # the round begins here, before anybody can ask for it beside a step
        self.serving.seat.open(rounds, tokens)

    def _look_on(self) -> None:
        for index, specimens in self._onlookers.items():
            courier = self._courier(index)
            for number, specimen in enumerate(specimens):
                courier.look_on(specimen, noted=not number)

    # running

    async def run(self, total_tokens: int, drain_s: float = 0.0) -> None:
        """Serve and train until every stage has the run's tokens, or until `stop`."""
        parts = []
        if self.serving is not None:
            self.peer.calls.handler = self.serving.server
            parts += [self.serving.server.run(), self.serving.loop.run(total_tokens, drain_s)]
        if self.trainer is not None:
            parts.append(self.trainer.run(lambda: self.rolls.tokens() >= total_tokens))
        tasks = [asyncio.ensure_future(part) for part in parts]
        ends = tasks[1:] if self.serving is not None else tasks  # the server itself serves until all else is over
        try:
            await asyncio.gather(*ends)
            while self.rolls.tokens() < total_tokens and not self.stopping:  # noqa: ASYNC110 - two parts' conditions
                await asyncio.sleep(SETTLE_S / 10)  # other stages still need this one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
        stage, replica = Stage(model), PlainReplica(model, plan.inner.build(model), plan.clip_norm)
        driver = Driver(method(plan.method, **plan.options), replica)
        server = StageServer(
            index,
            stage,
            self._edges,
            self.pipeline.server,
            life=peer.port.incarnation,
            compute=means.compute,
            run_pass=means.run_pass,
            now=lambda: asyncio.get_running_loop().time(),
            applied=lambda: seat.applied_round,
        )
        seat = Seat(peer, driver, self._courier(index), means.compute, index, server)
        trainee = StageTrainee(
            server, stage, replica, plan.schedule, self._edges.tokens, summing=plan.method in SUMMING
        )
        self._note_stream(index, driver.method.streams(replica)[0])
        batch = Batch(
            server,
            peer.rounds,
            peer.tallies,
            self._streams[index].name,
            index,
            self.pipeline.batch_tokens,
            stopping=lambda: loop.stopping,
        )
        loop = Loop(driver, seat, trainee, means.compute, gated(batch, means.train), means.report, adopt=self._over)
        return Serving(index, stage, server, seat, loop)

    async def _over(self, reason: str) -> None:
        raise LifeOver(reason)

    def _trainer(self, tokens: Tokens) -> Trainer:
        plan, pipeline, me = self.plan, self.pipeline, self.peer.me
        batches = Batches(tokens, plan.run_seed, me, plan.batch, plan.seq)
        policy = POLICIES[pipeline.policy](len(pipeline.stages), plan.run_seed, me)
        return Trainer(self.peer, self.rolls, policy, self._edges, batches.batch, pipeline.trainer, self._means.report)

    def _courier(self, index: int) -> Courier:
        return Courier(self.peer, self.plan.run_seed, self._means.compute, index)

    def _onlooker(self, index: int) -> list[Exchange]:
        specimens = self._specimens(index)
        self._note_stream(index, specimens[0])
        return specimens

    def _specimens(self, index: int) -> list[Exchange]:
        shapes = shapes_of(self.plan.model, self.pipeline.stages[index])
        return method(self.plan.method, **self.plan.options).streams(Shapes(shapes))

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


def edges_of(plan: Plan, pipeline: PipelinePlan) -> Edges:
    """What all peers of a run know of the edges between its stages."""
    config = plan.model
    codec = activation_codec(pipeline.codec)
    return Edges(codec, plan.batch, plan.seq, config.dim, config.vocab_size, plan.run_seed, plan.dtype)


def whole(stages: Sequence[Llama]) -> dict[str, Tensor]:
    """The tensors of the unsplit model, from those of its stages."""
    return {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}
