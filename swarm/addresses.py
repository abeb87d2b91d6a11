"""The grammars of the addresses in a peer's record: records come from strangers.

A place is where something listens: `/ip4/192.0.2.7/tcp/4001`. A door is the place of a directory
with its owner behind it: `/ip4/192.0.2.7/tcp/4001/p2p/12D3Koo…`. Addresses are numbers: a name
would make every reader ask the name's owner.
"""

import ipaddress
import re

from farflock.swarm.links import PeerId

_PLACE = re.compile(r"/ip(4/[0-9.]{7,15}|6/[0-9A-Fa-f:.]{2,45})/tcp/([1-9][0-9]{0,4})")
_MAX_PORT = 65535


def parse_place(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Return the address and the port of a place; raise `ValueError` for any other text."""
    match = _PLACE.fullmatch(text)
    if match is None or int(match[2]) > _MAX_PORT:
        raise ValueError(f"{text[:128]!a} is not of the form /ip4/A/tcp/P or /ip6/A/tcp/P")
    kind, _, host = match[1].partition("/")
    family = ipaddress.IPv4Address if kind == "4" else ipaddress.IPv6Address
    return family(host), int(match[2])


def is_place(text: str) -> bool:
    """Return whether a text is a place."""
    try:
        parse_place(text)
    except ValueError:
        return False
    return True


def is_door(text: str, owner: PeerId) -> bool:
    """Return whether a text is a door of this peer."""
    place, _, peer = text.rpartition("/p2p/")
    return peer == owner and is_place(place)
