"""The status of a node that runs: what it is, and the file and the live view that show it."""

import asyncio
import collections
import contextlib
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from farflock.node.assembly.coming_back import waits_for
from farflock.node.errors import Failure
from farflock.node.process.status import PartnerStatus, Status, Waiting, awaited_state, watched
from farflock.node.state.paths import write_whole
from farflock.swarm.messages import MAX_MEMBERS
from farflock.swarm.peer.state_download import StateProgress
from farflock.swarm.protocol.views import Member
from farflock.swarm.roles import role_of
from farflock.swarm.tasks import cancel
from farflock.swarm.zmq.links import ZmqLinks

if TYPE_CHECKING:
    from farflock.node.process.node_process import NodeProcess

STATUS_EVERY_S = 1.0
FULL = f"the run is full (it has {MAX_MEMBERS} members), until one of them leaves"
PACE_SAMPLES = 10  # seconds over which the pace is measured

Sample = tuple[float, int, float]

log = logging.getLogger(__name__)


class StatusWriter:
    """Writes a node's status to `status.json` in its folder, atomically, and shows it in the
    live view."""

    def __init__(self, node: "NodeProcess") -> None:
        self._node = node
        self._path = node.machine.folder.path / "status.json"
        # (loop time in s, trained tokens, seconds of computing)
        self._pace: collections.deque[Sample] = collections.deque(maxlen=PACE_SAMPLES)
        self._fails = False
        self._written: Status | None = None

    async def run(self, show: Callable[[Status], None]) -> None:
        """Write and show a status every `STATUS_EVERY_S`, until cancelled."""
        while True:
            now_s, node = asyncio.get_running_loop().time(), self._node
            self._pace.append((now_s, node.member.trained_tokens, node.worker.busy_s))
            show(self.write())
            await asyncio.sleep(STATUS_EVERY_S)

    @contextlib.asynccontextmanager
    async def while_joining(self) -> AsyncIterator[None]:
        """Write how far the download of the run's state is, while the block runs."""
        async with _beside(self._follow_download()):
            yield

    async def _follow_download(self) -> None:
        peer = self._node.member.peer
        while True:
            coming, is_full = peer.snapshots.coming, peer.membership.admission.is_full
            if (coming is not None or is_full) and peer.context.chain is not None:
                self._put(joining(self._node, coming))
            elif words := waits_for(peer.branching.returning):
                found = status_of(self._node, words)
                self._put(msgspec.structs.replace(found, loss=None, is_member=False))
            await asyncio.sleep(STATUS_EVERY_S)

    def write(self, doing: str | None = None) -> Status:
        """Write one status now, if it has changed; a full disk must not end the node."""
        return self._put(status_of(self._node, doing, *self._rates()))

    def _put(self, status: Status) -> Status:
        if status == self._written:
            return status
        try:
            write_whole(self._path, msgspec.json.encode(status))
            self._fails, self._written = False, status
        except OSError as error:
            if not self._fails:
                log.warning("cannot write %s: %s; the node continues", self._path, error.strerror)
            self._fails = True
        return status

    @contextlib.asynccontextmanager
    async def showing(self, show: Callable[[Status], None]) -> AsyncIterator[None]:
        """Write and show the status while the block runs, and write the last one. What this meets
        must not hide how the node has ended."""
        try:
            async with _beside(self.run(show)):
                yield
        finally:
            with contextlib.suppress(Failure):  # no address for an invite
                ended = ": ".join(filter(None, ("has ended", self._node.leaving.said)))
                # Whoever starts a node here again waits for what its own status says.
                self._put(msgspec.structs.replace(status_of(self._node, ended), is_member=False))

    def _rates(self) -> tuple[float | None, float | None]:
        """Return the tokens per second and the share of computing over the last seconds."""
        if len(self._pace) < 2:
            return None, None
        (began_s, *before), (ended_s, *now) = self._pace[0], self._pace[-1]
        tokens, busy_s = (late - early for early, late in zip(before, now, strict=True))
        return tokens / (ended_s - began_s), min(busy_s / (ended_s - began_s), 1.0)


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Show the status beside the block; that this fails is said, and ends nothing else."""
    shown = asyncio.create_task(work)
    try:
        yield
    finally:
        for ended in await cancel(shown):
            if isinstance(ended, Exception):
                log.error("the node's status can no longer be shown", exc_info=ended)


def joining(node: "NodeProcess", coming: StateProgress | None) -> Status:
    """Return the status of a node that downloads the run's state, or (None) waits for room in the
    run: it is no member yet."""
    found = status_of(node, f"waits: {FULL}" if coming is None else "downloads the run's state")
    return msgspec.structs.replace(
        found, tokens=0, loss=None, is_member=False, waits=awaited_state(coming)
    )


def status_of(
    node: "NodeProcess",
    doing: str | None = None,
    tokens_per_s: float | None = None,
    busy_share: float | None = None,
) -> Status:
    """Return the node's current status; `doing` overrides what the node says it is doing."""
    part, links = node.member, node.links
    peer = part.peer
    view = peer.context.views.newest
    sent_bytes, received_bytes = links.total_bytes()
    slow = peer.rounds.slowness.named(view.peers)
    return Status(
        pid=os.getpid(),
        run=node.run,
        peer=peer.me,
        invite=node.invite(),
        step=part.step,
        tokens=part.tokens,
        total_tokens=node.manifest.run.total_tokens,
        loss=None if part.last_loss is None or math.isnan(part.last_loss) else part.last_loss,
        view=view.number,
        members=view.peers,
        is_member=peer.membership.is_member,
        partners=tuple(
            _partner(links, other, other.peer == part.twin, slow.get(other.peer, ""))
            for other in view.members
            if other.peer != peer.me
        ),
        waits=awaited_state(peer.snapshots.coming)
        + tuple(
            Waiting(wait.what.stream, wait.what.round, wait.whom, wait.left_s)
            for wait in part.waits()
        ),
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
        unsure_rounds=peer.pairing.unsure_rounds,
        dropped=dict(peer.context.counters) | dict(links.counters),
        doing=doing or _doing(node),
        rounds=dict(node.journal.rounds),
        last_round=node.journal.last_round,
        tokens_per_s=tokens_per_s,
        branch=peer.membership.branch,
        role=part.role,
        work=part.work,
        exchanges=part.coded_on,
        busy_share=busy_share,
        evaluation=watched(part.watch),
        data=None if node.data is None else node.data.status(peer),
    )


def _doing(node: "NodeProcess") -> str:
    part, here, wanted = (
        node.member,
        len(node.member.peer.context.views.newest.peers),
        node.awaited(),
    )
    if part.stopping or node.leaving.asked:
        return node.leaving.doing
    if here < wanted:
        return f"waits for members: {here} of {wanted} are here"
    does = (
        "trains" if part.role in ("replica", "trainer") else f"serves {part.role.replace(':', ' ')}"
    )
    if limits := str(node.machine.place.shares):
        does += f" with at most {limits}"
    if trouble := node.session.world.trouble():
        does += f", without the run's directory ({trouble})"
    waits = waits_for(part.peer.branching.returning)
    if part.peer.membership.is_member:
        return f"{does}; {waits}" if waits else does
    if waits:
        return f"{does}, but counts as no member; {waits}"
    if part.peer.branching.returning.is_open:
        return f"{does}; counts as a member once all members have signed their return"
    if part.peer.membership.admission.is_full:
        return f"{does}, but does not count yet: {FULL}"
    view_s = node.manifest.exchange.view_s
    return f"{does}; counts as a member from the next change of members (within {view_s:g} s)"


def _partner(links: ZmqLinks, member: Member, twin: bool, slow: str) -> PartnerStatus:
    peer = member.peer
    rtt_s = links.rtt_s(peer)
    rtt_ms = None if rtt_s is None else rtt_s * 1000
    life, road, role = links.life(peer), links.road(peer), role_of(member.stage)
    sent_bytes = sum(traffic.sent for traffic in links.traffic(peer).values())
    relayed_bytes = links.relayed_bytes(peer)
    return PartnerStatus(peer, life, road, rtt_ms, role, twin, slow, sent_bytes, relayed_bytes)
