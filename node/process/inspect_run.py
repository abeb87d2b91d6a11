"""A run seen from outside: its manifest, its newest view, and which members answer.

The inspecting peer uses a throwaway identity, cannot be dialled, publishes nothing and never joins.
"""

import asyncio
import dataclasses
import tempfile
import time
from pathlib import Path

import msgspec

from farflock.node.process.network import MachineOptions, identity_of, learn_run, network
from farflock.node.process.status import EvaluationStatus
from farflock.node.run.invite import Invite
from farflock.node.run.manifest import Manifest
from farflock.node.state.paths import RunFolder
from farflock.swarm.links import Links
from farflock.swarm.peer.evaluations import Evaluations
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.record import unseal

ANSWER_TIMEOUT_S = 5.0  # for members to show that they are alive
POLL_S = 0.1
EVALUATIONS_TIMEOUT_S = 2.0  # a run without any has no answer
MAX_ASKED = 3  # members that are asked for them
SHOWN_EVALUATIONS = 5


class MemberInspection(msgspec.Struct, frozen=True):
    """A member, whether it answered, and its round trip in ms (None: not measured). `addresses`
    is empty if the member can only dial out, or if its record was not found."""

    peer: str
    addresses: tuple[str, ...]
    answers: bool
    rtt_ms: float | None


class RunInspection(msgspec.Struct, frozen=True):
    """The facts about a run that are visible from outside. `branch` names the newest view's
    branch; None is the main line. `evaluations` are the newest that members signed, oldest
    first."""

    manifest: Manifest
    view: int
    branch: str | None
    members: tuple[MemberInspection, ...]
    evaluations: tuple[EvaluationStatus, ...] = ()


async def fetch_manifest(machine: MachineOptions, invite: Invite, timeout_s: float) -> Manifest:
    """Return the verified manifest of an invite's run."""
    with tempfile.TemporaryDirectory(prefix="farflock-look-") as passing:
        visitor = _throwaway(machine, passing)
        async with network(visitor, identity_of(visitor.folder), invite.run, invite.addresses) as (
            directory,
            links,
        ):
            _, manifest, _ = await learn_run(directory, links, invite, timeout_s)
            return manifest


async def inspect_run(machine: MachineOptions, invite: Invite, timeout_s: float) -> RunInspection:
    """Return the manifest and the members of the newest view; raise `Refused` or `TimeoutError` if
    no member answers in time."""
    with tempfile.TemporaryDirectory(prefix="farflock-look-") as passing:
        visitor = _throwaway(machine, passing)
        identity = identity_of(visitor.folder)
        async with network(visitor, identity, invite.run, invite.addresses) as (directory, links):
            _, manifest, records = await learn_run(directory, links, invite, timeout_s)
            terms, life = (
                RunTerms(invite.run, manifest.run.seed, invite.founder),
                unseal(links.record(), invite.run).incarnation,
            )
            peer = Peer(terms, identity, links, None, incarnation=life, record=links.record)
            async with peer.running():
                await peer.meet(records, timeout_s)
                await _heard(peer, links)
                await _evaluated(peer, links)
                return _sight(peer, links, manifest)


def _throwaway(machine: MachineOptions, folder: str) -> MachineOptions:
    return dataclasses.replace(machine, folder=RunFolder(Path(folder)), client_mode=True)


async def _heard(peer: Peer, links: Links) -> None:
    """Wait until every member has answered, but at most `ANSWER_TIMEOUT_S`."""
    ends_s = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < ends_s:
        if all(links.life(member) == "alive" for member in peer.context.views.newest.peers):
            return
        await asyncio.sleep(POLL_S)


async def _evaluated(peer: Peer, links: Links) -> None:
    """Ask some members that answer for the run's evaluations, and wait for the first answer."""
    alive = [member for member in peer.context.views.newest.peers if links.life(member) == "alive"]
    for member in alive[:MAX_ASKED]:
        peer.evaluations.look_on(member)
    ends_s = time.monotonic() + EVALUATIONS_TIMEOUT_S
    while alive and not peer.evaluations.known and time.monotonic() < ends_s:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


def _shown(known: Evaluations) -> tuple[EvaluationStatus, ...]:
    values = known.known.items()
    measured = [(at, each) for at, each in values if each.outcome != "missed" and not each.place]
    newest = measured[-SHOWN_EVALUATIONS:]
    return tuple(EvaluationStatus.of(each, known.signer(at)) for at, each in newest)


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
    on_branch, evaluations = branch[0] if branch else None, _shown(peer.evaluations)
    return RunInspection(manifest, view.number, on_branch, tuple(members), evaluations)
