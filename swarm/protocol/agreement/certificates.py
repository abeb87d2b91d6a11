"""Certificates: the signatures of a quorum under one value, in one ballot, for one key."""

from collections.abc import Callable

from farflock.swarm.identity import verify
from farflock.swarm.messages import Ballot, Decided, Key
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.agreement.justified import digest_of, vote_domain, vote_text


def signed_text(key: Key, electorate: bytes, ballot: Ballot, value: bytes) -> bytes:
    """Return the text that a member of the electorate with this hash signs when it accepts."""
    return vote_text(key, electorate, ballot, digest_of(value))


def checker(run: str, electorate: Electorate) -> Callable[[int, bytes, bytes], bool]:
    """Return a function that verifies the votes of an electorate's members."""
    domain = vote_domain(run)
    return lambda member, text, proof: verify(electorate.peers[member], domain, text, proof)


def is_certified(
    decided: Decided, electorate: Electorate, checks: Callable[[int, bytes, bytes], bool]
) -> bool:
    """True if a quorum of an electorate has signed a decision, and no signature is false."""
    proofs = dict(decided.proofs)
    is_whole = len(proofs) == len(decided.proofs) and all(map(electorate.votes, proofs))
    if decided.view != electorate.hash or not is_whole or not electorate.is_quorum(proofs.keys()):
        return False
    text = signed_text(decided.key, decided.view, decided.ballot, decided.value)
    return all(checks(member, text, proof) for member, proof in proofs.items())
