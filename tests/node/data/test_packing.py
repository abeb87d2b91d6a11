"""A shard's samples hold its documents by next fit, and follow from its tokens and a length."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.data.packing import sample_starts

END = 0
shards = st.lists(st.integers(1, 40), min_size=0, max_size=30)


def shard(sizes):
    """Documents of these sizes, the end of text included."""
    return np.concatenate(
        [np.zeros(0, dtype=np.uint16), *(np.append(np.ones(n - 1, np.uint16), END) for n in sizes)]
    ).astype(np.uint16)


def next_fit(sizes, length):
    """The samples one document after the other: each one's first token."""
    total, begin, starts = sum(sizes), 0, [0]  # of the open sample, which takes what fits
    for size in sizes:
        end = begin + size
        if size <= length:
            if end > starts[-1] + length:
                starts.append(begin)
        else:
            while end > starts[-1] + length:
                starts.append(starts[-1] + length)
        begin = end
    if total < length:
        return []
    return sorted({min(start, total - length) for start in starts})


@given(shards, st.integers(1, 50))
def test_samples_are_those_of_next_fit(sizes, length):
    assert sample_starts(shard(sizes), END, length).tolist() == next_fit(sizes, length)


@given(shards, st.integers(1, 50))
def test_every_token_is_in_a_sample_and_what_fits_is_whole_in_one(sizes, length):
    starts = sample_starts(shard(sizes), END, length)
    if sum(sizes) < length:
        assert not len(starts)
        return
    held = np.zeros(sum(sizes), dtype=bool)
    for start in starts:
        held[start : start + length] = True
    assert held.all()
    ends = np.cumsum(sizes)
    for begin, end in zip(ends - sizes, ends, strict=True):
        if end - begin <= length:
            assert any(start <= begin and end <= start + length for start in starts)
    assert len(starts) <= 2 * sum(sizes) / length + 1


def test_the_first_document_that_does_not_fit_opens_the_next_sample():
    # 5 and 4 fit into 10; 3 is begun there and comes again, with 6; 8 is alone
    assert sample_starts(shard([5, 4, 3, 6, 8, 9]), END, 10).tolist() == [0, 9, 18, 25]


def test_a_document_that_fits_into_none_goes_on_where_it_was_cut():
    assert sample_starts(shard([4, 33, 3]), END, 10).tolist() == [0, 10, 20, 30]


def test_a_text_without_any_end_is_one_document():
    assert sample_starts(np.arange(25, dtype=np.uint16), None, 10).tolist() == [0, 10, 15]


@pytest.mark.parametrize("count", [2**21, 2**21 - 1])
def test_a_shard_of_nothing_but_ends_is_packed_like_any_other(count):
    starts = sample_starts(np.zeros(count, dtype=np.uint16), END, 2**16)
    assert len(starts) == -(-count // 2**16)
