"""The ways of a node into a run: as its founder, or by an invite.

`found` and `join` differ in where the manifest comes from, and in who has the state; after that,
both run the same node as simulations do.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from farflock.node.assembly.checkpoints import last_of
from farflock.node.assembly.known_run import KnownRun, learn_run, own_run
from farflock.node.assembly.learnt import LEARN_TIMEOUT_S, known_members
from farflock.node.assembly.own_world import identity_of
from farflock.node.assembly.session import AddressCache, Session, way_back, widened
from farflock.node.errors import Failure, RefusedByRun
from farflock.node.pipeline.lifecycle.rebalancer import LifeOver
from farflock.node.process.assembling import assembled
from farflock.node.process.network import MachineOptions, network, with_shares
from farflock.node.process.node_process import NodeProcess
from farflock.node.process.pipeline_role import founders, joiners, last_of_part
from farflock.node.process.room import with_room
from farflock.node.process.run_data import data_in_place
from farflock.node.process.run_text import fetch_text, inputs_of
from farflock.node.process.sample_keeper import founders_start, joiners_start
from farflock.node.process.status_writer import StatusWriter
from farflock.node.run.invite import Invite
from farflock.node.run.manifest import Manifest
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.train.run_size import require_carried
from farflock.swarm.dht.greeting import DirectoryUnreachable
from farflock.swarm.identity import Identity
from farflock.swarm.peer.peer import Peer
from farflock.swarm.peer.snapshots import DownloadProgress, SnapshotUnavailable
from farflock.swarm.roles import EVERY, NOTHING, UNMEASURED, role_of

JOIN_TIMEOUT_S = 120.0
REJOIN_TIMEOUT_S = 20.0  # to learn the terms of its run, for a founder that starts again

log = logging.getLogger(__name__)

OnStart = Callable[[NodeProcess], None]


async def found(machine: MachineOptions, manifest: Manifest, on_start: OnStart) -> Path:
    """Start a run, or resume it, and train it to its end; return the final checkpoint's folder.

    A run is resumed by rejoining its members if they can be reached, else from the checkpoint."""
    machine = with_room(with_shares(machine), manifest, Failure)
    pipeline = manifest.pipeline_plan()
    require_carried(manifest.plan(), pipeline)
    identity = identity_of(machine.folder)
    own = own_run(identity, manifest)
    stage, _ = founders(machine.role, pipeline)
    saved = last_of_part(machine.folder, own.run, pipeline, stage)
    # Without a checkpoint too: its run may live on, and must not begin a second time.
    back = way_back(machine.folder, own.run, identity.peer)
    if back is not None and (saved is None or not _ended(saved, manifest)):
        try:
            return await join(machine, back, on_start, REJOIN_TIMEOUT_S)
        except (RefusedByRun, DirectoryUnreachable) as reason:
            does = "begins again" if saved is None else f"resumes from step {saved.step}"
            log.info("the run %s: %s", does, reason)
    try:
        return await _found(machine, identity, own, saved, on_start)
    except LifeOver as reason:
        return await join(machine, _known_again(machine, own.run, reason), on_start)


async def _found(
    machine: MachineOptions,
    identity: Identity,
    own: KnownRun,
    saved: Checkpoint | None,
    on_start: OnStart,
) -> Path:
    manifest, run = own.manifest, own.run
    data = await data_in_place(manifest.data, machine)
    start = founders_start(machine.folder.path, manifest, run, saved)
    inputs = await inputs_of(machine, own, data, start, Failure, begins=saved is None)
    stage, trains = founders(machine.role, manifest.pipeline_plan())
    async with network(machine, identity, run, ()) as (world, links):
        links.record(role=role_of(stage if inputs.machine.evaluates else UNMEASURED))
        async with Session(world, identity, own).running() as session:
            node = assembled(inputs, session, links, stage, trains)
            async with node.travelling(()):
                if saved is None:
                    session.start(node.member)  # a stage whose checkpoint is here loads that
                else:
                    await session.resume(node.member, saved)
                    node.journal.report(
                        "resumed", {"step": saved.step, "checkpoint": str(saved.folder)}
                    )
                return await node.train(on_start)


async def join(
    machine: MachineOptions,
    invite: Invite,
    on_start: OnStart,
    learn_timeout_s: float = LEARN_TIMEOUT_S,
    downloaded: DownloadProgress = lambda here, total: None,
    *,
    waits_for_room: bool = True,
) -> Path:
    """Join the run of an invite and train it to its end; return the final checkpoint's folder.

    A peer that was in this run before keeps its position in its data and its inner moments; it
    takes the state from the swarm. A stage server that the other servers have left behind begins
    another life."""
    machine = with_shares(machine)
    while True:
        try:
            return await _join(
                machine, invite, on_start, learn_timeout_s, downloaded, waits_for_room
            )
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
    on_start: OnStart,
    learn_timeout_s: float,
    downloaded: DownloadProgress,
    waits_for_room: bool,
) -> Path:
    identity, run = identity_of(machine.folder), invite.run
    remembered, saved = AddressCache(machine.folder).read(run), last_of(machine.folder, run)
    invite = widened(invite, remembered)
    async with network(machine, identity, run, invite.members) as (world, links):
        known = await learn_run(world, invite, learn_timeout_s)
        manifest = known.manifest
        machine = with_room(machine, manifest, RefusedByRun)
        holders = known_members(links, known.records, run)
        data = await fetch_text(links, run, manifest.data, holders, machine)
        start = joiners_start(machine.folder.path, manifest, run, saved)
        inputs = await inputs_of(machine, known, data, start, RefusedByRun, begins=False)
        pipeline = manifest.pipeline_plan()
        stage, trains = EVERY if pipeline is None else NOTHING, True
        links.record(role=role_of(stage if inputs.machine.evaluates else UNMEASURED))
        async with Session(world, identity, known).running() as session:
            session.waits_for_room = waits_for_room
            if pipeline is not None:
                with _answered(session.peer):
                    # a founder that rejoins trains as before
                    founded, peer = identity.peer == known.founder, session.peer
                    records, role = session.recall(), machine.role
                    stage, trains = await joiners(
                        role, pipeline, peer, records, JOIN_TIMEOUT_S, founded
                    )
                links.record(role=role_of(stage))
            node = assembled(inputs, session, links, stage, trains, before=saved)
            part = node.member
            async with node.travelling(holders):
                with _answered(session.peer):
                    async with StatusWriter(node).while_joining():
                        await session.join(part, JOIN_TIMEOUT_S, downloaded)
                node.journal.report(
                    "joined", {"tokens": part.tokens, "run": run, "role": part.role}
                )
                return await node.train(on_start)


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
