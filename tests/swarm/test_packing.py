"""What is packed comes back, and bytes of a stranger take no more memory than they may."""

import random

import pytest
import zstandard
from worlds.chunk_net import in_a_world, snapshot

from farflock.swarm.messages import Piece
from farflock.swarm.packing import packed, unpacked
from farflock.swarm.peer.snapshots import Snapshot
from farflock.swarm.sim.network import LinkModel

SIZE = 64 * 1024
NOISE = random.Random(1).randbytes(SIZE)
RATE = 100_000.0


def test_what_gets_shorter_comes_back_and_noise_is_left_as_it_is():
    body = bytes(SIZE // 2) + NOISE[: SIZE // 2]
    short = packed(memoryview(body))
    assert len(short) < 0.6 * SIZE
    assert unpacked(memoryview(short), SIZE) == body
    assert packed(memoryview(NOISE)) is None


def frame(size, **options):
    return zstandard.ZstdCompressor(level=1, **options).compress(bytes(size))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        NOISE,
        frame(SIZE + 1),
        frame(2**28),
        frame(SIZE)[:-1],
        frame(SIZE) + b"more",
        frame(2**20, write_content_size=False),
    ],
    ids=["empty", "noise", "longer", "huge", "cut", "with more", "of unknown length"],
)
def test_all_else_is_refused(body):
    assert unpacked(body, SIZE) == b""


def zeros(chunks=20):
    return Snapshot(
        7, b"zeros".ljust(32, b"."), 70, tuple(bytes([n]) * SIZE for n in range(chunks))
    )


@in_a_world
async def test_a_state_gets_shorter_on_a_slow_line(world):
    world.network.set_link("joiner", LinkModel(down_bytes_per_s=RATE))
    source = world.peer("a").serve(zeros())
    assert await world.joiner.fetch(None) == zeros()
    assert source.context.chunks.server.sent_bytes < 0.2 * 20 * SIZE


@in_a_world
async def test_a_holder_of_false_packing_is_left_for_another(world):
    for name in "ab":
        world.peer(name).serve(snapshot())
    liar = world.peer("c").serve(snapshot())

    def lie(sender, want):
        piece = Piece(want.digest, want.start, len(snapshot().chunks[0]), packed=True)
        world.spawn(liar.context.send_piece(sender, piece, memoryview(b"false"), 1.0))

    liar.context.chunks.server.receive = lie
    assert await world.joiner.fetch(None) == snapshot()
    assert world.joiner.context.chunks.dropped["piece of the wrong size"]
