"""The meaning of `--host`, `--advertise` and `--up` on this machine, before anything is opened.

swarm/addresses.py decides what comes of it.
"""

import contextlib
import ipaddress
import math
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import psutil

from farflock.node.assembly.own_addresses import LOOPBACK, Listening
from farflock.node.errors import Usage
from farflock.swarm.addresses import (
    MAX_PUBLISHED,
    AddressScope,
    BadHost,
    LinkAddress,
    hosts_of,
    numeric,
    scope_of,
)

MAX_PORT = 65534  # the next one is for bulk
MAX_BITS = 1e12  # of a line's rate, each second
_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([kmg]bit)", re.ASCII)
_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# Where a connection of each family would go; nothing is sent there (RFC 5737, RFC 3849).
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_FAMILIES = [family for family, _ in _ELSEWHERE]


class Shares(msgspec.Struct, frozen=True):
    """Shares of its machine for a node: bytes per second of the line, and a part of the time of its
    threads. None: what its folder remembers; 0: all."""

    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    cpu: float | None = None

    def __str__(self) -> str:
        """Return them in words; empty if the node may take all."""
        rates = (self.up_bytes_per_s, "sent"), (self.down_bytes_per_s, "read")
        said = [f"{8e-6 * rate:g} Mbit/s {which}" for rate, which in rates if rate]
        said += [f"{self.cpu:.0%} of its threads' time"] if 0 < (self.cpu or 0) < 1 else []
        return ", ".join(said)

    def threads_of(self, threads: int) -> int:
        """Return how many of a node's threads to train with: as few as its share needs, since
        between steps there are pauses, but not within one."""
        return max(1, math.ceil((self.cpu or 1.0) * threads))

    def over(self, before: "Shares") -> "Shares":
        """Return these, and where nothing is said those before."""
        fields = msgspec.structs.asdict(self)
        said = {name: value for name, value in fields.items() if value is not None}
        return msgspec.structs.replace(before, **said)


@dataclass(frozen=True, slots=True)
class OwnPlace:
    """Where a user wants this machine to listen: `host` as `--host` says it (None: see
    `default_host`), the ports of the links and of the directory (0: any free one, or for the links
    that of the first address in `advertise`), and what is published beside; in client mode,
    nowhere. `shares` is what it may take of the machine."""

    host: str | None = None
    port: int = 0
    dht_port: int = 0
    client_mode: bool = False
    advertise: tuple[LinkAddress, ...] = ()
    shares: Shares = Shares()  # noqa: RUF009 - immutable

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports that it takes."""
        outside = self.advertise[0].control if self.advertise else 0
        return () if self.client_mode else (self.port or outside, self.dht_port)

    def hosts(self, option: str = "--host") -> tuple[str, ...]:
        """Return the numeric hosts to bind; raise `Usage`, which names the option, if nobody can
        listen there."""
        host = default_host(self.advertise) if self.host is None else self.host
        return () if self.client_mode else bound_hosts(host, option)

    def listening(self) -> Listening:
        """Return the same, with what the world needs to know of this machine."""
        up, down = (
            rate or math.inf for rate in (self.shares.up_bytes_per_s, self.shares.down_bytes_per_s)
        )
        if self.client_mode:
            return Listening(client_mode=True, up_bytes_per_s=up, down_bytes_per_s=down)
        port, dht_port = self.ports
        at, inside = self.hosts(), owned()
        return Listening(at, port, dht_port, False, inside, self.advertise, owned, up, down)


def owned() -> tuple[str, ...]:
    """Return the addresses of this machine's interfaces, those that lead elsewhere first."""
    found = tuple(each for addresses in _interfaces().values() for each in addresses)
    preferred = [host for host in _preferred() if host in found]
    return tuple(dict.fromkeys((*preferred, *found)))


def bound_hosts(host: str, place: str) -> tuple[str, ...]:
    """Return the numeric hosts to bind for what a user said; raise `Usage` if nobody can listen
    there. `place` names the option or the argument that gave it."""
    try:
        return hosts_of(host, _interfaces(), _resolved)
    except BadHost as error:
        raise Usage(place, error.why, error.remedy) from None


def advertised(texts: Sequence[str], place: str) -> tuple[LinkAddress, ...]:
    """Return the addresses in `ADDRESS:PORT`, whose next port is that of bulk; raise `Usage` for
    any other text, and for more addresses than a peer publishes. An IPv6 address is in brackets,
    and a name stands for all of its addresses."""
    found = []
    for text in texts:
        host, _, port = text.rpartition(":")
        if not (host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) <= MAX_PORT):
            why = f"{text[:64]!r} is not an address and a port"
            raise Usage(place, why, "write both, as in 203.0.113.7:4002 or [2001:db8::7]:4002")
        known = [each for each in _numbers(host) if scope_of(each) > AddressScope.NOWHERE]
        if not known:
            why = f"{host[:64]!r} is not an address that others could dial, nor a known name"
            raise Usage(place, why, "write the address at which others reach this machine")
        found += [LinkAddress(each, int(port), int(port) + 1) for each in known]
    several = tuple(dict.fromkeys(found))
    if len(several) > MAX_PUBLISHED:
        why = f"these are {len(several)} addresses, and a peer publishes {MAX_PUBLISHED}"
        raise Usage(place, why, "name those that most others can dial")
    return several


def rate_bits(text: str) -> float:
    """Parse `100mbit` into 1e8 bits per second; raise `ValueError` for anything else."""
    match = _RATE.fullmatch(text.strip().lower())
    bits = float(match[1]) * _RATE_UNITS[match[2]] if match else 0.0
    if not 0 < bits <= MAX_BITS:
        raise ValueError(
            f"{text!r} is not a rate; write a number and kbit, mbit or gbit, such as 100mbit"
        )
    return bits


def line_rate(text: str | None, place: str) -> float | None:
    """Return the bytes per second of a line, 0 for `all` of it, and None for None; raise `Usage`
    for any other text."""
    try:
        # A program may give a number in spite of the types.
        return None if text is None else 0.0 if text == "all" else rate_bits(str(text)) / 8
    except ValueError as error:
        raise Usage(place, f"{error}, or all", "") from None


def default_host(outside: Sequence[LinkAddress]) -> str:
    """Return where to listen if the user did not say: on loopback alone, or at every address of the
    machine where an address before it is advertised."""
    if not outside:
        return LOOPBACK
    return "::" if any(numeric(each.host).version == 6 for each in outside) else "0.0.0.0"


def _interfaces() -> dict[str, tuple[str, ...]]:
    """Return the addresses of this machine by interface, of those that are up."""
    states = psutil.net_if_stats()
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        hosts = [entry.address for entry in entries if entry.family in _FAMILIES]
        if name not in states or states[name].isup:
            found[name] = tuple(host for host in hosts if scope_of(host) > AddressScope.NOWHERE)
    return found


def _preferred() -> list[str]:
    """Return the addresses from which this machine would reach others, which are not those of a
    bridge to its own containers."""
    found = []
    for family, target in _ELSEWHERE:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            found.append(str(probe.getsockname()[0]))
    return found


def _numbers(host: str) -> Sequence[str]:
    """Return the numeric forms of a host; none for an unknown name."""
    with contextlib.suppress(ValueError):
        return [str(numeric(host))]
    return _resolved(host)


def _resolved(name: str) -> Sequence[str]:
    """Return the addresses of a host name; none if it is unknown."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM) if name else []
        return [str(ipaddress.ip_address(place[0])) for *_, place in found]
    return []
