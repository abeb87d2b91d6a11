"""The in-memory directory misbehaves like the real one on request, and peers find each other all
the same."""

import asyncio
import contextlib

import pytest
from worlds.peers import identity, peer_in

from farflock.swarm.peer.peer import ANNOUNCE_EVERY_S, RunTerms
from farflock.swarm.record import BadRecord, Record, seal, unseal
from farflock.swarm.sim.directory import HEAD_LIFETIME_S, DirectoryFaults, MemoryTable
from farflock.swarm.sim.network import SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

RUN = "run"


def record(number, sequence=1, **fields):
    owner = identity(number)
    return seal(
        owner, Record(fields.pop("run", RUN), owner.peer, number, sequence, bytes(32), **fields)
    )


class TableWorld:
    """A table with a clock that tests move by hand, and `count` directories on it."""

    def __init__(self, count, seed=1, **faults):
        self.now_s = 0.0
        self.table = MemoryTable(RUN, seed, lambda: self.now_s, DirectoryFaults(**faults))
        self.directories = [self.table.directory(identity(number).peer) for number in range(count)]

    def announce(self, number, sequence=1, **fields):
        return at_once(self.directories[number].announce(RUN, record(number, sequence, **fields)))

    def seen(self, number):
        """The (peer, sequence) pairs that one directory shows."""
        entries = [unseal(blob, RUN) for blob in at_once(self.directories[number].peers(RUN))]
        numbers = {identity(number).peer: number for number in range(len(self.directories))}
        return sorted((numbers[entry.peer], entry.sequence) for entry in entries)


def at_once(coroutine):
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waited")


def test_without_faults_everybody_sees_at_once_what_was_announced():
    world = TableWorld(3)
    assert world.announce(0)
    assert world.announce(1, sequence=5)
    assert world.seen(0) == world.seen(1) == world.seen(2) == [(0, 1), (1, 5)]
    assert not world.table.fired


def test_a_record_lives_as_long_as_it_says_and_announcing_it_again_gives_it_another_life():
    world = TableWorld(2)
    world.announce(0, lifetime_s=60.0)
    world.now_s = 50.0
    world.announce(0, lifetime_s=60.0)
    world.now_s = 109.9
    assert world.seen(1) == [(0, 1)]
    world.now_s = 110.0
    assert world.seen(1) == []


def test_heads_are_published_by_anybody_shown_once_each_and_expire():
    world = TableWorld(3)
    one, two, three = world.directories
    assert at_once(one.publish_head(RUN, b"head 2"))
    assert at_once(two.publish_head(RUN, b"head 1"))
    assert at_once(three.publish_head(RUN, b"head 2"))
    assert at_once(one.heads(RUN)) == [b"head 1", b"head 2"]
    world.now_s = HEAD_LIFETIME_S
    assert at_once(one.heads(RUN)) == []
    with pytest.raises(ValueError, match="1 to 2048 bytes, got 2049"):
        at_once(one.publish_head(RUN, bytes(2049)))


def test_only_records_of_this_run_and_of_its_own_are_announced():
    world = TableWorld(2)
    for blob in (record(1), record(0, run="other"), b"no record", record(0)[:-1]):
        with pytest.raises(BadRecord):
            at_once(world.directories[0].announce(RUN, blob))
    with pytest.raises(ValueError, match="opened for run run; open another one for run other"):
        at_once(world.directories[0].peers("other"))
    assert world.seen(1) == []


# Stale reads.


def test_a_stale_read_shows_a_version_that_was_the_newest_no_longer_than_stale_s_ago():
    world = TableWorld(2, stale_s=10.0)
    shown = set()
    for second in range(200):
        world.now_s = float(second)
        world.announce(0, sequence=second)
        world.now_s += 0.5
        for _ in range(5):
            for _, sequence in world.seen(1):
                shown.add(second - sequence)
    assert shown == set(range(11)), "reads of every age come, and of no other"
    assert world.table.fired["stale"] > 100


def test_a_new_record_is_seen_late_but_not_later_than_stale_s_and_never_after_its_end():
    world = TableWorld(2, stale_s=10.0)
    world.announce(0, lifetime_s=30.0)
    assert world.seen(1) == [], "just stored: only a read of no age at all shows it"
    world.now_s = 10.0
    assert all(world.seen(1) == [(0, 1)] for _ in range(50))
    world.now_s = 30.0
    assert not any(world.seen(1) for _ in range(50)), "a stale read does not bring the expired back"


def test_versions_that_no_read_can_show_are_dropped():
    world = TableWorld(2, stale_s=10.0)
    for second in range(1000):
        world.now_s = float(second)
        world.announce(0, sequence=second)
    (versions,) = world.table._versions.values()
    assert len(versions) <= 13


# Lost stores.


def test_lost_stores_say_yes_and_the_last_one_that_was_kept_is_seen():
    world = TableWorld(2, lost=0.5)
    kept = 0
    for sequence in range(1, 400):
        before = world.table.fired["lost"]
        assert world.announce(0, sequence)
        kept = kept if world.table.fired["lost"] > before else sequence
        assert world.seen(1) == ([(0, kept)] if kept else [])
    assert 150 < world.table.fired["lost"] < 250


def test_losses_follow_from_the_seed_and_not_from_what_others_do():
    def kept(seed, busy):
        world, history = TableWorld(3, seed=seed, lost=0.5, stale_s=2.0), []
        for second in range(60):
            world.now_s = float(second)
            world.announce(0, second)
            if busy:
                world.announce(1, second)
                world.seen(1)
            history.append([entry for entry in world.seen(2) if entry[0] == 0])
        return history

    assert kept(1, busy=False) == kept(1, busy=True)
    assert kept(1, busy=False) != kept(2, busy=False)


# Split views, ends and beginnings.


def test_in_a_split_everybody_sees_its_own_part_until_it_is_healed():
    world = TableWorld(5)
    peers = [directory.me for directory in world.directories]
    for number in range(5):
        world.announce(number)
    world.table.split(peers[:2], peers[2:4])
    assert world.announce(0, sequence=2)
    assert not world.announce(4, sequence=2), "in no part, so alone"
    assert world.seen(0) == world.seen(1) == [(0, 2), (1, 1)]
    assert world.seen(2) == world.seen(3) == [(2, 1), (3, 1)]
    assert world.seen(4) == [(4, 2)]
    world.table.heal()
    assert world.seen(3) == [(0, 2), (1, 1), (2, 1), (3, 1), (4, 2)]


def test_a_lone_founder_is_told_so_and_found_by_later_peers():
    world = TableWorld(1)
    assert not world.announce(0)
    world.directories.append(world.table.directory(identity(1).peer))
    assert world.seen(1) == [(0, 1)]
    assert world.announce(0)


def test_a_closed_directory_neither_stores_nor_shows_but_its_records_stay_until_they_expire():
    world = TableWorld(2)
    world.announce(0)
    at_once(world.directories[0].close())
    at_once(world.directories[0].close())
    assert not world.announce(0, sequence=2)
    assert world.seen(0) == []
    assert world.seen(1) == [(0, 1)]
    assert not world.announce(1), "no other directory is open"


def test_the_end_of_an_earlier_life_does_not_close_the_next_one():
    world = TableWorld(2)
    earlier, world.directories[0] = world.directories[0], world.table.directory(identity(0).peer)
    at_once(earlier.close())
    assert at_once(earlier.peers(RUN)) == []
    assert world.announce(0)
    assert world.seen(0) == [(0, 1)]


# With whole peers.


async def member(stack, network, directory, number):
    """A peer that starts the run if its number is 0, and otherwise looks in the directory until it
    shows a peer."""
    peer = peer_in(network, identity(number), RunTerms(RUN, 1, 2.0), number, directory=directory)
    await stack.enter_async_context(peer.running())
    if number == 0:
        peer.found()
        return peer
    others = []
    while not others:
        await asyncio.sleep(1.0)
        others = [blob for blob in await directory.peers(RUN) if unseal(blob, RUN).peer != peer.me]
    await peer.join(others, 30.0)
    return peer


@pytest.mark.parametrize("seed", range(3))
def test_peers_that_know_no_other_form_one_run_through_a_bad_directory(seed):
    async def main():
        loop = asyncio.get_running_loop()
        table = MemoryTable(RUN, seed, loop.time, DirectoryFaults(stale_s=20.0, lost=0.3))
        network = SimNetwork(seed)
        async with contextlib.AsyncExitStack() as stack:
            directories = [table.directory(identity(number).peer) for number in range(5)]
            peers = [
                await member(stack, network, directory, number)
                for number, directory in enumerate(directories)
            ]
            await asyncio.sleep(6 * ANNOUNCE_EVERY_S)
            assert {peer.context.views.newest.peers for peer in peers} == {
                peers[0].context.views.newest.peers
            }
            assert len(peers[0].context.views.newest.members) == 5
            everybody = {peer.me for peer in peers}
            assert all(set(peer.membership.records) | {peer.me} == everybody for peer in peers)
            assert table.fired["lost"]
            assert table.fired["stale"]

    run_virtual(main())
