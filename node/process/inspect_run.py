"""A run seen from outside: its manifest, its newest view, and which members answer.

The inspecting peer uses a throwaway identity, cannot be dialled, publishes nothing and never joins.
"""

import asyncio
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from farflock.node.assembly.known_run import known_members, learn_run
from farflock.node.assembly.session import Session
from farflock.node.process.data_look import Excerpt, read_excerpts
from farflock.node.process.network import MachineOptions, identity_of, network
from farflock.node.process.run_data import RunData, fetch_data
from farflock.node.process.run_text import fetch_tokenizer
from farflock.node.process.status import EvaluationStatus, watched
from farflock.node.run.data_section import tokenizer_of
from farflock.node.run.invite import Invite
from farflock.node.run.manifest import Manifest
from farflock.node.state.paths import RunFolder
from farflock.node.train.evaluation_watch import EvaluationWatch
from farflock.node.train.run_size import is_paired
from farflock.swarm.links import Links, PeerId
from farflock.swarm.peer.peer import Peer

ANSWER_TIMEOUT_S = 5.0  # for members to show that they are alive
POLL_S = 0.1


class MemberInspection(msgspec.Struct, frozen=True):
    """A member, whether it answered, and its round trip in ms (None: not measured). `addresses`
    is empty if the member can only dial out, or if its record was not found."""

    peer: str
    addresses: tuple[str, ...]
    answers: bool
    rtt_ms: float | None


class RunInspection(msgspec.Struct, frozen=True):
    """The facts about a run that are visible from outside. `branch` names the newest view's
    branch; None is the main line. `evaluation` is what one member says of the newest one."""

    manifest: Manifest
    view: int
    branch: str | None
    members: tuple[MemberInspection, ...]
    evaluation: EvaluationStatus | None = None


async def fetch_plan(
    machine: MachineOptions, invite: Invite, timeout_s: float
) -> tuple[Manifest, RunData | None]:
    """Return the verified manifest of an invite's run, and what is known of its prepared data,
    whose index is fetched; raise `RefusedByRun` if no member has that."""
    async with _visiting(machine, invite, timeout_s) as (session, members):
        manifest = session.known.manifest
        data = await fetch_data(session.world.links, invite.run, manifest.data, members, machine)
        if data is not None:
            data.close()  # it is lent to nobody
        return manifest, data


async def look_at_data(
    machine: MachineOptions, invite: Invite, timeout_s: float, seed: int
) -> tuple[Manifest, RunData | None, list[Excerpt]]:
    """Return the same, and a few documents of the data, drawn by the seed."""
    async with _visiting(machine, invite, timeout_s) as (session, members):
        links, run, manifest = session.world.links, invite.run, session.known.manifest
        data = await fetch_data(links, run, manifest.data, members, machine)
        if data is None:
            return manifest, None, []
        data.close()
        await fetch_tokenizer(links, run, manifest.data, members)
        tokenizer = tokenizer_of(manifest.data)
        return manifest, data, await read_excerpts(links, run, data, members, tokenizer, seed)


@contextlib.asynccontextmanager
async def _visiting(
    machine: MachineOptions, invite: Invite, timeout_s: float
) -> AsyncIterator[tuple[Session, list[PeerId]]]:
    """Yield a session in an invite's run, not running yet, which a throwaway identity has, and the
    run's members."""
    with tempfile.TemporaryDirectory(prefix="farflock-look-") as passing:
        folder, run = RunFolder(Path(passing)), invite.run
        visitor = dataclasses.replace(machine, folder=folder, client_mode=True)
        identity = identity_of(folder)
        async with network(visitor, identity, run, invite.addresses) as (world, links):
            known = await learn_run(world, invite, timeout_s)
            unseen = dataclasses.replace(world, directory=None)  # nothing is published
            members = known_members(links, known.records, run)
            yield Session(unseen, identity, known), members


async def inspect_run(machine: MachineOptions, invite: Invite, timeout_s: float) -> RunInspection:
    """Return the manifest and the members of the newest view; raise `Refused` or `TimeoutError` if
    no member answers in time."""
    async with _visiting(machine, invite, timeout_s) as (session, _), session.running():
        await session.watch(timeout_s)
        peer, links = session.peer, session.world.links
        await _heard(peer, links)
        sight = _sight(peer, links, session.known.manifest)
        return msgspec.structs.replace(sight, evaluation=await _evaluation(peer, sight))


async def _heard(peer: Peer, links: Links) -> None:
    """Wait until every member has answered, but at most `ANSWER_TIMEOUT_S`."""
    ends_s = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < ends_s:
        if all(links.life(member) == "alive" for member in peer.context.views.newest.peers):
            return
        await asyncio.sleep(POLL_S)


async def _evaluation(peer: Peer, sight: RunInspection) -> EvaluationStatus | None:
    """Return what a member that answers says of the newest evaluation; None if it says nothing."""
    ends_s = time.monotonic() + ANSWER_TIMEOUT_S
    for member in [member for member in sight.members if member.answers][:1]:
        peer.evaluations.look_on(member.peer)
        while time.monotonic() < ends_s and not peer.evaluations.answered:  # noqa: ASYNC110 - brief
            await asyncio.sleep(POLL_S)
    alone = sight.manifest.pipeline is None and is_paired(sight.manifest.plan())
    return watched(EvaluationWatch(peer.evaluations, lambda kind, fields: None, alone))


def _sight(peer: Peer, links: Links, manifest: Manifest) -> RunInspection:
    view, records = peer.context.views.newest, peer.membership.records
    members = []
    for member in view.peers:
        rtt_s = links.rtt_s(member)
        addresses = records[member].endpoints if member in records else ()
        answers = links.life(member) == "alive"
        members.append(
            MemberInspection(member, addresses, answers, None if rtt_s is None else rtt_s * 1000)
        )
    branch = peer.membership.branch
    return RunInspection(manifest, view.number, branch[0] if branch else None, tuple(members))
