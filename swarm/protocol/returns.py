"""Returns: how the keys of a view go on together after so many restarts that it has no quorum.

A restarted peer has forgotten its promises, so it may not act in a view that lists its old life. If
every key of the newest view is heard again, in whatever life, all of them sign one *return*: a view
of the same keys in the lives in which they are here, with the round and the state from which they
go on (docs/decisions/039-a-return.md).

Sans I/O, pure. swarm/protocol/views.py defines what a return is and who must sign it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from farflock.swarm.links import PeerId
from farflock.swarm.messages import HeldState
from farflock.swarm.protocol import axes
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
    held: tuple[HeldState, ...]
    heard_s: float


@dataclass(slots=True)
class RollCall:
    """The keys of a view that are heard, in which lives, and what each of them holds."""

    view: View
    _answers: dict[PeerId, _Answer] = field(default_factory=dict)
    _lives: dict[PeerId, dict[int, float]] = field(default_factory=dict)  # when heard, by life

    def hear(self, member: Member, held: tuple[HeldState, ...], now_s: float) -> None:
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

    def newest(self, chain: Chain, now_s: float) -> dict[int, HeldState]:
        """Return the newest state of this chain, by axis, that anyone here holds."""
        found: dict[int, HeldState] = {}
        for answer in self._here(now_s).values():
            for each in answer.held:
                if fits(chain, each):
                    found[each.axis] = max(found.get(each.axis, each), each, key=_age)
        return found

    def _here(self, now_s: float) -> dict[PeerId, _Answer]:
        return {
            peer: answer
            for peer, answer in self._answers.items()
            if now_s - answer.heard_s < FRESH_S
        }


def _age(held: HeldState) -> tuple[int, int, bytes]:
    return held.first, held.tokens, held.state


def fits(chain: Chain, held: HeldState) -> bool:
    """True if a state belongs to this chain: the view of its last round is the one to which that
    round belongs here, or a return of this chain began with this state."""
    if not held.first:
        return True  # the run's beginning, which all chains share
    view, place = chain.by_hash(held.under), held.axis
    if view is not None and chain.at(held.first - 1, axes.stage_on(place)) is view:
        return True
    return bool(held.state) and any(
        (entry.view.state(place), entry.view.begins[place]) == (held.state, held.first)
        for entry in chain.views
        if place < len(entry.view.states)
    )


def return_of(
    parent: View,
    here: Collection[Member],
    gone: Collection[PeerId],
    begins: Mapping[int, HeldState],
) -> View:
    """Return the return of a view that those who are here would make, without those that are
    `gone`, from these states, by axis."""
    lives = {member.peer: member for member in here if member.peer not in gone}
    members = tuple(lives[peer] for peer in parent.peers if peer in lives)
    places = range(1 + max(begins))
    before = [axes.at(parent.begins, axes.stage_on(place)) for place in places]
    rounds = [begins[place].first if place in begins else before[place] for place in places]
    states = tuple(begins[place].state if place in begins else b"" for place in places)
    first, *of_stages = rounds
    named = states if any(states) else ()
    return View(parent.number + 1, parent.return_mark, first, members, tuple(of_stages), named)
