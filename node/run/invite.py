"""Invites: one word by which a newcomer finds a run's members; any member can mint one.

`farflock:` + base64url, unpadded, of these bytes, numbers big endian:

    version (1): 2
    shape (1): how many addresses of members follow, 1 to 3, 4 times the founder's place among them
        (3: none), and 16, 32 and 64 for each of them that is an IPv6 one
    the run's id (16); when the invite expires, in Unix seconds (4)
    the founder's public key (32), if it is none of the members
    the members (74 each, or 86 with an IPv6 address, swarm/contact.py); one may come twice, with
        two addresses
    the run's name in ASCII (0 to 32), as a manifest may have it
    the first 4 bytes of SHA-256 over `farflock-invite` and all of the above

The checksum guards against typing errors; the manifest that a joiner then gets is verified against
the run's id and the founder's signature.
"""

import base64
import binascii
import hashlib
import itertools
import re
import struct
from dataclasses import dataclass

from farflock.node.errors import Usage
from farflock.swarm.contact import PACKED_BYTES, PACKED_IP6_BYTES, Contact, unpack
from farflock.swarm.identity import peer_id, public_key
from farflock.swarm.links import PeerId

PREFIX = "farflock:"
VERSION = 2
MAX_CHARS = 480
MAX_READ_CHARS = 4096  # of another version, whose number is told
MAX_MEMBERS = 3
MAX_NAME_BYTES = 32
CHECKSUM_BYTES = 4

_HEAD = struct.Struct(">BB16sI")
_ELSEWHERE = 3  # the founder's place if it is none of the members
_IP6 = 16  # the first member has an IPv6 address; the others follow
_KEY_BYTES = 32
_FIRST_VERSION = b"\x95\x01"  # it was msgpack
_RUN = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9 ._-]{{0,{MAX_NAME_BYTES - 1}}}|")


@dataclass(frozen=True, slots=True)
class Invite:
    """The content of an invite: the run's id in hex, its founder, some members, the beginning of
    its name, and when it expires, in Unix seconds."""

    run: str
    founder: PeerId
    members: tuple[Contact, ...]
    name: str
    expires: int


def mint(invite: Invite) -> str:
    """Return the invite as text; raise `ValueError` if no peer could read it."""
    if not _RUN.fullmatch(invite.run) or not 1 <= len(invite.members) <= MAX_MEMBERS:
        raise ValueError(f"an invite to a run by 1 to {MAX_MEMBERS} members, got {invite}")
    if not _NAME.fullmatch(invite.name) or not 0 <= invite.expires < 1 << 32:
        raise ValueError(f"an invite has a plain name and a time, got {invite}")
    peers = [member.peer for member in invite.members]
    place = peers.index(invite.founder) if invite.founder in peers else _ELSEWHERE
    shape = len(peers) + 4 * place
    shape += sum(_IP6 << number for number, member in enumerate(invite.members) if member.is_ip6)
    fields = [_HEAD.pack(VERSION, shape, bytes.fromhex(invite.run), invite.expires)]
    if place == _ELSEWHERE:
        fields.append(public_key(invite.founder))
    fields += [member.pack() for member in invite.members]
    body = b"".join((*fields, invite.name.encode()))
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
    _, shape, run, expires = _HEAD.unpack_from(body)
    count, place, versions = shape % 4, shape // 4 % 4, shape // _IP6
    elsewhere = place == _ELSEWHERE
    begins = _HEAD.size + _KEY_BYTES * elsewhere
    sizes = [PACKED_IP6_BYTES if versions >> n & 1 else PACKED_BYTES for n in range(count)]
    places = list(itertools.accumulate(sizes, initial=begins))
    ends, is_whole = places[-1], len(body) >= places[-1]
    if not count or (place >= count and not elsewhere) or versions >> count or not is_whole:
        raise ValueError("its length does not fit what it says of its members")
    members = tuple(unpack(body[at:to]) for at, to in itertools.pairwise(places))
    founder = peer_id(body[_HEAD.size : begins]) if elsewhere else members[place].peer
    name = body[ends:].decode("ascii")
    if not _NAME.fullmatch(name):
        raise ValueError("the run's name is none")
    return Invite(run.hex(), founder, members, name, expires)


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
