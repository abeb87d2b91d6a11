"""The seam of weight versions, and what a run that waits has in their place."""

import pytest

from farflock.node.pipeline.passes.requests import Version
from farflock.node.pipeline.server.weight_versions import WeightVersions


@pytest.mark.parametrize("version", [None, Version(3), Version(9, 7)])
def test_the_newest_weights_are_used_whatever_is_named_and_replies_name_none(version):
    single = WeightVersions()
    with single.using(version) as used:
        assert used is None
    assert version is None or single.lack(version) is None


def test_where_rounds_are_waited_for_no_gradient_is_late():
    single = WeightVersions()
    single.begin_step([5])
    single.begin_round([5])
    single.end_round()
    assert single.delay(0, 9) == single.delay(0, 9, 4) == 0
