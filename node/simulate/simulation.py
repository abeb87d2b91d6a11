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
from farflock.node.simulate.lives import JOIN_TIMEOUT_S, Lives, SimPeers, identity_of
from farflock.node.simulate.segments import SegmentState, SegmentStore
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.train.ending import drain
from farflock.node.train.task import Loss
from farflock.optimizers.catalog import method
from farflock.optimizers.method import Result, State
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.compute import inline
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.peer.snapshots import SnapshotUnavailable
from farflock.swarm.sim.directory import DirectoryFaults
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

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
        self._story, self._saved, self._until = story, dict(saved), until
        # where each peer's next life begins in its samples
        self._starts = {
            index: Start(bytes.fromhex(each.meta[SAMPLES]), each.step * plan.accumulate)
            for index, each in saved.items()
        }
        self.weights: WeightsFolder | None = None  # that the run starts from, if not from its seed
        self._random = random.Random(f"{plan.run_seed}/simulation")
        self.network = SimNetwork(plan.run_seed + 1_000_003 * story.legs, world.link)
        terms = RunTerms(str(plan.run_seed), plan.run_seed, world.view_s, world.branch_after_s)
        identities = [identity_of(plan, index) for index in range(world.peers)]
        self.peers = SimPeers(terms, self.network, identities, world.directory, story.births)
        self._slowness = [1 + self._random.random() * world.spread for _ in identities]
        # reseeded per leg, but only after the speeds, which all legs share
        self._random.seed(f"{plan.run_seed}/simulation/{story.legs}")
        self.lives: Lives[ReplicaNode] = Lives(
            self.peers, self._live, self._random, world.churn_s, AWAY_S, range(world.peers)
        )

    async def run(self) -> dict[int, ReplicaNode]:
        """Run all peers from start to end; return their final nodes, by number."""
        async with self.lives.running(self._random.random):
            await self._until_done()
        self._story.legs += 1
        self._story.births = self.peers.births
        self._story.kills += self.lives.kills
        self._story.sent_bytes += sum(line.sent_bytes for line in self.peers.lines)
        self._story.virtual_s += asyncio.get_running_loop().time()
        return dict(sorted(self.lives.nodes.items()))

    async def _until_done(self) -> None:
        while await self.lives.watch(5.0):
            founder = self.lives.nodes.get(0)
            if founder is not None:
                self._progress(founder.loop.driver.tokens / self._world.total_tokens)

    async def _live(self, index: int) -> None:
        """Run one life; one that returns stays away if the run has ended in the meantime."""
        returns = self.lives.kills > 0  # all first lives begin before any kill
        try:
            await self._one_life(index)
        except (TimeoutError, SnapshotUnavailable):
            if not returns or self.lives.mortal:
                raise

    async def _one_life(self, index: int) -> None:
        """Start or join the run, train, linger."""
        peer = self.peers.born(index)
        async with peer.running():
            node = self.lives.nodes[index] = self._assemble(index, peer)
            if (saved := self._saved.pop(index, None)) is not None:
                await self._resume(index, node, saved)
            elif peer.context.incarnation == 1:
                node.found()
            else:
                await node.join(await self.peers.introduced(index), JOIN_TIMEOUT_S)
            await node.loop.run(self._until, drain_s=LINGER_S)
            self.lives.mortal = ()  # the run has come to its end
            await asyncio.sleep(LINGER_S)
            await drain(node.loop, LINGER_S)

    async def _resume(self, index: int, node: ReplicaNode, saved: Checkpoint) -> None:
        """Begin a leg where the previous one ended; no peer trains before all peers are members
        again."""
        if index == 0:
            node.peer.found()
        else:
            await node.peer.join(await self.peers.introduced(index), JOIN_TIMEOUT_S)
        load_state(node, saved)
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            while not self.peers.settled:  # noqa: ASYNC110 - all nodes' condition
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
            weights=self.weights if peer.context.incarnation == 1 else None,
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
        identity_of(plan, index).peer: checkpoint.groups["method"]
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


def _by_tenth(losses: list[tuple[int, float]], total: int) -> list[float]:
    tenths: list[list[float]] = [[] for _ in range(10)]
    for tokens, loss in losses:
        tenths[min(int(10 * tokens / total), 9)].append(loss)
    return [round(sum(values) / len(values), 4) for values in tenths if values]
