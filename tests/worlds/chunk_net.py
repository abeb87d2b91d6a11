"""The smallest network on which `Chunks` runs, in virtual time; over a simulated network, peers
that lend chunks to each other, and peers with nothing but their snapshots."""

import asyncio
import collections
import random

from worlds.switchboard import Spawner

from farflock.swarm.chunk_store import Store, digest_of
from farflock.swarm.chunks import Chunks
from farflock.swarm.frame import unpack
from farflock.swarm.messages import DataHeld, DataQuery, StateOffer, StateQuery
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.data_holders import DataHolders
from farflock.swarm.peer.snapshots import Snapshot, Snapshots
from farflock.swarm.protocol.views import Certified, Chain, Member, View
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

NAME = "state"
MEMBERS = ("a", "b", "c", "d", "e")
GENESIS = View(0, bytes(32), 0, tuple(Member(name, 1) for name in MEMBERS))


def data_of(size, seed=0):
    return random.Random(f"{size}/{seed}").randbytes(size)


class Net:
    """The smallest network on which `Chunks` runs: latency, a rate for each sender's bulk frames,
    loss, and lives."""

    def __init__(self, *, latency_s=0.02, rate=12.5e6, loss=0.0, seed=1):
        self.latency_s, self.rate, self.loss = latency_s, rate, loss
        self.chance = random.Random(seed)
        self.peers = {}
        self.lives = {}
        self.busy_s = collections.Counter()
        self.tasks = set()
        self.sent_bytes = collections.Counter()
        self.tap = lambda sender, to, message, body: (message, body)

    def peer(self, name, *chunks, budget=2**40):
        store = Store(budget)
        for data in chunks:
            store.put(data, "mine")
        self.peers[name] = Chunks(store, Carrier(self, name))
        return self.peers[name]

    def transmit(self, sender, to, message, body):
        if to not in self.peers:
            return False
        tapped = self.tap(sender, to, message, body)
        self.sent_bytes[sender] += len(body)
        if (
            tapped is not None
            and self.chance.random() >= self.loss
            and self.lives.get(sender) != "dead"
        ):
            asyncio.get_running_loop().call_later(
                self.latency_s, self.peers[to].receive, sender, *tapped
            )
        return True

    def spawn(self, work):
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class Carrier:
    """One peer's access to the network."""

    def __init__(self, network, name):
        self.network, self.name, self.spawn = network, name, network.spawn

    def send(self, to, message):
        return self.network.transmit(self.name, to, message, b"")

    async def send_piece(self, to, piece, body, timeout_s):
        busy_s, loop = self.network.busy_s, asyncio.get_running_loop()
        busy_s[self.name] = max(busy_s[self.name], loop.time()) + len(body) / self.network.rate
        await asyncio.sleep(busy_s[self.name] - loop.time())
        return self.network.transmit(self.name, to, piece, bytes(body))

    def queued_bytes(self):
        return 0

    def life(self, peer):
        return self.network.lives.get(peer, "alive")


def fetch(chunks, data, holders, *, pin="pin", timeout_s=30.0):
    return chunks.fetch(digest_of(data), len(data), lambda: holders, pin, timeout_s)


def in_virtual_time(main):
    """Run a test, a coroutine, with a network of its own; afterwards nothing may be left running or
    reserved."""

    def test():
        async def whole():
            net = Net()
            await main(net)
            await asyncio.sleep(60)
            assert not net.tasks
            for chunks in net.peers.values():
                assert chunks.idle

        run_virtual(whole())

    test.__doc__ = main.__doc__
    return test


class MemoryLender:
    """Numbered chunks; some of them are here. `false` maps digests to what is read instead."""

    def __init__(self, chunks, held=None, index=b"index", false=None):
        self.chunks, self.index, self.root = list(chunks), index, digest_of(index)
        self.index_bytes = len(index)
        self.numbers = set(range(len(self.chunks)) if held is None else held)
        self.false = false or {}
        self.reads = 0

    def _here(self):
        return {self.root: self.index} | {
            digest_of(self.chunks[number]): self.chunks[number] for number in self.numbers
        }

    def __contains__(self, digest):
        return digest in self._here()

    def held(self, first):
        bits = bytearray(-(-max(0, len(self.chunks) - first) // 8))
        for number in self.numbers:
            if number >= first:
                bits[(number - first) // 8] |= 1 << (number - first) % 8
        return bytes(bits)

    async def read(self, digest):
        self.reads += 1
        await asyncio.sleep(0.01)
        return self.false.get(digest) or self._here().get(digest)


class LentWorld:
    """Peers with nothing but chunks and questions about data."""

    def __init__(self, link=None):
        self.network = SimNetwork(1, link or LinkModel(1e7, 1e7))
        self.tasks, self.contexts = set(), {}

    def spawn(self, work):
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def peer(self, name, *lenders):
        links = self.network.links(name)
        context = PeerContext("run", 0, 1, links, Store(2**30), self.spawn)
        self.contexts[name] = context
        holders = DataHolders(context)
        context.chunks.lending.lenders |= {lender.root: lender for lender in lenders}

        async def serve():
            while True:
                sender, packed = await links.receive()
                frame = unpack(packed)
                if isinstance(frame.message, DataQuery | DataHeld):
                    holders.receive(sender, frame.incarnation, frame.message)
                else:
                    context.chunks.receive(sender, frame.message, frame.body)

        self.spawn(serve())
        return holders

    async def close(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def snapshot(number=7, flavour=b"true", chunks=3, size=100_000):
    parts = tuple(flavour + random.Random(part).randbytes(size) for part in range(chunks))
    return Snapshot(number, flavour.ljust(32, b"."), 10 * max(number, 0), parts)


class SnapshotPeer:
    """One peer's snapshots on the network, with the loop that feeds them."""

    def __init__(self, world, name, budget_bytes=2**30):
        self.name, self.world = name, world
        links, self.store = world.network.links(name), Store(budget_bytes)
        self.context = PeerContext("run", 0, 1, links, self.store, world.spawn)
        self.context.chain = Chain("run", [Certified(GENESIS)])
        self.snapshots = Snapshots(
            self.context, lambda stage: [peer for peer in world.asked(stage) if peer != name]
        )
        self.built = 0
        world.spawn(self.receive(links))

    async def receive(self, links):
        while True:
            sender, packed = await links.receive()
            frame = unpack(packed)
            if isinstance(frame.message, StateQuery | StateOffer):
                self.snapshots.receive(sender, frame.message)
            else:
                self.context.chunks.receive(sender, frame.message, frame.body)

    def serve(self, what, build_s=0.0, **options):
        async def provide():
            await asyncio.sleep(build_s)
            self.built += 1
            return what

        self.snapshots.serve(NAME, provide, **options)
        return self

    async def fetch(self, timeout_s=30.0, **options):
        return await self.snapshots.fetch(NAME, timeout_s, **options)


class SnapshotWorld(Spawner):
    def __init__(self):
        super().__init__()
        self.network = SimNetwork(1)
        self.members = MEMBERS
        self.asked = lambda stage: self.members  # which members serve a stage
        self.joiner = SnapshotPeer(self, "joiner")

    def peer(self, name):
        return SnapshotPeer(self, name)


def in_a_world(main):
    """Run a test `main(world)` in virtual time."""

    def test():
        async def whole():
            world = SnapshotWorld()
            await main(world)
            assert not world.failures

        run_virtual(whole())

    return test
