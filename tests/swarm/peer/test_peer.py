"""One peer as its node sees it: it starts a run, joins, exchanges and leaves, survives any frame,
and ends with all its tasks."""

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.peers import identity, peer_in, record_of
from worlds.waiting import now, until

from farflock.swarm.frame import Frame, pack
from farflock.swarm.messages import Key, LogQuery, Offer, PairAbort, Ping, StateQuery, Want
from farflock.swarm.peer.peer import ANNOUNCE_EVERY_S, REST_TURNS, TICK_S, RunTerms
from farflock.swarm.protocol.exchange.close_list import RoundTerms
from farflock.swarm.protocol.exchange.streams import Reduction, Stream
from farflock.swarm.sim.directory import MemoryTable
from farflock.swarm.sim.network import SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

RUN, VIEW_S = "run", 2.0
TERMS = RunTerms(RUN, 3, VIEW_S)
MEAN, PAIRS = "weights", "pairs"


def stream(name=MEAN, group=0):
    def reduce(number, shard, inputs):
        return Reduction(b"+".join(sorted(data for _, _, data in inputs)))

    terms = RoundTerms("gather" if group else "mean", 1, deadline_s=6.0, group=group)
    return Stream(name, terms, 1000, reduce, lambda number, shard, data: True)


@pytest.fixture(autouse=True, params=[False, True], ids=["ticks", "rests"])
def rests(request, monkeypatch):
    """Peers that tick all the time, and peers that rest while nothing is under way."""
    monkeypatch.setattr(PeerWorld, "rests", request.param)
    return request.param


class PeerWorld:
    """Peers on one network; they run until the test's end."""

    rests = False

    def __init__(self, stack):
        self.network, self.stack = SimNetwork(1), stack
        self.peers = []

    def record(self, number):
        return record_of(identity(number), RUN, number)

    def make(self, directory=None):
        number = len(self.peers)
        peer = peer_in(self.network, identity(number), TERMS, number, directory=directory)
        peer.ticks.rests = self.rests
        self.peers.append(peer)
        return peer

    async def begin(self, directory=None):
        return await self.stack.enter_async_context(self.make(directory).running())

    async def members(self, count):
        """Return `count` members of one view, with both streams open from its first round on."""
        for number in range(count):
            peer = await self.begin()
            if number == 0:
                peer.found()
            else:
                await peer.join([self.record(0)], 20.0)
        await until(
            lambda: all(len(peer.context.views.newest.members) == count for peer in self.peers),
            60.0,
        )
        for peer in self.peers:
            for opened in (stream(), stream(PAIRS, group=2)):
                peer.open(opened, after_round=peer.context.views.newest.first_round - 1)
        return self.peers


def in_a_world(main):
    """Run a test `main(world)` in virtual time; no task may be left when its peers have ended."""

    def test():
        async def whole():
            async with contextlib.AsyncExitStack() as stack:
                await main(PeerWorld(stack))
            assert asyncio.all_tasks() == {asyncio.current_task()}

        run_virtual(whole())

    test.__doc__ = main.__doc__
    return test


# Ticks.


@in_a_world
async def test_a_peer_that_rests_ticks_less_often_until_something_stirs_it(world):
    peers = await world.members(2)
    await asyncio.sleep(20.0)
    ticks = []
    for peer in peers:
        tick = peer.membership.tick
        peer.membership.tick = lambda tick=tick: (ticks.append(now()), tick())
    await asyncio.sleep(10.0)
    rare = 2 * 10.0 / (REST_TURNS * TICK_S)
    assert abs(len(ticks) - (rare if world.rests else rare * REST_TURNS)) <= 4
    asked_s = now()
    contribution = asyncio.create_task(
        peers[0].exchange(MEAN, peers[0].rounds.newest(MEAN) + 1, [b"x"], weight=1.0)
    )
    await until(lambda: any(moment > asked_s for moment in ticks), 1.0)
    assert now() <= asked_s + TICK_S + 1e-6
    contribution.cancel()


# Joining and leaving.


@in_a_world
async def test_a_founder_is_a_member_at_once_and_its_clock_is_the_runs(world):
    await asyncio.sleep(5)
    founder = await world.begin()
    assert not founder.membership.is_member
    founder.found()
    assert founder.membership.is_member
    assert founder.me == identity(0).peer
    assert founder.run_s() == now()


@in_a_world
async def test_a_peer_that_meets_the_run_knows_the_views_and_is_let_in_only_when_it_asks(world):
    founder, newcomer = await world.begin(), await world.begin()
    founder.found()
    await newcomer.meet([world.record(0)], 10.0)
    await asyncio.sleep(5 * VIEW_S)
    assert (
        newcomer.context.views.newest.peers == founder.context.views.newest.peers == (founder.me,)
    )
    newcomer.ask_in()
    await until(lambda: newcomer.membership.is_member, 60.0)
    assert founder.context.views.newest.peers == (founder.me, newcomer.me)


@in_a_world
async def test_meeting_the_run_times_out_if_no_peer_answers(world):
    newcomer = await world.begin()
    with pytest.raises(TimeoutError):
        await newcomer.meet([world.record(7)], 4.0)
    assert now() == pytest.approx(4.0)


@in_a_world
async def test_a_member_that_leaves_is_out_of_the_next_view(world):
    founder, other = await world.members(2)
    other.leave()
    await until(
        lambda: founder.context.views.newest.peers == (founder.me,), within_s=2 * VIEW_S + 2
    )


@in_a_world
async def test_a_member_knows_that_it_is_alone_soon_after_the_last_other_one_died(world):
    founder = await world.begin()
    founder.found()
    assert founder.alone
    other = await world.begin()
    await other.join([world.record(0)], 20.0)
    await until(lambda: len(founder.context.views.newest.members) == 2, 60.0)
    assert not founder.alone
    world.network.kill(other.me)
    await until(lambda: founder.alone, within_s=2.0)
    assert len(founder.context.views.newest.members) == 2


@in_a_world
async def test_all_agree_on_the_time_of_the_run(world):
    await asyncio.sleep(100)
    peers = await world.members(3)
    await asyncio.sleep(20)
    assert all(abs(peer.run_s() - now()) < 0.05 for peer in peers)


# Exchanges.


@in_a_world
async def test_a_mean_and_a_pair_go_their_own_ways_and_bring_the_same_to_both(world):
    one, two = await world.members(2)
    number = one.context.views.newest.first_round
    results = await asyncio.gather(
        *(
            peer.exchange(name, number, [peer.me[-4:].encode()], tokens=10)
            for peer in (one, two)
            for name in (MEAN, PAIRS)
        )
    )
    means, pairs = results[::2], results[1::2]
    both = sorted([one.me[-4:].encode(), two.me[-4:].encode()])
    for result in means:
        assert (result.status, result.reduced, result.tokens) == ("ok", (b"+".join(both),), 20)
    for result in pairs:
        assert result.status == "ok"
        assert sorted(result.gathered.values()) == [(content,) for content in both]
    for peer in (one, two):
        rounds = peer.rounds
        assert (rounds.tokens(MEAN), rounds.newest(MEAN), rounds.newest(PAIRS)) == (20, 0, -1)
        assert peer.decided(MEAN, number).reduced == (b"+".join(both),)
        assert peer.decided(MEAN, number + 1) is None
        assert peer.decided(PAIRS, number) is None


@in_a_world
async def test_what_is_waited_for_is_told_with_whom_and_for_how_long(world):
    one, two = await world.members(2)
    number = one.context.views.newest.first_round
    tasks = [asyncio.create_task(one.exchange(name, number, [b"x"])) for name in (MEAN, PAIRS)]
    await asyncio.sleep(1.0)
    waits = {wait.what: wait for wait in one.waits()}
    assert set(waits) == {Key(MEAN, number), Key(PAIRS, number)}
    for wait in waits.values():
        assert wait.whom == (two.me,)
        assert 0 < wait.left_s <= 5.1
    await asyncio.gather(*tasks, *(two.exchange(name, number, [b"y"]) for name in (MEAN, PAIRS)))
    assert one.waits() == []


async def back_in_another_life(world, number):
    """Kill a member and begin its next life at once, in which it is known and alive, but not yet a
    member."""
    world.network.kill(identity(number).peer)
    born = peer_in(world.network, identity(number), TERMS, 77)
    await world.stack.enter_async_context(born.running())
    await born.meet([world.record(0)], 10.0)
    others = [peer for peer in world.peers if peer.me != born.me]
    await until(
        lambda: all(peer.context.gone(peer.context.views.newest, born.me) for peer in others),
        within_s=3.0,
    )
    assert {peer.context.life(born.me) for peer in others} == {"alive"}
    return born, others


@in_a_world
async def test_no_peer_waits_for_what_a_member_began_in_its_previous_life(world):
    """Neither a group nor a pair waits, although the member is alive again: otherwise each round
    until the next view would last until its deadline."""
    members = await world.members(3)
    number, began_s = members[0].context.views.newest.first_round, now()
    _, others = await back_in_another_life(world, 2)
    back_s = now() - began_s
    results = await asyncio.gather(
        *(
            peer.exchange(name, number, [peer.me.encode()])
            for peer in others
            for name in (MEAN, PAIRS)
        )
    )
    assert now() - began_s < back_s + 2.0
    assert [result.status for result in results[::2]] == ["partial", "partial"]
    assert {result.status for result in results[1::2]} in ({"ok"}, {"alone"})


@in_a_world
async def test_a_peer_not_yet_in_a_rounds_view_names_the_members_that_decide_it(world):
    members = await world.members(3)
    number = members[0].context.views.newest.first_round
    born, others = await back_in_another_life(world, 2)
    born.open(stream(), after_round=number - 1)
    waiting = asyncio.create_task(born.exchange(MEAN, number, [b"z"]))
    await asyncio.sleep(0.5)
    (wait,) = born.waits()
    assert wait.what == Key(MEAN, number)
    assert set(wait.whom) == {peer.me for peer in others}
    assert 0 < wait.left_s <= 6.0
    results = await asyncio.gather(*(peer.exchange(MEAN, number, [b"x"]) for peer in others))
    result = await waiting
    assert (
        result.participants == results[0].participants == tuple(sorted(peer.me for peer in others))
    )
    assert born.waits() == []


@in_a_world
async def test_a_view_that_names_another_life_is_believed_before_it_is_heard(world):
    await world.members(3)
    born, others = await back_in_another_life(world, 2)
    born.ask_in()
    while others[1].context.views.newest.index(born.me, 77) is None and now() < 60.0:
        others[1].context.lives[born.me] = 2  # the last that it heard was of the previous life
        await asyncio.sleep(0.01)
    assert not others[1].context.gone(others[1].context.views.newest, born.me)


@in_a_world
async def test_a_cancelled_exchange_does_not_end_the_peer(world):
    one, _ = await world.members(2)
    number = one.context.views.newest.first_round
    for name in (MEAN, PAIRS):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await one.exchange(name, number, [b"x"])
    await asyncio.sleep(1.0)
    assert one.membership.is_member
    assert one.failure is None


# The directory.


@in_a_world
async def test_a_peer_keeps_its_record_in_the_directory_and_learns_those_of_others_from_it(world):
    table = MemoryTable(RUN, 1, asyncio.get_running_loop().time)
    one, two = [await world.begin(table.directory(identity(number).peer)) for number in range(2)]
    reader = table.directory("reader")
    await asyncio.sleep(ANNOUNCE_EVERY_S + 1)
    assert set(one.membership.records) - {one.me} == {two.me}
    assert set(two.membership.records) - {two.me} == {one.me}
    await asyncio.sleep(600)
    assert set(await reader.peers(RUN)) == {world.record(0), world.record(1)}, (
        "records live for 60 s: they are renewed"
    )


@in_a_world
async def test_records_that_the_directory_should_not_have_shown_are_dropped_and_counted(world):
    class Poisoned:
        async def announce(self, run, record):
            return True

        async def peers(self, run):
            return [b"", b"nonsense" * 100, world.record(5)[:-1], world.record(6)]

    peer = await world.begin(Poisoned())
    await asyncio.sleep(1)
    assert set(peer.membership.records) == {identity(6).peer}
    assert peer.context.counters["dropped: bad record"] == 3


# Hostile frames.


def about(key):
    yield LogQuery(key)
    yield PairAbort(key)
    yield Offer(key, bytes(32), (bytes(32),), (10,), 1.0, 5)


@in_a_world
async def test_frames_that_come_before_the_views_are_known_are_ignored(world):
    peer = await world.begin()
    peer.open(stream())
    stranger = world.network.links("stranger")
    for message in (*about(Key(MEAN, 3)), Ping(1.0), StateQuery("state"), Want(bytes(32), 0, 10)):
        stranger.send(peer.me, pack(Frame(1, message)))
    await asyncio.sleep(2)
    assert peer.failure is None
    assert not peer.membership.is_member


@settings(max_examples=15, deadline=None)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5), st.integers(0, 2**32))
def test_no_bytes_of_a_stranger_end_a_peer(frames, number):
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            world = PeerWorld(stack)
            peer = await world.begin()
            peer.found()
            peer.open(stream())
            peer.open(stream(PAIRS, group=2))
            stranger = world.network.links("stranger")
            messages = [
                message
                for name in (MEAN, PAIRS, "another", "#views")
                for message in about(Key(name, number))
            ]
            for frame in (*frames, *(pack(Frame(1, message)) for message in messages)):
                stranger.send(peer.me, frame)
            await asyncio.sleep(2)
            assert peer.context.counters["dropped: bad frame"] == len(frames)
            assert (await peer.exchange(MEAN, 0, [b"x"])).status == "alone"

    run_virtual(main())


# The end.


@in_a_world
async def test_when_its_block_ends_nothing_of_a_peer_goes_on(world):
    peer = world.make()
    async with peer.running():
        peer.found()
        await asyncio.sleep(1)
        assert len(peer.tasks) == 2, "it receives and ticks"
    assert not peer.tasks
    assert peer.failure is None


@in_a_world
async def test_what_the_block_raises_comes_out_and_its_tasks_end_too(world):
    peer = world.make()
    with pytest.raises(KeyError, match="of the node"):
        async with peer.running():
            raise KeyError("of the node")
    assert not peer.tasks


@in_a_world
async def test_cancelling_the_block_is_no_failure_of_the_peer(world):
    peer = world.make()

    async def life():
        async with peer.running():
            peer.found()
            await asyncio.sleep(1e6)

    task = asyncio.create_task(life())
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert peer.failure is None
    assert not peer.tasks


@in_a_world
async def test_a_bug_in_a_task_of_the_peer_ends_its_block_with_that_very_error(world):
    peer = world.make()

    def bug():
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError, match="ours"):
        async with peer.running():
            peer.found()
            await asyncio.sleep(3)
            peer.membership.tick = bug
            await asyncio.sleep(1e6)
    assert now() < 4.0
    assert isinstance(peer.failure, ZeroDivisionError)
    assert not peer.tasks
    assert not asyncio.current_task().cancelling(), (
        "the owner goes on as if it had never been cancelled"
    )
