"""Marks on tokens: the top bit of 32 says that the loss leaves a token out as a target.

In a conversation only the answers are learned; the tokens of questions and of the headers of turns
have a mark. Read as a signed number, a token with a mark is negative.
"""

import numpy as np
from numpy.typing import NDArray

MAX_MARKED_VOCABULARY = 2**31
MARK = np.uint32(2**31)
PLAIN = 2**31 - 1  # all bits of a token but its mark


def marked(ids: NDArray[np.uint32], counted: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Return ids (n,) with a mark on each that does not count, where `counted` (n,) is false."""
    return np.where(counted, ids, ids | MARK)


def highest_id(tokens: NDArray[np.uint16] | NDArray[np.uint32], has_marks: bool) -> int:
    """Return the highest id among tokens, of which there is at least one and which may have
    marks."""
    return int((tokens & np.uint32(PLAIN)).max() if has_marks else tokens.max())
