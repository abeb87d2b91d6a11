"""A newcomer's time is a sum of what members say of their rounds and of what its line carries."""

import pytest
from worlds.herd import in_virtual_time
from worlds.waiting import until

from farflock.swarm.join_time import (
    FEW_ROUNDS,
    NO_TRAFFIC,
    JoinTime,
    RoundTraffic,
    TrafficMeter,
    together,
    usual,
)
from farflock.swarm.peer.round_log import traffic_of


def test_what_is_left_of_the_line_carries_the_state_and_the_rounds_of_that_time():
    found = JoinTime(86_000_000, 1_000_000, RoundTraffic(300_000, 1.0))
    assert found.rounds_share == pytest.approx(0.3)
    assert found.alone_s == pytest.approx(86.0)
    assert found.join_s == pytest.approx(86 / 0.7)
    assert 1_000_000 * found.join_s == pytest.approx(86_000_000 + 300_000 * found.join_s)
    assert not found.is_slow


@pytest.mark.parametrize(
    ("round_bytes", "slow", "hopeless", "said"),
    [
        (600_000, True, False, "so joining takes 0:03:35 in place of 0:01:26"),
        (
            950_000,
            True,
            True,
            "take 95% of this line, which carries 1.00 MB/s, so a newcomer",
        ),
        (5_000_000, True, True, "rounds of 5.00 MB every 1 s take 500% of this line"),
    ],
)
def test_it_says_both_numbers(round_bytes, slow, hopeless, said):
    found = JoinTime(86_000_000, 1_000_000, RoundTraffic(round_bytes, 1.0))
    assert (found.is_slow, found.is_hopeless) == (slow, hopeless)
    assert said in str(found)


def heard(*rounds):
    meter = TrafficMeter()
    for at_s, size, late in rounds:
        meter.heard(size, at_s, late=late)
    return meter.traffic


def test_a_member_says_the_medians_of_its_last_rounds_once_there_are_a_few():
    rounds = [(2.0 * number, 100 + number, False) for number in range(FEW_ROUNDS + 1)]
    assert heard(*rounds[:FEW_ROUNDS]) == NO_TRAFFIC
    assert heard(*rounds) == RoundTraffic(101, 2.0)
    outliers = [(100.0, 10**9, False), *[(100 + 2.0 * n, 7, False) for n in range(1, 8)]]
    assert heard(*rounds, *outliers) == RoundTraffic(7, 2.0)


def test_rounds_that_are_caught_up_with_say_nothing_of_the_time_between_rounds():
    late = [(50 + number / 10, 100, True) for number in range(10)]
    assert heard(*late) == NO_TRAFFIC
    assert heard(*late, *[(60 + 5.0 * n, 100, False) for n in range(4)]) == RoundTraffic(100, 5.0)


def test_streams_are_added_up_and_those_that_nothing_is_known_of_left_out():
    assert together([]) == together([NO_TRAFFIC]) == NO_TRAFFIC
    both = together([RoundTraffic(100, 2.0), NO_TRAFFIC, RoundTraffic(600, 4.0)])
    assert both == RoundTraffic(400, 2.0)
    assert both.bytes_per_s == 200.0


def test_of_what_members_say_the_median_counts_and_of_two_the_lower_one():
    low, high, huge = RoundTraffic(10, 1.0), RoundTraffic(20, 1.0), RoundTraffic(2**62, 1e-300)
    assert usual([]) == NO_TRAFFIC
    assert usual([huge, low]) == low
    assert usual([huge, low, high]) == high
    assert usual([huge, NO_TRAFFIC]) == NO_TRAFFIC


@in_virtual_time(3, seed=4)
async def test_members_say_alike_what_their_rounds_take(herd):
    first = herd.nodes[0]
    await until(lambda: first.applied >= 12, 60, "a dozen rounds")
    said = [traffic_of(node.peer.rounds.streams) for node in herd.nodes.values()]
    times = [at_s for at_s, number, _ in first.events if number > 4]
    gap_s = (times[-1] - times[0]) / (len(times) - 1)
    for traffic in said:
        assert traffic.round_s == pytest.approx(gap_s, rel=0.3)
        assert traffic.round_bytes == said[0].round_bytes > 0
    assert traffic_of(first.peer.rounds.streams, stage=3) == NO_TRAFFIC
