"""Blocks of tensors, and tensors that are computed when they are read."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.optimizers.method import TensorBlock
from farflock.optimizers.parts import blocks as module
from farflock.optimizers.parts.blocks import LazyTensors, blocks, read, shapes_of


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Blocks of four values."""
    monkeypatch.setattr(module, "BLOCK_VALUES", 4)


def counted(**sizes):
    """Return lazy tensors of ascending values, and the ranges that were computed."""
    asked = []

    def compute(name, start, stop):
        asked.append((name, start, stop))
        return torch.arange(float(start), float(stop))

    return LazyTensors({name: (size,) for name, size in sizes.items()}, compute), asked


@given(st.lists(st.integers(0, 5), max_size=3))
def test_blocks_cover_a_tensor_once_in_order(shape):
    x = torch.arange(torch.Size(shape).numel())
    found = [block.of(x) for block in blocks("x", shape)]
    assert torch.equal(torch.cat([*found, x[:0]]), x)
    assert all(1 <= len(part) <= 4 for part in found)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_the_ranges_within_a_block_name_the_same_values(ranges, one, other):
    start, stop = sorted((one, other))
    whole = torch.zeros(12)
    for low, high in ranges:
        whole[low:high] = 1
    part = torch.zeros(stop - start)
    for low, high in TensorBlock("x", start, stop).within(ranges):
        assert 0 <= low < high <= len(part)
        part[low:high] = 1
    assert torch.equal(part, whole[start:stop])


def test_a_range_is_computed_when_it_is_read_and_a_whole_tensor_block_by_block():
    lazy, asked = counted(a=10, b=3)
    assert not asked
    assert (list(lazy), len(lazy), shapes_of(lazy)) == (["a", "b"], 2, {"a": (10,), "b": (3,)})
    assert read(lazy, TensorBlock("a", 2, 5)).tolist() == [2, 3, 4]
    assert asked == [("a", 2, 5)]
    assert lazy["a"].tolist() == list(range(10))
    assert asked[1:] == [("a", 0, 4), ("a", 4, 8), ("a", 8, 10)]


def test_a_block_of_stored_tensors_is_a_view():
    stored = {"x": torch.zeros(2, 3)}
    read(stored, TensorBlock("x", 1, 3)).fill_(1.0)
    assert stored["x"].tolist() == [[0, 1, 1], [0, 0, 0]]
    assert shapes_of(stored) == {"x": (2, 3)}


def test_held_tensors_are_computed_no_more():
    lazy, asked = counted(a=5)
    lazy.hold()
    before = len(asked)
    lazy.hold()
    assert lazy["a"].tolist() == list(range(5))
    assert read(lazy, TensorBlock("a", 1, 3)).tolist() == [1, 2]
    assert len(asked) == before


@pytest.mark.parametrize("held", [False, True])
def test_dropped_tensors_keep_their_names_and_cannot_be_read(held):
    lazy, asked = counted(a=5)
    if held:
        lazy.hold()
    lazy.drop()
    before = len(asked)
    lazy.hold()
    assert lazy.dropped
    assert lazy
    assert shapes_of(lazy) == {"a": (5,)}
    with pytest.raises(AssertionError, match="a is read after it was dropped"):
        lazy["a"]
    assert len(asked) == before
    assert LazyTensors.spent({"a": (5,)}).dropped


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1.0, math.nan, -math.inf])
@pytest.mark.parametrize("count", [0, 1, 64, 150])
def test_a_tensor_is_zero_if_no_value_counts_as_true_wherever_it_is(value, count, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_VALUES", 64)  # of which every fifth value is looked at first
    for at in range(max(count, 1)):
        x = torch.zeros(count)
        x[at : at + 1] = value
        assert module.is_zero(x) == (not x.any())
    assert module.is_zero(torch.tensor(value).expand(count, 2)) == (not count or value == 0.0)
