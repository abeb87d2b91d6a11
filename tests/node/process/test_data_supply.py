"""A run's data comes from whoever has it, as far ahead as it is needed, and no more of it."""

import asyncio
import contextlib
import errno
import os

import pytest
from worlds.chunk_net import Lent, in_virtual_time
from worlds.prepared import documents_of, prepared
from worlds.waiting import now, until

from farflock.node.data.index import root_of
from farflock.node.data.local_data import LocalData
from farflock.node.data.mirror import BadMirror
from farflock.node.data.sequences import PackedBatches
from farflock.node.errors import RefusedByRun
from farflock.node.process import data_supply as module
from farflock.node.process.data_fetch import DataFetcher
from farflock.node.process.data_supply import DataSupply
from farflock.node.run.data_section import DataSection
from farflock.node.train.task import StepImpossible
from farflock.swarm.compute import inline

SHARDS = 20  # of each of two sources
SEED, BATCH, SEQ = 3, 4, 32


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    sources = {"web": documents_of(1600), "code": documents_of(1200, seed=50_000)}
    prepared(folder, sources, shards=SHARDS)
    return folder


class Nodes:
    """The data of several nodes on one simulated network."""

    def __init__(self, net, texts, tmp_path):
        self.net, self.texts, self.tmp_path = net, texts, tmp_path
        raw = (texts / "index.json").read_bytes()
        self.section = DataSection(
            root=root_of(raw),
            vocabulary=256,
            mix={"web": 0.7, "code": 0.3},
        )
        self.members = []

    def supply(self, name, *folders, mirrors=(), cache_bytes=None):
        """The supply of one more member."""
        cache = self.tmp_path / name
        local = LocalData(self.section.root, folders, cache, cache_bytes)
        chunks = self.net.peer(name)
        self.members.append(name)
        others = lambda: [peer for peer in self.members if peer != name]  # noqa: E731
        fetcher = DataFetcher(local, chunks, others, mirrors, inline)
        return DataSupply(fetcher, self.section.mix)

    async def founder(self, name="founder"):
        supply = self.supply(name, self.texts)
        await supply.text()
        return supply

    def leave(self, name):
        self.members.remove(name)
        self.net.lives[name] = "dead"


@contextlib.asynccontextmanager
async def training(supply, peer, steps, at=None):
    """A node whose data comes while it takes `steps` steps, one every tenth of a second."""
    text = await supply.text()
    stream = PackedBatches(text, SEED, peer, BATCH, SEQ)
    step = at or [0]

    async def train():
        while step[0] < steps:
            await supply.ready(step[0], lambda: False)
            stream.batch(step[0])
            step[0] += 1
            await asyncio.sleep(0.1)

    async with supply.running(stream, lambda: step[0]):
        yield asyncio.create_task(train()), stream


def shards_fetched(supply):
    return {path.stem for path in (supply.local.cache / "shards").glob("*.bin")}


def needed(stream, steps):
    return {shard.sha256 for shard in stream.needed(0, steps)}


def case(main):
    """Run a test in virtual time, with the data and a folder of its own."""

    def test(texts, tmp_path):
        @in_virtual_time
        async def whole(net):
            await main(Nodes(net, texts, tmp_path))

        whole()

    test.__doc__ = main.__doc__
    return test


@case
async def test_a_newcomer_gets_what_describes_the_data_and_then_what_it_draws(nodes):
    await nodes.founder()
    nodes.net.peer("idle")  # a member without any data
    nodes.members.insert(0, "idle")
    joiner = nodes.supply("joiner")
    async with training(joiner, "joiner", 100) as (task, stream):
        await task
    assert shards_fetched(joiner) >= needed(stream, 100)
    for sha256 in shards_fetched(joiner):
        there = nodes.texts / "shards" / f"{sha256}.bin"
        assert (joiner.local.cache / "shards" / there.name).read_bytes() == there.read_bytes()
    assert joiner.awaited() == ""


@case
async def test_two_joiners_fetch_the_shards_that_the_pure_function_predicts(nodes):
    await nodes.founder()
    for name in ("one", "two"):
        supply = nodes.supply(name)
        async with training(supply, name, 40) as (task, stream):
            await task
            await asyncio.sleep(60)  # nothing more is fetched meanwhile
            predicted = {shard.sha256 for shard in module.shards_ahead(stream, 0)}
            assert shards_fetched(supply) == predicted
            assert needed(stream, 40) <= predicted
            assert len(predicted) < 2 * SHARDS  # not all of the data


@case
async def test_members_serve_each_other_while_the_founder_is_away(nodes):
    await nodes.founder()
    supplies = [nodes.supply(name) for name in ("one", "two")]
    async with contextlib.AsyncExitStack() as stack:
        for name, supply in zip(("one", "two"), supplies, strict=True):
            task, _ = await stack.enter_async_context(training(supply, name, 4000))
            await task  # an epoch
        nodes.leave("founder")
        there = shards_fetched(supplies[0]) | shards_fetched(supplies[1])
        third = nodes.supply("third")
        async with training(third, "third", 60) as (task, stream):
            assert {shard.sha256 for shard in module.shards_ahead(stream, 0)} <= there
            await task
        assert shards_fetched(third) <= there


@case
async def test_what_nobody_has_is_waited_for_and_named(nodes):
    founder = await nodes.founder()
    joiner = nodes.supply("joiner")
    await joiner.text()
    nodes.leave("founder")
    async with training(joiner, "joiner", 5) as (task, _):
        await asyncio.sleep(100)
        assert not task.done()
        assert joiner.awaited().startswith("shards/")
        nodes.net.lives["founder"] = "alive"
        nodes.members.append("founder")
        await asyncio.wait_for(task, 60)
    assert founder is not None


@case
async def test_what_nobody_has_does_not_hold_up_the_shards_after_it(nodes):
    """A member has all shards but the second one that the joiner needs."""
    founder, joiner = await nodes.founder(), nodes.supply("joiner")
    async with training(joiner, "joiner", 4000) as (task, stream):
        ahead = module.shards_ahead(stream, 0)
        lacking, has = ahead[1], founder.local.lends
        pieces = {digest for digest, _ in lacking.chunks()}
        founder.local.lends = lambda digest: digest not in pieces and has(digest)
        await asyncio.sleep(100)
        assert {shard.sha256 for shard in ahead} - shards_fetched(joiner) == {lacking.sha256}
        assert joiner.awaited().startswith(lacking.name)
        founder.local.lends = has
        await asyncio.sleep(100)
        assert shards_fetched(joiner) >= {shard.sha256 for shard in ahead}
        task.cancel()


@case
async def test_a_silent_member_is_given_up_for_another(nodes):
    await nodes.founder()
    nodes.net.peer("silent").receive = lambda *_: None
    nodes.members.insert(0, "silent")
    joiner = nodes.supply("joiner")
    async with training(joiner, "joiner", 5) as (task, _):
        await asyncio.wait_for(task, 300)


@case
async def test_a_member_with_false_bytes_is_given_up_for_another(nodes):
    await nodes.founder()
    liar = nodes.net.peer("liar")
    liar.store.lenders["lies"] = Lent(lambda digest: bytes(4 * 2**20))
    nodes.members.insert(0, "liar")
    joiner = nodes.supply("joiner")
    async with training(joiner, "joiner", 5) as (task, _):
        await asyncio.wait_for(task, 300)


@case
async def test_nobody_to_ask_is_said_at_once(nodes):
    alone = nodes.supply("alone")
    with pytest.raises(RefusedByRun, match="is not on this machine: no folder here has an index"):
        await alone.text()
    assert now() == 0


@case
async def test_members_without_the_index_are_not_waited_for_longer_than_promised(nodes):
    nodes.net.peer("idle")
    nodes.members.append("idle")
    with pytest.raises(RefusedByRun, match="no member sent its index within 120 s"):
        await nodes.supply("joiner").text()
    assert now() < 130


class Shop:
    """A web server's copy, or one that fails."""

    def __init__(self, texts, fails=False):
        self.texts, self.fails, self.asked = texts, fails, []

    def read(self, name, max_bytes):
        return self._content(name)

    def stream(self, file, arrival):
        self.asked.append(file.name)
        return Parcel(self._content(file.name), sorted(arrival.missing))

    def _content(self, name):
        if self.fails:
            raise BadMirror("it is not there; check the URL")
        return (self.texts / name).read_bytes()


class Parcel:
    """The missing pieces of one file."""

    def __init__(self, content, places):
        self.content, self.places = content, places

    def take(self, arrival):
        if not self.places:
            return False
        place = self.places.pop(0)
        assert arrival.put(place, self.content[place * 2**22 : (place + 1) * 2**22])
        return True

    def close(self):
        assert not self.places


@case
async def test_what_no_member_has_comes_from_the_web(nodes):
    bad, good = Shop(nodes.texts, fails=True), Shop(nodes.texts)
    joiner = nodes.supply("joiner", mirrors=(bad, good))
    async with training(joiner, "joiner", 5) as (task, _):
        await asyncio.wait_for(task, 60)
    assert {name for name in good.asked if name.startswith("shards/")} == {
        f"shards/{sha256}.bin" for sha256 in shards_fetched(joiner)
    }


@case
async def test_a_full_disk_ends_training_in_words(nodes):
    await nodes.founder()
    joiner = nodes.supply("joiner")
    await joiner.text()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the cache")

    joiner.local.arrival = full
    async with training(joiner, "joiner", 5) as (task, _):
        with pytest.raises(StepImpossible, match="cannot keep the run's data: the cache: No space"):
            await asyncio.wait_for(task, 60)


@case
async def test_a_node_that_leaves_does_not_wait(nodes):
    await nodes.founder()
    joiner = nodes.supply("joiner")
    await joiner.text()
    nodes.leave("founder")
    leaving = []
    waiting = asyncio.create_task(joiner.ready(0, lambda: bool(leaving)))
    await asyncio.sleep(5)
    assert not waiting.done()
    leaving.append(True)
    await until(waiting.done, within_s=5)


@case
async def test_old_shards_go_when_the_cache_is_full(nodes):
    await nodes.founder()
    largest = max(path.stat().st_size for path in (nodes.texts / "shards").glob("*.bin"))
    room = 8 * largest
    joiner = nodes.supply("joiner", cache_bytes=room)
    async with training(joiner, "joiner", 1500) as (task, _):
        await task
        held = sum(path.stat().st_size for path in (joiner.local.cache / "shards").iterdir())
    assert held <= room
    assert len(joiner.fetcher.fetched) > 12


@case
async def test_an_index_that_comes_slowly_is_waited_for(nodes):
    founder, joiner = await nodes.founder(), nodes.supply("joiner")
    chunks, began_s = nodes.net.peers["joiner"], now()
    fetch, chunks.heard_s = chunks.fetch, lambda peer: now()

    async def slow(*given, **options):
        await asyncio.sleep(300)  # something comes all the time
        return await fetch(*given, **options)

    chunks.fetch = slow
    assert (await joiner.text()).index == (await founder.text()).index
    assert now() - began_s > 300
