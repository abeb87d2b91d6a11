"""The rows of a batch that each of several processes computes, and when."""

import math

from hypothesis import given
from hypothesis import strategies as st

from farflock.node.train.shared_task import shares_of

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
