"""Memory is what two real processes hold resident while they exchange, above what they held
before."""

import math

import pytest

from farflock.experiments.bench import memory
from farflock.experiments.bench.memory import NoExchange, Taken, one_exchange, whole_run
from farflock.experiments.bench.workers.memory_peer import Peak

MIB = 1024 * 1024
ROUNDS = [
    [Taken(100, 150), Taken(100, 130)],
    [Taken(120, 150), Taken(110, 190)],
    [Taken(130, 170), Taken(140, 160)],
]


@pytest.mark.ci_more
@pytest.mark.net
@pytest.mark.usefixtures("forked")
def test_two_processes_exchange_and_their_memory_is_held_against_the_allowance(quick):
    one, whole = memory.run(quick())
    assert (one.metric, whole.metric) == ("memory", "memory.run")
    assert one.yardstick == whole.yardstick > 64 * MIB
    for line in (one, whole):
        assert 0 < line.value < 1024 * MIB
        assert line.ratio == pytest.approx(line.value / line.yardstick, abs=1e-4)
        assert math.isfinite(line.ratio)
    assert "2 processes" in one.note


def test_one_exchange_is_the_median_of_the_worse_worker():
    assert one_exchange(ROUNDS) == 50


def test_a_whole_run_counts_what_earlier_exchanges_left():
    assert whole_run(ROUNDS) == 90


def test_an_exchange_that_not_both_took_part_in_measures_nothing(monkeypatch):
    with pytest.raises(NoExchange, match="alone"):
        memory.require_exchange([{"status": "ok", "peers": 2}, {"status": "alone", "peers": 1}])


def test_the_peak_is_seen_after_the_memory_is_given_back():
    peak = Peak()
    peak.forget()
    before = peak.now_bytes()
    block = bytearray(b"\1" * (48 * MIB))
    del block
    assert peak.highest_bytes() - before >= 40 * MIB


def test_a_forgotten_peak_does_not_count():
    peak = Peak()
    block = bytearray(b"\1" * (96 * MIB))
    del block
    peak.forget()
    assert peak.highest_bytes() - peak.now_bytes() < 48 * MIB
