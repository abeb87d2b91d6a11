"""A proposer of single-decree Paxos: one member's attempts to have a value decided."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from farflock.swarm.messages import Ballot, Key, Promise, Propose
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.agreement.justified import digest_of, ground_of
from farflock.swarm.protocol.agreement.transitions import after

ProposerState = Literal["idle", "preparing", "proposing", "decided"]
ProposerEvent = Literal["skipped", "prepared", "promised", "accepted", "learned"]

PROPOSER_TABLE: dict[tuple[ProposerState, ProposerEvent], ProposerState] = {
    ("idle", "skipped"): "proposing",
    ("idle", "prepared"): "preparing",
    ("idle", "learned"): "decided",
    ("preparing", "prepared"): "preparing",
    ("preparing", "promised"): "proposing",
    ("preparing", "learned"): "decided",
    ("proposing", "prepared"): "preparing",
    ("proposing", "accepted"): "decided",
    ("proposing", "learned"): "decided",
}


@dataclass(slots=True)
class Proposer:
    """One member's attempts to have a value decided, ballot after ballot."""

    key: Key
    view: bytes  # the hash of the electorate
    state: ProposerState = "idle"
    ballot: Ballot | None = None
    value: bytes = b""
    promises: dict[int, Promise] = field(default_factory=dict)  # by member
    accepts: dict[int, bytes] = field(default_factory=dict)  # proofs by member
    highest: int = 0  # the highest ballot number heard of
    # By proposed value, the members that can never accept it, with their signed refusals.
    refusers: dict[bytes, dict[int, bytes]] = field(default_factory=dict)
    _shown: dict[int, bytes] = field(default_factory=dict)  # refusals that free this ballot

    def begin(self, event: Literal["prepared", "skipped"], ballot: Ballot, value: bytes) -> None:
        """Begin a ballot with phase 1, or with phase 2 if phase 1 can be skipped."""
        self._move(event)
        self.ballot, self.value, self.promises, self.accepts = ballot, value, {}, {}
        self._shown = {}

    def bind(self, electorate: Electorate) -> bool:
        """Take over a value that an earlier ballot may have chosen, as far as promised; return
        False if there is none."""
        known = [
            (promise.accepted, promise.value)
            for promise in self.promises.values()
            if promise.accepted is not None and promise.value is not None
        ]
        if not known:
            return False
        # By digest, as acceptors judge: a liar may have had two values accepted in one ballot.
        _, bound = max(known, key=lambda each: (each[0], digest_of(each[1])))
        if self.is_impossible(bound, electorate):
            self._shown = self.refusers[bound]
            return False
        self.value = bound
        return True

    def put(self, value: bytes) -> None:
        """Go on to phase 2 with our value, or one that may have been chosen."""
        self._move("promised")
        self.value = value

    def proposal(self, convictions: tuple[bytes, ...]) -> Propose:
        """Return the proposal of this ballot, with the promises that it follows from, and proofs
        against those whose promises it needs no more."""
        assert self.ballot is not None, f"{self.key}: nothing is proposed here"
        grounds = tuple(ground_of(each, said) for each, said in sorted(self.promises.items()))
        refusals = tuple(sorted(self._shown.items()))
        return Propose(self.key, self.view, self.ballot, self.value, grounds, refusals, convictions)

    def forget(self, members: Collection[int]) -> None:
        """Forget what members have promised and accepted: their votes do not count any more."""
        self.promises = {at: said for at, said in self.promises.items() if at not in members}
        self.accepts = {at: proof for at, proof in self.accepts.items() if at not in members}

    def end(self, event: Literal["accepted", "learned"]) -> None:
        """Note that a value is decided."""
        self._move(event)

    def is_impossible(self, value: bytes, electorate: Electorate) -> bool:
        """True if so many refuse a value for good that no ballot, past or future, can choose it."""
        refusers = self.refusers.get(value, {})
        return not electorate.is_quorum(set(range(len(electorate))) - refusers.keys())

    def _move(self, event: ProposerEvent) -> None:
        self.state = after(PROPOSER_TABLE, self.state, event)
