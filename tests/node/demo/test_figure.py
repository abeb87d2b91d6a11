"""Every figure has units that fit, and labels that stay apart."""

import itertools

import pytest

from farflock.node.demo.figure import BYTES, TIME, TOKENS, fitting_unit, spread


@pytest.mark.parametrize(
    ("largest", "units", "name"),
    [
        (900, TOKENS, "tokens"),
        (798_720, TOKENS, "k tokens"),
        (2_000_000, TOKENS, "M tokens"),
        (12_105_251, BYTES, "MB"),
        (0, BYTES, "bytes"),
        (90, TIME, "seconds"),
        (600, TIME, "minutes"),
        (7200, TIME, "hours"),
        (86_400 * 3, TIME, "days"),
    ],
)
def test_an_axis_has_the_largest_unit_of_which_it_shows_two(largest, units, name):
    assert fitting_unit(largest, units)[1] == name


def test_labels_that_are_apart_stay_where_they_are():
    assert spread([0.9, 0.1, 0.5], 0.1, 0, 1) == pytest.approx([0.9, 0.1, 0.5])


@pytest.mark.parametrize("heights", [[0.5, 0.5, 0.5], [0.99, 0.98, 1.2], [-1.0, 0.0, 0.01]])
def test_labels_that_touch_move_apart_within_the_axes(heights):
    placed = spread(heights, 0.1, 0, 1)
    ordered = sorted(placed)
    assert all(after - before >= 0.1 - 1e-9 for before, after in itertools.pairwise(ordered))
    assert ordered[0] >= 0
    assert ordered[-1] <= 1


def test_more_labels_than_fit_share_the_height():
    placed = spread([0.5] * 21, 0.1, 0, 1)
    assert sorted(placed) == pytest.approx([number / 20 for number in range(21)])
