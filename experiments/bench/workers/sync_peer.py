"""A worker of the sync benchmark: the product's own exchange client, peer and links.

The yardsticks are the same bytes over plain TCP, and in gloo's ring.
`python -m farflock.experiments.bench.workers.sync_peer SETTINGS`, started by fleet.py.
"""

import asyncio
import hashlib
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from torch import Tensor

from farflock.experiments.bench.workers.fleet import Fields, Owner
from farflock.experiments.bench.workers.gloo_ring import Ring
from farflock.experiments.bench.workers.member import SEED, Place, meet, member
from farflock.node.train.driver import Claim
from farflock.node.train.exchange_client import ExchangeClient
from farflock.optimizers.method import All, Exchange, ExchangeKey, Result
from farflock.swarm.compute import Worker
from farflock.swarm.peer.peer import Peer

STREAM = "sync"
TENSOR_VALUES = 1_000_000
DEADLINE_S = 60.0
PIECE_BYTES = 256 * 1024


class Settings(Place, frozen=True):
    """The owner's settings: the number of parameters and the codecs."""

    parameters: int
    codec: str
    return_codec: str


def model(settings: Settings) -> dict[str, Tensor]:
    """Return this worker's contribution: tensors of a million values, the last one smaller."""
    chance = torch.Generator().manual_seed(settings.number)
    starts = range(0, settings.parameters, TENSOR_VALUES)
    counts = [min(TENSOR_VALUES, settings.parameters - start) for start in starts]
    return {
        f"tensor.{i}": 0.01 * torch.randn(count, generator=chance) for i, count in enumerate(counts)
    }


def exchange_of(settings: Settings, number: int, tensors: dict[str, Tensor]) -> Exchange:
    """Return a round's request; its bytes differ from every other round's, so all are fetched."""
    fresh = {name: tensor * (1 + number / 128) for name, tensor in tensors.items()}
    key = ExchangeKey(STREAM, number)
    return Exchange(
        key,
        "mean",
        All(),
        fresh,
        codec=settings.codec,
        return_codec=settings.return_codec,
        deadline_s=DEADLINE_S,
    )


def fingerprint(result: Result) -> str:
    """Return a hash of the mean, which must be equal at all workers."""
    assert result.mean is not None, f"the exchange has status {result.status!r} and no mean"
    whole = hashlib.sha256()
    for name in sorted(result.mean):
        whole.update(result.mean[name].numpy().tobytes())
    return whole.hexdigest()


@dataclass(slots=True)
class Sync:
    """The worker's rounds, which run one after another on command."""

    owner: Owner
    settings: Settings
    client: ExchangeClient
    codecs: Worker
    tensors: dict[str, Tensor]
    number: int

    async def round(self) -> None:
        """Encode, exchange and decode, from the barrier to the decoded mean."""
        exchange = exchange_of(self.settings, self.number, self.tensors)
        await self.owner.barrier()
        begun_s = time.process_time()
        offer = await self.codecs(partial(self.client.encode, exchange, Claim(tokens=1)))
        outcome = await self.client.exchange(offer)
        result = await self.codecs(
            partial(self.client.decode, exchange.key, outcome, offer.payloads)
        )
        done_s = asyncio.get_running_loop().time()
        self.owner.say("done", done_s=done_s, cpu_s=time.process_time() - begun_s)
        await self.owner.command(
            "check"
        )  # hashing now would slow the others, which may not be done
        self.owner.say(
            "checked",
            status=result.status,
            members=len(result.participants),
            hash=fingerprint(result),
        )
        self.number += 1


class Plain:
    """The yardstick: the same bytes between the same hosts over plain TCP alone."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0), backlog=64)
        self._server.setblocking(False)
        self.address = self._server.getsockname()[:2]
        self._out: list[socket.socket] = []
        self._in: list[socket.socket] = []

    async def connect(self, addresses: list[tuple[str, int]]) -> None:
        """Connect to each of the others, and accept a connection from each."""
        loop = asyncio.get_running_loop()

        async def dial(address: tuple[str, int]) -> socket.socket:
            plain = socket.socket()
            plain.setblocking(False)
            await loop.sock_connect(plain, address)
            return plain

        async def accept() -> list[socket.socket]:
            return [(await loop.sock_accept(self._server))[0] for _ in addresses]

        self._in, self._out = await asyncio.gather(accept(), asyncio.gather(*map(dial, addresses)))

    async def swap(self, size_bytes: int) -> None:
        """Send this many bytes to each of the others, and receive as many from each."""
        loop = asyncio.get_running_loop()
        data = memoryview(bytearray(size_bytes))

        async def send(plain: socket.socket) -> None:
            for at in range(0, size_bytes, PIECE_BYTES):
                await loop.sock_sendall(plain, data[at : at + PIECE_BYTES])

        async def receive(plain: socket.socket) -> None:
            buffer, left = memoryview(bytearray(PIECE_BYTES)), size_bytes
            while left:
                got = await loop.sock_recv_into(plain, buffer[: min(left, PIECE_BYTES)])
                assert got, "the other worker closed the connection"
                left -= got

        await asyncio.gather(*map(send, self._out), *map(receive, self._in))


async def timed(owner: Owner, work: Callable[[int], Awaitable[None]], size_bytes: int) -> None:
    """Do a yardstick's work once, starting at the barrier."""
    await owner.barrier()
    begun_s = time.process_time()
    await work(size_bytes)
    done_s = asyncio.get_running_loop().time()
    owner.say("done", done_s=done_s, cpu_s=time.process_time() - begun_s)


async def serve(owner: Owner, settings: Settings, peer: Peer, codecs: Worker) -> None:
    """Join the run, then run one round for each command."""
    view = await meet(owner, peer, settings, peer.found, peer.join)
    client = ExchangeClient(peer, SEED)
    tensors = model(settings)
    client.open(exchange_of(settings, view.first_round, tensors), view.first_round - 1)
    sync = Sync(owner, settings, client, codecs, tensors, view.first_round)
    plain, ring = Plain(settings.host), Ring(settings)
    owner.say("ready", plain=plain.address, ring=(settings.host, ring.port))
    peers: Fields = await owner.command("yardsticks")
    others = [
        address for number, address in enumerate(peers["addresses"]) if number != settings.number
    ]
    await plain.connect([(str(host), int(port)) for host, port in others])
    await ring.join(*peers["ring"])
    yardsticks = {"tcp": plain.swap, "gloo": ring.reduce}
    while True:
        command = await owner.next()
        if command["kind"] == "sync":
            await sync.round()
        else:
            await timed(owner, yardsticks[command["kind"]], command["bytes"])


async def main(settings: Settings) -> None:
    """Work until the owner disconnects or kills this process."""
    torch.set_num_threads(1)
    owner, codecs = await Owner.open(), Worker("codec")
    async with member(owner, settings, codecs) as peer:
        await serve(owner, settings, peer, codecs)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Settings)))
