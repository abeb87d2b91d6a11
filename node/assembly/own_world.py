"""The world of a process's peer: its identity, real links, worker threads, and the directory.

The links are open at once; the directory is opened beside them, and hivemind is imported only then.
"""

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from farflock.node.assembly.directory_beside import DirectoryBeside, OpenDirectory
from farflock.node.assembly.kept_ports import KeptPorts, port_in
from farflock.node.assembly.own_addresses import Listening, OwnAddresses, places
from farflock.node.assembly.peer_world import Clock, Files, PeerWorld, Workers
from farflock.node.errors import Failure, LivesElsewhere, Usage
from farflock.node.state.paths import RunFolder, make_folder
from farflock.swarm.addresses import AddressScope, scope_of
from farflock.swarm.compute import Worker
from farflock.swarm.contact import Contact, contacts_of
from farflock.swarm.dht.files import IdentityLock, PortTaken, refuse_taken_ports
from farflock.swarm.identity import Identity
from farflock.swarm.tasks import cancel
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks

DESCRIPTORS = 8192  # 64 partners take about twenty each, and the directory's process needs some
MAX_DOORS = 16  # by which the directory is entered


def require_startable(folder: Path | None, hosts: Sequence[str], *ports: int) -> None:
    """Make the folder, if one is named, and look at the ports (0: any free one), before anything
    starts. Raise `Failure` for a folder that cannot be written to and for a port that another
    program uses, and `Usage` for two equal ports."""
    if folder is not None:
        make_folder(folder)
    named = [port for port in ports if port]
    if len(named) > len(set(named)):
        why = "it is named for both links and discovery, and each needs a port of its own"
        raise Usage(f"port {named[0]}", why, "choose another for one of them, or 0 for any")
    try:
        refuse_taken_ports(place for port in named for place in places(hosts, port))
    except PortTaken as error:
        raise Failure("", str(error), "") from None


def identity_of(folder: RunFolder) -> Identity:
    """Return the identity in this folder's key file; the first start creates it."""
    make_folder(folder.path)
    if not folder.identity.exists():
        Identity.generate().save(folder.identity)
    return Identity.load(folder.identity)


def raise_descriptor_limit() -> None:
    """Let this process open `DESCRIPTORS` files and sockets, or as many as its limit permits."""
    import resource  # late: every system can import this module

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.asynccontextmanager
async def open_world(
    folder: RunFolder,
    listening: Listening,
    identity: Identity,
    run: str,
    contacts: Sequence[Contact],
) -> AsyncIterator[tuple[PeerWorld, ZmqLinks]]:
    """Keep a world open while the block runs, in which these contacts can be reached.

    The identity is that of the folder's key file, which is locked. Without contacts a run begins,
    and its directory with it: that is then open, unless it fails. The sequence numbers of records
    start at the wall clock in ms, because they must rise from one start to the next."""
    raise_descriptor_limit()
    ports = KeptPorts(folder.ports)
    refuse_taken_ports(listening.directory)
    async with contextlib.AsyncExitStack() as opened:
        opened.callback(IdentityLock(folder.identity).release)
        codec, files = Worker("codec"), Worker("files")
        for worker in (codec, files):
            opened.callback(worker.close)
        options = LinkOptions(
            incarnation=secrets.randbits(62),
            sequence=int(time.time() * 1000),
            also=listening.hosts[1:],
            advertise=listening.hosts,  # until it is known what can be dialled
            up_bytes_per_s=listening.up_bytes_per_s,
            down_bytes_per_s=listening.down_bytes_per_s,
            on_twin=(life := OneLife(folder)).stop,
        )
        links = await _open_links(identity, run, options, ports.again(listening), listening)
        opened.push_async_callback(links.close)
        ports.keep(links=next((address.control for address in links.listens), 0))
        now = asyncio.get_running_loop().time
        own = OwnAddresses(links, listening, _leaves_machine(contacts), now)
        own.publish()
        for peer in dict.fromkeys(contact.peer for contact in contacts):
            links.expect(*(contact for contact in contacts if contact.peer == peer))

        async def opening() -> OpenDirectory:
            doors, where = _doors(links, contacts), ports.again(listening)
            return await _open_directory(folder, run, doors, where, own.announced)

        def opened_directory(addresses: tuple[str, ...]) -> None:
            own.publish()
            if not listening.client_mode:
                ports.keep(directory=next(map(port_in, addresses), 0))

        directory = DirectoryBeside(opening, opened_directory)
        opened.push_async_callback(directory.close)
        own.directory = lambda: directory.addresses
        opened.push_async_callback(cancel, asyncio.create_task(own.keep()))
        if not contacts:
            await directory.begin()
        clock, workers = Clock(time.time, rests=True), Workers(codec, files)
        trouble = directory.trouble
        here = PeerWorld(links, directory, clock, workers, Files(folder), trouble, own)
        with life:
            yield here, links


class OneLife:
    """Ends its block with `LivesElsewhere` once `stop` is called: members say that this identity is
    in the run in another process."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._is_told = folder, False
        self._owner = asyncio.current_task()

    def stop(self) -> None:
        """End the block; called in its loop."""
        if not self._is_told and self._owner is not None:
            self._is_told = True
            self._owner.cancel()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._is_told or self._owner is None:
            return
        self._owner.uncancel()
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            raise LivesElsewhere(
                "this node's identity is in the run already",
                f"a process with a copy of {self._folder.path} answers for it",
                "stop one of the two, or give this one an empty --folder",
            ) from None


async def _open_links(
    identity: Identity, run: str, options: LinkOptions, again: Listening, listening: Listening
) -> ZmqLinks:
    """Open the links where this peer listened last, or, if that was taken since it was looked at,
    where it was told to."""
    if again.links != listening.links:
        with contextlib.suppress(OSError):
            return await ZmqLinks.open(identity, run, replace(options, listen=again.links))
    return await ZmqLinks.open(identity, run, replace(options, listen=listening.links))


def _leaves_machine(contacts: Sequence[Contact]) -> bool:
    """Return whether a run, which one enters by these contacts, has members on other machines."""
    return any(scope_of(contact.host) > AddressScope.MACHINE for contact in contacts)


def _doors(links: ZmqLinks, contacts: Sequence[Contact]) -> list[str]:
    """Return the ways into the directory that are known by now: of these contacts, and of all peers
    whose records are here."""
    records = [record for record, _ in links.table.known.values()]
    known = [*contacts, *itertools.chain.from_iterable(map(contacts_of, records))]
    doors = (door for contact in known if contact.peer != links.me for door in contact.doors)
    return list(dict.fromkeys(doors))[:MAX_DOORS]


async def _open_directory(
    folder: RunFolder,
    run: str,
    doors: Sequence[str],
    listening: Listening,
    announced: Sequence[str],
) -> OpenDirectory:
    """Open the directory of a run; its module is imported in a thread, which takes seconds."""
    kademlia = await asyncio.to_thread(import_module, "farflock.swarm.dht.kademlia")
    directory: OpenDirectory = await kademlia.DhtDirectory.open(
        folder.identity,
        run=run,
        initial_peers=doors,
        listen=listening.directory,
        announce_as=announced,
        client_mode=listening.client_mode,
        locked=True,
    )
    return directory
