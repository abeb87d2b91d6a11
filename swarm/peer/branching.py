"""The glue of branches: members without a majority start a branch, and two chains of views become
one. Keys that all come back in new lives make a return (returning.py).

Every peer decides for itself: it asks peers that may be on another chain, verifies that chain's
views, and gives up its own if the other has stayed stronger for a while. It then forgets everything
about its own chain, as in a restart: its open exchanges are lost, it adopts the other chain's state
and asks for admission.
"""

import random
from dataclasses import dataclass

from farflock.swarm.identity import Identity, verify
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    BranchAsk,
    BranchMessage,
    BranchSign,
    Lineage,
    Views,
)
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.membership import Membership
from farflock.swarm.peer.pairing import Pairing
from farflock.swarm.peer.returning import PROBED, Returning
from farflock.swarm.peer.round_log import are_before, are_within
from farflock.swarm.peer.rounds import Rounds
from farflock.swarm.peer.snapshots import Snapshots
from farflock.swarm.protocol import axes, branches, views
from farflock.swarm.protocol.branches import Fork, Petition, Solitude
from farflock.swarm.protocol.quorum import is_quorum
from farflock.swarm.protocol.returns import fits
from farflock.swarm.protocol.views import BadView, Certified, Chain

RESEND_S = 1.0  # petitions may be lost; several repetitions fit into `SIGNATURE_TIMEOUT_S`
# A member that has not signed by then is left out; it may join the branch later.
SIGNATURE_TIMEOUT_S = 10.0
# The next member in seniority takes over if the one before it starts no branch. That is time enough
# for two petitions, since the first may wait in vain for silent members.
STEP_IN_S = 20.0
PROBE_EVERY_S = 5.0  # chains meet after minutes apart, so seconds more do not matter
LINEAGE_EVERY_S = 1.0  # minimum between two answers, or two questions, to one peer
CANDIDATE_EVERY_S = 2.0  # between two questions to the peer on the stronger chain
# The other chain must stay stronger for this long, so that rounds in flight on both sides count.
SETTLE_S = 5.0
ANSWER_S = 10.0  # a chain not heard of for this long is no longer a candidate
MAX_SENT = 1024  # peers whose last message is remembered; strangers may be any number


@dataclass(slots=True)
class _Candidate:
    """A stronger chain to consider: the peer that told of it, and its first view after the fork."""

    peer: PeerId
    theirs: bytes
    since_s: float
    heard_s: float
    asked_s: float


class Branching:
    """One peer's part in starting and ending branches."""

    def __init__(
        self,
        context: PeerContext,
        identity: Identity,
        membership: Membership,
        rounds: Rounds,
        pairing: Pairing,
        snapshots: Snapshots,
        after_s: float,
    ) -> None:
        self._context, self._identity, self._after_s = context, identity, after_s
        self._membership, self._rounds = membership, rounds
        self._pairing, self._snapshots = pairing, snapshots
        self._solitude = Solitude()
        self._petition: Petition | None = None
        self._silent: set[int] = set()  # indices of members that did not sign in time
        self._refused = 0  # the lowest first round that every refusing member could sign
        self._signed: tuple[bytes, PeerId, float] = (b"", "", -1e9)  # (hash, for whom, when)
        self._candidate: _Candidate | None = None
        self._sent: dict[tuple[PeerId, bool], float] = {}  # when, by (peer, with views)
        self._probed_s = -1e9
        self._random = random.Random(f"{context.seed}/{context.me}/probe")
        self._believed_tokens = 0  # of a chain whose state is not adopted yet
        self._returns = False  # asks for admission once it has a state
        # Streams to be reopened with a state of the new chain.
        self.adrift: frozenset[str] = frozenset()
        membership.sync.on_branch, membership.sync.on_other_chain = self._take_branch, self.ask
        self.returning = Returning(context, identity, membership, rounds, self)

    def opened(self, name: str) -> None:
        """Note that a stream was opened with a state of the current chain."""
        was_adrift, self.adrift = bool(self.adrift), self.adrift - {name}
        if not self.adrift:
            self._believed_tokens = 0
            if was_adrift and self._returns:
                self._membership.admission.wants_in = True

    def tick(self) -> None:
        """Track time without a quorum, start a branch when due, and look for other chains."""
        now_s = self._context.now()
        view, me = self._context.views.newest, self._context.my_index(self._context.views.newest)
        self._solitude.look(now_s, me is None or self._can_decide())
        self._context.undecided_s = self._solitude.lasted_s
        if me is not None and self._is_due() and not self.adrift:
            self._found(now_s, me, self._membership.admission.present(view))
        else:
            self._petition, self._silent, self._refused = None, set(), 0
        self.returning.tick()
        self._look_out(now_s)
        self._ask_candidate(now_s)

    @property
    def is_sure(self) -> bool:
        """True if this peer has a state of its chain and considers no other chain."""
        return not self.adrift and self._candidate is None

    def receive(self, sender: PeerId, incarnation: int, message: BranchMessage) -> None:
        """Handle a message about branches."""
        if self._context.chain is None:
            return
        try:
            match message:
                case BranchAsk(view=raw):
                    self._take_ask(sender, incarnation, raw)
                case BranchSign():
                    self._take_signature(sender, message)
                case Lineage():
                    self._take_lineage(sender, incarnation, message)
        except BadView:
            self._context.drop("bad branch")

    def lose_state(self) -> None:
        """Give up this peer's state and all its promises, to adopt a newer state."""
        self._returns = self._membership.admission.wants_in
        self._context.give_up()
        self._snapshots.withdraw()
        self.adrift = frozenset((*self._rounds.abandon(), *self._pairing.abandon()))

    # starting a branch

    def _is_due(self) -> bool:
        """True if the time without a quorum is up.

        Never with stages: half a pipeline is useless, and a stage's rounds could not be taken
        back."""
        return not self._rounds.staged and self._solitude.lasted_s >= self._after_s

    def _can_decide(self) -> bool:
        """True if the newest view and the next round's have quorums and no next view is overdue.

        A view that some members accepted, but that rounds begun by others exclude, blocks both."""
        chain = self._context.views
        if self._membership.next_view.is_overdue:
            return False
        of_next_round = chain.at(self._rounds.floor()) if self._rounds.names else None
        present = self._membership.admission.present
        views_needed = [chain.newest]
        if of_next_round is not None and of_next_round is not chain.newest:
            views_needed.append(of_next_round)
        return all(is_quorum(present(view), len(view.members)) for view in views_needed)

    def _floor(self) -> int:
        """Return the first round with which a branch could begin, as far as this peer knows."""
        return self._rounds.floor() if self._rounds.names else axes.at(self._context.floor, None)

    def _found(self, now_s: float, me: int, present: set[int]) -> None:
        """Collect the signatures of all present members; the most senior one does so first."""
        # In turn: several petitions at once would compete for the same signatures.
        before_me = sum(index < me for index in present - self._silent)
        if self._solitude.lasted_s < self._after_s + STEP_IN_S * before_me:
            return
        parent = self._context.views.newest
        first_round = max(self._floor(), self._refused)
        view = branches.branch_of(parent, (present - self._silent) | {me}, first_round)
        petition = self._petition
        if petition is None or petition.view != view:
            petition = self._petition = Petition(parent, view, now_s)
            petition.proofs[me] = self._sign(views.encode(view))
        if not petition.missing:
            self.complete(petition)
        elif now_s - petition.begun_s >= SIGNATURE_TIMEOUT_S:
            self._silent.update(petition.missing)
        elif now_s - petition.asked_s >= RESEND_S:
            petition.asked_s = now_s
            for index in petition.missing:
                self._context.send(parent.peers[index], BranchAsk(views.encode(view)))

    def complete(self, petition: Petition) -> None:
        certified = petition.certified()
        self.follow(certified)
        for peer in petition.parent.peers:
            if peer != self._context.me:
                self._context.send(peer, Views((views.encode(certified),)))

    def _sign(self, raw: bytes) -> bytes:
        return self._identity.sign(views.branch_domain(self._context.run), raw)

    def _take_ask(self, sender: PeerId, incarnation: int, raw: bytes) -> None:
        """Sign a branch that lists this peer, if the time without a quorum is up here too."""
        parent, view = self._context.views.newest, views.decode_view(raw)
        views.require_branch_shape(parent, view)
        me, they = self._context.my_index(view), view.index(sender, incarnation)
        if me is None or they is None or self._context.my_index(parent) is None:
            self._context.drop("not from a member")
            return
        now_s, (signed, whom, signed_s) = self._context.now(), self._signed
        # A member signs for one petitioner at a time, else two branches could both be complete.
        is_bound = now_s - signed_s < SIGNATURE_TIMEOUT_S
        elsewhere = is_bound and signed != view.hash and whom != sender
        if not self._is_due() or self.adrift or elsewhere:
            return
        if view.first_round < self._floor():
            self._context.send(sender, BranchSign(view.hash, floor=self._floor()))
            return
        self._signed = (view.hash, sender, now_s)
        self._context.send(sender, BranchSign(view.hash, self._sign(raw)))

    def _take_signature(self, sender: PeerId, message: BranchSign) -> None:
        petition = self._petition
        if petition is None or petition.view.hash != message.digest:
            return
        if sender not in petition.view.peers:
            return
        raw, domain = views.encode(petition.view), views.branch_domain(self._context.run)
        if message.floor:
            # The member is further on, so the next petition must begin at its floor or later.
            self._refused = max(self._refused, message.floor)
        elif verify(sender, domain, raw, message.proof):
            petition.proofs[petition.parent.peers.index(sender)] = message.proof
        else:
            self._context.drop("bad branch")

    def _take_branch(self, sender: PeerId, branch: Certified) -> None:
        """Follow a branch or return of our newest view, or compare the chains first.

        They are compared if this peer has rounds that the other chain lacks, or is in that view and
        not yet long enough without a quorum; whoever is in a return's has signed it."""
        newest = self._context.views.newest
        if branch.view.previous == newest.return_mark:
            views.require_return(self._context.run, newest, branch)
            bound = not are_within(self._rounds.streams, branch.view.begins)
        else:
            views.require_branch(self._context.run, newest, branch)
            is_further = self._rounds.floor() > branch.view.first_round
            bound = is_further or (self._context.is_member and not self._is_due())
        if bound:
            self.ask(sender)
        else:
            self.follow(branch)

    def follow(self, branch: Certified) -> None:
        """Continue on this branch or return, and keep everything: it begins where our log is
        complete."""
        if self._context.views.extend(branch):
            self._rounds.rewind(branch.view.begins)
            self._membership.view_changed()

    # two chains meet

    def _tokens(self) -> int:
        """Return the agreed tokens of this peer's chain; while it waits for the others with a state
        of its last life, those of that state: a chain that somebody began anew has fewer."""
        if self.adrift:
            return self._believed_tokens
        own, agreed = self._context.own, [self._rounds.tokens(name) for name in self._rounds.names]
        kept = () if own.is_open else own.states()
        mine = max(agreed) if agreed else own.tokens()
        fitting = (held.tokens for held in kept if fits(self._context.views, held))
        return max(self._believed_tokens, mine, *fitting)

    def _look_out(self, now_s: float) -> None:
        """Ask some peers outside our view for their chain, every `PROBE_EVERY_S`.

        This peer asks only if it is on a branch, or started the run in this life (perhaps for a
        second time, because no peer answered)."""
        chain = self._context.views
        aside = chain.branch is not None or self._context.my_index(chain.views[0].view) is not None
        if now_s - self._probed_s < PROBE_EVERY_S or not aside:
            return
        self._probed_s = now_s
        member = self._membership.is_member
        others = branches.elsewhere(chain, self._membership.records, self._context.me, member)
        for peer in self._random.sample(others, min(len(others), PROBED)):
            self.ask(peer)

    def _ask_candidate(self, now_s: float) -> None:
        candidate = self._candidate
        if candidate is not None and now_s - candidate.heard_s > ANSWER_S:
            self._candidate = None
        elif candidate is not None and now_s - candidate.asked_s >= CANDIDATE_EVERY_S:
            candidate.asked_s = now_s
            self.ask(candidate.peer)

    def ask(self, peer: PeerId) -> None:
        """Tell a peer our chain; a peer on a stronger one answers with its views."""
        self._send_lineage(peer, ())

    def _send_lineage(self, peer: PeerId, missing: tuple[bytes, ...]) -> None:
        chain, now_s, place = self._context.views, self._context.now(), (peer, bool(missing))
        if now_s - self._sent.get(place, -1e9) < LINEAGE_EVERY_S:
            return
        if len(self._sent) >= MAX_SENT:
            self._sent.clear()
        self._sent[place] = now_s
        self._context.send(
            peer, Lineage(self._tokens(), chain.newest.number, branches.trail(chain), missing)
        )

    def _take_lineage(self, sender: PeerId, incarnation: int, message: Lineage) -> None:
        """Compare chains: send a weaker side the views it is missing, or consider leaving ours."""
        chain = self._context.views
        fork = branches.fork_of(chain, message.number, message.trail)
        if fork is None:
            self._context.drop("unrelated line of views")
        elif not fork.mine and not fork.theirs:
            return
        elif not fork.theirs and branches.first_parting(chain, fork) is None:
            self._membership.sync.send_views(sender, fork.number)
        elif not branches.is_stronger(message.tokens, self._tokens(), fork):
            if self._candidate is not None and self._candidate.theirs == fork.theirs:
                self._candidate = None
            self._send_lineage(sender, branches.missing_views(chain, fork))
        elif fork.theirs and not message.views:
            self.ask(sender)
        elif self._context.now() - self._sent.get((sender, False), -1e9) > ANSWER_S:
            # Views cost signature checks, so only those that this peer asked for are read.
            self._context.drop("line of views not asked for")
        else:
            self._consider(sender, incarnation, message, fork)

    def _consider(self, sender: PeerId, incarnation: int, message: Lineage, fork: Fork) -> None:
        now_s = self._context.now()
        other = branches.other_chain(self._context.views, fork, message.views)
        known = (entry.view for entry in other.views if entry.view.number >= fork.number)
        if all(view.index(sender, incarnation) is None for view in known):
            self._context.drop("not from a member")
            return
        candidate = self._candidate
        if candidate is None or candidate.theirs != fork.theirs:
            self._candidate = _Candidate(sender, fork.theirs, now_s, now_s, now_s)
        elif now_s - candidate.since_s < SETTLE_S:
            candidate.heard_s = now_s
        else:
            self._change(other, fork, message.tokens)

    def _change(self, other: Chain, fork: Fork, tokens: int) -> None:
        """Leave our chain for a stronger one.

        Keep everything held if that is a branch of ours that begins where our log is whole."""
        self._candidate = None
        parting = branches.first_parting(other, fork)
        if not fork.mine and (parting is None or are_before(self._rounds.streams, parting)):
            self._context.chain = other
            if parting is not None:
                self._rounds.rewind(parting)
            self._membership.view_changed()
            return
        self._returns = self._returns if self.adrift else self._membership.admission.wants_in
        self._membership.change_chain(other)
        self._snapshots.withdraw()
        self._believed_tokens = tokens
        self.adrift = frozenset((*self._rounds.abandon(), *self._pairing.abandon()))
        self._membership.admission.wants_in = self._returns and not self.adrift
