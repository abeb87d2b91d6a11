"""The glue of membership: joins and deaths become views by agreement of the old view's members.

A view changes at most every `view_s`. The first live member of the seeded order puts the next one forward; the others
step in one after the other if it is silent. Outsiders repeat `Join` to all members they know until they see
themselves in a view; who lacks views is sent them, certified by the signatures of those who decided.
"""

import asyncio
from collections.abc import Callable

from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    MAX_MEMBERS,
    Accepted,
    Decided,
    Join,
    Leave,
    Ping,
    Pong,
    Prepare,
    Promise,
    Propose,
    Rejected,
    ViewQuery,
    Views,
)
from farflock.swarm.peer.context import Port
from farflock.swarm.protocol import views
from farflock.swarm.protocol.axes import NO_FLOOR, Floor
from farflock.swarm.protocol.collective import TAKEOVER_S
from farflock.swarm.protocol.decide import Decision, Sends, is_quorum
from farflock.swarm.protocol.groups import order
from farflock.swarm.protocol.views import BadView, Candidates, Certified, Chain, Member, View
from farflock.swarm.record import BadRecord, Record, newer, unseal
from farflock.swarm.roles import EVERY, stage_of
from farflock.swarm.runtime import RunClock

JOIN_EVERY_S = 1.0
JOIN_LASTS_S = 4.0
RESEND_S = 0.5
PING_EVERY_S = 5.0
HELD_S = 3.0  # who is held back from rounds of stages for so long has the next view decided itself
ROUNDS_AHEAD = 2  # a view begins so many rounds of whole models after the last one begun: few have to wait for it then
MOST_DOUBLED = 3  # who puts a view forward again waits twice as long each time: over long lines one has to get through
MAX_KNOWN = 1024

MembershipMessage = (
    Prepare | Promise | Propose | Accepted | Rejected | Decided | Join | Leave | ViewQuery | Views | Ping | Pong
)
PaxosMessage = Prepare | Promise | Propose | Accepted | Rejected | Decided


class Membership:
    """One peer's part in the agreement on who is in the run."""

    def __init__(self, port: Port, identity: Identity, view_s: float) -> None:
        self._port, self._identity, self._view_s = port, identity, view_s
        self.clock = RunClock()
        self.records: dict[PeerId, Record] = {}
        self._blobs: dict[PeerId, bytes] = {}
        self._candidates = Candidates()
        self._decision: Decision | None = None
        self._changed_s = port.now()
        self._wanted_s: float | None = None  # since when a change is due
        self._proposed_s = self._sent_s = self._joined_s = self._pinged_s = self._held_s = -1e9
        self._proposals = 0  # of mine for the next view
        self._asked: set[PeerId] = set()  # whom I asked for the views: the first ones are believed of nobody else
        self._told: dict[PeerId, tuple[int, int, float]] = {}  # whom I sent which views last, and when
        self.wants_in = False
        self._leaves = False  # I have said goodbye
        self.watching = False  # wants to know the views, and to be let in only later
        self.known = asyncio.Event()  # set once the views are known
        self.on_branch: Callable[[PeerId, Certified], None] = lambda sender, branch: None  # of my newest view
        self.on_other_line: Callable[[PeerId], None] = lambda peer: None  # who names views that do not follow mine

    def found(self) -> None:
        """Begin the run: view 0 is me alone."""
        member = Member(self._port.me, self._port.incarnation, self._my_stage())
        self._port.chain = views.Chain(self._port.run, [Certified(views.genesis(self._port.run, member))])
        self.clock.is_origin = True
        self.wants_in = True  # back, if the others ever go on without me
        self.known.set()

    def learn(self, blob: bytes) -> Record | None:
        """Take in somebody's signed record, from wherever; returns it if it is good and new."""
        try:
            record = unseal(blob, self._port.run)
        except BadRecord:
            self._port.drop("bad record")
            return None
        known = self.records.get(record.peer)
        if record.peer == self._port.me:
            return None  # the directory still has one that I have replaced
        if not newer(record, known) or (known is None and len(self.records) >= MAX_KNOWN):
            return None
        self.records[record.peer], self._blobs[record.peer] = record, blob
        self._port.links.learn(blob)
        return record

    def my_record(self, blob: bytes) -> None:
        """What `Join` carries."""
        self._blobs[self._port.me] = blob

    def _my_stage(self) -> int:
        blob = self._blobs.get(self._port.me)
        return EVERY if not blob else stage_of(unseal(blob, self._port.run).role)

    @property
    def is_member(self) -> bool:
        """Whether I am in the newest view that I know, in this life."""
        return self._port.chain is not None and self._port.my_index(self._port.chain.newest) is not None

    def present(self, view: View) -> set[int]:
        """Members of a view, by index, who are still members, alive in the same life, and have not said goodbye."""
        newest = self._port.views.newest
        return {
            index
            for index, member in enumerate(view.members)
            if newest.index(member.peer, member.incarnation) is not None
            and not self._port.gone(view, member.peer)
            and member.peer not in self._candidates.leaving
            and (self._port.life(member.peer) == "alive" or member.peer == self._port.me)
        }

    @property
    def is_overdue(self) -> bool:
        """Whether the next view, which takes some round trips to decide, is due or has been accepted by me, and has not been
        decided yet."""
        if self._port.views.barrier is not None:
            return True
        return self._wanted_s is not None and self._port.now() >= max(self._wanted_s, self._changed_s + self._view_s)

    @property
    def branch(self) -> tuple[str, int] | None:
        """The name of the branch that I am on, and the round that it began with; None on the run's main line."""
        view = self._port.chain.branch if self._port.chain else None
        return None if view is None else (view.hash.hex()[:8], view.first_round)

    def leave(self) -> None:
        """Say goodbye to all members."""
        self.wants_in, self._leaves = False, True
        newest = self._port.chain.newest if self._port.chain is not None else None
        if newest is not None and (me := self._port.my_index(newest)) is not None:
            self._candidates.leave(newest.members[me])
        self._say_goodbye()

    def is_needed_in(self, view: View) -> bool:
        """Whether the members of a view who stay could decide nothing in it without me."""
        if (me := self._port.my_index(view)) is None:
            return False
        stay = self.present(view) - {me}
        return bool(stay) and not is_quorum(stay, len(view.members))

    def change_line(self, line: Chain) -> None:
        """Give up my line of views for another one, as who is in none of its views yet: I know them, and watch."""
        self._say_goodbye()
        self._port.forsake()
        self._port.chain, self._port.floor = line, NO_FLOOR
        self._candidates, self.watching, self.wants_in = Candidates(), True, False
        self._told.clear()
        self.view_changed()

    def _say_goodbye(self) -> None:
        for peer in self._others():
            self._port.send(peer, Leave())

    def tick(self) -> None:
        """Put the next view forward if it is due and my turn; ask to be let in; keep time."""
        now_s = self._port.now()
        self._port.leaving = self._candidates.leaving
        if (self.wants_in or self.watching) and not self.is_member and now_s - self._joined_s >= JOIN_EVERY_S:
            self._joined_s = now_s
            self._ask_in()
        if self.is_member:
            self._consider(now_s)
        if now_s - self._pinged_s >= PING_EVERY_S:
            self._pinged_s = now_s
            for peer in self._others():
                self._port.send(peer, Ping(now_s))

    def receive(self, sender: PeerId, incarnation: int, message: MembershipMessage) -> None:
        """Take in a message about membership or time."""
        if self._port.chain is not None and sender in self._port.chain.newest.peers:
            self._port.lives[sender] = incarnation
        match message:
            case Join(record=blob):
                self._take_join(sender, blob)
            case Leave():
                self._take_leave(sender, incarnation)
            case ViewQuery(number=number):
                self.send_views(sender, number - 1)
            case Views(views=encoded):
                self._take_views(sender, encoded)
            case Ping(sent_s=sent_s):
                self._port.send(sender, Pong(sent_s, self.clock.run_s(self._port.now())))
            case Pong(sent_s=sent_s, run_s=run_s):
                if sender in self._others():
                    self.clock.answered(sender, sent_s, self._port.now(), run_s)
            case _:
                self._take_paxos(sender, incarnation, message)

    def send_views(self, peer: PeerId, after_number: int) -> None:
        """Send a peer the views that it lacks; the same ones not again at once, however many messages show the lack."""
        chain, now_s = self._port.chain, self._port.now()
        if chain is None or after_number >= chain.newest.number:
            return
        newest, after, told_s = self._told.get(peer, (-1, -1, -1e9))
        if (newest, after) == (chain.newest.number, after_number) and now_s - told_s < RESEND_S:
            return
        known = chain.since(after_number) or chain.since(chain.views[0].view.number - 1)
        if known:
            if len(self._told) >= MAX_KNOWN:
                self._told.clear()
            self._told[peer] = (chain.newest.number, after_number, now_s)
            self._port.send(peer, Views(known))

    def reconcile(self, peer: PeerId, digest: bytes) -> None:
        """A message named a view that does not hold here for its round: one of us two lacks views."""
        chain = self._port.chain
        if chain is None:
            return
        view = chain.by_hash(digest)
        if view is None:
            self._port.send(peer, ViewQuery(chain.newest.number + 1))
            self.on_other_line(peer)
        else:
            self.send_views(peer, view.number)

    # joining

    def _others(self) -> list[PeerId]:
        peers = self._port.chain.newest.peers if self._port.chain else tuple(self.records)[:MAX_MEMBERS]
        return [peer for peer in peers if peer != self._port.me]

    def _ask_in(self) -> None:
        number = self._port.chain.newest.number + 1 if self._port.chain else 0
        self._asked = {*self._others(), *list(self.records)[:16]} - {self._port.me}
        chain = self._port.chain  # a view that I gave up once may still list me
        listed = chain is not None and chain.newest.index(self._port.me, self._port.incarnation) is not None
        for peer in sorted(self._asked):
            if self.wants_in:
                self._port.send(peer, Leave() if listed else Join(self._blobs[self._port.me]))
            self._port.send(peer, ViewQuery(number))

    def _take_join(self, sender: PeerId, blob: bytes) -> None:
        try:
            record = unseal(blob, self._port.run)
        except BadRecord:
            self._port.drop("bad record")
            return
        if record.peer != sender:
            self._port.drop("join for somebody else")
            return
        if self._port.chain is None:
            return
        self.learn(blob)
        member = Member(sender, record.incarnation, stage_of(record.role))
        if self._port.chain.newest.index(sender, record.incarnation) is None:
            self._candidates.join(member, self._port.now() + JOIN_LASTS_S)

    def _take_leave(self, sender: PeerId, incarnation: int) -> None:
        chain = self._port.chain
        index = chain.newest.index(sender, incarnation) if chain is not None else None
        if chain is not None and index is not None:
            self._candidates.leave(chain.newest.members[index])

    def _take_views(self, sender: PeerId, encoded: tuple[bytes, ...]) -> None:
        if self._port.chain is None and sender not in self._asked:
            self._port.drop("views of strangers")
            return
        try:
            for raw in encoded:
                self._take_view(sender, views.decode_certified(raw))
        except BadView:
            self._port.drop("bad view")
            self.on_other_line(sender)

    def _take_view(self, sender: PeerId, certified: Certified) -> None:
        chain = self._port.chain
        if chain is None:
            self._port.chain = Chain(self._port.run, [certified])
            self.known.set()
        elif certified.view.previous == chain.newest.branch_mark:
            self.on_branch(sender, certified)
        elif chain.extend(certified):
            self.view_changed()

    # the next view

    def _consider(self, now_s: float) -> None:
        members = self._next_members(now_s)
        if members is None and not self._overdue(now_s):
            self._wanted_s = None
            return
        self._wanted_s = now_s if self._wanted_s is None else self._wanted_s
        since_s = self._changed_s + (0.0 if self._hurries else self._view_s)
        if now_s < since_s:
            return
        if self._decision is not None and now_s - self._sent_s >= RESEND_S:
            self._sent_s = now_s
            self._send(self._decision.retry())
        rank = self._rank()
        due_s = max(self._wanted_s, since_s) + TAKEOVER_S * rank
        patience_s = TAKEOVER_S * (2 + rank) * 2 ** min(max(self._proposals - 1, 0), MOST_DOUBLED)
        if now_s >= due_s and now_s - self._proposed_s >= patience_s:
            self._proposed_s, self._proposals = now_s, self._proposals + 1
            self._propose(members or self._port.views.newest.members)

    @property
    def _hurries(self) -> bool:
        """Whether the next view must be decided before I am gone: afterwards it could not be."""
        return self._leaves and self.is_needed_in(self._port.views.newest)

    def _overdue(self, now_s: float) -> bool:
        """A view that I have accepted, or am held back for, has to be decided, by me if nobody else does it."""
        chain = self._port.views
        held = chain.held is not None and now_s - self._held_s >= HELD_S
        return (chain.barrier is not None or held) and now_s - self._proposed_s >= TAKEOVER_S

    def _next_members(self, now_s: float) -> tuple[Member, ...] | None:
        newest = self._port.views.newest
        lives = {peer: self._port.life(peer) for peer in newest.peers if peer != self._port.me}
        joining, leaving = self._candidates.live(now_s), self._candidates.leaving
        if not joining and not leaving and "dead" not in lives.values():
            return None  # what nearly every tick finds
        return views.next_members(newest, lives, joining, leaving)

    def _rank(self) -> int:
        """How many live members come before me in this decision's order; where only those who leave are in a hurry, of them."""
        newest = self._port.views.newest
        key = views.view_key(newest.number + 1)
        ordered = order(newest.peers, self._port.seed, newest.hash, key)
        before = ordered[: ordered.index(self._port.me)]
        if self._hurries:
            before = tuple(peer for peer in before if peer in self._candidates.leaving)
        return sum(self._port.life(peer) not in ("suspect", "dead") for peer in before)

    def _propose(self, members: tuple[Member, ...]) -> None:
        decision = self._ensure_decision()
        newest = self._port.views.newest
        view = View(newest.number + 1, newest.hash, newest.first_round, members, newest.stage_rounds)
        self._send(decision.propose(views.encode(view)))
        self._after_paxos()

    def _ensure_decision(self) -> Decision:
        if self._decision is None:
            newest = self._port.views.newest
            me = self._port.my_index(newest)
            assert me is not None, "only members decide views"
            key = views.view_key(newest.number + 1)
            ordered = order(newest.peers, self._port.seed, newest.hash, key)
            domain = views.signature_domain(self._port.run)
            self._decision = Decision(
                key,
                newest.hash,
                me,
                len(newest.members),
                tuple(newest.peers.index(peer) for peer in ordered),
                floor=lambda raw: self._port.views.floor(raw, self._port.floor),
                in_step=False,
                least=lambda: self._port.floor,
                lifted=lambda raw, floor: views.lifted(raw, floor if self._hurries else ahead(floor)),
                sign=lambda text: self._identity.sign(domain, text),
                checks=views.checker(self._port.run, newest),
            )
        return self._decision

    def _take_paxos(self, sender: PeerId, incarnation: int, message: PaxosMessage) -> None:
        if self._port.chain is None:
            return
        newest = self._port.chain.newest
        if message.view != newest.hash or message.key != views.view_key(newest.number + 1):
            self.reconcile(sender, message.view)
            return
        member = newest.index(sender, incarnation)
        if member is None:
            self._port.drop("not from a member")
        elif self.is_member:
            self._send(self._ensure_decision().receive(member, message))
            self._after_paxos()
        elif isinstance(message, Decided):
            self._take_decided(sender, message)

    def _take_decided(self, sender: PeerId, decided: Decided) -> None:
        """A view decided without me."""
        try:
            self._take_view(sender, Certified(views.decode_view(decided.value), decided.ballot, decided.proofs))
        except BadView:
            self._port.drop("bad view")

    def _after_paxos(self) -> None:
        """Hold back from rounds of a view that I accepted; move on when one is decided."""
        decision, chain = self._decision, self._port.views
        if decision is None:
            return
        if decision.decided is None:
            chain.barrier = views.decode_view(decision.accepted[1]) if decision.accepted else None
            if chain.held is None and decision.promised[0] and (chain.newest.staged or self._port.staged):
                chain.held, self._held_s = self._port.floor, self._port.now()
            return
        ballot, proofs = decision.certificate
        chain.extend(Certified(views.decode_view(decision.decided), ballot, proofs))
        self.view_changed()

    def view_changed(self) -> None:
        """The newest view is another one: begin anew with what depends on it."""
        newest = self._port.views.newest
        heard = self._port.lives.items()  # who is in the view with another life has begun that one since
        self._port.lives = {peer: life for peer, life in heard if newest.index(peer, life) is not None}
        self._decision, self._wanted_s, self._changed_s, self._proposals = None, None, self._port.now(), 0
        joined = [peer for peer in newest.peers if peer in self._candidates.joining]
        self._candidates.leaving.intersection_update(newest.peers)
        for peer in joined:
            if newest.index(peer, self._candidates.joining[peer][0].incarnation) is not None:
                del self._candidates.joining[peer]
                self.send_views(peer, newest.number - 1)

    def _send(self, sends: Sends) -> None:
        peers = self._port.views.newest.peers
        for member, message in sends:
            self._port.send(peers[member], message)


def ahead(floor: Floor) -> Floor:
    """Where a view that may begin at `floor` does. A stage's rounds would only be held up by members who are gone."""
    return (floor[0] + ROUNDS_AHEAD - 1, *floor[1:]) if floor else floor
