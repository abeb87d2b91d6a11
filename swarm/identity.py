"""A peer's Ed25519 key pair: it gives the libp2p id, signs records and is the root of session keys.

The file has libp2p's own format, so that the DHT daemon can use the same key: `08 01 12 40` + seed
(32) + public key (32), mode 0600. The peer id is base58(`00 24 08 01 12 20` + public key).
"""

import hashlib
import os
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from farflock.swarm.links import PeerId

_FILE_HEAD = bytes.fromhex("08011240")  # protobuf PrivateKey{type: Ed25519, data: 64 bytes}
_ID_HEAD = bytes.fromhex("002408011220")  # multihash of protobuf PublicKey{Ed25519, 32 bytes}
_FILE_BYTES = 68
SIGNATURE_BYTES = 64
MAX_REMEMBERED = 4096  # good signatures: those of many views, in less than a megabyte
_good: dict[tuple[PeerId, bytes], None] = {}


class BadIdentity(ValueError):
    """A malformed key file or peer id; the message names the remedy."""


@lru_cache(maxsize=1024)  # asked for with every frame, and base58 is slow
def peer_id(public: bytes) -> PeerId:
    """Return the libp2p id of a 32-byte Ed25519 public key."""
    if len(public) != 32:
        raise BadIdentity(f"an Ed25519 public key has 32 bytes, got {len(public)}")
    return str(base58.b58encode(_ID_HEAD + public), "ascii")


def public_key(peer: PeerId) -> bytes:
    """Return the key in a peer id; raise `BadIdentity` unless it is a canonical Ed25519 id."""
    if len(peer) > 64:
        raise BadIdentity(f"a peer id has at most 64 characters, got {len(peer)}")
    try:
        raw = bytes(base58.b58decode(peer))
    except ValueError as error:
        raise BadIdentity(f"{peer[:64]!r} is not a peer id: {error}") from None
    if len(raw) != 38 or raw[:6] != _ID_HEAD:
        raise BadIdentity(
            f"{peer[:64]!r} is not the id of an Ed25519 key (those begin with 12D3Koo)"
        )
    if peer_id(raw[6:]) != peer:  # decoders ignore white space: one key, many names
        raise BadIdentity(
            f"{peer[:64]!r} is not a peer id in canonical form, which has no white space around it"
        )
    return raw[6:]


def is_peer_id(text: str) -> bool:
    """Return whether a text is a canonical Ed25519 id."""
    try:
        public_key(text)
    except BadIdentity:
        return False
    return True


def verify(peer: PeerId, domain: bytes, message: bytes, signature: bytes) -> bool:
    """True if `peer` signed `message` for this domain; never raises on hostile input.

    Good signatures are remembered: records and views come from many peers, and more than once."""
    if len(signature) != SIGNATURE_BYTES:
        return False
    framed = _framed(domain, message)
    name = peer, hashlib.sha256(signature + framed).digest()
    if name in _good:
        return True
    try:
        Ed25519PublicKey.from_public_bytes(public_key(peer)).verify(signature, framed)
    except (InvalidSignature, ValueError):
        return False
    if len(_good) >= MAX_REMEMBERED:
        _good.clear()
    _good[name] = None
    return True


def _framed(domain: bytes, message: bytes) -> bytes:
    """Prefix a text with its domain, so no signature can be mistaken for one of another kind."""
    return b"farflock-v1\x00" + len(domain).to_bytes(1, "big") + domain + message


@dataclass(frozen=True, slots=True)
class Identity:
    """A private key and everything derived from it."""

    _key: Ed25519PrivateKey

    @classmethod
    def from_seed(cls, seed: bytes) -> "Identity":
        """Make a key from 32 bytes, so that simulations and tests have reproducible peers."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def generate(cls) -> "Identity":
        """Make a fresh key that is stored nowhere."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """Read a key file; raise `BadIdentity` if it is malformed or not its owner's alone,
        `OSError` if unreadable."""
        raw = _read_private(path)
        if len(raw) != _FILE_BYTES or raw[:4] != _FILE_HEAD:
            raise BadIdentity(
                f"{path} is not an Ed25519 key file of {_FILE_BYTES} bytes; "
                "move it away to get a new identity"
            )
        identity = cls.from_seed(raw[4:36])
        if identity.public != raw[36:]:
            raise BadIdentity(
                f"{path} is damaged: its public half does not match; restore it, "
                "or move it away to get a new identity"
            )
        return identity

    def save(self, path: Path) -> None:
        """Write a new key file readable only by its owner; never overwrite an existing file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_FILE_HEAD + self._key.private_bytes_raw() + self.public)
        except OSError:
            path.unlink()  # half a key would keep the next start from writing a whole one
            raise

    @property
    def public(self) -> bytes:
        """The 32-byte public key."""
        return self._key.public_key().public_bytes_raw()

    @property
    def peer(self) -> PeerId:
        """The libp2p peer id of this key."""
        return peer_id(self.public)

    def sign(self, domain: bytes, message: bytes) -> bytes:
        """Return a 64-byte signature of `message`, valid for this domain only."""
        return self._key.sign(_framed(domain, message))

    def session_key(self) -> X25519PrivateKey:
        """Return the X25519 key for CURVE links, derived from the identity and different from it.

        Its public half travels in the signed record."""
        secret = hashlib.blake2b(
            self._key.private_bytes_raw(), digest_size=32, person=b"farflock-curve"
        ).digest()
        return X25519PrivateKey.from_private_bytes(secret)


def _read_private(path: Path) -> bytes:
    """Return the start of a file that only this user can read or write."""
    try:  # not blocking, since it may be a pipe
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if not path.is_symlink():
            raise
        raise BadIdentity(
            f"{path} is a link ({error.strerror}), and a key is read only from a file of its own; "
            "move the key file here"
        ) from None
    try:
        _require_private(path, os.fstat(descriptor))
        return os.read(descriptor, _FILE_BYTES + 1)
    finally:
        os.close(descriptor)


def _require_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise BadIdentity(f"{path} is not a file; move it away to get a new identity")
    if found.st_uid != os.geteuid():
        raise BadIdentity(
            f"{path} belongs to another user, who may know the key; "
            "move it away to get a new identity, or make it yours (chown) if you trust that user"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise BadIdentity(
            f"{path} can be read or changed by other users of this machine (mode {mode:04o}); "
            f"close it with `chmod 600 {path}`, or, if one of them may have read it, move it away "
            "to get a new identity"
        )
