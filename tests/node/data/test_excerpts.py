"""A few documents to look at: whole ones, drawn by the seed alone, and nothing for a terminal."""

import numpy as np
import pytest

from farflock.node.data.excerpts import MAX_CHARS, TokenPlace, document_around, drawn_places, shown


def test_a_seed_draws_the_same_tokens_each_about_as_often():
    sizes = [[10, 30], [], [60]]
    assert drawn_places(sizes, 1, 5) == drawn_places(sizes, 1, 5)
    assert drawn_places(sizes, 1, 5) != drawn_places(sizes, 2, 5)
    found = drawn_places(sizes, 1, 2000)
    assert {(place.source, place.shard) for place in found} == {(0, 0), (0, 1), (2, 0)}
    assert all(0 <= place.token < sizes[place.source][place.shard] for place in found)
    assert 1100 < sum(place.source == 2 for place in found) < 1300


def test_nothing_is_drawn_from_nothing():
    assert drawn_places([[], []], 1, 5) == []
    assert drawn_places([[1]], 1, 1) == [TokenPlace(0, 0, 0)]


@pytest.mark.parametrize(
    ("token", "document"), [(0, [1, 2, 0]), (2, [1, 2, 0]), (3, [0]), (4, [3, 0]), (5, [3, 0])]
)
def test_the_document_of_a_token_is_whole(token, document):
    tokens = np.array([1, 2, 0, 0, 3, 0], dtype=np.uint16)
    assert document_around(tokens, 0, token).tolist() == document


def test_what_is_shown_is_one_short_line_that_no_terminal_obeys():
    assert shown("a\n\n  b\x1b[2Jc") == "a b [2Jc"
    assert len(shown("ab" * 1000)) == MAX_CHARS
    assert shown("") == ""
