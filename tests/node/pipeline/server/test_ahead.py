"""A server whose device computes on after it was asked: the next pass begins before the one before
it is waited for, and answers are the same.

Here the device is the CPU, and events only note that they were waited for."""

import asyncio

import pytest
import torch
from worlds.node_stage_server import Bench

from farflock.node.pipeline.passes.requests import Done, Refused
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.pipeline.server import passes
from farflock.swarm.sim.virtual_time import run_virtual

NUMBERS = range(1, 4)


@pytest.fixture
def events(monkeypatch):
    """What happens, in order; from then on stages run ahead."""
    seen = []

    class Event:
        def __init__(self, device):
            assert device.type == "cpu"

        def record(self):
            seen.append("asked")

        def synchronize(self):
            seen.append("waited")

    def begin():
        monkeypatch.setattr(Stage, "runs_ahead", property(lambda stage: True))
        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
        return seen

    return begin


def asked(main, index=1, **options):
    async def whole():
        async with Bench(index, **options).running() as bench:
            return await main(bench)

    return run_virtual(whole())


async def passed(bench):
    """Return the answers to many passes that wait at the same time, and a sum of gradients."""
    forwards = []
    if not bench.stage.is_last:
        forwards = await asyncio.gather(*(bench.ask(*bench.forward(n)) for n in NUMBERS))
    backwards = await asyncio.gather(*(bench.put_aside(n) for n in NUMBERS))
    for number in (6, 7):
        await bench.merge(number)
    answers = [(type(answer), payloads) for answer, payloads in (*forwards, *backwards)]
    losses = [answer.loss_sum for answer, _ in backwards]
    return answers, losses, bench.server.accounts.sums.take().staged.gradients


@pytest.mark.parametrize("index", [0, 1, 2])
def test_answers_and_sums_are_those_of_a_server_that_waits(events, index):
    wanted = asked(passed, index, places=8)
    seen = events()
    found = asked(passed, index, places=8)
    assert found[:2] == wanted[:2]
    assert {kind for kind, _ in found[0]} == {Done}
    assert all(torch.equal(x, wanted[2][name]) for name, x in found[2].items())
    assert seen.count("asked") == seen.count("waited") > len(NUMBERS)


def test_a_pass_begins_before_the_one_before_is_waited_for_and_the_last_one_is_not_left(events):
    seen = events()

    async def main(bench):
        await asyncio.gather(*(bench.ask(*bench.forward(n)) for n in (1, 2, 3)))

    asked(main, together=1)
    assert seen == ["asked", "asked", "waited", "asked", "waited", "waited"]


def test_a_gradient_that_is_not_finite_is_refused_when_it_comes(events, monkeypatch):
    events()
    monkeypatch.setattr(passes, "finite", lambda gradients: torch.tensor(False))

    async def main(bench):
        answer, _ = await bench.ask(*bench.backward(1))
        return answer, bench.server.pending.staging.free

    answer, free = asked(main, places=2)
    assert isinstance(answer, Refused)
    assert "not finite" in answer.why
    assert free == 2
