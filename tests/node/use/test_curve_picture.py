"""The picture of a run's evaluations is an image that shows each value at its place."""

import re
from xml.etree import ElementTree

import pytest

from farflock.node.train.evaluation_curve import EvaluatedPoint
from farflock.node.use.curve_picture import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, curve_picture

SVG = "{http://www.w3.org/2000/svg}"
FALLING = [EvaluatedPoint(10 * n, 1000 * n, 5.0 - n, 0.0) for n in range(4)]


def circles(raw):
    found = ElementTree.fromstring(raw).iter(f"{SVG}circle")
    return [(float(each.get("cx")), float(each.get("cy"))) for each in found]


def test_values_lie_from_the_upper_left_to_the_lower_right_and_are_named_at_the_axes():
    raw = curve_picture(FALLING)
    places = circles(raw)
    assert (places[0], places[-1]) == ((LEFT, TOP), (WIDTH - RIGHT, HEIGHT - BOTTOM))
    assert places[1] == pytest.approx((LEFT + (WIDTH - RIGHT - LEFT) / 3, TOP + 256 / 3), abs=0.1)
    words = re.findall(r">([^<\n]+)</text>", raw.decode())
    assert words[:4] == ["5.000", "2.000", "0", "3,000"]
    assert curve_picture(FALLING) == raw


@pytest.mark.parametrize("point", [EvaluatedPoint(0, 0, 5.0, 0.0), EvaluatedPoint(0, 0, 5.0, 0.1)])
def test_one_value_is_in_the_middle(point):
    ((_, y),) = circles(curve_picture([point]))
    assert y == pytest.approx((TOP + HEIGHT - BOTTOM) / 2, abs=0.1)
