"""A rate holds over seconds, whatever the frames, and is not saved up."""

import math

import pytest

from farflock.swarm.zmq.rate_limit import HEADERS, SAVED_S, RateLimit


def passed(limit, sizes, for_s, from_s=0.0):
    """The bytes of frames that pass in this time, if one always waits."""
    now_s, total, sizes = from_s, 0, iter(sizes)
    while now_s < from_s + for_s:
        size = next(sizes)
        limit.spend(size, now_s)
        total += size
        now_s += limit.wait_s(now_s)
    return total


@pytest.mark.parametrize("sizes", [[1000], [576 * 1024], [100, 60_000, 3]])
def test_the_rate_of_the_line_holds_with_what_headers_take(sizes):
    limit = RateLimit(625_000.0)
    endless = (size for _ in range(10**6) for size in sizes)
    line_bytes = HEADERS * passed(limit, endless, 10.0)
    assert 6.25e6 <= line_bytes <= (10 + SAVED_S) * 625_000 + HEADERS * max(sizes)


def test_who_always_comes_late_loses_nothing():
    limit, now_s, total = RateLimit(625_000.0), 0.0, 0
    while now_s < 10.0:
        limit.spend(65_536, now_s)
        total += 65_536
        now_s += limit.wait_s(now_s) + (0.02 if total % 3 else 0.0)
    assert HEADERS * total / now_s == pytest.approx(625_000, rel=0.03)


def test_a_pause_gives_no_right_to_a_burst():
    limit = RateLimit(1000.0)
    limit.spend(10, 0.0)
    assert limit.wait_s(100.0) == 0.0
    limit.spend(1000, 100.0)
    assert limit.wait_s(100.0) == pytest.approx(HEADERS - SAVED_S)


def test_without_a_limit_nothing_waits():
    limit = RateLimit()
    limit.spend(2**40, 5.0)
    assert limit.wait_s(5.0) == 0.0
    assert limit.bytes_per_s == math.inf


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_line_that_carries_nothing_is_refused(rate):
    with pytest.raises(ValueError, match="more than 0 bytes a second"):
        RateLimit(rate)
