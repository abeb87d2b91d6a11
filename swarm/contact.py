"""The way to a peer whose record is not here yet: its id, its links' key and its addresses.

Packed, 74 bytes, or 86 with an IPv6 address: public key (32), links' key (32), the address (4 or
16), and the ports (2 each, big endian) of control, of bulk and of the directory (0: none), all on
that one address. A peer with several addresses has a contact for each.
"""

import ipaddress
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from farflock.swarm.addresses import AddressScope, invited, multiaddress_of, numeric, scope_of
from farflock.swarm.identity import peer_id, public_key
from farflock.swarm.links import PeerId
from farflock.swarm.record import Record

_KEYS = struct.Struct(">32s32s")
_PORTS = struct.Struct(">HHH")
KEYS_BYTES = _KEYS.size
PACKED_BYTES = _KEYS.size + 4 + _PORTS.size
PACKED_IP6_BYTES = _KEYS.size + 16 + _PORTS.size
_PLACE = re.compile(r"(/ip4/[0-9.]{7,15}|/ip6/[0-9a-fA-F:.]{2,45})/tcp/([0-9]{1,5})")
_DOOR = re.compile(_PLACE.pattern + r"/p2p/(\w{1,64})")


@dataclass(frozen=True, slots=True)
class Contact:
    """A peer that can be dialled at an address: the ports of its links and, unless that is 0, of
    its directory; `curve` is the key of its links."""

    peer: PeerId
    curve: bytes
    host: str
    control: int
    bulk: int
    door: int = 0

    @property
    def endpoints(self) -> tuple[str, str]:
        """The multiaddresses of its links, as in its record."""
        start = multiaddress_of(self.host)
        return f"{start}/tcp/{self.control}", f"{start}/tcp/{self.bulk}"

    @property
    def doors(self) -> tuple[str, ...]:
        """The multiaddress of its directory, if it has one."""
        start = multiaddress_of(self.host)
        return (f"{start}/tcp/{self.door}/p2p/{self.peer}",) if self.door else ()

    @property
    def is_ip6(self) -> bool:
        """True if its address is an IPv6 one."""
        return numeric(self.host).version == 6

    def pack(self) -> bytes:
        """Return the packed form; raise `ValueError` if nobody could read it."""
        ports = (self.control, self.bulk, self.door)
        if len(self.curve) != 32 or not all(0 <= port < 1 << 16 for port in ports):
            raise ValueError(f"{self} cannot be written down")
        keys, host = _KEYS.pack(public_key(self.peer), self.curve), numeric(self.host).packed
        packed = keys + host + _PORTS.pack(*ports)
        unpack(packed)
        return packed


def unpack(packed: bytes) -> Contact:
    """Return the contact in `PACKED_BYTES` or `PACKED_IP6_BYTES` of any origin; raise `ValueError`
    if it is none."""
    if len(packed) not in (PACKED_BYTES, PACKED_IP6_BYTES):
        raise ValueError(
            f"a contact has {PACKED_BYTES} or {PACKED_IP6_BYTES} bytes, got {len(packed)}"
        )
    public, curve = _KEYS.unpack_from(packed)
    host = ipaddress.ip_address(packed[_KEYS.size : -_PORTS.size])
    control, bulk, door = _PORTS.unpack_from(packed, len(packed) - _PORTS.size)
    if not control or not bulk:
        raise ValueError("a port of a contact is 0")
    if numeric(str(host)) != host:
        raise ValueError("an IPv4 address of a contact is written as an IPv6 one")
    return Contact(peer_id(public), curve, str(host), control, bulk, door)


def contacts_of(record: Record, doors: Sequence[str] = ()) -> list[Contact]:
    """Return how to reach the owner of a record, whose directory has the addresses of the record
    or these `doors`: at the address that it names first and, of the same scope, at one of the other
    IP version. Nothing if it cannot be dialled."""
    found: dict[str, Contact] = {}
    for control, bulk in zip(record.endpoints[::2], record.endpoints[1::2], strict=False):
        contact = _contact(record, control, bulk, doors)
        if contact is not None:
            found.setdefault(contact.host, contact)
    return [found[host] for host in invited(list(found))]


def _contact(record: Record, control: str, bulk: str, doors: Sequence[str]) -> Contact | None:
    """Return the contact at a pair of endpoints; None if a stranger has described none."""
    first, second = _PLACE.fullmatch(control), _PLACE.fullmatch(bulk)
    if not first or not second or first[1] != second[1]:
        return None
    known = map(_DOOR.fullmatch, (*doors, *record.doors))
    ports = [int(door[2]) for door in known if door and door.group(1, 3) == (first[1], record.peer)]
    try:
        host = str(numeric(first[1].rpartition("/")[2]))
        numbers = int(first[2]), int(second[2]), (*ports, 0)[0]
        contact = Contact(record.peer, record.curve, host, *numbers)
        return contact if contact.pack() and scope_of(host) > AddressScope.NOWHERE else None
    except ValueError:
        return None
