"""The one way into a run: a `Session` is one life of one peer in it, in any `PeerWorld`.

A process, a program's own loop, a swarm in memory and a visitor take the same steps: the run is
known (node/assembly/known_run.py), the peer runs, a part is assembled over it, and `start`, `join`
or `resume` brings that part in. What differs between them is in the world, as data.
"""

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from farflock.node.assembly.known_run import KnownRun, keep_terms
from farflock.node.assembly.part import Part
from farflock.node.assembly.peer_world import PeerWorld, peer_over
from farflock.node.durable import write_durably
from farflock.node.errors import Failure, RefusedByRun, Usage
from farflock.node.run.invite import MAX_MEMBERS, Invite, fitting_name, founder_of, mint, parse
from farflock.node.state.kept_chunks import DownloadFolder
from farflock.node.state.kept_records import KeptRecords
from farflock.node.state.kept_views import KeptViews
from farflock.node.state.paths import RunFolder
from farflock.swarm.addresses import scope_of
from farflock.swarm.contact import Contact, contacts_of
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS as MAX_IN_RUN
from farflock.swarm.peer.snapshots import DownloadProgress
from farflock.swarm.record import unseal
from farflock.swarm.tasks import cancel

HEAD_EVERY_S = 60.0
REMEMBER_EVERY_S = 1.0  # a founder killed before it knows other members would start the run again
FORGET_EVERY_S = 1.0
INVITE_LASTS_S = 7 * 24 * 3600
INVITE_ROUND_S = 3600  # an invite's end is rounded up, so that a status changes only with the node

SavedT = TypeVar("SavedT")

log = logging.getLogger(__name__)


class Session:
    """One life of a peer in a known run. Use as `async with session.running():`.

    While a part is in, members of the run get its terms from this peer, find it in the directory by
    its signed head, and this peer remembers their addresses. A block that ends says goodbye; one
    that an error ends is a kill."""

    def __init__(self, world: PeerWorld, identity: Identity, known: KnownRun) -> None:
        self.world, self.known = world, known
        self.peer = peer_over(world, identity, known.terms)
        self.waits_for_room = True  # in a full run, until a member leaves
        self.silent = False  # no other member stays, so there is nobody to say goodbye to
        self.peer.membership.admission.on_full = self._say_full
        self._is_in = self._is_recalled = False
        self._records: list[bytes] = []
        self._views: KeptViews | None = None  # in the folder, if there is one
        self._helpers: list[asyncio.Task[None]] = []
        if world.addresses is not None:
            world.addresses.changed = self.peer.membership.book.renew

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Session"]:
        """Run the peer, without a part yet; leave the run with the block, and end its tasks."""
        async with self.peer.running():
            try:
                yield self
                await self.leave()  # not reached by an error
            finally:
                for ended in await cancel(*self._helpers):
                    if isinstance(ended, Exception):
                        log.error("a background task of the peer failed", exc_info=ended)

    def start(self, part: Part[Any]) -> None:
        """Start the run with this part's weights."""
        self._keep_views()
        part.found()
        self._stay()

    async def join(
        self,
        part: Part[Any],
        timeout_s: float,
        downloaded: DownloadProgress = lambda here, total: None,
    ) -> None:
        """Bring a part into the run of others, once there is room and it has the state; raise what
        the part raises, such as `TimeoutError`, if no member answers."""
        await part.join(self.recall(), timeout_s, downloaded)
        self._stay()

    def recall(self) -> list[bytes]:
        """Begin with the views of this peer's last life in its folder, once; return the records of
        members that are known."""
        if not self._is_recalled:
            self._is_recalled, before = True, self._keep_views(recall=True)
            self._records = [*self.known.records, *before]
        return self._records

    async def resume(self, part: Part[SavedT], saved: SavedT) -> None:
        """Start the run again, which no other peer has kept, where this node stopped."""
        self._keep_views()
        await part.resume(saved)
        self._stay()

    def _keep_views(self, *, recall: bool = False) -> list[bytes]:
        """Keep the views in this peer's folder from now on; begin with those of its last life there
        to `recall` them. Return the records of other members of that life."""
        folder, records = self.world.files.folder, list[bytes]()
        if folder is None:
            return records
        kept = self._views = KeptViews(folder.views)
        if recall and (before := kept.read(self.known.run)) is not None:
            self.peer.membership.sync.remember(before)
            records = KeptRecords(folder.records).read()
            self._introduce()  # others may come back with nothing but an address
        if self.known.founder == self.peer.me:  # it can start the run again
            self.peer.branching.returning.timeout_s = self.known.terms.branch_after_s
        self.peer.membership.sync.store = kept.keep
        return records

    def _introduce(self) -> None:
        """Answer those that ask for the run's terms."""
        self.peer.context.store.put(self.known.manifest.canonical(), "manifest")
        self.peer.membership.introductions.head = self.known.head

    async def watch(self, timeout_s: float) -> None:
        """Learn the run's members without a part in it; raise `TimeoutError` if none answers."""
        await self.peer.meet(self.known.records, timeout_s)

    async def leave(self) -> None:
        """Say goodbye, once, if a part is in."""
        stays, self._is_in = self._is_in, False
        if stays and not self.silent:
            await self.peer.leave_gracefully()

    def invite(self) -> str:
        """Return an invite to this peer and to others, since this one may not be dialled, or may
        stop; raise `Failure` if nobody is known that can be."""
        members = _widest([*self._own(), *self._others()])
        if not members:
            raise Failure(
                "no invite can be made",
                "this peer knows no member, itself included, that others could dial",
                "get one from another member",
            )
        return mint(self._invite(members))

    def _own(self) -> list[Contact]:
        """Return the ways to reach this peer, if it can be dialled."""
        sealed, directory = self.peer.membership.book.mine, self.world.directory
        doors = () if directory is None else directory.addresses
        return contacts_of(unseal(sealed, self.known.run), doors) if sealed else []

    def _others(self) -> list[Contact]:
        """Return the ways to reach others: members first, then those by which this peer came."""
        # as a list, for a program may ask for an invite from its own thread
        records, chain = list(self.peer.membership.records.values()), self.peer.context.chain
        members = () if chain is None else chain.newest.peers
        records.sort(key=lambda record: record.peer not in members)
        found = [*itertools.chain.from_iterable(map(contacts_of, records)), *self.known.contacts]
        return [one for one in found if one.peer != self.peer.me]

    def _invite(self, contacts: Sequence[Contact]) -> Invite:
        """Return an invite to the first of these addresses."""
        distinct = {(contact.peer, contact.host): contact for contact in reversed(contacts)}
        members = tuple(reversed(distinct.values()))[:MAX_MEMBERS]
        ends_s = self.world.clock.now_s() + INVITE_LASTS_S
        ends = math.ceil(ends_s / INVITE_ROUND_S) * INVITE_ROUND_S
        name = fitting_name(self.known.manifest.run.name, members)
        return Invite(self.known.run, founder_of(self.known.founder), members, name, ends)

    def _say_full(self) -> None:
        """Say that the run has no room; raise `RefusedByRun` if this peer does not wait for it."""
        full = f"the run is full: it has {MAX_IN_RUN} members, as many as a run can have"
        if not self.waits_for_room:
            remedy = "try again later, or without --no-wait, to wait until a member leaves"
            raise RefusedByRun(full, "", remedy)
        log.warning("%s; this node waits until one of them leaves", full)

    # while a part is in

    def _stay(self) -> None:
        self._is_in = True
        self._introduce()
        if (files := self.world.files.folder) is not None:
            keep_terms(files.terms, self.known)
        for helper in (self._publish(), self._remember(), self._forget_download()):
            self._helpers.append(asyncio.create_task(helper))

    async def _publish(self) -> None:
        """Publish the head again and again, as every member does, so that the run can be found
        without its founder."""
        while self.world.directory is not None:
            await self.world.directory.publish_head(self.known.run, self.known.head)
            await asyncio.sleep(HEAD_EVERY_S)

    async def _remember(self) -> None:
        """Keep on disk how to reach other members, for the next start, and the views if the disk
        was full."""
        known: list[Contact] = []
        while self.world.files.folder is not None:
            if self._views is not None and (chain := self.peer.context.chain) is not None:
                self._views.retry(chain)
            if (others := self._others()) and others != known:
                with contextlib.suppress(OSError):  # a full disk must not end the node
                    AddressCache(self.world.files.folder).write(self._invite(others))
                    known = others
                    KeptRecords(self.world.files.folder.records).keep(self._sealed())
            await asyncio.sleep(REMEMBER_EVERY_S)

    def _sealed(self) -> list[bytes]:
        """Return the sealed records of the other members."""
        sealed, members = self.peer.membership.book.sealed, self.peer.membership.book.others()
        return [sealed[peer] for peer in members if peer in sealed]

    async def _forget_download(self) -> None:
        """Remove a downloaded state from the disk as soon as this peer, a member, does not need it
        for another start."""
        while (files := self.world.files.folder) is not None:
            folder = DownloadFolder(files.download)
            is_needed = not self.peer.membership.is_member or self.peer.snapshots.downloading
            if folder.is_there and not is_needed:
                await self.world.workers.files(folder.clear)
            await asyncio.sleep(FORGET_EVERY_S)


def _widest(contacts: Sequence[Contact]) -> list[Contact]:
    """Return those of the widest scope: a private or a loopback address is of use only where the
    whole run lives there."""
    scopes = [scope_of(contact.host) for contact in contacts]
    return [each for each, scope in zip(contacts, scopes, strict=True) if scope == max(scopes)]


class AddressCache:
    """The last known addresses of members, by which a restarted node finds its run again even if
    some of them are gone.

    They are in `members.txt` in the node's folder, as an invite."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.path / "members.txt"

    def write(self, invite: Invite) -> None:
        """Store an invite."""
        write_durably(self._path, mint(invite).encode())

    def read(self, run: str) -> Invite | None:
        """Return the invite stored for this run, however old, or None if there is none or it cannot
        be read."""
        try:
            invite = parse(self._path.read_text(), 0.0)
        except (OSError, ValueError, Usage):
            return None
        return invite if invite.run == run else None


def parse_own(text: str, folder: RunFolder | None, now_s: float) -> Invite:
    """Parse an invite at Unix time `now_s`; raise `Usage` if it is invalid. One that has expired is
    good for a member that comes back, whose folder knows the run: others may wait for it, and could
    make no new one before that."""
    invite = parse(text, 0.0)
    is_known = folder is not None and AddressCache(folder).read(invite.run) is not None
    return invite if is_known else parse(text, now_s)


def widened(invite: Invite, remembered: Invite | None) -> Invite:
    """Return the invite, with the addresses of members that this peer has known."""
    members = (*invite.members, *(remembered.members if remembered else ()))
    distinct = {(member.peer, member.host): member for member in reversed(members)}
    return replace(invite, members=tuple(reversed(distinct.values())))


def way_back(folder: RunFolder, run: str, me: PeerId) -> Invite | None:
    """Return an invite to the members that a founder's folder knows of its run; None if it knows
    none, or all of them have said goodbye."""
    remembered = AddressCache(folder).read(run)
    alone = remembered is None or KeptViews(folder.views).alone(run, me)
    return None if alone else remembered
