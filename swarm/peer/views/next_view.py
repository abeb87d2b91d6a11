"""Deciding the view after the newest one, by agreement of the newest view's members.

A view changes at most every `view_s`. The first live member in the seeded order proposes the next
one; the others step in one after the other if it is silent. Each signs only what it can justify
(swarm/protocol/view_changes.py). Where too many have restarted, they re-found the newest view
(swarm/stable/recollection.py).
"""

import logging
from collections.abc import Callable

from farflock.swarm.context import PeerContext
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Decided, GiveUp, PaxosMessage, Prepare, Propose, Proven
from farflock.swarm.peer.views.admission import Admission
from farflock.swarm.peer.views.refounding import Refounding
from farflock.swarm.peer.views.view_rules import ViewRules, ahead
from farflock.swarm.peer.views.view_sync import ViewSync
from farflock.swarm.protocol import views
from farflock.swarm.protocol.agreement.axes import Floor
from farflock.swarm.protocol.agreement.decide import Decision, Sends
from farflock.swarm.protocol.agreement.turns import TAKEOVER_S
from farflock.swarm.protocol.groups import order
from farflock.swarm.protocol.view_changes import (
    Witness,
    unjustified,
)
from farflock.swarm.protocol.views import (
    Member,
    View,
    decode_view,
)

RESEND_S = 0.5  # half of `TAKEOVER_S`, so that a lost message rarely costs a turn
HELD_S = 3.0  # a member held back from rounds for this long pushes the decision itself
# The wait before each further proposal doubles up to this many times: over slow links, a proposal
# has to get through before the next one outbids it.
MAX_BACKOFF_DOUBLINGS = 3
# Requests for admission are remembered this long to justify views, although they are repeated each
# second: a view that admits their senders may be proposed, and bound to, some ballots later.
ASKED_LASTS_S = 60.0

log = logging.getLogger(__name__)


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
        self.refounding = Refounding(context, admission)
        self._decision: Decision | None = None
        self._changed_s = context.now()
        self._wanted_s: float | None = None  # when a change became due
        self._proposed_s = self._sent_s = self._held_s = -1e9
        self._proposals = 0  # by this peer, for this view
        self._asked: dict[Member, float] = {}  # when it last asked for admission

    def begin_anew(self) -> None:
        """Start the decision on the next view from scratch, because the newest view has changed."""
        self._decision, self._wanted_s = None, None
        self._changed_s, self._proposed_s = self._context.now(), -1e9
        self._proposals = 0

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

    @property
    def takes_part(self) -> bool:
        """True if this peer has a vote on the next view, in this life or from an earlier one."""
        return self._context.is_voter or self.refounding.is_back

    def tick(self, now_s: float) -> None:
        """Propose the next view if it is due and our turn; only for those that take part."""
        if not self._context.is_voter:
            self._admission.ask_oneself()
        members = self._next_members(now_s)
        refounds = self.refounding.is_wanted
        if members is None and refounds:
            members = self._context.views.newest.members
        self._keep_time(now_s)
        if members is None and not self._must_decide(now_s):
            self._wanted_s = None
            self._take_stock()
            return
        self._wanted_s = now_s if self._wanted_s is None else self._wanted_s
        since_s = self._changed_s + (0.0 if self._hurries or refounds else self._view_s)
        if now_s < since_s:
            return
        newest = self._context.views.newest
        if self._decision is not None and now_s - self._sent_s >= RESEND_S:
            self._sent_s = now_s
            self._admission.pass_on(self._decision.proposer.value, newest.peers)
            self._send(self._decision.retry())
        # In turn: simultaneous proposers would only outbid each other.
        rank = self._rank()
        due_s = max(self._wanted_s, since_s) + TAKEOVER_S * rank
        doublings = min(max(self._proposals - 1, 0), MAX_BACKOFF_DOUBLINGS)
        again_s = self._proposed_s + TAKEOVER_S * (2 + rank) * 2**doublings
        if now_s >= max(due_s, again_s) and self.open_decision().may_begin:
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
        self._asked.update(dict.fromkeys(joining.values(), now_s))
        life, me = self._context.links.life, self._context.me
        dead = [peer for peer in newest.peers if life(peer) == "dead" and peer != me]
        if not joining and not leaving and not dead:
            # the common case
            return newest.members if self._admission.gives_votes() else None
        lapsed = self._context.entrance.lapsed
        return views.next_members(newest, dict.fromkeys(dead, "dead"), joining, leaving, lapsed)

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
        """Return the voters in the order in which they may propose the next view."""
        newest = self._context.views.newest
        key, voters = views.view_key(newest.number + 1), newest.electorate.voters
        peers = [newest.peers[index] for index in voters]
        return order(peers, self._context.seed, newest.hash, key)

    def _keep_time(self, now_s: float) -> None:
        """Open the ballots whose turn has come, and forget old requests for admission."""
        if self._asked:
            since_s = now_s - ASKED_LASTS_S
            self._asked = {member: at_s for member, at_s in self._asked.items() if at_s > since_s}
        if (decision := self._decision) is not None:
            peers = self._context.views.newest.peers
            silent = {i for i, peer in enumerate(peers) if self._is_silent(peer)}
            decision.pass_time(now_s, silent)

    def _is_silent(self, peer: PeerId) -> bool:
        return peer != self._context.me and self._context.life(peer) in ("suspect", "dead")

    def witness(self) -> Witness:
        """Return what this peer knows that justifies changes of the newest view."""
        # What a peer asked for itself counts before what was passed on, which may be old.
        asked = self._admission.asked()
        asked |= {member.peer: member for member in self._asked}
        leaving, lapsed = self._admission.candidates.leaving, self._context.entrance.lapsed
        return Witness(self._context.hears, leaving, asked, lapsed)

    def unjustified(self, view: View) -> str | None:
        """Return which change of the newest view nothing known here justifies; None if all are."""
        change = unjustified(self._context.views.newest, view, self.witness())
        return change or self._admission.unjustified(view)

    def enrolled(self, raw: bytes) -> bytes:
        """Return this peer's proposal without those that may not come in, and with its roll."""
        return views.encode(self._admission.enrolled(decode_view(raw)))

    def begins(self, floor: Floor) -> Floor:
        """Return the rounds at which a view should begin that may begin at this floor."""
        return floor if self._hurries else ahead(floor)

    def is_due(self) -> bool:
        """True if the newest view has held for so long that another one may follow without any
        change."""
        return self._context.now() >= self._changed_s + self._view_s

    def _propose(self, members: tuple[Member, ...]) -> None:
        decision, newest = self.open_decision(), self._context.views.newest
        if self.refounding.has_lost:
            return  # the other side knows where the next view begins
        view = self._admission.enrolled(self.refounding.successor(newest, members))
        if not view.electorate.voters:
            return  # nothing could be decided in it
        value = views.encode(view)
        self._admission.pass_on(value, newest.peers)
        self._send(decision.propose(value))

    def open_decision(self) -> Decision:
        """Return the decision on the next view, begun if need be; only for those that take part."""
        if self._decision is None:
            newest = self._context.views.newest
            me = newest.peers.index(self._context.me)
            self._decision = Decision(
                views.view_key(newest.number + 1),
                newest.electorate,
                me,
                tuple(newest.peers.index(peer) for peer in self._ordered()),
                rules=ViewRules(self._context, self._identity, newest, self),
            )
            self.refounding.recollection.restore(self._decision)
            # from the last change on, so that members that were cut off from a ballot can follow it
            self._decision.take_turns(self._changed_s)
            self._keep_time(self._context.now())
        self._decision.convict(self._admission.convictions.proofs)
        return self._decision

    def receive(self, sender: PeerId, incarnation: int, message: PaxosMessage) -> None:
        """Handle a message of the decision."""
        if self._context.chain is None:
            return
        newest, convicted = self._context.chain.newest, self._context.entrance.convicted
        if message.view != newest.hash or message.key != views.view_key(newest.number + 1):
            self._sync.reconcile(sender, message.view)
            return
        member = newest.index(sender, incarnation)
        if member is None and newest.lists(sender) and self.refounding.is_stuck:
            member = newest.peers.index(sender)  # votes on views outlast a life
        if member is None:
            self._context.drop("not from a member")
        elif isinstance(message, Prepare | Propose) and sender in convicted:
            self._context.drop("proposal of a convicted member")
        elif self.takes_part:
            if isinstance(message, Propose | Decided) and message.convictions:
                self._admission.convictions.receive(sender, Proven(message.convictions))
            decision = self.open_decision()
            self._keep_time(self._context.now())
            if isinstance(message, Prepare) and decision.accepted is not None:
                # The proposer may have to repeat it, and the others may not know its newcomers.
                self._admission.pass_on(decision.accepted[1], (sender,))
            self._send(decision.receive(member, message))
        elif isinstance(message, Decided):
            self._sync.receive_decided(sender, message)
        elif newest in self._context.given_up:
            self._context.send(sender, GiveUp(newest.hash))  # do not wait for our vote

    def _take_stock(self) -> None:
        """Block the rounds that an accepted view may take over; move on once a view is decided."""
        decision, chain = self._decision, self._context.views
        if decision is None:
            return
        if decision.decided is None:
            chain.barrier = self._barrier(decision)
            self._hold_back(decision)
            return
        chain.extend(views.certified_by(decision.announcement()))
        self._changed()

    def _barrier(self, decision: Decision) -> View | None:
        """Return the accepted view, unless it is known that it will never be chosen."""
        if decision.accepted is None:
            return None
        value = decision.accepted[1]
        is_over = decision.proposer.is_impossible(value, decision.electorate)
        return None if is_over else views.decode_view(value)

    def _hold_back(self, decision: Decision) -> None:
        """Hold this peer back from further rounds while it waits for a view that it wants too.

        Other views would begin too early if it went on. A promise alone holds nobody back: any
        member could ask for one, again and again."""
        chain, now_s = self._context.views, self._context.now()
        wants = self._next_members(now_s) is not None or chain.barrier is not None
        if not wants or not decision.promised[0]:
            chain.held = None
        elif chain.held is None:
            chain.held, self._held_s = ahead(self._context.touched.floor), now_s

    def _send(self, sends: Sends) -> None:
        """Keep our votes and what is decided, and only then tell others."""
        decision, peers = self._decision, self._context.views.newest.peers
        if decision is None:
            return
        if not self.refounding.recollection.keep_votes(decision) and decision.decided is None:
            return  # as if the messages were lost
        self._take_stock()
        for member, message in sends:
            self._context.send(peers[member], message)
