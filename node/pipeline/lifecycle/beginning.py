"""The start of one stage at a node, and its initial state.

The node starts the run, adopts the state of the stage's other servers, or starts the stage over if
no peer has its state. node/pipeline/lifecycle/state.py chooses the state; this module puts it into
the stage's replica, method and streams. A full replica does this for each stage."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from msgspec.structs import replace

from farflock.node.assembly.coming_back import VIEW, require_listed, settled
from farflock.node.assembly.resume import Resumable, cursors_of, load_stage_state
from farflock.node.pipeline.lifecycle.end_copies import find_copy
from farflock.node.pipeline.lifecycle.frozen_embedding import FrozenEmbedding
from farflock.node.pipeline.lifecycle.state import (
    SCALE,
    begin_anew,
    living,
    round_of,
    scale_snapshot,
)
from farflock.node.pipeline.recovery.rebuild import Unrecoverable
from farflock.node.pipeline.server.task import StageTask
from farflock.node.pipeline.server.weight_versions import ORIGIN, origin_of
from farflock.node.reporting import Report
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.train.driver import RunPosition
from farflock.node.train.state_sync import NEXT, rounds_before
from farflock.optimizers.method import Exchange, ExchangeKey, RandomGroups, Result, Tensors
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.messages import HeldState
from farflock.swarm.peer.peer import Peer
from farflock.swarm.peer.snapshots import DownloadProgress, Snapshot, SnapshotUnavailable
from farflock.swarm.protocol.axes import axis
from farflock.swarm.protocol.exchange.streams import Cadence
from farflock.swarm.tasks import cancel

log = logging.getLogger(__name__)

SETTLE_S = 3.0  # without news of a stage's rounds, after which its log is taken to be complete


class ServedStage(Resumable, Protocol):
    """A stage that a node serves, and the node's peer."""

    @property
    def index(self) -> int: ...
    @property
    def peer(self) -> Peer: ...
    @property
    def training_task(self) -> StageTask: ...


@dataclass(frozen=True, slots=True)
class StageStartup:
    """The start of the stage that `serving` serves.

    `templates` are one exchange for each of its streams and `saved` its last checkpoint here;
    `look_on` opens its streams as a peer that does not serve it would."""

    plan: RunPlan
    pipeline: PipelinePlan
    serving: ServedStage
    templates: Sequence[Exchange]
    saved: Checkpoint | None
    look_on: Callable[[], None]
    report: Report
    embedding: FrozenEmbedding = field(default_factory=FrozenEmbedding)  # the node's, at one stage

    def found(self) -> None:
        """Start the stage at the run's first node, with initial weights or those of the last
        checkpoint."""
        self._from_disk({}, 0)
        self.embedding.founded()

    async def enter(self, downloaded: DownloadProgress) -> None:
        """Begin where the run goes on, at a node that did not found it."""
        peer = self.serving.peer
        while (begins := await settled(peer)) is not None:
            try:
                return await self._come_back(begins[axis(self.serving.index)], downloaded)
            except SnapshotUnavailable as error:
                require_listed(peer, error)
        await self.join(downloaded)

    async def join(self, downloaded: DownloadProgress) -> None:
        """Adopt the state of the stage's other servers; if there are none, start the stage over."""
        serving = self.serving
        while True:
            if await self._adopted(downloaded):
                await self.embedding.begun(anew=False)
                self._serve_scale()
                return
            rounds, tokens = await self._where()
            # if another peer has started the stage in the meantime, its state is adopted instead
            if not self._is_served():
                break
        after = max(rounds.values(), default=-1)
        await self.embedding.before(after)
        ends = await self._end_copy() if after >= 0 else None
        where = serving.peer, self.plan, self.pipeline, serving.index
        begun = await begin_anew(*where, after, self.saved, ends)
        index, kind, reason = serving.index, begun.kind, begun.reason
        self.report("stage", {"stage": index, "from": kind, "why": reason, "round": after})
        if begun.tensors is not None:
            serving.loop.driver.replica.write(begun.tensors, "param")
            if after >= 0:  # a stage that was lost learns faster for a while
                serving.state_sync.marks["bumped"] = after
        if begun.kind == "snapshot":
            self._from_disk(rounds, tokens)
        else:
            self._begin(rounds, tokens)
        await self.embedding.begun(anew=True)

    async def recall(self) -> None:
        """Note what this node holds of the stage from its last life, as it tells the others; the
        initial weights, if it has no checkpoint and everybody's are the same."""
        held, alike = self.serving.state_sync.held, self.plan.weights is None
        if self.saved is None:
            await (held.recall(RunPosition(), b"") if alike else asyncio.sleep(0))
        elif isinstance(under := self.saved.meta.get(VIEW), str):
            kept = await self.serving.loop.compute(partial(self._held, self.saved))
            held.remember(replace(kept, under=bytes.fromhex(under) if kept.first else b""))

    def _held(self, saved: Checkpoint) -> HeldState:
        """Return what a checkpoint of the stage holds; in the worker."""
        place, shared = cursors_of(saved).place, dict(saved.groups["method"])
        rounds = {each.key.stream: place.rounds[each.key.stream] for each in self.templates}
        nexts = {each.key.stream: rounds[each.key.stream] + each.stride for each in self.templates}
        shared |= {NEXT + name: torch.tensor(number) for name, number in nexts.items()}
        state = state_hash(shared) if self._is_exact else b""
        first = min(nexts.values())
        return HeldState(first, state, place.agreed_tokens, axis=axis(self.serving.index))

    @property
    def _is_exact(self) -> bool:
        return self.serving.loop.driver.method.equality == "exact"

    async def _come_back(self, begins: HeldState, downloaded: DownloadProgress) -> None:
        """Begin with the state with which a return begins: this node's own, if that is it, else
        another server's. Where servers' states differ, each has its own."""
        serving, kept = self.serving, self.serving.state_sync.held.kept()
        is_same = kept is not None and (kept.first, kept.state) == (begins.first, begins.state)
        own = not self._is_exact and kept is not None and kept.first > 0
        if not is_same and not own:
            await serving.state_sync.adopt(None, downloaded, begins.first)
            self._serve_scale()
        elif self.saved is None:
            self._begin({}, 0)
        else:
            await serving.loop.compute(partial(load_stage_state, serving, self.saved))
            place = cursors_of(self.saved).place
            rounds = place.rounds if is_same else rounds_before(self.templates, begins.first)
            self._begin(rounds, begins.tokens)
        await self.embedding.begun(anew=False)
        how = "its own state" if is_same or own else "another server's state"
        fields = {"stage": serving.index, "from": how, "why": "all came back"}
        self.report("stage", {**fields, "round": begins.first - 1})

    async def _adopted(self, downloaded: DownloadProgress) -> bool:
        """Download the state from other servers of the stage; return True once it is adopted.

        Return False once no server is left and no byte has arrived: members listed in the view
        may have begun other lives, and then wait for this peer's state as it waits for theirs."""
        comes = False

        def coming(here: int, total: int) -> None:
            nonlocal comes
            comes = True
            downloaded(here, total)

        if not self._is_served():
            return False
        adopting = asyncio.ensure_future(self.serving.state_sync.adopt(None, coming))
        try:
            while not adopting.done() and (comes or self._is_served()):
                await asyncio.wait([adopting], timeout=SETTLE_S / 10)
            if adopting.done():
                adopting.result()
            return adopting.done()
        finally:
            await cancel(adopting)

    def _from_disk(self, rounds: Mapping[str, int], tokens: int) -> None:
        """Start with the last checkpoint's state, if any, and at its rounds if the run has no
        log."""
        if self.saved is not None and round_of(self.saved) is not None:
            load_stage_state(self.serving, self.saved)
            if max(rounds.values(), default=-1) < 0:
                place = cursors_of(self.saved).place
                rounds, tokens = place.rounds, place.agreed_tokens
        self._begin(rounds, tokens)

    async def _where(self) -> tuple[dict[str, int], int]:
        """Return the last round by stream and the agreed tokens of a stage whose state is lost."""
        rounds, index = self.serving.peer.rounds, self.serving.index
        self.look_on()
        paired = [each for each in self.templates if isinstance(each.group, RandomGroups)]
        logged = [each for each in self.templates if each not in paired]
        names = {entry.key.stream: f"{entry.key.stream}/{index}" for entry in logged}
        before, newest = None, {stream: rounds.newest(name) for stream, name in names.items()}
        # until the log stops growing: it arrives in parts
        while before != newest and not self._is_served():
            await asyncio.sleep(SETTLE_S)
            before, newest = newest, {stream: rounds.newest(name) for stream, name in names.items()}
        first = self.templates[0].key.stream
        for entry in paired:  # whose rounds are in no log
            newest[entry.key.stream] = Cadence(entry.key.round, entry.stride).upto(newest[first])
        tokens = rounds.tokens(names[first])
        for name in names.values():
            rounds.close(name)
        return newest, tokens

    async def _end_copy(self) -> Tensors | None:
        peer, index, stages = self.serving.peer, self.serving.index, self.pipeline.stages
        if not self.pipeline.end_copies or index not in (0, len(stages) - 1):
            return None
        try:
            return await find_copy(peer, self.plan.model, stages, index)
        except Unrecoverable as reason:
            log.warning("stage %d starts without the exact copy of its end: %s", index, reason)
            return None

    def _is_served(self) -> bool:
        return bool(living(self.serving.peer, len(self.pipeline.stages))[self.serving.index])

    def _begin(self, rounds: Mapping[str, int], tokens: int) -> None:
        driver = self.serving.loop.driver
        # before any step: the snapshot fixes the state in which the round begins
        state = driver.method.snapshot(driver.replica)
        if self.pipeline.asynchronous is not None and max(rounds.values(), default=-1) >= 0:
            self.serving.state_sync.marks[ORIGIN] = origin_of(state)
        for entry in self.templates:
            after = rounds.get(entry.key.stream, -1)
            if after >= entry.key.round:  # to the method, rounds without a result have failed
                missed = Result("failed", after + entry.stride, tokens=tokens)
                driver.skip(ExchangeKey(entry.key.stream, after), missed)
        self.serving.state_sync.open(rounds, tokens)
        self._serve_scale()

    def _serve_scale(self) -> None:
        """Serve this stage's gradient scale to peers that rebuild a neighbouring stage."""
        serving = self.serving

        async def scale() -> Snapshot:
            return scale_snapshot(serving.state_sync.applied_round, serving.training_task.scale)

        serving.peer.snapshots.serve(f"{SCALE}/{serving.index}", scale)
