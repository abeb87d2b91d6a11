"""Votes in a run of peers: newcomers learn first, vote once they have earned it, and a run goes on
without its founder if enough others do."""

import asyncio

from worlds.herd import VIEW_S, in_virtual_time
from worlds.waiting import now, until

from farflock.swarm.capability import MAX_UNIX_S, Ticket
from farflock.swarm.peer.views import admission
from farflock.swarm.protocol import enrolment, view_changes, views
from farflock.swarm.protocol.votes import EARNED


def earning(herd):
    herd.votes = EARNED
    return herd


def voters(node):
    return set(node.view.electorate.keys_that_vote)


async def started(herd, count):
    for number in range(count):
        await started_more(herd, number)


async def started_more(herd, number):
    node = herd.start(number)
    await until(lambda: node.peer.membership.is_member, 60, "a new member")


@in_virtual_time()
async def test_a_newcomer_learns_first_and_votes_after_so_many_rounds_that_counted_it(herd):
    earning(herd)
    await started(herd, 4)
    founder, newcomer = herd.nodes[0], herd.nodes[3]
    assert newcomer.id not in voters(founder)
    await until(lambda: newcomer.id in voters(founder), 120, "its vote")
    assert founder.peer.context.entrance.counted(newcomer.id) >= EARNED.after_rounds
    await until(lambda: newcomer.id in voters(newcomer), 30, "its vote, at itself")


@in_virtual_time()
async def test_an_idle_newcomer_never_votes_once_three_others_do(herd):
    earning(herd)
    await started(herd, 3)
    await until(lambda: len(voters(herd.nodes[0])) == 3, 60, "three votes")
    await started_more(herd, 3)
    herd.nodes[3].quiet = True
    assert len(herd.nodes[3].served()) < EARNED.after_rounds
    begun_s = now()
    await until(lambda: now() - begun_s > 60, 70, "time")
    assert herd.nodes[3].id not in voters(herd.nodes[0])


@in_virtual_time()
async def test_a_run_goes_on_without_its_founder_once_two_others_vote(herd):
    earning(herd)
    await started(herd, 3)
    await until(lambda: len(voters(herd.nodes[0])) == 3, 180, "three votes")
    herd.kill(0)
    survivors = [herd.nodes[1], herd.nodes[2]]
    before = [len(node.served()) for node in survivors]
    await until(
        lambda: all(
            len(node.served()) >= old + 5 for node, old in zip(survivors, before, strict=True)
        ),
        120,
        "rounds without the founder",
    )
    assert len(voters(survivors[0])) == 2


@in_virtual_time()
async def test_a_voter_that_comes_back_has_its_vote_in_the_first_view_that_lists_it(herd):
    earning(herd)
    await started(herd, 3)
    await until(lambda: len(voters(herd.nodes[0])) == 3, 180, "three votes")
    gone = herd.kill(2)
    await until(lambda: gone.id not in herd.nodes[0].members, 60, "a view without it")
    back = herd.start(2)
    await until(lambda: back.id in herd.nodes[0].members, 60, "a view with it")
    assert back.id in voters(herd.nodes[0])


@in_virtual_time()
async def test_the_first_three_members_vote_at_once(herd):
    earning(herd)
    await started(herd, 3)
    await until(lambda: len(voters(herd.nodes[0])) == 3, 3 * VIEW_S, "three votes")


def with_places(monkeypatch, count):
    for module in (views, view_changes, enrolment, admission):
        monkeypatch.setattr(module, "MAX_MEMBERS", count)
    monkeypatch.setattr(enrolment, "MAX_PLACES_EACH", count // 2)


def test_a_learner_that_no_round_counts_gives_its_place_to_one_that_waits(monkeypatch):
    with_places(monkeypatch, 4)

    @in_virtual_time()
    async def main(herd):
        earning(herd)
        await started(herd, 4)
        idle, late = herd.nodes[3], herd.start(4)
        idle.quiet = True
        await until(lambda: late.id in herd.nodes[0].members, 120, "its place")
        assert idle.id not in herd.nodes[0].members
        assert {herd.nodes[0].id, herd.nodes[1].id} <= herd.nodes[0].members

    main()


def test_while_all_work_or_vote_nobody_gives_a_place_up(monkeypatch):
    with_places(monkeypatch, 3)

    @in_virtual_time()
    async def main(herd):
        earning(herd)
        await started(herd, 3)
        await until(lambda: len(voters(herd.nodes[0])) == 3, 180, "three votes")
        herd.nodes[2].quiet = True  # it still votes
        late = herd.start(3)
        begun_s, before = now(), herd.nodes[0].members
        start = herd.nodes[0].applied
        await until(lambda: herd.nodes[0].applied > start + 12, 90, "rounds without its work")
        assert now() - begun_s < 90
        assert not herd.nodes[0].peer.membership.next_view.is_open, "no change is wanted"
        assert late.id not in before
        assert herd.nodes[0].members == before
        late.task.cancel()

    main()


def others_invite(herd):
    """A second invite by the founder."""
    return Ticket.issue(herd.inviter, "run", b"2" * 32, MAX_UNIX_S, uses=0, votes=0)


def test_learners_beyond_half_by_one_capability_give_way_to_one_that_comes_by_another(monkeypatch):
    with_places(monkeypatch, 6)

    @in_virtual_time()
    async def main(herd):
        earning(herd)
        await started(herd, 6)
        junior = herd.nodes[5]
        assert junior.id not in voters(herd.nodes[0])
        same = herd.start(6)
        await until(lambda: same.peer.membership.admission.own_wait is not None, 30, "its place")
        assert "half of them or more" in same.peer.membership.admission.own_wait
        assert junior.id in herd.nodes[0].members
        late = herd.start(7)
        late.peer.membership.bring(others_invite(herd))
        await until(lambda: late.id in herd.nodes[0].members, 90, "its place")
        assert herd.nodes[0].peer.context.counters[f"dropped: join: {enrolment.OUT_OF_TURN}"] > 0
        lost = {node.id for node in herd.nodes.values()} - herd.nodes[0].members
        assert lost <= {same.id, herd.nodes[4].id, junior.id}
        settled = herd.nodes[0].members
        await asyncio.sleep(60)
        assert herd.nodes[0].members == settled, "nobody takes turns"
        herd.kill(2)
        await until(lambda: len(herd.nodes[0].members - settled) == 1, 90, "the next that waits")
        for node in (same, junior, herd.nodes[4]):
            node.task.cancel()

    main()
