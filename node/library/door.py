"""An optimizer's entry point over the real network: it starts a run, or joins that of an invite.

It does for optimizers what node/process/entering.py does for nodes, but in a background
thread."""

import contextlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from farflock.node.assembly.known_run import KNOWN_S, learn_run, listed_by_members, own_run
from farflock.node.assembly.learnt import learn_terms
from farflock.node.assembly.own_world import identity_of, require_startable
from farflock.node.assembly.session import AddressCache, Session
from farflock.node.errors import RefusedByRun
from farflock.node.library.background import Background, BackgroundContext
from farflock.node.library.forked import closed_in_forks
from farflock.node.library.presence import JoinRequest, OptimizerNode, present
from farflock.node.process.freed import trimmed
from farflock.node.process.host import OwnPlace
from farflock.node.process.network import MachineOptions, network
from farflock.node.run.invite import Invite, parse
from farflock.node.run.manifest import Manifest
from farflock.node.run.model_section import UserModel
from farflock.node.run.user_terms import founded, require_agreed
from farflock.node.state.outer_files import OuterFiles
from farflock.node.state.paths import RunFolder
from farflock.node.train.state_sync import Spool
from farflock.swarm.compute import Worker
from farflock.swarm.dht.greeting import DirectoryUnreachable
from farflock.swarm.identity import Identity
from farflock.swarm.record import unseal
from farflock.swarm.zmq.links import ZmqLinks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NetworkEntryPoint:
    """An entry point over the real network, in a thread: it starts a run, or joins that of the
    invite."""

    invite: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    dht_port: int = 0
    client_mode: bool = False
    folder: Path | None = None  # holds the identity's key; None: a temporary one

    def enter(
        self, join_request: JoinRequest
    ) -> tuple[BackgroundContext[OptimizerNode], Callable[[], None]]:
        """See `EntryPoint`."""
        place = OwnPlace(self.host, self.port, self.dht_port, self.client_mode)
        hosts = place.hosts("host")
        wished = join_request.wished  # mistakes are reported before anything is opened
        way = founded(wished) if self.invite is None else parse(self.invite, time.time())
        require_startable(self.folder, hosts, *place.ports)
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
        with contextlib.ExitStack() as kept:
            folder = self.folder or Path(
                kept.enter_context(tempfile.TemporaryDirectory(prefix="farflock-"))
            )
            place = OwnPlace(self.host, self.port, self.dht_port, self.client_mode)
            machine = MachineOptions(RunFolder(folder), place)
            identity = identity_of(machine.folder)
            # A step waits for the state's thread, and not for what others need reduced.
            state = Worker("state")
            kept.callback(state.close)
            starts = isinstance(way, Manifest)
            run = way.run_id(identity.peer) if isinstance(way, Manifest) else way.run
            if starts and await _lives_on(machine, identity, run):
                starts, way = False, AddressCache(machine.folder).read(run) or way
            contacts = () if isinstance(way, Manifest) else way.members
            async with network(machine, identity, run, contacts) as (world, links):
                if isinstance(way, Manifest):
                    known = own_run(identity, way, join_request.listed)
                else:
                    known = await learn_run(world, way, model=UserModel)
                    theirs = await listed_by_members(links, known, join_request.listed)
                    require_agreed(known.manifest, join_request.wished, join_request.listed, theirs)
                async with Session(world, identity, known).running() as session:
                    peer, files = session.peer, world.workers.files
                    peer.context.store.put(join_request.listed, "listing")
                    report = trimmed(join_request.report, files, peer.context.spawn)
                    here = OptimizerNode.assemble(
                        replace(join_request, report=report),
                        known.manifest,
                        peer,
                        state,
                        session.invite,
                        founder=starts,
                        spool=Spool(files, OuterFiles(machine.folder.snapshots).allocate),
                    )
                    own = unseal(links.record(), run).endpoints
                    with closed_in_forks(machine.folder.identity, lambda: _addresses(own, links)):
                        async with present(session, here):
                            yield here


async def _lives_on(machine: MachineOptions, identity: Identity, run: str) -> bool:
    """Return whether a member of the run that this program started in an earlier life answers: then
    it goes back there, and begins no second one."""
    before = AddressCache(machine.folder).read(run)
    if before is None:
        return False
    try:
        async with network(machine, identity, run, before.members) as (world, _):
            await learn_terms(world, before, KNOWN_S)
    except (RefusedByRun, DirectoryUnreachable):
        log.info("no member of the run that this folder knows answers, so it begins again")
        return False
    return True


def _addresses(own: Sequence[str], links: ZmqLinks) -> Iterator[str]:
    """Yield this peer's addresses and those that it may have dialled."""
    yield from own
    for record, _ in links.table.known.values():
        yield from record.endpoints
