"""Enrolment: which peers may come into the next view, and what the view then says about them.

A newcomer needs a request that it made itself, in the life that the view lists. Unless its key is
on the roll already, it also needs a capability: signed by a key that may issue one, with uses left,
and not over. A view names the capability by which each new key came, so that all voters count the
same use, and which of its members vote (swarm/protocol/votes.py).

Places go round by capability, too: while others wait, one with several uses brings nobody into more
than half of them (docs/decisions/044-places-of-one-capability.md).

Sans I/O, pure: a proposer calls `enrolled`, and every voter checks with `unjustified`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from farflock.swarm.capability import Capability, Issuers, shown
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS, Join
from farflock.swarm.protocol import votes
from farflock.swarm.protocol.roll import MAX_ADMITTED, Admittance, Roll
from farflock.swarm.protocol.views import Member, View
from farflock.swarm.protocol.votes import NOTHING_COUNTED, VoteRules
from farflock.swarm.record import unseal
from farflock.swarm.roles import stage_of
from farflock.swarm.statements import NO_ORDERS, Orders

# Places that the keys of one capability with several uses may hold while others wait for one.
MAX_PLACES_EACH = MAX_MEMBERS // 2
OUT_OF_TURN = "its capability holds half of the places, and others wait"


@dataclass(frozen=True, slots=True)
class JoinClaim:
    """A verified request to join: whose it is, in which life, by which capability, if any, and
    when the voter first heard it, in Unix seconds by its own clock.

    Whoever asked in time is let in, however long a decision takes."""

    member: Member
    capability: Capability | None
    request: Join
    asked_s: float

    @property
    def shown(self) -> bytes | None:
        """The name of its capability."""
        return None if self.capability is None else self.capability.id


Additions = Sequence[tuple[PeerId, Admittance]]  # keys that are to be on the roll
Claims = Mapping[PeerId, Sequence[JoinClaim]]  # what a voter has heard, by joiner


@dataclass(frozen=True, slots=True)
class Enrolment:
    """A voter's knowledge by which it judges who comes in, and who votes.

    `roll` is the newest view's; None if it is not known here."""

    roll: Roll | None
    heard: Claims
    issuers: Issuers
    orders: Orders = NO_ORDERS
    votes: VoteRules = NOTHING_COUNTED

    def roll_of(self, view: View) -> Roll | None:
        """Return a view's roll, if it is known here."""
        return self.roll if self.roll is not None and self.roll.root == view.roll else None


def claim_of(request: Join, run: str, unix_s: float) -> JoinClaim:
    """Verify a request to join, whoever brought it; raise `BadRecord` or `BadCapability`."""
    record = unseal(request.record, run)
    member = Member(record.peer, record.incarnation, stage_of(record.role))
    return JoinClaim(member, shown(run, record.peer, request), request, unix_s)


def refusal(
    claim: JoinClaim,
    roll: Roll,
    issuers: Issuers,
    before: Additions = (),
    orders: Orders = NO_ORDERS,
) -> str | None:
    """Return why a key may not come in, in words; None if it may. The keys `before` it are not on
    the roll yet, but go first."""
    peer, capability = claim.member.peer, claim.capability
    if peer in orders.banned:
        return "it is banned"
    if peer in roll:
        return None
    if orders.closed:
        return "the founder has closed the run to new keys"
    if capability is None:
        return "it shows no capability"
    if not issuers.allows(capability.issuer, roll.__contains__):
        return "the issuer of its capability may not issue any"
    if capability.is_over(claim.asked_s):
        return "its capability has expired"
    waiting = sum(by.capability == capability.id for _, by in before)
    if capability.room(roll.used(capability.id) + waiting) < 1:
        return "its capability is used up"
    if len(roll) + len(before) >= MAX_ADMITTED:
        return f"the run has admitted {MAX_ADMITTED} keys, and takes no more"
    return None


def crowded(parent: View, enrolment: Enrolment) -> frozenset[bytes]:
    """Return the capabilities that bring nobody into the next view, because they hold half of the
    places, and more keys of others wait than there are places left.

    Only those that the founder or an authority invited go first: a member could otherwise put
    others out by invites of its own, as many as it likes."""
    roll = enrolment.roll_of(parent)
    full = frozenset[bytes]() if roll is None else full_capabilities(parent, roll)
    if roll is None or not full:
        return full
    waiting = sum(
        any(_goes_first(claim, roll, full, enrolment) for claim in claims)
        for peer, claims in enrolment.heard.items()
        if not parent.lists(peer)
    )
    return full if waiting > MAX_MEMBERS - len(parent.members) else frozenset()


def full_capabilities(view: View, roll: Roll) -> frozenset[bytes]:
    """Return the capabilities with several uses whose keys hold half of the places, or more."""
    held = _held(view, roll).items()
    return frozenset(name for name, members in held if len(members) >= MAX_PLACES_EACH)


def over_half(view: View, roll: Roll) -> frozenset[Member]:
    """Return the members beyond half of the places by one capability with several uses: they give
    way to others that wait. A voter keeps its place."""
    learners = {view.peers[index] for index in view.learners}
    return frozenset(
        member
        for members in _held(view, roll).values()
        for member in members[MAX_PLACES_EACH:]
        if member.peer in learners
    )


def has_to_wait(
    peer: PeerId, shown: bytes | None, roll: Roll, without_place: Collection[bytes]
) -> bool:
    """True if a newcomer's capability, that on the roll or else the one `shown`, is one of these.
    A key that holds a vote comes back to it at once."""
    entry = roll.entry_of(peer)
    name = shown if entry is None else entry.by.capability
    return name in without_place and peer not in roll.voting


def _held(view: View, roll: Roll) -> dict[bytes, list[Member]]:
    """Return the members by each capability with several uses, the most senior first."""
    held: dict[bytes, list[Member]] = {}
    for member in view.members:
        entry = roll.entry_of(member.peer)
        if entry is not None and entry.uses != 1:
            held.setdefault(entry.by.capability, []).append(member)
    return held


def _goes_first(
    claim: JoinClaim, roll: Roll, full: Collection[bytes], enrolment: Enrolment
) -> bool:
    capability, issuers = claim.capability, enrolment.issuers
    if capability is None or not issuers.may_give_votes(capability.issuer):
        return False
    if has_to_wait(claim.member.peer, claim.shown, roll, full):
        return False
    return refusal(claim, roll, issuers, (), enrolment.orders) is None


def enrolled(parent: View, view: View, enrolment: Enrolment) -> View:
    """Return a proposal without those that may not come in, with the roll that it makes, and with
    the votes that its members may have.

    Without the parent's roll no new key comes in: its uses could not be counted."""
    roll, members = enrolment.roll_of(parent), list[Member]()
    additions: list[tuple[PeerId, Admittance]] = []
    admits: list[tuple[int, Admittance]] = []
    crowd = crowded(parent, enrolment)
    for member in view.members:
        if member.peer in enrolment.orders.banned:
            continue
        if member in parent.members or member.peer in parent.peers:
            members.append(member)
            continue
        claim = _first_admissible(member, roll, additions, enrolment)
        if roll is None or claim is None or has_to_wait(member.peer, claim.shown, roll, crowd):
            continue
        if member.peer not in roll and claim.capability is not None:
            by = admittance_of(claim.capability, enrolment.issuers)
            additions.append((member.peer, by))
            admits.append((len(members), by))
        members.append(member)
    after = None if roll is None else roll.with_keys(additions)
    learners = votes.learners(parent, members, after, enrolment.votes)
    view = msgspec.structs.replace(
        view,
        members=tuple(members),
        admits=tuple(admits),
        learners=learners,
        statement=max(parent.statement, enrolment.orders.newest, key=lambda newest: newest[0]),
    )
    root, size = _roll_after(parent, view, after)
    return msgspec.structs.replace(view, roll=root, roll_bytes=size)


def unjustified(parent: View, view: View, enrolment: Enrolment) -> str | None:
    """Return why a voter must not sign a view for those who come in, or for those who vote, in
    words; None if it may.

    It may be justified later: a request may still arrive, and so may the parent's roll."""
    roll = enrolment.roll_of(parent)
    if view.statement[0] < parent.statement[0]:
        return "it forgets what the founder has stated"
    if banned := next((peer for peer in view.peers if peer in enrolment.orders.banned), None):
        return f"{banned}: it is banned"
    if why := _out_of_turn(parent, view, enrolment):
        return why
    additions = _additions(parent, view, enrolment)
    if isinstance(additions, str):
        return additions
    after = None if roll is None else roll.with_keys(additions)
    if why := votes.unjustified(parent, view, after, enrolment.votes):
        return why
    root = _roll_after(parent, view, after)
    return None if (view.roll, view.roll_bytes) == root else "it names another roll"


def gives_votes(parent: View, enrolment: Enrolment) -> bool:
    """True if members of a view may take up votes in the next one."""
    known = enrolment.roll_of(parent), enrolment.votes
    return votes.learners(parent, parent.members, *known) != parent.learners


def admittance_of(capability: Capability, issuers: Issuers) -> Admittance:
    """Return what the roll says about a capability.

    Those that members issue bring no votes: one member could make a majority of its own keys."""
    brings = capability.votes if issuers.may_give_votes(capability.issuer) else 0
    return Admittance(capability.id, capability.uses, brings)


def _roll_after(parent: View, view: View, after: Roll | None) -> tuple[bytes, int]:
    """Return the root and the size of a view's roll; `after` is the parent's with new keys."""
    if after is None:
        return parent.roll, parent.roll_bytes
    after = after.with_votes([view.peers[index] for index in view.electorate.voters])
    return after.root, len(after.encoded)


def _additions(
    parent: View, view: View, enrolment: Enrolment
) -> list[tuple[PeerId, Admittance]] | str:
    """Return the keys that a view is the first to list; a sentence if one must not come in."""
    roll, admits = enrolment.roll_of(parent), dict(view.admits)
    additions: list[tuple[PeerId, Admittance]] = []
    for index, member in enumerate(view.members):
        new = _new_keys_claims(member, parent, roll, enrolment.heard)
        if isinstance(new, str):
            return f"{member.peer}: {new}"
        by = admits.pop(index, None)
        if new is None:
            if by is not None:
                return f"{member.peer}: it needs no admission"
            continue
        claim = next((each for each in new if _by(each, enrolment.issuers) == by), None)
        if claim is None or by is None or roll is None:
            return f"{member.peer}: it has not shown the capability that the view names"
        if why := refusal(claim, roll, enrolment.issuers, additions, enrolment.orders):
            return f"{member.peer}: {why}"
        additions.append((member.peer, by))
    if admits or len(view.admits) != len(additions):
        return "it admits a member that it does not list, or one twice"
    return additions


def _out_of_turn(parent: View, view: View, enrolment: Enrolment) -> str | None:
    """Return which newcomer has to wait for others, in words; None if no one does."""
    roll, crowd = enrolment.roll_of(parent), crowded(parent, enrolment)
    named = {index: by.capability for index, by in view.admits}
    for index, member in enumerate(view.members):
        if roll is None or parent.lists(member.peer):
            continue
        if has_to_wait(member.peer, named.get(index), roll, crowd):
            return f"{member.peer}: {OUT_OF_TURN}"
    return None


def _new_keys_claims(
    member: Member, parent: View, roll: Roll | None, heard: Claims
) -> Collection[JoinClaim] | str | None:
    """Return the claims by which a new key may come in; None if it needs no admission; a sentence
    if it must not come in as far as is known here."""
    if member in parent.members:
        return None
    claims = [claim for claim in heard.get(member.peer, ()) if claim.member == member]
    if not claims:
        return "no request of it in this life is known here"
    if member.peer in parent.peers:
        return None
    if roll is None:
        return "the roll is not known here"
    return None if member.peer in roll else claims


def _first_admissible(
    member: Member, roll: Roll | None, additions: Additions, enrolment: Enrolment
) -> JoinClaim | None:
    if roll is None:
        return None
    for claim in enrolment.heard.get(member.peer, ()):
        may_come = refusal(claim, roll, enrolment.issuers, additions, enrolment.orders) is None
        if claim.member == member and may_come:
            return claim
    return None


def _by(claim: JoinClaim, issuers: Issuers) -> Admittance | None:
    return None if claim.capability is None else admittance_of(claim.capability, issuers)
