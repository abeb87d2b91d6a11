"""Known peers, and the requests of peers that join or leave a run.

Outsiders repeat `Join` to all known members until they are in a view; `Leave` is sent once. A
request shows the capability that lets its sender in (swarm/capability.py). Whoever proposes a view
passes on the requests of those that it adds: voters that a newcomer cannot reach check them too.
"""

from collections.abc import Callable, Collection

from farflock.swarm.capability import BadCapability, Ticket
from farflock.swarm.context import PeerContext
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS, Join, Leave
from farflock.swarm.peer.views.admission_sync import RollKeeper, StatementSync
from farflock.swarm.peer.views.conviction_sync import ConvictionSync
from farflock.swarm.protocol import backbone
from farflock.swarm.protocol.enrolment import (
    OUT_OF_TURN,
    Enrolment,
    JoinClaim,
    admittance_of,
    claim_of,
    crowded,
    enrolled,
    full_capabilities,
    gives_votes,
    has_to_wait,
    over_half,
    refusal,
    unjustified,
)
from farflock.swarm.protocol.roll import Roll
from farflock.swarm.protocol.views import Candidates, Member, View, decode_view
from farflock.swarm.protocol.votes import VoteRules
from farflock.swarm.record import BadRecord, Record, newer, unseal

ASKED = 16  # known peers asked at a time, beside the members
JOIN_EVERY_S = 1.0  # a request is repeated, since it may be lost or expire
JOIN_LASTS_S = 4.0  # several repetitions: one lost message does not withdraw a request
CLAIM_LASTS_S = 60.0  # a proposal that names a newcomer may need as long to be decided
MAX_CLAIMANTS = 2 * MAX_MEMBERS  # peers whose requests are kept to check proposals by
MAX_CANDIDATES_EACH = 8  # new keys that ask by the capabilities of one member
MAX_INVITED_EACH = 2 * MAX_CANDIDATES_EACH  # of these: its own candidates, and a proposer's
MAX_CLAIMS_EACH = 4  # of one peer: in several lives, or by several capabilities
CROWD_LASTS_S = 0.5  # who waits for whom is a question of many requests, and asked for each of them
MAX_KNOWN = 1024  # records kept; strangers can make any number of identities


class RecordBook:
    """The newest record of each known peer; new records are passed on to the links."""

    def __init__(self, context: PeerContext) -> None:
        self.records: dict[PeerId, Record] = {}  # of other peers
        self.mine = b""  # this peer's own, sealed, as carried by `Join`
        self._context = context

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
            self.records[record.peer] = record
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


class ClaimBook:
    """The requests to join that a member has heard lately, from whom they came or passed on."""

    def __init__(self) -> None:
        self._kept: dict[PeerId, dict[Join, tuple[JoinClaim, float]]] = {}
        self._inviters: dict[PeerId, PeerId | None] = {}

    def add(self, claim: JoinClaim, until_s: float, inviter: PeerId | None = None) -> list[PeerId]:
        """Keep a request; of too many peers, or too many of one, the oldest go first. Of a new key
        that a member invited, those go first that the same one did. Return whose went."""
        peer = claim.member.peer
        mine = self._kept.pop(peer, {})
        first, _ = mine.pop(claim.request, (claim, until_s))
        mine[claim.request] = first, until_s
        while len(mine) > MAX_CLAIMS_EACH:
            del mine[next(iter(mine))]
        self._kept[peer], self._inviters[peer] = mine, inviter
        mates = [] if inviter is None else [p for p in self._kept if self._inviters[p] == inviter]
        over = mates[: max(0, len(mates) - MAX_INVITED_EACH)]
        over += list(self._kept)[: max(0, len(self._kept) - len(over) - MAX_CLAIMANTS)]
        for peer in over:
            self._forget(peer)
        return over

    def _forget(self, peer: PeerId) -> None:
        del self._kept[peer], self._inviters[peer]

    def heard(self, now_s: float) -> dict[PeerId, list[JoinClaim]]:
        """Return the requests that still hold, the newest of each peer first."""
        for peer, mine in list(self._kept.items()):
            if not (holds := {name: each for name, each in mine.items() if each[1] > now_s}):
                self._forget(peer)
            elif len(holds) < len(mine):
                self._kept[peer] = holds
        return {
            peer: [claim for claim, _ in reversed(mine.values())]
            for peer, mine in self._kept.items()
        }


class Crowd:
    """The capabilities that bring nobody into the next view, and the members that give way to
    others that wait; computed at most every `CROWD_LASTS_S`."""

    def __init__(self, context: PeerContext, enrolment: Callable[[], Enrolment]) -> None:
        self._context, self._enrolment = context, enrolment
        self._of, self._until_s = b"", 0.0  # the view's hash
        self._without_place = frozenset[bytes]()
        self._giving_way = frozenset[Member]()

    def holds_back(self, claim: JoinClaim, roll: Roll) -> bool:
        """True if a newcomer has to wait for others."""
        self._look()
        return has_to_wait(claim.member.peer, claim.shown, roll, self._without_place)

    def gives_way(self, member: Member) -> bool:
        """True if a member of the newest view gives its place to others that wait."""
        self._look()
        return member in self._giving_way

    def _look(self) -> None:
        newest, now_s = self._context.views.newest, self._context.now()
        if self._of == newest.hash and now_s < self._until_s:
            return
        self._of, self._until_s = newest.hash, now_s + CROWD_LASTS_S
        enrolment = self._enrolment()
        self._without_place = crowded(newest, enrolment)
        known = enrolment.roll if self._without_place else None
        self._giving_way = frozenset() if known is None else over_half(newest, known)


class Admission:
    """The peers that want to join or leave, this one included."""

    def __init__(self, context: PeerContext, book: RecordBook) -> None:
        self.candidates = Candidates()
        self.ticket: Ticket | None = None  # lets this peer in, where its key is not known yet
        self.rolls = RollKeeper(context)
        self.claims = ClaimBook()
        self.statements = StatementSync(context, self.obey)
        self.convictions = ConvictionSync(context, self.rolls.has_admitted, self.obey)
        self.wants_in = False
        self.watching = False  # wants the views now, and admission only later
        self.leaves = False  # this peer has said goodbye
        self._context, self._book = context, book
        self.crowd = Crowd(context, self._enrolment)
        self._joined_s = -1e9
        self._turn = 0  # of the known peers that are asked

    def to_ask(self, now_s: float) -> list[PeerId]:
        """Return the peers to ask now for admission or views: none for a member, or if not due."""
        self._context.leaving = self.candidates.leaving
        due = now_s - self._joined_s >= JOIN_EVERY_S
        if not (self.wants_in or self.watching) or self._context.is_member or not due:
            return []
        self._joined_s = now_s
        # A few at a time, and all in turn: strangers may have filled the book.
        known = list(self._book.records)
        some = [known[(self._turn + step) % len(known)] for step in range(min(ASKED, len(known)))]
        self._turn += ASKED
        return sorted({*self._book.others(), *some} - {self._context.me})

    def ask(self, peer: PeerId) -> None:
        """Ask a member for admission, if this peer wants in: members of other lines must not admit
        it too, and wait for it."""
        chain, me = self._context.chain, self._context.me
        # A view given up may still list this peer, which must then leave before it can join.
        listed = chain is not None and chain.newest.index(me, self._context.incarnation) is not None
        if self.wants_in and chain is not None and self._book.is_known(peer):
            self._context.send(peer, Leave() if listed else self._request())

    def ask_oneself(self) -> None:
        """Take in this peer's own request, as the voter that it was in an earlier life."""
        self.receive_join(self._context.me, self._request())

    def _request(self) -> Join:
        if self.ticket is None:
            return Join(self._book.mine)
        return self.ticket.request(self._context.run, self._context.me, self._book.mine)

    @property
    def own_refusal(self) -> str | None:
        """Why the members do not let this peer in, as far as it can tell; None if they may."""
        roll, context = self.rolls.roll, self._context
        asks = self.wants_in or self.watching
        if not asks or roll is None or context.views.newest.lists(context.me):
            return None
        claim = claim_of(self._request(), context.run, context.unix_now())
        return refusal(claim, roll, context.entrance.issuers, (), context.entrance.orders)

    @property
    def own_wait(self) -> str | None:
        """Why this peer waits for a place, as far as it can tell; None if there is one."""
        roll, context, me = self.rolls.roll, self._context, self._context.me
        newest = None if context.chain is None else context.chain.newest
        asks = self.wants_in or self.watching
        if not asks or roll is None or newest is None or newest.lists(me):
            return None
        if len(newest.members) < MAX_MEMBERS:
            return None
        why = f"all {MAX_MEMBERS} places are taken"
        claim = claim_of(self._request(), context.run, context.unix_now())
        if has_to_wait(me, claim.shown, roll, full_capabilities(newest, roll)):
            why += ", half of them or more by the same invite, so those with another one go first"
        return why

    def receive_join(self, sender: PeerId, request: Join) -> None:
        """Take in a request to join, from the joiner itself or passed on by a member.

        Only the joiner's own makes it a candidate here: what a member passes on may be old."""
        chain, context = self._context.chain, self._context
        try:
            claim = claim_of(request, context.run, context.unix_now())
        except BadRecord:
            context.drop("bad record")
            return
        except BadCapability:
            # An honest joiner checked its invite, and an honest member what it passes on.
            context.accuse(sender, "a request to join with a false capability")
            return
        own = claim.member.peer == sender
        if not own and (chain is None or not chain.newest.lists(sender)):
            context.drop("join for somebody else")
            return
        member = claim.member
        if chain is None or chain.newest.index(member.peer, member.incarnation) is not None:
            return
        now_s = context.now()
        if (why := self._refusal(claim, own)) is not None:
            context.drop(f"join: {why}")
            if why == OUT_OF_TURN:  # those for whom it waits may have come later
                self.candidates.joining.pop(member.peer, None)
            return
        self._book.learn(request.record)
        self._keep(claim, now_s)
        if own:
            self.candidates.join(member, now_s + JOIN_LASTS_S)

    def _keep(self, claim: JoinClaim, now_s: float) -> None:
        """Keep a request for as long as a decision may take; those that it takes the place of are
        candidates no more."""
        roll, issuers = self.rolls.roll, self._context.entrance.issuers
        is_new = roll is None or claim.member.peer not in roll
        inviter = issuers.inviter(claim.capability) if is_new else None
        for peer in self.claims.add(claim, now_s + CLAIM_LASTS_S, inviter):
            self.candidates.joining.pop(peer, None)

    def _refusal(self, claim: JoinClaim, own: bool = True) -> str | None:
        """Return why a request counts for nothing; None if it does.

        A joiner's `own` waits behind the candidates of its capability that this peer heard before
        it. Other members heard others first: what they pass on counts by itself."""
        peer, roll = claim.member.peer, self.rolls.roll
        orders = self._context.entrance.orders
        if peer in orders.banned:
            return "it is banned"
        if peer in self.convictions.proofs:
            return "it is convicted of a lie"
        if self._context.views.newest.lists(peer):
            return None
        if roll is None:
            return "the roll is not known here"
        if own and self.crowd.holds_back(claim, roll):
            return OUT_OF_TURN
        if peer in self.candidates.joining or not own:
            return refusal(claim, roll, self._context.entrance.issuers, (), orders)
        waiting, issuers = self._waiting(roll), self._context.entrance.issuers
        # One capability does not fill the table, whatever number of keys shows it.
        mates = sum(each.shown == claim.shown for each in waiting)
        if peer not in roll and mates >= MAX_MEMBERS:
            return "too many by its capability"
        inviter = issuers.inviter(claim.capability)
        mates = sum(issuers.inviter(each.capability) == inviter for each in waiting)
        if peer not in roll and inviter is not None and mates >= MAX_CANDIDATES_EACH:
            return "too many by its issuer"
        before = [
            (each.member.peer, admittance_of(each.capability, issuers))
            for each in waiting
            if each.capability is not None
        ]
        return refusal(claim, roll, issuers, before, orders)

    def _waiting(self, roll: Roll) -> list[JoinClaim]:
        """Return the requests of the candidates that are new keys."""
        heard = self.claims.heard(self._context.now())
        newest = (heard[peer][0] for peer in self.candidates.joining if heard.get(peer))
        return [
            claim
            for claim in newest
            if claim.capability is not None and claim.member.peer not in roll
        ]

    # the next view

    def enrolled(self, view: View) -> View:
        """Return this peer's proposal without those that may not be in it, and with its roll and
        votes."""
        return enrolled(self._context.views.newest, view, self._enrolment())

    def gives_votes(self) -> bool:
        """True if members of the newest view may take up votes now."""
        newest = self._context.views.newest
        return bool(newest.learners) and gives_votes(newest, self._enrolment())

    def _enrolment(self) -> Enrolment:
        entrance, heard = self._context.entrance, self.claims.heard(self._context.now())
        promoted = [peer for peer, votes in entrance.orders.promoted if votes]
        rules = VoteRules(entrance.votes, entrance.counted, promoted)
        return Enrolment(self.rolls.roll, heard, entrance.issuers, entrance.orders, rules)

    def unjustified(self, view: View) -> str | None:
        """Return why this peer must not sign a view for those that it lists; None if it may."""
        if not self.statements.log.knows(view.statement):
            return "it names a statement of the founder that is not known here"
        return unjustified(self._context.views.newest, view, self._enrolment())

    def asked(self) -> dict[PeerId, Member]:
        """Return the peers whose requests are known here, whoever brought them."""
        heard = self.claims.heard(self._context.now())
        return {peer: claims[0].member for peer, claims in heard.items()}

    def obey(self) -> None:
        """Act on what the founder has stated: banned peers are cut off, and the next view drops
        them."""
        chain, banned = self._context.chain, self._context.entrance.orders.banned
        if chain is not None:
            backbone.pin(chain, self._context.entrance.orders.anchor)
        for peer in banned:
            self.candidates.joining.pop(peer, None)
            if peer != self._context.me:
                self._context.entrance.refuse(peer)
            if chain is not None and chain.newest.lists(peer):
                self.candidates.leaving.add(peer)
        for peer in self.convictions.proofs:
            self.candidates.joining.pop(peer, None)
            if chain is not None and chain.newest.lists(peer):
                self.candidates.leaving.add(peer)
            elif peer != self._context.me:
                # Not before it is out: its vote may be needed for the view without it.
                self._context.entrance.refuse(peer)
        if self._context.me in (*banned, *self.convictions.proofs):
            self.wants_in = False

    def pass_on(self, raw: bytes, peers: Collection[PeerId]) -> None:
        """Send peers the requests of those that a proposed view adds, and keep these requests; and
        the statements that it is the first to name. Empty: nothing is proposed."""
        if not raw:
            return
        view = decode_view(raw)
        newest, now_s = self._context.views.newest, self._context.now()
        heard = self.claims.heard(now_s)
        if view.statement[0] > newest.statement[0]:
            self.statements.tell(peers, newest.statement[0])
        for member in view.members:
            if member in newest.members:
                continue
            for claim in (each for each in heard.get(member.peer, ()) if each.member == member):
                self._keep(claim, now_s)
                for peer in peers:
                    if peer != self._context.me:
                        self._context.send(peer, claim.request)

    def receive_leave(self, sender: PeerId, incarnation: int) -> None:
        """Note that a member leaves."""
        chain = self._context.chain
        index = chain.newest.index(sender, incarnation) if chain is not None else None
        if chain is not None and index is not None:
            self.candidates.leave(chain.newest.members[index])

    def leave(self) -> None:
        """Say goodbye to all members."""
        self.wants_in, self.leaves = False, True
        newest = self._context.chain.newest if self._context.chain is not None else None
        if newest is not None and (me := self._context.my_index(newest)) is not None:
            self.candidates.leave(newest.members[me])
        self.say_goodbye()

    def say_goodbye(self) -> None:
        """Tell the members of the newest view that this peer leaves."""
        for peer in self._book.others():
            self._context.send(peer, Leave())

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
        self.rolls.follow()
        self.obey()
        if admitted:
            self.convictions.tell(admitted)
        heard = self.claims.heard(self._context.now())
        for peer in list(joining):
            # The last use of a capability may have gone to another key.
            if all(self._refusal(claim) is not None for claim in heard.get(peer, ())):
                del joining[peer]
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
        return bool(stay) and not view.electorate.is_quorum(stay)
