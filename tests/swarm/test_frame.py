"""One frame on the wire: what was packed comes back, and everything else is refused without
allocating memory."""

import json
import math
import random
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm import frame as frames
from farflock.swarm.batch import BATCH_BYTES
from farflock.swarm.chunk_store import digest_of, is_intact
from farflock.swarm.frame import Frame, ProtocolViolation, message_kind, pack, unpack
from farflock.swarm.links import MAX_FRAME_BYTES
from farflock.swarm.messages import (
    MAX_BATCH_CHUNKS,
    MAX_BODY_BYTES,
    MAX_BUNDLES,
    MAX_CHANGES,
    MAX_CHUNK_BYTES,
    MAX_CODECS,
    MAX_EVALUATIONS,
    MAX_HOLDERS,
    MAX_INLINE_BYTES,
    MAX_LEFT_IDS,
    MAX_MEMBERS,
    MAX_PAYLOAD_CHUNKS,
    MAX_PAYLOADS,
    MAX_SAMPLE_CHARS,
    MAX_TRAIL,
    MAX_VALUE_BYTES,
    Accepted,
    Answer,
    Away,
    BranchAsk,
    BranchSign,
    Call,
    CodecId,
    DataHeld,
    DataQuery,
    Decided,
    Evaluated,
    Evaluation,
    EvaluationQuery,
    Forgotten,
    Heard,
    HeldState,
    Holds,
    Join,
    Keep,
    Key,
    Leave,
    Lineage,
    Load,
    LogQuery,
    Measuring,
    Message,
    Miss,
    Offer,
    PairAbort,
    PairAccept,
    PairCommit,
    PairHave,
    PairPropose,
    PairRefuse,
    Piece,
    Ping,
    Pong,
    Prepare,
    Probe,
    Probed,
    Promise,
    Propose,
    Reads,
    Reduced,
    Rejected,
    ReturnAsk,
    ReturnSign,
    Roll,
    StateOffer,
    StateQuery,
    Tally,
    Terms,
    TermsQuery,
    ViewQuery,
    Views,
    Want,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "frames.json"
HEAD_BYTES = 24
KEY = Key("weights/0", 7, 1)
A, B = bytes(range(32)), bytes(range(32, 64))
EVALUATION = Evaluation(7, 640, 2.5, 0.125, 3.5)
OFFER = Offer(KEY, A, (A, B), (5, 0), 1.5, 640, B, EVALUATION)
CALL = Call(3, b"forward", (((A, MAX_CHUNK_BYTES), (B, 5)),))

LINEAGE = Lineage(640, 5, A[:16], (b"one",))
TERMS = Terms(b"head", (b"record", b"another"))
SPECIMENS: tuple[Message, ...] = (
    Want(A, 65536, 131072, 262144, B),
    Piece(A, 65536, 131072, bytes(4)),
    Miss(B),
    Probe(9),
    Probed(9),
    OFFER,
    Reduced(KEY, A, 3, B, 1000, bytes([5, 0, 0, 0, 0, 0, 0, 0])),
    Holds(KEY, A, 3, B[:24], 5, True, False),
    Prepare(KEY, A, (2, 1)),
    Promise(KEY, A, (2, 1), (1, 0), b"value", (9, 4)),
    Propose(KEY, A, (2, 1), b"value"),
    Accepted(KEY, A, (2, 1), b"s" * 64),
    Rejected(KEY, A, (2, 1), (3, 0), (9, 4)),
    Decided(KEY, A, b"value", (2, 1), ((0, b"s" * 64), (2, b""))),
    LogQuery(KEY),
    Forgotten(KEY, 8, 15),
    PairPropose(OFFER),
    PairAccept(OFFER),
    PairRefuse(KEY, 8),
    PairHave(KEY, A, True),
    PairCommit(KEY),
    PairAbort(KEY),
    ViewQuery(4),
    Views((b"one", b"two")),
    Join(b"record"),
    Leave(A, b"s" * 64),
    StateQuery("state"),
    StateOffer("state", A, 6, B, A, 4096, 640, 90_000, 2.5),
    Ping(1.25),
    Pong(1.25, 77.5),
    CALL,
    Answer(7, 3, "ok", b"done", ((), ((B, 70),))),
    Heard(3),
    Keep((3, 8)),
    Tally(KEY, 640),
    Away(KEY),
    EvaluationQuery(),
    Evaluated((("p" * 52, EVALUATION),), "The king", answers=True),
    Measuring(40, 7),
    Load(7, 3.0, 1.5, 2**30, 60.0),
    Reads((CodecId("int4,int8", 1), CodecId("subspace:4+bf16,bf16", 7, B[:8]))),
    DataQuery(A, 65536),
    DataHeld(A, 65536, 4096, bytes([5, 0, 255])),
    BranchAsk(b"view"),
    BranchSign(A, b"s" * 64, 9),
    LINEAGE,
    Roll(A, -1, (HeldState(7, B, 640, A, 3),)),
    ReturnAsk(b"view", ((2, b"s" * 64),)),
    ReturnSign(A, b"s" * 64),
    TermsQuery(),
    TERMS,
)
KINDS = get_args(Message)


def body_of(message):
    return b"piece of a chunk" if isinstance(message, Piece) else b""


def sealed(message_bytes, body=b"", *, incarnation=1, version=frames.VERSION, flags=0, magic=b"FF"):
    """A frame with a correct checksum around any message bytes, as a hostile peer can make it."""
    head = struct.pack(
        "<2sBBQII", magic, version, flags, incarnation, len(message_bytes), len(body)
    )
    return head + struct.pack("<I", zlib.crc32(head + message_bytes)) + message_bytes + body


def refused_in_little_memory(packed):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolViolation):
            unpack(packed)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def small(kind):
    """Random fields of one message kind, within the limits, from a seed."""
    return st.integers(0, 2**32).map(lambda seed: filled(kind, random.Random(seed)))


def filled(kind, chance):
    key = Key(
        chance.choice(["", "weights/0", "ä" * 64]),
        chance.choice([0, 1, 2**62]),
        chance.choice([0, 255]),
    )
    many = chance.choice([0, 1, 7])
    offer = Offer(
        key,
        chance.randbytes(32),
        tuple(chance.randbytes(32) for _ in range(many)),
        tuple(chance.randrange(MAX_CHUNK_BYTES + 1) for _ in range(many)),
        chance.choice([0.0, 1.0, 1e18, chance.random()]),
        chance.choice([0, 2**62]),
        chance.randbytes(chance.choice([0, 32])),
        chance.choice([None, EVALUATION]),
    )
    ballot = (chance.choice([0, 5, 2**62]), chance.randrange(MAX_MEMBERS))
    fields = {
        "key": key,
        "offer": offer,
        "evaluation": offer.evaluation,
        "evaluations": (("p" * 52, EVALUATION),) * many,
        "sample": "ä" * chance.randrange(401),
        "head": chance.randbytes(1 + many),
        "records": (chance.randbytes(many),) * (1 + many),
        "percent": chance.randrange(101),
        "ballot": ballot,
        "promised": ballot,
        "accepted": chance.choice([None, ballot]),
        "value": chance.randbytes(chance.choice([0, 1, 1000])),
        "proof": chance.randbytes(64),
        "proofs": tuple((member, chance.randbytes(64)) for member in range(many)),
        "trail": chance.randbytes(8 * (many + 1)),
        **dict.fromkeys(("queue", "round_s"), chance.choice([0.0, 1e9, chance.random()])),
        "rate": chance.choice([1e-6, 1e9, 1 - chance.random()]),
        "resident_s": chance.choice([0.0, 1e9, chance.random()]),
        "codecs": tuple(
            CodecId("c" * chance.randrange(65), 7, chance.randbytes(8)) for _ in range(many)
        ),
        "first": chance.randrange(2**62),
        "root": chance.randbytes(32),
        "held": (HeldState(chance.randrange(2**62), offer.state),) * (many % 64)
        if kind is Roll
        else b"held" * many,
        "stage": chance.choice([-3, 0, 7]),
        "goodbyes": tuple((member, chance.randbytes(64)) for member in range(many)),
        "known": chance.randrange(2**62),
        "changes": chance.randbytes(12 * many),
        "more": chance.randbytes(4 * many),
        "floor": 9
        if kind is BranchSign
        else tuple(chance.choice([0, 9, 2**62]) for _ in range(many)),
        "mask": chance.randbytes(8),
        "views": tuple(chance.randbytes(50) for _ in range(many)),
        "record": chance.randbytes(200),
        "inline": tuple(chance.randbytes(many * 100) for _ in range(many // 2)),
        "stream": key.stream,
        "state": offer.state,
        "digests": offer.digests,
        "sizes": offer.sizes,
        "weight": offer.weight,
        **dict.fromkeys(
            ("ask", "over", "notes", "offered", "asks", "leave", "left", "answers"),
            chance.choice([False, True]),
        ),
        "packs": many == 7,
        "packed": many == 7,
        "sent_s": chance.uniform(-1e9, 1e9),
        "run_s": chance.uniform(-1e9, 1e9),
        "bundle": chance.randrange(MAX_BUNDLES),
        "view": offer.view,
        "digest": chance.randbytes(32),
        "request": chance.randbytes(chance.choice([0, 1000])),
        "body": chance.randbytes(chance.choice([0, 1000])),
        "verdict": chance.choice(["ok", "full", "failed", "late", "missing"]),
        "holders": tuple(("p" * 52,) * chance.randrange(4) for _ in range(many // 2)),
        "ids": tuple(chance.randrange(2**62) for _ in range(many)),
        "payloads": (((chance.randbytes(32), chance.randint(1, MAX_CHUNK_BYTES)),) * many,)
        * chance.randint(0, 4),
    }
    numbers = {"start", "stop", "size", "piece"}
    made = {}
    for name in kind.__struct_fields__:
        if name in numbers:
            made[name] = chance.randrange(MAX_CHUNK_BYTES + 1)
        else:
            made[name] = fields[name] if name in fields else chance.choice([0, 1, 2**62])
    return kind(**made)


@pytest.mark.parametrize("message", SPECIMENS, ids=lambda message: type(message).__name__)
def test_the_kind_of_a_message_is_its_tag(message):
    packed = pack(Frame(2**63, message, body_of(message)))
    assert message_kind(packed).decode() == type(message).__struct_config__.tag


def test_every_kind_of_message_has_a_specimen():
    assert [type(template) for template in SPECIMENS] == list(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_is_packed_comes_back(kind, data):
    message = data.draw(small(kind))
    body = data.draw(st.binary(max_size=200)) if kind is Piece else b""
    incarnation = data.draw(st.integers(0, 2**64 - 1))
    back = unpack(pack(Frame(incarnation, message, body)))
    assert (back.incarnation, back.message, bytes(back.body)) == (incarnation, message, body)


@pytest.mark.parametrize("message", SPECIMENS, ids=lambda message: type(message).__name__)
def test_every_truncation_extension_and_bit_flip_is_refused(message):
    packed = pack(Frame(12345, message, body_of(message)))
    for length in range(len(packed)):
        with pytest.raises(ProtocolViolation):
            unpack(packed[:length])
    for tail in (b"\x00", b"\xc0", packed):
        with pytest.raises(ProtocolViolation):
            unpack(packed + tail)
    covered = len(packed) - len(body_of(message))
    for bit in range(8 * covered):
        with pytest.raises(ProtocolViolation):
            unpack(flipped(packed, bit))


def flipped(packed, bit):
    altered = bytearray(packed)
    altered[bit // 8] ^= 1 << bit % 8
    return bytes(altered)


def test_a_bit_flip_in_a_piece_is_left_to_the_digest_of_its_chunk():
    body = b"a chunk of one piece"
    piece = Piece(digest_of(body), 0, len(body))
    packed = pack(Frame(12345, piece, body))
    assert is_intact(bytes(unpack(packed).body), piece.digest)
    for bit in range(8 * (len(packed) - len(body)), 8 * len(packed)):
        frame = unpack(flipped(packed, bit))
        assert (frame.incarnation, frame.message) == (12345, piece)
        assert not is_intact(bytes(frame.body), piece.digest)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_with_a_right_head_and_checksum_are_a_message_or_refused(raw):
    try:
        message = unpack(sealed(raw)).message
    except ProtocolViolation:
        return
    assert isinstance(message, KINDS)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SPECIMENS), st.integers(0, 10**6), st.integers(0, 255))
def test_an_altered_message_with_a_right_checksum_is_refused_or_keeps_every_limit(
    message, place, value
):
    raw = bytearray(msgspec.msgpack.encode(message))
    raw[place % len(raw)] = value
    try:
        altered = unpack(sealed(bytes(raw), body_of(message))).message
    except ProtocolViolation:
        return
    assert msgspec.convert(msgspec.to_builtins(altered, builtin_types=(bytes,)), Message) == altered


def test_an_evaluation_takes_at_most_64_bytes():
    longest = Evaluation(2**62, 2**62, 1e6, 1e6, 1e6)
    said = Evaluated((("p" * 64, longest),) * MAX_EVALUATIONS, "é" * MAX_SAMPLE_CHARS, answers=True)
    assert len(pack(Frame(2**64 - 1, said))) <= 35_000
    assert len(msgspec.msgpack.encode(longest)) <= 64


def test_the_head_is_as_documented():
    packed = pack(Frame(0x0102030405060708, Piece(A, 0, 3), b"abc"))
    magic, version, flags, incarnation, message_bytes, body_bytes, checksum = struct.unpack(
        "<2sBBQIII", packed[:24]
    )
    assert (magic, version, flags, incarnation) == (b"FF", frames.VERSION, 0, 0x0102030405060708)
    assert HEAD_BYTES + message_bytes + body_bytes == len(packed)
    assert packed[-3:] == b"abc"
    assert checksum == zlib.crc32(packed[:20] + packed[24:-3])


@pytest.mark.parametrize(
    "wrong", [{"magic": b"GG"}, {"flags": 1}, {"version": frames.VERSION + 1}], ids=str
)
def test_another_magic_flag_or_version_is_refused(wrong):
    raw = msgspec.msgpack.encode(Leave())
    assert unpack(sealed(raw)).message == Leave()
    with pytest.raises(ProtocolViolation):
        unpack(sealed(raw, **wrong))


def test_a_body_is_refused_on_every_message_that_carries_none():
    for message in SPECIMENS:
        raw = msgspec.msgpack.encode(message)
        if isinstance(message, Piece):
            assert bytes(unpack(sealed(raw, b"x")).body) == b"x"
        else:
            with pytest.raises(ProtocolViolation, match="carries no body"):
                unpack(sealed(raw, b"x"))


def test_a_frame_longer_than_the_limit_is_refused_and_never_made():
    biggest = MAX_FRAME_BYTES - len(pack(Frame(0, Piece(A, 0, 0))))
    assert len(pack(Frame(0, Piece(A, 0, 0), bytes(biggest)))) == MAX_FRAME_BYTES
    with pytest.raises(AssertionError, match="over the limit"):
        pack(Frame(0, Piece(A, 0, 0), bytes(biggest + 1)))
    with pytest.raises(ProtocolViolation):
        unpack(sealed(msgspec.msgpack.encode(Piece(A, 0, 0)), bytes(biggest + 1)))


def limited(message, **fields):
    return msgspec.msgpack.encode(msgspec.structs.replace(message, **fields))


OVER_THE_LIMIT = {
    "too many digests": limited(
        OFFER, digests=(A,) * (MAX_BUNDLES + 1), sizes=(1,) * (MAX_BUNDLES + 1)
    ),
    "fewer sizes than digests": limited(OFFER, sizes=(5,)),
    "fewer sizes than digests in a pair's offer": msgspec.msgpack.encode(
        PairPropose(msgspec.structs.replace(OFFER, sizes=()))
    ),
    "short digest": limited(Miss(A), digest=A[:31]),
    "long digest": limited(Miss(A), digest=A + b"x"),
    "negative start": limited(Want(A, 0, 1), start=-1),
    "chunk too large": limited(Piece(A, 0, 1), size=MAX_CHUNK_BYTES + 1),
    "batch too large": limited(Want(A, 0, 1), more=bytes(32 * MAX_BATCH_CHUNKS)),
    "answer to a batch too large": limited(Piece(A, 0, 1), more=bytes(4 * MAX_BATCH_CHUNKS)),
    "bundle too high": limited(SPECIMENS[6], bundle=MAX_BUNDLES),
    "mask too short": limited(SPECIMENS[6], mask=bytes(7)),
    "changes too long": limited(SPECIMENS[7], changes=bytes(12 * MAX_CHANGES + 1)),
    "member too high": limited(SPECIMENS[8], ballot=(1, MAX_MEMBERS)),
    "value too long": limited(SPECIMENS[10], value=bytes(MAX_VALUE_BYTES + 1)),
    "proof too long": limited(SPECIMENS[11], proof=bytes(65)),
    "too many proofs": limited(SPECIMENS[13], proofs=((0, b""),) * (MAX_MEMBERS + 1)),
    "too many views": limited(SPECIMENS[23], views=(b"v",) * 17),
    "too many views of a line": limited(LINEAGE, views=(b"v",) * (MAX_TRAIL + 1)),
    "trail too long": limited(LINEAGE, trail=bytes(8 * MAX_TRAIL + 1)),
    "no trail": limited(LINEAGE, trail=b""),
    "signature of a branch too long": limited(BranchSign(A), proof=bytes(65)),
    "record too long": limited(SPECIMENS[24], record=bytes(4097)),
    "head too long": limited(TERMS, head=bytes(513)),
    "no head": limited(TERMS, head=b""),
    "too many records": limited(TERMS, records=(b"x",) * (MAX_MEMBERS + 1)),
    "a member's record too long": limited(TERMS, records=(bytes(4097),)),
    "no record": limited(TERMS, records=()),
    "stream name too long": limited(SPECIMENS[26], stream="x" * 65),
    "round too high": limited(LogQuery(KEY), key=Key("s", 2**62 + 1)),
    "attempt too high": limited(LogQuery(KEY), key=Key("s", 0, 256)),
    "negative weight": limited(OFFER, weight=-1.0),
    "negative loss": limited(OFFER, evaluation=Evaluation(7, 640, -1.0, 0.1)),
    "loss too high": limited(OFFER, evaluation=Evaluation(7, 640, 1e7, 0.1)),
    "round of an evaluation too high": limited(
        OFFER, evaluation=Evaluation(2**62 + 1, 0, 1.0, 0.1)
    ),
    "too many evaluations": limited(Evaluated(()), evaluations=(("p", EVALUATION),) * 257),
    "more than all of an evaluation": limited(Measuring(40, 7), percent=101),
    "sample too long": limited(Evaluated(()), sample="x" * 401),
    "unknown tag": msgspec.msgpack.encode(["run", "rm -rf"]),
    "a map": msgspec.msgpack.encode({"type": "leave"}),
    "request too long": limited(CALL, request=bytes(MAX_BODY_BYTES + 1)),
    "too many payloads": limited(CALL, payloads=((),) * (MAX_PAYLOADS + 1)),
    "too many chunks of a payload": limited(CALL, payloads=(((A, 1),) * (MAX_PAYLOAD_CHUNKS + 1),)),
    "too many payloads with holders": limited(CALL, holders=(("p",),) * (MAX_PAYLOADS + 1)),
    "too many holders of a payload": limited(CALL, holders=(("p",) * (MAX_HOLDERS + 1),)),
    "a holder's name too long": limited(CALL, holders=(("p" * 65,),)),
    "too many calls kept": limited(Keep(()), ids=(1,) * (MAX_LEFT_IDS + 1)),
    "an empty chunk of a payload": limited(CALL, payloads=(((A, 0),),)),
    "a payload's chunk too large": limited(CALL, payloads=(((A, MAX_CHUNK_BYTES + 1),),)),
    "a payload's chunk without a size": limited(CALL, payloads=(((A,),),)),
    "answer too long": limited(Answer(7, 3, "ok"), body=bytes(MAX_BODY_BYTES + 1)),
    "an answer of another kind": limited(Answer(7, 3, "ok"), verdict="fine"),
    "too many codecs": limited(Reads(()), codecs=(("raw,raw", 1, b""),) * (MAX_CODECS + 1)),
    "codec's name too long": limited(Reads(()), codecs=(("x" * 65, 1, b""),)),
    "codec's version too high": limited(Reads(()), codecs=(("raw,raw", 1 << 32, b""),)),
    "codec's digest too long": limited(Reads(()), codecs=(("raw,raw", 1, bytes(9)),)),
    "text for bytes": msgspec.msgpack.encode(["miss", "x" * 32]),
    "truth for number": msgspec.msgpack.encode(["views?", True]),
    "too few fields": msgspec.msgpack.encode(["want", A]),
    "two messages": msgspec.msgpack.encode(Leave()) * 2,
    "nothing": b"",
}


@pytest.mark.parametrize("case", OVER_THE_LIMIT)
def test_a_message_over_a_limit_is_refused(case):
    with pytest.raises(ProtocolViolation):
        unpack(sealed(OVER_THE_LIMIT[case]))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "message",
    [
        OFFER,
        StateOffer("state", A, 6, B, A, 4096, 640, 1, 2.5),
        Ping(0.0),
        Pong(0.0, 0.0),
        PairPropose(OFFER),
        PairAccept(OFFER),
    ],
)
def test_a_number_that_is_not_finite_is_refused(message, number):
    if isinstance(message, PairPropose | PairAccept):
        value = msgspec.structs.replace(EVALUATION, standard_error=number)
        bad = type(message)(msgspec.structs.replace(OFFER, evaluation=value))
    else:
        field = "weight" if message is OFFER else message.__struct_fields__[-1]
        bad = msgspec.structs.replace(message, **{field: number})
    with pytest.raises(ProtocolViolation):
        unpack(sealed(msgspec.msgpack.encode(bad)))


def test_lengths_of_four_gigabytes_are_refused_in_little_memory():
    start = (
        b"\x98"
        + msgspec.msgpack.encode("offer")
        + msgspec.msgpack.encode(KEY)
        + msgspec.msgpack.encode(A)
    )
    huge = b"\xff\xff\xff\xff"
    claims = [
        start + b"\xdd" + huge,  # four thousand million digests
        start + b"\xdc\xff\xff" + b"\xc4\x20" * 3,
        b"\x92" + msgspec.msgpack.encode("miss") + b"\xc6" + huge,  # a digest of 4 GiB
        b"\x92" + msgspec.msgpack.encode("state?") + b"\xdb" + huge,  # a name of 4 GiB
        b"\xdd" + huge,  # a message of that many fields
        b"\xdf" + huge,
        b"\x93"
        + msgspec.msgpack.encode("miss")
        + msgspec.msgpack.encode(A)
        + b"\xdd"
        + huge,  # an unknown field
    ]
    for raw in claims:
        assert refused_in_little_memory(sealed(raw)) < 64 * 1024
    lying = bytearray(sealed(msgspec.msgpack.encode(Leave())))
    for place in (12, 16):
        lying[place : place + 4] = huge
        assert refused_in_little_memory(bytes(lying)) < 64 * 1024


def test_deep_nesting_is_refused():
    deep = b"\x91" * 100_000
    unknown_field = b"\x93" + msgspec.msgpack.encode("miss") + msgspec.msgpack.encode(A) + deep
    known_field = b"\x92" + msgspec.msgpack.encode("miss") + deep
    for raw in (deep, known_field, unknown_field):
        with pytest.raises(ProtocolViolation):
            unpack(sealed(raw))


def test_a_newer_peer_may_append_fields_that_this_build_does_not_know():
    raw = msgspec.msgpack.encode(["miss", A, {"later": [1, 2, 3]}])
    assert unpack(sealed(raw)).message == Miss(A)


def test_the_largest_close_list_and_the_longest_offer_fit_a_frame():
    value = bytes(MAX_VALUE_BYTES)
    proofs = tuple((member, bytes(64)) for member in range(MAX_MEMBERS))
    long_key = Key("ä" * 64, 2**62, 255)
    entries = (A,) * MAX_BUNDLES, (MAX_CHUNK_BYTES,) * MAX_BUNDLES
    offer = Offer(long_key, A, *entries, 1e18, 2**62, A, EVALUATION)
    for message in (
        Decided(long_key, A, value, (2**62, 63), proofs),
        Promise(long_key, A, (2**62, 63), (2**62, 63), value, (2**62, 1)),
        PairPropose(offer),
        Call(
            2**62,
            bytes(MAX_BODY_BYTES),
            ((((A, MAX_CHUNK_BYTES),) * MAX_PAYLOAD_CHUNKS),) * MAX_PAYLOADS,
        ),
        Call(2**62, bytes(MAX_BODY_BYTES), *_inline()),
        Answer(2**63 - 1, 2**62, "failed", bytes(MAX_BODY_BYTES), *_inline()),
    ):
        assert unpack(pack(Frame(2**64 - 1, message))).message == message


def _inline():
    """The most payloads inside a message that the product sends, as announced and as bytes."""
    each = MAX_INLINE_BYTES // MAX_PAYLOADS
    return (((A, MAX_CHUNK_BYTES),),) * MAX_PAYLOADS, (bytes(each),) * MAX_PAYLOADS


def test_the_largest_batch_and_its_answer_fit_a_frame():
    others = MAX_BATCH_CHUNKS - 1
    want = Want(A, 0, MAX_CHUNK_BYTES, MAX_CHUNK_BYTES, bytes(32 * others))
    piece = Piece(A, 0, MAX_CHUNK_BYTES, bytes(4 * others))
    assert unpack(pack(Frame(2**64 - 1, want))).message == want
    assert unpack(pack(Frame(2**64 - 1, piece, bytes(BATCH_BYTES)))).message == piece


def test_unpacking_takes_no_copy_of_the_body():
    packed = pack(Frame(1, Piece(A, 0, 65536), bytes(65536)))
    tracemalloc.start()
    unpack(packed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 1024


def test_the_bytes_of_every_kind_are_the_golden_ones(request):
    made = {
        type(message).__name__: pack(Frame(12345, message, body_of(message))).hex()
        for message in SPECIMENS
    }
    if request.config.getoption("--write-golden", default=False):
        GOLDEN.write_text(json.dumps({"version": frames.VERSION, "frames": made}, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert golden["version"] == frames.VERSION
    assert made == golden["frames"], (
        "the wire format changed: raise VERSION, then pytest --write-golden"
    )
    for name, packed in golden["frames"].items():
        assert type(unpack(bytes.fromhex(packed)).message).__name__ == name
