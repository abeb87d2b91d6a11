"""Single-decree Paxos among the members of a view: one value for one key, whatever crashes, is late or is lost.

Sans I/O: messages and `retry` come in, messages go out. The first proposer of the seeded order owns ballot 0 and skips
the first phase, so that an undisturbed decision takes one round trip and a broadcast. A quorum is more than half of
the members; of exactly half, the half with the view's most senior member (index 0), so that two peers go on when the
newer one dies. Any two quorums share a member, which is what agreement rests on (Lamport, "Paxos Made Simple", 2001).

Members that restart lose their promises: they come back under a new incarnation and are not members until the next
view, so no acceptor ever forgets.

One step beyond the paper: an acceptor may refuse a value for good (`floor`). A value that so many refused that no
quorum is left for it was never chosen and never will be, so a proposer that finds it accepted by the others is bound to
nothing: whatever an earlier ballot could have chosen, that value's proposer had to repeat.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

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

Sends = list[tuple[int, Message]]  # (member index, message)

_NEVER: Ballot = (0, 0)


def is_quorum(members: Collection[int], size: int) -> bool:
    """Whether these distinct member indices may decide for a view of `size` members."""
    return 2 * len(members) > size or (2 * len(members) == size and 0 in members)


def signed_text(key: Key, ballot: Ballot, value: bytes) -> bytes:
    """What an accepting member signs where the decision must convince outsiders."""
    return msgspec.msgpack.encode((key, ballot)) + value


@dataclass(slots=True)
class Decision:
    """One agreement as one member sees it: acceptor, proposer and learner at once.

    `proposers` are member indices in the seeded order. `floor` says why a value cannot be accepted here: nothing if it can,
    else the least rounds that could (views only); once refused, a value that is not the last one accepted here must be
    refused for ever. Members whose floors are far apart must not skip the first phase (`in_step` False): there each tells
    its `least`, and the proposer's own value is `lifted` to the highest. `sign` signs what this member accepts; `checks`
    verifies another member's signature.
    """

    key: Key
    view: bytes
    me: int
    size: int
    proposers: tuple[int, ...]
    floor: Callable[[bytes], Floor] = lambda value: NO_FLOOR
    in_step: bool = True
    least: Callable[[], Floor] = lambda: NO_FLOOR
    lifted: Callable[[bytes, Floor], bytes] = lambda value, floor: value
    sign: Callable[[bytes], bytes] = lambda text: b""
    checks: Callable[[int, bytes, bytes], bool] = lambda member, text, proof: True
    holds_back: Callable[[], bool] = lambda: False  # while this is so, I accept nothing and put nothing forward
    ready: Callable[[bytes], bool] = lambda value: True  # whether I may accept this value now; if not, `resume` follows

    promised: Ballot = _NEVER
    accepted: tuple[Ballot, bytes] | None = None
    decided: bytes | None = None
    certificate: tuple[Ballot, tuple[tuple[int, bytes], ...]] = (_NEVER, ())
    known_floor: Floor = NO_FLOOR  # the highest that anybody answered with: a value below it would be refused there

    _ballot: Ballot | None = None
    _value: bytes | None = None
    _promises: dict[int, tuple[Ballot, bytes] | None] = field(default_factory=dict)
    _accepts: dict[int, bytes] = field(default_factory=dict)
    _proposing: bool = False  # in phase 2 of my ballot
    _refusers: dict[bytes, set[int]] = field(default_factory=dict)  # of each value that I put forward
    _highest: int = 0
    _withheld: tuple[int, Ballot, bytes] | None = None  # the last proposal that I was not ready for, and whose

    def propose(self, value: bytes) -> Sends:
        """Try to have a value decided: an earlier accepted one wins over it. Call again to start a new ballot."""
        if self.decided is not None or self.holds_back():
            return []
        first_time = self._ballot is None and self.promised == _NEVER and self.accepted is None
        self._value, self._promises, self._accepts = value, {}, {}
        if first_time and self.in_step and self.me == self.proposers[0]:
            self._ballot = (0, self.me)
            return self._second_phase(value)
        self._highest = max(self._highest, self.promised[0]) + 1
        self._ballot, self._proposing = (self._highest, self.me), False
        return self._broadcast(Prepare(self.key, self.view, self._ballot))

    def receive(self, sender: int, message: Message) -> Sends:
        """Take a member's message in; returns what to send."""
        if self.decided is not None:
            return self._answer_decided(sender, message)
        match message:
            case Prepare(ballot=ballot) if ballot[1] == sender and ballot[0] > 0:
                return self._prepare(sender, ballot)
            case Propose(ballot=ballot, value=value) if ballot[1] == sender and self._may_use(ballot):
                return self._accept(sender, ballot, value)
            case Promise(ballot=ballot) if ballot == self._ballot and not self._proposing:
                return self._promise(sender, message)
            case Accepted(ballot=ballot, proof=proof) if ballot == self._ballot and self._proposing:
                return self._accepted(sender, proof)
            case Rejected():
                self._rejected(sender, message)
            case Decided():
                self._learn(message)
        return []

    def retry(self) -> Sends:
        """Repeat what has not been answered yet; everything here may be lost and may be repeated."""
        if self.decided is not None or self._ballot is None:
            return []
        if self._proposing:
            assert self._value is not None
            message: Message = Propose(self.key, self.view, self._ballot, self._value)
            return self._to_others(message, except_for=self._accepts)
        return self._to_others(Prepare(self.key, self.view, self._ballot), except_for=self._promises)

    def resume(self) -> Sends:
        """I may have become ready for what I could not accept."""
        if self.decided is not None or self._withheld is None:
            return []
        withheld, self._withheld = self._withheld, None
        return self._accept(*withheld)

    def announcement(self) -> Decided:
        """The decision as others may learn it; only after it was made."""
        assert self.decided is not None, f"{self.key} is not decided"
        ballot, proofs = self.certificate
        return Decided(self.key, self.view, self.decided, ballot, proofs)

    def _may_use(self, ballot: Ballot) -> bool:
        return ballot[0] > 0 or ballot[1] == self.proposers[0]

    def _prepare(self, sender: int, ballot: Ballot) -> Sends:
        if ballot < self.promised:
            return [(sender, Rejected(self.key, self.view, ballot, self.promised))]
        self.promised = ballot
        earlier, value = self.accepted if self.accepted else (None, None)
        return self._deliver(sender, Promise(self.key, self.view, ballot, earlier, value, self.least()))

    def _accept(self, sender: int, ballot: Ballot, value: bytes) -> Sends:
        if ballot < self.promised:
            return [(sender, Rejected(self.key, self.view, ballot, self.promised))]
        if self.holds_back():
            return []
        floor = self.floor(value)
        if floor:
            return self._deliver(sender, Rejected(self.key, self.view, ballot, self.promised, floor))
        if not self.ready(value):
            self._withheld = sender, ballot, value
            return []
        self.promised, self.accepted = ballot, (ballot, value)
        proof = self.sign(signed_text(self.key, ballot, value))
        return self._deliver(sender, Accepted(self.key, self.view, ballot, proof))

    def _promise(self, sender: int, promise: Promise) -> Sends:
        earlier = (promise.accepted, promise.value) if promise.accepted and promise.value is not None else None
        self._promises[sender] = earlier
        self.known_floor = highest(self.known_floor, promise.floor)
        if not is_quorum(self._promises.keys(), self.size):
            return []
        known = [entry for entry in self._promises.values() if entry is not None]
        assert self._value is not None
        if known and not self._is_impossible(max(known)[1]):
            return self._second_phase(max(known)[1])
        return self._second_phase(self.lifted(self._value, self.known_floor))

    def _rejected(self, sender: int, rejected: Rejected) -> None:
        self._highest = max(self._highest, rejected.promised[0])
        self.known_floor = highest(self.known_floor, rejected.floor)
        if rejected.floor and rejected.ballot == self._ballot and self._proposing and self._value is not None:
            self._refusers.setdefault(self._value, set()).add(sender)

    def _is_impossible(self, value: bytes) -> bool:
        """Whether so many refuse a value for good that it can be chosen in no ballot, past ones included."""
        refusers = self._refusers.get(value, set())
        return not is_quorum(set(range(self.size)) - refusers, self.size)

    def _second_phase(self, value: bytes) -> Sends:
        assert self._ballot is not None
        self._value, self._proposing = value, True
        return self._broadcast(Propose(self.key, self.view, self._ballot, value))

    def _accepted(self, sender: int, proof: bytes) -> Sends:
        assert self._ballot is not None
        assert self._value is not None
        if not self.checks(sender, signed_text(self.key, self._ballot, self._value), proof):
            return []
        self._accepts[sender] = proof
        if not is_quorum(self._accepts.keys(), self.size):
            return []
        self.decided = self._value
        self.certificate = (self._ballot, tuple(sorted(self._accepts.items())))
        return self._to_others(self.announcement())

    def _learn(self, decided: Decided) -> None:
        if is_certified(decided, self.size, self.checks):
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
    """Whether a quorum of distinct members stands behind a decision. Where members do not sign, every claim of a
    member passes: agreement then holds among honest members that crash, not among liars (docs/threat-model.md)."""
    signers = {member for member, _ in decided.proofs if member < size}
    if not is_quorum(signers, size):
        return False
    text = signed_text(decided.key, decided.ballot, decided.value)
    return all(checks(member, text, proof) for member, proof in decided.proofs if member < size)
