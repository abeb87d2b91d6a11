"""Pieces of work over threads: results in order, the first error, and no thread for one piece."""

import threading

import pytest

from farflock.optimizers.parts.spread import Threads, in_turn, spread_over


@pytest.fixture(params=[1, 2, 3])
def spread(request):
    made = spread_over(request.param)
    yield made
    if isinstance(made, Threads):
        made.close()


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_results_are_in_the_order_of_the_items(spread, count):
    assert spread(lambda item: item * item, range(count)) == [item**2 for item in range(count)]


def test_the_first_failed_piece_is_told(spread):
    def fails(item):
        if item % 3 == 2:
            raise ValueError(str(item))

    with pytest.raises(ValueError, match=r"^2$"):
        spread(fails, range(9))
    assert spread(str, [1, 2]) == ["1", "2"]


def test_pieces_are_done_at_the_same_time_and_a_single_one_by_the_caller():
    threads, meeting = Threads(2), threading.Barrier(2)
    try:
        assert sorted(threads(lambda _: meeting.wait(10.0), range(2))) == [0, 1]
        (name,) = threads(lambda _: threading.current_thread().name, [0])
        assert name == threading.current_thread().name
    finally:
        threads.close()


def test_one_thread_is_the_calling_one():
    assert spread_over(1) is in_turn
