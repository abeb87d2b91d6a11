"""The small parts that methods are made of: schedule, feedback, inner optimizers, state hash,
catalogue."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.optimizers.catalog import METHODS, method
from farflock.optimizers.parts.feedback import choose, message
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.parts.state import named, state_hash, unnamed

SCHEDULE = Schedule(peak=2.0, total_tokens=1000, warmup_tokens=100, floor=0.1, joiner_steps=4)


def test_the_rate_rises_then_falls_to_its_floor():
    assert SCHEDULE.rate(0, 9) < SCHEDULE.rate(50, 9) < SCHEDULE.rate(100, 9) == pytest.approx(2.0)
    assert SCHEDULE.rate(1000, 9) == pytest.approx(0.2)
    assert SCHEDULE.rate(10**9, 9) == pytest.approx(0.2)


def test_a_joiner_warms_up_on_its_own():
    assert [SCHEDULE.rate(100, step) / 2.0 for step in range(5)] == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 1.0]
    )


@given(st.integers(0, 2000), st.integers(0, 50))
def test_the_rate_is_never_negative_nor_above_the_peak(tokens, steps):
    assert 0 <= SCHEDULE.rate(tokens, steps) <= 2.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schedule(0.0, 10),
        lambda: Schedule(1.0, 10, warmup_tokens=11),
        lambda: Schedule(1.0, 10, floor=2.0),
        lambda: InnerConfig(name="adam"),
        lambda: InnerConfig(lr=0),
        lambda: InnerConfig(betas=(0.9, 1.0)),
    ],
)
def test_senseless_values_are_refused(make):
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        make()


def test_only_matrices_decay():
    module = torch.nn.Linear(3, 2)
    groups = InnerConfig().build(module).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decays == {id(module.weight): 0.1, id(module.bias): 0.0}
    assert isinstance(InnerConfig(name="sgd").build(module), torch.optim.SGD)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4))
def test_choose_takes_exactly_the_ranges(pairs):
    ranges = sorted((min(a, b), max(a, b)) for a, b in pairs)
    inside, outside = torch.ones(3, 4), torch.zeros(3, 4)
    expected = [float(any(a <= i < b for a, b in ranges)) for i in range(12)]
    assert choose(ranges, inside, outside).reshape(-1).tolist() == expected
    assert outside.sum() == 0


def test_a_message_is_the_new_value_and_the_decayed_residual():
    assert message(torch.ones(2), None, 0.5).tolist() == [1.0, 1.0]
    assert message(torch.ones(2), torch.full((2,), 4.0), 0.5).tolist() == [3.0, 3.0]


def test_the_hash_sees_names_types_shapes_and_values():
    base = {"a": torch.zeros(2, 3), "round": torch.tensor(1)}
    others = [
        {"b": torch.zeros(2, 3), "round": torch.tensor(1)},
        {"a": torch.zeros(3, 2), "round": torch.tensor(1)},
        {"a": torch.zeros(2, 3, dtype=torch.float64), "round": torch.tensor(1)},
        {"a": torch.zeros(2, 3), "round": torch.tensor(2)},
        {"a": torch.full((2, 3), -0.0), "round": torch.tensor(1)},
    ]
    assert len({state_hash(state) for state in [base, *others]}) == 6
    assert state_hash(dict(reversed(base.items()))) == state_hash(base)


def test_names_come_back_as_they_went():
    tensors = {"x.weight": torch.ones(2), "y": torch.zeros(1)}
    state = named("phi", tensors) | named("philo", {"z": torch.ones(1)})
    assert unnamed("phi", state, {"x.weight": (2,), "y": (1,)}).keys() == tensors.keys()
    assert unnamed("phi", state, {"y": (1,)})["y"] is tensors["y"]


def test_every_method_is_to_be_had_by_name():
    classes = {"local": "Local", "ddp": "DDP", "diloco": "DiLoCo", "noloco": "NoLoCo"}
    assert {name: type(method(name)).__name__ for name in classes} == classes
    assert classes.keys() <= METHODS.keys()


@pytest.mark.parametrize(
    ("name", "options", "hint"), [("dilocko", {}, "diloco"), ("diloco", {"perid": 3}, "period")]
)
def test_a_misspelt_name_is_answered_with_the_nearest(name, options, hint):
    with pytest.raises(ValueError, match=hint):
        method(name, **options)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_options_that_are_private_are_no_options(name):
    with pytest.raises(ValueError, match="no option"):
        method(name, _round=3)
