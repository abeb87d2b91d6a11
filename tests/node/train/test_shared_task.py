"""The rows of a batch that each of several processes computes, and when."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.model.device import Device
from farflock.node.model.llama import ModelConfig, build
from farflock.node.model.loss import IGNORED
from farflock.node.train.shared_task import SharedTask, shares_of

SIZES = st.integers(1, 40)


@given(SIZES, SIZES, st.integers(1, 9))
def test_each_row_is_computed_once_and_all_ranks_take_part_in_each_pass(batch, at_once, count):
    every = [list(shares_of(batch, at_once, rank, count)) for rank in range(count)]
    assert len({len(one) for one in every}) == 1
    real = [rows for one in every for rows, share in one if share]
    assert [row for rows in real for row in range(batch)[rows]] == list(range(batch))
    assert all(0 < rows.stop - rows.start <= at_once for one in every for rows, _ in one)
    assert math.isclose(sum(share for one in every for _, share in one), 1.0)
    assert all(
        math.isclose(share, (rows.stop - rows.start) / batch) or not share
        for one in every
        for rows, share in one
    )


SHAPE = ModelConfig(dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=32, context=16)


class Rank:
    """One of several ranks that take their turns: each is alone while it computes."""

    def __init__(self, rank, count):
        self.rank, self.count = rank, count

    def sum(self, value):
        return value


def taken(model, batches, ranks, micro_batch=None):
    """The loss of a step, and the gradients that FSDP would leave: the mean over ranks."""
    total = 0.0
    for rank in range(ranks):
        replica = SimpleNamespace(ranks=Rank(rank, ranks))
        task = SharedTask(model, replica, batches, None, 2, Device(), micro_batch)
        total += task.take_part(0)
    found = {name: weight.grad / ranks for name, weight in model.named_parameters()}
    model.zero_grad()
    return total, found


class Batches:
    """Two batches of 5 sequences, with a few targets that count in some of them."""

    batch_size, seq = 5, 16

    def __init__(self, kept):
        chance = torch.Generator().manual_seed(4)
        self.x, y = torch.randint(256, (2, 2, 5, 16), generator=chance)
        counts = torch.rand(y.shape, generator=chance) < kept
        counts[0, 1:4] = kept == 1
        self.y = torch.where(counts, y, IGNORED)

    def batch(self, step):
        return self.x[step], self.y[step]


@pytest.mark.parametrize("kept", [0.2, 0, 1])
@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, None), (2, None), (3, 1), (7, 2)])
def test_ranks_together_take_the_mean_over_the_targets_that_count(kept, ranks, micro_batch):
    model, batches = build(SHAPE, 1), Batches(kept)
    loss, found = taken(model, batches, ranks, micro_batch)
    expected = sum(model(batches.x[part], batches.y[part]) for part in range(2)) / 2
    expected.backward()
    assert math.isclose(loss, expected.item(), rel_tol=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-7)
