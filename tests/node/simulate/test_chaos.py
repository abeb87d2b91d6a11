"""A disaster: every fault meets every phase in turn, only hits count, and hangs are found."""

import asyncio
import collections
from functools import partial

import pytest

from farflock.node.simulate import chaos
from farflock.node.simulate.chaos import (
    CELLS,
    FAULTS,
    KINDS,
    Chaos,
    empty_cells,
    faults_of,
    run_seed,
    run_seeds,
)
from farflock.node.simulate.chaos_methods import PAIR_PHASES, PHASES, case_of
from farflock.node.simulate.standstill import moving_clock
from farflock.swarm.sim.virtual_time import Deadlock, run_virtual

EXACT, GATHERS, SILENT, PAIRS = 0, 1, 16, 43  # seeds
BLOCK = len(CELLS) // FAULTS


def test_so_many_seeds_in_a_row_have_no_kind_of_fault_twice_in_a_phase_and_some_more_have_all():
    for first in (0, 7 * BLOCK):
        drawn = [fault for seed in range(first, first + BLOCK) for fault in faults_of(seed)]
        assert len(set(drawn)) == len(drawn) == BLOCK * FAULTS
        more = {fault for seed in range(first, first + 2 * BLOCK) for fault in faults_of(seed)}
        assert more == {*CELLS}
    assert faults_of(0) != faults_of(BLOCK)


def test_the_seeds_named_here_run_methods_of_each_kind():
    assert [case_of(seed).method for seed in (EXACT, GATHERS, SILENT, PAIRS)] == [
        "diloco",
        "sparseloco",
        "local",
        "noloco",
    ]


def test_a_cell_is_empty_until_its_fault_has_fired():
    fired = collections.Counter(dict.fromkeys(CELLS, 1))
    assert empty_cells(fired) == []
    fired["kill", "vote"] = 0
    del fired["slow", "offer"]
    assert empty_cells(fired) == [("kill", "vote"), ("slow", "offer")]


def until_all_are_in(seed, main):
    """Run `main(disaster)` once all peers of a seed have come in."""

    async def whole():
        disaster = Chaos(seed, case_of(seed))
        for index in range(len(disaster.population.identities)):
            disaster.population.begin(index)
            await asyncio.sleep(0.3)
        await disaster.progress(1, "the start")
        await main(disaster)
        await disaster.population.end_all()
        return disaster

    return run_virtual(whole())


@pytest.mark.parametrize("seed", [EXACT, PAIRS])
def test_each_kind_of_fault_hits_something(seed):
    hits = {}

    async def main(disaster):
        for kind in KINDS:
            hits[kind] = await disaster.strike(kind)

    until_all_are_in(seed, main)
    assert hits.keys() == set(KINDS)
    assert all(hits.values()) or len(Chaos(seed, case_of(seed)).population.identities) == 4


@pytest.mark.parametrize(("seed", "peers", "may_die"), [(EXACT, 8, 3), (PAIRS, 8, 3), (9, 4, 1)])
def test_a_majority_always_lives_and_a_fault_that_hits_no_peer_is_not_counted(seed, peers, may_die):
    async def main(disaster):
        assert len(disaster.population.lives) == peers
        await asyncio.sleep(10)  # until the rounds, too, are those of the view with all
        assert [await disaster.kill(index) for index in disaster.population.lives] == [
            n < may_die for n in range(peers)
        ]
        for kind in ("kill", "restart"):
            assert not await disaster.strike(kind)
        assert all(
            not life.task.done()
            for index, life in disaster.population.lives.items()
            if index >= may_die
        )

    until_all_are_in(seed, main)


@pytest.mark.parametrize("seed", [EXACT, PAIRS])
def test_no_peer_is_killed_that_a_view_needs_for_its_quorum(monkeypatch, seed):
    # so the view's first member decides all
    monkeypatch.setattr(chaos, "is_quorum", lambda members, size: 0 in members)

    async def main(disaster):
        assert not await disaster.kill(0)
        assert await disaster.kill(1)

    until_all_are_in(seed, main)


@pytest.mark.parametrize(
    ("seed", "phase"),
    [(EXACT, phase) for phase in sorted(set(PHASES.values()))] + [(PAIRS, "held")],
)
def test_a_fault_strikes_when_a_message_of_its_phase_is_sent(seed, phase):
    async def main(disaster):
        assert await disaster.tap.wait_for(phase) == phase

    until_all_are_in(seed, main)


def test_where_pairs_have_no_such_phase_another_one_is_met():
    async def main(disaster):
        assert await disaster.tap.wait_for("vote") in PAIR_PHASES

    until_all_are_in(PAIRS, main)


def test_where_nothing_is_reduced_another_phase_is_met_and_where_nothing_is_sent_none():
    async def gathers(disaster):
        assert await disaster.tap.wait_for("reduced") in set(PHASES.values()) - {"reduced"}

    async def silent(disaster):
        before_s = asyncio.get_running_loop().time()
        assert await disaster.tap.wait_for("offer") == ""
        assert asyncio.get_running_loop().time() == before_s

    until_all_are_in(GATHERS, gathers)
    until_all_are_in(SILENT, silent)


def test_faults_of_a_method_that_sends_nothing_fill_no_cell():
    report = run_seed(SILENT)
    assert (report.violations, report.fired, report.rounds) == ([], {}, 0)


def test_a_peer_that_ends_by_itself_is_a_violation_though_it_is_replaced():
    async def main(disaster):
        async def fail(work):
            raise ArithmeticError("out of order")

        disaster.population.lives[1].loop.train = fail
        await asyncio.sleep(3)
        disaster.repair()
        await disaster.progress(1, "the fault")

    disaster = until_all_are_in(EXACT, main)
    assert ["out of order" in violation for violation in disaster.watch.violations] == [True]


def test_what_interrupts_a_peer_from_outside_ends_the_seed_and_is_no_violation_of_it():
    class TimeLimit(BaseException):
        pass

    async def main(disaster):
        async def strike(work):
            raise TimeLimit

        disaster.population.lives[1].loop.train = strike
        await asyncio.sleep(30)

    with pytest.raises(TimeLimit):
        until_all_are_in(EXACT, main)


def test_peers_that_do_not_come_in_are_a_violation():
    async def main(disaster):
        disaster.population.lives[1].loop.stop()
        await asyncio.sleep(1)
        await disaster.progress(1, "the fault")

    violations = until_all_are_in(EXACT, main).watch.violations
    assert len(violations) == 1
    assert violations[0].startswith("peer 1 has made ")


def test_a_task_that_outlives_its_peer_and_uncounted_bytes_are_violations():
    async def main(disaster):
        looking = asyncio.create_task(asyncio.sleep(1e9))
        looking.cancel()
        await asyncio.wait([looking])
        forgotten = asyncio.create_task(asyncio.sleep(1e9), name="forgotten")
        disaster.population.peers.lines[0].sent_bytes += 1
        disaster.network.bytes["sent"] += 1
        await disaster.population.end_all()
        disaster.check_rest(looking)
        forgotten.cancel()

    found = until_all_are_in(EXACT, main).watch.violations
    assert [
        words in text
        for words, text in zip(
            ("forgotten", "bytes sent", "1 bytes are missing"), found, strict=True
        )
    ]
    assert len(found) == 3


def test_a_swarm_that_hangs_for_ever_is_a_violation_of_its_seed(monkeypatch):
    async def hang(disaster):
        await asyncio.Event().wait()

    monkeypatch.setattr(Chaos, "run", hang)
    report = run_seed(5)
    assert report.seed == 5
    assert "give the wait a deadline" in report.violations[0]
    with pytest.raises(Deadlock):
        run_virtual(hang(None))


def test_a_swarm_whose_clock_stands_still_is_a_violation_of_its_seed(monkeypatch):
    async def at_once():
        pass

    async def spin(disaster):
        while True:
            await at_once()

    monkeypatch.setattr(Chaos, "run", spin)
    monkeypatch.setattr(chaos, "moving_clock", partial(moving_clock, 0.05))
    assert "the clock shows 0 s for 0.05 s of computing" in run_seed(5).violations[0]


def test_reports_come_in_the_order_of_seeds(monkeypatch):
    monkeypatch.setattr(chaos, "run_seed", lambda seed, name: (seed, name))
    assert list(run_seeds(4, 3)) == [(4, None), (5, None), (6, None)]
    assert list(run_seeds(4, 2, name="ddp")) == [(4, "ddp"), (5, "ddp")]


def test_a_stream_that_stands_still_is_a_violation_though_others_go_on():
    async def main(disaster):
        disaster.streams += 1
        await disaster.progress(1, "the fault")

    violations = until_all_are_in(EXACT, main).watch.violations
    assert len(violations) == len(Chaos(EXACT, case_of(EXACT)).population.identities)
    assert "has made" in violations[0]
