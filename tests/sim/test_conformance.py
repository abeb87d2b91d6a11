"""Every method x alone, 2, 4 and 7 peers x every misfortune, on the product's own nodes in virtual
time, watched all along: equal bits (or nearly, or only equal means, as the method promises),
tokens and bytes that add up, nothing twice, progress.

Every day all misfortunes strike one after the other, in an order drawn for each cell;
each of them must show. Methods take turns with 2 and 7 peers. Among the long tests are all other
cells; there misfortunes strike alone too, and every arm of the disasters takes its turn.
"""

import asyncio
import collections
import logging
import zlib

import pytest
import torch
from worlds.waiting import now

from farflock.node.simulate.chaos import Chaos
from farflock.node.simulate.chaos_methods import ARMS, ChaosCase
from farflock.node.simulate.population import Population
from farflock.optimizers.catalog import METHODS
from farflock.swarm.identity import Identity
from farflock.swarm.sim.network import Faults
from farflock.swarm.sim.virtual_time import run_virtual

SIZES = (1, 2, 4, 7)
SEEDS = 3
LONG = pytest.mark.long
MISFORTUNES = ("drop", "delay", "partial", "join", "leave", "corrupt", "late")
SHARE = 0.2  # of all frames, where it is frames that suffer
LEAST_S, MOST_S = 2.0, 30.0  # how long one lasts until it shows
TINY = 2  # peers: so few need another one first, or the one left would have no partner


class Dishonest(Population):
    """One of these peers may lie: once, it brings shards that no codec writes."""

    liar = None

    def _peer(self, index):
        peer = super()._peer(index)
        exchange = peer.exchange

        async def dishonest(name, number, shards, **terms):
            if index == self.liar:
                self.liar, shards = None, [shard[:-1] for shard in shards]
            return await exchange(name, number, shards, **terms)

        peer.exchange = dishonest
        return peer


class Trial(Chaos):
    """A swarm of `peers` at first; `shown` counts the faults that took effect."""

    def __init__(self, arm: ChaosCase, peers: int, misfortunes=MISFORTUNES, seed=0):
        super().__init__(
            zlib.crc32(f"{arm.method}/{peers}/{misfortunes}/{seed}".encode()), arm, peers
        )
        self.misfortunes, self.shown = misfortunes, collections.Counter()
        self.happened = []
        self.population = Dishonest(
            self.seed, arm, self.network, self.watch, self.population.identities
        )

    def _faults(self):
        order = self._random.sample(self.misfortunes, len(self.misfortunes))
        if len(self.population.identities) <= TINY:
            between = [kind for kind in order if kind not in ("join", "leave")]
            order = ["join", *between, "leave"]
        self.happened = order
        return [(kind, self._random.choice(self.tap.phases or ("",))) for kind in order]

    async def strike(self, kind):
        await self.until(self.all_know_all)
        self.shown[kind] += await getattr(self, kind)()
        return bool(self.shown[kind])

    async def until(self, shown):
        """Return True if the condition holds in time."""
        end_s = now() + MOST_S
        while not (there := shown()) and now() < end_s:  # noqa: ASYNC110 - anything may show
            await asyncio.sleep(0.1)
        return there

    async def frames_suffer(self, fault, **more):
        before = self.network.fired[fault]
        self.network.faults = Faults(**{fault: SHARE}, **more)
        await asyncio.sleep(LEAST_S)
        there = await self.until(lambda: self.network.fired[fault] > before)
        self.network.faults = Faults()
        return there

    async def drop(self):
        return await self.frames_suffer("loss")

    async def delay(self):
        return await self.frames_suffer("reorder", delay_s=1.0)

    async def corrupt(self):
        """Change frames on the way, serve chunks under false names, and let one peer send payloads
        that no codec writes."""
        self.tap.lying, self.population.liar = SHARE, self.last()
        there = await self.frames_suffer("corrupt")
        there = there and await self.until(lambda: self.population.liar is None or not self.streams)
        self.tap.lying, self.population.liar = 0.0, None
        return there

    async def partial(self):
        """Let one peer compute for so long that rounds are closed without it."""
        victim, before = self.last(), self.rounds_missing_a_peer()
        self.population.slow[victim] = 1e9
        there = await self.until(lambda: self.rounds_missing_a_peer() > before or not self.streams)
        self.population.slow.pop(victim)
        return there

    async def late(self):
        """Cut one peer off until its exchange is overdue (a pair's exchange ends then); it hears of
        the result later."""
        victim, before = self.last(), self.watch.statuses["failed"] + self.watch.statuses["alone"]
        life, peer = self.population.lives[victim], self.population.identities[victim].peer
        self.network.partition(
            {peer}, {identity.peer for identity in self.population.identities} - {peer}
        )

        def overdue():
            now_s = life.peer.run_s()
            ages = [now_s - one.since_s - one.exchange.deadline_s for one in life.loop.driver.table]
            ended = self.watch.statuses["failed"] + self.watch.statuses["alone"] > before
            return (
                not self.streams
                or max(ages, default=0) > 0
                or (self.arm.method == "noloco" and ended)
            )

        there = await self.until(overdue)
        self.network.heal()
        return there

    async def join(self):
        index = len(self.population.identities)
        self.population.identities.append(
            Identity.from_seed(bytes([index]) + self.seed.to_bytes(31, "big"))
        )
        self.watch._peers.append(self.population.identities[index].peer)
        self.population.begin(index)
        return await self.until(self.all_know_all)

    async def leave(self):
        victim = self.last()
        life = self.population.lives.pop(victim)
        life.loop.stop()
        await life.task
        return await self.until(
            lambda: all(victim not in self.members_of(index) for index in self.population.lives)
        )

    # The peers

    def last(self):
        """The member that a quorum can do without: the last of the newest view."""
        return self.members_of(next(iter(self.population.lives)))[-1]

    def members_of(self, index):
        numbers = {
            identity.peer: number for number, identity in enumerate(self.population.identities)
        }
        return [
            numbers[peer] for peer in self.population.lives[index].peer.context.chain.newest.peers
        ]

    def all_know_all(self):
        here = all(life.loop is not None for life in self.population.lives.values())
        return here and all(
            self.population.lives.keys() <= set(self.members_of(index))
            for index in self.population.lives
        )

    def rounds_missing_a_peer(self):
        pairs = self.arm.method == "noloco"
        return sum(
            self.watch.statuses[one] for one in (("alone", "failed") if pairs else ("partial",))
        )


def tried(arm, peers, misfortunes=MISFORTUNES, seed=0):
    """Run the trial of an arm; return it and its report."""

    async def whole():
        trial = Trial(arm, peers, misfortunes, seed)
        return trial, await trial.run()

    torch.set_num_threads(1)
    return run_virtual(whole())


def require_clean(arm, size, misfortunes, seed=0):
    logging.getLogger("farflock").setLevel(logging.CRITICAL)
    trial, report = tried(arm, size, misfortunes, seed)
    cell = f"{arm.method}, {size} peers, {misfortunes}, seed {seed}"
    assert report.violations == [], f"{cell}: {report.violations[0]}"
    assert [one for one in trial.happened if not trial.shown[one]] == [], cell
    assert set(misfortunes) <= set(trial.happened)
    assert bool(report.rounds) == (arm.method != "local"), cell
    return report


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if size == (2, 7)[place % 2] else LONG)
        for place, name in enumerate(METHODS)
        for size in SIZES
    ],
)
def test_a_method_keeps_its_promise_among_all_misfortunes(name, size):
    arm = next(arm for arm in ARMS if arm.method == name)
    require_clean(arm, size, MISFORTUNES)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "arm",
    [pytest.param(arm, id=f"{place}-{arm.method}", marks=LONG) for place, arm in enumerate(ARMS)],
)
def test_an_arm_keeps_its_promise_in_each_misfortune_alone_and_in_all_in_other_orders(arm, size):
    for misfortune in MISFORTUNES:
        require_clean(arm, size, (misfortune,))
    for seed in range(1, 1 + SEEDS):
        require_clean(arm, size, MISFORTUNES, seed)


def test_the_same_trial_ends_twice_in_the_same_state():
    arm = ARMS[1]
    assert require_clean(arm, 4, MISFORTUNES) == require_clean(arm, 4, MISFORTUNES)
