"""The peers of a disaster: real nodes on the simulated network, each in one life after another."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from farflock.node.assembly.core import Core
from farflock.node.loop import Loop
from farflock.node.simulate.chaos_methods import ChaosCase, CountingTask
from farflock.node.simulate.invariants import STORE_BYTES, InvariantChecker
from farflock.node.simulate.lives import SimPeers
from farflock.node.train.driver import Driver
from farflock.node.train.task import Loss, Train
from farflock.swarm.compute import inline
from farflock.swarm.identity import Identity
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.sim.network import SimNetwork
from farflock.swarm.tasks import cancel

SLICE_S = 0.5  # of a step: a slow or stopped peer resumes this soon after the fault's end
VIEW_S = 3.0
GOODBYE_S = 0.2  # for the goodbye to be sent


@dataclass(slots=True)
class PeerLife:
    """One life of one peer: its task, its peer once that is made, and its loop while it is in
    the run."""

    task: asyncio.Task[None] = field(init=False)
    loop: Loop | None = None
    peer: Peer | None = None


class Population:
    """All peers by number, with their lives."""

    def __init__(
        self,
        seed: int,
        arm: ChaosCase,
        network: SimNetwork,
        watch: InvariantChecker,
        identities: list[Identity],
    ) -> None:
        terms = RunTerms("chaos", seed, VIEW_S)
        self.peers = SimPeers(terms, network, identities, store_bytes=STORE_BYTES)
        self.identities = identities
        self.lives: dict[int, PeerLife] = {}
        self.slow: dict[int, float] = {}  # factor by which a peer computes slower
        self._seed, self._arm, self._watch = seed, arm, watch

    def begin(self, index: int) -> None:
        """Start a peer's next life; the first life of all peers starts the run."""
        life = self.lives[index] = PeerLife()
        life.task = asyncio.create_task(self._live(index, life))

    async def _live(self, index: int, life: PeerLife) -> None:
        peer = life.peer = self._peer(index)
        birth = peer.context.incarnation
        async with peer.running():
            replica = self._arm.replica(index)
            driver = Driver(self._arm.make(), replica)
            core = Core.over(peer, driver, CountingTask(replica), inline, self._trainer(index))
            self._watch.exchange_client(peer, index, birth, driver, core.client)
            core.loop.report = lambda kind, fields: self._watch.reported(
                index, birth, driver, kind, fields, driver.position.rounds
            )
            if birth == 1:
                peer.found()
                core.state_sync.open()
            else:
                await peer.meet(self._contacts(index), 600.0)
                await core.state_sync.adopt(600.0)
                peer.ask_in()
            life.loop = core.loop
            await core.loop.run(10**9)
            peer.leave()
            await asyncio.sleep(GOODBYE_S)

    def _trainer(self, index: int) -> Train:
        async def train(work: Callable[[], Loss]) -> Loss:
            loss = work()
            left_s = self._arm.step_s
            while left_s > 0:
                slice_s = min(left_s, SLICE_S) if index not in self.slow else SLICE_S
                await asyncio.sleep(slice_s)
                left_s -= slice_s / self.slow.get(index, 1.0)
            return loss

        return train

    def _peer(self, index: int) -> Peer:
        return self.peers.born(index)

    def _contacts(self, index: int) -> list[bytes]:
        living = [
            other for other, life in self.lives.items() if other != index and life.loop is not None
        ]
        return [self.peers.record(other, 0) for other in living[:4]]

    async def end(self, index: int) -> None:
        """End a peer's life at once, without a goodbye."""
        life = self.lives[index]
        life.loop = None
        await cancel(life.task)

    async def end_all(self) -> None:
        """End every peer's life."""
        for index in self.lives:
            await self.end(index)
