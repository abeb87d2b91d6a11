"""The start of both commands is measured as users see it, and torch is not waited for."""

import pytest

from farflock.experiments.bench import start

pytestmark = pytest.mark.net


@pytest.mark.long
def test_both_commands_say_something_before_torch_is_there(quick):
    metrics = list(start.run(quick()))
    assert [each.metric for each in metrics] == [
        "start.join",
        "start.join_cpu",
        "start.status",
        "start.status_cpu",
    ]
    assert all(each.n == 2 and each.value > 0 for each in metrics)
    assert {each.yardstick for each in metrics} == {1.5}
    assert all("without torch" in each.note for each in metrics[2:])
