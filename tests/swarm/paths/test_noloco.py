"""Seeded permutations at every stage: all peers compute the same ones, both sides of a boundary
agree, and load is even."""

import collections
import dataclasses
import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.paths.noloco import Draw, line

DRAW = Draw(seed=7, membership=3, step=11, index=2)


def grid(*sizes):
    return tuple(
        tuple(f"12D3Koo{stage}{number:02d}" for number in range(size))
        for stage, size in enumerate(sizes)
    )


def holder(draw, stages, stage, lane):
    return line(draw, stages[stage], stage, lane)[0]


def crossing(draw, stages, here, there, peer, lanes):
    """The server of stage `there` in each lane that a server of stage `here` holds."""
    held = [lane for lane in range(lanes) if holder(draw, stages, here, lane) == peer]
    return tuple((lane, holder(draw, stages, there, lane)) for lane in held)


def receivers(draw, stages, boundary, sender, lanes):
    return crossing(draw, stages, boundary, boundary + 1, sender, lanes)


def senders(draw, stages, boundary, receiver, lanes):
    return crossing(draw, stages, boundary + 1, boundary, receiver, lanes)


sizes = st.lists(st.integers(1, 6), min_size=2, max_size=4)
draws = st.builds(
    Draw, st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 99)
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), draws)
def test_with_equal_stages_each_boundary_is_crossed_by_a_bijection(replicas, draw):
    stages = grid(replicas, replicas, replicas)
    for boundary in (0, 1):
        crossings = [
            receivers(draw, stages, boundary, sender, replicas) for sender in stages[boundary]
        ]
        assert all(len(crossing) == 1 for crossing in crossings)
        assert {crossing[0][1] for crossing in crossings} == set(stages[boundary + 1])


@settings(max_examples=60, deadline=None)
@given(sizes, draws, st.integers(1, 20))
def test_senders_and_receivers_agree_whatever_the_sizes(sizes, draw, lanes):
    stages = grid(*sizes)
    for boundary in range(len(sizes) - 1):
        sent = {
            (lane, sender, receiver)
            for sender in stages[boundary]
            for lane, receiver in receivers(draw, stages, boundary, sender, lanes)
        }
        received = {
            (lane, sender, receiver)
            for receiver in stages[boundary + 1]
            for lane, sender in senders(draw, stages, boundary, receiver, lanes)
        }
        assert sent == received
        assert sorted(lane for lane, _, _ in sent) == list(range(lanes))


@settings(max_examples=60, deadline=None)
@given(sizes, draws, st.integers(0, 30))
def test_the_servers_of_a_stage_hold_as_many_lanes_each_up_to_one(sizes, draw, lanes):
    stages = grid(*sizes)
    for stage, peers in enumerate(stages):
        held = collections.Counter(holder(draw, stages, stage, lane) for lane in range(lanes))
        counts = [held[peer] for peer in peers]
        assert sum(counts) == lanes
        assert max(counts) - min(counts) <= 1


@settings(max_examples=60, deadline=None)
@given(draws, st.data())
def test_the_answer_does_not_depend_on_how_servers_are_listed(draw, data):
    stages = grid(5, 5)
    shuffled = tuple(tuple(data.draw(st.permutations(peers))) for peers in stages)
    for stage in (0, 1):
        for lane in range(7):
            assert line(draw, shuffled[stage], stage, lane) == line(
                draw, stages[stage], stage, lane
            )


def test_the_order_is_that_of_the_documented_hash_and_the_line_a_rotation_of_it():
    peers = grid(5, 5)[1]
    # lane 6 of 5 is in block 1
    salt = b"\x00".join((b"mixing", b"7", b"3", b"11", b"2", b"1", b"1"))
    ordered = sorted(
        peers, key=lambda peer: hashlib.sha256(salt + b"\x00" + peer.encode()).digest()
    )
    assert line(DRAW, peers, 1, 6) == (*ordered[1:], ordered[0])


@pytest.mark.parametrize("field", ["seed", "membership", "step", "index"])
def test_each_input_of_the_draw_changes_the_permutation(field):
    peers = grid(12, 12)[1]
    other = dataclasses.replace(DRAW, **{field: getattr(DRAW, field) + 1})
    assert line(other, peers, 1, 0) != line(DRAW, peers, 1, 0)


def test_boundaries_are_crossed_differently():
    peers = grid(12)[0]
    orders = {line(DRAW, peers, stage, 0) for stage in range(1, 6)}
    assert len(orders) == 5


def test_stage_0_holds_its_own_lanes():
    stages = grid(4, 4)
    for step in range(5):
        draw = dataclasses.replace(DRAW, step=step)
        assert [holder(draw, stages, 0, lane) for lane in range(6)] == [*stages[0], *stages[0][:2]]


@pytest.mark.parametrize(("counts", "boundary"), [((4, 4, 4), 0), ((4, 4, 4), 1), ((2, 5, 3), 1)])
def test_over_many_steps_every_pair_meets_equally_often(counts, boundary):
    stages, steps = grid(*counts), 3000
    met = collections.Counter()
    lanes = 4
    for step in range(steps):
        for sender in stages[boundary]:
            for _, receiver in receivers(
                dataclasses.replace(DRAW, step=step), stages, boundary, sender, lanes
            ):
                met[sender, receiver] += 1
    expected = steps * lanes / (counts[boundary] * counts[boundary + 1])
    assert len(met) == counts[boundary] * counts[boundary + 1]
    assert all(abs(count - expected) < 6 * expected**0.5 for count in met.values())


def test_where_a_lane_comes_from_says_nothing_of_where_it_goes():
    """The crossings of two boundaries are independent: all nine combinations of the peer before and
    the peer after occur."""
    stages, met = grid(3, 3, 3), collections.Counter()
    for step in range(2000):
        draw = dataclasses.replace(DRAW, step=step)
        middle = stages[1][0]
        ((_, before),) = senders(draw, stages, 0, middle, 3)
        ((_, after),) = receivers(draw, stages, 1, middle, 3)
        met[before, after] += 1
    assert len(met) == 9
    assert all(abs(count - 2000 / 9) < 6 * (2000 / 9) ** 0.5 for count in met.values())


@settings(max_examples=60, deadline=None)
@given(draws, st.integers(0, 4), st.integers(0, 4))
def test_all_survivors_agree_without_the_dead_one(draw, dead, lane):
    stages = grid(5, 5)
    left = tuple(peer for peer in stages[1] if peer != stages[1][dead])
    assert holder(draw, (stages[0], left), 1, lane) in left
    assert sorted(line(draw, left, 1, lane)) == sorted(left)
    assert collections.Counter(
        holder(draw, (stages[0], left), 1, lane) for lane in range(4)
    ) == dict.fromkeys(left, 1)


def test_a_stage_without_servers_has_an_empty_line():
    assert line(DRAW, (), 1, 3) == ()
