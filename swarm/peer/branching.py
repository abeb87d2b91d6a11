"""The glue of branches: members without a majority start one, and two chains of views become one.

Every peer decides for itself: it asks peers that may be on another chain, verifies that chain's
views, and gives up its own if the other has stayed stronger for a while. It then forgets everything
about its own chain, as in a restart: its open exchanges are lost, it adopts the other chain's state
and asks for admission.
"""

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from farflock.swarm.context import PeerContext
from farflock.swarm.identity import Identity, verify
from farflock.swarm.links import PeerId
from farflock.swarm.messages import BranchAsk, BranchMessage, BranchSign, Lineage, Views
from farflock.swarm.peer.rounds.pairing import Pairing
from farflock.swarm.peer.rounds.rounds import Rounds
from farflock.swarm.peer.snapshots import Snapshots
from farflock.swarm.peer.views.membership import Membership
from farflock.swarm.peer.views.refounding import LEFT_S
from farflock.swarm.protocol import backbone, branches, views
from farflock.swarm.protocol.agreement import axes
from farflock.swarm.protocol.branches import Fork, Petition, Solitude
from farflock.swarm.protocol.views import BadView, Certified, Chain, View

RESEND_S = 1.0  # petitions may be lost; several repetitions fit into `SIGNATURE_TIMEOUT_S`
# A member that has not signed by then is left out; it may join the branch later.
SIGNATURE_TIMEOUT_S = 10.0
# The next member in seniority takes over if the one before it starts no branch. That is time enough
# for two petitions, since the first may wait in vain for silent members.
STEP_IN_S = 20.0
PROBE_EVERY_S = 5.0  # chains meet after minutes apart, so seconds more do not matter
PROBED = 16  # peers asked at once; each may answer with many views
LINEAGE_EVERY_S = 1.0  # minimum between two answers, or two questions, to one peer
CANDIDATE_EVERY_S = 2.0  # between two questions to the peer on the stronger chain
# The other chain must stay stronger for this long, so that rounds in flight on both sides count.
SETTLE_S = 5.0
ANSWER_S = 10.0  # a chain not heard of for this long is no longer a candidate
MAX_SENT = 1024  # peers whose last message is remembered; strangers may be any number
BEYOND = "more tokens than its line can have trained"
# Where a chain leaves ours that goes on beyond all that we know: nothing of ours is kept.
NOWHERE = Fork(-1, bytes(branches.PREFIX_BYTES), bytes(branches.PREFIX_BYTES))

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Candidate:
    """A stronger chain to consider: the peer that told of it, and its first view after the fork."""

    peer: PeerId
    theirs: bytes
    since_s: float
    heard_s: float
    asked_s: float


def _max_tokens(mine: int, rounds: Rounds, pairing: Pairing, run_s: float) -> float:
    """Return the most tokens that a line of a run of this age may have; no limit is known before
    any stream is open, which says what a member may claim."""
    streams = (*(state.stream for state in rounds.streams.values()), *pairing.streams.values())
    each = max((stream.terms.entitlement.max_tokens(1) for stream in streams), default=0)
    return branches.max_tokens(mine, each, run_s) if each else math.inf


def _proof(identity: Identity, run: str, raw: bytes) -> bytes:
    """Return a member's signature under a branch."""
    return identity.sign(views.branch_domain(run), raw)


def _has_anchor(context: PeerContext, other: Chain, fork: Fork, said: Lineage) -> bool | None:
    """Return whether another chain has the founder's anchor after it parted from ours; None if its
    trail says so, and the views that came do not reach that far."""
    anchor = context.entrance.orders.anchor
    if anchor is None or not branches.is_anchored(anchor, fork, said.number, said.trail):
        return False
    if backbone.holds(other, anchor):
        return True
    return None if other.newest.number < anchor[0] else False


def _is_beside(context: PeerContext) -> bool:
    """True if this peer's chain has another view in place of the one that the founder anchored."""
    chain, anchor = context.views, context.entrance.orders.anchor
    is_short = anchor is None or chain.newest.number < anchor[0]
    return anchor is not None and not is_short and backbone.lacks(chain, anchor)


class Drift:
    """The streams of a peer that has lost its state, until they are opened with another one."""

    def __init__(
        self, membership: Membership, rounds: Rounds, pairing: Pairing, snapshots: Snapshots
    ) -> None:
        self._membership, self._rounds = membership, rounds
        self._pairing, self._snapshots = pairing, snapshots
        self.streams: frozenset[str] = frozenset()
        self.believed_tokens = 0  # of a chain whose state is not adopted yet
        self.returns = False  # asks for admission once it has a state
        self.sources: frozenset[PeerId] = frozenset()  # of the next state; empty: all members

    def begin(
        self, tokens: int, *, returns: bool = False, sources: frozenset[PeerId] = frozenset()
    ) -> None:
        """Lose the state here, and wait for one of a chain with at least these agreed tokens, by
        these members: others may have lost theirs too, and not know it yet."""
        self._snapshots.withdraw()
        self.believed_tokens, self.returns, self.sources = tokens, returns, sources
        self.streams = frozenset((*self._rounds.abandon(), *self._pairing.abandon()))

    def opened(self, name: str) -> None:
        """Note that a stream was opened with a state of the current chain."""
        was_adrift, self.streams = bool(self.streams), self.streams - {name}
        if not self.streams:
            self.believed_tokens, self.sources = 0, frozenset()
            if was_adrift and self.returns:
                self._membership.admission.wants_in = True


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
        self._pairing, self.drift = pairing, Drift(membership, rounds, pairing, snapshots)
        self._solitude = Solitude()
        self._petition: Petition | None = None
        self._silent: set[int] = set()  # indices of members that did not sign in time
        self._refused = 0  # the lowest first round that every refusing member could sign
        self._signed: tuple[bytes, PeerId, float] = (b"", "", -1e9)  # (hash, for whom, when)
        self._candidate: _Candidate | None = None
        self._voices = branches.Voices()
        self._sent: dict[tuple[PeerId, bool], float] = {}  # when, by (peer, with views)
        self._probed_s = -1e9
        self._random = random.Random(f"{context.seed}/{context.me}/probe")
        # Called with a re-founded view, and whether it takes the state that was here.
        self.on_refounded: Callable[[View, bool], None] = lambda view, loses_state: None
        sync = membership.sync
        sync.on_branch, sync.on_other_chain = self._take_branch, self._ask
        membership.on_refounded = self._take_refounding
        sync.on_longer_chain = lambda chain: self._change(chain, NOWHERE, self._tokens())

    def tick(self) -> None:
        """Track time without a quorum, start a branch when due, and look for other chains."""
        now_s = self._context.now()
        view, me = self._context.views.newest, self._context.my_index(self._context.views.newest)
        self._solitude.look(now_s, me is None or self._can_decide())
        if me is not None and self._is_due() and not self.drift.streams:
            self._found(now_s, me, self._membership.admission.present(view))
        else:
            self._petition, self._silent, self._refused = None, set(), 0
        self._look_out(now_s)
        self._ask_candidate(now_s)

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

    # starting a branch

    def _is_due(self) -> bool:
        """True if the time without a quorum is up.

        Never with stages: half a pipeline is useless, and a stage's rounds could not be taken
        back."""
        lasted_s = self._solitude.lasted_s
        # The look at who is missing comes last: the usual member waits for nobody.
        is_long = lasted_s >= min(LEFT_S, self._after_s)
        return is_long and not self._rounds.staged and lasted_s >= self._wait_s()

    def _wait_s(self) -> float:
        """Return the seconds without a quorum after which this peer starts a branch."""
        context, absent = self._context, set[PeerId]()
        if self._membership.next_view.refounding.are_enough:
            return self._after_s  # the newest view's voters go on together
        for view in self._views_needed():
            present = self._membership.admission.present(view)
            absent |= {peer for index, peer in enumerate(view.peers) if index not in present}
        have_left = all(context.left(peer) and context.life(peer) != "alive" for peer in absent)
        return min(LEFT_S, self._after_s) if absent and have_left else self._after_s

    def _can_decide(self) -> bool:
        """True if the newest view and the next round's have quorums and no next view is overdue.

        A view that some members accepted, but that rounds begun by others exclude, blocks both."""
        if self._membership.next_view.is_overdue:
            return False
        present = self._membership.admission.present
        return all(view.electorate.is_quorum(present(view)) for view in self._views_needed())

    def _views_needed(self) -> list[View]:
        """Return the newest view, and the next round's if that is another one."""
        return self._context.views.deciding(self._rounds.floor() if self._rounds.names else None)

    def _floor(self) -> int:
        """Return the first round with which a branch could begin, as far as this peer knows."""
        touched = self._context.touched.floor
        return self._rounds.floor() if self._rounds.names else axes.at(touched, None)

    def _found(self, now_s: float, me: int, present: set[int]) -> None:
        """Collect the signatures of all present members; the most senior one does so first."""
        # In turn: several petitions at once would compete for the same signatures.
        before_me = sum(index < me for index in present - self._silent)
        if self._solitude.lasted_s < self._wait_s() + STEP_IN_S * before_me:
            return
        parent = self._context.views.newest
        first_round = max(self._floor(), self._refused)
        view = branches.branch_of(parent, (present - self._silent) | {me}, first_round)
        if not view.electorate.voters:
            return  # nothing could be decided on it
        petition = self._petition
        if petition is None or petition.view != view:
            petition = self._petition = Petition(parent, view, now_s)
            petition.proofs[me] = _proof(self._identity, self._context.run, views.encode(view))
        if not petition.missing:
            self._complete(petition)
        elif now_s - petition.begun_s >= SIGNATURE_TIMEOUT_S:
            self._silent.update(petition.missing)
        elif now_s - petition.asked_s >= RESEND_S:
            petition.asked_s = now_s
            for index in petition.missing:
                self._context.send(parent.peers[index], BranchAsk(views.encode(view)))

    def _complete(self, petition: Petition) -> None:
        certified = petition.certified()
        self._follow(certified)
        self._context.tell(petition.parent.peers, Views((views.encode(certified),)))

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
        if not self._is_due() or self.drift.streams or elsewhere:
            return
        if view.first_round < self._floor():
            self._context.send(sender, BranchSign(view.hash, floor=self._floor()))
            return
        self._signed = (view.hash, sender, now_s)
        proof = _proof(self._identity, self._context.run, raw)
        self._context.send(sender, BranchSign(view.hash, proof))

    def _take_signature(self, sender: PeerId, message: BranchSign) -> None:
        petition = self._petition
        if petition is None or petition.view.hash != message.digest:
            return
        if sender not in petition.view.peers:
            return
        raw = views.encode(petition.view)
        if message.floor:
            # The member is further on, so the next petition must begin at its floor or later.
            self._refused = max(self._refused, message.floor)
        elif verify(sender, views.branch_domain(self._context.run), raw, message.proof):
            petition.proofs[petition.parent.peers.index(sender)] = message.proof
        else:
            self._context.drop("bad branch")

    def _take_branch(self, sender: PeerId, branch: Certified) -> None:
        """Follow a branch off our newest view, or compare the chains first.

        They are compared if this peer has rounds that the branch lacks, is in that view and not yet
        long enough without a quorum, or is not in it and hears a quorum: any member could sign a
        branch of its own, and lead newcomers away."""
        views.require_branch(self._context.run, self._context.views.newest, branch)
        listed = self._context.my_index(self._context.views.newest) is not None
        bound = not self._is_due() if listed else self._can_decide()
        if bound or self._rounds.floor() > branch.view.first_round:
            self._ask(sender)
        else:
            self._follow(branch)

    def _take_refounding(self, view: View) -> None:
        """Go on in a re-founded view; without the state that is here if it has later rounds."""
        forks, refounding = self._rounds.forks, self._membership.next_view.refounding
        loses_state = self._rounds.floor() > view.first_round or refounding.has_lost
        log.warning(
            "the members go on together with round %d, which the voters before could not decide%s",
            view.first_round,
            ": later rounds, which only others know, are given up" if loses_state else "",
        )
        self.on_refounded(view, loses_state)
        sources = frozenset() if forks.found is None else frozenset(forks.found.winners)
        forks.healed()
        if loses_state:
            self._context.give_up(but=view)
            self.drift.begin(0, returns=self.drift.returns, sources=sources)
        else:
            self._rounds.rewind(view.first_round)

    def _follow(self, branch: Certified) -> None:
        """Continue on this branch, and keep everything: it begins where our log is complete."""
        if self._context.views.extend(branch):
            self._rounds.rewind(branch.view.first_round)
            self._membership.view_changed()

    # two chains meet

    def _tokens(self) -> int:
        """Return the agreed tokens of this peer's chain."""
        if self.drift.streams:
            return self.drift.believed_tokens
        agreed = [self._rounds.tokens(name) for name in self._rounds.names]
        mine = max(agreed) if agreed else self._context.progress_tokens()
        return max(self.drift.believed_tokens, mine)

    def _look_out(self, now_s: float) -> None:
        """Ask some peers outside our view for their chain, every `PROBE_EVERY_S`.

        This peer asks only if it is on a branch, or beside the founder's anchor, or started the run
        in this life (perhaps for a second time, because no peer answered)."""
        if now_s - self._probed_s < PROBE_EVERY_S:
            return
        chain = self._context.views
        began = self._context.my_index(chain.views[0].view) is not None
        aside = chain.branch is not None or began or _is_beside(self._context)
        if not aside:
            return
        self._probed_s = now_s
        member = self._membership.is_member
        others = branches.elsewhere(chain, self._membership.records, self._context.me, member)
        for peer in self._random.sample(others, min(len(others), PROBED)):
            self._ask(peer)

    def _ask_candidate(self, now_s: float) -> None:
        candidate = self._candidate
        if candidate is not None and now_s - candidate.heard_s > ANSWER_S:
            self._candidate = None
        elif candidate is not None and now_s - candidate.asked_s >= CANDIDATE_EVERY_S:
            candidate.asked_s = now_s
            self._ask(candidate.peer)

    def _ask(self, peer: PeerId) -> None:
        """Tell a peer our chain; a peer on a stronger one answers with its views."""
        self._send_lineage(peer, ())

    def _send_lineage(self, peer: PeerId, missing: tuple[bytes, ...]) -> None:
        chain, now_s, place = self._context.views, self._context.now(), (peer, bool(missing))
        if now_s - self._sent.get(place, -1e9) < LINEAGE_EVERY_S:
            return
        if len(self._sent) >= MAX_SENT:
            self._sent.clear()
        self._sent[place] = now_s
        number, stands = chain.newest.number, self._stands()
        trail, said = branches.trail(chain), self._context.entrance.orders.newest
        self._context.send(peer, Lineage(self._tokens(), number, trail, missing, stands, said))

    def _stands(self) -> bool:
        """True if this peer is in its newest view and sees a quorum of it."""
        is_in = self._context.my_index(self._context.views.newest) is not None
        return is_in and not self.drift.streams and self._can_decide()

    def _take_lineage(self, sender: PeerId, incarnation: int, message: Lineage) -> None:
        """Compare chains: send a weaker side the views it is missing, or consider leaving ours."""
        chain, anchor = self._context.views, self._context.entrance.orders.anchor
        self._membership.admission.statements.look_up(sender, message.statement)
        fork = branches.fork_of(chain, message.number, message.trail)
        if fork is None:
            self._context.drop("unrelated line of views")
            lacks = anchor is not None and backbone.lacks(chain, anchor)
            if anchor and lacks and branches.shows(anchor, message.number, message.trail):
                self._membership.sync.look_far(sender)
            return
        is_ours = branches.is_anchored(anchor, fork, chain.newest.number, branches.trail(chain))
        is_theirs = branches.is_anchored(anchor, fork, message.number, message.trail)
        is_stronger = branches.is_stronger(message.tokens, self._tokens(), fork)
        if not fork.mine and not fork.theirs:
            if chain.newest.index(sender, incarnation) is None and self._stands():
                self._ask(sender)  # a newcomer asks for our word
            elif chain.newest.index(sender, incarnation) is not None and message.stands:
                self._voices.hear(sender, chain.newest, self._context.now())
        elif not fork.theirs and branches.first_parting(chain, fork) is None:
            self._membership.sync.send_views(sender, fork.number)
        elif is_theirs or (is_stronger and not is_ours):
            self._look_at(sender, incarnation, message, fork)
        else:
            self._send_lineage(sender, branches.missing_views(chain, fork))
            if message.stands and branches.parts(chain, fork) and not is_ours:
                # It has fewer tokens, but its quorum, where ours is a branch.
                self._look_at(sender, incarnation, message, fork)
            elif self._candidate is not None and self._candidate.theirs == fork.theirs:
                self._candidate = None

    def _look_at(self, sender: PeerId, incarnation: int, message: Lineage, fork: Fork) -> None:
        """Ask for the views of a chain that may be the stronger one, or read them."""
        if fork.theirs and not message.views:
            self._ask(sender)
        elif self._context.now() - self._sent.get((sender, False), -1e9) > ANSWER_S:
            # Views cost signature checks, so only those that this peer asked for are read.
            self._context.drop("line of views not asked for")
        else:
            self._consider(sender, incarnation, message, fork)

    def _consider(self, sender: PeerId, incarnation: int, message: Lineage, fork: Fork) -> None:
        mine, now_s = self._context.views, self._context.now()
        other = branches.other_chain(mine, fork, message.views)
        known = (entry.view for entry in other.views if entry.view.number >= fork.number)
        if all(view.index(sender, incarnation) is None for view in known):
            self._context.drop("not from a member")
            return
        branches.testify(mine, other, fork, self._context.entrance.convict)
        run_s = max(now_s, self._membership.clock.run_s(now_s))
        most = _max_tokens(self._tokens(), self._rounds, self._pairing, run_s)
        # A chain with another start may be older, and have begun with more.
        is_beyond = fork.number >= 0 and message.tokens > most
        if is_beyond and branches.has_begun(other, fork, sender, incarnation):
            self._context.accuse(sender, BEYOND)
        has_anchor = _has_anchor(self._context, other, fork, message)
        if has_anchor is None:
            self._membership.sync.look_far(sender)
        is_branch = branches.parts(other, fork) and not branches.parts(mine, fork)
        has_quorum = self._stands() or self._voices.make_quorum(mine.newest, now_s)
        if is_branch and has_quorum and not has_anchor:
            # Any member can branch alone and name any number of tokens.
            self._context.drop("branch of a line that has its quorum")
            self._send_lineage(sender, branches.missing_views(mine, fork))
            return
        if is_beyond and not has_anchor:
            self._context.drop(BEYOND)
            return
        if message.stands and other.newest.index(sender, incarnation) is not None:
            self._voices.hear(sender, other.newest, now_s)
        stands = not branches.parts(other, fork) and self._voices.make_quorum(other.newest, now_s)
        is_stronger = branches.is_stronger(message.tokens, self._tokens(), fork)
        if not stands and not is_stronger and not has_anchor:
            return
        candidate = self._candidate
        if not self._context.is_member:
            for peer in mine.newest.peers:  # a newcomer sees no quorum by itself
                self._ask(peer)
        if candidate is None or candidate.theirs != fork.theirs:
            self._candidate = _Candidate(sender, fork.theirs, now_s, now_s, now_s)
        elif now_s - candidate.since_s < SETTLE_S:
            candidate.heard_s = now_s
        else:
            # Of the founder's line, a claim that nobody can believe counts for nothing.
            self._change(other, fork, self._tokens() if is_beyond else message.tokens)

    def _change(self, other: Chain, fork: Fork, tokens: int) -> None:
        """Leave our chain for a stronger one.

        Keep everything held if that is a branch of ours that begins where our log is whole."""
        self._candidate = None
        parting = branches.first_parting(other, fork)
        if not fork.mine and (parting is None or parting >= self._rounds.floor()):
            self._context.chain = other
            if parting is not None:
                self._rounds.rewind(parting)
            self._membership.view_changed()
            return
        anchor = self._context.entrance.orders.anchor
        if anchor is not None and backbone.holds(other, anchor):
            log.warning("goes over to the line with view %d, which the founder anchored", anchor[0])
        returns = self.drift.returns if self.drift.streams else self._membership.admission.wants_in
        self._membership.change_chain(other)
        self.drift.begin(tokens, returns=returns)
        self._membership.admission.wants_in = returns and not self.drift.streams
