"""A joiner gets the state that most members announce, whole, from all that hold it, or learns that
it cannot."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from worlds.chunk_net import (
    GENESIS,
    MEMBERS,
    NAME,
    SnapshotPeer,
    SnapshotWorld,
    in_a_world,
    snapshot,
)
from worlds.waiting import now

from farflock.swarm.messages import MAX_CHUNK_BYTES, StateOffer, StateQuery
from farflock.swarm.peer import state_download
from farflock.swarm.peer.snapshots import (
    ASK_EVERY_S,
    KEEP_ROUNDS,
    KEEP_S,
    MAX_ASKERS,
    MAX_DISTRUSTED,
    REMADE_S,
    SETTLE_S,
    Snapshot,
)
from farflock.swarm.peer.state_download import (
    MAX_LISTINGS,
    PARALLEL,
    Listing,
    SnapshotUnavailable,
)
from farflock.swarm.protocol.views import Certified, Chain, Member, View
from farflock.swarm.sim.network import Faults, LinkModel
from farflock.swarm.sim.virtual_time import run_virtual

# Which state.


@in_a_world
async def test_the_snapshot_that_all_announce_comes_whole_and_in_order(world):
    for name in "abc":
        world.peer(name).serve(snapshot())
    assert await world.joiner.fetch() == snapshot()
    assert now() < 5.0


@pytest.mark.parametrize(
    ("offers", "taken"),
    [
        ({"a": snapshot(7), "b": snapshot(7), "c": snapshot(9)}, snapshot(7)),
        ({"a": snapshot(7), "b": snapshot(9)}, snapshot(9)),
        (
            {"a": snapshot(7, b"true"), "b": snapshot(7, b"true"), "c": snapshot(7, b"lie")},
            snapshot(7, b"true"),
        ),
        ({"a": snapshot(-1)}, snapshot(-1)),
        ({"a": snapshot(7, chunks=0)}, snapshot(7, chunks=0)),
    ],
    ids=[
        "most win over newest",
        "of equals the newest",
        "most win over a liar",
        "before the first round",
        "no chunks",
    ],
)
def test_the_joiner_takes(offers, taken):
    async def main():
        world = SnapshotWorld()
        for name, offered in offers.items():
            world.peer(name).serve(offered)
        assert await world.joiner.fetch() == taken

    run_virtual(main())


@in_a_world
async def test_the_state_of_a_stage_is_asked_of_its_members_and_believed_of_no_other_peer(world):
    members = {0: ["a"], 1: ["b", "c"], None: list(MEMBERS)}
    world.asked = members.get
    liar, one, other = (world.peer(name).serve(snapshot(7, name.encode())) for name in "abc")

    async def lie():
        while True:
            liar.context.send("joiner", liar.snapshots._put(NAME, snapshot(9, b"lie"), "lies"))
            await asyncio.sleep(0.1)

    lying = asyncio.create_task(lie())
    other.serve(snapshot(8, b"c"))
    assert await world.joiner.fetch(stage=1) == snapshot(8, b"c"), (
        "of two that differ the newer one"
    )
    assert liar.built == 0
    lying.cancel()
    assert await world.joiner.fetch(stage=0) == snapshot(7, b"a")
    assert (one.built, other.built, liar.built) == (1, 1, 1)


@in_a_world
async def test_the_first_offer_is_not_taken_before_others_had_time_to_answer(world):
    world.peer("a").serve(snapshot(7, b"lie"))
    for name in "bc":
        world.peer(name).serve(snapshot(7), build_s=ASK_EVERY_S + SETTLE_S / 2)
    assert await world.joiner.fetch() == snapshot(7)


@in_a_world
async def test_only_members_are_asked_and_believed(world):
    world.members = ("a",)
    world.peer("a").serve(snapshot(7))
    for name in "bcd":
        stranger = world.peer(name).serve(snapshot(9, b"lie"))
        # as if it had been asked: it answers
        stranger.snapshots.receive("joiner", StateQuery(NAME))
    assert await world.joiner.fetch() == snapshot(7)


@in_a_world
async def test_an_offer_that_was_not_asked_for_is_kept_nowhere(world):
    world.joiner.snapshots.receive(
        "a", StateOffer(NAME, GENESIS.hash, 7, bytes(32), bytes(32), 100, 0)
    )
    assert not world.joiner.snapshots.downloading
    with pytest.raises(SnapshotUnavailable, match="0 members offered one"):
        await world.joiner.fetch(timeout_s=3.0)
    assert not world.joiner.snapshots.downloading


@in_a_world
async def test_a_state_of_a_line_of_views_that_the_joiner_does_not_know_is_not_taken(world):
    """It would bring one line's state into another, and all work of that line would be lost."""
    elsewhere = View(1, GENESIS.hash, 4, (Member("a", 1), Member("b", 1)))
    there = Certified(elsewhere)
    for name in "abc":
        world.peer(name).serve(snapshot(9, b"elsewhere")).context.chain = Chain(
            "run", [Certified(GENESIS), there]
        )
    with pytest.raises(SnapshotUnavailable, match="0 members offered one"):
        await world.joiner.fetch(timeout_s=5.0)
    assert world.joiner.context.counters["dropped: snapshot of an unknown view"] >= 3
    assert world.joiner.context.counters["stale view"] >= 3, (
        "no peer is asked for the missing views"
    )
    world.joiner.context.chain = Chain("run", [Certified(GENESIS), there])
    assert await world.joiner.fetch() == snapshot(9, b"elsewhere")


@in_a_world
async def test_older_states_than_the_log_leads_on_from_are_not_taken_however_many_offer_them(world):
    for name in "abc":
        world.peer(name).serve(snapshot(4, b"old"))
    world.peer("d").serve(snapshot(20, b"new"))
    assert await world.joiner.fetch() == snapshot(4, b"old")
    assert await world.joiner.fetch(min_round=12) == snapshot(20, b"new")
    assert await world.joiner.fetch(min_round=-3) == snapshot(4, b"old"), "of a stride of three"
    with pytest.raises(SnapshotUnavailable):
        await world.joiner.fetch(timeout_s=4.0, min_round=21)


@in_a_world
async def test_a_peer_that_changes_branch_while_offers_come_in_begins_again(world):
    host = world.peer("a").serve(snapshot(9, b"old"))

    async def change():
        await asyncio.sleep(ASK_EVERY_S + SETTLE_S / 2)
        world.joiner.context.chain = Chain("run", [Certified(GENESIS)])
        host.serve(snapshot(5, b"new"))

    world.spawn(change())
    assert await world.joiner.fetch() == snapshot(5, b"new")


# More chunks than one listing names.


@in_a_world
async def test_a_large_snapshot_has_listings_of_listings(world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_download, "MAX_LISTED", 4)
        for name in "ab":
            world.peer(name).serve(snapshot(chunks=10, size=1000))
        assert await world.joiner.fetch() == snapshot(chunks=10, size=1000)
        for chunks in (1, 4, 5, 8):
            world.peer("a").serve(snapshot(9 + chunks, chunks=chunks, size=1000))
            world.peer("b").serve(snapshot(9 + chunks, chunks=chunks, size=1000))
            assert await world.joiner.fetch() == snapshot(9 + chunks, chunks=chunks, size=1000)


@pytest.mark.parametrize("listings", [2, MAX_LISTINGS + 1])
def test_listings_that_nest_deeper_or_are_too_many_are_refused(listings):
    @in_a_world
    async def refused(world):
        host = world.peer("a")
        inner = msgspec.msgpack.encode(Listing((), listings=listings == 2))
        entry = host.store.put(inner, "pin"), len(inner)
        outer = msgspec.msgpack.encode(Listing((entry,) * listings, listings=True))
        digest, view = host.store.put(outer, "pin"), host.context.views.newest.hash
        offer = StateOffer(NAME, view, 7, b"state", digest, len(outer), 0)
        host.snapshots = SimpleNamespace(
            receive=lambda sender, query: host.context.send(sender, offer)
        )
        with pytest.raises(SnapshotUnavailable):
            await world.joiner.fetch(timeout_s=10.0)
        assert world.joiner.context.counters["dropped: snapshot listing too deep"]

    refused()


# With faults.


@in_a_world
async def test_it_comes_through_loss_doubling_and_reordering(world):
    world.network.faults = Faults(loss=0.1, duplicate=0.1, reorder=0.1)
    for name in "ab":
        world.peer(name).serve(snapshot(chunks=10))
    assert await world.joiner.fetch(60.0) == snapshot(chunks=10)


@in_a_world
async def test_a_holder_that_dies_on_the_way_is_replaced_by_another(world):
    world.network.set_link("joiner", LinkModel(down_bytes_per_s=1e6))
    for name in "ab":
        world.peer(name).serve(snapshot(chunks=20))

    async def death():
        await asyncio.sleep(ASK_EVERY_S + SETTLE_S + 1.0)
        world.network.kill("a")

    world.spawn(death())
    assert await world.joiner.fetch() == snapshot(chunks=20)
    assert now() > ASK_EVERY_S + SETTLE_S + 1.0, "the death came too late to be one on the way"


@in_a_world
async def test_if_no_peer_answers_in_time_the_message_says_what_came_and_what_to_do(world):
    with pytest.raises(
        SnapshotUnavailable,
        match=r"no snapshot of state within 5 s \(0 members .*; check the network",
    ):
        await world.joiner.fetch(timeout_s=5.0)
    assert abs(now() - 5.0) < 0.01
    lazy = world.peer("a").serve(snapshot())
    lazy.store.view = lambda digest: None  # it offers what it does not hold
    with pytest.raises(SnapshotUnavailable, match="1 members offered one"):
        await world.joiner.fetch(timeout_s=5.0)


@in_a_world
async def test_a_member_that_comes_later_is_asked_again(world):
    async def begin():
        await asyncio.sleep(10.0)
        world.peer("a").serve(snapshot())

    world.spawn(begin())
    assert await world.joiner.fetch() == snapshot()
    assert 10.0 < now() < 15.0


@pytest.mark.parametrize("listing", [b"", b"nonsense", msgspec.msgpack.encode([[[b"short", 5]]])])
def test_a_listing_that_cannot_be_read_is_dropped_and_better_ones_are_taken_when_they_come(listing):
    async def main():
        world = SnapshotWorld()
        liar = world.peer("a")
        digest = liar.store.put(listing, "lie")

        def offer():
            liar.context.send(
                "joiner", StateOffer(NAME, GENESIS.hash, 99, bytes(32), digest, len(listing), 0)
            )

        async def keep_lying():
            while True:
                offer()
                await asyncio.sleep(0.2)

        world.spawn(keep_lying())
        fetch = asyncio.create_task(world.joiner.fetch())
        await asyncio.sleep(8.0)
        assert world.joiner.context.counters["dropped: undecodable snapshot listing"] >= 2
        for name in "bc":
            world.peer(name).serve(snapshot())
        assert await fetch == snapshot()

    run_virtual(main())


@in_a_world
async def test_a_distrusted_download_is_never_taken_again(world):
    for name in "abc":
        world.peer(name).serve(snapshot(9, b"lie"))
    for name in "de":
        world.peer(name).serve(snapshot(7))
    assert await world.joiner.fetch() == snapshot(9, b"lie")
    world.joiner.snapshots.distrust(NAME)
    assert await world.joiner.fetch() == snapshot(7)
    assert world.joiner.context.counters["dropped: distrusted snapshot"] >= 3


@in_a_world
async def test_the_list_of_the_distrusted_is_bounded(world):
    honest = world.peer("a")
    for number in range(MAX_DISTRUSTED + 10):
        honest.serve(snapshot(number, b"%d" % number, size=10))
        assert await world.joiner.fetch() == snapshot(number, b"%d" % number, size=10)
        world.joiner.snapshots.distrust(NAME)
    assert world.joiner.snapshots.distrusted == MAX_DISTRUSTED


# Serving.


@in_a_world
async def test_progress_counts_up_to_all_bytes(world):
    world.peer("a").serve(snapshot(chunks=5))
    heard = []
    await world.joiner.fetch(progress=lambda here, total: heard.append((here, total)))
    assert heard == [(here * 100_004, 5 * 100_004) for here in range(1, 6)]


@in_a_world
async def test_a_snapshot_is_built_once_for_all_that_ask_meanwhile(
    world,
):
    host = world.peer("a").serve(snapshot(), build_s=3.0)
    joiners = [SnapshotPeer(world, f"joiner {number}") for number in range(4)]
    assert await asyncio.gather(*(joiner.fetch() for joiner in joiners)) == [snapshot()] * 4
    assert host.built == 1
    assert now() < 6.0


@in_a_world
async def test_as_many_as_ask_meanwhile_are_remembered_up_to_a_bound(world):
    host = world.peer("a").serve(snapshot(), build_s=3.0)
    for number in range(MAX_ASKERS + 50):
        host.snapshots.receive(f"stranger {number}", StateQuery(NAME))
    assert host.snapshots.waiting[NAME] == MAX_ASKERS
    await asyncio.sleep(5.0)
    assert not host.snapshots.waiting


@in_a_world
async def test_it_is_known_whether_a_snapshot_in_the_making_is_for_members_alone(world):
    host = world.peer("a").serve(snapshot(), build_s=3.0)
    host.snapshots.receive("b", StateQuery(NAME))
    assert not host.snapshots.is_asked_by_newcomers(NAME)
    host.snapshots.receive("joiner", StateQuery(NAME))
    assert host.snapshots.is_asked_by_newcomers(NAME)


@in_a_world
async def test_a_peer_that_withdraws_serves_no_peer_until_it_serves_again(world):
    host = world.peer("a").serve(snapshot())
    host.snapshots.withdraw()
    with pytest.raises(SnapshotUnavailable):
        await world.joiner.fetch(timeout_s=5.0)
    host.serve(snapshot(9))
    assert await world.joiner.fetch() == snapshot(9)


@in_a_world
async def test_a_question_that_is_overtaken_by_withdrawing_is_not_answered(world):
    for begun in (False, True):
        host = world.peer("a").serve(snapshot(), build_s=1.0)
        host.snapshots.receive("joiner", StateQuery(NAME))
        if begun:
            await asyncio.sleep(0.5)
        host.snapshots.withdraw()
        await asyncio.sleep(2.0)
        assert world.network.line("a").sent_frames == 0
        assert not host.snapshots.waiting


@in_a_world
async def test_an_older_snapshot_is_let_go_when_a_newer_one_is_served(world):
    host = SnapshotPeer(world, "a", budget_bytes=0)
    host.serve(snapshot(1, b"one"))
    assert await world.joiner.fetch() == snapshot(1, b"one")
    first_bytes = host.store.size_bytes
    assert await world.joiner.fetch() == snapshot(1, b"one")
    assert host.store.size_bytes == first_bytes, "the same one is not put in again"
    host.serve(snapshot(2, b"two"))
    assert await world.joiner.fetch() == snapshot(2, b"two")
    assert host.store.size_bytes == first_bytes, (
        "only what is not pinned leaves a store without budget"
    )


@in_a_world
async def test_a_later_question_gets_the_snapshot_in_download_until_it_is_too_old(
    world,
):
    host, states = SnapshotPeer(world, "a", budget_bytes=0), iter(range(100))

    async def provide():
        return snapshot(next(states), b"some")

    host.snapshots.serve(NAME, provide)
    for touched, number in (
        (0, 0),
        (KEEP_ROUNDS, 0),
        (KEEP_ROUNDS + 1, 1),
        (2 * KEEP_ROUNDS + 1, 1),
    ):
        host.context.floor = (touched + 1,)
        newcomer = SnapshotPeer(world, f"newcomer {touched}")
        assert (await newcomer.fetch()).round == number
    assert (await world.joiner.fetch()).round == 1
    assert (await newcomer.fetch()).round == 1, "who reads one goes on with it"
    await asyncio.sleep(KEEP_S)
    assert (await world.joiner.fetch()).round == 2
    host.snapshots.serve(NAME, provide)
    assert (await world.joiner.fetch()).round == 3, "a new state is served at once"


@in_a_world
async def test_a_peer_to_which_each_state_is_too_old_has_one_made_only_now_and_then(world):
    host = world.peer("a").serve(snapshot(7))
    for second in range(60):
        host.context.floor = (second // 5,)
        host.snapshots.receive(world.joiner.name, StateQuery(NAME, 2**62))
        await asyncio.sleep(1.0)
    assert 60 / KEEP_S <= host.built <= 60 / REMADE_S


@in_a_world
async def test_a_snapshot_with_a_version_is_made_anew_when_that_changes_and_only_then(world):
    host, states, version = SnapshotPeer(world, "a", budget_bytes=0), iter(range(100)), 7

    async def provide():
        return snapshot(next(states), b"some")

    host.snapshots.serve(NAME, provide, lambda: version)
    for version, number in ((7, 0), (7, 0), (8, 1), (8, 1), (7, 2)):  # noqa: B007 - asked for by the lambda
        host.context.floor = (host.context.touched + 2 * KEEP_ROUNDS,)
        await asyncio.sleep(KEEP_S)
        assert (await world.joiner.fetch()).round == number
    host.snapshots.withdraw()
    host.snapshots.serve(NAME, provide)
    assert (await world.joiner.fetch()).round == 3
    host.context.floor = (host.context.touched + KEEP_ROUNDS + 2,)
    another = SnapshotPeer(world, "another")
    assert (await another.fetch()).round == 4, "it has no version any more"


@in_a_world
async def test_a_snapshot_that_is_larger_than_it_can_be_is_not_begun(world):
    host, joiner = world.peer("a").serve(snapshot()), SnapshotPeer(world, "another")
    total = sum(map(len, snapshot().chunks))
    with pytest.raises(SnapshotUnavailable):
        await joiner.fetch(timeout_s=5.0, max_bytes=total - 1)
    assert joiner.store.size_bytes < 1000, "of the chunks none has come"
    assert await joiner.fetch(max_bytes=total) == snapshot()
    assert host.built == 1


@in_a_world
async def test_a_peer_whose_download_is_no_longer_held_asks_for_a_newer_one(world):
    host = SnapshotPeer(world, "a", budget_bytes=0).serve(snapshot(1, b"one", size=3_000_000))
    download = asyncio.create_task(world.joiner.fetch(timeout_s=300.0))
    while not world.joiner.context.chunks.fetching_bytes:  # noqa: ASYNC110 - until it has begun
        await asyncio.sleep(0.01)
    host.snapshots.withdraw()
    host.serve(snapshot(2, b"two"))
    await SnapshotPeer(world, "b").fetch()
    assert await download == snapshot(2, b"two")
    assert now() < 20.0


@in_a_world
async def test_nothing_stays_in_the_joiner_s_store_however_much_room_it_has(world):
    world.peer("a").serve(snapshot())
    for name, budget_bytes in (("another", 0), ("a third", 2**30)):
        joiner = SnapshotPeer(world, name, budget_bytes)
        assert await joiner.fetch() == snapshot()
        assert joiner.store.size_bytes == 0


@in_a_world
async def test_the_store_holds_only_the_chunks_on_their_way(world):
    world.peer("a").serve(snapshot(chunks=120))
    highest, joiner = 0, world.joiner

    def progress(here, total):
        nonlocal highest
        highest = max(highest, joiner.store.size_bytes + joiner.context.chunks.fetching_bytes)

    assert await joiner.fetch(progress=progress) == snapshot(chunks=120)
    assert 100_000 < highest < (PARALLEL + 1) * 101_000


@in_a_world
async def test_a_snapshot_lands_in_one_piece_in_the_room_that_it_is_given(world):
    world.peer("a").serve(snapshot())
    rooms = []

    def room(size):
        rooms.append(bytearray(size))
        return memoryview(rooms[-1])

    found = await world.joiner.fetch(room=room)
    assert [bytes(each) for each in rooms] == [b"".join(snapshot().chunks)]
    rooms[0][:4] = b"seen"
    assert found.chunks[0][:4] == b"seen", "a view"


@in_a_world
async def test_equal_chunks_are_fetched_once(world):
    alike = replace(snapshot(), chunks=(b"a" * 50_000, b"b" * 9, b"a" * 50_000, b"a" * 50_000))
    world.peer("a").serve(alike)
    fetched, counts, fetch = [], [], world.joiner.context.chunks.fetch

    def counted(digest, size, *rest, **options):
        fetched.append(size)
        return fetch(digest, size, *rest, **options)

    world.joiner.context.chunks.fetch = counted
    found = await world.joiner.fetch(progress=lambda here, total: counts.append((here, total)))
    assert found == alike
    assert sorted(fetched[1:]) == [9, 50_000]
    assert counts[-1] == (150_009, 150_009)


@in_a_world
async def test_what_came_before_a_holder_let_a_snapshot_go_is_not_fetched_again(world):
    host = world.peer("a").serve(snapshot(1, chunks=40))
    fetched, fetch = [], world.joiner.context.chunks.fetch

    async def counted(digest, size, *rest, **options):
        fetched.append(digest)
        if len(fetched) == 30:
            host.serve(snapshot(2, chunks=41))  # with more chunks
            return False
        return await fetch(digest, size, *rest, **options)

    world.joiner.context.chunks.fetch = counted
    assert await world.joiner.fetch() == snapshot(2, chunks=41)
    # all chunks, a listing for each attempt, and the chunk that was refused once
    assert len(fetched) == 41 + 2 + 1


@pytest.mark.parametrize("delta", [1, -1])
def test_a_listing_that_gives_a_chunk_another_size_brings_nothing(delta):
    async def main(world):
        host = world.peer("a").serve(snapshot(chunks=2))
        put = host.store.put

        def lying(data, pin, verified=None):
            if verified is None and len(data) < 1000:
                listing = msgspec.msgpack.decode(data, type=Listing)
                first, (digest, size) = listing.chunks
                data = msgspec.msgpack.encode(Listing((first, (digest, size + delta))))
            return put(data, pin, verified)

        host.store.put = lying
        for already in (False, True):
            if already:
                world.joiner.store.put(snapshot(chunks=2).chunks[1], "another use")
            with pytest.raises(SnapshotUnavailable):
                await world.joiner.fetch(timeout_s=8.0)

    in_a_world(main)()


@in_a_world
async def test_a_question_for_a_stream_that_is_not_served_is_not_answered(world):
    host = world.peer("a").serve(snapshot())
    host.snapshots.receive("joiner", StateQuery("another"))
    await asyncio.sleep(5)
    assert host.built == 0
    assert world.network.line("a").sent_frames == 0


@in_a_world
async def test_a_chunk_that_no_frame_of_ours_could_carry_is_our_own_bug(world):
    host = world.peer("a").serve(Snapshot(1, b"", 0, (bytes(MAX_CHUNK_BYTES + 1),)))
    host.snapshots.receive("joiner", StateQuery(NAME))
    await asyncio.sleep(1.0)
    (failure,) = world.failures
    assert "too large" in str(failure)
    world.failures.clear()


def test_a_listing_names_each_chunk_and_its_size():
    listing = Listing(((bytes(32), 5), (bytes(range(32)), 0)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(listing), type=Listing) == listing
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(
            msgspec.msgpack.encode([[[bytes(32), MAX_CHUNK_BYTES + 1]]]), type=Listing
        )
