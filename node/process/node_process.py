"""A node as a process: real links and directory, worker threads, files, signals.

`found` and `join` differ only in where the manifest comes from; after that, both run the same node
as simulations do. Everything lives on one asyncio loop; computation runs in worker threads.
"""

import asyncio
import contextlib
import gc
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from farflock.node.assembly.checkpoints import CheckpointManager, last_of, save_all
from farflock.node.assembly.part import Part
from farflock.node.assembly.text import NodeText
from farflock.node.errors import Failure, RefusedByRun
from farflock.node.model.ranks import FollowerLost
from farflock.node.model.weights_folder import WeightsFolder
from farflock.node.pipeline.lifecycle.rebalancer import LifeOver
from farflock.node.process.busy import TimedWorker
from farflock.node.process.freed import trimmed
from farflock.node.process.network import (
    LEARN_TIMEOUT_S,
    AddressCache,
    MachineOptions,
    identity_of,
    keep_published,
    known_members,
    learn_run,
    network,
)
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
from farflock.node.run.invite import MAX_ADDRESSES, Invite, mint
from farflock.node.run.manifest import Head, Manifest, seal_head
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.state.history import History
from farflock.node.state.kept_chunks import DownloadFolder
from farflock.node.state.run_log import RunRecorder
from farflock.node.state.shelf import Shelf
from farflock.node.tokens.tokenizer import ByteTokenizer, Tokenizer
from farflock.node.train.run_size import require_carried
from farflock.node.train.task import StepImpossible
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.compute import Worker
from farflock.swarm.dht.greeting import DirectoryUnreachable
from farflock.swarm.dht.kademlia import DhtDirectory
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.peer.snapshots import DownloadProgress, SnapshotUnavailable
from farflock.swarm.record import unseal
from farflock.swarm.roles import EVERY, NOTHING, UNMEASURED, role_of
from farflock.swarm.tasks import cancel
from farflock.swarm.zmq.links import ZmqLinks

JOIN_TIMEOUT_S = 120.0
REJOIN_TIMEOUT_S = 20.0  # for members to answer a founder that starts again
POLL_S = 0.1
LINGER_S = 5.0  # after the last step: others may still be working towards the last round
REMEMBER_EVERY_S = 1.0  # a founder killed before it knows other members would start the run again
FORGET_EVERY_S = 1.0
INVITE_LASTS_S = 7 * 24 * 3600
INVITE_ROUND_S = 3600  # an invite's end is rounded up, so that a status changes only with the node

log = logging.getLogger(__name__)


@dataclass(slots=True)
class NodeProcess:
    """A running node, as commands and the live view see it."""

    machine: MachineOptions
    manifest: Manifest
    run: str
    founder: str
    member: Part[Checkpoint]
    directory: DhtDirectory
    links: ZmqLinks
    history: History
    journal: RunRecorder
    keepers: list[CheckpointManager]  # one per held stage, or one for the whole model
    worker: TimedWorker  # that trains, or serves stages
    doors: tuple[str, ...] = ()  # addresses used to join
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    data: RunData | None = None  # what it trains on, if that was prepared
    show: Callable[[Status], None] = lambda status: None  # called once a second

    @property
    def view_s(self) -> float:
        """The longest that a newcomer waits for a membership change, in seconds."""
        return self.manifest.exchange.view_s

    def show_to(self, show: Callable[[Status], None]) -> None:
        """Call `show` with each status from now on."""
        self.show = show

    def stop(self) -> None:
        """Ask the node to finish its step, save and leave."""
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
        first = self.links.me == self.founder and not self.member.step
        return self.manifest.exchange.start_peers if first else 0

    def invite(self) -> str:
        """Return an invite with this node's address and those of others, since this node may have
        none, or may stop."""
        return mint(self._invite((*self.directory.addresses[:1], *self._others())))

    def _others(self) -> tuple[str, ...]:
        """Return one address of each member that has any, followed by the addresses used to
        join."""
        records = self.member.peer.membership.records.values()
        return (
            *(
                record.doors[0]
                for record in records
                if record.doors and record.peer != self.links.me
            ),
            *self.doors,
        )

    def _invite(self, addresses: Sequence[str]) -> Invite:
        distinct = tuple(dict.fromkeys(addresses))[:MAX_ADDRESSES]
        ends = math.ceil((time.time() + INVITE_LASTS_S) / INVITE_ROUND_S) * INVITE_ROUND_S
        return Invite(self.run, self.founder, distinct, ends)

    async def remember(self) -> None:
        """Keep the addresses of other members on disk for the next start."""
        known: tuple[str, ...] = ()
        while True:
            if (others := self._others()) and others != known:
                with contextlib.suppress(OSError):  # a full disk must not end the node
                    AddressCache(self.machine.folder).write(self._invite(others))
                    known = others
            await asyncio.sleep(REMEMBER_EVERY_S)

    async def forget_download(self) -> None:
        """Remove a downloaded state from the disk as soon as this node, a member, does not need it
        for another start."""
        folder, peer = DownloadFolder(self.machine.folder.download), self.member.peer
        while True:
            if peer.membership.is_member and folder.is_there and not peer.snapshots.downloading:
                await asyncio.to_thread(folder.clear)
            await asyncio.sleep(FORGET_EVERY_S)


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
    evaluates = part.evaluates and node.machine.evaluates
    async with data.travelling(part.peer, known, node.founder, evaluates=evaluates):
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
    if known is not None and (saved is None or not _ended(saved, manifest)):
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
    async with network(machine, identity, run, ()) as (directory, links):
        entrant = _Entrant(machine, manifest, run, identity.peer, identity, directory, links)
        peer = entrant.peer(stage)
        node = entrant.node(peer, stage, trains, text, weights)
        terms = manifest.canonical()
        head = seal_head(identity, Head(run, identity.peer, digest_of(terms), len(terms), 0))
        part = node.member
        async with peer.running(), travelling(data, node, ()):
            if saved is None:
                part.found()  # a stage whose checkpoint is here loads that
            else:
                await part.resume(saved)
                node.history.event("resumed", step=saved.step, checkpoint=str(saved.folder))
            return await _train(node, head, on_start)


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
    identity = identity_of(machine.folder)
    known, saved = (
        AddressCache(machine.folder).read(invite.run),
        last_of(machine.folder, invite.run),
    )
    doors = tuple(dict.fromkeys((*invite.addresses, *(known.addresses if known else ()))))[
        :MAX_ADDRESSES
    ]
    async with network(machine, identity, invite.run, doors) as (directory, links):
        head, manifest, records = await learn_run(directory, links, invite, learn_timeout_s)
        machine = with_room(machine, manifest, RefusedByRun)
        holders = known_members(links, records, invite.run)
        data = await fetch_text(links, invite.run, manifest.data, holders, machine)
        machine = await fitted(machine, manifest, RefusedByRun)
        pipeline = manifest.pipeline_plan()
        start = joiners_start(machine.folder.path, manifest, invite.run, saved)
        text = await load_text(manifest, data, start)
        stage, trains = EVERY if pipeline is None else NOTHING, True
        run, founder = invite.run, invite.founder
        entrant = _Entrant(machine, manifest, run, founder, identity, directory, links)
        peer = entrant.peer(stage)
        async with peer.running():
            if pipeline is not None:
                with _answered(peer):
                    # a founder that rejoins trains as before
                    founded = identity.peer == invite.founder
                    stage, trains = await joiners(
                        machine.role, pipeline, peer, records, JOIN_TIMEOUT_S, founded
                    )
                links.record(role=role_of(stage))
            weights = weights_of(machine, manifest, begins=False)
            node = entrant.node(peer, stage, trains, text, weights, before=saved)
            node.doors = doors
            part = node.member
            async with travelling(data, node, holders):
                with _answered(peer):
                    async with _shown(node):
                        await part.join(records, JOIN_TIMEOUT_S, downloaded)
                node.history.event("joined", tokens=part.tokens, run=invite.run, role=part.role)
                return await _train(node, head, on_start)


@contextlib.asynccontextmanager
async def _shown(node: NodeProcess) -> AsyncIterator[None]:
    """Let the status say how far the download of the state is, while the block runs."""
    writing = asyncio.create_task(StatusWriter(node).while_joining())
    try:
        yield
    finally:
        await cancel(writing)


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


async def _train(node: NodeProcess, head: bytes, on_start: Callable[[NodeProcess], None]) -> Path:
    """Publish the run, train, write the status, save, and say goodbye."""
    gc.collect()
    gc.freeze()  # some 200,000 objects of the imports, which each full collection would visit
    part = node.member
    peer = part.peer
    peer.context.store.put(node.manifest.canonical(), "manifest")
    lend_tokenizer(peer.context.store, node.tokenizer)
    status = StatusWriter(node)
    helpers = [
        asyncio.create_task(keep_published(node.directory, node.run, head)),
        asyncio.create_task(status.run(lambda now: node.show(now))),
        asyncio.create_task(node.remember()),
        asyncio.create_task(node.forget_download()),
    ]
    try:
        on_start(node)
        await _until(node, lambda: len(peer.context.views.newest.members) >= node.awaited())
        await unless_lost(node.machine.ranks, part.run(node.manifest.run.total_tokens))
        lingers_s = asyncio.get_running_loop().time() + LINGER_S
        await _until(node, lambda: peer.alone or asyncio.get_running_loop().time() >= lingers_s)
        return await _leave(node, part.stopping)
    except StepImpossible:
        await _leave(node, True)
        raise
    except FollowerLost:
        await peer.part()
        raise
    finally:
        for ended in await cancel(*helpers):
            if isinstance(ended, Exception):
                log.error("a background task of the node failed", exc_info=ended)
        status.write("has ended")
        node.history.close()


async def _leave(node: NodeProcess, stopped: bool) -> Path:
    """Save a checkpoint, say goodbye, and return the checkpoint's folder."""
    saved = await save_all(node.keepers, node.machine.folder)
    await node.member.peer.part()
    node.history.event(
        "stopped" if stopped else "done", checkpoint=str(saved), step=node.member.step
    )
    return saved


async def _until(node: NodeProcess, there: Callable[[], bool]) -> None:
    """Return once the condition `there` holds or the node is asked to stop."""
    while not (there() or node.member.stopping):  # noqa: ASYNC110 - two parts' conditions
        await asyncio.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class _Entrant:
    """A machine that is about to have a part in a run, over its open links."""

    machine: MachineOptions
    manifest: Manifest
    run: str
    founder: str
    identity: Identity
    directory: DhtDirectory
    links: ZmqLinks

    def peer(self, stage: int) -> Peer:
        """Return the peer, with its record as a server of this stage."""
        run, links, exchange = self.run, self.links, self.manifest.exchange
        role = role_of(stage if self.machine.evaluates else UNMEASURED)
        incarnation = unseal(links.record(role=role), run).incarnation
        peer = Peer(
            RunTerms(run, self.manifest.run.seed, exchange.view_s, exchange.branch_after_s),
            self.identity,
            links,
            self.directory,
            incarnation=incarnation,
            record=links.record,
            compute=Worker("codec"),
        )
        peer.ticks.rests = True
        peer.context.shelve = Shelf(self.machine.folder.rounds, Worker("files"))
        peer.snapshots.kept = DownloadFolder(self.machine.folder.download).of
        return peer

    def node(
        self,
        peer: Peer,
        stage: int,
        trains: bool,
        text: NodeText,
        weights: WeightsFolder | None,
        before: Checkpoint | None = None,
    ) -> NodeProcess:
        """Assemble the node, whose first weights these are; its worker threads end with the
        process. `before` is the last checkpoint of a whole replica that returns to a run."""
        machine, manifest, run = self.machine, self.manifest, self.run
        torch.set_num_threads(machine.threads)
        history = History.open(machine.folder.path, time.time)
        journal = RunRecorder(history, self.links.total_bytes)
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
            manifest,
            run,
            self.founder,
            part,
            self.directory,
            self.links,
            history,
            journal,
            keepers,
            worker,
            tokenizer=text.tokenizer,
        )
