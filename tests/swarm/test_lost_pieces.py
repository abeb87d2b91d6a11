"""What is lost of a chunk that is fetched gently is found out by a probe, however slow the line:
nothing is sent twice that was only late."""

import pytest
from worlds.chunk_net import data_of, in_virtual_time
from worlds.waiting import now, until

from farflock.swarm.chunk_server import MAX_WANTS, PIECE_BYTES
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.chunks import GENTLE_SILENCE_S
from farflock.swarm.messages import Piece, Probe, Probed, Want
from farflock.swarm.pace import PROBE_S, STRAY_S, Pace, Probing, Watch

LOOK_S = 0.25  # between two looks of a fetch
FOUND_S = PROBE_S + STRAY_S + 4 * LOOK_S  # at most, and the way there and back


async def watched(reader, data, holders=("holder",)):
    heard = []
    came = await reader.fetch(
        digest_of(data),
        len(data),
        lambda: holders,
        "pin",
        None,
        gently=True,
        watch=Watch(heard.append, 2.0),
    )
    assert not came or sum(heard) == len(data)
    return came


def losing(net, *lost):
    """Lose the messages of these kinds, each so many times; return the kinds of all."""
    left, seen = dict(lost), []

    def tap(sender, to, message, body):
        kind = type(message)
        seen.append(kind)
        left[kind] = left.get(kind, 0) - 1
        return None if left[kind] >= 0 else (message, body)

    net.tap = tap
    return seen


@pytest.mark.parametrize("kind", [Want, Piece])
def test_a_lone_holder_is_asked_again_soon_for_what_is_lost(kind):
    async def main(net):
        data = data_of(4 * PIECE_BYTES)
        net.peer("holder", data)
        losing(net, (kind, 1))
        assert await watched(net.peer("reader"), data)
        assert PROBE_S < now() < FOUND_S
        assert net.sent_bytes["holder"] == len(data) + (PIECE_BYTES if kind is Piece else 0)

    in_virtual_time(main)()


@pytest.mark.parametrize("kind", [Probe, Probed])
def test_a_probe_without_an_answer_is_repeated_after_twice_the_time(kind):
    async def main(net):
        data = data_of(PIECE_BYTES)
        net.peer("holder", data)
        seen = losing(net, (Want, 1), (kind, 2))
        assert await watched(net.peer("reader"), data)
        assert seen.count(Probe) == 3
        assert seen.count(Want) == 2
        assert 7 * PROBE_S < now() < 7 * PROBE_S + FOUND_S

    in_virtual_time(main)()


@in_virtual_time
async def test_a_holder_that_is_slow_sends_every_piece_once(net):
    net.rate = 5_000.0
    data = data_of(4 * PIECE_BYTES)
    net.peer("holder", data)
    seen = losing(net)
    assert await watched(net.peer("reader"), data)
    assert net.sent_bytes["holder"] == len(data)
    assert now() < 1.05 * len(data) / net.rate
    assert 4 < seen.count(Probe) <= 16


@in_virtual_time
async def test_a_holder_that_answers_no_probe_is_left_before_the_silence_ends(net):
    data = data_of(PIECE_BYTES)
    net.peer("mute", data)
    net.peer("holder", data)
    net.tap = lambda sender, to, message, body: None if sender == "mute" else (message, body)
    assert await watched(net.peer("reader"), data, ("mute", "holder"))
    assert now() < GENTLE_SILENCE_S / 2


@in_virtual_time
async def test_an_answer_comes_behind_all_that_was_wanted_before(net):
    data = data_of(3 * PIECE_BYTES)
    holder, came = net.peer("holder", data), []
    net.peer("reader").receive = lambda sender, message, body: came.append((type(message), now()))
    net.rate = PIECE_BYTES
    holder.receive("reader", Want(digest_of(data), 0, len(data)), b"")
    holder.receive("reader", Probe(1), b"")
    holder.receive("reader", Probe(2), b"")
    await until(lambda: len(came) == 5)
    assert [kind for kind, _ in came] == 3 * [Piece] + 2 * [Probed]
    assert came[-1][1] - came[2][1] < 0.1


@in_virtual_time
async def test_the_probes_of_one_asker_are_bounded(net):
    holder = net.peer("holder")
    seen = losing(net)
    net.peer("reader")
    for number in range(2 * MAX_WANTS):
        holder.receive("reader", Probe(number), b"")
    assert holder.wants == {"reader": MAX_WANTS}
    assert holder.dropped["too many wants"] == MAX_WANTS
    await until(lambda: not holder.wants)
    assert seen == MAX_WANTS * [Probed]


@in_virtual_time
async def test_answers_that_nobody_asked_for_change_nothing(net):
    data = data_of(4 * PIECE_BYTES)
    net.rate = PIECE_BYTES / 4
    net.peer("holder", data)
    reader = net.peer("reader")
    net.tap = lambda sender, to, message, body: (
        (message, body)
        if sender == "reader" or isinstance(message, Piece)
        else (Probed(2**62), b"")
    )
    for sender in ("holder", "stranger"):
        reader.receive(sender, Probed(1), b"")
    assert await watched(reader, data)
    assert net.sent_bytes["holder"] == len(data)


def test_a_request_is_lost_once_an_answer_covers_it_and_no_stray_piece_comes():
    pace = Pace()
    first, second = (Probing(pace.asked(0.0), 0.0) for _ in range(2))
    assert not first.is_lost(pace.over, 9.0)
    pace.probed(3)
    assert pace.over == 0, "nobody has asked so much"
    pace.probed(1)
    assert not first.is_lost(pace.over, 10.0)
    first.heard(10.2)
    assert not first.is_lost(pace.over, 10.2 + STRAY_S / 2)
    assert first.is_lost(pace.over, 10.3 + 2 * STRAY_S)
    assert not second.is_lost(pace.over, 99.0)
