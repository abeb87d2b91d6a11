"""Deciding the view after the newest one, by agreement of the newest view's members.

A view changes at most every `view_s`. The first live member in the seeded order proposes the next
one; the others step in one after the other if it is silent.
"""

from collections.abc import Callable, Collection

from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Decided, PaxosMessage
from farflock.swarm.peer.admission import Admission
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.view_sync import ViewSync
from farflock.swarm.protocol import views
from farflock.swarm.protocol.axes import Floor
from farflock.swarm.protocol.decide import TAKEOVER_S, AcceptanceRules, Decision, Sends
from farflock.swarm.protocol.groups import order
from farflock.swarm.protocol.views import Certified, Member, View

RESEND_S = 0.5  # half of `TAKEOVER_S`, so that a lost message rarely costs a turn
HELD_S = 3.0  # a member held back from rounds for this long pushes the decision itself
# Whole-model rounds from the last one begun to the new view's first: few of them must then wait for
# the decision.
ROUNDS_AHEAD = 2
# The wait before each further proposal doubles up to this many times: over slow links, a proposal
# has to get through before the next one outbids it.
MAX_BACKOFF_DOUBLINGS = 3


class NextView:
    """One member's part in deciding the next view; calls `changed` after it appends a view."""

    def __init__(
        self,
        context: PeerContext,
        identity: Identity,
        view_s: float,
        admission: Admission,
        sync: ViewSync,
        changed: Callable[[], None],
    ) -> None:
        self._context, self._identity, self._view_s = context, identity, view_s
        self._admission, self._sync, self._changed = admission, sync, changed
        self._decision: Decision | None = None
        self._changed_s = context.now()
        self._wanted_s: float | None = None  # when a change became due
        self._proposed_s = self._sent_s = self._held_s = -1e9
        self._proposals = 0  # by this peer, for this view

    def begin_anew(self) -> None:
        """Start the decision on the next view from scratch, because the newest view has changed."""
        self._decision, self._wanted_s = None, None
        self._changed_s, self._proposals = self._context.now(), 0

    @property
    def is_open(self) -> bool:
        """True if a change of members is wanted, or its decision has begun."""
        chain = self._context.views
        is_begun = self._wanted_s is not None or self._decision is not None
        return is_begun or chain.barrier is not None or chain.held is not None

    @property
    def is_overdue(self) -> bool:
        """True if the next view is due, or accepted here, and not decided yet."""
        if self._context.views.barrier is not None:
            return True
        due_s = self._changed_s + self._view_s
        return self._wanted_s is not None and self._context.now() >= max(self._wanted_s, due_s)

    def tick(self, now_s: float) -> None:
        """Propose the next view if it is due and our turn; only for members."""
        members = self._next_members(now_s)
        if members is None and not self._must_decide(now_s):
            self._wanted_s = None
            return
        self._wanted_s = now_s if self._wanted_s is None else self._wanted_s
        since_s = self._changed_s + (0.0 if self._hurries else self._view_s)
        if now_s < since_s:
            return
        if self._decision is not None and now_s - self._sent_s >= RESEND_S:
            self._sent_s = now_s
            self._send(self._decision.retry())
        # In turn: simultaneous proposers would only outbid each other.
        rank = self._rank()
        due_s = max(self._wanted_s, since_s) + TAKEOVER_S * rank
        doublings = min(max(self._proposals - 1, 0), MAX_BACKOFF_DOUBLINGS)
        if now_s >= due_s and now_s - self._proposed_s >= TAKEOVER_S * (2 + rank) * 2**doublings:
            self._proposed_s, self._proposals = now_s, self._proposals + 1
            self._propose(members or self._context.views.newest.members)

    @property
    def _hurries(self) -> bool:
        """True if this peer is leaving, and the next view could not be decided without it."""
        leaves = self._admission.leaves
        return leaves and self._admission.is_needed_in(self._context.views.newest)

    def _must_decide(self, now_s: float) -> bool:
        """True if a view that this peer accepted, or is held back for, was not decided in time."""
        chain = self._context.views
        held = chain.held is not None and now_s - self._held_s >= HELD_S
        return (chain.barrier is not None or held) and now_s - self._proposed_s >= TAKEOVER_S

    def _next_members(self, now_s: float) -> tuple[Member, ...] | None:
        newest, candidates = self._context.views.newest, self._admission.candidates
        joining, leaving = candidates.live(now_s), candidates.leaving
        life, me = self._context.links.life, self._context.me
        dead = [peer for peer in newest.peers if life(peer) == "dead" and peer != me]
        if not joining and not leaving and not dead:
            return None  # the common case
        return views.next_members(newest, dict.fromkeys(dead, "dead"), joining, leaving)

    def _rank(self) -> int:
        """Return the number of live members before this peer in this decision's order.

        In a hurry, only leaving members count: no others can be in a hurry."""
        before = self._ordered()
        before = before[: before.index(self._context.me)]
        if self._hurries:
            leaving = self._admission.candidates.leaving
            before = tuple(peer for peer in before if peer in leaving)
        return sum(self._context.life(peer) not in ("suspect", "dead") for peer in before)

    def _ordered(self) -> tuple[PeerId, ...]:
        """Return the members in the order in which they may propose the next view."""
        newest = self._context.views.newest
        key = views.view_key(newest.number + 1)
        return order(newest.peers, self._context.seed, newest.hash, key)

    def _propose(self, members: tuple[Member, ...]) -> None:
        decision, newest = self._ensure_decision(), self._context.views.newest
        rounds = newest.first_round, newest.stage_rounds
        view = View(newest.number + 1, newest.hash, rounds[0], members, rounds[1])
        self._send(decision.propose(views.encode(view)))
        self._take_stock()

    def _ensure_decision(self) -> Decision:
        if self._decision is None:
            newest = self._context.views.newest
            me = self._context.my_index(newest)
            assert me is not None, "only members decide views"
            self._decision = Decision(
                views.view_key(newest.number + 1),
                newest.hash,
                me,
                tuple(newest.peers.index(peer) for peer in self._ordered()),
                rules=ViewRules(
                    self._context,
                    self._identity,
                    newest,
                    begins=lambda floor: floor if self._hurries else ahead(floor),
                    leaving=lambda: self._admission.candidates.leaving,
                ),
            )
        return self._decision

    def receive(self, sender: PeerId, incarnation: int, message: PaxosMessage) -> None:
        """Handle a message of the decision."""
        if self._context.chain is None:
            return
        newest = self._context.chain.newest
        if message.view != newest.hash or message.key != views.view_key(newest.number + 1):
            self._sync.reconcile(sender, message.view)
            return
        member = newest.index(sender, incarnation)
        if member is None:
            self._context.drop("not from a member")
        elif self._context.is_member:
            self._send(self._ensure_decision().receive(member, message))
            self._take_stock()
        elif isinstance(message, Decided):
            self._sync.receive_decided(sender, message)

    def _take_stock(self) -> None:
        """Block the rounds that an accepted view may take over; move on once a view is decided."""
        decision, chain = self._decision, self._context.views
        if decision is None:
            return
        if decision.decided is None:
            chain.barrier = views.decode_view(decision.accepted[1]) if decision.accepted else None
            if chain.held is None and decision.promised[0]:
                chain.held, self._held_s = ahead(self._context.floor), self._context.now()
            return
        ballot, proofs = decision.certificate
        chain.extend(Certified(views.decode_view(decision.decided), ballot, proofs))
        self._changed()

    def _send(self, sends: Sends) -> None:
        peers = self._context.views.newest.peers
        for member, message in sends:
            self._context.send(peers[member], message)


def ahead(floor: Floor) -> Floor:
    """Return the rounds at which a view begins that may begin at `floor`.

    A stage's rounds begin at once: waiting would only delay them, for members that are gone."""
    return (floor[0] + ROUNDS_AHEAD - 1, *floor[1:]) if floor else floor


class ViewRules(AcceptanceRules):
    """A view must begin after every round that this member took part in under the previous view.

    A proposer keeps every member that promised, unless `leaving` returns it: a member that answers
    is alive, whatever its links looked like (docs/decisions/022). `begins` maps a floor to the
    rounds at which the view should begin. Members sign the next view, to convince outsiders."""

    # Members are at different rounds: each reports its floor before a proposal.
    in_step = False

    def __init__(
        self,
        context: PeerContext,
        identity: Identity,
        view: View,
        *,
        begins: Callable[[Floor], Floor],
        leaving: Callable[[], Collection[PeerId]],
    ) -> None:
        self._context, self._identity, self._view = context, identity, view
        self._begins, self._leaving = begins, leaving
        self._checker = views.checker(context.run, view)

    def floor(self, value: bytes) -> Floor:
        """Return an empty floor for an acceptable view, else the lowest acceptable one."""
        return self._context.views.floor(value, self._context.floor)

    def min_floor(self) -> Floor:
        """Return the first rounds that this peer has no part in."""
        return self._context.floor

    def revised(self, value: bytes, floor: Floor, promised: Collection[int]) -> bytes:
        """Return the view, beginning late enough for all members that promised, and with them."""
        leaving = self._leaving()
        present = {
            member
            for index in promised
            if (member := self._view.members[index]).peer not in leaving
        }
        return views.revised(value, self._view, self._begins(floor), present)

    def sign(self, text: bytes) -> bytes:
        """Return this peer's signature."""
        return self._identity.sign(views.signature_domain(self._context.run), text)

    def checks(self, member: int, text: bytes, proof: bytes) -> bool:
        """True if the member of this index in the view signed the text."""
        return self._checker(member, text, proof)
