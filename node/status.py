"""The status file: what this node does now and whom it waits for, once a second, for `farflock status` and the live view."""

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec

from farflock.swarm.links import Links

if TYPE_CHECKING:
    from farflock.node.process import Node

EVERY_S = 1.0


class Partner(msgspec.Struct, frozen=True):
    """Another member, as this node sees it."""

    peer: str
    life: str
    road: str
    rtt_ms: float | None


class Waiting(msgspec.Struct, frozen=True):
    """An exchange that is open: for whom, and for how long still."""

    stream: str
    round: int
    whom: tuple[str, ...]
    left_s: float


class Status(msgspec.Struct, frozen=True):
    """One node at one moment. Bytes are those of the links, both ways, since the start."""

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
    partners: tuple[Partner, ...]
    waits: tuple[Waiting, ...]
    sent_bytes: int
    received_bytes: int
    unsure_rounds: int
    dropped: dict[str, int]


class StatusWriter:
    """Writes a node's status to `status.json` in its folder, atomically."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._path = node.machine.folder.path / "status.json"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.write()
            await asyncio.sleep(EVERY_S)

    def write(self) -> None:
        """Once, now."""
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(status_of(self._node)))
        os.replace(partial, self._path)


def status_of(node: "Node") -> Status:
    """What there is to say about a node now."""
    part, links = node.participant, node.links
    peer, loop = part.peer, part.loop
    view = peer.port.views.newest
    sent_bytes, received_bytes = links.total_bytes()
    return Status(
        pid=os.getpid(),
        run=node.run,
        peer=peer.me,
        invite=node.invite(),
        step=loop.step,
        tokens=part.seat.progress(loop.step).tokens,
        total_tokens=node.manifest.run.total_tokens,
        loss=loop.last_loss,
        view=view.number,
        members=view.peers,
        is_member=peer.membership.is_member,
        partners=tuple(_partner(links, other) for other in view.peers if other != peer.me),
        waits=tuple(Waiting(wait.what.stream, wait.what.round, wait.whom, wait.left_s) for wait in peer.waits()),
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
        unsure_rounds=peer.pairing.unsure_rounds,
        dropped=dict(peer.port.counters) | dict(links.counters),
    )


def read_status(path: "os.PathLike[str]") -> Status:
    """The status in a file; `OSError` or `msgspec.MsgspecError` if there is none."""
    with open(path, "rb") as file:
        return msgspec.json.decode(file.read(), type=Status)


def _partner(links: Links, peer: str) -> Partner:
    rtt_s = links.rtt_s(peer)
    return Partner(peer, links.life(peer), links.road(peer), None if rtt_s is None else rtt_s * 1000)
