"""The addresses that a process's peer publishes, kept true while it runs, and who can reach it."""

import asyncio
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from farflock.swarm.addresses import (
    AddressScope,
    LinkAddress,
    Whereabouts,
    bracketed,
    multiaddress_of,
    numeric,
    published,
    reach_of,
    scope_of,
)
from farflock.swarm.links import PeerId
from farflock.swarm.zmq.links import ZmqLinks
from farflock.swarm.zmq.witness import ASK_EVERY_S

LOOPBACK = "127.0.0.1"
LOOK_S = 20.0  # between two looks at the machine's addresses, and at what members have confirmed
WORD_S = 3 * ASK_EVERY_S  # a member is asked so often, and its word counts for this long
MAX_WORDS = 128  # of members that have confirmed an address; 64 of them may do so twice


@dataclass(frozen=True, slots=True)
class Listening:
    """Where this machine listens: at numeric hosts, of which an unspecified one stands for all of
    the `interfaces`, which `look` reads again, and at the ports of the links and of the directory
    (0: any free one). What is `advertised` is published too. In client mode it listens nowhere."""

    hosts: tuple[str, ...] = (LOOPBACK,)
    port: int = 0
    dht_port: int = 0
    client_mode: bool = False
    interfaces: tuple[str, ...] = ()
    advertised: tuple[LinkAddress, ...] = ()
    look: Callable[[], tuple[str, ...]] | None = None
    up_bytes_per_s: float = math.inf  # of its line that the links may take
    down_bytes_per_s: float = math.inf

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


@dataclass(frozen=True, slots=True)
class Word:
    """An address that a member of another network has confirmed, and until when that counts."""

    address: LinkAddress
    until_s: float


class OwnAddresses:
    """The addresses that a peer with open links publishes; `changed` is called when they change.

    Of the addresses that members of other networks have confirmed lately, that one of each IP
    version counts which most of them name, and among equals the one named last."""

    def __init__(
        self,
        links: ZmqLinks,
        listening: Listening,
        leaves_machine: bool,
        now: Callable[[], float],
    ) -> None:
        self.changed: Callable[[], None] = lambda: None
        self.directory: Callable[[], Sequence[str]] = tuple  # its addresses, once it is open
        self._links, self._listening, self._leaves_machine = links, listening, leaves_machine
        self._tell: Callable[[str], None] = lambda said: None
        self._now, self._told = now, ""
        self._words: dict[tuple[int, PeerId], Word] = {}  # by IP version and member, the last last
        self._published: tuple[LinkAddress, ...] = ()
        links.witness.confirmed = self._confirm

    def publish(self) -> None:
        """Put the addresses of the links, and the doors at these, into the peer's record."""
        self._published = self.links
        self._links.record(addresses=self._published, doors=self.doors(self.directory()))

    async def keep(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Read the machine's addresses again, and end what was confirmed long ago. Between two
        networks a machine has none that others could dial; it keeps those that it had."""
        look = self._listening.look
        found = () if look is None else look()
        if any(scope_of(host) > AddressScope.MACHINE for host in found):
            self._listening = dataclasses.replace(self._listening, interfaces=found)
        self._settle()

    def _confirm(self, address: LinkAddress, by: PeerId) -> None:
        entry = numeric(address.host).version, by
        self._words.pop(entry, None)
        self._words[entry] = Word(address, self._now() + WORD_S)
        if len(self._words) > MAX_WORDS:
            del self._words[next(iter(self._words))]
        self._settle()

    def _settle(self) -> None:
        """Publish what has changed, and tell who can reach this peer if that is new."""
        if self.links != self._published:
            self.publish()
            self.changed()
        if (reach := self.reach()) != self._told:
            self._told = reach
            self._tell(reach)

    @property
    def _confirmed(self) -> list[tuple[LinkAddress, PeerId]]:
        """The address of each IP version that counts, and who named it last; the last one last."""
        now_s, found = self._now(), dict[LinkAddress, PeerId]()
        for entry, word in list(self._words.items()):
            if word.until_s <= now_s:
                del self._words[entry]
                continue
            found.pop(word.address, None)
            found[word.address] = entry[1]
        named = Counter(word.address for word in self._words.values())
        best: dict[int, LinkAddress] = {}
        for address in found:
            version = numeric(address.host).version
            if version not in best or named[address] >= named[best[version]]:
                best[version] = address
        return [(address, by) for address, by in found.items() if address in best.values()]

    @property
    def links(self) -> tuple[LinkAddress, ...]:
        """The addresses of the links, the best first; none if the peer only dials out."""
        bound, said = self._links.listens, self._listening
        if not bound:
            return ()
        ports = bound[0].control, bound[0].bulk
        confirmed = [address for address, _ in self._confirmed]
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
        self._tell, self._told = tell, self.reach()
        tell(self._told)

    def reach(self) -> str:
        """Return who can reach this peer, as a phrase."""
        confirmed = [(address.host, by) for address, by in self._confirmed]
        return reach_of(self.links, confirmed[-1] if confirmed else None)
