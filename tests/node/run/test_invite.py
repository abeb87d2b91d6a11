"""An invite comes back as it was minted; all else is refused with a sentence; nothing crashes."""

import base64
import hashlib
import struct
from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farflock.node.errors import Usage
from farflock.node.run.invite import (
    FOUNDER_BYTES,
    MAX_CHARS,
    MAX_CHARS_OF_ONE,
    MAX_MEMBERS,
    MAX_NAME_BYTES,
    MAX_READ_CHARS,
    PREFIX,
    VERSION,
    Invite,
    fitting_name,
    founder_of,
    mint,
    parse,
)
from farflock.swarm.addresses import numeric
from farflock.swarm.contact import Contact
from farflock.swarm.identity import peer_id

NOW_S = 1_800_000_000
RUN = "0123456789abcdef" * 2
FOUNDER = Contact(peer_id(bytes(range(32))), bytes(range(32, 64)), "192.0.2.7", 4001, 4002, 4003)
INVITE = Invite(RUN, founder_of(FOUNDER.peer), (FOUNDER,), "a run", NOW_S + 60)
PACKED = FOUNDER.pack()
LONGEST_NAME = "n" * MAX_NAME_BYTES

keys = st.binary(min_size=32, max_size=32)
ports = st.integers(1, 65535)
hosts = st.ip_addresses().map(lambda host: str(numeric(str(host))))
contacts = st.builds(Contact, keys.map(peer_id), keys, hosts, ports, ports, st.integers(0, 65535))
invites = st.builds(
    Invite,
    run=st.text("0123456789abcdef", min_size=32, max_size=32),
    founder=keys.map(peer_id).map(founder_of),
    members=st.lists(contacts, min_size=1, max_size=MAX_MEMBERS).map(tuple),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,31}", fullmatch=True) | st.just(""),
    expires=st.integers(NOW_S, 2**32 - 1),
)


def packed(body):
    """An invite's text around any body, with a checksum that fits."""
    checksum = hashlib.sha256(b"farflock-invite" + body).digest()[:4]
    return PREFIX + base64.urlsafe_b64encode(body + checksum).decode().rstrip("=")


def body_of(shape=1, more=PACKED, expires=NOW_S + 60):
    head = struct.pack(">BB16sI", VERSION, shape, bytes.fromhex(RUN), expires)
    return head + bytes(range(FOUNDER_BYTES)) + more


def refusal(text, now_s=NOW_S):
    with pytest.raises(Usage) as error:
        parse(text, now_s)
    assert error.value.remedy
    assert "\n" not in str(error.value)
    return str(error.value)


@given(invites, st.lists(st.booleans(), min_size=2, max_size=2))
def test_an_invite_comes_back_as_it_was_minted(invite, again):
    members = list(invite.members)
    for number, one_more in enumerate(again[: len(members) - 1], 1):
        if one_more:
            before = members[number - 1]
            members[number] = replace(members[number], peer=before.peer, curve=before.curve)
    invite = replace(invite, members=tuple(members))
    text = mint(invite)
    assert parse(text, NOW_S) == invite
    assert text.removeprefix(PREFIX).replace("-", "").replace("_", "").isalnum()
    assert len(text) <= MAX_CHARS


STRANGER = Contact(peer_id(bytes([9]) * 32), bytes([8]) * 32, "192.0.2.9", 4001, 4002, 4003)


@pytest.mark.parametrize(
    ("hosts", "named"),
    [
        (["192.0.2.9"], MAX_NAME_BYTES),
        (["2001:db8::9"], 20),
        (["192.0.2.9", "2001:db8::9"], 10),
    ],
)
@pytest.mark.parametrize("member", [FOUNDER, STRANGER])
def test_an_invite_of_one_member_is_one_line_of_a_chat(member, hosts, named):
    members = tuple(replace(member, host=host) for host in hosts)
    name = fitting_name(LONGEST_NAME + "n", members)
    assert len(name) == named
    invite = replace(INVITE, members=members, name=name)
    assert parse(mint(invite), NOW_S) == invite
    assert len(mint(invite)) <= MAX_CHARS_OF_ONE


def test_one_of_several_members_has_the_longest_name():
    assert fitting_name(LONGEST_NAME + "n", (FOUNDER, STRANGER)) == LONGEST_NAME


def test_white_space_around_an_invite_is_forgiven():
    assert parse(f"  {mint(INVITE)}\n", NOW_S) == INVITE


def test_the_format_is_what_was_documented():
    other = Contact(peer_id(bytes(32)), bytes(32), "192.0.2.8", 5001, 5003)
    ports = struct.pack(">HHH", 4001, 4002, 4003)
    first = bytes(range(64)) + bytes([192, 0, 2, 7]) + ports
    second = bytes(64) + bytes([192, 0, 2, 8]) + struct.pack(">HHH", 5001, 5003, 0)
    assert mint(INVITE) == packed(body_of(more=first + b"a run"))
    assert mint(replace(INVITE, members=(other, FOUNDER))) == packed(
        body_of(shape=2, more=second + first + b"a run")
    )
    assert mint(replace(INVITE, members=(other,), name="")) == packed(body_of(more=second))


def test_a_member_with_an_ip6_address_is_marked_in_the_shape():
    six = replace(FOUNDER, host="2001:db8::7")
    ports = struct.pack(">HHH", 4001, 4002, 4003)
    address = bytes.fromhex("20010db8") + bytes(11) + b"\7"
    both = replace(INVITE, members=(FOUNDER, six))  # its keys come once
    assert mint(both) == packed(body_of(shape=2 + 8 + 32, more=PACKED + address + ports + b"a run"))
    assert parse(mint(both), NOW_S) == both
    mixed = replace(INVITE, members=(STRANGER, FOUNDER, six))
    text = body_of(shape=3 + 16 + 64, more=STRANGER.pack() + PACKED + address + ports + b"a run")
    assert mint(mixed) == packed(text)
    assert parse(mint(mixed), NOW_S) == mixed


def test_the_longest_invite_fits():
    others = [Contact(peer_id(bytes([n]) * 32), bytes(32), "2001:db8::7", 1, 2) for n in range(3)]
    longest = replace(INVITE, members=tuple(others), name=LONGEST_NAME)
    assert len(mint(longest)) == 445 <= MAX_CHARS


def test_every_mistyped_character_is_found():
    text = mint(INVITE)
    # the last one may carry bits that count for nothing
    for place in range(len(PREFIX), len(text) - 1):
        other = "A" if text[place] != "A" else "B"
        assert "the invite is damaged" in refusal(text[:place] + other + text[place + 1 :])


def test_every_cut_is_found():
    text = mint(INVITE)
    for size in range(len(text)):
        sentence = refusal(text[:size])
        assert "damaged" in sentence if size >= len(PREFIX) else "does not begin" in sentence


def test_an_expired_invite_says_since_when():
    assert parse(mint(INVITE), INVITE.expires) == INVITE
    sentence = refusal(mint(INVITE), INVITE.expires + 7200)
    assert "expired 2.0 hours ago; ask" in sentence


def test_an_invite_of_the_first_version_is_refused_in_one_sentence():
    address = f"/ip4/192.0.2.7/tcp/4001/p2p/{FOUNDER.peer}"
    for count in (1, 8):
        body = msgspec.msgpack.encode([1, RUN, FOUNDER.peer, [address] * count, NOW_S + 60])
        assert refusal(packed(body)) == (
            "the invite has another version: it is version 1, and this program reads version 3;"
            " ask a member to update and send a new one"
        )


@pytest.mark.parametrize(
    ("version", "remedy"),
    [(VERSION + 1, "update farflock"), (0, "ask a member to update"), (255, "update farflock")],
)
def test_another_version_is_named_whatever_follows(version, remedy):
    for rest in (b"", b"new fields" * 100):
        sentence = refusal(packed(bytes([version]) + rest))
        assert f"version {version}, and this program reads version {VERSION}" in sentence
        assert remedy in sentence


@pytest.mark.parametrize(
    "body",
    [
        bytes([VERSION]),
        body_of(more=b""),
        body_of(more=PACKED[:-1]),
        body_of(shape=0, more=b""),
        body_of(shape=1 + 4),
        body_of(shape=2),
        body_of(shape=2 + 32),
        body_of(shape=1 + 8),  # the second of one is an IPv6 one
        body_of(shape=1 + 32),  # and comes again
        body_of(shape=2 + 64, more=PACKED * 2),
        body_of(shape=1 + 128),
        body_of()[: 22 + FOUNDER_BYTES - 1],
        body_of(shape=255, more=PACKED * 4),
        body_of(more=PACKED + b"x" * (MAX_NAME_BYTES + 1)),
        body_of(more=PACKED + b"\x1b[2J"),
        body_of(more=PACKED + "ä".encode()),
        body_of(more=PACKED[:68] + bytes(6)),
    ],
)
def test_well_packed_nonsense_is_refused(body):
    assert "the invite is damaged" in refusal(packed(body))


def test_an_invite_that_is_far_too_long_is_not_even_decoded():
    sentence = refusal(PREFIX + "A" * MAX_READ_CHARS)
    assert f"at most {MAX_CHARS:,}" in sentence


@pytest.mark.parametrize(
    "change",
    [
        {"members": ()},
        {"members": (FOUNDER,) * 4},
        {"run": "short"},
        {"run": "F" * 32},
        {"name": LONGEST_NAME + "n"},
        {"name": "two\nlines"},
        {"expires": -1},
        {"expires": 2**32},
        {"founder": bytes(FOUNDER_BYTES + 1)},
        {"members": (replace(FOUNDER, host="here"),)},
        {"members": (replace(FOUNDER, control=0),)},
        {"members": (replace(FOUNDER, door=1 << 16),)},
        {"members": (replace(FOUNDER, curve=bytes(31)),)},
    ],
)
def test_an_invite_that_could_not_be_read_is_not_minted(change):
    with pytest.raises(ValueError):  # noqa: PT011 - each has words of its own
        mint(replace(INVITE, **change))


@given(st.text(max_size=200))
@example("farflock:é")
@example("farflock:====")
@example("FARFLOCK:AAAA")
def test_any_text_at_all_is_refused_with_a_sentence(text):
    refusal(text)
    refusal(PREFIX + text)


@given(st.binary(max_size=200))
def test_any_bytes_with_a_fitting_checksum_are_refused_with_a_sentence(body):
    refusal(packed(body))


@given(st.binary(max_size=330), st.integers(0, 255), st.integers(0, 2**32 - 1))
def test_whatever_can_be_read_is_minted_to_the_same_text(rest, shape, expires):
    text = packed(body_of(shape=shape, expires=expires, more=rest))
    try:
        invite = parse(text, 0)
    except Usage:
        return
    again = mint(invite)
    assert parse(again, 0) == invite
    assert len(again) <= MAX_CHARS
