"""An optimizer's entry point over the real network: it starts a run, or joins that of an invite.

It does for optimizers what node/process/node_process.py does for nodes, but in a background
thread. Importing this module loads the directory, and with it hivemind."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from farflock.node.errors import Failure
from farflock.node.library.background import Background, BackgroundContext
from farflock.node.library.forked import closed_in_forks
from farflock.node.library.presence import JOIN_TIMEOUT_S, JoinRequest, OptimizerNode, present
from farflock.node.process.freed import trimmed
from farflock.node.process.host import require_host
from farflock.node.process.network import (
    MachineOptions,
    identity_of,
    keep_published,
    learn_run,
    network,
    require_startable,
)
from farflock.node.run.invite import MAX_ADDRESSES, Invite, mint, parse
from farflock.node.run.manifest import Head, Manifest, seal_head
from farflock.node.run.model_section import UserModel
from farflock.node.run.user_terms import founded, require_agreed
from farflock.node.state.outer_files import OuterFiles
from farflock.node.state.paths import RunFolder
from farflock.node.state.shelf import Shelf
from farflock.node.train.state_sync import Spool
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.compute import Compute, Worker
from farflock.swarm.dht.kademlia import DhtDirectory
from farflock.swarm.identity import Identity
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.record import unseal
from farflock.swarm.tasks import cancel
from farflock.swarm.zmq.links import ZmqLinks

INVITE_LASTS_S = 7 * 24 * 3600


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
        require_host(self.host, "host")
        wished = join_request.wished  # mistakes are reported before anything is opened
        way = founded(wished) if self.invite is None else parse(self.invite, time.time())
        ports = () if self.client_mode else (self.port, self.dht_port)
        require_startable(self.folder, self.host, *ports)
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
            machine = MachineOptions(
                RunFolder(folder), self.host, self.port, self.dht_port, client_mode=self.client_mode
            )
            identity = identity_of(machine.folder)
            # A step waits for the state's thread, and not for what others need reduced.
            codecs, state, files = Worker("codec"), Worker("state"), Worker("files")
            for worker in (codecs, state, files):
                kept.callback(worker.close)
            starts = isinstance(way, Manifest)
            run = way.run_id(identity.peer) if isinstance(way, Manifest) else way.run
            known = () if isinstance(way, Manifest) else way.addresses
            async with network(machine, identity, run, known) as (directory, links):
                if isinstance(way, Manifest):
                    terms, founder, records = way, identity.peer, list[bytes]()
                    raw = terms.canonical()
                    head = seal_head(identity, Head(run, founder, digest_of(raw), len(raw), 0))
                else:
                    head, terms, records = await learn_run(
                        directory, links, way, JOIN_TIMEOUT_S, UserModel
                    )
                    require_agreed(terms, join_request.wished)
                    founder = way.founder
                peer = _peer(terms, run, identity, links, directory, codecs)
                peer.context.shelve = Shelf(machine.folder.rounds, files)
                report = trimmed(join_request.report, files, peer.context.spawn)
                doors = (*directory.addresses, *known)
                here = OptimizerNode.assemble(
                    replace(join_request, report=report),
                    terms,
                    peer,
                    state,
                    lambda: _mint(run, founder, doors),
                    founder=starts,
                    spool=Spool(files, OuterFiles(machine.folder.snapshots).allocate),
                )
                own = unseal(links.record(), run).endpoints
                with closed_in_forks(machine.folder.identity, lambda: _addresses(own, links)):
                    async with present(here, records), _published(directory, run, head, here):
                        yield here


@contextlib.asynccontextmanager
async def _published(
    directory: DhtDirectory, run: str, head: bytes, here: OptimizerNode
) -> AsyncIterator[None]:
    """Serve the run's terms from this peer, and keep their head published in the directory."""
    here.peer.context.store.put(here.terms.canonical(), "manifest")
    publishing = asyncio.create_task(keep_published(directory, run, head))
    try:
        yield
    finally:
        await cancel(publishing)


def _peer(
    terms: Manifest,
    run: str,
    identity: Identity,
    links: ZmqLinks,
    directory: DhtDirectory,
    compute: Compute,
) -> Peer:
    known = RunTerms(run, terms.run.seed, terms.exchange.view_s, terms.exchange.branch_after_s)
    incarnation = unseal(links.record(), run).incarnation
    peer = Peer(
        known,
        identity,
        links,
        directory,
        incarnation=incarnation,
        record=links.record,
        compute=compute,
    )
    peer.ticks.rests = True
    return peer


def _addresses(own: Sequence[str], links: ZmqLinks) -> Iterator[str]:
    """Yield this peer's addresses and those that it may have dialled."""
    yield from own
    for record, _ in links.table.known.values():
        yield from record.endpoints


def _mint(run: str, founder: str, doors: Sequence[str]) -> str:
    addresses = tuple(dict.fromkeys(doors))[:MAX_ADDRESSES]
    if not addresses:
        raise Failure(
            "no invite can be made",
            "this peer has no address that others could reach",
            "get one from another member",
        )
    return mint(Invite(run, founder, addresses, int(time.time() + INVITE_LASTS_S)))
