"""The promises of every directory to its callers: the real one on loopback, and the in-memory one
at its worst."""

import asyncio
import contextlib
import functools
import time

import pytest
from worlds.waiting import LIMIT_S, now, text_of

from farflock.swarm.identity import Identity
from farflock.swarm.messages import MAX_RECORD_BYTES
from farflock.swarm.record import BadRecord, Record, seal, unseal
from farflock.swarm.sim import directory as memory
from farflock.swarm.sim.directory import DirectoryFaults, MemoryTable
from farflock.swarm.sim.virtual_time import run_virtual

RUN = "run"
BRIEF_S = 30.0  # a lifetime


def identity(number):
    return Identity.from_seed(bytes([number]) * 32)


def record(number, sequence=1, run=RUN, **fields):
    owner = identity(number)
    return seal(owner, Record(run, owner.peer, number, sequence, bytes(32), **fields))


class InMemory:
    """Directories on one table, in virtual time."""

    def __init__(self, faults):
        self.table = MemoryTable(RUN, 1, asyncio.get_running_loop().time, faults)

    async def open(self, number):
        return self.table.directory(identity(number).peer)

    async def later(self, seconds):
        await asyncio.sleep(seconds)


class OverLibp2p:
    """Real directories, one daemon each; all join through the first."""

    def __init__(self, stack, folder, module):
        self._stack, self._folder, self._module = stack, folder, module
        self._door, self._later_s = (), 0.0
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(module, "wall_s", lambda: time.time() + self._later_s)

    async def open(self, number):
        path = self._folder / f"key-{number}"
        if not path.exists():
            identity(number).save(path)
        directory = await self._module.DhtDirectory.open(path, run=RUN, initial_peers=self._door)
        self._stack.push_async_callback(directory.close)
        self._door = self._door or directory.addresses
        return directory

    async def later(self, seconds):
        self._later_s += seconds


async def _on_libp2p(law, folder, module):
    async with contextlib.AsyncExitStack() as stack:
        await law(OverLibp2p(stack, folder, module))


def on_every_directory(law):
    """Run a law, a coroutine over a way to open directories, on each of them."""

    @pytest.mark.parametrize(
        "world",
        ["in memory", "in memory, unreliable", pytest.param("over libp2p", marks=pytest.mark.net)],
    )
    def test(world, tmp_path):
        if world == "over libp2p":
            pytest.importorskip("hivemind")
            from farflock.swarm.dht import kademlia as dht  # takes seconds: only where it is used

            asyncio.run(_on_libp2p(law, tmp_path, dht))
        else:
            faults = (
                DirectoryFaults(stale_s=5.0, lost=0.3)
                if "unreliable" in world
                else DirectoryFaults()
            )

            async def main():
                await law(InMemory(faults))

            run_virtual(main())

    test.__name__, test.__doc__ = law.__name__, law.__doc__
    return test


async def soon(condition, again=None):
    """Wait until an async condition holds; `again` is repeated meanwhile,
    as callers repeat their announcements."""
    ends_s = now() + LIMIT_S
    while not await condition():
        assert now() < ends_s, f"not within {LIMIT_S} s: {text_of(condition)}"
        await asyncio.sleep(0.2)
        if again is not None:
            await again()


async def shows(directory, *blobs):
    return set(await directory.peers(RUN)) == set(blobs)


@on_every_directory
async def test_what_is_announced_again_and_again_is_seen_by_all_others(world):
    directories = [await world.open(number) for number in (1, 2, 3)]
    everybody = [record(number) for number in (1, 2, 3)]

    async def announce():
        for directory, blob in zip(directories, everybody, strict=True):
            await directory.announce(RUN, blob)

    for directory in directories:
        await soon(functools.partial(shows, directory, *everybody), announce)


@on_every_directory
async def test_of_each_owner_one_record_is_shown_and_at_last_the_newest(world):
    writer, reader = await world.open(1), await world.open(2)
    for sequence in (1, 2, 3):
        await writer.announce(RUN, record(1, sequence))
        shown = [unseal(blob, RUN) for blob in await reader.peers(RUN)]
        assert len(shown) <= 1
        assert all(entry.sequence <= sequence for entry in shown)
    newest = record(1, 3)
    await soon(lambda: shows(reader, newest), lambda: writer.announce(RUN, newest))


@on_every_directory
async def test_a_record_that_is_not_announced_again_is_gone_when_its_lifetime_is_over(world):
    writer, reader = await world.open(1), await world.open(2)
    lasting, brief = record(2, lifetime_s=600.0), record(1, lifetime_s=BRIEF_S)

    async def announce():
        await reader.announce(RUN, lasting)
        await writer.announce(RUN, brief)

    await announce()
    await soon(lambda: shows(reader, lasting, brief), announce)
    await world.later(BRIEF_S)
    for directory in (reader, writer) * 5:
        assert await shows(directory, lasting)


@on_every_directory
async def test_a_peer_that_announces_alone_is_told_so_and_is_seen_by_later_ones(world):
    founder = await world.open(1)
    blob = record(1)
    assert not await founder.announce(RUN, blob)
    late = await world.open(2)
    await soon(lambda: shows(late, blob), lambda: founder.announce(RUN, blob))
    assert await founder.announce(RUN, blob)


@on_every_directory
async def test_nothing_is_announced_that_others_could_not_verify_as_its_owners(world):
    writer, reader = await world.open(1), await world.open(2)
    whole = record(1)
    tampered = whole[:-1] + bytes([whole[-1] ^ 1])
    for blob in (
        record(3),
        record(1, run="other"),
        tampered,
        whole[:-1],
        b"",
        bytes(MAX_RECORD_BYTES + 1),
    ):
        with pytest.raises(BadRecord):
            await writer.announce(RUN, blob)
    assert await reader.peers(RUN) == []


@on_every_directory
async def test_every_different_head_is_shown_from_any_publisher(world):
    one, two, three = [await world.open(number) for number in (1, 2, 3)]

    async def publish():
        await one.publish_head(RUN, b"head 1")
        await two.publish_head(RUN, b"head 2")
        await three.publish_head(RUN, b"head 2")

    async def shown():
        return await two.heads(RUN) == [b"head 1", b"head 2"]

    await publish()
    await soon(shown, publish)
    assert await two.peers(RUN) == [], "a head is no record"
    for head in (b"", bytes(4096)):
        with pytest.raises(ValueError, match="2048 bytes, got"):
            await one.publish_head(RUN, head)


@on_every_directory
async def test_a_directory_serves_the_run_that_it_was_opened_for(world):
    directory = await world.open(1)
    for call in (
        directory.announce(RUN + "2", record(1)),
        directory.peers(RUN + "2"),
        directory.heads(RUN + "2"),
    ):
        with pytest.raises(ValueError, match="open another one"):
            await call
    with pytest.raises(ValueError, match="open another one"):
        await directory.publish_head(RUN + "2", b"head")


@on_every_directory
async def test_announcements_outlive_their_directory_and_calls_after_closing_end_quietly(
    world,
):
    others = [await world.open(1), await world.open(2)]
    leaver = await world.open(3)
    blob = record(3)

    async def seen():
        return all([await shows(other, blob) for other in others])

    await soon(seen, lambda: leaver.announce(RUN, blob))
    await leaver.close()
    assert not await leaver.announce(RUN, record(3, 2))
    assert set(await leaver.peers(RUN)) <= {blob, record(3, 2)}, "it sees no other peer"
    await soon(seen)
    await leaver.close()


@on_every_directory
async def test_a_peer_in_its_next_life_replaces_its_record(world):
    reader, earlier = await world.open(1), await world.open(2)
    first, second = record(2, 1), record(2, 2)
    await soon(lambda: shows(reader, first), lambda: earlier.announce(RUN, first))
    await earlier.close()
    again = await world.open(2)
    await soon(lambda: shows(reader, second), lambda: again.announce(RUN, second))


@pytest.mark.net
def test_both_keep_heads_for_the_same_time():
    pytest.importorskip("hivemind")
    from farflock.swarm.dht import kademlia as dht

    assert memory.HEAD_LIFETIME_S == dht.HEAD_LIFETIME_S
