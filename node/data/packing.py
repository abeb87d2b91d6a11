"""Documents of a shard packed into samples, by next fit: a function of its tokens and the length.

A sample is a run of `length` tokens of the shard, so that it needs neither padding nor a mask. It
holds documents one after the other, as long as they fit. The first that does not fit whole is
begun, for its head fills the gap, and comes again: it opens the next sample. So no document that
fits into a sample is only ever seen cut. One that fits into none goes on in the next sample where
it was cut.

The last sample ends where the shard does. A shard with fewer than `length` tokens has none.
"""

import bisect
from array import array

import numpy as np
from numpy.typing import NDArray

from farflock.node.tokens.tokenizer import TokenIds


def sample_starts(tokens: TokenIds, end_of_text: int | None, length: int) -> NDArray[np.int64]:
    """Return the place of the first token of each sample of a shard: (samples,), ascending."""
    assert length > 0, "a sample has tokens"
    total = len(tokens)
    ends = memoryview(_ends(tokens, end_of_text).data)  # whose items are Python's own integers
    starts, start = array("q"), 0
    while start + length < total:
        stop = start + length
        cut = bisect.bisect_right(ends, stop)  # the first document that does not end here
        begin = ends[cut - 1] if cut else 0
        if begin <= start:  # all of it is of this document, as are the samples up to its end
            stop = start + (ends[cut] - 1 - start) // length * length
            starts.extend(range(start, stop, length))
            start = stop
        else:
            starts.append(start)
            start = begin if ends[cut] - begin <= length else stop
    if start < total and total >= length:
        starts.append(total - length)
    return np.array(starts, dtype=np.int64)


def _ends(tokens: TokenIds, end_of_text: int | None) -> NDArray[np.int64]:
    """Return the places after documents' ends; the last document may lack the end of text."""
    found = np.zeros(0, dtype=np.int64)
    if end_of_text is not None:
        found = np.flatnonzero(tokens == end_of_text).astype(np.int64) + 1
    if len(found) and int(found[-1]) == len(tokens):
        return found
    return np.append(found, np.int64(len(tokens)))
