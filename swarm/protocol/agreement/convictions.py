"""Convictions: two signed statements of one member that no honest member makes both.

A member accepts one value in a ballot, ever; and it promises what it has accepted, and accepts
nothing below what it has promised. So two acceptances of different values in one ballot prove that
their signer lies, and so does a promise beside an acceptance in an earlier ballot that the promise
does not show. Both hold across restarts: a member that votes in a further life has its votes on
its disk. Whoever holds two such statements can show them to anybody, and no other word is needed.

Not among them is a refusal beside an acceptance of the same value: what a member refuses may change
with what it hears.

Sans I/O, pure.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any

import msgspec

from farflock.swarm.identity import verify
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    MAX_PROOFS_SENT,
    Ballot,
    Digest,
    Ground,
    Key,
    RoundsByAxis,
    Signature,
)
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.agreement.justified import promised_text, vote_domain, vote_text

MAX_KEPT = 8  # statements of each kind and member that are kept of one decision: the newest


class SignedVote(msgspec.Struct, frozen=True, array_like=True, tag="vote"):
    """An acceptance of the value with this SHA-256."""

    ballot: Ballot
    digest: Digest
    proof: Signature


class SignedPromise(msgspec.Struct, frozen=True, array_like=True, tag="promise"):
    """A promise: `digest` is of the value that its signer had accepted in ballot `accepted`."""

    ballot: Ballot
    floor: RoundsByAxis
    accepted: Ballot | None
    digest: Annotated[bytes, msgspec.Meta(max_length=32)]
    proof: Signature


class Contradiction(msgspec.Struct, frozen=True, array_like=True):
    """A vote of a peer about a key in an electorate (its hash), and what it contradicts."""

    peer: Annotated[str, msgspec.Meta(max_length=64)]
    key: Key
    electorate: Digest
    vote: SignedVote
    against: SignedVote | SignedPromise


class BadProof(ValueError):
    """Bytes that prove no lie."""


_decoder = msgspec.msgpack.Decoder(Contradiction)


def decode_proof(raw: bytes) -> Contradiction:
    """Decode a proof, without looking at its signatures; raise `BadProof` for anything else."""
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadProof(f"not a proof: {error}") from None


def judging(run: str, electorate: Electorate, proofs: Collection[bytes]) -> Electorate:
    """Return the members of an electorate that decide the next view beside these proofs.

    Raise `BadProof` if one proves nothing, or convicts nobody that votes there."""
    if not proofs:
        return electorate
    convicted = set[PeerId]()
    for raw in proofs:
        said = decode_proof(raw)
        if said.peer not in electorate.keys_that_vote or said.peer in convicted:
            raise BadProof("a proof against a peer that has no vote here")
        if not is_proven(run, said):
            raise BadProof("a proof that proves nothing")
        convicted.add(said.peer)
    return electorate.without(convicted)


class Judges:
    """The voters that decide one view: those of an electorate but for the convicted, as far as they
    are known here. `proofs` are against those that are left out."""

    def __init__(self, electorate: Electorate) -> None:
        self.electorate, self._all = electorate, electorate
        self.proofs: tuple[bytes, ...] = ()

    def leave_out(self, proofs: Mapping[PeerId, bytes]) -> bool:
        """Leave out the voters among these convicted peers, as many as a message has proofs; return
        True if that is a change."""
        if not proofs:
            return False
        voters = [peer for peer in self._all.keys_that_vote if peer in proofs]
        against = {peer: proofs[peer] for peer in voters[:MAX_PROOFS_SENT]}
        electorate = self._all.without(against)
        if electorate == self.electorate:
            return False
        self.electorate = electorate
        self.proofs = tuple(against[self._all.peers[index]] for index in sorted(self.left_out))
        return True

    @property
    def left_out(self) -> Collection[int]:
        """The convicted voters, by index."""
        return self.electorate.learners - self._all.learners

    def needed_by(self, signers: Collection[int]) -> tuple[bytes, ...]:
        """Return the proofs without which these signers would be no quorum."""
        return () if self._all.is_quorum(signers) else self.proofs


def contradict(vote: SignedVote, other: SignedVote | SignedPromise) -> bool:
    """True if no honest member signs both, about one key in one electorate."""
    if isinstance(other, SignedVote):
        return vote.ballot == other.ballot and vote.digest != other.digest
    if vote.ballot >= other.ballot:
        return False
    # Whichever of the two came first: it voted below its promise, or promised without its vote.
    hides = other.accepted is None or other.accepted < vote.ballot
    return hides or (other.accepted == vote.ballot and other.digest != vote.digest)


def is_proven(run: str, said: Contradiction) -> bool:
    """True if a peer has signed both statements in this run, and they contradict each other."""
    if not contradict(said.vote, said.against):
        return False
    texts = [(_text(said, each), each.proof) for each in (said.vote, said.against)]
    return all(verify(said.peer, vote_domain(run), text, proof) for text, proof in texts)


def _text(said: Contradiction, statement: SignedVote | SignedPromise) -> bytes:
    key, voters = said.key, said.electorate
    if isinstance(statement, SignedVote):
        return vote_text(key, voters, statement.ballot, statement.digest)
    accepted, digest = statement.accepted, statement.digest
    return promised_text(key, voters, statement.ballot, accepted, digest, statement.floor)


class Testimony:
    """Statements that members (indices) have signed in one decision, as far as known here; the
    signatures are good. `found` is called with each contradiction."""

    def __init__(
        self, key: Key, electorate: Electorate, found: Callable[[Contradiction], None]
    ) -> None:
        self._key, self._electorate, self._found = key, electorate, found
        self._votes: dict[int, dict[tuple[Ballot, bytes], SignedVote]] = {}
        self._promises: dict[int, dict[Ballot, SignedPromise]] = {}

    def hear_votes(
        self, ballot: Ballot, digest: bytes, proofs: Iterable[tuple[int, bytes]]
    ) -> None:
        """Note acceptances of one value."""
        for member, proof in proofs:
            vote, kept = SignedVote(ballot, digest, proof), self._votes.setdefault(member, {})
            others: list[SignedVote | SignedPromise] = [
                *kept.values(),
                *self._promises.get(member, {}).values(),
            ]
            _keep(kept, (ballot, digest), vote)
            against = next((each for each in others if contradict(vote, each)), None)
            if against is not None:
                self._tell(member, vote, against)

    def hear_promises(self, ballot: Ballot, grounds: Iterable[Ground]) -> None:
        """Note promises, as a proposal shows them."""
        for each in grounds:
            said = SignedPromise(ballot, each.floor, each.accepted, each.digest, each.proof)
            kept = self._promises.setdefault(each.member, {})
            _keep(kept, ballot, said)
            votes = self._votes.get(each.member, {}).values()
            vote = next((vote for vote in votes if contradict(vote, said)), None)
            if vote is not None:
                self._tell(each.member, vote, said)

    def _tell(self, member: int, vote: SignedVote, other: SignedVote | SignedPromise) -> None:
        peer, voters = self._electorate.peers[member], self._electorate.hash
        self._found(Contradiction(peer, self._key, voters, vote, other))


def _keep(kept: dict[Any, Any], name: object, said: object) -> None:
    """Keep the newest statements: a liar could fill the table with old ones."""
    kept.setdefault(name, said)
    while len(kept) > MAX_KEPT:
        del kept[next(iter(kept))]
