"""Whole nodes come back with what their folders kept, and go on from there."""

import asyncio
import errno
import math
import os
import shutil
from types import SimpleNamespace

import pytest
from worlds.waiting import now, until

from farflock.node.assembly.coming_back import admitted, waits_for
from farflock.node.assembly.known_run import own_run
from farflock.node.errors import RefusedByRun
from farflock.node.run.manifest import simulated_default
from farflock.node.simulate.homes import Homes
from farflock.node.simulate.lives import SimPeers
from farflock.node.state import kept_views
from farflock.node.state.kept_views import KeptViews
from farflock.node.state.paths import RunFolder
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.sim.virtual_time import run_virtual

SAVE_S = 3.0


class Village:
    """Nodes of one plan with folders; `rounds` are those that they report."""

    def __init__(self, bench, folder):
        self.rounds = []

        def make(peer, home):
            def report(kind, fields):
                if kind == "round":
                    self.rounds.append((home.number, fields["round"], fields["peers"]))

            return bench.node(peer, report)

        manifest = simulated_default(["exchange.view_s=2.0", "exchange.branch_after_s=20.0"])
        known = own_run(bench.identities[0], manifest)
        peers = SimPeers(known.terms, bench.network, bench.identities)
        self.homes = Homes(peers, known, folder, make, self, SAVE_S)

    def kept(self, home, chain):
        """Do nothing."""

    def enters(self, home, saved):
        """Do nothing."""

    def founds(self, home):
        """Do nothing."""

    def entered(self, home):
        """Do nothing."""

    def peer(self, number):
        return self.homes.by_number[number].session.peer

    async def rounds_of(self, together, more=2):
        """Wait until each node has made so many rounds with so many peers."""
        begun = len(self.rounds)

        def made(number):
            return sum((who, peers) == (number, together) for who, _, peers in self.rounds[begun:])

        await until(lambda: all(made(n) >= more for n in self.homes.by_number), 120, "rounds")


def village(bench, text, folder, method, work, count=3, together=3):
    options = {"period": 4, "codec": "fp16", "deadline_s": 6.0}

    async def main():
        made = Village(bench(text, method, count, 10**9, **options), folder)
        for number in range(count):
            made.homes.start(number)
            await asyncio.sleep(0.5)
        await made.rounds_of(together)
        await asyncio.sleep(SAVE_S)
        await work(made)
        await made.homes.end_all()
        return made

    return run_virtual(main())


@pytest.mark.parametrize("method", ["diloco", "noloco"])
def test_all_nodes_go_on_from_their_newest_state_after_a_power_cut(bench, text, tmp_path, method):
    together = 2 if method == "noloco" else 3

    async def work(made):
        await made.homes.kill(0, 1, 2)
        shutil.rmtree(RunFolder(made.homes.by_number[1].path).checkpoints)
        newest = max(number for _, number, _ in made.rounds)
        made.rounds.clear()
        for number in (2, 1, 0):
            made.homes.start(number)
            await asyncio.sleep(3)
        await made.rounds_of(together)
        assert min(number for _, number, _ in made.rounds) > newest - 3
        assert len({made.peer(number).membership.branch for number in range(3)}) == 1

    made = village(bench, text, tmp_path, method, work, together=together)
    if method == "diloco":
        drivers = [home.part.loop.driver for home in made.homes.by_number.values()]
        by_round = {}
        for driver in drivers:
            state = state_hash(driver.method.snapshot(driver.replica))
            by_round.setdefault(driver.position.rounds["delta"], set()).add(state)
        assert all(len(states) == 1 for states in by_round.values())


def test_a_founder_with_little_patience_says_whom_it_waits_for_and_begins_again(
    bench, text, tmp_path, caplog
):
    async def work(made):
        other = made.peer(1).me
        await made.homes.kill(0, 1)
        step = made.homes.by_number[0].part.step
        made.homes.start(0)
        await until(lambda: made.homes.by_number[0].is_in, 60)
        assert f"waits for {other[-8:]}" in caplog.text
        assert made.peer(0).context.views.newest.peers == (made.peer(0).me,)
        assert step - made.homes.by_number[0].part.step < 20

    caplog.set_level("INFO")
    village(bench, text, tmp_path, "diloco", work, count=2, together=2)


def test_views_that_a_full_disk_did_not_take_are_kept_once_it_has_room(
    bench, text, tmp_path, monkeypatch
):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def work(made):
        before = made.peer(0).context.views.newest.number
        with monkeypatch.context() as patch:
            patch.setattr(kept_views, "write_durably", full)
            await made.homes.kill(2)
            await until(lambda: made.peer(0).context.views.newest.number > before, 60, "a view")
        kept = KeptViews(RunFolder(made.homes.by_number[0].path).views)
        known = made.peer(0).context.views
        assert kept.read(known.run).newest.number == before, "nothing was to keep"
        await asyncio.sleep(2.0)
        assert kept.read(known.run).newest.hash == known.newest.hash

    village(bench, text, tmp_path, "diloco", work)


@pytest.mark.parametrize("branch_after_s", [None, 120.0])
def test_a_key_of_the_newest_view_waits_for_the_others_though_they_have_ended_again(
    branch_after_s, caplog
):
    """None: a joiner, which waits without end. The others were there once, and are not any more."""
    patience_s = math.inf if branch_after_s is None else branch_after_s
    returning = SimpleNamespace(timeout_s=patience_s, awaited=("other1234",), lacking=())
    peer = SimpleNamespace(
        me="me",
        context=SimpleNamespace(
            views=SimpleNamespace(newest=SimpleNamespace(lists=lambda key: True)),
            life=lambda key: "alive" if now() < 10.0 else "dead",
        ),
        branching=SimpleNamespace(returning=returning),
        membership=SimpleNamespace(
            is_member=False, book=SimpleNamespace(others=lambda: ["other1234"])
        ),
    )

    async def main():
        waiting = asyncio.create_task(admitted(peer, 30.0))
        await asyncio.sleep(100.0)
        assert not waiting.done()
        assert "waits for ther1234, without whom" in caplog.text
        if branch_after_s is not None:
            with pytest.raises(RefusedByRun, match="have not come back"):
                await waiting
            assert now() == pytest.approx(130.0, abs=1.1)
            return
        peer.membership.is_member = True
        await waiting
        assert now() == pytest.approx(100.0, abs=0.1)

    run_virtual(main())


@pytest.mark.parametrize(
    ("awaited", "lacking", "said"),
    [
        (("…12345678",), (None,), "waits for 12345678, without whom"),
        ((), (None,), "waits for the run's state, which no member here has"),
        ((), (1, 2), "waits for the state of stage 1, 2, which no member here has"),
    ],
)
def test_whom_and_what_a_peer_waits_for_is_said(awaited, lacking, said):
    assert waits_for(SimpleNamespace(awaited=awaited, lacking=lacking)).startswith(said)
