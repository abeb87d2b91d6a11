"""An idle node's processor time is measured on a whole node, alone and with partners on links."""

import math

import pytest

from farflock.experiments.bench import idle

pytestmark = pytest.mark.net


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_a_node_is_measured_alone_and_with_all_partners_in_its_view(quick):
    alone, full = idle.run(quick())
    assert [alone.metric, full.metric] == ["idle.alone", "idle.3"]
    assert (alone.yardstick, full.yardstick) == (2.0, 5.0)
    assert 0 < alone.value < math.inf
    assert 0 < full.value < math.inf
    assert alone.note.startswith("1 members; event loop")
    assert full.note.startswith("3 members; event loop")
