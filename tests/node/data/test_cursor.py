"""A cursor is small, comes back as it was, and is refused if it is not one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.data.cursor import (
    MAX_CURSOR_BYTES,
    MAX_SOURCES,
    BadCursor,
    Cursor,
    SourcePlace,
    read_cursor,
)

NAME = b"8 bytes."
SIZES = (2**24, 2**32, 2**24, 2**8, 2**8)
places = st.builds(SourcePlace, *(st.integers(0, size - 1) for size in SIZES))
cursors = st.builds(
    Cursor,
    st.just(NAME),
    st.integers(0, 2**63 - 1),
    st.lists(places, min_size=1, max_size=MAX_SOURCES).map(tuple),
)
ONE = Cursor(NAME, 1234, (SourcePlace(1, 2, 3), SourcePlace(4, 5, 6)))


@given(cursors)
def test_a_cursor_comes_back_from_at_most_200_bytes(cursor):
    raw = cursor.encode()
    assert len(raw) <= MAX_CURSOR_BYTES == 200
    assert read_cursor(raw, NAME, len(cursor.places)) == cursor


@given(st.binary(max_size=400), st.integers(1, MAX_SOURCES))
def test_any_other_bytes_are_refused_in_one_sentence(raw, sources):
    with pytest.raises(BadCursor, match=r"is damaged .*; move it away") as caught:
        read_cursor(raw, NAME, sources)
    assert "\n" not in str(caught.value)


@given(st.integers(0, len(ONE.encode()) - 1), st.integers(1, 255))
def test_a_changed_byte_is_found(place, change):
    raw = bytearray(ONE.encode())
    raw[place] ^= change
    with pytest.raises(BadCursor, match="is damaged"):
        read_cursor(bytes(raw), NAME, 2)


@given(st.integers(0, len(ONE.encode()) - 1))
def test_a_cut_cursor_is_refused(size):
    with pytest.raises(BadCursor, match=f"it has {size} bytes"):
        read_cursor(ONE.encode()[:size], NAME, 2)


def test_the_cursor_of_another_stream_is_refused():
    with pytest.raises(BadCursor, match="of another run, or of other data; move it away"):
        read_cursor(ONE.encode(), b"another.", 2)


def test_a_cursor_of_more_samples_than_there_can_be_is_refused():
    with pytest.raises(BadCursor, match="contradicts itself"):
        read_cursor(Cursor(NAME, 2**63, ONE.places).encode(), NAME, 2)


def test_the_bytes_are_those_of_the_description():
    assert ONE.encode().hex() == (
        "0102" + "3820627974 65732e" + "d204000000000000" + "010000000200000003000000"
        "040000000500000006000000" + "829d3792"
    ).replace(" ", "")
