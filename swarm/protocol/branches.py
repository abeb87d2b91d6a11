"""Branches: how members go on without a lost majority, and which of two meeting chains stays.

No peer can tell a dead majority from one behind a broken cable, so a branch may be one of two
chains that both train. Each chain has its own log, in which nothing counts twice, and when they
meet, one is given up whole: two logs are never merged (docs/decisions/007-branches.md).

Sans I/O, pure. swarm/protocol/views.py defines what a branch is and who must sign it.
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass, field

from farflock.swarm.links import PeerId
from farflock.swarm.protocol.axes import Floor, lowest
from farflock.swarm.protocol.views import (
    BadView,
    Certified,
    Chain,
    View,
    decode_certified,
    encode,
    genesis,
)

# A longer gap between two calls of `look` counts as this: the machine slept, and saw no peer leave.
AWAKE_S = 1.0
PREFIX_BYTES = 8  # of each view's hash in a trail
MAX_MISSING_BYTES = 192 * 1024  # of views in one message; fits in a frame


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
    return View(parent.number + 1, parent.branch_mark, first_round, members)


@dataclass(slots=True)
class Petition:
    """A branch or return waiting for the signatures of all its members; `proofs` by index in the
    parent. Those of a return may hold goodbyes of others."""

    parent: View
    view: View
    begun_s: float
    asked_s: float = -1e9
    proofs: dict[int, bytes] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices in the parent of members that have not signed."""
        listed = (self.parent.peers.index(peer) for peer in self.view.peers)
        return tuple(index for index in listed if index not in self.proofs)

    def certified(self) -> Certified:
        """Return the branch or return with all its signatures."""
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
    views: list[bytes] = []
    room = MAX_MISSING_BYTES
    for entry in _after(chain, fork):
        raw = encode(entry)
        room -= len(raw)
        if room < 0:
            break
        views.append(raw)
    return tuple(views)


def other_chain(chain: Chain, fork: Fork, encoded: tuple[bytes, ...]) -> Chain:
    """Return the other chain: ours up to the fork, then `encoded`.

    Raise `BadView` if they do not fit. If the geneses differ, the same peer must have started the
    run, in another of its lives."""
    views = [decode_certified(raw) for raw in encoded]
    other = Chain(chain.run, [entry for entry in chain.views if entry.view.number <= fork.number])
    if not other.views:
        other.views = [_founding(chain, views[0] if views else None)]
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


def _founding(chain: Chain, first: Certified | None) -> Certified:
    founder = chain.views[0].view.members[0].peer
    if first is None or first.view.members[0].peer != founder or first.proofs:
        raise BadView("the other chain does not begin with a view 0 by this run's founder")
    if first.view != genesis(chain.run, first.view.members[0]):
        raise BadView("the other chain's first view is not a view 0 of this run")
    return first


def is_stronger(their_tokens: int, my_tokens: int, fork: Fork) -> bool:
    """True if the other chain stays: it has more agreed tokens, or as many and the greater hash.

    The hash is that of the first view after the fork. Both sides compute the same from the same
    numbers, and tokens only rise, so with fresh numbers two chains cannot both give up."""
    return (their_tokens, fork.theirs) > (my_tokens, fork.mine)


def first_parting(other: Chain, fork: Fork) -> Floor | None:
    """Return the first rounds, by axis, of any branch or return after the fork; None if there is
    none.

    Earlier rounds are shared."""
    pairs = zip(other.views, other.views[1:], strict=False)
    parted = [entry.view for before, entry in pairs if entry.view.parts_from(before.view)]
    later = [view.begins for view in parted if view.number > fork.number]
    return functools.reduce(lowest, later) if later else None


def _after(chain: Chain, fork: Fork) -> list[Certified]:
    return [entry for entry in chain.views if entry.view.number > fork.number]


def elsewhere(
    chain: Chain, known: Collection[PeerId], me: PeerId, member: bool
) -> tuple[PeerId, ...]:
    """Return the peers, known or in any kept view, that may be on another chain."""
    with_me = {me, *(chain.newest.peers if member else ())}
    ever = {peer for entry in chain.views for peer in entry.view.peers}
    return tuple(sorted((ever | set(known)) - with_me))
