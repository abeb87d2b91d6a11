"""Membership of the run: joins and deaths become views by agreement of the newest view's members.

It has three parts: known, joining and leaving peers (`admission`), deciding the next view
(`next_view`), and sending views to peers that are missing them (`view_sync`). This module routes
their messages and tells all of them about a new view.
"""

import math
from collections.abc import Callable, Iterable

from farflock.swarm.capability import Ticket
from farflock.swarm.context import PeerContext
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    GiveUp,
    Join,
    Knock,
    Leave,
    PaxosMessage,
    Ping,
    Pong,
    Proven,
    StatementMessage,
    StatementQuery,
    Statements,
    TimeMessage,
    ViewMessage,
    ViewQuery,
    Views,
)
from farflock.swarm.peer.views.admission import Admission, RecordBook
from farflock.swarm.peer.views.admission_sync import GuestSync
from farflock.swarm.peer.views.next_view import NextView
from farflock.swarm.peer.views.view_sync import ViewSync
from farflock.swarm.protocol import views
from farflock.swarm.protocol.agreement.axes import Touched
from farflock.swarm.protocol.roll import Roll, first_roll
from farflock.swarm.protocol.views import Chain, Member, View
from farflock.swarm.record import unseal
from farflock.swarm.roles import EVERY, stage_of
from farflock.swarm.runtime import RunClock
from farflock.swarm.stable.recollection import Recollection
from farflock.swarm.stable.storage import StableStorage

PING_EVERY_S = 5.0  # local clocks drift by far less than a round in this time
# A restarted peer goes on with the views on its disk if nobody has told it any by then.
RECALL_S = 10.0
MAX_PINGED = 16  # peers at once; of more, others each time: the median of these will do


class Membership:
    """One peer's part in the agreement on the run's members and on the run time."""

    def __init__(
        self, context: PeerContext, identity: Identity, founder: PeerId, view_s: float
    ) -> None:
        self._context, self._identity = context, identity
        self.clock = RunClock()
        self.book = RecordBook(context)
        self.records = self.book.records  # the newest of each other known peer
        self.sync = ViewSync(context, founder, self.view_changed)
        self.known = self.sync.known  # set once the views are known
        self.admission = Admission(context, self.book)
        self.guests = GuestSync(context, self.admission.rolls, self._hosts)
        self.next_view = NextView(
            context, identity, view_s, self.admission, self.sync, self.view_changed
        )
        # Called once the newest view has been re-founded.
        self.on_refounded: Callable[[View], None] = lambda view: None
        self._founder = founder
        self._refoundings: int | None = None  # in the chain of views as it was last seen
        self._kept_roll: Roll | None = None  # beside the views that are kept
        self._watching_s: float | None = None  # since when, without any view
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
        return None if view is None else (view.hash.hex()[:8], view.first_round)

    def found(self) -> None:
        """Start the run: view 0 has this peer, the founder, as its only member."""
        stage = (
            stage_of(unseal(self.book.mine, self._context.run).role) if self.book.mine else EVERY
        )
        member = Member(self._context.me, self._context.incarnation, stage)
        self.admission.rolls.begin(first_roll(self._context.me))
        self.sync.found(views.founded(self._context.run, self._identity, member))
        self.clock.is_origin = True
        self.admission.wants_in = True  # rejoins if the others ever go on without this peer

    def go_on_alone(self) -> bool:
        """Take up the views of an earlier life if this key alone could decide the next one; return
        False if it could not: another key may have decided since."""
        memory = self.next_view.refounding.recollection
        chain, roll = memory.chain(), memory.roll()
        if chain is None or roll is None or chain.newest.roll != roll.root:
            return False
        newest = chain.newest
        me = {at for at in newest.electorate.voters if newest.peers[at] == self._context.me}
        if newest.stage_rounds or not newest.electorate.is_quorum(me):
            return False
        self._take_up(chain, roll)
        self.clock.is_origin = self.admission.wants_in = True
        return True

    def _take_up(self, chain: Chain, roll: Roll | None) -> None:
        if roll is not None:
            self.admission.rolls.begin(roll)
        self.sync.begin(chain)
        self.admission.rolls.follow()

    def bring(self, ticket: Ticket | None, records: Iterable[bytes] = ()) -> None:
        """Ask for admission with an invite's ticket; a key that was admitted once needs none.

        The peers of these records are asked for places at once: data may be fetched first."""
        for blob in records:
            self.book.learn(blob)
        self.admission.ticket = self.guests.ticket = ticket

    def remember(self, storage: StableStorage) -> None:
        """Keep views, votes and proofs there, and take up those of this peer's earlier lives."""
        self.next_view.refounding.recollection = Recollection(
            self._context.run, self._founder, storage
        )
        self.admission.convictions.remember(storage)

    def _hosts(self) -> list[PeerId]:
        """Return the peers that may serve this one before it is a member."""
        if self._context.chain is not None:
            return self.book.others()
        return list(self.records)

    def change_chain(self, chain: Chain) -> None:
        """Give up this peer's chain of views for a known one that it is not in, and only watch."""
        self.admission.say_goodbye()
        self._context.give_up()
        self._context.touched = Touched()
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
        self._keep_views()
        for peer in admitted:
            if peer != self._context.me:
                self.sync.send_views(peer, newest.number - 1)
        known, self._refoundings = self._refoundings, newest.refoundings
        if known is not None and newest.refoundings > known:
            self.on_refounded(newest)

    def _keep_views(self) -> None:
        memory, roll = self.next_view.refounding.recollection, self.admission.rolls.last
        memory.keep_views(self._context.views, roll, is_member=self._context.is_member)
        self._kept_roll = roll

    def tick(self) -> None:
        """Ask for admission, propose the next view if it is due and our turn, and ping."""
        now_s = self._context.now()
        if asked := self.admission.to_ask(now_s):
            self.sync.expect(asked)
        for peer in asked:
            self.admission.ask(peer)
            self.sync.ask(peer)
        self.sync.tick()
        if not self.admission.leaves:
            self.guests.tick(now_s)
        if self._context.chain is not None:
            self.admission.rolls.tick(now_s)
            self.admission.statements.tick(now_s)
            self.admission.convictions.tick(now_s)
            self._note_chain()
            self.next_view.refounding.look()
        elif self.admission.watching or self.admission.wants_in:
            self._recall(now_s)
        if self.next_view.takes_part:
            self.next_view.tick(now_s)
        if now_s - self._pinged_s >= PING_EVERY_S:
            self._pinged_s = now_s
            for peer in self._to_ping():
                self._context.send(peer, Ping(now_s))

    def _recall(self, now_s: float) -> None:
        """Go on with the views of an earlier life, if nobody knows any others: all may have
        restarted."""
        self._watching_s = now_s if self._watching_s is None else self._watching_s
        memory = self.next_view.refounding.recollection
        if now_s - self._watching_s >= RECALL_S:
            self._watching_s = math.inf  # once: what is no chain now will be none later
            if (chain := memory.chain()) is not None:
                self._take_up(chain, memory.roll())

    def _note_chain(self) -> None:
        """Begin to watch and to keep a chain of views that this peer has begun to follow, and keep
        its roll, which may come later."""
        if self._refoundings is None or self.admission.rolls.last is not self._kept_roll:
            self._refoundings = self._context.views.newest.refoundings
            self._keep_views()

    def _to_ping(self) -> list[PeerId]:
        """Return the peers to ask for the run time now: of many, the next in turn."""
        others = self.book.others()
        if len(others) <= MAX_PINGED:
            return others
        first = self._ping_turn * MAX_PINGED % len(others)
        self._ping_turn += 1
        return (others + others)[first : first + MAX_PINGED]

    def receive(
        self,
        sender: PeerId,
        incarnation: int,
        message: PaxosMessage | ViewMessage | TimeMessage | StatementMessage,
    ) -> None:
        """Handle a message about membership or time."""
        if self._context.chain is not None and self._context.chain.newest.lists(sender):
            self._context.lives[sender] = incarnation
        match message:
            case Join():
                self.admission.receive_join(sender, message)
            case Knock():
                self.guests.receive(sender, message)
            case StatementQuery() | Statements():
                self.admission.statements.receive(sender, message)
            case Proven():
                self.admission.convictions.receive(sender, message)
            case Leave():
                self.admission.receive_leave(sender, incarnation)
            case GiveUp(view=digest):
                self.sync.receive_give_up(sender, incarnation, digest)
            case ViewQuery(number=number, links=links):
                self.sync.send_views(sender, number - 1, links)
                if links:  # a newcomer, and the founder may have anchored one of several lines
                    self.admission.statements.receive(sender, StatementQuery(1))
            case Views():
                self.sync.receive(sender, message)
            case Ping(sent_s=sent_s):
                self._context.send(sender, Pong(sent_s, self.clock.run_s(self._context.now())))
            case Pong(sent_s=sent_s, run_s=run_s):
                if self.book.is_known(sender):
                    # Only known peers count: strangers must not shift the run time.
                    self.clock.answered(sender, sent_s, self._context.now(), run_s)
            case _:
                self.next_view.receive(sender, incarnation, message)
