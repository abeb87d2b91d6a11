"""Where a peer listens, and which of its addresses it publishes: one seam, without I/O.

What is said with `--host` becomes addresses to bind (`hosts_of`); these, the addresses of the
machine's interfaces, what `--advertise` names and what another member has confirmed become the
published ones (`published`), and those say who can reach the peer (`reach_of`). Whoever knows of a
new fact asks again.
"""

import enum
import ipaddress
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from farflock.swarm.links import PeerId

MAX_PUBLISHED = 4  # pairs of endpoints, as many as a record has room for

_NETWORKS = [
    ipaddress.ip_network(network)
    for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
]


class AddressScope(enum.IntEnum):
    """From where an address can be dialled, if nothing is in the way."""

    NOWHERE = 0  # it names no single machine, or only within one link
    MACHINE = 1
    NETWORK = 2  # private: the same address may be another machine's elsewhere
    EVERYWHERE = 3


class BadHost(ValueError):
    """A host on which nobody can listen, or whom nobody can dial; `why` and a `remedy`."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(f"{why}; {remedy}")
        self.why, self.remedy = why, remedy


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """A numeric host, and its ports of a peer's links for control and for bulk."""

    host: str
    control: int
    bulk: int

    @property
    def endpoints(self) -> tuple[str, str]:
        """Its two multiaddresses, as a record has them."""
        start = multiaddress_of(self.host)
        return f"{start}/tcp/{self.control}", f"{start}/tcp/{self.bulk}"


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The facts on a peer that listens: the hosts and ports that are bound, the addresses of
    its machine's interfaces, those that the user advertises, and those that a member of another
    network has confirmed. `leaves_machine`: members of its run are on other machines."""

    hosts: Sequence[str]
    ports: tuple[int, int]
    interfaces: Sequence[str] = ()
    advertised: Sequence[LinkAddress] = ()
    confirmed: Sequence[LinkAddress] = ()
    leaves_machine: bool = False


def numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address, brackets and a mapped IPv4 address undone; `ValueError` if it is none."""
    address = ipaddress.ip_address(host.strip("[]"))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def bracketed(host: str) -> str:
    """Return a numeric host as it stands before a port."""
    address = numeric(host)
    return f"[{address}]" if address.version == 6 else str(address)


def multiaddress_of(host: str) -> str:
    """Return the beginning of a multiaddress; raise `ValueError` for a host that is no address."""
    address = numeric(host)
    return f"/ip{address.version}/{address}"


def scope_of(host: str) -> AddressScope:
    """Return from where a numeric host can be dialled; raise `ValueError` for another."""
    address = numeric(host)
    if address.is_unspecified or address.is_link_local or address.is_multicast:
        return AddressScope.NOWHERE
    if address.is_loopback:
        return AddressScope.MACHINE
    is_private = any(address in network for network in _NETWORKS)
    return AddressScope.NETWORK if is_private else AddressScope.EVERYWHERE


def is_elsewhere(host: str, other: str) -> bool:
    """Return whether two hosts are of different networks: /24 of IPv4, /64 of IPv6."""
    one, two = numeric(host), numeric(other)
    if one.version != two.version:
        return True
    shift = 8 if one.version == 4 else 64
    return int(one) >> shift != int(two) >> shift


def hosts_of(
    said: str,
    interfaces: Mapping[str, Sequence[str]],
    resolve: Callable[[str], Sequence[str]],
) -> tuple[str, ...]:
    """Return the numeric hosts to bind for what a user has said: an address of this machine,
    0.0.0.0 or :: for all, the name of an interface, or a host name, which `resolve` turns into
    addresses (none: it is unknown). Raise `BadHost` if nobody can listen there."""
    owned = [address for each in interfaces.values() for address in each]
    try:
        found = [str(numeric(said))]
    except ValueError:
        named = interfaces.get(said)
        found = [str(numeric(each)) for each in (resolve(said) if named is None else named)]
        if not found:
            why = f"{said[:64]!r} is no address, no interface and no known name"
            raise BadHost(why, f"write an address of this machine{_listed(owned)}") from None
    here = [host for host in dict.fromkeys(found) if _is_here(host, owned)]
    if not here:
        why = f"{said[:64]} is {found[0]}, which" if said != found[0] else said
        why += " is not an address of this machine, or not one that others can dial"
        remedy = f"write one of its own{_listed(owned)}, or let a router in front of it pass on"
        raise BadHost(why, f"{remedy} the ports and write --advertise ADDRESS:PORT")
    return tuple(here)


def _is_here(host: str, owned: Iterable[str]) -> bool:
    """Return whether this machine can listen on the host, and others dial what comes of it."""
    address = numeric(host)
    if address.is_unspecified or address.is_loopback:
        return True
    return scope_of(host) > AddressScope.NOWHERE and address in map(numeric, owned)


def _listed(owned: Iterable[str]) -> str:
    """Return the addresses that others may dial as a clause; empty if there are none."""
    known = [host for host in owned if scope_of(host) > AddressScope.MACHINE]
    return f" ({', '.join(known)})" if known else ""


def published(listener: Whereabouts) -> tuple[LinkAddress, ...]:
    """Return the addresses that a peer publishes, the best one first: what is advertised, then its
    own, from the widest scope to the narrowest, the first of each IP version before the second of
    any. What is confirmed stands before the private ones: another peer may have lied.

    Loopback is published only by a peer that has nothing else, in a run that lives there."""
    own = [host for host in _expanded(listener) if scope_of(host) > AddressScope.NOWHERE]
    wide = [host for host in own if scope_of(host) > AddressScope.MACHINE]
    ranks: dict[str, tuple[int, int, int]] = {}
    for host in wide or ([] if listener.leaves_machine else own):
        scope, version = scope_of(host), numeric(host).version
        before = sum(rank[1:] == (-scope, version) for rank in ranks.values())
        ranks.setdefault(host, (before, -scope, version))
    mine = [LinkAddress(host, *listener.ports) for host in sorted(ranks, key=ranks.__getitem__)]
    if listener.advertised and not wide:
        mine = []  # who is told of another way does not need loopback
    ours = itertools.takewhile(lambda each: _is_public(each.host), mine)
    found = dict.fromkeys((*listener.advertised, *ours, *listener.confirmed, *mine))
    return tuple(found)[:MAX_PUBLISHED]


def _is_public(host: str) -> bool:
    return scope_of(host) == AddressScope.EVERYWHERE


def _expanded(listener: Whereabouts) -> Iterable[str]:
    """Yield the hosts that are bound, each on its own: :: stands for all, 0.0.0.0 for IPv4."""
    for host in listener.hosts:
        address = numeric(host)
        if not address.is_unspecified:
            yield str(address)
            continue
        for owned in map(numeric, listener.interfaces):
            if address.version == 6 or owned.version == 4:
                yield str(owned)


def invited(hosts: Sequence[str]) -> list[str]:
    """Return the hosts of one peer that belong in an invite, of those that it publishes, the best
    first: of the first one's scope, one of each IP version."""
    chosen: dict[int, str] = {}
    for host in hosts:
        if scope_of(host) == scope_of(hosts[0]):
            chosen.setdefault(numeric(host).version, host)
    return list(chosen.values())


def reach_of(addresses: Sequence[LinkAddress], confirmed: tuple[str, PeerId] | None) -> str:
    """Return who can reach a peer that publishes these addresses, as a phrase; `confirmed` is the
    host that a member of another network has dialled, and that member."""
    if not addresses:
        return "nobody: this node only dials out"
    widest = max(addresses, key=lambda each: scope_of(each.host))
    scope = scope_of(widest.host)
    if scope == AddressScope.MACHINE:
        return "only this machine"
    if confirmed is not None:
        return f"confirmed from outside by {confirmed[1][-8:]} ({confirmed[0]})"
    if scope == AddressScope.NETWORK:
        return f"this network ({widest.host})"
    return f"unknown until somebody joins ({widest.host})"
