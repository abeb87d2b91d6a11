"""The lot that draws who evaluates: the same for all, and not for the drawn to choose."""

import collections

import pytest

from farflock.swarm.protocol.evaluation_lot import REPEATED, EvaluationSchedule
from farflock.swarm.protocol.views import Certified, Chain, Member, View, genesis
from farflock.swarm.roles import EVERY, NOTHING, UNMEASURED

FOUNDER = Member("founder", 1, EVERY)
GENESIS = genesis("run", FOUNDER)
PEERS = tuple(Member(f"peer{number}", 1, EVERY) for number in range(8))
SCHEDULE = EvaluationSchedule("weights", 7, every=5)


def chain(members=PEERS, first_round=1):
    later = View(1, GENESIS.hash, first_round, members)
    return Chain("run", [Certified(GENESIS), Certified(later)])


def test_the_first_round_and_every_nth_after_it_are_due_on_the_streams_own_axis():
    schedule = EvaluationSchedule("weights", 7, every=3, first=2, stride=4)
    assert [number for number in range(40) if schedule.is_due(number)] == [2, 14, 26, 38]
    assert schedule.drawn(chain(), 3) == ()


def test_one_member_is_drawn_and_in_one_round_of_ten_a_second_one():
    numbers = range(0, 5 * 40, 5)
    drawn = [SCHEDULE.drawn(chain(), number) for number in numbers]
    assert [len(set(each)) for each in drawn[1:]] == [
        2 if place % REPEATED == 0 else 1 for place in range(1, 40)
    ]
    counts = collections.Counter(each[0] for each in drawn)
    assert len(counts) == 9, "each has its turn"
    assert max(counts.values()) < 15


def test_the_lot_depends_on_the_seed_and_the_view():
    other = EvaluationSchedule("weights", 8, every=5)
    numbers = range(5, 200, 5)
    mine = [SCHEDULE.drawn(chain(), number) for number in numbers]
    assert mine != [other.drawn(chain(), number) for number in numbers]
    assert mine != [SCHEDULE.drawn(chain(PEERS[:7]), number) for number in numbers]


def test_a_view_that_begins_with_the_evaluated_round_changes_nothing():
    before, number = chain(), 35
    after = chain()
    after.views.append(Certified(View(2, before.newest.hash, number, PEERS[:2])))
    assert SCHEDULE.drawn(before, number) == SCHEDULE.drawn(after, number)


def test_the_founder_evaluates_before_the_first_round_whoever_joins_in_time_for_that():
    assert SCHEDULE.drawn(chain(first_round=0), 0) == ("founder",)


@pytest.mark.parametrize(
    ("roles", "able"),
    [
        ((0, 1, NOTHING, NOTHING), {"peer2", "peer3"}),
        ((0, 1, EVERY, NOTHING), {"peer2", "peer3"}),
        ((0, 1, 0, 1), {"peer0", "peer1", "peer2", "peer3"}),
    ],
)
def test_in_a_pipeline_trainers_evaluate_and_all_members_if_there_is_none(roles, able):
    members = tuple(Member(f"peer{place}", 1, stage) for place, stage in enumerate(roles))
    schedule = EvaluationSchedule("grad/0", 7, every=1, stage=0)
    views = Chain("run", [Certified(View(1, GENESIS.hash, 0, members))])
    drawn = [schedule.drawn(views, number) for number in range(1, 60)]
    assert all(len(each) == 1 for each in drawn), "weights change while they are measured"
    assert {each[0] for each in drawn} == able


def test_members_without_the_room_are_passed_over_and_all_other_turns_stay_as_they_are():
    peers = tuple(
        Member(f"peer{place}", 1, UNMEASURED if place in (3, 4) else EVERY) for place in range(8)
    )
    drawn = [SCHEDULE.drawn(chain(peers), number) for number in range(10, 5 * 80, 5)]
    assert {peer for each in drawn for peer in each} == {f"peer{n}" for n in (0, 1, 2, 5, 6, 7)}
    assert {len(each) for each in drawn} == {1, 2}, "second members too"
    nobody = tuple(Member(f"peer{place}", 1, UNMEASURED) for place in range(3))
    assert SCHEDULE.drawn(chain(nobody), 10) == ()


def test_members_without_the_whole_model_are_not_drawn_for_it():
    views = Chain("run", [Certified(View(1, GENESIS.hash, 0, (Member("t", 1, NOTHING),)))])
    assert EvaluationSchedule("weights", 7, every=1).drawn(views, 3) == ()
