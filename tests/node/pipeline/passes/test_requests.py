"""Requests to stages and their answers: read as they were written, and nothing else is."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.pipeline.passes import requests as said
from farflock.node.pipeline.passes.requests import (
    Backward,
    BadRequest,
    Done,
    Forward,
    decode_answer,
    decode_request,
    encode,
)
from farflock.swarm.messages import MAX_BODY_BYTES, MAX_CODECS, MAX_STAGES, CodecId

COUNT, ROUND = st.integers(0, 2**62), st.integers(-1, 2**62)
STAGE, SOURCE = st.integers(0, MAX_STAGES - 1), st.integers(-1, MAX_STAGES - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
VERSION = st.none() | st.builds(said.Version, ROUND, COUNT)
SAMPLES = st.lists(COUNT, min_size=1, max_size=said.MAX_VISIT).map(tuple)
VISIT = st.none() | st.builds(said.Visit, SAMPLES, st.binary(max_size=8 * said.MAX_VISIT))
NAMED = st.builds(CodecId, st.text(max_size=64), st.integers(0, 2**32 - 1), st.binary(max_size=8))
CODEC = st.none() | NAMED
REQUESTS = st.one_of(
    st.builds(Forward, COUNT, STAGE, SOURCE, ROUND, VISIT, CODEC, CODEC),
    st.builds(Backward, COUNT, STAGE, SOURCE, ROUND, COUNT, VERSION, VISIT, CODEC, CODEC),
    st.builds(said.HeldOutForward, COUNT, STAGE, SOURCE, ROUND, CODEC, CODEC),
    st.builds(said.Confirm, COUNT, STAGE, COUNT),
    st.builds(said.Revoke, COUNT, STAGE, COUNT),
)
ANSWERS = st.one_of(
    st.builds(
        Done, COUNT, COUNT, st.floats(0, 1e6), st.none() | FINITE, st.floats(0, 1e6), VERSION
    ),
    st.builds(said.Gone, ROUND, st.booleans()),
    st.builds(
        said.Lacks, st.lists(st.integers(0, said.MAX_VISIT - 1), max_size=said.MAX_VISIT).map(tuple)
    ),
    st.builds(said.Foreign, st.lists(NAMED, max_size=MAX_CODECS).map(tuple)),
    st.builds(said.Busy),
    st.builds(said.Stale, ROUND),
    st.builds(said.Refused, st.text(max_size=200), st.sampled_from([None, "input", "gradient"])),
    st.builds(said.NotFinite),
    st.builds(said.Merged),
    st.builds(said.Unknown),
)


@given(REQUESTS)
def test_a_request_is_read_as_it_was_written(request):
    assert decode_request(encode(request)) == request
    assert len(encode(request)) < MAX_BODY_BYTES
    with pytest.raises(BadRequest):
        decode_answer(encode(request))


@given(ANSWERS)
def test_an_answer_is_read_as_it_was_written(answer):
    assert decode_answer(encode(answer)) == answer
    assert len(encode(answer)) < MAX_BODY_BYTES
    with pytest.raises(BadRequest):
        decode_request(encode(answer))


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(raw):
    for decode in (decode_request, decode_answer):
        try:
            found = decode(raw)
        except BadRequest:
            continue
        assert decode(encode(found)) == found


@given(REQUESTS, st.data())
def test_a_request_that_was_cut_is_refused(request, data):
    raw = encode(request)
    with pytest.raises(BadRequest):
        decode_request(raw[: data.draw(st.integers(0, len(raw) - 1))])


FIELDS = ["forward", 5, 1, 0, 3]
WRONG = {
    "a number below 0": (1, -1),
    "a stage below 0": (2, -1),
    "a stage too many": (2, MAX_STAGES),
    "a source below that of tokens": (3, -2),
    "a round below all": (4, -2),
    "a round that is no number": (4, "3"),
    "a number that does not fit": (1, 2**63),
    "another tag": (0, "sideways"),
}


@pytest.mark.parametrize(("place", "value"), WRONG.values(), ids=WRONG.keys())
def test_a_field_out_of_its_bounds_is_refused(place, value):
    assert decode_request(msgspec.msgpack.encode(FIELDS)) == Forward(5, 1, 0, 3)
    fields = [*FIELDS[:place], value, *FIELDS[place + 1 :]]
    with pytest.raises(BadRequest, match="not a request"):
        decode_request(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xc1", b"\xa2\xff\xff", b"\x91" * 5000, msgspec.msgpack.encode(["refused", "x" * 201])],
)
def test_odd_bytes_are_refused(raw):
    for decode in (decode_request, decode_answer):
        with pytest.raises(BadRequest):
            decode(raw)


def test_a_peer_that_knows_no_versions_is_understood_and_understands():
    """The version is the last field: it has a default if it is missing; others are ignored."""
    old = msgspec.msgpack.encode(["backward", 1, 2, 1, 5, 3])
    assert decode_request(old) == Backward(1, 2, 1, 5, 3, None)
    assert decode_answer(msgspec.msgpack.encode(["done", 7, 1, 0.5, None, 0.0])) == Done(7, 1, 0.5)
    later = msgspec.msgpack.decode(encode(Done(7, 1, 0.5, version=said.Version(4, 9))))
    assert decode_answer(msgspec.msgpack.encode([*later, "more"])) == Done(
        7, 1, 0.5, version=said.Version(4, 9)
    )
