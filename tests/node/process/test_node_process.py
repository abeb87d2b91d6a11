"""A node says what it computes on."""

import re
from types import SimpleNamespace

import pytest

from farflock.node.model.device import Device
from farflock.node.process.node_process import NodeProcess


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ((0, 1), r"this node trains on Double Card, .* free, fp32"),
        ((1,), r"this node serves stage 1 on Double Card, .* free, fp32"),
        ((), "this node trains without weights: servers of stages compute, and not Double Card"),
    ],
)
def test_each_role_of_a_pipeline_says_what_it_computes_on(card, stages, expected):
    servings = tuple(SimpleNamespace(index=index) for index in stages)
    part = SimpleNamespace(servings=servings, serving=next(iter(servings), None))
    machine = SimpleNamespace(device=Device(card, "Double Card", "fp32"))
    node = NodeProcess(machine, *(None,) * 3, part, *(None,) * 6)
    assert re.fullmatch(expected, node.says_device())
