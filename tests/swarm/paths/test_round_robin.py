"""Interleaved weighted round-robin: visits follow speed, bans end when they should, and no server
is forgotten or chosen twice."""

import collections
import heapq
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from farflock.swarm.paths.round_robin import (
    BACKWARD_SIZE,
    DIAL_BAN_S,
    INITIAL_RATE,
    MAX_DOUBLINGS,
    MAX_PEERS,
    MIN_SECONDS,
    RPC_BAN_S,
    STALE_SLACK,
    TOLD_TRUST,
    TRUST,
    WARMUP_TASKS,
    Announced,
    Balancer,
    Ema,
)


def stage(rates, seed=0):
    """A balancer that knows servers with these announced rates from the start."""
    balancer = Balancer(random.Random(seed))
    balancer.refresh([Announced(peer, 1, rate) for peer, rate in rates.items()], 0.0)
    return balancer


def visits(balancer, tasks, size=1.0, now_s=0.0, exclude=()):
    return collections.Counter(balancer.choose(size, now_s, exclude) for _ in range(tasks))


def test_600_tasks_among_speeds_one_two_three_go_100_200_300():
    for seed in range(5):
        counts = visits(stage({"a": 1.0, "b": 2.0, "c": 3.0}, seed), 600)
        assert all(
            abs(counts[peer] - wanted) <= 3
            for peer, wanted in {"a": 100, "b": 200, "c": 300}.items()
        ), counts


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1.0, 4.0), min_size=1, max_size=8), st.integers(0, 999))
def test_at_every_moment_charges_differ_by_one_task_at_most_and_visits_follow_the_rates(
    rates, seed
):
    servers = {f"p{number}": rate for number, rate in enumerate(rates)}
    balancer, counts = stage(servers, seed), collections.Counter()
    for _ in range(60):
        counts[balancer.choose(1.0, 0.0)] += 1
        charges = balancer.charges.values()
        assert max(charges) - min(charges) <= 1 / min(rates) + 1e-9
        done = [counts[peer] / rate for peer, rate in servers.items()]
        assert max(done) - min(done) <= 1 / min(rates) + 1e-9


def test_a_backward_call_counts_as_two_and_a_half_forward_calls():
    balancer = stage({"a": 1.0, "b": 1.0})
    first = balancer.choose(BACKWARD_SIZE, 0.0)
    assert balancer.charges[first] == 2.5
    other = ({"a", "b"} - {first}).pop()
    assert [balancer.choose(1.0, 0.0) for _ in range(3)] == [other] * 3


def test_ties_are_broken_by_the_chance_that_was_given_and_by_nothing_else():
    def run(seed, names):
        balancer = stage(dict.fromkeys(names, 1.0), seed)
        return [balancer.choose(1.0, 0.0) for _ in range(30)]

    assert run(3, "abcde") == run(3, "edcba")
    assert run(3, "abcde") != run(4, "abcde")


def test_measured_speed_overrules_what_was_announced():
    """Eight calls at a time go to servers that each work on one call at a time, at speeds that they
    do not announce."""
    speeds = {"a": 1.0, "b": 2.0, "c": 4.0}
    balancer, free_s, counts = (
        stage(dict.fromkeys(speeds, 2.0)),
        dict.fromkeys(speeds, 0.0),
        collections.Counter(),
    )
    out, now_s = [], 0.0
    for number in range(1400):
        if len(out) == 8:
            now_s, _, peer, started_s = heapq.heappop(out)
            balancer.finished(peer, 1.0, started_s, now_s)
        peer = balancer.choose(1.0, now_s)
        free_s[peer] = max(free_s[peer], now_s) + 1 / speeds[peer]
        heapq.heappush(out, (free_s[peer], number, peer, now_s))
        counts[peer] += 1
    assert {
        peer: pytest.approx(7 * count / 1400, rel=0.05) for peer, count in counts.items()
    } == speeds
    assert 1400 / now_s > 0.95 * 7


def test_one_sample_gives_exactly_that_sample():
    for taken_s in (0.1, 0.3, 7.7, 1e-3):
        mean = Ema()
        mean.update(1, 0.0, taken_s)
        assert mean.seconds == taken_s


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=30))
def test_the_mean_is_the_bias_corrected_one_of_the_paper(samples):
    mean, plain, now_s = Ema(), 0.0, 0.0
    for count, taken_s in enumerate(samples, 1):
        mean.update(2, now_s, now_s + 2 * taken_s)
        now_s += 2 * taken_s
        plain = 0.9 * plain + 0.1 * taken_s
        assert mean.seconds == pytest.approx(plain / (1 - 0.9**count), rel=1e-6)
    assert mean.rate == pytest.approx(1 / mean.seconds)


def test_constant_input_gives_constant_output():
    mean = Ema()
    for number in range(1000):
        mean.update(4, float(number), number + 0.5)
        assert mean.seconds == 0.125


def test_calls_that_overlap_are_measured_as_throughput_not_as_latency():
    mean = Ema()
    for number in range(1, 101):
        mean.update(1, 0.0, 0.5 * number)  # all sent at once, one comes back every half second
    assert mean.seconds == pytest.approx(0.5)


def test_a_server_that_has_nothing_to_do_is_as_fast_as_it_says_and_not_as_far_as_it_is():
    near, far = Ema(), Ema()
    for call in range(20):
        near.update(1, call * 10.0, call * 10.0 + 0.6, took_s=0.5)
        far.update(1, call * 10.0, call * 10.0 + 0.9, took_s=0.5)
    assert near.seconds == pytest.approx(0.5) == far.seconds


def test_what_a_server_says_counts_within_a_factor_of_what_is_seen():
    liar, braggart = Ema(), Ema()
    for call in range(20):
        liar.update(1, call * 10.0, call * 10.0 + 2.0, took_s=0.0)
        braggart.update(1, call * 10.0, call * 10.0 + 2.0, took_s=1e6)
    assert liar.seconds == pytest.approx(2.0 / TOLD_TRUST)
    assert braggart.seconds == pytest.approx(2.0)


def test_calls_that_end_at_one_moment_or_in_the_wrong_order_leave_a_finite_rate():
    mean = Ema()
    mean.update(1, 5.0, 5.0)
    assert mean.rate == pytest.approx(1 / MIN_SECONDS)
    mean.update(1, 4.0, 4.5)
    assert mean.seconds == 0.0


def test_nothing_is_known_of_speed_before_the_first_call():
    assert Ema().seconds is None
    assert Ema().rate is None
    assert stage({"a": 0.0}).rates == {"a": INITIAL_RATE}


@pytest.mark.parametrize("told", [math.inf, math.nan, -1.0, 0.0])
def test_a_rate_that_says_nothing_is_taken_to_be_typical(told):
    assert stage({"a": 3.0, "b": 3.0, "c": told}).rates["c"] == 3.0


def test_a_server_with_one_task_more_before_any_measurement_does_not_pay_for_it_later():
    balancer = stage({"a": 0.0, "b": 0.0})
    early = visits(balancer, 3, BACKWARD_SIZE)
    assert sorted(early.values()) == [1, 2]
    for peer in "ab":
        balancer.finished(peer, BACKWARD_SIZE, 0.0, 0.01)
    later = visits(balancer, 100)
    assert (
        abs(later["a"] + early["a"] * BACKWARD_SIZE - later["b"] - early["b"] * BACKWARD_SIZE)
        <= BACKWARD_SIZE
    )


def test_a_slow_server_pays_at_its_first_measurement_for_what_it_was_given_by_a_guess():
    balancer = stage({"a": 0.0, "b": 0.0})
    early = visits(balancer, 20)
    assert early["a"] == early["b"] == 10
    for peer, took_s in {"a": 1.0, "b": 10.0}.items():
        balancer.finished(peer, 1.0, 0.0, took_s)
    assert balancer.charges == pytest.approx({"a": 10.0, "b": 100.0})
    assert visits(balancer, 89)["b"] == 0


def test_a_server_raised_to_the_others_level_after_a_ban_is_not_lowered_by_old_charges():
    balancer = stage({"a": 0.0, "b": 0.0})
    visits(balancer, 2)
    balancer.failed("b", "dial", 0.0)
    visits(balancer, 50)
    balancer.choose(1.0, DIAL_BAN_S)
    level = balancer.charges["b"]
    balancer.finished("b", 1.0, DIAL_BAN_S, DIAL_BAN_S + 0.01)
    assert balancer.charges["b"] == level > 10


def test_a_boaster_gets_little_more_than_the_others_until_it_is_measured():
    balancer = stage({"a": 1.0, "b": 1.0, "c": 1e30})
    assert balancer.rates["c"] == TRUST
    assert visits(balancer, 60)["c"] == pytest.approx(40, abs=2)
    balancer.finished("c", 1.0, 0.0, 10.0)
    assert balancer.rates["c"] == 0.1


def test_a_server_that_only_lets_calls_run_out_loses_its_share_and_earns_it_back():
    balancer = stage({"a": 1.0, "b": 1.0})
    for _ in range(MAX_DOUBLINGS + 5):
        balancer.failed("a", "deadline", 0.0)
    assert visits(balancer, 650)["a"] == pytest.approx(650 / (1 + 2**MAX_DOUBLINGS), abs=1)
    for speak in (lambda: balancer.busy("a"), lambda: balancer.finished("a", 1.0, 0.0, 1.0)):
        balancer.failed("a", "deadline", 0.0)
        speak()
        before = balancer.charges["a"]
        assert balancer.choose(1.0, 0.0, exclude=("b",)) == "a"
        assert balancer.charges["a"] == before + 1.0


def test_a_deadline_bans_no_server_and_no_failure_gives_a_charge_back():
    balancer = stage({"a": 1.0})
    for reason in ("deadline", "dial", "rpc"):
        assert balancer.choose(1.0, 0.0) == "a"
        balancer.failed("a", reason, 0.0)
        balancer.refresh([Announced("a", {"deadline": 1, "dial": 2, "rpc": 3}[reason], 1.0)], 0.0)
    # Doubled twice: once because its deadline has not been forgiven.
    assert balancer.charges == {"a": 1.0 + 2.0 + 2.0}


def test_busy_neither_bans_nor_gives_the_charge_back():
    balancer = stage({"a": 1.0, "b": 1.0})
    first = balancer.choose(1.0, 0.0)
    balancer.busy(first)
    assert balancer.charges[first] == 1.0
    assert balancer.next_ban_ends_s is None
    assert {balancer.choose(1.0, 0.0) for _ in range(3)} == {"a", "b"}


@pytest.mark.parametrize(("reason", "lasts_s"), [("dial", DIAL_BAN_S), ("rpc", RPC_BAN_S)])
def test_a_ban_ends_with_its_time(reason, lasts_s):
    balancer = stage({"a": 1.0, "b": 1.0})
    balancer.failed("a", reason, 10.0)
    assert visits(balancer, 20, now_s=10.0 + lasts_s - 0.1) == {"b": 20}
    assert balancer.next_ban_ends_s == 10.0 + lasts_s
    assert visits(balancer, 20, now_s=10.0 + lasts_s)["a"] >= 9
    assert balancer.next_ban_ends_s is None


@pytest.mark.parametrize("reason", ["dial", "rpc"])
def test_a_ban_ends_when_a_newer_record_is_seen_and_not_by_the_old_one(reason):
    balancer = stage({"a": 1.0, "b": 1.0})
    balancer.failed("a", reason, 0.0)
    for sequence in (1, 0):
        balancer.refresh([Announced("a", sequence, 1.0), Announced("b", 1, 1.0)], 1.0)
        assert "a" not in visits(balancer, 5, now_s=1.0)
    balancer.refresh([Announced("a", 2, 1.0), Announced("b", 1, 1.0)], 2.0)
    assert visits(balancer, 10, now_s=2.0)["a"] >= 4


def test_leaving_the_list_for_a_moment_does_not_end_a_ban():
    balancer = stage({"a": 1.0, "b": 1.0})
    balancer.failed("a", "rpc", 0.0)
    balancer.refresh([Announced("b", 1)], 1.0)
    assert balancer.next_ban_ends_s is None  # no use waiting for a server that is gone
    balancer.refresh([Announced("a", 1), Announced("b", 1)], 2.0)
    assert visits(balancer, 5, now_s=2.0) == {"b": 5}


def test_a_short_ban_does_not_cut_a_long_one():
    balancer = stage({"a": 1.0})
    balancer.failed("a", "rpc", 0.0)
    balancer.failed("a", "dial", 1.0)
    assert balancer.next_ban_ends_s == RPC_BAN_S


def test_a_server_that_comes_back_from_a_ban_draws_no_burst():
    balancer = stage({"a": 1.0, "b": 1.0})
    balancer.failed("a", "dial", 0.0)
    visits(balancer, 1000)
    assert visits(balancer, 20, now_s=DIAL_BAN_S) == {"a": 10, "b": 10}


def test_with_all_banned_or_excluded_the_answer_is_none_and_when_to_ask_again():
    balancer = stage({"a": 1.0, "b": 1.0})
    assert balancer.choose(1.0, 0.0, exclude=("a", "b")) is None
    assert balancer.next_ban_ends_s is None
    balancer.failed("a", "rpc", 0.0)
    balancer.failed("b", "dial", 0.0)
    assert balancer.choose(1.0, 0.0) is None
    assert balancer.next_ban_ends_s == DIAL_BAN_S
    assert balancer.choose(1.0, DIAL_BAN_S, exclude=("b",)) is None
    assert balancer.choose(1.0, DIAL_BAN_S) == "b"
    assert Balancer(random.Random(0)).choose(1.0, 0.0) is None


def test_of_banned_servers_the_one_whose_ban_ends_first_may_be_asked():
    balancer = stage({"a": 1.0, "b": 1.0, "c": 1.0})
    assert balancer.first_back() is None
    balancer.failed("a", "rpc", 0.0)
    balancer.failed("b", "dial", 0.0)
    assert balancer.first_back() == "b"
    assert balancer.first_back(exclude=("b",)) == "a"
    balancer.refresh([Announced("a", 1), Announced("c", 1)], 1.0)
    assert balancer.first_back() == "a", "b is not here"


def test_a_server_passed_over_once_is_next_as_soon_as_it_may_be():
    balancer = stage({"a": 1.0, "b": 1.0})
    assert visits(balancer, 5, exclude=("a",)) == {"b": 5}
    assert visits(balancer, 5) == {"a": 5}


def test_a_server_that_is_gone_is_never_chosen_until_it_is_back():
    balancer = stage({"a": 1.0, "b": 1.0})
    balancer.refresh([Announced("b", 1, 1.0)], 0.0)
    assert visits(balancer, 20) == {"b": 20}
    balancer.finished("a", 1.0, 0.0, 1.0)  # later answers count for no server
    balancer.failed("a", "rpc", 1.0)
    balancer.busy("a")
    balancer.refresh([Announced("a", 1, 1.0), Announced("b", 1, 1.0)], 0.0)
    assert visits(balancer, 40)["a"] > 10


def starting(first_s, slow_s=0.0, old=("a",), minutes=5):
    """The times at which a newcomer is asked, of 8 calls at a time to servers of one speed, where
    it takes `first_s` for its first call and for all in its first `slow_s`. It comes at 30 s."""
    balancer, free_s, out, asked_s = Balancer(random.Random(0)), collections.Counter(), [], []
    known = [Announced(peer, 1) for peer in old]
    balancer.refresh(known, 0.0)

    def ask(number, now_s):
        peer, took_s = balancer.choose(1.0, now_s), 0.05
        if peer == "new":
            took_s = first_s if not asked_s or now_s < 30.0 + slow_s else took_s
            asked_s.append(now_s)
        free_s[peer] = max(free_s[peer], now_s) + took_s
        heapq.heappush(out, (free_s[peer], number, peer, now_s, took_s))

    for number in range(8):
        ask(number, 0.0)
    for number in itertools.count(8):
        now_s, _, peer, started_s, took_s = heapq.heappop(out)
        if now_s > 60.0 * minutes:
            return asked_s
        if now_s > 30.0 and len(known) == len(old):
            known.append(Announced("new", 1))
            balancer.refresh(known, now_s)
        balancer.finished(peer, 1.0, started_s, now_s, took_s)
        ask(number, now_s)


@pytest.mark.parametrize(("first_s", "old"), [(2.0, "a"), (5.0, "a"), (5.0, "abc")])
def test_a_newcomer_whose_first_call_takes_seconds_has_its_share_soon_after(first_s, old):
    asked_s = starting(first_s, old=tuple(old))
    ready_s = 30.0 + first_s
    early = [at_s for at_s in asked_s if ready_s <= at_s < ready_s + 20.0]
    assert len(early) > 0.9 * 20.0 / 0.05


def test_a_newcomer_that_is_slow_pays_for_its_trial_too():
    asked_s = starting(5.0, slow_s=math.inf)
    assert len(asked_s) <= 270 / 5.0 + 8, "as many as it can serve, and a window"
    assert len([at_s for at_s in asked_s if at_s > 150.0]) == pytest.approx(150 / 5.0, abs=3)


def test_a_newcomer_joins_at_the_median_charge():
    balancer = stage({"a": 1.0, "b": 1.0, "c": 1.0})
    balancer.choose(2.0, 0.0, exclude=("a", "c"))
    balancer.choose(6.0, 0.0, exclude=("a", "b"))
    known = [Announced(peer, 1, 1.0) for peer in "abc"]
    balancer.refresh([Announced("e", 1, 1.0), *known, Announced("d", 1, 1.0)], 0.0)
    assert balancer.charges == {"a": 0.0, "b": 2.0, "c": 6.0, "d": 2.0, "e": 2.0}


def test_the_first_tasks_of_a_newcomer_count_double_and_those_of_the_founders_do_not():
    balancer = stage({"a": 1.0})
    balancer.choose(1.0, 0.0)
    assert balancer.charges == {"a": 1.0}
    balancer.refresh([Announced("a", 1, 1.0), Announced("b", 1, 1.0)], 0.0)
    charges = [balancer.charges["b"]]
    for _ in range(WARMUP_TASKS + 2):
        balancer.choose(1.0, 0.0, exclude=("a",))
        charges.append(balancer.charges["b"])
    assert [after - before for before, after in itertools.pairwise(charges)] == [2] * 8 + [1, 1]


def test_with_all_others_banned_a_newcomer_joins_at_their_level():
    balancer = stage({"a": 1.0})
    visits(balancer, 50)
    balancer.failed("a", "dial", 0.0)
    balancer.refresh([Announced("a", 1, 1.0), Announced("b", 1, 1.0)], 0.0)
    assert balancer.charges == {"b": 50.0}


def test_of_two_records_of_a_peer_the_newer_one_counts_in_any_order():
    records = [Announced("a", 2, 2.0), Announced("a", 1, 1.0), Announced("b", 1, 2.0)]
    for order in (records, records[::-1]):
        balancer = Balancer(random.Random(0))
        balancer.refresh(order, 0.0)
        assert balancer.rates == {"a": 2.0, "b": 2.0}
        balancer.refresh([Announced("a", 3, 4.0), Announced("b", 0, 1.0)], 0.0)
        assert balancer.rates == {"a": 4.0, "b": 2.0}


def test_a_flood_of_records_and_bans_is_bounded_and_pushes_no_server_out():
    balancer = stage({"zz": 1.0})
    for wave in range(3):
        flood = [Announced(f"{wave}-{number:05d}", 1, 1.0) for number in range(MAX_PEERS + 500)]
        balancer.refresh([*flood, Announced("zz", 1, 1.0)], float(wave))
        assert len(balancer.charges) == MAX_PEERS
        assert "zz" in balancer.charges
        for peer in list(balancer.charges.keys() - {"zz"}):
            balancer.failed(peer, "rpc", float(wave))
        assert len(balancer._bans) <= MAX_PEERS
        assert len(balancer._heap) <= 2 * MAX_PEERS + STALE_SLACK


@pytest.mark.parametrize("size", [0.0, -1.0, math.inf, math.nan])
def test_a_task_without_a_size_is_refused(size):
    with pytest.raises(ValueError, match="must be positive and finite"):
        stage({"a": 1.0}).choose(size, 0.0)


class AnyHistory(RuleBasedStateMachine):
    """Servers come, go, fail and return in any order; a plain model says which may be chosen."""

    peers = st.sampled_from("abcdef")

    def __init__(self):
        super().__init__()
        self.balancer = Balancer(random.Random(1))
        self.now_s, self.known, self.bans, self.charges, self.measured = 0.0, {}, {}, {}, set()

    def may_be_chosen(self):
        return {peer for peer in self.known if peer not in self.bans}

    @rule(records=st.dictionaries(peers, st.integers(0, 3), max_size=6))
    def refresh(self, records):
        self.balancer.refresh(
            [Announced(peer, sequence, 1.0) for peer, sequence in records.items()], self.now_s
        )
        self.known = {
            peer: max(sequence, self.known.get(peer, 0)) for peer, sequence in records.items()
        }
        self.bans = {
            p: (end_s, old)
            for p, (end_s, old) in self.bans.items()
            if not self.known.get(p, -1) > old
        }
        self.charges = {peer: charge for peer, charge in self.charges.items() if peer in self.known}
        self.measured &= self.known.keys()

    @rule(size=st.floats(0.5, 4.0), exclude=st.sets(peers))
    def choose(self, size, exclude):
        allowed = self.may_be_chosen() - exclude
        charges = self.balancer.charges
        chosen = self.balancer.choose(size, self.now_s, exclude)
        assert (chosen is None) == (not allowed)
        if chosen is not None:
            assert chosen in allowed
            assert charges[chosen] == min(charges[peer] for peer in allowed)

    @rule(peer=peers, reason=st.sampled_from(["dial", "rpc", "deadline"]))
    def fail(self, peer, reason):
        self.balancer.failed(peer, reason, self.now_s)
        if peer in self.known and reason != "deadline":
            end_s = self.now_s + (DIAL_BAN_S if reason == "dial" else RPC_BAN_S)
            self.bans[peer] = (max(end_s, self.bans.get(peer, (0, 0))[0]), self.known[peer])

    @rule(peer=peers, taken_s=st.floats(0.0, 3.0))
    def finish(self, peer, taken_s):
        self.balancer.finished(peer, 1.0, self.now_s - taken_s, self.now_s)
        # What was charged by a guess is charged again.
        if peer in self.known.keys() - self.measured:
            self.measured.add(peer)
            self.charges.pop(peer, None)

    @rule(peer=peers)
    def busy(self, peer):
        self.balancer.busy(peer)

    @precondition(lambda self: self.bans)
    @rule(wait_s=st.sampled_from([1.0, DIAL_BAN_S, RPC_BAN_S]))
    def wait(self, wait_s):
        self.now_s += wait_s
        self.bans = {peer: ban for peer, ban in self.bans.items() if ban[0] > self.now_s}
        self.balancer.choose(1.0, self.now_s)

    @invariant()
    def every_live_peer_has_exactly_one_valid_entry(self):
        servers = self.balancer._servers
        valid = [
            entry[2]
            for entry in self.balancer._heap
            if entry[2] in servers and servers[entry[2]].entry is entry
        ]
        assert sorted(valid) == sorted(self.may_be_chosen()) == sorted(self.balancer.charges)
        assert len(self.balancer._heap) - len(valid) <= max(len(servers), STALE_SLACK)

    @invariant()
    def a_charge_never_falls_but_at_the_first_measurement(self):
        now = self.balancer.charges
        assert all(now[peer] >= before for peer, before in self.charges.items() if peer in now)
        self.charges |= now

    @invariant()
    def there_is_a_time_to_ask_again_if_and_only_if_a_server_is_banned(self):
        ends = [end_s for peer, (end_s, _) in self.bans.items() if peer in self.known]
        assert self.balancer.next_ban_ends_s == min(ends, default=None)


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
