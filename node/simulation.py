"""A whole run on a simulated network: the product's own nodes, real steps, virtual time, one seed.

The same seed gives the same bytes: the same rounds, losses and states. Churn kills peers and lets others join, both at
seeded moments; every kill is followed by a new life of the same peer a while later.
"""

import asyncio
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from farflock.node.participant import Participant, Plan, participant
from farflock.node.tokenizer import Tokens
from farflock.optimizers.state import state_hash
from farflock.swarm.identity import Identity
from farflock.swarm.peer import Peer, RunTerms
from farflock.swarm.record import Record, seal
from farflock.swarm.sim import LinkModel, SimNetwork
from farflock.swarm.snapshots import SnapshotUnavailable
from farflock.swarm.virtual import run_virtual

JOIN_TIMEOUT_S = 120.0
LINGER_S = 30.0  # after the last step: peers answer those who are still on their way
AWAY_S = (5.0, 20.0)


@dataclass(frozen=True, slots=True)
class World:
    """The simulated surroundings. `step_s` is what one training step takes; `churn_s` the mean time between kills."""

    peers: int
    total_tokens: int
    link: LinkModel = field(default_factory=LinkModel)
    step_s: float = 0.5
    spread: float = 0.1  # steps of peer i take up to this share longer, drawn once
    churn_s: float | None = None
    view_s: float = 5.0


@dataclass(slots=True)
class Outcome:
    """What `farflock sim` prints."""

    state_hash: str
    rounds: int
    losses: list[float]  # mean training loss over peers, by tenth of the run
    bytes: int
    bytes_per_peer: float
    virtual_s: float
    kills: int
    steps: int
    held_out: list[torch.Tensor] = field(default_factory=list, repr=False)
    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict, repr=False)


class Simulation:
    """All nodes of one simulated run."""

    def __init__(self, plan: Plan, world: World, tokens: Tokens, progress: Callable[[float], None]) -> None:
        self._plan, self._world, self._tokens, self._progress = plan, world, tokens, progress
        self._random = random.Random(f"{plan.run_seed}/simulation")
        self.network = SimNetwork(plan.run_seed, world.link)
        self._identities = [Identity.from_seed(_seed(plan.run_seed, i)) for i in range(world.peers)]
        self._slowness = [1 + self._random.random() * world.spread for _ in self._identities]
        self._lives: dict[int, asyncio.Task[None]] = {}
        self._nodes: dict[int, Participant] = {}
        self._births = 0
        self._losses: list[tuple[int, float]] = []
        self._rounds: set[tuple[str, int]] = set()
        self._sent_bytes = 0
        self._done = 0
        self.kills = 0

    async def run(self) -> Outcome:
        """Everybody from start to end."""
        for index in range(self._world.peers):
            self._lives[index] = asyncio.create_task(self._live(index))
            await asyncio.sleep(self._random.random())
        churn = asyncio.create_task(self._churn()) if self._world.churn_s else None
        try:
            await self._until_done()
        finally:
            if churn is not None:
                churn.cancel()
            for task in self._lives.values():
                task.cancel()
            await asyncio.gather(*self._lives.values(), return_exceptions=True)
        return self._outcome()

    async def _until_done(self) -> None:
        while alive := [task for task in self._lives.values() if not task.done()]:
            await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED, timeout=5.0)
            for task in self._lives.values():
                if task.done() and not task.cancelled():
                    task.result()
            founder = self._nodes.get(0)
            if founder is not None:
                self._progress(founder.seat.progress(0).tokens / self._world.total_tokens)

    async def _live(self, index: int) -> None:
        """One life of one peer: found or join, train, linger."""
        self._births += 1
        peer = self._peer(index, self._births)
        async with peer.running():
            node = self._assemble(index, peer)
            self._nodes[index] = node
            if self._births == 1:
                node.found()
            else:
                await node.join([self._record(other, 0) for other in self._contacts(index)], JOIN_TIMEOUT_S)
            await node.loop.run(self._world.total_tokens)
            self._done += 1
            await asyncio.sleep(LINGER_S)

    def _assemble(self, index: int, peer: Peer) -> Participant:
        step_s = self._world.step_s * self._slowness[index]

        async def compute(work: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the work returns
            return work()

        async def train(work: Callable[[], float]) -> float:
            loss = work()
            await asyncio.sleep(step_s)
            return loss

        def report(kind: str, fields: dict[str, Any]) -> None:
            if kind == "step":
                self._losses.append((node.seat.progress(0).tokens, fields["loss"]))
            elif kind == "round":
                self._rounds.add((fields["stream"], fields["round"]))

        node = participant(self._plan, peer, self._tokens, compute=compute, train=train, report=report)
        return node

    def _peer(self, index: int, incarnation: int) -> Peer:
        identity = self._identities[index]
        terms = RunTerms(str(self._plan.run_seed), self._plan.run_seed, self._world.view_s)
        record = self._record(index, incarnation)
        links = self.network.links(identity.peer)
        return Peer(terms, identity, links, None, incarnation=incarnation, record=lambda: record)

    def _record(self, index: int, incarnation: int) -> bytes:
        identity = self._identities[index]
        run = str(self._plan.run_seed)
        return seal(identity, Record(run, identity.peer, incarnation, incarnation, curve=bytes(32)))

    def _contacts(self, index: int) -> list[int]:
        others = [other for other in self._nodes if other != index]
        return others[:3]

    async def _churn(self) -> None:
        """Kill a seeded peer now and then; it comes back as a new life."""
        assert self._world.churn_s is not None
        while True:
            await asyncio.sleep(self._random.expovariate(1 / self._world.churn_s))
            if self._done or not self._complete():
                continue
            index = self._random.randrange(self._world.peers)
            self.kills += 1
            peer = self._identities[index].peer
            self._sent_bytes += self.network.line(peer).sent_bytes
            self.network.kill(peer)
            del self._nodes[index]
            self._lives[index].cancel()
            await asyncio.gather(self._lives[index], return_exceptions=True)
            self._lives[index] = asyncio.create_task(self._return(index, self._random.uniform(*AWAY_S)))

    def _complete(self) -> bool:
        """Whether everybody is a member: a swarm that loses its majority at once is dead, and that is another experiment."""
        members = [node.peer.membership.is_member for node in self._nodes.values()]
        return len(members) == self._world.peers and all(members)

    async def _return(self, index: int, away_s: float) -> None:
        """Come back as a new life; who finds nobody left, because the run has ended meanwhile, stays away."""
        await asyncio.sleep(away_s)
        try:
            await self._live(index)
        except (TimeoutError, SnapshotUnavailable):
            if not self._done:
                raise

    def _outcome(self) -> Outcome:
        states = {self._identities[i].peer: node.loop.driver for i, node in sorted(self._nodes.items())}
        snapshots = {peer: driver.method.snapshot(driver.replica) for peer, driver in states.items()}
        digest = hashlib.sha256()
        for peer in sorted(snapshots):
            digest.update(peer.encode() + state_hash(snapshots[peer]))
        lines = [self.network.line(self._identities[index].peer) for index in self._nodes]
        total = self._sent_bytes + sum(line.sent_bytes for line in lines)
        return Outcome(
            state_hash=digest.hexdigest(),
            rounds=len(self._rounds),
            losses=_by_tenth(self._losses, self._world.total_tokens),
            bytes=total,
            bytes_per_peer=total / self._world.peers,
            virtual_s=asyncio.get_running_loop().time(),
            kills=self.kills,
            steps=len(self._losses),
            states=snapshots,
        )


def simulate(
    plan: Plan, world: World, tokens: Tokens, progress: Callable[[float], None] = lambda share: None
) -> Outcome:
    """Run a simulation to its end."""

    async def main() -> Outcome:
        return await Simulation(plan, world, tokens, progress).run()

    return run_virtual(main())


def _seed(run_seed: int, index: int) -> bytes:
    return hashlib.sha256(f"simulated peer {run_seed}/{index}".encode()).digest()


def _by_tenth(losses: list[tuple[int, float]], total: int) -> list[float]:
    tenths: list[list[float]] = [[] for _ in range(10)]
    for tokens, loss in losses:
        tenths[min(int(10 * tokens / total), 9)].append(loss)
    return [round(sum(values) / len(values), 4) for values in tenths if values]
