"""Rules by which a member proposes, and signs, the view after the newest one."""

import functools
import logging
from collections.abc import Collection, Mapping
from typing import Protocol

from farflock.swarm.context import PeerContext
from farflock.swarm.identity import Identity
from farflock.swarm.messages import Propose
from farflock.swarm.peer.views.refounding import Refounding
from farflock.swarm.protocol.agreement.axes import NO_FLOOR, Floor, highest, lowest
from farflock.swarm.protocol.agreement.convictions import judging
from farflock.swarm.protocol.agreement.decide import Decision
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.agreement.rules import SignedRules
from farflock.swarm.protocol.view_changes import Witness, begins_in_time, revised, vouched
from farflock.swarm.protocol.views import BadView, View, decode_view, is_refounding

# Whole-model rounds from the last one begun to the new view's first: few of them must then wait for
# the decision.
ROUNDS_AHEAD = 2

log = logging.getLogger(__name__)


def ahead(floor: Floor) -> Floor:
    """Return the rounds at which a view begins that may begin at `floor`.

    A stage's rounds begin at once: waiting would only delay them, for members that are gone."""
    return (floor[0] + ROUNDS_AHEAD - 1, *floor[1:]) if floor else floor


class Justifier(Protocol):
    """The source of what justifies the next view at a member, with its decision on it."""

    refounding: Refounding

    def open_decision(self) -> Decision:
        """Return the decision, begun if need be."""

    def witness(self) -> Witness:
        """Return what this peer knows that justifies changes of the newest view."""

    def unjustified(self, view: View) -> str | None:
        """Return which change nothing known here justifies; None if all are justified."""

    def enrolled(self, raw: bytes) -> bytes:
        """Return a proposal without those that may not come in, and with its roll."""

    def begins(self, floor: Floor) -> Floor:
        """Return the rounds at which a view should begin that may begin at this floor."""

    def is_due(self) -> bool:
        """True if another view may follow without any change."""


class ViewRules(SignedRules):
    """A view must begin after every round in which this member has voted under the previous view,
    and all its changes must be justified here.

    A proposer keeps every member that promised, unless it said goodbye: a member that answers is
    alive, whatever its links looked like (docs/decisions/022)."""

    # Members are at different rounds: each reports its floor before a proposal.
    in_step = False

    def __init__(
        self,
        context: PeerContext,
        identity: Identity,
        view: View,
        next_view: Justifier,
    ) -> None:
        super().__init__(context.run, identity, view.electorate, notes=context)
        self._context, self._view, self._next_view = context, view, next_view

    def refuses(self, value: bytes) -> bool:
        """True if a view begins before a round of this peer's votes, or can follow no view known
        here.

        A voter that restarted has forgotten the rounds that it took part in. It accepts only what
        it has accepted before, and a view that takes over such rounds."""
        if self._context.views.refuses(value, self._context.touched.bound):
            return True
        if self._context.is_member or is_refounding(self._view, decode_view(value)):
            return False
        accepted = self._next_view.open_decision().accepted
        return accepted is None or accepted[1] != value

    def min_floor(self) -> Floor:
        """Return the first rounds that this peer has no part in."""
        return self._context.touched.floor

    def revised(self, value: bytes, floors: Mapping[int, Floor], number: int) -> bytes:
        """Return the view, beginning late enough for all members that promised, and with them.

        One that re-founds a view takes over their rounds, and lists only lives that are heard."""
        view = decode_view(value)
        if is_refounding(self._view, view):
            promised = {self._view.members[index] for index in floors}
            convicted, hears = self._context.entrance.convicted, self._context.hears
            there = [each for each in self._view.members if each in promised and hears(each)]
            there = [each for each in there if each.peer not in convicted]
            return self._next_view.enrolled(revised(value, self._view, NO_FLOOR, there, number))
        leaving = self._next_view.witness().leaving
        present = {
            member for index in floors if (member := self._view.members[index]).peer not in leaving
        }
        begins = functools.reduce(highest, floors.values(), NO_FLOOR)
        begins = self._next_view.begins(lowest(begins, self._vouched(floors)))
        return self._next_view.enrolled(revised(value, self._view, begins, present, number))

    def contradicts(self, proposal: Propose) -> str | None:
        """Return a lie about this peer: a view without it, although it promised and did not leave.

        Only the member itself knows that it never said goodbye."""
        me = self._view.index(self._context.me, self._context.incarnation)
        promised = any(ground.member == me for ground in proposal.grounds)
        if me is None or not promised or self._context.me in self._context.leaving:
            return None
        try:
            view = decode_view(proposal.value)
        except BadView:
            return None
        # One that re-founds a view lists whom its proposer hears, which may be one side of a split.
        is_fair = self._view.members[me] in view.members or is_refounding(self._view, view)
        return None if is_fair else "a view without a member that promised and did not leave"

    def judging(self, electorate: Electorate, proofs: Collection[bytes]) -> Electorate:
        """Return the members that decide the next view beside these proofs."""
        return judging(self._context.run, electorate, proofs)

    def _vouched(self, floors: Mapping[int, Floor], *mine: Floor) -> Floor:
        # No round before the view's own first one is open any more, whatever its members took part
        # in: a newcomer has touched none yet.
        said = [highest(floor, self._view.begins) for floor in (*floors.values(), *mine)]
        return vouched(said, self._context.lead)

    def is_justified(self, value: bytes, floors: Mapping[int, Floor]) -> bool:
        """True if this member justifies each change of a view, and where it begins."""
        view = decode_view(value)
        if is_refounding(self._view, view):
            return self._is_signed(view, self._next_view.refounding.unjustified(view))
        kept = self._view.members, self._view.learners
        if (view.members, view.learners) == kept and not self._next_view.is_due():
            return False
        limit = ahead(self._vouched(floors, self._context.touched.floor))
        if not begins_in_time(view, self._view, limit):
            self._context.drop("view that begins too late")
            return False
        return self._is_signed(view)

    def _is_signed(self, view: View, why: str | None = None) -> bool:
        why = why or self._next_view.unjustified(view)
        if why is not None:
            self._context.counters["views not signed yet"] += 1
            log.debug("view %d is not signed yet: %s", view.number, why)
        return why is None
