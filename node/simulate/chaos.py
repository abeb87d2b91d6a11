"""Seeded disasters: a small swarm of real nodes in virtual time, hit by faults and checked.

One seed decides everything: the number of peers, the method and codec, the faults, and the phase of
an exchange at which each strikes. The checks are in node/simulate/invariants.py. A violation prints
the command that reproduces it.
"""

import asyncio
import collections
import concurrent.futures
import itertools
import logging
import multiprocessing
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from farflock.node.simulate.chaos_methods import PHASES, ChaosCase, case_of
from farflock.node.simulate.invariants import DEADLINE_S, InvariantChecker
from farflock.node.simulate.phase_tap import PhaseTap
from farflock.node.simulate.population import SLICE_S, PeerLife, Population
from farflock.node.simulate.standstill import Standstill, moving_clock
from farflock.node.simulate.worker_processes import end_with_parent, warm
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.protocol.quorum import is_quorum
from farflock.swarm.sim.network import Faults, LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import Deadlock, run_virtual

FAULTS = 4  # per seed
ENOUGH_SEEDS = 100  # for every kind of fault to meet every phase of an exchange
GAP_S = 2.0  # maximum time from a fault's end to the wait for the next fault's phase
RECOVERY_S = 30.0  # after the start and the last fault: by then all are members and make progress
PROGRESS_STEPS = 4  # by every peer
RECOVERED_ROUNDS = 3  # applied by every peer after the last fault
LOOK_S = 1.0  # between checks of what peers hold and wait for
LINK = LinkModel(2.5e6, 2.5e6, 0.02, 0.01)
STOPPED = 1e9  # slowdown of a stopped peer
SLOW_LINE = 25.0  # a newcomer's line: half a second one way, so that rounds pass as it comes in
CALM_AFTER_DEATH_S = 2 * DEADLINE_S  # no other fault: one death alone may fail no round
_RATE = {  # the network's rate of each fault that hits single frames
    "loss": "loss",
    "duplicate": "duplicate",
    "reorder": "reorder",
    "corrupt": "corrupt",
    "delay": "reorder",
}
KINDS = ("kill", "restart", "newcomer", "partition", "stop", "slow", *_RATE)
CELLS = [(kind, phase) for kind in KINDS for phase in sorted(set(PHASES.values()))]


@dataclass(slots=True)
class SeedReport:
    """The result of one seed."""

    seed: int
    violations: list[str]
    fired: collections.Counter[tuple[str, str]]
    rounds: int
    state_hash: str
    recovery_s: float = 0.0  # from the last fault until all were in and had made progress


@dataclass(slots=True)
class Chaos:
    """One seeded disaster with a given method and, optionally, a given number of peers."""

    seed: int
    arm: ChaosCase
    peers: int = 0  # 0: the seed decides
    watch: InvariantChecker = field(init=False)
    network: SimNetwork = field(init=False)
    population: Population = field(init=False)
    tap: PhaseTap = field(init=False)
    fired: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    _random: random.Random = field(init=False)
    streams: int = field(init=False)  # how many the method has

    def __post_init__(self) -> None:
        self._random = random.Random(f"chaos/{self.seed}")
        self.network = SimNetwork(self.seed, LINK)
        self.tap = PhaseTap(self.arm.phases(), self._random)
        self.network.tap = self.tap.hear
        count = self.peers or min(self._random.randint(4, 12) for _ in range(2))
        identities = [
            Identity.from_seed(bytes([index]) + self.seed.to_bytes(31, "big"))
            for index in range(count)
        ]
        self.streams = len(self.arm.streams())
        self.watch = InvariantChecker(self.arm.method, [identity.peer for identity in identities])
        self.population = Population(self.seed, self.arm, self.network, self.watch, identities)

    async def run(self) -> SeedReport:
        """Run from the first peer's start until all have recovered from the last fault."""
        looking = asyncio.create_task(self._look_around())
        for index in range(len(self.population.identities)):
            self.population.begin(index)
            await asyncio.sleep(0.3)
        await self.progress(1, "the start")
        for kind, wanted in self._faults():
            phase = await self.tap.wait_for(wanted)
            self.fired[kind, phase] += await self.strike(kind) and bool(phase)
            await asyncio.sleep(self._random.uniform(0, GAP_S))
        self._check_memory()
        self.repair()
        recovery_s = await self.progress(RECOVERED_ROUNDS, "the last fault")
        self._check_memory()
        self._check_waits()
        looking.cancel()
        await asyncio.wait([looking])
        await self.population.end_all()
        self.check_rest(looking)
        return SeedReport(
            self.seed,
            self.watch.violations,
            +self.fired,
            self.watch.rounds,
            self.watch.digest(),
            recovery_s,
        )

    # faults

    def _faults(self) -> list[tuple[str, str]]:
        """Return the faults in order, each with the phase of an exchange at which it strikes."""
        return faults_of(self.seed)

    async def strike(self, kind: str) -> bool:
        """Let a fault happen, from start to end; return whether it hit anything."""
        living = [index for index, life in self.population.lives.items() if life.loop is not None]
        victim = self._random.choice(living or [0])
        match kind:
            case "kill":
                return await self._kill_for_good(victim)
            case "restart":
                return await self._restart(victim)
            case "newcomer":
                return await self._restart(victim, SLOW_LINE)
            case "partition":
                return await self._partition()
            case "stop":
                return await self._stop(victim)
            case "slow":
                self.population.slow[victim] = self._random.uniform(2, 6)
                self.network.slow(self.population.identities[victim].peer, 4.0)
                return True
        return await self._disturb(kind)

    async def _kill_for_good(self, victim: int) -> bool:
        if not await self.kill(victim):
            return False
        lives = self.population.lives
        # Only without a living slow peer, which could hold up a round until its deadline.
        if not any(lives[index].loop for index in self.population.slow):
            self.watch.calm_until_s = asyncio.get_running_loop().time() + CALM_AFTER_DEATH_S
        await asyncio.sleep(CALM_AFTER_DEATH_S)
        return True

    async def _restart(self, victim: int, slower: float = 1.0) -> bool:
        if not await self.kill(victim):
            return False
        await asyncio.sleep(self._random.uniform(0.1, 6.0))
        if slower > 1.0:
            self.population.slow.setdefault(victim, 1.0)
            self.network.slow(self.population.identities[victim].peer, slower)
        self.population.begin(victim)
        return True

    async def kill(self, victim: int) -> bool:
        in_run = sum(life.loop is not None for life in self.population.lives.values())
        if in_run <= 3 or not self._quorums_stay(victim):
            return False  # a majority must stay: losing it is another test
        self.network.kill(self.population.identities[victim].peer)
        await self.population.end(victim)
        return True

    def _quorums_stay(self, victim: int) -> bool:
        """Return whether the survivors are a quorum of each newest view and of the view of each
        next round."""
        others = [
            life.peer
            for index, life in self.population.lives.items()
            if index != victim and not life.task.done()
        ]
        living = {(peer.me, peer.context.incarnation) for peer in others if peer is not None}
        for peer in others:
            chain = peer.context.chain if peer is not None else None
            if peer is None or chain is None:
                continue
            next_view = chain.at(peer.rounds.floor()) if peer.rounds.names else None
            for view in (chain.newest, next_view):
                members = view.members if view is not None else ()
                there = {
                    place
                    for place, member in enumerate(members)
                    if (member.peer, member.incarnation) in living
                }
                if members and not is_quorum(there, len(members)):
                    return False
        return True

    async def _partition(self) -> bool:
        peers = [identity.peer for identity in self.population.identities]
        some = set(self._random.sample(peers, self._random.randint(1, len(peers) // 2)))
        self.network.partition(some, set(peers) - some)
        await asyncio.sleep(self._random.uniform(1, 8))
        self.network.heal()
        return True

    async def _stop(self, victim: int) -> bool:
        peer = self.population.identities[victim].peer
        self.network.stop(peer)
        self.population.slow[victim] = STOPPED
        await asyncio.sleep(self._random.uniform(0.5, 8))
        self.population.slow.pop(victim)
        self.network.cont(peer)
        return True

    async def _disturb(self, kind: str) -> bool:
        """Disturb a share of all frames for a while; return whether any frame was hit."""
        share, before = self._random.uniform(0.02, 0.2), self.network.fired[_RATE[kind]]
        self.tap.lying = share if kind == "corrupt" else 0.0
        delay_s = 0.2 if kind == "reorder" else 1.0
        self.network.faults = Faults(**{_RATE[kind]: share}, delay_s=delay_s)
        await asyncio.sleep(self._random.uniform(2, 6))
        self.network.faults, self.tap.lying = Faults(), 0.0
        return self.network.fired[_RATE[kind]] > before

    def repair(self) -> None:
        """End all faults: every peer runs at full speed, and all hear each other."""
        self.network.heal()
        self.network.faults = Faults()
        self.population.slow.clear()
        for identity in self.population.identities:
            self.network.set_link(identity.peer, LINK)
        for index, life in self.population.lives.items():
            if life.task.done():
                self._check_ended(index, life)
                self.population.begin(index)

    # checks

    async def _look_around(self) -> None:
        """Check every peer every `LOOK_S`."""
        while True:
            await asyncio.sleep(LOOK_S)
            for life in self.population.lives.values():
                if life.peer is not None and not life.task.done():
                    self.watch.look(life.peer)

    async def progress(self, rounds: int, after: str) -> float:
        """Wait until all peers are members, train, and have applied `rounds` rounds.

        Return the time taken. A peer that has not done all that after `RECOVERY_S` is a
        violation."""
        begun_s = asyncio.get_running_loop().time()
        steps = {
            index: life.loop.step if life.loop is not None else 0
            for index, life in self.population.lives.items()
        }
        while lagging := self._lagging(begun_s, steps, rounds):
            if asyncio.get_running_loop().time() - begun_s >= RECOVERY_S:
                for what in lagging:
                    self.watch.violate(f"{what} in the {RECOVERY_S:.0f} s after {after}")
                break
            await asyncio.sleep(SLICE_S)
        return asyncio.get_running_loop().time() - begun_s

    def _lagging(self, begun_s: float, steps: Mapping[int, int], rounds: int) -> list[str]:
        """Return a sentence for each peer without enough progress, which says what is missing."""
        counts, found = self.watch.rounds_since(begun_s), []
        for index, life in self.population.lives.items():
            each = counts[self.population.identities[index].peer]
            applied = each.total() if len(each) == self.streams else 0
            if life.peer is None or life.loop is None:
                found.append(f"peer {index} has not joined the run")
            elif not life.peer.membership.is_member:
                found.append(f"peer {index} has not become a member")
            else:
                made = life.loop.step - steps[index]
                lacks_rounds = self.streams > 0 and applied < rounds
                if made < PROGRESS_STEPS or lacks_rounds:
                    found.append(f"peer {index} has made {made} steps and {dict(each)} rounds")
        return found

    def _check_ended(self, index: int, life: PeerLife) -> None:
        if not life.task.cancelled() and (error := life.task.exception()) is not None:
            self.watch.violate(f"peer {index} ended with an error: {error!r}")

    def _check_memory(self) -> None:
        for life in self.population.lives.values():
            if life.peer is not None and not life.task.done():
                self.watch.check_memory(life.peer)

    def _check_waits(self) -> None:
        for life in self.population.lives.values():
            if life.peer is not None and life.loop is not None:
                self.watch.check_waits(life.peer, life.loop)

    def check_rest(self, looking: asyncio.Task[None]) -> None:
        """Check that no life ended early, no task outlives its peer, and no bytes are missing."""
        if not looking.cancelled():
            looking.result()  # raises the error that ended the checks
        for index, life in self.population.lives.items():
            self._check_ended(index, life)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            names = sorted(task.get_name() for task in left)[:3]
            self.watch.violate(f"{len(left)} tasks outlive their peers, such as {names}")
        sent_bytes: collections.Counter[PeerId] = collections.Counter()
        for line in self.population.peers.lines:
            sent_bytes[line.me] += line.sent_bytes
        if sent_bytes != self.tap.sent_bytes:
            self.watch.violate(
                f"peers count {sent_bytes} sent bytes, but the network saw {self.tap.sent_bytes}"
            )
        if self.network.missing_bytes() or self.network.bytes["overflowed"]:
            self.watch.violate(
                f"{self.network.missing_bytes()} bytes are missing: {self.network.bytes}"
            )


def run_seed(seed: int, name: str | None = None) -> SeedReport:
    """Run one seeded disaster from start to end, with the named method if a name is given."""

    async def main() -> SeedReport:
        return await Chaos(seed, case_of(seed, name)).run()

    return report_of(seed, main())


def report_of(seed: int, disaster: Coroutine[Any, Any, SeedReport]) -> SeedReport:
    """Run a disaster in virtual time. That it hangs, or that time stands still, is a violation."""
    torch.set_num_threads(1)
    try:
        with moving_clock():
            return run_virtual(disaster)
    except (Deadlock, Standstill) as error:
        return SeedReport(seed, [str(error)], collections.Counter(), 0, "")


def run_seeds(
    first: int,
    count: int,
    workers: int = 1,
    name: str | None = None,
    run: Callable[[int, str | None], SeedReport] | None = None,
) -> Iterator[SeedReport]:
    """Yield the reports of seeds in order; they are the same for any number of worker processes,
    which end at once with the iterator. `run` runs one seed; None: `run_seed`."""
    run = run or run_seed
    seeds, names = range(first, first + count), itertools.repeat(name)
    if workers == 1:
        yield from map(run, seeds, names)
        return
    level, context = logging.getLogger("farflock").level, warm(run.__module__)
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _quieten, (level,))
    try:
        yield from pool.map(run, seeds, names)
    except BaseException:  # nobody waits for the seeds that run now, of which one may hang
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _quieten(level: int) -> None:
    """Give a worker process its parent's log level, and end it with its parent."""
    logging.getLogger("farflock").setLevel(level)
    end_with_parent()


def faults_of(seed: int) -> list[tuple[str, str]]:
    """Return a seed's faults, each with the phase that it waits for. No block of `len(CELLS)
    // FAULTS` seeds has a cell twice."""
    turn, place = divmod(seed, len(CELLS) // FAULTS)
    shuffled = random.Random(f"faults/{turn}").sample(CELLS, len(CELLS))
    return shuffled[FAULTS * place : FAULTS * (place + 1)]


def empty_cells(fired: Mapping[tuple[str, str], int]) -> list[tuple[str, str]]:
    """Return the (fault, phase) pairs that never struck."""
    return [cell for cell in CELLS if not fired.get(cell)]
