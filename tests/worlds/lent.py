"""Lenders in memory, and peers that lend to each other over a simulated network."""

import asyncio

from farflock.swarm.chunk_store import Store, digest_of
from farflock.swarm.frame import unpack
from farflock.swarm.messages import DataHeld, DataQuery
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.data_holders import DataHolders
from farflock.swarm.sim.network import LinkModel, SimNetwork


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
