"""Disasters of returns: a seed decides everything, and each check finds what it is there for."""

import asyncio
import shutil
from dataclasses import replace

import pytest

from farflock.node.assembly.checkpoints import last_of
from farflock.node.simulate import returns_chaos
from farflock.node.simulate.returns_chaos import (
    COMING_BACK,
    ReturnsChaos,
    returns_case,
    run_returns_seed,
)
from farflock.node.state.paths import RunFolder
from farflock.optimizers.catalog import METHODS
from farflock.swarm.sim.virtual_time import run_virtual

pytestmark = pytest.mark.usefixtures("quiet_log")

SMALL = 3, 6  # seeds: two peers


def test_seeds_draw_every_method_disaster_and_size():
    cases = [returns_case(seed) for seed in range(200)]
    assert {case.arm.method for case in cases} == METHODS.keys()
    assert {kind for case in cases for kind in case.disasters} == set(COMING_BACK)
    assert {case.peers for case in cases} == {2, 3, 4, 5}
    assert not any("one" in case.disasters for case in cases if case.peers == 2)
    assert {returns_case(seed, "lean").arm.method for seed in range(9)} == {"lean"}


@pytest.mark.parametrize("seed", SMALL)
def test_a_seed_violates_nothing_and_its_disasters_strike(seed):
    report = run_returns_seed(seed)
    assert report.violations == []
    assert report.fired.total() == len(returns_case(seed).disasters)
    assert report.rounds > 4


def test_the_same_seed_gives_the_same_report():
    one, again = (run_returns_seed(SMALL[0]) for _ in range(2))
    assert one == again


def disaster(seed, folder, main, **changed):
    """Run `main(chaos)` once all peers of a seed are together; return the violations."""

    async def whole():
        chaos = ReturnsChaos(seed, replace(returns_case(seed), **changed), folder)
        for number in chaos.numbers:
            chaos.homes.start(number)
            await asyncio.sleep(0.3)
        await chaos.together("the start")
        await main(chaos)
        await chaos.homes.end_all()
        return chaos.watch.violations

    return run_virtual(whole())


@pytest.mark.parametrize("seed", [2, 11, 79, 86, 122, 218, 323])
def test_a_seed_that_failed_once(seed):
    """2: of two streams, of which one was further, nobody could read a state after which no round
    came. 11: a founder whose checkpoint had the result of a round waited for that round to end. 79,
    86: a member that replayed gathered norms took part in a mean of long ago, and lost those after
    it. 122: a life that gave up its chain applied a result of it that waited. 218: of streams that
    are two rounds apart, a query named the round before the first, -2, and was refused. 323: of
    pairs with short rounds, somebody passed the round of each return before all had signed it."""
    assert run_returns_seed(seed).violations == []


def test_a_founder_of_two_that_is_rebooted_again_and_again_is_back_as_soon_each_time(tmp_path):
    took_s = []

    async def main(chaos):
        for _ in range(3):
            await asyncio.sleep(10.0)
            await chaos.homes.kill(0)
            await asyncio.sleep(5.0)
            chaos.homes.start(0)
            took_s.append(await chaos.together("a reboot"))

    arm = returns_case(SMALL[0], "diloco").arm
    assert disaster(SMALL[0], tmp_path, main, arm=arm, peers=2) == []
    assert max(took_s) < 15.0


def test_a_founder_that_has_lost_its_folder_takes_the_others_state_and_does_not_replace_it(
    tmp_path,
):
    """It has begun the run again by the time at which the other one, with a state, comes back."""
    tokens = []

    async def main(chaos):
        await asyncio.sleep(20.0)
        await chaos.homes.kill(0, 1)
        home, kept = (chaos.homes.by_number[number] for number in (0, 1))
        tokens.append(last_of(RunFolder(kept.path), chaos.homes.known.run).meta["tokens"])
        shutil.rmtree(home.path)
        home.path.mkdir()
        chaos.watch.damaged.add(chaos.homes.key(0))
        chaos.homes.start(0)
        await asyncio.sleep(10.0)
        tokens.append(home.part.loop.driver.tokens)
        chaos.homes.start(1)
        await chaos.together("its return")
        tokens.append(home.part.loop.driver.tokens)

    arm = returns_case(SMALL[0], "diloco").arm
    assert disaster(SMALL[0], tmp_path, main, arm=arm, peers=2) == []
    kept, begun, after = tokens
    assert begun < kept <= after


def test_peers_that_stay_apart_are_a_violation(tmp_path, monkeypatch):
    async def main(chaos):
        monkeypatch.setattr(returns_chaos, "ONE_CHAIN_S", 20.0)
        await chaos.homes.kill(1)
        await chaos.together("a death")

    found = disaster(SMALL[0], tmp_path, main)
    assert any(
        what.startswith("peer 1 has not come into the run 20 s after a death") for what in found
    )


def test_a_run_that_hangs_is_a_violation_of_its_seed(monkeypatch):
    async def hang(chaos):
        await asyncio.Event().wait()

    monkeypatch.setattr(ReturnsChaos, "run", hang)
    assert "give the wait a deadline" in run_returns_seed(0).violations[0]
