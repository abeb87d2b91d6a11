"""Which views a member signs: each change is justified to it, and so are the rounds at which a view
begins."""

import pytest

from farflock.swarm.messages import MAX_MEMBERS
from farflock.swarm.protocol.view_changes import (
    Witness,
    begins_in_time,
    revised,
    unjustified,
    vouched,
)
from farflock.swarm.protocol.views import Member, View, decode_view, encode

A, B, C, D, E = (Member(name, 1) for name in "abcde")
BEFORE = View(2, bytes(32), 7, (A, B, C, D))


def after(*members):
    return View(3, BEFORE.hash, 8, members)


def witness(heard=(A, B, C, D), leaving=(), asked=()):
    return Witness(lambda member: member in heard, leaving, {each.peer: each for each in asked})


@pytest.mark.parametrize(
    ("view", "known"),
    [
        (after(A, B, C, D), witness()),
        (after(A, B, C), witness(heard=(A, B, C))),
        (after(A, B, C), witness(leaving={"d"})),
        (after(A, B, C, D, E), witness(asked=[E])),
        (after(A, B, D, Member("c", 5)), witness(asked=[Member("c", 5)])),
        (after(A, E), witness(heard=(A,), asked=[E])),
    ],
    ids=["nothing changes", "dead", "left", "asked", "back in another life", "all but one dead"],
)
def test_a_view_whose_changes_are_all_known_is_signed(view, known):
    assert unjustified(BEFORE, view, known) is None


FULL = View(2, bytes(32), 7, tuple(Member(f"m{number:02}", 1) for number in range(MAX_MEMBERS)))


@pytest.mark.parametrize(
    ("gone", "coming", "lapsed", "signed"),
    [
        ((5,), [E], {5}, True),
        ((5, 6), [E, D], {5, 6, 7}, True),
        ((5,), [E], {6}, False),
        ((5, 6), [E], {5, 6}, False),
        ((5,), [], {5}, False),
    ],
    ids=["for another", "for two", "not its own", "one too many", "for nobody"],
)
def test_a_lapsed_member_goes_only_for_one_that_comes_and_only_from_a_full_view(
    gone, coming, lapsed, signed
):
    def view(before):
        staying = tuple(each for place, each in enumerate(before.members) if place not in gone)
        return View(3, before.hash, 8, (*staying, *coming))

    def known(before):
        idle = {before.members[place] for place in lapsed}
        asked = {each.peer: each for each in coming}
        return Witness(lambda member: True, (), asked, lambda member: member in idle)

    assert (unjustified(FULL, view(FULL), known(FULL)) is None) is signed
    smaller = View(2, bytes(32), 7, FULL.members[:-1])
    assert "is heard here" in unjustified(smaller, view(smaller), known(smaller))


@pytest.mark.parametrize(
    ("view", "known", "why"),
    [
        (after(D), witness(), "is heard here"),
        (after(A, B, C), witness(), "d is heard here"),
        (after(A, B, C, D, E), witness(), "e did not ask"),
        (after(A, B, C, D, E), witness(asked=[Member("e", 2)]), "e did not ask"),
        (after(A, B, D, Member("c", 5)), witness(), "c did not ask"),
        (after(B, A, C, D), witness(), "the order"),
        (after(A, B, E, C, D), witness(asked=[E]), "the order"),
    ],
    ids=["itself alone", "heard", "not asked", "another life", "no new life", "seniors", "between"],
)
def test_a_view_with_a_change_that_nothing_known_justifies_is_not(view, known, why):
    assert why in unjustified(BEFORE, view, known)


def test_one_member_of_three_can_neither_raise_nor_lower_where_a_view_begins():
    honest, liar = (7, 3), (2**62, 2**62)
    assert vouched([honest, liar, honest], lead=4) == (11, 7)
    assert vouched([honest, (), honest], lead=4) == (11, 7)
    assert vouched([(7,), (8,), (9,), (2**62,), (2**62,), (7,)], lead=0) == (9,)


def test_a_view_may_begin_where_the_one_before_began_and_up_to_the_limit():
    assert begins_in_time(after(A), BEFORE, (8,))
    assert begins_in_time(after(A), after(A), ())
    assert not begins_in_time(after(A), BEFORE, (7,))
    assert not begins_in_time(View(3, bytes(32), 8, (A,), (4,)), BEFORE, (8, 3))


def test_a_proposal_is_revised_by_axis_to_where_it_may_begin():
    view = View(2, bytes(32), 7, (A, B), (3, 9))
    assert decode_view(revised(encode(view), view, (5, 4, 8, 2), (), 0)).begins == (7, 4, 9, 2)
    assert decode_view(revised(encode(view), view, (), (A, B), 0)) == view


def test_a_proposal_keeps_the_members_that_are_present_in_their_places():
    restarted = Member("c", 99)
    kept = decode_view(revised(encode(after(A, restarted, E)), BEFORE, (), (B, C), 0)).members
    assert kept == (A, B, restarted, E)


def test_the_same_change_proposed_in_another_ballot_is_another_view():
    assert revised(encode(after(A)), BEFORE, (), (), 1) != revised(
        encode(after(A)), BEFORE, (), (), 2
    )


def test_a_view_never_has_more_members_than_fit():
    full = View(2, bytes(32), 7, tuple(Member(f"{n:02}", 1) for n in range(MAX_MEMBERS)))
    more = View(3, full.hash, 8, (*full.members[1:], A))
    kept = decode_view(revised(encode(more), full, (), full.members, 0)).members
    assert kept == full.members
