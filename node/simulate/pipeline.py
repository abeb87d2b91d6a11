"""A pipeline on a simulated network: real nodes, real passes, virtual time, one seed.

The caller gives the roles. Churn kills peers at seeded moments, and each comes back a while later
in another life that serves the same stage. A life that the others have left behind ends, and
another begins.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from farflock.node.data.samples import Text
from farflock.node.model.data import Start
from farflock.node.model.device import Device
from farflock.node.model.evaluation import HeldOut
from farflock.node.model.weights_folder import WeightsFolder
from farflock.node.pipeline.lifecycle.assembly import NodeServices
from farflock.node.pipeline.lifecycle.rebalancer import LifeOver
from farflock.node.pipeline.lifecycle.reservations import choose_stage
from farflock.node.pipeline.node import PipelineNode, evaluate
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.simulate.lives import JOIN_TIMEOUT_S, Lives, SimPeers, identity_of
from farflock.swarm.compute import inline
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.peer.snapshots import SnapshotUnavailable
from farflock.swarm.roles import EVERY, NOTHING, role_of
from farflock.swarm.sim.directory import DirectoryFaults
from farflock.swarm.sim.network import LinkModel, SimNetwork

LINGER_S = 10.0
POLL_S = 0.5  # of the directory, by a newcomer


@dataclass(frozen=True, slots=True)
class PeerRole:
    """A peer's role: the stage it serves (`NOTHING` for none, `EVERY` for a full replica, None for
    the one that the members choose), whether it trains, its seconds for a forward pass through one
    stage, the codecs that its release knows (None: all that the run names), and the device of its
    stages."""

    stage: int | None = NOTHING
    trains: bool = False
    forward_s: float = 0.05
    codec: str | None = None
    device: Device | None = None  # None: the CPU


@dataclass(frozen=True, slots=True)
class PipelineWorld:
    """The simulated surroundings. The first peer starts the run; the others come `apart_s` seconds
    after one another. `churn_s` is the mean time
    between kills of stage servers and full replicas; a killed peer stays away for `away_s`."""

    parts: tuple[PeerRole, ...]
    total_tokens: int
    link: LinkModel = field(default_factory=LinkModel)
    churn_s: float | None = None
    away_s: tuple[float, float] = (5.0, 20.0)
    apart_s: float = 0.2
    view_s: float = 3.0
    branch_after_s: float = 600.0
    limit_s: float = 3600.0  # in virtual time; a longer run has failed


@dataclass(slots=True)
class EventLog:
    """The reported events, as (time in s, peer number, kind, fields), and totals of the run."""

    events: list[tuple[float, int, str, dict[str, object]]] = field(default_factory=list)
    kills: int = 0
    virtual_s: float = 0.0
    sent_bytes: int = 0

    def fields(self, kind: str) -> list[dict[str, object]]:
        """Return the fields of all events of a kind."""
        return [fields for _, _, what, fields in self.events if what == kind]


class PipelineSimulation:
    """All nodes of one simulated run. `made` is called with each life's number and node before it
    begins: a hook for tests. Only the founder has the `weights` that the run starts from.
    `evaluations` are the rounds from one to the next, and the text for them; None: there are none.
    """

    def __init__(
        self,
        plan: RunPlan,
        pipeline: PipelinePlan,
        world: PipelineWorld,
        tokens: Text,
        made: Callable[[int, PipelineNode], None] = lambda number, node: None,
        weights: WeightsFolder | None = None,
        evaluations: tuple[int, HeldOut] | None = None,
    ) -> None:
        self._evaluations = evaluations
        self._plan, self._pipeline, self._world = plan, pipeline, world
        self._tokens, self._made, self._weights = tokens, made, weights
        self.random = random.Random(f"{plan.run_seed}/pipeline")
        self.network = SimNetwork(plan.run_seed, world.link)
        terms = RunTerms(str(plan.run_seed), plan.run_seed, world.view_s, world.branch_after_s)
        identities = [identity_of(plan, number) for number in range(len(world.parts))]
        self.peers = SimPeers(terms, self.network, identities, DirectoryFaults())
        mortal = [n for n, part in enumerate(world.parts) if not part.trains or part.stage == EVERY]
        self.lives: Lives[PipelineNode] = Lives(
            self.peers, self._live, self.random, world.churn_s, world.away_s, mortal
        )
        self.nodes = self.lives.nodes
        # a server may move, and a newcomer whose stage is left open serves none at first
        self._stages = [NOTHING if part.stage is None else part.stage for part in world.parts]
        self._open = {number for number, part in enumerate(world.parts) if part.stage is None}
        self.tale = EventLog()
        self._starts: dict[int, Start] = {}  # of each peer's next life
        self.done: set[int] = set()

    async def run(self) -> EventLog:
        """Run all peers from start to end; raise `TimeoutError` beyond the world's limit."""
        async with asyncio.timeout(self._world.limit_s):
            async with self.lives.running(lambda: self._world.apart_s):
                await self._until_done()
        self.tale.kills = self.lives.kills
        self.tale.virtual_s = asyncio.get_running_loop().time()
        self.tale.sent_bytes = sum(
            self.network.line(node.peer.me).sent_bytes for node in self.nodes.values()
        )
        return self.tale

    def end(self) -> None:
        """Stop waiting for any peer, so that the run ends soon."""
        self.done |= set(range(len(self._world.parts)))

    async def _until_done(self) -> None:
        """Wait until all trainers are done: until then servers are needed."""
        trainers = {number for number, part in enumerate(self._world.parts) if part.trains}
        while not trainers <= self.done:
            there = await self.lives.watch(1.0)
            assert there, "all lives have ended, but not all trainers are done"
        await asyncio.sleep(LINGER_S)

    async def _live(self, number: int) -> None:
        """Run one life of a peer after another, until one ends without being left behind."""
        while True:
            try:
                await self._one_life(number)
                return
            except (LifeOver, SnapshotUnavailable) as reason:
                self.tale.events.append((_now(), number, "over", {"reason": str(reason)}))
                if isinstance(reason, LifeOver) and reason.stage is not None:
                    self._stages[number] = reason.stage
                self.network.kill(self.peers.identities[number].peer)
                await asyncio.sleep(1.0)

    async def _one_life(self, number: int) -> None:
        peer = self._peer(number)
        async with peer.running():
            part = self._world.parts[number]
            tokens = self._tokens if part.trains else None
            pipeline = replace(self._pipeline, codec=part.codec or self._pipeline.codec)
            if number in self._open:
                await peer.meet(await self.peers.introduced(number, POLL_S), JOIN_TIMEOUT_S)
                self._stages[number] = await choose_stage(peer, len(pipeline.stages))
                self._open.discard(number)  # its later lives serve this stage, or move
                self.tale.events.append(
                    (_now(), number, "reserved", {"stage": self._stages[number]})
                )
            means, start = self._means(number), self._starts.get(number, Start())
            stage = self._stages[number]
            node = PipelineNode(self._plan, pipeline, peer, means, stage, tokens, start=start)
            self.nodes[number] = node
            if node.trainer is not None:
                node.trainer.source.counted = partial(self._counted, number, node)
            if self._evaluations is not None:
                every, held_out = self._evaluations
                evaluate(node, every, lambda: held_out)
            self._made(number, node)
            if peer.context.incarnation == 1:
                node.found()
            else:
                await node.join(await self.peers.introduced(number, POLL_S), JOIN_TIMEOUT_S)
            await node.run(self._world.total_tokens)
            self.done.add(number)
            await asyncio.sleep(self._world.limit_s)

    def _counted(self, number: int, node: PipelineNode, batch: int) -> None:
        self._starts[number] = Start(node.batches.cursor(batch), batch)

    def _means(self, number: int) -> NodeServices:
        forward_s, turn = self._world.parts[number].forward_s, asyncio.Lock()

        async def run_pass(work: Callable[[], Any], cost: float) -> Any:  # noqa: ANN401
            async with turn:  # a machine computes one thing at a time, whatever it serves
                done = work()
                await asyncio.sleep(forward_s * cost)
                return done

        def report(kind: str, fields: dict[str, object]) -> None:
            self.tale.events.append((_now(), number, kind, fields))

        device = self._world.parts[number].device or Device()
        weights = None if number else self._weights
        return NodeServices(inline, run_pass, inline, report, device=device, weights=weights)

    def _peer(self, number: int) -> Peer:
        return self.peers.born(number, partial(self._record, number))

    def _record(self, number: int, birth: int) -> bytes:
        sequence = 2 * birth + (number not in self._open)
        return self.peers.record(number, birth, sequence, role_of(self._stages[number]))

    @property
    def settled(self) -> bool:
        """True if all peers are members."""
        return self.peers.settled

    def kill(self, number: int, away_s: float | None) -> None:
        """End a life without a goodbye; the next one begins after `away_s`. If `away_s` is None,
        there is no next one, and the run does not wait for this peer."""
        if away_s is None:
            self.done.add(number)
        self.lives.kill(number, away_s)


def parts(
    stages: int, servers: int, trainers: int, forward_s: float = 0.05, replicas: int = 0
) -> tuple[PeerRole, ...]:
    """Return `servers` servers per stage, then pure trainers, then full replicas."""
    serving = [
        PeerRole(stage, forward_s=forward_s) for _ in range(servers) for stage in range(stages)
    ]
    whole = [PeerRole(EVERY, trains=True, forward_s=forward_s)] * replicas
    return (*serving, *([PeerRole(trains=True)] * trainers), *whole)


def _now() -> float:
    return asyncio.get_running_loop().time()
