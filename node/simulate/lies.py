"""Liars in a disaster: which peers lie, in which way and when, and what honest ones then suffer.

A seed chooses the liars and gives each a way to lie from the registry. A liar waits for a phase of
an exchange or of a change of view, lies for a while, and is a peer like any other until the next.
"""

import asyncio
import collections
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from farflock.node.simulate.chaos_methods import ChaosCase
from farflock.node.simulate.invariants import InvariantChecker
from farflock.node.simulate.liars.liar import Liar
from farflock.node.simulate.liars.registry import LIARS, MIXED
from farflock.node.simulate.phase_tap import VIEW_PHASES, PhaseTap
from farflock.node.simulate.population import PeerLife, Population
from farflock.swarm.links import PeerId
from farflock.swarm.protocol.views import View
from farflock.swarm.sim.network import SimNetwork

MAX_SHARE = 1 / 3  # of the voters
FEWEST = 4  # peers with a liar among them
LIES_S = (1.0, 4.0)  # at once
ANSWERS_S = (6.0, 12.0)  # if it has to be asked
RESTS_S = (0.0, 2.0)
HEARD_S = 10.0  # a quorum hears a member for so long: nobody may vote it out

Acted = collections.Counter[tuple[str, str]]


@dataclass(slots=True)
class LieReport:
    """The lies of one seed, or of many, and what honest peers said of them.

    `acted` counts lies by adversary and phase, `said` statements by adversary, `refusals` what
    honest peers refused or dropped by reason, and `accusations` the honest peers that made one, by
    adversary and what it did."""

    liars: dict[int, str] = field(default_factory=dict)  # by the number of the peer, of one seed
    acted: Acted = field(default_factory=collections.Counter)
    said: collections.Counter[str] = field(default_factory=collections.Counter)
    refusals: collections.Counter[str] = field(default_factory=collections.Counter)
    accusations: Acted = field(default_factory=collections.Counter)

    def add(self, other: "LieReport") -> None:
        """Count another seed's lies too."""
        self.acted += other.acted
        self.said += other.said
        self.refusals += other.refusals
        self.accusations += other.accusations


def liars_of(seed: int, share: float, peers: int, has_lists: bool) -> dict[int, str]:
    """Return which peers of a seed lie, by number, and how; none for a share of 0.

    Consecutive seeds go through all ways to lie, as far as the seed's method has lists that members
    vote on. At no time are liars more than a third of the peers that have come so far, but for the
    first few, which do not lie yet."""
    if not share or peers < FEWEST:
        return {}
    chance, count = random.Random(f"liars/{seed}"), max(1, math.floor(share * peers))
    numbers = [
        chance.randrange(3 * place + 2 if place else 0, 3 * place + 3) for place in range(count)
    ]
    turn, first = divmod(seed, len(MIXED))
    names = random.Random(f"ways to lie/{turn}").sample(MIXED, len(MIXED))
    fit = [name for name in names[first:] + names[:first] if has_lists or not needs_lists(name)]
    return dict(zip(numbers, fit, strict=False))


def needs_lists(name: str) -> bool:
    """True if a way to lie is about lists that members vote on."""
    return LIARS[name].needs_lists


class Lies:
    """The liars of one seed, and what they did. None begins to lie unless it `may_begin`."""

    def __init__(
        self, seed: int, report: LieReport, arm: ChaosCase, population: Population, tap: PhaseTap
    ) -> None:
        self._seed, self.report, self._population, self._tap = seed, report, population, tap
        self._phases = [*arm.phases(), *sorted(set(VIEW_PHASES.values()))]
        self._liars: dict[int, Liar] = {}
        self.may_begin: Callable[[], bool] = lambda: True

    async def run(self) -> None:
        """Lie until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number, name in self.report.liars.items():
                tasks.create_task(self._lie_on(number, name))

    async def _lie_on(self, number: int, name: str) -> None:
        chance = random.Random(f"liar/{self._seed}/{number}")
        while True:
            for phase in chance.sample(self._phases, len(self._phases)):
                met, liar = await self._tap.meets(phase), self._liar(number, name)
                if met and liar is not None and self.may_begin():
                    lasts_s = chance.uniform(*(ANSWERS_S if liar.only_answers else LIES_S))
                    await self._lie(liar, name, phase, lasts_s)
                await asyncio.sleep(chance.uniform(*RESTS_S))

    def _liar(self, number: int, name: str) -> Liar | None:
        """Return the liar beside a peer's life, with what it remembers of it; None without one."""
        life, known = self._population.lives[number], self._liars.get(number)
        if life.peer is None or life.loop is None or life.task.done():
            return None
        if known is None or known.peer is not life.peer:
            known = LIARS[name](life.peer, self._population.identities[number])
            self._liars[number] = known
        return known

    async def _lie(self, liar: Liar, name: str, phase: str, lasts_s: float) -> None:
        before, kept = liar.said.total(), liar.kept
        async with liar.lying():
            await asyncio.sleep(lasts_s)
        said = liar.said.total() - before
        self.report.acted[name, phase] += bool(said or liar.kept > kept)
        self.report.said[name] += said


class HonestWatch:
    """A watch over honest peers: whatever the liars do, none is accused by another one, or voted
    out while a quorum hears it."""

    def __init__(
        self,
        report: LieReport,
        population: Population,
        network: SimNetwork,
        checker: InvariantChecker,
    ) -> None:
        self._report, self._population = report, population
        self._network, self._checker = network, checker
        # By member and life: since when it is in the newest views, and a quorum of them hears it.
        self._heard_s: dict[tuple[PeerId, int], float] = {}

    def look(self) -> None:
        """Compare the newest views with those of the look before."""
        view, now_s = self._newest(), asyncio.get_running_loop().time()
        before, self._heard_s = self._heard_s, {}
        for number, life in self._honest():
            if view is None or life.peer is None or not self._is_heard(view, life.peer.me):
                continue
            me = life.peer.me, life.peer.context.incarnation
            since_s = before.get(me, now_s)
            if view.index(*me) is not None:
                self._heard_s[me] = since_s
            elif me in before and now_s - since_s > HEARD_S and number not in self._population.slow:
                self._checker.violate(f"peer {number} is out of view {view.number}, and was heard")

    def _honest(self) -> list[tuple[int, PeerLife]]:
        return [
            (number, life)
            for number, life in self._population.lives.items()
            if number not in self._report.liars and life.loop is not None and not life.task.done()
        ]

    def _newest(self) -> View | None:
        chains = [life.peer.context.chain for _, life in self._honest() if life.peer is not None]
        known = [chain.newest for chain in chains if chain is not None]
        return max(known, key=lambda view: view.number, default=None)

    def _is_heard(self, view: View, peer: PeerId) -> bool:
        """True if a quorum of a view's honest members hears a peer."""
        honest = {life.peer.me for _, life in self._honest() if life.peer is not None}
        hears = {
            place
            for place, other in enumerate(view.peers)
            if other in honest and self._network.life(other, peer) == "alive"
        }
        return view.electorate.is_quorum(hears)

    def conclude(self) -> None:
        """Count what honest peers refused and whom they accused, and check that no honest one is
        among these."""
        identities = self._population.identities
        liars = {identities[number].peer: name for number, name in self._report.liars.items()}
        honest = {identity.peer for identity in identities} - liars.keys()
        for peer in self._population.peers:
            if peer.me in liars:
                continue
            self._report.refusals.update(_refused(peer.context.counters))
            for said in peer.context.accusations:
                self._report.accusations[liars.get(said.peer, "nobody known"), said.what] += 1
                if said.peer in honest:
                    self._checker.violate(f"{peer.me[-6:]} accuses {said.peer[-6:]}: {said.what}")


def _refused(counters: Mapping[str, int]) -> dict[str, int]:
    reasons = ("refused: ", "dropped: ")
    return {reason: count for reason, count in counters.items() if reason.startswith(reasons)}
