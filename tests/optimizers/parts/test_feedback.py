"""Error feedback as arithmetic: nothing that was to be sent is lost, and nothing counts twice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.optimizers.parts.feedback import choose, message, settle

X = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
E = torch.tensor([[8.0, 8.0, 8.0], [16.0, 16.0, 16.0]])


def test_a_message_is_the_new_value_plus_the_decayed_residual():
    assert torch.equal(message(X, E, 0.5), X + torch.tensor([[4.0] * 3, [8.0] * 3]))


def test_the_first_message_is_a_copy_of_the_value():
    first = message(X, None, 0.5)
    assert torch.equal(first, X)
    assert first.data_ptr() != X.data_ptr()


def test_where_it_was_taken_the_residual_is_what_was_not_delivered():
    sent = torch.where(X.abs() > 3, X, torch.zeros(()))
    assert torch.equal(settle(X, sent, [(0, 6)], E), X - sent)


def test_where_it_was_not_taken_the_residual_stays():
    assert torch.equal(settle(X, torch.zeros(2, 3), [], E), E)
    assert torch.equal(settle(X, torch.zeros(2, 3), [], None), torch.zeros(2, 3))


def test_each_range_is_settled_by_itself():
    settled = settle(X, torch.zeros(2, 3), [(0, 2), (5, 6)], E)
    assert settled.tolist() == [[1.0, -2.0, 8.0], [16.0, 16.0, -6.0]]


def test_with_beta_one_all_that_was_meant_arrives_or_waits():
    """What was delivered plus the residual equals the sum of all values, over many rounds of a
    codec that sends half."""
    delivered, residual, meant = torch.zeros(8), None, torch.zeros(8)
    for number in range(20):
        x = torch.arange(8.0) * (number + 1) - 13
        meant = meant + x
        a = message(x, residual, 1.0)
        sent = torch.where(torch.arange(8) % 2 == number % 2, a, torch.zeros(()))
        delivered, residual = delivered + sent, settle(a, sent, [(0, 8)], residual)
        assert torch.equal(delivered + residual, meant)


@given(st.lists(st.integers(0, 6), max_size=6, unique=True))
def test_choose_takes_inside_exactly_in_the_ranges(bounds):
    edges = sorted(bounds)[: len(bounds) // 2 * 2]
    ranges = list(zip(edges[::2], edges[1::2], strict=True))
    inside = {i for start, stop in ranges for i in range(start, stop)}
    chosen = choose(ranges, X, E).reshape(-1).tolist()
    assert chosen == [float((X if i in inside else E).reshape(-1)[i]) for i in range(6)]


@pytest.mark.parametrize("ranges", [[(1, 3)], [(0, 6)], []])
def test_choose_changes_neither_input(ranges):
    inside, outside = X.clone(), E.clone()
    choose(ranges, inside, outside)
    assert torch.equal(inside, X)
    assert torch.equal(outside, E)
