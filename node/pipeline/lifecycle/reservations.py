"""Reservations of stages: a newcomer asks one member which stage to serve, before it asks for
admission.

No peer sees a newcomer before it is a member. If newcomers that arrive together chose for
themselves, they could all take the same stage while another has no server. So they all ask the same
member, the first server in the view that is not known to be gone, and it counts those that it has
sent to each stage and that are not members yet. A reservation is advice: no server needs one."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from farflock.node.pipeline.lifecycle.state import living
from farflock.node.pipeline.passes.requests import (
    RESERVE,
    BadRequest,
    Reserved,
    decode_reserved,
    encode,
)
from farflock.swarm.links import PeerId
from farflock.swarm.peer.calls.call_server import CallReply, Handler
from farflock.swarm.peer.calls.calls import CallFailed
from farflock.swarm.peer.peer import Peer

RESERVE_TIMEOUT_S = 2.0  # for one member's answer
MAX_ASKED = 3  # members, before a newcomer chooses for itself
MAX_RESERVED = 64  # reservations of newcomers, as many as there may be members
HELD_S = 120.0  # for which one is held: longer than most downloads of a stage


@dataclass(slots=True)
class Reservations:
    """The reservations that one member has made, in front of the `handler` of its other calls.

    `serving()` returns how many members serve each stage, `is_member` says whether a peer is
    one, and `now()` returns seconds."""

    handler: Handler
    serving: Callable[[], Sequence[int]]
    is_member: Callable[[PeerId], bool]
    now: Callable[[], float]
    _made: dict[PeerId, tuple[int, float]] = field(default_factory=dict)  # stage, and until when

    def admit(self, caller: PeerId, request: bytes, sizes: tuple[int, ...]) -> bytes | None:
        """Answer a request for a stage at once; pass on every other call."""
        greeting = self.greet(caller, request)
        return self.handler.admit(caller, request, sizes) if greeting is None else greeting

    def greet(self, caller: PeerId, request: bytes) -> bytes | None:
        """Answer a request for a stage, which newcomers make; return None for any other."""
        return encode(Reserved(self.reserve(caller))) if request == RESERVE else None

    async def serve(self, caller: PeerId, request: bytes, payloads: tuple[bytes, ...]) -> CallReply:
        """Pass on a call."""
        return await self.handler.serve(caller, request, payloads)

    def reserve(self, peer: PeerId) -> int:
        """Return the stage with the fewest servers, newcomers included, and count the peer there
        from now on."""
        self._made.pop(peer, None)
        self._forget()
        servers = list(self.serving())
        for stage, _ in self._made.values():
            servers[stage] += 1
        stage = emptiest(servers, peer)
        self._made[peer] = stage, self.now() + HELD_S
        return stage

    def __len__(self) -> int:
        """Return the number of newcomers that are counted."""
        return len(self._made)

    def _forget(self) -> None:
        """Forget newcomers that are members by now or took too long, and the oldest of too
        many."""
        now_s = self.now()
        for peer, (_, until_s) in list(self._made.items()):
            if self.is_member(peer) or until_s <= now_s or len(self._made) >= MAX_RESERVED:
                del self._made[peer]


def reservations_of(peer: Peer, stages: int, handler: Handler) -> Reservations:
    """Return the reservations of a member of a run of this many stages."""
    context = peer.context

    def serving() -> list[int]:
        served = list(living(peer, stages))
        view = context.views.newest
        for stage in range(stages):
            served[stage] += context.me in {view.peers[index] for index in view.serving(stage)}
        return served

    return Reservations(
        handler, serving, lambda other: other in context.views.newest.peers, context.now
    )


async def choose_stage(peer: Peer, stages: int) -> int:
    """Return the stage that a newcomer should serve: the one that a member names or, if none
    answers, the one with the fewest servers in the members' own list."""
    for member in _asked(peer, stages):
        try:
            reply = await peer.calls.ask(
                member, RESERVE, timeout_s=RESERVE_TIMEOUT_S, max_reply_bytes=0
            )
            if (stage := decode_reserved(reply.body)) < stages:
                return stage
        except (CallFailed, BadRequest):
            continue
    return emptiest(living(peer, stages), peer.me)


def _asked(peer: Peer, stages: int) -> list[PeerId]:
    """Return the first servers in the view that are not known to be gone."""
    view, context = peer.context.views.newest, peer.context
    serving = sorted({index for stage in range(stages) for index in view.serving(stage)})
    others = [view.peers[index] for index in serving if view.peers[index] != context.me]
    return [other for other in others if not context.gone(view, other)][:MAX_ASKED]


def emptiest(servers: Sequence[int], me: PeerId) -> int:
    """Return the stage with the fewest servers. Ties are broken by `me`, so peers that arrive at
    once do not all choose the same stage."""

    def chance(stage: int) -> bytes:
        return hashlib.sha256(f"{me}/{stage}".encode()).digest()

    return min(range(len(servers)), key=lambda stage: (servers[stage], chance(stage)))
