"""Invites: one word that holds a run's id, its founder, some addresses, an expiry and a grant.

The grant is a capability with its secret key (swarm/capability.py): what lets the bearer in, signed
by the founder, an authority of the run or, where the manifest allows it, any member.

`farflock:` + base64url, unpadded, of msgpack [version, run, founder, addresses, expires, grant] and
the first 4 bytes of SHA-256 over `farflock-invite` and that msgpack. The checksum guards against
typing errors; the manifest that a joiner then downloads is verified against the run's id and the
founder's signature.
"""

import base64
import binascii
import hashlib
from typing import Annotated

import msgspec

from farflock.node.errors import Usage
from farflock.swarm.capability import (
    MAX_UNIX_S,
    MAX_USES,
    SECRET_BYTES,
    BadCapability,
    Capability,
    Level,
    Ticket,
    encode,
    unseal,
)
from farflock.swarm.identity import SIGNATURE_BYTES, Identity, is_peer_id
from farflock.swarm.messages import MAX_MEMBERS

PREFIX = "farflock:"
VERSION = 2
MAX_CHARS = 4096
MAX_ADDRESSES = 8
CHECKSUM_BYTES = 4

# A multiaddress that ends in its peer's id: /ip4/192.0.2.7/tcp/4001/p2p/12D3Koo…
_ID = "[1-9A-HJ-NP-Za-km-z]+"
Address = Annotated[
    str, msgspec.Meta(max_length=256, pattern=rf"\A(/[A-Za-z0-9.:_%-]+)+/p2p/{_ID}\Z")
]


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The part of a capability that the invite does not say elsewhere: its issuer, uses (0: any
    number), votes and level, its secret, and the issuer's signature."""

    issuer: Annotated[str, msgspec.Meta(max_length=64, pattern=rf"\A{_ID}\Z")]
    uses: Annotated[int, msgspec.Meta(ge=0, le=MAX_USES)]
    votes: Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMBERS)]
    level: Level
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    signature: Annotated[
        bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)
    ]


class Invite(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of an invite; `expires` in Unix seconds. With three or more addresses it outlives
    the peer that minted it. A founder's own note of its run has no grant: it needs none."""

    run: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    founder: Annotated[str, msgspec.Meta(max_length=64, pattern=rf"\A{_ID}\Z")]
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    expires: Annotated[int, msgspec.Meta(ge=0, le=MAX_UNIX_S)]
    grant: Grant | None = None

    @property
    def capability(self) -> Capability | None:
        """The capability of its grant; None without one."""
        grant = self.grant
        if grant is None:
            return None
        key = Identity.from_seed(grant.secret).public
        shape = grant.issuer, self.expires, grant.uses, grant.votes, grant.level, key
        return Capability(self.run, *shape)

    @property
    def ticket(self) -> Ticket | None:
        """The capability and its secret, for a request to join; None without a grant."""
        grant, capability = self.grant, self.capability
        if grant is None or capability is None:
            return None
        return Ticket(grant.signature + encode(capability), grant.secret)


def grant_of(issuer: Identity, invite: Invite, uses: int, votes: int, secret: bytes) -> Invite:
    """Return the invite with a grant that this issuer signs, of 32 random bytes."""
    ticket = Ticket.issue(issuer, invite.run, secret, invite.expires, uses, votes)
    signature = ticket.capability[:SIGNATURE_BYTES]
    grant = Grant(issuer.peer, uses, votes, "trusted", secret, signature)
    return msgspec.structs.replace(invite, grant=grant)


def is_address(value: object) -> bool:
    """Return whether this value is an address by which a peer can be found."""
    try:
        address = msgspec.convert(value, Address)
    except msgspec.ValidationError:
        return False
    return is_peer_id(address.rpartition("/p2p/")[2])


def mint(invite: Invite) -> str:
    """Return the invite as text; raise `ValueError` if no peer could read it, or join by it."""
    fields = msgspec.to_builtins(invite, builtin_types=(bytes,))
    msgspec.convert(fields, Invite)
    if invite.ticket is None:
        raise ValueError("an invite without a grant lets nobody in")
    body = msgspec.msgpack.encode((VERSION, *fields))
    return PREFIX + base64.urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")


def parse(text: str, now_s: float) -> Invite:
    """Parse an invite at Unix time `now_s`; raise `Usage`, with cause and remedy, if invalid."""
    version, fields = _versioned(_body(text.strip()))
    if version != VERSION:
        remedy = (
            "update farflock" if version > VERSION else "ask a member to update and send a new one"
        )
        raise Usage(
            "the invite has another version",
            f"it is version {version}, and this program reads version {VERSION}",
            remedy,
        )
    try:
        invite = msgspec.convert([msgspec.msgpack.decode(field) for field in fields], Invite)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _damaged(str(error)[:120]) from None
    _require_genuine(invite)
    if invite.expires < now_s:
        age_h = (now_s - invite.expires) / 3600
        raise Usage(
            f"the invite expired {age_h:.1f} hours ago",
            "",
            "ask any member of the run for a new one",
        )
    return invite


def _require_genuine(invite: Invite) -> None:
    """Raise `Usage` unless the invite's issuer signed its capability."""
    try:
        if invite.ticket is None:
            raise BadCapability("it has no capability")
        unseal(invite.ticket.capability, invite.run)
    except BadCapability as error:
        raise Usage(
            "the invite lets nobody in", str(error), "ask any member of the run for a new one"
        ) from None


def _body(text: str) -> bytes:
    """Return the bytes that the checksum covers."""
    if not text.startswith(PREFIX):
        raise Usage(
            "this is not an invite",
            f"it does not begin with {PREFIX!r}",
            "copy the whole word that `farflock run` printed",
        )
    if len(text) > MAX_CHARS:
        raise Usage(
            "this is not an invite",
            f"it has {len(text):,} characters, and an invite at most {MAX_CHARS:,}",
            "copy only the invite",
        )
    packed = text.removeprefix(PREFIX)
    try:
        raw = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise _damaged("it is cut short, or has characters that no invite has") from None
    body, checksum = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
    if not body or checksum != _checksum(body):
        raise _damaged("its checksum does not match, so it was cut or mistyped")
    return body


def _versioned(body: bytes) -> tuple[int, list[msgspec.Raw]]:
    """Return the version and the fields after it, which stay encoded: they depend on the
    version."""
    try:
        version, *fields = msgspec.msgpack.decode(body, type=list[msgspec.Raw])
        return msgspec.msgpack.decode(version, type=int), fields
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _damaged(str(error)[:120]) from None


def _damaged(why: str) -> Usage:
    return Usage("the invite is damaged", why, "copy it again, or ask for a new one")


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"farflock-invite" + body).digest()[:CHECKSUM_BYTES]
