"""The world of a process's peer: its identity, real links, worker threads, and the directory.

The links are open at once; the directory is opened beside them, and hivemind is imported only then.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from farflock.node.assembly.directory_beside import DirectoryBeside, OpenDirectory
from farflock.node.assembly.kept_ports import KeptPorts, port_in
from farflock.node.assembly.peer_world import Clock, Files, PeerWorld, Workers
from farflock.node.errors import Failure, Usage
from farflock.node.state.paths import RunFolder, make_folder
from farflock.swarm.compute import Worker
from farflock.swarm.contact import Contact, contact_of
from farflock.swarm.dht.files import IdentityLock, PortTaken, refuse_taken_ports
from farflock.swarm.identity import Identity
from farflock.swarm.record import unseal
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks

DESCRIPTORS = 8192  # 64 partners take about twenty each, and the directory's process needs some
MAX_DOORS = 16  # by which the directory is entered


@dataclass(frozen=True, slots=True)
class Listening:
    """Where this machine listens: its address, the ports of the links and of the directory (0: any
    free one); in client mode, nowhere."""

    host: str = "127.0.0.1"
    port: int = 0
    dht_port: int = 0
    client_mode: bool = False


def require_startable(folder: Path | None, host: str, *ports: int) -> None:
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
        refuse_taken_ports(f"/ip4/{host}/tcp/{port}" for port in named)
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
    host, client_mode, ports = listening.host, listening.client_mode, KeptPorts(folder.ports)
    port, dht_port = ports.wanted(host, listening.port, listening.dht_port)
    listen = (f"/ip4/{host}/tcp/{dht_port}",)
    refuse_taken_ports(() if client_mode else listen)
    async with contextlib.AsyncExitStack() as opened:
        opened.callback(IdentityLock(folder.identity).release)
        codec, files = Worker("codec"), Worker("files")
        for worker in (codec, files):
            opened.callback(worker.close)
        options = LinkOptions(
            incarnation=secrets.randbits(62),
            sequence=int(time.time() * 1000),
            listen=None if client_mode else f"tcp://{host}:{port}",
        )
        try:
            links = await ZmqLinks.open(identity, run, options)
        except OSError:
            if client_mode or listening.port or not port:
                raise
            options = replace(options, listen=f"tcp://{host}:0")  # taken since it was looked at
            links = await ZmqLinks.open(identity, run, options)
        opened.push_async_callback(links.close)
        for endpoint in unseal(links.record(), run).endpoints[:1]:
            ports.keep(links=port_in(endpoint))
        for contact in contacts:
            links.expect(contact)

        async def opening() -> OpenDirectory:
            doors = _doors(links, contacts)
            return await _open_directory(folder, run, doors, listen, client_mode)

        def opened_at(addresses: tuple[str, ...]) -> None:
            links.record(doors=addresses)
            if not client_mode:
                ports.keep(directory=next(map(port_in, addresses), 0))

        directory = DirectoryBeside(opening, opened_at)
        opened.push_async_callback(directory.close)
        if not contacts:
            await directory.begin()
        clock, workers = Clock(time.time, rests=True), Workers(codec, files)
        trouble = directory.trouble
        yield PeerWorld(links, directory, clock, workers, Files(folder), trouble), links


def _doors(links: ZmqLinks, contacts: Sequence[Contact]) -> list[str]:
    """Return the ways into the directory that are known by now: of these contacts, and of all peers
    whose records are here."""
    records = [record for record, _ in links.table.known.values()]
    known = [*contacts, *filter(None, map(contact_of, records))]
    doors = (door for contact in known if contact.peer != links.me for door in contact.doors)
    return list(dict.fromkeys(doors))[:MAX_DOORS]


async def _open_directory(
    folder: RunFolder, run: str, doors: Sequence[str], listen: Sequence[str], client_mode: bool
) -> OpenDirectory:
    """Open the directory of a run; its module is imported in a thread, which takes seconds."""
    kademlia = await asyncio.to_thread(import_module, "farflock.swarm.dht.kademlia")
    directory: OpenDirectory = await kademlia.DhtDirectory.open(
        folder.identity,
        run=run,
        initial_peers=doors,
        listen=listen,
        client_mode=client_mode,
        locked=True,
    )
    return directory
