"""A trainer draws batches that a thread has made, and is never held up by one that is not there."""

import threading

import pytest
import torch

from farflock.node.data.coming_shards import ReadingStopped
from farflock.node.model.batches_ahead import BatchesAhead, is_ready


class Slow:
    """Batches that are there once they are let through."""

    batch_size, seq = 2, 3

    def __init__(self):
        self.open, self.error, self.made = threading.Event(), None, []

    def batch(self, step):
        assert self.open.wait(10)
        if self.error is not None:
            raise self.error
        self.made.append(step)
        return torch.full((2, 3), step), torch.full((2, 3), step + 1)

    def cursor(self, step):
        return bytes([step])


def until_ready(batches, step):
    """Ask until the thread has made a batch, or failed at it."""
    while not batches.is_ready(step):
        threading.Event().wait(0.001)


def test_a_batch_is_ready_once_it_is_made_and_the_next_one_is_made_meanwhile():
    slow = Slow()
    batches = BatchesAhead(slow)
    assert not batches.is_ready(5)
    assert not is_ready(batches, 5)
    slow.open.set()
    until_ready(batches, 5)
    until_ready(batches, 6)
    assert slow.made[:2] == [5, 6]
    assert batches.batch(5)[0][0, 0] == 5
    assert batches.batch(6)[1][0, 0] == 7
    assert batches.batch(1)[0][0, 0] == 1, "an older one is made when it is asked for"
    assert batches.cursor(6) == b"\x06"


def test_what_makes_them_fails_where_it_is_drawn_but_a_stop_is_no_failure():
    slow = Slow()
    slow.open.set()
    slow.error = ReadingStopped()
    batches = BatchesAhead(slow)
    for _ in range(20):
        assert not batches.is_ready(0)
    slow.error = OSError(28, "No space left")
    with pytest.raises(OSError, match="No space"):
        until_ready(batches, 10)


def test_other_batches_are_always_ready():
    assert is_ready(Slow(), 3)
