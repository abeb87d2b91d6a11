"""In which phase of an exchange a swarm is, so that a fault can strike there."""

import asyncio
import collections
import contextlib
import random

from farflock.node.simulate.chaos_methods import PHASES
from farflock.swarm.frame import Frame, message_kind, pack, unpack
from farflock.swarm.links import PeerId

MOMENT_S = 6.0  # a fault waits so long for its phase


class PhaseTap:
    """Listens to all that is sent; may alter pieces of chunks on behalf of a sender that lies."""

    def __init__(self, phases: tuple[str, ...], chance: random.Random) -> None:
        self.sent_bytes: collections.Counter[PeerId] = collections.Counter()
        self.lying = 0.0  # share of chunk pieces that are altered
        self.phases = phases  # that exchanges have here
        self._random = chance
        self._phase = "offer"
        self._wanted = ""  # the phase that the next fault waits for
        self._moment = asyncio.Event()

    def hear(self, now_s: float, sender: PeerId, receiver: PeerId, frame: bytes) -> bytes:
        """Note the phase that the last message sent belongs to; return what goes over the line."""
        self.sent_bytes[sender] += len(frame)
        kind = message_kind(frame)
        self._phase = PHASES.get(kind, self._phase)
        if self._phase == self._wanted:
            self._moment.set()
        if kind == b"piece" and self.lying and self._random.random() < self.lying:
            return _altered(frame)
        return frame

    async def wait_for(self, wanted: str) -> str:
        """Wait until a message of this phase is sent; return the phase met.

        If exchanges have no such phase, wait for another one; if there are none, for nothing.
        """
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
    """A piece with one byte changed and a checksum that fits: only the chunk's digest tells."""
    good = unpack(frame)
    body = bytearray(good.body)
    if body:
        body[len(body) // 2] ^= 0x40
    return pack(Frame(good.incarnation, good.message, bytes(body)))
