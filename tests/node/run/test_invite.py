"""An invite comes back as it was minted; all else is refused with a sentence; nothing crashes."""

import base64
import hashlib

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farflock.node.errors import Usage
from farflock.node.run.invite import (
    MAX_ADDRESSES,
    MAX_CHARS,
    PREFIX,
    VERSION,
    Grant,
    Invite,
    grant_of,
    mint,
    parse,
)
from farflock.swarm.capability import MAX_USES, shown, unseal
from farflock.swarm.identity import Identity
from farflock.swarm.messages import MAX_MEMBERS

NOW_S = 1_800_000_000
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
ADDRESS = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
ISSUER = Identity.from_seed(bytes(32))


def granted(invite, uses=3, votes=1, secret=bytes(range(32))):
    return grant_of(ISSUER, invite, uses, votes, secret)


INVITE = granted(
    Invite(
        "0123456789abcdef" * 2,
        "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",
        (ADDRESS,),
        NOW_S + 60,
    )
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
).flatmap(
    lambda invite: st.builds(
        granted,
        st.just(invite),
        st.integers(0, MAX_USES),
        st.integers(0, MAX_MEMBERS),
        st.binary(min_size=32, max_size=32),
    )
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
    bare = Invite("f" * 32, "x" * 64, (address,) * MAX_ADDRESSES, 2**40)
    longest = granted(bare, MAX_USES, MAX_MEMBERS)
    assert len(mint(longest)) <= MAX_CHARS
    assert parse(mint(longest), NOW_S) == longest


def test_an_invite_of_three_addresses_is_one_line_of_a_chat():
    three = msgspec.structs.replace(INVITE, addresses=(ADDRESS,) * 3)
    assert len(mint(three)) < 750


def test_white_space_around_an_invite_is_forgiven():
    assert parse(f"  {mint(INVITE)}\n", NOW_S) == INVITE


def test_the_format_is_what_was_documented():
    grant = [ISSUER.peer, 3, 1, "trusted", bytes(range(32)), INVITE.grant.signature]
    fields = [VERSION, INVITE.run, INVITE.founder, list(INVITE.addresses), INVITE.expires, grant]
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


def test_an_invite_gives_what_a_joiner_shows_and_members_check():
    joiner = Identity.from_seed(bytes([1]) * 32).peer
    request = parse(mint(INVITE), NOW_S).ticket.request(INVITE.run, joiner, b"record")
    capability = shown(INVITE.run, joiner, request)
    assert capability == INVITE.capability
    assert (capability.issuer, capability.expires) == (ISSUER.peer, INVITE.expires)
    assert (capability.uses, capability.votes) == (3, 1)
    assert unseal(INVITE.ticket.capability, INVITE.run) == capability


def raw(invite):
    return packed(
        msgspec.msgpack.encode((VERSION, *msgspec.to_builtins(invite, builtin_types=(bytes,))))
    )


@pytest.mark.parametrize(
    "change", [{"uses": 9}, {"votes": 9}, {"secret": bytes(32)}, {"signature": bytes(64)}]
)
def test_an_invite_that_its_issuer_did_not_sign_so_is_refused(change):
    forged = msgspec.structs.replace(INVITE, grant=msgspec.structs.replace(INVITE.grant, **change))
    assert "the invite lets nobody in: not signed by its issuer" in refusal(raw(forged))
    later = msgspec.structs.replace(INVITE, expires=INVITE.expires + 10**6)
    assert "the invite lets nobody in" in refusal(raw(later))


def test_an_invite_without_a_grant_is_neither_minted_nor_read():
    bare = msgspec.structs.replace(INVITE, grant=None)
    with pytest.raises(ValueError, match="lets nobody in"):
        mint(bare)
    assert "the invite lets nobody in: it has no capability" in refusal(raw(bare))
    assert bare.ticket is None
    assert not isinstance(bare.grant, Grant)


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
