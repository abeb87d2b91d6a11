from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.quota import BYTES_PER_UNIT, Quota, units


def test_a_burst_is_served_and_then_only_what_flows_in():
    quota = Quota(units_per_s=10, burst_units=20)
    assert sum(quota.take(b"a", 1, now_s=0.0) for _ in range(100)) == 20
    assert sum(quota.take(b"a", 1, now_s=0.5) for _ in range(100)) == 5


def test_a_bucket_never_holds_more_than_the_burst():
    quota = Quota(units_per_s=10, burst_units=20)
    quota.take(b"a", 20, now_s=0.0)
    assert not quota.take(b"a", 21, now_s=1e6)
    assert quota.take(b"a", 20, now_s=1e6)


def test_a_refused_request_costs_nothing():
    quota = Quota(units_per_s=0, burst_units=20)
    assert not quota.take(b"a", 21, now_s=0.0)
    assert quota.take(b"a", 20, now_s=0.0)


def test_peers_do_not_pay_for_each_other():
    quota = Quota(units_per_s=0, burst_units=1)
    assert quota.take(b"a", 1, now_s=0.0)
    assert quota.take(b"b", 1, now_s=0.0)


def test_a_clock_that_steps_back_gives_nothing_and_takes_nothing():
    quota = Quota(units_per_s=10, burst_units=20)
    assert quota.take(b"a", 15, now_s=100.0)
    assert not quota.take(b"a", 6, now_s=50.0)
    assert quota.take(b"a", 5, now_s=50.0)


def test_the_table_is_bounded_and_forgets_the_longest_silent_peer():
    quota = Quota(units_per_s=0, burst_units=1, max_peers=2)
    for peer in (b"a", b"b", b"a", b"c"):
        quota.take(peer, 1, now_s=0.0)
    assert len(quota) == 2
    assert not quota.take(b"a", 1, now_s=0.0)
    assert quota.take(b"b", 1, now_s=0.0)  # forgotten, so it has a stranger's full bucket


def test_bytes_cost_too():
    assert units(2, 3 * BYTES_PER_UNIT) == 5


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=60))
def test_no_peer_gets_more_than_the_burst_and_the_inflow(steps):
    quota, now_s, paid = Quota(units_per_s=3, burst_units=7), 0.0, 0.0
    for cost, wait_s in steps:
        now_s += wait_s
        paid += cost if quota.take(b"a", cost, now_s) else 0.0
        assert paid <= 7 + 3 * now_s + 1e-6
