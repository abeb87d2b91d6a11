"""Whole loops in virtual time that evaluate their run: real methods on counting replicas, with a
meter that takes as long as a test says."""

import asyncio
from functools import partial

from worlds.peers import end, identity, peer_in
from worlds.waiting import until

from farflock.node.assembly.core import Core
from farflock.node.model.evaluation import LossEstimate
from farflock.node.simulate.chaos_methods import ChaosCase, CountingTask
from farflock.node.train.driver import Driver
from farflock.node.train.evaluator import Evaluator, Measured
from farflock.swarm.compute import inline
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.roles import EVERY, UNMEASURED, role_of
from farflock.swarm.sim.network import SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

STEP_S = 0.5


class Meter:
    """A meter whose loss is the sum of the weights; `lie` is added to it."""

    def __init__(self, node):
        self.node, self.seconds, self.lie, self.copies = node, 0.2, 0.0, 0

    def copy(self, weights):
        self.copies += 1
        loss = sum(float(x.double().sum()) for x in weights.values())
        return partial(self.measured, loss)

    def measured(self, loss, halted):
        self.node.charge_s = self.seconds
        if halted():
            return None
        return Measured(LossEstimate(1.0 + abs(loss) + self.lie, 0.1, 256), 3.5, "a text")


class Node:
    """One member. `events` are its reports with their times."""

    def __init__(self, world, number):
        self.world, self.number, self.charge_s, self.events = world, number, 0.0, []
        role = role_of(UNMEASURED if number in world.unable else EVERY)
        self.peer = peer_in(world.network, identity(number), RunTerms("run", 7, 3.0), role=role)
        self.record = self.peer.membership.book.make()
        replica = world.case.replica(number)
        driver = Driver(world.case.make(), replica)
        task = CountingTask(replica)
        core = Core.over(self.peer, driver, task, inline, self.train, self.report)
        self.state_sync, self.loop = core.state_sync, core.loop
        self.meter = Meter(self)
        self.evaluator = Evaluator(self.peer, self.loop, self.meter, world.every)
        self.loop.pause = self.evaluator.between_steps
        self.is_in = False

    @property
    def id(self):
        return self.peer.me

    @property
    def next(self):
        return self.state_sync.next_rounds[self.loop.driver.streams[0].key.stream]

    @property
    def evaluations(self):
        return [fields for _, kind, fields in self.events if kind == "evaluation"]

    @property
    def known(self):
        return dict(self.peer.evaluations.known)

    def rounds(self):
        """Participants by round, as this node applied them."""
        return {
            fields["round"]: fields["participants"]
            for _, kind, fields in self.events
            if kind == "round"
        }

    async def train(self, work):
        self.charge_s = STEP_S
        loss = work()
        await asyncio.sleep(self.charge_s)
        return loss

    def report(self, kind, fields):
        self.events.append((asyncio.get_running_loop().time(), kind, fields))

    async def live(self):
        async with self.peer.running():
            if self.number == 0:
                self.peer.found()
                self.state_sync.open()
                await self.evaluator.between_steps()
            else:
                await self.peer.meet([self.world.nodes[0].record], 60.0)
                await self.state_sync.adopt(60.0)
                self.peer.ask_in()
            self.is_in = True
            await self.loop.run(10**12)


class EvaluatedRun:
    """Nodes of one run, of which those with the numbers `unable` cannot evaluate it."""

    def __init__(self, method, every, options, unable=()):
        self.case, self.every, self.unable = ChaosCase(method, options), every, unable
        self.network, self.nodes, self.tasks = SimNetwork(3), [], []

    async def start(self, count):
        for _ in range(count):
            await self.add()
        await until(
            lambda: all(len(n.peer.context.views.newest.members) == count for n in self.nodes),
            30,
            "a view of all",
        )

    async def add(self):
        """Start a node, which founds the run or joins it, and return it."""
        node = Node(self, len(self.nodes))
        self.nodes.append(node)
        self.tasks.append(asyncio.create_task(node.live()))
        await until(lambda: node.is_in, 30, "a node in the run")
        return node

    async def end(self):
        for node in self.nodes:
            node.loop.stop()
        await end(*self.tasks)


def evaluated(count, method="diloco", every=4, unable=(), **options):
    """Run a test `main(run)` of `count` nodes in virtual time."""

    def decorate(main):
        def test():
            async def whole():
                usual = {"period": 4} if method == "diloco" else {}
                run = EvaluatedRun(method, every, usual | options, unable)
                await run.start(count)
                await main(run)
                await run.end()

            run_virtual(whole())

        test.__doc__ = main.__doc__
        return test

    return decorate
