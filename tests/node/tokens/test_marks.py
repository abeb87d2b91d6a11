"""A mark is the top bit of a token, and the sign of the same memory."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.tokens.marks import MARK, MAX_MARKED_VOCABULARY, PLAIN, highest_id, marked

TOKENS = st.lists(st.tuples(st.integers(0, MAX_MARKED_VOCABULARY - 1), st.booleans()), min_size=1)


@given(TOKENS)
def test_ids_and_marks_come_back_in_both_readings(pairs):
    ids, counted = (np.array(each) for each in zip(*pairs, strict=True))
    tokens = marked(ids.astype(np.uint32), counted)
    assert tokens.dtype == np.uint32
    assert (tokens & PLAIN).tolist() == ids.tolist()
    assert ((tokens & MARK) == 0).tolist() == counted.tolist()
    assert (tokens.view(np.int32) >= 0).tolist() == counted.tolist()
    assert (tokens.view(np.int32) & PLAIN).tolist() == ids.tolist()
    assert highest_id(tokens, has_marks=True) == ids.max()


def test_without_marks_all_bits_are_the_id():
    assert highest_id(np.array([1, 2**32 - 1], np.uint32), has_marks=False) == 2**32 - 1
    assert highest_id(np.array([7, 2], np.uint16), has_marks=False) == 7
