"""Whole nodes come back with what their folders kept, and go on from there."""

import asyncio
import copy

import pytest
from worlds.waiting import until

from farflock.node.assembly.coming_back import VIEW
from farflock.node.assembly.resume import checkpoint_state
from farflock.node.errors import RefusedByRun
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.state.kept_views import KeptViews
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.sim.virtual_time import run_virtual


class Homes:
    """Nodes of one plan, each with a folder in which its views and its last checkpoint are."""

    def __init__(self, bench, folder):
        self.bench, self.folder = bench, folder
        self.nodes, self.tasks, self.saved, self.rounds = {}, {}, {}, []
        self.lives = 0  # of all nodes

    def start(self, number, founds=False, timeout_s=None):
        self.tasks[number] = asyncio.create_task(self.live(number, founds, timeout_s))

    async def live(self, number, founds, timeout_s):
        def report(kind, fields):
            if kind == "round":
                self.rounds.append((number, fields["round"], fields["peers"]))
                self.saved[number] = saved(node)

        self.lives += 1
        async with self.bench.peer(number, self.lives).running() as peer:
            node = self.nodes[number] = self.bench.node(peer, report)
            kept = KeptViews(self.folder / f"views-{number}")
            peer.membership.sync.store = kept.keep
            if founds:
                node.found()
            else:
                if (chain := kept.read("3")) is not None:
                    peer.membership.sync.remember(chain)
                if timeout_s is not None:
                    peer.branching.returning.timeout_s = timeout_s
                node.before = self.saved.get(number)
                others = [other for other in self.nodes if other != number]
                await node.join([self.bench.record(other, self.lives) for other in others], 60.0)
            await node.loop.run(10**9)

    async def kill(self, *numbers):
        for number in numbers:
            self.bench.network.kill(self.nodes[number].peer.me)
            self.tasks[number].cancel()
        await asyncio.gather(*(self.tasks[number] for number in numbers), return_exceptions=True)

    async def rounds_of(self, together, more=2):
        """Wait until each node has made so many rounds with so many peers."""
        begun = len(self.rounds)

        def made(number):
            return sum((who, peers) == (number, together) for who, _, peers in self.rounds[begun:])

        await until(lambda: all(made(number) >= more for number in self.nodes), 120, "rounds")


def saved(node):
    """A checkpoint of the node as it is now, without its pending exchanges."""
    groups, cursors = checkpoint_state(node)
    meta = {"node": cursors, VIEW: node.state_sync.held.under.hex()}
    return copy.deepcopy(Checkpoint(None, node.loop.step, groups, meta, {}))


def homes(bench, text, folder, method, work, count=3, together=3):
    options = {"period": 4, "codec": "fp16", "deadline_s": 6.0}

    async def main():
        made = Homes(bench(text, method, count, 10**9, **options), folder)
        for number in range(count):
            made.start(number, founds=number == 0)
            await asyncio.sleep(0.5)
        await made.rounds_of(together)
        await work(made)
        await made.kill(*made.nodes)
        return made

    return run_virtual(main())


@pytest.mark.parametrize("method", ["diloco", "noloco"])
def test_all_nodes_go_on_from_their_newest_state_after_a_power_cut(bench, text, tmp_path, method):
    together = 2 if method == "noloco" else 3

    async def work(made):
        await made.kill(0, 1, 2)
        del made.saved[1]
        newest = max(number for _, number, _ in made.rounds)
        made.rounds.clear()
        for number in (2, 1, 0):
            made.start(number)
            await asyncio.sleep(3)
        await made.rounds_of(together)
        assert min(number for _, number, _ in made.rounds) > newest - 3
        assert len({node.peer.membership.branch for node in made.nodes.values()}) == 1

    made = homes(bench, text, tmp_path, method, work, together=together)
    if method == "diloco":
        drivers = [node.loop.driver for node in made.nodes.values()]
        by_round = {}
        for driver in drivers:
            state = state_hash(driver.method.snapshot(driver.replica))
            by_round.setdefault(driver.position.rounds["delta"], set()).add(state)
        assert all(len(states) == 1 for states in by_round.values())


def test_a_node_with_little_patience_says_whom_it_has_waited_for(bench, text, tmp_path, caplog):
    async def work(made):
        await made.kill(0, 1)
        made.start(0, timeout_s=20.0)
        with pytest.raises(RefusedByRun, match=made.nodes[1].peer.me[-8:]):
            await made.tasks[0]
        assert made.nodes[1].peer.me[-8:] in caplog.text

    caplog.set_level("INFO")
    homes(bench, text, tmp_path, "diloco", work, count=2, together=2)
