"""The catalogue's law: a name says one computation, which refuses what it does not know before it
computes anything."""

import dataclasses

import msgspec
import pytest

from farflock.experiments.pipelines import table
from farflock.experiments.pipelines.catalog import COMPUTATIONS
from farflock.experiments.reproduce import recipe
from farflock.experiments.reproduce.command import TIERS
from farflock.node.errors import Usage


def test_names_are_in_order_and_no_computation_has_two():
    assert list(COMPUTATIONS) == sorted(COMPUTATIONS)
    assert len({entry.compute.__module__ for entry in COMPUTATIONS.values()}) == len(COMPUTATIONS)
    assert len({entry.parameters for entry in COMPUTATIONS.values()}) == len(COMPUTATIONS)


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_parameters_and_their_computation_are_of_one_module_and_refuse_what_they_do_not_know(name):
    entry = COMPUTATIONS[name]
    assert entry.parameters.__module__ == entry.compute.__module__
    assert issubclass(entry.parameters, table.Parameters)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"unheard_of": 1}, entry.parameters)


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_its_recipe_has_its_name_and_can_be_asked_for_in_every_tier(name):
    shipped = recipe.load(name)
    assert shipped.computation == name
    keys = {tier: shipped.key(tier) for tier in TIERS}
    assert all(len(key) == 64 for key in keys.values())
    same = shipped.parameters("ci") == shipped.parameters("cpu")
    assert (keys["ci"] == keys["cpu"]) == same, "equal parameters, and only they, have one key"
    with pytest.raises(Usage, match="has no tier"):
        shipped.parameters("tomorrow")


def test_an_entry_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        COMPUTATIONS["depth"].compute = None
