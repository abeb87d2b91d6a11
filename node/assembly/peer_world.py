"""The surroundings of a peer as data: its links, directory, clock, workers and files.

Processes, swarms in memory, simulations and benchmarks differ in these alone. Every peer is made
here.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from farflock.node.assembly.own_addresses import OwnAddresses
from farflock.node.state.kept_chunks import DownloadFolder
from farflock.node.state.paths import RunFolder
from farflock.swarm.compute import Compute, inline
from farflock.swarm.directory import Directory
from farflock.swarm.identity import Identity
from farflock.swarm.links import Links
from farflock.swarm.peer.peer import STORE_BYTES, Peer, RunTerms
from farflock.swarm.record import unseal


class OwnLinks(Links, Protocol):
    """Links of a peer, which know its record."""

    def record(self) -> bytes:
        """Return this peer's sealed record, as it is now."""
        ...


def loop_s() -> float:
    """Return the time of the running loop, which is virtual in simulations."""
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class Clock:
    """The time at which invites are made, in processes in Unix seconds; and whether a peer to whom
    nothing happens may skip ticks."""

    now_s: Callable[[], float] = loop_s
    rests: bool = False


@dataclass(frozen=True, slots=True)
class Workers:
    """Where a peer computes: checks and reductions, and what reads and writes files."""

    codec: Compute = inline
    files: Compute = inline


@dataclass(frozen=True, slots=True)
class Files:
    """Where a peer keeps what it serves: bytes in memory at most, and a folder if it has one, for
    past rounds, a state that is downloaded, and the addresses of members."""

    folder: RunFolder | None = None
    store_bytes: int = STORE_BYTES


@dataclass(frozen=True, slots=True)
class PeerWorld:
    """The surroundings of one life of one peer: its open links, with its record, and the rest."""

    links: OwnLinks
    directory: Directory | None
    clock: Clock = field(default_factory=Clock)
    workers: Workers = field(default_factory=Workers)
    files: Files = field(default_factory=Files)
    trouble: Callable[[], str] = str  # what keeps the directory from this peer; empty: nothing
    addresses: OwnAddresses | None = None  # that this peer publishes, if it has real links


def peer_over(world: PeerWorld, identity: Identity, terms: RunTerms) -> Peer:
    """Return the peer of a new life in this world; the life is that of the links' record."""
    files = world.files
    peer = Peer(
        terms,
        identity,
        world.links,
        world.directory,
        incarnation=unseal(world.links.record(), terms.run).incarnation,
        record=world.links.record,
        compute=world.workers.codec,
        store_bytes=files.store_bytes,
    )
    peer.ticks.rests = world.clock.rests
    if files.folder is not None:
        from farflock.node.state.shelf import Shelf  # late: with it comes torch

        peer.context.shelve = Shelf(files.folder.rounds, world.workers.files)
        peer.snapshots.kept = DownloadFolder(files.folder.download).of
    return peer
