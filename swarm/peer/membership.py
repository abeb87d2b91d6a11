"""Membership of the run: joins and deaths become views by agreement of the newest view's members.

It has three parts: known, joining and leaving peers (`admission`), deciding the next view
(`next_view`), and sending views to peers that are missing them (`view_sync`). This module routes
their messages and tells all of them about a new view.
"""

from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    Join,
    Leave,
    PaxosMessage,
    Ping,
    Pong,
    TimeMessage,
    ViewMessage,
    ViewQuery,
    Views,
)
from farflock.swarm.peer.admission import Admission, Introductions, RecordBook
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.next_view import NextView
from farflock.swarm.peer.view_sync import ViewSync
from farflock.swarm.protocol import views
from farflock.swarm.protocol.axes import NO_FLOOR
from farflock.swarm.protocol.views import Certified, Chain, Member
from farflock.swarm.record import unseal
from farflock.swarm.roles import EVERY, stage_of
from farflock.swarm.runtime import RunClock

PING_EVERY_S = 5.0  # local clocks drift by far less than a round in this time
MAX_PINGED = 16  # peers at once; of more, others each time: the median of these will do


class Membership:
    """One peer's part in the agreement on the run's members and on the run time."""

    def __init__(self, context: PeerContext, identity: Identity, view_s: float) -> None:
        self._context = context
        self.clock = RunClock()
        self.book = RecordBook(context)
        self.introductions = Introductions(context, self.book)
        self.records = self.book.records  # the newest of each other known peer
        self.sync = ViewSync(context, self.view_changed)
        self.known = self.sync.known  # set once the views are known
        self.admission = Admission(context, self.book, identity)
        self.next_view = NextView(
            context, identity, view_s, self.admission, self.sync, self.view_changed
        )
        self._pinged_s = -1e9
        self._ping_turn = 0

    @property
    def is_member(self) -> bool:
        """True if this peer is in the newest view that it knows, in this life."""
        return self._context.is_member

    @property
    def is_settled(self) -> bool:
        """True if this peer is a member, all others are alive, and no change is under way."""
        context, candidates = self._context, self.admission.candidates
        if not context.is_member or candidates.joining or candidates.leaving:
            return False
        others = (peer for peer in context.views.newest.peers if peer != context.me)
        return not self.next_view.is_open and all(map(self._is_here, others))

    def _is_here(self, peer: PeerId) -> bool:
        return self._context.life(peer) == "alive"

    @property
    def branch(self) -> tuple[str, int] | None:
        """The (name, first round) of this peer's branch; None on the run's main chain."""
        view = self._context.chain.branch if self._context.chain else None
        return None if view is None else (view.hash.hex()[:8], max(view.begins))

    def found(self) -> None:
        """Start the run: view 0 has this peer as its only member."""
        stage = (
            stage_of(unseal(self.book.mine, self._context.run).role) if self.book.mine else EVERY
        )
        member = Member(self._context.me, self._context.incarnation, stage)
        genesis = Certified(views.genesis(self._context.run, member))
        self.sync.begin(Chain(self._context.run, [genesis]))
        self.sync.keep()
        self.clock.is_origin = True
        self.admission.wants_in = True  # rejoins if the others ever go on without this peer

    def change_chain(self, chain: Chain) -> None:
        """Give up this peer's chain of views for a known one that it is not in, and only watch."""
        self.admission.say_goodbye()
        self._context.give_up()
        self._context.floor = NO_FLOOR
        self.sync.change_chain(chain)
        self.admission.start_over()
        self.view_changed()

    def view_changed(self) -> None:
        """Restart everything that depends on the newest view, which has changed."""
        newest = self._context.views.newest
        heard = self._context.lives.items()
        # A member listed with another life than was last heard has restarted since.
        self._context.lives = {
            peer: life for peer, life in heard if newest.index(peer, life) is not None
        }
        self.next_view.begin_anew()
        admitted = self.admission.settle(newest)
        self.sync.keep()
        for peer in admitted:
            self.sync.send_views(peer, newest.number - 1)
        if self.admission.leaves and newest.lists(self._context.me):
            self.admission.say_goodbye()  # the one before was to another view

    def tick(self) -> None:
        """Ask for admission, propose the next view if it is due and our turn, and ping."""
        now_s = self._context.now()
        if asked := self.admission.to_ask(now_s):
            self.sync.expect(asked)
        for peer in asked:
            self.admission.ask(peer)
            self.sync.ask(peer)
        if self._context.is_member:
            self.next_view.tick(now_s)
        if now_s - self._pinged_s >= PING_EVERY_S:
            self._pinged_s = now_s
            for peer in self._to_ping():
                self._context.send(peer, Ping(now_s))

    def _to_ping(self) -> list[PeerId]:
        """Return the peers to ask for the run time now: of many, the next in turn."""
        others = self.book.others()
        if len(others) <= MAX_PINGED:
            return others
        first = self._ping_turn * MAX_PINGED % len(others)
        self._ping_turn += 1
        return (others + others)[first : first + MAX_PINGED]

    def receive(
        self, sender: PeerId, incarnation: int, message: PaxosMessage | ViewMessage | TimeMessage
    ) -> None:
        """Handle a message about membership or time."""
        if self._context.chain is not None and self._context.chain.newest.lists(sender):
            self._context.lives[sender] = incarnation
        match message:
            case Join(record=blob):
                self.admission.receive_join(sender, blob)
            case Leave():
                if self.admission.receive_leave(sender, incarnation, message):
                    self.sync.keep()
            case ViewQuery(number=number):
                self.sync.send_views(sender, number - 1)
            case Views(views=encoded):
                self.sync.receive(sender, encoded)
            case Ping(sent_s=sent_s):
                self._context.send(sender, Pong(sent_s, self.clock.run_s(self._context.now())))
            case Pong(sent_s=sent_s, run_s=run_s):
                if self.book.is_known(sender):
                    # Only known peers count: strangers must not shift the run time.
                    self.clock.answered(sender, sent_s, self._context.now(), run_s)
            case _:
                self.next_view.receive(sender, incarnation, message)
