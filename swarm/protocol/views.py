"""Views: the agreed, numbered member list, and the rounds from which it holds.

A view is decided by the previous view's members (swarm/protocol/decide.py) and names the round at
which it begins, so every round belongs to exactly one view and no round can be decided by two: a
member that has accepted a view beginning at round R takes no part in rounds from R on under the old
one, and refuses a view that begins at a round it has already touched. Rounds of all streams of a
run count on one axis, those of a stage on its own.

A view may also have a *branch* (swarm/protocol/branches.py): some of its members go on as a run of
their own once nothing can be decided any more. A branch is signed by exactly its members. A
*return* (swarm/protocol/returns.py) lists the same keys in the lives in which they come back.

Sans I/O, pure. Members are ordered by seniority: index 0 breaks ties of even views.
"""

import functools
import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from farflock.swarm.identity import verify
from farflock.swarm.links import Liveness, PeerId
from farflock.swarm.messages import (
    MAX_MEMBERS,
    MAX_STAGES,
    MAX_TRAIL,
    MAX_VALUE_BYTES,
    Count,
    Decided,
    Digest,
    Key,
)
from farflock.swarm.protocol import axes
from farflock.swarm.protocol.axes import NO_FLOOR, Floor, highest, reaches
from farflock.swarm.protocol.decide import is_certified
from farflock.swarm.roles import EVERY, UNMEASURED

VIEW_STREAM = "#views"
# A peer that misses more of them cannot verify the newest one, and has to join again.
KEPT_VIEWS = MAX_TRAIL
_DOMAIN, _BRANCH_DOMAIN = b"view", b"branch"
_RETURN_DOMAIN, _GOODBYE_DOMAIN = b"return", b"goodbye"


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A peer in one of its lives: a restarted peer is a new member, as it has lost its promises.

    A server that changes its stage (swarm/roles.py) begins another life too."""

    peer: Annotated[str, msgspec.Meta(max_length=64)]
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # same bounds as in a record
    stage: Annotated[int, msgspec.Meta(ge=UNMEASURED, lt=MAX_STAGES)] = EVERY


_State = Annotated[bytes, msgspec.Meta(max_length=32)]


class View(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """A numbered member list that holds from `first_round` on, for stage s from `stage_rounds[s]`.

    swarm/protocol/axes.py explains these rounds. `previous` is the hash of the previous view; in
    a branch, its `branch_mark`, in a return, its `return_mark`. Only a return has `states`, by
    axis: the hashes of those with which it begins, where its members' states are equal."""

    number: Count
    previous: Digest
    first_round: Count
    members: Annotated[tuple[Member, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    stage_rounds: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()
    states: Annotated[tuple[_State, ...], msgspec.Meta(max_length=1 + MAX_STAGES)] = ()

    @property
    def begins(self) -> Floor:
        """The rounds from which the view holds, by axis."""
        return (self.first_round, *self.stage_rounds)

    def state(self, place: int = 0) -> bytes:
        """Return the hash of the state with which a return begins on an axis; empty if none is
        named."""
        return self.states[place] if place < len(self.states) else b""

    @functools.cached_property
    def hash(self) -> bytes:
        """SHA-256 of the encoding; every message names its view by it, so it is computed once."""
        return hashlib.sha256(encode(self)).digest()

    @functools.cached_property
    def branch_mark(self) -> bytes:
        """The `previous` of a branch, so that no ordinary successor can be taken for one."""
        return hashlib.sha256(b"farflock-branch\x00" + self.hash).digest()

    @functools.cached_property
    def return_mark(self) -> bytes:
        """The `previous` of a return, which is neither a successor nor a branch."""
        return hashlib.sha256(b"farflock-return\x00" + self.hash).digest()

    def parts_from(self, before: "View") -> bool:
        """True if this is a branch or a return of another view: a chain of its own begins here."""
        return self.previous in (before.branch_mark, before.return_mark)

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

    def is_full_for(self, peer: PeerId) -> bool:
        """True if there is no room for a peer, which is not a member in any life."""
        return len(self.members) >= MAX_MEMBERS and not self.lists(peer)

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
    """A view signed by a quorum of the previous view; a branch by all its own, a return by all of
    the previous view, of which some may have signed a goodbye instead; genesis by none."""

    view: View
    ballot: tuple[Count, Count] = (0, 0)
    proofs: Annotated[tuple[tuple[Count, bytes], ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()


class BadView(ValueError):
    """A view that does not follow from the one before it."""


_encoder = msgspec.msgpack.Encoder()
_view_decoder = msgspec.msgpack.Decoder(View)
_certified_decoder = msgspec.msgpack.Decoder(Certified)


def encode(value: View | Certified) -> bytes:
    """Return the canonical bytes, which are decided, signed and hashed."""
    return _encoder.encode(value)


def decode_view(raw: bytes) -> View:
    """Decode a proposed view; raise `BadView` for anything else."""
    try:
        view = _view_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadView(f"not a view: {error}") from None
    if len(set(view.peers)) != len(view.peers):
        raise BadView(f"view {view.number} names a peer twice")
    return view


def revised(raw: bytes, before: View, floor: Floor, present: Collection[Member]) -> bytes:
    """Return the proposal, changed to begin at these rounds at the earliest and to keep the
    members of the view `before` that are `present`, except those that come back in a new life."""
    view = decode_view(raw)
    first_round, *stage_rounds = highest(view.begins, floor)
    kept = {*view.members, *(member for member in present if member.peer not in view.peers)}
    staying = tuple(member for member in before.members if member in kept)
    coming = tuple(member for member in view.members if member not in staying)
    return encode(
        msgspec.structs.replace(
            view,
            first_round=first_round,
            stage_rounds=tuple(stage_rounds),
            members=(staying + coming)[:MAX_MEMBERS],
        )
    )


def decode_certified(raw: bytes) -> Certified:
    """Decode a certified view; raise `BadView` for anything else."""
    if len(raw) > MAX_VALUE_BYTES:
        raise BadView(f"a view of {len(raw)} bytes is over the limit of {MAX_VALUE_BYTES}")
    try:
        return _certified_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadView(f"not a certified view: {error}") from None


def genesis(run: str, founder: Member) -> View:
    """Return view 0: the founder alone, from round 0 on."""
    return View(0, hashlib.sha256(b"farflock-genesis\x00" + run.encode()).digest(), 0, (founder,))


def view_key(number: int) -> Key:
    """Return the key under which view `number` is decided."""
    return Key(VIEW_STREAM, number)


def signature_domain(run: str) -> bytes:
    """Return the domain of signatures on views, which is different for each run."""
    return _DOMAIN + hashlib.sha256(run.encode()).digest()[:16]


def checker(run: str, view: View) -> Callable[[int, bytes, bytes], bool]:
    """Return a function that verifies signatures of `view`'s members on the next view."""
    return lambda member, text, proof: verify(
        view.members[member].peer, signature_domain(run), text, proof
    )


def branch_domain(run: str) -> bytes:
    """Return the domain of signatures on branches, which do not count for views."""
    return _BRANCH_DOMAIN + hashlib.sha256(run.encode()).digest()[:16]


def require_branch_shape(parent: View, view: View) -> None:
    """Raise `BadView` unless some of the parent's members could start this branch, in the same
    order and lives. Each of them decides whether to sign, and from which round on."""
    if view.number != parent.number + 1 or view.previous != parent.branch_mark or view.states:
        raise BadView(f"view {view.number} is not a branch of view {parent.number}")
    if view.members != tuple(member for member in parent.members if member in view.members):
        raise BadView(
            f"the members of a branch of view {parent.number} must be members of that view, "
            "in the same order and lives"
        )


def require_branch(run: str, parent: View, certified: Certified) -> None:
    """Raise `BadView` unless exactly the members of a branch have signed it."""
    view = certified.view
    require_branch_shape(parent, view)
    signers = tuple(parent.members.index(member) for member in view.members)
    text, domain = encode(view), branch_domain(run)
    if certified.ballot != (0, 0) or tuple(index for index, _ in certified.proofs) != signers:
        raise BadView(
            f"a branch of view {parent.number} needs one signature by each of its members, "
            "in their order"
        )
    if not all(
        verify(parent.members[index].peer, domain, text, proof) for index, proof in certified.proofs
    ):
        raise BadView(f"a signature on a branch of view {parent.number} is invalid")


def return_domain(run: str) -> bytes:
    """Return the domain of signatures on returns."""
    return _RETURN_DOMAIN + hashlib.sha256(run.encode()).digest()[:16]


def goodbye_domain(run: str) -> bytes:
    """Return the domain of signatures on goodbyes."""
    return _GOODBYE_DOMAIN + hashlib.sha256(run.encode()).digest()[:16]


def goodbye_text(view: View, peer: PeerId) -> bytes:
    """Return what a member of a view signs when it leaves: its key, its life, and the view."""
    member = view.members[view.peers.index(peer)]
    return _encoder.encode((member.peer, member.incarnation, view.hash))


def is_goodbye(run: str, view: View, peer: PeerId, proof: bytes) -> bool:
    """True if a member of the view has signed that it leaves."""
    return view.lists(peer) and verify(peer, goodbye_domain(run), goodbye_text(view, peer), proof)


def require_return_shape(parent: View, view: View) -> None:
    """Raise `BadView` unless some of the parent's keys, in the same order and in whichever lives,
    could make this return. Each of them decides whether to sign."""
    if view.number != parent.number + 1 or view.previous != parent.return_mark:
        raise BadView(f"view {view.number} is not a return of view {parent.number}")
    if view.peers != tuple(peer for peer in parent.peers if view.lists(peer)):
        raise BadView(
            f"the members of a return of view {parent.number} must have the keys of that view, "
            "in the same order"
        )
    sizes = {len(state) for state in view.states}
    if len(view.states) > len(view.begins) or not sizes <= {0, hashlib.sha256().digest_size}:
        raise BadView(f"view {view.number} begins with what no return begins with")


def require_return(run: str, parent: View, certified: Certified) -> None:
    """Raise `BadView` unless each key of the parent has signed the return, if it is listed there,
    or else its goodbye."""
    view = certified.view
    require_return_shape(parent, view)
    indices = tuple(index for index, _ in certified.proofs)
    if certified.ballot != (0, 0) or indices != tuple(range(len(parent.members))):
        raise BadView(
            f"a return of view {parent.number} needs one signature by each key of that view, "
            "in their order"
        )
    text, domain = encode(view), return_domain(run)
    for index, proof in certified.proofs:
        peer = parent.peers[index]
        listed = view.lists(peer)
        if listed and not verify(peer, domain, text, proof):
            raise BadView(f"a signature on a return of view {parent.number} is invalid")
        if not listed and not is_goodbye(run, parent, peer, proof):
            raise BadView(f"a goodbye in a return of view {parent.number} is invalid")


@dataclass(slots=True)
class Chain:
    """The views that a peer knows, oldest first, without a gap; at most `KEPT_VIEWS`."""

    run: str
    views: list[Certified]
    # An accepted next view. Until it is decided, this peer takes no part in its rounds.
    barrier: View | None = None
    # The rounds at which a view begins at the earliest whose proposer has our promise. Until it is
    # decided, this peer takes no part in these rounds or later ones.
    held: Floor | None = None
    goodbyes: dict[PeerId, bytes] = field(default_factory=dict)  # to the newest view, signed

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

    def by_hash(self, digest: bytes) -> View | None:
        """Return the known view of this hash, or None."""
        return next(
            (entry.view for entry in reversed(self.views) if entry.view.hash == digest), None
        )

    @property
    def branch(self) -> View | None:
        """The last branch or return among the kept views, which this peer is on; None on the main
        chain."""
        pairs = zip(reversed(self.views[:-1]), reversed(self.views[1:]), strict=True)
        branches = (entry.view for before, entry in pairs if entry.view.parts_from(before.view))
        return next(branches, None)

    def blocked(self, round_number: int, stage: int | None = None) -> bool:
        """True if taking part in this round must wait for the next view's decision."""
        if self.held is not None and round_number >= axes.at(self.held, stage):
            # This would raise our floor above the promised one. We would refuse a view that
            # others accept, and neither it nor the round could be decided.
            return True
        return self.barrier is not None and round_number >= axes.at(self.barrier.begins, stage)

    def extend(self, certified: Certified) -> bool:
        """Append the next view, a branch or a return; return False if it is known.

        Raise `BadView` if it does not follow."""
        view, newest = certified.view, self.newest
        if view.number <= newest.number:
            return False
        if view.previous == newest.branch_mark:
            require_branch(self.run, newest, certified)
        elif view.previous == newest.return_mark:
            require_return(self.run, newest, certified)
        else:
            self._require_decided(certified)
        self.views.append(certified)
        self.barrier = self.held = None
        self.goodbyes.clear()
        del self.views[:-KEPT_VIEWS]
        return True

    def since(self, number: int, limit: int = 16) -> tuple[bytes, ...]:
        """Return encoded views after `number`, oldest first; empty if ours do not reach back."""
        if self.views[0].view.number > number + 1:
            return ()
        # `limit` is as many as a `Views` message may carry.
        missing = (entry for entry in self.views if entry.view.number > number)
        return tuple(encode(entry) for entry in itertools.islice(missing, limit))

    def floor(self, raw: bytes, min_floor: Floor) -> Floor:
        """Return an empty floor for an acceptable next view, else the lowest acceptable one."""
        try:
            view = decode_view(raw)
            self._require_successor(view)
        except BadView:
            return min_floor or (1,)  # Never empty: that would mean acceptable.
        return NO_FLOOR if reaches(view.begins, min_floor) else min_floor

    def _require_decided(self, certified: Certified) -> None:
        view, newest = certified.view, self.newest
        self._require_successor(view)
        decided = Decided(
            view_key(view.number), newest.hash, encode(view), certified.ballot, certified.proofs
        )
        if not is_certified(decided, len(newest.members), checker(self.run, newest)):
            raise BadView(
                f"view {view.number} lacks the signatures of a quorum of view {newest.number}"
            )

    def _require_successor(self, view: View) -> None:
        newest = self.newest
        if view.number != newest.number + 1 or view.previous != newest.hash or view.states:
            raise BadView(f"view {view.number} does not follow view {newest.number}")
        # It may begin at the same rounds: it then replaces a view that never held.
        if not reaches(view.begins, newest.begins):
            raise BadView(
                f"view {view.number} begins at rounds {view.begins}, before {newest.begins}"
            )


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
) -> tuple[Member, ...] | None:
    """Return the next view's members, or None if nothing changes.

    Dead and leaving members go, restarted ones move to the end in their new life, and joiners
    follow in the order of their ids."""
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
    # Joiners over the limit repeat their requests, and enter once there is room.
    members = (staying + coming)[:MAX_MEMBERS]
    return None if members == view.members or not members else members
