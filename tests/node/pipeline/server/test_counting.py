"""A count before each merge: what leaves a server holds counted microbatches only, a server that a
count does not name sits out, and a method whose counts name everyone is the method itself."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from farflock.node.model.replica import PlainReplica
from farflock.node.pipeline.server.counting import NO_WEIGHT, STREAM, Counting
from farflock.optimizers.catalog import method
from farflock.optimizers.method import ExchangeKey, Progress, Result
from farflock.optimizers.parts.state import copies, state_hash

PERIOD = 3
NOLOCO = {"period": PERIOD, "codec": "fp32"}
METHODS = (
    ("noloco", NOLOCO),
    ("sparta", {"period": 2, "one_in": 2, "codec": "fp32", "return_codec": "fp32"}),
    ("delayed", {"period": 2, "codec": "fp32"}),
    ("co2", {"period": 3, "codec": "fp32"}),
    ("streaming", {"period": 4, "fragments": 2, "overlap": 1, "codec": "fp32"}),
    ("local", {}),
)


class Member:
    """A server's method and its loop, whose swarm is the test. The exchanges that went out are in
    `sent` with their tensors, as the others would decode them."""

    def __init__(self, name="noloco", options=NOLOCO, *, counting=True, every=1):
        torch.manual_seed(1)
        module = nn.Sequential()
        module.layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))
        self.replica = PlainReplica(module, torch.optim.SGD(module.parameters(), 0.5), None)
        self.bare = method(name, **options)
        counted = Counting(self.bare, self.bare, every=every)
        self.method = counted if counting else self.bare
        self.templates = {each.key.stream: each for each in self.method.streams(self.replica)}
        self.module, self.steps, self.open, self.sent = module, 0, [], []

    def step(self, gradient):
        """Make a local step; return the keys of what is asked for."""
        for place, parameter in enumerate(self.module.parameters()):
            parameter.grad = torch.full_like(parameter, float(gradient * (place + 1)))
        self.method.local_step(self.replica, Progress(self.steps))
        self.steps += 1
        return self.begin(self.method.due(self.replica, Progress(self.steps)))

    def begin(self, exchanges):
        for each in exchanges:
            told = copies(dict(each.tensors))
            self.open.append((each, told, self.steps))
            if each.key.stream != STREAM:
                self.sent.append((each, told))
        return [(each.key.stream, each.key.round) for each in exchanges]

    def count(self, *, named=True, status="ok"):
        """Let the open count end; return the keys of what it held back."""
        (entry,) = [one for one in self.open if one[0].key.stream == STREAM]
        self.open.remove(entry)
        asked, _, since = entry
        taken = {STREAM: ((0, 1),)} if named else {}
        late = self.steps - since
        result = Result(status, asked.key.round + 1, taken=taken, steps_since=late)
        return self.begin(self.method.apply(self.replica, asked, result))

    def merge(self, *, pull=0.0):
        """Let the merges end that are wanted now, alone but for a `pull` of the mean."""
        for entry in list(self.open):
            asked, told, since = entry
            late = self.steps - since
            if asked.key.stream == STREAM or late < asked.apply_after:
                continue
            self.open.remove(entry)
            mean = {name: x + pull for name, x in told.items()}
            whole = {name: ((0, x.numel()),) for name, x in told.items()}
            after = asked.key.round + asked.stride
            alone = Result("alone", after, ("me",), (1.0,), mean, {"me": told}, told, whole)
            self.method.apply(self.replica, asked, replace(alone, steps_since=late))

    def whole_step(self, gradient, *, pull=0.0):
        asked = self.step(gradient)
        if any(stream == STREAM for stream, _ in asked):
            self.count()
        self.merge(pull=pull)

    @property
    def theta(self):
        return state_hash(self.replica.read(self.replica.names, "param"))

    @property
    def outer(self):
        return state_hash(self.bare.snapshot(self.replica))


@pytest.mark.parametrize("is_rare", [False, True])
@pytest.mark.parametrize(("name", "options"), METHODS)
def test_where_counts_name_everyone_the_method_is_the_bare_one_to_the_bit(name, options, is_rare):
    due = method(name, **options).due_steps.values()
    every = (math.gcd(*(step for steps in due for step in steps)) or 4) if is_rare else 1
    counted, bare = Member(name, options, every=every), Member(name, options, counting=False)
    for step in range(3 * PERIOD + 2):
        for one in (counted, bare):
            one.whole_step(step % 5 - 2, pull=0.125)
        assert counted.theta == bare.theta, f"after step {step}"
        assert counted.outer == bare.outer
    assert len(counted.sent) == len(bare.sent)
    assert bool(counted.sent) == (name != "local")
    assert counted.method.counts == counted.steps // every


def test_a_merge_has_the_number_of_its_count_and_waits_for_it():
    one, seen = Member(), []
    for _ in range(2 * PERIOD):
        seen += one.step(1)
        seen += one.count()
        one.merge()
    merges = [("pairs", 2), ("pairs", 5)]
    expected = [(STREAM, number) for number in range(6)]
    assert seen == [*expected[:3], merges[0], *expected[3:], merges[1]]
    template = one.templates["pairs"]
    assert (template.key.round, template.stride) == (2, PERIOD)
    first = one.templates[STREAM]
    assert (first.key.round, first.stride, dict(first.tensors), first.uniform) == (0, 1, {}, True)


def test_counts_after_several_steps_have_neighbouring_numbers_and_take_in_all_of_them():
    one, seen = Member("noloco", NOLOCO | {"period": 2 * PERIOD}, every=PERIOD), []
    for step in range(4 * PERIOD):
        seen += (asked := one.step(1))
        assert bool(asked) == ((step + 1) % PERIOD == 0)
        seen += one.count() if asked else []
        assert one.method.is_counted == bool(asked), "what is not counted yet may not leave"
        one.merge()
    assert seen == [
        *((STREAM, 0), (STREAM, 1), ("pairs", 1)),
        *((STREAM, 2), (STREAM, 3), ("pairs", 3)),
    ]
    assert (one.templates["pairs"].key.round, one.templates["pairs"].stride) == (1, 2)


def test_steps_made_while_a_rare_count_is_open_belong_to_the_next_one():
    one = Member(every=PERIOD)
    asked = [one.step(1) for _ in range(PERIOD + 1)]
    assert asked == [*[[]] * (PERIOD - 1), [(STREAM, 0)], []]
    one.count()
    one.merge()
    assert [one.step(1) for _ in range(PERIOD - 1)] == [*[[]] * (PERIOD - 2), [(STREAM, 1)]]


def test_a_server_that_missed_a_rare_count_begins_its_steps_again_with_the_others():
    one = Member(every=PERIOD)
    one.step(1)
    missed = replace(one.templates[STREAM], key=ExchangeKey(STREAM, 4))
    one.method.apply(one.replica, missed, Result("ok", 5))
    asked = [one.step(1) for _ in range(PERIOD)]
    assert asked == [*[[]] * (PERIOD - 1), [(STREAM, 5)]]
    assert one.count() == [("pairs", 5)]


def test_a_server_that_stops_between_rare_counts_goes_on_where_it_was():
    one, again = Member(every=PERIOD), Member(every=PERIOD)
    one.step(1)
    state = one.method.snapshot(one.replica) | one.method.personal(one.replica)
    again.method.resume(again.replica, state)
    assert [again.step(1) for _ in range(PERIOD - 1)] == [*[[]] * (PERIOD - 2), [(STREAM, 0)]]


@pytest.mark.parametrize("status", ["partial", "failed"])
def test_a_server_that_is_not_named_sits_out_one_merge_and_keeps_its_work(status):
    one = Member()
    for _ in range(PERIOD):
        one.step(1)
        if one.steps < PERIOD:
            one.count()
    before, outer = one.theta, copies(one.bare.snapshot(one.replica))
    assert one.count(named=False, status=status) == [("pairs", 2)]
    (asked, told), *_ = one.sent
    assert asked.weight == NO_WEIGHT
    assert all(not x.any() for x in told.values())
    assert not one.method.is_counted
    one.merge(pull=1.0)
    after = one.bare.snapshot(one.replica)
    assert one.theta == before, "nothing merged"
    assert {name for name in outer if not torch.equal(outer[name], after[name])} == {"round"}
    for _ in range(PERIOD):
        one.whole_step(1)
    assert [asked.key.round for asked, _ in one.sent] == [2, 5]
    assert one.sent[1][0].weight == 1.0
    assert one.method.is_counted


def test_steps_made_while_a_count_is_open_are_neither_sent_nor_lost():
    late, prompt = Member(), Member()
    for one in (late, prompt):
        for _ in range(PERIOD - 1):
            one.whole_step(1)
        one.step(1)
    prompt.count()
    assert late.step(7) == [], "one count at a time"
    late.count()
    assert not late.method.is_counted, "the last step is in no count"
    told = [{name: x.tolist() for name, x in one.sent[0][1].items()} for one in (late, prompt)]
    assert told[0] == told[1]
    late.merge()
    prompt.merge()
    prompt.step(7)
    mine, theirs = (one.replica.read(one.replica.names, "param") for one in (late, prompt))
    for name, x in mine.items():
        torch.testing.assert_close(x, theirs[name])


def test_a_joiner_and_a_server_that_missed_counts_merge_when_the_others_do():
    old, new = Member(), Member()
    for _ in range(PERIOD + 1):
        old.whole_step(1)
    new.method.restore(new.replica, old.method.snapshot(old.replica), "adopt")
    assert new.method.is_counted
    missed = replace(old.templates[STREAM], key=ExchangeKey(STREAM, PERIOD + 1))
    new.method.apply(new.replica, missed, Result("ok", PERIOD + 2))
    assert new.step(1) == [(STREAM, PERIOD + 2)]
    assert new.count() == [("pairs", 2 * PERIOD - 1)]


def test_what_waits_for_a_count_when_its_server_stops_goes_out_empty():
    one, again = Member(), Member()
    for _ in range(PERIOD):
        one.step(1)
        if one.steps < PERIOD:
            one.count()
    state = one.method.snapshot(one.replica) | one.method.personal(one.replica)
    again.replica.write(one.replica.read(one.replica.names, "param"), "param")
    again.method.resume(again.replica, state)
    asked = replace(again.templates[STREAM], key=ExchangeKey(STREAM, PERIOD - 1))
    (merge,) = again.method.apply(again.replica, asked, Result("failed", PERIOD))
    assert (merge.key, merge.weight) == (ExchangeKey("pairs", PERIOD - 1), NO_WEIGHT)
    again.begin([merge])
    again.merge()
    assert again.theta == one.theta
    for _ in range(PERIOD):
        again.whole_step(1)
    assert again.sent[-1][0].key == ExchangeKey("pairs", 2 * PERIOD - 1)


def test_two_servers_that_meet_in_pairs_make_the_steps_of_the_paper():
    """A plain twin in NumPy: section 3 of arXiv:2506.10911, in the signs of its released code."""
    alpha, beta, gamma, rate = 0.5, 0.7, 0.7, 0.5
    servers = [Member(), Member()]
    name = servers[0].replica.names[0]
    with torch.no_grad():
        servers[1].module.get_parameter(name).add_(0.5)
    phi = [one.replica.read([name], "param")[name].numpy().astype("float64") for one in servers]
    theta, momentum = [x.copy() for x in phi], [np.zeros_like(x) for x in phi]
    for step in range(4 * PERIOD):
        gradients = [step % 3 - 1.0, step % 4 / 2]
        for place, (one, gradient) in enumerate(zip(servers, gradients, strict=True)):
            one.step(gradient)
            one.count()
            theta[place] = theta[place] - rate * gradient
        if (step + 1) % PERIOD == 0:
            swap(servers)
            messages = [one.sent[-1][1].values() for one in servers]
            sent = [np.concatenate([x.numpy().ravel() for x in message]) for message in messages]
            apart = np.linalg.norm(sent[0] - sent[1]) / 2
            for one, mine in zip(servers, sent, strict=True):
                expected = apart / np.linalg.norm(mine)
                assert one.method.spread == pytest.approx(expected, rel=1e-3)
            work = np.mean([before - after for before, after in zip(phi, theta, strict=True)], 0)
            middle = np.mean(phi, 0)
            for place in range(2):
                pull = gamma * (phi[place] - middle)
                momentum[place] = alpha * momentum[place] - beta * work - pull
            phi = [x + u for x, u in zip(phi, momentum, strict=True)]
            theta = [x.copy() for x in phi]
        for one, expected in zip(servers, theta, strict=True):
            found = one.replica.read([name], "param")[name].numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not np.allclose(phi[0], phi[1]), "each has weights of its own"


def swap(servers):
    """Let a pair swap what both have sent."""
    offers = [one.open.pop() for one in servers]
    gathered = {str(place): told for place, (_, told, _) in enumerate(offers)}
    mean = {name: (x + offers[1][1][name]) / 2 for name, x in offers[0][1].items()}
    taken = {name: ((0, x.numel()),) for name, x in mean.items()}
    for one, (asked, told, _) in zip(servers, offers, strict=True):
        after = asked.key.round + asked.stride
        both = Result("ok", after, ("0", "1"), (1.0, 1.0), mean, gathered, told, taken)
        one.method.apply(one.replica, asked, both)


# what leaves a server, by a slow and obvious account


@dataclass(slots=True)
class Markers:
    """A toy method: its replica is a set of microbatches, and a merge sends that set."""

    period: int = PERIOD
    equality: str = "per-peer"
    keeps_gradients: bool = False
    has: set = field(default_factory=set)
    next: set = field(default_factory=set)  # that the next local step takes in
    round: int = 0
    since: int = 0

    @property
    def due_steps(self):
        return {"merge": (self.period, self.period)}

    def at_step(self, replica, step):
        self.since = step % self.period

    def exchange(self, values):
        asked = method("noloco", **NOLOCO).streams(_Nothing())[0]
        return replace(asked, key=ExchangeKey("merge", self.round), tensors=values)

    def streams(self, replica):
        return [self.exchange({})]

    def local_step(self, replica, progress):
        self.has, self.next, self.since = self.has | self.next, set(), self.since + 1

    def due(self, replica, progress):
        if self.since < self.period:
            return []
        self.since = 0
        return [self.exchange({key: torch.ones(()) for key in sorted(self.has)})]

    def apply(self, replica, exchange, result):
        self.round = result.next_round
        return []


class _Nothing:
    shapes, names = {}, ()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=20))
def test_no_message_ever_holds_a_microbatch_that_no_count_has_named(story):
    """Each count names this server or not, and ends some local steps late."""
    toy = Markers()
    one, counted, offered, waiting, number = Counting(toy, toy), set(), set(), [], 0
    one.streams(_Nothing())
    for named, late in story:
        toy.next = {f"microbatch {number}"}
        number += 1
        one.local_step(_Nothing(), Progress(number))
        (count,) = one.due(_Nothing(), Progress(number))
        offered = set(toy.has)
        for _ in range(late):
            toy.next = {f"microbatch {number}"}
            number += 1
            one.local_step(_Nothing(), Progress(number))
            assert one.due(_Nothing(), Progress(number)) == []
        taken = {STREAM: ((0, 1),)} if named else {}
        result = Result("ok", count.key.round + 1, taken=taken, steps_since=late)
        for merge in one.apply(_Nothing(), count, result):
            assert merge.key.round == count.key.round
            waiting.append((merge, named))
        counted |= offered if named else set()
        assert one.is_counted == (toy.has <= counted)
        for merge, was_named in waiting:
            held = {name for name, x in merge.tensors.items() if x}
            assert held <= counted, "uncounted work has left"
            assert held == (offered if was_named else set())
            one.apply(_Nothing(), merge, Result("failed", merge.key.round + merge.stride))
        waiting.clear()
