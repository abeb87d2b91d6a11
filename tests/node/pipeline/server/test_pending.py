"""The table of gradients that wait for their confirmation, and of the replies that go with them."""

import pytest

from farflock.node.pipeline.server.pending import PendingGradient, PendingGradients
from farflock.swarm.protocol.gradient_leases import GradientLeases

KEY, LEASE_S = ("t", 1), 10.0
GRADIENT = PendingGradient("its gradient", None, 3)


@pytest.fixture
def table():
    return PendingGradients(GradientLeases(2, LEASE_S))


def begun(table, key=KEY, attempt=1):
    reply = object()
    return table.begin(key, attempt, reply), reply


def test_a_pass_runs_once_and_a_repeated_request_gets_its_reply(table):
    said, reply = begun(table)
    assert said == "run"
    assert begun(table, attempt=2)[0] == "again"
    assert table.replies == {KEY: reply}
    assert table.put_aside(KEY, GRADIENT, 0.0) == 2, "the attempt that was asked for last"
    assert begun(table, attempt=3)[0] == "again"


def test_the_number_of_places_is_bounded(table):
    assert [begun(table, ("t", number))[0] for number in range(3)] == ["run", "run", "busy"]
    assert len(table.replies) == 2


def test_a_confirmed_gradient_is_handed_out_once(table):
    begun(table)
    table.put_aside(KEY, GRADIENT, 0.0)
    assert table.confirm(KEY, 1) is GRADIENT
    assert table.confirm(KEY, 1) is True
    assert not table.gradients
    assert not table.replies
    assert begun(table, attempt=2)[0] == "nothing", "it counts already"


@pytest.mark.parametrize("how", ["revoke", "expire", "confirm another"])
def test_what_is_no_longer_wanted_is_forgotten(table, how):
    begun(table)
    table.put_aside(KEY, GRADIENT, 0.0)
    if how == "revoke":
        table.revoke(KEY, 1)
    elif how == "expire":
        table.expire(LEASE_S)
    else:
        assert table.confirm(KEY, 2) is False
    assert not table.gradients
    assert not table.replies
    assert table.confirm(KEY, 1) is False


def test_what_was_given_up_while_it_ran_is_not_kept(table):
    begun(table)
    table.revoke(KEY, 1)
    assert table.put_aside(KEY, GRADIENT, 0.0) is None
    assert not table.gradients
    assert not table.replies


def test_a_pass_that_brought_nothing_may_be_asked_for_again(table):
    begun(table)
    table.drop(KEY, 1)
    assert begun(table, attempt=2)[0] == "run"
