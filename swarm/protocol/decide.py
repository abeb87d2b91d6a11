"""Single-decree Paxos among the members of a view: one value for one key, whatever is lost.

Sans I/O: messages and `retry` come in, messages go out. The first proposer in the seeded order owns
ballot 0 and skips phase 1, so an undisturbed decision takes one round trip and a broadcast. A
quorum is more than half of the members; of exactly half, the half with the view's most senior
member (index 0), so that two peers go on when the newer one dies. Any two quorums share a member,
which is what agreement rests on (Lamport, "Paxos Made Simple", 2001).

Restarted members lose their promises: they come back under a new incarnation and are not members
until the next view, so no acceptor ever forgets.

One step beyond the paper: an acceptor may refuse a value for good (`AcceptanceRules`). If so many
refused a value that no quorum is left for it, it was never chosen and never will be, so a proposer
that finds it accepted by the others is bound to nothing: whatever an earlier ballot could have
chosen, that value's proposer had to repeat.

Each member is an acceptor, a proposer and a learner. An acceptor has no states: it compares
ballots. A proposer has the states of the table:

- *idle*: it has proposed nothing.
- *preparing*: phase 1 of its own ballot; it collects promises.
- *proposing*: phase 2; it collects acceptances. It comes here directly from *idle* if it may skip
  phase 1, and goes back to *preparing* with each new ballot.
- *decided*: a quorum has accepted its value ("accepted"), or it was told of a decision ("learned").
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from farflock.swarm.messages import (
    Accepted,
    Ballot,
    Decided,
    Key,
    Message,
    Prepare,
    Promise,
    Propose,
    Rejected,
)
from farflock.swarm.protocol.axes import NO_FLOOR, Floor, highest
from farflock.swarm.protocol.quorum import is_quorum
from farflock.swarm.protocol.transitions import after

Sends = list[tuple[int, Message]]  # (member index, message)

TAKEOVER_S = 1.0  # each later member waits this much longer before it replaces a silent one

_NEVER: Ballot = (0, 0)

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


def signed_text(key: Key, ballot: Ballot, value: bytes) -> bytes:
    """Return the text that an accepting member signs if the decision must convince outsiders."""
    return msgspec.msgpack.encode((key, ballot)) + value


class AcceptanceRules:
    """A member's rules for values: which it may ever accept, and its proof of acceptance.

    This default accepts every value and proves nothing, so members trust each other: agreement
    among peers that may crash, not among liars.

    Every implementation obeys one law: once `floor` has refused a value that is not the last one
    accepted here, it refuses that value forever. Members whose floors are far apart are not
    `in_step` and must not skip phase 1: each reports its `min_floor`, and a proposer's own value is
    `revised` by these and by the promises."""

    in_step = True

    def floor(self, value: bytes) -> Floor:
        """Return an empty floor for an acceptable value, else the lowest acceptable one."""
        return NO_FLOOR

    def min_floor(self) -> Floor:
        """Return the lowest floor of a value that could be accepted here."""
        return NO_FLOOR

    def revised(self, value: bytes, floor: Floor, promised: Collection[int]) -> bytes:
        """Return the value as phase 1 requires it: to begin at `floor` or later, and to suit the
        members (indices) that promised, which are therefore alive."""
        return value

    def sign(self, text: bytes) -> bytes:
        """Return this member's signature, if a decision must convince outsiders."""
        return b""

    def checks(self, member: int, text: bytes, proof: bytes) -> bool:
        """True if this is the member's signature of this text."""
        return True


@dataclass(slots=True)
class Proposer:
    """One member's attempts to have a value decided, ballot after ballot."""

    state: ProposerState = "idle"
    ballot: Ballot | None = None
    value: bytes = b""
    # By member, the (ballot, value) that it had accepted before.
    promises: dict[int, tuple[Ballot, bytes] | None] = field(default_factory=dict)
    accepts: dict[int, bytes] = field(default_factory=dict)  # proofs by member
    highest: int = 0  # the highest ballot number heard of
    # By proposed value, the members that can never accept it.
    refusers: dict[bytes, set[int]] = field(default_factory=dict)

    def begin(self, event: Literal["prepared", "skipped"], ballot: Ballot, value: bytes) -> None:
        """Begin a ballot with phase 1, or with phase 2 if phase 1 can be skipped."""
        self._move(event)
        self.ballot, self.value, self.promises, self.accepts = ballot, value, {}, {}

    def put(self, value: bytes) -> None:
        """Go on to phase 2 with our value, or one that may have been chosen."""
        self._move("promised")
        self.value = value

    def end(self, event: Literal["accepted", "learned"]) -> None:
        """Note that a value is decided."""
        self._move(event)

    def refused(self, sender: int, rejected: Rejected) -> None:
        """Note that a member rejected a ballot, perhaps because it can never accept the value."""
        self.highest = max(self.highest, rejected.promised[0])
        if rejected.floor and rejected.ballot == self.ballot and self.state == "proposing":
            self.refusers.setdefault(self.value, set()).add(sender)

    def bound_to(self, size: int) -> bytes | None:
        """Return the value that an earlier ballot may have chosen, as far as promised, or None."""
        known = [entry for entry in self.promises.values() if entry is not None]
        if not known or self.is_impossible(max(known)[1], size):
            return None
        return max(known)[1]

    def is_impossible(self, value: bytes, size: int) -> bool:
        """True if so many refuse a value for good that no ballot, past or future, can choose it."""
        refusers = self.refusers.get(value, set())
        return not is_quorum(set(range(size)) - refusers, size)

    def _move(self, event: ProposerEvent) -> None:
        self.state = after(PROPOSER_TABLE, self.state, event)


class Decision:
    """One agreement as one member sees it: acceptor, proposer and learner at once.

    `proposers` are all members' indices in the seeded order. While `holds_back` returns True, this
    member accepts and proposes nothing. `ready` tells whether it may accept a value now; if not,
    call `resume` once it may."""

    def __init__(
        self,
        key: Key,
        view: bytes,
        me: int,
        proposers: tuple[int, ...],
        *,
        rules: AcceptanceRules | None = None,
        holds_back: Callable[[], bool] = lambda: False,
        ready: Callable[[bytes], bool] = lambda value: True,
    ) -> None:
        self.key, self.view, self.me, self.proposers = key, view, me, proposers
        self.rules = rules or AcceptanceRules()
        self._holds_back, self._ready = holds_back, ready
        self.proposer = Proposer()
        self.promised: Ballot = _NEVER
        self.accepted: tuple[Ballot, bytes] | None = None
        self.decided: bytes | None = None
        self.certificate: tuple[Ballot, tuple[tuple[int, bytes], ...]] = (_NEVER, ())
        # The highest floor in any answer: a value below it would be refused there.
        self.known_floor: Floor = NO_FLOOR
        # The last proposal that was not `ready`: (sender, ballot, value).
        self._withheld: tuple[int, Ballot, bytes] | None = None

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.proposers)

    def propose(self, value: bytes) -> Sends:
        """Try to have a value decided; a value that may already be chosen wins over it.

        Call again to begin a new ballot."""
        if self.decided is not None or self._holds_back():
            return []
        proposer = self.proposer
        # Ballot 0 has one owner and nothing can have been chosen before it, so phase 1 would learn
        # nothing. After any promise or acceptance that no longer holds.
        untouched = proposer.ballot is None and self.promised == _NEVER and self.accepted is None
        if untouched and self.rules.in_step and self.me == self.proposers[0]:
            proposer.begin("skipped", (0, self.me), value)
            return self._second_phase()
        # Above every ballot heard of: a lower one would only be rejected.
        proposer.highest = max(proposer.highest, self.promised[0]) + 1
        ballot = (proposer.highest, self.me)
        proposer.begin("prepared", ballot, value)
        return self._broadcast(Prepare(self.key, self.view, ballot))

    def receive(self, sender: int, message: Message) -> Sends:
        """Handle a member's message; return the messages to send."""
        if self.decided is not None:
            return self._answer_decided(sender, message)
        mine, state = self.proposer.ballot, self.proposer.state
        match message:
            case Prepare(ballot=ballot) if ballot[1] == sender and ballot[0] > 0:
                return self._prepare(sender, ballot)
            case Propose(ballot=ballot, value=value) if self._may_use(sender, ballot):
                return self._accept(sender, ballot, value)
            case Promise(ballot=ballot) if ballot == mine and state == "preparing":
                return self._promise(sender, message)
            case Accepted(ballot=ballot, proof=proof) if ballot == mine and state == "proposing":
                return self._accepted(sender, ballot, proof)
            case Rejected():
                self.known_floor = highest(self.known_floor, message.floor)
                self.proposer.refused(sender, message)
            case Decided():
                self._learn(message)
        return []

    def retry(self) -> Sends:
        """Repeat unanswered messages: they may have been lost, and may arrive twice."""
        proposer = self.proposer
        if self.decided is not None or proposer.ballot is None:
            return []
        if proposer.state == "proposing":
            message: Message = Propose(self.key, self.view, proposer.ballot, proposer.value)
            return self._to_others(message, except_for=proposer.accepts)
        return self._to_others(
            Prepare(self.key, self.view, proposer.ballot), except_for=proposer.promises
        )

    def resume(self) -> Sends:
        """Try again to accept the last proposal that was not `ready`."""
        if self.decided is not None or self._withheld is None:
            return []
        withheld, self._withheld = self._withheld, None
        return self._accept(*withheld)

    def announcement(self) -> Decided:
        """Return the message that tells others the decision; there must be one."""
        assert self.decided is not None, f"{self.key} is not decided"
        ballot, proofs = self.certificate
        return Decided(self.key, self.view, self.decided, ballot, proofs)

    # the acceptor

    def _may_use(self, sender: int, ballot: Ballot) -> bool:
        # Only one member may skip phase 1: a second one would not learn what the first had chosen.
        return ballot[1] == sender and (ballot[0] > 0 or sender == self.proposers[0])

    def _prepare(self, sender: int, ballot: Ballot) -> Sends:
        if ballot < self.promised:
            return [(sender, Rejected(self.key, self.view, ballot, self.promised))]
        # An equal ballot is a repeated message, whose answer may have been lost.
        self.promised = ballot
        earlier, value = self.accepted if self.accepted else (None, None)
        return self._deliver(
            sender, Promise(self.key, self.view, ballot, earlier, value, self.rules.min_floor())
        )

    def _accept(self, sender: int, ballot: Ballot, value: bytes) -> Sends:
        if ballot < self.promised:
            return [(sender, Rejected(self.key, self.view, ballot, self.promised))]
        if self._holds_back():
            return []  # as if the message were lost: the proposer repeats it
        floor = self.rules.floor(value)
        if floor:
            return self._deliver(
                sender, Rejected(self.key, self.view, ballot, self.promised, floor)
            )
        if not self._ready(value):
            self._withheld = sender, ballot, value
            return []
        self.promised, self.accepted = ballot, (ballot, value)
        proof = self.rules.sign(signed_text(self.key, ballot, value))
        return self._deliver(sender, Accepted(self.key, self.view, ballot, proof))

    # the proposer

    def _promise(self, sender: int, promise: Promise) -> Sends:
        earlier = (
            (promise.accepted, promise.value)
            if promise.accepted and promise.value is not None
            else None
        )
        proposer = self.proposer
        proposer.promises[sender] = earlier
        self.known_floor = highest(self.known_floor, promise.floor)
        # Any quorum shares a member with every quorum that may have chosen a value before.
        if not is_quorum(proposer.promises.keys(), self.size):
            return []
        # A value that may have been chosen is repeated as it is; only our own is revised.
        value = proposer.bound_to(self.size)
        if value is None:
            value = self.rules.revised(proposer.value, self.known_floor, proposer.promises.keys())
        proposer.put(value)
        return self._second_phase()

    def _second_phase(self) -> Sends:
        assert self.proposer.ballot is not None
        return self._broadcast(
            Propose(self.key, self.view, self.proposer.ballot, self.proposer.value)
        )

    def _accepted(self, sender: int, ballot: Ballot, proof: bytes) -> Sends:
        proposer = self.proposer
        if not self.rules.checks(sender, signed_text(self.key, ballot, proposer.value), proof):
            return []
        proposer.accepts[sender] = proof
        # A quorum of acceptances in one ballot: every later ballot must repeat this value.
        if not is_quorum(proposer.accepts.keys(), self.size):
            return []
        proposer.end("accepted")
        self.decided = proposer.value
        self.certificate = (ballot, tuple(sorted(proposer.accepts.items())))
        return self._to_others(self.announcement())

    # the learner

    def _learn(self, decided: Decided) -> None:
        if is_certified(decided, self.size, self.rules.checks):
            self.proposer.end("learned")
            self.decided, self.certificate = decided.value, (decided.ballot, decided.proofs)

    def _answer_decided(self, sender: int, message: Message) -> Sends:
        if isinstance(message, Prepare | Propose):
            return [(sender, self.announcement())]
        return []

    def _broadcast(self, message: Message) -> Sends:
        return [*self._to_others(message), *self.receive(self.me, message)]

    def _deliver(self, to: int, message: Message) -> Sends:
        return self.receive(self.me, message) if to == self.me else [(to, message)]

    def _to_others(self, message: Message, except_for: Iterable[int] = ()) -> Sends:
        skip = {self.me, *except_for}
        return [(member, message) for member in range(self.size) if member not in skip]


def is_certified(decided: Decided, size: int, checks: Callable[[int, bytes, bytes], bool]) -> bool:
    """True if a quorum of distinct members stands behind a decision.

    Without signatures every claim of a member passes: agreement then holds among honest members
    that crash, not among liars (docs/threat-model.md)."""
    signers = {member for member, _ in decided.proofs if member < size}
    if not is_quorum(signers, size):
        return False
    text = signed_text(decided.key, decided.ballot, decided.value)
    return all(checks(member, text, proof) for member, proof in decided.proofs if member < size)
