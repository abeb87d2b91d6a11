"""Several processes give what one gives, and none of them is left behind."""

import multiprocessing
import os
import signal

import pytest

from farflock.compression.codec import UnencodableTensor
from farflock.experiments.reproduce import workers
from farflock.experiments.reproduce.job import Diverged
from farflock.node.errors import Failure

pytestmark = pytest.mark.net


def silent(job, share):
    pass


def by_seed(found):
    return {job.seed: outcome.metrics for job, outcome in found}


def test_many_processes_give_the_same_outcomes_as_this_one(noise):
    jobs = [noise(seed=seed, rounds=20) for seed in range(4)]
    told = set()
    together = by_seed(
        workers.run_all(jobs, 2, lambda job, share: told.add((job.seed, share == 1.0)))
    )
    assert together == by_seed(workers.run_all(jobs, 1, silent))
    assert {seed for seed, done in told if done} == set(range(4))
    assert multiprocessing.active_children() == []


def test_a_reader_that_stops_listening_leaves_no_process_behind(noise):
    found = workers.run_all([noise(seed=seed, rounds=20) for seed in range(6)], 2, silent)
    next(found)
    found.close()
    assert multiprocessing.active_children() == []


def test_ctrl_c_ends_all_processes(noise, monkeypatch):
    def interrupted(lines, timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(workers.run_all([noise(seed=seed) for seed in range(2)], 2, silent))
    assert multiprocessing.active_children() == []


def test_a_job_that_fails_in_its_process_is_told_with_its_reason(noise):
    with pytest.raises(Failure, match="arm noise failed on seed 1"):
        list(workers.run_all([noise(alpha="much"), noise(alpha="more")], 2, silent))
    assert multiprocessing.active_children() == []


def test_a_process_that_is_killed_is_told_with_a_remedy(noise, monkeypatch):
    told = []

    def kill(job, share):
        if not told:
            told.append(job)
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(
        Failure, match=r"was killed, perhaps .* \(exit code -9\); use fewer --workers"
    ):
        list(
            workers.run_all(
                [noise(seed=seed, rounds=2_000, gamma=0.001) for seed in range(2)], 2, kill
            )
        )


def test_a_process_that_died_before_it_had_its_job_is_told_too(noise, monkeypatch):
    give = workers.give_job

    def give_to_the_dead(worker, waiting):
        worker.process.kill()
        worker.process.join()
        give(worker, waiting)

    monkeypatch.setattr(workers, "give_job", give_to_the_dead)
    with pytest.raises(Failure, match="was killed"):
        list(workers.run_all([noise(seed=seed) for seed in range(2)], 2, silent))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "error", [Diverged("at step 3"), UnencodableTensor("2 of 8 values are NaN")]
)
@pytest.mark.parametrize("group", [True, False])
def test_a_run_that_diverges_has_no_metrics_and_its_time(noise, monkeypatch, error, group):
    def diverge(job, progress):
        raise ExceptionGroup("tasks", [error]) if group else error

    monkeypatch.setattr(workers, "_runner", lambda job: diverge)
    outcome = workers.run(noise(), lambda share: None)
    assert outcome.diverged
    assert outcome.metrics == {}
    assert outcome.took_s >= 0


def test_other_errors_beside_divergence_are_not_swallowed(noise, monkeypatch):
    def fail(job, progress):
        raise ExceptionGroup("tasks", [Diverged("at step 3"), ValueError("a fault")])

    monkeypatch.setattr(workers, "_runner", lambda job: fail)
    with pytest.raises(ExceptionGroup):
        workers.run(noise(), lambda share: None)
