"""The benchmark of sudden deaths, small: the others go on, and its books are kept honestly."""

import asyncio

import pytest

from farflock.experiments.bench import kill
from farflock.experiments.bench.kill import Blow, Diverged, Watch
from farflock.experiments.bench.workers.kill_peer import PERIOD, Reductions
from farflock.experiments.measure.metric import Options
from farflock.swarm.sim.virtual_time import run_virtual


class Said:
    """A worker whose rounds are known beforehand."""

    def __init__(self, name, *rounds):
        self.name, self.rounds = name, list(rounds)

    async def hear(self, kind, timeout_s):
        return self.rounds.pop(0)


def said(number, state="aa", **fields):
    return {
        "number": number,
        "state": state,
        "at_s": float(number),
        "members": 3,
        "lost": 0,
        **fields,
    }


def test_states_that_differ_after_the_same_round_are_not_passed_over():
    a, b = Said("a", said(1), said(2)), Said("b", said(1), said(2, state="bb"))
    watch = Watch([a, b])

    async def main():
        for worker in (a, b, a):
            await watch.next(worker)
        with pytest.raises(Diverged, match="after round 2, the state of b differs from the others"):
            await watch.next(b)

    run_virtual(main())


def test_notice_counts_from_the_first_round_that_ended_after_the_signal():
    worker = Said("a", said(1, members=2), said(2), said(3), said(4))
    watch = Watch([worker])

    async def main():
        await watch.together(3)
        assert watch.latest["a"]["number"] == 2
        assert await watch.after(worker, 3.0) == 4.0

    run_virtual(main())


@pytest.mark.parametrize(
    ("agreed", "honest"), [(40, True), (45, True), (35, False), (50, False), (41, False)]
)
def test_the_runs_tokens_must_confirm_what_the_workers_count(agreed, honest):
    """Two survivors, one a round ahead with five steps more, and a victim whose last five steps may
    have counted."""
    workers = [Said("a"), Said("victim"), Said("b")]
    watch = Watch(workers)
    watch.note(workers[0], said(7, agreed=agreed, counted=15))
    watch.note(workers[1], said(5, agreed=30, counted=10))
    watch.note(workers[2], said(8, agreed=agreed + 2 * PERIOD, counted=15 + PERIOD))
    if honest:
        kill.require_books(watch, workers[1])
    else:
        with pytest.raises(Diverged):
            kill.require_books(watch, workers[1])


def test_the_metrics_are_the_median_notice_and_the_worst_loss():
    notice, lost = kill.death_metrics(
        "kill.", [Blow(0.2, 0), Blow(0.9, 3), Blow(0.4, 0)], "SIGKILL"
    )
    assert (notice.metric, notice.value, notice.yardstick, notice.n) == (
        "kill.notice_s",
        0.4,
        1.0,
        3,
    )
    assert "0.90 s" in notice.note
    assert (lost.metric, lost.value, lost.unit) == ("kill.steps_lost", 3, "steps")


def test_held_reductions_wait_and_others_do_not(capsysbinary):
    async def worker(work):
        return work()

    async def main():
        reductions = Reductions(worker)
        assert await reductions(lambda: 1) == 1
        reductions.hold()
        held = asyncio.create_task(reductions(lambda: 2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not held.done()
        assert b"holding" in capsysbinary.readouterr().out
        reductions.release()
        assert await held == 2

    run_virtual(main())


@pytest.mark.net
@pytest.mark.long
def test_three_nodes_lose_one_to_a_stop_and_to_a_kill_and_go_on():
    metrics = {metric.metric: metric for metric in kill.run(Options(quick=True))}
    assert list(metrics) == [
        "kill.notice_s",
        "kill.steps_lost",
        "kill.stop_notice_s",
        "kill.stop_steps_lost",
    ]
    assert metrics["kill.steps_lost"].value == metrics["kill.stop_steps_lost"].value == 0
    assert metrics["kill.notice_s"].value > 0
    assert metrics["kill.stop_notice_s"].value > 0
