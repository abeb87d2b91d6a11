"""A pipeline's trainer: it takes microbatches through the stages, and each stage counts each
gradient once (decision 014).

It holds no weights. In node/pipeline/trainer, in_flight.py has the parts of a microbatch that a
trainer keeps, walker.py the walk, stage_client.py one call of a walk, and commits.py the
microbatches that count. The path policy chooses the servers (swarm/paths/policy.py)."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from farflock.node.pipeline.trainer.blame import Quarantine
from farflock.node.pipeline.trainer.commits import CommitTracker
from farflock.node.pipeline.trainer.edge_codecs import EdgeCodecs
from farflock.node.pipeline.trainer.in_flight import (
    InFlight,
    MicrobatchSource,
    StageInputs,
    WholeInputs,
)
from farflock.node.pipeline.trainer.stage_client import StageClient
from farflock.node.pipeline.trainer.stage_directory import StageDirectory
from farflock.node.pipeline.trainer.walker import Walker
from farflock.node.reporting import Report
from farflock.node.run.terms import TrainerTerms
from farflock.swarm.paths.policy import PathPolicy
from farflock.swarm.peer.peer import OpenWait, Peer
from farflock.swarm.protocol.allowance import Allowance
from farflock.swarm.protocol.depth import Depth
from farflock.swarm.tasks import cancel

TICK_S = 0.1  # between two checks for lost gradients; a walk that ends makes room at once


class Trainer:
    """One life of one trainer, which starts in its stream of microbatches at the run's position.

    `inputs` keeps each stage's output as the next stage's input."""

    def __init__(
        self,
        peer: Peer,
        stage_directory: StageDirectory,
        policy: PathPolicy,
        source: MicrobatchSource,
        terms: TrainerTerms,
        report: Report = lambda kind, fields: None,
        inputs: StageInputs | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        self._stage_directory, self._terms = stage_directory, terms
        self.source, self.inputs = source, WholeInputs() if inputs is None else inputs
        codecs, quarantine = EdgeCodecs(source.edges, peer.codec_offers.of), Quarantine()
        timeouts_s = terms.forward_timeout_s, terms.backward_timeout_s
        self.client = StageClient(
            peer, stage_directory, policy, codecs, quarantine, *timeouts_s, direct=terms.direct
        )
        self._allowance = allowance or Allowance(terms.kept, terms.kept)
        self.commits = CommitTracker(peer.me, stage_directory, report, heard=self._heard)
        self._walker = Walker(
            self.client,
            stage_directory,
            codecs,
            self.inputs,
            quarantine,
            self.commits,
            report,
            self._spawn,
        )
        self._depth = Depth(min(stage_directory.stages, terms.window), terms.window)
        self._flights: dict[int, InFlight] = {}
        self._walking: set[int] = set()
        self._walk_ended = asyncio.Event()
        self._next_tick_s = 0.0
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._failure: BaseException | None = None  # a bug in one of the tasks
        self.stopping = False
        self.may_begin: Callable[[], bool] = lambda: True  # asked before each microbatch

    async def run(self, enough: Callable[[], bool]) -> None:
        """Train until `enough()` is true or `stopping` is set; then give up the microbatches in
        flight."""
        try:
            while not (self.stopping or enough()):
                if self._failure is not None:
                    raise self._failure
                if _now() >= self._next_tick_s:
                    self._next_tick_s = _now() + TICK_S
                    self._look_around()
                self.begin_more()
                await self._until_walk_ends()
        finally:
            await cancel(*self._tasks)
            for flight in self._flights.values():
                self.client.drop(flight)

    async def _until_walk_ends(self) -> None:
        """Wait until a walk has ended, but not beyond the next tick."""
        self._walk_ended.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._next_tick_s):
                await self._walk_ended.wait()

    # status

    @property
    def kept(self) -> int:
        """Microbatches in flight: on their walk, or waiting until a round names them."""
        return len(self._flights)

    @property
    def walking(self) -> int:
        """Microbatches on their way through the stages."""
        return len(self._walking)

    @property
    def tasks(self) -> int:
        """Walks, passes and confirmations in progress."""
        return len(self._tasks)

    def waits(self) -> list[OpenWait]:
        """Return the calls in progress, and the stages that have no server to ask."""
        return self.client.waits()

    # one tick

    def _look_around(self) -> None:
        """Forget finished microbatches, redo lost passes, repeat unanswered confirmations."""
        if finished := self.commits.hear(_now()):
            self.source.settle(self.commits.begun_s)
        for number in finished:
            self.client.drop(self._flights.pop(number))
        for begun_s in self.commits.late_begun_s:
            self._allowance.late(begun_s, _now())
        ledger = self.commits.ledger
        for number, stage in ledger.open():
            flight = self._flights[number]
            if number in self._walking or stage in flight.asking:
                continue
            if stage in flight.gradients:
                # its gradient was lost with a server; the other stages keep theirs
                self._spawn(self._walker.backward(flight, stage))
            else:
                self._walker.give_up_lost(flight, stage)
        for (number, stage), server, attempt in list(ledger.confirms()):
            flight = self._flights[number]
            if stage not in flight.asking:
                self._spawn(self._walker.confirm(flight, stage, server, attempt))

    def _heard(self, stage: int, size: int) -> None:
        if not stage:  # one stage's rounds are enough, and every microbatch visits the first
            self._allowance.named(size, _now())

    def begin_more(self) -> None:
        """Begin as many microbatches as may be in flight."""
        # depth hides the latency, `kept` bounds the memory, the allowance the size of rounds
        while (
            len(self._walking) < self._depth.wanted
            and len(self._flights) < self._terms.kept
            and self._allowance.has_room(self.commits.ledger.uncommitted, _now())
            and self.may_begin()
            and self.source.is_ready()
        ):
            flight = self.source.draw(self._stage_directory.epoch)
            self._flights[flight.number] = flight
            self.commits.begin(flight.number, flight.order, _now())
            self._walking.add(flight.number)
            self._spawn(self._walk(flight))

    async def _walk(self, flight: InFlight) -> None:
        try:
            await self._walker.walk(flight)
            self._depth.came_back(_now(), flight.trip_s)
        finally:
            self._walking.discard(flight.number)
            self._walk_ended.set()

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        self._failure = self._failure or error


def _now() -> float:
    return asyncio.get_running_loop().time()
