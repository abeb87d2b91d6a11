"""A recipe in practice: every arm is searched alike, nothing is run twice,
and what cannot be compared is not."""

import pytest

from farflock.experiments.reproduce import recipe, study
from farflock.experiments.reproduce.job import Line, Outcome, Swarm, key
from farflock.experiments.reproduce.shelf import Shelf
from farflock.experiments.reproduce.study import Study
from farflock.experiments.reproduce.verdict import NO, UNKNOWN, YES
from farflock.node.errors import Failure


@pytest.fixture
def played(monkeypatch, outcome, tmp_path):
    """A function (recipe's text, loss of a job) -> the study, its results,
    and the jobs that were run."""

    def play(text, loss, tier="cpu", metrics=lambda job: {}):
        ran = []

        def run_all(jobs, workers, told):
            for job in jobs:
                told(job, 1.0)
                ran.append(job)
                found = loss(job)
                yield (
                    job,
                    Outcome(metrics={}, diverged=True)
                    if found is None
                    else outcome(found, **metrics(job)),
                )

        monkeypatch.setattr("farflock.experiments.reproduce.workers.run_all", run_all)
        mine = Study(recipe.read("mine", text), tier)
        return mine, mine.run(Shelf(tmp_path), 1, lambda share: None), ran

    return play


def is_none(job):
    return isinstance(job, Line) and job.batch == 2


def period(job):
    return job.options["period"] if isinstance(job, Swarm) else 0


def loss(job):
    """DDP 1.0, none 2.0, H = 1 1.2, H = 2 1.5, with a little noise over seeds;
    the higher rate is better."""
    base = {1: 1.2, 2: 1.5}.get(period(job), 2.0 if is_none(job) else 1.0)
    return base + 0.01 * job.seed + (0.1 if job.lr < 4e-3 else 0.0)


def test_each_arm_and_both_lines_are_searched_over_the_same_grid_on_the_first_seed(
    played, recipe_text
):
    _, results, ran = played(recipe_text, loss)
    assert [result.name for result in results] == ["ddp", "none", "short", "long"]
    for result in results:
        assert set(result.grid) == {(1e-3, 0.25), (4e-3, 0.25)}
        assert result.setting == (4e-3, 0.25)
        assert result.at_edge
        assert len(result.outcomes) == 2
    assert len(ran) == 4 * (2 + 1), "the best of the search is the first seed's run"


def test_all_arms_of_a_seed_have_the_same_data_model_and_tokens(played, recipe_text):
    _, _, ran = played(recipe_text, loss)
    assert len({(job.corpus, job.model, job.steps, job.seq) for job in ran}) == 1
    assert {job.batch for job in ran} == {2, 4}
    assert all(job.batch == 4 for job in ran if not is_none(job))


def test_a_second_time_nothing_is_run(played, recipe_text):
    _, first, _ = played(recipe_text, loss)
    _, again, ran = played(recipe_text, loss)
    assert ran == []
    assert again == first


def test_an_interrupted_study_goes_on_where_it_stopped(played, recipe_text):
    count = 0

    def until_five(job):
        nonlocal count
        count += 1
        if count > 5:
            raise KeyboardInterrupt
        return loss(job)

    with pytest.raises(KeyboardInterrupt):
        played(recipe_text, until_five)
    _, _, ran = played(recipe_text, loss)
    assert len(ran) == 12 - 5


def test_two_recipes_share_the_runs_that_they_have_in_common(played, recipe_text):
    played(recipe_text, loss)
    other = recipe_text.replace("period = 2", "period = 4").replace("H = 2", "H = 4")
    _, _, ran = played(other, lambda job: 1.0)
    assert {period(job) for job in ran} == {4}


def test_a_claim_that_holds_is_reproduced(played, recipe_text):
    mine, results, _ = played(recipe_text, loss)
    assert [finding.word for finding in mine.judged(results)] == [YES]
    assert study.verdict("cpu", mine.judged(results)) == YES


def test_a_claim_that_does_not_hold_is_not(played, recipe_text):
    mine, results, _ = played(
        recipe_text, lambda job: loss(job) if period(job) != 2 else 1.1 + 0.01 * job.seed
    )
    assert study.verdict("cpu", mine.judged(results)) == NO


def test_tier_ci_gives_no_verdict(played, recipe_text):
    mine, results, _ = played(recipe_text, loss, "ci")
    assert study.verdict("ci", mine.judged(results)) is None


def test_where_communication_gains_nothing_nothing_can_be_told(played, recipe_text):
    mine, results, _ = played(
        recipe_text, lambda job: 1.0 + 0.01 * job.seed if is_none(job) else loss(job)
    )
    (finding,) = mine.judged(results)
    assert finding.word == UNKNOWN
    assert "too little to judge by" in finding.reason


def test_an_arm_that_diverged_in_one_seed_has_no_loss(played, recipe_text):
    mine, results, _ = played(
        recipe_text, lambda job: None if period(job) == 2 and job.seed == 2 else loss(job)
    )
    assert results[3].values("loss") == []
    assert mine.judged(results)[0].word == UNKNOWN


def test_a_rate_at_which_an_arm_diverges_is_not_chosen(played, recipe_text):
    _, results, _ = played(
        recipe_text, lambda job: None if period(job) == 2 and job.lr == 4e-3 else loss(job)
    )
    assert results[3].setting == (1e-3, 0.25)
    assert results[3].grid[4e-3, 0.25] is None


def test_arms_that_trained_other_tokens_than_planned_are_refused(played, recipe_text):
    with pytest.raises(Failure, match="short trained 120 tokens: 128 were planned"):
        played(recipe_text, loss, metrics=lambda job: {"tokens": 120} if period(job) == 1 else {})


def test_the_lines_bytes_are_a_ring_s_and_their_tokens_the_whole_swarm_s(played, recipe_text):
    _, (ddp, none, *_), _ = played(recipe_text, loss)
    assert ddp.values("bytes") == [2 * 1 / 2 * 8 * 4 * 4] * 2, (
        "8 parameters, fp32, 4 steps, 2 peers"
    )
    assert [point.tokens for point in none.outcomes[0].curve] == [64, 128]
    assert none.values("bytes") == [0, 0]
    assert ddp.outcomes[0].curve[-1].compute_s == 4 * 0.5


def test_data_parallelism_waits_for_the_slowest_of_unequal_machines(played, recipe_text):
    text = recipe_text.replace('label = "H = 1"', 'label = "H = 1"\nspeeds = [1.0, 4.0]')
    _, (ddp, none, *_), _ = played(text, loss)
    assert ddp.outcomes[0].curve[-1].compute_s == 4 * 0.5 * 4
    assert none.outcomes[0].curve[-1].compute_s == 4 * 0.5


def test_an_arm_may_have_peers_a_rate_and_an_optimizer_of_its_own(recipe_text):
    own = 'label = "H = 1"\npeers = 4\nlr = [1e-2]\noptimizer = "sgd"\nclip = 0.0'
    mine = Study(recipe.read("mine", recipe_text.replace('label = "H = 1"', own)), "cpu")
    job = mine.job("short", 1, (1e-2, 0.25))
    assert (job.peers, job.optimizer, job.clip, job.batch) == (4, "sgd", 0.0, 4)
    assert mine.job("long", 1, (1e-2, 0.25)).optimizer == "adamw"
    assert job.plan("diloco", {}, 1).inner.name == "sgd"


def test_a_dry_run_describes_the_jobs_and_hashes_alike(recipe_text):
    described = Study(recipe.read("mine", recipe_text), "cpu").described()
    assert [len(jobs) for jobs in described["arms"].values()] == [2, 2, 2, 2]
    assert described == Study(recipe.read("mine", recipe_text), "cpu").described()


def test_progress_ends_at_one_and_never_falls(recipe_text, monkeypatch, outcome, tmp_path):
    told = []

    def run_all(jobs, workers, tell):
        for job in jobs:
            for share in (0.5, 1.0):
                tell(job, share)
            yield job, outcome(1.0)

    monkeypatch.setattr("farflock.experiments.reproduce.workers.run_all", run_all)
    Study(recipe.read("mine", recipe_text), "cpu").run(Shelf(tmp_path), 1, told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_the_search_s_best_run_counts_as_the_first_seed(recipe_text):
    mine = Study(recipe.read("mine", recipe_text), "cpu")
    assert key(mine.searched("short")[1]) == key(mine.job("short", 1, (4e-3, 0.25)))
