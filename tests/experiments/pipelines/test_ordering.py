"""Searches for layouts, by one cost and from one start."""

import pytest

SMALL = {"machines": 16, "stages": 4, "partitions": 6, "seeds": [1, 2]}


def test_a_search_is_not_worse_than_chance_and_its_ratio_is_as_said(table):
    found = table("dtfm-ordering", **SMALL, trials=10)
    for name in ("DT-FM", "Kernighan-Lin", "our planner"):
        assert all(one <= other for one, other in zip(found[name], found["random"], strict=True))
    ratios = [one / other for one, other in zip(found["random"], found["DT-FM"], strict=True)]
    assert found["random over DT-FM"] == pytest.approx(ratios)


def test_without_children_both_searches_are_the_best_of_one_population(table):
    found = table("dtfm-ordering", **SMALL, trials=0)
    assert found["DT-FM"] == found["Kernighan-Lin"]
    assert table("dtfm-ordering", **SMALL, trials=20)["DT-FM"] <= found["DT-FM"]
