"""The promises of all links: the simulator's in virtual time, and real ones over loopback."""

import asyncio
import collections
import functools

import pytest
from worlds.fleet import FRAME, Fleet, identity
from worlds.waiting import LIMIT_S, in_time, until

from farflock.swarm.links import MAX_FRAME_BYTES
from farflock.swarm.record import Record, seal
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

STRANGER = identity(9).peer


class Simulated:
    """Links on a simulated network, in virtual time."""

    def __init__(self):
        self.network = SimNetwork(1)

    async def open(self, number):
        links = self.network.links(identity(number).peer)
        return links, seal(identity(number), Record("run", links.me, number, 1, bytes(32)))

    async def end(self, links):
        """The peer's process ends."""
        self.network.kill(links.me)

    async def again(self, number, others):
        links, _ = await self.open(number)
        return links


class Real:
    """Links over ZMQ on loopback."""

    def __init__(self, fleet):
        self._fleet = fleet
        self._opened = 0

    async def open(self, number):
        self._opened += 1
        links = await self._fleet.peer(number, sequence=100 * self._opened)
        return links, links.record()

    async def end(self, links):
        await links.close()

    async def again(self, number, others):
        links, record = await self.open(number)
        for other in others:
            assert other.learn(record)
        return links


async def _really(law):
    async with Fleet() as fleet:
        await in_time(law(Real(fleet)), "the end of the test", limit_s=2 * LIMIT_S)


async def _simulated(law):
    await law(Simulated())


def on_all_links(law):
    """Run a law, a coroutine over a way to open links, on each kind of them."""

    @pytest.mark.parametrize("kind", ["simulated", pytest.param("real", marks=pytest.mark.net)])
    def test(kind):
        if kind == "real":
            asyncio.run(_really(law))
        else:
            run_virtual(_simulated(law))

    test.__name__, test.__doc__ = law.__name__, law.__doc__
    return test


async def acquainted(world, *numbers):
    """Links that know each other and have heard each other."""
    opened = [await world.open(number) for number in numbers]
    for links, _ in opened:
        for other, record in opened:
            if other is not links:
                links.learn(record)
    everybody = [links for links, _ in opened]
    for links in everybody:
        for other in everybody:
            if other is not links:
                assert links.send(other.me, b"hello")
    for links in everybody:
        assert {(await got(links))[0] for _ in everybody[1:]} == {
            other.me for other in everybody if other is not links
        }
    return everybody


async def got(links):
    return await in_time(links.receive(), "a frame")


@on_all_links
async def test_frames_of_every_size_arrive_whole_with_their_senders_name(world):
    a, b = await acquainted(world, 1, 2)
    for size in (0, 1, 255, 65_536, MAX_FRAME_BYTES):
        frame = (FRAME + FRAME)[:size]
        assert a.send(b.me, frame)
        assert await got(b) == (a.me, frame)
        assert await b.send_bulk(a.me, frame, LIMIT_S)
        assert await got(a) == (b.me, frame)


@on_all_links
async def test_all_bytes_are_counted_on_both_ends(world):
    a, b = await acquainted(world, 1, 2)
    (sent, _), (_, received) = a.total_bytes(), b.total_bytes()
    assert a.send(b.me, FRAME)
    assert await got(b) == (a.me, FRAME)
    assert a.total_bytes()[0] >= sent + len(FRAME)
    assert b.total_bytes()[1] >= received + len(FRAME)


@on_all_links
async def test_a_frame_is_as_it_was_when_it_was_sent(world):
    a, b = await acquainted(world, 1, 2)
    frame = bytearray(b"as sent")
    assert a.send(b.me, bytes(frame))
    frame[:] = b"altered"
    assert await got(b) == (a.me, b"as sent")


@on_all_links
async def test_frames_of_many_senders_come_to_one_reader_each_under_its_own_name(world):
    everybody = await acquainted(world, 1, 2, 3, 4)
    reader, senders = everybody[0], everybody[1:]
    for number in range(50):
        for sender in senders:
            assert sender.send(reader.me, f"{sender.me} {number}".encode())
    counts = collections.Counter()
    for _ in range(50 * len(senders)):
        peer, frame = await got(reader)
        assert frame.decode().split()[0] == peer
        counts[peer] += 1
    assert counts == {sender.me: 50 for sender in senders}


@on_all_links
async def test_no_unknown_peer_is_reached(world):
    (links, _) = await world.open(1)
    assert not links.send(STRANGER, b"x")
    assert not await links.send_bulk(STRANGER, b"x", 0.1)
    assert links.life(STRANGER) == "unknown"
    assert links.road(STRANGER) == "none"


@on_all_links
async def test_a_frame_over_the_limit_is_our_own_fault_and_raises(world):
    a, b = await acquainted(world, 1, 2)
    with pytest.raises(ValueError, match=str(MAX_FRAME_BYTES + 1)):
        a.send(b.me, bytes(MAX_FRAME_BYTES + 1))
    with pytest.raises(ValueError, match=str(MAX_FRAME_BYTES + 1)):
        await a.send_bulk(b.me, bytes(MAX_FRAME_BYTES + 1), 1.0)
    assert a.send(b.me, b"still here")
    assert await got(b) == (a.me, b"still here")


@on_all_links
async def test_send_does_not_wait_even_for_a_peer_that_does_not_read(world):
    a, b = await acquainted(world, 1, 2)
    for _ in range(5000):
        a.send(b.me, bytes(1000))


@on_all_links
async def test_bulk_for_a_peer_that_does_not_read_ends_at_its_timeout_and_control_still_passes(
    world,
):
    a, b = await acquainted(world, 1, 2)
    loop, queued = asyncio.get_running_loop(), 0
    if isinstance(world, Simulated):
        # as slow as a reader that does not read
        world.network.set_link(a.me, LinkModel(up_bytes_per_s=1000))
    while True:
        begun_s = loop.time()
        if not await a.send_bulk(b.me, FRAME, 0.3):
            break
        queued += len(FRAME)
        assert queued < 256 * 2**20, "the queue is not bounded"
    assert loop.time() - begun_s >= (0.3 if isinstance(world, Real) else 0.0)
    assert queued > 2**20, "room for some chunks is there"
    assert b.send(a.me, b"control")
    assert await got(a) == (b.me, b"control")


@on_all_links
async def test_the_living_are_alive_with_a_road_and_a_round_trip(world):
    a, b = await acquainted(world, 1, 2)
    for links, other in ((a, b), (b, a)):
        assert (links.life(other.me), links.road(other.me)) == ("alive", "direct")
        await until(functools.partial(measured, links, other), every_s=0.01)
        assert links.rtt_s(other.me) > 0


def measured(links, other):
    return links.rtt_s(other.me) is not None


@on_all_links
async def test_a_peer_that_ended_is_suspect_in_a_second_dead_in_five_and_its_next_life_alive(
    world,
):
    a, b = await acquainted(world, 1, 2)
    await world.end(b)
    lives = [a.life(b.me)]

    def is_now(*expected):
        if a.life(b.me) != lives[-1]:
            lives.append(a.life(b.me))
        return lives[-1] in expected

    suspect_s = await until(lambda: is_now("suspect", "dead"), every_s=0.01)
    dead_s = suspect_s + await until(lambda: is_now("dead"), every_s=0.01)
    if isinstance(world, Simulated):
        assert suspect_s < 1.0
        assert 4.0 < dead_s < 6.5
        assert lives == ["alive", "suspect", "dead"]
    assert not a.send(b.me, b"x")
    assert not await a.send_bulk(b.me, b"x", 0.1)
    again = await world.again(2, [a])
    if isinstance(world, Real):
        a.send(again.me, b"hello")  # the first frame builds the route
    await until(lambda: is_now("alive"), every_s=0.01)
    assert a.send(again.me, b"welcome back")
    while (await got(again))[1] != b"welcome back":
        pass


@on_all_links
async def test_nonsense_instead_of_a_record_does_no_harm(world):
    a, b = await acquainted(world, 1, 2)
    _, record = await world.open(3)
    for blob in (b"", b"x", bytes(5000), record[:-1], bytes([record[0] ^ 1]) + record[1:]):
        a.learn(blob)
    assert a.send(b.me, b"x")
    assert await got(b) == (a.me, b"x")


@on_all_links
async def test_a_cancelled_reader_takes_no_frame_with_it(world):
    a, b = await acquainted(world, 1, 2)
    for number in range(20):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(b.receive(), 0.01)
        assert a.send(b.me, b"%d" % number)
        assert await got(b) == (a.me, b"%d" % number)
