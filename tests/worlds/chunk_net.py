"""The smallest network on which `Chunks` runs, in virtual time."""

import asyncio
import collections
import random

from farflock.swarm.chunk_store import Store, digest_of
from farflock.swarm.chunks import Chunks
from farflock.swarm.sim.virtual_time import run_virtual


def data_of(size, seed=0):
    return random.Random(f"{size}/{seed}").randbytes(size)


class Lent:
    """Chunks in the hands of somebody else; `read` counts how often one was read."""

    def __init__(self, find):
        self.find, self.read = find, 0

    def lends(self, digest):
        return self.find(digest) is not None

    def lend(self, digest):
        self.read += 1
        return self.find(digest)


class Net:
    """The smallest network on which `Chunks` runs: latency, a rate for each sender's bulk frames,
    loss, and lives."""

    def __init__(self, *, latency_s=0.02, rate=12.5e6, loss=0.0, seed=1):
        self.latency_s, self.rate, self.loss = latency_s, rate, loss
        self.chance = random.Random(seed)
        self.peers = {}
        self.lives = {}
        self.standings = {}  # of peers that are no members
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

    def life(self, peer):
        return self.network.lives.get(peer, "alive")

    def standing(self, peer):
        return self.network.standings.get(peer, "member")


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
