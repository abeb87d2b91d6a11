"""Small chunks come together, in few messages, whatever their holders do, and in bounded memory."""

import asyncio
import collections
import random
import struct

import pytest
from worlds.chunk_net import fetch, in_virtual_time
from worlds.waiting import now

from farflock.swarm.batch import BATCH_BYTES, SMALL_BYTES, Batch, answer, fitting, is_sensible
from farflock.swarm.chunk_server import MAX_BATCHES, MAX_WANTS, PIECE_BYTES
from farflock.swarm.chunk_store import Store, digest_of
from farflock.swarm.chunks import BATCH_TRIES, STALL_S
from farflock.swarm.messages import MAX_BATCH_CHUNKS, Miss, Piece, Want


def small(count, size=40):
    """Different small chunks."""
    return [random.Random(f"{size}/{seed}").randbytes(size) for seed in range(count)]


def entries_of(chunks):
    return [(digest_of(data), len(data)) for data in chunks]


def noting(net):
    """Count the messages of each kind, and their further chunks."""
    seen = collections.Counter()

    def tap(sender, to, message, body):
        seen[type(message)] += 1
        seen["more"] += bool(getattr(message, "more", b""))
        return message, body

    net.tap = tap
    return seen


async def batch_of(reader, chunks, holders, timeout_s=30.0):
    """Fetch chunks together; return those that did not come."""
    left = await reader.fetch_batch(entries_of(chunks), lambda: holders, "pin", timeout_s)
    missing = dict(left)
    for data in chunks:
        held = reader.store.get(digest_of(data))
        assert held == (None if digest_of(data) in missing else data)
        assert (digest_of(data) in reader.store.pinned("pin")) is (held is not None)
    return left


@in_virtual_time
async def test_small_chunks_come_together(net):
    chunks = small(1000)
    net.peer("holder", *chunks)
    reader, seen = net.peer("reader"), noting(net)
    assert not await batch_of(reader, chunks, ["holder"])
    assert seen == {Want: 1, Piece: 1, "more": 2}


@in_virtual_time
async def test_a_batch_is_no_longer_than_a_piece_may_be_on_this_line(net):
    chunks, longest = small(200, 10_000), []
    net.peer("holder", *chunks)
    reader = net.peer("reader")
    net.tap = lambda sender, to, message, body: longest.append(len(body)) or (message, body)
    net.rate = 100_000
    assert not await batch_of(reader, chunks, ["holder"], 60.0)
    assert 30_000 < max(longest) <= PIECE_BYTES
    net.rate, reader = 1e9, net.peer("other")
    longest.clear()
    assert not await batch_of(reader, chunks, ["holder"])
    assert PIECE_BYTES < max(longest) <= BATCH_BYTES


@in_virtual_time
async def test_what_one_holder_lacks_comes_from_another(net):
    chunks = small(100)
    net.peer("first", *chunks[:60])
    net.peer("second", *chunks[40:])
    reader = net.peer("reader")
    assert not await batch_of(reader, chunks, ["first", "second"])
    assert reader.dropped.total() == 0


@in_virtual_time
async def test_what_no_holder_has_is_left(net):
    chunks = small(100)
    net.peer("holder", *chunks[1:50])
    reader = net.peer("reader")
    assert await batch_of(reader, chunks[1:], ["holder"]) == entries_of(chunks[50:])
    # The holder of nothing that the batch is named by says so.
    began_s = now()
    assert len(await batch_of(net.peer("late"), chunks, ["holder"])) == len(chunks)
    assert now() - began_s < STALL_S


@in_virtual_time
async def test_a_false_chunk_is_dropped_and_the_others_of_its_batch_are_kept(net):
    chunks = small(20)
    net.peer("liar", *chunks)
    reader, seen = net.peer("reader"), noting(net)

    def tap(sender, to, message, body):
        return message, body[:-1] + b"?" if isinstance(message, Piece) else body

    net.tap = tap
    left = await batch_of(reader, chunks, ["liar"])
    assert left == entries_of(chunks[-1:])
    assert not seen
    assert reader.dropped["content differs from its digest"] == 1


@in_virtual_time
async def test_a_lost_message_is_asked_for_again_and_a_silent_holder_is_given_up(net):
    chunks = small(50)
    net.peer("holder", *chunks)
    lost = iter([True])
    net.tap = lambda sender, to, message, body: None if next(lost, False) else (message, body)
    assert not await batch_of(net.peer("reader"), chunks, ["holder"])
    assert STALL_S < now() < 2 * STALL_S
    began_s = now()
    net.tap = lambda sender, to, message, body: None
    assert len(await batch_of(net.peer("other"), chunks, ["holder"])) == 50
    assert now() - began_s == pytest.approx(BATCH_TRIES * STALL_S, abs=0.1)


@in_virtual_time
async def test_an_answer_that_is_late_counts(net):
    chunks = small(50, 1000)
    net.peer("holder", *chunks)
    net.rate = 50_000 / (1.5 * STALL_S)
    assert not await batch_of(net.peer("reader"), chunks, ["holder"])
    assert now() == pytest.approx(1.5 * STALL_S, abs=0.1)


@in_virtual_time
async def test_a_holder_that_dies_is_left_at_once(net):
    chunks = small(50)
    net.peer("holder", *chunks)
    net.peer("spare", *chunks)
    reader = net.peer("reader")
    net.lives["holder"] = "dead"
    assert not await batch_of(reader, chunks, ["holder", "spare"])
    assert now() < STALL_S


@in_virtual_time
async def test_time_runs_out(net):
    chunks = small(50)
    net.peer("holder", *chunks)
    net.tap = lambda sender, to, message, body: None
    assert len(await batch_of(net.peer("reader"), chunks, ["holder"], 0.5)) == 50
    assert now() == pytest.approx(0.5)


@in_virtual_time
async def test_a_chunk_is_fetched_once_alone_or_in_a_batch(net):
    chunks = small(50)
    net.peer("holder", *chunks)
    reader, seen = net.peer("reader"), noting(net)
    alone, _ = await asyncio.gather(
        fetch(reader, chunks[7], ["holder"], pin="alone"), batch_of(reader, chunks[:7], ["holder"])
    )
    again, rest = await asyncio.gather(
        fetch(reader, chunks[9], ["holder"], pin="alone"), batch_of(reader, chunks[8:], ["holder"])
    )
    assert alone
    assert again
    assert rest in ([], entries_of([chunks[9]]))
    assert seen[Want] == seen[Piece] == 4


@in_virtual_time
async def test_a_peer_of_an_older_build_sends_the_first_chunk_only(net):
    chunks = small(5)
    net.peer("holder", *chunks)
    reader = net.peer("reader")

    def tap(sender, to, message, body):
        if isinstance(message, Want):
            message = Want(message.digest, message.start, message.stop, message.piece)
        return message, body

    net.tap = tap
    left = await batch_of(reader, chunks, ["holder"])
    assert left == entries_of(chunks[1:])


@pytest.mark.parametrize(
    ("start", "size", "more", "length"),
    [
        (0, 40, (40, 40), 119),
        (0, 40, (40, 41), 121),
        (0, 40, (40, 40, 0), 120),
        (0, 0, (2**32 - 1, 40), 120),
        (40, 40, (40, 40), 120),
    ],
)
def test_an_answer_that_does_not_fit_its_request_is_refused(start, size, more, length):
    entries = entries_of(small(3))
    batch = Batch("holder", entries)
    piece = Piece(entries[0][0], start, size, struct.pack(f"<{len(more)}I", *more))
    assert not batch.fill(piece, bytes(length))
    assert not batch.ended
    assert batch.fill(Piece(entries[0][0], 0, 40, struct.pack("<2I", 0, 40)), bytes(80))


@in_virtual_time
async def test_answers_that_nobody_asked_for_are_dropped(net):
    chunks = small(5)
    net.peer("holder", *chunks)
    reader = net.peer("reader")
    piece = Piece(digest_of(chunks[0]), 0, 40, struct.pack("<4I", *[40] * 4))
    fetching = asyncio.ensure_future(batch_of(reader, chunks, ["holder"]))
    await asyncio.sleep(0)
    reader.receive("stranger", piece, bytes(200))
    reader.receive("stranger", Miss(digest_of(chunks[0])), b"")
    reader.receive("holder", piece, bytes(199))
    assert not await fetching
    reader.receive("holder", piece, b"".join(chunks))
    assert reader.dropped == {"piece not asked for": 2, "piece of the wrong size": 1}


@in_virtual_time
async def test_a_peer_serves_few_batches_at_a_time_and_no_senseless_ones(net):
    first, *others = small(40)
    holder = net.peer("holder", first, *others)
    net.rate = 1  # so that requests wait
    digest, more = digest_of(first), b"".join(map(digest_of, others))
    for length in (more[:-1], more[:33]):
        holder.receive("greedy", Want(digest, 0, 40, more=length), b"")
    holder.receive("greedy", Want(digest, 0, BATCH_BYTES + 1, more=more), b"")
    holder.receive("greedy", Want(digest, PIECE_BYTES, PIECE_BYTES + 1, more=more), b"")
    assert holder.dropped == {"senseless want": 4}
    for number in range(MAX_WANTS):
        holder.receive("greedy", Want(digest, 0, 40, more=more[32 * number :][:64]), b"")
    assert holder.wants["greedy"] == MAX_BATCHES
    holder.receive("greedy", Want(digest, 0, 40), b"")
    assert holder.wants["greedy"] == MAX_BATCHES, "it comes first in each of them"
    net.rate = 1e9
    await asyncio.sleep(4000)


def test_an_answer_has_as_much_as_a_piece_may_hold_and_says_what_is_missing():
    store = Store(2**30)
    parts = small(3, 200_000)
    first, *_ = digests = [store.put(data, "mine") for data in parts]
    piece, body = answer(
        store, Want(first, 0, 200_000, more=bytes(32) + b"".join(digests[1:])), store.view(first)
    )
    assert struct.unpack("<3I", piece.more) == (0, 200_000, 0)
    assert bytes(body) == parts[0] + parts[1]


def test_a_batch_has_small_chunks_only_and_no_more_than_fit():
    tiny, large = (bytes(32), 40), (bytes(32), SMALL_BYTES + 1)
    assert len(fitting([tiny] * 5000)) == MAX_BATCH_CHUNKS
    assert len(fitting([(bytes(32), SMALL_BYTES)] * 5000)) == 16
    assert len(fitting([tiny] * 50, 399)) == 9
    assert fitting([tiny, large, tiny]) == [tiny]
    assert fitting([large]) == fitting([(bytes(32), 0)], 99) == []
    assert is_sensible(Want(bytes(32), PIECE_BYTES, 10**6))
