"""Whole nodes that lose a majority, for good or for a while, reach their end as one run."""

import asyncio

import pytest
from worlds.waiting import until

from farflock.node.train.ending import drain
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.sim.virtual_time import run_virtual

AFTER_S = 15.0


class Crowd:
    """Five nodes of one plan and what they report."""

    def __init__(self, bench):
        self.bench = bench
        self.nodes, self.tasks, self.reports = {}, {}, []

    async def live(self, number):
        def report(kind, fields):
            self.reports.append((asyncio.get_running_loop().time(), number, kind, fields))

        async with self.bench.peer(number, branch_after_s=AFTER_S).running() as peer:
            node = self.nodes[number] = self.bench.node(peer, report)
            if number == 0:
                node.found()
            else:
                await node.join([self.bench.record(0)], 60.0)
            await node.loop.run(self.bench.total, drain_s=10.0)
            await asyncio.sleep(60.0)
            await drain(node.loop, 10.0)

    async def gather(self, count):
        for number in range(count):
            self.tasks[number] = asyncio.create_task(self.live(number))
            await asyncio.sleep(0.5)
        async with asyncio.timeout(60):
            await until(
                lambda: (
                    {number for _, number, kind, _ in self.reports if kind == "round"}
                    == set(range(count))
                )
            )
            await until(
                lambda: all(node.loop.driver.members == count for node in self.nodes.values())
            )

    async def kill(self, *numbers):
        for number in numbers:
            self.bench.network.kill(self.nodes.pop(number).peer.me)
            self.tasks[number].cancel()
        await asyncio.gather(
            *(self.tasks.pop(number) for number in numbers), return_exceptions=True
        )

    def split(self, *sides):
        self.bench.network.partition(
            *({self.nodes[number].peer.me for number in side} for side in sides)
        )

    def happened(self, kind):
        return [(at_s, number) for at_s, number, what, _ in self.reports if what == kind]

    def states(self):
        drivers = {number: node.loop.driver for number, node in self.nodes.items()}
        return {
            number: state_hash(driver.method.snapshot(driver.replica))
            for number, driver in drivers.items()
        }


def crowd(bench, text, method, total, work):
    """Run `work(crowd)` and then all nodes to their end."""
    options = {"period": 4, "codec": "fp16", "deadline_s": 6.0}

    async def main():
        made = Crowd(bench(text, method, 5, total, **options))
        await made.gather(5)
        await work(made)
        await asyncio.gather(*made.tasks.values())
        made.tokens = [node.loop.driver.tokens for node in made.nodes.values()]
        return made

    return run_virtual(main())


@pytest.mark.parametrize("method", ["diloco", pytest.param("noloco", marks=pytest.mark.long)])
def test_a_run_of_which_three_of_five_nodes_are_killed_for_good_goes_on_to_its_end(
    bench, text, method
):
    async def main(made):
        await made.kill(0, 2, 4)
        made.killed_s = asyncio.get_running_loop().time()

    made = crowd(bench, text, method, 16_000, main)
    survivors = [made.nodes[1], made.nodes[3]]
    assert min(made.tokens) >= 16_000
    assert len({node.peer.membership.branch for node in survivors}) == 1
    assert survivors[0].peer.membership.branch is not None
    together = [
        at_s for at_s, _, kind, fields in made.reports if kind == "round" and fields["peers"] == 2
    ]
    assert sum(at_s > made.killed_s + AFTER_S for at_s in together) >= 6
    assert not made.happened("adopt"), "their work since the last round was not given up"
    if method == "diloco":
        assert len(set(made.states().values())) == 1


@pytest.mark.parametrize("method", [pytest.param("diloco", marks=pytest.mark.long), "noloco"])
def test_when_a_branch_meets_the_majority_the_one_with_fewer_tokens_gives_up_and_one_run_ends(
    bench, text, method
):
    async def main(made):
        made.split({0, 1, 2}, {3, 4})
        async with asyncio.timeout(3 * AFTER_S):
            await until(
                lambda: None not in {made.nodes[number].peer.membership.branch for number in (3, 4)}
            )
        await asyncio.sleep(5)
        made.bench.network.heal()
        made.healed_s = asyncio.get_running_loop().time()
        agreed = {
            number: node.loop.driver.position.agreed_tokens for number, node in made.nodes.items()
        }
        made.fewer = min({0, 1, 2}, {3, 4}, key=lambda side: max(agreed[number] for number in side))

    made = crowd(bench, text, method, 24_000, main)
    assert len({node.peer.membership.branch for node in made.nodes.values()}) == 1
    assert {number for _, number in made.happened("adopt")} == made.fewer
    assert all(at_s > made.healed_s for at_s, _ in made.happened("adopt"))
    assert min(made.tokens) >= 24_000
    last = [number for at_s, number in made.happened("round") if at_s > made.healed_s + 10]
    assert set(last) == set(range(5)), "all take part again"
    if method == "diloco":
        assert len(set(made.states().values())) == 1
