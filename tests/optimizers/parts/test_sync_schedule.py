"""The ends of rounds, counted in steps or in seconds."""

import math

import pytest

from farflock.optimizers.method import Progress
from farflock.optimizers.parts.options import require_options
from farflock.optimizers.parts.sync_schedule import SyncSchedule


def at(seconds):
    return Progress(0, run_time_s=seconds)


def test_rounds_of_steps_know_no_time():
    sync_schedule = SyncSchedule(3)
    assert [sync_schedule.over(since, 0, at(1e6)) for since in range(5)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert sync_schedule.slot(at(1e6)) == 0


def test_rounds_of_seconds_end_at_multiples_of_them_whenever_they_began():
    sync_schedule = SyncSchedule(3, round_s=10.0)
    assert [sync_schedule.slot(at(seconds)) for seconds in (0.0, 9.99, 10.0, 25.0)] == [1, 1, 2, 3]
    began = sync_schedule.slot(at(9.0))
    assert not sync_schedule.over(100, began, at(9.99))
    assert sync_schedule.over(1, began, at(10.0))
    assert sync_schedule.over(1, began, at(1e6)), "after a long sleep too, once"


def test_a_round_has_its_least_steps():
    sync_schedule = SyncSchedule(3, round_s=10.0, min_steps=4)
    assert not sync_schedule.over(3, 1, at(50.0))
    assert sync_schedule.over(4, 1, at(50.0))


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan, 1e-9])
def test_a_round_that_has_no_room_or_no_end_is_refused(wrong):
    require_options(SyncSchedule(3, None))
    require_options(SyncSchedule(3, 600.0))
    with pytest.raises(ValueError, match=r"is out of range; choose 0.001 s or more, usually 600"):
        require_options(SyncSchedule(3, wrong))
