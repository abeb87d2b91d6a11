"""A state comes over any line, as long as it comes: no chunk twice, whatever breaks on the way."""

import asyncio
import collections
import re

import pytest
from worlds.chunk_net import NAME, SnapshotPeer, in_a_world, snapshot
from worlds.waiting import now, until

from farflock.swarm.chunk_store import digest_of
from farflock.swarm.join_time import RoundTraffic
from farflock.swarm.peer.snapshots import SnapshotUnavailable
from farflock.swarm.peer.state_download import (
    BREAK_S,
    MEASURED_S,
    MUTE_S,
    SILENT_S,
    UNVERIFIED_S,
    VERDICTS,
    LineRate,
)
from farflock.swarm.sim.network import LinkModel

RATE = 200_000.0  # a line of 1.6 Mbit/s
SIZE = 1024 * 1024
STATE = snapshot(chunks=30, size=SIZE - 4)
BYTES = 30 * SIZE
SOON_S = 3.0


class MemoryKept:
    """Chunks that outlive a joiner."""

    def __init__(self):
        self.chunks = {}

    def get(self, digest, size):
        return self.chunks.get(digest)

    def put(self, digest, body):
        assert digest not in self.chunks, "a chunk that is here was fetched again"
        self.chunks[digest] = bytes(body)

    def keep_only(self, digests):
        self.chunks = {name: body for name, body in self.chunks.items() if name in digests}


def slow(world, joiner=None):
    """Give the joiner a slow line, and count the chunks that come whole, by digest."""
    joiner = joiner or world.joiner
    world.network.set_link(joiner.name, LinkModel(down_bytes_per_s=RATE))
    landed, put = collections.Counter(), joiner.store.put

    def counted(data, pin, verified=None):
        landed[verified] += 1
        return put(data, pin, verified)

    joiner.store.put = counted
    return landed


def served_bytes(*peers):
    return sum(peer.context.chunks.server.sent_bytes for peer in peers)


@in_a_world
async def test_a_state_that_takes_longer_than_two_minutes_comes_at_the_rate_of_the_line(world):
    landed, source = slow(world), world.peer("a").serve(STATE)
    assert await world.joiner.fetch(None) == STATE
    assert 120.0 < now() < 1.1 * BYTES / RATE + SOON_S
    assert max(landed.values()) == 1
    assert served_bytes(source) < 1.03 * BYTES


@in_a_world
async def test_a_source_that_dies_in_the_middle_costs_nothing_that_was_here(world):
    landed, sources = slow(world), [world.peer(name).serve(STATE) for name in "ab"]

    async def death():
        await asyncio.sleep(80.0)
        world.network.kill("a")

    world.spawn(death())
    assert await world.joiner.fetch(None) == STATE
    assert 120.0 < now() < 1.15 * BYTES / RATE + SOON_S
    assert max(landed.values()) == 1
    assert served_bytes(*sources) < 1.15 * BYTES  # some of it was lost with the one that died


@in_a_world
async def test_a_source_that_trickles_is_replaced(world):
    landed, sources = slow(world), [world.peer(name).serve(STATE) for name in "ab"]
    world.network.set_link("a", LinkModel(up_bytes_per_s=5_000.0))
    assert await world.joiner.fetch(None) == STATE
    assert now() < 1.15 * BYTES / RATE + 3 * SOON_S
    assert max(landed.values()) == 1
    assert served_bytes(sources[1]) > 0.95 * BYTES


@in_a_world
async def test_sources_that_are_slower_than_the_line_are_asked_together(world):
    slow(world)
    for name in "abcd":
        world.peer(name).serve(STATE)
        world.network.set_link(name, LinkModel(up_bytes_per_s=RATE / 4))
    assert await world.joiner.fetch(None) == STATE
    assert now() < 1.2 * BYTES / RATE + 3 * SOON_S


@in_a_world
async def test_a_lone_source_behind_a_broken_line_goes_on_with_the_same_state(world):
    landed, source = slow(world), world.peer("a").serve(STATE)

    async def interrupt():
        await asyncio.sleep(60.0)
        source.serve(snapshot(8, b"newer", chunks=30, size=SIZE - 5))
        world.network.cut("joiner", "a")
        await asyncio.sleep(0.8 * BREAK_S)
        world.network.heal()

    world.spawn(interrupt())
    assert await world.joiner.fetch(None) == STATE
    assert source.built == 1, "nobody asked for a newer one"
    assert max(landed.values()) == 1
    assert now() < 1.15 * BYTES / RATE + BREAK_S + 2 * SOON_S


@in_a_world
async def test_the_state_of_a_member_that_stays_is_taken_before_that_of_one_that_leaves(world):
    world.peer("a").serve(snapshot(9))
    world.peer("b").serve(snapshot(5))
    world.joiner.context.leaving = {"a"}
    assert await world.joiner.fetch(None) == snapshot(5)
    assert now() < SOON_S


@in_a_world
async def test_a_source_that_said_goodbye_and_is_gone_is_not_waited_for(world):
    slow(world)
    world.peer("a").serve(STATE)

    async def leave():
        await asyncio.sleep(50.0)
        world.joiner.context.leaving = {"a"}
        world.network.kill("a")
        world.peer("b").serve(snapshot(5))

    world.spawn(leave())
    assert await world.joiner.fetch(None) == snapshot(5)
    assert 50.0 < now() < 50.0 + BREAK_S - SOON_S


@in_a_world
async def test_a_joiner_that_starts_again_goes_on_with_what_it_has_verified(world):
    kept, source = MemoryKept(), world.peer("a").serve(STATE)
    slow(world)
    world.joiner.snapshots.kept = lambda name: kept
    first = asyncio.create_task(world.joiner.fetch(None, keep=True))
    await asyncio.sleep(80.0)
    first.cancel()
    world.network.kill("joiner")
    assert 10 < len(kept.chunks) < 20
    await asyncio.sleep(5.0)
    again = SnapshotPeer(world, "joiner")
    landed, again.snapshots.kept, heard = slow(world, again), lambda name: kept, []
    before, begun_s, sent_bytes = set(kept.chunks), now(), served_bytes(source)
    here_bytes = SIZE * len(before)
    found = await again.fetch(None, keep=True, progress=lambda *said: heard.append(said))
    assert found == STATE
    assert not before & landed.keys()
    assert served_bytes(source) - sent_bytes < 1.1 * (BYTES - here_bytes) + 2 * SIZE
    assert now() - begun_s < 1.1 * (BYTES - here_bytes) / RATE + SIZE / RATE + 2 * SOON_S
    assert heard[-1] == (BYTES, BYTES)


@in_a_world
async def test_a_kept_chunk_that_is_damaged_is_fetched_again(world):
    kept, landed = MemoryKept(), slow(world)
    world.peer("a").serve(snapshot())
    kept.get = lambda digest, size: b"x" * size
    world.joiner.snapshots.kept = lambda name: kept
    assert await world.joiner.fetch(None, keep=True) == snapshot()
    assert len([digest for digest in landed if digest in kept.chunks]) == 3


@in_a_world
async def test_chunks_of_another_state_are_not_kept(world):
    kept = MemoryKept()
    kept.chunks[b"old"] = b"of a state that nobody serves any more"
    world.peer("a").serve(snapshot())
    world.joiner.snapshots.kept = lambda name: kept
    assert await world.joiner.fetch(None) == snapshot()
    assert list(kept.chunks) == [b"old"], "kept only where that is asked for"
    await world.joiner.fetch(None, keep=True)
    assert set(kept.chunks) == {digest_of(chunk) for chunk in snapshot().chunks}


@in_a_world
async def test_a_source_that_is_there_and_sends_nothing_is_left_for_another_state(world):
    slow(world)
    source, other = world.peer("a").serve(STATE), world.peer("b")

    async def fall_mute():
        await asyncio.sleep(50.0)
        source.context.chunks.server.receive = lambda sender, want: None
        other.serve(snapshot(5, b"older"))

    world.spawn(fall_mute())
    assert await world.joiner.fetch(None) == snapshot(5, b"older")
    assert 50.0 + MUTE_S < now() < 50.0 + SILENT_S


@in_a_world
async def test_a_lone_source_that_is_there_and_sends_nothing_is_no_reason_to_wait(world):
    slow(world)
    world.members = ("a",)
    source = world.peer("a").serve(STATE)

    async def fall_mute():
        await asyncio.sleep(50.0)
        source.context.chunks.server.receive = lambda sender, want: None

    world.spawn(fall_mute())
    with pytest.raises(SnapshotUnavailable, match="no byte of it came for 30 s"):
        await world.joiner.fetch(None)
    assert 50.0 + SILENT_S - 1.0 < now() < 50.0 + SILENT_S + 3 * SOON_S


@in_a_world
async def test_nothing_for_half_a_minute_ends_with_what_why_and_what_to_do(world):
    slow(world)
    world.peer("a").serve(STATE)

    async def silence():
        await asyncio.sleep(100.0)
        world.network.stop("a")

    world.spawn(silence())
    with pytest.raises(SnapshotUnavailable) as ended:
        await world.joiner.fetch(None)
    assert 100.0 + SILENT_S - 1.0 < now() < 100.0 + SILENT_S + 2 * SOON_S
    said = str(ended.value)
    assert said.startswith(f"no snapshot of {NAME}: no byte of it came ")
    assert "for 30 s; 18.9 of 31.5 MB had come; check the network and" in said


@in_a_world
async def test_without_a_living_member_nobody_waits_longer_than_that(world):
    world.peer("a")
    world.network.kill("a")
    world.members = ("a",)
    with pytest.raises(
        SnapshotUnavailable, match="none of its members could be reached for 30 s; check"
    ):
        await world.joiner.fetch(None)
    assert now() == pytest.approx(SILENT_S, abs=1.0)


@in_a_world
async def test_a_member_that_writes_its_state_may_take_longer_but_not_for_ever(world):
    world.members = ("a",)
    source = world.peer("a").serve(snapshot(), build_s=60.0)
    assert await world.joiner.fetch(None) == snapshot()
    assert now() > 60.0
    source.serve(snapshot(8), build_s=1000.0)
    with pytest.raises(SnapshotUnavailable, match="no member offered it within 120 s; check"):
        await world.joiner.fetch(None)


@in_a_world
async def test_a_source_whose_chunks_never_come_whole_is_left_after_two_minutes(world):
    world.members = ("a",)
    source = world.peer("a").serve(STATE)
    world.network.set_link("a", LinkModel(up_bytes_per_s=6_000.0))
    with pytest.raises(SnapshotUnavailable, match="no part of it came whole within 120 s"):
        await world.joiner.fetch(None)
    assert now() == pytest.approx(UNVERIFIED_S, abs=SOON_S)
    assert served_bytes(source) < 2 * SIZE, "few chunks are on their way at a slow line"


@pytest.mark.parametrize("share", [1, 8, 20])
def test_over_a_slow_line_that_loses_every_twentieth_frame_little_comes_twice(share):
    @in_a_world
    async def whole(world):
        landed, state = slow(world), snapshot(chunks=30 // share, size=SIZE - 4)
        all_bytes, rate = sum(map(len, state.chunks)), RATE / share
        world.network.set_link("joiner", LinkModel(down_bytes_per_s=rate, loss=0.05))
        source = world.peer("a").serve(state)
        assert await world.joiner.fetch(None) == state
        assert max(landed.values()) == 1
        assert served_bytes(source) < 1.3 * all_bytes
        assert now() < 1.3 * all_bytes / rate + SOON_S

    whole()


@in_a_world
async def test_the_rate_and_the_time_that_is_left_are_known_on_the_way(world):
    slow(world)
    world.peer("a").serve(STATE)
    task = asyncio.create_task(world.joiner.fetch(None))
    await asyncio.sleep(60.0)
    coming = world.joiner.snapshots.coming
    assert coming.bytes_per_s == pytest.approx(RATE, rel=0.1)
    assert coming.total_bytes == BYTES
    assert coming.left_s == pytest.approx(BYTES / RATE - 60.0, abs=8.0)
    await until(task.done)
    assert world.joiner.snapshots.coming is None


def test_a_rate_is_that_of_the_last_seconds():
    line = LineRate()
    assert line.bytes_per_s(5.0) == 0.0
    line.begin(0.0)
    for second in range(1, 101):
        line.heard(100 if second < 50 else 10, float(second))
    assert line.total_bytes == 100 * 49 + 10 * 51
    assert line.bytes_per_s(100.0) == pytest.approx(10.0, rel=0.2)


# The sum.


def busy(round_bytes, round_s=2.0):
    return lambda: RoundTraffic(round_bytes, round_s)


@in_a_world
async def test_a_line_that_rounds_would_fill_is_refused_at_the_beginning_with_both_numbers(world):
    slow(world)
    for name in "abc":
        world.peer(name).serve(STATE, traffic=busy(2_000_000))
    with pytest.raises(SnapshotUnavailable) as ended:
        await world.joiner.fetch(None, keep=True)
    assert now() < VERDICTS * (MEASURED_S + 1.0) + SOON_S
    why = r"rounds of 2\.00 MB every 2 s take 50.% of this line, which carries 0\.20 MB/s, so a new"
    assert re.match(why, ended.value.why)
    assert ended.value.remedy == "use a longer period or a coarser codec, or a faster line"


@in_a_world
async def test_a_line_that_others_use_for_some_seconds_is_measured_again_and_not_refused(world):
    slow(world)
    world.peer("a").serve(STATE, traffic=busy(240_000))
    world.network.set_link("joiner", LinkModel(down_bytes_per_s=RATE / 2))
    fetching = asyncio.create_task(world.joiner.fetch(None, keep=True))
    await asyncio.sleep(MEASURED_S + SOON_S)
    assert world.joiner.snapshots.coming.rounds_share == 0.0
    world.network.set_link("joiner", LinkModel(down_bytes_per_s=RATE))
    await asyncio.sleep(VERDICTS * (MEASURED_S + SOON_S))
    assert 0.6 < world.joiner.snapshots.coming.rounds_share < 0.8  # a part of it at half the rate
    assert await fetching == STATE


@in_a_world
async def test_a_line_that_rounds_would_fill_by_half_is_told_what_helps_and_joins(world):
    slow(world)
    world.peer("a").serve(STATE, traffic=busy(240_000))
    fetching = asyncio.create_task(world.joiner.fetch(None, keep=True))
    await asyncio.sleep(MEASURED_S + SOON_S)
    assert world.joiner.snapshots.coming.rounds_share == pytest.approx(0.6, rel=0.1)
    assert "; rounds take 6" in str(world.joiner.snapshots.coming)
    assert await fetching == STATE


@in_a_world
async def test_what_one_member_says_of_rounds_keeps_nobody_away(world):
    slow(world)
    for name in "abc":
        said = busy(2**62, 1e-9) if name == "a" else busy(20_000)
        world.peer(name).serve(STATE, traffic=said)
    assert await world.joiner.fetch(None, keep=True) == STATE


@in_a_world
async def test_a_line_that_breaks_in_its_first_seconds_is_measured_once_it_is_back(world):
    slow(world)
    world.peer("a").serve(STATE, traffic=busy(120_000))

    async def interrupt():
        await asyncio.sleep(3.0)
        world.network.cut("joiner", "a")
        await asyncio.sleep(0.8 * BREAK_S)
        world.network.heal()

    world.spawn(interrupt())
    fetching = asyncio.create_task(world.joiner.fetch(None, keep=True))
    await asyncio.sleep(0.8 * BREAK_S + MEASURED_S + 3 * SOON_S)
    assert world.joiner.snapshots.coming.rounds_share == pytest.approx(0.3, rel=0.15)
    assert await fetching == STATE


@in_a_world
async def test_a_newcomer_with_a_limit_of_time_is_told_the_same_before_that(world):
    slow(world)
    world.peer("a").serve(STATE, traffic=busy(2_000_000))
    with pytest.raises(SnapshotUnavailable, match="so a newcomer would hardly ever catch up"):
        await world.joiner.fetch(60.0, keep=True)
    assert now() < VERDICTS * (MEASURED_S + 1.0) + SOON_S


@in_a_world
async def test_a_member_that_takes_the_others_state_is_not_refused(world):
    slow(world)
    world.peer("a").serve(snapshot(chunks=5, size=SIZE - 4), traffic=busy(2_000_000))
    assert await world.joiner.fetch(None) == snapshot(chunks=5, size=SIZE - 4)
