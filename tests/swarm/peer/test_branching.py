"""A peer whose majority is gone for good continues as a branch. When two lines of views meet, one
stays, and nothing counts twice."""

import asyncio
import contextlib
import random

import msgspec
import pytest
from worlds.chains.lines import (
    AFTER_S,
    has_served_since,
    ids,
    is_one,
    lines,
    names_of,
    progress,
)
from worlds.herd import STREAM, TOKENS, Node
from worlds.waiting import now, until

from farflock.swarm.frame import Frame
from farflock.swarm.identity import Identity
from farflock.swarm.messages import BranchAsk, BranchSign, Lineage, Views
from farflock.swarm.peer.snapshots import SnapshotUnavailable
from farflock.swarm.protocol import branches
from farflock.swarm.protocol.branches import branch_of, fork_of, trail
from farflock.swarm.protocol.views import Certified, Chain, encode

IDENTITIES = [Identity.from_seed(bytes([number]) * 32) for number in range(5)]


# Whole peers.


@lines(5)
async def test_the_last_of_five_goes_on_alone_after_the_time_set_and_not_before(herd):
    for number in (0, 1, 2, 4):
        herd.kill(number)
    await asyncio.sleep(0.5)
    survivor, before = herd.nodes[3], herd.nodes[3].applied
    await asyncio.sleep(AFTER_S - 3)
    assert survivor.peer.membership.branch is None
    assert survivor.applied <= before + 1
    await until(lambda: survivor.applied >= before + 5, 30, "its progress alone")
    name, first_round = survivor.peer.membership.branch
    assert len(name) == 8
    assert before < first_round <= before + 2
    assert survivor.members == {survivor.id}
    assert not any(status in ("lost", "failed") for _, _, status in survivor.events), (
        "its open exchange went on"
    )
    herd.check_line(3)


@lines(5)
async def test_the_remaining_peers_start_one_branch_together_and_newcomers_join_it(herd):
    for number in (0, 2, 4):
        herd.kill(number)
    await until(lambda: is_one(herd, 1, 3), AFTER_S + 10, "a branch of two")
    assert len(names_of(herd, 1, 3)) == 1
    moment_s = now()
    for number in (0, 4):
        herd.start(number)
    await until(lambda: is_one(herd, 0, 1, 3, 4), 30, "a view with the newcomers")
    await until(lambda: has_served_since(herd, moment_s, 0, 1, 3, 4), 30, "a round with all")
    herd.check_line(0, 1, 3, 4)


@lines(5)
async def test_a_majority_that_restarts_at_once_comes_back_although_its_old_lives_are_gone(herd):
    """The peers are back, but in other incarnations: none of them may act in the old view."""
    for number in (0, 1, 2):
        herd.kill(number)
    await asyncio.sleep(1)
    for number in (0, 1, 2):
        herd.start(number)
    moment_s = now()
    await until(lambda: is_one(herd, *range(5)), AFTER_S + 40, "a view of all")
    await until(lambda: has_served_since(herd, moment_s, *range(5)), 30, "a round with all")
    herd.check_line(*range(5))


@lines(4)
async def test_two_halves_of_which_one_is_a_quorum_become_one_and_the_smaller_branch_gives_up(herd):
    herd.network.partition(ids(herd, 0, 1), ids(herd, 2, 3))
    await until(
        lambda: names_of(herd, 2, 3) != {None},
        AFTER_S + 15,
        "the branch of the half without the senior one",
    )
    await until(lambda: len(herd.nodes[0].members) == 2, 20, "the main line's view")
    start = progress(herd, 2, 3)
    await until(lambda: progress(herd, 2, 3) > start + 3, 20, "the branch's progress")
    assert progress(herd, 0, 1) > progress(herd, 2, 3) + 3
    herd.network.heal()
    moment_s = now()
    await until(lambda: is_one(herd, *range(4)), 60, "one view of all")
    await until(lambda: has_served_since(herd, moment_s, *range(4)), 30, "a round with all")
    assert names_of(herd, *range(4)) == {None}, "the main line stayed"
    for number in (2, 3):
        assert [status for _, _, status in herd.nodes[number].events].count("lost") == 1
        assert any(
            status == "adopted" and at_s > moment_s for at_s, _, status in herd.nodes[number].events
        )
    for number in (0, 1):
        assert not any(status == "lost" for _, _, status in herd.nodes[number].events)
    herd.check_line(*range(4))


@lines(6)
async def test_of_two_branches_that_both_lack_a_majority_one_stays_when_they_meet(herd):
    herd.kill(0)
    herd.network.partition(ids(herd, 1, 2), ids(herd, 3, 4, 5))
    await until(lambda: None not in names_of(herd, *range(1, 6)), AFTER_S + 30, "two branches")
    assert len(names_of(herd, *range(1, 6))) == 2
    start = progress(herd, *range(1, 6))
    await until(lambda: progress(herd, *range(1, 6)) > start + 4, 30, "progress of both")
    larger = names_of(herd, 3, 4, 5)
    herd.network.heal()
    moment_s = now()
    await until(lambda: is_one(herd, *range(1, 6)), 60, "one view of all")
    await until(lambda: has_served_since(herd, moment_s, *range(1, 6)), 30, "a round with all")
    assert names_of(herd, *range(1, 6)) == larger, "three train more tokens than two"
    herd.check_line(*range(1, 6))


@pytest.mark.parametrize(("seed", "loss"), [(0, 0.0), (1, 0.05)])
def test_equal_branches_of_equal_speed_become_one(seed, loss):
    @lines(5, seed=seed)
    async def main(herd):
        from farflock.swarm.sim.network import Faults

        herd.kill(0)
        herd.network.partition(ids(herd, 1, 2), ids(herd, 3, 4))
        await asyncio.sleep(AFTER_S + 15 + seed)
        assert len(names_of(herd, 1, 2, 3, 4) - {None}) == 2
        herd.network.heal()
        herd.network.faults = Faults(loss=loss)
        moment_s = now()
        await until(lambda: is_one(herd, 1, 2, 3, 4), 150, "one view of all")
        await until(lambda: has_served_since(herd, moment_s, 1, 2, 3, 4), 60, "a round with all")
        herd.check_line(1, 2, 3, 4)

    main()


@lines(5)
async def test_a_peer_cut_off_for_less_than_the_time_set_starts_no_branch(
    herd,
):
    herd.network.partition(ids(herd, 0, 1, 2), ids(herd, 3, 4))
    await asyncio.sleep(AFTER_S - 5)
    herd.network.heal()
    await until(lambda: is_one(herd, *range(5)), 20, "one run again")
    await asyncio.sleep(AFTER_S)
    assert names_of(herd, *range(5)) == {None}
    herd.check_line(*range(5))


@lines(5)
async def test_rounds_of_an_old_view_whose_members_were_all_replaced_since_are_taken_over(herd):
    """No majority is missing now, but the rounds until the newest view begins belong to lives that
    have ended."""
    for node in herd.nodes.values():
        node.quiet = True
    await asyncio.sleep(4)
    for number in (2, 3, 4):
        herd.kill(number)
        await asyncio.sleep(9)
        herd.start(number)
        herd.nodes[number].quiet = True
        await until(
            lambda: all(
                len(node.members) == 5 for node in herd.nodes.values() if node.peer.context.chain
            ),
            30,
        )
        await asyncio.sleep(4)
    moment_s = now()
    for node in herd.nodes.values():
        node.quiet = False
    await until(
        lambda: has_served_since(herd, moment_s, *range(5)), AFTER_S + 60, "a round with all"
    )
    await until(lambda: is_one(herd, *range(5)), 20, "a view of all")
    assert None not in names_of(herd, *range(5))
    herd.check_line(*range(5))


@lines(5)
async def test_a_round_that_was_decided_but_whose_content_died_with_the_others_is_decided_anew(
    herd,
):
    survivor = herd.nodes[3]
    herd.network.tap = lambda when_s, sender, to, packed: (
        None if to == survivor.id and b"piece" in packed else packed
    )
    state = survivor.peer.rounds.streams[STREAM]
    await until(
        lambda: any(not entry.complete for entry in state.log.values()),
        20,
        "a decision without content",
    )
    number = state.newest
    for other in (0, 1, 2, 4):
        herd.kill(other)
    herd.network.tap = None
    assert survivor.peer.rounds.floor() <= number
    await until(lambda: survivor.applied > number + 2, AFTER_S + 20, "its progress alone")
    assert survivor.peer.membership.branch[1] <= number
    herd.check_line(3)


@lines(4)
async def test_a_founder_that_starts_the_run_again_while_it_sees_no_peer_finds_back_to_the_others(
    herd,
):
    await until(
        lambda: progress(herd, 0) > herd.nodes[0].view.first_round, 20, "a round of the view of all"
    )
    herd.network.partition(ids(herd, 0), ids(herd, 1, 2, 3))
    herd.kill(0)
    await asyncio.sleep(1)
    herd.incarnation += 1
    herd.nodes[0] = Node(herd, 0, herd.incarnation, founds=True)
    for number in (1, 2, 3):
        herd.nodes[0].peer.membership.book.learn(herd.nodes[number].record)
    await until(
        lambda: herd.nodes[0].applied > 3 and len(herd.nodes[1].members) == 3,
        30,
        "progress of both",
    )
    herd.network.heal()
    await until(lambda: is_one(herd, *range(4)), 60, "one view of all")
    assert [status for _, _, status in herd.nodes[0].events].count("lost") == 1
    assert not any(status == "lost" for n in (1, 2, 3) for _, _, status in herd.nodes[n].events)
    herd.check_line(*range(4))


@lines(5, group=2)
async def test_pairs_branch_and_meet_too(herd):
    for node in herd.nodes.values():
        node.peer.context.own.tokens = lambda node=node: node.serial * TOKENS
    herd.kill(0)
    herd.network.partition(ids(herd, 1, 2), ids(herd, 3, 4))
    await asyncio.sleep(AFTER_S + 15)
    assert len(names_of(herd, 1, 2, 3, 4) - {None}) == 2
    herd.network.heal()
    await until(lambda: is_one(herd, 1, 2, 3, 4), 60, "one view of all")
    losers = [
        n for n in (1, 2, 3, 4) if any(status == "lost" for _, _, status in herd.nodes[n].events)
    ]
    assert losers in ([1, 2], [3, 4])


# Strangers, liars and old lives.


def told(herd, number, sender, message, incarnation=1):
    herd.nodes[number].peer.router.deliver(sender, Frame(incarnation, message))


@lines(3)
async def test_no_member_signs_a_branch_while_a_quorum_is_there(herd):
    node, other = herd.nodes[0], herd.nodes[1]
    sent = []
    node.peer.context.links.send = lambda peer, frame: sent.append(frame) or True
    view = branch_of(node.view, (0,), node.applied + 5)
    index = {node.view.peers.index(other.id)}
    for founders in (index, {1}, {2}):
        view = branch_of(node.view, founders, node.applied + 5)
        told(herd, 0, other.id, BranchAsk(encode(view)), other.incarnation)
    assert not any(b"branch" in frame for frame in sent)
    del node.peer.context.links.send


@lines(3)
async def test_hostile_messages_about_branches_change_nothing_and_are_counted(herd):
    node, member = herd.nodes[0], herd.nodes[1]
    stranger = IDENTITIES[4].peer
    await asyncio.sleep(1)
    chain = node.peer.context.views
    view, me = chain.newest, chain.newest.peers.index(node.id)
    lone = branch_of(view, ({0, 1, 2} - {me, 0}) or {1}, 5)
    lure = trail(Chain("run", [*chain.views[:-1], Certified(lone)]))
    hostile = [
        BranchAsk(b"nonsense"),
        BranchAsk(encode(lone)),
        BranchSign(lone.hash, b"x" * 64, 0),
        Lineage(2**62, view.number, bytes(8 * 512)),
        Lineage(2**62, 2**62, b"short"),
        Lineage(2**62, lone.number, trail(chain) + lone.hash[:8], (encode(Certified(lone)),)),
        Lineage(2**62, view.number, lure, (encode(Certified(lone)),)),
        Lineage(2**62, view.number, lure, (b"x",) * 100),
        Views((encode(Certified(lone)),)),
    ]
    for sender, incarnation in ((stranger, 1), (member.id, 1), (member.id, member.incarnation)):
        for message in hostile:
            told(herd, 0, sender, message, incarnation)
        await asyncio.sleep(1.5)
    assert node.view.hash == view.hash
    assert not node.peer.branching.adrift
    assert (
        sum(
            count
            for reason, count in node.peer.context.counters.items()
            if reason.startswith("dropped")
        )
        >= 12
    )
    assert not any(status == "lost" for _, _, status in node.events)


@lines(5)
async def test_a_stranger_cannot_lend_tokens_to_a_line_that_it_is_not_in(herd):
    herd.network.partition(ids(herd, 0, 1, 2), ids(herd, 3, 4))
    await until(lambda: None not in names_of(herd, 3, 4), AFTER_S + 15, "the branch")
    await until(lambda: len(herd.nodes[0].members) == 3, 20, "the main line's view")
    node, stranger = herd.nodes[0], IDENTITIES[4].peer
    chain = herd.nodes[3].peer.context.views
    views_there = branches.missing_views(
        chain, fork_of(chain, node.view.number, trail(node.peer.context.views))
    )
    message = Lineage(2**62, chain.newest.number, trail(chain), views_there)
    for _ in range(20):
        told(herd, 0, stranger, msgspec.structs.replace(message, views=()))
        told(herd, 0, stranger, message)
        await asyncio.sleep(1)
    assert node.peer.membership.branch is None
    assert node.peer.context.counters["dropped: not from a member"] >= 10


@lines(3)
async def test_a_member_that_gave_up_a_view_never_acts_in_it_again(herd):
    node = herd.nodes[2]
    old = node.view
    assert node.peer.context.my_index(old) is not None
    node.peer.context.give_up()
    assert node.peer.context.my_index(old) is None
    assert not node.peer.membership.is_member
    await until(
        lambda: node.view.number >= old.number + 2 and node.peer.membership.is_member,
        30,
        "its return",
    )
    assert node.peer.context.my_index(old) is None


# Seeded disasters.


async def misfortune(herd, draw):
    """Split the network, and kill and restart peers, at any moment of the others' reaction to
    it."""
    count = len(herd.nodes)
    for _ in range(draw.randint(2, 5)):
        fate = draw.choice(["split", "split", "kill", "restart", "heal"])
        alive = [number for number, node in herd.nodes.items() if not node.task.cancelled()]
        if fate == "split":
            sides = [set(), set(), set()]
            for node in herd.nodes.values():
                draw.choice(sides[: draw.choice([2, 2, 3])]).add(node.id)
            herd.network.partition(*sides)
        elif fate == "heal":
            herd.network.heal()
        elif len(alive) > 2:
            victim = draw.choice(alive)
            herd.kill(victim)
            if fate == "restart":
                await asyncio.sleep(draw.uniform(0.1, 8))
                herd.start(victim)
        await asyncio.sleep(draw.choice([1, 5, AFTER_S, 2 * AFTER_S]) * draw.uniform(0.5, 1.5))
    assert count == len(herd.nodes)


def revived(herd):
    """Restart every node that was killed or found no peer to adopt from in time; return True if
    there was none."""
    ended = [number for number, node in herd.nodes.items() if node.task.done()]
    for number in ended:
        with contextlib.suppress(asyncio.CancelledError, TimeoutError, SnapshotUnavailable):
            herd.nodes[number].task.result()
        herd.start(number)
    return not ended


def ends_on_one_line(seed):
    draw = random.Random(f"branches/{seed}")

    @lines(draw.randint(3, 7), seed=seed, kind=draw.choice(["mean", "gather"]))
    async def main(herd):
        await misfortune(herd, draw)
        herd.network.heal()
        await asyncio.sleep(0.1)
        moment_s, everybody = now(), range(len(herd.nodes))
        await until(
            lambda: revived(herd) and is_one(herd, *everybody), 8 * AFTER_S, "one view of all"
        )
        await until(lambda: has_served_since(herd, moment_s, *everybody), 60, "a round with all")
        await until(lambda: is_one(herd, *everybody), 30, "one view of all")
        herd.check_line(*everybody)

    main()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_all_end_on_one_line_and_nothing_counts_twice_in_it(seed):
    ends_on_one_line(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", [3, 4, *range(100, 250)])
def test_the_same_for_many_more_seeds(seed):
    ends_on_one_line(seed)
