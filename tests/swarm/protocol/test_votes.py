"""Votes are given by capabilities, earned by work, few at a time, and nobody's is taken away."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.decisions import AT_ONCE

from farflock.swarm.protocol.roll import Admittance, first_roll
from farflock.swarm.protocol.views import BadView, Member, View, decode_view, encode, genesis
from farflock.swarm.protocol.votes import VoteRules, VoteTerms, learners, unjustified

MANY = Admittance(b"m" * 32, 64, 64)
FEW = Admittance(b"f" * 32, 64, 2)
NONE = Admittance(b"n" * 32, 64, 0)
SINGLE = [Admittance(bytes([number]) * 32, 1, 1) for number in range(16)]
TERMS = VoteTerms()


def rules(counted=None, promoted=(), terms=TERMS):
    rounds = counted or {}
    return VoteRules(terms, lambda peer: rounds.get(peer, 0), promoted)


def rolled(voting, others=(), by=MANY):
    """Return a roll on which these keys vote, the first as the founder, and others came too."""
    roll = first_roll(voting[0]).with_keys([(key, by) for key in (*voting[1:], *others)])
    return roll.with_votes(voting)


def view(voting, others=(), number=7):
    members = tuple(Member(key, 1) for key in (*voting, *others))
    without = tuple(range(len(voting), len(members)))
    return View(number, bytes(32), 5, members, learners=without)


def voters(parent, roll, known, members=None):
    members = parent.members if members is None else members
    without = learners(parent, members, roll, known)
    return [each.peer for index, each in enumerate(members) if index not in without]


def test_a_key_votes_after_so_many_counted_rounds_and_not_before():
    parent, roll = view("abc", "d"), rolled("abc", "d")
    assert voters(parent, roll, rules({"d": TERMS.after_rounds - 1})) == ["a", "b", "c"]
    assert voters(parent, roll, rules({"d": TERMS.after_rounds})) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("present", "most"), [(1, 1), (3, 1), (5, 1), (6, 2), (9, 3)])
def test_a_view_adds_a_third_of_the_voters_that_stay_at_most_and_at_least_one(present, most):
    old, new = "abcdefghi"[:present], "qrstuvwxyz"
    parent, roll = view(old, new), rolled(old, new)
    known = rules(dict.fromkeys(new, 255))
    assert voters(parent, roll, known) == [*old, *new[:most]]


def test_the_voters_that_go_do_not_count_for_the_third():
    parent, roll = view("abcdef", "xyz"), rolled("abcdef", "xyz")
    staying = tuple(each for each in parent.members if each.peer not in "abc")
    assert len(voters(parent, roll, rules(dict.fromkeys("xyz", 9)), staying)) == 3 + 1


def test_a_capability_never_brings_more_votes_than_it_says_whoever_went():
    parent = view("abc", "xyz")
    roll = first_roll("a").with_keys([("b", FEW), ("c", FEW), *((key, FEW) for key in "xyz")])
    roll, known = roll.with_votes("bc"), rules(dict.fromkeys("xyz", 255))
    assert voters(parent, roll, known) == ["a", "b", "c"]
    without = tuple(each for each in parent.members if each.peer != "c")
    assert voters(parent, roll, known, without) == ["a", "b"]


def test_a_capability_without_votes_brings_none_and_the_founder_may_give_one():
    parent, roll = view("a", "xy"), rolled("a", "xy", NONE)
    known = dict.fromkeys("xy", 255)
    assert voters(parent, roll, rules(known)) == ["a"]
    assert voters(parent, roll, rules(promoted=["y"])) == ["a", "y"]


def test_while_there_are_hardly_any_voters_a_key_that_may_vote_does_at_once():
    roll = first_roll("a").with_keys([("x", SINGLE[1]), ("y", SINGLE[2]), ("z", SINGLE[3])])
    parent = view("a", "xyz")
    assert voters(parent, roll, rules()) == ["a", "x"]
    parent, roll = view("ax", "yz"), roll.with_votes("x")
    assert voters(parent, roll, rules()) == ["a", "x", "y"]
    parent, roll = view("axy", "z"), roll.with_votes("y")
    assert voters(parent, roll, rules()) == ["a", "x", "y"], "three are enough: it has to earn it"
    crowd = first_roll("a").with_keys([("x", NONE)])
    assert voters(view("a", "x"), crowd, rules()) == ["a"]


def test_a_key_has_its_vote_again_in_the_first_view_that_lists_it_outside_the_bound():
    roll = rolled("abcdef", "x")
    parent = view("ab", "x")
    back = (*parent.members, *(Member(key, 2) for key in "cdef"))
    assert voters(parent, roll, rules({"x": 9}), back) == list("abxcdef")


def test_where_no_voter_stays_one_that_may_have_a_vote_takes_it():
    parent, roll = view("a", "xy"), rolled("a", "xy")
    assert voters(parent, roll, rules(), parent.members[1:]) == ["x"]
    roll = rolled("a", "xy", NONE)
    assert voters(parent, roll, rules(), parent.members[1:]) == []


def test_without_the_roll_nobody_gets_a_vote_and_nobody_loses_one():
    parent = view("abc", "xyz")
    assert voters(parent, None, rules(dict.fromkeys("xyz", 255))) == ["a", "b", "c"]
    assert unjustified(parent, parent, None, rules()) is None


def test_with_other_terms_whoever_is_let_in_votes():
    parent, roll = view("a"), rolled("a", "pqrstuvwxyz")
    members = (*parent.members, *(Member(key, 1) for key in "pqrstuvwxyz"))
    assert voters(parent, roll, rules(terms=AT_ONCE), members) == list("apqrstuvwxyz")


WRONG = [
    ("a", {}, "bcx", "a: it takes its vote away"),
    ("x", {}, "abcx", "x: it has not earned its vote yet"),
    ("y", {"x": 9, "y": 9}, "abcxy", "y: a view may not add so many voters"),
    ("n", {"n": 9}, "abcn", "n: its capability brings no further vote"),
    ("q", {"q": 9}, "abcq", "q: its capability is not known here"),
]


@pytest.mark.parametrize(("key", "counted", "voting", "why"), WRONG)
def test_a_voter_signs_no_view_that_gives_or_takes_votes_otherwise(key, counted, voting, why):
    parent, others = view("abc", "xynq"), "xynq"
    roll = rolled("abc", "xy").with_keys([("n", NONE)])
    wanted = tuple(index for index, each in enumerate(parent.members) if each.peer not in voting)
    proposed = msgspec.structs.replace(parent, learners=wanted)
    assert unjustified(parent, proposed, roll, rules(counted)) == why, (key, others)


def test_a_proposer_need_not_give_what_it_may_give():
    parent, roll = view("abc", "x"), rolled("abc", "x")
    assert unjustified(parent, parent, roll, rules({"x": 255})) is None


keys = st.lists(st.sampled_from("abcdefghij"), unique=True, max_size=8)


@given(keys, keys, keys, st.dictionaries(st.sampled_from("abcdefghij"), st.integers(0, 9)))
def test_what_is_given_is_justified_to_whoever_knows_the_same(voting, others, staying, counted):
    others = [key for key in others if key not in voting]
    parent, roll = view(["F", *voting], others), rolled(["F", *voting], others)
    members = tuple(each for each in parent.members if each.peer in ("F", *staying))
    known = rules(counted)
    proposed = msgspec.structs.replace(
        parent, members=members, learners=learners(parent, members, roll, known)
    )
    assert unjustified(parent, proposed, roll, known) is None


@pytest.mark.parametrize("without", [(0,), (1, 0), (1, 1), (2,), (0, 1)])
def test_a_view_without_a_voter_or_with_learners_named_in_another_way_is_none(without):
    parent = genesis("run", Member("f", 1))
    two = msgspec.structs.replace(
        parent, members=(*parent.members, Member("x", 1)), learners=without
    )
    if without == (0,):
        assert decode_view(encode(two)).electorate.voters == (1,)
        return
    with pytest.raises(BadView):
        decode_view(encode(two))
