"""A node as a process: real links and directory, worker threads, files, signals.

`found` and `join` differ only in where the manifest comes from; after that, both run the same node
as simulations do. Everything lives on one asyncio loop; computation runs in worker threads.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import torch

from farflock.compression.codec import UnencodableTensor
from farflock.node.assembly.checkpoints import CheckpointManager, last_of, save_all
from farflock.node.assembly.node import ReplicaNode
from farflock.node.assembly.resume import load_moments, load_state
from farflock.node.assembly.text import require_all_counted, require_described, text_here
from farflock.node.data.sequences import Text
from farflock.node.errors import Failure, RefusedByRun
from farflock.node.model.ranks import FollowerLost
from farflock.node.pipeline.lifecycle.rebalancer import LifeOver
from farflock.node.pipeline.node import PipelineNode
from farflock.node.pipeline.passes.stage import used_by_stages
from farflock.node.process.base_supply import BaseSupply, base_supply_of
from farflock.node.process.data_supply import DataSupply, others_in, supply_of
from farflock.node.process.freed import trimmed
from farflock.node.process.held_out import (
    bring_held_out,
    gone_wrong,
    has_gone_wrong,
    measure_start,
    require_unended,
    require_well,
)
from farflock.node.process.inviting import Inviter
from farflock.node.process.network import (
    LEARN_TIMEOUT_S,
    AddressCache,
    MachineOptions,
    forward_for,
    identity_of,
    keep_published,
    learn_run,
    network,
    owners,
)
from farflock.node.process.pipeline_role import founders, joiners, last_of_part, part_of
from farflock.node.process.replica_role import replica_part
from farflock.node.process.room import fitted, with_room
from farflock.node.process.statement_files import StatementKeeper
from farflock.node.process.status import Status
from farflock.node.process.status_writer import StatusWriter
from farflock.node.process.torchrun import unless_lost
from farflock.node.run.invite import MAX_ADDRESSES, Invite, mint
from farflock.node.run.manifest import Head, Manifest, seal_head
from farflock.node.run.model_section import first_weights, require_founder
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.state.history import History
from farflock.node.state.run_log import RunRecorder
from farflock.node.state.sample_cursor import SampleCursor
from farflock.node.state.shelf import Shelf
from farflock.node.state.voting_files import VotingFiles
from farflock.node.state.weights_file import WeightsFolder
from farflock.node.train.run_size import require_carried
from farflock.node.train.task import StepImpossible
from farflock.swarm.chunk_store import TERMS, digest_of
from farflock.swarm.compute import Worker
from farflock.swarm.dht.greeting import DirectoryUnreachable
from farflock.swarm.dht.kademlia import DhtDirectory
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.peer.rounds.round_log import verdict
from farflock.swarm.peer.snapshots import DownloadProgress
from farflock.swarm.record import unseal
from farflock.swarm.roles import EVERY, NOTHING, role_of
from farflock.swarm.tasks import cancel, kept_up
from farflock.swarm.zmq.links import ZmqLinks

JOIN_TIMEOUT_S = 120.0
REFUSED_EVERY_S = 1.0  # between looks at whether this peer is let in
REJOIN_TIMEOUT_S = 20.0  # for members to answer a founder that starts again
POLL_S = 0.1
LINGER_S = 5.0  # after the last step: others may still be working towards the last round
REMEMBER_EVERY_S = 1.0  # a founder killed before it knows other members would start the run again

# (what is downloaded, how much of it is here, how much there is)
NamedProgress = Callable[[Literal["model", "state"], int, int], None]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class NodeProcess:
    """A running node, as commands and the live view see it."""

    machine: MachineOptions
    manifest: Manifest
    run: str
    founder: str
    inviter: Inviter
    member: ReplicaNode | PipelineNode
    directory: DhtDirectory
    links: ZmqLinks
    history: History
    journal: RunRecorder
    keepers: list[CheckpointManager]  # one per held stage, or one for the whole model
    cursor: SampleCursor
    supply: DataSupply | None = None  # of prepared data
    doors: tuple[str, ...] = ()  # addresses used to join
    came_by: Invite | None = None  # with the grant that let this node in
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
        part, device = self.member, self.machine.device
        if isinstance(part, ReplicaNode):
            ranks, options = self.machine.ranks, self.machine.step_options
            rows = -(-self.manifest.train.batch // (1 if ranks is None else ranks.count))
            at_once = options.micro_batch or rows
            some = "" if at_once >= rows else f", {at_once} of a batch's {rows} sequences at once"
            again = ", with layers computed again" if options.checkpoints else ""
            adapted = self.manifest.train.lora is not None
            beside = f", beside a model in {options.base}" if adapted else ""
            return f"this node trains on {device}{some}{again}{beside}"
        device = used_by_stages(device)
        if len(part.servings) > 1:
            return f"this node trains on {device}"
        if part.serving is not None:
            return f"this node serves stage {part.serving.index} on {device}"
        return f"this node trains without weights: servers of stages compute, and not {device.name}"

    def awaited(self) -> int:
        """Return how many members the founder waits for before it trains; 0 if it does not wait."""
        first = self.links.me == self.founder and not self.member.step
        return self.manifest.exchange.start_peers if first else 0

    def invite(self) -> str:
        """Return an invite with this node's address and those of other members, since this node may
        have none, or may stop; an empty one if this node may not invite (yet)."""
        made = self.inviter.invite((*self.directory.addresses[:1], *self._others()))
        return "" if made is None else mint(made)

    def _others(self) -> tuple[str, ...]:
        """Return one address of each other member that has any, followed by the addresses used to
        join. A stranger's record is no reason to send newcomers to it."""
        chain, records = self.member.peer.context.chain, self.member.peer.membership.records
        members = () if chain is None else chain.newest.peers
        others = [records[peer] for peer in members if peer in records]
        return (*(record.doors[0] for record in others if record.doors), *self.doors)

    def _way_back(self, addresses: Sequence[str]) -> Invite:
        """Return what lets this node find its run again, and in, after a restart."""
        came_by = self.came_by or Invite(self.run, self.founder, (), 0)
        distinct = tuple(dict.fromkeys(addresses))[:MAX_ADDRESSES]
        return msgspec.structs.replace(came_by, addresses=distinct)

    async def remember(self) -> None:
        """Keep the addresses of other members on disk for the next start."""
        known: tuple[str, ...] = ()
        while True:
            if (others := self._others()) and others != known:
                with contextlib.suppress(OSError):  # a full disk must not end the node
                    AddressCache(self.machine.folder).write(self._way_back(others))
                    known = others
            await asyncio.sleep(REMEMBER_EVERY_S)


async def found(
    machine: MachineOptions, manifest: Manifest, on_start: Callable[[NodeProcess], None]
) -> Path:
    """Start a run, or resume it, and train it to its end; return the final checkpoint's folder.

    A run is resumed by rejoining its members if they can be reached, else from the checkpoint."""
    machine = with_room(machine, manifest, Failure)
    require_carried(manifest.plan(), manifest.pipeline_plan())
    identity = identity_of(machine.folder)
    run = manifest.run_id(identity.peer)
    require_unended(machine.folder, run)
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
    plan = manifest.plan()
    from_folder = saved is None and plan.lora is None
    weights = first_weights(plan, machine.model) if from_folder else None
    if weights is not None and manifest.pipeline is not None:
        require_founder(stage, machine.role)
    machine = await fitted(machine, manifest, Failure)
    async with network(machine, identity, run, ()) as (directory, links):
        peer = _peer(machine, manifest, run, identity.peer, identity, directory, links, stage)
        sources = peer.context.chunks, lambda: ()
        supply = supply_of(machine, manifest.data, *sources)
        base = base_supply_of(machine, manifest.model, *sources)
        async with peer.running():
            text = await _text(manifest, supply)
            weights = weights or await _base(manifest, base)
            names = machine, manifest, run, identity.peer, identity
            node = _node(*names, peer, directory, links, stage, trains, text, supply, weights)
            terms = manifest.canonical()
            head = Head(run, identity.peer, digest_of(terms), len(terms), 0)
            part = node.member
            if saved is not None and isinstance(part, ReplicaNode):
                part.peer.found()
                load_state(part, saved)
            else:
                part.found()  # a stage loads its checkpoint by itself
            if saved is not None:
                node.history.event("resumed", step=saved.step, checkpoint=str(saved.folder))
            async with _supplied(node):
                return await _train(node, seal_head(identity, head), on_start)


async def join(
    machine: MachineOptions,
    invite: Invite,
    on_start: Callable[[NodeProcess], None],
    learn_timeout_s: float = LEARN_TIMEOUT_S,
    downloaded: NamedProgress = lambda what, here, total: None,
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
    downloaded: NamedProgress,
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
        machine = await fitted(machine, manifest, RefusedByRun)
        pipeline = manifest.pipeline_plan()
        stage, trains = EVERY if pipeline is None else NOTHING, True
        names = invite.run, invite.founder, identity
        peer = _peer(machine, manifest, *names, directory, links, stage)
        came_by = invite if invite.grant is not None or known is None else known
        peer.membership.bring(came_by.ticket, records)
        known_peers = owners(records, invite.run)
        sources = peer.context.chunks, lambda: others_in(peer) or known_peers
        supply = supply_of(machine, manifest.data, *sources)
        base = base_supply_of(machine, manifest.model, *sources)
        async with peer.running():
            text = await _text(manifest, supply)
            weights = await _base(manifest, base, partial(downloaded, "model"))
            if pipeline is not None:
                async with _answered(peer):
                    # a founder that rejoins trains as before
                    founded = identity.peer == invite.founder
                    stage, trains = await joiners(
                        machine.role, pipeline, peer, records, JOIN_TIMEOUT_S, founded
                    )
                links.record(role=role_of(stage))
            known_as = machine, manifest, *names
            node = _node(*known_as, peer, directory, links, stage, trains, text, supply, weights)
            node.doors, node.came_by = doors, came_by
            part = node.member
            if isinstance(part, ReplicaNode):
                if saved is not None:
                    load_moments(part, saved)
                part.loop.step = max(part.loop.step, node.cursor.read())
            async with _supplied(node):
                async with _answered(peer):
                    await part.join(records, JOIN_TIMEOUT_S, partial(downloaded, "state"))
                node.history.event("joined", tokens=part.tokens, run=invite.run, role=part.role)
                if (why := peer.membership.sync.choice) != "":
                    node.history.event("chose", why=why)
                return await _train(node, head, on_start)


async def _text(manifest: Manifest, supply: DataSupply | None) -> Text:
    """Return what the run trains on; raise `RefusedByRun` if it cannot be had: before the members
    count this node."""
    if supply is None:
        return text_here(manifest.data, None)
    text = await supply.text()
    require_described(manifest.data, text.index)
    if manifest.pipeline is not None:
        require_all_counted(text)
    return text


async def _base(
    manifest: Manifest,
    supply: BaseSupply | None,
    downloaded: DownloadProgress = lambda here, total: None,
) -> WeightsFolder | None:
    """Return the weights beside which the run trains adapters; None if it trains all weights."""
    if supply is None:
        return None
    return WeightsFolder(await supply.folder(downloaded), manifest.model.shape)


@contextlib.asynccontextmanager
async def _supplied(node: NodeProcess) -> AsyncIterator[None]:
    """Keep the data of the steps to come on its way while the block runs, and wait for the first
    of it."""
    supply, part = node.supply, node.member
    if supply is None:
        yield
        return
    if isinstance(part, ReplicaNode):
        task = part.training_task
        async with supply.running(task.batches, lambda: part.step * task.accumulate):
            async with _status_written(node):
                await supply.ready((part.step + 1) * task.accumulate - 1, lambda: part.stopping)
            yield
    elif part.trainer is None:
        yield
    else:
        source = part.trainer.source
        source.has_data = supply.is_ready
        async with supply.running(source.stream, lambda: source.position):
            yield


@contextlib.asynccontextmanager
async def _status_written(node: NodeProcess) -> AsyncIterator[None]:
    """Keep the status file up to date while the block runs."""
    task = asyncio.create_task(kept_up("the status file", StatusWriter(node).run))
    try:
        yield
    finally:
        await cancel(task)


async def _stop_if_refused(peer: Peer, limit: asyncio.Timeout) -> None:
    """End the wait once this peer knows that it is not let in: nobody serves it then."""
    while peer.membership.admission.own_refusal is None:  # noqa: ASYNC110
        await asyncio.sleep(REFUSED_EVERY_S)
    limit.reschedule(asyncio.get_running_loop().time())


@contextlib.asynccontextmanager
async def _answered(peer: Peer) -> AsyncIterator[None]:
    """Turn a `TimeoutError` into an error that names what did not arrive in time, or why this peer
    is not let in."""
    try:
        async with asyncio.timeout(None) as limit:
            looking = asyncio.create_task(_stop_if_refused(peer, limit))
            try:
                yield
            finally:
                await cancel(looking)
    except TimeoutError:
        if (refusal := peer.membership.admission.own_refusal) is not None:
            raise RefusedByRun(
                "the run does not let this peer in",
                refusal,
                "ask for a new invite, and join with that",
            ) from None
        if peer.membership.known.is_set():
            why = f"no member sent all of it within {JOIN_TIMEOUT_S:.0f} s"
            raise Failure(
                "the run's state could not be downloaded",
                why,
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
    peer.context.store.put(node.manifest.canonical(), TERMS)
    status = StatusWriter(node)
    helpers = [asyncio.create_task(kept_up(*each)) for each in _helpers(node, status, head)]
    try:
        on_start(node)
        await _until(node, lambda: len(peer.context.views.newest.members) >= node.awaited())
        if node.links.me == node.founder:
            await measure_start(part, helpers[-1])
        await unless_lost(node.machine.ranks, part.run(node.manifest.run.total_tokens))
        lingers_s = asyncio.get_running_loop().time() + LINGER_S
        await _until(node, lambda: peer.alone or asyncio.get_running_loop().time() >= lingers_s)
        saved = await _leave(node, part.stopping or has_gone_wrong(part))
        require_well(part, node.keepers)
        return saved
    except UnencodableTensor as error:
        raise gone_wrong(part, node.keepers, str(error)) from error
    except StepImpossible:
        await _leave(node, True)
        raise
    except FollowerLost:
        await peer.part()
        raise
    finally:
        await cancel(*helpers)
        status.write_last()
        node.history.close()
        node.cursor.close()


def _helpers(
    node: NodeProcess, status: StatusWriter, head: bytes
) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    """Return what runs beside the training, by name; the last brings the held-out text."""
    return [
        ("publishing the run", partial(keep_published, node.directory, node.run, head)),
        ("the founder's statements", StatementKeeper(node.machine.folder, node.member.peer).run),
        ("the status file", status.run),
        ("the live view", partial(status.show, lambda now: node.show(now))),
        ("remembering addresses", node.remember),
        ("the held-out text", partial(bring_held_out, node.member, node.manifest, node.supply)),
    ]


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


def _peer(
    machine: MachineOptions,
    manifest: Manifest,
    run: str,
    founder: PeerId,
    identity: Identity,
    directory: DhtDirectory,
    links: ZmqLinks,
    stage: int,
) -> Peer:
    """Return the peer, with its record as a server of this stage."""
    trust, waits = manifest.trust, (manifest.exchange.view_s, manifest.exchange.branch_after_s)
    keys = trust.authorities, trust.members_invite
    terms = RunTerms(run, manifest.run.seed, founder, *waits, *keys, votes=trust.votes)
    incarnation = unseal(links.record(role=role_of(stage)), run).incarnation
    peer = Peer(
        terms,
        identity,
        links,
        directory,
        incarnation=incarnation,
        record=links.record,
        compute=Worker("codec"),
    )
    forward_for(peer, links)
    peer.membership.remember(VotingFiles(machine.folder))
    peer.context.entrance.unix_s, peer.context.entrance.refuse = time.time, links.refuse
    peer.ticks.rests = True
    peer.context.shelve = Shelf(machine.folder.rounds, Worker("files"))
    return peer


def _node(
    machine: MachineOptions,
    manifest: Manifest,
    run: str,
    founder: str,
    identity: Identity,
    peer: Peer,
    directory: DhtDirectory,
    links: ZmqLinks,
    stage: int,
    trains: bool,
    text: Text,
    supply: DataSupply | None,
    weights: WeightsFolder | None = None,
) -> NodeProcess:
    """Assemble the node; its worker threads end with the process."""
    torch.set_num_threads(machine.threads)
    history = History.open(machine.folder.path, time.time)
    decided = functools.partial(verdict, peer.rounds.streams)
    journal = RunRecorder(history, links.total_bytes, decided)
    peer.context.accusations.on_new = journal.accused
    peer.branching.on_refounded = journal.refounded
    files, cursor = Worker("files"), SampleCursor(machine.folder, run)
    report = trimmed(journal.report, files, peer.context.spawn)
    tokenizer = None if supply is None else supply.tokenizer
    terms = machine, manifest, run, peer, text, report
    part: ReplicaNode | PipelineNode
    if manifest.pipeline is not None:
        part, keepers = part_of(*terms, stage, trains, tokenizer, weights)
    else:
        part, keeper = replica_part(*terms, files, cursor, supply, weights)
        keepers = [keeper]
    parts = part, directory, links, history, journal, keepers, cursor, supply
    inviter = Inviter(identity, peer, run, founder)
    return NodeProcess(machine, manifest, run, founder, inviter, *parts)
