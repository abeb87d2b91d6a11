"""The addresses that a process's peer publishes, kept true while it runs, and who can reach it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from farflock.swarm.addresses import (
    LinkAddress,
    Whereabouts,
    bracketed,
    multiaddress_of,
    numeric,
    published,
    reach_of,
)
from farflock.swarm.links import PeerId
from farflock.swarm.zmq.links import ZmqLinks

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Listening:
    """Where this machine listens: at numeric hosts, of which an unspecified one stands for all of
    the `interfaces`, and at the ports of the links and of the directory (0: any free one). What is
    `advertised` is published too. In client mode it listens nowhere."""

    hosts: tuple[str, ...] = (LOOPBACK,)
    port: int = 0
    dht_port: int = 0
    client_mode: bool = False
    interfaces: tuple[str, ...] = ()
    advertised: tuple[LinkAddress, ...] = ()

    @property
    def links(self) -> str | None:
        """Where the links listen first; None: nowhere."""
        return None if self.client_mode else f"tcp://{bracketed(self.hosts[0])}:{self.port}"

    @property
    def directory(self) -> tuple[str, ...]:
        """The multiaddresses at which the directory listens; :: is for IPv4 too."""
        if self.client_mode:
            return ()
        hosts = [*self.hosts, "0.0.0.0"] if "::" in self.hosts else self.hosts
        return places(hosts, self.dht_port)


def places(hosts: Iterable[str], port: int) -> tuple[str, ...]:
    """Return the multiaddresses of a port at numeric hosts."""
    return tuple(f"{multiaddress_of(host)}/tcp/{port}" for host in dict.fromkeys(hosts))


class OwnAddresses:
    """The addresses that a peer with open links publishes; `changed` is called when they change.

    Of the addresses that members of other networks have confirmed, the newest of each IP version
    counts."""

    def __init__(self, links: ZmqLinks, listening: Listening, leaves_machine: bool) -> None:
        self.changed: Callable[[], None] = lambda: None
        self._links, self._listening, self._leaves_machine = links, listening, leaves_machine
        self._tell: Callable[[str], None] = lambda said: None
        self._confirmed: dict[int, tuple[LinkAddress, PeerId]] = {}  # by IP version, the last last
        links.witness.confirmed = self._confirm

    def publish(self) -> None:
        """Put the addresses of the links into the peer's record."""
        self._links.record(addresses=self.links)

    def _confirm(self, address: LinkAddress, by: PeerId) -> None:
        before, version = self.links, numeric(address.host).version
        is_new = self._confirmed.get(version, (None, by))[0] != address
        self._confirmed[version] = address, by
        if self.links != before:
            self.publish()
            self.changed()
        if is_new:
            self._tell(self.reach())

    @property
    def links(self) -> tuple[LinkAddress, ...]:
        """The addresses of the links, the best first; none if the peer only dials out."""
        bound, said = self._links.listens, self._listening
        if not bound:
            return ()
        ports = bound[0].control, bound[0].bulk
        confirmed = [address for address, _ in self._confirmed.values()]
        leaves = self._leaves_machine
        return published(
            Whereabouts(said.hosts, ports, said.interfaces, said.advertised, confirmed, leaves)
        )

    @property
    def announced(self) -> tuple[str, ...]:
        """The multiaddresses at which the directory is to be dialled; none if it is to find out."""
        port = self._listening.dht_port
        return places((each.host for each in self.links), port) if port else ()

    def doors(self, addresses: Sequence[str]) -> list[str]:
        """Return the directory's addresses that are at a published host, the best first."""
        hosts = [f"{multiaddress_of(each.host)}/" for each in self.links]
        return [door for host in hosts for door in addresses if door.startswith(host)]

    def tell_reach(self, tell: Callable[[str], None]) -> None:
        """Tell who can reach this peer, now and whenever another address is confirmed."""
        self._tell = tell
        tell(self.reach())

    def reach(self) -> str:
        """Return who can reach this peer, as a phrase."""
        confirmed = [(address.host, by) for address, by in self._confirmed.values()]
        return reach_of(self.links, confirmed[-1] if confirmed else None)
