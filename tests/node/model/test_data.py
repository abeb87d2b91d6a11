"""A peer's batches are its samples in turn; all evaluate on the same sequences."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.data.samples import SampleReader, Text, TooShort, text_in_memory
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import BadData, Batches, Start, evaluation


class Shards:
    """Two sources in one text: 30 shards of 40 tokens each."""

    end_of_text, sizes = 0, (40,) * 30

    def __init__(self, name):
        self.name = name

    def read(self, number):
        return (np.arange(40) + 100 * number + 5000 * (self.name == "b")).astype(np.uint16)


TEXT = Text((Shards("a"), Shards("b")), (3.0, 1.0))
ALICE = SampleStream(1, "alice")


def sampled(start=Start(), **more):  # noqa: B008
    return Batches(TEXT, ALICE, 4, 8, start=start, **more)


def test_prepared_data_give_the_samples_in_turn():
    rows = SampleReader(TEXT, ALICE, 9).read(0, 40).astype(np.int64)
    one = sampled()
    for step in range(10):
        x, y = one.batch(step)
        assert x.dtype == y.dtype == torch.int64
        assert x.tolist() == rows[4 * step : 4 * step + 4, :-1].tolist()
        assert y.tolist() == rows[4 * step : 4 * step + 4, 1:].tolist()


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_a_sampled_batch_depends_on_its_number_alone(steps):
    one = sampled()
    for step in steps:
        for x, y in zip(one.batch(step), sampled().batch(step), strict=True):
            assert torch.equal(x, y)


@given(st.integers(0, 60), st.integers(0, 1000), st.sampled_from([0, 7]))
def test_another_life_goes_on_with_the_batch_whose_cursor_it_got(step, begin, recurring):
    first = sampled(recurring=recurring)
    other = sampled(Start(first.cursor(step), begin), recurring=recurring)
    for more in range(3):
        assert torch.equal(other.batch(begin + more)[0], first.batch(step + more)[0])
        assert other.cursor(begin + more) == first.cursor(step + more)


def test_recurring_samples_are_the_first_ones_each_once_an_epoch():
    one, plain = sampled(recurring=6), SampleReader(TEXT, ALICE, 9).read(0, 6)
    for epoch in range(2):
        numbers = sum((one.samples(step) for step in range(3 * epoch, 3 * epoch + 3)), ())
        assert sorted(numbers) == sorted([*range(6)] * 2)
    for step in range(4):
        assert one.batch(step)[0].tolist() == plain[list(one.samples(step)), :-1].tolist()


def test_a_place_before_the_first_sample_is_refused():
    with pytest.raises(BadData, match="out of range"):
        sampled(Start(b"", 5)).batch(4)


TOKENS = np.arange(1000, dtype=np.uint16)


def in_memory(stream=ALICE, batch_size=4, seq=8, recurring=0):
    return Batches(text_in_memory(TOKENS), stream, batch_size, seq, recurring)


def test_a_text_in_memory_is_read_whole_before_any_of_it_comes_again():
    x, y = in_memory(batch_size=112).batch(0)
    assert torch.equal(x + 1, y)
    assert x.shape == y.shape == (112, 8)
    assert sorted(x[:, 0].tolist()) == [*range(0, 991, 9), 991]


def test_seed_and_peer_each_change_the_batch():
    firsts = [
        in_memory(stream).batch(3)[0].tolist()
        for stream in (ALICE, SampleStream(2, "alice"), SampleStream(1, "bob"))
    ]
    assert firsts[0] != firsts[1] != firsts[2] != firsts[0]


def test_batches_are_the_same_on_every_machine():
    """As first written down: another order would be another run."""
    assert in_memory().batch(3)[0][:, 0].tolist() == [828, 63, 351, 639]
    one = in_memory(recurring=5, batch_size=7)
    assert one.samples(3) == (1, 4, 3, 2, 4, 1, 0), (
        "21 to 27: all but one of epoch 4, and three of the next"
    )


def test_each_epoch_of_recurring_samples_has_an_order_of_its_own():
    one = in_memory(recurring=64, batch_size=64)
    assert one.samples(0) != one.samples(1)
    assert sorted(one.samples(0)) == sorted(one.samples(1)) == list(range(64))


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"batch_size": 0}, BadData, "use 1 or more of each"),
        ({"seq": 0}, BadData, "use 1 or more of each"),
        ({"seq": 1000}, TooShort, "has 1,001 tokens"),
        ({"recurring": -1}, BadData, "number of recurring samples"),
        ({"recurring": 2**20 + 1}, BadData, "number of recurring samples"),
    ],
)
def test_impossible_batches_are_refused(change, error, sentence):
    with pytest.raises(error, match=sentence):
        in_memory(**change)


@given(st.integers(2, 500), st.integers(1, 50), st.integers(1, 60))
def test_evaluation_windows_do_not_overlap_and_spread_over_the_text(count, seq, wanted):
    tokens = np.arange(count, dtype=np.uint16)
    if count <= seq:
        with pytest.raises(BadData, match="hold out more text"):
            evaluation(tokens, seq, wanted)
        return
    x, y = evaluation(tokens, seq, wanted)
    assert len(x) == min(wanted, (count - 1) // seq)
    assert torch.equal(x + 1, y)
    assert len(set(x.flatten().tolist())) == x.numel()
    assert torch.equal(x, evaluation(tokens, seq, wanted)[0])
    gaps = [*(x[1:, 0] - x[:-1, 0]).tolist(), count - int(x[-1, 0])]
    assert max(gaps) <= min(gaps) + 2 * seq
