"""Single-decree Paxos in an electorate: one value for one key, whatever is lost.

Sans I/O: messages and `retry` come in, messages go out. The first proposer in the seeded order owns
ballot 0 and skips phase 1, so an undisturbed decision takes one round trip and a broadcast. Any two
quorums (electorate.py) share a member, which is what agreement rests on (Lamport, "Paxos Made
Simple", 2001).

Members sign what they accept. The signatures of a quorum under one value in one ballot are the
decision's certificate: a peer that only says what was decided is not believed. A member accepts one
value in a ballot, ever; otherwise a proposer could get two quorums for two values in one ballot.

Restarted members lose their promises: they come back under a new incarnation and are not members
until the next view, so no acceptor ever forgets.

A proposer is believed about nothing: after phase 1 it shows the promises that its value follows
from, and each acceptor checks them (justified.py). A ballot number has one owner, and is promised
only in its turn (turns.py).

One step beyond the paper: an acceptor may refuse a value for good (`AcceptanceRules`). If so many
refused a value that no quorum is left for it, it was never chosen and never will be, so a proposer
that finds it accepted by the others is bound to nothing: whatever an earlier ballot could have
chosen, that value's proposer had to repeat.

Each voter is an acceptor, a proposer and a learner; a member without a vote is no acceptor, and a
proposer only if it alone may have something to propose. An acceptor has no states: it compares
ballots. A proposer has the states of the table:

- *idle*: it has proposed nothing.
- *preparing*: phase 1 of its own ballot; it collects promises.
- *proposing*: phase 2; it collects acceptances. It comes here directly from *idle* if it may skip
  phase 1, and goes back to *preparing* with each new ballot.
- *decided*: a quorum has accepted its value ("accepted"), or it was told of a decision ("learned").
"""

from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from farflock.swarm.links import PeerId
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
from farflock.swarm.protocol.agreement.axes import Floor
from farflock.swarm.protocol.agreement.certificates import is_certified, signed_text
from farflock.swarm.protocol.agreement.convictions import BadProof, Judges, Testimony
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.agreement.justified import (
    digest_of,
    ground_of,
    is_justified,
    promise_text,
    refusal_text,
)
from farflock.swarm.protocol.agreement.proposer import Proposer
from farflock.swarm.protocol.agreement.rules import JUSTIFY_TIMEOUT_S, AcceptanceRules, Waits
from farflock.swarm.protocol.agreement.turns import (
    EARLY_S,
    MAX_NUMBER,
    BallotTurns,
    next_ballot,
    owner,
)

Sends = list[tuple[int, Message]]  # (member index, message)

_NEVER: Ballot = (0, 0)
_ANY_TURN = 2**62


class Decision:
    """One agreement as one member sees it: acceptor, proposer and learner at once.

    `proposers` are the indices of all members that may propose, in the seeded order. `ready` tells
    whether this member may accept a value now; if not, call `resume` once it may. `turn` is the
    highest ballot number whose turn has come; without turns, any may begin
    (turns.py)."""

    def __init__(
        self,
        key: Key,
        electorate: Electorate,
        me: int,
        proposers: tuple[int, ...],
        *,
        rules: AcceptanceRules | None = None,
        ready: Callable[[bytes], bool] = lambda value: True,
        justify_timeout_s: float = JUSTIFY_TIMEOUT_S,
    ) -> None:
        self.key, self.me, self.proposers = key, me, proposers
        self.electorate, self.view = electorate, electorate.hash
        self.judges = Judges(electorate)
        self.rules = rules or AcceptanceRules()
        self._ready = ready
        self.testimony = Testimony(key, electorate, self.rules.convict)
        self.proposer = Proposer(key, self.view)
        self.promised: Ballot = _NEVER
        self.accepted: tuple[Ballot, bytes] | None = None
        self.decided: bytes | None = None
        self.certificate: Decided | None = None
        self._turns: BallotTurns | None = None
        self.turn = self._admitted = _ANY_TURN
        self._waits = Waits(justify_timeout_s)
        # The last proposal that was not `ready`: (sender, ballot, value, promised floors).
        self._withheld: tuple[int, Ballot, bytes, Mapping[int, Floor]] | None = None

    def take_turns(self, begun_s: float) -> None:
        """Begin to count turns now; before, no ballot but number 0 may begin."""
        self._turns = BallotTurns(self.proposers, begun_s)

    def pass_time(self, now_s: float, suspects: Collection[int]) -> None:
        """Let time pass: the turns of live members follow each other, and patience ends."""
        self._waits.now_s = now_s
        if self._turns is None:
            self.turn = self._admitted = 0
            return
        number = self.promised[0]
        self.turn = self._turns.latest(number, now_s, suspects)
        self._admitted = self._turns.latest(number, now_s, suspects, EARLY_S)

    def convict(self, proofs: Mapping[PeerId, bytes]) -> None:
        """Decide without these members, of whom all voters can prove that they lie: their votes are
        left out of the quorum. Only for views: rounds belong to the members that are listed."""
        if self.decided is None and self.judges.leave_out(proofs):
            self.proposer.forget(self.judges.left_out)

    @property
    def may_begin(self) -> bool:
        """True if this member may propose, and the turn of its next ballot has come."""
        if self.me not in self.proposers:
            return False
        return self._may_skip or self._next_number() <= self.turn

    def propose(self, value: bytes) -> Sends:
        """Try to have a value decided; a value that may already be chosen wins over it.

        Call again to begin a new ballot."""
        if self.decided is not None or self.rules.holds_back() or not self.may_begin:
            return []
        if self._may_skip:
            self.proposer.begin("skipped", (0, self.me), value)
            return self._broadcast(self.proposer.proposal(self.judges.proofs))
        self.proposer.highest = self._next_number()
        ballot = (self.proposer.highest, self.me)
        self.proposer.begin("prepared", ballot, value)
        return self._broadcast(Prepare(self.key, self.view, ballot))

    @property
    def _may_skip(self) -> bool:
        # Ballot 0 has one owner and nothing can have been chosen before it, so phase 1 would learn
        # nothing. After any promise or acceptance that no longer holds.
        untouched = self.promised == _NEVER and self.accepted is None
        is_first = self.proposer.ballot is None and self.me == self.proposers[0]
        return untouched and is_first and self.rules.in_step

    def _next_number(self) -> int:
        # Above every ballot heard of: a lower one would only be rejected.
        heard = max(self.proposer.highest, self.promised[0])
        return next_ballot(heard, self.proposers, self.me)

    def receive(self, sender: int, message: Message) -> Sends:
        """Handle a member's message; return the messages to send."""
        if self.decided is not None:
            is_asking = isinstance(message, Prepare | Propose)
            return [(sender, self.announcement())] if is_asking else []
        if isinstance(message, Prepare | Propose) and not self.electorate.votes(self.me):
            return []
        mine, state = self.proposer.ballot, self.proposer.state
        match message:
            case Prepare(ballot=ballot) if ballot[0] > 0 and self._may_use(sender, ballot):
                return self._prepare(sender, ballot)
            case Propose(ballot=ballot) if self._may_use(sender, ballot):
                return self._consider(sender, message)
            case Promise(ballot=ballot) if ballot == mine and state == "preparing":
                return self._promise(sender, message)
            case Accepted(ballot=ballot, proof=proof) if ballot == mine and state == "proposing":
                return self._accepted(sender, ballot, proof)
            case Rejected(ballot=ballot) if ballot == mine:
                self._rejected(sender, message)
            case Decided():
                self._learn(message)
        return []

    def retry(self) -> Sends:
        """Repeat unanswered messages: they may have been lost, and may arrive twice."""
        proposer = self.proposer
        if self.decided is not None or proposer.ballot is None:
            return []
        if proposer.state == "proposing":
            proposal = proposer.proposal(self.judges.proofs)
            return self._to_others(proposal, except_for=proposer.accepts)
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
        assert self.certificate is not None, f"{self.key} is not decided"
        return self.certificate

    # the acceptor

    def _may_use(self, sender: int, ballot: Ballot) -> bool:
        if ballot[1] != sender or owner(ballot[0], self.proposers) != sender:
            self.rules.accuse(sender, "a ballot of another member")
            return False
        if ballot[0] > MAX_NUMBER:
            self.rules.accuse(sender, "a ballot that no turn reaches")
            return False
        if self._turns is not None:
            self._turns.hear(ballot[0])
        # Too early by this member's clock: as if the message were lost, for its sender repeats it.
        return ballot[0] <= self._admitted

    def _prepare(self, sender: int, ballot: Ballot) -> Sends:
        if ballot < self.promised:
            return [(sender, Rejected(self.key, self.view, ballot, self.promised))]
        # An equal ballot is a repeated message, whose answer may have been lost.
        self.promised = ballot
        earlier, value = self.accepted if self.accepted else (None, None)
        promise = Promise(self.key, self.view, ballot, earlier, value, self.rules.min_floor())
        proof = self.rules.sign(promise_text(promise))
        return self._deliver(sender, msgspec.structs.replace(promise, proof=proof))

    def _consider(self, sender: int, proposal: Propose) -> Sends:
        """Accept a proposal if it follows from what was promised before."""
        ballot, value = proposal.ballot, proposal.value
        if ballot < self.promised:
            return [(sender, Rejected(self.key, self.view, ballot, self.promised))]
        if self.accepted == (ballot, value):  # repeated, and checked before
            return self._accept(sender, ballot, value, {})
        is_mine, voters = sender == self.me, self.judges.electorate
        if ballot[0] > 0 and not is_mine:
            if not is_justified(proposal, voters, self.rules.checks):
                self.rules.accuse(sender, "a proposal that does not follow from its promises")
                return []
            self.testimony.hear_promises(ballot, proposal.grounds)
        is_bound = any(ground.accepted is not None for ground in proposal.grounds)
        if not is_mine and not is_bound and (lie := self.rules.contradicts(proposal)) is not None:
            self.rules.accuse(sender, lie)
            return []
        floors = {ground.member: ground.floor for ground in proposal.grounds}
        return self._accept(sender, ballot, value, floors)

    def _accept(
        self, sender: int, ballot: Ballot, value: bytes, floors: Mapping[int, Floor]
    ) -> Sends:
        if ballot < self.promised or self.rules.holds_back():
            return []  # as if the message were lost: the proposer repeats it
        if self.accepted is not None and self.accepted[0] == ballot and self.accepted[1] != value:
            self.rules.accuse(sender, "two values in one ballot")
            return []
        if self.rules.refuses(value):
            return self._refuse(sender, ballot, value)
        was_accepted = self.accepted is not None and self.accepted[1] == value
        if was_accepted or self._may_accept(value, floors):
            self.promised, self.accepted = ballot, (ballot, value)
            proof = self.rules.sign(signed_text(self.key, self.view, ballot, value))
            return self._deliver(sender, Accepted(self.key, self.view, ballot, proof))
        self._withheld = sender, ballot, value, floors
        return self._refuse(sender, ballot, value) if value in self._waits.refused else []

    def _may_accept(self, value: bytes, floors: Mapping[int, Floor]) -> bool:
        if value in self._waits.refused:
            return False
        if self.rules.is_justified(value, floors) and self._ready(value):
            return True
        self._waits.note(value)
        return False

    def _refuse(self, sender: int, ballot: Ballot, value: bytes) -> Sends:
        proof = self.rules.sign(refusal_text(self.key, self.view, digest_of(value)))
        rejected = Rejected(self.key, self.view, ballot, self.promised, refused=True, proof=proof)
        return self._deliver(sender, rejected)

    # the proposer

    def _promise(self, sender: int, promise: Promise) -> Sends:
        proposer = self.proposer
        if not self.judges.electorate.votes(sender):
            return []
        if not self.rules.checks(sender, promise_text(promise), promise.proof):
            return []
        if promise.accepted is not None and promise.accepted >= promise.ballot:
            self.rules.accuse(sender, "a promise with a later vote")
            return []
        proposer.promises[sender] = promise
        self.testimony.hear_promises(promise.ballot, (ground_of(sender, promise),))
        # Any quorum shares a member with every quorum that may have chosen a value before.
        if not self.judges.electorate.is_quorum(proposer.promises.keys()):
            return []
        # A value that may have been chosen is repeated as it is; only our own is revised.
        if not proposer.bind(self.judges.electorate):
            floors = {each: said.floor for each, said in proposer.promises.items()}
            proposer.value = self.rules.revised(proposer.value, floors, promise.ballot[0])
        proposer.put(proposer.value)
        return self._broadcast(self.proposer.proposal(self.judges.proofs))

    def _rejected(self, sender: int, rejected: Rejected) -> None:
        """Note that a member rejected our ballot, perhaps because it can never accept the value."""
        proposer = self.proposer
        if self._turns is not None:
            self._turns.hear(rejected.promised[0])
        # A member's clock may be ahead of ours, but not by more than all members' turns.
        if rejected.promised[0] <= self.turn + len(self.electorate):
            proposer.highest = max(proposer.highest, rejected.promised[0])
        if rejected.refused and proposer.state == "proposing":
            text = refusal_text(self.key, self.view, digest_of(proposer.value))
            if self.rules.checks(sender, text, rejected.proof):
                proposer.refusers.setdefault(proposer.value, {})[sender] = rejected.proof

    def _accepted(self, sender: int, ballot: Ballot, proof: bytes) -> Sends:
        proposer = self.proposer
        text = signed_text(self.key, self.view, ballot, proposer.value)
        if not self.judges.electorate.votes(sender) or not self.rules.checks(sender, text, proof):
            return []
        proposer.accepts[sender] = proof
        self.testimony.hear_votes(ballot, digest_of(proposer.value), ((sender, proof),))
        # A quorum of acceptances in one ballot: every later ballot must repeat this value.
        if not self.judges.electorate.is_quorum(proposer.accepts.keys()):
            return []
        proposer.end("accepted")
        self.decided, proofs = proposer.value, tuple(sorted(proposer.accepts.items()))
        needed = self.judges.needed_by(proposer.accepts.keys())
        self.certificate = Decided(self.key, self.view, self.decided, ballot, proofs, needed)
        return self._to_others(self.announcement())

    # the learner

    def _learn(self, decided: Decided) -> None:
        try:
            voters = self.rules.judging(self.electorate, decided.convictions)
        except BadProof:
            return
        if is_certified(decided, voters, self.rules.checks):
            self.testimony.hear_votes(decided.ballot, digest_of(decided.value), decided.proofs)
            self.proposer.end("learned")
            self.decided, self.certificate = decided.value, decided

    def _broadcast(self, message: Message) -> Sends:
        return [*self._to_others(message), *self.receive(self.me, message)]

    def _deliver(self, to: int, message: Message) -> Sends:
        return self.receive(self.me, message) if to == self.me else [(to, message)]

    def _to_others(self, message: Message, except_for: Iterable[int] = ()) -> Sends:
        skip = {self.me, *except_for}
        # All hear what is decided; only voters are asked.
        learns = isinstance(message, Decided)
        to = range(len(self.electorate)) if learns else self.electorate.voters
        return [(member, message) for member in to if member not in skip]
