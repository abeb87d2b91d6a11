"""The standard library reads back every TOML that is written, and the text is always the same."""

import json
import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.run.toml import FOLDED, to_toml

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
)
values = st.one_of(scalars, st.lists(scalars, max_size=4))
tables = st.recursive(
    st.dictionaries(texts, values, min_size=1, max_size=4),
    lambda inner: st.dictionaries(texts, inner, min_size=1, max_size=3),
)


@given(st.dictionaries(texts, st.one_of(values, tables), max_size=4))
def test_what_is_written_is_read_back(table):
    text = to_toml(table)
    assert tomllib.loads(text) == table
    assert to_toml(tomllib.loads(text)) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_keeps_every_bit_and_its_sign(number):
    back = tomllib.loads(to_toml({"x": number}))["x"]
    assert (back, math.copysign(1, back)) == (number, math.copysign(1, number))


def test_none_is_left_out_and_tuples_are_arrays():
    assert tomllib.loads(to_toml({"a": None, "b": (1, 2), "c": {"d": None, "e": 1}})) == {
        "b": [1, 2],
        "c": {"e": 1},
    }


def test_it_reads_well():
    text = to_toml(
        {
            "top": 1,
            "run": {"name": "a b", "seed": 1},
            "method": {"name": "x", "options": {"outer": {"lr": 0.5}}},
        }
    )
    assert (
        text == 'top = 1\n\n[run]\nname = "a b"\nseed = 1\n\n[method]\nname = "x"\n\n'
        "[method.options.outer]\nlr = 0.5\n"
    )


@given(st.lists(st.lists(texts, max_size=60), min_size=1, max_size=30))
def test_no_array_makes_a_long_line_unless_one_of_its_items_is_long(rows):
    text = to_toml({"rows": rows})
    assert tomllib.loads(text) == {"rows": rows}
    longest = max(len(json.dumps(item, ensure_ascii=False)) for row in rows for item in [*row, ""])
    assert max(map(len, text.split("\n"))) <= max(FOLDED, 6 * longest) + len("rows = ,")


@pytest.mark.parametrize("name", ["with space", "dotted.name", "", "ünlaut", '"', "new\nline"])
def test_a_name_that_needs_quotes_gets_them(name):
    assert tomllib.loads(to_toml({name: {name: 1}})) == {name: {name: 1}}


def test_a_value_that_toml_cannot_hold_is_refused():
    with pytest.raises(TypeError):
        to_toml({"x": object()})
