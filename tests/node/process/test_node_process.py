"""A node says what it computes on."""

import re
from types import SimpleNamespace

import pytest

from farflock.node.model.device import Device
from farflock.node.model.step_options import StepOptions
from farflock.node.process.network import MachineOptions
from farflock.node.process.node_process import NodeProcess
from farflock.node.state.paths import RunFolder


def said(card, folder, role, pipeline=None, **options):
    machine = MachineOptions(
        RunFolder(folder), device=Device(card, "Double Card", "fp16"), **options
    )
    manifest = SimpleNamespace(pipeline=pipeline, train=SimpleNamespace(batch=16))
    part = SimpleNamespace(role=role)
    session = SimpleNamespace(known=SimpleNamespace(manifest=manifest))
    journal = SimpleNamespace(report=None)
    return NodeProcess(machine, session, None, part, journal, [], None).says_device()


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("replica", r"this node trains on Double Card, .* free, fp32"),
        ("stage:1", r"this node serves stage 1 on Double Card, .* free, fp32"),
        (
            "trainer",
            "this node trains without weights: servers of stages compute, and not Double Card",
        ),
    ],
)
def test_each_role_of_a_pipeline_says_what_it_computes_on(card, tmp_path, role, expected):
    assert re.fullmatch(expected, said(card, tmp_path, role, pipeline=object()))


@pytest.mark.parametrize(
    ("options", "more"),
    [
        (StepOptions(), ""),
        (StepOptions(micro_batch=4), ", 4 of a batch's 16 sequences at once"),
        (StepOptions("on", micro_batch=16), ", with layers computed again"),
    ],
)
def test_a_whole_replica_says_how_much_it_computes_at_once(card, tmp_path, options, more):
    expected = rf"this node trains on Double Card, .* free, fp16{more}"
    assert re.fullmatch(expected, said(card, tmp_path, "replica", step_options=options))
