"""One member of four lies when it votes: the rounds of the others go on, they decide one thing, all
of them stay members, and whoever is accused is the liar."""

import pytest
from worlds.herd import VIEW_S, in_virtual_time
from worlds.waiting import now, until

from farflock.node.simulate.liars.ballots import (
    EarlyBallots,
    EvictsAll,
    FarBallots,
    FarFloors,
    FarViews,
    NeedlessViews,
    TwoFaced,
    VoidLists,
)
from farflock.swarm.sim.network import Faults

MEMBERS, LIAR = 4, 3
WITHIN_S = 10.0  # of the attack's start, rounds go on


def honest_of(herd):
    return [node for number, node in herd.nodes.items() if number != LIAR]


def lying(herd, kind):
    """The fourth member lies in this way while the block runs."""
    node = herd.nodes[LIAR]
    return kind(node.peer, node.identity).lying()


async def rounds_go_on(herd, rounds=5, within_s=WITHIN_S):
    honest = honest_of(herd)
    start = max(node.applied for node in honest)
    await until(lambda: min(node.applied for node in honest) > start, within_s, "a round")
    await until(lambda: min(node.applied for node in honest) >= start + rounds, 60, "rounds")


def accused(herd):
    """The peers that honest members accuse, and of what."""
    accusations = [each for node in honest_of(herd) for each in node.peer.context.accusations]
    assert {each.peer for each in accusations} <= {herd.nodes[LIAR].id}, accusations
    return {each.what for each in accusations}


def all_honest_are_members(herd):
    everybody = {node.id for node in honest_of(herd)}
    return all(everybody <= node.members for node in honest_of(herd))


@in_virtual_time(MEMBERS)
async def test_a_view_without_the_others_is_signed_by_none_of_them(herd):
    async with lying(herd, EvictsAll):
        for _ in range(10):
            await rounds_go_on(herd)
            assert all_honest_are_members(herd)
    assert "a view without a member that promised and did not leave" in accused(herd)


@in_virtual_time(MEMBERS)
async def test_a_view_that_begins_at_a_round_that_never_comes_is_signed_by_nobody(herd):
    async with lying(herd, FarViews):
        for _ in range(10):
            await rounds_go_on(herd)
    assert max(node.view.first_round for node in honest_of(herd)) < 10**4
    assert all_honest_are_members(herd)


@in_virtual_time(MEMBERS)
async def test_views_without_a_change_come_no_more_often_than_others(herd):
    before, start_s = herd.nodes[0].view.number, now()
    async with lying(herd, NeedlessViews):
        await rounds_go_on(herd, rounds=20)
    assert herd.nodes[0].view.number - before <= (now() - start_s) / VIEW_S + 1


@in_virtual_time(MEMBERS)
async def test_a_floor_that_never_comes_keeps_no_newcomer_out_of_the_rounds(herd):
    async with lying(herd, FarFloors):
        newcomer = herd.start(LIAR + 1)
        await until(lambda: newcomer.served(), 60, "a newcomer's round")
        await rounds_go_on(herd)
    assert max(node.view.first_round for node in honest_of(herd)) < 10**4


@in_virtual_time(MEMBERS)
async def test_ballots_at_the_end_of_all_numbers_freeze_neither_rounds_nor_views(herd):
    async with lying(herd, FarBallots):
        await rounds_go_on(herd)
        newcomer = herd.start(LIAR + 1)
        await until(lambda: newcomer.served(), 60, "a newcomer's round")
    assert "a ballot that no turn reaches" in accused(herd)


@in_virtual_time(MEMBERS)
async def test_a_member_that_begins_a_ballot_in_each_turn_and_proposes_nothing_stops_no_round(herd):
    async with lying(herd, EarlyBallots):
        await rounds_go_on(herd, rounds=10)


@in_virtual_time(MEMBERS)
async def test_a_list_of_content_that_nobody_has_is_signed_by_nobody_that_would_hold_it(herd):
    async with lying(herd, VoidLists):
        await rounds_go_on(herd, rounds=10)


@pytest.mark.parametrize("seed", range(5))
def test_a_member_that_hides_its_votes_makes_no_two_results_of_honest_proposers(seed):
    """The herd's laws fail on two results of one round."""

    @in_virtual_time(MEMBERS, seed=seed)
    async def main(herd):
        async with lying(herd, TwoFaced):
            herd.network.faults = Faults(loss=0.1)
            await rounds_go_on(herd, rounds=10)

    main()
