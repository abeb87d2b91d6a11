"""A node as a process: real links and directory, worker threads, files, signals.

`found` and `join` differ only in where the manifest comes from; after that, both run the same node
as simulations do. Everything lives on one asyncio loop; computation runs in worker threads.
"""

import contextlib
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from farflock.node.assembly.checkpoints import CheckpointManager, last_of
from farflock.node.assembly.known_run import learn_run, own_run
from farflock.node.assembly.learnt import LEARN_TIMEOUT_S, known_members
from farflock.node.assembly.leaving import Leaving, Unsaved
from farflock.node.assembly.own_world import identity_of
from farflock.node.assembly.part import Part
from farflock.node.assembly.session import AddressCache, Session
from farflock.node.assembly.text import NodeText
from farflock.node.errors import Failure, RefusedByRun
from farflock.node.model.ranks import FollowerLost
from farflock.node.model.weights_folder import WeightsFolder
from farflock.node.pipeline.lifecycle.rebalancer import LifeOver
from farflock.node.process.busy import TimedWorker
from farflock.node.process.freed import trimmed
from farflock.node.process.network import MachineOptions, network
from farflock.node.process.pipeline_role import (
    founders,
    joiners,
    last_of_part,
    part_of,
    says_stages_device,
    weights_of,
)
from farflock.node.process.replica_role import replica_of, says_replicas_device
from farflock.node.process.room import fitted, with_room
from farflock.node.process.run_data import RunData, data_in_place
from farflock.node.process.run_text import fetch_text, lend_tokenizer, load_text
from farflock.node.process.sample_keeper import founders_start, joiners_start
from farflock.node.process.status import Status
from farflock.node.process.status_writer import StatusWriter
from farflock.node.process.torchrun import unless_lost
from farflock.node.run.invite import Invite
from farflock.node.run.manifest import Manifest
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.state.history import History
from farflock.node.state.kept_views import KeptViews
from farflock.node.state.run_log import RunRecorder
from farflock.node.tokens.tokenizer import ByteTokenizer, Tokenizer
from farflock.node.train.run_size import require_carried
from farflock.node.train.task import StepImpossible
from farflock.swarm.compute import Worker
from farflock.swarm.dht.greeting import DirectoryUnreachable
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.peer.peer import Peer
from farflock.swarm.peer.snapshots import DownloadProgress, SnapshotUnavailable
from farflock.swarm.roles import EVERY, NOTHING, UNMEASURED, role_of
from farflock.swarm.zmq.links import ZmqLinks

JOIN_TIMEOUT_S = 120.0
REJOIN_TIMEOUT_S = 20.0  # to learn the terms of its run, for a founder that starts again
LINGER_S = 5.0  # after the last step: others may still be working towards the last round

log = logging.getLogger(__name__)


@dataclass(slots=True)
class NodeProcess:
    """A running node, as commands and the live view see it."""

    machine: MachineOptions
    session: Session
    links: ZmqLinks
    member: Part[Checkpoint]
    history: History
    journal: RunRecorder
    keepers: list[CheckpointManager]  # one per held stage, or one for the whole model
    worker: TimedWorker  # that trains, or serves stages
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    data: RunData | None = None  # what it trains on, if that was prepared
    show: Callable[[Status], None] = lambda status: None  # called once a second
    leaving: Leaving = field(init=False)

    def __post_init__(self) -> None:
        what = self.session, self.keepers, self.machine.folder, self.journal.report
        self.leaving = Leaving(*what)

    @property
    def manifest(self) -> Manifest:
        """The run's terms."""
        return self.session.known.manifest

    @property
    def run(self) -> str:
        """The id of the run."""
        return self.session.known.run

    @property
    def view_s(self) -> float:
        """The longest that a newcomer waits for a membership change, in seconds."""
        return self.manifest.exchange.view_s

    def show_to(self, show: Callable[[Status], None]) -> None:
        """Call `show` with each status from now on."""
        self.show = show

    def stop(self) -> None:
        """Ask the node to leave: it says goodbye, finishes its step and saves."""
        self.leaving.ask()
        self.member.stop()

    def says_device(self) -> str:
        """Return a sentence on the device that the node computes on."""
        if self.manifest.pipeline is not None:
            return says_stages_device(self.member.role, self.machine.device)
        return says_replicas_device(self.machine, self.manifest)

    def says_disk(self) -> str:
        """Return a sentence on the room that the node takes on the disk."""
        return str(self.machine.disk_plan)

    def awaited(self) -> int:
        """Return how many members the founder waits for before it trains; 0 if it does not wait."""
        first = self.links.me == self.session.known.founder and not self.member.step
        return self.manifest.exchange.start_peers if first else 0

    def invite(self) -> str:
        """Return an invite with this node's address and those of others."""
        return self.session.invite()


@contextlib.asynccontextmanager
async def travelling(
    data: RunData | None, node: NodeProcess, known: Sequence[PeerId]
) -> AsyncIterator[None]:
    """Let a run's prepared data come and go while the block runs, if it has such."""
    if data is None:
        yield
        return
    part = node.member
    data.stop_with(lambda: part.stopping)
    node.data = data
    founder, evaluates = node.session.known.founder, part.evaluates and node.machine.evaluates
    async with data.travelling(part.peer, known, founder, evaluates=evaluates):
        yield


async def found(
    machine: MachineOptions, manifest: Manifest, on_start: Callable[[NodeProcess], None]
) -> Path:
    """Start a run, or resume it, and train it to its end; return the final checkpoint's folder.

    A run is resumed by rejoining its members if they can be reached, else from the checkpoint."""
    machine = with_room(machine, manifest, Failure)
    require_carried(manifest.plan(), manifest.pipeline_plan())
    identity = identity_of(machine.folder)
    run = manifest.run_id(identity.peer)
    pipeline = manifest.pipeline_plan()
    if pipeline is None:
        stage, trains, saved = EVERY, True, last_of(machine.folder, run)
    else:
        stage, trains = founders(machine.role, pipeline)
        saved = last_of_part(machine.folder, run, pipeline, stage)
    known = AddressCache(machine.folder).read(run)
    # Without a checkpoint too: its run may live on, and must not begin a second time.
    lives_on = known is not None and not KeptViews(machine.folder.views).alone(run, identity.peer)
    if known is not None and lives_on and (saved is None or not _ended(saved, manifest)):
        try:
            return await join(machine, known, on_start, REJOIN_TIMEOUT_S)
        except (RefusedByRun, DirectoryUnreachable) as reason:
            goes_on = "begins again" if saved is None else f"resumes from step {saved.step}"
            log.info("no other member can be reached, so the run %s: %s", goes_on, reason)
    try:
        return await _found(machine, manifest, run, identity, saved, stage, trains, on_start)
    except LifeOver as reason:
        return await join(machine, _known_again(machine, run, reason), on_start)


async def _found(
    machine: MachineOptions,
    manifest: Manifest,
    run: str,
    identity: Identity,
    saved: Checkpoint | None,
    stage: int,
    trains: bool,
    on_start: Callable[[NodeProcess], None],
) -> Path:
    weights = weights_of(machine, manifest, begins=saved is None)
    machine = await fitted(machine, manifest, Failure)
    start = founders_start(machine.folder.path, manifest, run, saved)
    data = await data_in_place(manifest.data, machine)
    text = await load_text(manifest, data, start)
    async with network(machine, identity, run, ()) as (world, links):
        links.record(role=role_of(stage if machine.evaluates else UNMEASURED))
        async with Session(world, identity, own_run(identity, manifest)).running() as session:
            node = _node(machine, session, links, stage, trains, text, weights)
            async with travelling(data, node, ()):
                if saved is None:
                    session.start(node.member)  # a stage whose checkpoint is here loads that
                else:
                    await session.resume(node.member, saved)
                    node.journal.report(
                        "resumed", {"step": saved.step, "checkpoint": str(saved.folder)}
                    )
                return await _train(node, on_start)


async def join(
    machine: MachineOptions,
    invite: Invite,
    on_start: Callable[[NodeProcess], None],
    learn_timeout_s: float = LEARN_TIMEOUT_S,
    downloaded: DownloadProgress = lambda here, total: None,
) -> Path:
    """Join the run of an invite and train it to its end; return the final checkpoint's folder.

    A peer that was in this run before keeps its position in its data and its inner moments; it
    takes the state from the swarm. A stage server that the other servers have left behind begins
    another life."""
    while True:
        try:
            return await _join(machine, invite, on_start, learn_timeout_s, downloaded)
        except LifeOver as reason:
            invite = _known_again(machine, invite.run, reason)
            if reason.stage is not None:
                machine = replace(machine, role=role_of(reason.stage))


def _known_again(machine: MachineOptions, run: str, reason: LifeOver) -> Invite:
    """Return an invite with the known addresses by which to rejoin; raise `Failure` if there are
    none."""
    log.info("the node starts again in the run: %s", reason)
    known = AddressCache(machine.folder).read(run)
    if known is None:
        raise Failure(
            "the run has continued without this node",
            str(reason),
            "join again with an invite from another member",
        )
    return known


async def _join(
    machine: MachineOptions,
    invite: Invite,
    on_start: Callable[[NodeProcess], None],
    learn_timeout_s: float,
    downloaded: DownloadProgress,
) -> Path:
    identity, run = identity_of(machine.folder), invite.run
    remembered, saved = AddressCache(machine.folder).read(run), last_of(machine.folder, run)
    invite = _widened(invite, remembered)
    async with network(machine, identity, run, invite.members) as (world, links):
        known = await learn_run(world, invite, learn_timeout_s)
        manifest = known.manifest
        machine = with_room(machine, manifest, RefusedByRun)
        holders = known_members(links, known.records, run)
        data = await fetch_text(links, run, manifest.data, holders, machine)
        machine = await fitted(machine, manifest, RefusedByRun)
        start = joiners_start(machine.folder.path, manifest, run, saved)
        text = await load_text(manifest, data, start)
        pipeline = manifest.pipeline_plan()
        stage, trains = EVERY if pipeline is None else NOTHING, True
        links.record(role=role_of(stage if machine.evaluates else UNMEASURED))
        async with Session(world, identity, known).running() as session:
            if pipeline is not None:
                with _answered(session.peer):
                    # a founder that rejoins trains as before
                    founded, peer = identity.peer == invite.founder, session.peer
                    stage, trains = await joiners(
                        machine.role, pipeline, peer, known.records, JOIN_TIMEOUT_S, founded
                    )
                links.record(role=role_of(stage))
            weights = weights_of(machine, manifest, begins=False)
            node = _node(machine, session, links, stage, trains, text, weights, before=saved)
            part = node.member
            async with travelling(data, node, holders):
                with _answered(session.peer):
                    async with StatusWriter(node).while_joining():
                        await session.join(part, JOIN_TIMEOUT_S, downloaded)
                node.journal.report(
                    "joined", {"tokens": part.tokens, "run": run, "role": part.role}
                )
                return await _train(node, on_start)


def _widened(invite: Invite, remembered: Invite | None) -> Invite:
    """Return the invite, with the members that this node has known."""
    members = (*invite.members, *(remembered.members if remembered else ()))
    distinct = {member.peer: member for member in reversed(members)}
    return replace(invite, members=tuple(reversed(distinct.values())))


@contextlib.contextmanager
def _answered(peer: Peer) -> Iterator[None]:
    """Turn a `TimeoutError` into an error that names what did not arrive in time, and say which
    state did not come."""
    try:
        yield
    except SnapshotUnavailable as reason:
        what = "the run's state could not be downloaded"
        raise Failure(what, reason.why or str(reason), reason.remedy) from None
    except TimeoutError:
        if peer.membership.known.is_set():
            raise Failure(
                "the run's state could not be downloaded",
                "its members did not answer any more",
                "check the network connection, and try again",
            ) from None
        why = f"its members did not answer within {JOIN_TIMEOUT_S:.0f} s"
        raise RefusedByRun(
            "the run cannot be joined",
            why,
            "check that a member is running, or ask for a new invite",
        ) from None


def _ended(saved: Checkpoint, manifest: Manifest) -> bool:
    """Return whether this checkpoint was written at the run's end."""
    return int(saved.meta["tokens"]) >= manifest.run.total_tokens


async def _train(node: NodeProcess, on_start: Callable[[NodeProcess], None]) -> Path:
    """Train, write the status, save, and say goodbye."""
    gc.collect()
    gc.freeze()  # some 200,000 objects of the imports, which each full collection would visit
    part, peer, leaving = node.member, node.session.peer, node.leaving
    lend_tokenizer(peer.context.store, node.tokenizer)
    async with StatusWriter(node).showing(lambda now: node.show(now)):
        on_start(node)
        await leaving.until(lambda: len(peer.context.views.newest.members) >= node.awaited())
        work = part.run(node.manifest.run.total_tokens)
        try:
            await leaving.train(unless_lost(node.machine.ranks, work))
            await leaving.until(lambda: peer.alone, LINGER_S)
            return await leaving.end()
        except StepImpossible:
            leaving.ask()
            with contextlib.suppress(Unsaved):
                await leaving.end()
            raise
        except FollowerLost:
            await leaving.close()
            raise
        finally:
            node.journal.close()


def _node(
    machine: MachineOptions,
    session: Session,
    links: ZmqLinks,
    stage: int,
    trains: bool,
    text: NodeText,
    weights: WeightsFolder | None,
    before: Checkpoint | None = None,
) -> NodeProcess:
    """Assemble the node over the session's peer, whose first weights these are; its worker threads
    end with the process. `before` is the last checkpoint of a whole replica that returns to a
    run."""
    manifest, run, peer = session.known.manifest, session.known.run, session.peer
    torch.set_num_threads(machine.threads)
    history = History.open(machine.folder.path, time.time)
    journal = RunRecorder(history, links.total_bytes)
    files, worker = Worker("files"), TimedWorker("train")
    report = trimmed(journal.report, files, peer.context.spawn)
    part: Part[Checkpoint]
    if manifest.pipeline is not None:
        part, keepers = part_of(
            machine, manifest, run, peer, text, report, stage, trains, worker, weights
        )
    else:
        part, keeper = replica_of(
            machine, manifest, run, peer, text, report, files, weights, worker, before
        )
        keepers = [keeper]
    return NodeProcess(
        machine,
        session,
        links,
        part,
        history,
        journal,
        keepers,
        worker,
        tokenizer=text.tokenizer,
    )
