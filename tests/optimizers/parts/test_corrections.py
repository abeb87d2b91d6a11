"""Corrections of late gradients compared with slow twins in NumPy, written from the papers'
recursions; without a delay nothing changes."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from farflock.optimizers.parts.corrections import (
    TREND,
    AdaptiveBraking,
    Age,
    Momentum,
    SpikeCompensation,
    Trend,
    along_trend,
    along_velocity,
    brake,
    nadam,
    nesterov,
    rescheduled,
    spike_factors,
    stability_limit,
    trend_decay,
)

# the quadratic's matrix; its minimum is at 0
A = np.array([[1.0, 0.3, 0.0], [0.3, 0.5, -0.1], [0.0, -0.1, 0.2]])
W0 = np.array([1.0, -2.0, 0.5])
STEPS = 60
RATE, MOMENTUM = 0.01, 0.9
DELAYS = [0, 1, 2, 5]


class Point(nn.Module):
    def __init__(self, start=W0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))


def sgd(point, **options):
    return torch.optim.SGD(point.parameters(), lr=RATE, momentum=MOMENTUM, **options)


def trajectory(point, inner, delay, age=None, predict=None, steps=STEPS):
    """All weights of a run whose gradients are those of the weights `delay` steps ago, or of the
    oldest ones at first."""
    predict = predict or (lambda: point.w.detach().clone())
    served, path = [predict()], [point.w.detach().numpy().copy()]
    for step in range(steps):
        then = max(step - delay, 0)
        if age is not None:
            age.epochs = step - then
        point.w.grad = torch.from_numpy(A @ served[then].numpy())
        inner.step()
        served.append(predict())
        path.append(point.w.detach().numpy().copy())
    return np.array(path)


def same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13)


# Spike compensation.


@given(st.floats(0, 0.999), st.integers(0, 64))
def test_one_gradient_moves_the_weights_as_far_in_all_whatever_its_delay(momentum, delay):
    into, past = spike_factors(momentum, delay)
    assert past + into / (1 - momentum) == pytest.approx(1 / (1 - momentum), rel=1e-12)


def test_spike_factors_without_a_delay_are_those_of_momentum_sgd():
    assert spike_factors(0.9, 0) == (1.0, 0.0)
    assert spike_factors(0.0, 3) == (0.0, 1.0)


@pytest.mark.parametrize("delay", DELAYS)
def test_spike_compensation_is_the_papers_recursion(delay):
    w, v, past = W0.copy(), np.zeros(3), [W0]
    expected = [w]
    for step in range(STEPS):
        then = max(step - delay, 0)
        a = MOMENTUM ** (step - then)
        b = (1 - a) / (1 - MOMENTUM)
        g = A @ past[then]
        # The paper has a·v in the step; `a` differs between steps only while the pipeline fills.
        v = MOMENTUM * v + a * g
        w = w - RATE * (v + b * g)
        past.append(w)
        expected.append(w)
    point, age = Point(), Age()
    inner = sgd(point)
    SpikeCompensation(inner, age)
    same(trajectory(point, inner, delay, age), expected)


def test_with_a_constant_delay_it_is_the_papers_own_form_to_the_letter():
    gradients = np.random.default_rng(0).normal(size=(STEPS, 3))
    a, b = spike_factors(MOMENTUM, 3)
    w, v = W0.copy(), np.zeros(3)
    point, age = Point(), Age(3)
    inner = sgd(point)
    SpikeCompensation(inner, age)
    for g in gradients:
        v = MOMENTUM * v + g
        w = w - RATE * (a * v + b * g)
        point.w.grad = torch.from_numpy(g.copy())
        inner.step()
        same(point.w.detach().numpy(), w)


def test_for_a_delay_of_one_it_is_nesterovs_step():
    point, twin, age = Point(), Point(), Age()
    inner = sgd(point)
    SpikeCompensation(inner, age)
    inner.param_groups[0]["lr"] = 0.1
    age.epochs = 1
    looking = nesterov([{"params": [twin.w]}], 0.1 / (1 - MOMENTUM), MOMENTUM)
    for g in np.random.default_rng(2).normal(size=(STEPS, 3)):
        point.w.grad, twin.w.grad = torch.from_numpy(g.copy()), torch.from_numpy(g.copy())
        inner.step()
        looking.step()
        same(point.w.detach().numpy(), twin.w.detach().numpy())


def test_gradients_of_different_ages_all_arrive_whole():
    point, age = Point(), Age()
    inner = sgd(point)
    SpikeCompensation(inner, age)
    gradients = np.random.default_rng(1).normal(size=(6, 3))
    for g, delay in zip(gradients, [0, 4, 1, 1, 7, 0], strict=True):
        age.epochs = delay
        point.w.grad = torch.from_numpy(g.copy())
        inner.step()
    for delay in [3, 0] * 400:
        age.epochs = delay
        point.w.grad = torch.zeros(3, dtype=torch.float64)
        inner.step()
    same(point.w.detach().numpy(), W0 - RATE / (1 - MOMENTUM) * gradients.sum(axis=0))


def test_spike_compensation_refuses_what_it_is_not_for():
    for options in ({"nesterov": True}, {"dampening": 0.5}):
        with pytest.raises(ValueError, match="plain momentum"):
            SpikeCompensation(sgd(Point(), **options), Age())


# Weight prediction.


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("form", ["velocity", "trend"])
def test_linear_weight_prediction_is_the_papers_recursion_in_both_forms(delay, form):
    w, v, ahead = W0.copy(), np.zeros(3), [W0]
    expected = [w]
    for step in range(STEPS):
        v = MOMENTUM * v + A @ ahead[max(step - delay, 0)]
        w = w - RATE * v
        ahead.append(w - RATE * delay * v)
        expected.append(w)
    point = Point()
    inner = sgd(point)
    Trend(inner)
    along = along_velocity if form == "velocity" else along_trend
    same(trajectory(point, inner, delay, predict=lambda: along(point, inner, delay)["w"]), expected)


@pytest.mark.parametrize("delay", DELAYS)
def test_spike_compensation_and_prediction_go_together(delay):
    w, before, v, ahead = W0.copy(), W0, np.zeros(3), [W0]
    expected = [w]
    for step in range(STEPS):
        then = max(step - delay, 0)
        a = MOMENTUM ** (step - then)
        b = (1 - a) / (1 - MOMENTUM)
        g = A @ ahead[then]
        v = MOMENTUM * v + a * g
        w, before = w - RATE * (v + b * g), w
        ahead.append(w + delay * (w - before))
        expected.append(w)
    point, age = Point(), Age()
    inner = sgd(point)
    SpikeCompensation(inner, age)
    Trend(inner)
    same(
        trajectory(point, inner, delay, age, lambda: along_trend(point, inner, delay)["w"]),
        expected,
    )


def test_a_prediction_is_new_memory_and_before_the_first_step_it_is_the_weights():
    point = Point()
    inner = sgd(point)
    Trend(inner)
    for along in (along_velocity, along_trend):
        predicted = along(point, inner, 3)["w"]
        assert torch.equal(predicted, point.w)
        assert predicted.data_ptr() != point.w.data_ptr()


# Adaptive braking.


def test_a_gradient_across_the_velocity_is_left_as_it_is():
    g, v = torch.tensor([0.3, 0.0, -0.7]), torch.tensor([0.0, 5.0, 0.0])
    assert torch.equal(brake(g, v, 2.0), g)


def test_a_gradient_along_the_velocity_is_stopped_and_one_against_it_is_doubled():
    g = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert brake(g, 3 * g, 1.0).norm() < 1e-15 * g.norm() * 10
    torch.testing.assert_close(brake(g, -0.2 * g, 1.0), 2 * g)
    torch.testing.assert_close(brake(g, 0.5 * g, 2.0), -g)


def test_nothing_brakes_without_a_velocity_or_a_gradient():
    g = torch.tensor([1.0, 2.0])
    assert torch.equal(brake(g, torch.zeros(2), 2.0), g)
    assert torch.equal(brake(torch.zeros(2), g, 2.0), torch.zeros(2))


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_adaptive_braking_is_the_papers_recursion(delay):
    w, v, past = W0.copy(), np.zeros(3), [W0]
    expected = [w]
    for step in range(STEPS):
        then = max(step - delay, 0)
        g = A @ past[then]
        if step > then and v.any():
            g = g * (1 - 2.0 * (g @ v) / (np.linalg.norm(g) * np.linalg.norm(v)))
        v = MOMENTUM * v + g
        w = w - RATE * v
        past.append(w)
        expected.append(w)
    point, age = Point(), Age()
    inner = sgd(point)
    AdaptiveBraking(inner, age)
    same(trajectory(point, inner, delay, age), expected)


def test_adam_is_braked_against_its_first_moment():
    point, age = Point(), Age()
    inner = torch.optim.AdamW(point.parameters(), lr=RATE)
    AdaptiveBraking(inner, age, rho=1.0)
    point.w.grad = torch.ones(3, dtype=torch.float64)
    inner.step()
    age.epochs = 1
    point.w.grad = torch.ones(3, dtype=torch.float64)
    inner.step()
    assert point.w.grad.abs().max() < 1e-12


def test_braking_that_would_drive_on_is_refused():
    with pytest.raises(ValueError, match="rho=-1"):
        AdaptiveBraking(sgd(Point()), Age(), rho=-1.0)


# Nesterov's correction.


@pytest.mark.parametrize("delay", DELAYS)
def test_nesterovs_correction_is_asyncpps_recursion_at_the_points_of_the_look_ahead(delay):
    gamma, rate = 0.95, 0.1
    w, before, looked = W0.copy(), W0, []
    for step in range(STEPS + 1):
        d = gamma * (w - before)
        looked.append(w + d)
        w, before = w + d - rate * (1 - gamma) * (A @ looked[max(step - delay, 0)]), w
    point = Point()
    same(trajectory(point, nesterov([{"params": [point.w]}], rate, gamma), delay), looked)


def test_without_a_delay_it_is_nesterovs_method():
    gamma, rate = 0.9, 0.1
    y, u = W0.copy(), W0
    expected = [y]
    # the textbook's: a gradient step from y, then beyond it by gamma times what it gained
    for _ in range(STEPS):
        step_end = y - rate * (1 - gamma) * (A @ y)
        y, u = step_end + gamma * (step_end - u), step_end
        expected.append(y)
    point = Point()
    same(trajectory(point, nesterov([{"params": [point.w]}], rate, gamma), 0), expected)


@pytest.mark.parametrize("delay", [0, 2])
def test_nadam_is_its_recursion_with_decoupled_decay(delay):
    b1, b2, psi, decay, rate = 0.99, 0.95, 4e-3, 0.1, 0.02
    w, m, s, product, past = W0.copy(), np.zeros(3), np.zeros(3), 1.0, [W0]
    for step in range(1, STEPS + 1):
        g = A @ past[max(step - 1 - delay, 0)]
        mu, mu_next = (b1 * (1 - 0.5 * 0.96 ** (k * psi)) for k in (step, step + 1))
        product *= mu
        m, s = b1 * m + (1 - b1) * g, b2 * s + (1 - b2) * g**2
        root = np.sqrt(s / (1 - b2**step)) + 1e-8
        look = mu_next * m / (1 - product * mu_next) + (1 - mu) * g / (1 - product)
        w = w * (1 - rate * decay) - rate * look / root
        past.append(w)
    point = Point()
    inner = nadam([{"params": [point.w], "weight_decay": decay}], rate, (b1, b2))
    # torch keeps the product in float32
    np.testing.assert_allclose(trajectory(point, inner, delay), past, rtol=1e-6)


# PipeMare.


def test_the_rate_begins_divided_by_the_delay_and_ends_whole():
    assert rescheduled(0.8, 4, 0, 100) == 0.2
    assert rescheduled(0.8, 4, 50, 100) == pytest.approx(0.4)
    assert rescheduled(0.8, 4, 100, 100) == rescheduled(0.8, 4, 5000, 100) == 0.8
    rates = [rescheduled(0.8, 4, step, 100) for step in range(101)]
    assert rates == sorted(rates)
    with pytest.raises(ValueError, match="annealing over 0 steps"):
        rescheduled(0.8, 4, 0, 0)


@given(st.floats(0, 1), st.integers(0, 200))
def test_what_is_not_late_keeps_its_rate(delay, step):
    assert rescheduled(0.8, delay, step, 100) == 0.8


@pytest.mark.parametrize("gap", [1, 2, 5])
def test_the_discrepancy_correction_is_pipemares_recursion(gap):
    decay = math.exp(-2) ** (1 / gap)
    point = Point()
    inner = sgd(point)
    Trend(inner, trend_decay(gap))
    guesses = []

    def serve():
        guesses.append(along_trend(point, inner, -gap)["w"])
        return point.w.detach().clone()

    path = trajectory(point, inner, 2, predict=serve)
    delta, expected = np.zeros(3), [W0]
    for old, new in itertools.pairwise(path):
        delta = decay * delta + (1 - decay) * (new - old)
        expected.append(new - gap * delta)
    same(torch.stack(guesses).numpy(), expected)


def test_weights_that_move_steadily_are_guessed_exactly_in_the_end():
    point = Point()
    inner = torch.optim.SGD(point.parameters(), lr=0.5)
    Trend(inner, trend_decay(3))
    before = []
    for _ in range(80):
        before.append(point.w.detach().numpy().copy())
        point.w.grad = torch.ones(3, dtype=torch.float64)
        inner.step()
    same(along_trend(point, inner, -3)["w"].numpy(), before[-3])


def test_a_trend_forgets_within_its_gap_and_for_none_is_the_last_move():
    assert trend_decay(5) ** 5 == pytest.approx(math.exp(-2))
    assert trend_decay(0) == 0.0
    with pytest.raises(ValueError, match="decay 1"):
        Trend(sgd(Point()), 1.0)


# Without a delay, and combined.

KINDS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "nadam": lambda parameters: nadam([{"params": list(parameters)}], 0.1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_delay_every_correction_leaves_every_bit(kind):
    bare, point, age = Point(), Point(), Age(0)
    plain, inner = KINDS[kind](bare.parameters()), KINDS[kind](point.parameters())
    if kind == "sgd":
        SpikeCompensation(inner, age)
    AdaptiveBraking(inner, age)
    Trend(inner, trend_decay(0))
    found = trajectory(point, inner, 0, age, lambda: along_trend(point, inner, 0)["w"])
    assert np.array_equal(found, trajectory(bare, plain, 0))
    moments = {name: value for name, value in inner.state[point.w].items() if name != TREND}
    assert moments.keys() == plain.state[bare.w].keys()
    assert all(
        torch.equal(torch.as_tensor(x), torch.as_tensor(plain.state[bare.w][n]))
        for n, x in moments.items()
    )


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_trend_is_saved_and_taken_up_with_the_optimizers_moments(kind):
    through, point = Point(), Point()
    whole, first = KINDS[kind](through.parameters()), KINDS[kind](point.parameters())
    Trend(whole, 0.5)
    Trend(first, 0.5)
    expected = trajectory(through, whole, 0, steps=20)
    trajectory(point, first, 0, steps=10)
    second = KINDS[kind](point.parameters())
    Trend(second, 0.5)
    second.load_state_dict(first.state_dict())
    assert np.array_equal(trajectory(point, second, 0, steps=10)[-1], expected[-1])
    assert torch.equal(second.state[point.w][TREND], whole.state[through.w][TREND])


def test_a_parameter_without_a_gradient_is_left_alone():
    used, idle = Point(), Point()
    inner = torch.optim.AdamW([*used.parameters(), *idle.parameters()], lr=0.1)
    age = Age(2)
    AdaptiveBraking(inner, age)
    Trend(inner)
    for _ in range(3):
        used.w.grad = torch.ones(3, dtype=torch.float64)
        inner.step()
    assert not inner.state.get(idle.w)
    assert torch.equal(idle.w, Point().w)


# Batches of other sizes, and cases that need no correction.


@given(st.floats(0.1, 0.999), st.floats(1, 1000), st.floats(1, 1000))
def test_a_samples_effect_and_the_memory_of_it_do_not_depend_on_the_batch_size(m, size, other):
    at = Momentum(0.1, m, size)
    then = at.at(other)
    assert then.rate / (1 - then.momentum) / then.samples == pytest.approx(
        at.rate / (1 - at.momentum) / at.samples
    )
    assert then.momentum**size == pytest.approx(at.momentum**other)


def test_batches_of_the_same_size_change_nothing():
    assert Momentum(0.1, 0.9, 32).at(32) == Momentum(0.1, 0.9, 32)


def test_the_stability_limit_is_2_without_a_delay_and_1_with_one():
    assert stability_limit(0) == pytest.approx(2)
    assert stability_limit(1) == pytest.approx(1)
    assert stability_limit(50) * 50 == pytest.approx(math.pi / 2, rel=0.02)


@pytest.mark.parametrize("delay", [0, 1, 2, 4, 9])
@pytest.mark.parametrize(("share", "settles"), [(0.99, True), (1.01, False)])
def test_late_sgd_settles_below_the_limit_and_not_above_it(delay, share, settles):
    point = Point(np.ones(1))
    inner = torch.optim.SGD(point.parameters(), lr=share * stability_limit(delay))
    served, largest = [point.w.detach().clone()], [0.0, 0.0]
    for step in range(4000):
        point.w.grad = served[max(step - delay, 0)].clone()  # curvature 1
        inner.step()
        served.append(point.w.detach().clone())
        largest[step >= 2000] = max(largest[step >= 2000], abs(float(served[-1])))
    assert (largest[1] < largest[0]) == settles
