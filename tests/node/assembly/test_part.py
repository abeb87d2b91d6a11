"""The law of `Part` (node/assembly/part.py), for each kind: a whole replica, the stages of a
pipeline, and a user's own loop."""

import asyncio

import pytest
import torch
from torch import nn
from worlds import pipeline_audit
from worlds.waiting import until

from farflock.node.assembly.resume import checkpoint_state
from farflock.node.library.presence import ExternalStep, JoinRequest, OptimizerNode
from farflock.node.model.replica import PlainReplica
from farflock.node.pipeline.lifecycle.assembly import NodeServices
from farflock.node.pipeline.node import PipelineNode
from farflock.node.run.user_terms import fingerprint, founded, wish
from farflock.node.state import checkpoint
from farflock.swarm.compute import inline
from farflock.swarm.roles import EVERY
from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.tasks import cancel

JOIN_S = 120.0
STEP_S = 0.5
ENDLESS = 10**9


class Replica:
    """A whole replica, assembled as in a process."""

    total = 4 * 3200

    def __init__(self, bench, text):
        self.bench = bench(text, "diloco", peers=2, total=self.total, period=4)

    def part(self, peer, saved=None):
        return self.bench.node(peer)

    def working(self, part):
        return None

    def weights(self, part):
        driver = part.loop.driver
        return torch.cat([x.flatten() for x in driver.method.eval_params(driver.replica).values()])

    async def saved(self, part, folder):
        return self._saved(part, folder)

    def _saved(self, part, folder):
        parts, cursors = checkpoint_state(part)
        meta = {"node": cursors, "tokens": part.loop.driver.tokens}
        return checkpoint.load(checkpoint.save(folder, part.loop.step, parts, meta))


class Stages(Replica):
    """Both stages of a pipeline at one node, which trains."""

    total = 30 * 8 * pipeline_audit.TOKENS

    def __init__(self, bench, text):
        super().__init__(bench, text)
        self.plan = pipeline_audit.plan(
            total=self.total, rate=0.3, method="diloco", options={"period": 2}
        )
        self.pipeline = pipeline_audit.pipeline(stages=2)

    def part(self, peer, saved=None):
        turn = asyncio.Lock()

        async def run_pass(work, cost):
            async with turn:
                done = work()
                await asyncio.sleep(0.05 * cost)
                return done

        services = NodeServices(inline, run_pass, inline)
        known = self.plan, self.pipeline, peer, services
        before = None if saved is None else dict(enumerate(saved))
        return PipelineNode(*known, EVERY, pipeline_audit.TEXT, before)

    def weights(self, part):
        return torch.cat([super(Stages, self).weights(each) for each in part.servings])

    async def saved(self, part, folder):
        return [self._saved(each, folder / str(each.index)) for each in part.servings]


class OwnLoop(Replica):
    """A program that steps as it likes."""

    total = 60

    def part(self, peer, saved=None):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        inner = torch.optim.SGD(model.parameters(), lr=1e-2)
        wished = wish(fingerprint(model, inner), "diloco", {"name": None, "seed": 3}, {"period": 4})
        request = JoinRequest(
            wished, PlainReplica(model, inner, None), ExternalStep(), lambda kind, fields: None
        )
        part = OptimizerNode.assemble(request, founded(wished), peer, inline, str, founder=False)
        part.training_task.closure = lambda: self._closure(model, inner)
        return part

    def _closure(self, model, inner):
        inner.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    def working(self, part):
        async def program():
            while True:
                await part.loop.end_step(part.loop.train_one(await part.loop.begin_step()))
                await asyncio.sleep(STEP_S)

        return program()


@pytest.fixture(params=[Replica, Stages, OwnLoop])
def kind(request, bench, text):
    return request.param(bench, text)


async def taking_part(kind, part, total):
    """Run it to its end, with the program if it has one."""
    program = kind.working(part)
    beside = [] if program is None else [asyncio.create_task(program)]
    try:
        await part.run(total)
    finally:
        await cancel(*beside)


def test_a_newcomer_asks_in_once_it_has_the_state_and_both_end_with_the_runs_tokens(kind):
    asked = []  # whether the weights were others than those it began with

    async def newcomer():
        async with kind.bench.peer(1).running() as peer:
            part, ask_in = kind.part(peer), peer.ask_in
            fresh = kind.weights(part)

            def asking():
                asked.append(not torch.equal(kind.weights(part), fresh))
                ask_in()

            peer.ask_in = asking
            await part.join([kind.bench.record(0)], JOIN_S)
            await taking_part(kind, part, kind.total)
            assert peer.membership.is_member
            return part

    async def main():
        async with kind.bench.peer(0).running() as peer:
            part = kind.part(peer)
            part.found()
            assert (part.step, part.tokens, part.trained_tokens, part.waits()) == (0, 0, 0, [])
            assert (part.last_loss, part.stopping, part.watch) == (None, False, None)
            assert (part.role, part.coded_on, part.evaluates) == ("replica", "", False)
            running = asyncio.create_task(taking_part(kind, part, kind.total))
            await until(lambda: part.step >= 10)
            _, other = await asyncio.gather(running, newcomer())
            return part, other

    for part in run_virtual(main()):
        assert part.tokens >= kind.total
        assert part.trained_tokens > 0 < part.step
        assert part.last_loss > 0
        assert all(isinstance(count, int) for count in part.work.values())
    assert asked == [True]


def test_a_part_that_is_told_to_stop_does(kind):
    async def main():
        async with kind.bench.peer(0).running() as peer:
            part = kind.part(peer)
            part.found()
            running = asyncio.create_task(taking_part(kind, part, ENDLESS))
            await until(lambda: part.step >= 6)
            assert not part.stopping
            assert not running.done()
            part.stop()
            assert part.stopping
            async with asyncio.timeout(60.0):
                await running

    run_virtual(main())


def test_a_part_resumes_where_it_stopped(kind, tmp_path):
    async def first():
        async with kind.bench.peer(0).running() as peer:
            part = kind.part(peer)
            part.found()
            await taking_part(kind, part, kind.total // 2)
            return part.step, part.tokens, await kind.saved(part, tmp_path)

    async def second(step, tokens, saved):
        async with kind.bench.peer(0, incarnation=2).running() as peer:
            part = kind.part(peer, saved)
            await part.resume(saved[0] if isinstance(saved, list) else saved)
            assert (part.step, part.tokens) == (step, tokens)
            await taking_part(kind, part, kind.total)
            assert part.tokens >= kind.total
            assert part.step > step

    run_virtual(second(*run_virtual(first())))
