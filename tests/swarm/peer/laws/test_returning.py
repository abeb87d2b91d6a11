"""All keys of a view come back in new lives, in any order, and go on as one run in which nothing
counts twice."""

import asyncio
import contextlib
import random

import pytest
from worlds.chains.lines import has_served_since, ids, is_one, lines, names_of
from worlds.chains.returns import Homes
from worlds.waiting import now, until

from farflock.swarm.frame import Frame, unpack
from farflock.swarm.messages import HeldState, ReturnAsk, ReturnSign, Roll, Views
from farflock.swarm.peer.returning import MAX_LEAD
from farflock.swarm.peer.snapshots import SnapshotUnavailable
from farflock.swarm.protocol import axes, views

BACK_S = 60.0


def homes(count, **options):
    return lines(count, Homes, **options)


def kill(herd, *numbers):
    """End nodes at once, as a power cut does."""
    for number in numbers:
        herd.kill(number)


async def are_back(herd, *numbers, within_s=BACK_S):
    """Wait for a round of all after this moment, in one view."""
    moment_s = now()
    await until(lambda: is_one(herd, *numbers), within_s, "one view of all")
    await until(lambda: has_served_since(herd, moment_s, *numbers), within_s, "a round with all")
    for node in herd.nodes.values():
        herd.look(node)
    herd.check_line(*numbers)
    return now() - moment_s


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_run_of_two_goes_on_after_a_power_cut_in_whichever_order_they_come_back(order):
    @homes(2)
    async def main(herd):
        await asyncio.sleep(10)
        applied = min(node.applied for node in herd.nodes.values())
        kill(herd, 0, 1)
        await asyncio.sleep(3)
        for number in order:
            herd.start(number)
            await asyncio.sleep(7)
        await are_back(herd, 0, 1, within_s=20)
        assert len(herd.check_returns()) == 1
        assert min(node.applied for node in herd.nodes.values()) > applied, "it went on from there"

    main()


@homes(2)
async def test_a_founder_that_restarts_beside_one_survivor_is_back_and_the_survivor_loses_nothing(
    herd,
):
    await asyncio.sleep(5)
    survivor = herd.nodes[1]
    herd.kill(0)
    await asyncio.sleep(1)
    herd.start(0)
    await are_back(herd, 0, 1, within_s=30)
    assert survivor is herd.nodes[1]
    assert not any(status in ("lost", "adopted") for _, _, status in survivor.events[1:])


@homes(2)
async def test_a_joiner_that_restarts_is_admitted_by_the_founder_without_a_return(herd):
    herd.kill(1)
    await asyncio.sleep(1)
    herd.start(1)
    await are_back(herd, 0, 1, within_s=30)
    assert names_of(herd, 0, 1) == {None}


@homes(3)
async def test_one_of_three_that_restarts_is_admitted_without_a_return(herd):
    herd.kill(0)
    await asyncio.sleep(8)
    herd.start(0)
    await are_back(herd, 0, 1, 2, within_s=30)
    assert names_of(herd, 0, 1, 2) == {None}


@homes(3, saves=4)
async def test_a_return_begins_with_the_newest_state_that_anyone_holds(herd):
    await until(lambda: herd.nodes[0].applied >= 6, 60)
    kill(herd, 0, 1, 2)
    for disk, rounds in zip(herd.disks.values(), (0, 4, 4), strict=True):
        if rounds == 0:
            disk.saved = ()
    await asyncio.sleep(1)
    for number in (2, 1, 0):
        herd.start(number)
    await are_back(herd, 0, 1, 2)
    (made,) = herd.check_returns()
    assert made.first_round == 5
    assert made.state() == herd.by_view[herd.nodes[1].peer.context.views.at(4).hash, 4][3]


@homes(3)
async def test_a_key_that_said_goodbye_before_the_power_cut_is_not_waited_for(herd):
    herd.nodes[2].peer.leave()
    await asyncio.sleep(0.3)
    kill(herd, 0, 1, 2)
    await asyncio.sleep(1)
    for number in (0, 1):
        herd.start(number)
    await are_back(herd, 0, 1)
    (made,) = herd.check_returns()
    assert set(made.peers) == ids(herd, 0, 1)


@homes(3)
async def test_nobody_signs_before_the_last_key_is_here_and_it_is_named(herd):
    kill(herd, 0, 1, 2)
    await asyncio.sleep(1)
    for number in (0, 1):
        herd.start(number)
    await asyncio.sleep(60)
    for number in (0, 1):
        peer = herd.nodes[number].peer
        assert peer.branching.returning.awaited == (herd.nodes[2].id,)
        assert not peer.membership.is_member
    herd.start(2)
    assert await are_back(herd, 0, 1, 2) < 20


@homes(2)
async def test_a_state_that_nobody_has_is_said_to_be_missing_and_not_while_somebody_is_silent(herd):
    kill(herd, 0, 1)
    for disk in herd.disks.values():
        disk.saved = ()
    await asyncio.sleep(1)
    herd.start(1)
    await asyncio.sleep(20)
    returning = herd.nodes[1].peer.branching.returning
    assert (returning.awaited, returning.lacking) == ((herd.nodes[0].id,), ())
    herd.start(0)
    await asyncio.sleep(20)
    assert (returning.awaited, returning.lacking) == ((), (None,))


def told(herd, listener, sender, message, life=None):
    node, other = herd.nodes[listener], herd.nodes[sender]
    frame = Frame(life or other.peer.context.incarnation, message)
    node.peer.router.deliver(other.id, frame)


@homes(3)
async def test_nobody_signs_while_a_key_answers_in_two_lives(herd):
    kill(herd, 0, 1, 2)
    for number in (0, 1, 2):
        herd.start(number)

    async def copied():
        while True:
            for listener in (1, 2):
                chain = herd.nodes[listener].peer.context.chain
                told(herd, listener, 0, Roll(chain.newest.hash, -1, (HeldState(0),)), life=7)
            await asyncio.sleep(1)

    copy = asyncio.create_task(copied())
    await asyncio.sleep(40)
    assert not any(node.peer.membership.is_member for node in herd.nodes.values())
    assert herd.nodes[1].peer.branching.returning.awaited == (herd.nodes[0].id,)
    copy.cancel()
    await asyncio.wait([copy])
    await are_back(herd, 0, 1, 2)


@homes(4)
async def test_a_later_view_that_only_a_member_outside_knows_is_taken_over_from_it(herd):
    """Three of four lose their last view, in which the fourth was admitted."""
    kill(herd, 0, 1, 2)
    for number in (0, 1, 2):
        herd.forget_view(number)
        herd.start(number)
    await are_back(herd, 0, 1, 2, 3)
    (made,) = herd.check_returns()
    assert len(made.peers) == 4


@homes(3)
async def test_a_return_that_a_key_did_not_hear_of_is_handed_over_to_it(herd):
    kill(herd, 0, 1, 2)
    deaf = ids(herd, 2)
    herd.network.tap = lambda at_s, sender, to, packed: (
        None if to in deaf and b"views" in packed else packed
    )
    for number in (0, 1, 2):
        herd.start(number)
    await until(lambda: herd.nodes[0].peer.membership.branch is not None, BACK_S)
    await asyncio.sleep(3)
    assert herd.nodes[2].peer.membership.branch is None
    herd.network.tap = None
    await are_back(herd, 0, 1, 2)


@homes(2)
async def test_whoever_has_given_up_its_chain_says_nothing_of_the_state_that_it_held_there(herd):
    await asyncio.sleep(10)
    kill(herd, 0)
    survivor, said = herd.nodes[1], []

    def heard(at_s, sender, to, packed):
        message = unpack(packed).message
        if sender == survivor.id and isinstance(message, Roll):
            said.append(message.held)
        return packed

    herd.network.tap = heard
    survivor.peer.branching.adrift = frozenset({"until it has the new chain's"})
    herd.start(0)
    await asyncio.sleep(5)
    assert set(said) == {()}


@homes(2, group=2)
async def test_pairs_come_back_with_a_state_of_their_own_each(herd):
    await asyncio.sleep(10)
    kill(herd, 0, 1)
    await asyncio.sleep(1)
    for number in (1, 0):
        herd.start(number)
    await until(lambda: is_one(herd, 0, 1), BACK_S, "one view")
    moment_s = now()
    await until(lambda: has_served_since(herd, moment_s, 0, 1), BACK_S, "a round")


@homes(3, group=2)
async def test_pairs_whose_rounds_are_short_sign_a_return_that_begins_ahead_of_them(herd):
    """The survivor trains on; between two answers of a key it ends many rounds."""
    herd.pace_s = 0.1
    await asyncio.sleep(10)
    kill(herd, 0, 2)
    await asyncio.sleep(1)
    for number in (0, 2):
        herd.start(number)
    await until(lambda: is_one(herd, 0, 1, 2), BACK_S, "one view")
    moment_s = now()
    await until(lambda: has_served_since(herd, moment_s, 0, 1, 2), BACK_S, "a round")
    assert len(herd.check_returns()) == 1


@homes(2, group=2)
async def test_a_return_of_pairs_is_never_farther_ahead_than_its_limit_whatever_a_liar_says(herd):
    """The other key says each second that it has passed the return that it is asked to sign."""
    asker, ahead, said = herd.nodes[1], [], [1000]

    def lie(at_s, sender, to, packed):
        message = unpack(packed).message
        if isinstance(message, ReturnAsk):
            first = axes.at(views.decode_view(message.view).begins, None)
            ahead.append(first - said[-1])
            said.append(first + 1)
        return packed if sender == asker.id else None  # of itself, the liar says nothing

    herd.network.tap, newest = lie, asker.view.hash
    for _ in range(90):
        told(herd, 1, 0, Roll(newest, -1, (HeldState(said[-1], under=newest),)), life=1000)
        await asyncio.sleep(1)
    assert max(ahead) == MAX_LEAD


@homes(3)
async def test_what_strangers_and_liars_say_of_returns_is_dropped(herd):
    node = herd.nodes[0]
    newest = node.view
    for message in (
        Roll(newest.hash, -1, (HeldState(2**60),)),
        Roll(bytes(32), -1),
        ReturnAsk(b"junk", ()),
        ReturnAsk(views.encode(newest), ()),
        ReturnSign(bytes(32), b"s" * 64),
    ):
        told(herd, 0, 1, message)
        node.peer.router.deliver("stranger", Frame(5, message))
    told(herd, 0, 1, Views((views.encode(views.Certified(newest)),)))
    await asyncio.sleep(3)
    assert names_of(herd, 0, 1, 2) == {None}
    assert node.peer.context.counters["dropped: bad return"] >= 4
    herd.check_line(0, 1, 2)


# Seeded disasters.


async def comings_back(herd, draw):
    """All lives of the newest view end, some of them at first; they come back in any order."""
    numbers, left = list(herd.nodes), False
    await asyncio.sleep(draw.uniform(0, 15))
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.2:
            herd.nodes[draw.choice(numbers)].peer.leave()
            left = True
            await asyncio.sleep(draw.choice([0.1, 0.5, 2]))
        cut = draw.sample(numbers, draw.randint(1, len(numbers)))
        cut = numbers if draw.random() < 0.6 else cut
        kill(herd, *cut)
        await asyncio.sleep(draw.choice([0.5, 3, 12]))
        for number in draw.sample(cut, len(cut)):
            if draw.random() < 0.1 and not herd.forgetful:
                herd.forget_view(number)
            if draw.random() < 0.1 and not left and all(d.saved for d in herd.disks.values()):
                herd.disks[number].saved = ()  # others have one, and can come back with it
            herd.start(number)
            await asyncio.sleep(draw.choice([0, 0, 1, 6]))
        await asyncio.sleep(draw.choice([1, 5, 15, 30]))


def revived(herd):
    """Start every node again that ended because nobody sent it a state; True if there is none."""
    ended = [number for number, node in herd.nodes.items() if node.task.done()]
    for number in ended:
        with contextlib.suppress(asyncio.CancelledError, TimeoutError, SnapshotUnavailable):
            herd.nodes[number].task.result()
        herd.start(number)
    return not ended


def comes_back_as_one(seed, syncs=True):
    draw = random.Random(f"returns/{seed}")

    @homes(draw.randint(2, 5), seed=seed, saves=draw.choice([1, 1, 2, 4]), syncs=syncs)
    async def main(herd):
        await comings_back(herd, draw)
        everybody = range(len(herd.nodes))
        await until(lambda: revived(herd) and is_one(herd, *everybody), 150, "one view of all")
        await are_back(herd, *everybody)
        herd.check_returns()

    main()


@pytest.mark.parametrize("seed", range(4))
def test_whoever_comes_back_in_whichever_order_all_end_on_one_chain(seed):
    comes_back_as_one(seed)


def test_views_that_are_not_on_the_disk_before_their_owner_acts_in_them_are_found_out():
    @homes(3, syncs=False)
    async def main(herd):
        await asyncio.sleep(10)
        kill(herd, 0, 1, 2)
        for number in (0, 1, 2):
            herd.disks[number].saved = (-1, b"", 0, b"")  # newer ones are of a view that is lost
            herd.start(number)
        await until(lambda: is_one(herd, 0, 1, 2), BACK_S, "one view of all")
        for node in herd.nodes.values():
            herd.look(node)
        with pytest.raises(AssertionError, match="and signed a return of that"):
            herd.check_returns()

    main()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 600))
def test_the_same_for_500_seeds(seed):
    comes_back_as_one(seed)
