"""Returns: how the keys of a view go on together after so many restarts that it has no quorum.

A restarted peer has forgotten its promises, so it may not act in a view that lists its old life. If
every key of the newest view is heard again, in whatever life, all of them sign one *return*: a view
of the same keys in the lives in which they are here, with the round and the state from which they
go on (docs/decisions/039-a-return.md).

Sans I/O, pure. swarm/protocol/views.py defines what a return is and who must sign it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from farflock.swarm.links import PeerId
from farflock.swarm.messages import HeldState
from farflock.swarm.protocol.quorum import is_quorum
from farflock.swarm.protocol.views import Chain, Member, View

# A key that has not answered for so long is not here: several answers may be lost.
FRESH_S = 5.0
# Two lives of one key within this time: the older one may still run, from a copied folder.
TWO_LIVES_S = 5.0
MAX_LIVES = 4  # of one key that are remembered; one is the rule, two are too many


@dataclass(frozen=True, slots=True)
class _Answer:
    """The last answer of a key: the life and stage in which it is here, and what it holds."""

    member: Member
    held: HeldState | None
    heard_s: float


@dataclass(slots=True)
class RollCall:
    """The keys of a view that are heard, in which lives, and what each of them holds."""

    view: View
    _answers: dict[PeerId, _Answer] = field(default_factory=dict)
    _lives: dict[PeerId, dict[int, float]] = field(default_factory=dict)  # when heard, by life

    def hear(self, member: Member, held: HeldState | None, now_s: float) -> None:
        """Note that a key of the view is here."""
        if not self.view.lists(member.peer):
            return
        self._answers[member.peer] = _Answer(member, held, now_s)
        lives = self._lives.setdefault(member.peer, {})
        lives.pop(member.incarnation, None)
        lives[member.incarnation] = now_s  # the last one is the one heard last
        while len(lives) > MAX_LIVES:
            del lives[next(iter(lives))]

    def silent(self, now_s: float, gone: Collection[PeerId] = ()) -> tuple[PeerId, ...]:
        """Return the keys that are not here, but for those that have said goodbye."""
        here = self._here(now_s)
        return tuple(peer for peer in self.view.peers if peer not in here and peer not in gone)

    def doubled(self, now_s: float) -> tuple[PeerId, ...]:
        """Return the keys that were heard in two lives of late: perhaps of a copied folder."""
        return tuple(
            peer
            for peer, lives in self._lives.items()
            if sum(now_s - heard_s < TWO_LIVES_S for heard_s in lives.values()) > 1
        )

    def has_quorum(self, now_s: float) -> bool:
        """True if the view can decide: enough keys are heard in the lives that it lists."""
        listed = (self.view.index(peer, now.incarnation) for peer, now in self.here(now_s).items())
        return is_quorum({index for index in listed if index is not None}, len(self.view.members))

    def here(self, now_s: float) -> dict[PeerId, Member]:
        """Return the keys that are heard, in the lives in which they are."""
        return {peer: answer.member for peer, answer in self._here(now_s).items()}

    def newest(self, chain: Chain, now_s: float) -> HeldState | None:
        """Return the newest state of this chain that anyone here holds; None if nobody has any."""
        held = (answer.held for answer in self._here(now_s).values())
        fitting = [each for each in held if each is not None and fits(chain, each)]
        return max(fitting, key=lambda each: (each.first, each.tokens, each.state), default=None)

    def _here(self, now_s: float) -> dict[PeerId, _Answer]:
        return {
            peer: answer
            for peer, answer in self._answers.items()
            if now_s - answer.heard_s < FRESH_S
        }


def fits(chain: Chain, held: HeldState) -> bool:
    """True if a state belongs to this chain: the view of its last round is the one to which that
    round belongs here, or a return of this chain began with this state."""
    if not held.first:
        return True  # the run's beginning, which all chains share
    view = chain.by_hash(held.under)
    if view is not None and chain.at(held.first - 1) is view:
        return True
    return bool(held.state) and any(
        (entry.view.state, entry.view.first_round) == (held.state, held.first)
        for entry in chain.views
    )


def return_of(
    parent: View, here: Collection[Member], gone: Collection[PeerId], begins: HeldState
) -> View:
    """Return the return of a view that those who are here would make, without those that are
    `gone`."""
    lives = {member.peer: member for member in here if member.peer not in gone}
    members = tuple(lives[peer] for peer in parent.peers if peer in lives)
    return View(parent.number + 1, parent.return_mark, begins.first, members, state=begins.state)
