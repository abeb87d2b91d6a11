"""Peers, hostile clients and processes for the tests of real links."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
from pathlib import Path

import zmq
from worlds import waiting
from worlds.waiting import LIMIT_S, in_time
from zmq.utils import z85

from farflock.swarm.identity import Identity
from farflock.swarm.record import Record, seal, unseal
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks
from farflock.swarm.zmq.socket import zmq_endpoint

ROOT = Path(__file__).resolve().parents[2]
FRAME = bytes(range(256)) * 1024  # 256 KiB

until = functools.partial(waiting.until, every_s=0.005)


def identity(seed: int) -> Identity:
    return Identity.from_seed(bytes([seed]) * 32)


def run(main) -> None:
    """Run `main(fleet)` and close whatever it opened."""

    async def whole():
        async with Fleet() as fleet:
            await in_time(main(fleet), "the end of the test", limit_s=2 * LIMIT_S)

    asyncio.run(whole())


class Fleet(contextlib.AsyncExitStack):
    """Links, hostile clients and processes that end with the test."""

    async def peer(self, seed: int, **options) -> ZmqLinks:
        links = await ZmqLinks.open(
            identity(seed), options.pop("run", "run"), LinkOptions(incarnation=seed, **options)
        )
        self.push_async_callback(links.close)
        return links

    async def pair(self, **options) -> tuple[ZmqLinks, ZmqLinks]:
        """Return two peers that know each other and are connected."""
        a, b = await self.peer(1), await self.peer(2, **options)
        assert a.learn(b.record())
        assert b.learn(a.record())
        await meet(b, a)
        return a, b

    def stranger(self, target, seed: int = 9, lane: int = 0, **options) -> "Stranger":
        """Return a hostile client of a peer: of anything with a `record()`."""
        stranger = Stranger(target, identity(seed), lane, **options)
        self.callback(stranger.close)
        return stranger

    async def process(self, seed: int, prefix: tuple[str, ...] = (), **options) -> "Process":
        process = await Process.start(seed, options, prefix)
        self.push_async_callback(process.end)
        return process


class Stranger:
    """A hand-made client that holds a CURVE key and sends whatever it likes."""

    def __init__(
        self,
        target,
        owner: Identity,
        lane: int,
        routing_id: bytes | None = None,
        heartbeat_ivl: int = 0,
    ):
        self.owner = owner
        self.key = owner.session_key()
        record = unseal(target.record(), "run")
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.curve_secretkey = z85.encode(self.key.private_bytes_raw())
        self.socket.curve_publickey = z85.encode(self.curve)
        self.socket.curve_serverkey = z85.encode(record.curve)
        self.socket.reconnect_ivl = -1
        self.socket.heartbeat_ivl = heartbeat_ivl
        if routing_id:
            self.socket.routing_id = routing_id
        self.socket.connect(zmq_endpoint(record.endpoints[lane]))

    @property
    def curve(self) -> bytes:
        return self.key.public_key().public_bytes_raw()

    def record(self, sequence: int = 1, curve: bytes | None = None) -> bytes:
        return seal(self.owner, Record("run", self.owner.peer, 1, sequence, curve or self.curve))

    async def say(self, *parts: bytes) -> None:
        self.socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        await asyncio.sleep(0)

    async def introduce(self) -> None:
        await self.say(b"\x01" + self.record())
        await until(lambda: self.socket.poll(0))
        assert self.socket.recv()[:1] == b"\x01"

    def close(self) -> None:
        """Go at once, also if called twice."""
        self.socket.close()
        self.context.term()


CHILD = """
import asyncio, ctypes, json, sys
from farflock.swarm.identity import Identity
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks

async def commands():
    reader = asyncio.StreamReader(limit=2**20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().split()

async def echo(links):
    while True:
        peer, frame = await links.receive()
        if frame.startswith(b"echo"):
            links.send(peer, frame)
        print("got", peer, frame.hex(), flush=True)

async def main():
    options = json.loads(sys.argv[2])
    relays = options.pop("relays", ())
    seed = int(sys.argv[1])
    identity = Identity.from_seed(bytes([seed]) * 32)
    links = await ZmqLinks.open(identity, "run", LinkOptions(incarnation=seed, **options))
    print("record", links.record(relays=relays).hex(), flush=True)
    task = asyncio.create_task(echo(links))
    async for word, *rest in commands():
        if word == "learn":
            links.learn(bytes.fromhex(rest[0]))
        elif word == "send":
            print("sent", links.send(rest[0], bytes.fromhex(rest[1])), flush=True)
        elif word == "road":
            print("road", links.road(rest[0]), links.life(rest[0]), flush=True)
        elif word == "hold":  # the GIL, for so many microseconds
            ctypes.PyDLL(None).usleep(int(rest[0]))
            print("held", flush=True)
        elif word == "relayed":
            print("relayed", links.relayed_bytes(rest[0]), flush=True)
    task.cancel()
    await links.close()

asyncio.run(main())
"""


class Process:
    """A peer in a process of its own, told what to do line by line."""

    def __init__(self, child):
        self.child = child
        self.lines: dict[str, list[list[str]]] = {}

    @classmethod
    async def start(cls, seed: int, options: dict, prefix: tuple[str, ...] = ()) -> "Process":
        child = await asyncio.create_subprocess_exec(
            *prefix,
            *(sys.executable, "-c", CHILD, str(seed), json.dumps(options)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        process = cls(child)
        process.record = bytes.fromhex((await process.answer("record"))[0])
        process.peer = unseal(process.record, "run").peer
        return process

    def tell(self, *words: str) -> None:
        self.child.stdin.write(" ".join(words).encode() + b"\n")

    async def answer(self, word: str) -> list[str]:
        """Return the next line that begins with `word`; keep other lines for later."""
        while not self.lines.get(word):
            line = await in_time(self.child.stdout.readline(), f"{word!r} of {self.child}")
            assert line, "the process ended"
            first, *rest = line.decode().split()
            self.lines.setdefault(first, []).append(rest)
        return self.lines[word].pop(0)

    async def end(self) -> None:
        """Let it close by itself; kill it if it does not."""
        with contextlib.suppress(ProcessLookupError):
            self.child.send_signal(signal.SIGCONT)
        self.child.stdin.close()
        try:
            await asyncio.wait_for(self.child.communicate(), LIMIT_S)
        except TimeoutError:
            self.child.kill()
            await self.child.communicate()


async def meet(a: ZmqLinks, b: ZmqLinks) -> None:
    """Let `a` dial `b`, and wait until both have heard each other."""
    assert a.send(b.me, b"meet")
    assert await got(b) == (a.me, b"meet")
    assert b.send(a.me, b"met")
    assert await got(a) == (b.me, b"met")
    await until(
        lambda: len(b.table.partners[a.me].routes[1]) and len(a.table.partners[b.me].routes[1])
    )


async def got(links: ZmqLinks):
    return await in_time(links.receive(), "a frame", lambda: str(links.counters))


async def noticed(links: ZmqLinks, peer: str) -> float:
    """Wait until a peer that is gone seems so; a slow machine finds it dead before it looks."""
    return await until(lambda: links.life(peer) != "alive", what="the partner's end")


async def silent(links: ZmqLinks, seconds: float = 0.3) -> bool:
    try:
        await asyncio.wait_for(links.receive(), seconds)
    except TimeoutError:
        return True
    return False


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def port_of(links: ZmqLinks) -> int:
    return int(unseal(links.record(), "run").endpoints[0].rpartition("/")[2])
