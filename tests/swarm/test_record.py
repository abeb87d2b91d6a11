"""A record is its owner's statement, whole and within limits, or it is refused."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.directory import MAX_RECORD_AGE_S
from farflock.swarm.identity import SIGNATURE_BYTES, Identity, peer_id
from farflock.swarm.messages import MAX_RECORD_BYTES, MAX_STAGES
from farflock.swarm.record import MAX_DOORS, BadRecord, Record, newer, owner, seal, unseal
from farflock.swarm.roles import NOTHING, role_of

A, B = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))
RUN = "run"
PLAIN = Record(RUN, A.peer, 1, 1, bytes(32))

GOLDEN = (  # of `WHOLE`, signed by `A`
    "fbb975fa11a7d0424fd0041d3880508b44897e6e3f2f74e906a40aef647c582351855c5577e05d8af48f831bc7"
    "fc6bfa526835c281c1d2d9de4498371dced6038ba372756ed92030313233343536373839616263646566303132"
    "33343536373839616263646566a470656572d934313244334b6f6f574b3939566f56784e4537587a7942775845"
    "7a573778684b37477076383572394633563366794b53554b504835ab696e6361726e6174696f6e07a873657175"
    "656e636508a56375727665c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "a9656e64706f696e747392b72f6970342f3139322e302e322e372f7463702f34303031ba2f6970362f32303031"
    "3a6462383a3a372f7463702f3635353335a672656c61797391d934313244334b6f6f574a576f61715a6844616f"
    "454673684637526831627059396f68696846687a6357366436394c72324e41537571a5646f6f727392d9502f69"
    "70342f3139322e302e322e372f7463702f343030312f7032702f313244334b6f6f574b3939566f56784e453758"
    "7a79427758457a573778684b37477076383572394633563366794b53554b504835d9532f6970362f323030313a"
    "6462383a3a372f7463702f36353533352f7032702f313244334b6f6f574b3939566f56784e4537587a79427758"
    "457a573778684b37477076383572394633563366794b53554b504835a4726f6c65a773746167653a33a5737065"
    "6564cb405ee00000000000aa6c69666574696d655f73cb403e000000000000"
)
PLACES = "/ip4/192.0.2.7/tcp/4001", "/ip6/2001:db8::7/tcp/65535"
WHOLE = Record(
    "0123456789abcdef" * 2,
    A.peer,
    7,
    8,
    bytes(range(32)),
    PLACES,
    (B.peer,),
    tuple(f"{place}/p2p/{A.peer}" for place in PLACES),
    "stage:3",
    123.5,
    30.0,
)
TITLE = "\x1b]0;PWNED\x07\x1b[2J"  # sets a terminal's title and clears it

numbers = st.integers(0, 2**63 - 1)
places = st.builds(
    lambda address, port: f"/ip{address.version}/{address}/tcp/{port}",
    st.ip_addresses(),
    st.integers(1, 65535),
)
peers = st.binary(min_size=32, max_size=32).map(peer_id)
records = st.builds(
    Record,
    run=st.from_regex(r"[0-9a-z-]{1,64}", fullmatch=True),
    peer=st.just(A.peer),
    incarnation=numbers,
    sequence=numbers,
    curve=st.binary(min_size=32, max_size=32),
    endpoints=st.lists(places, max_size=8).map(tuple),
    relays=st.lists(peers, max_size=4).map(tuple),
    doors=st.lists(places.map(lambda place: f"{place}/p2p/{A.peer}"), max_size=MAX_DOORS).map(
        tuple
    ),
    role=st.integers(NOTHING, MAX_STAGES - 1).map(role_of),
    speed=st.floats(0, 1e12),
    lifetime_s=st.floats(0, MAX_RECORD_AGE_S, exclude_min=True),
)


def changed(**fields):
    return msgspec.structs.replace(PLAIN, **fields)


def signed(body, signer=A, domain=b"record"):
    """A record that a hostile owner can publish: any bytes, truly signed."""
    raw = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return signer.sign(domain, raw) + raw


@given(records)
def test_what_was_sealed_is_unsealed(record):
    blob = seal(A, record)
    assert unseal(blob, record.run) == record
    assert owner(blob, record.run) == A.peer
    assert len(blob) <= MAX_RECORD_BYTES


def test_the_bytes_of_a_record_are_the_golden_ones():
    assert seal(A, WHOLE).hex() == GOLDEN
    assert unseal(bytes.fromhex(GOLDEN), WHOLE.run) == WHOLE


@settings(max_examples=200)
@given(st.binary(max_size=300) | st.binary(max_size=200).map(signed))
def test_any_bytes_signed_or_not_are_a_record_or_a_bad_record(blob):
    with pytest.raises(BadRecord):
        unseal(blob, RUN)


@given(st.integers(0), st.integers(1, 255))
def test_no_byte_can_be_altered(place, by):
    blob = bytearray(seal(A, PLAIN))
    blob[place % len(blob)] ^= by
    with pytest.raises(BadRecord):
        unseal(bytes(blob), RUN)


@given(st.integers(0))
def test_a_truncated_record_is_refused(size):
    blob = seal(A, PLAIN)
    with pytest.raises(BadRecord):
        unseal(blob[: size % len(blob)], RUN)


def test_a_record_of_another_run_is_refused():
    with pytest.raises(BadRecord, match="of run run, not of other"):
        unseal(seal(A, PLAIN), "other")


def test_a_record_is_signed_by_the_peer_in_it_and_for_this_purpose():
    with pytest.raises(BadRecord, match=f"not signed by {A.peer}"):
        unseal(signed(PLAIN, signer=B), RUN)
    with pytest.raises(BadRecord, match="not signed by"):
        unseal(signed(PLAIN, domain=b"view"), RUN)
    with pytest.raises(BadRecord, match=f"{B.peer} cannot sign a record of {A.peer}"):
        seal(B, PLAIN)


def test_one_key_cannot_speak_under_two_names():
    with pytest.raises(BadRecord, match="`peer`"):
        unseal(signed(changed(peer=A.peer + " ")), RUN)


@pytest.mark.parametrize(
    "fields",
    [
        {"run": "r" * 65},
        {"incarnation": -1},
        {"incarnation": 2**63},
        {"sequence": -1},
        {"curve": bytes(31)},
        {"curve": bytes(33)},
        {"endpoints": ("/ip4/192.0.2.7/tcp/4001",) * 9},
        {"endpoints": ("e" * 129,)},
        {"relays": ("peer",) * 5},
        {"doors": ("/ip4/192.0.2.7/tcp/4001",) * (MAX_DOORS + 1)},
        {"role": "stage:" + "1" * 123},
        {"speed": -1.0},
        {"speed": math.nan},
        {"speed": math.inf},
        {"lifetime_s": 0.0},
        {"lifetime_s": math.nan},
        {"lifetime_s": MAX_RECORD_AGE_S + 1},
    ],
    ids=str,
)
def test_a_field_beyond_its_limit_is_refused_when_read_and_when_sealed(fields):
    record = changed(**fields)
    with pytest.raises(BadRecord, match="not a record"):
        unseal(signed(record), RUN)
    with pytest.raises(BadRecord):
        seal(A, record)


DOOR = f"{PLACES[0]}/p2p/{A.peer}"


@pytest.mark.parametrize(
    ("field", "text"),
    [
        *[("run", text) for text in ("", "Run", "a b", "run\n", TITLE)],
        *[("peer", text) for text in ("", "peer", A.peer + "\n", A.peer[:-1], TITLE)],
        *[
            ("endpoints", text)
            for text in (
                "",
                TITLE,
                "/ip4/192.0.2.7/tcp/0",
                "/ip4/192.0.2.7/tcp/65536",
                "/ip4/192.0.2.7/tcp/04001",
                "/ip4/192.0.2.7/tcp/4001\n",
                "/ip4/192.0.2.7/tcp/\u0661",  # a digit to Python, but not an ASCII one
                "/ip4/192.0.2.07/tcp/4001",
                "/ip4/192.0.2/tcp/4001",
                "/ip4/2001:db8::7/tcp/4001",
                "/ip6/192.0.2.7/tcp/4001",
                "/ip6/fe80::1%\x1b[2J/tcp/4001",
                "/dns4/example.org/tcp/4001",
                "/ip4/192.0.2.7/udp/4001/quic",
                DOOR,
            )
        ],
        *[("relays", text) for text in ("", "peer", B.peer + " ", TITLE)],
        *[
            ("doors", text)
            for text in (
                "",
                TITLE,
                "not an address \x1b[31m",
                PLACES[0],
                f"{PLACES[0]}/p2p/{B.peer}",
                f"{DOOR}\n",
                f"{DOOR}{TITLE}",
                f"{TITLE}{DOOR}",
                f"{DOOR}/p2p/{A.peer}",
                f"/dns4/example.org/tcp/4001/p2p/{A.peer}",
            )
        ],
        *[("role", text) for text in ("", "reader", "stage:", "stage:03", "stage:-1", TITLE)],
        ("role", f"stage:{MAX_STAGES}"),
        ("role", "stage:1\n"),
    ],
)
def test_a_text_that_is_not_what_its_field_means_is_refused_by_the_fields_name(field, text):
    is_one = isinstance(getattr(PLAIN, field), str)
    record = changed(**{field: text if is_one else (text,)})
    with pytest.raises(BadRecord, match=f"[`.]{field}") as refused:
        unseal(signed(record), record.run)
    assert str(refused.value).isascii()
    assert str(refused.value).isprintable()
    with pytest.raises(BadRecord):
        seal(A, record)


@given(
    st.sampled_from(["run", "peer", "endpoints", "relays", "doors", "role"]),
    st.text(max_size=128) | st.sampled_from(["", DOOR, *PLACES, A.peer, "replica", "run"]),
)
def test_whatever_a_stranger_writes_into_a_text_no_control_character_is_taken(field, text):
    is_one = isinstance(getattr(PLAIN, field), str)
    try:
        taken = unseal(signed(changed(**{field: text if is_one else (text,)})), RUN)
    except BadRecord as refused:
        assert str(refused).isprintable()
    else:
        assert all(each.isascii() and each.isprintable() for each in taken.doors)
        assert taken.role.isascii()
        assert taken.role.isprintable()


def test_fields_that_are_unknown_or_missing_are_refused():
    fields = msgspec.structs.asdict(PLAIN)
    assert unseal(signed(fields), RUN) == PLAIN
    with pytest.raises(BadRecord, match="not a record"):
        unseal(signed({**fields, "more": 1}), RUN)
    del fields["curve"]
    with pytest.raises(BadRecord, match="not a record"):
        unseal(signed(fields), RUN)


@pytest.mark.parametrize("size", [0, SIGNATURE_BYTES, MAX_RECORD_BYTES + 1])
def test_the_size_is_checked_before_anything_else(size):
    with pytest.raises(
        BadRecord, match=f"{SIGNATURE_BYTES + 1} to {MAX_RECORD_BYTES} bytes, got {size}"
    ):
        unseal(bytes(size), RUN)


def test_the_largest_record_is_taken_and_one_beyond_the_size_cannot_be_sealed():
    place = "/ip6/" + "ffff:" * 7 + "ffff/tcp/65535"
    largest = changed(
        run="r" * 64,
        endpoints=(place,) * 8,
        relays=(B.peer,) * 4,
        doors=(f"{place}/p2p/{A.peer}",) * MAX_DOORS,
        role=f"stage:{MAX_STAGES - 1}",
    )
    assert unseal(seal(A, largest), largest.run) == largest
    wide = changed(endpoints=("\U00010000" * 128,) * 8)  # characters of four bytes each
    with pytest.raises(BadRecord, match="4096 bytes, got"):
        seal(A, wide)


@pytest.mark.parametrize(
    ("known", "is_newer"),
    [
        (None, True),
        (changed(sequence=0), True),
        (PLAIN, False),
        (changed(sequence=2), False),
        (changed(sequence=0, incarnation=9), True),
        (changed(sequence=0, peer=B.peer), False),
    ],
)
def test_only_a_higher_sequence_number_of_the_same_owner_is_newer(known, is_newer):
    assert newer(PLAIN, known) is is_newer
