"""A joiner's model that is another one is told the first tensor that differs, and how."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from farflock.node.run import tensor_list
from farflock.node.run.tensor_list import decode, encode, first_difference, list_tensors


def net(width=3, frozen=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))
    if frozen is not None:
        model[0].requires_grad_(False)
        nn.init.constant_(model[0].weight, frozen)
    return model


def longer():
    return nn.Sequential(*net(), nn.Linear(1, 1))


def named(*names):
    return nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names})


@pytest.mark.parametrize(
    ("here", "run", "says"),
    [
        (net(), longer(), "parameter 2.weight is missing here"),
        (longer(), net(), "parameter 2.weight is not in the run's model"),
        (
            net(4),
            net(3),
            "parameter 0.weight has the shape (4, 2) here and (3, 2) in the run",
        ),
        (
            net().double(),
            net(),
            "parameter 0.weight is torch.float64 here and torch.float32 in the run",
        ),
        (net(frozen=1), net(), "parameter 0.weight is frozen here and trained in the run"),
        (net(), net(frozen=1), "parameter 0.weight is trained here and frozen in the run"),
        (
            net(frozen=1),
            net(frozen=2),
            "parameter 0.weight is frozen, and its values here are not the run's",
        ),
        (
            named("a", "b"),
            named("b", "a"),
            "parameter a.weight is here in the place of parameter b.weight",
        ),
    ],
)
def test_the_first_difference_is_said_with_its_name(here, run, says):
    sent = decode(encode(list_tensors(run)))
    found = first_difference(list_tensors(here), sent)
    assert found[0] == says
    assert found[1]


def test_equal_models_do_not_differ_wherever_they_are_wrapped():
    wrapped = torch.compile(net(frozen=1), backend="eager")
    assert list_tensors(wrapped) == list_tensors(net(frozen=1))
    assert first_difference(list_tensors(wrapped), list_tensors(net(frozen=1))) == ()


def test_a_list_that_is_too_large_is_not_sent_and_not_read(monkeypatch):
    monkeypatch.setattr(tensor_list, "MAX_LIST_BYTES", 20)
    assert encode(list_tensors(net())) == b""
    assert decode(b"\x90" + bytes(20)) is None


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_of_a_member_are_a_list_or_nothing(raw):
    found = decode(raw)
    assert found is None or all(first_difference(found, [each]) is not None for each in found)


def test_a_name_of_a_member_is_shown_short_and_without_controls():
    raw = msgspec.msgpack.encode([["\x1b[2J" * 1000, [1], "torch.float32", b""]])
    said = " ".join(first_difference((), decode(raw)))
    assert len(said) < 300
    assert said.isprintable()
