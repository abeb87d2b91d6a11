"""The harness's results become a list of numbers with their errors."""

from farflock.node.use.tasks import TaskScore, scores_of, unknown_task


def test_scores_are_the_numbers_of_each_task():
    results = {
        "a": {
            "alias": "a",
            "acc,none": 0.5,
            "acc_stderr,none": 0.1,
            "exact,strict": 1,
            "exact_stderr,strict": "N/A",
            "sample_len": 7,
        },
        "b": {"bits,none": 2.5},
    }
    assert scores_of(results) == [
        TaskScore("a", "acc", 0.5, 0.1),
        TaskScore("a", "exact (strict)", 1.0, None),
        TaskScore("b", "bits", 2.5, None),
    ]


def test_an_unknown_task_is_refused_with_the_nearest_name():
    refusal = unknown_task("arc_eazy", ["arc_easy", "hellaswag"])
    assert str(refusal).startswith("there is no task 'arc_eazy'; did you mean 'arc_easy'?")
