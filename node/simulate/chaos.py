"""Seeded disasters: a small swarm of the product's own nodes in virtual time, hit by faults, watched all along.

One seed decides everything: how many peers, which method and codec, which faults and at which moment of an exchange. What is
watched is in node/simulate/watch.py. A violation prints the command that brings it back.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from farflock.node.loop import Loop
from farflock.node.process.worker_processes import end_with_parent, warm
from farflock.node.simulate.chaos_methods import PHASES, Arm, CountingTrainee, arm_of
from farflock.node.simulate.watch import DEADLINE_S, STORE_BYTES, Watch
from farflock.node.train.driver import Driver
from farflock.node.train.exchange_client import Courier
from farflock.node.train.state_sync import Seat
from farflock.swarm.frame import Frame, pack, unpack
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.protocol.decide import is_quorum
from farflock.swarm.record import Record, seal
from farflock.swarm.sim.network import Faults, LinkModel, SimLinks, SimNetwork
from farflock.swarm.sim.virtual_time import Deadlock, run_virtual

FAULTS = 4  # a seed
ENOUGH_SEEDS = 100  # for every kind of fault to meet every phase of an exchange
GAP_S = 2.0  # at most, from the end of a fault to the wait for the next one's moment
RECOVERY_S = 30.0  # after the start and the last fault: within it everybody must be in and make progress
PROGRESS_STEPS = 4  # by everybody
RECOVERED_ROUNDS = 3  # applied by everybody after the last fault
LOOK_S = 1.0  # from one look at what peers hold and wait for to the next
LINK = LinkModel(2.5e6, 2.5e6, 0.02, 0.01)
MOMENT_S = 6.0  # a fault waits so long for its phase
SLICE_S = 0.5
STOPPED = 1e9  # times slower
CALM_AFTER_DEATH_S = 2 * DEADLINE_S  # without another fault: no round may fail because of one death
VIEW_S = 3.0
GOODBYE_S = 0.2  # until it is on its way
KINDS = ("kill", "restart", "partition", "stop", "slow", "loss", "duplicate", "reorder", "corrupt", "delay")
CELLS = [(kind, phase) for kind in KINDS for phase in sorted(set(PHASES.values()))]


@dataclass(slots=True)
class Report:
    """One seed's result."""

    seed: int
    violations: list[str]
    fired: collections.Counter[tuple[str, str]]
    rounds: int
    state_hash: str
    recovery_s: float = 0.0  # from the last fault until everybody was in and had made progress


@dataclass(slots=True)
class _Life:
    task: asyncio.Task[None]
    loop: Loop | None = None
    peer: Peer | None = None


@dataclass(slots=True)
class Chaos:
    """One seeded disaster; what the seed does not decide is said: the method, the number of peers."""

    seed: int
    arm: Arm
    peers: int = 0  # 0: the seed decides
    watch: Watch = field(init=False)
    network: SimNetwork = field(init=False)
    fired: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    _random: random.Random = field(init=False)
    _identities: list[Identity] = field(init=False)
    _lives: dict[int, _Life] = field(default_factory=dict)
    _births: int = 0
    _streams: int = 0  # that the method has
    _phases: tuple[str, ...] = ()  # that its exchanges have
    _slow: dict[int, float] = field(default_factory=dict)
    _phase: str = "offer"
    _wanted: str = ""  # the phase that the next fault waits for
    _moment: asyncio.Event = field(default_factory=asyncio.Event)
    _lying: float = 0.0  # share of chunk pieces that are altered by who sends them
    _lines: list[SimLinks] = field(default_factory=list)  # of all lives
    _tapped_bytes: collections.Counter[PeerId] = field(default_factory=collections.Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(f"chaos/{self.seed}")
        self.network = SimNetwork(self.seed, LINK)
        self.network.tap = self._tapped
        count = self.peers or min(self._random.randint(4, 12) for _ in range(2))
        self._identities = [
            Identity.from_seed(bytes([index]) + self.seed.to_bytes(31, "big")) for index in range(count)
        ]
        self._streams = len(self.arm.streams())
        self._phases = self.arm.phases()
        self.watch = Watch(self.arm.method, [identity.peer for identity in self._identities])

    async def run(self) -> Report:
        """From the first peer's start until all have recovered from the last fault."""
        looking = asyncio.create_task(self._look_around())
        for index in range(len(self._identities)):
            self._begin(index)
            await asyncio.sleep(0.3)
        await self._progress(1, "the start")
        for kind, wanted in self._faults():
            phase = await self._wait_for_moment(wanted)
            self.fired[kind, phase] += await self._strike(kind) and bool(phase)
            await asyncio.sleep(self._random.uniform(0, GAP_S))
        self._check_memory()
        self._repair()
        recovery_s = await self._progress(RECOVERED_ROUNDS, "the last fault")
        self._check_memory()
        self._check_waits()
        looking.cancel()
        await asyncio.wait([looking])
        await self._end_all()
        self._check_rest(looking)
        return Report(self.seed, self.watch.violations, +self.fired, self.watch.rounds, self.watch.digest(), recovery_s)

    # peers

    def _begin(self, index: int) -> None:
        self._births += 1
        life = _Life(asyncio.create_task(asyncio.sleep(0)))
        self._lives[index] = life
        life.task = asyncio.create_task(self._live(index, self._births, life))

    async def _live(self, index: int, birth: int, life: _Life) -> None:
        peer = life.peer = self._peer(index, birth)
        async with peer.running():
            replica = self.arm.replica(index)
            driver = Driver(self.arm.make(), replica)
            courier = self.watch.courier(peer, index, birth, driver, Courier(peer, self.seed, _inline))
            seat = Seat(peer, driver, courier, _inline)
            loop = Loop(driver, seat, CountingTrainee(replica), _inline, self._trainer(index))
            loop.report = lambda kind, fields: self.watch.reported(
                index, birth, driver, kind, fields, seat.place.rounds
            )
            if birth == 1:
                peer.found()
                seat.open()
            else:
                await peer.meet(self._contacts(index), 600.0)
                await seat.adopt(600.0)
                peer.ask_in()
            life.loop = loop
            await loop.run(10**9)
            peer.leave()
            await asyncio.sleep(GOODBYE_S)

    def _trainer(self, index: int) -> Callable[[Callable[[], float]], Any]:
        async def train(work: Callable[[], float]) -> float:
            loss = work()
            left_s = self.arm.step_s
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
        self._lines.append(links)
        terms = RunTerms("chaos", self.seed, VIEW_S)
        return Peer(terms, identity, links, None, incarnation=birth, record=lambda: record, store_bytes=STORE_BYTES)

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

    def _faults(self) -> list[tuple[str, str]]:
        """What happens, in this order, each with the phase of an exchange that it waits for."""
        return faults_of(self.seed)

    def _tapped(self, now_s: float, sender: PeerId, receiver: PeerId, frame: bytes) -> bytes:
        """Note in which phase of an exchange the swarm is, by the last message sent (its tag follows the frame's head)."""
        self._tapped_bytes[sender] += len(frame)
        tag = frame[26 : 26 + (frame[25] & 31)]
        self._phase = PHASES.get(tag, self._phase)
        if self._phase == self._wanted:
            self._moment.set()
        if tag == b"piece" and self._lying and self._random.random() < self._lying:
            return _altered(frame)
        return frame

    async def _wait_for_moment(self, wanted: str) -> str:
        """Until a message of this phase is sent (of another one where the method has none such); returns the phase met."""
        if not self._phases:
            return ""
        self._wanted = wanted if wanted in self._phases else self._random.choice(self._phases)
        self._moment.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOMENT_S):
                await self._moment.wait()
        met = self._wanted if self._moment.is_set() else self._phase
        self._wanted = ""
        return met

    async def _strike(self, kind: str) -> bool:
        """Let a fault happen, to its end; returns whether it hit anything."""
        living = [index for index, life in self._lives.items() if life.loop is not None]
        victim = self._random.choice(living or [0])
        match kind:
            case "kill":
                return await self._kill_for_good(victim)
            case "restart":
                return await self._restart(victim)
            case "partition":
                return await self._partition()
            case "stop":
                return await self._stop(victim)
            case "slow":
                self._slow[victim] = self._random.uniform(2, 6)
                self.network.slow(self._identities[victim].peer, 4.0)
                return True
        return await self._disturb(kind)

    async def _kill_for_good(self, victim: int) -> bool:
        if not await self._kill(victim):
            return False
        if not any(self._lives[index].loop for index in self._slow):  # who lives may keep a round until its deadline
            self.watch.calm_until_s = asyncio.get_running_loop().time() + CALM_AFTER_DEATH_S
        await asyncio.sleep(CALM_AFTER_DEATH_S)
        return True

    async def _restart(self, victim: int) -> bool:
        if not await self._kill(victim):
            return False
        await asyncio.sleep(self._random.uniform(0.1, 6.0))
        self._begin(victim)
        return True

    async def _kill(self, victim: int) -> bool:
        if sum(life.loop is not None for life in self._lives.values()) <= 3 or not self._quorums_stay(victim):
            return False  # a majority must stay: what happens without one is another test
        self.network.kill(self._identities[victim].peer)
        await self._end(victim)
        return True

    def _quorums_stay(self, victim: int) -> bool:
        """Whether without this peer a quorum lives on of every newest view and of every view that a next round belongs to."""
        others = [life.peer for index, life in self._lives.items() if index != victim and not life.task.done()]
        living = {(peer.me, peer.port.incarnation) for peer in others if peer is not None}
        for peer in others:
            chain = peer.port.chain if peer is not None else None
            if peer is None or chain is None:
                continue
            for view in (chain.newest, chain.at(peer.rounds.floor()) if peer.rounds.names else None):
                members = view.members if view is not None else ()
                there = {place for place, member in enumerate(members) if (member.peer, member.incarnation) in living}
                if members and not is_quorum(there, len(members)):
                    return False
        return True

    async def _partition(self) -> bool:
        peers = [identity.peer for identity in self._identities]
        some = set(self._random.sample(peers, self._random.randint(1, len(peers) // 2)))
        self.network.partition(some, set(peers) - some)
        await asyncio.sleep(self._random.uniform(1, 8))
        self.network.heal()
        return True

    async def _stop(self, victim: int) -> bool:
        peer = self._identities[victim].peer
        self.network.stop(peer)
        self._slow[victim] = STOPPED
        await asyncio.sleep(self._random.uniform(0.5, 8))
        self._slow.pop(victim)
        self.network.cont(peer)
        return True

    async def _disturb(self, kind: str) -> bool:
        """Let a share of all frames suffer for a while."""
        share, before = self._random.uniform(0.02, 0.2), self.network.fired[_RATE[kind]]
        self._lying = share if kind == "corrupt" else 0.0
        self.network.faults = Faults(**{_RATE[kind]: share}, delay_s=0.2 if kind == "reorder" else 1.0)
        await asyncio.sleep(self._random.uniform(2, 6))
        self.network.faults, self._lying = Faults(), 0.0
        return self.network.fired[_RATE[kind]] > before

    def _repair(self) -> None:
        """The last fault is over: everybody runs, nobody is slow, all hear each other."""
        self.network.heal()
        self.network.faults = Faults()
        self._slow.clear()
        for identity in self._identities:
            self.network.set_link(identity.peer, LINK)
        for index, life in self._lives.items():
            if life.task.done():
                self._check_ended(index, life)
                self._begin(index)

    # judgement

    async def _look_around(self) -> None:
        """Now and then, at every peer."""
        while True:
            await asyncio.sleep(LOOK_S)
            for life in self._lives.values():
                if life.peer is not None and not life.task.done():
                    self.watch.look(life.peer)

    async def _progress(self, rounds: int, after: str) -> float:
        """Wait until everybody is in, trains, and has applied so many rounds; returns how long that took."""
        begun_s = asyncio.get_running_loop().time()
        steps = {index: life.loop.step if life.loop is not None else 0 for index, life in self._lives.items()}
        while lagging := self._lagging(begun_s, steps, rounds):
            if asyncio.get_running_loop().time() - begun_s >= RECOVERY_S:
                for what in lagging:
                    self.watch.violate(f"{what} in the {RECOVERY_S:.0f} s after {after}")
                break
            await asyncio.sleep(SLICE_S)
        return asyncio.get_running_loop().time() - begun_s

    def _lagging(self, begun_s: float, steps: Mapping[int, int], rounds: int) -> list[str]:
        """Who has not made progress since then, and what is missing."""
        counts, found = self.watch.rounds_since(begun_s), []
        for index, life in self._lives.items():
            each = counts[self._identities[index].peer]
            applied = each.total() if len(each) == self._streams else 0
            if life.peer is None or life.loop is None:
                found.append(f"peer {index} has not come into the run")
            elif not life.peer.membership.is_member:
                found.append(f"peer {index} has not become a member")
            elif life.loop.step - steps[index] < PROGRESS_STEPS or (self._streams and applied < rounds):
                made = life.loop.step - steps[index]
                found.append(f"peer {index} has made {made} steps and applied {dict(each)} rounds")
        return found

    def _check_ended(self, index: int, life: _Life) -> None:
        if not life.task.cancelled() and (error := life.task.exception()) is not None:
            self.watch.violate(f"peer {index} ended by itself: {error!r}")

    def _check_memory(self) -> None:
        for life in self._lives.values():
            if life.peer is not None and not life.task.done():
                self.watch.check_memory(life.peer)

    def _check_waits(self) -> None:
        for life in self._lives.values():
            if life.peer is not None and life.loop is not None:
                self.watch.check_waits(life.peer, life.loop)

    def _check_rest(self, looking: asyncio.Task[None]) -> None:
        """When all have ended: nobody had ended before, nothing runs on without an owner, and all bytes are accounted for."""
        if not looking.cancelled():
            looking.result()  # raises what a look ended with
        for index, life in self._lives.items():
            self._check_ended(index, life)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            self.watch.violate(f"{len(left)} tasks outlive their peers: {sorted(task.get_name() for task in left)[:3]}")
        sent_bytes: collections.Counter[PeerId] = collections.Counter()
        for line in self._lines:
            sent_bytes[line.me] += line.sent_bytes
        if sent_bytes != self._tapped_bytes:
            self.watch.violate(f"peers count {sent_bytes} bytes sent, the network saw {self._tapped_bytes}")
        if self.network.missing_bytes() or self.network.bytes["overflowed"]:
            self.watch.violate(f"{self.network.missing_bytes()} bytes are missing: {self.network.bytes}")


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


def run_seed(seed: int, name: str | None = None) -> Report:
    """One seeded disaster from start to end, of the method of this name if one is given."""

    async def main() -> Report:
        return await Chaos(seed, arm_of(seed, name)).run()

    torch.set_num_threads(1)
    try:
        return run_virtual(main())
    except Deadlock as error:
        return Report(seed, [str(error)], collections.Counter(), 0, "")


def run_seeds(first: int, count: int, workers: int = 1, name: str | None = None) -> Iterator[Report]:
    """Reports of seeds in order, run by so many processes; each seed's is the same however many there are."""
    seeds, names = range(first, first + count), itertools.repeat(name)
    if workers == 1:
        yield from map(run_seed, seeds, names)
        return
    level = logging.getLogger("farflock").level
    pool = concurrent.futures.ProcessPoolExecutor(workers, warm(__name__), _quieten, (level,))
    try:
        yield from pool.map(run_seed, seeds, names)
    finally:
        pool.shutdown(cancel_futures=True)


def _quieten(level: int) -> None:
    """A worker says as little as its parent, and ends with it."""
    logging.getLogger("farflock").setLevel(level)
    end_with_parent()


def faults_of(seed: int) -> list[tuple[str, str]]:
    """A seed's faults, each with the phase that it waits for: every so many seeds in a row have each cell once."""
    turn, place = divmod(seed, len(CELLS) // FAULTS)
    shuffled = random.Random(f"faults/{turn}").sample(CELLS, len(CELLS))
    return shuffled[FAULTS * place : FAULTS * (place + 1)]


def empty_cells(fired: Mapping[tuple[str, str], int]) -> list[tuple[str, str]]:
    """The kinds of faults that met no exchange in this phase."""
    return [cell for cell in CELLS if not fired.get(cell)]
