"""The address that a node listens on: checked before anything is opened.

It is also the address that the node publishes, so it must be one that other members can dial.
"""

import ipaddress
import socket

import psutil

from farflock.node.errors import Usage

LOOPBACK = "127.0.0.1"


def require_host(host: str, place: str) -> str:
    """Return the host; raise `Usage` unless it is an IPv4 address that other members could dial.

    `place` names the option or the argument that gave it.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        remedy = f"write {LOOPBACK}" if host == "localhost" else "write the address of this machine"
        raise Usage(place, f"{host[:64]!r} is not an IP address", remedy) from None
    if address.version != 4:
        why = f"{host[:64]} is an IPv6 address, and nodes listen on IPv4"
        raise Usage(place, why, f"write an IPv4 address of this machine{_owned()}")
    if address.is_unspecified:
        why = f"{host} means every address of this machine, and other members need one to dial"
        raise Usage(place, why, f"write the one that they can reach{_owned()}")
    return host


def is_loopback(host: str) -> bool:
    """Return whether only this machine can dial the host."""
    return ipaddress.ip_address(host).is_loopback


def _owned() -> str:
    """Return this machine's addresses as a clause; empty if it has none but loopback."""
    found = sorted(
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not ipaddress.ip_address(entry.address).is_loopback
    )
    return f" (this machine has {', '.join(found)})" if found else ""
