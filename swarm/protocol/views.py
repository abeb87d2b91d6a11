"""Views: the agreed, numbered member list, and the rounds from which it holds.

A view is decided by the previous view's members (swarm/protocol/agreement/decide.py) and names the
round at which it begins, so every round belongs to exactly one view and no round can be decided by
two: a member that has accepted a view beginning at round R votes in no rounds from R on under the
old one, and refuses a view that begins at a round in which it has already voted. Rounds of all
streams of a run count on one axis, those of a stage on its own.

If so many voters restart that the lives which a view lists can decide nothing any more, its keys
decide a *re-founding*: a next view with the members in their new lives, which begins where their
state ends. What was begun later is given up (swarm/stable/recollection.py).

A view may also have a *branch* (swarm/protocol/branches.py): some of its members go on as a run of
their own once nothing can be decided any more. A branch is signed by exactly its members.

View 0 is signed by the run's founder, and every chain begins there: swarm/protocol/backbone.py
begins a chain, and proves one to a peer that knows no view yet.

Sans I/O, pure. Members are ordered by seniority: index 0 breaks ties of even views.
"""

import functools
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import msgspec

from farflock.swarm.identity import Identity, verify
from farflock.swarm.links import Liveness, PeerId
from farflock.swarm.messages import (
    MAX_MEMBERS,
    MAX_STAGES,
    MAX_TRAIL,
    MAX_VALUE_BYTES,
    MAX_VIEWS_SENT,
    Count,
    Decided,
    Digest,
    Index,
    Key,
    Proofs,
)
from farflock.swarm.protocol.agreement import axes
from farflock.swarm.protocol.agreement.axes import Floor, reaches
from farflock.swarm.protocol.agreement.certificates import checker, is_certified
from farflock.swarm.protocol.agreement.convictions import BadProof, judging
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.roll import MAX_ROLL_BYTES, Admittance, first_roll
from farflock.swarm.roles import EVERY, NOTHING
from farflock.swarm.statements import NO_ORDERS

if TYPE_CHECKING:
    from farflock.swarm.protocol.backbone import Backbone

VIEW_STREAM = "#views"
# A peer that misses more of them follows links from view 0 on (swarm/protocol/backbone.py).
KEPT_VIEWS = MAX_TRAIL
MAX_SENT_BYTES = 192 * 1024  # of views in one message; fits in a frame
_BRANCH_DOMAIN = b"branch"
_GENESIS_DOMAIN = b"genesis"


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A peer in one of its lives: a restarted peer is a new member, as it has lost its promises.

    A server that changes its stage (swarm/roles.py) begins another life too."""

    peer: Annotated[str, msgspec.Meta(max_length=64)]
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # same bounds as in a record
    stage: Annotated[int, msgspec.Meta(ge=NOTHING, lt=MAX_STAGES)] = EVERY


class View(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """A numbered member list that holds from `first_round` on, for stage s from `stage_rounds[s]`.

    swarm/protocol/agreement/axes.py explains these rounds. `previous` is the hash of the previous
    view; in a branch, its `branch_mark`. `ballot` is the number of the ballot that first proposed
    the view, so that a view refused for good can be proposed again as another one. `branches` is
    how many there are from view 0 to this view. `roll` is the root of all keys that were ever
    admitted (swarm/protocol/roll.py), a chunk of `roll_bytes`; `admits` names the capabilities by
    which members of this view are new on it. `statement` is the number and hash of the founder's
    newest statement (swarm/statements.py). `learners` are the members without a vote
    (swarm/protocol/votes.py). `refoundings` is how many there are from view 0 to this view."""

    number: Count
    previous: Digest
    first_round: Count
    members: Annotated[tuple[Member, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    stage_rounds: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()
    ballot: Count = 0
    branches: Count = 0
    roll: Digest = bytes(32)
    roll_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_ROLL_BYTES)] = 0
    admits: Annotated[
        tuple[tuple[Index, Admittance], ...], msgspec.Meta(max_length=MAX_MEMBERS)
    ] = ()
    statement: tuple[Count, Digest] = NO_ORDERS.newest
    learners: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    refoundings: Count = 0

    @property
    def begins(self) -> Floor:
        """The rounds from which the view holds, by axis."""
        return (self.first_round, *self.stage_rounds)

    @functools.cached_property
    def hash(self) -> bytes:
        """SHA-256 of the encoding; every message names its view by it, so it is computed once."""
        return hashlib.sha256(encode(self)).digest()

    @functools.cached_property
    def branch_mark(self) -> bytes:
        """The `previous` of a branch, so that no ordinary successor can be taken for one."""
        return hashlib.sha256(b"farflock-branch\x00" + self.hash).digest()

    @functools.cached_property
    def electorate(self) -> Electorate:
        """Those who decide the view's rounds, and the view after it."""
        lives = tuple(each.incarnation for each in self.members)
        return Electorate(self.hash, self.peers, lives, frozenset(self.learners))

    @functools.cached_property
    def peers(self) -> tuple[PeerId, ...]:
        """Peer ids by member index."""
        return tuple(member.peer for member in self.members)

    def index(self, peer: PeerId, incarnation: int) -> int | None:
        """Return the member index of a peer in this life; None if it is not a member."""
        index, life = self._places.get(peer, (None, None))
        return index if life == incarnation else None

    def lists(self, peer: PeerId) -> bool:
        """True if a peer is a member, in whichever life."""
        return peer in self._places

    def serving(self, stage: int | None) -> tuple[int, ...]:
        """Return the indices of the members that serve a stage (None: the whole model, all)."""
        wanted = {stage, EVERY}
        return tuple(
            index
            for index, member in enumerate(self.members)
            if stage is None or member.stage in wanted
        )

    @functools.cached_property
    def _places(self) -> dict[PeerId, tuple[int, int]]:
        return {
            member.peer: (index, member.incarnation) for index, member in enumerate(self.members)
        }


class Certified(msgspec.Struct, frozen=True, array_like=True):
    """A view signed by a quorum of the previous view; a branch by all its own, view 0 by the
    founder. The quorum may lack voters against which there are `convictions`."""

    view: View
    ballot: tuple[Count, Count] = (0, 0)
    proofs: Annotated[tuple[tuple[Count, bytes], ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    convictions: Proofs = ()


class BadView(ValueError):
    """A view that does not follow from the one before it."""


class Forgery(BadView):
    """A view that no honest peer passes on, whatever it knows."""


_encoder = msgspec.msgpack.Encoder()
_view_decoder = msgspec.msgpack.Decoder(View)
_certified_decoder = msgspec.msgpack.Decoder(Certified)


def encode(value: msgspec.Struct) -> bytes:
    """Return the canonical bytes, which are decided, signed and hashed."""
    return _encoder.encode(value)


def decode_view(raw: bytes) -> View:
    """Decode a proposed view; raise `BadView` for anything else."""
    try:
        view = _view_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Forgery(f"not a view: {error}") from None
    _require_sound(view)
    return view


def certified_by(decided: Decided) -> Certified:
    """Return the view that was decided with its certificate; raise `BadView` if it is no view."""
    view = decode_view(decided.value)
    return Certified(view, decided.ballot, decided.proofs, decided.convictions)


def _require_sound(view: View) -> None:
    learners, count = view.learners, len(view.members)
    if len(set(view.peers)) != count:
        raise Forgery(f"view {view.number} names a peer twice")
    if learners != tuple(sorted(set(learners))) or max(learners, default=0) >= count:
        raise Forgery(f"view {view.number} names learners twice, or not in order")
    if len(learners) == count:
        raise Forgery(f"in view {view.number} nobody has a vote")


def decode_certified(raw: bytes) -> Certified:
    """Decode a certified view; raise `BadView` for anything else."""
    if len(raw) > MAX_VALUE_BYTES:
        raise Forgery(f"a view of {len(raw)} bytes is over the limit of {MAX_VALUE_BYTES}")
    try:
        certified = _certified_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Forgery(f"not a certified view: {error}") from None
    _require_sound(certified.view)
    return certified


def genesis(run: str, founder: Member) -> View:
    """Return view 0: the founder alone, from round 0 on."""
    previous = hashlib.sha256(b"farflock-genesis\x00" + run.encode()).digest()
    roll = first_roll(founder.peer)
    return View(0, previous, 0, (founder,), roll=roll.root, roll_bytes=len(roll.encoded))


def genesis_domain(run: str) -> bytes:
    """Return the domain of the founder's signature under view 0."""
    return _GENESIS_DOMAIN + hashlib.sha256(run.encode()).digest()[:16]


def founded(run: str, identity: Identity, founder: Member) -> Certified:
    """Return view 0, signed by its founder, whose identity this is."""
    view = genesis(run, founder)
    return Certified(view, proofs=((0, identity.sign(genesis_domain(run), encode(view))),))


def require_genesis(run: str, founder: PeerId, certified: Certified) -> None:
    """Raise `Forgery` unless this is a view 0 of this run, signed by this founder."""
    view, proofs = certified.view, certified.proofs
    if view.members[0].peer != founder or view != genesis(run, view.members[0]):
        raise Forgery("a chain of views must begin with a view 0 of this run's founder")
    is_plain = certified.ballot == (0, 0) and not certified.convictions
    signed = is_plain and len(proofs) == 1 and proofs[0][0] == 0
    if not signed or not verify(founder, genesis_domain(run), encode(view), proofs[0][1]):
        raise Forgery("this view 0 is not signed by the run's founder")


def view_key(number: int) -> Key:
    """Return the key under which view `number` is decided."""
    return Key(VIEW_STREAM, number)


def branch_domain(run: str) -> bytes:
    """Return the domain of signatures on branches, which do not count for views."""
    return _BRANCH_DOMAIN + hashlib.sha256(run.encode()).digest()[:16]


def require_branch_shape(parent: View, view: View) -> None:
    """Raise `BadView` unless some of the parent's members could start this branch, in the same
    order and lives. Each of them decides whether to sign, and from which round on."""
    place = parent.number + 1, parent.branches + 1, parent.refoundings, parent.branch_mark
    if (view.number, view.branches, view.refoundings, view.previous) != place:
        raise BadView(f"view {view.number} is not a branch of view {parent.number}")
    if view.members != tuple(member for member in parent.members if member in view.members):
        raise BadView(
            f"the members of a branch of view {parent.number} must be members of that view, "
            "in the same order and lives"
        )
    kept = parent.roll, parent.roll_bytes, (), parent.statement, learners_of(parent, view.members)
    if (view.roll, view.roll_bytes, view.admits, view.statement, view.learners) != kept:
        raise BadView(f"a branch of view {parent.number} changes no votes, and states nothing")


def require_branch(run: str, parent: View, certified: Certified) -> None:
    """Raise `BadView` unless exactly the members of a branch have signed it."""
    view = certified.view
    require_branch_shape(parent, view)
    signers = tuple(parent.members.index(member) for member in view.members)
    text, domain = encode(view), branch_domain(run)
    is_plain = certified.ballot == (0, 0) and not certified.convictions
    if not is_plain or tuple(index for index, _ in certified.proofs) != signers:
        raise BadView(
            f"a branch of view {parent.number} needs one signature by each of its members, "
            "in their order"
        )
    if not all(
        verify(parent.members[index].peer, domain, text, proof) for index, proof in certified.proofs
    ):
        raise BadView(f"a signature on a branch of view {parent.number} is invalid")


def fitting(encoded: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return the first of these, as many as one message holds."""
    room, taken = MAX_SENT_BYTES, list[bytes]()
    for raw in itertools.islice(encoded, MAX_VIEWS_SENT):
        room -= len(raw)
        if room < 0:
            break
        taken.append(raw)
    return tuple(taken)


def require_successor(before: View, view: View) -> None:
    """Raise `BadView` unless a view could follow the view `before`, with the right signatures."""
    if view.number != before.number + 1 or view.previous != before.hash:
        raise BadView(f"view {view.number} does not follow view {before.number}")
    if is_refounding(before, view):
        require_refounding_shape(before, view)
    else:
        require_later(before, view)


def is_refounding(before: View, view: View) -> bool:
    """True if a view re-founds the view `before`."""
    return view.refoundings == before.refoundings + 1


def require_refounding_shape(before: View, view: View) -> None:
    """Raise `BadView` unless a view re-founds the view `before` with keys of its members alone."""
    if view.branches != before.branches or view.stage_rounds or before.stage_rounds:
        raise BadView(f"view {view.number} does not re-found view {before.number}")
    if view.admits or not all(map(before.lists, view.peers)):
        raise BadView(f"a re-founding of view {before.number} lets nobody in")


def require_later(before: View, view: View) -> None:
    """Raise `BadView` unless a view could come after the view `before`, without a branch or a
    re-founding."""
    if view.branches != before.branches:
        raise BadView(f"between views {before.number} and {view.number} there is a branch")
    if view.refoundings != before.refoundings:
        raise BadView(f"between views {before.number} and {view.number} there is a re-founding")
    # It may begin at the same rounds: it then replaces a view that never held.
    if not reaches(view.begins, before.begins):
        raise BadView(f"view {view.number} begins at rounds {view.begins}, before {before.begins}")


def require_decided(run: str, before: View, certified: Certified) -> None:
    """Raise `BadView` unless a view follows the view `before`, signed by a quorum of it."""
    view = certified.view
    require_successor(before, view)
    try:
        voters = judging(run, before.electorate, certified.convictions)
    except BadProof as error:
        raise Forgery(f"the certificate of view {view.number} has {error}") from None
    decided = Decided(
        view_key(view.number), before.hash, encode(view), certified.ballot, certified.proofs
    )
    if not is_certified(decided, voters, checker(run, voters)):
        raise Forgery(
            f"view {view.number} lacks the signatures of a quorum of view {before.number}"
        )


def learners_of(before: View, members: Sequence[Member]) -> tuple[int, ...]:
    """Return which of the next view's members (indices) had no vote in the view before."""
    without = {before.peers[index] for index in before.learners}
    return tuple(index for index, member in enumerate(members) if member.peer in without)


def successor(before: View, members: tuple[Member, ...]) -> View:
    """Return the view with these members that follows a view, and takes its place; newcomers to it
    vote, unless swarm/protocol/enrolment.py decides otherwise."""
    return View(
        before.number + 1,
        before.hash,
        before.first_round,
        members,
        before.stage_rounds,
        branches=before.branches,
        roll=before.roll,
        roll_bytes=before.roll_bytes,
        statement=before.statement,
        learners=learners_of(before, members),
        refoundings=before.refoundings,
    )


def refounded(before: View, members: tuple[Member, ...], first_round: int) -> View:
    """Return the re-founding of a view by these members, those of other keys left out."""
    known = tuple(member for member in members if before.lists(member.peer))
    view = successor(before, known)
    count = before.refoundings + 1
    return msgspec.structs.replace(view, first_round=first_round, refoundings=count)


@dataclass(slots=True)
class Chain:
    """The views that a peer knows, oldest first, without a gap; at most `KEPT_VIEWS`.

    Only `backbone.begun` begins one for a peer. `past` leads from view 0 to the oldest kept view,
    whose own signatures are therefore not needed."""

    run: str
    views: list[Certified]
    # An accepted next view. Until it is decided, this peer takes no part in its rounds.
    barrier: View | None = None
    # The rounds at which a view begins at the earliest whose proposer has our promise. Until it is
    # decided, this peer takes no part in these rounds or later ones.
    held: Floor | None = None
    past: "Backbone | None" = None

    @property
    def newest(self) -> View:
        """The last view known here to be decided."""
        return self.views[-1].view

    def at(self, round_number: int, stage: int | None = None) -> View | None:
        """Return the view that a round belongs to; None for rounds before the oldest kept view."""
        for certified in reversed(self.views):
            if axes.at(certified.view.begins, stage) <= round_number:
                return certified.view
        return None

    def deciding(self, next_round: int | None) -> list[View]:
        """Return the views whose voters decide what comes next: the newest, and that of the next
        round (None if it is not known) if that is another one."""
        of_round = None if next_round is None else self.at(next_round)
        if of_round is None or of_round is self.newest:
            return [self.newest]
        return [self.newest, of_round]

    def by_hash(self, digest: bytes) -> View | None:
        """Return the known view of this hash, or None."""
        return next(
            (entry.view for entry in reversed(self.views) if entry.view.hash == digest), None
        )

    def differs(self, view: View) -> bool:
        """True if the kept view of the same number is another one."""
        place = view.number - self.views[0].view.number
        return 0 <= place < len(self.views) and self.views[place].view.hash != view.hash

    def believes(self, decided: Decided) -> bool:
        """True if a quorum of its view has signed a decision, or its view is not known here."""
        view = self.by_hash(decided.view)
        voters = None if view is None else view.electorate
        return voters is None or is_certified(decided, voters, checker(self.run, voters))

    @property
    def branch(self) -> View | None:
        """The last branch among the kept views, which this peer is on; None on the main chain."""
        pairs = zip(reversed(self.views[:-1]), reversed(self.views[1:]), strict=True)
        branches = (
            entry.view for before, entry in pairs if entry.view.previous == before.view.branch_mark
        )
        return next(branches, None)

    @property
    def refounded_at(self) -> int:
        """The first round of the last re-founding among the kept views, or 0: the rounds before it
        are decided."""
        if not self.newest.refoundings:
            return 0
        pairs = zip(reversed(self.views[:-1]), reversed(self.views[1:]), strict=True)
        firsts = (
            entry.view.first_round
            for before, entry in pairs
            if is_refounding(before.view, entry.view)
        )
        return next(firsts, 0)

    def blocked(self, round_number: int, stage: int | None = None) -> bool:
        """True if taking part in this round must wait for the next view's decision."""
        if self.held is not None and round_number >= axes.at(self.held, stage):
            # This would raise our floor above the promised one. We would refuse a view that
            # others accept, and neither it nor the round could be decided.
            return True
        return self.barrier is not None and round_number >= axes.at(self.barrier.begins, stage)

    def extend(self, certified: Certified) -> bool:
        """Append the next view or a branch; return False if it is known.

        Raise `BadView` if it does not follow."""
        view, newest = certified.view, self.newest
        if view.number <= newest.number:
            return False
        if view.previous == newest.branch_mark:
            require_branch(self.run, newest, certified)
        else:
            require_decided(self.run, newest, certified)
        self.views.append(certified)
        self.barrier = self.held = None
        if self.past is not None:
            for left in self.views[:-KEPT_VIEWS]:
                self.past.take(left)
        del self.views[:-KEPT_VIEWS]
        return True

    def listed_since(self, peer: PeerId) -> View:
        """Return the first of the newest kept views that list a peer without a gap."""
        entries = itertools.takewhile(lambda each: each.view.lists(peer), reversed(self.views))
        return min((entry.view for entry in entries), key=lambda view: view.number)

    def since(self, number: int, limit: int = MAX_VIEWS_SENT) -> tuple[bytes, ...]:
        """Return encoded views after `number`, oldest first, as many as a message holds; empty if
        ours do not reach back."""
        oldest = self.views[0].view.number
        if number < oldest and oldest > 0:  # the oldest one may be signed by an earlier electorate
            return ()
        missing = (encode(entry) for entry in self.views if entry.view.number > number)
        return fitting(itertools.islice(missing, limit))

    def refuses(self, raw: bytes, min_floor: Floor) -> bool:
        """True if this can never be the next view here: it is none, or begins too early."""
        try:
            view = decode_view(raw)
            require_successor(self.newest, view)
        except BadView:
            return True
        if is_refounding(self.newest, view):
            return False  # it takes over open rounds, which the old lives cannot decide
        return not reaches(view.begins, min_floor)


@dataclass(slots=True)
class Candidates:
    """Requests to join or leave known to a member; requests to join expire, so they are repeated.

    Only members leave, so `leaving` is as bounded as the view."""

    joining: dict[PeerId, tuple[Member, float]] = field(default_factory=dict)  # (member, expiry)
    leaving: set[PeerId] = field(default_factory=set)

    def join(self, member: Member, expires_s: float) -> None:
        """Note a peer that asked for admission; the table is bounded."""
        # Strangers may ask, so the table is bounded; requests expire, so it empties again.
        if member.peer in self.joining or len(self.joining) < 2 * MAX_MEMBERS:
            self.joining[member.peer] = (member, expires_s)
            self.leaving.discard(member.peer)

    def leave(self, member: Member) -> None:
        """Note a member that said goodbye, unless it has begun another life meanwhile."""
        known, _ = self.joining.get(member.peer, (member, 0.0))
        if known == member:
            self.joining.pop(member.peer, None)
            self.leaving.add(member.peer)

    def live(self, now_s: float) -> dict[PeerId, Member]:
        """Return the peers that still want to join."""
        if not self.joining:
            return {}
        self.joining = {peer: entry for peer, entry in self.joining.items() if entry[1] > now_s}
        return {peer: member for peer, (member, _) in self.joining.items()}


def next_members(
    view: View,
    lives: Mapping[PeerId, Liveness],
    joining: Mapping[PeerId, Member],
    leaving: Collection[PeerId],
    lapsed: Callable[[Member], bool] = lambda member: False,
) -> tuple[Member, ...] | None:
    """Return the next view's members, or None if nothing changes.

    Dead and leaving members go, restarted ones move to the end in their new life, and joiners
    follow in the order of their ids. While there is no room for joiners, as many members go whose
    places have `lapsed`, the most junior first."""
    staying = tuple(
        member
        for member in view.members
        if lives.get(member.peer, "unknown") != "dead"
        and member.peer not in leaving
        and joining.get(member.peer, member) == member
    )
    present = {member.peer for member in staying}
    coming = tuple(
        joining[peer] for peer in sorted(joining) if peer not in present and peer not in leaving
    )
    if (over := len(staying) + len(coming) - MAX_MEMBERS) > 0:
        idle = [member for member in reversed(staying) if lapsed(member)][:over]
        staying = tuple(member for member in staying if member not in idle)
    # Joiners over the limit repeat their requests, and enter once there is room.
    members = (staying + coming)[:MAX_MEMBERS]
    return None if members == view.members or not members else members
