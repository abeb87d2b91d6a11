"""How a process comes into a swarm: its identity, directory and links, and what it learns of a run before it takes part.

Shared by nodes (node/process.py) and by the optimizer for other people's loops (node/swarm_optimizer.py).
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from farflock.node.errors import Refused
from farflock.node.invite import Invite
from farflock.node.manifest import Head, Manifest, parse, unseal_head
from farflock.node.paths import RunFolder
from farflock.swarm.bootstrap import fetch_chunk
from farflock.swarm.dht import DhtDirectory
from farflock.swarm.identity import Identity
from farflock.swarm.record import unseal
from farflock.swarm.zmq_links import ZmqLinks

LEARN_TIMEOUT_S = 120.0
MANIFEST_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine gives: where it listens, how many threads, and where its files are."""

    folder: RunFolder
    host: str = "127.0.0.1"
    port: int = 0  # of the links; 0: any
    dht_port: int = 0
    threads: int = 1
    client_mode: bool = False  # cannot be dialled


def identity_of(folder: RunFolder) -> Identity:
    """This machine's identity in this folder: the key file, made on the first start."""
    if not folder.identity.exists():
        Identity.generate().save(folder.identity)
    return Identity.load(folder.identity)


@contextlib.asynccontextmanager
async def network(
    machine: Machine, identity: Identity, run: str, addresses: Sequence[str]
) -> AsyncIterator[tuple[DhtDirectory, ZmqLinks]]:
    """Directory and links, open for as long as the block runs. Sequence numbers of records are milliseconds of the wall
    clock at the start: they must only rise from one start to the next."""
    listen = (f"/ip4/{machine.host}/tcp/{machine.dht_port}",)
    directory = await DhtDirectory.open(
        machine.folder.identity, run=run, initial_peers=addresses, listen=listen, client_mode=machine.client_mode
    )
    try:
        links = await ZmqLinks.open(
            identity,
            run,
            incarnation=secrets.randbits(62),
            sequence=int(time.time() * 1000),
            listen=None if machine.client_mode else f"tcp://{machine.host}:{machine.port}",
        )
        try:
            yield directory, links
        finally:
            await links.close()
    finally:
        await directory.close()


async def learn_run(directory: DhtDirectory, links: ZmqLinks, invite: Invite) -> tuple[bytes, Manifest, list[bytes]]:
    """The run's head, its manifest and some members' records, each verified against the invite."""
    deadline_s = time.monotonic() + LEARN_TIMEOUT_S
    while time.monotonic() < deadline_s:
        heads = [blob for blob in await directory.heads(invite.run) if _head_of(blob, invite) is not None]
        records = await directory.peers(invite.run)
        members = [_owner(blob, invite.run) for blob in records if links.learn(blob)]
        if heads and members:
            head = max((unseal_head(blob) for blob in heads), key=lambda entry: entry.sequence)
            raw = await fetch_chunk(links, invite.run, head.digest, head.size, members, 20.0)
            if raw is not None:
                return heads[0], _checked(raw, invite), records
        await asyncio.sleep(0.5)
    raise Refused(
        f"run {invite.run} cannot be joined",
        "none of its members answered in time",
        "check that somebody is training, and ask for a fresh invite",
    )


def _checked(raw: bytes, invite: Invite) -> Manifest:
    manifest = parse(raw.decode())
    if manifest.run_id(invite.founder) != invite.run:
        raise Refused(
            "the manifest is not the run's", "its hash differs from the invite's run id", "ask for a new invite"
        )
    return manifest


def _head_of(blob: bytes, invite: Invite) -> Head | None:
    """A head that the run's founder signed, else None."""
    try:
        head = unseal_head(blob)
    except ValueError:
        return None
    fits = head.run == invite.run and head.founder == invite.founder and head.size <= MANIFEST_BYTES
    return head if fits else None


def _owner(blob: bytes, run: str) -> str:
    return unseal(blob, run).peer
