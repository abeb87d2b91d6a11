"""A running node as a process: its status, its training, and how it is asked to leave.

How it enters a run is in entering.py, of what it is assembled in assembling.py. Everything lives on
one asyncio loop; computation runs in worker threads.
"""

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farflock.node.assembly.checkpoints import CheckpointManager
from farflock.node.assembly.leaving import Leaving, Unsaved
from farflock.node.assembly.part import Part
from farflock.node.assembly.session import Session
from farflock.node.model.ranks import FollowerLost
from farflock.node.process.busy import TimedWorker
from farflock.node.process.network import MachineOptions
from farflock.node.process.pipeline_role import says_stages_device
from farflock.node.process.replica_role import says_replicas_device
from farflock.node.process.run_data import RunData
from farflock.node.process.status import Status
from farflock.node.process.status_writer import StatusWriter
from farflock.node.process.torchrun import unless_lost
from farflock.node.run.manifest import Manifest
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.state.run_log import RunRecorder
from farflock.node.train.task import StepImpossible
from farflock.swarm.links import PeerId
from farflock.swarm.zmq.links import ZmqLinks

LINGER_S = 5.0  # after the last step: others may still be working towards the last round


@dataclass(slots=True)
class NodeProcess:
    """A running node, as commands and the live view see it."""

    machine: MachineOptions
    session: Session
    links: ZmqLinks
    member: Part[Checkpoint]
    journal: RunRecorder
    keepers: list[CheckpointManager]  # one per held stage, or one for the whole model
    worker: TimedWorker  # that trains, or serves stages
    data: RunData | None = None  # what it trains on, if that was prepared
    show: Callable[[Status], None] = lambda status: None  # called once a second
    leaving: Leaving = field(init=False)

    def __post_init__(self) -> None:
        what = self.session, self.keepers, self.machine.folder, self.journal.report
        self.leaving = Leaving(*what)
        self.leaving.unmerged = lambda: self.member.unmerged
        self.leaving.stop = lambda: self.member.stop()

    @property
    def manifest(self) -> Manifest:
        """The run's terms."""
        return self.session.known.manifest

    @property
    def run(self) -> str:
        """The id of the run."""
        return self.session.known.run

    @property
    def view_s(self) -> float:
        """The longest that a newcomer waits for a membership change, in seconds."""
        return self.manifest.exchange.view_s

    def show_to(self, show: Callable[[Status], None]) -> None:
        """Call `show` with each status from now on."""
        self.show = show

    def stop(self) -> None:
        """Ask the node to leave: it says goodbye, finishes its step and saves."""
        self.leaving.ask()

    def says_device(self) -> str:
        """Return a sentence on the device that the node computes on."""
        if self.manifest.pipeline is not None:
            return says_stages_device(self.member.role, self.machine.device)
        return says_replicas_device(self.machine, self.manifest)

    def says_disk(self) -> str:
        """Return a sentence on the room that the node takes on the disk."""
        return str(self.machine.disk_plan)

    def tell_reach(self, tell: Callable[[str], None]) -> None:
        """Tell who can reach the node, now and whenever a member of another network confirms it."""
        if self.session.world.addresses is not None:
            self.session.world.addresses.tell_reach(tell)

    def awaited(self) -> int:
        """Return how many members the founder waits for before it trains; 0 if it does not wait."""
        first = self.links.me == self.session.known.founder and not self.member.step
        return self.manifest.exchange.start_peers if first else 0

    def invite(self) -> str:
        """Return an invite with this node's address and those of others."""
        return self.session.invite()

    def travelling(self, known: Sequence[PeerId]) -> contextlib.AbstractAsyncContextManager[None]:
        """Let the run's prepared data come and go while the block runs, if it has such; `known` are
        members to ask before the node knows a view."""
        part, data = self.member, self.data
        if data is None:
            return contextlib.nullcontext()
        data.stop_with(lambda: part.stopping)
        founder, evaluates = self.session.known.founder, part.evaluates and self.machine.evaluates
        return data.travelling(part.peer, known, founder, evaluates=evaluates)

    async def train(self, on_start: Callable[["NodeProcess"], None]) -> Path:
        """Train to the run's end, write the status, save, and say goodbye; return the final
        checkpoint's folder."""
        gc.collect()
        gc.freeze()  # some 200,000 objects of the imports, which each full collection would visit
        part, peer, leaving = self.member, self.session.peer, self.leaving
        async with StatusWriter(self).showing(lambda now: self.show(now)):
            on_start(self)
            await leaving.until(lambda: len(peer.context.views.newest.members) >= self.awaited())
            work = part.run(self.manifest.run.total_tokens)
            try:
                await leaving.train(unless_lost(self.machine.ranks, work))
                await leaving.until(lambda: peer.alone, LINGER_S)
                return await leaving.end()
            except StepImpossible:
                leaving.ask()
                with contextlib.suppress(Unsaved):
                    await leaving.end()
                raise
            except FollowerLost:
                await leaving.close()
                raise
            finally:
                self.journal.close()
