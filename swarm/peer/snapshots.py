"""The states that peers serve to each other: a member offers its snapshot as a list of chunks,
fetched from all that have it (swarm/peer/state_download.py).

For an exact stream, take the state that most answers announce for one round; for a per-peer stream,
any one member's. Chunks are verified by their digests, the whole by the state's hash (in node/).
"""

import asyncio
import collections
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from farflock.swarm.chunk_store import KeptChunks, digest_of
from farflock.swarm.join_time import NO_TRAFFIC, RoundTraffic
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_CHUNK_BYTES, Probe, StateOffer, StateQuery
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.state_download import (
    MAX_LISTED,
    SILENT_S,
    UNVERIFIED_S,
    Listing,
    Room,
    StateDownload,
    StateProgress,
    Wanted,
)
from farflock.swarm.peer.state_download import DownloadProgress as DownloadProgress
from farflock.swarm.peer.state_download import SnapshotUnavailable as SnapshotUnavailable
from farflock.swarm.protocol.state_readers import READS_S, LaterRounds, StateVersion, StateVersions
from farflock.swarm.tasks import cancel

ASK_EVERY_S = 1.0  # queries and offers may be lost
SETTLE_S = 0.5  # wait after the first offer for others to compare it with
MAX_ASKERS = 64  # peers that wait for one snapshot; others ask again
MAX_DISTRUSTED = 64  # bad snapshots remembered; the oldest is forgotten first
# Where no rounds lead on from it, or nobody reads it, a snapshot is offered to newcomers until this
# many rounds have begun since, or for so long.
KEEP_ROUNDS = 4
KEEP_S = 30.0
# Another one is made for a peer that refuses the present one, or that says it is of no use, once
# that is so old.
REMADE_S = 10.0
RENEW_S = READS_S / 3  # between two signs of life of a reader that asks for nothing


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A stream's state after `round`: opaque chunks, its hash, and the run's agreed tokens then.

    Chunks may be views of a mapped file. `digests` are theirs, if they are known already. `firsts`
    are the first rounds that are not in it, by stream, where some are further than `round` says."""

    round: int
    state: bytes
    tokens: int
    chunks: tuple[bytes | memoryview, ...]
    digests: tuple[bytes, ...] = ()
    firsts: Mapping[str, int] = field(default_factory=dict)


Provide = Callable[[], Awaitable[Snapshot]]

_ANOTHER = (
    "the snapshot of %s that was being read cannot be had any more: its members are gone, or rounds"
    " after it are; beginning with that of round %d, of %s"
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Served:
    """A state that is served; it is made anew whenever its `mark` changes, if it has one."""

    provide: Provide
    mark: Callable[[], int] | None
    versions: StateVersions
    traffic: Callable[[], RoundTraffic]  # of the rounds that follow

    def note_mark(self) -> int:
        """Return the present mark; older versions are offered no more."""
        mark = self.mark() if self.mark is not None else 0
        for version in self.versions.kept if self.mark is not None else ():
            version.stale |= version.mark != mark
        return mark


def in_memory(size: int) -> memoryview:
    """Return fresh memory."""
    return memoryview(bytearray(size))


class ServedStates:
    """The states that this peer serves, by stream, with those that read them."""

    def __init__(self, context: PeerContext) -> None:
        self.by_name: dict[str, _Served] = {}
        self._context, readers = context, context.readers
        readers.asked, readers.read = self._heard, self._joins_by
        readers.wanted, readers.outgrown = self._wanted, self._let_go

    def is_fresh(self, version: StateVersion) -> bool:
        """Return whether to offer a version that nobody reads, or from which no rounds lead on."""
        served = self.by_name[version.offer.stream]
        if served.mark is not None or (version.readers and served.versions.rounds is not None):
            return True
        few_rounds = self._context.touched - version.touched <= KEEP_ROUNDS
        return few_rounds and self._context.now() - version.made_s <= KEEP_S

    def release(self, name: str, versions: Sequence[StateVersion]) -> None:
        """Let the chunks of versions go."""
        for version in versions:
            self._context.store.forget(("snapshot", name, version.number))

    def _heard(self, asker: PeerId, digest: bytes) -> None:
        """Note that a peer asked for a chunk, or (without a digest) gave a sign of life."""
        now_s, store = self._context.now(), self._context.store
        for name, served in self.by_name.items():
            served.versions.renew(
                asker,
                now_s,
                lambda version, name=name: (  # type: ignore[misc]
                    store.pins_it(digest, ("snapshot", name, version.number)) if digest else None
                ),
            )

    def _joins_by(self, asker: PeerId, digest: bytes) -> bool:
        """Return whether a chunk is of a state that is served, or of what a newcomer that reads one
        replays."""
        store, chain = self._context.store, self._context.chain
        is_member = chain is not None and chain.newest.lists(asker)
        return any(
            store.pins_it(digest, ("snapshot", name, version.number))
            or (asker in version.readers and not is_member)
            for name, served in self.by_name.items()
            for version in served.versions.kept
        )

    def _wanted(self, stream: str) -> tuple[int, int] | None:
        """Return the round of a stream after which readers need all, and the most bytes of them."""
        now_s = self._context.now()
        for served in self.by_name.values():
            served.versions.expire(now_s)
            if (found := served.versions.wanted(stream)) is not None:
                return found
        return None

    def _let_go(self) -> None:
        """Drop what is not read any more, or from which the rounds do not lead on any more."""
        now_s = self._context.now()
        for name, served in self.by_name.items():
            self.release(name, served.versions.superseded(now_s))


class Snapshots:
    """Serves this peer's snapshots and downloads others'."""

    def __init__(self, context: PeerContext, asked: Callable[[int | None], list[PeerId]]) -> None:
        self._context, self._members = context, asked
        self.kept: Callable[[str], KeptChunks] | None = None  # where chunks of a state stay
        self._states = ServedStates(context)
        self._askers: dict[str, set[PeerId]] = {}  # peers waiting for a snapshot in the making
        self._downloads: dict[str, StateDownload] = {}
        # (state's hash, listing), and who had it
        self._taken: dict[str, tuple[tuple[bytes, bytes], Sequence[PeerId]]] = {}
        self._distrusted: collections.deque[tuple[bytes, bytes]] = collections.deque(
            maxlen=MAX_DISTRUSTED
        )

    def serve(
        self,
        name: str,
        provide: Provide,
        version: Callable[[], int] | None = None,
        rounds: LaterRounds | None = None,
        traffic: Callable[[], RoundTraffic] = lambda: NO_TRAFFIC,
    ) -> None:
        """Answer queries for this stream's snapshot from now on, and say the `traffic` of rounds.

        A snapshot is offered until its `version` changes, or without a `version` for a while. Where
        `rounds` lead on from it, it is offered as long as they do, and is read from all members
        that have it; else it is this member's alone."""
        before = self._states.by_name.get(name)
        versions = StateVersions(rounds, before.versions.kept if before is not None else [])
        versions.made = before.versions.made if before is not None else 0
        for each in versions.kept:  # of a state that another one has replaced
            each.stale = True
        self._states.by_name[name] = _Served(provide, version, versions, traffic)
        self._context.readers.states[name] = versions

    def withdraw(self) -> None:
        """Stop serving: this peer's state is not the run's."""
        for name, served in self._states.by_name.items():
            self._states.release(name, served.versions.kept)
        self._states.by_name.clear()
        self._context.readers.states.clear()

    def receive(self, sender: PeerId, message: StateQuery | StateOffer) -> None:
        """Answer a query, or note an offer."""
        if isinstance(message, StateOffer):
            self._take_offer(sender, message)
        elif (served := self._states.by_name.get(message.stream)) is not None:
            served.note_mark()
            ready = served.versions.to_offer(
                sender,
                self._context.now(),
                self._states.is_fresh,
                lambda version: self._suits(version, message.min_round),
            )
            askers = self._askers.get(message.stream)
            if ready is not None:
                self._send_offer(sender, ready)
            elif askers is None:
                self._askers[message.stream] = {sender}
                self._context.spawn(self._make(message.stream))
            elif len(askers) < MAX_ASKERS:
                askers.add(sender)

    def _suits(self, version: StateVersion, min_round: int) -> bool:
        """Return whether to offer a version to a peer to which states before a round are of no use.
        No peer makes this one copy its state more often than now and then."""
        is_young = self._context.now() - version.made_s < REMADE_S
        return version.offer.round >= min_round or is_young

    def _take_offer(self, sender: PeerId, offer: StateOffer) -> None:
        """Note an offer, unless it is unsolicited, distrusted, stale, or of an unknown view.

        The state of an unknown view might belong to another chain than ours."""
        download, chain = self._downloads.get(offer.stream), self._context.chain
        if download is None or sender not in self._members(download.wanted.stage):
            return  # not asked for, or not by a possible holder
        if (offer.state, offer.digest) in self._distrusted:
            self._context.drop("distrusted snapshot")
            download.refused.setdefault(sender, self._context.now())
        elif chain is None or chain.by_hash(offer.view) is None:
            self._context.drop("snapshot of an unknown view")
            self._context.counters["stale view"] += 1
        elif offer.round < download.wanted.min_round:
            self._context.drop("stale snapshot")
        else:
            download.offers[sender] = offer

    def distrust(self, name: str) -> None:
        """Refuse the last download from now on: the caller found that it is not as offered."""
        self._distrusted.append(self._taken.pop(name)[0])

    @contextlib.asynccontextmanager
    async def reading(self, name: str) -> AsyncIterator[None]:
        """Let the members that the last download came from keep what follows it, while the block
        runs: it may take long to take over a state and the rounds since."""
        async with self._renewing(self._taken[name][1] if name in self._taken else ()):
            yield

    @contextlib.asynccontextmanager
    async def _renewing(self, holders: Sequence[PeerId]) -> AsyncIterator[None]:
        """Stay a reader at these members: at a slow line only one of them is asked for chunks."""

        async def renew() -> None:
            while True:
                for peer in holders:
                    self._context.send(peer, Probe(0))
                await asyncio.sleep(RENEW_S)

        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            await cancel(renewing)

    @property
    def served(self) -> tuple[str, ...]:
        """The names of the snapshots that this peer serves."""
        return tuple(self._states.by_name)

    @property
    def distrusted(self) -> int:
        """The number of snapshots that are refused."""
        return len(self._distrusted)

    @property
    def waiting(self) -> dict[str, int]:
        """The numbers of peers that wait for a snapshot in the making, by stream."""
        return {name: len(askers) for name, askers in self._askers.items()}

    def versions(self, name: str) -> Sequence[StateVersion]:
        """Return what is served of a state, the newest last, with its readers."""
        served = self._states.by_name.get(name)
        return () if served is None else tuple(served.versions.kept)

    def is_asked_by_newcomers(self, name: str) -> bool:
        """Return whether a snapshot in the making is not for members alone."""
        newest = self._context.views.newest
        return not all(newest.lists(asker) for asker in self._askers.get(name, ()))

    @property
    def downloading(self) -> tuple[str, ...]:
        """The streams whose snapshots this peer downloads."""
        return tuple(self._downloads)

    @property
    def coming(self) -> StateProgress | None:
        """The progress of all downloads together; None if nothing is downloaded."""
        coming = [download.coming for download in self._downloads.values()]
        if not coming:
            return None
        return StateProgress(
            sum(each.here_bytes for each in coming),
            sum(each.total_bytes for each in coming),
            sum(each.bytes_per_s for each in coming),
            sum(each.begun_bytes for each in coming),
            max(each.rounds_share for each in coming),
        )

    async def fetch(
        self,
        name: str,
        timeout_s: float | None = None,
        progress: DownloadProgress = lambda here, total: None,
        min_round: int = -1,
        stage: int | None = None,
        max_bytes: int | None = None,
        known: bytes | None = None,
        room: Room = in_memory,
        *,
        keep: bool = False,
        silent_s: float = SILENT_S,
    ) -> Snapshot:
        """Download the state that most members announce, after round `min_round` or later.

        No log leads on from an earlier state, however many peers lag behind with it. With `stage`,
        only its members are asked. A snapshot of more than `max_bytes` is not begun. The one of the
        state that is `known` here comes without chunks. The chunks of others follow one another in
        memory from `room`; `keep` them, as those of a newcomer, for another start, too, where the
        peer has a place for that. Raise `SnapshotUnavailable` after `timeout_s`; if it is None,
        once nothing has come for `silent_s` (swarm/peer/state_download.py), or a newcomer's line is
        measured and cannot carry the rounds beside the state (swarm/join_time.py)."""
        kept = self.kept(name) if keep and self.kept is not None else None
        wanted = Wanted(stage, min_round, max_bytes, known, room, kept, progress, silent_s, keep)
        download = self._downloads[name] = StateDownload(self._context, name, wanted)
        try:
            get = self._while_it_comes if timeout_s is None else self._fetch
            async with asyncio.timeout(timeout_s), download.while_worth_it():
                return await get(download)
        except TimeoutError:
            heard = len(download.offers)
            raise SnapshotUnavailable(
                f"no snapshot of {name} within {timeout_s:.0f} s ({heard} members offered one); "
                "check the network and try again"
            ) from None
        finally:
            self._downloads.pop(name, None)

    async def _while_it_comes(self, download: StateDownload) -> Snapshot:
        """Download without a limit on the whole time, but on silence."""
        silence, silent_s = download.silence, download.wanted.silent_s
        unverified_s = max(UNVERIFIED_S, silent_s)
        try:
            async with silence.limited(unverified_s, "chunk"):
                try:
                    async with silence.limited(silent_s, "byte"):
                        return await self._fetch(download)
                except TimeoutError:
                    raise download.ended(_silent(download, silent_s)) from None
        except TimeoutError:
            raise download.ended(_incomplete(download, unverified_s)) from None

    async def _fetch(self, download: StateDownload) -> Snapshot:
        name, store, begun = download.name, self._context.store, b""
        while True:
            chain = self._context.chain
            await self._gather_offers(download)
            heard = {p: said for p, said in download.offers.items() if p not in download.mute}
            offer, holders = _choose(heard or download.offers, download.stays)
            if offer.state == download.wanted.known:
                return Snapshot(offer.round, offer.state, offer.tokens, ())
            if begun not in (b"", offer.state):
                log.warning(_ANOTHER, name, offer.round, ", ".join(holders))
            begun, pin = offer.state, ("download", name)
            try:
                async with self._renewing(holders):
                    chunks = await download.get(offer, holders)
                if chunks is not None:
                    store.forget(pin)
            finally:
                store.release(pin)
            # After a change of chain, this state belongs to the old one.
            if chunks is not None and self._context.chain is chain:
                self._taken[name] = (offer.state, offer.digest), holders
                return Snapshot(offer.round, offer.state, offer.tokens, chunks)

    async def _gather_offers(self, download: StateDownload) -> None:
        download.offers = {}
        # of streams whose rounds are far apart, the one before the first is below -1
        query = StateQuery(download.name, max(download.wanted.min_round, -1))
        while not download.offers:
            asked = self._members(download.wanted.stage)
            for peer in asked:
                self._context.send(peer, query)
            # one that offered a false state makes another after a while
            since_s = self._context.now() - REMADE_S
            hopeful = [
                peer
                for peer in asked
                if peer not in download.mute and download.refused.get(peer, since_s) >= since_s
            ]
            if any(self._context.life(peer) == "alive" for peer in hopeful):
                download.hears_members()
            await asyncio.sleep(ASK_EVERY_S)
        await asyncio.sleep(SETTLE_S)

    async def _make(self, name: str) -> None:
        """Make a new version, and offer it to all peers that have asked meanwhile."""
        askers = self._askers[name]
        try:
            while (served := self._states.by_name.get(name)) is not None:
                touched, mark = self._context.touched, served.note_mark()
                snapshot = await served.provide()
                if self._states.by_name.get(name) is served:
                    break  # not another state by now
            if served is None:
                return
            served.versions.made += 1
            number, now_s = served.versions.made, self._context.now()
            offer = self._put(name, snapshot, ("snapshot", name, number))
            size = sum(map(len, snapshot.chunks))
            version = StateVersion(number, offer, size, now_s, touched, mark, snapshot.firsts)
            served.versions.add(version, askers)
            self._states.release(name, served.versions.superseded(now_s))
            for waiting in sorted(askers):
                self._send_offer(waiting, version)
        finally:
            del self._askers[name]

    def _send_offer(self, asker: PeerId, version: StateVersion) -> None:
        view = self._context.views.newest.hash
        round_bytes, round_s = self._states.by_name[version.offer.stream].traffic()
        offer = msgspec.structs.replace(
            version.offer, view=view, round_bytes=round_bytes, round_s=round_s
        )
        self._context.send(asker, offer)

    def _put(self, name: str, snapshot: Snapshot, pin: object) -> StateOffer:
        store = self._context.store
        largest = max(map(len, snapshot.chunks), default=0)
        assert largest <= MAX_CHUNK_BYTES, f"{name}: a chunk of {largest} bytes is too large"
        digests = snapshot.digests or map(digest_of, snapshot.chunks)
        listed = [
            (store.put(chunk, pin, digest), len(chunk))
            for chunk, digest in zip(snapshot.chunks, digests, strict=True)
        ]
        listings = [
            msgspec.msgpack.encode(Listing(tuple(listed[first : first + MAX_LISTED])))
            for first in range(0, max(len(listed), 1), MAX_LISTED)
        ]
        listing = listings[0]
        if len(listings) > 1:
            entries = tuple((store.put(each, pin), len(each)) for each in listings)
            listing = msgspec.msgpack.encode(Listing(entries, listings=True))
        digest = store.put(listing, pin)
        return StateOffer(
            name,
            self._context.views.newest.hash,
            snapshot.round,
            snapshot.state,
            digest,
            len(listing),
            snapshot.tokens,
        )


def _silent(download: StateDownload, seconds: float) -> str:
    if download.refused:
        return f"its members offered none that is true for {seconds:.0f} s"
    begun = download.total_bytes
    why = "no byte of it came" if begun else "none of its members could be reached"
    return f"{why} for {seconds:.0f} s"


def _incomplete(download: StateDownload, seconds: float) -> str:
    why = "no part of it came whole" if download.total_bytes else "no member offered it"
    return f"{why} within {seconds:.0f} s"


def _choose(
    offers: dict[PeerId, StateOffer], stays: Callable[[PeerId], bool]
) -> tuple[StateOffer, list[PeerId]]:
    """Return the state announced most often (ties: the newest round) and its holders: one that a
    peer holds who stays, if there is any."""
    announced = {peer: (offer.round, offer.state, offer.digest) for peer, offer in offers.items()}
    votes = collections.Counter(announced.values())
    lasting = {entry for peer, entry in announced.items() if stays(peer)}
    best = max(lasting or votes, key=lambda entry: (votes[entry], entry[0], entry[1]))
    holders = sorted(peer for peer, entry in announced.items() if entry == best)
    return offers[holders[0]], holders
