"""An end-to-end session over a carrier that may read, drop, replay, reorder or change frames.

Forwarded frames pass through a third peer, where the CURVE links end.

Hello (192 bytes): my key, your key, my ephemeral X25519 key, the ephemeral key that I heard from
you (zeros at first), Ed25519 signature over run and all of these. A side derives keys only from a
hello that names its own ephemeral key, so an old hello has no effect. Keys: HKDF-SHA256 of the
shared secret, one for each direction. Sealed frame: lane (1 byte), counter (8 bytes, big endian),
AES-256-GCM ciphertext and tag; the nonce is lane and counter. Each lane has its own rising counter,
because control and bulk travel on separate connections.
"""

import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from farflock.swarm.identity import SIGNATURE_BYTES, Identity, public_key, verify
from farflock.swarm.links import PeerId

LANES = 2
HELLO_BYTES = 4 * 32 + SIGNATURE_BYTES
REORDER = 64  # how many newer frames of its lane may overtake a frame
SEAL_BYTES = 1 + 8 + 16  # what sealing adds to a frame

_HELLO_DOMAIN = b"sealed-hello"
_KEYS_INFO = b"farflock-sealed-v1"
_HEAD = struct.Struct(">BQ")
_NOTHING_HEARD = bytes(32)


class BadSeal(ValueError):
    """Bytes that the partner did not make for this session, or that were seen before."""


@dataclass(slots=True)
class _Seen:
    """Opened counters of a lane: the highest plus one, and a bit for each of the last `REORDER`."""

    next: int = 0
    bits: int = 0

    def fresh(self, counter: int) -> bool:
        behind = self.next - 1 - counter
        return behind < 0 or (behind < REORDER and not self.bits >> behind & 1)

    def mark(self, counter: int) -> None:
        ahead = counter + 1 - self.next
        if ahead > 0:
            self.bits = (self.bits << min(ahead, REORDER) | 1) & (1 << REORDER) - 1
            self.next = counter + 1
        else:
            self.bits |= 1 << -ahead


def read_hello(hello: bytes, me: PeerId, partner: PeerId, run: str) -> tuple[bytes, bytes]:
    """Return the partner's ephemeral key and the one it heard from me; else raise `BadSeal`."""
    if len(hello) != HELLO_BYTES:
        raise BadSeal(f"a hello has {HELLO_BYTES} bytes, got {len(hello)}")
    text, signature = hello[:-SIGNATURE_BYTES], hello[-SIGNATURE_BYTES:]
    if text[:64] != public_key(partner) + public_key(me):
        raise BadSeal(f"not a hello of {partner} to {me}")
    if not verify(partner, _HELLO_DOMAIN, _named(run) + text, signature):
        raise BadSeal(f"a hello that {partner} did not sign for this run")
    return text[64:96], text[96:128]


def _named(run: str) -> bytes:
    """Encode the run with its length, so that no two (run, text) pairs read the same."""
    raw = run.encode()
    return len(raw).to_bytes(2, "big") + raw


class Sealed:
    """One session with one partner, keyed once; a partner that restarts needs a new session.

    Send it `hello()` and pass its hellos to `meet`; once `ready`, frames can be sealed and opened.
    """

    def __init__(
        self, identity: Identity, partner: PeerId, run: str, ephemeral: X25519PrivateKey
    ) -> None:
        self._identity = identity
        self._partner = partner
        self._run = run
        self._ephemeral = ephemeral
        self.mine = ephemeral.public_key().public_bytes_raw()
        self.theirs = _NOTHING_HEARD
        self._tx: AESGCM | None = None
        self._rx: AESGCM | None = None
        self._sent = [0] * LANES
        self._seen = [_Seen() for _ in range(LANES)]

    @property
    def ready(self) -> bool:
        """True once keys are agreed."""
        return self._tx is not None

    def hello(self) -> bytes:
        """Return 192 bytes for the partner that name the ephemeral key heard from it so far."""
        text = self._identity.public + public_key(self._partner) + self.mine + self.theirs
        return text + self._identity.sign(_HELLO_DOMAIN, _named(self._run) + text)

    def meet(self, hello: bytes) -> bool:
        """Take the partner's hello; return True once keys are agreed. Raise `BadSeal` otherwise."""
        theirs, echo = read_hello(hello, self._identity.peer, self._partner, self._run)
        if self.ready:
            if theirs != self.theirs:
                raise BadSeal("a hello of another session")
            return True
        self.theirs = theirs
        if echo == self.mine:
            self._agree()
        return self.ready

    def _agree(self) -> None:
        try:
            shared = self._ephemeral.exchange(X25519PublicKey.from_public_bytes(self.theirs))
        except ValueError:
            raise BadSeal("an ephemeral key of low order") from None
        me, you = self._identity.public + self.mine, public_key(self._partner) + self.theirs
        info = _KEYS_INFO + _named(self._run) + min(me, you) + max(me, you)
        keys = HKDF(hashes.SHA256(), 64, salt=None, info=info).derive(shared)
        low, high = AESGCM(keys[:32]), AESGCM(keys[32:])
        self._tx, self._rx = (low, high) if me < you else (high, low)

    def seal(self, data: bytes, lane: int = 0) -> bytes:
        """Encrypt for the partner; only once `ready`."""
        assert self._tx is not None, "seal before the hellos were exchanged"
        head = _HEAD.pack(lane, self._sent[lane])
        self._sent[lane] += 1
        return head + self._tx.encrypt(_nonce(head), data, None)

    def open(self, frame: bytes | memoryview) -> tuple[int, bytes]:
        """Return the lane and the data; raise `BadSeal` if altered, seen before or too old."""
        if self._rx is None or len(frame) < SEAL_BYTES:
            raise BadSeal(f"{len(frame)} bytes cannot be opened here")
        head = bytes(frame[: _HEAD.size])
        lane, counter = _HEAD.unpack(head)
        if lane >= LANES or not self._seen[lane].fresh(counter):
            raise BadSeal(f"frame {counter} of lane {lane} was seen before or is too old")
        try:
            data = self._rx.decrypt(_nonce(head), frame[_HEAD.size :], None)
        except InvalidTag:
            raise BadSeal(
                f"frame {counter} of lane {lane} is not what {self._partner} sealed"
            ) from None
        self._seen[lane].mark(counter)
        return lane, data


def _nonce(head: bytes) -> bytes:
    return head[:1] + b"\x00\x00\x00" + head[1:]
