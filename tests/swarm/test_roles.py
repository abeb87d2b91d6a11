"""A member's role as its record states it, and as others read it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.messages import MAX_STAGES
from farflock.swarm.roles import EVERY, NOTHING, is_role, role_of, stage_of


@given(st.integers(NOTHING, MAX_STAGES - 1))
def test_every_part_is_read_as_it_was_written(stage):
    assert stage_of(role_of(stage)) == stage
    assert is_role(role_of(stage))


def test_a_record_says_it_in_words():
    assert [role_of(stage) for stage in (EVERY, NOTHING, 0, 37)] == [
        "replica",
        "trainer",
        "stage:0",
        "stage:37",
    ]


@given(st.text(max_size=20))
def test_a_role_that_is_not_known_serves_nothing(role):
    stage = stage_of(role)
    assert stage == NOTHING or role_of(stage) == role


@pytest.mark.parametrize(
    "role",
    [
        "",
        "Replica",
        "replica ",
        "stage",
        "stage:",
        "stage:-1",
        "stage:01",
        "stage:1024",
        "stage:99999",
        "stage:1\n",
        "stage:٣",
    ],
)
def test_what_is_nearly_a_role_is_none(role):
    assert stage_of(role) == NOTHING
    assert not is_role(role)
