"""Seeded disasters of returns: lives end and come back, with what their folders kept.

One seed decides everything: the number of peers, the method, the disasters, the order and the times
of the starts, and who stays away. The nodes are those of node/simulate/homes.py, and the checks are
in node/simulate/return_invariants.py.
"""

import asyncio
import collections
import random
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from farflock.node.assembly.core import Core
from farflock.node.assembly.known_run import KnownRun, own_run
from farflock.node.run.manifest import simulated_default
from farflock.node.simulate.chaos import LINK, SeedReport, report_of
from farflock.node.simulate.chaos_methods import ChaosCase, CountingTask, case_of
from farflock.node.simulate.homes import Home, Homes, PlainNode
from farflock.node.simulate.invariants import STORE_BYTES
from farflock.node.simulate.lives import SimPeers
from farflock.node.simulate.return_invariants import ReturnsChecker
from farflock.node.train.driver import Driver
from farflock.node.train.task import Loss
from farflock.swarm.compute import inline
from farflock.swarm.identity import Identity
from farflock.swarm.peer.peer import Peer
from farflock.swarm.protocol.quorum import is_quorum
from farflock.swarm.protocol.views import View
from farflock.swarm.sim.network import SimNetwork

COMING_BACK = ("cut", "one", "copy", "outside", "goodbye", "forgotten")
OF_THREE = ("one",)  # disasters that need as many peers
VIEW_S, BRANCH_AFTER_S = 2.0, 40.0
AWAY_S = 60.0  # for which a peer stays away: the others go on without it, if they can
ONE_CHAIN_S = 120.0  # after the last disaster: by then all are in one chain, and all count
ROUNDS = 2  # applied by every peer since all are in one chain
LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class ReturnsCase:
    """One seed's swarm and its disasters, in order; peers start `apart_s` after one another at
    first, in one view or in one after the other, and save every `save_s`."""

    arm: ChaosCase
    peers: int
    apart_s: float
    save_s: float
    disasters: tuple[str, ...]


def returns_case(seed: int, name: str | None = None) -> ReturnsCase:
    """Return what a seed runs, of all methods or of the named one."""
    draw = random.Random(f"returns chaos/{seed}")
    peers = draw.choice([2, 2, 2, 3, 3, 3, 4, 5])
    kinds = [each for each in COMING_BACK if peers > 2 or each not in OF_THREE]
    disasters = tuple(draw.choices(kinds, k=draw.randint(1, 3)))
    apart_s, save_s = draw.choice([0.3, 3.0]), draw.choice([3.0, 8.0, 20.0])
    return ReturnsCase(case_of(seed, name), peers, apart_s, save_s, disasters)


class ReturnsChaos:
    """One seeded disaster of returns; made inside the loop that runs it. Its homes are folders
    below `folder`."""

    def __init__(self, seed: int, case: ReturnsCase, folder: Path) -> None:
        self.seed, self.case, self._draw = seed, case, random.Random(f"returns/{seed}")
        self.numbers = range(case.peers)
        identities = [
            Identity.from_seed(bytes([number]) + seed.to_bytes(31, "big"))
            for number in self.numbers
        ]
        keys = [identity.peer for identity in identities]
        known = _known(seed, identities[0])
        self.network = SimNetwork(seed, LINK)
        self.watch = ReturnsChecker(case.arm.method, keys, lambda: self.homes.living())
        peers = SimPeers(known.terms, self.network, identities, store_bytes=STORE_BYTES)
        self.homes = Homes(peers, known, folder, self._node, self.watch, case.save_s)
        self.fired: collections.Counter[tuple[str, str]] = collections.Counter()
        self._streams = len(case.arm.streams())

    def _node(self, peer: Peer, home: Home) -> PlainNode:
        """Assemble the node of a life; each life's gradients are its own."""
        replica, birth = self.case.arm.replica(home.birth), home.birth
        driver, task = Driver(self.case.arm.make(), replica), CountingTask(replica)

        async def train(work: Callable[[], Loss]) -> Loss:
            loss = work()
            await asyncio.sleep(self.case.arm.step_s)
            return loss

        core = Core.over(peer, driver, task, inline, train)
        self.watch.exchange_client(peer, home.number, birth, driver, core.client)
        core.loop.report = lambda kind, fields: self.watch.reported(
            home.number, birth, driver, kind, fields, driver.position.rounds
        )
        return PlainNode(peer, core.state_sync, core.loop, task)

    async def run(self) -> SeedReport:
        """Run from the first start until all are in one chain after the last disaster."""
        others = asyncio.all_tasks()
        for number in self.numbers:
            self.homes.start(number)
            await asyncio.sleep(self.case.apart_s)
        await self.together("the start")
        for kind in self.case.disasters:
            await asyncio.sleep(self._draw.uniform(0, 10))
            self.fired[kind, self.case.arm.method] += await self.strike(kind)
        recovery_s = await self.together("the last disaster")
        self._check_states()
        await self.homes.end_all()
        self._check_rest(asyncio.all_tasks() - others)
        watch = self.watch
        return SeedReport(
            self.seed, watch.violations, +self.fired, watch.rounds, watch.digest(), recovery_s
        )

    # disasters

    async def strike(self, kind: str) -> bool:
        """Let a disaster happen; return whether it did. Whoever is to come back has started."""
        match kind:
            case "cut":
                return await self._cut(self._some(), self._draw.random() < 0.2)
            case "one":
                return await self._one()
            case "copy":
                return await self._copy(self._draw.choice(self.numbers))
            case "outside":
                return await self._outside()
            case "goodbye":
                return await self._goodbye(self._draw.choice(self.numbers))
        return await self._forgotten(self._draw.choice(self.numbers))

    def _some(self) -> Sequence[int]:
        """Return all peers, or some of them."""
        if self._draw.random() < 0.7:
            return self.numbers
        return self._draw.sample(self.numbers, self._draw.randint(1, len(self.numbers)))

    async def _cut(self, numbers: Sequence[int], stays_away: bool = False) -> bool:
        """End these peers at once, and start them in any order; the last one late, if one of them
        `stays_away`."""
        await self.homes.kill(*numbers)
        await asyncio.sleep(self._draw.choice([0.5, 3, 12]))
        await self._start(numbers, stays_away)
        return True

    async def _start(self, numbers: Sequence[int], stays_away: bool = False) -> None:
        *early, last = self._draw.sample(numbers, len(numbers))
        for number in early:
            self.homes.start(number)
            await asyncio.sleep(self._draw.choice([0, 0, 1, 6]))
        await asyncio.sleep(AWAY_S if stays_away else 0)
        self.homes.start(last)
        await asyncio.sleep(self._draw.choice([1, 5, 15, 30]))

    async def _one(self) -> bool:
        """Restart one of three or more: the others are a quorum, so no return may be made."""
        await self.together("the disaster before")
        made = len(self.watch.returns)
        await self._cut([self._draw.choice(self.numbers)])
        await self.together("the restart of one")
        if len(self.watch.returns) > made:
            self.watch.violate("a return was made although only one of the members restarted")
        return True

    async def _copy(self, number: int) -> bool:
        """Copy a folder, and start the copy beside its original, which lives on or starts again
        with all others; then end one of the two."""
        await self.together("the disaster before")
        self.watch.damaged.add(self.homes.key(number))
        if self._draw.random() < 0.5:
            await self.homes.kill(*self.numbers)
            for each in self._draw.sample(self.numbers, len(self.numbers)):
                self.homes.start(each)
                await asyncio.sleep(self._draw.choice([0, 0, 1]))
        self.homes.copy(number)
        await asyncio.sleep(self._draw.uniform(6, 25))
        await self.homes.end_copy(number, original=self._draw.random() < 0.5)
        return True

    async def _outside(self) -> bool:
        """Put the folders of all but one back to before that one was admitted: it alone knows the
        newest view, and is in none that the others know."""
        await self.together("the disaster before")
        view = self._newest(self.homes.by_number[0])
        last = [n for n in self.numbers if view is not None and self._go_on_without(view, n)]
        number = self._draw.choice(last)
        key, others = self.homes.key(number), [n for n in self.numbers if n != number]
        await self.homes.kill(number)
        if not await self._within(20, lambda: not any(self._lists(n, key) for n in others)):
            return False
        before = {n: self.homes.by_number[n].views.read_bytes() for n in others}
        self.homes.start(number)
        await self.together("the return of the one outside")
        await asyncio.sleep(self._draw.uniform(3, 10))
        await self.homes.kill(*others)
        for n in others:
            self.homes.by_number[n].views.write_bytes(before[n])
            self.watch.put_back.add(self.homes.key(n))
        await self._start(others)
        return True

    def _go_on_without(self, view: View, number: int) -> bool:
        """True if the others are a quorum of a view."""
        key = self.homes.key(number)
        return is_quorum({n for n, peer in enumerate(view.peers) if peer != key}, len(view.peers))

    def _lists(self, number: int, key: str) -> bool:
        view = self._newest(self.homes.by_number[number])
        return view is None or view.lists(key)

    async def _goodbye(self, number: int) -> bool:
        """Let one say goodbye just before all lives end: the others come back without it."""
        await self.together("the disaster before")
        session = self.homes.by_number[number].session
        assert session is not None
        leaving = asyncio.create_task(session.leave())
        await asyncio.sleep(self._draw.uniform(0.3, 1.0))
        await self.homes.kill(*self.numbers)
        await asyncio.wait([leaving])
        others = [n for n in self.numbers if n != number]
        await self._start(others)
        await self.together("a power cut, without the one that had left,", others)
        self.homes.start(number)
        return True

    async def _forgotten(self, number: int) -> bool:
        """End all lives, and put one folder back to before its last view."""
        await self.homes.kill(*self.numbers)
        home = self.homes.by_number[number]
        struck = bool(home.older)
        if struck:
            home.views.write_bytes(home.older)
            self.watch.damaged.add(self.homes.key(number))
        await self._start(self.numbers)
        return struck

    # progress

    async def together(self, after: str, numbers: Collection[int] | None = None) -> float:
        """Wait until these peers (None: all) are in one chain, and then until all of them count in
        it; return the seconds taken. Not to be by `ONE_CHAIN_S` is a violation."""
        numbers, begun_s = numbers or self.numbers, _now()
        since_s, done = begun_s, False
        while not done and _now() - begun_s < ONE_CHAIN_S:
            await asyncio.sleep(LOOK_S)
            if self._apart(numbers):
                since_s = _now()
            done = not self._idle(numbers, since_s)
        for what in [] if done else self._apart(numbers) or self._idle(numbers, since_s):
            self.watch.violate(f"{what} {ONE_CHAIN_S:.0f} s after {after}")
        return _now() - begun_s

    async def _within(self, seconds: float, there: Callable[[], bool]) -> bool:
        ends_s = _now() + seconds
        while not there() and _now() < ends_s:  # noqa: ASYNC110 - of all nodes
            await asyncio.sleep(LOOK_S)
        return there()

    def _newest(self, home: Home) -> View | None:
        chain = home.session.peer.context.chain if home.session else None
        return None if chain is None or home.line is None else chain.newest

    def _apart(self, numbers: Collection[int]) -> list[str]:
        """Return a sentence for each peer that is not with all others in one newest view."""
        found, keys = [], {self.homes.key(number) for number in numbers}
        views = {number: self._newest(self.homes.by_number[number]) for number in numbers}
        hashes = collections.Counter(view.hash for view in views.values() if view is not None)
        common = max(hashes, key=lambda digest: hashes[digest], default=b"")
        for number, view in views.items():
            home = self.homes.by_number[number]
            peer = home.session.peer if home.session else None
            if not home.is_in or peer is None or view is None:
                found.append(f"peer {number} has not come into the run")
            elif not peer.membership.is_member or peer.branching.adrift:
                found.append(f"peer {number} is no member of its view {view.number}")
            elif view.hash != common or {*view.peers} != keys:
                found.append(f"peer {number} is in view {view.number}, not in one of all")
        return found

    def _idle(self, numbers: Collection[int], since_s: float) -> list[str]:
        """Return a sentence for each peer that has made no progress since."""
        if not self._streams:
            return [] if _now() - since_s > LOOK_S else ["nobody has been in one view"]
        counts, found = self.watch.rounds_since(since_s), []
        for number in numbers:
            key = self.homes.key(number)
            applied = counts[key]
            if len(applied) < self._streams or min(applied.values()) < ROUNDS:
                found.append(f"peer {number} has applied {dict(applied)} rounds")
            elif self.watch.counted_s.get(key, 0.0) <= since_s:
                found.append(f"no round has counted peer {number}")
        return found

    # checks

    def _check_states(self) -> None:
        """Compare what all hold at the end."""
        for home in self.homes.living():
            if home.part is not None and home.is_in:
                self.watch.compare_exact(home)

    def _check_rest(self, left: Collection[asyncio.Task[object]]) -> None:
        for home in self.homes.by_number.values():
            task = home.task
            if task is not None and not task.cancelled() and (error := task.exception()):
                self.watch.violate(f"peer {home.number} ended with an error: {error!r}")
        if left:
            names = sorted(task.get_name() for task in left)[:3]
            self.watch.violate(f"{len(left)} tasks outlive their peers, such as {names}")
        if self.network.missing_bytes() or self.network.bytes["overflowed"]:
            self.watch.violate(f"bytes are missing: {self.network.bytes}")


def _known(seed: int, founder: Identity) -> KnownRun:
    """Return a run; of its manifest, only what concerns peers matters here."""
    terms = f"run.seed={seed}", f"exchange.view_s={VIEW_S}"
    manifest = simulated_default([*terms, f"exchange.branch_after_s={BRANCH_AFTER_S}"])
    return own_run(founder, manifest)


def _now() -> float:
    return asyncio.get_running_loop().time()


def run_returns_seed(seed: int, name: str | None = None) -> SeedReport:
    """Run one seeded disaster from start to end, with the named method if a name is given."""

    async def main(folder: Path) -> SeedReport:
        return await ReturnsChaos(seed, returns_case(seed, name), folder).run()

    with tempfile.TemporaryDirectory() as folder:
        return report_of(seed, main(Path(folder)))
