"""Swarms with liars among their peers, and faults: nothing that honest peers are promised breaks.

A failing seed prints its command."""

import collections
import logging

import pytest

from farflock.node.simulate.chaos import Chaos, run_seed, run_seeds
from farflock.node.simulate.chaos_methods import case_of
from farflock.node.simulate.liars.registry import LIARS, MIXED, NOT_MIXED
from farflock.node.simulate.lies import MAX_SHARE, liars_of, needs_lists
from farflock.swarm.sim.virtual_time import run_virtual

WORKERS = 2
EVERYDAY = range(4)
MANY = 100
SHARE = MAX_SHARE


def quiet(work):
    """Return what `work` does without messages; `own_log_level` comes after fixtures of modules."""
    logger = logging.getLogger("farflock")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return work()
    finally:
        logger.setLevel(level)


def disasters(seeds):
    """Run seeds with liars; fail with the commands that bring the violations back."""
    reports = quiet(lambda: list(run_seeds(seeds.start, len(seeds), WORKERS, liars=SHARE)))
    again = "farflock sim --chaos --seeds 1 --liars 0.333333 --first-seed"
    failures = [
        f"{report.violations[0]}; again with: {again} {report.seed}"
        for report in reports
        if report.violations
    ]
    assert not failures, "\n".join(failures)
    return reports


@pytest.fixture(scope="module")
def everyday():
    return disasters(EVERYDAY)


def test_a_few_seeds_with_liars_violate_nothing(everyday):
    assert all(report.lies.liars for report in everyday)
    assert sum((report.lies.said for report in everyday), collections.Counter())


def test_liars_are_refused_and_no_honest_peer_is_accused(everyday):
    refused = sum((report.lies.refusals for report in everyday), collections.Counter())
    accused = sum((report.lies.accusations for report in everyday), collections.Counter())
    assert any(reason.startswith("refused: ") for reason in refused)
    assert accused
    assert {name for name, _ in accused} <= {
        name for report in everyday for name in report.lies.liars.values()
    }


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_seeds_violate_nothing_and_each_way_to_lie_is_tried():
    lies = collections.Counter()
    for report in disasters(range(MANY)):
        lies += report.lies.acted
    assert {name for name, _ in lies} == set(MIXED)


@pytest.mark.parametrize(
    "seed",
    [
        43,  # a newcomer followed a branch of the liar alone, and came back to rounds it had had
        239,  # the same, of a method with several streams
    ],
)
def test_seeds_with_liars_that_failed_once(seed):
    disasters(range(seed, seed + 1))


def test_the_same_seed_with_liars_gives_the_same_run_in_whichever_process():
    logging.getLogger("farflock").setLevel(logging.CRITICAL)
    here = [run_seed(1, liars=SHARE)]
    there = list(run_seeds(1, 2, WORKERS, liars=SHARE))
    assert there[:1] == here


# Who lies, and how.


@pytest.mark.parametrize("peers", range(4, 13))
@pytest.mark.parametrize("seed", range(50))
def test_liars_are_at_most_a_third_of_all_peers_and_of_those_that_came_first(seed, peers):
    liars = liars_of(seed, SHARE, peers, has_lists=True)
    assert len(liars) == max(1, int(SHARE * peers))
    assert all(0 <= number < peers for number in liars)
    for count in range(3, peers + 1):
        assert 3 * sum(number < count for number in liars) <= count


def test_a_share_of_nothing_or_a_swarm_of_three_has_no_liar():
    assert not liars_of(1, 0.0, 12, has_lists=True)
    assert not liars_of(1, SHARE, 3, has_lists=True)


@pytest.mark.parametrize("has_lists", [True, False])
def test_consecutive_seeds_go_through_all_ways_to_lie(has_lists):
    able = {name for name in MIXED if has_lists or not needs_lists(name)}
    for first in (0, len(MIXED), 5 * len(MIXED)):
        seeds = range(first, first + len(MIXED))
        chosen = {next(iter(liars_of(seed, SHARE, 4, has_lists).values())) for seed in seeds}
        assert chosen == able


def test_a_way_to_lie_is_in_the_mix_or_has_a_reason_not_to_be():
    assert LIARS.keys() == {*MIXED, *NOT_MIXED}
    assert all(NOT_MIXED.values())
    assert len(MIXED) > 3 * len(NOT_MIXED)


# The watch finds what it is there for.


class Framed(Chaos):
    """A disaster after which an honest peer accuses another one."""

    def check_rest(self, *tasks):
        liars = {self.population.identities[number].peer for number in self.lies.liars}
        one, other, *_ = [peer for peer in self.population.peers if peer.me not in liars]
        one.context.accuse(other.me, "a lie that it never told")
        super().check_rest(*tasks)


class Deserted(Chaos):
    """A disaster after which an honest peer says goodbye, and stays: the others cannot know why."""

    async def progress(self, rounds, after):
        lasted_s = await super().progress(rounds, after)
        if after == "the last fault":
            number = next(each for each in self.population.lives if each not in self.lies.liars)
            self.population.lives[number].peer.leave()
        return lasted_s


@pytest.mark.parametrize(
    ("made", "words"), [(Framed, "a lie that it never told"), (Deserted, "and was heard")]
)
def test_the_watch_over_honest_peers_finds_what_it_is_there_for(made, words):
    logging.getLogger("farflock").setLevel(logging.CRITICAL)

    async def main():
        return await made(1, case_of(1), liars=SHARE).run()

    assert any(words in violation for violation in run_virtual(main()).violations)
