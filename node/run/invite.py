"""Invites: one word by which a newcomer finds a run's members; any member can mint one.

`farflock:` + base64url, unpadded, of these bytes, numbers big endian:

    version (1): 3
    shape (1): how many addresses of members follow, 1 to 3; and 4, 8 and 16 for each of them that
        is an IPv6 one, 32 and 64 for the second and the third if it is the member before it again
    the run's id (16); when the invite expires, in Unix seconds (4)
    the beginning of the founder's public key (11)
    the members (74 each, or 86 with an IPv6 address, swarm/contact.py), one that comes again
        without its keys (10, or 22)
    the run's name in ASCII (0 to 32), as a manifest may have it
    the first 4 bytes of SHA-256 over `farflock-invite` and all of the above

The checksum guards against typing errors; the manifest that a joiner then gets is verified against
the run's id, which covers the founder's whole id, and the founder's signature. The beginning of the
key, 88 bits that nobody can match, keeps other heads of the same run apart before that.
"""

import base64
import binascii
import hashlib
import itertools
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from farflock.node.errors import Usage
from farflock.swarm.contact import KEYS_BYTES, PACKED_BYTES, PACKED_IP6_BYTES, Contact, unpack
from farflock.swarm.identity import public_key
from farflock.swarm.links import PeerId

PREFIX = "farflock:"
VERSION = 3
MAX_CHARS = 480
MAX_CHARS_OF_ONE = 200  # of one member, whose run's name is cut for that: a line of a chat
MAX_READ_CHARS = 4096  # of another version, whose number is told
MAX_MEMBERS = 3
MAX_NAME_BYTES = 32
CHECKSUM_BYTES = 4
FOUNDER_BYTES = 11

_HEAD = struct.Struct(f">BB16sI{FOUNDER_BYTES}s")
_IP6 = 4  # the first address is an IPv6 one; the others follow
_AGAIN = 32  # the second address is one more of the first member; the third follows
_FIRST_VERSION = b"\x95\x01"  # it was msgpack
_RUN = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9 ._-]{{0,{MAX_NAME_BYTES - 1}}}|")


@dataclass(frozen=True, slots=True)
class Invite:
    """The content of an invite: the run's id in hex, the beginning of its founder's public key,
    some addresses of members, the beginning of its name, and when it expires, in Unix seconds."""

    run: str
    founder: bytes
    members: tuple[Contact, ...]
    name: str
    expires: int


def founder_of(peer: PeerId) -> bytes:
    """Return what an invite says of the founder of its run."""
    return public_key(peer)[:FOUNDER_BYTES]


def fitting_name(name: str, members: Sequence[Contact]) -> str:
    """Return as much of a run's name as an invite by these members has room for."""
    room = MAX_NAME_BYTES
    if len({member.peer for member in members}) == 1:
        bits = (MAX_CHARS_OF_ONE - len(PREFIX)) * 6
        taken = _HEAD.size + sum(map(len, _packed(members))) + CHECKSUM_BYTES
        room = max(0, min(room, bits // 8 - taken))
    return name[:room]


def mint(invite: Invite) -> str:
    """Return the invite as text; raise `ValueError` if no peer could read it."""
    if not _RUN.fullmatch(invite.run) or not 1 <= len(invite.members) <= MAX_MEMBERS:
        raise ValueError(f"an invite to a run by 1 to {MAX_MEMBERS} members, got {invite}")
    if not _NAME.fullmatch(invite.name) or not 0 <= invite.expires < 1 << 32:
        raise ValueError(f"an invite has a plain name and a time, got {invite}")
    if len(invite.founder) != FOUNDER_BYTES:
        raise ValueError(f"an invite has {FOUNDER_BYTES} bytes of its founder's key, got {invite}")
    shape, members = len(invite.members), invite.members
    shape += sum(_IP6 << number for number, member in enumerate(members) if member.is_ip6)
    shape += sum(
        _AGAIN << number for number, pair in enumerate(itertools.pairwise(members)) if _again(*pair)
    )
    head = _HEAD.pack(VERSION, shape, bytes.fromhex(invite.run), invite.expires, invite.founder)
    body = b"".join((head, *_packed(members), invite.name.encode()))
    return PREFIX + base64.urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")


def parse(text: str, now_s: float) -> Invite:
    """Parse an invite at Unix time `now_s`; raise `Usage`, with cause and remedy, if invalid."""
    body = _body(text.strip())
    if body[0] != VERSION:
        raise _other_version(body[0])
    try:
        invite = _content(body)
    except ValueError as error:
        raise _damaged(str(error)[:120]) from None
    if invite.expires < now_s:
        age_h = (now_s - invite.expires) / 3600
        raise Usage(
            f"the invite expired {age_h:.1f} hours ago",
            "",
            "ask any member of the run for a new one",
        )
    return invite


def _content(body: bytes) -> Invite:
    """Return the invite in the bytes that the checksum covers; raise `ValueError` if it is none."""
    if len(body) < _HEAD.size:
        raise ValueError("it is too short")
    _, shape, run, expires, founder = _HEAD.unpack_from(body)
    count, versions, repeats = shape % 4, shape // _IP6 % 8, shape // _AGAIN
    if not count or versions >> count or repeats >> (count - 1):
        raise ValueError("what it says of its members contradicts itself")
    members, at = list[Contact](), _HEAD.size
    for number in range(count):
        size = PACKED_IP6_BYTES if versions >> number & 1 else PACKED_BYTES
        keys = b""
        if number and repeats >> (number - 1) & 1:
            keys = members[-1].pack()[:KEYS_BYTES]
        ends = at + size - len(keys)
        if len(body) < ends:
            raise ValueError("its length does not fit what it says of its members")
        members.append(unpack(keys + body[at:ends]))
        at = ends
    name = body[at:].decode("ascii")
    if not _NAME.fullmatch(name):
        raise ValueError("the run's name is none")
    return Invite(run.hex(), founder, tuple(members), name, expires)


def _packed(members: Sequence[Contact]) -> list[bytes]:
    """Return the packed form of each address; one more of the member before it has no keys."""
    rest = [
        member.pack()[KEYS_BYTES if _again(before, member) else 0 :]
        for before, member in itertools.pairwise(members)
    ]
    return [members[0].pack(), *rest]


def _again(before: Contact, member: Contact) -> bool:
    """Return whether this is one more address of the member before it."""
    return (member.peer, member.curve) == (before.peer, before.curve)


def _body(text: str) -> bytes:
    """Return the bytes that the checksum covers, at least one."""
    if not text.startswith(PREFIX):
        raise Usage(
            "this is not an invite",
            f"it does not begin with {PREFIX!r}",
            "copy the whole word that `farflock run` printed",
        )
    if len(text) > MAX_READ_CHARS:
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
    if body.startswith(_FIRST_VERSION):
        raise _other_version(1)
    return body


def _other_version(version: int) -> Usage:
    newer = version > VERSION
    return Usage(
        "the invite has another version",
        f"it is version {version}, and this program reads version {VERSION}",
        "update farflock" if newer else "ask a member to update and send a new one",
    )


def _damaged(why: str) -> Usage:
    return Usage("the invite is damaged", why, "copy it again, or ask for a new one")


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"farflock-invite" + body).digest()[:CHECKSUM_BYTES]
