"""Invites: one word that holds a run's id, its founder, some addresses and an expiry.

Any member can mint one.

`farflock:` + base64url, unpadded, of msgpack [version, run, founder, addresses, expires] and the
first 4 bytes of SHA-256 over `farflock-invite` and that msgpack. The checksum guards against typing
errors; the manifest that a joiner then downloads is verified against the run's id and the founder's
signature.
"""

import base64
import binascii
import hashlib
from typing import Annotated

import msgspec

from farflock.node.errors import Usage

PREFIX = "farflock:"
VERSION = 1
MAX_CHARS = 4096
MAX_ADDRESSES = 8
CHECKSUM_BYTES = 4

# A multiaddress that ends in its peer's id: /ip4/192.0.2.7/tcp/4001/p2p/12D3Koo…
Address = Annotated[
    str, msgspec.Meta(max_length=256, pattern=r"^(/[A-Za-z0-9.:_%-]+)+/p2p/[1-9A-HJ-NP-Za-km-z]+$")
]


class Invite(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of an invite; `expires` in Unix seconds. With three or more addresses it outlives
    the peer that minted it."""

    run: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
    founder: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    expires: Annotated[int, msgspec.Meta(ge=0, le=2**40)]


def mint(invite: Invite) -> str:
    """Return the invite as text; raise `ValueError` (msgspec's) if no peer could read it."""
    fields = msgspec.structs.astuple(invite)
    msgspec.convert(fields, Invite)
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
    if invite.expires < now_s:
        age_h = (now_s - invite.expires) / 3600
        raise Usage(
            f"the invite expired {age_h:.1f} hours ago",
            "",
            "ask any member of the run for a new one",
        )
    return invite


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
