"""Justification of a proposal in a later ballot: the signed promises of a quorum.

A proposer is not believed about what earlier ballots promised. It shows the promises that its value
follows from, and an acceptor draws the conclusion itself: the value of the highest ballot that any
of them accepted, or, if none did, a value that suits their floors. Otherwise one lying proposer
could have a second value accepted beside one that a quorum had chosen.

A promise binds to nothing if so many members refuse its value for good that no quorum is left for
it; then the proposer shows their signed refusals. A member that signs a promise and hides a vote in
it, or refuses what it accepts, contradicts itself in two signed statements.
"""

import hashlib
from collections.abc import Callable

import msgspec

from farflock.swarm.messages import Ballot, Ground, Key, Promise, Propose
from farflock.swarm.protocol.agreement.axes import Floor
from farflock.swarm.protocol.agreement.electorate import Electorate

Checks = Callable[[int, bytes, bytes], bool]  # (member, text, signature)


def digest_of(value: bytes) -> bytes:
    """Return the hash by which signed statements name a value."""
    return hashlib.sha256(value).digest()


def vote_domain(run: str) -> bytes:
    """Return the domain of votes, which is different for each run."""
    return b"vote" + hashlib.sha256(run.encode()).digest()[:16]


def vote_text(key: Key, electorate: bytes, ballot: Ballot, digest: bytes) -> bytes:
    """Return the text that a member of the electorate with this hash signs when it accepts."""
    return msgspec.msgpack.encode((electorate, key, ballot, digest))


def promise_text(promise: Promise) -> bytes:
    """Return the text that a member signs when it promises."""
    accepted = None if promise.value is None else promise.accepted
    digest = b"" if promise.value is None else digest_of(promise.value)
    return promised_text(promise.key, promise.view, promise.ballot, accepted, digest, promise.floor)


def promised_text(
    key: Key,
    electorate: bytes,
    ballot: Ballot,
    accepted: Ballot | None,
    digest: bytes,
    floor: Floor,
) -> bytes:
    """Return the text of a promise that names what its signer had accepted by ballot and hash."""
    return msgspec.msgpack.encode(("promised", electorate, key, ballot, accepted, digest, floor))


def refusal_text(key: Key, electorate: bytes, digest: bytes) -> bytes:
    """Return the text that a member signs when it refuses the value with this digest for good."""
    return msgspec.msgpack.encode(("refused", electorate, key, digest))


def ground_of(member: int, promise: Promise) -> Ground:
    """Return a promise as a proposal shows it."""
    if promise.accepted is None or promise.value is None:
        return Ground(member, promise.floor, promise.proof)
    digest = digest_of(promise.value)
    return Ground(member, promise.floor, promise.proof, promise.accepted, digest)


def is_justified(proposal: Propose, electorate: Electorate, checks: Checks) -> bool:
    """True if a proposal shows the promises of a quorum for its ballot, and its value is the one
    that these bind it to, if there is one."""
    grounds = {ground.member: ground for ground in proposal.grounds}
    if len(grounds) != len(proposal.grounds) or not all(map(electorate.votes, grounds)):
        return False
    if not electorate.is_quorum(grounds.keys()):
        return False
    if not all(_is_signed(proposal, ground, checks) for ground in grounds.values()):
        return False
    accepted = [
        (ground.accepted, ground.digest)
        for ground in grounds.values()
        if ground.accepted is not None
    ]
    if not accepted:
        return True
    _, bound = max(accepted)
    return bound == digest_of(proposal.value) or _is_impossible(proposal, bound, electorate, checks)


def _is_signed(proposal: Propose, ground: Ground, checks: Checks) -> bool:
    # No ballot below this one, or a promise that names a later vote: nobody signs that.
    if ground.accepted is not None and ground.accepted >= proposal.ballot:
        return False
    key, view, ballot = proposal.key, proposal.view, proposal.ballot
    text = promised_text(key, view, ballot, ground.accepted, ground.digest, ground.floor)
    return checks(ground.member, text, ground.proof)


def _is_impossible(
    proposal: Propose, digest: bytes, electorate: Electorate, checks: Checks
) -> bool:
    """True if so many refuse a value for good that no ballot, past or future, can choose it."""
    refusals = dict(proposal.refusals)
    if len(refusals) != len(proposal.refusals):
        return False
    if electorate.is_quorum(set(range(len(electorate))) - refusals.keys()):
        return False
    text = refusal_text(proposal.key, proposal.view, digest)
    return all(
        electorate.votes(member) and checks(member, text, proof)
        for member, proof in refusals.items()
    )
