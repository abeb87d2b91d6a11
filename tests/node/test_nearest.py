"""A misspelt name is answered by the nearest one; a strange one by all there are."""

from hypothesis import given
from hypothesis import strategies as st

from farflock.node.nearest import nearest

METHODS = {"local": 1, "ddp": 2, "diloco": 3, "noloco": 4}


def test_a_misspelt_name_is_answered_by_the_nearest_one():
    assert nearest("dilico", METHODS) == "did you mean 'diloco'?"
    assert nearest("nolocco", list(METHODS)) == "did you mean 'noloco'?"


def test_a_strange_name_is_answered_by_all_there_are_in_order():
    assert nearest("adam", METHODS) == "choose from ddp, diloco, local, noloco"
    assert nearest("x", []) == "choose from none"


def test_of_a_very_long_name_only_the_beginning_is_looked_at():
    assert nearest("diloco" + "o" * 10**6, METHODS).startswith("choose from")


@given(st.text())
def test_there_is_always_an_answer(word):
    assert nearest(word, METHODS)
