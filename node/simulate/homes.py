"""Nodes with folders in simulated lives: whatever ends a life, the next one of the same folder
begins with what is in it, and takes the steps of a process (node/process/entering.py).

Views, checkpoints and known members are real files. Only time, links and local steps are simulated.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from farflock.node.assembly.checkpoints import CheckpointManager, last_of
from farflock.node.assembly.coming_back import Returner, enter
from farflock.node.assembly.known_run import KnownRun
from farflock.node.assembly.part import Part, WholePart
from farflock.node.assembly.resume import Newcomer, load_moments, load_state
from farflock.node.assembly.session import Session, way_back
from farflock.node.errors import RefusedByRun
from farflock.node.loop import Loop
from farflock.node.simulate.lives import SimPeers
from farflock.node.state import checkpoint
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.state.paths import RunFolder
from farflock.node.train.evaluation_watch import EvaluationWatch
from farflock.node.train.state_sync import StateSync
from farflock.swarm.links import PeerId
from farflock.swarm.peer.peer import OpenWait, Peer
from farflock.swarm.peer.snapshots import DownloadProgress, SnapshotUnavailable
from farflock.swarm.protocol.views import Chain
from farflock.swarm.record import Record, seal
from farflock.swarm.sim.network import SimLinks
from farflock.swarm.tasks import cancel

JOIN_S = 20.0  # for members to answer
RESTART_S = 1.0  # from the end of a process that nobody answered to its next start
KEPT = 2  # checkpoints
ENDLESS = 10**12  # tokens


class KeepingPart(Part[Checkpoint], Returner, Protocol):
    """A part with a whole model that can come back to its run."""

    before: Checkpoint | None

    @property
    def loop(self) -> Loop: ...


@dataclass(slots=True)
class PlainNode(WholePart):
    """The part of a node with a whole replica that is no language model."""

    peer: Peer
    state_sync: StateSync
    loop: Loop
    training_task: Newcomer
    before: Checkpoint | None = None
    begins_alike: bool = True
    watch: EvaluationWatch | None = None
    evaluates: bool = False

    @property
    def trained_tokens(self) -> int:
        """The tokens that this node has trained."""
        return self.step * self.loop.training_task.tokens_per_step

    def waits(self) -> list[OpenWait]:
        """Return the open rounds."""
        return self.peer.waits()

    async def run(self, total_tokens: int) -> None:
        """Train until the run has its tokens."""
        await self.loop.run(total_tokens)

    async def resume(self, saved: Checkpoint) -> None:
        """Start the run again where this node's checkpoint ends."""
        self.peer.found()
        load_state(self, saved)

    async def join(
        self,
        records: Sequence[bytes],
        timeout_s: float,
        downloaded: DownloadProgress = lambda here, total: None,
    ) -> None:
        """Join the run through the members with these records."""
        await enter(self, records, timeout_s, downloaded)


@dataclass(slots=True)
class Home:
    """One folder of a key, and the life that goes on in it, or the last one."""

    number: int
    path: Path
    birth: int = 0
    began_s: float = 0.0
    line: SimLinks | None = None  # None: nobody lives here now
    session: Session | None = None
    part: KeepingPart | None = None
    is_in: bool = False
    task: asyncio.Task[None] | None = None
    older: bytes = b""  # the file of views as it was before the newest view
    newest: bytes = b""  # that view's hash

    @property
    def views(self) -> Path:
        """The file of the views."""
        return RunFolder(self.path).views


class LifeWatch(Protocol):
    """An observer of all lives."""

    def kept(self, home: Home, chain: Chain) -> None:
        """Hear of views that a life has put on its disk, before it acts in the newest one."""
        ...

    def enters(self, home: Home, saved: Checkpoint | None) -> None:
        """Hear of a life that begins with this checkpoint."""
        ...

    def founds(self, home: Home) -> None:
        """Hear of a founder that starts its run again at once, waiting for nobody."""
        ...

    def entered(self, home: Home) -> None:
        """Hear of a life that is about to train."""
        ...


@dataclass(slots=True)
class Homes:
    """The folders of all keys of one run, below `folder`, and the lives in them. The first key
    founds the run. `make(peer, home)` assembles the part of a life, which writes a checkpoint
    between two steps every `save_s`."""

    peers: SimPeers
    known: KnownRun
    folder: Path
    make: Callable[[Peer, Home], KeepingPart]
    watch: LifeWatch
    save_s: float
    by_number: dict[int, Home] = field(default_factory=dict)
    copies: dict[int, Home] = field(default_factory=dict)

    def key(self, number: int) -> PeerId:
        """Return the id of a peer."""
        return self.peers.identities[number].peer

    def living(self) -> Iterator[Home]:
        """Yield the homes that somebody lives in, copies last."""
        return (
            home
            for home in (*self.by_number.values(), *self.copies.values())
            if home.line is not None
        )

    def start(self, number: int) -> None:
        """Begin the next life of a key in its folder; the first one makes that."""
        if number not in self.by_number:
            self.by_number[number] = Home(number, self.folder / str(number))
            self.by_number[number].path.mkdir()
        home = self.by_number[number]
        home.task = asyncio.create_task(self._live(home))

    def copy(self, number: int) -> None:
        """Copy a key's folder as it is now, and begin a life in the copy."""
        home = self.by_number[number]
        path = self.folder / f"{number}-copied-{self.peers.births}"
        shutil.copytree(home.path, path)
        copied = self.copies[number] = Home(number, path, older=home.older, newest=home.newest)
        copied.task = asyncio.create_task(self._live(copied))

    async def kill(self, *numbers: int) -> None:
        """End all lives of these keys at once, as a power cut does."""
        ended = [
            home
            for number in numbers
            for home in (self.by_number[number], self.copies.pop(number, None))
            if home is not None
        ]
        await self._end(*ended)

    async def end_copy(self, number: int, *, original: bool) -> None:
        """End one of the two lives of a key; the other one's folder is its home from now on."""
        copied = self.copies.pop(number)
        ended, stays = (
            (self.by_number[number], copied) if original else (copied, self.by_number[number])
        )
        self.by_number[number] = stays
        await self._end(ended)

    async def end_all(self) -> None:
        """End all lives."""
        await self.kill(*self.by_number)

    async def _end(self, *homes: Home) -> None:
        for home in homes:
            self._hang_up(home)
        await cancel(*(home.task for home in homes if home.task is not None))

    def _hang_up(self, home: Home) -> None:
        """End the links of a life, before the life itself ends: it says no more."""
        line, home.line, home.is_in = home.line, None, False
        if line is None:
            return
        network = self.peers.network
        if network.twin(line.me) is not None and network.is_current(line):
            network.end_beside(line)
        else:
            network.kill(line.me)

    # lives

    async def _live(self, home: Home) -> None:
        """Live, again and again where nobody answers: a founder waits for its members for so long,
        and then starts its run again from its own checkpoint."""
        starts_again = False
        while True:
            try:
                await self._live_once(home, starts_again=starts_again)
                return
            except RefusedByRun:
                starts_again = self.key(home.number) == self.known.founder
            except (TimeoutError, SnapshotUnavailable):
                starts_again = False
            self._hang_up(home)
            await asyncio.sleep(RESTART_S)

    async def _live_once(self, home: Home, *, starts_again: bool) -> None:
        me, folder = self.peers.identities[home.number], RunFolder(home.path)
        home.line = self._line(home)
        record = partial(self._record, home.number)
        world = self.peers.world(home.number, home.line, record, folder)
        home.birth, home.began_s = self.peers.births, asyncio.get_running_loop().time()
        saved = last_of(folder, self.known.run)
        async with Session(world, me, self._known(home)).running() as session:
            home.session, home.part = session, self.make(session.peer, home)
            home.part.loop.pause = self._saver(home.part, folder)
            self.watch.enters(home, saved)
            await self._enter(home, session, home.part, saved, starts_again)
            self.watch.entered(home)
            home.is_in = True
            await home.part.run(ENDLESS)

    def _line(self, home: Home) -> SimLinks:
        """Return the links of a new life, beside those of another one of the same key."""
        network, me = self.peers.network, self.key(home.number)
        both = self.by_number.get(home.number), self.copies.get(home.number)
        beside = any(each is not None and each is not home and each.line for each in both)
        return network.beside(me) if beside else network.links(me)

    def _known(self, home: Home) -> KnownRun:
        """Return the run as a process knows it that asks the members whom it can reach."""
        here = {each.number: each for each in self.living() if each.is_in}
        records = [self._record(n, each.birth) for n, each in here.items() if n != home.number]
        return replace(self.known, records=records)

    def _record(self, number: int, birth: int) -> bytes:
        """Return a sealed record, with addresses that a peer remembers, though nobody dials."""
        me, place = self.peers.identities[number], f"/ip4/10.0.0.{1 + number}/tcp/"
        ends = f"{place}4001", f"{place}4002"
        return seal(me, Record(self.known.run, me.peer, birth, birth, bytes(32), ends))

    async def _enter(
        self,
        home: Home,
        session: Session,
        part: KeepingPart,
        saved: Checkpoint | None,
        starts_again: bool,
    ) -> None:
        is_founder = session.peer.me == self.known.founder
        back = way_back(RunFolder(home.path), self.known.run, session.peer.me)
        if is_founder and (starts_again or back is None):
            if not starts_again:
                self.watch.founds(home)
            if saved is None:
                session.start(part)
            else:
                await session.resume(part, saved)
            self._watch_views(home, session)
            return
        session.recall()
        self._watch_views(home, session)
        if saved is not None:
            part.before = saved
            load_moments(part, saved)
        await session.join(part, JOIN_S)

    def _watch_views(self, home: Home, session: Session) -> None:
        """Let the observer hear of views once they are kept, and keep the file as it was before."""
        sync = session.peer.membership.sync
        keep = sync.store

        def kept(chain: Chain) -> None:
            before = home.views.read_bytes() if home.views.exists() else b""
            keep(chain)
            if chain.newest.hash != home.newest:
                home.older, home.newest = before, chain.newest.hash
            self.watch.kept(home, chain)

        sync.store = kept
        if (chain := session.peer.context.chain) is not None:
            home.newest = chain.newest.hash
            self.watch.kept(home, chain)

    def _saver(self, part: KeepingPart, folder: RunFolder) -> Callable[[], Awaitable[None]]:
        """Return what writes a checkpoint if one is due; it is written in no time."""
        run, loop = self.known.run, asyncio.get_running_loop()
        keeper = CheckpointManager(part, folder, run, self.known.manifest.canonical().decode(), 0)
        intact, saved_s = set[Path](), loop.time()

        async def save() -> None:
            nonlocal saved_s
            is_there = part.step in dict(checkpoint.steps(folder.checkpoints))
            if loop.time() - saved_s < self.save_s or is_there:
                return
            saved_s, cut = loop.time(), keeper.cut()
            with part.loop.driver.cuts.added(*cut.groups.values()):
                intact.add(checkpoint.save(folder.checkpoints, cut.step, cut.groups, cut.meta))
            checkpoint.prune(folder.checkpoints, KEPT, None, intact)

        return save
