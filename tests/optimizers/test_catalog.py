"""Methods by name."""

import dataclasses

import pytest

from farflock.optimizers.catalog import METHODS, method
from farflock.optimizers.diloco import DiLoCo


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_made_by_its_name_alone(name):
    assert type(method(name)) is METHODS[name]


def test_options_reach_the_constructor():
    made = method("diloco", period=7, codec="int8")
    assert isinstance(made, DiLoCo)
    assert (made.period, made.codec) == (7, "int8")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dilocoo", "'dilocoo' is not known; did you mean 'diloco'?"),
        ("zzz", f"choose from {', '.join(sorted(METHODS))}"),
        ("x" * 10_000, r"'x{64}' is not known"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        method(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peroid": 3}, "diloco has no option 'peroid'; did you mean 'period'?"),
        ({"_round": 3}, "no option '_round'"),
        ({"zzz": 3}, "choose from codec, deadline_s, feedback, outer, period, return_codec"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest(options, message):
    with pytest.raises(ValueError, match=message):
        method("diloco", **options)


def test_a_method_without_options_says_so():
    with pytest.raises(ValueError, match="local has no option 'period'; choose from none"):
        method("local", period=3)


@pytest.mark.parametrize("name", METHODS)
def test_two_methods_share_no_state(name):
    first, second = method(name), method(name)
    for entry in dataclasses.fields(METHODS[name]):
        value = getattr(first, entry.name)
        assert not isinstance(value, dict) or value is not getattr(second, entry.name)
