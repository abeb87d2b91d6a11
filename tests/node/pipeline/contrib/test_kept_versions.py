"""Versions of a stage at one server, against a plain list of copies, and the measured delays."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from farflock.node.pipeline.contrib.kept_versions import (
    DELAY,
    FINENESS,
    Versions,
    corrected,
    mean_delay,
)
from farflock.node.pipeline.passes.requests import Version
from farflock.node.pipeline.server.weight_versions import ORIGIN, MissingVersion, origin_of
from farflock.node.run.terms import Asynchronous
from farflock.optimizers.parts.corrections import TREND, Age

BOUND = 3


class Server:
    """A module of one weight whose rounds add what a test says."""

    def __init__(self, terms, bound=BOUND, agreed=None, inner=None, local_steps=1):
        self.module = nn.Linear(1, 1, bias=False).double()
        self.round, self.marks, self.reports = -1, {}, []
        self.inner = (
            inner(self.module.parameters())
            if inner
            else torch.optim.SGD(self.module.parameters(), 0.5, 0.5)
        )
        self.versions = Versions(
            self.module,
            self.inner,
            terms,
            bound,
            lambda: self.round,
            lambda: self.marks,
            agreed,
            local_steps,
            self.reports.append,
        )

    @property
    def weight(self):
        return float(self.module.weight.detach())

    def set(self, value):
        with torch.no_grad():
            self.module.weight.fill_(value)

    def apply(self, value=None, ages=(), gradient=None):
        self.versions.begin_round(ages)
        if gradient is not None:
            self.module.weight.grad = torch.full_like(self.module.weight, gradient)
            self.inner.step()
        elif value is not None:
            self.set(value)
        self.round += 1
        self.versions.end_round()

    def used(self, version=None):
        with self.versions.using(version):
            return self.weight


@settings(max_examples=60)
@given(
    st.integers(1, 4),
    st.lists(st.sampled_from(["round", "empty", "adopt", "anew", "ask"]), max_size=25),
    st.data(),
)
def test_a_version_is_the_weights_of_its_round_or_is_named_as_lacking(keep, events, data):
    server, known, value = Server(Asynchronous(keep)), {}, 0.0
    server.set(value)
    known[-1, 0] = value
    here = [-1]  # rounds of what this server may have kept, newest last
    for event in events:
        value += 1.0
        origin = server.marks.get(ORIGIN, 0)
        if event in ("round", "empty"):
            server.used()  # a server that computes nothing in a round needs no version of it
            server.apply(value if event == "round" else None)
            known[server.round, origin] = server.weight
            here = [*here, server.round][-keep:]
        elif event in ("adopt", "anew"):
            server.round += 2
            if event == "anew":
                origin = server.marks[ORIGIN] = origin + 7
            server.set(value)
            known[server.round, origin] = value
            here = [server.round]
        else:
            version = Version(
                data.draw(st.integers(-1, server.round + 2)),
                data.draw(st.sampled_from([0, 7, origin])),
            )
            expected = _expected(version, server.round, origin, here)
            server.used()
            assert server.versions.lack(version) == expected
            if expected is None:
                assert server.used(version) == known[version.round, origin]
            else:
                with pytest.raises(MissingVersion, match=expected):
                    server.used(version)
        assert server.used() == known[server.round, origin]
        assert server.versions.newest == Version(server.round, origin)
    assert server.weight == known[server.round, server.marks.get(ORIGIN, 0)]


def _expected(version, newest, origin, here):
    if version.origin != origin or version.round < newest - BOUND:
        return "late"
    if version.round > newest:
        return "ahead"
    return None if version.round in here else "gone"


@given(st.lists(st.integers(0, 63), max_size=50))
def test_the_agreed_delay_is_the_mean_to_a_sixteenth_of_a_step(ages):
    delay = mean_delay(ages)
    assert isinstance(delay, int)
    mean = statistics.fmean(ages) if ages else 0.0
    assert abs(delay / FINENESS - mean) <= 0.5 / FINENESS
    assert delay == mean_delay(sorted(ages, reverse=True))


@given(st.integers(-1, 30), st.integers(0, 9), st.integers(0, 9))
def test_a_delay_is_the_rounds_between_the_weights_and_the_round_or_the_local_step(
    weights, waited, more
):
    stepped = weights + waited
    number = stepped + 1 + more
    waits, local = Server(Asynchronous(2)), Server(Asynchronous(2), agreed=dict)
    for server in (waits, local):
        assert server.versions.delay(weights, number) == waited + more
        assert (
            server.versions.delay(weights, weights + 1)
            == server.versions.delay(weights, weights)
            == 0
        )
    assert waits.versions.delay(weights, number, stepped) == waited + more
    assert local.versions.delay(weights, number, stepped) == waited, "the step has used it"


def test_a_round_says_how_late_its_gradients_are_and_an_empty_one_says_nothing():
    server = Server(Asynchronous(2))
    server.apply(1.0, ages=[0, 1, 1, 2])
    assert (server.versions.age.epochs, server.marks[DELAY]) == (1.0, FINENESS)
    server.apply(2.0)
    assert server.versions.age.epochs == 1.0
    server.apply(3.0, ages=[0, 0])
    assert (server.versions.age.epochs, server.marks[DELAY]) == (0.0, 0)
    assert server.reports == [
        {"round": 0, "mean": 1.0, "most": 2},
        {"round": 2, "mean": 0.0, "most": 0},
    ]


def test_with_local_steps_passes_use_the_agreed_weights_and_count_steps_since_then():
    agreed = {"weight": torch.full((1, 1), 5.0)}
    server = Server(Asynchronous(3), agreed=lambda: dict(agreed), local_steps=4)
    server.set(9.0)
    assert server.used() == 5.0
    for since, ages, expected in ((0, [0, 0], 0.0), (1, [1, 0], 3.0), (2, [], 2.0)):
        server.versions.begin_step(ages)
        assert server.versions.age.epochs == expected == 4 * (sum(ages) / max(len(ages), 1)) + since
        server.set(10.0 + since)
    agreed["weight"] = torch.full((1, 1), 6.0)
    server.apply(20.0, ages=[2])
    assert (server.used(), server.used(Version(-1)), server.weight) == (6.0, 5.0, 20.0)
    server.versions.begin_step([0])
    assert server.versions.age.epochs == 0.0


def test_predicted_weights_go_ahead_by_the_last_rounds_delay_and_no_farther_than_the_bound():
    server = Server(Asynchronous(3, "prediction"), bound=2)
    server.set(0.0)
    assert server.used() == 0.0
    server.apply(gradient=1.0, ages=[2, 1])  # w = -0.5
    assert server.used() == -0.5 + 1.5 * -0.5
    assert server.used(Version(-1)) == 0.0
    server.marks[DELAY] = 10**9  # from a stranger
    server.apply(gradient=0.0)  # w = -0.75
    assert server.used() == -0.75 + 2 * -0.25
    assert server.used(Version(0)) == -1.25, "the version that a pass used, not the weights of then"
    server.apply(gradient=0.0, ages=[0])
    assert server.used() == server.weight
    assert TREND in server.inner.state[server.module.weight]


@pytest.mark.parametrize("correction", ["spike", "spike+prediction"])
def test_a_spike_needs_the_momentum_of_sgd(correction):
    with pytest.raises(ValueError, match="not AdamW"):
        corrected(torch.optim.AdamW(nn.Linear(1, 1).parameters()), correction, Age())


@pytest.mark.parametrize(
    ("correction", "moves"),
    [
        ("none", False),
        ("nesterov", False),
        ("spike", True),
        ("braking", True),
        ("prediction", False),
    ],
)
def test_a_correction_changes_late_steps_and_no_others(correction, moves):
    for late in (0, 2):
        ends = []
        for chosen in ("none", correction):
            server = Server(Asynchronous(3, chosen))
            server.set(0.0)
            for gradient in (1.0, 0.5, -0.25):
                server.apply(gradient=gradient, ages=[late])
            ends.append(server.weight)
        assert (ends[0] != ends[1]) == (moves and late > 0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"versions": 0}, "0 versions"),
        ({"versions": 65}, "65 versions"),
        ({"versions": 2, "correction": "spyke"}, "'spyke' is not known"),
        ({"versions": 2, "gone": "wait"}, "'wait' is not known"),
    ],
)
def test_terms_that_cannot_be_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Asynchronous(**options)


def test_an_origin_names_a_state_and_fits_a_mark():
    states = [{"w": torch.full((2,), value)} for value in (1.0, 2.0)]
    names = [origin_of(state) for state in states]
    assert names[0] == origin_of({"w": torch.ones(2)}) != names[1]
    assert all(0 < name < 2**62 for name in names)
