"""One key, one name: the libp2p id, the key file, and signatures that are valid for one purpose
only."""

import os
import stat

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm import identity
from farflock.swarm.identity import (
    SIGNATURE_BYTES,
    BadIdentity,
    Identity,
    peer_id,
    public_key,
    verify,
)

A, B = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))

# The Ed25519 private key that libp2p's specification of peer ids gives as a test vector.
LIBP2P_KEY = bytes.fromhex(
    "08011240"
    "7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)


# Names.


def test_a_name_is_the_base58_of_the_multihash_that_libp2p_prescribes():
    assert base58.b58decode(A.peer) == bytes.fromhex("002408011220") + A.public
    assert A.peer.startswith("12D3Koo")
    assert public_key(A.peer) == A.public
    assert peer_id(A.public) == A.peer != B.peer


@given(st.binary(min_size=32, max_size=32))
def test_every_public_key_has_one_name_and_is_found_in_it(public):
    assert public_key(peer_id(public)) == public


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_of_another_length_has_no_name(size):
    with pytest.raises(BadIdentity, match=f"32 bytes, got {size}"):
        peer_id(bytes(size))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "not the id of an Ed25519 key"),
        # of an RSA key
        (
            "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
            "not the id of an Ed25519 key",
        ),
        (str(base58.b58encode(bytes.fromhex("002408011220") + bytes(31)), "ascii"), "not the id"),
        (A.peer[:-1], "not the id"),
        (A.peer[:-1] + "0", "not a peer id"),  # base58 has no 0
        (A.peer[:-1] + "é", "not a peer id"),
        (A.peer + " ", "canonical"),
        (A.peer + "\n\t", "canonical"),
        ("1" * 65, "at most 64 characters, got 65"),
    ],
)
def test_a_name_of_another_form_is_refused_with_the_reason(name, reason):
    with pytest.raises(BadIdentity, match=reason):
        public_key(name)


@given(st.text(max_size=70) | st.from_regex(r"12D3Koo[1-9A-HJ-NP-Za-km-z]{45}", fullmatch=True))
def test_any_text_is_refused_or_is_the_only_name_of_its_key(text):
    try:
        public = public_key(text)
    except BadIdentity:
        return
    assert peer_id(public) == text


# Signatures.


def test_good_signatures_are_remembered_up_to_a_limit_and_bad_ones_never(monkeypatch):
    monkeypatch.setattr(identity, "MAX_REMEMBERED", 3)
    monkeypatch.setattr(identity, "_good", {})
    key, checked = Identity.from_seed(bytes(32)), []
    public_key = identity.public_key

    def counted(peer):
        checked.append(peer)
        return public_key(peer)

    monkeypatch.setattr(identity, "public_key", counted)
    signature = key.sign(b"one", b"text")
    for _ in range(5):
        assert verify(key.peer, b"one", b"text", signature)
        assert not verify(key.peer, b"two", b"text", signature)
    assert len(checked) == 1 + 5
    for number in range(5):
        text = bytes([number])
        assert verify(key.peer, b"one", text, key.sign(b"one", text))
    assert len(checked) == 1 + 5 + 5
    assert verify(key.peer, b"one", b"text", signature)
    assert len(checked) == 1 + 5 + 5 + 1, "the first was forgotten"
    assert not verify(Identity.from_seed(bytes([1]) * 32).peer, b"one", b"text", signature)
    assert not verify(key.peer, b"one", b"text", signature + bytes(1))


def test_a_signature_is_good_for_its_signer_its_domain_and_its_message_alone():
    signature = A.sign(b"view", b"text")
    assert len(signature) == SIGNATURE_BYTES
    assert verify(A.peer, b"view", b"text", signature)
    assert not verify(B.peer, b"view", b"text", signature)
    assert not verify(A.peer, b"record", b"text", signature)
    assert not verify(A.peer, b"view", b"texts", signature)


def test_moving_the_border_between_domain_and_message_makes_another_text():
    signature = A.sign(b"ab", b"cd")
    for domain, message in ((b"a", b"bcd"), (b"abc", b"d"), (b"", b"abcd"), (b"abcd", b"")):
        assert not verify(A.peer, domain, message, signature)


@given(st.integers(0, 8 * SIGNATURE_BYTES - 1))
def test_no_bit_of_a_signature_can_be_altered(bit):
    altered = bytearray(A.sign(b"view", b"text"))
    altered[bit // 8] ^= 1 << bit % 8
    assert not verify(A.peer, b"view", b"text", bytes(altered))


@given(st.text(max_size=70) | st.just(A.peer), st.binary(max_size=40), st.binary(max_size=80))
def test_nonsense_is_not_signed_by_anybody(peer, message, signature):
    assert not verify(peer, b"view", message, signature)


# Keys.


def test_a_seed_always_gives_the_same_key():
    assert Identity.from_seed(bytes([1]) * 32).peer == A.peer


@pytest.mark.net
def test_a_fresh_key_is_new():
    assert Identity.generate().peer != Identity.generate().peer


def test_the_session_key_follows_from_the_identity_and_is_another_key():
    def secret(identity):
        return identity.session_key().private_bytes_raw()

    assert secret(A) == secret(Identity.from_seed(bytes([1]) * 32))
    assert secret(A) != secret(B)
    assert secret(A) != bytes([1]) * 32
    assert A.session_key().public_key().public_bytes_raw() != A.public


# The key file.


def test_a_saved_key_is_loaded_again_and_only_its_owner_can_read_the_file(tmp_path):
    path = tmp_path / "new" / "folders" / "identity.key"
    A.save(path)
    assert Identity.load(path).peer == A.peer
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert path.read_bytes() == bytes.fromhex("08011240") + bytes([1]) * 32 + A.public


def test_a_key_file_of_libp2p_is_read_as_it_is(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(LIBP2P_KEY)
    identity = Identity.load(path)
    assert identity.public == LIBP2P_KEY[36:]
    identity.save(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == LIBP2P_KEY


def test_an_existing_file_is_never_overwritten(tmp_path):
    path = tmp_path / "key"
    A.save(path)
    with pytest.raises(FileExistsError):
        B.save(path)
    assert Identity.load(path).peer == A.peer


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b"", "move it away to get a new identity"),
        (LIBP2P_KEY[:-1], "move it away to get a new identity"),
        (LIBP2P_KEY + b"\n", "move it away to get a new identity"),
        (b"\x08\x00" + LIBP2P_KEY[2:], "move it away to get a new identity"),  # an RSA key
        (LIBP2P_KEY[:-1] + b"\x00", "restore it, or move it away to get a new identity"),
    ],
)
def test_a_file_of_another_form_is_refused_with_a_remedy_and_left_alone(tmp_path, content, remedy):
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(BadIdentity, match=remedy) as caught:
        Identity.load(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Identity.load(tmp_path / "none")
