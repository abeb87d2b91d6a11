"""An optimizer's entry point over the real network: it starts a run, or joins that of an invite.

It does for optimizers what node/process/entering.py does for nodes, but in a background
thread."""

import asyncio
import contextlib
import logging
import math
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from farflock.node.assembly.checkpoints import CHECKPOINT_S, CheckpointManager, last_of, members_of
from farflock.node.assembly.known_run import (
    KnownRun,
    kept_run,
    learn_run,
    listed_by_members,
    own_run,
)
from farflock.node.assembly.own_world import identity_of, require_startable
from farflock.node.assembly.peer_world import PeerWorld
from farflock.node.assembly.session import AddressCache, Session, parse_own, way_back, widened
from farflock.node.errors import Failure, RefusedByRun, Usage
from farflock.node.library.background import Background, BackgroundContext
from farflock.node.library.forked import closed_in_forks
from farflock.node.library.presence import JoinRequest, OptimizerNode, present
from farflock.node.library.rank_calls import is_grouped
from farflock.node.library.run_options import OwnOptions
from farflock.node.process.freed import trimmed
from farflock.node.process.host import OwnPlace, Shares, advertised, line_rate
from farflock.node.process.network import MachineOptions, network, with_shares
from farflock.node.run.invite import Invite
from farflock.node.run.manifest import Manifest, parse
from farflock.node.run.model_section import UserModel
from farflock.node.run.user_terms import TomlTable, founded, require_agreed
from farflock.node.state.checkpoint import Checkpoint, CheckpointError
from farflock.node.state.outer_files import OuterFiles
from farflock.node.state.paths import RunFolder
from farflock.node.train.state_sync import Spool
from farflock.swarm.compute import Worker
from farflock.swarm.dht.greeting import DirectoryUnreachable
from farflock.swarm.identity import Identity
from farflock.swarm.record import unseal
from farflock.swarm.zmq.links import ZmqLinks

KEPT = 2  # checkpoints: the newest, and the one before, if a disk spoils that
FORGETS = (
    "no folder is named, so nothing is kept for the next start of this program: it would begin"
    " another run, or join as a newcomer"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NetworkEntryPoint:
    """An entry point over the real network, in a thread: it starts a run, or joins that of the
    invite."""

    invite: str | None
    place: OwnPlace
    folder: Path | None  # holds what is kept for the next start; None: a temporary one
    checkpoint_s: float

    @classmethod
    def of(cls, invite: str | None, own: OwnOptions) -> "NetworkEntryPoint":
        """Return the one that a program's keywords describe; raise `Usage`, which names the
        keyword, for a wrong one."""
        said, seconds = own.get("advertise", ()), own.get("checkpoint_s", CHECKPOINT_S)
        if not seconds > 0:  # nor NaN
            why = f"{seconds} is not a time from one checkpoint to the next"
            raise Usage("checkpoint_s", why, "give seconds, such as 600.0")
        place = OwnPlace(
            own.get("host"),
            own.get("port", 0),
            own.get("dht_port", 0),
            own.get("client_mode", False),
            advertised([said] if isinstance(said, str) else said, "advertise"),
            Shares(line_rate(own.get("up"), "up"), line_rate(own.get("down"), "down")),
        )
        return cls(invite, place, own.get("folder"), seconds)

    def enter(
        self, join_request: JoinRequest
    ) -> tuple[BackgroundContext[OptimizerNode], Callable[[], None]]:
        """See `EntryPoint`."""
        hosts = self.place.hosts("host")
        wished = join_request.wished  # mistakes are reported before anything is opened
        folder = None if self.folder is None else RunFolder(self.folder)
        if self.invite is None:
            way: Invite | Manifest = founded(wished)
        else:
            way = parse_own(self.invite, folder, time.time())
        require_startable(self.folder, hosts, *self.place.ports)
        background = Background("farflock")
        try:
            life = background.enter(lambda: self._inside(join_request, way))
        except BaseException:
            background.close()
            raise

        def end() -> None:
            life.end()
            background.close()

        return life, end

    @contextlib.asynccontextmanager
    async def _inside(
        self, join_request: JoinRequest, way: Invite | Manifest
    ) -> AsyncIterator[OptimizerNode]:
        """Open everything from the folder to the peer, to join by an invite or to start a run;
        close it in the reverse order."""
        async with contextlib.AsyncExitStack() as kept:
            folder = self.folder or Path(
                kept.enter_context(tempfile.TemporaryDirectory(prefix="farflock-"))
            )
            machine = with_shares(
                MachineOptions(RunFolder(folder), self.place, checkpoint_s=self.checkpoint_s)
            )
            # A step waits for the state's thread, and not for what others need reduced.
            state = Worker("state")
            kept.callback(state.close)
            # Of several processes, each has a part of the state, and reads it with the others.
            keeps = self.folder is not None and not is_grouped()
            life = _Life(machine, identity_of(machine.folder), join_request, state, keeps)
            if self.folder is None:
                log.warning("%s", FORGETS)
            yield await _entered(kept, life, way)


async def _entered(
    kept: contextlib.AsyncExitStack, life: "_Life", way: Invite | Manifest
) -> OptimizerNode:
    """Enter the run as long as `kept` lasts. A program that started it in an earlier life goes back
    to the others, and begins alone only if nobody comes."""
    if isinstance(way, Invite):
        return await kept.enter_async_context(life.joined(way))
    me = life.identity.peer
    run = way.run_id(me)
    require_own_run(life.machine.folder, run, life.join_request.wished)
    back = way_back(life.machine.folder, run, me)
    if back is not None:
        try:
            return await kept.enter_async_context(life.joined(back))
        except (RefusedByRun, DirectoryUnreachable) as reason:
            log.warning("this program goes on alone: %s", reason)  # it shows no other lines
    return await kept.enter_async_context(life.started(way))


def require_own_run(folder: RunFolder, run: str, wished: TomlTable) -> None:
    """Raise `Usage`, with what differs, if a folder belongs to another run than the one that a
    program would start in it: the others of that run may wait for it, and its state would go."""
    kept = kept_run(folder.terms)
    if kept is None or kept.run == run:
        return
    why = f"it is of run {kept.run[:8]}"
    try:
        require_agreed(parse(kept.text, UserModel), wished)
    except RefusedByRun as differs:
        why = f"{why}, in which {differs.what} differs: {differs.why}"
    except Usage:
        why = f"{why}, of another version"
    remedy = "give SwarmOptimizer what it had before, an invite to that run, or another folder"
    raise Usage(f"the folder {folder.path} belongs to another run", why, remedy)


@dataclass(frozen=True, slots=True)
class _Life:
    """One life of a program: its machine and folder, and what it brings into a run."""

    machine: MachineOptions
    identity: Identity
    join_request: JoinRequest
    state: Worker
    keeps: bool  # the state, in the folder

    @contextlib.asynccontextmanager
    async def started(self, manifest: Manifest) -> AsyncIterator[OptimizerNode]:
        """Be in this program's own run: begin it, or go on where the last life stopped."""
        known = own_run(self.identity, manifest, self.join_request.listed)
        async with (
            network(self.machine, self.identity, known.run, ()) as (world, links),
            self._present(world, links, known, founder=True) as here,
        ):
            yield here

    @contextlib.asynccontextmanager
    async def joined(self, invite: Invite) -> AsyncIterator[OptimizerNode]:
        """Be in the run of an invite."""
        wished, listed = self.join_request.wished, self.join_request.listed
        invite = widened(invite, AddressCache(self.machine.folder).read(invite.run))
        contacts = invite.members
        async with network(self.machine, self.identity, invite.run, contacts) as (world, links):
            known = await learn_run(world, invite, model=UserModel)
            theirs = await listed_by_members(links, known, listed)
            require_agreed(known.manifest, wished, listed, theirs)
            async with self._present(world, links, known, founder=False) as here:
                yield here

    @contextlib.asynccontextmanager
    async def _present(
        self, world: PeerWorld, links: ZmqLinks, known: KnownRun, *, founder: bool
    ) -> AsyncIterator[OptimizerNode]:
        folder, files = self.machine.folder, world.workers.files
        async with Session(world, self.identity, known).running() as session:
            peer = session.peer
            peer.context.store.put(self.join_request.listed, "listing")
            report = trimmed(self.join_request.report, files, peer.context.spawn)
            here = OptimizerNode.assemble(
                replace(self.join_request, report=report),
                known.manifest,
                peer,
                self.state,
                session.invite,
                founder=founder,
                spool=Spool(files, OuterFiles(folder.snapshots).allocate),
            )
            here.before, here.keeper = await self._last(known.run), self._keeper(here, known)
            own = unseal(links.record(), known.run).endpoints
            with closed_in_forks(folder.identity, lambda: _addresses(own, links)):
                async with present(session, here):
                    yield here

    async def _last(self, run: str) -> Checkpoint | None:
        """Return the checkpoint of the last life in a run, if there is one; raise `Failure` if all
        are corrupt."""
        if not self.keeps:
            return None
        try:
            return await asyncio.to_thread(last_of, self.machine.folder, run, role_in(run))
        except CheckpointError as error:
            raise Failure("the state in this folder cannot be used", str(error), "") from error

    def _keeper(self, here: OptimizerNode, known: KnownRun) -> CheckpointManager | None:
        if not self.keeps:
            return None
        return CheckpointManager(
            here,
            self.machine.folder,
            known.run,
            known.manifest.canonical().decode(),
            self.machine.checkpoint_s,
            role_in(known.run),
            keep=KEPT,
            written_s=-math.inf,  # a folder that knows a run has a state of it, too
            members=partial(members_of, here.peer),
        )


def role_in(run: str) -> str:
    """Return the role under which a folder keeps the state of a program in a run: one folder may
    see several runs."""
    return f"program:{run[:16]}"


def _addresses(own: Sequence[str], links: ZmqLinks) -> Iterator[str]:
    """Yield this peer's addresses and those that it may have dialled."""
    yield from own
    for record, _ in links.table.known.values():
        yield from record.endpoints
