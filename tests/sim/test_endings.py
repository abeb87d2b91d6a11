"""Whole runs to their last token, on the product's own nodes in virtual time: how each node ends,
and with which state.

Peers are unequal and come in one after the other, and the network's faults change when the run
nears its end. Each node ends as a process does (node/process/node_process.py): it takes part until
the run is over, stays a little for the others, saves, and leaves."""

import asyncio
import itertools
import random
from dataclasses import dataclass, field

import pytest
from worlds.peers import peer_in, record_of

from farflock.node.assembly.core import Core
from farflock.node.assembly.node import ReplicaNode
from farflock.node.process.node_process import LINGER_S
from farflock.node.simulate.chaos_methods import FP32, ChaosCase, CountingTask
from farflock.node.simulate.invariants import DEADLINE_S
from farflock.node.train.driver import Driver
from farflock.node.train.end_barrier import CUT_OFF_S, END_S, LOOK_EVERY_S
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.compute import inline
from farflock.swarm.identity import Identity
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.sim.network import Faults, LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

VIEW_S = 3.0
LATE = 0.8  # of the run's tokens: from then on the network is as bad as it is at the end
MOST_S = 3600.0  # of virtual time, for a run


@dataclass(frozen=True, slots=True)
class Terms:
    """A run: peers' steps take up to `spread` times longer than the fastest one's;
    `faults` are those of the end."""

    arm: ChaosCase
    peers: int = 3
    total: int = 400
    spread: float = 1.0
    apart_s: float = 1.0  # between two that come in
    faults: Faults = field(default_factory=Faults)


class Trainee(CountingTask):
    """Remembers where it came in, as those of participants do."""

    joined_at = 0


@dataclass(slots=True)
class Ended:
    """One node's end."""

    round: int
    tokens: int
    state: bytes
    at_s: float
    step: int
    stayed_s: float  # after its last step


class Endings:
    """One run."""

    def __init__(self, terms: Terms, seed: int) -> None:
        self.terms, self.seed = terms, seed
        self.random = random.Random(f"endings/{seed}")
        self.network = SimNetwork(seed, LinkModel(2.5e6, 2.5e6, 0.02, 0.01))
        self.identities = [
            Identity.from_seed(bytes([index]) + seed.to_bytes(31, "big"))
            for index in range(terms.peers)
        ]
        self.slowness = [1 + self.random.random() * terms.spread for _ in self.identities]
        self.nodes: list[ReplicaNode] = []
        self.ended: dict[str, Ended] = {}

    async def run(self) -> dict[str, Ended]:
        """By peer, in the order of their coming."""
        lives = []
        async with asyncio.timeout(MOST_S):
            for index in range(self.terms.peers):
                lives.append(asyncio.create_task(self._live(index)))
                await asyncio.sleep(self.terms.apart_s * self.random.random())
            await asyncio.gather(*lives)
        return self.ended

    async def _live(self, index: int) -> None:
        peer = self._peer(index)
        async with peer.running():
            node, last = self._node(index, peer)
            if not index:
                node.found()
            else:
                await node.join([self._record(other) for other in range(index)], 600.0)
            self.nodes.append(node)
            await node.run(self.terms.total)
            lingers_s = self._now() + LINGER_S
            while not peer.alone and self._now() < lingers_s:  # noqa: ASYNC110 - two conditions
                await asyncio.sleep(0.1)
            driver = node.loop.driver
            state = state_hash(driver.method.snapshot(driver.replica))
            place = driver.position
            self.ended[peer.me] = Ended(
                node.state_sync.applied_round,
                place.agreed_tokens,
                state,
                self._now(),
                node.step,
                self._now() - last[0],
            )
            await peer.leave_gracefully()

    def _node(self, index: int, peer: Peer) -> tuple[ReplicaNode, list[float]]:
        replica, last = self.terms.arm.replica(index), [0.0]
        driver = Driver(self.terms.arm.make(), replica)
        step_s = self.terms.arm.step_s * self.slowness[index]

        async def train(work):
            loss = work()
            await asyncio.sleep(step_s)
            last[0] = self._now()
            if node.tokens >= LATE * self.terms.total:
                self.network.faults = self.terms.faults
            return loss

        training_task = Trainee(replica)
        core = Core.over(peer, driver, training_task, inline, train)
        node = ReplicaNode(peer, None, core.state_sync, core.loop, training_task)
        return node, last

    def _peer(self, index: int) -> Peer:
        terms = RunTerms("endings", self.seed, VIEW_S)
        return peer_in(self.network, self.identities[index], terms)

    def _record(self, index: int) -> bytes:
        return record_of(self.identities[index], "endings")

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def ended(terms: Terms, seed: int) -> list[Ended]:
    """The end of each node of a run."""

    async def whole():
        return await Endings(terms, seed).run()

    return list(run_virtual(whole()).values())


ARMS = {
    "ddp": ChaosCase("ddp", FP32, 1.5),
    "diloco": ChaosCase("diloco", {"period": 3, **FP32}),
    "diloco of seconds": ChaosCase("diloco", {"period": 3, "round_s": 3.0, **FP32}),
    "sparseloco": ChaosCase("sparseloco", {"period": 3, "codec": "topk:2/8"}),
    "streaming": ChaosCase("streaming", {"period": 4, "fragments": 2, "overlap": 1}),
    "co2": ChaosCase("co2", {"period": 3, **FP32}),
    "desloc": ChaosCase("desloc", {"period": 2, "exp_avg_period": 4, "exp_avg_sq_period": 6}),
    "async": ChaosCase("async", {"period": 6, "enough": 2, "codec": "int8"}),
}
WORLDS = {
    "alike": {"spread": 0.2},
    "unequal": {"spread": 3.0},
    "loss": {"faults": Faults(loss=0.4)},
    "delay": {"faults": Faults(reorder=0.7, delay_s=3.0)},
}
SEEDS = 3


def by_its_own_estimate(patch):
    """As nodes ended before: each when it thinks that the run has its tokens."""

    async def run(self, total):
        await self.loop.run(total)

    patch.setattr(ReplicaNode, "run", run)


def meetings():
    """Every pair of an arm, a world and a seed meets every day; all three do among the long
    tests."""
    for (i, name), (j, world), seed in itertools.product(
        enumerate(ARMS), enumerate(WORLDS), range(SEEDS)
    ):
        marks = [] if seed == (i + j) % SEEDS else [pytest.mark.long]
        yield pytest.param(name, world, seed, marks=marks)


@pytest.mark.parametrize(("name", "world", "seed"), [*meetings()])
def test_all_end_with_one_state_after_the_round_that_brings_the_run_its_tokens(name, world, seed):
    terms = Terms(ARMS[name], **WORLDS[world])
    nodes = ended(terms, seed)
    assert len(nodes) == terms.peers
    assert len({node.state for node in nodes}) == 1, [(node.round, node.tokens) for node in nodes]
    assert all(node.tokens >= terms.total for node in nodes)
    assert max(node.stayed_s for node in nodes) < DEADLINE_S + END_S + LINGER_S


@pytest.mark.parametrize("name", ["ddp", "diloco"])
def test_by_their_own_estimates_they_would_end_apart(monkeypatch, name):
    by_its_own_estimate(monkeypatch)
    terms = Terms(ARMS[name], **WORLDS["unequal"])
    apart = [len({node.state for node in ended(terms, seed)}) > 1 for seed in range(5)]
    assert sum(apart) >= 2


def test_a_peer_with_a_state_of_its_own_ends_when_it_estimates_the_runs_end():
    terms = Terms(ChaosCase("noloco", {"period": 3, "codec": "fp32"}), **WORLDS["unequal"])
    for seed in range(SEEDS):
        assert max(node.stayed_s for node in ended(terms, seed)) <= 2 * DEADLINE_S + LINGER_S


class OneHangs(Endings):
    """The last to come lives and computes for ever at its second step; `names` are those that the
    others say they wait for."""

    names: frozenset = frozenset()

    def _node(self, index, peer):
        if index == self.terms.peers - 1:
            self.slowness[index] = 10 * MOST_S
        return super()._node(index, peer)

    async def run(self):
        lives = asyncio.create_task(super().run())
        while len(self.ended) < self.terms.peers - 1:
            await asyncio.sleep(1.0)
            waits = [
                wait
                for node in self.nodes
                if node.together is not None
                for wait in node.together.waits()
            ]
            assert all(-LOOK_EVERY_S <= wait.left_s <= DEADLINE_S + END_S for wait in waits)
            self.names |= {peer for wait in waits for peer in wait.whom}
        lives.cancel()
        return self.ended


def test_one_that_lives_and_never_ends_is_waited_for_by_name_and_not_for_ever():
    async def whole():
        hanging = OneHangs(Terms(ARMS["diloco"]), 1)
        return await hanging.run(), hanging.names, hanging.identities[-1].peer

    nodes, names, hangs = run_virtual(whole())
    assert hangs not in nodes
    assert hangs in names
    assert len({node.state for node in nodes.values()}) == 1
    for node in nodes.values():
        assert (
            DEADLINE_S + END_S <= node.stayed_s <= DEADLINE_S + END_S + LINGER_S + 1.5 * DEADLINE_S
        )


class OthersDie(Endings):
    """All but the founder are killed half-way."""

    async def _live(self, index):
        life = asyncio.create_task(super()._live(index))
        if index:
            await asyncio.sleep(10.0)
            self.network.kill(self.identities[index].peer)
            life.cancel()
        await asyncio.gather(life, return_exceptions=bool(index))


def test_a_peer_without_the_others_ends_by_its_estimate_and_not_before_it_is_sure():
    terms = Terms(ARMS["diloco"], spread=0.0, total=600)

    async def whole():
        return await OthersDie(terms, 2).run()

    (node,) = run_virtual(whole()).values()
    assert node.tokens < terms.total
    assert CUT_OFF_S <= node.at_s <= MOST_S / 10
