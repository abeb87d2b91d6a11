"""Members that have missed many rounds are waited for only a little longer than all others."""

import pytest
from worlds.collective import DEADLINE_S, KEY, VIEW, ExchangeWorld, mask, offering_world

from farflock.swarm.messages import Reduced
from farflock.swarm.protocol.agreement.turns import TAKEOVER_S
from farflock.swarm.protocol.exchange.content import GRACE, SOFT
from farflock.swarm.protocol.exchange.roster import Roster

KINDS = pytest.mark.parametrize("kind", ["mean", "uniform", "gather"])
SOFT_S = SOFT * DEADLINE_S
PROMPT_S, LAGGARD = 4.0, 3  # when the others have their contributions
CLOSED_S = 2.5  # after the last contribution that is waited for, all know the list


def world_of(kind, seed, laggards=(LAGGARD,)):
    world = ExchangeWorld(seed, n=4, kind=kind, laggards=laggards)
    for member in range(LAGGARD):
        world.offer_at(PROMPT_S - 0.1 * member, member)
    return world


def counted(world):
    return [member for member, _ in world.close.members]


@KINDS
@pytest.mark.parametrize("seed", range(5))
def test_whoever_brings_nothing_costs_half_of_the_deadline_and_a_laggard_little(kind, seed):
    assert max(world_of(kind, seed, ()).run().finished_s.values()) >= SOFT_S
    world = world_of(kind, seed).run()
    assert counted(world) == [0, 1, 2]
    last_s = max(world.finished_s.values())
    assert PROMPT_S * (1 + GRACE) <= last_s < PROMPT_S * (1 + GRACE) + CLOSED_S < SOFT_S


@KINDS
@pytest.mark.parametrize("seed", range(5))
def test_a_laggard_that_comes_with_the_others_or_little_later_counts(kind, seed):
    for offered_s in (0.0, PROMPT_S, PROMPT_S * (1 + GRACE) - 0.5):
        world = world_of(kind, seed)
        world.offer_at(offered_s, LAGGARD)
        assert counted(world.run()) == [0, 1, 2, 3]
        assert max(world.finished_s.values()) < PROMPT_S * (1 + GRACE) + CLOSED_S


@KINDS
@pytest.mark.parametrize("seed", range(5))
def test_a_laggard_that_offers_and_does_not_deliver_costs_little_too(kind, seed):
    for laggards in ((), (LAGGARD,)):
        world = world_of(kind, seed, laggards)
        world.hoarders.add(LAGGARD)
        world.offer_at(PROMPT_S, LAGGARD)
        world.run()
        is_early = max(world.finished_s.values()) < SOFT_S
        assert is_early == bool(laggards)
        if is_early and kind != "mean":  # a reducer of a bundle has its own there
            assert counted(world) == [0, 1, 2]


@KINDS
def test_where_only_laggards_live_they_are_waited_for_in_full(kind):
    world = world_of(kind, 1, range(4))
    world.offer_at(SOFT_S - 1, LAGGARD)
    assert counted(world.run()) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["mean", "uniform"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("misers", [{LAGGARD}, {LAGGARD, 4}], ids=["one", "one and its accomplice"])
def test_a_reducer_that_keeps_its_results_costs_no_round_and_a_laggard_reduces_nothing(
    kind, seed, misers
):
    """Of four one lies, of seven two: one more of them says that it holds the results."""
    for laggards in ((), tuple(misers)):
        world = ExchangeWorld(seed, n=4 if len(misers) == 1 else 7, kind=kind, laggards=laggards)
        world.misers = misers
        for member in range(world.n):
            world.offer_at(PROMPT_S, member)
        world.run()
        assert counted(world) == [member for member in range(world.n) if member not in misers]
        last_s = max(world.finished_s.values())
        assert last_s < (SOFT_S if laggards else DEADLINE_S - TAKEOVER_S)


def test_the_prompt_are_the_living_without_laggards_and_all_if_there_are_no_others():
    roster = Roster(tuple("abc"), 0, (0, 1, 2), laggards=frozenset({1}))
    assert roster.prompt == {0, 2}
    roster.suspect(frozenset({2}))
    assert roster.prompt == {0}
    roster = Roster(tuple("abc"), 1, (0, 1, 2), laggards=frozenset({1}))
    roster.suspect(frozenset({0, 2}))
    assert roster.prompt == {1}
    roster = Roster(tuple("abc"), 0, (0, 1, 2), laggards=frozenset({1}), probation=True)
    assert roster.prompt == {0, 1, 2}


def test_laggards_are_the_last_to_reduce_also_while_they_are_waited_for():
    for probation in (False, True):
        roster = Roster(
            tuple("abcd"), 0, (0, 1, 2, 3), laggards=frozenset({1, 3}), probation=probation
        )
        assert [roster.reducers(bundle) for bundle in range(3)] == [
            (0, 2, 1, 3),
            (2, 0, 1, 3),
            (2, 0, 3, 1),
        ]


def test_results_without_end_are_not_remembered():
    world = offering_world(1, n=4)
    mean = world.machines[0].content
    for number in range(1000):
        digest = number.to_bytes(32, "big")
        mean.take(LAGGARD, Reduced(KEY, VIEW, 0, digest, 8, mask(0, 1)))
        mean.work(1.0)
    assert len(mean._heard_s) <= world.n
