"""Many seeds of the whole product among faults: each is a swarm of 4 to 12 peers; a failing one prints its command."""

import collections

import pytest

from farflock.node.chaos import cells, run_seed

EVERYDAY = 100
CHUNK = 10


def disasters(first: int, count: int) -> collections.Counter:
    """Run seeds; fail with the command that brings the first violation back."""
    fired: collections.Counter = collections.Counter()
    for seed in range(first, first + count):
        report = run_seed(seed)
        again = f"farflock sim --chaos --seeds 1 --first-seed {seed}"
        assert not report.violations, f"{report.violations[0]}; again with: {again}"
        fired += report.fired
    return fired


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, EVERYDAY, CHUNK))
def test_no_seed_of_the_everyday_set_violates_anything(first: int):
    assert sum(disasters(first, CHUNK).values()) == 4 * CHUNK


def test_the_same_seed_gives_the_same_run():
    one, other = run_seed(7), run_seed(7)
    assert (one.state_hash, one.rounds, one.fired) == (other.state_hash, other.rounds, other.fired)


def test_another_seed_gives_another_run():
    assert run_seed(1).state_hash != run_seed(6).state_hash


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_two_thousand_seeds_violate_nothing_and_every_fault_meets_every_phase():
    fired = disasters(0, 2000)
    empty = [cell for cell in cells() if not fired[cell]]
    assert not empty, f"never fired: {empty}"
