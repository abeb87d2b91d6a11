"""The time of a NoLoCo sync, next to that of all peers, where latencies are log-normal.

The exchanges are the product's: its rounds and pairs, with every message that they take, between
whole nodes on a simulated network in virtual time. Tensors are a few values and lines are fast, so
that messages' delays are all that costs time. All peers begin together; an exchange is over when
its last member has the result.

Beside them stand models of what the paper compares, with delays of the same distribution: a pair's
two messages, there and back, and an all-reduce by a binomial tree; and one by a ring.
"""

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Annotated, Any

import msgspec

from farflock.experiments.measure.threads import one_thread
from farflock.experiments.pipelines.table import Parameters, Progress, Row, Table, sampled
from farflock.node.assembly.core import Core
from farflock.node.errors import Failure
from farflock.node.simulate.chaos_methods import CountingReplica, CountingTask
from farflock.node.simulate.lives import SimPeers
from farflock.node.train.driver import Driver
from farflock.node.train.task import Loss
from farflock.optimizers.catalog import method
from farflock.swarm.compute import inline
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

VALUES = {"a": 64, "b": 5}  # of each tensor: a gradient of its own for each peer
NEAR = LinkModel(1e9, 1e9, 0.001, 0.0)  # while peers join
EVERY_S = 6.0  # from one exchange to the next: long enough for any to end
JOIN_S = 0.2  # from one newcomer to the next
LOOK_S = 0.5
LIMIT_S = 3600.0
VIEW_S = 3.0
DEADLINE_S = 3 * EVERY_S  # no exchange gives up its members here
METHODS: Mapping[str, Mapping[str, Any]] = {
    "noloco": {"codec": "fp32"},
    "diloco": {"codec": "fp32", "return_codec": "fp32"},
}

Delay = Callable[[], float]
Peers = Annotated[int, msgspec.Meta(ge=2, le=64, multiple_of=2)]


class Size(Parameters, frozen=True, kw_only=True):
    """Parameters: `rounds` exchanges of `few` peers, and as many of `many`. The median delay of a
    message is `median_s`, and `sigma` the standard deviation of its logarithm."""

    few: Peers
    many: Peers
    rounds: Annotated[int, msgspec.Meta(ge=1, le=1000)]
    median_s: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.05
    sigma: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.7
    models: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1000  # drawings of each model
    seeds: Annotated[list[int], msgspec.Meta(min_length=1, max_length=16)]


class DelayLaw(random.Random):
    """A generator whose `uniform` is log-normal: the network asks it for a message's jitter between
    0 and the sum of both lines', which is the median here."""

    def __init__(self, seed: str, sigma: float) -> None:
        super().__init__(seed)
        self._sigma = sigma

    def uniform(self, a: float, b: float) -> float:
        """Return a log-normal number of median `b`."""
        return b * self.lognormvariate(0.0, self._sigma)


class DelayedNetwork(SimNetwork):
    """A network whose lines' jitter is log-normal, drawn anew for every message."""

    def __init__(self, seed: int, sigma: float) -> None:
        super().__init__(seed, NEAR)
        self._delays: dict[tuple[PeerId, PeerId], DelayLaw] = {}
        self._name, self._sigma = seed, sigma

    def random(self, sender: PeerId, receiver: PeerId) -> random.Random:
        """Return the generator for frames from `sender` to `receiver`."""
        key = sender, receiver
        if key not in self._delays:
            self._delays[key] = DelayLaw(f"{self._name}/{sender}/{receiver}", self._sigma)
        return self._delays[key]


@dataclass(slots=True)
class Swarm:
    """All peers of one run, which exchange at the multiples of `EVERY_S` once all are members.

    `took_s` has the seconds until each member of an exchange had its result, by the exchange's
    start and members."""

    size: Size
    method: str
    count: int
    seed: int
    network: DelayedNetwork = field(init=False)
    peers: SimPeers = field(init=False)
    took_s: dict[tuple[float, tuple[str, ...]], list[float]] = field(default_factory=dict)
    _begins_s: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        self.network = DelayedNetwork(self.seed, self.size.sigma)
        identities = [
            Identity.from_seed(bytes([number]) + self.seed.to_bytes(31, "big"))
            for number in range(self.count)
        ]
        terms = RunTerms("noloco-sync", self.seed, VIEW_S)
        self.peers = SimPeers(terms, self.network, identities)

    async def run(self) -> "Swarm":
        """Run until all exchanges are over."""
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as living:
            tasks = []
            for number in range(self.count):
                tasks.append(living.create_task(self._live(number)))
                await asyncio.sleep(JOIN_S)
            while not self.peers.settled:  # noqa: ASYNC110 - no event covers all peers
                await asyncio.sleep(LOOK_S)
            await asyncio.sleep(2 * VIEW_S)  # for what the joining has left to say
            half_s = self.size.median_s / 2  # of a message's delay, on each of its two lines
            for identity in self.peers.identities:
                self.network.set_link(identity.peer, LinkModel(1e9, 1e9, 0.0, half_s))
            self._begins_s = (_now() // EVERY_S + 1) * EVERY_S
            await asyncio.sleep(self._begins_s + self.size.rounds * EVERY_S - _now())
            for task in tasks:
                task.cancel()
        return self

    async def _live(self, number: int) -> None:
        peer = self.peers.born(number)
        async with peer.running():
            replica = CountingReplica(number, VALUES)
            options = {"period": 1, "deadline_s": DEADLINE_S, **METHODS[self.method]}
            driver = Driver(method(self.method, **options), replica)
            core = Core.over(peer, driver, CountingTask(replica), inline, self._train)
            core.loop.report = self._report
            if number == 0:
                peer.found()
                core.state_sync.open()
            else:
                await peer.meet([self.peers.record(0, 0)], LIMIT_S)
                await core.state_sync.adopt(LIMIT_S)
                peer.ask_in()
            await core.loop.run(10**12)

    async def _train(self, work: Callable[[], Loss]) -> Loss:
        """Take a step at the next multiple of `EVERY_S`, once exchanges are measured."""
        while self._begins_s == math.inf:  # noqa: ASYNC110 - no event covers all peers
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(max(self._begins_s, (_now() // EVERY_S + 1) * EVERY_S) - _now())
        return work()

    def _report(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "round":
            start = _now() // EVERY_S * EVERY_S
            members = tuple(sorted(fields["participants"]))
            self.took_s.setdefault((start, members), []).append(_now() - start)


def _now() -> float:
    return asyncio.get_running_loop().time()


def exchange_s(size: Size, name: str, count: int, seed: int) -> float:
    """Return the mean seconds of a method's exchange among `count` peers. Raise `Failure` unless
    each was among all its members."""

    async def whole() -> Swarm:
        return await Swarm(size, name, count, seed).run()

    took_s = run_virtual(whole()).took_s
    members = 2 if name == "noloco" else count
    wanted = size.rounds * count // members
    whole_ones = [each for (_, who), each in took_s.items() if len(who) == len(each) == members]
    if len(took_s) != wanted or len(whole_ones) != wanted:
        why = f"{len(whole_ones)} exchanges of {wanted} were among all {members} members"
        raise Failure(f"{name}, {count} peers, seed {seed}", why, "choose shorter delays")
    return fmean(map(max, whole_ones))


# models


def tree_s(count: int, delay: Delay) -> float:
    """Return the time of an all-reduce by a binomial tree: sums go up to the first peer, and their
    total comes down. For a pair these are two messages, there and back. Raise `ValueError` unless
    there are a power of two peers."""
    if count & (count - 1):
        raise ValueError(f"a binomial tree of {count} peers; choose a power of two")
    at_s, far = [0.0] * count, 1
    while far < count:
        for peer in range(0, count, 2 * far):
            at_s[peer] = max(at_s[peer], at_s[peer + far] + delay())
        far *= 2
    while far > 1:
        far //= 2
        for peer in range(0, count, 2 * far):
            at_s[peer + far] = at_s[peer] + delay()
    return max(at_s)


def ring_s(count: int, delay: Delay) -> float:
    """Return the time of an all-reduce by a ring: each of its 2(M-1) steps waits for the step
    before, of the same peer and of the one behind it."""
    at_s = [0.0] * count
    for _ in range(2 * (count - 1)):
        at_s = [max(own_s, at_s[peer - 1] + delay()) for peer, own_s in enumerate(at_s)]
    return max(at_s)


def modelled(size: Size, count: int, seed: int) -> dict[str, float]:
    """Return the mean seconds of each model among `count` peers."""
    law = DelayLaw(f"{seed}/{count}/models", size.sigma)
    delay = partial(law.uniform, 0.0, size.median_s)
    models: dict[str, Callable[[], float]] = {
        "pair": partial(tree_s, 2, delay),
        "tree": partial(tree_s, count, delay),
        "ring": partial(ring_s, count, delay),
    }
    return {name: fmean(one() for _ in range(size.models)) for name, one in models.items()}


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate the seconds of exchanges, of the product's and of models, and their ratios."""
    rows: list[Row] = []
    groups, done = {"few": size.few, "many": size.many}, 0
    with one_thread():
        for called, count in groups.items():
            found: list[dict[str, float]] = []
            for seed in size.seeds:
                ours = {name: exchange_s(size, name, count, seed) for name in METHODS}
                found.append(ours | modelled(size, count, seed))
                done += 1
                progress(done / (len(groups) * len(size.seeds)))
            rows += _rows(called, found)
    return Table(
        rows,
        f"{size.rounds} exchanges of {size.few} and of {size.many} peers, "
        f"{size.models} drawings of each model, a message takes {1e3 * size.median_s:g} ms in the "
        f"median, sigma {size.sigma:g}, {len(size.seeds)} seeds",
    )


def _rows(called: str, found: Sequence[Mapping[str, float]]) -> list[Row]:
    seconds = {
        "NoLoCo's pair": "noloco",
        "DiLoCo's round": "diloco",
        "a pair, modelled": "pair",
        "a tree, modelled": "tree",
        "a ring, modelled": "ring",
    }
    ratios = {
        "DiLoCo's round over NoLoCo's pair": ("diloco", "noloco"),
        "tree over pair, modelled": ("tree", "pair"),
        "ring over pair, modelled": ("ring", "pair"),
    }
    rows = [
        sampled(f"{what}, {called} peers, s", [one[name] for one in found])
        for what, name in seconds.items()
    ]
    for what, (slow, fast) in ratios.items():
        rows.append(sampled(f"{what}, {called} peers", [one[slow] / one[fast] for one in found]))
    return rows
