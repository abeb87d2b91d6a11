"""The holders of the chunks of data that a run trains on: asked, not told.

Whoever wants chunks asks the members, and each answers with a bitmap. An answer is remembered for
a while, so a peer asks again when it needs what nobody had.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence

from farflock.swarm.chunk_store import digest_of
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_HELD_CHUNKS, DataHeld, DataQuery
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.quota import Quota, units

ANSWER_TIMEOUT_S = 3.0
REPEAT_S = 0.5  # between two questions to a peer that has not answered
LASTS_S = 120.0  # for an answer
MAX_ANSWERS = 4096  # that are remembered

log = logging.getLogger(__name__)

_Place = tuple[PeerId, bytes, int]  # who was asked, for the chunks of which root from which number


class DataHolders:
    """The data that other peers hold, and this peer's answers about its own."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._answers: dict[_Place, tuple[float, DataHeld]] = {}  # the oldest first
        self._asked: dict[_Place, None] = {}  # without an answer
        self._came = asyncio.Event()
        self._quota = Quota()
        self.left_out: set[PeerId] = set()  # who sent a false chunk
        self.fetched_bytes = 0

    def receive(self, sender: PeerId, incarnation: int, message: DataQuery | DataHeld) -> None:
        """Answer a question, or take in an answer that was asked for."""
        if isinstance(message, DataHeld):
            place = sender, message.root, message.first
            if place in self._asked:
                del self._asked[place]
                self._answers.pop(place, None)
                self._answers[place] = self._context.now(), message
                if len(self._answers) > MAX_ANSWERS:
                    del self._answers[next(iter(self._answers))]
                self._came.set()
            return
        lender = self._context.chunks.lending.lenders.get(message.root)
        misplaced = message.first % MAX_HELD_CHUNKS
        cost = units(1, MAX_HELD_CHUNKS // 8)
        if misplaced or not self._quota.take(sender.encode(), cost, self._context.now()):
            self._context.drop("question about data")
            return
        size = 0 if lender is None else lender.index_bytes
        held = b"" if lender is None else lender.held(message.first)
        self._context.send(sender, DataHeld(message.root, message.first, size, held))

    async def ask(
        self, peers: Sequence[PeerId], root: bytes, first: int, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        """Ask peers for what they hold, and wait until all have answered, or for `timeout_s`."""
        query = DataQuery(root, first)
        places = [(peer, root, first) for peer in peers if peer != self._context.me]
        self._asked |= dict.fromkeys(places)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while missing := [place for place in places if place in self._asked]:
                    for peer, _, _ in missing:
                        self._context.send(peer, query)
                    self._came.clear()
                    await self._some(REPEAT_S)
        for place in places:
            self._asked.pop(place, None)

    async def _some(self, seconds: float) -> None:
        """Wait until the answers that are missing come, but no longer than so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._came.wait()

    def holders(self, root: bytes, number: int) -> list[PeerId]:
        """Return the peers that are known to hold a chunk, but for those that sent a false one."""
        first = number - number % MAX_HELD_CHUNKS
        return [
            peer
            for (peer, of, start), (since_s, answer) in self._answers.items()
            if (of, start) == (root, first)
            and self._context.now() - since_s < LASTS_S
            and peer not in self.left_out
            and has(answer.held, number - first)
        ]

    def held(self, peer: PeerId, root: bytes, first: int) -> bytes:
        """Return what a peer is known to hold from a number on; nothing if it has not said."""
        since_s, answer = self._answers.get((peer, root, first), (0.0, None))
        late = self._context.now() - since_s >= LASTS_S
        return b"" if answer is None or late or peer in self.left_out else answer.held

    def index_sizes(self, root: bytes) -> dict[PeerId, int]:
        """Return the size of the index of this root, by the peers that say that they have it."""
        return {
            peer: answer.size
            for (peer, of, first), (_, answer) in self._answers.items()
            if of == root and not first and answer.size and peer not in self.left_out
        }

    def forget(self, root: bytes, number: int) -> None:
        """Forget who is said to hold a chunk and those beside it, since nobody delivered it."""
        first = number - number % MAX_HELD_CHUNKS
        for place in [place for place in self._answers if place[1:] == (root, first)]:
            del self._answers[place]

    async def fetch(
        self,
        digest: bytes,
        size: int,
        holders: Sequence[PeerId],
        timeout_s: float | None = None,
        known: Callable[[], Sequence[PeerId]] = tuple,
    ) -> bytes | None:
        """Return a chunk, verified, from any of these holders, or of those that are `known` once
        there are others; None if none delivers it in time, or they are silent for too long
        (`Chunks.fetch`). A peer that sends a false one is named, and
        left out from then on."""
        chunks, pin, liars = self._context.chunks, ("data", digest), set[PeerId]()

        def asked() -> list[PeerId]:
            return self._ordered(digest, {*holders, *known()})

        try:
            there = await chunks.fetch(
                digest, size, asked, pin, timeout_s, final=True, gently=True, liars=liars
            )
            if not there:
                return None
            self.fetched_bytes += size
            return chunks.store.get(digest)
        finally:
            chunks.store.forget(pin)
            for liar in sorted(liars - self.left_out):
                log.warning(
                    "%s sent a false copy of %s…, a part of the run's data; no more data is taken"
                    " from it",
                    liar,
                    digest.hex()[:16],
                )
            self.left_out |= liars

    def _ordered(self, digest: bytes, holders: Collection[PeerId]) -> list[PeerId]:
        """Return holders in an order of this peer and chunk, so that peers ask different ones."""
        mine = digest + self._context.me.encode()
        return sorted(holders, key=lambda peer: digest_of(mine + peer.encode()))


def has(held: bytes, number: int) -> bool:
    """Return whether a bitmap has this bit."""
    return number // 8 < len(held) and bool(held[number // 8] >> number % 8 & 1)
