"""A process's way to a swarm: what it contributes, and the world of its peer.

Shared by nodes (node/process/entering.py) and by the optimizer for users' own training loops
(node/library/swarm_optimizer.py).
"""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from farflock.node.assembly.checkpoints import CHECKPOINT_S
from farflock.node.assembly.own_world import open_world
from farflock.node.assembly.peer_world import PeerWorld
from farflock.node.model.device import Device
from farflock.node.model.ranks import Ranks
from farflock.node.model.step_options import StepOptions
from farflock.node.process.disk import DiskPlan
from farflock.node.process.host import OwnPlace, Shares
from farflock.node.run.memory import OuterPlace
from farflock.node.state.paths import RunFolder, make_folder, write_whole
from farflock.swarm.contact import Contact
from farflock.swarm.identity import Identity
from farflock.swarm.zmq.links import ZmqLinks

DATA_CACHE_BYTES = 20 * 10**9
SHARES_FILE = "shares.json"  # in a node's folder


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """This machine's contribution: where it listens, its threads, and its folder."""

    folder: RunFolder
    place: OwnPlace = field(default_factory=OwnPlace)  # where it listens
    threads: int = 1
    codec_threads: int = 1
    checkpoint_s: float = CHECKPOINT_S  # between checkpoints
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


def with_shares(machine: MachineOptions) -> MachineOptions:
    """Return the options with the shares of line and processor that the folder remembers where none
    are named; it remembers those that are."""
    path = machine.folder.path / SHARES_FILE
    before = Shares()
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        before = msgspec.json.decode(path.read_bytes(), type=Shares)
    shares = machine.place.shares.over(before)
    if shares != before:
        make_folder(machine.folder.path)
        write_whole(path, msgspec.json.encode(shares))
    return replace(machine, place=replace(machine.place, shares=shares))


def network(
    machine: MachineOptions, identity: Identity, run: str, contacts: Sequence[Contact]
) -> AbstractAsyncContextManager[tuple[PeerWorld, ZmqLinks]]:
    """Keep the world of this machine's peer open while the block runs: see `open_world`."""
    where = machine.place.listening()
    return open_world(machine.folder, where, identity, run, contacts)
