"""State downloads: a member offers its snapshot as a list of chunks, fetched from all that have it.

For an exact stream, take the state that most answers announce for one round; for a per-peer stream,
any one member's. Chunks are verified by their digests, the whole by the state's hash (in node/).
"""

import asyncio
import collections
import itertools
import math
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import msgspec

from farflock.swarm.chunk_store import digest_of
from farflock.swarm.context import PeerContext
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_CHUNK_BYTES, Digest, Size, StateOffer, StateQuery
from farflock.swarm.protocol.views import View

ASK_EVERY_S = 1.0  # queries and offers may be lost
SETTLE_S = 0.5  # wait after the first offer for others to compare it with
COMPARE_S = 5.0  # for a quorum to announce one state; some make theirs for the first time
MAX_LISTED = 65_536  # chunks in one listing, which is a chunk itself
MAX_LISTINGS = 64  # of one snapshot
PARALLEL = 16  # chunks fetched at once: enough to fill a slow link
MAX_ASKERS = 64  # peers that wait for one snapshot, half of them members; others ask again
SHUN_S = 600.0  # for which a member that offered a wrong state is not asked for another
MAX_DISTRUSTED = 64  # bad snapshots remembered; the oldest is forgotten first
# A snapshot is offered until this many rounds have begun since: the logs must still continue it.
KEEP_ROUNDS = 4
KEEP_S = 30.0  # the limit for a stream without rounds


class Listing(msgspec.Struct, frozen=True, array_like=True):
    """The content of a snapshot: the chunk that a `StateOffer` names. The `chunks` of a large
    snapshot are `listings` themselves."""

    chunks: Annotated[tuple[tuple[Digest, Size], ...], msgspec.Meta(max_length=MAX_LISTED)]
    listings: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A stream's state after `round`: opaque chunks, its hash, and the run's agreed tokens then.

    Chunks may be views of a mapped file. `digests` are theirs, if they are known already. What is
    not `sure` is the word of a few members, until a certified close list names it."""

    round: int
    state: bytes
    tokens: int
    chunks: tuple[bytes | memoryview, ...]
    digests: tuple[bytes, ...] = ()
    sure: bool = field(default=False, compare=False)  # a quorum offers it


Provide = Callable[[], Awaitable[Snapshot]]
DownloadProgress = Callable[[int, int], None]  # (chunks here, chunks in all)
Room = Callable[[int], memoryview]  # a size -> memory for so many bytes


def in_memory(size: int) -> memoryview:
    """Return fresh memory."""
    return memoryview(bytearray(size))


class SnapshotUnavailable(Exception):
    """No member delivered a snapshot in time; the message says how far the download got."""


@dataclass(slots=True)
class _Download:
    """A running download: the stage, the limits, and the offers by peer."""

    stage: int | None
    min_round: int  # the first useful round
    max_bytes: int | None
    known: bytes | None  # the hash of the state that is here
    room: Room
    certain: bool
    offers: dict[PeerId, StateOffer] = field(default_factory=dict)
    here: dict[tuple[bytes, int], memoryview] = field(default_factory=dict)  # chunks, verified


class Snapshots:
    """Serves this peer's snapshots and downloads others'."""

    def __init__(self, context: PeerContext, asked: Callable[[int | None], list[PeerId]]) -> None:
        self._context, self._members = context, asked
        self._providers: dict[str, Provide] = {}
        self._served: dict[str, StateOffer] = {}
        self._versions: dict[str, Callable[[], int]] = {}  # those remade on every change
        self._made: dict[str, tuple[int, float, int]] = {}  # (round, time, version)
        self._askers: dict[str, set[PeerId]] = {}  # peers waiting for a snapshot in the making
        self._downloads: dict[str, _Download] = {}
        self._taken: dict[str, tuple[bytes, bytes]] = {}  # (state's hash, listing)
        self._holders: dict[str, list[PeerId]] = {}  # of what was taken last
        # Until when members are not asked that offered a state that a certified list contradicts.
        self._shunned: dict[PeerId, float] = {}
        self._distrusted: collections.deque[tuple[bytes, bytes]] = collections.deque(
            maxlen=MAX_DISTRUSTED
        )

    def serve(self, name: str, provide: Provide, version: Callable[[], int] | None = None) -> None:
        """Answer queries for this stream's snapshot from now on.

        A snapshot is offered until its `version` changes, or without a `version` for a while."""
        self._providers[name] = provide
        self._made.pop(name, None)
        if version is not None:
            self._versions[name] = version

    def withdraw(self) -> None:
        """Stop serving: this peer's state is not the run's."""
        self._providers.clear()
        self._versions.clear()
        self._made.clear()

    def receive(self, sender: PeerId, message: StateQuery | StateOffer) -> None:
        """Answer a query, or note an offer."""
        if isinstance(message, StateOffer):
            self._take_offer(sender, message)
            return
        standing = self._context.standing(sender)
        if standing == "stranger":
            self._context.drop("state query of a stranger")
        elif message.stream in self._askers:
            most = MAX_ASKERS if standing == "member" else MAX_ASKERS // 2
            if len(self._askers[message.stream]) < most:
                self._askers[message.stream].add(sender)
        elif message.stream in self._providers:
            self._askers[message.stream] = set()
            self._context.spawn(self._offer(sender, message.stream))

    def _take_offer(self, sender: PeerId, offer: StateOffer) -> None:
        """Note an offer, unless it is unsolicited, distrusted, stale, or of an unknown view.

        The state of an unknown view might belong to another chain than ours."""
        wanted, chain = self._downloads.get(offer.stream), self._context.chain
        if wanted is None or sender not in self._possible(wanted.stage):
            return  # not asked for, or not by a possible holder
        if (offer.state, offer.digest) in self._distrusted:
            self._context.drop("distrusted snapshot")
        elif chain is None or chain.by_hash(offer.view) is None:
            self._context.drop("snapshot of an unknown view")
            self._context.counters["stale view"] += 1
        elif offer.round < wanted.min_round:
            self._context.drop("stale snapshot")
        else:
            wanted.offers[sender] = offer

    def distrust(self, name: str, *, lied: bool = False) -> None:
        """Refuse the last download from now on: the caller found that it is not as offered.

        If those that offered it `lied`, none of theirs is taken for a while. They are not accused:
        a peer that has just fallen out of step offers such a state too."""
        self._distrusted.append(self._taken.pop(name))
        now_s = self._context.now()
        self._shunned = {peer: end_s for peer, end_s in self._shunned.items() if end_s > now_s}
        for peer in self._holders.pop(name, []) if lied else []:
            self._context.drop("state that no close list names")
            self._shunned[peer] = now_s + SHUN_S

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

    async def fetch(
        self,
        name: str,
        timeout_s: float,
        progress: DownloadProgress = lambda here, total: None,
        min_round: int = -1,
        stage: int | None = None,
        max_bytes: int | None = None,
        known: bytes | None = None,
        room: Room = in_memory,
        certain: bool = False,
    ) -> Snapshot:
        """Download the state that most members announce, after round `min_round` or later.

        If the caller has to be `certain`, wait a little for a state that a quorum announces; if
        there is none, of those with as many votes take the earliest, for which a certified list may
        exist already.

        No log leads on from an earlier state, however many peers lag behind with it. With `stage`,
        only its members are asked. A snapshot of more than `max_bytes` is not begun. The one of the
        state that is `known` here comes without chunks. The chunks of others follow one another in
        memory from `room`. Raise `SnapshotUnavailable` on timeout."""
        download = self._downloads[name] = _Download(
            stage, min_round, max_bytes, known, room, certain
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await self._fetch(name, download, timeout_s, progress)
        except TimeoutError:
            heard = len(download.offers)
            raise SnapshotUnavailable(
                f"no snapshot of {name} within {timeout_s:.0f} s ({heard} members offered one); "
                "check the network and try again"
            ) from None
        finally:
            self._downloads.pop(name, None)

    async def _fetch(
        self, name: str, download: _Download, timeout_s: float, progress: DownloadProgress
    ) -> Snapshot:
        while True:
            chain = self._context.chain
            download.offers = {}
            await self._gather_offers(name, download)
            offer, holders = _choose(download.offers, earliest=download.certain)
            sure = self._is_sure(download, holders)
            if offer.state == download.known:
                return Snapshot(offer.round, offer.state, offer.tokens, (), sure=sure)
            pin = ("download", name)
            try:
                chunks = await self._get(offer, holders, download, pin, timeout_s, progress)
                if chunks is not None:
                    self._context.store.forget(pin)
            finally:
                self._context.store.release(pin)
            # After a change of chain, this state belongs to the old one.
            if chunks is not None and self._context.chain is chain:
                self._taken[name], self._holders[name] = (offer.state, offer.digest), holders
                return Snapshot(offer.round, offer.state, offer.tokens, chunks, sure=sure)

    async def _gather_offers(self, name: str, download: _Download) -> None:
        while not download.offers:
            await self._ask(name, download)
        await asyncio.sleep(SETTLE_S)
        ends_s = self._context.now() + COMPARE_S
        while download.certain and self._context.now() < ends_s:
            _, holders = _choose(download.offers, earliest=True)
            silent = set(self._possible(download.stage)) - download.offers.keys()
            if not silent or self._is_sure(download, holders):
                return
            await self._ask(name, download)

    def _possible(self, stage: int | None) -> list[PeerId]:
        """Return the members to ask: all of them where all are shunned, for then none of them is
        known to be worse than the others, and a quorum may agree by now."""
        now_s, members = self._context.now(), self._members(stage)
        return [peer for peer in members if self._shunned.get(peer, now_s) <= now_s] or members

    async def _ask(self, name: str, download: _Download) -> None:
        for peer in self._possible(download.stage):
            self._context.send(peer, StateQuery(name))
        await asyncio.sleep(ASK_EVERY_S)

    def _is_sure(self, download: _Download, holders: list[PeerId]) -> bool:
        """True if only these members are enough to vouch for their state: two that include this
        peer could both be."""
        others = [peer for peer in download.offers if peer not in holders]
        rivals = collections.defaultdict[tuple[int, bytes, bytes, int], list[PeerId]](list)
        for peer in others:
            rivals[_what(download.offers[peer])].append(peer)
        stage = download.stage
        return self._are_quorum(holders, stage) and not any(
            self._are_quorum(rival, stage) for rival in rivals.values()
        )

    def _are_quorum(self, holders: list[PeerId], stage: int | None) -> bool:
        """True if these members could certify a list alone, or with this peer if it is one of them.

        Of a stage's members, if they are most of the living others; and so for a voter that
        restarted, where the others wait for its vote: no list can name their state before."""
        chain = self._context.chain
        if chain is None:
            return False
        view = chain.newest
        if stage is not None:
            return 2 * len(holders) > len(self._living(view, stage))
        voters = view.electorate
        heard = self._context.heard_in(view)
        if self._context.me in voters.keys_that_vote and not voters.is_quorum(heard):
            return 2 * len(holders) > len(self._living(view))
        indices = {index for index, peer in enumerate(view.peers) if peer in holders}
        me = self._context.my_index(view)
        return view.electorate.is_quorum(indices if me is None else indices | {me})

    def _living(self, view: View, stage: int | None = None) -> set[PeerId]:
        peers = (view.peers[index] for index in view.serving(stage))
        return {peer for peer in peers if not self._context.gone(view, peer)} - {self._context.me}

    async def _get(
        self,
        offer: StateOffer,
        holders: list[PeerId],
        download: _Download,
        pin: Hashable,
        timeout_s: float,
        progress: DownloadProgress,
    ) -> tuple[memoryview, ...] | None:
        async def fetch(digest: bytes, size: int, pin: Hashable = pin) -> bool:
            return await self._context.chunks.fetch(
                digest, size, lambda: holders, pin, timeout_s, final=True
            )

        listed = await self._list(offer, fetch)
        if listed is None:
            return None
        size_bytes = sum(size for _, size in listed)
        if download.max_bytes is not None and size_bytes > download.max_bytes:
            self._context.drop("snapshot too large")
            return None
        places = _Places(listed)
        # what an attempt before this one has brought; all else of it is dropped
        download.here = {what: body for what, body in download.here.items() if what in places.of}
        room = await self._context.compute(partial(download.room, size_bytes))
        gate, here = asyncio.Semaphore(PARALLEL), 0

        async def one(what: tuple[bytes, int]) -> bool:
            nonlocal here
            async with gate:
                done = await self._land(what, download, fetch, [room[at] for at in places.of[what]])
            here += done * len(places.of[what])
            progress(here, len(listed))
            return done

        if not all(await asyncio.gather(*map(one, places.of))):
            return None
        return tuple(room[at] for at in places.all)

    async def _land(
        self,
        what: tuple[bytes, int],
        download: _Download,
        fetch: Callable[[bytes, int, Hashable], Awaitable[bool]],
        places: list[memoryview],
    ) -> bool:
        """Fetch a chunk and copy it to its places; it does not stay in the store."""
        (digest, size), store = what, self._context.store
        pin = ("landing", digest)
        try:
            body = download.here.get(what)
            if body is None and await fetch(digest, size, pin):
                body = store.view(digest)
            if body is None or len(body) != size:
                return False
            # in a worker: the system may let whoever writes to a mapped file wait for the disk
            await self._context.compute(partial(_fill, places, body))
            download.here[what] = places[0]
            return True
        finally:
            store.forget(pin)

    async def _list(
        self, offer: StateOffer, fetch: Callable[[bytes, int], Awaitable[bool]]
    ) -> list[tuple[bytes, int]] | None:
        """Return the chunks of an offered snapshot, or None if a listing cannot be had or read."""
        listed: list[tuple[bytes, int]] = []
        left = [(offer.digest, offer.size)]
        while left:
            digest, size = left.pop(0)
            if not await fetch(digest, size):
                return None
            try:
                listing = msgspec.msgpack.decode(
                    self._context.store.get(digest) or b"", type=Listing
                )
            except (msgspec.MsgspecError, RecursionError):
                self._context.drop("undecodable snapshot listing")
                return None
            if not listing.listings:
                listed += listing.chunks
            elif digest == offer.digest and len(listing.chunks) <= MAX_LISTINGS:
                left += listing.chunks
            else:  # only the first lists others, or a listing could name itself
                self._context.drop("snapshot listing too deep")
                return None
        return listed

    async def _offer(self, asker: PeerId, name: str) -> None:
        """Offer a new snapshot, or the last one if recent, to all peers that asked meanwhile.

        There may be room for only one, and replacing it would break downloads in progress."""
        askers = self._askers.setdefault(name, set())
        askers.add(asker)
        try:
            if name in self._providers and not self._is_new(name):
                made = (self._context.touched.newest, self._context.now(), self._version(name))
                snapshot = await self._providers[name]()
                self._context.store.release(("snapshot", name))
                self._served[name] = self._put(name, snapshot, ("snapshot", name))
                self._made[name] = made
            if name not in self._providers:
                return  # withdrawn meanwhile
            current = msgspec.structs.replace(
                self._served[name], view=self._context.views.newest.hash
            )
            for waiting in sorted(askers):
                self._context.send(waiting, current)
        finally:
            del self._askers[name]

    def _is_new(self, name: str) -> bool:
        touched, now_s, version = self._made.get(name, (0, -math.inf, 0))
        if name in self._versions:
            return name in self._made and version == self._version(name)
        few_rounds = self._context.touched.newest - touched <= KEEP_ROUNDS
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


class _Places:
    """The places of a snapshot's chunks, one after the other; equal ones are fetched once."""

    def __init__(self, listed: Sequence[tuple[bytes, int]]) -> None:
        ends = list(itertools.accumulate(size for _, size in listed))
        self.all = [slice(end - size, end) for (_, size), end in zip(listed, ends, strict=True)]
        self.of: dict[tuple[bytes, int], list[slice]] = {}
        for what, place in zip(listed, self.all, strict=True):
            self.of.setdefault(what, []).append(place)


def _fill(places: list[memoryview], body: memoryview) -> None:
    for place in places:
        place[:] = body


def _choose(offers: dict[PeerId, StateOffer], *, earliest: bool) -> tuple[StateOffer, list[PeerId]]:
    """Return the state announced most often, and its holders; of several the earliest, or the one
    in the middle: anybody can claim a later round than all others."""
    votes = collections.Counter(map(_what, offers.values()))
    most = sorted(entry for entry in votes if votes[entry] == max(votes.values()))
    best = most[0 if earliest else len(most) // 2]
    holders = sorted(peer for peer, offer in offers.items() if _what(offer) == best)
    return offers[holders[0]], holders


def _what(offer: StateOffer) -> tuple[int, bytes, bytes, int]:
    return offer.round, offer.state, offer.digest, offer.tokens
