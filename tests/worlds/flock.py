"""Whole `Peer`s that serve the stages of a model, on the simulated network. A contribution is a
name, as in `herd`, so that whatever counts twice or in the wrong stage is seen."""

import asyncio
import collections
import json

from worlds.herd import reduce
from worlds.peers import end, identity, peer_in
from worlds.waiting import until

from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.peer.snapshots import Snapshot
from farflock.swarm.protocol.exchange.close_list import RoundTerms
from farflock.swarm.protocol.exchange.streams import Stream
from farflock.swarm.roles import NOTHING, role_of
from farflock.swarm.sim.network import SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

SHARDS, TOKENS, VIEW_S = 2, 10, 2.0


def name_of(stage):
    return f"grad/{stage}"


def stream(stage, wants="all", witnessed=False):
    terms = RoundTerms("mean", SHARDS, deadline_s=6.0, uniform=True, witnessed=witnessed)
    return Stream(
        name_of(stage),
        terms,
        100_000,
        reduce,
        lambda number, shard, data: True,
        stage=stage,
        wants=wants,
    )


class Node:
    """One life of one peer: it brings a named contribution to each round of its stage, and observes
    the others."""

    def __init__(self, flock, number, stage, life, wants):
        self.flock, self.number, self.stage, self.life, self.wants = (
            flock,
            number,
            stage,
            life,
            wants,
        )
        terms, role = RunTerms("run", 7, VIEW_S), role_of(stage)
        self.peer = peer_in(flock.network, identity(number), terms, life, role=role)
        self.record = self.peer.membership.book.make()
        self.applied, self.tokens, self.serial = -1, 0, 0
        self.statuses = []
        self.task = asyncio.create_task(self.live())

    @property
    def id(self):
        return self.peer.me

    @property
    def rounds(self):
        return self.peer.rounds

    @property
    def view(self):
        return self.peer.context.views.newest

    async def live(self):
        async with self.peer.running():
            if len(self.flock.nodes) == 0:
                self.peer.found()
                self.begin()
            else:
                await self.peer.meet(self.flock.records(), 30.0)
                await self.join()
                self.peer.ask_in()
            while True:
                await asyncio.sleep(self.flock.pace_s[self.stage])
                if self.stage not in {NOTHING, *self.flock.quiet}:
                    await self.step()

    def begin(self):
        for stage in range(self.flock.stages):
            if stage == self.stage:
                self.peer.open(
                    stream(stage, witnessed=self.flock.witnessed), self.applied, self.tokens
                )
                self.peer.snapshots.serve(f"state/{stage}", self.snapshot)
            elif name_of(stage) not in self.rounds.names:
                self.peer.open(stream(stage, self.wants, self.flock.witnessed))

    async def join(self):
        """Join with the state of a mate, or, if there is none, after the last round that any peer
        knows of."""
        port, view = self.peer.context, self.view
        mates = (
            [view.peers[index] for index in view.serving(self.stage)]
            if self.stage != NOTHING
            else []
        )
        if any(not port.gone(view, mate) for mate in mates if mate != self.id):
            await self.adopt()
        elif self.stage != NOTHING:
            name = name_of(self.stage)
            self.peer.open(stream(self.stage, "last", self.flock.witnessed))
            await asyncio.sleep(6.0)
            self.applied, self.tokens = self.rounds.newest(name), self.rounds.tokens(name)
            self.rounds.close(name)
            self.begin()
        else:
            self.begin()

    async def snapshot(self):
        chunk = json.dumps([self.applied, self.tokens]).encode()
        return Snapshot(self.applied, bytes(32), self.tokens, (chunk,))

    async def adopt(self):
        found = await self.peer.snapshots.fetch(
            f"state/{self.stage}", 30.0, min_round=self.peer.reach(self.stage), stage=self.stage
        )
        self.applied, self.tokens = json.loads(bytes(found.chunks[0]))
        self.begin()

    async def step(self):
        # A test may take the stage away while an exchange is on its way.
        stage, number, name = self.stage, self.applied + 1, name_of(self.stage)
        outcome = self.peer.decided(name, number)
        mine = None
        if outcome is None:
            self.serial += 1
            mine = f"{self.number}.{self.life}.{self.serial}"
            payload = json.dumps({"name": mine}).encode()
            outcome = await self.peer.exchange(name, number, [payload] * SHARDS, tokens=TOKENS)
        self.statuses.append(outcome.status if mine else "replayed")
        if outcome.status == "lost":
            await self.adopt()
            return
        assert outcome.key.round == number
        self.applied, self.tokens = number, outcome.tokens
        self.flock.take_in(stage, outcome, mine)


class Flock:
    """Nodes of some stages on one network, and the laws that hold over all of them at all times."""

    def __init__(self, stages, seed=1, witnessed=False):
        self.stages, self.network, self.witnessed = stages, SimNetwork(seed), witnessed
        self.pace_s = collections.defaultdict(lambda: 0.5)
        self.nodes, self.lives, self.serving = {}, 100, {}
        self.quiet = set()  # stages that bring nothing by themselves
        # by round: (names, participants, tokens)
        self.results = {stage: {} for stage in range(stages)}
        self.counted = collections.Counter()
        # rounds that were applied by some, and had failed for others
        self.given_up, self.may_give_up = (
            set(),
            False,
        )

    def records(self):
        return [node.record for node in self.nodes.values()]

    def start(self, number, stage, wants="last"):
        self.lives += 1
        node = Node(self, number, stage, self.lives, wants)
        self.serving[node.id, self.lives] = stage
        asyncio.get_running_loop().call_soon(self.nodes.__setitem__, number, node)
        return node

    def kill(self, number):
        node = self.nodes.pop(number)
        self.network.kill(node.id)
        node.task.cancel()
        return node

    def of(self, stage):
        return [node for node in self.nodes.values() if node.stage == stage]

    def newest(self, stage):
        return max(self.results[stage], default=-1)

    def take_in(self, stage, outcome, mine):
        number, contents = outcome.key.round, outcome.reduced or ()
        names = tuple(json.loads(contents[0])["names"]) if contents else ()
        for shard, content in enumerate(contents):
            assert json.loads(content) == {"names": [*names], "round": number, "shard": shard}
        result = (names, outcome.participants, outcome.tokens)
        if (
            self.may_give_up
            and outcome.status == "failed"
            and self.results[stage].get(number, ((),))[0]
        ):
            self.given_up.add((stage, number))
            assert self.results[stage][number][2] == outcome.tokens, "what counted, counted"
            return
        if number not in self.results[stage]:
            self.counted.update(names)
        assert self.results[stage].setdefault(number, result) == result, (
            f"two results of round {number}"
        )
        assert max(self.counted.values(), default=0) <= 1, "a contribution counted twice"
        if mine is not None and outcome.status != "failed":
            assert outcome.taken == (mine in names,) * SHARDS
        served = {peer for (peer, _), other in self.serving.items() if other == stage}
        assert set(outcome.participants) <= served, "a member of another stage contributed"

    def check(self):
        """Check that each stage has all its rounds, with the tokens of what counted in them."""
        for stage, results in self.results.items():
            tokens = 0
            for number in range(min(results, default=0), max(results, default=-1) + 1):
                names, _, after = results.get(number, ((), (), None))
                tokens += TOKENS * len(names)
                assert after in (None, tokens), (
                    f"round {number} of stage {stage} says {after} tokens, {tokens} count"
                )

    async def go_on(self, stage, rounds=3, within_s=15.0):
        """Wait until `rounds` more rounds of a stage are applied; return how long that took."""
        goal = self.newest(stage) + rounds
        return await until(
            lambda: self.newest(stage) >= goal, within_s, f"round {goal} of stage {stage}"
        )

    async def end(self):
        await end(*(node.task for node in self.nodes.values()))


def flock(*stages, wants="last", seed=1, pace_s=None, witnessed=False):
    """Run a test `main(flock)` whose nodes serve these stages, in virtual time; check that all laws
    held."""

    def decorate(main):
        def test():
            async def whole():
                made = Flock(max(stages) + 1, seed, witnessed)
                made.pace_s.update(pace_s or {})
                for number, stage in enumerate(stages):
                    made.start(number, stage, wants)
                    await asyncio.sleep(0.1)
                nodes = made.nodes.values()
                await until(
                    lambda: all(
                        n.peer.context.chain is not None and len(n.view.members) == len(stages)
                        for n in nodes
                    ),
                    40.0,
                    "a view of all",
                )
                for stage in range(made.stages):
                    await made.go_on(stage, 2)
                await main(made)
                await made.end()
                made.check()
                assert asyncio.all_tasks() == {asyncio.current_task()}

            run_virtual(whole())

        test.__doc__ = main.__doc__
        return test

    return decorate


def ids(*nodes):
    return tuple(sorted(node.id for node in nodes))
