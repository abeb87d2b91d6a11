"""A whole run on a simulated network: real nodes, real steps, virtual time, one seed.

The same seed gives the same bytes: the same rounds, losses and states, if models train on the same
kind of device. Churn kills peers at seeded moments; each killed peer begins a new life a while
later. A long run may be cut into legs: at the end of a leg all peers stop and are saved
(node/simulate/segments.py), and the next leg continues from there on a new simulated network.
"""

import asyncio
import collections
import hashlib
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farflock.node.assembly.checkpoints import SAMPLES
from farflock.node.assembly.node import ReplicaNode, replica_node
from farflock.node.assembly.resume import load_state
from farflock.node.data.samples import Text
from farflock.node.model.data import Start
from farflock.node.model.device import Device
from farflock.node.model.evaluation import LossEstimate, losses, summarise
from farflock.node.model.llama import build
from farflock.node.model.replica import PlainReplica
from farflock.node.model.step_options import StepOptions
from farflock.node.model.weights_folder import WeightsFolder
from farflock.node.run.terms import RunPlan
from farflock.node.simulate.segments import SegmentState, SegmentStore
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.train.ending import drain
from farflock.node.train.task import Loss
from farflock.optimizers.catalog import method
from farflock.optimizers.method import Result, State
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.compute import inline
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.peer.snapshots import SnapshotUnavailable
from farflock.swarm.record import Record, seal, unseal
from farflock.swarm.sim.directory import DirectoryFaults, MemoryDirectory, MemoryTable
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.tasks import cancel

JOIN_TIMEOUT_S = 120.0
LINGER_S = 30.0  # after the last step: peers still answer those that are behind
AWAY_S = (5.0, 20.0)


@dataclass(frozen=True, slots=True)
class World:
    """The simulated surroundings. `step_s` is the time of a local step, `churn_s` the mean time
    between kills."""

    peers: int
    total_tokens: int
    link: LinkModel = field(default_factory=LinkModel)
    step_s: float = 0.5
    spread: float = 0.1  # a peer's steps take up to this share longer, drawn once
    churn_s: float | None = None
    view_s: float = 5.0
    branch_after_s: float = 600.0
    directory: DirectoryFaults = field(default_factory=DirectoryFaults)
    leg_tokens: int | None = None  # tokens per leg; None: one leg


@dataclass(slots=True)
class SimulationResult:
    """The results that `farflock sim` prints."""

    state_hash: str
    rounds: int
    losses: list[float]  # mean training loss over peers, by tenth of the run
    bytes: int
    bytes_per_peer: float
    virtual_s: float
    kills: int
    steps: int
    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict, repr=False)


class Simulation:
    """All nodes of one simulated run, from the start or from `saved`, until `until` tokens."""

    def __init__(
        self,
        plan: RunPlan,
        world: World,
        tokens: Text,
        progress: Callable[[float], None],
        story: SegmentState,
        saved: Mapping[int, Checkpoint],
        until: int,
        device: Device | None = None,
    ) -> None:
        self._device = device or Device()
        self._plan, self._world, self._tokens, self._progress = plan, world, tokens, progress
        self._story, self._saved, self._until = story, saved, until
        # where each peer's next life begins in its samples
        self._starts = {
            index: Start(bytes.fromhex(each.meta[SAMPLES]), each.step * plan.accumulate)
            for index, each in saved.items()
        }
        self.weights: WeightsFolder | None = None  # that the run starts from, if not from its seed
        self._random = random.Random(f"{plan.run_seed}/simulation")
        self.network = SimNetwork(plan.run_seed + 1_000_003 * story.legs, world.link)
        now = asyncio.get_running_loop().time
        self.directory = MemoryTable(str(plan.run_seed), plan.run_seed, now, world.directory)
        self._identities = [_identity(plan, index) for index in range(world.peers)]
        self._slowness = [1 + self._random.random() * world.spread for _ in self._identities]
        self._begun: set[int] = set()
        self._lives: dict[int, asyncio.Task[None]] = {}
        self._nodes: dict[int, ReplicaNode] = {}
        self._done = 0
        # reseeded per leg, but only after the speeds, which all legs share
        self._random.seed(f"{plan.run_seed}/simulation/{story.legs}")

    async def run(self) -> dict[int, ReplicaNode]:
        """Run all peers from start to end; return their final nodes, by number."""
        for index in range(self._world.peers):
            self._lives[index] = asyncio.create_task(self._live(index))
            await asyncio.sleep(self._random.random())
        churn = asyncio.create_task(self._churn()) if self._world.churn_s else None
        try:
            await self._until_done()
        finally:
            if churn is not None:
                churn.cancel()
            await cancel(*self._lives.values())
        self._story.legs += 1
        self._story.sent_bytes += sum(
            self.network.line(node.peer.me).sent_bytes for node in self._nodes.values()
        )
        self._story.virtual_s += asyncio.get_running_loop().time()
        return dict(sorted(self._nodes.items()))

    async def _until_done(self) -> None:
        while alive := [task for task in self._lives.values() if not task.done()]:
            await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED, timeout=5.0)
            for task in self._lives.values():
                if task.done() and not task.cancelled():
                    task.result()
            founder = self._nodes.get(0)
            if founder is not None:
                self._progress(founder.loop.driver.tokens / self._world.total_tokens)

    async def _live(self, index: int) -> None:
        """Run one life of one peer: start or join the run, train, linger."""
        known = index in self._begun
        self._story.births += 1
        self._begun.add(index)
        directory = self.directory.directory(self._identities[index].peer)
        peer = self._peer(index, self._story.births, directory)
        async with peer.running():
            node = self._assemble(index, peer)
            self._nodes[index] = node
            if self._saved and not known:
                await self._resume(index, node, directory)
            elif self._story.births == 1:
                node.found()
            else:
                await node.join(await self._introduced(peer.me, directory), JOIN_TIMEOUT_S)
            await node.loop.run(self._until, drain_s=LINGER_S)
            self._done += 1
            await asyncio.sleep(LINGER_S)
            await drain(node.loop, LINGER_S)

    async def _resume(self, index: int, node: ReplicaNode, directory: MemoryDirectory) -> None:
        """Begin a leg where the previous one ended; no peer trains before all peers are members
        again."""
        if index == 0:
            node.peer.found()
        else:
            await node.peer.join(await self._introduced(node.peer.me, directory), JOIN_TIMEOUT_S)
        load_state(node, self._saved[index])
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            while not self._complete():  # noqa: ASYNC110 - all nodes' condition
                await asyncio.sleep(0.1)

    def _assemble(self, index: int, peer: Peer) -> ReplicaNode:
        step_s = self._world.step_s * self._slowness[index]

        async def train(work: Callable[[], Loss]) -> Loss:
            loss = work()
            await asyncio.sleep(step_s)
            return loss

        def report(kind: str, fields: dict[str, Any]) -> None:
            if kind == "step":
                self._story.losses.append((node.loop.driver.tokens, fields["loss"]))
            elif kind == "round":
                self._story.rounds.add((fields["stream"], fields["round"]))

        start = self._starts.get(index, Start())
        node = replica_node(
            self._plan,
            peer,
            self._tokens,
            compute=inline,
            train=train,
            report=report,
            device=self._device,
            step_options=StepOptions(compile="off"),
            weights=self.weights if self._story.births == 1 else None,
            start=start,
        )
        self._keep_place(index, node, start)
        return node

    def _keep_place(self, index: int, node: ReplicaNode, start: Start) -> None:
        """Let a peer's next life, whose steps are numbered from 0, begin at the first sample that
        no round has counted."""
        batches, accumulate = node.training_task.batches, self._plan.accumulate
        self._starts[index] = Start(batches.cursor(start.batch))

        async def counted(result: Result, step: int) -> None:
            if node.peer.me in result.participants:
                self._starts[index] = Start(batches.cursor(step * accumulate))

        node.loop.counted = counted

    def _peer(self, index: int, incarnation: int, directory: MemoryDirectory) -> Peer:
        identity = self._identities[index]
        world = self._world
        terms = RunTerms(
            str(self._plan.run_seed), self._plan.run_seed, world.view_s, world.branch_after_s
        )
        record = self._record(index, incarnation)
        links = self.network.links(identity.peer)
        return Peer(
            terms, identity, links, directory, incarnation=incarnation, record=lambda: record
        )

    def _record(self, index: int, incarnation: int) -> bytes:
        identity = self._identities[index]
        run = str(self._plan.run_seed)
        return seal(identity, Record(run, identity.peer, incarnation, incarnation, curve=bytes(32)))

    async def _introduced(self, me: PeerId, directory: MemoryDirectory) -> list[bytes]:
        """Poll the directory until it lists another peer; raise `TimeoutError` if it never does."""
        run = str(self._plan.run_seed)
        others: list[bytes] = []
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            while not others:
                await asyncio.sleep(1.0)
                others = [
                    blob for blob in await directory.peers(run) if unseal(blob, run).peer != me
                ]
        return others

    async def _churn(self) -> None:
        """Kill random peers at seeded moments; each comes back as a new life."""
        assert self._world.churn_s is not None
        while True:
            await asyncio.sleep(self._random.expovariate(1 / self._world.churn_s))
            if self._done or not self._complete():
                continue
            index = self._random.randrange(self._world.peers)
            self._story.kills += 1
            peer = self._identities[index].peer
            self._story.sent_bytes += self.network.line(peer).sent_bytes
            self.network.kill(peer)
            del self._nodes[index]
            await cancel(self._lives[index])
            self._lives[index] = asyncio.create_task(
                self._return(index, self._random.uniform(*AWAY_S))
            )

    def _complete(self) -> bool:
        """Return whether all peers are members: churn must not take a swarm's majority at once."""
        members = [node.peer.membership.is_member for node in self._nodes.values()]
        return len(members) == self._world.peers and all(members)

    async def _return(self, index: int, away_s: float) -> None:
        """Come back in a new life, or stay away if the run has ended in the meantime."""
        await asyncio.sleep(away_s)
        try:
            await self._live(index)
        except (TimeoutError, SnapshotUnavailable):
            if not self._done:
                raise


def outcome(world: World, story: SegmentState, states: dict[str, State]) -> SimulationResult:
    """Return the result of a finished run; its hash covers every peer's method state."""
    digest = hashlib.sha256()
    for peer in sorted(states):
        digest.update(peer.encode() + state_hash(states[peer]))
    return SimulationResult(
        state_hash=digest.hexdigest(),
        rounds=len(story.rounds),
        losses=_by_tenth(story.losses, world.total_tokens),
        bytes=story.sent_bytes,
        bytes_per_peer=story.sent_bytes / world.peers,
        virtual_s=story.virtual_s,
        kills=story.kills,
        steps=len(story.losses),
        states=states,
    )


def simulate(
    plan: RunPlan,
    world: World,
    tokens: Text,
    progress: Callable[[float], None] = lambda share: None,
    folder: Path | None = None,
    device: Device | None = None,
    weights: WeightsFolder | None = None,
) -> SimulationResult:
    """Run a simulation to its end, with all models on `device` (None: the CPU). Only the founder
    has the `weights` that the run starts from, if any.

    With a `folder` each leg is saved there, and saved legs are not run again; the outcome is bit
    for bit that of an uninterrupted run. Raise `Usage` if the folder holds another run."""
    shelf: SegmentStore | None = None
    if folder:
        data = [source.name for source in tokens.sources], tokens.weights
        where = f"/{device.name}" if device is not None and device.place.type != "cpu" else ""
        shelf = SegmentStore(folder, f"{plan}/{world}/{data}{where}", plan.accumulate)
    story, saved = shelf.newest() if shelf else (SegmentState(), {})

    async def leg(until: int) -> dict[int, ReplicaNode]:
        run = Simulation(plan, world, tokens, progress, story, saved, until, device)
        run.weights = weights
        return await run.run()

    leg_tokens = world.leg_tokens or world.total_tokens
    states = {
        _identity(plan, index).peer: checkpoint.parts["method"]
        for index, checkpoint in saved.items()
    }
    while story.legs * leg_tokens < world.total_tokens:
        nodes = run_virtual(leg(min((story.legs + 1) * leg_tokens, world.total_tokens)))
        states = {node.peer.me: _state(node) for node in nodes.values()}
        if shelf:
            saved = shelf.save(story, nodes)
    return outcome(world, story, states)


def held_out(
    plan: RunPlan,
    states: Collection[State],
    x: Tensor,
    y: Tensor,
    device: Device | None = None,
) -> LossEstimate:
    """Return the mean held-out loss of all peers' models; the standard error is over sequences."""
    place = (device or Device()).place
    different = {state_hash(state): state for state in states}
    weights = collections.Counter(state_hash(state) for state in states)
    means = torch.zeros(len(x), dtype=torch.float64)
    for digest, state in different.items():
        model = build(plan.model, plan.run_seed).to(place)
        replica = PlainReplica(model, plan.inner_of(model), plan.clip_norm)
        kept = method(plan.method, **plan.options)
        kept.restore(replica, state, "adopt")
        replica.write(kept.eval_params(replica), "param")
        means += losses(model, x, y) * (weights[digest] / weights.total())
    return summarise(means)


def _state(node: ReplicaNode) -> State:
    return node.loop.driver.method.snapshot(node.loop.driver.replica)


def _identity(plan: RunPlan, index: int) -> Identity:
    return Identity.from_seed(
        hashlib.sha256(f"simulated peer {plan.run_seed}/{index}".encode()).digest()
    )


def _by_tenth(losses: list[tuple[int, float]], total: int) -> list[float]:
    tenths: list[list[float]] = [[] for _ in range(10)]
    for tokens, loss in losses:
        tenths[min(int(10 * tokens / total), 9)].append(loss)
    return [round(sum(values) / len(values), 4) for values in tenths if values]
