"""The roll has one root for one history, counts uses and votes, and nothing else decodes as one."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.chunk_store import digest_of
from farflock.swarm.messages import MAX_CHUNK_BYTES
from farflock.swarm.protocol.roll import (
    FOUNDERS,
    MAX_ADMITTED,
    MAX_ROLL_BYTES,
    Admittance,
    BadRoll,
    decode_roll,
    first_roll,
)

ONE, OTHER = [bytes([1]) * 32, 1, 1], [bytes([2]) * 32, 1, 1]

CAPABILITIES = [Admittance(bytes([number]) * 32, 4, 2) for number in range(1, 4)]
additions = st.lists(
    st.tuples(st.sampled_from([f"k{n}" for n in range(8)]), st.sampled_from(CAPABILITIES)),
    max_size=12,
)


@given(additions, st.integers(0, 12))
def test_a_roll_depends_on_its_additions_and_not_on_how_they_were_cut_into_views(added, cut):
    at_once = first_roll("f").with_keys(added)
    in_two = first_roll("f").with_keys(added[:cut]).with_keys(added[cut:])
    assert at_once.root == in_two.root
    assert at_once.root == digest_of(at_once.encoded)


@given(additions)
def test_it_comes_back_from_its_chunk(added):
    roll = first_roll("f").with_keys(added)
    assert decode_roll(roll.encoded) == roll


@given(additions)
def test_each_key_counts_once_for_the_capability_that_let_it_in(added):
    roll, first = first_roll("f").with_keys(added), {}
    for key, capability in added:
        first.setdefault(key, capability)
    for capability in CAPABILITIES:
        assert roll.used(capability.capability) == list(first.values()).count(capability)
    assert all(key in roll for key in first)
    assert len(roll) == 1 + len(first)
    assert roll.used(FOUNDERS) == 1


@given(additions, st.sets(st.sampled_from([f"k{n}" for n in range(9)])))
def test_votes_that_were_taken_up_stay_whatever_comes_later(added, voting):
    roll = first_roll("f").with_keys(added)
    listed = {key for key in voting if key in roll}
    with_votes = roll.with_votes(voting)
    assert with_votes.voting == {"f", *listed}
    later = with_votes.with_keys([("late", CAPABILITIES[0])]).with_votes(["late"])
    assert later.voting == {"f", "late", *listed}
    assert decode_roll(later.encoded) == later
    assert with_votes.with_votes(listed) is with_votes


def test_other_keys_or_another_order_give_another_root():
    roll = first_roll("f")
    roots = {
        roll.with_keys(added).root
        for added in (
            [],
            [("a", CAPABILITIES[0])],
            [("a", CAPABILITIES[1])],
            [("a", CAPABILITIES[0]), ("b", CAPABILITIES[0])],
            [("b", CAPABILITIES[0]), ("a", CAPABILITIES[0])],
        )
    }
    assert len(roots) == 5


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_roll_in_its_one_form_or_refused(raw):
    try:
        roll = decode_roll(raw)
    except BadRoll:
        return
    assert roll.encoded == raw


@pytest.mark.parametrize(
    "entries",
    [
        [[ONE, ["a"], []], [OTHER, ["a"], []]],
        [[ONE, ["a", "a"], []]],
        [[ONE, ["a"], []], [ONE, ["b"], []]],
        [[ONE, [], []]],
        [[ONE, ["a" * 65], []]],
        [[[b"short", 1, 1], ["a"], []]],
        [[[ONE[0], 2**16 + 1, 1], ["a"], []]],
        [[[ONE[0], 1, 65], ["a"], []]],
        [[ONE, ["a"], [], "more"]],
        [[ONE, ["a"], [1]]],
        [[ONE, ["a"], [0, 0]]],
        [[ONE, ["a", "b"], [1, 0]]],
    ],
)
def test_a_key_or_capability_that_is_named_twice_or_is_none_is_refused(entries):
    with pytest.raises(BadRoll):
        decode_roll(msgspec.msgpack.encode(entries))


def test_the_fullest_roll_fits_its_bound_and_one_key_more_is_refused():
    keys = [f"{number:052}" for number in range(MAX_ADMITTED)]
    entries = [
        [[number.to_bytes(32, "big"), 2**16, 64], [key], [0]] for number, key in enumerate(keys)
    ]
    full = msgspec.msgpack.encode(entries)
    assert len(full) <= MAX_ROLL_BYTES <= MAX_CHUNK_BYTES
    assert len(decode_roll(full)) == MAX_ADMITTED
    entries[0][1].append("one more")
    with pytest.raises(BadRoll):
        decode_roll(msgspec.msgpack.encode(entries))
