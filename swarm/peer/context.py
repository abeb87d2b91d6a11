"""The context of every part of a peer: its name, a way to send, the time, views and chunks.

A plain record, made once by `swarm/peer/peer.py` and handed to the parts, so that each part can be
read and tested alone.
"""

import asyncio
import collections
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

from farflock.swarm.bundle_store import BundleStore
from farflock.swarm.chunk_server import StateReaders
from farflock.swarm.chunk_store import Shelve, Store
from farflock.swarm.chunks import Chunks
from farflock.swarm.compute import Compute, inline
from farflock.swarm.frame import Frame, pack, pack_buffers
from farflock.swarm.links import Links, Liveness, PeerId
from farflock.swarm.messages import MAX_TRAIL, Evaluation, HeldState, Key, Message, Piece, Probed
from farflock.swarm.protocol.axes import NO_FLOOR, Floor, raised
from farflock.swarm.protocol.views import Chain, View

MAX_GIVEN_UP = 8 * MAX_TRAIL  # the kept views of 8 chains


@dataclass(slots=True)
class OwnState:
    """The states of this peer, as it tells others: the run's tokens, used where no round agrees on
    them, and what it holds on each axis, once that is known. It `is_open` once all its streams have
    begun with that."""

    tokens: Callable[[], int] = lambda: 0
    held: dict[int, Callable[[], HeldState | None]] = field(default_factory=dict)
    is_open: bool = False

    def states(self) -> tuple[HeldState, ...]:
        """Return the states that are known."""
        found = (known() for known in self.held.values())
        return tuple(each for each in found if each is not None)


@dataclass(slots=True)
class PeerContext:
    """One peer as its parts see it: its identity, its links, and the views that it knows."""

    run: str
    seed: int
    incarnation: int
    links: Links
    store: Store
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    compute: Compute = inline
    shelve: Shelve | None = None  # moves the content of past rounds out of memory
    chain: Chain | None = None
    # The next view must begin here or later: after the rounds that this peer took part in.
    floor: Floor = NO_FLOOR
    own: OwnState = field(default_factory=OwnState)
    given_up: dict[bytes, None] = field(default_factory=dict)  # given-up views, oldest first
    # The incarnation in which each member of the newest view was last heard.
    lives: dict[PeerId, int] = field(default_factory=dict)
    leaving: Collection[PeerId] = ()  # members of the newest view that have said goodbye
    # The round from which on a member contributes again to a stream, where it said so.
    away: dict[tuple[PeerId, str], int] = field(default_factory=dict)
    undecided_s: float = 0.0  # for which the newest view, or the next round's, could decide nothing
    measured: dict[str, Evaluation] = field(default_factory=dict)  # for the next offer, by stream
    evaluated: Callable[[str, PeerId, Evaluation], None] = lambda stream, member, value: None
    counters: collections.Counter[str] = field(default_factory=collections.Counter)
    chunks: Chunks = field(init=False)
    bundles: BundleStore = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = Chunks(self.store, self)
        self.bundles = BundleStore(self.store, self.chunks, self.compute)

    @property
    def me(self) -> PeerId:
        """The id of this peer."""
        return self.links.me

    @property
    def views(self) -> Chain:
        """The chain of views; there is none before genesis or before joining."""
        assert self.chain is not None, "this peer knows no view yet: start a run or join one first"
        return self.chain

    @property
    def readers(self) -> StateReaders:
        """The peers that read this peer's states."""
        return self.chunks.server.readers

    def now(self) -> float:
        """Return monotonic local seconds: the loop's clock, virtual in simulations."""
        return asyncio.get_running_loop().time()

    def send(self, peer: PeerId, message: Message) -> bool:
        """Send a message, best effort; return False if the links refused it."""
        return self.links.send(peer, pack(Frame(self.incarnation, message)))

    async def send_piece(
        self, peer: PeerId, piece: Piece | Probed, body: memoryview, timeout_s: float
    ) -> bool:
        """Send a piece of a chunk, or what follows it, as bulk; False if the links refused it or
        had no room in time."""
        frame = pack_buffers(Frame(self.incarnation, piece, body))
        return await self.links.send_bulk(peer, frame, timeout_s)

    def queued_bytes(self) -> int:
        """Return the bytes of bulk that wait for this peer's own line."""
        return self.links.queued_bytes()

    async def send_bulk(self, peer: PeerId, message: Message, timeout_s: float) -> bool:
        """Send a large message as bulk; False if the links refused it or had no room in time."""
        return await self.links.send_bulk(peer, pack(Frame(self.incarnation, message)), timeout_s)

    def life(self, peer: PeerId) -> Liveness:
        """Return the peer's apparent liveness."""
        return self.links.life(peer)

    def gone(self, view: View, peer: PeerId) -> bool:
        """True if a member of a view need not be waited for.

        It is suspect, dead, or in another life, in which it knows nothing of what it began."""
        heard = self.lives.get(peer)
        return self.life(peer) in ("suspect", "dead") or (
            heard is not None and view.index(peer, heard) is None
        )

    def living(self, number: int, stage: int | None) -> tuple[PeerId, ...]:
        """Return the other live peers that can decide a round, or still have the decision."""
        view = self.views.at(number, stage) or self.views.newest
        return tuple(peer for peer in view.peers if peer != self.me and not self.gone(view, peer))

    def left(self, peer: PeerId) -> bool:
        """True if a member has said goodbye: it votes while needed, but contributes nothing."""
        return peer in self.leaving or not self.views.newest.lists(peer)

    def is_away(self, peer: PeerId, key: Key) -> bool:
        """True if another member has said that it contributes nothing to this round."""
        return key.round < self.away.get((peer, key.stream), 0)

    def note_followed(self, peer: PeerId, stream: str, applied: int, *, current: bool) -> None:
        """Note up to which round of a stream a peer has all, for the states that it may read, and
        whether none is decided after that."""
        for state in self.readers.states.values():
            state.followed(peer, stream, applied, self.now(), current=current)

    def my_index(self, view: View) -> int | None:
        """Our member index in a view; None if we are not in it in this life, or gave it up."""
        return None if view.hash in self.given_up else view.index(self.me, self.incarnation)

    @property
    def is_member(self) -> bool:
        """True if this peer is in the newest view that it knows, in this life."""
        return self.chain is not None and self.my_index(self.chain.newest) is not None

    def stayed(self, since: int) -> bool:
        """True if each later view that is known lists this life."""
        for entry in reversed(self.views.views):
            if entry.view.number <= since:
                break
            if self.my_index(entry.view) is None:
                return False
        return True

    def give_up(self) -> None:
        """Never act again in the views known so far: our promises in them are being forgotten."""
        for entry in self.views.views:
            self.given_up[entry.view.hash] = None
        while len(self.given_up) > MAX_GIVEN_UP:
            del self.given_up[next(iter(self.given_up))]

    def touch(self, stage: int | None, number: int) -> None:
        """Note that this peer takes part in a round, so the next view must begin after it."""
        self.floor = raised(self.floor, stage, number + 1)

    @property
    def touched(self) -> int:
        """The highest round on any axis that this peer took part in; -1 before the first."""
        return max(self.floor, default=0) - 1

    def drop(self, reason: str) -> None:
        """Count a dropped message or record."""
        self.counters[f"dropped: {reason}"] += 1
