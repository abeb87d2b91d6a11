"""Places are shared out among trainers: each has its share, whoever never confirms has none while
others wait, and none stays free that somebody may have."""

import asyncio
import collections
import random

import pytest

from farflock.node.pipeline.server import places as places_module
from farflock.node.pipeline.server.pending import PendingGradient, PendingGradients
from farflock.node.pipeline.server.places import FORGIVEN_LEASES, Debts, Places
from farflock.swarm.protocol.gradient_leases import GradientLeases
from farflock.swarm.sim.virtual_time import run_virtual

PLACES, LEASE_S, ROOM = 4, 10.0, 8
GRADIENT = PendingGradient("its gradient", None, 3)


class Bench:
    """The places of a server whose passes take no time, and the passes that wait."""

    def __init__(self, count=PLACES, room=ROOM):
        self.pending = PendingGradients(GradientLeases(count, LEASE_S))
        self.places, self.now_s = Places(self.pending, room), 0.0
        self.waiting, self.begun = {}, {}

    async def ask(self, trainer, *numbers):
        for number in numbers:
            key, reply = (trainer, number), asyncio.get_running_loop().create_future()
            self.waiting[key] = asyncio.ensure_future(self.places.begin(key, 1, reply))
            await self.settle()

    async def settle(self):
        """Let each pass that has a place end: its gradient waits for a confirmation."""
        await asyncio.sleep(0.01)
        for key, task in list(self.waiting.items()):
            if task.done():
                self.begun[key] = task.result()
                del self.waiting[key]
                if self.begun[key] == "run":
                    self.pending.put_aside(key, GRADIENT, self.now_s)

    async def confirm(self, trainer, number):
        assert self.places.confirm((trainer, number), 1) is GRADIENT
        await self.settle()

    async def pass_time(self, seconds):
        self.now_s += seconds
        self.places.expire(self.now_s)
        await self.settle()

    async def default(self, trainer, *numbers):
        """Let a trainer take places and not confirm."""
        await self.ask(trainer, *numbers)
        await self.pass_time(LEASE_S)

    @property
    def held(self):
        return dict(collections.Counter(trainer for trainer, _ in self.pending.gradients))


def on_bench(*given):
    """Run a test `main(bench)` in virtual time."""

    def decorate(main):
        def test():
            async def whole():
                bench = Bench(*given)
                await main(bench)
                bench.places.turn_away()
                await bench.settle()

            run_virtual(whole())

        return test

    return decorate


@on_bench()
async def test_a_trainer_alone_has_all_places(bench):
    await bench.ask("a", 1, 2, 3, 4, 5)
    assert bench.held == {"a": PLACES}
    await bench.confirm("a", 1)
    assert bench.held == {"a": PLACES}
    assert bench.begun["a", 5] == "run"


@on_bench()
async def test_while_another_waits_no_trainer_gets_more_than_its_share(bench):
    await bench.ask("a", 1, 2, 3, 4, 5, 6)
    await bench.ask("b", 1, 2, 3)
    for number in (1, 2):
        await bench.confirm("a", number)
    assert bench.held == {"a": 2, "b": 2}
    await bench.confirm("a", 3)
    assert bench.held == {"a": 2, "b": 2}
    await bench.ask("c", 1)
    await bench.confirm("b", 1)
    assert bench.held == {"a": 2, "b": 1, "c": 1}, "each has at least one"
    assert {*bench.waiting} == {("a", 6), ("b", 3)}


@on_bench(1)
async def test_one_place_goes_from_trainer_to_trainer(bench):
    await bench.ask("a", 1, 2, 3)
    await bench.ask("b", 1, 2)
    order = []
    for _ in range(5):
        ((trainer, number),) = bench.pending.gradients
        order.append(trainer)
        await bench.confirm(trainer, number)
    assert sorted(order) == ["a", "a", "a", "b", "b"]


@on_bench()
async def test_whoever_never_confirms_has_no_place_while_others_wait(bench):
    await bench.default("liar", 1, 2, 3, 4)
    await bench.ask("a", *range(1, PLACES + 1))
    await bench.ask("liar", 5)
    await bench.ask("a", 5, 6)
    await bench.confirm("a", 1)
    await bench.confirm("a", 2)
    assert bench.held == {"a": PLACES}, "its turn has come, but another waits"
    await bench.confirm("a", 3)
    assert bench.held == {"a": PLACES - 1, "liar": 1}, "nobody else waits"


@on_bench()
async def test_all_that_owe_have_one_place_together_and_one_pass_each_in_line(bench):
    for liar in ("x", "y", "z"):
        await bench.default(liar, 1)
    for liar in ("x", "y", "z"):
        await bench.ask(liar, 2, 3)
    assert sum(bench.held.values()) == 1
    assert {*bench.waiting} == {("x", 3), ("y", 2), ("z", 2)}
    assert list(bench.begun.values()).count("busy") == 2


@on_bench()
async def test_a_trainer_that_confirms_again_has_its_share_again(bench):
    await bench.default("a", 1, 2)
    await bench.ask("a", 3)
    await bench.ask("a", 4)
    assert bench.held == {"a": 1}
    await bench.confirm("a", 3)
    assert "a" in bench.places.debts, "it owes two"
    await bench.confirm("a", 4)
    assert "a" not in bench.places.debts
    await bench.ask("a", 5, 6, 7)
    assert bench.held == {"a": 3}


@on_bench()
async def test_what_is_owed_is_forgiven(bench):
    await bench.default("a", 1)
    await bench.pass_time(FORGIVEN_LEASES * LEASE_S - 0.1)
    assert "a" in bench.places.debts
    await bench.pass_time(0.2)
    assert "a" not in bench.places.debts


@on_bench(1)
async def test_what_is_revoked_while_it_is_computed_holds_its_place_until_it_ends(bench):
    reply = asyncio.get_running_loop().create_future()
    assert await bench.places.begin(("a", 1), 1, reply) == "run"
    bench.places.revoke(("a", 1), 1)
    await bench.ask("b", 1)
    assert not bench.held
    assert bench.pending.put_aside(("a", 1), GRADIENT, 0.0) is None
    await bench.pass_time(0.0)
    assert bench.held == {"b": 1}


@on_bench()
async def test_what_a_trainer_revokes_is_not_owed(bench):
    await bench.ask("a", 1)
    bench.places.revoke(("a", 1), 1)
    await bench.pass_time(LEASE_S)
    assert not len(bench.places.debts)


def test_debts_are_bounded(monkeypatch):
    monkeypatch.setattr(places_module, "MAX_DEBTORS", 3)
    debts = Debts(10.0)
    for number in range(5):
        debts.add(f"{number}", float(number))
    assert [f"{number}" in debts for number in range(5)] == [False, False, True, True, True]


@on_bench(1, 2)
async def test_the_line_is_bounded_but_for_the_first_of_each_trainer(bench):
    await bench.ask("a", 1, 2, 3, 4)
    assert bench.begun["a", 4] == "busy"
    await bench.ask("b", 1, 2)
    assert bench.places.waiting == 3
    assert bench.begun["b", 2] == "busy"


@on_bench(1)
async def test_a_repeated_request_waits_for_the_same_pass_and_takes_no_place(bench):
    await bench.ask("a", 1)
    await bench.ask("b", 1)
    reply = asyncio.get_running_loop().create_future()
    again = asyncio.ensure_future(bench.places.begin(("b", 1), 2, reply))
    await bench.confirm("a", 1)
    assert bench.held == {"b": 1}
    assert await again == "again"


@on_bench(1)
async def test_one_that_no_longer_waits_gets_no_place(bench):
    await bench.ask("a", 1)
    await bench.ask("b", 1)
    await bench.ask("c", 1)
    bench.waiting.pop(("b", 1)).cancel()
    await bench.confirm("a", 1)
    assert bench.held == {"c": 1}


@on_bench(1)
async def test_one_that_is_cancelled_as_it_gets_its_place_frees_it(bench):
    await bench.ask("a", 1)
    await bench.ask("b", 1)
    bench.places.confirm(("a", 1), 1)
    bench.waiting.pop(("b", 1)).cancel()
    await bench.ask("c", 1)
    assert bench.held == {"c": 1}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_place_stays_free_that_an_honest_trainer_waits_for(seed):
    async def main():
        chance = random.Random(seed)
        bench = Bench(chance.randint(1, 5))
        honest = ["a", "b", "c"][: chance.randint(1, 3)]
        for number in range(120):
            if chance.random() < 0.3:
                await bench.ask("liar", number)
            else:
                await bench.ask(chance.choice(honest), number)
            mine = [key for key in bench.pending.gradients if key[0] != "liar"]
            if mine and chance.random() < 0.6:
                await bench.confirm(*chance.choice(sorted(mine)))
            if chance.random() < 0.1:
                await bench.pass_time(LEASE_S / 4)
            waits = {trainer for trainer, _ in bench.waiting} - {"liar"}
            waits = {trainer for trainer in waits if trainer not in bench.places.debts}
            assert not (waits and bench.pending.staging.free)
        bench.places.turn_away()
        await bench.settle()
        assert not bench.waiting

    run_virtual(main())
