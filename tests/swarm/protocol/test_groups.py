"""The members of a group: a pure function that all peers compute alike."""

import collections
import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.messages import Key
from farflock.swarm.protocol.groups import group_of, order, proposers, reducers, rotation

VIEW = bytes(range(32))
PEERS = tuple(f"12D3Koo{number:02d}" for number in range(12))


@settings(max_examples=60, deadline=None)
@given(st.permutations(PEERS), st.integers(0, 2**63), st.integers(0, 2**40))
def test_the_order_does_not_depend_on_how_members_are_listed(shuffled, seed, number):
    key = Key("weights", number)
    assert order(shuffled, seed, VIEW, key) == order(PEERS, seed, VIEW, key)
    assert sorted(order(PEERS, seed, VIEW, key)) == sorted(PEERS)


def test_the_order_is_that_of_the_documented_hash():
    def place(peer):
        return hashlib.sha256(
            b"\x00".join((b"5", VIEW, b"weights", b"9", b"2", peer.encode()))
        ).digest()

    assert order(PEERS, 5, VIEW, Key("weights", 9, 2)) == tuple(sorted(PEERS, key=place))


@pytest.mark.parametrize(
    "other",
    [(6, VIEW, Key("weights", 9)), (5, VIEW[::-1], Key("weights", 9)), (5, VIEW, Key("weight", 9)),
     (5, VIEW, Key("weights", 10)), (5, VIEW, Key("weights", 9, 1))],
    ids=["seed", "view", "stream", "round", "attempt"],
)  # fmt: skip
def test_the_order_changes_with_each_of_its_inputs(other):
    assert order(PEERS, *other) != order(PEERS, 5, VIEW, Key("weights", 9))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**40))
def test_groups_are_disjoint_cover_everybody_and_each_member_sees_the_same_one(
    members, size, number
):
    peers, key = PEERS[:members], Key("weights", number)
    groups = {peer: group_of(peer, peers, size, 1, VIEW, key) for peer in peers}
    assert all(groups[other] == group for group in groups.values() for other in group)
    assert all(peer in group for peer, group in groups.items())
    sizes = sorted(len(group) for group in set(groups.values()))
    assert sizes == sorted([size] * (members // size) + [members % size] * (members % size > 0))


def test_over_many_rounds_all_pairs_meet_equally_often_and_each_peer_leads_half_the_time():
    met, led = collections.Counter(), collections.Counter()
    rounds = 4000
    for number in range(rounds):
        for peer in PEERS:
            leader, partner = group_of(peer, PEERS, 2, 3, VIEW, Key("pairs", number))
            if peer == leader:
                led[peer] += 1
                met[frozenset((leader, partner))] += 1
    expected = rounds * 6 / 66
    assert len(met) == 66
    assert all(abs(count - expected) < 6 * expected**0.5 for count in met.values())
    assert all(abs(count - rounds / 2) < 6 * (rounds / 4) ** 0.5 for count in led.values())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 4095))
def test_the_line_of_reducers_is_a_rotation_of_all_members(members, shard):
    line = reducers(PEERS[:members], shard)
    assert sorted(line) == sorted(PEERS[:members])
    assert line == reducers(PEERS[:members], shard + members)


def test_shards_are_spread_evenly_and_so_is_what_a_dead_reducer_leaves():
    first = collections.Counter(reducers(PEERS, shard)[0] for shard in range(120))
    assert set(first.values()) == {10}
    heirs = {
        reducers(PEERS, shard)[1] for shard in range(120) if reducers(PEERS, shard)[0] == PEERS[3]
    }
    assert heirs == {PEERS[4]}


def test_a_shards_reducer_is_the_same_in_all_rounds_and_views_but_not_in_all_streams():
    assert rotation(PEERS, 5, "a") == rotation(PEERS[::-1], 5, "a")
    assert len({rotation(PEERS, seed, stream) for seed in (5, 6) for stream in "ab"}) == 4


def test_a_member_that_comes_or_goes_leaves_the_others_order_as_it_is():
    whole = rotation(PEERS, 5, "a")
    for gone in PEERS:
        assert rotation([peer for peer in PEERS if peer != gone], 5, "a") == tuple(
            p for p in whole if p != gone
        )


def test_voters_that_serve_a_stage_propose_first_then_its_learners_then_other_voters():
    ordered, voters = [4, 3, 2, 1, 0], {0, 3, 4}
    assert proposers(ordered, {2, 3}, voters.__contains__, stage=1) == (3, 2, 4, 0)
    assert proposers(ordered, {1, 2}, voters.__contains__, stage=0) == (2, 1, 4, 3, 0)
    everybody = set(range(5))
    assert proposers(ordered, everybody, voters.__contains__, stage=None) == (4, 3, 0)
    assert proposers(ordered, everybody, everybody.__contains__, stage=None) == (4, 3, 2, 1, 0)
