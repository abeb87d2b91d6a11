"""The lives of simulated peers: each peer, known by its number, is in one life after another.

Lives have numbers too, among those of all peers of a run: the incarnations of their peers. A killed
peer says no goodbye, and its next life knows nothing of the one before. Peers find each other in
the directory, if there is one.
"""

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from farflock.node.assembly.peer_world import Files, PeerWorld, peer_over
from farflock.node.run.terms import RunPlan
from farflock.node.state.paths import RunFolder
from farflock.swarm.identity import Identity
from farflock.swarm.peer.peer import STORE_BYTES, Peer, RunTerms
from farflock.swarm.record import Record, seal, unseal
from farflock.swarm.sim.directory import DirectoryFaults, MemoryTable
from farflock.swarm.sim.network import SimLinks, SimNetwork
from farflock.swarm.tasks import cancel

JOIN_TIMEOUT_S = 120.0

N = TypeVar("N")


@dataclass(slots=True)
class SimPeers:
    """Makes the peers of one simulated run, in each of their lives. They share a directory with
    these `faults`; None: there is no directory."""

    terms: RunTerms
    network: SimNetwork
    identities: list[Identity]
    faults: DirectoryFaults | None = None
    births: int = 0
    store_bytes: int = STORE_BYTES
    table: MemoryTable | None = field(init=False, default=None)  # of the directory
    lines: list[SimLinks] = field(init=False, default_factory=list)  # of all lives
    here: dict[int, Peer] = field(init=False, default_factory=dict)  # in their newest lives

    def __post_init__(self) -> None:
        if self.faults is not None:
            now, terms = asyncio.get_running_loop().time, self.terms
            self.table = MemoryTable(terms.run, terms.seed, now, self.faults)

    def born(self, number: int, record: Callable[[int], bytes] | None = None) -> Peer:
        """Return the peer of a new life. `record(birth)` seals its record as it is then; None: it
        is always the same one, of a replica."""
        me, line = self.identities[number], self.network.links(self.identities[number].peer)
        world = self.world(number, line, record or partial(self.record, number))
        self.here[number] = peer_over(world, me, self.terms)
        return self.here[number]

    def world(
        self,
        number: int,
        line: SimLinks,
        record: Callable[[int], bytes],
        folder: RunFolder | None = None,
    ) -> PeerWorld:
        """Return the surroundings of a new life with these links, and with this folder if it has
        one; `record(birth)` seals its record as it is then."""
        self.births += 1
        self.lines.append(line)
        line.record = partial(record, self.births)
        me = self.identities[number].peer
        directory = self.table.directory(me) if self.table is not None else None
        return PeerWorld(line, directory, files=Files(folder, self.store_bytes))

    def record(self, number: int, birth: int, sequence: int = 0, role: str = "replica") -> bytes:
        """Return a peer's sealed record; without a `sequence`, the only one of this life."""
        me = self.identities[number]
        content = Record(self.terms.run, me.peer, birth, sequence or birth, bytes(32), role=role)
        return seal(me, content)

    async def introduced(self, number: int, every_s: float = 1.0) -> list[bytes]:
        """Return records of other peers, once the directory shows any to this one; raise
        `TimeoutError` if it never does."""
        assert self.table is not None, "there is no directory"
        me, others = self.identities[number].peer, list[bytes]()
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            while not others:
                await asyncio.sleep(every_s)
                shown = self.table.seen("records", me)
                others = [blob for blob in shown if unseal(blob, self.terms.run).peer != me]
        return others

    @property
    def settled(self) -> bool:
        """True if all peers are members."""
        members = [peer.membership.is_member for peer in self.here.values()]
        return len(members) == len(self.identities) and all(members)


@dataclass(slots=True)
class Lives(Generic[N]):
    """The lives of all peers of one simulated run.

    `live(number)` is one life, or one after another; each puts its node among the `nodes`. While
    all peers are members, churn kills one of the `mortal` every `churn_s` in the mean (None:
    never), which stays `away_s` at least and at most. More kills could take a majority at once."""

    peers: SimPeers
    live: Callable[[int], Coroutine[Any, Any, None]]
    chance: random.Random
    churn_s: float | None
    away_s: tuple[float, float]
    mortal: Sequence[int]
    nodes: dict[int, N] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    kills: int = 0

    @contextlib.asynccontextmanager
    async def running(self, apart_s: Callable[[], float]) -> AsyncIterator[None]:
        """Begin the first lives, `apart_s()` after one another; end all lives with the block."""
        for number in range(len(self.peers.identities)):
            self.tasks[number] = asyncio.create_task(self.live(number))
            await asyncio.sleep(apart_s())
        churn = asyncio.create_task(self._churn())
        try:
            yield
        finally:
            await cancel(churn, *self.tasks.values())

    async def watch(self, timeout_s: float) -> bool:
        """Wait until a task ends, or for `timeout_s`; raise the error of any that failed. Return
        whether there was any to wait for."""
        alive = [task for task in self.tasks.values() if not task.done()]
        if alive:
            await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
        for task in self.tasks.values():
            if task.done() and not task.cancelled():
                task.result()
        return bool(alive)

    async def _churn(self) -> None:
        while self.churn_s is not None:
            await asyncio.sleep(self.chance.expovariate(1 / self.churn_s))
            if self.mortal and self.peers.settled:
                self.kill(self.chance.choice(self.mortal), self.chance.uniform(*self.away_s))

    def kill(self, number: int, away_s: float | None) -> None:
        """End a life at once; the next one begins after `away_s`. None: there is none."""
        self.kills += 1
        self.peers.network.kill(self.peers.identities[number].peer)
        self.peers.here.pop(number, None)
        self.nodes.pop(number, None)
        self.tasks[number].cancel()
        self.tasks[number] = asyncio.create_task(self._return(number, self.tasks[number], away_s))

    async def _return(self, number: int, before: asyncio.Task[None], away_s: float | None) -> None:
        await asyncio.gather(before, return_exceptions=True)
        if away_s is not None:
            await asyncio.sleep(away_s)
            await self.live(number)


def identity_of(plan: RunPlan, number: int) -> Identity:
    """Return the identity of a simulated peer."""
    return Identity.from_seed(
        hashlib.sha256(f"simulated peer {plan.run_seed}/{number}".encode()).digest()
    )
