"""A newcomer gets its first chunk from any peer that has it, whole or not at all, and leaves
nothing running."""

import asyncio

import pytest
from worlds.waiting import now

from farflock.swarm.chunk_server import PIECE_BYTES
from farflock.swarm.chunk_store import TERMS, Store, digest_of
from farflock.swarm.context import PeerContext
from farflock.swarm.frame import Frame, pack, unpack
from farflock.swarm.links import MAX_FRAME_BYTES
from farflock.swarm.messages import MAX_CHUNK_BYTES, Miss, Piece, Ping, Want
from farflock.swarm.peer.bootstrap import fetch_chunk
from farflock.swarm.sim.network import Faults, LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

MANIFEST = b"the run's manifest " * 10_000  # three pieces
DIGEST, SIZE = digest_of(MANIFEST), len(MANIFEST)


class BootstrapWorld:
    """A newcomer's links and some holders of chunks."""

    def __init__(self, link=None):
        self.network = SimNetwork(1, link or LinkModel())
        self.newcomer = self.network.links("newcomer")
        self.tasks = set()

    def spawn(self, work):
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def holder(self, name, *chunks):
        """A member that serves these chunks."""
        links, store = self.network.links(name), Store(2**30)
        for chunk in chunks:
            store.put(chunk, TERMS)
        port = PeerContext("run", 0, 1, links, store, self.spawn)

        async def serve():
            while True:
                sender, packed = await links.receive()
                frame = unpack(packed)
                port.chunks.receive(sender, frame.message, frame.body)

        self.spawn(serve())

    def hostile(self, name, answer):
        """A peer that answers every `Want` with the frames of `answer(want)`."""
        links = self.network.links(name)

        async def serve():
            while True:
                sender, packed = await links.receive()
                message = unpack(packed).message
                for reply in answer(message) if isinstance(message, Want) else ():
                    links.send(
                        sender, reply if isinstance(reply, bytes) else pack(Frame(1, *reply))
                    )

        self.spawn(serve())

    def fetch(self, *holders, timeout_s=20.0, size=SIZE):
        return fetch_chunk(self.newcomer, "run", DIGEST, size, holders, timeout_s)


def in_a_world(main):
    """Run a test `main(world)`; the newcomer may leave no task behind."""

    def test():
        async def whole():
            world = BootstrapWorld()
            await main(world)
            assert asyncio.all_tasks() - world.tasks == {asyncio.current_task()}

        run_virtual(whole())

    return test


@in_a_world
async def test_the_chunk_comes_from_the_peer_that_has_it(world):
    world.holder("a")
    world.holder("b", MANIFEST)
    assert await world.fetch("a", "b") == MANIFEST
    assert now() < 2.0


@in_a_world
async def test_holders_that_are_gone_or_unknown_cost_little(world):
    world.holder("a", MANIFEST)
    world.holder("b", MANIFEST)
    world.network.kill("a")
    assert await world.fetch("a", "nobody", "b") == MANIFEST
    assert now() < 5.0


@in_a_world
async def test_it_comes_through_loss_doubling_and_reordering(world):
    world.network.faults = Faults(loss=0.2, duplicate=0.2, reorder=0.2)
    world.holder("a", MANIFEST)
    assert await world.fetch("a") == MANIFEST


@in_a_world
async def test_if_no_peer_has_it_in_time_it_is_none(world):
    world.holder("a", b"another chunk")
    assert await world.fetch("a", timeout_s=6.0) is None
    assert abs(now() - 6.0) < 0.1
    assert await world.fetch(timeout_s=2.0) is None


@in_a_world
async def test_false_content_is_not_taken_and_an_honest_holder_is_found(world):
    def forge(want):
        size = min(PIECE_BYTES, SIZE - want.start)
        return [(Piece(want.digest, want.start, SIZE), bytes(size))]

    world.hostile("liar", forge)
    assert await world.fetch("liar", timeout_s=5.0) is None
    world.holder("honest", MANIFEST)
    assert await world.fetch("liar", "honest") == MANIFEST


@in_a_world
async def test_frames_that_are_none_or_mean_something_else_are_passed_over(world):
    world.hostile(
        "noise",
        lambda want: [b"", b"no frame", bytes(MAX_FRAME_BYTES), (Ping(1.0),), (Miss(want.digest),)],
    )
    world.holder("honest", MANIFEST)
    assert await world.fetch("noise", "honest") == MANIFEST


@in_a_world
async def test_a_size_beyond_any_chunk_is_refused_at_once(world):
    world.holder("a", MANIFEST)
    assert await world.fetch("a", size=MAX_CHUNK_BYTES + 1) is None
    assert now() == 0.0


@in_a_world
async def test_a_chunk_of_another_size_than_promised_is_not_taken(world):
    world.holder("a", MANIFEST)
    assert await world.fetch("a", size=SIZE - 1, timeout_s=5.0) is None


@in_a_world
async def test_a_caller_that_gives_up_waiting_leaves_nothing_running(world):
    world.holder("a")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await world.fetch("a")
