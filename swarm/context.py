"""The context of every part of a peer: its name, a way to send, the time, views and chunks.

A plain record, made once by `swarm/peer/peer.py` and handed to the parts, so that each part can be
read and tested alone.
"""

import asyncio
import collections
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from farflock.swarm.accusations import Accusations
from farflock.swarm.bundle_store import BundleStore
from farflock.swarm.capability import Issuers
from farflock.swarm.chunk_store import Shelve, Store
from farflock.swarm.chunks import Chunks
from farflock.swarm.compute import Compute, inline
from farflock.swarm.frame import Frame, pack, pack_parts
from farflock.swarm.links import Links, Liveness, PeerId, Standing
from farflock.swarm.messages import MAX_TRAIL, Message, Piece
from farflock.swarm.protocol.agreement.axes import Touched
from farflock.swarm.protocol.agreement.convictions import Contradiction
from farflock.swarm.protocol.views import Chain, Member, View
from farflock.swarm.protocol.votes import EARNED, Counted, VoteTerms
from farflock.swarm.statements import NO_ORDERS, Orders

MAX_GIVEN_UP = 8 * MAX_TRAIL  # the kept views of 8 chains
NOBODY = Issuers("", (), False)  # may let peers in, unless the run's terms name keys
# Rounds by which an honest member may be ahead of most others: one begins a round only once the one
# before it is decided.
LEAD = 4


@dataclass(slots=True)
class Entrance:
    """The means to let peers in and put others out: the keys that may issue capabilities, what the
    founder has stated, the terms of votes, the rounds that counted a member, whether its place has
    lapsed, a way to cut a peer's links, the wall clock (None: the loop's, as in simulations), the
    standing of other peers, and those that contradicted themselves, with a way to convict more."""

    issuers: Issuers = NOBODY
    orders: Orders = NO_ORDERS
    votes: VoteTerms = EARNED
    counted: Counted = lambda peer: 0
    lapsed: Callable[[Member], bool] = lambda member: False
    refuse: Callable[[PeerId], None] = lambda peer: None
    unix_s: Callable[[], float] | None = None
    standing: Callable[[PeerId], Standing] = lambda peer: "stranger"
    convicted: Collection[PeerId] = ()
    convict: Callable[[Contradiction], None] = lambda said: None


class GivenUp:
    """Views that their members have given up: they are listed there, in lives that go on, and take
    part no more.

    A member that goes over to another line of views, or whose state is taken back, forgets what it
    promised and accepted. What it signed in those views stays, so it signs nothing more in them.
    Others are told, since a silent vote of a member that they hear would be waited for."""

    def __init__(self) -> None:
        self._mine: dict[bytes, None] = {}  # by hash, oldest first
        self._others: dict[bytes, set[PeerId]] = {}

    def __contains__(self, view: View) -> bool:
        """True if this peer takes no part in a view any more."""
        return view.hash in self._mine

    def add(self, views: Iterable[View]) -> None:
        """Give up these views."""
        self._mine.update(dict.fromkeys(view.hash for view in views))
        while len(self._mine) > MAX_GIVEN_UP:
            del self._mine[next(iter(self._mine))]

    def hear(self, view: View, peer: PeerId, kept: Collection[View]) -> None:
        """Note that a member of a view has given it up; of views not `kept`, nothing is noted."""
        if self.by(view, peer):
            return  # a repeated word costs nothing
        known = {each.hash for each in kept}
        self._others = {place: peers for place, peers in self._others.items() if place in known}
        self._others.setdefault(view.hash, set()).add(peer)

    def by(self, view: View, peer: PeerId) -> bool:
        """True if another member says that it has given a view up."""
        return peer in self._others.get(view.hash, ())


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
    entrance: Entrance = field(default_factory=Entrance)
    shelve: Shelve | None = None  # moves the content of past rounds out of memory
    chain: Chain | None = None
    touched: Touched = field(default_factory=Touched)  # the rounds that this peer took part in
    lead: int = LEAD  # rounds that a member's floor counts above those of most members
    progress_tokens: Callable[[], int] = lambda: 0  # used where no round agrees on tokens
    given_up: GivenUp = field(default_factory=GivenUp)
    # The incarnation in which each member of the newest view was last heard.
    lives: dict[PeerId, int] = field(default_factory=dict)
    leaving: Collection[PeerId] = ()  # members of the newest view that have said goodbye
    counters: collections.Counter[str] = field(default_factory=collections.Counter)
    accusations: Accusations = field(default_factory=Accusations)
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

    def now(self) -> float:
        """Return monotonic local seconds: the loop's clock, virtual in simulations."""
        return asyncio.get_running_loop().time()

    def unix_now(self) -> float:
        """Return Unix seconds by this peer's own clock, virtual in simulations."""
        return self.now() if self.entrance.unix_s is None else self.entrance.unix_s()

    def send(self, peer: PeerId, message: Message) -> bool:
        """Send a message, best effort; return False if the links refused it."""
        return self.links.send(peer, pack(Frame(self.incarnation, message)))

    def tell(self, peers: Iterable[PeerId], message: Message) -> None:
        """Send a message to each of these peers but this one, best effort."""
        frame = pack(Frame(self.incarnation, message))
        for peer in peers:
            if peer != self.me:
                self.links.send(peer, frame)

    async def send_piece(
        self, peer: PeerId, piece: Piece, body: memoryview, timeout_s: float
    ) -> bool:
        """Send a piece of a chunk as bulk; False if the links refused it or had no room in time."""
        frame = pack_parts(Frame(self.incarnation, piece, body))
        return await self.links.send_bulk(peer, frame, timeout_s)

    async def send_bulk(self, peer: PeerId, message: Message, timeout_s: float) -> bool:
        """Send a large message as bulk; False if the links refused it or had no room in time."""
        return await self.links.send_bulk(peer, pack(Frame(self.incarnation, message)), timeout_s)

    def life(self, peer: PeerId) -> Liveness:
        """Return the peer's apparent liveness."""
        return self.links.life(peer)

    def standing(self, peer: PeerId) -> Standing:
        """Return the peer's standing in the run, by which it is served."""
        return self.entrance.standing(peer)

    def hears(self, member: Member) -> bool:
        """True if a member is alive in this life, as far as this peer can tell."""
        if member.peer == self.me:
            return member.incarnation == self.incarnation
        heard = self.lives.get(member.peer, member.incarnation)
        return self.life(member.peer) == "alive" and heard == member.incarnation

    def heard_in(self, view: View) -> set[int]:
        """Return the voters (indices) of a view that are heard in the lives that it lists, and have
        not given it up."""
        return {
            index
            for index in view.electorate.voters
            if self.hears(view.members[index]) and not self.has_given_up(view, view.peers[index])
        }

    def has_given_up(self, view: View, peer: PeerId) -> bool:
        """True if a member of a view takes no part in it any more, though its life goes on."""
        return view in self.given_up if peer == self.me else self.given_up.by(view, peer)

    def gone(self, view: View, peer: PeerId) -> bool:
        """True if a member of a view need not be waited for.

        It is suspect, dead, has given the view up, or is in another life, in which it knows nothing
        of what it began."""
        heard = self.lives.get(peer)
        return (
            self.life(peer) in ("suspect", "dead")
            or (heard is not None and view.index(peer, heard) is None)
            or self.has_given_up(view, peer)
        )

    def left(self, peer: PeerId) -> bool:
        """True if a member has said goodbye: it votes while needed, but contributes nothing."""
        return peer in self.leaving or not self.views.newest.lists(peer)

    def my_index(self, view: View) -> int | None:
        """Our member index in a view; None if we are not in it in this life, or gave it up."""
        return None if view in self.given_up else view.index(self.me, self.incarnation)

    @property
    def is_member(self) -> bool:
        """True if this peer is in the newest view that it knows, in this life."""
        return self.chain is not None and self.my_index(self.chain.newest) is not None

    @property
    def is_voter(self) -> bool:
        """True if this peer is a member of the newest view that it knows, and votes in it."""
        if self.chain is None:
            return False
        me = self.my_index(self.chain.newest)
        return me is not None and self.chain.newest.electorate.votes(me)

    def give_up(self, but: View | None = None) -> None:
        """Never act again in the views known so far, `but` one that has just begun: our promises in
        them are being forgotten, and votes beside forgotten ones would convict us."""
        self.given_up.add(entry.view for entry in self.views.views if entry.view is not but)

    def drop(self, reason: str) -> None:
        """Count a dropped message or record."""
        self.counters[f"dropped: {reason}"] += 1

    def accuse(self, peer: PeerId, what: str) -> None:
        """Count a refused statement that no honest peer makes, and note who made it."""
        self.counters[f"refused: {what}"] += 1
        self.accusations.note(peer, what, self.now())

    def convict(self, said: Contradiction) -> None:
        """Convict a peer of two statements of its own, and tell others."""
        self.entrance.convict(said)
