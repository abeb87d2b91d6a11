"""The stages of the benchmark: which arms are screened, which are in the final and at which rate,
and that nothing is run twice."""

import math
from dataclasses import replace

import pytest

from farflock.experiments.measure.metric import NotMeasured
from farflock.experiments.measure.threads import one_thread
from farflock.experiments.quality import screen as quality
from farflock.experiments.quality.arms import Arm, Arms, Grid
from farflock.experiments.quality.pace import Pace
from farflock.experiments.quality.screen import Bench, Size, further, ring_bytes
from farflock.experiments.reproduce.job import Outcome, Swarm
from farflock.experiments.reproduce.shelf import Shelf
from farflock.node.model.llama import PRESETS

SIZE = Size(
    model=PRESETS["tiny"],
    peers=2,
    batch=4,
    seq=8,
    screen_steps=2,
    steps=4,
    seeds=(1, 2),
    finalists=2,
    trials=2,
    held_out=4,
)
LOSS = {"ddp": 2.0, "none": 3.0, "diloco": 2.2, "noloco": 2.4, "demo": 2.6}


@pytest.fixture
def arms(trial):
    """Three methods with two trials each: the second has twice the rate of the first."""

    def both(period, more=0.0):
        return [trial(lr + more, options={"period": period}) for lr in (4e-3, 8e-3)]

    methods = {name: Arm({"100": both(2), "500": both(4)}) for name in ("diloco", "noloco")}
    methods["demo"] = Arm({"100": both(1), "500": both(4)}, "sgd", 0.0)
    return Arms(
        {"ddp": Grid([4e-3, 8e-3, 1.6e-2], [0.1, 0.2]), "none": Grid([2e-3], [0.1])}, methods
    )


@pytest.fixture
def played(monkeypatch, arms, tmp_path):
    """A function (loss of a job, its bytes, what else the bench is told) -> its scores and the jobs
    that were run."""

    def play(loss=None, sent=lambda job: 1.0, size=SIZE, budgets=(100,), only=()):
        ran = []

        def run_all(jobs, workers, told):
            for job in jobs:
                told(job, 1.0)
                ran.append(job)
                found = (loss or usual)(job)
                metrics = {} if found is None else {"loss": found, "bytes": sent(job)}
                yield job, Outcome(metrics=metrics, diverged=found is None)

        monkeypatch.setattr("farflock.experiments.reproduce.workers.run_all", run_all)
        pace = Pace(1.0, 1, 1.0, lambda share, left_s: None)
        return Bench(size, arms, budgets, only).run(Shelf(tmp_path), 1, pace), ran

    return play


def name_of(job):
    if isinstance(job, Swarm):
        return job.method
    return "ddp" if job.batch == SIZE.batch else "none"


def usual(job):
    """Best at a rate of 8e-3, and in long runs at 0.6 of it."""
    wanted = 8e-3 if job.steps == SIZE.screen_steps else 4.8e-3
    return LOSS[name_of(job)] + abs(math.log(job.lr / wanted)) / 10 + job.seed / 100


def test_every_method_is_screened_and_the_best_two_are_in_the_final_with_both_lines(played):
    scores, ran = played()
    assert set(scores.screen) == {"ddp", "none", "diloco.100", "noloco.100", "demo.100"}
    assert [len(runs) for runs in scores.screen.values()] == [6, 1, 2, 2, 2]
    assert set(scores.finals) == {"ddp", "none", "diloco.100", "noloco.100"}
    assert {job.seed for job in ran if job.steps == SIZE.screen_steps} == {1}


def test_finalists_start_from_their_best_trial_and_try_two_rates_and_one_beyond_the_better(played):
    scores, _ = played()
    rates = [round(run.contender.trial.lr, 6) for run in scores.finals["diloco.100"].ladder]
    assert rates == [8e-3, 4.8e-3, 2.88e-3]
    assert scores.finals["diloco.100"].runs[0].contender.trial.lr == pytest.approx(4.8e-3)
    assert not scores.finals["diloco.100"].at_edge
    assert [run.seed for run in scores.finals["diloco.100"].runs] == [1, 2]


def test_the_lines_have_the_same_ladder(played):
    scores, _ = played()
    assert {len(final.ladder) for final in scores.finals.values()} == {3}


def test_where_the_first_rate_is_the_better_one_the_third_is_above(run_of):
    ladder = (run_of("a.100", 2.0, lr=6e-3), run_of("a.100", 2.1, lr=3.6e-3))
    assert further(ladder).trial.lr == pytest.approx(1e-2)
    assert further((ladder[1], run_of("a.100", 2.0, lr=2.16e-3))).trial.lr == pytest.approx(
        1.296e-3
    )


def test_a_lower_rate_that_sends_too_much_is_not_the_better_one(run_of):
    ladder = (run_of("a.100", 2.0, lr=6e-3), run_of("a.100", 1.0, lr=3.6e-3, sent=99.0))
    assert further(ladder).trial.lr == pytest.approx(1e-2)


def test_a_trial_above_the_budget_is_never_the_best_however_low_its_loss(played):
    ring = ring_bytes(SIZE, SIZE.screen_steps)
    scores, _ = played(sent=lambda job: ring / 50 if name_of(job) == "diloco" else 1.0)
    assert set(scores.finals) == {"ddp", "none", "noloco.100", "demo.100"}
    assert scores.screen["diloco.100"][0].excess == pytest.approx(1.0)


def test_a_method_that_only_diverges_is_screened_and_not_in_the_final(played):
    scores, _ = played(lambda job: None if name_of(job) == "diloco" else usual(job))
    assert not any(run.counts for run in scores.screen["diloco.100"])
    assert "diloco.100" not in scores.finals


def test_a_line_that_diverges_everywhere_is_no_measurement(played):
    with pytest.raises(NotMeasured, match="ddp diverged at every learning rate"):
        played(lambda job: None if name_of(job) == "ddp" else usual(job))


def test_both_budgets_have_finalists_of_their_own_and_share_the_lines(played):
    scores, ran = played(budgets=(100, 500))
    assert {"diloco.100", "diloco.500"} <= set(scores.finals)
    assert len([job for job in ran if name_of(job) == "none"]) == 1 + 3 + 1, (
        "grid, ladder, the second seed"
    )


def test_one_metric_alone_needs_the_lines_and_that_method(played):
    scores, ran = played(only=("demo.100",))
    assert set(scores.screen) == set(scores.finals) == {"ddp", "none", "demo.100"}
    assert {name_of(job) for job in ran} == {"ddp", "none", "demo"}


def test_a_second_time_nothing_is_run(played):
    first, _ = played()
    again, ran = played()
    assert ran == []
    assert again == first


def test_an_interrupted_measurement_goes_on_where_it_stopped(played):
    count = 0

    def until_five(job):
        nonlocal count
        count += 1
        if count > 5:
            raise KeyboardInterrupt
        return usual(job)

    with pytest.raises(KeyboardInterrupt):
        played(until_five)
    _, ran = played()
    assert len([job for job in ran if job.steps == SIZE.screen_steps]) == 6 + 1 + 3 * 2 - 5


def test_all_jobs_of_a_stage_differ_in_nothing_but_the_arm(played):
    _, ran = played()
    screen = [job for job in ran if job.steps == SIZE.screen_steps]
    same = (
        "seed",
        "model",
        "corpus",
        "seq",
        "steps",
        "floor",
        "weight_decay",
        "betas",
        "points",
        "held_out",
    )
    assert len({tuple(getattr(job, field) for field in same) for job in screen}) == 1
    assert {job.batch for job in screen} == {SIZE.batch, SIZE.batch // SIZE.peers}
    assert {(job.optimizer, job.clip) for job in screen if name_of(job) == "demo"} == {("sgd", 0.0)}
    assert {(job.optimizer, job.clip) for job in screen if name_of(job) != "demo"} == {
        ("adamw", 1.0)
    }


def test_a_trial_may_have_a_second_beta_of_its_own(arms, trial, run_of):
    job = Bench(SIZE, arms, [100]).job(run_of("diloco.100", 1.0, beta2=0.99).contender, 1, 2)
    assert job.betas == (0.9, 0.99)


def test_ddp_s_bytes_are_those_of_a_ring_of_fp32_gradients():
    values = quality.parameters_of(SIZE.model)
    assert ring_bytes(SIZE, 10) == 2 * (1 / 2) * 4 * values * 10
    assert ring_bytes(Size(), 1) == 2 * (3 / 4) * 4 * 467_808


def test_the_longest_jobs_are_run_first(played):
    _, ran = played()
    screen = [quality.effort(job) for job in ran if job.steps == SIZE.screen_steps]
    assert screen == sorted(screen, reverse=True)


def test_what_is_on_the_shelf_is_not_foreseen(arms, tmp_path, played):
    bench = Bench(SIZE, arms, [100])
    jobs, total = bench.efforts()
    assert bench.foreseen(Shelf(tmp_path / "empty"), 2.0, 4) == pytest.approx(total / 2)
    played()
    left = bench.foreseen(Shelf(tmp_path), 2.0, 4)
    assert left == pytest.approx((total - sum(map(quality.effort, jobs))) / 2)
    assert left > 0


def test_the_quick_size_has_one_trial_a_method_and_two_points_a_line(arms):
    quick = Bench(quality.QUICK, arms, [100])
    names = [one.name for one in quick.screened()]
    assert names == ["ddp", "ddp", "none", "none", "diloco.100", "noloco.100", "demo.100"]


def test_the_real_machinery_from_end_to_end(trial, tmp_path):
    """Two steps of a tiny model: an arm that exchanges each step is far above 1/100,
    one that never does is within it."""
    exact = {"codec": "fp32", "return_codec": "fp32"}
    methods = {
        "diloco": Arm({"100": [trial(options={"period": 1, **exact})]}),
        "co2": Arm({"100": [trial(options={"period": 50, **exact})]}),
    }
    size = replace(SIZE, trials=1, seeds=(1,), steps=3, finalists=1)
    lines = {line: Grid([1e-3, 4e-3], [0.25]) for line in ("ddp", "none")}
    told = []
    bench = Bench(size, Arms(lines, methods), [100])
    pace = Pace(bench.efforts()[1], 1, 1.0, lambda share, left_s: told.append(share))
    with one_thread():
        scores = bench.run(Shelf(tmp_path), 1, pace)
    (counted,) = scores.screen["diloco.100"]
    assert counted.sent_bytes == pytest.approx(counted.ring_bytes, rel=0.5), (
        "one fp32 mean each way is a ring's"
    )
    assert counted.excess > 50
    assert set(scores.finals) == {"ddp", "none", "co2.100"}
    assert scores.finals["co2.100"].runs[0].saving > 100
    assert told == sorted(told)
    assert bench.measured_at(Shelf(tmp_path), scores) > 0
