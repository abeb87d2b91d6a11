"""A peer's batches are a pure function of seed, peer, round and step; all evaluate on the same."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.data.samples import SampleReader, Text
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import BadData, Batches, SampleBatches, Start, batches_of, evaluation

TOKENS = np.arange(1000, dtype=np.uint16)
counters = st.integers(0, 2**63 - 1)
peers = st.text(min_size=1, max_size=60)


def batches(peer="alice", run_seed=1, tokens=TOKENS, batch_size=4, seq=8, **more):
    return Batches(tokens, run_seed, peer, batch_size, seq, **more)


@given(peer=peers, seed=st.integers(0, 2**64), step=counters, round_=counters)
def test_a_batch_depends_on_its_cursor_alone(peer, seed, step, round_):
    one, other = batches(peer, seed), batches(peer, seed)
    other.batch(0)
    batches("somebody else", seed).batch(step, round_)
    x, y = one.batch(step, round_)
    again = other.batch(step, round_)
    assert torch.equal(x, again[0])
    assert torch.equal(y, again[1])


@given(members=st.lists(peers, min_size=1, max_size=8, unique=True), step=counters)
def test_the_other_members_do_not_matter(members, step):
    alone = batches(members[0]).starts(step)
    crowd = {peer: batches(peer).starts(step) for peer in reversed(members)}
    assert np.array_equal(alone, crowd[members[0]])


@given(first=st.integers(0, 50), length=st.integers(1, 20))
def test_a_run_taken_up_at_its_cursor_goes_on_as_if_it_never_stopped(first, length):
    whole = [batches().starts(step).tolist() for step in range(first + length)]
    resumed = [batches().starts(step).tolist() for step in range(first, first + length)]
    assert whole[first:] == resumed


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 300), counters)
def test_targets_are_the_next_tokens_and_every_window_lies_inside(batch_size, seq, extra, step):
    tokens = np.arange(seq + 1 + extra, dtype=np.uint16)
    x, y = batches(tokens=tokens, batch_size=batch_size, seq=seq).batch(step)
    assert x.shape == y.shape == (batch_size, seq)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x + 1, y)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert int(y.max()) <= seq + extra


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**40), st.integers(1, 3))
def test_recurring_samples_come_once_in_each_epoch_always_with_the_same_text(
    recurring, batch_size, first, epochs
):
    one = batches(batch_size=batch_size, recurring=recurring)
    start = first * recurring  # a multiple of both: at the beginning of an epoch, and of a batch
    steps = range(start, start + epochs * recurring)
    seen = [sample for step in steps for sample in one.samples(step)]
    for at in range(0, len(seen), recurring):
        assert sorted(seen[at : at + recurring]) == list(range(recurring))
    text = {}
    for step in steps:
        for sample, begin in zip(one.samples(step), one.starts(step).tolist(), strict=True):
            assert text.setdefault(sample, begin) == begin
    assert all(0 <= begin < len(TOKENS) - one.seq for begin in text.values())


def test_each_epoch_has_an_order_of_its_own_and_each_peer_samples_of_its_own():
    one, other = batches(recurring=64, batch_size=64), batches("bob", recurring=64, batch_size=64)
    assert one.samples(0) != one.samples(1) != one.samples(1, round=1)
    assert (
        sorted(one.starts(0))
        == sorted(one.starts(1))
        == sorted(one.starts(1, 1))
        != sorted(other.starts(0))
    )
    assert len(set(one.starts(0).tolist())) > 32, "hardly two at one place"
    assert sorted(one.starts(0)) != sorted(
        batches(recurring=64, batch_size=64, run_seed=2).starts(0)
    )


def test_recurring_samples_are_the_same_on_every_machine():
    """As first written down: another order would be another run."""
    one = batches(recurring=5, batch_size=7)
    assert one.samples(3) == (1, 4, 3, 2, 4, 1, 0), (
        "21 to 27: all but one of epoch 4, and three of the next"
    )
    assert one.starts(3).tolist() == [659, 324, 145, 520, 324, 659, 810]


@pytest.mark.parametrize("recurring", [-1, 2**20 + 1])
def test_impossible_numbers_of_samples_are_refused(recurring):
    with pytest.raises(BadData, match="number of recurring samples"):
        batches(recurring=recurring)


def test_seed_peer_round_and_step_each_change_the_batch():
    base = batches(batch_size=8).starts(3, 2).tolist()
    others = [
        batches(batch_size=8, run_seed=2).starts(3, 2),
        batches(batch_size=8, peer="bob").starts(3, 2),
        batches(batch_size=8).starts(3, 3),
        batches(batch_size=8).starts(4, 2),
        batches(batch_size=8).starts(2, 3),
    ]
    assert all(other.tolist() != base for other in others)


def test_a_larger_batch_begins_with_the_smaller_one():
    assert batches(batch_size=9).starts(5)[:4].tolist() == batches(batch_size=4).starts(5).tolist()


def philox(counter, key):
    """Philox4x64-10 as in its paper (Salmon et al., SC 2011), in Python's integers."""
    for i in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * counter[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * counter[2], 2**64)
        bumped = [
            (key[0] + i * 0x9E3779B97F4A7C15) % 2**64,
            (key[1] + i * 0xBB67AE8584CAA73B) % 2**64,
        ]
        counter = [high1 ^ counter[1] ^ bumped[0], low1, high0 ^ counter[3] ^ bumped[1], low0]
    return counter


def test_the_order_is_the_documented_one():
    digest = hashlib.sha256(b"farflock-data-order-v1 7 12D3Koo").digest()
    key = [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")]
    expected = [draw % (1000 - 8) for block in (1, 2) for draw in philox([block, 0, 1, 2], key)]
    order = batches(run_seed=7, peer="12D3Koo", batch_size=8)
    assert order.starts(step=1, round=2).tolist() == expected
    assert expected[:4] == [503, 970, 402, 513]


def test_all_positions_are_drawn_about_equally():
    tokens = np.arange(28, dtype=np.uint16)
    drawn = np.concatenate(
        [batches(tokens=tokens, batch_size=50).starts(step) for step in range(200)]
    )
    counts = np.bincount(drawn, minlength=20)
    assert len(counts) == 20
    assert (abs(counts - 500) < 5 * np.sqrt(500)).all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch_size": 0}, "use 1 or more of each"),
        ({"seq": 0}, "use 1 or more of each"),
        ({"seq": 1000}, "1000 tokens are too few for a sequence of 1000 and its next"),
    ],
)
def test_an_empty_batch_is_refused(change, sentence):
    with pytest.raises(BadData, match=sentence):
        batches(**change)


@pytest.mark.parametrize("cursor", [(-1, 0), (0, -1), (2**63, 0)])
def test_a_cursor_out_of_range_is_refused(cursor):
    with pytest.raises(BadData, match="out of range"):
        batches().batch(*cursor)


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
    return SampleBatches(TEXT, ALICE, 4, 8, start=start, **more)


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
    assert other.first(trained=99) == begin


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


def test_tokens_in_memory_and_prepared_data_both_become_batches():
    assert isinstance(batches_of(TEXT, ALICE, 4, 8), SampleBatches)
    made = batches_of(TOKENS, ALICE, 4, 8)
    assert made == batches()
    assert (made.cursor(5), made.first(7)) == (b"", 7)
