"""The law of depth on wires that are slower than stages."""

import pytest


def test_the_five_times_of_eight_stages_at_200_mbit_are_met(table):
    found = table("depth")
    assert found["GPipe"] == pytest.approx(found["GPipe, formula"])
    assert found["GPipe, formula"] == pytest.approx(94.65, abs=0.01)
    assert found["1F1B"] == pytest.approx(89.4, abs=0.05)
    assert found["1F1B, twice as deep"] == pytest.approx(53.2, abs=0.05)
    assert found["1F1B, three times as deep"] == pytest.approx(57.1, abs=0.05)


def test_the_rule_finds_a_depth_that_meets_its_bound(table):
    found = table("depth", microbatches=32, latency_s=0.2)
    assert found["as deep as wanted"] == pytest.approx(found["as deep as wanted, bound"])
    assert found["wire alone"] < found["as deep as wanted"] < found["1F1B"]


def test_gradients_first_do_not_pay_for_too_much_depth(table):
    found = table("depth")
    assert found["three times as deep, backward first"] < found["1F1B, three times as deep"]
