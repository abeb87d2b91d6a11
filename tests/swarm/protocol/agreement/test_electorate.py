"""Two quorums of one electorate always share a voter, and members without a vote are in none."""

import itertools

import pytest
from worlds.decisions import electorate_of


def subsets(size):
    members = range(size)
    return [
        set(some) for count in range(size + 1) for some in itertools.combinations(members, count)
    ]


@pytest.mark.parametrize("size", range(1, 6))
def test_any_two_quorums_share_a_voter_whoever_has_no_vote(size):
    for learners in subsets(size):
        electorate = electorate_of(size, learners=learners)
        quorums = [some for some in subsets(size) if electorate.is_quorum(some)]
        assert bool(quorums) is bool(electorate.voters)
        for one, other in itertools.combinations(quorums, 2):
            assert (one & other) - learners, (learners, one, other)


@pytest.mark.parametrize("size", range(1, 6))
def test_members_without_a_vote_make_no_quorum_and_hinder_none(size):
    for learners in subsets(size):
        electorate = electorate_of(size, learners=learners)
        for some in subsets(size):
            assert electorate.is_quorum(some) is electorate.is_quorum(some - learners)
        assert electorate.voters == tuple(sorted(set(range(size)) - learners))
        assert [electorate.votes(each) for each in range(size)] == [
            each not in learners for each in range(size)
        ]


def test_of_two_voters_the_senior_goes_on_alone_also_behind_members_without_a_vote():
    electorate = electorate_of(4, learners={0, 2})
    assert electorate.is_quorum({1})
    assert not electorate.is_quorum({3})
    assert not electorate.votes(-1)
    assert not electorate.votes(4)
    assert electorate.keys_that_vote == ("peer1", "peer3")
