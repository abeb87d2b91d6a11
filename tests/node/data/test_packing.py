"""Windows are full, no token is in two of them, and hardly a document is cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.data.packing import document_lengths, packing_of

END = 9
documents = st.lists(st.integers(1, 40), max_size=60)
windows = st.integers(1, 30)


def packed(lengths, length):
    return packing_of(np.array(lengths, dtype=np.int64), length)


def by_hand(lengths, length):
    """The runs of each window, as the module's docstring tells it, with a list of pieces."""
    whole, pieces, start = [], [], 0
    for document in lengths:
        while document >= length:
            whole.append([(start, length)])
            start, document = start + length, document - length
        if document:
            pieces.append((start, document))
        start += document
    while sum(size for _, size in pieces) >= length:
        whole.append(window := [])
        gap = length
        while gap:
            fitting = [piece for piece in pieces if piece[1] <= gap]
            # the newest of the longest
            first, size = max(reversed(fitting or pieces), key=lambda piece: piece[1])
            pieces.remove((first, size))
            if size > gap:
                pieces.append((first + gap, size - gap))
            window.append((first, min(size, gap)))
            gap -= min(size, gap)
    return whole


@given(documents, windows)
def test_windows_are_those_of_the_plain_algorithm(lengths, length):
    packing = packed(lengths, length)
    assert [packing.runs(window) for window in range(len(packing))] == by_hand(lengths, length)


@given(documents, windows)
def test_there_are_as_many_windows_as_fit_and_each_is_full(lengths, length):
    packing = packed(lengths, length)
    assert len(packing) == sum(lengths) // length
    tokens = np.arange(sum(lengths), dtype=np.uint32)
    seen = [packing.window(window, tokens) for window in range(len(packing))]
    assert all(len(window) == length for window in seen)
    used = np.concatenate([*seen, tokens[:0]])
    assert len(np.unique(used)) == len(used), "no token is in two windows"
    assert len(used) == 0 or int(used.max()) < sum(lengths)


@given(documents, windows)
def test_a_short_document_is_whole_unless_a_window_had_room_for_none(lengths, length):
    packing = packed(lengths, length)
    ends = np.cumsum(lengths)
    for window in range(len(packing)):
        runs = packing.runs(window)
        cut = [run for run in runs if sum(run) not in ends and run[1] < length]
        assert len(cut) <= 1
        assert not cut or cut == runs[-1:], "only to fill the gap that is left"


def test_documents_as_long_as_a_window_are_never_cut():
    packing = packed([7, 3, 7, 4, 7], 7)
    assert [packing.runs(window) for window in range(4)] == [
        [(0, 7)],
        [(10, 7)],
        [(21, 7)],
        [(17, 4), (7, 3)],
    ]


def test_where_nothing_fits_the_longest_piece_is_cut_and_its_tail_comes_later():
    packing = packed([6, 5, 5], 8)
    assert [packing.runs(window) for window in range(2)] == [
        [(0, 6), (11, 2)],
        [(6, 5), (13, 3)],
    ]


@pytest.mark.parametrize("window", [-1, 2])
def test_there_is_no_window_before_the_first_or_after_the_last(window):
    with pytest.raises(IndexError, match=f"no window {window} of 2"):
        packed([6, 5, 5], 8).runs(window)


def test_a_window_has_the_type_of_its_tokens_and_is_a_copy():
    for dtype in (np.uint16, np.uint32):
        tokens = np.arange(70_000).astype(dtype)
        window = packed([70_000], 69_999).window(0, tokens)
        assert window.dtype == dtype
        window[:] = 0
        assert tokens[1] == 1


@given(st.lists(st.integers(0, END), max_size=80))
def test_documents_end_with_the_end_of_text_and_the_last_may_have_none(tokens):
    expected, length = [], 0
    for token in tokens:
        length += 1
        if token == END:
            expected.append(length)
            length = 0
    expected += [length] if length else []
    assert document_lengths(np.array(tokens, dtype=np.uint16), END).tolist() == expected


def test_documents_that_span_the_parts_of_a_scan_are_found():
    tokens = np.zeros(9_000_000, dtype=np.uint16)
    ends = [0, 5, 4_194_303, 4_194_304, 8_388_607, 8_999_998]
    tokens[ends] = END
    lengths = document_lengths(tokens, END)
    assert (np.cumsum(lengths) - 1).tolist() == [*ends, 8_999_999]


@given(st.lists(st.integers(END - 1, END), min_size=1, max_size=200), st.integers(2, 20))
def test_too_many_documents_are_joined_to_no_more_than_allowed(tokens, max_documents):
    array = np.array(tokens, dtype=np.uint16)
    exact = document_lengths(array, END)
    lengths = document_lengths(array, END, max_documents)
    assert len(lengths) <= max_documents
    assert lengths.sum() == len(tokens)
    assert set(np.cumsum(lengths)) <= set(np.cumsum(exact)), "none is cut"
    if tokens.count(END) < max_documents:
        assert lengths.tolist() == exact.tolist()


def test_what_follows_the_last_end_is_one_of_the_documents_allowed():
    tokens = np.array([1, END] * 4 + [1], dtype=np.uint16)
    assert document_lengths(tokens, END, 5).tolist() == [2, 2, 2, 2, 1]
    assert document_lengths(tokens, END, 4).tolist() == [4, 4, 1]


def test_a_shard_of_nothing_but_ends_takes_bounded_memory_and_packs():
    lengths = document_lengths(np.full(3_000_000, END, dtype=np.uint16), END, 1 << 16)
    assert 1 << 14 < len(lengths) <= 1 << 16
    assert len(packing_of(lengths, 2049)) == 3_000_000 // 2049


def shares_cut(lengths, length):
    """Of the documents that fit in a window, the share that a packing cuts, that are in no window,
    and that chopping at multiples of a window cuts."""
    packing = packing_of(lengths, length)
    ends = np.cumsum(lengths)
    starts, short = ends - lengths, lengths <= length
    first_run = dict(zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True))
    runs = np.array([first_run.get(start, 0) for start in starts.tolist()])
    cut, left_out = (runs > 0) & (runs < lengths) & short, (runs == 0) & short
    chopped = (starts // length != (ends - 1) // length) & short
    return tuple(float(which.sum() / short.sum()) for which in (cut, left_out, chopped))


def test_far_fewer_documents_are_cut_than_by_chopping():
    """Lengths as of web pages: log-normal, 400 tokens in the median and 820 in the mean."""
    generator = np.random.Generator(np.random.Philox(key=1))
    lengths = np.maximum(generator.lognormal(np.log(400), 1.2, size=20_000).astype(np.int64), 2)
    cut, left_out, chopped = shares_cut(lengths, 2049)
    assert cut < 0.01
    assert left_out < 0.005
    assert chopped > 0.2
