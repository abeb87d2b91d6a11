"""`SwarmOptimizer`s without threads: the loop turns, in virtual time, while their program waits."""

import asyncio

from farflock.node.library.background import stopped
from farflock.node.library.local_swarm import QUICK, LocalPeers
from farflock.node.library.swarm_optimizer import SwarmOptimizer
from farflock.swarm.compute import inline
from farflock.swarm.sim.virtual_time import VirtualLoop


class VirtualContext:
    """What `BackgroundContext` is, in the program's own thread."""

    def __init__(self, context):
        self._loop, self._leave = VirtualLoop(0.0), asyncio.Event()
        self._entered = self._loop.create_future()
        self._life = self._loop.create_task(self._live(context))
        self._turn(asyncio.wait((self._entered, self._life), return_when="FIRST_COMPLETED"))
        if self._life.done():
            self._loop.close()
            self._life.result()

    @property
    def value(self):
        return self._entered.result()

    @property
    def ended(self):
        return self._life.done()

    def call(self, work, *, through=False):
        if self.ended:
            raise stopped(None)
        return self._turn(work())

    def end(self):
        if not self.ended:
            self._leave.set()
            self._turn(self._life)
            self._loop.close()

    async def _live(self, context):
        async with context() as value:
            self._entered.set_result(value)
            await self._leave.wait()

    def _turn(self, work):
        return self._loop.run_until_complete(work)


class LoneDoor:
    """The entry point of a peer without others, over links in memory."""

    def enter(self, join_request):
        peers = LocalPeers(1, 0, QUICK, inline)
        life = VirtualContext(lambda: peers.inside(0, join_request))
        return life, life.end


def alone(model, method="diloco", **options):
    """Return the optimizer of a peer alone."""
    return SwarmOptimizer(model, method, LoneDoor(), **options)
