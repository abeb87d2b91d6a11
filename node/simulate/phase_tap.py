"""The phase of an exchange that a swarm is in, so that a fault can strike in a chosen one."""

import asyncio
import collections
import contextlib
import random

from farflock.node.simulate.chaos_methods import PHASES
from farflock.swarm.frame import Frame, message_kind, pack, unpack
from farflock.swarm.links import PeerId
from farflock.swarm.protocol.views import VIEW_STREAM

VIEW_PHASES = {  # phase of a change of view by message tag
    b"prepare": "view promise",
    b"promise": "view promise",
    b"propose": "view vote",
    b"accepted": "view vote",
    b"decided": "view decided",
}
_OF_VIEWS = VIEW_STREAM.encode()
_HEAD_BYTES = 64  # of a frame: the key of a vote is in them
MOMENT_S = 6.0  # maximum wait of a fault for its phase


class PhaseTap:
    """A listener to all frames; it may alter chunk pieces on behalf of a lying sender."""

    def __init__(self, phases: tuple[str, ...], chance: random.Random) -> None:
        self.sent_bytes: collections.Counter[PeerId] = collections.Counter()
        self.lying = 0.0  # share of chunk pieces to alter
        self.phases = phases  # phases that exchanges have here
        self._random = chance
        self._phase = "offer"
        self._wanted = ""  # the phase that the next fault waits for
        self._moment = asyncio.Event()
        self._awaited: dict[asyncio.Event, str] = {}  # phases that liars wait for

    def hear(self, now_s: float, sender: PeerId, receiver: PeerId, frame: bytes) -> bytes:
        """Note the phase of a frame; return the frame, or an altered one, to send in its place."""
        self.sent_bytes[sender] += len(frame)
        kind = message_kind(frame)
        self._phase = PHASES.get(kind, self._phase)
        if self._phase == self._wanted:
            self._moment.set()
        if self._awaited:
            self._tell_liars(kind, frame)
        if kind == b"piece" and self.lying and self._random.random() < self.lying:
            return _altered(frame)
        return frame

    def _tell_liars(self, kind: bytes, frame: bytes) -> None:
        is_of_views = kind in VIEW_PHASES and _OF_VIEWS in frame[:_HEAD_BYTES]
        phase = (VIEW_PHASES if is_of_views else PHASES).get(kind)
        for moment, awaited in self._awaited.items():
            if awaited == phase:
                moment.set()

    async def meets(self, phase: str) -> bool:
        """Wait at most `MOMENT_S` for a phase of an exchange or of a change of view; return whether
        it came. Any number of callers may wait at once."""
        moment = asyncio.Event()
        self._awaited[moment] = phase
        try:
            async with asyncio.timeout(MOMENT_S):
                await moment.wait()
        except TimeoutError:
            return False
        finally:
            del self._awaited[moment]
        return True

    async def wait_for(self, wanted: str) -> str:
        """Wait at most `MOMENT_S` for a message of this phase, or of a random one if exchanges
        have no such phase. Return the phase of the message, or "" at once if there are no
        exchanges."""
        if not self.phases:
            return ""
        self._wanted = wanted if wanted in self.phases else self._random.choice(self.phases)
        self._moment.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOMENT_S):
                await self._moment.wait()
        met = self._wanted if self._moment.is_set() else self._phase
        self._wanted = ""
        return met


def _altered(frame: bytes) -> bytes:
    """Return a piece with one byte changed and a valid checksum: only the chunk's digest tells."""
    good = unpack(frame)
    body = bytearray(good.body)
    if body:
        body[len(body) // 2] ^= 0x40
    return pack(Frame(good.incarnation, good.message, bytes(body)))
