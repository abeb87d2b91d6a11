"""Seeded disasters: a small swarm of the product's own nodes in virtual time, hit by faults, watched all along.

One seed decides everything: how many peers, which method and codec, which faults and at which moment of an exchange. What is
watched is in node/watch.py. A violation prints the command that brings it back.
"""

import asyncio
import collections
import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflock.node.courier import Courier
from farflock.node.driver import Driver
from farflock.node.loop import Loop
from farflock.node.seat import Seat
from farflock.node.watch import Watch
from farflock.optimizers.catalog import method
from farflock.optimizers.method import Progress, Tensors, What
from farflock.swarm.frame import Frame, pack, unpack
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.peer import Peer, RunTerms
from farflock.swarm.record import Record, seal
from farflock.swarm.sim import Faults, LinkModel, SimNetwork
from farflock.swarm.virtual import run_virtual

FAULT_S = 24.0  # faults fall in this stretch of virtual time, after `CALM_S`
CALM_S = 8.0
RECOVERY_S = 30.0  # after the last fault: within it the run must make progress again
STEP_S = 0.5
MOMENT_S = 6.0  # a fault waits so long for its phase
SLICE_S = 0.5
STOPPED = 1e9  # times slower
PERIOD = 3
DEADLINE_S = 6.0
CALM_AFTER_DEATH_S = 2 * DEADLINE_S  # without another fault: no round may fail because of one death
VIEW_S = 3.0
KINDS = ("kill", "restart", "partition", "stop", "slow", "loss", "duplicate", "reorder", "corrupt", "delay")
PHASES = {  # of an exchange, by the tag of a message
    b"offer": "offer",
    b"pair": "offer",
    b"pair+": "offer",
    b"want": "transfer",
    b"piece": "transfer",
    b"reduced": "reduced",
    b"holds": "held",
    b"have": "held",
    b"propose": "vote",
    b"accepted": "vote",
    b"prepare": "vote",
    b"promise": "vote",
    b"decided": "decided",
    b"commit": "decided",
}
PAIR_PHASES = ["decided", "held", "offer", "transfer"]
ARMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("diloco", {"period": PERIOD, "codec": "fp32", "return_codec": "fp32", "deadline_s": DEADLINE_S}),
    ("diloco", {"period": PERIOD, "codec": "int8", "deadline_s": DEADLINE_S}),
    ("diloco", {"period": PERIOD, "codec": "topk:2/8", "feedback": 0.9, "deadline_s": DEADLINE_S}),
    ("noloco", {"period": PERIOD, "codec": "fp32", "deadline_s": DEADLINE_S}),
    ("ddp", {"codec": "fp32", "return_codec": "fp32", "deadline_s": DEADLINE_S}),
)


class CountingReplica:
    """Two tensors that every local step moves in a way that tells whose step it was."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._tensors = {
            "param": {"a": torch.zeros(12), "b": torch.zeros(5)},
            "grad": {"a": torch.zeros(12), "b": torch.zeros(5)},
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Both."""
        return ("a", "b")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Both."""
        return {"a": (12,), "b": (5,)}

    def read(self, names: Any, what: What) -> dict[str, Tensor]:  # noqa: ANN401 - as the protocol
        """Copies; moments read as zeros, for there are none."""
        kept = self._tensors.get(what)
        return {name: kept[name].clone() if kept else torch.zeros(self.shapes[name]) for name in names}

    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None:
        """Overwrite; moments are ignored."""
        for name, new in tensors.items():
            if what in self._tensors:
                self._tensors[what][name] = new.clone()

    def inner_step(self, lr: float | None = None) -> None:
        """theta <- theta - grad."""
        for name, theta in self._tensors["param"].items():
            self._tensors["param"][name] = theta - self._tensors["grad"][name]
        self.write({name: torch.zeros(shape) for name, shape in self.shapes.items()}, "grad")

    def add_gradient(self, step: int) -> None:
        """This peer's gradient of this step: 1 at its own place, a little of the step's number in `b`."""
        grad = self._tensors["grad"]
        grad["a"][self._place % 12] += 1.0
        grad["b"][step % 5] += 0.25


@dataclass(slots=True)
class _Trainee:
    replica: CountingReplica

    @property
    def tokens_per_step(self) -> int:
        return 10

    def forward_backward(self, step: int, progress: Progress) -> float:
        self.replica.add_gradient(step)
        return 0.0

    def set_rate(self, tokens: int) -> None:
        """Its gradients are whole counts, which no rate scales."""


@dataclass(slots=True)
class Report:
    """One seed's result."""

    seed: int
    violations: list[str]
    fired: collections.Counter[tuple[str, str]]
    rounds: int
    state_hash: str


@dataclass(slots=True)
class _Life:
    task: asyncio.Task[None]
    loop: Loop | None = None
    peer: Peer | None = None


@dataclass(slots=True)
class Chaos:
    """One seeded disaster."""

    seed: int
    watch: Watch = field(init=False)
    network: SimNetwork = field(init=False)
    fired: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    _random: random.Random = field(init=False)
    _identities: list[Identity] = field(init=False)
    _lives: dict[int, _Life] = field(default_factory=dict)
    _births: int = 0
    _slow: dict[int, float] = field(default_factory=dict)
    _phase: str = "offer"
    _wanted: str = ""  # the phase that the next fault waits for
    _moment: asyncio.Event = field(default_factory=asyncio.Event)
    _lying: float = 0.0  # share of chunk pieces that are altered by who sends them

    def __post_init__(self) -> None:
        self._random = random.Random(f"chaos/{self.seed}")
        self.network = SimNetwork(self.seed, LinkModel(2.5e6, 2.5e6, 0.02, 0.01))
        self.network.tap = self._tapped
        count = self._random.randint(4, 12)
        self._identities = [
            Identity.from_seed(bytes([index]) + self.seed.to_bytes(31, "big")) for index in range(count)
        ]
        self.arm, self.options = ARMS[self.seed % len(ARMS)]
        self._step_s = STEP_S * PERIOD if self.arm == "ddp" else STEP_S
        self.watch = Watch(self.arm, [identity.peer for identity in self._identities])

    arm: str = ""
    _step_s: float = STEP_S
    options: dict[str, Any] = field(default_factory=dict)

    async def run(self) -> Report:
        """From the first peer's start to the end of recovery."""
        for index in range(len(self._identities)):
            self._begin(index)
            await asyncio.sleep(0.3)
        await asyncio.sleep(CALM_S)
        for kind in self._random.sample(KINDS, 4):
            phase = await self._wait_for_moment()
            self.fired[kind, phase] += 1
            await self._strike(kind)
            await asyncio.sleep(self._random.uniform(0, FAULT_S / 4))
        await self._repair()
        marks = self._marks()
        await asyncio.sleep(RECOVERY_S)
        self._check_progress(marks)
        self._check_all()
        report = Report(self.seed, self.watch.violations, self.fired, self.watch.rounds, self.watch.digest())
        await self._end_all()
        return report

    # peers

    def _begin(self, index: int) -> None:
        self._births += 1
        life = _Life(asyncio.create_task(asyncio.sleep(0)))
        self._lives[index] = life
        life.task = asyncio.create_task(self._live(index, self._births, life))

    async def _live(self, index: int, birth: int, life: _Life) -> None:
        peer = life.peer = self._peer(index, birth)
        async with peer.running():
            replica = CountingReplica(index)
            driver = Driver(method(self.arm, **self.options), replica)
            courier = self.watch.courier(peer, index, birth, driver, Courier(peer, self.seed, _inline))
            seat = Seat(peer, driver, courier, _inline)
            loop = Loop(driver, seat, _Trainee(replica), _inline, self._trainer(index))
            loop.report = lambda kind, fields: self.watch.reported(index, birth, driver, kind, fields)
            if birth == 1:
                peer.found()
                seat.open()
            else:
                await peer.meet(self._contacts(index), 600.0)
                await seat.adopt(600.0)
                peer.ask_in()
            life.loop = loop
            await loop.run(10**9)

    def _trainer(self, index: int) -> Callable[[Callable[[], float]], Any]:
        async def train(work: Callable[[], float]) -> float:
            loss = work()
            left_s = self._step_s
            while left_s > 0:  # in slices, so that who is slow or stopped gets going again when that ends
                slice_s = min(left_s, SLICE_S) if index not in self._slow else SLICE_S
                await asyncio.sleep(slice_s)
                left_s -= slice_s / self._slow.get(index, 1.0)
            return loss

        return train

    def _peer(self, index: int, birth: int) -> Peer:
        identity = self._identities[index]
        record = self._record(index, birth)
        links = self.network.links(identity.peer)
        terms = RunTerms("chaos", self.seed, VIEW_S)
        return Peer(terms, identity, links, None, incarnation=birth, record=lambda: record, store_bytes=1 << 20)

    def _record(self, index: int, birth: int) -> bytes:
        identity = self._identities[index]
        return seal(identity, Record("chaos", identity.peer, birth, birth, curve=bytes(32)))

    def _contacts(self, index: int) -> list[bytes]:
        living = [other for other, life in self._lives.items() if other != index and life.loop is not None]
        return [self._record(other, 0) for other in living[:4]]

    async def _end(self, index: int) -> None:
        life = self._lives[index]
        life.loop = None
        life.task.cancel()
        await asyncio.gather(life.task, return_exceptions=True)

    async def _end_all(self) -> None:
        for index in self._lives:
            await self._end(index)

    # faults

    def _tapped(self, now_s: float, sender: PeerId, receiver: PeerId, frame: bytes) -> bytes:
        """Note in which phase of an exchange the swarm is, by the last message sent (its tag follows the frame's head)."""
        tag = frame[26 : 26 + (frame[25] & 31)]
        self._phase = PHASES.get(tag, self._phase)
        if self._phase == self._wanted:
            self._moment.set()
        if tag == b"piece" and self._lying and self._random.random() < self._lying:
            return _altered(frame)
        return frame

    async def _wait_for_moment(self) -> str:
        """Until a message of a phase drawn beforehand is sent, so that each kind of fault meets each phase in some seed;
        returns the phase that was met."""
        phases = PAIR_PHASES if self.arm == "noloco" else sorted(set(PHASES.values()))
        self._wanted = self._random.choice(phases)
        self._moment.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOMENT_S):
                await self._moment.wait()
        met = self._wanted if self._moment.is_set() else self._phase
        self._wanted = ""
        return met

    async def _strike(self, kind: str) -> None:
        living = [index for index, life in self._lives.items() if life.loop is not None]
        victim = self._random.choice(living or [0])
        peer = self._identities[victim].peer
        match kind:
            case "kill":
                await self._kill(victim)
                self.watch.calm_until_s = asyncio.get_running_loop().time() + CALM_AFTER_DEATH_S
                await asyncio.sleep(CALM_AFTER_DEATH_S)
            case "restart":
                await self._kill(victim)
                await asyncio.sleep(self._random.uniform(0.1, 6.0))
                self._begin(victim)
            case "partition":
                peers = [identity.peer for identity in self._identities]
                some = set(self._random.sample(peers, self._random.randint(1, len(peers) // 2)))
                self.network.partition(some, set(peers) - some)
                await asyncio.sleep(self._random.uniform(1, 8))
                self.network.heal()
            case "stop":
                self.network.stop(peer)
                self._slow[victim] = STOPPED
                await asyncio.sleep(self._random.uniform(0.5, 8))
                self._slow.pop(victim)
                self.network.cont(peer)
            case "slow":
                self._slow[victim] = self._random.uniform(2, 6)
                self.network.slow(peer, 4.0)
            case _:
                share = self._random.uniform(0.02, 0.2)
                self._lying = share if kind == "corrupt" else 0.0
                self.network.faults = Faults(**{_RATE[kind]: share}, delay_s=0.2 if kind == "reorder" else 1.0)
                await asyncio.sleep(self._random.uniform(2, 6))
                self.network.faults, self._lying = Faults(), 0.0

    async def _kill(self, victim: int) -> None:
        if sum(life.loop is not None for life in self._lives.values()) <= 3:
            return  # a majority must stay: what happens without one is another test
        self.network.kill(self._identities[victim].peer)
        self.watch.killed(victim)
        await self._end(victim)

    async def _repair(self) -> None:
        """The last fault is over: everybody runs, nobody is slow, all hear each other."""
        self.network.heal()
        self.network.faults = Faults()
        self._slow.clear()
        for index, life in self._lives.items():
            if life.task.done():
                if not life.task.cancelled() and (error := life.task.exception()) is not None:
                    self.watch.violate(f"peer {index} ended by itself: {error!r}")
                self._begin(index)

    # judgement

    def _marks(self) -> dict[int, int]:
        return {index: life.loop.step for index, life in self._lives.items() if life.loop is not None}

    def _check_progress(self, marks: dict[int, int]) -> None:
        """After the last fault everybody is in, trains, and exchanges again."""
        for index, life in self._lives.items():
            if life.task.done() and not life.task.cancelled():
                self.watch.violate(f"peer {index} ended by itself: {life.task.exception()!r}")
            elif life.loop is None:
                self.watch.violate(f"peer {index} is not back in the run {RECOVERY_S:.0f} s after the last fault")
            elif life.loop.step - marks.get(index, 0) < 8:
                self.watch.violate(
                    f"peer {index} made {life.loop.step - marks.get(index, 0)} steps in {RECOVERY_S:.0f} s"
                )
            elif life.peer is not None and not life.peer.membership.is_member:
                self.watch.violate(f"peer {index} is no member {RECOVERY_S:.0f} s after the last fault")
        if self.watch.rounds_since_repair(asyncio.get_running_loop().time() - RECOVERY_S) < 3:
            self.watch.violate(f"fewer than 3 rounds in the {RECOVERY_S:.0f} s after the last fault")

    def _check_all(self) -> None:
        peers = [life.peer for life in self._lives.values() if life.peer is not None]
        self.watch.check_end(peers)


_RATE = {"loss": "loss", "duplicate": "duplicate", "reorder": "reorder", "corrupt": "corrupt", "delay": "reorder"}


def _altered(frame: bytes) -> bytes:
    """A piece with one byte of its content changed and a checksum that fits: only the chunk's digest can tell."""
    good = unpack(frame)
    body = bytearray(good.body)
    if body:
        body[len(body) // 2] ^= 0x40
    return pack(Frame(good.incarnation, good.message, bytes(body)))


async def _inline(work: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the work returns
    return work()


def run_seed(seed: int) -> Report:
    """One seeded disaster from start to end."""

    async def main() -> Report:
        return await Chaos(seed).run()

    return run_virtual(main())


def run_seeds(first: int, count: int) -> Iterator[Report]:
    """Seeds one after the other."""
    torch.set_num_threads(1)
    for seed in range(first, first + count):
        yield run_seed(seed)


def cells() -> list[tuple[str, str]]:
    """Every kind of fault in every phase of an exchange: what a full run must have fired."""
    return [(kind, phase) for kind in KINDS for phase in sorted(set(PHASES.values()))]
