"""The way to a peer whose record is not here yet: its id, its links' key and its addresses.

Packed, 74 bytes: public key (32), links' key (32), IPv4 address (4), and the ports (2 each, big
endian) of control, of bulk and of the directory (0: none), all on that one address.
"""

import ipaddress
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from farflock.swarm.identity import peer_id, public_key
from farflock.swarm.links import PeerId
from farflock.swarm.record import Record

_PACKED = struct.Struct(">32s32s4sHHH")
PACKED_BYTES = _PACKED.size
_PLACE = re.compile(r"/ip4/([0-9.]{7,15})/tcp/([0-9]{1,5})")
_DOOR = re.compile(_PLACE.pattern + r"/p2p/(\w{1,64})")


@dataclass(frozen=True, slots=True)
class Contact:
    """A peer that can be dialled at an IPv4 address: the ports of its links and, unless that is 0,
    of its directory; `curve` is the key of its links."""

    peer: PeerId
    curve: bytes
    host: str
    control: int
    bulk: int
    door: int = 0

    @property
    def endpoints(self) -> tuple[str, str]:
        """The multiaddresses of its links, as in its record."""
        return f"/ip4/{self.host}/tcp/{self.control}", f"/ip4/{self.host}/tcp/{self.bulk}"

    @property
    def doors(self) -> tuple[str, ...]:
        """The multiaddress of its directory, if it has one."""
        return (f"/ip4/{self.host}/tcp/{self.door}/p2p/{self.peer}",) if self.door else ()

    def pack(self) -> bytes:
        """Return the packed form; raise `ValueError` if nobody could read it."""
        host, ports = ipaddress.IPv4Address(self.host).packed, (self.control, self.bulk, self.door)
        if len(self.curve) != 32 or not all(0 <= port < 1 << 16 for port in ports):
            raise ValueError(f"{self} cannot be written down")
        packed = _PACKED.pack(public_key(self.peer), self.curve, host, *ports)
        unpack(packed)
        return packed


def unpack(packed: bytes) -> Contact:
    """Return the contact in `PACKED_BYTES` of any origin; raise `ValueError` if it is none."""
    if len(packed) != PACKED_BYTES:
        raise ValueError(f"a contact has {PACKED_BYTES} bytes, got {len(packed)}")
    public, curve, host, control, bulk, door = _PACKED.unpack(packed)
    if not control or not bulk:
        raise ValueError("a port of a contact is 0")
    return Contact(peer_id(public), curve, str(ipaddress.IPv4Address(host)), control, bulk, door)


def contact_of(record: Record, doors: Sequence[str] = ()) -> Contact | None:
    """Return how to reach the owner of a record, whose directory has the addresses of the record
    or these `doors`; None if it cannot be dialled over IPv4."""
    for control, bulk in zip(record.endpoints[::2], record.endpoints[1::2], strict=False):
        first, second = _PLACE.fullmatch(control), _PLACE.fullmatch(bulk)
        if first and second and first[1] == second[1]:
            found = map(_DOOR.fullmatch, (*doors, *record.doors))
            ports = [
                int(door[2])
                for door in found
                if door and door.group(1, 3) == (first[1], record.peer)
            ]
            contact = Contact(
                record.peer, record.curve, first[1], int(first[2]), int(second[2]), (*ports, 0)[0]
            )
            return contact if _is_sound(contact) else None
    return None


def _is_sound(contact: Contact) -> bool:
    """Return whether a contact that a stranger has described can be written down."""
    try:
        return bool(contact.pack())
    except ValueError:
        return False
