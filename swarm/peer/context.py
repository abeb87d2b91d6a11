"""The context of every part of a peer's protocol: its name, a way to send, the time, views, chunks.

A plain record, made once by `swarm/peer/peer.py` and handed to the parts, so that each of them can be
read and tested alone.
"""

import asyncio
import collections
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

from farflock.swarm.chunks import Chunks, Store
from farflock.swarm.compute import Compute, inline
from farflock.swarm.frame import Frame, pack
from farflock.swarm.links import Links, Liveness, PeerId
from farflock.swarm.messages import MAX_TRAIL, Message, Piece
from farflock.swarm.protocol.axes import NO_FLOOR, Floor, raised
from farflock.swarm.protocol.views import Chain, View

MAX_FORSAKEN = 8 * MAX_TRAIL


@dataclass(slots=True)
class PeerContext:
    """One peer as its parts see it: who it is, how it sends, and the views that it knows."""

    run: str
    seed: int
    incarnation: int
    links: Links
    store: Store
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    compute: Compute = inline
    chain: Chain | None = None
    floor: Floor = NO_FLOOR  # after the rounds that this peer took part in: the next view must not begin before it
    progress_tokens: Callable[[], int] = lambda: 0  # the node's estimate, asked where no round agrees on tokens
    staged: bool = False  # the run's model is cut into stages, whoever is a member: there are streams of stages here
    forsaken: dict[bytes, None] = field(default_factory=dict)  # hashes of views that I was in and gave up, oldest first
    lives: dict[PeerId, int] = field(default_factory=dict)  # in which life members of the newest view were last heard
    leaving: Collection[PeerId] = ()  # members of the newest view who have said goodbye
    counters: collections.Counter[str] = field(default_factory=collections.Counter)
    chunks: Chunks = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = Chunks(self.store, self)

    @property
    def me(self) -> PeerId:
        """My peer id."""
        return self.links.me

    @property
    def views(self) -> Chain:
        """The views; only after genesis or after joining."""
        assert self.chain is not None, "this peer knows no view yet: found a run or join one first"
        return self.chain

    def now(self) -> float:
        """Monotonic local seconds: the loop's clock, virtual in simulations."""
        return asyncio.get_running_loop().time()

    def send(self, peer: PeerId, message: Message) -> bool:
        """Best effort; False if the links refused it."""
        return self.links.send(peer, pack(Frame(self.incarnation, message)))

    async def send_piece(self, peer: PeerId, piece: Piece, body: memoryview, timeout_s: float) -> bool:
        """Send a piece of a chunk as bulk; False if the links refused it or had no room in time."""
        return await self.links.send_bulk(peer, pack(Frame(self.incarnation, piece, body)), timeout_s)

    def life(self, peer: PeerId) -> Liveness:
        """The peer's liveness, as it seems."""
        return self.links.life(peer)

    def gone(self, view: View, peer: PeerId) -> bool:
        """True if a member of a view is not to be waited for: suspect or dead, or alive in another life, which knows nothing of
        what it began in that one."""
        heard = self.lives.get(peer)
        return self.life(peer) in ("suspect", "dead") or (heard is not None and view.index(peer, heard) is None)

    def left(self, peer: PeerId) -> bool:
        """True if a member of some view has said goodbye: it votes still, as long as it is needed, and brings nothing."""
        return peer in self.leaving or peer not in self.views.newest.peers

    def my_index(self, view: View) -> int | None:
        """My member index in a view, None if I am not in it in this life, or have forgotten what I promised there."""
        return None if view.hash in self.forsaken else view.index(self.me, self.incarnation)

    @property
    def is_member(self) -> bool:
        """True if I am in the newest view that I know, in this life."""
        return self.chain is not None and self.my_index(self.chain.newest) is not None

    def forsake(self) -> None:
        """Never act again in the views known so far: what I promised and accepted in them is being forgotten."""
        for entry in self.views.views:
            self.forsaken[entry.view.hash] = None
        while len(self.forsaken) > MAX_FORSAKEN:
            del self.forsaken[next(iter(self.forsaken))]

    def touch(self, stage: int | None, number: int) -> None:
        """I take part in this round: the next view must begin after it."""
        self.floor = raised(self.floor, stage, number + 1)

    @property
    def touched(self) -> int:
        """The highest round of any axis that this peer took part in; -1 before the first."""
        return max(self.floor, default=0) - 1

    def drop(self, reason: str) -> None:
        """Count something that was not taken in."""
        self.counters[f"dropped: {reason}"] += 1
