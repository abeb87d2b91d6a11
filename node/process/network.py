"""A process's entry into a swarm: its identity, its directory and its links.

This module also downloads and verifies a run's terms before the process takes part.

Shared by nodes (node/process/node_process.py) and by the optimizer for users' own training loops
(node/library/swarm_optimizer.py).
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from farflock.node.errors import Failure, RefusedByRun, Usage
from farflock.node.model.device import Device
from farflock.node.model.ranks import Ranks
from farflock.node.model.step_options import StepOptions
from farflock.node.process.disk import DiskPlan
from farflock.node.run.invite import Invite
from farflock.node.run.manifest import Head, Manifest, parse, unseal_head
from farflock.node.run.memory import OuterPlace
from farflock.node.run.model_section import ModelKind, ModelSection
from farflock.node.run.sections import require_same_protocol
from farflock.node.state.paths import RunFolder, make_folder, write_whole
from farflock.swarm.dht.files import PortTaken, refuse_taken_ports
from farflock.swarm.dht.kademlia import DhtDirectory
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.peer.bootstrap import fetch_chunk
from farflock.swarm.record import BadRecord, unseal
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks

LEARN_TIMEOUT_S = 120.0
FETCH_TIMEOUT_S = 20.0
MAX_TERMS_BYTES = 256 * 1024
HEAD_EVERY_S = 60.0
DATA_CACHE_BYTES = 20 * 10**9
DESCRIPTORS = 8192  # 64 partners take about twenty each, and the directory's process needs some


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """This machine's contribution: where it listens, its threads, and its folder."""

    folder: RunFolder
    host: str = "127.0.0.1"
    port: int = 0  # of the links; 0: any free port
    dht_port: int = 0
    threads: int = 1
    codec_threads: int = 1
    client_mode: bool = False  # cannot be dialled
    checkpoint_s: float = 600.0  # between checkpoints
    keep: int = 3  # checkpoints
    keep_bytes: int | None = None  # of checkpoints
    role: str = "auto"  # in a run with a pipeline (node/process/pipeline_role.py)
    outer: OuterPlace = "auto"  # where the method's state is kept
    device: Device = field(default_factory=Device)  # that trains
    step_options: StepOptions = field(default_factory=StepOptions)  # how it does
    ranks: Ranks | None = None  # the processes of this peer, if there are several
    model: Path | None = None  # the folder that a founder's run starts from
    data: tuple[Path, ...] = ()  # folders of prepared data
    disk: int | None = None  # bytes that all of its files may take
    disk_plan: DiskPlan | None = None  # what the disk is given to, once the run is known
    evaluates: bool = True  # has room to evaluate the run, so that it can be drawn for that

    @property
    def data_cache(self) -> int:
        """The bytes of fetched shards that are kept."""
        return (self.disk_plan.data if self.disk_plan else 0) or DATA_CACHE_BYTES


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
async def network(
    machine: MachineOptions, identity: Identity, run: str, addresses: Sequence[str]
) -> AsyncIterator[tuple[DhtDirectory, ZmqLinks]]:
    """Keep the directory and the links open while the block runs.

    The sequence numbers of records start at the wall clock in ms, because they must rise from
    one start to the next."""
    raise_descriptor_limit()
    listen = (f"/ip4/{machine.host}/tcp/{machine.dht_port}",)
    directory = await DhtDirectory.open(
        machine.folder.identity,
        run=run,
        initial_peers=addresses,
        listen=listen,
        client_mode=machine.client_mode,
    )
    try:
        options = LinkOptions(
            incarnation=secrets.randbits(62),
            sequence=int(time.time() * 1000),
            listen=None if machine.client_mode else f"tcp://{machine.host}:{machine.port}",
            doors=directory.addresses,
        )
        links = await ZmqLinks.open(identity, run, options)
        try:
            yield directory, links
        finally:
            await links.close()
    finally:
        await directory.close()


async def learn_run(
    directory: DhtDirectory,
    links: ZmqLinks,
    invite: Invite,
    timeout_s: float = LEARN_TIMEOUT_S,
    model: ModelKind = ModelSection,
) -> tuple[bytes, Manifest, list[bytes]]:
    """Return the run's head, its manifest and some records, each verified against the invite; raise
    `RefusedByRun` if there are none, or if the run's model is of another kind."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        heads = {
            blob: head
            for blob in await directory.heads(invite.run)
            if (head := _head_of(blob, invite))
        }
        records = await directory.peers(invite.run)
        members = known_members(links, records, invite.run)
        if heads:
            newest = max(heads, key=lambda blob: heads[blob].sequence)
            require_same_protocol(heads[newest].protocol)
        if heads and members:
            raw = await fetch_chunk(
                links,
                invite.run,
                heads[newest].digest,
                heads[newest].size,
                members,
                FETCH_TIMEOUT_S,
            )
            if raw is not None:
                manifest = parse(raw, model)
                if manifest.run_id(invite.founder) == invite.run:
                    return newest, manifest, records
                raise RefusedByRun(
                    "the members sent the manifest of another run",
                    "its hash does not match the invite",
                    "ask for a new invite",
                )
        await asyncio.sleep(0.5)
    raise RefusedByRun(
        f"run {invite.run} cannot be joined",
        f"none of its members answered within {timeout_s:.0f} s",
        "check that a member is running, and ask for a new invite",
    )


async def keep_published(directory: DhtDirectory, run: str, head: bytes) -> None:
    """Publish the head again and again, as every member does, so that the run can be found
    without its founder."""
    while True:
        await directory.publish_head(run, head)
        await asyncio.sleep(HEAD_EVERY_S)


def _head_of(blob: bytes, invite: Invite) -> Head | None:
    """Return a head signed by the run's founder, else None."""
    try:
        head = unseal_head(blob)
    except ValueError:
        return None
    fits = (
        head.run == invite.run and head.founder == invite.founder and head.size <= MAX_TERMS_BYTES
    )
    return head if fits else None


def known_members(links: ZmqLinks, records: Sequence[bytes], run: str) -> list[PeerId]:
    """Pass records to the links and return their owners, but for this peer itself."""
    owners = [_learned(links, blob, run) for blob in records]
    return [owner for owner in owners if owner not in ("", links.me)]


def _learned(links: ZmqLinks, blob: bytes, run: str) -> str:
    """Pass a record to the links and return its owner, or "" for a bad record."""
    try:
        owner = unseal(blob, run).peer
    except BadRecord:
        return ""
    links.learn(blob)
    return owner


class AddressCache:
    """The last known addresses of members, by which a restarted node finds its run again even if
    some of them are gone.

    They are in `doors.json` in the node's folder: the run, its founder, and up to
    `MAX_ADDRESSES` addresses."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.path / "doors.json"

    def write(self, invite: Invite) -> None:
        """Store an invite."""
        write_whole(self._path, msgspec.json.encode(msgspec.structs.astuple(invite)))

    def read(self, run: str) -> Invite | None:
        """Return the invite stored for this run, or None if there is none or it cannot be read."""
        try:
            invite = msgspec.json.decode(self._path.read_bytes(), type=Invite)
        except (OSError, msgspec.MsgspecError):
            return None
        return invite if invite.run == run else None
