"""Capabilities: what lets a peer into a run, and how a request to join shows it.

An issuer (the founder, an authority of the manifest or, if the run allows it, a member) signs that
whoever holds the secret key of a capability may bring so many peers in until it expires. An invite
carries both. A request to join shows the capability and a signature that the secret key made over
the joiner's own id. The secret itself is never sent, so a peer that is asked gains nothing that it
could use, and a request says nothing for anybody but its sender: members may pass it on.

Wire: signature (64 bytes) + msgpack of `Capability`.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from farflock.swarm.identity import SIGNATURE_BYTES, Identity, is_peer_id, peer_id, verify
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_CAPABILITY_BYTES, MAX_MEMBERS, Join, Knock

MAX_USES = 2**16  # of one capability; 0 is any number
MAX_UNIX_S = 2**40
MAX_AUTHORITIES = 8  # keys of one run that may issue capabilities besides its founder's
SECRET_BYTES = 32
# Clocks of machines differ. Whoever asks in time is let in by all voters, or by none.
EXPIRY_GRACE_S = 600.0
_DOMAIN = b"capability"
_JOIN_DOMAIN = b"join"
_KNOCK_DOMAIN = b"knock"  # of its own: no member makes a request to join of it

Level = Literal["trusted"]


class Capability(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An issuer's permission: until `expires` (Unix seconds), `uses` peers may join the run (0:
    any number), with `votes` votes among them, by the secret half of `key`."""

    run: Annotated[str, msgspec.Meta(max_length=64)]
    issuer: Annotated[str, msgspec.Meta(max_length=64)]
    expires: Annotated[int, msgspec.Meta(ge=0, le=MAX_UNIX_S)]
    uses: Annotated[int, msgspec.Meta(ge=0, le=MAX_USES)]
    votes: Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMBERS)]
    level: Level
    key: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]

    @property
    def id(self) -> bytes:
        """The name of this capability: SHA-256 of what is signed, whatever the signature."""
        return hashlib.sha256(encode(self)).digest()

    def is_over(self, unix_s: float) -> bool:
        """True if it lets no new peer in at this time, by the clock of whoever asks."""
        return unix_s > self.expires + EXPIRY_GRACE_S

    def room(self, used: int) -> int:
        """Return how many more peers it lets in after `used`; a peer's table has no more."""
        return MAX_USES if self.uses == 0 else max(0, self.uses - used)


class BadCapability(ValueError):
    """A capability that its issuer did not sign, or that is not the sender's to show."""


_decoder = msgspec.msgpack.Decoder(Capability)
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Issuers:
    """The keys that may issue capabilities of a run: the founder's, `authorities`, and those of
    `members`, if the run lets them invite."""

    founder: PeerId
    authorities: tuple[PeerId, ...] = ()
    members: bool = True

    def allows(self, issuer: PeerId, is_admitted: Callable[[PeerId], bool]) -> bool:
        """True if this key may issue; `is_admitted` tells whether it ever was a member's."""
        own = self.may_give_votes(issuer)
        return own or (self.members and is_admitted(issuer))

    def may_give_votes(self, issuer: PeerId) -> bool:
        """True if the capabilities of this key bring the votes that they name."""
        return issuer == self.founder or issuer in self.authorities

    def inviter(self, capability: Capability | None) -> PeerId | None:
        """Return the member that issued a capability, None if the founder or an authority did.

        What many keys may take is bounded by member: each may issue any number of capabilities."""
        if capability is None or self.may_give_votes(capability.issuer):
            return None
        return capability.issuer


def encode(capability: Capability) -> bytes:
    """Return the canonical bytes, which are signed."""
    return _encoder.encode(capability)


def seal(issuer: Identity, capability: Capability) -> bytes:
    """Sign a capability; raise `BadCapability` if others would refuse it."""
    blob = issuer.sign(_DOMAIN, encode(capability)) + encode(capability)
    unseal(blob, capability.run)
    return blob


def unseal(blob: bytes, run: str) -> Capability:
    """Verify and decode a capability of this run; raise `BadCapability` with the reason."""
    if not SIGNATURE_BYTES < len(blob) <= MAX_CAPABILITY_BYTES:
        raise BadCapability(f"a capability of {len(blob)} bytes")
    signature, body = blob[:SIGNATURE_BYTES], blob[SIGNATURE_BYTES:]
    try:
        capability = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadCapability(f"not a capability: {ascii(str(error))[1:-1]}") from None
    if encode(capability) != body:  # one meaning, one name
        raise BadCapability("a capability in another than its canonical form")
    if not is_peer_id(capability.issuer):
        raise BadCapability("its issuer is not a peer id")
    if capability.run != run:
        raise BadCapability("a capability of another run")
    if not verify(capability.issuer, _DOMAIN, body, signature):
        raise BadCapability("not signed by its issuer")
    return capability


@dataclass(frozen=True, slots=True)
class Ticket:
    """A capability with its secret key: what an invite gives to the peer that it invites."""

    capability: bytes  # sealed
    secret: bytes

    @classmethod
    def issue(
        cls, issuer: Identity, run: str, secret: bytes, expires: int, uses: int, votes: int
    ) -> "Ticket":
        """Sign a new capability, whose secret key comes from `secret`, 32 random bytes."""
        key = Identity.from_seed(secret).public
        capability = Capability(run, issuer.peer, expires, uses, votes, "trusted", key)
        return cls(seal(issuer, capability), secret)

    def request(self, run: str, me: PeerId, record: bytes) -> Join:
        """Return this peer's request to join, with the capability and the proof of its secret."""
        proof = Identity.from_seed(self.secret).sign(_JOIN_DOMAIN, _joins(run, me))
        return Join(record, self.capability, proof)

    def knock(self, run: str, me: PeerId) -> Knock:
        """Return this peer's request to be served before it asks for admission."""
        proof = Identity.from_seed(self.secret).sign(_KNOCK_DOMAIN, _joins(run, me))
        return Knock(self.capability, proof)


def shown(run: str, joiner: PeerId, request: Join | Knock) -> Capability | None:
    """Return the capability that a request shows, None if it shows none; raise `BadCapability`
    unless its issuer signed it and this joiner's request was made with its secret."""
    if not request.capability:
        return None
    capability = unseal(request.capability, run)
    holder = peer_id(capability.key)
    domain = _JOIN_DOMAIN if isinstance(request, Join) else _KNOCK_DOMAIN
    if not verify(holder, domain, _joins(run, joiner), request.proof):
        raise BadCapability("not made with the capability's secret key")
    return capability


def _joins(run: str, joiner: PeerId) -> bytes:
    return msgspec.msgpack.encode((run, joiner))
