"""The driver: what starts, what is applied, and what training waits for, in order.

The method under it only takes notes.
"""

import pytest
import torch

from farflock.node.train.driver import Apply, Driver, Wait
from farflock.optimizers.method import All, Exchange, ExchangeKey, Progress, RandomGroups, Result

OK = Result("ok", 1, ("a",), (1.0,), mean={})


def ask(stream="x", number=0, *, apply_after=0, slack=0, deadline_s=30.0):
    return Exchange(
        ExchangeKey(stream, number),
        "mean",
        All(),
        {"w": torch.zeros(1)},
        apply_after=apply_after,
        slack=slack,
        deadline_s=deadline_s,
    )


class Notes:
    """Asks for what it is told to, and writes down what it is given."""

    def __init__(self):
        self.wanted, self.second_phase, self.applied = [], [], []

    equality = "close"

    def streams(self, replica):
        return [ask("x"), ask("y"), Exchange(ExchangeKey("pair", 0), "gather", RandomGroups(2), {})]

    def due(self, replica, progress):
        wanted, self.wanted = self.wanted, []
        return wanted

    def apply(self, replica, exchange, result):
        self.applied.append((exchange, result))
        second, self.second_phase = self.second_phase, []
        return second

    def stepped(self, driver, *exchanges, step=0, now_s=0.0):
        self.wanted = list(exchanges)
        return driver.after_step(Progress(step, run_time_s=now_s))


@pytest.fixture
def notes():
    return Notes()


@pytest.fixture
def driver(notes):
    return Driver(notes, replica=None)


def test_with_nothing_asked_there_is_nothing_to_do(driver, notes):
    assert notes.stepped(driver) == []
    assert driver.next(Progress(5)) is None
    assert driver.pending == ()


def test_what_the_method_asks_for_is_started_and_pending_until_it_is_applied(driver, notes):
    exchange = ask()
    assert notes.stepped(driver, exchange) == [exchange]
    assert driver.pending == (exchange.key,)
    driver.resolve(exchange.key, OK)
    assert driver.pending == (exchange.key,)
    driver.apply(driver.next(Progress(0)), Progress(0))
    assert driver.pending == ()
    assert notes.applied == [(exchange, OK)]


def test_a_blocking_exchange_waits_until_its_deadline_and_no_longer(driver, notes):
    notes.stepped(driver, ask(deadline_s=30.0), step=4, now_s=100.0)
    assert driver.next(Progress(4, run_time_s=100.0)) == Wait(ExchangeKey("x", 0), 30.0)
    assert driver.next(Progress(4, run_time_s=129.5)) == Wait(ExchangeKey("x", 0), 0.5)
    assert driver.next(Progress(4, run_time_s=130.0)) is None


def test_after_the_deadline_the_result_is_still_applied_once_it_is_known(driver, notes):
    exchange = ask(deadline_s=1.0)
    notes.stepped(driver, exchange, step=4, now_s=0.0)
    assert driver.next(Progress(9, run_time_s=50.0)) is None
    driver.resolve(exchange.key, OK)
    action = driver.next(Progress(9, run_time_s=50.0))
    assert isinstance(action, Apply)
    assert action.result.steps_since == 5


def test_a_result_waits_for_the_step_at_which_it_is_wanted(driver, notes):
    exchange = ask(apply_after=3)
    notes.stepped(driver, exchange, step=10)
    driver.resolve(exchange.key, OK)
    assert [driver.next(Progress(step)) for step in (10, 11, 12)] == [None] * 3
    action = driver.next(Progress(13))
    assert action.exchange is exchange
    assert action.result.steps_since == 3


def test_after_the_last_step_a_result_is_due_when_it_is_there(driver, notes):
    exchange = ask(apply_after=3)
    notes.stepped(driver, exchange, step=10)
    driver.resolve(exchange.key, OK)
    assert driver.next(Progress(11)) is None
    action = driver.next(Progress(11), last=True)
    assert isinstance(action, Apply)
    assert action.result.steps_since == 1


def test_training_goes_on_without_waiting_until_a_streamed_result_is_wanted(driver, notes):
    notes.stepped(driver, ask(apply_after=2, deadline_s=30.0), step=0, now_s=0.0)
    assert driver.next(Progress(1, run_time_s=1.0)) is None
    assert driver.next(Progress(2, run_time_s=2.0)) == Wait(ExchangeKey("x", 0), 28.0)


def test_a_late_result_is_applied_when_it_is_known_and_waited_for_after_the_slack(driver, notes):
    exchange = ask(apply_after=2, slack=3, deadline_s=30.0)
    notes.stepped(driver, exchange, step=0, now_s=0.0)
    assert [driver.next(Progress(step, run_time_s=step)) for step in (2, 3, 4)] == [None] * 3
    assert driver.next(Progress(5, run_time_s=5.0)) == Wait(exchange.key, 25.0)
    driver.resolve(exchange.key, OK)
    action = driver.next(Progress(4, run_time_s=4.0))
    assert isinstance(action, Apply)
    assert action.result.steps_since == 4


def test_after_the_last_step_nothing_is_left_of_the_slack(driver, notes):
    exchange = ask(apply_after=2, slack=3, deadline_s=30.0)
    notes.stepped(driver, exchange, step=0, now_s=0.0)
    assert driver.next(Progress(1, run_time_s=1.0), last=True) == Wait(exchange.key, 29.0)


def test_results_of_one_stream_are_applied_in_round_order(driver, notes):
    first, second = ask(number=0, deadline_s=1.0), ask(number=1, deadline_s=1.0)
    notes.stepped(driver, first, step=0, now_s=0.0)
    notes.stepped(driver, second, step=1, now_s=1.0)
    driver.resolve(second.key, OK)
    late = Progress(5, run_time_s=100.0)
    assert driver.next(late) is None
    driver.resolve(first.key, OK)
    for _ in range(2):
        driver.apply(driver.next(late), late)
    assert [exchange for exchange, _ in notes.applied] == [first, second]


def test_streams_do_not_hold_each_other_up(driver, notes):
    slow, quick = ask("slow", deadline_s=1.0), ask("quick")
    notes.stepped(driver, slow, quick)
    driver.resolve(quick.key, OK)
    assert driver.next(Progress(1, run_time_s=2.0)).exchange is quick


def test_a_second_phase_is_started_and_waits_for_its_own_answer(driver, notes):
    first, then = ask(number=0), ask(number=1)
    notes.stepped(driver, first)
    notes.second_phase = [then]
    driver.resolve(first.key, OK)
    now = Progress(3, run_time_s=7.0)
    assert driver.apply(driver.next(now), now) == [then]
    assert driver.next(now) == Wait(then.key, 30.0)


def test_no_result_is_taken_twice(driver, notes):
    exchange = ask()
    notes.stepped(driver, exchange)
    driver.resolve(exchange.key, OK)
    with pytest.raises(AssertionError, match="second result"):
        driver.resolve(exchange.key, OK)
    driver.apply(driver.next(Progress(0)), Progress(0))
    with pytest.raises(AssertionError, match="not pending"):
        driver.resolve(exchange.key, OK)
    assert len(notes.applied) == 1


def test_a_result_that_was_not_asked_for_is_refused(driver):
    with pytest.raises(AssertionError, match="not pending"):
        driver.resolve(ExchangeKey("x", 7), OK)


def test_a_key_that_is_pending_cannot_be_asked_for_again(driver, notes):
    notes.stepped(driver, ask())
    with pytest.raises(AssertionError, match="twice"):
        notes.stepped(driver, ask())


def test_a_replayed_round_has_no_tensors_of_ours_and_needs_no_exchange(driver, notes):
    driver.replay(ExchangeKey("x", 3), OK, Progress(1))
    ((exchange, result),) = notes.applied
    assert (exchange.key, dict(exchange.tensors), result) == (ExchangeKey("x", 3), {}, OK)
    assert driver.pending == ()


def test_of_a_replayed_rounds_second_phase_only_what_the_others_have_not_passed_is_asked_for(
    driver, notes
):
    driver.has_passed = lambda key: key.round < 4
    for number in (3, 4):
        notes.second_phase = [ask(number=number)]
        driver.replay(ExchangeKey("y", number), OK, Progress(1))
    assert [key.round for key in driver.pending] == [4]


def test_a_pending_round_cannot_be_replayed(driver, notes):
    notes.stepped(driver, ask(number=3))
    with pytest.raises(AssertionError, match="pending"):
        driver.replay(ExchangeKey("x", 3), OK, Progress(1))
    assert notes.applied == []


def test_forgetting_drops_everything_that_is_pending(driver, notes):
    exchange = ask()
    notes.stepped(driver, exchange)
    driver.resolve(exchange.key, OK)
    driver.forget()
    assert driver.pending == ()
    assert driver.next(Progress(9)) is None
    assert notes.stepped(driver, ask()) != []


# the run


def offered(driver, notes, exchange, tokens=64):
    """The driver after a step of this many tokens, and the claim of an exchange."""
    driver.trained(tokens, 2)
    notes.stepped(driver, exchange)
    return driver.claim(exchange)


def test_tokens_that_did_not_count_stay_mine(driver, notes):
    assert offered(driver, notes, ask()).tokens == 64
    driver.apply(Apply(ask(), Result("failed", 1)), Progress(0))
    assert driver.tokens == 2 * 64
    assert offered(driver, notes, ask(number=1), tokens=0).tokens == 64
    done = Result("ok", 2, ("me",), (1.0,), taken={"a": [(0, 1)]}, tokens=100)
    driver.apply(Apply(ask(number=1), done), Progress(0))
    assert driver.tokens == driver.position.agreed_tokens == 100


def test_tokens_go_with_the_first_stream_and_pairs_say_what_they_believe_of_the_run(driver, notes):
    assert offered(driver, notes, ask("y")).tokens == 0
    driver.streams.insert(0, driver.streams.pop())
    driver.begin({}, 1000)
    assert (
        offered(
            driver, notes, Exchange(ExchangeKey("pair", 0), "gather", RandomGroups(2), {})
        ).tokens
        == 1000 + 2 * 64
    )


def test_a_round_that_failed_for_all_is_over_and_one_that_no_peer_knows_of_is_asked_for_again(
    driver,
):
    # as a restored node says of its open exchange
    driver.apply(Apply(ask(), Result("failed", 0)), Progress(0))
    assert driver.position.rounds["x"] == -1
    driver.apply(Apply(ask(), Result("failed", 1)), Progress(0))
    assert driver.position.rounds["x"] == 0


def test_rounds_that_are_skipped_move_the_method_and_nothing_else(driver, notes):
    driver.skip(ExchangeKey("x", 3), Result("failed", 4, tokens=50))
    assert [exchange.key.round for exchange, _ in notes.applied] == [3]
    assert (driver.position.rounds["x"], driver.tokens) == (-1, 0)
