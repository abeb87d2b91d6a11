"""The product's balancer among unequal servers, in virtual time."""

import random

import pytest

from farflock.experiments.pipelines.wiring import Size, peer, run

QUICK = {
    "speeds": [1.0, 2.0, 4.0],
    "told": [1.0, 2.0, 3.0],
    "tasks": 1200,
    "out": [4],
    "seeds": [1, 2],
}


def test_told_speeds_are_visited_in_their_ratio(table):
    found = table("swarm-wiring", **QUICK)
    assert [found[f"visits at a told speed of {speed}"] for speed in (1, 2, 3)] == [100, 200, 300]


def test_measured_speeds_are_nearly_as_good_and_round_robin_is_as_slow_as_the_slowest(table):
    found = table("swarm-wiring", **QUICK)
    assert min(found["weighted, 4 a server: of the ideal"]) > 90
    assert max(found["weighted, 4 a server: visits off by at most"]) < 15
    assert found["round robin, 4 a server: of the slowest's speed"] == pytest.approx(
        [100, 100], abs=10
    )


def test_a_server_with_nothing_waiting_idles(table):
    found = table("swarm-wiring", **{**QUICK, "out": [1, 4]})
    assert max(found["weighted, 1 a server: of the ideal"]) < min(
        found["weighted, 4 a server: of the ideal"]
    )


def test_a_fleet_that_is_always_busy_does_the_sum_of_its_speeds():
    size = Size(**{**QUICK, "jitter": 0.0, "tasks": 4000})
    turns = iter([peer(0), peer(1), peer(1), peer(2), peer(2), peer(2), peer(2)] * 1000)
    heard = []
    rate, worst = run(
        size,
        8,
        random.Random(0),
        lambda trainer, now_s: next(turns),
        lambda *told: heard.append(told),
    )
    assert rate == pytest.approx(7, rel=0.01)
    assert worst < 0.01
    assert len(heard) == 4000 - 8 * 3, "those of the beginning are given before any is done"
    assert all(begun_s < now_s for _, _, begun_s, now_s in heard)
