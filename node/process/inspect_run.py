"""A run seen from outside: its terms, its newest view, and which members answer.

The one who looks has a throwaway identity, cannot be dialled, publishes nothing and never joins.
Nothing here needs torch, so that a look takes no longer than the members do.
"""

import asyncio
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from farflock.node.assembly.learnt import LearntTerms, ShownTerms, learn_terms, shown
from farflock.node.assembly.own_addresses import Listening
from farflock.node.assembly.own_world import identity_of, open_world
from farflock.node.assembly.peer_world import Files, PeerWorld, peer_over
from farflock.node.process.status import EvaluationStatus, watched
from farflock.node.run.invite import Invite
from farflock.node.state.paths import RunFolder
from farflock.node.train.evaluation_watch import EvaluationWatch
from farflock.swarm.identity import Identity
from farflock.swarm.links import Links
from farflock.swarm.peer.peer import Peer

ANSWER_TIMEOUT_S = 5.0  # for members to show that they are alive
POLL_S = 0.02
PAIRED = ("noloco",)  # methods whose members have weights of their own


@dataclasses.dataclass(frozen=True, slots=True)
class RunVisit:
    """A visitor in a run: its world, its identity, and what members told it."""

    world: PeerWorld
    identity: Identity
    learnt: LearntTerms


@contextlib.asynccontextmanager
async def visiting_run(
    invite: Invite, timeout_s: float, directory: bool = True
) -> AsyncIterator[RunVisit]:
    """Visit an invite's run while the block runs; raise what `learn_terms` raises. Members that the
    invite does not name are asked if there is a `directory`."""
    with tempfile.TemporaryDirectory(prefix="farflock-look-") as passing:
        folder, where = RunFolder(Path(passing)), Listening(client_mode=True)
        identity = identity_of(folder)
        async with open_world(folder, where, identity, invite.run, invite.members) as (world, _):
            # nothing is published or kept
            unseen = dataclasses.replace(world, directory=None, files=Files())
            learnt = await learn_terms(world if directory else unseen, invite, timeout_s)
            yield RunVisit(unseen, identity, learnt)


class MemberInspection(msgspec.Struct, frozen=True):
    """A member, whether it answered, and its round trip in ms (None: not measured). `addresses`
    is empty if the member can only dial out, or if its record was not found."""

    peer: str
    addresses: tuple[str, ...]
    answers: bool
    rtt_ms: float | None


class RunInspection(msgspec.Struct, frozen=True):
    """The facts about a run that are visible from outside; `manifest` is its text. `branch` names
    the newest view's branch; None is the main line. `evaluation` is what one member says of the
    newest one."""

    founder: str
    manifest: str
    terms: ShownTerms
    view: int
    branch: str | None
    members: tuple[MemberInspection, ...]
    evaluation: EvaluationStatus | None = None


async def inspect_run(invite: Invite, timeout_s: float) -> RunInspection:
    """Return the terms and the members of the newest view; raise `RefusedByRun` or `TimeoutError`
    if no member answers in time."""
    async with visiting_run(invite, timeout_s) as visit:
        links, learnt, terms = visit.world.links, visit.learnt, shown(visit.learnt)
        peer = peer_over(visit.world, visit.identity, terms.for_peers(invite.run))
        async with peer.running():
            await peer.meet(learnt.records, timeout_s)
            await _heard(peer, links)
            sight = _sight(peer, links, learnt, terms)
            return msgspec.structs.replace(sight, evaluation=await _evaluation(peer, sight))


async def show_run(invite: Invite, timeout_s: float) -> str:
    """Return an invite's run in a line: its name, method, size, and how many members are known;
    raise `RefusedByRun` if none of those that the invite names answers."""
    async with visiting_run(invite, timeout_s, directory=False) as visit:
        return f"{shown(visit.learnt).said()}; members: {len(visit.learnt.records)}"


async def _heard(peer: Peer, links: Links) -> None:
    """Wait until every member has answered, and its round trip is known, but at most
    `ANSWER_TIMEOUT_S`."""
    ends_s = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < ends_s:
        if all(links.rtt_s(member) is not None for member in peer.context.views.newest.peers):
            return
        await asyncio.sleep(POLL_S)


async def _evaluation(peer: Peer, sight: RunInspection) -> EvaluationStatus | None:
    """Return what a member that answers says of the newest evaluation; None if it says nothing."""
    ends_s = time.monotonic() + ANSWER_TIMEOUT_S
    for member in [member for member in sight.members if member.answers][:1]:
        peer.evaluations.look_on(member.peer)
        while time.monotonic() < ends_s and not peer.evaluations.answered:  # noqa: ASYNC110 - brief
            await asyncio.sleep(POLL_S)
    alone = sight.terms.pipeline is None and sight.terms.method.name in PAIRED
    return watched(EvaluationWatch(peer.evaluations, lambda kind, fields: None, alone))


def _sight(peer: Peer, links: Links, learnt: LearntTerms, terms: ShownTerms) -> RunInspection:
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
    named = branch[0] if branch else None
    text = learnt.text.decode()
    return RunInspection(learnt.founder, text, terms, view.number, named, tuple(members))
