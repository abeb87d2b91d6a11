"""The states that peers serve to each other: a member offers its snapshot as a list of chunks,
fetched from all that have it (swarm/peer/state_download.py).

For an exact stream, take the state that most answers announce for one round; for a per-peer stream,
any one member's. Chunks are verified by their digests, the whole by the state's hash (in node/).
"""

import asyncio
import collections
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from farflock.swarm.chunk_store import KeptChunks, digest_of
from farflock.swarm.join_time import NO_TRAFFIC, RoundTraffic
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_CHUNK_BYTES, StateOffer, StateQuery
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

ASK_EVERY_S = 1.0  # queries and offers may be lost
SETTLE_S = 0.5  # wait after the first offer for others to compare it with
MAX_ASKERS = 64  # peers that wait for one snapshot; others ask again
MAX_DISTRUSTED = 64  # bad snapshots remembered; the oldest is forgotten first
# A snapshot is offered until this many rounds have begun since: the logs must still continue it.
KEEP_ROUNDS = 4
KEEP_S = 30.0  # the limit for a stream without rounds


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A stream's state after `round`: opaque chunks, its hash, and the run's agreed tokens then.

    Chunks may be views of a mapped file. `digests` are theirs, if they are known already."""

    round: int
    state: bytes
    tokens: int
    chunks: tuple[bytes | memoryview, ...]
    digests: tuple[bytes, ...] = ()


Provide = Callable[[], Awaitable[Snapshot]]


def in_memory(size: int) -> memoryview:
    """Return fresh memory."""
    return memoryview(bytearray(size))


class Snapshots:
    """Serves this peer's snapshots and downloads others'."""

    def __init__(self, context: PeerContext, asked: Callable[[int | None], list[PeerId]]) -> None:
        self._context, self._members = context, asked
        self.kept: Callable[[str], KeptChunks] | None = None  # where chunks of a state stay
        self._providers: dict[str, Provide] = {}
        self._served: dict[str, StateOffer] = {}
        self._versions: dict[str, Callable[[], int]] = {}  # those remade on every change
        self._traffic: dict[str, Callable[[], RoundTraffic]] = {}  # of rounds
        self._made: dict[str, tuple[int, float, int]] = {}  # (round, time, version)
        self._askers: dict[str, set[PeerId]] = {}  # peers waiting for a snapshot in the making
        self._downloads: dict[str, StateDownload] = {}
        self._taken: dict[str, tuple[bytes, bytes]] = {}  # (state's hash, listing)
        self._distrusted: collections.deque[tuple[bytes, bytes]] = collections.deque(
            maxlen=MAX_DISTRUSTED
        )

    def serve(
        self,
        name: str,
        provide: Provide,
        version: Callable[[], int] | None = None,
        traffic: Callable[[], RoundTraffic] = lambda: NO_TRAFFIC,
    ) -> None:
        """Answer queries for this stream's snapshot from now on, and say the `traffic` of rounds.

        A snapshot is offered until its `version` changes, or without a `version` for a while."""
        self._providers[name], self._traffic[name] = provide, traffic
        self._made.pop(name, None)
        if version is not None:
            self._versions[name] = version

    def withdraw(self) -> None:
        """Stop serving: this peer's state is not the run's."""
        self._providers.clear()
        self._versions.clear()
        self._traffic.clear()
        self._made.clear()

    def receive(self, sender: PeerId, message: StateQuery | StateOffer) -> None:
        """Answer a query, or note an offer."""
        if isinstance(message, StateOffer):
            self._take_offer(sender, message)
        elif message.stream in self._askers:
            if len(self._askers[message.stream]) < MAX_ASKERS:
                self._askers[message.stream].add(sender)
        elif message.stream in self._providers:
            self._askers[message.stream] = set()
            self._context.spawn(self._offer(sender, message.stream))

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
        self._distrusted.append(self._taken.pop(name))

    @property
    def served(self) -> tuple[str, ...]:
        """The names of the snapshots that this peer serves."""
        return tuple(self._providers)

    @property
    def distrusted(self) -> int:
        """The number of snapshots that are refused."""
        return len(self._distrusted)

    @property
    def waiting(self) -> dict[str, int]:
        """The numbers of peers that wait for a snapshot in the making, by stream."""
        return {name: len(askers) for name, askers in self._askers.items()}

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
        name, store = download.name, self._context.store
        while True:
            chain = self._context.chain
            await self._gather_offers(download)
            heard = {p: said for p, said in download.offers.items() if p not in download.mute}
            offer, holders = _choose(heard or download.offers, download.stays)
            if offer.state == download.wanted.known:
                return Snapshot(offer.round, offer.state, offer.tokens, ())
            pin = ("download", name)
            try:
                chunks = await download.get(offer, holders)
                if chunks is not None:
                    store.forget(pin)
            finally:
                store.release(pin)
            # After a change of chain, this state belongs to the old one.
            if chunks is not None and self._context.chain is chain:
                self._taken[name] = (offer.state, offer.digest)
                return Snapshot(offer.round, offer.state, offer.tokens, chunks)

    async def _gather_offers(self, download: StateDownload) -> None:
        download.offers = {}
        while not download.offers:
            asked = self._members(download.wanted.stage)
            for peer in asked:
                self._context.send(peer, StateQuery(download.name))
            # one that offered a false state makes another after a while
            since_s = self._context.now() - KEEP_S / 3
            hopeful = [
                peer
                for peer in asked
                if peer not in download.mute and download.refused.get(peer, since_s) >= since_s
            ]
            if any(self._context.life(peer) == "alive" for peer in hopeful):
                download.hears_members()
            await asyncio.sleep(ASK_EVERY_S)
        await asyncio.sleep(SETTLE_S)

    async def _offer(self, asker: PeerId, name: str) -> None:
        """Offer a new snapshot, or the last one if recent, to all peers that asked meanwhile.

        There may be room for only one, and replacing it would break downloads in progress."""
        askers = self._askers.setdefault(name, set())
        askers.add(asker)
        try:
            if name in self._providers and not self._is_new(name):
                made = (self._context.touched, self._context.now(), self._version(name))
                snapshot = await self._providers[name]()
                self._context.store.release(("snapshot", name))
                self._served[name] = self._put(name, snapshot, ("snapshot", name))
                self._made[name] = made
            if name not in self._providers:
                return  # withdrawn meanwhile
            round_bytes, round_s = self._traffic[name]()
            current = msgspec.structs.replace(
                self._served[name],
                view=self._context.views.newest.hash,
                round_bytes=round_bytes,
                round_s=round_s,
            )
            for waiting in sorted(askers):
                self._context.send(waiting, current)
        finally:
            del self._askers[name]

    def _is_new(self, name: str) -> bool:
        touched, now_s, version = self._made.get(name, (0, -math.inf, 0))
        if name in self._versions:
            return name in self._made and version == self._version(name)
        few_rounds = self._context.touched - touched <= KEEP_ROUNDS
        return few_rounds and self._context.now() - now_s <= KEEP_S

    def _version(self, name: str) -> int:
        return self._versions[name]() if name in self._versions else 0

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
