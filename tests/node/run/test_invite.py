"""An invite comes back as it was minted; all else is refused with a sentence; nothing crashes."""

import base64
import hashlib

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farflock.node.errors import Usage
from farflock.node.run.invite import MAX_ADDRESSES, MAX_CHARS, PREFIX, VERSION, Invite, mint, parse

NOW_S = 1_800_000_000
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
ADDRESS = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
INVITE = Invite(
    "0123456789abcdef" * 2,
    "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",
    (ADDRESS,),
    NOW_S + 60,
)

peers = st.text(BASE58, min_size=1, max_size=60)
addresses = st.builds(
    lambda kind, host, port, peer: f"/{kind}/{host}/tcp/{port}/p2p/{peer}",
    st.sampled_from(["ip4", "ip6", "dns4"]),
    st.from_regex(r"[a-z0-9.:-]{1,40}", fullmatch=True),
    st.integers(1, 65535),
    peers,
)
invites = st.builds(
    Invite,
    run=st.text("0123456789abcdef", min_size=32, max_size=32),
    founder=peers,
    addresses=st.lists(addresses, min_size=1, max_size=MAX_ADDRESSES).map(tuple),
    expires=st.integers(NOW_S, 2**40),
)


def packed(body):
    """An invite's text around any body, with a checksum that fits."""
    checksum = hashlib.sha256(b"farflock-invite" + body).digest()[:4]
    return PREFIX + base64.urlsafe_b64encode(body + checksum).decode().rstrip("=")


def refusal(text, now_s=NOW_S):
    with pytest.raises(Usage) as error:
        parse(text, now_s)
    assert error.value.remedy
    assert "\n" not in str(error.value)
    return str(error.value)


@given(invites)
def test_an_invite_comes_back_as_it_was_minted(invite):
    text = mint(invite)
    assert parse(text, NOW_S) == invite
    assert text.removeprefix(PREFIX).replace("-", "").replace("_", "").isalnum()


def test_the_longest_invite_that_can_be_minted_can_be_read():
    address = "/dns4/" + "a" * (256 - len("/dns4//p2p/" + "x" * 52)) + "/p2p/" + "x" * 52
    longest = Invite("f" * 32, "x" * 64, (address,) * MAX_ADDRESSES, 2**40)
    assert len(mint(longest)) <= MAX_CHARS
    assert parse(mint(longest), NOW_S) == longest


def test_an_invite_of_three_addresses_is_one_line_of_a_chat():
    three = msgspec.structs.replace(INVITE, addresses=(ADDRESS,) * 3)
    assert len(mint(three)) < 500


def test_white_space_around_an_invite_is_forgiven():
    assert parse(f"  {mint(INVITE)}\n", NOW_S) == INVITE


def test_the_format_is_what_was_documented():
    fields = [VERSION, INVITE.run, INVITE.founder, list(INVITE.addresses), INVITE.expires]
    assert mint(INVITE) == packed(msgspec.msgpack.encode(fields))


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


@pytest.mark.parametrize(
    ("version", "remedy"),
    [(VERSION + 1, "update farflock"), (VERSION - 1, "ask a member to update"), (-5, "ask")],
)
def test_another_version_is_named_whatever_its_fields_are(version, remedy):
    sentence = refusal(packed(msgspec.msgpack.encode([version, {"new": "fields"}])))
    assert f"version {version}, and this program reads version {VERSION}" in sentence
    assert remedy in sentence


@pytest.mark.parametrize(
    "fields",
    [
        [],
        ["one"],
        [VERSION],
        [VERSION, INVITE.run, INVITE.founder, [ADDRESS]],
        [VERSION, INVITE.run, INVITE.founder, [ADDRESS], NOW_S + 60, "more"],
        [VERSION, INVITE.run, INVITE.founder, [], NOW_S + 60],
        [VERSION, INVITE.run, INVITE.founder, [ADDRESS] * (MAX_ADDRESSES + 1), NOW_S + 60],
        [VERSION, INVITE.run, INVITE.founder, ["192.0.2.7:4001"], NOW_S + 60],
        [VERSION, INVITE.run, INVITE.founder, [ADDRESS + "\x1b[2J"], NOW_S + 60],
        [VERSION, INVITE.run, INVITE.founder, ["/dns4/" + "a" * 256 + ADDRESS], NOW_S + 60],
        [VERSION, "../../etc", INVITE.founder, [ADDRESS], NOW_S + 60],
        [VERSION, INVITE.run, "x" * 65, [ADDRESS], NOW_S + 60],
        [VERSION, INVITE.run, INVITE.founder, [ADDRESS], -1],
        [VERSION, INVITE.run, INVITE.founder, [ADDRESS], float("nan")],
    ],
)
def test_well_packed_nonsense_is_refused(fields):
    assert "the invite is damaged" in refusal(packed(msgspec.msgpack.encode(fields)))


def test_deep_nesting_is_refused():
    deep = b"\x92\x01" + b"\x91" * 3000 + b"\x01"
    assert "damaged" in refusal(packed(deep))


def test_an_invite_that_is_far_too_long_is_not_even_decoded():
    assert f"at most {MAX_CHARS:,}" in refusal(PREFIX + "A" * 10**6)


@pytest.mark.parametrize(
    "change",
    [{"addresses": ()}, {"run": "short"}, {"addresses": ("here",)}, {"addresses": (ADDRESS,) * 9}],
)
def test_an_invite_that_could_not_be_read_is_not_minted(change):
    with pytest.raises(ValueError, match="Expected"):
        mint(msgspec.structs.replace(INVITE, **change))


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
