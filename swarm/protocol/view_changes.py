"""Changes of views: what a proposer makes of promises, and what a member signs.

A member signs a view only if it can justify each change itself: nobody goes that it still hears,
unless that member left or came back in another life, or gives its place to others that wait for one
after many rounds that did not count it; nobody comes that did not ask it for admission in that
life; those that stay keep their order. So a member that proposes a view without the others
gets no signature but its own. A change that is not justified yet may be so soon: the member waits.

A view must begin after all rounds that its signers took part in, and a member's word for these is
bounded by the others': otherwise one member could let the next view begin at a round that never
comes.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS
from farflock.swarm.protocol.agreement.axes import Floor, highest, reaches
from farflock.swarm.protocol.views import Member, View, decode_view, encode


@dataclass(frozen=True, slots=True)
class Witness:
    """A member's knowledge that justifies changes of a view."""

    hears: Callable[[Member], bool]  # True for a member that is alive in this life
    leaving: Collection[PeerId]  # members that said goodbye
    asked: Mapping[PeerId, Member]  # the peers that asked for admission, in their newest lives
    # True for a member that rounds have not counted for so long that others may have its place.
    lapsed: Callable[[Member], bool] = lambda member: False


def unjustified(before: View, view: View, witness: Witness) -> str | None:
    """Return which change from the view before nothing known here justifies; None if all are."""
    staying = tuple(member for member in before.members if member in view.members)
    if view.members[: len(staying)] != staying:
        return "it changes the order of those that stay"
    coming = view.members[len(staying) :]
    for member in coming:
        if witness.asked.get(member.peer) != member:
            return f"{member.peer} did not ask for admission here"
    # A place lapses only for others, and only while all are taken.
    is_full = len(before.members) == len(view.members) == MAX_MEMBERS
    room = sum(member.peer not in before.peers for member in coming) if is_full else 0
    for member in (each for each in before.members if each not in staying):
        is_replaced = member.peer in view.peers
        if not is_replaced and member.peer not in witness.leaving and witness.hears(member):
            if room < 1 or not witness.lapsed(member):
                return f"{member.peer} is heard here"
            room -= 1
    return None


def vouched(floors: Iterable[Floor], lead: int) -> Floor:
    """Return by axis the highest round up to which floors count: `lead` above the highest one when
    the highest third is left out, as that many members may lie."""
    columns = list(itertools.zip_longest(*floors, fillvalue=0))
    return tuple(sorted(column, reverse=True)[len(column) // 3] + lead for column in columns)


def revised(
    raw: bytes, before: View, floor: Floor, present: Collection[Member], number: int
) -> bytes:
    """Return the proposal of this ballot number, changed to begin at these rounds at the earliest
    and to keep the members of the view `before` that are `present`, except those that come back in
    a new life."""
    view = decode_view(raw)
    first_round, *stage_rounds = highest(view.begins, floor)
    kept = {*view.members, *(member for member in present if member.peer not in view.peers)}
    staying = tuple(member for member in before.members if member in kept)
    coming = tuple(member for member in view.members if member not in staying)
    return encode(
        msgspec.structs.replace(
            view,
            first_round=first_round,
            stage_rounds=tuple(stage_rounds),
            members=(staying + coming)[:MAX_MEMBERS],
            ballot=number,
        )
    )


def begins_in_time(view: View, before: View, limit: Floor) -> bool:
    """True if a view begins at `limit` at the latest, or where the view before began."""
    return reaches(highest(limit, before.begins), view.begins)
