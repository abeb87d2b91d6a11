"""Methods by name."""

import dataclasses

import pytest

from farflock.optimizers.catalog import METHODS, NAMES, PRESETS, method, options_of
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
        ("zzz", f"choose from {', '.join(sorted(NAMES))}"),
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


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_method_with_its_options_and_ones_own_win(name):
    base, options = PRESETS[name]
    made = method(name)
    assert type(made) is METHODS[base]
    assert {option: getattr(made, option) for option in options} == options
    assert {option: options_of(name)[option] for option in options} == options
    assert options_of(name).keys() == options_of(base).keys()
    assert method(name, period=7).period == 7
    assert method(base).period == options_of(base)["period"]


def test_a_misspelt_preset_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="'best-10' is not known; did you mean 'best-100'"):
        method("best-10")
