"""The roll of admitted keys (swarm/protocol/roll.py), the founder's statements
(swarm/statements.py) and the guests (swarm/guests.py) as one peer keeps them up to date.

A member sends each new statement to all members at once. Later ones find out by the views, each of
which names the newest that its proposer knew, and the roll.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from farflock.swarm.capability import BadCapability, Ticket, shown
from farflock.swarm.chunk_store import ROLL
from farflock.swarm.context import PeerContext
from farflock.swarm.guests import MAX_UNADMITTED, Guests
from farflock.swarm.links import PeerId, Standing
from farflock.swarm.messages import MAX_STATEMENTS_SENT, Join, Knock, StatementQuery, Statements
from farflock.swarm.protocol.enrolment import JoinClaim, refusal
from farflock.swarm.protocol.roll import BadRoll, Roll, decode_roll
from farflock.swarm.protocol.views import Member, View
from farflock.swarm.statements import BadStatement, StatementLog

FETCH_TIMEOUT_S = 20.0
FETCH_EVERY_S = 2.0  # between two tries
ASK_EVERY_S = 2.0  # between two questions, each to the next member
ANSWER_EVERY_S = 1.0  # between two answers to one peer
KNOCK_EVERY_S = 5.0  # a place lasts for several repetitions, which may be lost
KNOCKS_AT_ONCE = 16  # peers asked for a place in a second: strangers may have filled the book
MAX_ANSWERED = 256  # peers whose last answer is remembered; strangers may be any number
# Before the newest statement known: two lines may have gone on from different ones of a number.
RIVALS_BACK = MAX_STATEMENTS_SENT // 2


class RollKeeper:
    """Follows the views: computes each next roll, or fetches it from the members that hold it."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._roll: Roll | None = None
        self._fetching = False
        self._tried_s = -1e9

    @property
    def roll(self) -> Roll | None:
        """The newest view's roll; None if it is not known here yet."""
        chain, known = self._context.chain, self._roll
        if chain is None or known is None or chain.newest.roll != known.root:
            return None
        return known

    @property
    def last(self) -> Roll | None:
        """The newest roll that is known here, of whichever view: keys are only added."""
        return self._roll

    def has_admitted(self, peer: PeerId) -> bool:
        """True if a key is a member's, or was admitted once, as far as this peer knows."""
        chain, roll = self._context.chain, self._roll
        is_member = chain is not None and chain.newest.lists(peer)
        return is_member or (roll is not None and peer in roll)

    def begin(self, roll: Roll) -> None:
        """Take a roll that this peer knows."""
        self._take(roll)

    def follow(self) -> None:
        """Go on to the newest view's roll, if it follows from the one known here."""
        roll, missed = self._roll, list[View]()
        if roll is None:
            return
        for entry in reversed(self._context.views.views):
            if entry.view.roll == roll.root:
                break
            missed.append(entry.view)
        else:
            return
        for view in reversed(missed):
            roll = roll.with_keys((view.peers[index], by) for index, by in view.admits)
            roll = roll.with_votes([view.peers[index] for index in view.electorate.voters])
        if missed and self._context.views.newest.roll == roll.root:
            self._take(roll)

    def tick(self, now_s: float) -> None:
        """Fetch the newest view's roll if it is not known here.

        A newcomer does before it is a member: from then on the others may rest on its copy."""
        if self.roll is None and not self._fetching and now_s - self._tried_s >= FETCH_EVERY_S:
            self._tried_s, self._fetching = now_s, True
            self._context.spawn(self._fetch(self._context.views.newest))

    async def _fetch(self, view: View) -> None:
        context = self._context

        def holders() -> Sequence[PeerId]:
            return [peer for peer in view.peers if peer != context.me]

        try:
            asked = (view.roll, view.roll_bytes, holders, ROLL, FETCH_TIMEOUT_S)
            there = await context.chunks.fetch(*asked, final=True)
            raw = context.store.get(view.roll) if there else None
            if raw is not None:
                self._take(decode_roll(raw))
        except BadRoll:
            context.drop("bad roll")
        finally:
            self._fetching = False

    def _take(self, roll: Roll) -> None:
        self._roll = roll
        self._context.store.put(roll.encoded, ROLL, verified=roll.root)
        self._context.store.keep_only((roll.root,), ROLL)


class StatementSync:
    """Keeps the log of statements; calls `changed` after each new one."""

    def __init__(self, context: PeerContext, changed: Callable[[], None]) -> None:
        issuers = context.entrance.issuers
        self.log = StatementLog(context.run, (issuers.founder, *issuers.authorities))
        self._context, self._changed = context, changed
        self._answered: dict[PeerId, float] = {}
        self._looked_up: dict[PeerId, float] = {}  # when a peer was asked for what it named
        self._asked_s, self._turn = -1e9, 0
        self._told = b""  # the view whose members were told what it did not name

    def take(self, blobs: Iterable[bytes], sender: PeerId | None = None) -> None:
        """Take in statements from a peer, or from this machine, and pass new ones on."""
        new, first = False, self.log.orders.newest[0]
        for blob in blobs:
            try:
                new |= self.log.add(blob)
            except BadStatement:
                if sender is not None:
                    self._context.accuse(sender, "a false statement in the founder's name")
                break
        if new:
            self._context.entrance.orders = self.log.orders
            self._changed()
            if self._context.chain is not None:
                members = self._context.views.newest.peers
                self.tell([peer for peer in members if peer != sender], first)

    def receive(self, sender: PeerId, message: StatementQuery | Statements) -> None:
        """Answer a question, or take in statements."""
        if isinstance(message, Statements):
            self.take(message.values, sender)
            return
        now_s = self._context.now()
        if now_s - self._answered.get(sender, -1e9) < ANSWER_EVERY_S:
            return
        if len(self._answered) >= MAX_ANSWERED:
            self._answered.clear()
        self._answered[sender] = now_s
        if values := tuple(islice(self.log.since(message.number), MAX_STATEMENTS_SENT)):
            self._context.send(sender, Statements(values))

    def tick(self, now_s: float) -> None:
        """Ask for what the newest view names, and tell its members what it does not name."""
        view, (number, _) = self._context.views.newest, self.log.orders.newest
        if not self.log.knows(view.statement) and now_s - self._asked_s >= ASK_EVERY_S:
            self._asked_s = now_s
            others = [peer for peer in view.peers if peer != self._context.me]
            if others:
                self._turn += 1
                # From the first on: another statement of a number that is known may be missing.
                first = max(1, min(number, view.statement[0]))
                self._context.send(others[self._turn % len(others)], StatementQuery(first))
        if number > view.statement[0] and self._told != view.hash:
            self._told = view.hash
            self.tell(view.peers, view.statement[0])

    def look_up(self, peer: PeerId, newest: tuple[int, bytes]) -> None:
        """Ask a peer of any line for the statement that it names, unless that is known here."""
        now_s = self._context.now()
        is_recent = now_s - self._looked_up.get(peer, -1e9) < ASK_EVERY_S
        if self.log.knows(newest) or is_recent:
            return
        if len(self._looked_up) >= MAX_ANSWERED:
            self._looked_up.clear()
        self._looked_up[peer] = now_s
        known = min(self.log.orders.newest[0], newest[0])
        self._context.send(peer, StatementQuery(max(1, known - RIVALS_BACK)))

    def tell(self, peers: Collection[PeerId], number: int) -> None:
        """Send peers the statements from this number on, if this peer is a member."""
        values = tuple(islice(self.log.since(max(1, number)), MAX_STATEMENTS_SENT))
        if values and self._context.is_member:
            self._context.tell(peers, Statements(values))


class GuestSync:
    """Gives newcomers places here, and asks for places at others until this peer is admitted.

    `hosts` are the peers that may serve this one."""

    def __init__(
        self, context: PeerContext, rolls: RollKeeper, hosts: Callable[[], Sequence[PeerId]]
    ) -> None:
        self.ticket: Ticket | None = None  # shows what lets this peer in
        self.guests = Guests()
        self._context, self._rolls, self._hosts = context, rolls, hosts
        self._asked: dict[PeerId, float] = {}  # when each host was asked last
        self._asked_s = -1e9
        context.entrance.standing = self.standing

    def standing(self, peer: PeerId) -> Standing:
        """Return a peer's standing: candidates are keys that were admitted once, and guests."""
        context, roll = self._context, self._rolls.last
        if context.chain is None or peer in context.entrance.orders.banned:
            return "stranger"
        if context.chain.newest.lists(peer):
            return "member"
        is_known = roll is not None and peer in roll
        return "candidate" if is_known or self.guests.has(peer, context.now()) else "stranger"

    def receive(self, sender: PeerId, request: Knock) -> None:
        """Give a newcomer a place, or renew it, if it may come in and there is room."""
        try:
            why = self._refusal(sender, request)
        except BadCapability:
            self._context.accuse(sender, "a knock with a false capability")
            return
        if why is not None:
            self._context.drop(f"knock: {why}")

    def _refusal(self, sender: PeerId, request: Knock) -> str | None:
        """Return why a newcomer gets no place; None if it has one now, or needs none."""
        context, roll = self._context, self._rolls.roll
        if roll is None:
            return "the roll is not known here"
        capability = shown(context.run, sender, request)
        as_asked = Join(b"", request.capability, request.proof)
        claim = JoinClaim(Member(sender, 0), capability, as_asked, context.unix_now())
        issuers, orders = context.entrance.issuers, context.entrance.orders
        if (why := refusal(claim, roll, issuers, (), orders)) is not None:
            self.guests.forget(sender)
            return why
        if capability is None or sender in roll:
            return None
        most = min(MAX_UNADMITTED, capability.room(roll.used(capability.id)))
        self.guests.forget_all(roll.__contains__)
        inviter = issuers.inviter(capability)
        if not self.guests.take(sender, capability.id, most, context.now(), inviter):
            return "others have the places"
        return None

    def tick(self, now_s: float) -> None:
        """Ask some hosts for a place if it is time and this peer needs one."""
        context, roll = self._context, self._rolls.last
        is_in = context.is_member or (roll is not None and context.me in roll)
        if self.ticket is None or is_in or now_s - self._asked_s < 1.0:
            return
        self._asked_s = now_s
        asked = {peer: self._asked.get(peer, -1e9) for peer in self._hosts()}
        due = [peer for peer, at_s in asked.items() if now_s - at_s >= KNOCK_EVERY_S]
        if due:
            request = self.ticket.knock(context.run, context.me)
            for peer in sorted(due, key=asked.__getitem__)[:KNOCKS_AT_ONCE]:
                context.send(peer, request)
                asked[peer] = now_s
        self._asked = asked
