"""What is being read is kept: a newcomer's download is never started over by another newcomer's."""

import asyncio
import collections

from worlds.chunk_net import NAME, SnapshotPeer, in_a_world, snapshot
from worlds.peers import logged
from worlds.waiting import now

from farflock.swarm.messages import Probe, StateQuery
from farflock.swarm.peer import snapshots
from farflock.swarm.peer.snapshots import KEEP_ROUNDS
from farflock.swarm.protocol.state_readers import MAX_READERS, READS_S
from farflock.swarm.sim.network import LinkModel

RATE = 20_000.0
SIZE = 100_000
CHUNKS = 14  # 70 s of the line, as 86 MB at 10 Mbit/s
BYTES = CHUNKS * SIZE


class Rounds:
    """Rounds that lead on from a state: the log begins with `oldest`, and each has some bytes."""

    names = ("outer",)

    def __init__(self, round_bytes=0):
        self.oldest, self.newest, self.round_bytes = 0, -1, round_bytes

    def lead_on(self, number, firsts):
        return number >= self.oldest - 1

    def size_bytes(self, number):
        return (self.newest - number) * self.round_bytes


class Member:
    """A member whose state changes with each round; `state` makes that after a round."""

    def __init__(self, world, name, rounds=None):
        self.peer, self.rounds, self.number = world.peer(name), rounds, 0

        async def provide():
            self.peer.built += 1
            return self.state()

        self.peer.snapshots.serve(NAME, provide, rounds=rounds)

    def state(self):
        whose = self.peer.name if self.rounds is None else "all"
        return snapshot(self.number, f"{whose}/{self.number}".encode(), CHUNKS, SIZE)

    def go_on(self, rounds=1):
        self.number += rounds
        self.peer.context.floor = (self.number + 1,)
        if self.rounds is not None:
            self.rounds.newest = self.number

    @property
    def versions(self):
        return self.peer.snapshots.versions(NAME)

    @property
    def served_bytes(self):
        return self.peer.context.chunks.server.sent_bytes


async def newcomer(world, number, heard, begins_s=0.0):
    await asyncio.sleep(begins_s)
    joiner = SnapshotPeer(world, f"newcomer {number}")
    world.network.set_link(joiner.name, LinkModel(down_bytes_per_s=RATE))
    state = await joiner.fetch(None, progress=lambda here, total: heard[number].append(here))
    return state, now() - begins_s


def assert_none_was_started_over(heard):
    for said in heard.values():
        assert said == sorted(said), "progress went back"
        assert said[-1] - BYTES < SIZE


@in_a_world
async def test_three_newcomers_one_after_the_other_read_two_states_of_one_member(world):
    world.members = ("a",)
    host, heard = Member(world, "a"), collections.defaultdict(list)

    async def rounds():
        while True:
            await asyncio.sleep(5.0)
            host.go_on()

    world.spawn(rounds())
    found = await asyncio.gather(
        *(newcomer(world, number, heard, 35.0 * number) for number in range(3))
    )
    assert_none_was_started_over(heard)
    assert [state.round for state, _ in found] == [0, 7, 7], "the third got the newer one"
    assert host.peer.built == 2
    assert host.served_bytes < 1.2 * 3 * BYTES
    assert all(took_s < 1.2 * BYTES / RATE + 3.0 for _, took_s in found)


@in_a_world
async def test_where_rounds_lead_on_all_newcomers_read_one_state_from_all_members(world):
    members = [Member(world, name, Rounds()) for name in "abc"]
    heard = collections.defaultdict(list)

    async def rounds():
        while True:
            await asyncio.sleep(5.0)
            for member in members:
                member.go_on()

    world.spawn(rounds())
    found = await asyncio.gather(
        *(newcomer(world, number, heard, 35.0 * number) for number in range(3))
    )
    assert_none_was_started_over(heard)
    assert {state.round for state, _ in found} == {0}
    assert [member.peer.built for member in members] == [1, 1, 1]
    served = [member.served_bytes for member in members]
    assert sum(served) < 1.2 * 3 * BYTES
    assert min(served) > 0.1 * sum(served), "all had a part in it"


@in_a_world
async def test_rounds_that_outgrow_a_state_send_its_reader_to_a_newer_one(world):
    world.members = ("a",)
    rounds, heard = Rounds(BYTES // 10), collections.defaultdict(list)
    host = Member(world, "a", rounds)

    async def outgrow():
        await asyncio.sleep(20.0)
        host.go_on(11)
        rounds.oldest = 2  # as the log lets the first one go
        host.peer.context.readers.outgrown()

    world.spawn(outgrow())
    state, took_s = await newcomer(world, 0, heard)
    assert state.round == 11
    assert host.peer.built == 2
    assert took_s < 50.0 + 1.1 * BYTES / RATE, "half a minute of the line was on its way"


@in_a_world
async def test_a_newcomer_does_not_begin_with_a_state_behind_many_rounds(world):
    """It would have to fetch these, too."""
    rounds, heard = Rounds(BYTES // 20), collections.defaultdict(list)
    world.members = ("a",)
    host = Member(world, "a", rounds)

    async def later(number, begins_s, passed):
        await asyncio.sleep(begins_s)
        host.go_on(passed)
        return await newcomer(world, number, heard)

    coming = [(0, 0.0, 0), (1, 10.0, 2), (2, 20.0, 1), (3, 25.0, 3)]
    found = await asyncio.gather(*(later(*each) for each in coming))
    # after two rounds of a twentieth the first one would do, after three not, and a third version
    # would start somebody over
    assert [state.round for state, _ in found] == [0, 0, 3, 3]
    assert_none_was_started_over(heard)


@in_a_world
async def test_a_reader_that_is_silent_for_half_a_minute_is_forgotten(world):
    host = Member(world, "a", Rounds())
    readers, receive = host.peer.context.readers, host.peer.snapshots.receive
    receive("reader", StateQuery(NAME))
    await asyncio.sleep(1.0)
    assert readers.wanted("outer") == (0, sum(map(len, host.state().chunks)))
    assert readers.wanted("another") is None
    for _ in range(3):
        await asyncio.sleep(0.9 * READS_S)
        host.peer.context.chunks.receive("reader", Probe(0), b"")
    host.go_on(KEEP_ROUNDS + 1)
    receive("reader", StateQuery(NAME))
    await asyncio.sleep(0.9 * READS_S)
    assert readers.wanted("outer") is not None
    await asyncio.sleep(0.1 * READS_S)
    assert readers.wanted("outer") is None, "a question alone shows nobody reading"
    receive("reader", StateQuery(NAME))
    await asyncio.sleep(1.0)
    assert host.peer.built == 2


@in_a_world
async def test_strangers_that_only_ask_are_remembered_up_to_a_bound_and_not_for_long(world):
    host = Member(world, "a", Rounds())
    host.peer.snapshots.receive("first", StateQuery(NAME))
    await asyncio.sleep(1.0)
    for number in range(MAX_READERS + 50):
        host.peer.snapshots.receive(f"stranger {number}", StateQuery(NAME))
    (version,) = host.versions
    assert len(version.readers) == MAX_READERS
    await asyncio.sleep(READS_S)
    assert host.peer.context.readers.wanted("outer") is None
    assert not version.readers


@in_a_world
async def test_a_reader_has_ended_once_it_takes_part_in_rounds(world):
    host = Member(world, "a", Rounds())
    context = host.peer.context
    host.peer.snapshots.receive("reader", StateQuery(NAME))
    await asyncio.sleep(1.0)
    context.note_followed("reader", "outer", 9, current=True)
    assert context.readers.wanted("outer")[0] == 0, (
        "a member that reads a state may follow them, too"
    )
    for _ in range(4):
        await asyncio.sleep(READS_S / 3)
        context.chunks.receive("reader", Probe(0), b"")
    context.note_followed("reader", "another", 9, current=True)
    context.note_followed("reader", "outer", 4, current=False)
    assert context.readers.wanted("outer")[0] == 4
    context.note_followed("reader", "outer", 9, current=True)
    assert context.readers.wanted("outer") is None


@in_a_world
async def test_the_state_of_one_member_that_dies_is_followed_by_that_of_another(world):
    hosts, heard = [Member(world, name) for name in "ab"], collections.defaultdict(list)

    async def death():
        await asyncio.sleep(40.0)
        first = max(hosts, key=lambda host: host.served_bytes)
        world.network.kill(first.peer.name)

    world.spawn(death())
    with logged(snapshots.log) as said:
        state, took_s = await newcomer(world, 0, heard)
    assert state.round == 0
    assert 40.0 + BYTES / RATE < took_s < 40.0 + 1.2 * BYTES / RATE + 25.0
    assert len(said) == 1
    assert "cannot be had any more: its members are gone" in said[0]


@in_a_world
async def test_who_took_over_a_state_stays_its_reader_while_it_replays_rounds(world):
    host = Member(world, "a", Rounds())
    await world.joiner.fetch(None)
    async with world.joiner.snapshots.reading(NAME):
        await asyncio.sleep(4 * READS_S)
        assert host.peer.context.readers.wanted("outer") is not None
    await asyncio.sleep(1.1 * READS_S)
    assert host.peer.context.readers.wanted("outer") is None
