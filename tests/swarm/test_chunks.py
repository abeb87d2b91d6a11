"""Chunks arrive complete and correct from any peer that holds them, whatever the holders do, and
take no more memory than was agreed."""

import asyncio

import pytest
from worlds.chunk_net import data_of, fetch, in_virtual_time
from worlds.waiting import now

from farflock.swarm import chunks as module
from farflock.swarm.chunk_server import MAX_ASKERS, MAX_PIECE_BYTES, MAX_WANTS, PIECE_BYTES
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.chunks import INBOUND_BYTES, STALL_S, WINDOW_BYTES
from farflock.swarm.messages import MAX_CHUNK_BYTES, Miss, Piece, Want


def pins_of(store, data):
    """The users that keep this chunk."""
    return {pin for pin in store.pins if digest_of(data) in store.pinned(pin)}


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        PIECE_BYTES - 1,
        PIECE_BYTES,
        PIECE_BYTES + 1,
        3 * PIECE_BYTES,
        WINDOW_BYTES + 1,
        MAX_CHUNK_BYTES,
    ],
)
def test_a_chunk_of_any_size_comes_whole(size):
    async def main(net):
        data = data_of(size)
        net.peer("holder", data)
        reader = net.peer("reader")
        assert await fetch(reader, data, ["holder"])
        assert reader.store.get(digest_of(data)) == data

    in_virtual_time(main)()


@in_virtual_time
async def test_what_is_here_already_is_pinned_without_asking(net):
    data = data_of(10)
    reader = net.peer("reader", data)
    assert await fetch(reader, data, [])
    reader.store.release("mine")
    reader.store.budget_bytes = 0
    reader.store.put(b"other", "other")
    assert digest_of(data) in reader.store


@in_virtual_time
async def test_a_chunk_above_the_limit_is_not_even_asked_for(net):
    reader = net.peer("reader")
    assert not await reader.fetch(bytes(32), MAX_CHUNK_BYTES + 1, lambda: ["holder"], "pin", 5.0)
    assert now() == 0


@in_virtual_time
async def test_a_chunk_that_is_said_to_have_no_bytes_and_is_not_the_empty_one_ends_at_once(net):
    net.peer("liar")
    reader = net.peer("reader")
    assert not await reader.fetch(digest_of(b"something"), 0, lambda: ["liar"], "pin", 5.0)
    assert await reader.fetch(digest_of(b""), 0, lambda: [], "pin", 5.0)
    assert reader.store.get(digest_of(b"")) == b""
    assert now() == 0.0


@in_virtual_time
async def test_a_link_is_used_to_nine_tenths(net):
    parts = [data_of(2**18, seed) for seed in range(40)]
    net.peer("holder", *parts)
    reader = net.peer("reader")
    assert all(await asyncio.gather(*(fetch(reader, part, ["holder"]) for part in parts)))
    assert 40 * 2**18 / net.rate > 0.9 * now()


@in_virtual_time
async def test_lost_pieces_are_asked_for_again_and_little_else(net):
    net.loss = 0.1
    parts = [data_of(2**20, seed) for seed in range(10)]
    net.peer("holder", *parts)
    reader = net.peer("reader")
    assert all(await asyncio.gather(*(fetch(reader, part, ["holder"]) for part in parts)))
    assert net.sent_bytes["holder"] < 1.6 * 10 * 2**20


@in_virtual_time
async def test_many_readers_of_a_slow_holder_get_every_piece_about_once(net):
    """Slow is not lost: a piece that is still on its way must not be asked for again."""
    net.rate = 0.25e6
    parts = [data_of(2**18, seed) for seed in range(4)]
    net.peer("holder", *parts)
    readers = [net.peer(f"reader{number}") for number in range(8)]
    work = [
        fetch(reader, part, ["holder"], timeout_s=120.0) for reader in readers for part in parts
    ]
    assert all(await asyncio.gather(*work))
    await asyncio.sleep(60)
    assert net.sent_bytes["holder"] < 1.05 * 8 * 2**20


@in_virtual_time
async def test_a_silent_holder_is_left_for_the_next_after_a_second(net):
    data = data_of(5 * PIECE_BYTES)
    net.peer("silent")
    net.peer("holder", data)
    net.tap = lambda sender, to, message, body: None if to == "silent" else (message, body)
    assert await fetch(net.peer("reader"), data, ["silent", "holder"])
    assert STALL_S <= now() < STALL_S + 0.5


@in_virtual_time
async def test_a_holder_that_lacks_the_chunk_costs_one_round_trip(net):
    data = data_of(100)
    net.peer("empty")
    net.peer("holder", data)
    assert await fetch(net.peer("reader"), data, ["empty", "holder"])
    assert now() < 0.1


@in_virtual_time
async def test_a_holder_that_cannot_be_reached_at_all_costs_nothing(net):
    data = data_of(100)
    net.peer("holder", data)
    assert await fetch(net.peer("reader"), data, ["nobody", "holder"])
    assert now() < 0.1


@in_virtual_time
async def test_dead_and_suspect_holders_are_not_asked(net):
    data = data_of(100)
    for name in ("dead", "suspect", "holder"):
        net.peer(name, data)
        net.lives[name] = name if name != "holder" else "alive"
    assert await fetch(net.peer("reader"), data, ["dead", "suspect", "holder"])
    assert now() < 0.1


@in_virtual_time
async def test_a_holder_that_dies_half_way_is_left_at_once_and_only_the_rest_is_asked_of_the_next(
    net,
):
    data = data_of(16 * PIECE_BYTES)
    net.rate = 16 * PIECE_BYTES / 4  # four seconds for the whole
    net.peer("dying", data)
    net.peer("holder", data)
    task = asyncio.create_task(fetch(net.peer("reader"), data, ["dying", "holder"]))
    await asyncio.sleep(2)
    net.lives["dying"] = "dead"
    assert await task
    assert now() < 5.0
    assert net.sent_bytes["holder"] < 0.7 * len(data)


@in_virtual_time
async def test_a_fetch_without_holders_gives_up_in_time_and_uses_a_holder_that_appears(
    net,
):
    data, holders = data_of(100), []
    net.peer("late", data)
    reader = net.peer("reader")
    assert not await fetch(reader, data, [], timeout_s=3.0)
    assert now() == pytest.approx(3.0)
    task = asyncio.create_task(reader.fetch(digest_of(data), 100, lambda: holders, "pin", 30.0))
    await asyncio.sleep(2)
    holders.append("late")
    assert await task
    assert now() < 6.0


@in_virtual_time
async def test_a_final_fetch_ends_as_soon_as_no_peer_is_left_that_could_have_the_chunk(net):
    data = data_of(100)
    reader = net.peer("reader")
    for name in ("one", "other"):
        net.peer(name)
    net.peer("late", data)
    assert not await reader.fetch(
        digest_of(data), 100, lambda: ["one", "other"], "pin", 300.0, final=True
    )
    assert now() < 2.0
    assert await reader.fetch(
        digest_of(data), 100, lambda: ["one", "late"], "pin", 300.0, final=True
    )
    reader.store.release("pin")
    net.lives["late"] = "dead"
    other = data_of(200)
    assert not await reader.fetch(digest_of(other), 200, lambda: ["late"], "pin", 300.0, final=True)
    assert now() < 4.0


@in_virtual_time
async def test_fetches_from_the_dead_leave_the_budget_to_others(net):
    """A dead member's many shards must not hold up those of the living."""
    net.rate = 1e9
    net.lives["dead"] = "dead"
    reader = net.peer("reader")
    lost = [
        asyncio.create_task(
            reader.fetch(bytes([n]) * 32, MAX_CHUNK_BYTES, lambda: ["dead"], "pin", 20.0)
        )
        for n in range(32)
    ]
    await asyncio.sleep(1)
    data = data_of(MAX_CHUNK_BYTES)
    net.peer("holder", data)
    assert await fetch(reader, data, ["holder"])
    assert now() < 2.0
    assert not any(await asyncio.gather(*lost))


# Liars.


@in_virtual_time
async def test_a_liar_is_found_out_and_not_asked_again(net):
    data = data_of(3 * PIECE_BYTES)
    net.peer("liar", data)
    net.peer("holder", data)
    lies = []

    def lie(sender, to, message, body):
        if sender == "liar" and body:
            lies.append(message.start)
            body = bytes(len(body))
        return message, body

    net.tap = lie
    reader = net.peer("reader")
    assert await fetch(reader, data, ["liar", "holder"])
    assert reader.store.get(digest_of(data)) == data
    assert len(lies) == 3
    assert reader.dropped["content differs from its digest"] == 1


@in_virtual_time
async def test_a_liar_that_spoils_one_piece_does_not_stop_the_chunk(
    net,
):
    """A mixed copy does not show which holder lied: from then on each copy comes from a single
    holder."""
    data = data_of(4 * PIECE_BYTES)
    net.peer("liar", data)
    net.peer("holder", data)

    def lie(sender, to, message, body):
        if sender == "liar":
            return (message, bytes(len(body))) if message.start == 0 else None
        return message, body

    net.tap = lie
    reader = net.peer("reader")
    assert await fetch(reader, data, ["liar", "holder"])
    assert reader.store.get(digest_of(data)) == data
    assert now() < 10


@in_virtual_time
async def test_a_lone_liar_delivers_nothing_and_the_fetch_ends_in_time(net):
    data = data_of(100)
    net.peer("liar", data)
    net.tap = lambda sender, to, message, body: (message, bytes(len(body)))
    reader = net.peer("reader")
    assert not await fetch(reader, data, ["liar"], timeout_s=2.0)
    assert digest_of(data) not in reader.store
    assert now() == pytest.approx(2.0)


def forged(digest, start, size, body):
    return Piece(digest, start, size), body


@in_virtual_time
async def test_a_peer_that_says_another_size_is_found_out_at_once(net):
    data = data_of(2 * PIECE_BYTES)
    for name in ("liar", "holder"):
        net.peer(name, data)

    def tap(sender, to, message, body):
        if sender == "liar" and isinstance(message, Piece):
            message = Piece(message.digest, message.start, message.size + 1)
        return message, body

    net.tap, liars, reader = tap, set(), net.peer("reader")
    assert await reader.fetch(
        *(digest_of(data), len(data), lambda: ["liar", "holder"], "pin", None),
        final=True,
        gently=True,
        liars=liars,
    )
    assert liars == {"liar"}
    assert now() < STALL_S


@in_virtual_time
async def test_pieces_that_were_not_asked_for_are_dropped_and_counted(net):
    data = data_of(2 * PIECE_BYTES)
    holder, reader = net.peer("holder", data), net.peer("reader")
    net.latency_s = 0.5
    reader.receive("holder", *forged(digest_of(data), 0, len(data), bytes(PIECE_BYTES)))
    task = asyncio.create_task(fetch(reader, data, ["holder"]))
    await asyncio.sleep(0.1)
    strange = forged(digest_of(data), 0, len(data), bytes(PIECE_BYTES))
    reader.receive("stranger", *strange)
    for piece in (
        forged(bytes(32), 0, len(data), bytes(PIECE_BYTES)),
        forged(digest_of(data), 1, len(data), bytes(PIECE_BYTES)),
        forged(digest_of(data), 5 * PIECE_BYTES, len(data), bytes(PIECE_BYTES)),
    ):
        reader.receive("holder", *piece)
    assert reader.dropped["piece not asked for"] == 5
    for piece in (
        forged(digest_of(data), 0, len(data) + 1, bytes(PIECE_BYTES)),
        forged(digest_of(data), 0, len(data), bytes(10)),
        forged(digest_of(data), 0, len(data), b""),
        forged(digest_of(data), PIECE_BYTES, len(data), bytes(PIECE_BYTES + 1)),
    ):
        reader.receive("holder", *piece)
    assert reader.dropped["piece of the wrong size"] == 4
    assert await task
    assert reader.dropped["content differs from its digest"] == 0
    reader.receive("holder", *strange)
    reader.receive("holder", Miss(digest_of(data)), b"")
    assert holder.dropped == {}


@in_virtual_time
async def test_a_strangers_miss_does_not_turn_the_reader_from_its_holder(net):
    data = data_of(100)
    net.peer("holder", data)
    net.latency_s = 0.2
    reader = net.peer("reader")
    task = asyncio.create_task(fetch(reader, data, ["holder"]))
    await asyncio.sleep(0.1)
    reader.receive("stranger", Miss(digest_of(data)), b"")
    assert await task
    assert now() < 0.5


def contributions(count):
    """Chunks of a shard's size: 262,144 values of four bytes and a length, so that two do not quite
    fit a window."""
    return [data_of(2**20 + 4, seed) for seed in range(count)]


@in_virtual_time
async def test_chunks_asked_for_in_order_are_whole_in_order_one_after_the_other(net):
    """Transfers that have begun finish first; otherwise all would be complete only at the end, and
    the reader would wait until then."""
    parts = contributions(8)
    net.peer("holder", *parts)
    reader = net.peer("reader")
    whole = {}

    async def one(number, part):
        assert await fetch(reader, part, ["holder"])
        whole[number] = now()

    await asyncio.gather(*(one(number, part) for number, part in enumerate(parts)))
    assert sorted(whole, key=whole.get) == list(range(8))
    part_s = len(parts[0]) / net.rate
    assert all(whole[number] < (number + 2) * part_s + 4 * net.latency_s for number in whole)


@in_virtual_time
async def test_a_far_holder_is_never_idle_while_something_is_missing(net):
    """Each piece that arrives makes room for the next request: the line stays full although the
    window is four times what is on its way."""
    parts = contributions(20)
    net.peer("holder", *parts)
    reader = net.peer("reader")
    assert all(await asyncio.gather(*(fetch(reader, part, ["holder"]) for part in parts)))
    assert now() < sum(map(len, parts)) / net.rate + 4 * net.latency_s


# Bounds.


@in_virtual_time
async def test_no_holder_is_ever_asked_for_more_than_its_window(net):
    parts = [
        data_of(size, seed)
        for seed, size in enumerate([2**20, 300, 2**18, MAX_CHUNK_BYTES, 5000] * 20)
    ]
    net.peer("holder", *parts)
    reader = net.peer("reader")
    open_wants, most, most_wants = {}, 0, 0

    def watch(sender, to, message, body):
        nonlocal most, most_wants
        if isinstance(message, Want):
            for start in range(message.start, message.stop, PIECE_BYTES):
                open_wants[message.digest, start] = min(PIECE_BYTES, message.stop - start)
        elif isinstance(message, Piece):
            for start in range(message.start, message.start + len(body), PIECE_BYTES):
                open_wants.pop((message.digest, start), None)
        most, most_wants = (
            max(most, sum(open_wants.values())),
            max(most_wants, len(net.peers["holder"].wants)),
        )
        return message, body

    net.tap = watch
    assert all(
        await asyncio.gather(*(fetch(reader, part, ["holder"], timeout_s=120) for part in parts))
    )
    assert 0.5 * WINDOW_BYTES < most <= WINDOW_BYTES
    assert net.peers["holder"].dropped == {}


@in_virtual_time
async def test_unfinished_fetches_hold_no_more_than_the_inbound_budget(net):
    reader = net.peer("reader")
    net.peer("silent")
    net.tap = lambda *frame: None
    tasks = [
        asyncio.create_task(
            reader.fetch(bytes([n]) * 32, MAX_CHUNK_BYTES, lambda: ["silent"], "pin", 9.0)
        )
        for n in range(40)
    ]
    for _ in range(18):
        await asyncio.sleep(0.5)
        assert reader.fetching_bytes <= INBOUND_BYTES
    assert not any(await asyncio.gather(*tasks))


@in_virtual_time
async def test_a_long_queue_for_one_holder_leaves_the_lines_of_the_others_busy(net):
    queued = [
        data_of(MAX_CHUNK_BYTES, seed) for seed in range(2 * INBOUND_BYTES // MAX_CHUNK_BYTES)
    ]
    other = data_of(1024 * 1024)
    net.peer("long", *queued)
    net.peer("short", other)
    reader = net.peer("reader")
    for data in queued:
        net.spawn(fetch(reader, data, ["long"], timeout_s=3600))
    began = now()
    assert await fetch(reader, other, ["short"])
    assert now() - began < 2 * len(other) / net.rate
    assert reader.fetching_bytes < INBOUND_BYTES / 2


@in_virtual_time
async def test_two_fetches_of_one_chunk_that_wait_for_room_transfer_it_once(
    net,
):
    data = data_of(MAX_CHUNK_BYTES)
    net.peer("holder", data)
    net.peer("silent")
    net.tap = lambda sender, to, message, body: None if to == "silent" else (message, body)
    reader = net.peer("reader")
    blockers = [
        asyncio.create_task(
            reader.fetch(bytes([n]) * 32, MAX_CHUNK_BYTES, lambda: ["silent"], "pin", 5.0)
        )
        for n in range(16)
    ]
    await asyncio.sleep(0.1)
    twins = [asyncio.create_task(fetch(reader, data, ["holder"], pin=pin)) for pin in "ab"]
    assert all(await asyncio.gather(*twins))
    await asyncio.gather(*blockers)
    assert net.sent_bytes["holder"] == len(data)
    assert pins_of(reader.store, data) == {"a", "b"}


@in_virtual_time
async def test_a_cancelled_fetch_gives_everything_back_and_another_waiter_goes_on(net):
    data = data_of(WINDOW_BYTES)
    net.peer("holder", data)
    reader = net.peer("reader")
    first = asyncio.create_task(fetch(reader, data, ["holder"], pin="first"))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(fetch(reader, data, ["holder"], pin="second"))
    await asyncio.sleep(0.03)
    first.cancel()
    assert await second
    assert pins_of(reader.store, data) == {"second"}


@in_virtual_time
async def test_wants_of_one_asker_are_bounded_and_so_are_askers(net):
    data = data_of(PIECE_BYTES)
    net.rate = PIECE_BYTES  # one piece a second
    holder = net.peer("holder", data)
    net.peers["greedy"] = net.peer("sink")
    for _ in range(500):
        for stop in (PIECE_BYTES, PIECE_BYTES - 1):
            holder.receive("greedy", Want(digest_of(data), 0, stop), b"")
    assert holder.wants["greedy"] == 1, "the same again is no new want"
    for number in range(1000):
        holder.receive("greedy", Want(digest_of(data), 0, PIECE_BYTES + 1 + number), b"")
    assert holder.wants["greedy"] == MAX_WANTS
    assert holder.dropped["too many wants"] == 1001 - MAX_WANTS
    for number in range(1000):
        holder.receive(f"stranger{number}", Want(digest_of(data), 0, PIECE_BYTES), b"")
    assert len(holder.wants) == MAX_ASKERS
    assert len(net.tasks) == MAX_ASKERS
    await asyncio.sleep(400)


@in_virtual_time
async def test_nonsensical_wants_send_nothing_beyond_the_chunk(net):
    data = data_of(PIECE_BYTES + 10)
    holder = net.peer("holder", data)
    got = []
    net.peer("asker").receive = lambda sender, message, body: got.append((message, len(body)))
    senseless = [(PIECE_BYTES, 3), (MAX_CHUNK_BYTES, MAX_CHUNK_BYTES), (5, 9), (0, 0)]
    for start, stop in [*senseless, (PIECE_BYTES, MAX_CHUNK_BYTES)]:
        holder.receive("asker", Want(digest_of(data), start, stop), b"")
    await asyncio.sleep(1)
    assert got == [(Piece(digest_of(data), PIECE_BYTES, len(data)), 10)]
    holder.receive("asker", Want(bytes(32), 0, 10), b"")
    await asyncio.sleep(1)
    assert got[1:] == [(Miss(bytes(32)), 0)]
    assert holder.dropped["senseless want"] == 4


def test_the_constants_fit_each_other():
    assert WINDOW_BYTES % PIECE_BYTES == 0
    assert module.ASK_BYTES % PIECE_BYTES == 0
    assert MAX_CHUNK_BYTES % PIECE_BYTES == 0
    assert module.MAX_WANTS * (WINDOW_BYTES // MAX_WANTS) == WINDOW_BYTES
    assert INBOUND_BYTES >= MAX_CHUNK_BYTES


@pytest.mark.parametrize(
    ("rate", "longest"), [(100e3, PIECE_BYTES), (1.2e6, 2 * PIECE_BYTES), (1e9, MAX_PIECE_BYTES)]
)
def test_a_piece_is_as_long_as_the_line_carries_in_a_fraction_of_a_second(rate, longest):
    """On a slow line a long piece would look like silence."""

    @in_virtual_time
    async def main(net):
        net.rate, lengths = rate, []
        data = [data_of(40 * PIECE_BYTES, seed) for seed in range(4)]
        net.peer("holder", *data)
        reader = net.peer("reader")

        def watch(sender, to, message, body):
            if isinstance(message, Piece):
                lengths.append(len(body))
            return message, body

        net.tap = watch
        for each in data:
            assert await fetch(reader, each, ["holder"], timeout_s=120)
        assert lengths[0] == PIECE_BYTES  # nothing is known of the line yet
        assert max(lengths) == longest
        assert not reader.dropped

    main()


@in_virtual_time
async def test_a_long_piece_fills_only_what_is_missing_and_pieces_are_whole_units(net):
    data = data_of(10 * PIECE_BYTES + 7)
    net.peer("holder", data)
    reader = net.peer("reader")
    wants = []

    def watch(sender, to, message, body):
        if isinstance(message, Piece):
            piece = forged(
                message.digest, PIECE_BYTES, len(data), data[PIECE_BYTES:][: 3 * PIECE_BYTES]
            )
            for _ in range(2):  # the second one fills nothing
                reader.receive("holder", *piece)
            reader.receive("holder", *forged(message.digest, 0, len(data), data[: PIECE_BYTES + 1]))
            reader.receive("holder", *forged(message.digest, 0, len(data), data[:-1]))
            net.tap = lambda sender, to, message, body: (message, body)
        else:
            wants.append(message)
        return message, body

    net.tap = watch
    assert await fetch(reader, data, ["holder"])
    assert reader.dropped["piece of the wrong size"] == 2
    assert reader.dropped["piece not asked for"] >= 1


@pytest.mark.parametrize("size", [1, PIECE_BYTES + 1, 2 * PIECE_BYTES - 1, 10 * PIECE_BYTES + 7])
def test_a_chunk_with_a_short_last_unit_takes_one_request(size):
    @in_virtual_time
    async def main(net):
        net.peer("holder", data_of(size))
        wants = []

        def watch(sender, to, message, body):
            if isinstance(message, Want):
                wants.append((message.start, message.stop))
            return message, body

        net.tap = watch
        assert await fetch(net.peer("reader"), data_of(size), ["holder"])
        assert wants == [(0, size)]

    main()
