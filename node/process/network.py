"""A process's way to a swarm: its identity, and the world of its peer, with real links, directory,
worker threads and files.

Shared by nodes (node/process/node_process.py) and by the optimizer for users' own training loops
(node/library/swarm_optimizer.py).
"""

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farflock.node.assembly.peer_world import Clock, Files, PeerWorld, Workers
from farflock.node.errors import Failure, Usage
from farflock.node.model.device import Device
from farflock.node.model.ranks import Ranks
from farflock.node.model.step_options import StepOptions
from farflock.node.process.disk import DiskPlan
from farflock.node.run.memory import OuterPlace
from farflock.node.state.paths import RunFolder, make_folder
from farflock.swarm.compute import Worker
from farflock.swarm.dht.files import PortTaken, refuse_taken_ports
from farflock.swarm.dht.kademlia import DhtDirectory
from farflock.swarm.identity import Identity
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks

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
) -> AsyncIterator[tuple[PeerWorld, ZmqLinks]]:
    """Keep a world open while the block runs: the directory, the links and worker threads.

    The sequence numbers of records start at the wall clock in ms, because they must rise from
    one start to the next."""
    raise_descriptor_limit()
    listen = (f"/ip4/{machine.host}/tcp/{machine.dht_port}",)
    async with contextlib.AsyncExitStack() as opened:
        codec, files = Worker("codec"), Worker("files")
        for worker in (codec, files):
            opened.callback(worker.close)
        directory = await DhtDirectory.open(
            machine.folder.identity,
            run=run,
            initial_peers=addresses,
            listen=listen,
            client_mode=machine.client_mode,
        )
        opened.push_async_callback(directory.close)
        options = LinkOptions(
            incarnation=secrets.randbits(62),
            sequence=int(time.time() * 1000),
            listen=None if machine.client_mode else f"tcp://{machine.host}:{machine.port}",
            doors=directory.addresses,
        )
        links = await ZmqLinks.open(identity, run, options)
        opened.push_async_callback(links.close)
        clock = Clock(time.time, rests=True)
        yield (
            PeerWorld(links, directory, clock, Workers(codec, files), Files(machine.folder)),
            links,
        )
