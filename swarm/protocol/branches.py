"""Branches: how members go on without a lost majority, and which of two meeting chains stays.

No peer can tell a dead majority from one behind a broken cable, so a branch may be one of two
chains that both train. Each chain has its own log, in which nothing counts twice, and when they
meet, one is given up whole: two logs are never merged (docs/decisions/007-branches.md).

Sans I/O, pure. swarm/protocol/views.py defines what a branch is and who must sign it.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS
from farflock.swarm.protocol import backbone
from farflock.swarm.protocol.agreement.convictions import Contradiction, Testimony
from farflock.swarm.protocol.entitlement import MAX_CLAIMED_ROUNDS
from farflock.swarm.protocol.views import (
    BadView,
    Certified,
    Chain,
    View,
    decode_certified,
    encode,
    fitting,
    learners_of,
    view_key,
)
from farflock.swarm.statements import AnchoredView

# A longer gap between two calls of `look` counts as this: the machine slept, and saw no peer leave.
AWAKE_S = 1.0
PREFIX_BYTES = 8  # of each view's hash in a trail
# No line has more rounds in a second, on average over its life. Each takes several messages and
# signatures, and its members train in between; real ones take seconds.
MAX_ROUNDS_PER_S = 100.0
STANDS_S = 30.0  # a member's word that its chain has its quorum; all are asked within this time


@dataclass(slots=True)
class Solitude:
    """The time, without sleep or interruption, in which a peer's view could decide nothing."""

    lasted_s: float = 0.0
    _looked_s: float | None = None

    def look(self, now_s: float, can_decide: bool) -> None:
        """Note whether the view can decide at a local time; called regularly."""
        since_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, AWAKE_S)
        self._looked_s = now_s
        self.lasted_s = 0.0 if can_decide else self.lasted_s + since_s


def branch_of(parent: View, founders: Collection[int], first_round: int) -> View:
    """Return the branch that these members of a view would start."""
    members = tuple(parent.members[index] for index in sorted(founders))
    view = View(parent.number + 1, parent.branch_mark, first_round, members)
    return msgspec.structs.replace(
        view,
        branches=parent.branches + 1,
        roll=parent.roll,
        roll_bytes=parent.roll_bytes,
        learners=learners_of(parent, members),
        statement=parent.statement,
        refoundings=parent.refoundings,
    )


@dataclass(slots=True)
class Petition:
    """A branch waiting for the signatures of all its members; `proofs` by index in the parent."""

    parent: View
    view: View
    begun_s: float
    asked_s: float = -1e9
    proofs: dict[int, bytes] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices in the parent of members that have not signed."""
        listed = (self.parent.members.index(member) for member in self.view.members)
        return tuple(index for index in listed if index not in self.proofs)

    def certified(self) -> Certified:
        """Return the branch with all its signatures."""
        assert not self.missing, f"the branch lacks signatures of {self.missing}"
        return Certified(self.view, proofs=tuple(sorted(self.proofs.items())))


# When two chains meet.


@dataclass(frozen=True, slots=True)
class Fork:
    """The last view `number` that two chains share; -1 if even their geneses differ.

    `mine` and `theirs` are hash prefixes of the next view, empty for a chain that ends there."""

    number: int
    mine: bytes
    theirs: bytes


def trail(chain: Chain) -> bytes:
    """Return the hash prefixes of the kept views: enough to find a fork, proof of nothing."""
    return b"".join(entry.view.hash[:PREFIX_BYTES] for entry in chain.views)


def fork_of(chain: Chain, number: int, their_trail: bytes) -> Fork | None:
    """Compare our chain with one that ends with view `number`; None if they share no kept view."""
    mine = {entry.view.number: entry.view.hash[:PREFIX_BYTES] for entry in chain.views}
    prefixes = [
        their_trail[at : at + PREFIX_BYTES] for at in range(0, len(their_trail), PREFIX_BYTES)
    ]
    theirs = dict(enumerate(prefixes, start=number - len(prefixes) + 1))
    oldest = chain.views[0].view.number
    common = max((view for view, prefix in mine.items() if theirs.get(view) == prefix), default=-1)
    if common < 0 and (oldest or 0 not in theirs):
        return None
    return Fork(common, mine.get(common + 1, b""), theirs.get(common + 1, b""))


def missing_views(chain: Chain, fork: Fork) -> tuple[bytes, ...]:
    """Return our certified views after the fork, oldest first, as many as a message holds."""
    return fitting(encode(entry) for entry in _after(chain, fork))


def other_chain(chain: Chain, fork: Fork, encoded: tuple[bytes, ...]) -> Chain:
    """Return the other chain: ours up to the fork, then `encoded`.

    Raise `BadView` if they do not fit. If the geneses differ, the same peer must have started the
    run, in another of its lives."""
    views = [decode_certified(raw) for raw in encoded]
    if fork.number >= 0:
        other = backbone.cut(chain, fork.number)
    else:
        other = _begun_again(chain, views[0] if views else None)
        views = views[1:]
    for certified in views:
        if not other.extend(certified):
            raise BadView(f"view {certified.view.number} of the other chain is given twice")
    reached = next((entry.view.hash[:PREFIX_BYTES] for entry in _after(other, fork)), b"")
    if reached != fork.theirs:
        raise BadView(
            f"after view {other.newest.number} the other chain does not match its announced hashes"
        )
    return other


def _begun_again(chain: Chain, first: Certified | None) -> Chain:
    """Return a chain of the same run and founder that begins with another view 0."""
    if first is None:
        raise BadView("the other chain does not begin with a view 0 of this run's founder")
    return backbone.begun(chain.run, chain.views[0].view.members[0].peer, first)


def is_anchored(anchor: AnchoredView | None, fork: Fork, number: int, its_trail: bytes) -> bool:
    """True if, of two chains that have both gone on after a fork, the one that ends with view
    `number` has the founder's anchor after it, as far as its trail tells.

    The other one then lacks that view, however short it is: the two part before it."""
    if anchor is None or not fork.mine or not fork.theirs or anchor[0] <= fork.number:
        return False
    return shows(anchor, number, its_trail)


def shows(anchor: AnchoredView, number: int, its_trail: bytes) -> bool:
    """True if the trail of a chain that ends with view `number` has the anchored view."""
    place = (anchor[0] - number - 1) * PREFIX_BYTES + len(its_trail)
    return place >= 0 and its_trail[place : place + PREFIX_BYTES] == anchor[1][:PREFIX_BYTES]


def is_stronger(their_tokens: int, my_tokens: int, fork: Fork) -> bool:
    """True if the other chain stays: it has more agreed tokens, or as many and the greater hash.

    The hash is that of the first view after the fork. Both sides compute the same from the same
    numbers, and tokens only rise, so with fresh numbers two chains cannot both give up."""
    return (their_tokens, fork.theirs) > (my_tokens, fork.mine)


def max_tokens(mine: int, per_round: int, run_s: float) -> int:
    """Return the most tokens that any line may have that began with the same view 0 as ours.

    Ours has `mine`, a member may claim `per_round` in a round, and the run is `run_s` old at most.
    What counts is that no honest line comes near it, not that it is tight: views say neither when
    they began nor how many rounds their members had, so it takes the most of each."""
    rounds = MAX_CLAIMED_ROUNDS + math.ceil(run_s * MAX_ROUNDS_PER_S)
    return mine + MAX_MEMBERS * per_round * rounds


@dataclass(slots=True)
class Voices:
    """The members of other chains that said lately that they see a quorum of their newest view."""

    _said: dict[PeerId, tuple[bytes, float]] = field(default_factory=dict)  # (view, local time)

    def hear(self, peer: PeerId, newest: View, now_s: float) -> None:
        """Note the word of a member of a chain's newest view."""
        self._said[peer] = newest.hash, now_s
        self._said = {
            peer: word for peer, word in self._said.items() if now_s - word[1] <= STANDS_S
        }

    def make_quorum(self, newest: View, now_s: float) -> bool:
        """True if a quorum of this view said so in the last `STANDS_S`."""
        words = (self._said.get(peer, (b"", -STANDS_S)) for peer in newest.peers)
        voices = {
            index
            for index, (view, said_s) in enumerate(words)
            if view == newest.hash and now_s - said_s <= STANDS_S
        }
        return newest.electorate.is_quorum(voices)


def parts(chain: Chain, fork: Fork) -> bool:
    """True if a chain left the last common view, or a later one, by a branch.

    Chains from different starts of the run have no common view, and neither left it."""
    return fork.number >= 0 and first_parting(chain, fork) is not None


def first_parting(other: Chain, fork: Fork) -> int | None:
    """Return the first round of any branch after the fork; None if there is no branch.

    Earlier rounds are shared."""
    return min((view.first_round for view in _branches(other, fork)), default=None)


def has_begun(other: Chain, fork: Fork, peer: PeerId, incarnation: int) -> bool:
    """True if a peer has signed, in this life, the first branch after the fork.

    It is on that branch from its start, so it knows what was trained there. A later member of it
    has the others' word for that."""
    first = next(iter(_branches(other, fork)), None)
    return first is not None and first.index(peer, incarnation) is not None


def _branches(other: Chain, fork: Fork) -> list[View]:
    """Return the branches after the fork, oldest first."""
    pairs = zip(other.views, other.views[1:], strict=False)
    parted = [
        entry.view for before, entry in pairs if entry.view.previous == before.view.branch_mark
    ]
    return [view for view in parted if view.number > fork.number]


def _after(chain: Chain, fork: Fork) -> list[Certified]:
    return [entry for entry in chain.views if entry.view.number > fork.number]


def testify(mine: Chain, other: Chain, fork: Fork, found: Callable[[Contradiction], None]) -> None:
    """Find those that signed, in one ballot, both of the views that follow the last common one."""
    parent = next((each.view for each in mine.views if each.view.number == fork.number), None)
    if parent is None:
        return
    testimony = Testimony(view_key(fork.number + 1), parent.electorate, found)
    for each in (*_after(mine, fork)[:1], *_after(other, fork)[:1]):
        if each.view.previous == parent.hash:
            testimony.hear_votes(each.ballot, each.view.hash, each.proofs)


def elsewhere(
    chain: Chain, known: Collection[PeerId], me: PeerId, member: bool
) -> tuple[PeerId, ...]:
    """Return the peers, known or in any kept view, that may be on another chain."""
    with_me = {me, *(chain.newest.peers if member else ())}
    ever = {peer for entry in chain.views for peer in entry.view.peers}
    return tuple(sorted((ever | set(known)) - with_me))
