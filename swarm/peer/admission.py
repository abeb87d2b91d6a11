"""Known peers, the questions of newcomers, and the requests of peers that join or leave a run.

Outsiders repeat `Join` to all known members until they are in a view; `Leave` is sent once for each
view. A view that has as many members as it may have says "full": its members have signed it, so
nobody can make that up. Outsiders then only ask a few members, ever more rarely, for a view with
room.
"""

import asyncio
import random
from collections.abc import Callable

from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    MAX_MEMBERS,
    IntroductionMessage,
    Join,
    Leave,
    Terms,
    TermsQuery,
)
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.protocol import views
from farflock.swarm.protocol.quorum import is_quorum
from farflock.swarm.protocol.views import Candidates, Member, View
from farflock.swarm.quota import Quota, units
from farflock.swarm.record import BadRecord, Record, newer, unseal
from farflock.swarm.roles import stage_of

JOIN_EVERY_S = 1.0  # a request is repeated, since it may be lost or expire
JOIN_LASTS_S = 4.0  # several repetitions: one lost message does not withdraw a request
ROOM_EVERY_S = 0.1  # between looks at whether there is room
FULL_EVERY_S = 30.0  # the longest pause between two questions for room
FULL_ASKED = 3  # members, other ones each time; one of them may be about to leave
MAX_KNOWN = 1024  # records kept; strangers can make any number of identities


class RecordBook:
    """The newest record of each known peer; new records are passed on to the links."""

    def __init__(self, context: PeerContext) -> None:
        self.records: dict[PeerId, Record] = {}  # of other peers
        self.sealed: dict[PeerId, bytes] = {}  # the same, as their owners signed them
        self.mine = b""  # this peer's own, sealed, as carried by `Join`
        self.make: Callable[[], bytes] = lambda: b""  # makes this peer's own, as it is now
        self._context = context

    def renew(self) -> None:
        """Make this peer's own record again."""
        self.mine = self.make()

    def learn(self, blob: bytes) -> None:
        """Take in a signed record from any source, if it is valid and new."""
        try:
            record = unseal(blob, self._context.run)
        except BadRecord:
            self._context.drop("bad record")
            return
        known = self.records.get(record.peer)
        has_room = known is not None or len(self.records) < MAX_KNOWN
        # The directory may still have an old record of this peer itself.
        if record.peer != self._context.me and newer(record, known) and has_room:
            self.records[record.peer], self.sealed[record.peer] = record, bytes(blob)
            self._context.links.learn(blob)

    def others(self) -> list[PeerId]:
        """Return the other members of the newest view, or known peers if no view is known yet."""
        chain = self._context.chain
        # No view has more members than `MAX_MEMBERS`, and the book may have filled with strangers.
        peers = chain.newest.peers if chain else tuple(self.records)[:MAX_MEMBERS]
        return [peer for peer in peers if peer != self._context.me]

    def is_known(self, peer: PeerId) -> bool:
        """True if `others` names a peer."""
        chain = self._context.chain
        if chain is None:
            return peer in self.others()
        return peer != self._context.me and chain.newest.lists(peer)


class Introductions:
    """Tells newcomers, which have only an invite, the run's head, once that is set, and the records
    of members. Strangers ask, so each has a quota, and it is answered in one frame."""

    def __init__(self, context: PeerContext, book: RecordBook) -> None:
        self.head = b""  # signed by the founder; empty: this peer introduces nobody
        self._context, self._book = context, book
        self._quota = Quota()

    def receive(self, sender: PeerId, incarnation: int, message: IntroductionMessage) -> None:
        """Answer a question; a peer that runs asks none, so an answer is dropped."""
        if not isinstance(message, TermsQuery):
            self._context.drop("terms that nobody asked for")
            return
        if not self.head:
            return
        others = self._others(sender)
        cost = units(1, sum(map(len, others)))
        if not self._quota.take(sender.encode(), cost, self._context.now()):
            self._context.drop("question about the terms")
            return
        # signed for this answer, so only once that is paid for
        self._context.send(sender, Terms(self.head, (self._book.make(), *others)))

    def _others(self, sender: PeerId) -> list[bytes]:
        """Return the sealed records of other members that are not known to be dead."""
        context, sealed = self._context, self._book.sealed
        members = [peer for peer in self._book.others() if peer != sender and peer in sealed]
        here = [peer for peer in members if context.life(peer) != "dead"]
        return [sealed[peer] for peer in here[: MAX_MEMBERS - 1]]


class Admission:
    """The peers that want to join or leave, this one included."""

    def __init__(self, context: PeerContext, book: RecordBook, identity: Identity) -> None:
        self.candidates = Candidates()
        self.wants_in = False
        self.watching = False  # wants the views now, and admission only later
        self.leaves = False  # this peer has said goodbye
        self._context, self._book, self._identity = context, book, identity
        self.on_full: Callable[[], None] = lambda: None
        self._joined_s, self._pause_s = -1e9, JOIN_EVERY_S
        self._random = random.Random(f"{context.seed}/{context.me}/room")

    @property
    def is_full(self) -> bool:
        """True if the newest view has no room for this peer."""
        chain = self._context.chain
        return chain is not None and chain.newest.is_full_for(self._context.me)

    async def find_room(self) -> None:
        """Return once the run has room for this peer. `on_full` is called if it has none, once, and
        may raise; a state that is downloaded before there is room would be too old."""
        if self.is_full:
            self.on_full()
        while self.is_full:  # noqa: ASYNC110 - it may change with each view
            await asyncio.sleep(ROOM_EVERY_S)

    def to_ask(self, now_s: float) -> list[PeerId]:
        """Return the peers to ask now for admission or views: none for a member, or if not due."""
        self._context.leaving = self.candidates.leaving
        if not self.is_full:
            self._pause_s = JOIN_EVERY_S
        due = now_s - self._joined_s >= self._pause_s
        if not (self.wants_in or self.watching) or self._context.is_member or not due:
            return []
        self._joined_s = now_s
        # A few records are enough; strangers may have filled the book.
        known = sorted({*self._book.others(), *list(self._book.records)[:16]} - {self._context.me})
        if not self.is_full:
            return known
        self._pause_s = min(2 * self._pause_s, FULL_EVERY_S)
        return self._random.sample(known, min(len(known), FULL_ASKED))

    def ask(self, peer: PeerId) -> None:
        """Ask a peer for admission, if this peer wants in and there is room."""
        chain, me = self._context.chain, self._context.me
        # A view given up may still list this peer, which must then leave before it can join.
        listed = chain is not None and chain.newest.index(me, self._context.incarnation) is not None
        if self.wants_in and not self.is_full:
            self._context.send(peer, self._goodbye() if listed else Join(self._book.mine))

    def receive_join(self, sender: PeerId, blob: bytes) -> None:
        """Note that a peer wants to join, if it sent its own record."""
        try:
            record = unseal(blob, self._context.run)
        except BadRecord:
            self._context.drop("bad record")
            return
        if record.peer != sender:
            self._context.drop("join for somebody else")
            return
        if self._context.chain is None:
            return
        self._book.learn(blob)
        if self._context.chain.newest.index(sender, record.incarnation) is None:
            member = Member(sender, record.incarnation, stage_of(record.role))
            self.candidates.join(member, self._context.now() + JOIN_LASTS_S)

    def receive_leave(self, sender: PeerId, incarnation: int, message: Leave) -> bool:
        """Note that a member leaves; return whether its goodbye to the newest view is new."""
        chain = self._context.chain
        if chain is None or not chain.newest.lists(sender):
            return False
        newest = chain.newest
        is_new = message.view == newest.hash and sender not in chain.goodbyes
        if is_new:
            if not views.is_goodbye(chain.run, newest, sender, message.proof):
                self._context.drop("bad goodbye")
                return False
            chain.goodbyes[sender] = message.proof
        index = newest.index(sender, incarnation)
        if index is not None:
            self.candidates.leave(newest.members[index])
        return is_new

    def leave(self) -> None:
        """Say goodbye to all members."""
        self.wants_in, self.leaves = False, True
        newest = self._context.chain.newest if self._context.chain is not None else None
        if newest is not None and (me := self._context.my_index(newest)) is not None:
            self.candidates.leave(newest.members[me])
        self.say_goodbye()

    def say_goodbye(self) -> None:
        """Tell the members of the newest view that this peer leaves."""
        goodbye = self._goodbye()
        for peer in self._book.others():
            self._context.send(peer, goodbye)

    def _goodbye(self) -> Leave:
        """Return this peer's goodbye to the newest view, signed if that lists its key."""
        chain, me = self._context.chain, self._context.me
        if chain is None or not chain.newest.lists(me):
            return Leave()
        text, domain = views.goodbye_text(chain.newest, me), views.goodbye_domain(chain.run)
        return Leave(chain.newest.hash, self._identity.sign(domain, text))

    def start_over(self) -> None:
        """Forget all requests after a change of chain, and only watch."""
        self.candidates, self.watching, self.wants_in = Candidates(), True, False

    def settle(self, newest: View) -> list[PeerId]:
        """Forget the requests that a new view fulfils; return the peers that it admitted."""
        joining = self.candidates.joining
        listed = [peer for peer in newest.peers if peer in joining]
        admitted = [
            peer for peer in listed if newest.index(peer, joining[peer][0].incarnation) is not None
        ]
        for peer in admitted:
            del joining[peer]
        self.candidates.leaving.intersection_update(newest.peers)
        return admitted

    def present(self, view: View) -> set[int]:
        """Return the indices of a view's members that can take part in it.

        They are still members, alive in the same life, and have not said goodbye."""
        newest = self._context.views.newest
        return {
            index
            for index, member in enumerate(view.members)
            if newest.index(member.peer, member.incarnation) is not None
            and not self._context.gone(view, member.peer)
            and member.peer not in self.candidates.leaving
            and (self._context.life(member.peer) == "alive" or member.peer == self._context.me)
        }

    def is_needed_in(self, view: View) -> bool:
        """True if the members of a view that stay cannot decide in it without this peer."""
        if (me := self._context.my_index(view)) is None:
            return False
        stay = self.present(view) - {me}
        return bool(stay) and not is_quorum(stay, len(view.members))
