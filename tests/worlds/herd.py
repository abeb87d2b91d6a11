"""Whole `Peer`s on the simulated network with the smallest node on top that can show a fault.

A contribution is a name; a reduced shard lists the names in it; a node's state is a hash chain over
the rounds it has applied. So whatever counts twice, in the wrong round, or differently at two
peers, is seen.
"""

import asyncio
import collections
import hashlib
import json

from worlds.peers import end, identity, peer_in
from worlds.waiting import now, until

from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.peer.snapshots import Snapshot
from farflock.swarm.protocol.exchange.close_list import RoundTerms
from farflock.swarm.protocol.exchange.streams import Cadence, Reduction, Stream
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

STREAM = "weights"
SHARDS = 3
VIEW_S = 3.0
TOKENS = 10


def reduce(number, shard, inputs):
    names = sorted(json.loads(data)["name"] for _, _, data in inputs)
    return Reduction(json.dumps({"names": names, "round": number, "shard": shard}).encode())


def stream(kind="mean", first=0, stride=1, **options):
    terms, cadence = RoundTerms(kind, SHARDS, **options), Cadence(first, stride)
    return Stream(STREAM, terms, 100_000, reduce, lambda number, shard, data: True, cadence)


def contents_of(outcome):
    """The reduced shards; for a gather, what reducing its payloads would give."""
    if outcome.gathered is None:
        return outcome.reduced or ()
    columns = zip(*outcome.gathered.values(), strict=True)
    number = outcome.key.round
    return tuple(
        reduce(number, shard, [("", 1.0, data) for data in column]).data
        for shard, column in enumerate(columns)
    )


class Node:
    """One life of one peer: it starts the run or joins it, adopts a state, and brings a named
    contribution to each round."""

    def __init__(self, herd, number, incarnation, founds):
        self.herd, self.number, self.incarnation, self.founds = herd, number, incarnation, founds
        terms = RunTerms("run", 7, VIEW_S, herd.branch_after_s)
        self.peer = peer_in(herd.network, identity(number), terms, incarnation)
        self.record = self.peer.membership.book.make()
        self.applied, self.state, self.tokens = herd.stream.cadence.upto(-1), b"", 0
        self.serial = 0
        self.events = []  # (time, round, status)
        self.quiet = False  # takes part without contributing
        self.task = asyncio.create_task(self.life())

    @property
    def id(self):
        return self.peer.me

    @property
    def view(self):
        return self.peer.context.views.newest

    @property
    def members(self):
        return {member.peer for member in self.view.members}

    def served(self):
        """The rounds of which this node got an outcome of its own."""
        return [number for _, number, status in self.events if status in ("ok", "partial", "alone")]

    async def life(self):
        async with self.peer.running():
            if self.founds:
                self.peer.found()
                self.open()
            else:
                await self.peer.join(self.herd.records(but=self), 30.0)
                await self.adopt()
            await self.work()

    async def work(self):
        while True:
            await asyncio.sleep(self.herd.pace_s)
            if not self.quiet:
                await self.step()

    def open(self):
        self.peer.open(self.herd.stream, self.applied, self.tokens)
        self.peer.snapshots.serve("state", self.snapshot)

    async def snapshot(self):
        chunk = json.dumps([self.applied, self.state.hex(), self.tokens]).encode()
        return Snapshot(self.applied, self.state, self.tokens, (chunk, b"padding" * 1000))

    async def adopt(self, min_round=-1, within_s=60.0):
        oldest = max(min_round, self.peer.reach())
        snapshot = await self.peer.snapshots.fetch("state", within_s, min_round=oldest)
        self.applied, state, self.tokens = json.loads(bytes(snapshot.chunks[0]))
        self.state = bytes.fromhex(state)
        self.events.append((now(), self.applied, "adopted"))
        self.open()

    async def step(self):
        number = self.applied + self.herd.stream.cadence.stride
        outcome = self.peer.decided(STREAM, number)
        while self.herd.stream.terms.enough and outcome is not None and outcome.status != "lost":
            # Rounds that wait for no peer are many: a node takes in all that it missed at once.
            self.apply(outcome, None)
            number = self.applied + self.herd.stream.cadence.stride
            outcome = self.peer.decided(STREAM, number)
        name = None
        if outcome is None:
            self.serial += 1
            name = f"{self.number}.{self.incarnation}.{self.serial}"
            payload = json.dumps({"name": name, "padding": "x" * self.herd.padding}).encode()
            outcome = await self.peer.exchange(
                STREAM, number, [payload] * SHARDS, tokens=TOKENS, state=self.state
            )
        if outcome.status == "lost":
            self.events.append((now(), number, "lost"))
            await self.adopt()
        else:
            self.apply(outcome, name)

    def apply(self, outcome, name):
        number, pairs = outcome.key.round, self.herd.stream.is_paired
        stride = self.herd.stream.cadence.stride
        assert number == self.applied + stride, "a round was left out"
        self.events.append((now(), number, outcome.status if name else "replayed"))
        self.applied = outcome.next_round - stride
        assert pairs or self.applied == number
        contents = contents_of(outcome)
        if outcome.status != "failed":
            self.state = hashlib.sha256(self.state + b"".join(contents)).digest()
            self.tokens = outcome.tokens
        self.herd.applied(self, outcome, contents, name)


class Herd:
    """Nodes of one kind on one network, and the laws that hold over all of them at all times."""

    node = Node

    def __init__(self, seed=1, link=None, kind="mean", **options):
        self.network = SimNetwork(seed, link or LinkModel())
        self.stream = stream(kind, **{"deadline_s": 8.0, **options})
        self.nodes = {}
        self.pace_s, self.padding = 1.0, 0
        self.branch_after_s = 600.0
        self.results = {}  # by round: (contents, participants, tokens, state after)
        self.counted = collections.Counter()
        self.pairs = {}
        self.incarnation = 100

    def records(self, but):
        return [node.record for node in self.nodes.values() if node is not but]

    def start(self, number):
        self.incarnation += 1
        self.nodes[number] = self.node(self, number, self.incarnation, founds=not self.nodes)
        return self.nodes[number]

    def kill(self, number):
        """Kill a node as SIGKILL does: it says no goodbye, and loses what it has not sent yet."""
        node = self.nodes[number]
        self.network.kill(node.id)
        node.task.cancel()
        return node

    def applied(self, node, outcome, contents, name):
        """Check an outcome that a node has applied against those of all others."""
        if self.stream.is_paired:
            self.swapped(node, contents, name)
        else:
            self.agreed(node, outcome, contents, name)

    def swapped(self, node, contents, name):
        """Check that a pair's contribution counts at its owner and at one other peer, and that both
        name the same two."""
        for content in contents[:1]:
            names = json.loads(content)["names"]
            assert name in names
            assert len(names) <= 2
            self.counted.update(other for other in names if other != name)
            assert max(self.counted.values(), default=0) <= 1, "a contribution went to two partners"
            self.pairs[name] = names
            for other in set(names) - {name}:
                assert self.pairs.get(other, names) in (names, [other]), (
                    "partners mean different pairs"
                )

    def agreed(self, node, outcome, contents, name):
        """Check that a round has one result, with each contribution in it at most once and in its
        own round."""
        number = outcome.key.round
        result = (contents, outcome.participants, outcome.tokens, node.state)
        if number not in self.results:
            self.results[number] = result
            for content in contents[:1]:
                self.counted.update(json.loads(content)["names"])
            assert max(self.counted.values(), default=0) <= 1, (
                f"a contribution counted twice: {self.counted}"
            )
        assert self.results[number] == result, f"two results of round {number}"
        for content in contents:
            assert json.loads(content)["round"] == number, "a contribution of another round"
        inside = tuple(name in json.loads(content)["names"] for content in contents)
        if name is not None and outcome.status != "failed":
            assert outcome.taken == inside, f"{name}: taken {outcome.taken}, but in {inside}"

    def check_tokens(self):
        """Check that tokens are those of the counted contributions, round after round."""
        tokens = 0
        for number in sorted(self.results):
            contents, participants, after, _ = self.results[number]
            if contents:
                tokens += TOKENS * len(participants)
                assert after == tokens, f"round {number} says {after} tokens, {tokens} were trained"

    async def end(self):
        """End all nodes; raise the error that ended any of them."""
        await end(*(node.task for node in self.nodes.values()))
        for node in self.nodes.values():
            assert not node.peer.tasks


async def grown(herd, count):
    """Start a run and let `count` nodes in."""
    for number in range(count):
        herd.start(number)
    await until(
        lambda: all(
            node.peer.context.chain is not None and len(node.members) == count
            for node in herd.nodes.values()
        ),
        30,
        f"a view of {count}",
    )
    await until(lambda: all(node.served() for node in herd.nodes.values()), 30, "a round with all")


def in_virtual_time(count=0, **options):
    """Run a test `main(herd)` of `count` nodes in virtual time; end them, and check that all laws
    held."""

    def decorate(main):
        def test():
            async def whole():
                herd = Herd(**options)
                await grown(herd, count) if count else None
                await main(herd)
                await herd.end()
                herd.check_tokens()
                assert asyncio.all_tasks() == {asyncio.current_task()}

            run_virtual(whole())

        test.__doc__ = main.__doc__
        return test

    return decorate
