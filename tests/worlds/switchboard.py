"""Peers that call each other over the simulated network, and what they keep for a call."""

import asyncio
import collections
import random

import pytest
from worlds.waiting import now

from farflock.swarm.chunk_store import Store
from farflock.swarm.frame import unpack
from farflock.swarm.messages import Answer, Call, Heard, Keep
from farflock.swarm.peer.call_server import LEASE_S, CallReply
from farflock.swarm.peer.calls import CallFailed, Calls
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.sim.network import DEAD_S, LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

RTT_S = 0.1
LINK = LinkModel(up_bytes_per_s=1.25e8, down_bytes_per_s=1.25e8, latency_s=RTT_S / 4, jitter_s=0.0)
STALE_S = 3.0


class Spawner:
    """A starter of tasks; `failures` are the exceptions that ended any of them."""

    def __init__(self, failures=None):
        self.tasks = set()
        self.failures = [] if failures is None else failures

    def spawn(self, work):
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.ended)

    def ended(self, task):
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failures.append(task.exception())


def data_of(size, seed=0):
    return random.Random(f"{size}/{seed}").randbytes(size)


def backwards(*payloads):
    return tuple(payload[::-1] for payload in payloads[::-1])


class Echo:
    """A handler that answers with the request and with all payloads reversed. It may be slow,
    refuse or raise, and records what it was asked."""

    def __init__(self, slow_s=0.0, refuse=None, answer=None):
        self.slow_s, self.refuse, self.answer = slow_s, refuse, answer
        self.judged, self.served, self.ended = (
            collections.Counter(),
            collections.Counter(),
            collections.Counter(),
        )

    def admit(self, caller, request, sizes):
        self.judged[caller, request] += 1
        if request == b"bad":
            raise RuntimeError("cannot judge")
        return self.refuse

    async def serve(self, caller, request, payloads):
        self.served[caller, request] += 1
        await asyncio.sleep(self.slow_s)
        self.ended[caller, request] += 1
        if request == b"worse":
            raise RuntimeError("cannot do")
        return self.answer or CallReply(request, backwards(*payloads))


class Life(Spawner):
    """One incarnation of one peer: its calls on the network, with the loops that feed them. It
    keeps only pinned chunks."""

    def __init__(self, world, name, incarnation, handler, options):
        super().__init__(world.failures)
        self.world, self.name = world, name
        links, self.store = world.network.links(name), Store(0)
        self.context = PeerContext("run", 0, incarnation, links, self.store, self.spawn)
        self.calls = Calls(self.context, **options)
        self.calls.handler = handler
        self.spawn(self.receive(links))
        self.spawn(self.tick())

    async def receive(self, links):
        while True:
            sender, packed = await links.receive()
            frame = unpack(packed)
            if isinstance(frame.message, Call | Answer | Heard | Keep):
                self.calls.receive(sender, frame.incarnation, frame.message)
            else:
                self.context.chunks.receive(sender, frame.message, frame.body)

    async def tick(self):
        while True:
            self.calls.tick()
            await asyncio.sleep(0.1)

    async def ask(
        self, peer, request=b"do", payloads=(), timeout_s=30.0, max_reply_bytes=2**26, leave=False
    ):
        given = {"timeout_s": timeout_s, "max_reply_bytes": max_reply_bytes, "leave": leave}
        return await self.calls.ask(peer, request, payloads, **given)

    async def fails(self, peer, *args, **options):
        with pytest.raises(CallFailed) as failure:
            await self.ask(peer, *args, **options)
        return failure.value.reason

    @property
    def kept(self):
        """Return everything that is kept for any call."""
        calls, serving = self.calls, self.calls.serving
        return (
            calls.asking,
            len(serving),
            serving.held_bytes,
            self.store.size_bytes,
            calls.sending,
        )

    @property
    def left(self):
        """Return how many calls have left payloads: those of this peer elsewhere, and others'
        here."""
        return self.calls.left, len(self.calls.serving.left)

    def kill(self):
        self.world.network.kill(self.name)
        for task in self.tasks:
            task.cancel()


class Switchboard:
    """Peers by name; the first tap that returns something decides what becomes of a message."""

    def __init__(self, seed=1, link=LINK):
        self.network, self.failures, self.lives, self.incarnation = (
            SimNetwork(seed, link),
            [],
            [],
            10,
        )
        self.sent, self.taps = collections.Counter(), []
        self.network.tap = self.tap

    def peer(self, name, handler=None, **options):
        self.incarnation += 1
        life = Life(self, name, self.incarnation, handler, options)
        self.lives.append(life)
        return life

    def pair(self, handler=None, **options):
        return self.peer("caller"), self.peer("server", handler or Echo(), **options)

    def tap(self, now_s, sender, to, packed):
        message = unpack(packed).message
        self.sent[type(message)] += 1
        return None if any(tap(sender, message) for tap in self.taps) else packed

    def lose(self, kind, times=1):
        """Lose the next `times` messages of a kind."""
        left = [times]

        def tap(sender, message):
            left[0] -= isinstance(message, kind) and left[0] >= 0
            return isinstance(message, kind) and left[0] >= 0

        self.taps.append(tap)

    def say(self, sender, to, message):
        """Let a peer say what its calls would not."""
        sender.context.send(to.name, message)

    async def empty(self, within_s=LEASE_S + DEAD_S + 1.0):
        """Wait until no living peer keeps anything for any call, which must be soon."""
        living = [life for life in self.lives if life.tasks]
        begun_s = now()
        while any(any((*life.kept, *life.left)) for life in living):
            assert now() - begun_s < within_s, (
                f"kept: {[(life.name, life.kept, life.left) for life in living]}"
            )
            await asyncio.sleep(0.05)


def in_a_world(main):
    """Run a test `main(world)` in virtual time; nothing may be kept for any call after it."""

    def test():
        async def whole():
            world = Switchboard()
            await main(world)
            await world.empty()
            assert not world.failures

        run_virtual(whole())

    test.__doc__ = main.__doc__
    return test
