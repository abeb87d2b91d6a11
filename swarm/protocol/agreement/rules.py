"""A member's own rules for a decision: which values it may accept, and how it signs."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Propose
from farflock.swarm.protocol.agreement.axes import NO_FLOOR, Floor
from farflock.swarm.protocol.agreement.certificates import checker
from farflock.swarm.protocol.agreement.convictions import BadProof, Contradiction
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.agreement.justified import vote_domain

# A value that a member cannot justify for so long it refuses for good, unless told otherwise. The
# same may then be proposed in other words.
JUSTIFY_TIMEOUT_S = 5.0
MAX_WAITS = 64  # values waited for in one decision; liars could propose any number
# A value that was not proposed for so long begins to wait anew: a member that was cut off meanwhile
# could not hear what justifies it. Proposers repeat themselves more often than that.
WAITED_GAP_S = 2.0


class AcceptanceRules:
    """A member's rules for values: which it may ever accept, and its proof of acceptance.

    This base accepts every value and proves nothing: it is the algorithm alone.

    Every implementation obeys one law: once it `refuses` a value that is not the last one accepted
    here, it refuses that value forever. Members whose floors are far apart are not
    `in_step` and must not skip phase 1: each reports its `min_floor`, and a proposer's own value is
    `revised` by the floors of those that promised."""

    in_step = True

    def refuses(self, value: bytes) -> bool:
        """True if this member can never accept a value."""
        return False

    def min_floor(self) -> Floor:
        """Return the lowest floor of a value that could be accepted here."""
        return NO_FLOOR

    def holds_back(self) -> bool:
        """True if this member accepts and proposes nothing now."""
        return False

    def revised(self, value: bytes, floors: Mapping[int, Floor], number: int) -> bytes:
        """Return the value as phase 1 of this ballot requires it: to suit the floors of the members
        (indices) that promised, which are therefore alive."""
        return value

    def is_justified(self, value: bytes, floors: Mapping[int, Floor]) -> bool:
        """True if the value follows from what this member knows, and from the floors of those that
        promised; False to wait."""
        return True

    def accuse(self, member: int, what: str) -> None:
        """Note a statement of a member that no honest member makes."""

    def convict(self, said: Contradiction) -> None:
        """Note two statements of a member that contradict each other."""

    def contradicts(self, proposal: Propose) -> str | None:
        """Return what in a proposal no honest member says, in words; None if this member cannot
        tell. What earlier ballots bind the proposer to is not its own word."""
        return None

    def sign(self, text: bytes) -> bytes:
        """Return this member's signature."""
        return b""

    def checks(self, member: int, text: bytes, proof: bytes) -> bool:
        """True if this is the member's signature of this text."""
        return True

    def judging(self, electorate: Electorate, proofs: Collection[bytes]) -> Electorate:
        """Return the members that decide beside these proofs; raise `BadProof` if one is false, or
        if all members decide, whatever they are convicted of."""
        if proofs:
            raise BadProof("a proof in a decision that needs none")
        return electorate


class Notes(Protocol):
    """The place where a member notes others' false statements."""

    def accuse(self, peer: PeerId, what: str) -> None:
        """Note a statement that no honest member makes."""

    def convict(self, said: Contradiction) -> None:
        """Note two statements that contradict each other."""


class Unnoted:
    """Notes of a member that keeps none."""

    def accuse(self, peer: PeerId, what: str) -> None:
        """Forget it."""

    def convict(self, said: Contradiction) -> None:
        """Forget it."""


UNNOTED = Unnoted()


class SignedRules(AcceptanceRules):
    """The rules of a member that signs what it accepts, as every member of a run does."""

    def __init__(
        self,
        run: str,
        identity: Identity,
        electorate: Electorate,
        *,
        is_held_back: Callable[[], bool] = lambda: False,
        notes: Notes = UNNOTED,
    ) -> None:
        self._domain, self._identity, self._electorate = vote_domain(run), identity, electorate
        self._checker, self._is_held_back = checker(run, electorate), is_held_back
        self._notes = notes

    def holds_back(self) -> bool:
        """True if this member accepts and proposes nothing now."""
        return self._is_held_back()

    def sign(self, text: bytes) -> bytes:
        """Return this peer's signature."""
        return self._identity.sign(self._domain, text)

    def checks(self, member: int, text: bytes, proof: bytes) -> bool:
        """True if the member of this index in the electorate signed the text."""
        return self._checker(member, text, proof)

    def accuse(self, member: int, what: str) -> None:
        """Note a false statement of the member of this index."""
        self._notes.accuse(self._electorate.peers[member], what)

    def convict(self, said: Contradiction) -> None:
        """Note two statements of a member that contradict each other."""
        self._notes.convict(said)


class Waits:
    """The values of a decision that wait for a member to be able to justify them.

    A value that waits for too long is refused for good: those that have accepted it are bound to
    it, and their next ballots would be, for ever."""

    def __init__(self, timeout_s: float) -> None:
        self.now_s, self._timeout_s = 0.0, timeout_s
        self._waited: dict[bytes, tuple[float, float]] = {}  # by value: (since, last proposed)
        self.refused: set[bytes] = set()

    def note(self, value: bytes) -> None:
        """Note that a value was proposed and is not justified; refuse it if it waits too long."""
        since_s, last_s = self._waited.get(value, (self.now_s, self.now_s))
        if value not in self._waited and len(self._waited) >= MAX_WAITS:
            return
        if self.now_s - last_s >= WAITED_GAP_S:
            since_s = self.now_s
        self._waited[value] = since_s, self.now_s
        if self.now_s - since_s >= self._timeout_s:
            self.refused.add(value)
