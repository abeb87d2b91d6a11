"""The status file: what this node does now and whom it waits for, once a second, for `farflock status` and the live view."""

import asyncio
import collections
import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
import psutil

from farflock.node.state.paths import write_whole
from farflock.swarm.links import Links
from farflock.swarm.protocol.views import Member
from farflock.swarm.roles import role_of

if TYPE_CHECKING:
    from farflock.node.process.node_process import NodeProcess

EVERY_S = 1.0
PACE_SAMPLES = 10  # the pace is that of so many seconds

log = logging.getLogger(__name__)


class PartnerStatus(msgspec.Struct, frozen=True):
    """Another member, as this node sees it."""

    peer: str
    life: str
    road: str
    rtt_ms: float | None
    role: str = "replica"


class Waiting(msgspec.Struct, frozen=True):
    """An exchange that is open: for whom, and for how long still."""

    stream: str
    round: int
    whom: tuple[str, ...]
    left_s: float

    def said(self, names: Mapping[str, str]) -> str:
        """Who is waited for, in what, and how long still: a round that is late stays open while training goes on."""
        whom = ", ".join(names.get(peer, peer[-8:]) for peer in self.whom) or "the decision"
        left = f"{self.left_s:.0f} s left" if self.left_s > 0 else f"{-self.left_s:.0f} s late, training goes on"
        return f"{whom} ({self.stream}, round {self.round}, {left})"


class Status(msgspec.Struct, frozen=True):
    """One node at one moment. Bytes are those of the links, both ways, since the start; `rounds` are those applied here
    since then, by status; `tokens_per_s` is this node's own pace; `branch` is name and first round of the one it is on;
    `work` counts what a pipeline's node has done."""

    pid: int
    run: str
    peer: str
    invite: str
    step: int
    tokens: int
    total_tokens: int
    loss: float | None
    view: int
    members: tuple[str, ...]
    is_member: bool
    partners: tuple[PartnerStatus, ...]
    waits: tuple[Waiting, ...]
    sent_bytes: int
    received_bytes: int
    unsure_rounds: int
    dropped: dict[str, int]
    doing: str = "trains"
    rounds: dict[str, int] = {}
    last_round: int | None = None
    tokens_per_s: float | None = None
    branch: tuple[str, int] | None = None
    role: str = "replica"
    work: dict[str, int] = {}


class StatusWriter:
    """Writes a node's status to `status.json` in its folder, atomically, and shows it to whoever watches."""

    def __init__(self, node: "NodeProcess") -> None:
        self._node = node
        self._path = node.machine.folder.path / "status.json"
        self._pace: collections.deque[tuple[float, int]] = collections.deque(
            maxlen=PACE_SAMPLES
        )  # when, how many tokens
        self._fails = False

    async def run(self, show: Callable[[Status], None]) -> None:
        """Until cancelled."""
        while True:
            self._pace.append((asyncio.get_running_loop().time(), self._node.participant.trained_tokens))
            show(self.write())
            await asyncio.sleep(EVERY_S)

    def write(self, doing: str | None = None) -> Status:
        """Once, now. A disk that is full must not end a node that could train on."""
        status = status_of(self._node, doing, self._tokens_per_s())
        try:
            write_whole(self._path, msgspec.json.encode(status))
            self._fails = False
        except OSError as error:
            if not self._fails:
                log.warning("%s cannot be written: %s", self._path, error.strerror)
            self._fails = True
        return status

    def _tokens_per_s(self) -> float | None:
        if len(self._pace) < 2:
            return None
        (began_s, first), (ended_s, last) = self._pace[0], self._pace[-1]
        return (last - first) / (ended_s - began_s)


def status_of(node: "NodeProcess", doing: str | None = None, tokens_per_s: float | None = None) -> Status:
    """What there is to say about a node now; `doing` where the caller knows better."""
    part, links = node.participant, node.links
    peer = part.peer
    view = peer.context.views.newest
    sent_bytes, received_bytes = links.total_bytes()
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
        partners=tuple(_partner(links, other) for other in view.members if other.peer != peer.me),
        waits=tuple(Waiting(wait.what.stream, wait.what.round, wait.whom, wait.left_s) for wait in part.waits()),
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
    )


def _doing(node: "NodeProcess") -> str:
    part, here, wanted = node.participant, len(node.participant.peer.context.views.newest.peers), node.awaited()
    if part.stopping:
        return "is leaving"
    if here < wanted:
        return f"waits for members: {here} of {wanted} are here"
    does = "trains" if part.role in ("replica", "trainer") else f"serves {part.role.replace(':', ' ')}"
    return does if part.peer.membership.is_member else f"{does}, and waits to be admitted"


def read_status(path: "os.PathLike[str]") -> Status:
    """The status in a file; `OSError` or `msgspec.MsgspecError` if there is none."""
    with open(path, "rb") as file:
        return msgspec.json.decode(file.read(), type=Status)


def _partner(links: Links, member: Member) -> PartnerStatus:
    peer = member.peer
    rtt_s = links.rtt_s(peer)
    rtt_ms = None if rtt_s is None else rtt_s * 1000
    return PartnerStatus(peer, links.life(peer), links.road(peer), rtt_ms, role_of(member.stage))


def is_node(pid: int) -> bool:
    """Whether a process of ours has this number; another program may have it by now."""
    try:
        return "farflock" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
